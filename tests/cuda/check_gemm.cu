/* SPDX-License-Identifier: MIT */
/* Prompt products from the tiles: equal bits with the plain loop over the same weights as F16 rows, for every type, order and
 * number of rows; that loop against double; tiles to F16 rows; raw blocks; the scales owed to E4M3 products. */
#include <cuda_fp8.h>

#include "kernels/cuda/fused_order.cuh"
#include "kernels/cuda/tiles.cuh"
#include "tests/cuda/support.cuh"

static std::vector<uint16_t> f16_rows(const weight &w)
{
	dbuf<uint16_t> d((size_t)w.m.n_out * w.m.n_in);

	CHECK(apr_cuda_unpack_f16(stream, &w.m, d.p) == 0, "launch");
	return d.get();
}

/* Fast unpacking against the element-wise one, which check_weights holds to the file's blocks */
static void unpacking(const weight &w)
{
	dbuf<uint16_t> d((size_t)w.m.n_out * w.m.n_in);
	std::vector<uint16_t> fast = f16_rows(w);
	size_t bad = 0;

	CHECK(apr_cuda_unpack(stream, &w.m, 0, w.m.n_out, APR_REAL_F16, d.p, NULL) == 0, "launch");
	std::vector<uint16_t> slow = d.get();
	for (size_t i = 0; i < slow.size(); i++) /* a zero's sign may differ: it changes no product's sum */
		bad += fast[i] != slow[i] && ((fast[i] | slow[i]) & 0x7fff);
	CHECK(!bad, "type %u %u x %u order %u: %zu of F16 rows differ", w.type, w.m.n_in, w.m.n_out, w.m.order, bad);
}

/* Three matrices side by side in `rows` rows, of a bucket a little larger */
static void product(const std::vector<const weight *> &w, uint32_t rows, bool against_double)
{
	uint32_t k = w[0]->m.n_in, n = 0, bucket = rows < 250 ? rows + rows % 3 : rows, all = apr_cuda_fused_columns(bucket);
	std::vector<uint16_t> whole;
	const apr_mat *mats[3];

	for (size_t i = 0; i < w.size(); i++) {
		std::vector<uint16_t> part = f16_rows(*w[i]);

		whole.insert(whole.end(), part.begin(), part.end());
		mats[i] = &w[i]->m;
		n += w[i]->m.n_out;
	}
	dbuf<uint16_t> dw(whole), in((size_t)all * k), order((size_t)all * k);
	dbuf<float> want((size_t)all * n), out((size_t)all * n);
	step st(256 * 1024);
	size_t bad = 0;

	st.set(bucket, rows, {}, {});
	CHECK(apr_cuda_fill_wide(stream, APR_REAL_F16, false, all, k, in.p) == 0, "launch");
	CHECK(apr_cuda_fill_wide(stream, APR_REAL_F16, true, all, k, order.p) == 0, "launch");
	CHECK(apr_cuda_gemm_loop(stream, dw.p, in.p, want.p, n, k, rows) == 0, "launch");
	CHECK(apr_cuda_fused_gemm(&st.l, mats, (uint32_t)w.size(), order.p, out.p, n) == 0, "launch");
	std::vector<float> a = want.get(), b = out.get();
	for (uint32_t r = 0; r < rows; r++)
		bad += !same_bits(&a[(size_t)r * n], &b[(size_t)r * n], n);
	CHECK(!bad, "type %u %u x %u rows %u: %zu rows have other bits", w[0]->type, k, n, rows, bad);
	for (size_t i = (size_t)rows * n; i < b.size(); i++)
		bad += !isnan(b[i]); /* rows that do not exist are not written */
	CHECK(!bad, "type %u %u x %u rows %u: rows past the last were written", w[0]->type, k, n, rows);
	if (!against_double)
		return;
	std::vector<uint16_t> x = in.get();
	double worst = 0;
	for (uint32_t r = 0; r < rows; r += 3)
		for (uint32_t c = 0; c < n; c += 7) {
			double sum = 0, size = 0;

			for (uint32_t i = 0; i < k; i++) {
				double p = (double)apr_half_to_f32(x[(size_t)r * k + i]) * apr_half_to_f32(whole[(size_t)c * k + i]);

				sum += p;
				size += fabs(p);
			}
			/* each product of 16 cuts at the largest term's 24 bits or so */
			worst = fmax(worst, fabs(a[(size_t)r * n + c] - sum) / (size * (k / 16 + 16) * 0x1p-23));
		}
	CHECK(worst <= 1, "the loop, %u x %u: %.3g of the bound", k, n, worst);
}

static void converted(void)
{
	const uint32_t n = 640, rows = 21;
	std::vector<float> x = random_rows(rows, n, 5, true);
	dbuf<float> dx(x), s0(32), s1(32);
	dbuf<uint16_t> plain(32 * n), order(32 * n);
	step st(256 * 1024);
	apr_cuda_gemm_in a = {APR_REAL_F16, plain.p, s0.p, 32, false, NULL}, b = {APR_REAL_F16, order.p, s1.p, 32, true, NULL};
	size_t bad = 0;

	st.set(24, rows, {}, {});
	CHECK(apr_cuda_prefill_convert(&st.l, dx.p, n, &a) == 0 && apr_cuda_prefill_convert(&st.l, dx.p, n, &b) == 0, "launch");
	std::vector<uint16_t> p = plain.get(), o = order.get();
	for (uint32_t r = 0; r < 32; r++)
		for (uint32_t k = 0; k < n; k++)
			bad += p[r * n + k] != o[fused_place(r, k, n)];
	std::vector<float> sa = s0.get(), sb = s1.get();
	CHECK(!bad && same_bits(sa.data(), sb.data(), 32), "the fused order: %zu numbers elsewhere", bad);
}

static void raw_blocks(uint32_t type)
{
	const uint32_t n_in = 768, n_out = 40;
	std::vector<uint8_t> blocks = random_blocks(type, n_in, n_out, type);
	dbuf<uint8_t> d(blocks);
	dbuf<float> out((size_t)n_out * n_in);
	apr_mat m = {};
	size_t bad = 0;

	m.type = type, m.tile = APR_TILE_RAW, m.n_in = n_in, m.n_out = n_out, m.tiles = d.p;
	CHECK(apr_cuda_unpack(stream, &m, 0, n_out, APR_REAL_F32, out.p, NULL) == 0, "launch");
	std::vector<float> f = out.get();
	for (uint32_t r = 0; r < n_out; r++)
		for (uint32_t k = 0; k < n_in; k++) {
			float want = block_value(type, &blocks[r * file_row_bytes(type, n_in)], k);

			bad += !same_bits(&want, &f[(size_t)r * n_in + k], 1);
		}
	CHECK(!bad, "raw blocks of type %u: %zu wrong", type, bad);
}

static void channel_scales(void)
{
	const uint32_t n = 320, rows = 9;
	std::vector<float> y = random_rows(rows, n, 1, false), row = random_rows(1, rows, 2, false),
					   ch = random_rows(1, n, 3, false), bias = random_rows(1, n, 4, false);
	dbuf<float> dy(y), dr(row), dc(ch), db(bias), out((size_t)rows * n);
	step st(256 * 1024);
	size_t bad = 0;

	st.set(rows, rows, {}, {});
	CHECK(apr_cuda_prefill_finish(&st.l, out.p, dy.p, n, {dr.p, dc.p}, db.p) == 0, "launch");
	std::vector<float> z = out.get();
	for (uint32_t r = 0; r < rows; r++)
		for (uint32_t i = 0; i < n; i++) {
			float want = y[r * n + i] * row[r] * ch[i] + bias[i];

			bad += !same_bits(&want, &z[r * n + i], 1);
		}
	CHECK(!bad, "scales of rows and channels: %zu wrong", bad);
}

/* Settled on the way or by a launch of its own: the same bits in x_out and in the next product's input */
static void owed_on_the_way(apr_cuda_real real)
{
	const uint32_t n = 640, rows = 19, padded = 32;
	std::vector<float> x = random_rows(rows, n, 1, true), y = random_rows(rows, n, 2, false), s = random_rows(1, padded, 3, false),
					   ch = random_rows(1, n, 4, false), bias = random_rows(1, n, 5, false), w = random_rows(1, n, 6, false);
	dbuf<float> dx(x), dc(ch), db(bias), dw(w), x0((size_t)rows * n), x1((size_t)rows * n);
	step st(256 * 1024);
	std::vector<uint8_t> got[2];
	std::vector<float> out[2], scale[2];

	st.set(20, rows, {}, {});
	for (int way = 0; way < 2; way++) {
		dbuf<float> dy(y), ds(s);
		dbuf<uint8_t> to((size_t)padded * n * 4);
		apr_cuda_gemm_in dst = {real, to.p, real == APR_REAL_F32 ? NULL : ds.p, padded, false, NULL};
		apr_cuda_owed owed = {{ds.p, dc.p}, db.p};

		if (!way)
			CHECK(apr_cuda_prefill_finish(&st.l, dy.p, dy.p, n, owed.scale, db.p) == 0, "launch");
		CHECK(apr_cuda_prefill_norm(&st.l, dx.p, dy.p, x0.p, {NULL, 0}, {dw.p, 1e-5f}, n, way ? &owed : NULL, &dst) == 0,
		      "launch");
		got[way] = to.get(), out[way] = x0.get(), scale[way] = ds.get();
	}
	CHECK(got[0] == got[1] && same_bits(out[0].data(), out[1].data(), out[0].size()) &&
	              same_bits(scale[0].data(), scale[1].data(), rows),
	      "what is owed to y, real %d: other bits on the way", real);
}

static void act_on_the_way(apr_cuda_real real, bool gated, bool fused)
{
	const uint32_t n = 1536, rows = 19, padded = 32, ld = 2 * n;
	std::vector<float> gu = random_rows(rows, ld, 1, false), s = random_rows(1, padded, 3, false),
					   ch = random_rows(1, ld, 4, false);
	dbuf<float> dg(gu), dc(ch), da((size_t)rows * n);
	step st(256 * 1024);
	std::vector<uint8_t> got[2];
	std::vector<float> scale[2];

	st.set(20, rows, {}, {});
	for (int way = 0; way < 2; way++) {
		dbuf<float> ds(s);
		dbuf<uint8_t> to((size_t)padded * n * 4);
		apr_cuda_gemm_in dst = {real, to.p, real == APR_REAL_F32 ? NULL : ds.p, padded, fused, NULL};
		const float *gate = gated ? dg.p : NULL, *up = gated ? dg.p + n : dg.p;

		if (way) {
			CHECK(apr_cuda_prefill_act_in(&st.l, APR_OP_SILU, gate, up, ld, n, {ds.p, dc.p}, &dst) == 0, "launch");
		} else {
			CHECK(apr_cuda_prefill_act(&st.l, APR_OP_SILU, gate, up, ld, da.p, n, {ds.p, dc.p}) == 0, "launch");
			CHECK(apr_cuda_prefill_convert(&st.l, da.p, n, &dst) == 0, "launch");
		}
		got[way] = to.get(), scale[way] = ds.get();
	}
	CHECK(got[0] == got[1] && same_bits(scale[0].data(), scale[1].data(), rows), "activation on the way, real %d gated %d: other bits",
	      real, gated);
}

void check_gemm(void)
{
	for (uint32_t type : shape_types) {
		for (uint32_t k : {64u, 576u, 1536u}) {
			if (k % block_elems(type))
				continue;
			weight a(type, k, 200, type + k), b(type, k, 192, type + k + 1, APR_ORDER_ROPE_HALVES, 64, 32),
					c(type, k, 2 * 40, type + k + 2, APR_ORDER_GATE_UP);

			unpacking(a);
			unpacking(b);
			unpacking(c);
			product({&a}, 3, false);
			product({&c}, 17, false);
			product({&b, &a}, 64, k == 576);
		}
		raw_blocks(type);
	}
	weight q(12, 2048, 512, 1, APR_ORDER_ROPE_HALVES, 64, 32), k(12, 2048, 128, 2, APR_ORDER_ROPE_HALVES, 64, 32),
			v(14, 2048, 128, 3), long_k(12, 14336, 96, 4);

	for (uint32_t rows : shape_prefill)
		product({&q, &k, &v}, rows, false);
	for (uint32_t rows : {4u, 8u, 16u, 32u, 64u})
		product({&long_k}, rows, false);
	converted();
	channel_scales();
	for (apr_cuda_real real : {APR_REAL_F32, APR_REAL_F16, APR_REAL_E4M3}) {
		owed_on_the_way(real);
		act_on_the_way(real, false, false);
		act_on_the_way(real, true, real == APR_REAL_F16);
	}
}
