/* SPDX-License-Identifier: MIT */
/* What stands around a prompt's GEMMs: error against double; equal bits at every number of rows. */
#include <cuda_fp8.h>

#include "kernels/cuda/sm90_any_heads_rope_ref.h"
#include "kernels/cuda/sm90_any_proj_decode_ref.h"
#include "tests/cuda/kv.cuh"

static float read_real(apr_cuda_real real, const uint8_t *b, size_t i)
{
	__nv_fp8_e4m3 e;
	uint16_t h;
	float f;

	switch (real) {
	case APR_REAL_F32: memcpy(&f, b + i * 4, 4); return f;
	case APR_REAL_E4M3: memcpy(&e, b + i, 1); return (float)e;
	default: memcpy(&h, b + i * 2, 2); return real == APR_REAL_F16 ? apr_half_to_f32(h) : apr_bfloat_to_f32(h);
	}
}

static void gemm_inputs(uint32_t n, uint32_t rows, apr_cuda_real real)
{
	const uint32_t bucket = rows + 3, padded = (bucket + 15) & ~15u;
	std::vector<float> x = random_rows(rows, n, 1, true), y = random_rows(rows, n, 2, true),
					   w = random_rows(1, n, 3, false), pw = random_rows(1, n, 4, false);
	dbuf<float> dx(x), dy(y), dw(w), dp(pw), xo((size_t)rows * n), scale(padded);
	dbuf<uint8_t> out((size_t)padded * n * 4);
	step st(256 * 1024);
	bool scaled = real == APR_REAL_F16 || real == APR_REAL_E4M3;
	apr_cuda_gemm_in dst = {real, out.p, scaled ? scale.p : NULL, padded, false, NULL};
	double rel = real == APR_REAL_F32    ? 1e-6
	             : real == APR_REAL_F16  ? 0x1p-11 * 1.01
	             : real == APR_REAL_BF16 ? 0x1p-8 * 1.01
	                                     : 0x1p-4 * 1.01;

	for (int norm = 0; norm < 2; norm++) {
		double worst = 0;
		size_t bad = 0;
		std::vector<double> dxo(n), h(n), cancel(n);

		out.poison();
		st.set(bucket, rows, {}, {});
		if (norm)
			CHECK(apr_cuda_prefill_norm(&st.l, dx.p, dy.p, xo.p, {dp.p, 1e-6f}, {dw.p, 1e-5f}, n, NULL, &dst) == 0, "launch");
		else
			CHECK(apr_cuda_prefill_convert(&st.l, dx.p, n, &dst) == 0, "launch");
		std::vector<uint8_t> b = out.get();
		std::vector<float> sc = scale.get();
		for (uint32_t r = 0; r < padded; r++) {
			double amax = 0;

			if (r < rows) {
				apr_ref_add_norm(&x[(size_t)r * n], &y[(size_t)r * n], pw.data(), 1e-6, w.data(), 1e-5, n, dxo.data(),
				                 h.data());
				for (uint32_t i = 0; i < n; i++) { /* x + post(y) may cancel: its rounding is of the larger terms */
					double parts = fabs(x[(size_t)r * n + i]) + fabs(dxo[i] - x[(size_t)r * n + i]);

					cancel[i] = fabs(dxo[i]) > 0 ? 1e-6 * parts * fabs(h[i] / dxo[i]) : 0;
					h[i] = norm ? h[i] : x[(size_t)r * n + i];
					amax = fmax(amax, fabs(h[i]));
				}
			}
			for (uint32_t i = 0; i < n; i++) {
				double got = read_real(real, b.data(), (size_t)r * n + i) * (scaled ? sc[r] : 1);

				if (r >= rows) {
					bad += got != 0;
					continue;
				}
				/* the smallest steps: of FP16 under rows scaled to 1024, of E4M3 under 448 */
				double e = fabs(got - h[i]) / (rel * fabs(h[i]) + 2e-6 * fabs(h[i]) + (norm ? cancel[i] : 0) +
				                               amax * (real == APR_REAL_E4M3  ? 0x1p-10 / 448 * 1.1
				                                       : real == APR_REAL_F16 ? 0x1p-34
				                                                              : 0) +
				                               1e-30);

				worst = e < 1e9 ? fmax(worst, e) : 1e9;
			}
		}
		CHECK(worst <= 1 && !bad, "gemm input %d n %u rows %u norm %d: %.3g of the bound, %zu not zero", real, n, rows,
		      norm, worst, bad);
	}
}

static void small_ops(void)
{
	const uint32_t n = 640, rows = 70, ld = 2 * n;
	std::vector<float> gu = random_rows(rows, ld, 1, false), s(rows), b = random_rows(1, n, 2, false),
					   y = random_rows(rows, n, 3, false);
	dbuf<float> dg(gu), da((size_t)rows * n), ds(rows), db(b), dy(y);
	step st(256 * 1024);
	double worst = 0;

	for (uint32_t i = 0; i < rows; i++)
		s[i] = ldexpf(1, (int)i % 5 - 2);
	ds.put(s);
	st.set(80, rows, {}, {});
	for (uint32_t act = 0; act < 4; act++)
		for (int gated = 0; gated < 2; gated++) {
			CHECK(apr_cuda_prefill_act(&st.l, act, gated ? dg.p : NULL, dg.p + n, ld, da.p, n, {ds.p, NULL}) == 0, "launch");
			std::vector<float> a = da.get();
			for (uint32_t r = 0; r < rows; r++)
				for (uint32_t i = 0; i < n; i++) {
					double g = (double)gu[(size_t)r * ld + i] * s[r], u = (double)gu[(size_t)r * ld + n + i] * s[r];
					double want = gated ? apr_ref_act(act, g) * u : apr_ref_act(act, u);

					worst = fmax(worst, fabs(a[(size_t)r * n + i] - want) /
					                            (3e-6 * (fabs(want) + fabs(u) * (gated ? fmax(1, fabs(g)) : 1))));
				}
		}
	CHECK(worst <= 1, "activations: %.3g of the bound", worst);
	CHECK(apr_cuda_prefill_finish(&st.l, dy.p, dy.p, n, {ds.p, NULL}, db.p) == 0, "launch");
	std::vector<float> z = dy.get();
	size_t bad = 0;
	for (uint32_t r = 0; r < rows; r++)
		for (uint32_t i = 0; i < n; i++)
			bad += z[(size_t)r * n + i] != y[(size_t)r * n + i] * s[r] + b[i];
	CHECK(!bad, "finish: %zu wrong", bad);
}

static void heads(const struct shape_heads &h, uint32_t kind, apr_kv_type type)
{
	const uint32_t rows = 70, nq = h.n_heads * h.k_dim, nk = h.n_kv * h.k_dim, nv = h.n_kv * h.v_dim, ld = nq + nk + nv,
				   n_rot = h.k_dim / 2;
	kv_pool kv(h, type, 128, 4, 2, 1);
	const bool halves = type == APR_KV_F16 && h.k_dim == h.v_dim && h.k_dim % 64 == 0;
	std::vector<float> qkv = random_rows(rows, ld, 1, false), bias = random_rows(1, ld, 2, false),
					   norm = random_rows(1, 2 * h.k_dim, 3, false), cs(128 * n_rot), s(rows, 2.0f);
	for (uint32_t i = 0; i < cs.size() / 2; i++)
		cs[2 * i] = cosf(i * 0.37f), cs[2 * i + 1] = sinf(i * 0.37f);
	dbuf<float> dx(qkv), db(bias), dn(norm), dcs(cs), ds(s), dq((size_t)rows * nq);
	step st(256 * 1024);
	apr_op_attn_in op = {NULL,
	                     NULL,
	                     NULL,
	                     {NULL, 0},
	                     {NULL, 0},
	                     64,
	                     h.n_heads,
	                     h.n_kv,
	                     h.k_dim,
	                     h.v_dim,
	                     NULL,
	                     NULL,
	                     NULL,
	                     db.p,
	                     db.p + nq,
	                     db.p + nq + nk,
	                     {dn.p, 1e-6f},
	                     {dn.p + h.k_dim, 1e-6f},
	                     {kind, kind ? n_rot : 0, dcs.p},
	                     dq.p,
	                     {&kv.group, 1}};
	std::vector<uint32_t> pos(rows), slot(rows);
	std::vector<double> v(h.k_dim + h.v_dim);
	double worst = 0;

	for (uint32_t i = 0; i < rows; i++)
		pos[i] = (i * 7) % 128, slot[i] = i / 64 + 1;
	kv.pool.poison();
	st.set(80, rows, pos, slot);
	CHECK(apr_cuda_prefill_heads(&st.l, &op, dx.p, ld, dx.p + nq, ld, dx.p + nq + nk, ld, {ds.p, NULL}) == 0, "launch");
	std::vector<float> q = dq.get();
	std::vector<uint8_t> pool = kv.pool.get();
	for (uint32_t r = 0; r < rows; r++)
		for (uint32_t head = 0; head < h.n_heads + 2 * h.n_kv; head++) {
			uint32_t what = head < h.n_heads            ? 0
			                : head < h.n_heads + h.n_kv ? 1
			                                            : 2,
					 hh = head - (what == 0   ? 0
			                      : what == 1 ? h.n_heads
			                                  : h.n_heads + h.n_kv);
			uint32_t dim = what == 2 ? h.v_dim : h.k_dim, at = (what == 0 ? 0 : what == 1 ? nq : nq + nk) + hh * dim;

			for (uint32_t d = 0; d < dim; d++)
				v[d] = (double)qkv[(size_t)r * ld + at + d] * 2 + bias[at + d];
			if (what < 2)
				apr_ref_head(v.data(), dim, &norm[what * h.k_dim], 1e-6, kind, n_rot, &cs[pos[r] * n_rot]);
			for (uint32_t d = 0; d < dim; d++) {
				float got;
				size_t i = ((size_t)kv.table[slot[r] * kv.per_seq + pos[r] / 64] * 2 + 1) * kv.group.layer_bytes +
				           ((what == 2 ? (size_t)h.n_kv * 64 * h.k_dim : 0) + ((size_t)hh * 64 + pos[r] % 64) * dim +
				            d) * kv.elem();
				const uint16_t *half = (const uint16_t *)&q[(size_t)r * nq];

				if (what)
					got = read_real(type == APR_KV_F16 ? APR_REAL_F16 : APR_REAL_F32, &pool[i], 0);
				else if (halves)
					got = apr_half_to_f32(half[hh * dim + d]) * ((const float *)(half + nq))[hh];
				else
					got = q[((size_t)r * h.n_heads + hh) * dim + d];
				double e = fabs(got - v[d]) / ((type == APR_KV_F16 ? 0x1p-11 * 1.1 : 1e-5) * fabs(v[d]) + 1e-5);

				worst = e < 1e9 ? fmax(worst, e) : 1e9;
			}
		}
	CHECK(worst <= 1, "heads %u/%u dim %u rope %u: %.3g of the bound", h.n_heads, h.n_kv, h.k_dim, kind, worst);
}

void check_prefill(void)
{
	for (uint32_t n : {576u, 640u, 4096u, 5120u, 14336u, 20480u})
		for (uint32_t rows : {1u, 17u, 65u})
			for (apr_cuda_real real : {APR_REAL_F32, APR_REAL_F16, APR_REAL_BF16, APR_REAL_E4M3})
				gemm_inputs(n, rows, real);
	for (uint32_t rows : shape_prefill)
		gemm_inputs(640, rows, rows & 1 ? APR_REAL_F16 : APR_REAL_E4M3);
	small_ops();
	for (const struct shape_heads &h : shape_heads) {
		for (uint32_t kind = 0; kind < 3; kind++)
			for (apr_kv_type type : {APR_KV_F32, APR_KV_F16})
				heads(h, kind, type);
	}
}
