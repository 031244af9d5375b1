/* SPDX-License-Identifier: MIT */
/* The decode ops around the projections: residual, norms, rotation, keys and values in their pages, activations, logits,
 * embedding; against double, and one row against many. */
#include "kernels/cuda/sm90_any_heads_rope_ref.h"
#include "kernels/cuda/sm90_any_proj_decode_ref.h"
#include "tests/cuda/kv.cuh"

struct wide { /* a weight as doubles */
	std::vector<double> w, m;
	uint32_t k;
	explicit wide(const weight &s) : w((size_t)s.m.n_out * s.m.n_in), m(w.size()), k(s.m.n_in)
	{
		for (uint32_t r = 0; r < s.m.n_out; r++)
			apr_ref_row(s.type, s.row(r), k, &w[(size_t)r * k], &m[(size_t)r * k]);
	}
	double dot(uint32_t r, const double *h, double *mag) const
	{
		double s = 0;

		*mag = 0;
		for (uint32_t i = 0; i < k; i++) {
			s += w[(size_t)r * k + i] * h[i];
			*mag += m[(size_t)r * k + i] * fabs(h[i]);
		}
		return s;
	}
};

static std::vector<float> norm_weights(uint32_t n, uint64_t seed)
{
	std::vector<float> v = random_rows(1, n, seed, false);

	for (float &f : v)
		f = 1 + 0.2f * f;
	return v;
}
static void add_worst(double &worst, double got, double want, double bound)
{
	double e = fabs(got - want) / bound;

	worst = e < 1e9 ? fmax(worst, e) : 1e9;
}

static void ffn_shape(uint32_t type, uint32_t k, uint32_t n_ff, bool post, uint32_t act)
{
	const uint32_t rows = 17;
	weight w(type, k, 2 * n_ff, k + n_ff, APR_ORDER_GATE_UP);
	wide d(w);
	std::vector<float> x = random_rows(rows, k, 1, true), y = random_rows(rows, k, 2, true), nw = norm_weights(k, 3),
					   pw = norm_weights(k, 4);
	dbuf<float> dx(x), dy(y), dn(nw), dp(pw), dxo((size_t)rows * k), da((size_t)rows * n_ff), dxo1(k), da1(n_ff);
	apr_cuda_limits lim = {64, k, n_ff, 1, 1, 64, 64, 64};
	step st(apr_cuda_scratch_bytes(&lim));
	apr_op_ffn_in op = {dx.p, dy.p, dxo.p, {post ? dp.p : NULL, 1e-6f}, {dn.p, 1e-5f}, k, n_ff, &w.m, &w.m, act, da.p};
	std::vector<double> xo(k), h(k);
	double worst = 0, worst_x = 0;

	st.set(32, rows, {}, {});
	CHECK(apr_cuda_decode_ffn_in(&st.l, &op) == 0, "launch");
	std::vector<float> a = da.get(), gxo = dxo.get();
	for (uint32_t r = 0; r < rows; r++) {
		apr_ref_add_norm(&x[(size_t)r * k], &y[(size_t)r * k], post ? pw.data() : NULL, 1e-6, nw.data(), 1e-5, k,
		                 xo.data(), h.data());
		for (uint32_t i = 0; i < k; i++)
			add_worst(worst_x, gxo[(size_t)r * k + i], xo[i],
			          1e-6 * (fabs(xo[i]) + fabs(x[(size_t)r * k + i])) + 1e-30);
		for (uint32_t o = 0; o < n_ff; o++) {
			double mg, mu, g = d.dot(o, h.data(), &mg), u = d.dot(n_ff + o, h.data(), &mu);

			/* |act'| stays below 1.13 but for the square's */
			double slope = act == APR_OP_RELU2 ? 2 * fabs(g) + 0x1p-10 * mg : 1.13;

			add_worst(worst, a[(size_t)r * n_ff + o], apr_ref_act(act, g) * u,
			          0x1p-10 * (slope * mg * (fabs(u) + 0x1p-10 * mu) + fabs(apr_ref_act(act, g)) * mu) +
			                  1e-6 * fabs(g * u) + 1e-30);
		}
	}
	CHECK(worst <= 1 && worst_x <= 1, "ffn type %u K %u post %d act %u: %.3g, x %.3g of the bound", type, k, post, act,
	      worst, worst_x);
	op.x_out = dxo1.p, op.a = da1.p;
	for (uint32_t r = 0; r < rows; r += 4) {
		op.x = dx.p + (size_t)r * k, op.y = dy.p + (size_t)r * k;
		st.set(1, 1, {}, {});
		CHECK(apr_cuda_decode_ffn_in(&st.l, &op) == 0, "launch");
		CHECK(same_bits(da1.get().data(), &a[(size_t)r * n_ff], n_ff) &&
		              same_bits(dxo1.get().data(), &gxo[(size_t)r * k], k),
		      "ffn type %u K %u row %u alone differs", type, k, r);
	}
}

/* kinds: rotation; norms of heads; biases; order of wq and wk */
static void attn_in_shape(const struct shape_heads &h, uint32_t tq, uint32_t tv, uint32_t k, uint32_t kind, bool norms,
                          bool bias)
{
	const uint32_t rows = 11, nq = h.n_heads * h.k_dim, nk = h.n_kv * h.k_dim, nv = h.n_kv * h.v_dim,
				   n_rot = h.k_dim >= 128 ? h.k_dim / 2 : h.k_dim;
	uint32_t order = kind == APR_OP_ROPE_HALVES ? APR_ORDER_ROPE_HALVES : APR_ORDER_PLAIN;
	weight wq(tq, k, nq, 1, order, h.k_dim, n_rot / 2), wk(tq, k, nk, 2, order, h.k_dim, n_rot / 2), wv(tv, k, nv, 3);
	wide dq(wq), dk(wk), dv(wv);
	kv_pool kv(h, APR_KV_F32, 256, 16, 2, 1);
	std::vector<float> x = random_rows(rows, k, 1, true), nw = norm_weights(k, 3), bq = random_rows(1, nq, 5, false),
					   bk = random_rows(1, nk, 6, false), bv = random_rows(1, nv, 7, false),
					   qn = norm_weights(h.k_dim, 8), kn = norm_weights(h.k_dim, 9), cs(256 * n_rot);
	for (uint32_t p = 0; p < 256; p++)
		for (uint32_t i = 0; i < n_rot / 2; i++) {
			cs[(p * n_rot / 2 + i) * 2] = cosf(p * powf(10000, -2.0f * i / n_rot));
			cs[(p * n_rot / 2 + i) * 2 + 1] = sinf(p * powf(10000, -2.0f * i / n_rot));
		}
	dbuf<float> dx(x), dn(nw), dbq(bq), dbk(bk), dbv(bv), dqn(qn), dkn(kn), dcs(cs), dxo((size_t)rows * k),
			dout((size_t)rows * nq);
	apr_cuda_limits lim = {64, k, k, h.n_heads, h.n_kv, h.k_dim, h.v_dim, 256};
	step st(apr_cuda_scratch_bytes(&lim));
	apr_op_attn_in op = {dx.p,
	                     NULL,
	                     dxo.p,
	                     {NULL, 0},
	                     {dn.p, 1e-5f},
	                     k,
	                     h.n_heads,
	                     h.n_kv,
	                     h.k_dim,
	                     h.v_dim,
	                     &wq.m,
	                     &wk.m,
	                     &wv.m,
	                     bias ? dbq.p : NULL,
	                     bias ? dbk.p : NULL,
	                     bias ? dbv.p : NULL,
	                     {norms ? dqn.p : NULL, 1e-6f},
	                     {norms ? dkn.p : NULL, 1e-6f},
	                     {kind, kind ? n_rot : 0, dcs.p},
	                     dout.p,
	                     {&kv.group, 1}};
	std::vector<uint32_t> pos(rows), slot(rows);
	std::vector<double> xo(k), hh(k), v(nq);
	double worst = 0;
	size_t wrong = 0;

	for (uint32_t i = 0; i < rows; i++)
		pos[i] = (i * 37 + 5) % 256, slot[i] = i == 4 ? APR_CUDA_DEAD : (i * 5) % 16;
	kv.pool.poison();
	st.set(16, rows, pos, slot);
	CHECK(apr_cuda_decode_attn_in(&st.l, &op) == 0, "launch");
	std::vector<float> q = dout.get();
	std::vector<uint8_t> pool = kv.pool.get();
	wrong += !same_bits(dxo.get().data(), x.data(), x.size());
	for (uint32_t r = 0; r < rows; r++) {
		apr_ref_add_norm(&x[(size_t)r * k], NULL, NULL, 0, nw.data(), 1e-5, k, xo.data(), hh.data());
		for (uint32_t what = 0; what < 3; what++) {
			const wide &w = what == 0 ? dq : what == 1 ? dk : dv;
			uint32_t n = what == 0 ? nq : what == 1 ? nk : nv, dim = what == 2 ? h.v_dim : h.k_dim;
			const std::vector<float> &b = what == 0 ? bq : what == 1 ? bk : bv;

			if (what && slot[r] == APR_CUDA_DEAD)
				continue;
			for (uint32_t head = 0; head < n / dim; head++) {
				double rms = 0, magsum = 0;

				for (uint32_t d = 0; d < dim; d++) {
					double mag;

					v[d] = w.dot(head * dim + d, hh.data(), &mag) + (bias ? b[head * dim + d] : 0);
					rms += v[d] * v[d] / dim;
					magsum = fmax(magsum, mag);
				}
				if (what < 2)
					apr_ref_head(v.data(), dim, norms ? (what ? kn : qn).data() : NULL, 1e-6, kind, n_rot,
					             &cs[pos[r] * n_rot]);
				for (uint32_t d = 0; d < dim; d++) {
					double bound = 0x1p-10 * magsum * (norms && what < 2 ? 4 / sqrt(rms + 1e-6) : 2);
					const uint8_t *page = &pool[0];
					float got;

					if (what == 0) {
						got = q[((size_t)r * h.n_heads + head) * dim + d];
					} else {
						page += ((size_t)kv.table[slot[r] * kv.per_seq + pos[r] / 64] * 2 + 1) * kv.group.layer_bytes;
						page += ((what == 2 ? (size_t)h.n_kv * 64 * h.k_dim : 0) +
						         ((size_t)head * 64 + pos[r] % 64) * dim + d) *
						        4;
						memcpy(&got, page, 4);
					}
					add_worst(worst, got, v[d], bound);
				}
			}
		}
	}
	CHECK(worst <= 1 && !wrong,
	      "attn_in %u/%u dim %u K %u types %u %u rope %u norms %d bias %d: %.3g of the bound, x wrong %zu", h.n_heads,
	      h.n_kv, h.k_dim, k, tq, tv, kind, norms, bias, worst, wrong);
	/* keys and values: written there and nowhere else */
	size_t live = 0;
	for (size_t i = 0; i < pool.size(); i += 4)
		live += memcmp(&pool[i], "\xff\xff\xff\xff", 4) != 0;
	CHECK(live == (size_t)(rows - 1) * (nk + nv), "pages: %zu numbers written, not %zu", live,
	      (size_t)(rows - 1) * (nk + nv));
	for (uint32_t r : {0u, 7u}) { /* alone */
		dbuf<float> q1(nq), xo1(k);

		op.x = dx.p + (size_t)r * k, op.x_out = xo1.p, op.q = q1.p;
		kv.pool.poison();
		st.set(1, 1, {pos[r]}, {slot[r]});
		CHECK(apr_cuda_decode_attn_in(&st.l, &op) == 0, "launch");
		std::vector<uint8_t> pool1 = kv.pool.get();
		size_t bad = 0;
		for (size_t i = 0; i < pool1.size(); i += 4)
			bad += memcmp(&pool1[i], "\xff\xff\xff\xff", 4) != 0 && memcmp(&pool1[i], &pool[i], 4) != 0;
		CHECK(!bad && same_bits(q1.get().data(), &q[(size_t)r * nq], nq), "attn_in row %u alone differs (%zu in pages)",
		      r, bad);
	}
}

static void head_shape(uint32_t type, uint32_t k, uint32_t n_vocab, float softcap)
{
	const uint32_t rows = 9;
	weight w(type, k, n_vocab, 5);
	wide d(w);
	std::vector<float> x = random_rows(rows, k, 1, true), y = random_rows(rows, k, 2, false), nw = norm_weights(k, 3);
	dbuf<float> dx(x), dy(y), dn(nw), dl((size_t)64 * n_vocab);
	apr_cuda_limits lim = {64, k, k, 1, 1, 64, 64, 64};
	step st(apr_cuda_scratch_bytes(&lim));
	apr_op_head op = {dx.p, dy.p, {NULL, 0}, {dn.p, 1e-5f}, k, n_vocab, &w.m, dl.p, 0.5f, softcap};
	std::vector<double> xo(k), h(k);
	double worst = 0;
	std::vector<uint32_t> out = {8, 2, 5};

	for (uint32_t n : {3u, 1u}) {
		st.set(n == 1 ? 1 : 4, rows, {}, {});
		st.out.put(out);
		st.n_out.put({n});
		dl.poison();
		CHECK(apr_cuda_decode_head(&st.l, &op) == 0, "launch");
		std::vector<float> lg = dl.get();
		for (uint32_t i = 0; i < n; i++) {
			apr_ref_add_norm(&x[(size_t)out[i] * k], &y[(size_t)out[i] * k], NULL, 0, nw.data(), 1e-5, k, xo.data(),
			                 h.data());
			for (uint32_t o = 0; o < n_vocab; o++) {
				double mag, v = d.dot(o, h.data(), &mag) * 0.5;

				v = softcap != 0 ? softcap * tanh(v / softcap) : v;
				add_worst(worst, lg[(size_t)i * n_vocab + o], v, 0x1p-11 * mag + 1e-6 * softcap);
			}
		}
		CHECK(memcmp(&lg[(size_t)n * n_vocab], "\xff\xff\xff\xff", 4) == 0, "logits past the wanted rows were written");
	}
	CHECK(worst <= 1, "head type %u K %u V %u: %.3g of the bound", type, k, n_vocab, worst);
}

static void embed_shape(uint32_t type, uint32_t k)
{
	weight w(type, k, 200, 5);
	dbuf<float> dx((size_t)5 * k);
	step st(256 * 1024);
	apr_op_embed op = {dx.p, &w.m, k, 3.5f};
	std::vector<int32_t> ids = {0, 199, 33, 16, 200};
	size_t bad = 0;

	st.set(8, 5, {}, {});
	st.tok.put(ids);
	CHECK(apr_cuda_embed(&st.l, &op) == 0, "launch");
	std::vector<float> x = dx.get();
	for (uint32_t i = 0; i < 4; i++)
		for (uint32_t j = 0; j < k; j++) {
			float v = block_value(type, w.row(ids[i]), j);

			if (w.m.tile == APR_TILE_F16)
				v = apr_half_to_f32(apr_half_from_f32(v));
			bad += x[(size_t)i * k + j] != v * 3.5f;
		}
	CHECK(!bad && isnan(x[(size_t)4 * k]), "embed type %u K %u: %zu wrong", type, k, bad);
}

void check_ops(void)
{
	for (uint32_t act = 0; act < 4; act++)
		ffn_shape(APR_TYPE_Q8_0, 576, 200, act & 1, act);
	ffn_shape(APR_TYPE_Q4_K, 4096, 256, false, APR_OP_SILU);
	ffn_shape(APR_TYPE_Q6_K, 8192, 64, true, APR_OP_SILU);
	ffn_shape(APR_TYPE_F16, 16384, 32, true, APR_OP_SILU);
	ffn_shape(APR_TYPE_BF16, 640, 128, true, APR_OP_GELU_TANH);
	ffn_shape(APR_TYPE_Q5_1, 896, 64, false, APR_OP_SILU);
	for (const struct shape_heads &h : shape_heads)
		for (uint32_t kind = 0; kind < 3; kind++)
			for (int norms = 0; norms < 2; norms++)
				attn_in_shape(h, kind == 1 ? APR_TYPE_Q4_K : APR_TYPE_Q8_0, kind == 1 ? APR_TYPE_Q6_K : APR_TYPE_BF16,
				              512, kind, norms, kind != 1);
	for (uint32_t t : {12u, 14u, 8u, 30u})
		head_shape(t, 1536, 300, t == 14 ? 30.0f : 0.0f);
	for (uint32_t t : shape_types)
		embed_shape(t, 512);
}
