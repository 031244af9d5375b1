/* SPDX-License-Identifier: MIT */
/* Decode projections: error against double within a bound of the arithmetic's own, and equal bits for a row in every
 * bucket, column and company, on any number of multiprocessors. */
#include "kernels/cuda/sm90_any_proj_decode_ref.h"
#include "tests/cuda/support.cuh"

/* The smallest bucket of so many rows, or the largest */
static uint32_t bucket_of(uint32_t rows)
{
	uint32_t b = 1;

	while (b < rows && b < APR_CUDA_DECODE_ROWS)
		b *= 2;
	return b;
}

static void one_shape(uint32_t type, uint32_t k, uint32_t n_out, bool planted)
{
	const uint32_t rows = 64;
	weight w(type, k, n_out, type * 7919 + k + n_out);
	std::vector<float> x = random_rows(rows, k, k + n_out, planted), bias = random_rows(1, n_out, 5, false);
	apr_cuda_limits lim = {64, k, k, 1, 1, 64, 64, 256};
	step st(apr_cuda_scratch_bytes(&lim));
	dbuf<float> dx(x), db(bias), dy((size_t)rows * n_out);
	apr_op_proj op = {dx.p, dy.p, k, n_out, &w.m, db.p};
	double worst = 0, err2 = 0, ref2 = 0;

	st.set(64, 64, {}, {});
	CHECK(apr_cuda_decode_proj(&st.l, &op) == 0, "launch");
	std::vector<float> all = dy.get();
	std::vector<double> wv(k), wm(k);
	for (uint32_t o = 0; o < n_out; o++) {
		apr_ref_row(type, w.row(o), k, wv.data(), wm.data());
		for (uint32_t r = 0; r < rows; r += planted ? 3 : 5) {
			double mag, ref = apr_ref_proj(wv.data(), wm.data(), &x[(size_t)r * k], k, &mag) + bias[o];
			double wide = w.m.tile == APR_TILE_F16 && type != APR_TYPE_F16 ? 2 : 1; /* the weight is rounded too */
			double e = fabs(all[(size_t)r * n_out + o] - ref),
				   bound = wide * 0x1p-11 * mag + 0x1p-18 * mag + 0x1p-23 * fabs(ref);

			worst = fmax(worst, e / bound);
			if (!(e <= bound))
				worst = 1e9;
			err2 += e * e;
			ref2 += ref * ref;
		}
	}
	CHECK(worst <= 1, "type %u K %u N %u planted %d: %.3g of the bound, rms %.3g", type, k, n_out, planted, worst,
	      sqrt(err2 / ref2));
	/* each row in other buckets, columns and company: one row is NaN */
	rng g = {k * 31 + n_out};
	std::vector<uint32_t> lives(shape_rows_few, shape_rows_few + COUNT(shape_rows_few));
	if (!planted)
		lives.assign(shape_rows, shape_rows + COUNT(shape_rows));
	for (uint32_t live : lives)
		for (uint32_t b : {bucket_of(live), bucket_of(bucket_of(live) + 1)}) {
			std::vector<float> px((size_t)rows * k, NAN);
			std::vector<uint32_t> from(live);

			for (uint32_t i = 0; i < live; i++) {
				from[i] = g.below(rows);
				if (i != 1)
					memcpy(&px[(size_t)i * k], &x[(size_t)from[i] * k], k * 4);
			}
			dx.put(px);
			dy.poison();
			st.set(b, live, {}, {});
			st.l.sms = live % 3 ? device_sms : 7;
			CHECK(apr_cuda_decode_proj(&st.l, &op) == 0, "launch");
			std::vector<float> y = dy.get();
			size_t bad = 0;

			for (uint32_t i = 0; i < live; i++)
				if (i != 1)
					bad += !same_bits(&y[(size_t)i * n_out], &all[(size_t)from[i] * n_out], n_out);
			for (size_t i = (size_t)live * n_out; i < y.size(); i++)
				bad += memcmp(&y[i], "\xff\xff\xff\xff", 4) != 0;
			CHECK(!bad, "type %u K %u N %u bucket %u live %u: %zu rows differ or were written", type, k, n_out, b, live,
			      bad);
		}
}

void check_proj(void)
{
	for (uint32_t type : {12u, 14u, 8u, 3u, 6u, 1u, 30u, 2u})
		for (uint32_t k : shape_widths) {
			if (k % block_elems(type) || (few && (k == 640 || k == 960 || k == 2048 || k == 3584 || k == 8960)))
				continue;
			one_shape(type, k, 96, true);
			if (k == 576 || (k == 4096 && !few)) {
				one_shape(type, k, 33, false);
				one_shape(type, k, 200, false);
			}
		}
}
