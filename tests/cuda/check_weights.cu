/* SPDX-License-Identifier: MIT */
/* Weights survive packing: every element of every type comes back from its tiles as the file has it, in every order of
 * rows, and as rows of each kind of number. */
#include <cuda_fp8.h>

#include "kernels/cuda/tiles.cuh"
#include "tests/cuda/support.cuh"

static float rounded(uint32_t tile, uint32_t type, float v)
{
	if (tile == APR_TILE_F16 && type != APR_TYPE_F16)
		return apr_half_to_f32(apr_half_from_f32(v)); /* widened */
	return v;
}

static void round_trip(uint32_t type, uint32_t n_in, uint32_t n_out, uint32_t order, uint32_t dim, uint32_t half)
{
	weight w(type, n_in, n_out, type * 1000 + n_in + n_out, order, dim, half);
	dbuf<float> f((size_t)n_out * n_in), scale(n_out);
	dbuf<uint16_t> h((size_t)n_out * n_in);
	dbuf<uint8_t> e((size_t)n_out * n_in);
	size_t bad = 0, bad_h = 0, bad_e = 0;

	CHECK(apr_cuda_unpack(stream, &w.m, 0, n_out, APR_REAL_F32, f.p, NULL) == 0, "unpack f32");
	CHECK(apr_cuda_unpack(stream, &w.m, 0, n_out, APR_REAL_F16, h.p, NULL) == 0, "unpack f16");
	CHECK(apr_cuda_unpack(stream, &w.m, 0, n_out, APR_REAL_E4M3, e.p, scale.p) == 0, "unpack e4m3");
	std::vector<float> got = f.get(), sc = scale.get();
	std::vector<uint16_t> got_h = h.get();
	std::vector<uint8_t> got_e = e.get();
	for (uint32_t r = 0; r < n_out; r++) {
		float amax = 0;

		for (uint32_t k = 0; k < n_in; k++)
			amax = fmaxf(amax, fabsf(got[(size_t)r * n_in + k]));
		bad_e += sc[r] != (amax > 0 ? amax / 448.0f : 1.0f);
		for (uint32_t k = 0; k < n_in; k++) {
			size_t i = (size_t)r * n_in + k;
			float want = rounded(w.m.tile, type, block_value(type, w.row(r), k));
			__nv_fp8_e4m3 want_e(want / sc[r]);

			bad += !same_bits(&got[i], &want, 1);
			bad_h += got_h[i] != apr_half_from_f32(want);
			bad_e += memcmp(&want_e, &got_e[i], 1) != 0;
		}
	}
	CHECK(!bad && !bad_h && !bad_e, "type %u %u x %u order %u: %zu f32, %zu f16, %zu e4m3 wrong", type, n_in, n_out,
	      order, bad, bad_h, bad_e);
}

void check_weights(void)
{
	for (uint32_t type : shape_types)
		for (uint32_t n_in : {64u, 256u, 576u, 640u, 1536u}) {
			if (n_in % block_elems(type))
				continue;
			for (uint32_t n_out : shape_outs)
				round_trip(type, n_in, n_out, APR_ORDER_PLAIN, 0, 0);
			round_trip(type, n_in, 192, APR_ORDER_ROPE_HALVES, 64, 32);
			round_trip(type, n_in, 192, APR_ORDER_ROPE_HALVES, 96, 16);
			round_trip(type, n_in, 2 * 40, APR_ORDER_GATE_UP, 0, 0);
		}
}
