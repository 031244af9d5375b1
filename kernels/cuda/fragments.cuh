/* SPDX-License-Identifier: MIT */
/*
 * Decode tiles as operands of tensor-core products, each weight the very F16 number
 * that unpacking to rows gives.
 *
 * Owns: for each tile type, its registers of one row tile and their way to F16: one
 * float operation (two for Q6_K) as in block_join, then one rounding. products.cuh
 * multiplies integer codes and scales the sums, which is faster and another
 * arithmetic. Does not own the loops (sm90_any_fused_gemm.cu).
 *
 * An operand is a[4] of mma m16n8k16 with k 4t … 4t + 3 of each 16 where the standard
 * has 2t, 2t + 1, 2t + 8, 2t + 9: within one product the order of k changes no bit
 * (checked on the device, as everything that enters the table of algorithms is).
 */
#ifndef APR_KERNELS_CUDA_FRAGMENTS_CUH
#define APR_KERNELS_CUDA_FRAGMENTS_CUH

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tiles.cuh"

struct row_scale { /* weight = fmaf(scale, code, min), or scale · code */
	float scale, min;
};

DEV uint32_t scaled_pair(uint32_t codes, row_scale s, bool has_min)
{
	float2 c = __half22float2(*(__half2 *)&codes);

	return has_min ? pack_half2(fmaf(s.scale, c.x, s.min), fmaf(s.scale, c.y, s.min))
	               : pack_half2(s.scale * c.x, s.scale * c.y);
}
/* a: codes as F16 integers; rows g (a[0], a[2]) and g + 8 */
DEV void scaled_operand(uint32_t *a, row_scale g, row_scale g8, bool has_min)
{
	a[0] = scaled_pair(a[0], g, has_min);
	a[1] = scaled_pair(a[1], g8, has_min);
	a[2] = scaled_pair(a[2], g, has_min);
	a[3] = scaled_pair(a[3], g8, has_min);
}
/* Four bytes (below 256) of each row, less OFF, as F16 integers: byte b over 0x64 is 1024 + b */
template <int OFF> DEV void codes_operand(uint32_t g, uint32_t g8, uint32_t *a)
{
	const float k = 1024.0f + OFF;

	a[0] = hsub2_const(__byte_perm(g, 0x64646464u, 0x4140), k);
	a[2] = hsub2_const(__byte_perm(g, 0x64646464u, 0x4342), k);
	a[1] = hsub2_const(__byte_perm(g8, 0x64646464u, 0x4140), k);
	a[3] = hsub2_const(__byte_perm(g8, 0x64646464u, 0x4342), k);
}
DEV float low_half(uint32_t v)
{
	return __low2float(*(__half2 *)&v);
}
DEV float high_half(uint32_t v)
{
	return __high2float(*(__half2 *)&v);
}

/* load: from shared memory; group(gi): the operands of the two products of 32-group gi of the tile. gi is a constant
 * once the caller's loop is unrolled. */
template <int TILE> struct Fragments;

template <> struct Fragments<APR_TILE_Q4_K> {
	uint4 q[4], s0, s1;

	__device__ __forceinline__ void load(uint32_t sp, uint32_t lane)
	{
#pragma unroll
		for (int j = 0; j < 4; j++)
			q[j] = lds128(sp + j * 512 + lane * 16);
		s0 = lds128(sp + 2048 + (lane >> 2) * 16);
		s1 = lds128(sp + 2048 + (lane >> 2) * 16 + 128);
	}
	/* scale6 and min6 of blocks.cuh, of 12 bytes in three words */
	static __device__ __forceinline__ row_scale scale_of(const uint4 &s, int j)
	{
		uint32_t at = 8 * (j & 3), sc = s.y >> at, mn = s.z >> at, x = s.w >> at;

		if (j >= 4) {
			sc = (x & 15) | (sc >> 6 & 3) << 4;
			mn = (x >> 4 & 15) | (mn >> 6 & 3) << 4;
		}
		return {low_half(s.x) * (float)(sc & 63), -(high_half(s.x) * (float)(mn & 63))};
	}
	/* Nibbles where FP16's mantissa wants them: over 16.0 at bits 6-9, over 256.0 at bits 2-5 (tiles.cuh) */
	static __device__ __forceinline__ void codes(uint32_t w, uint32_t *a)
	{
		uint32_t r = __funnelshift_r(w, w, 8);

		a[0] = hsub2_const((w & 0x03C003C0u) | 0x4C004C00u, 16.0f);
		a[2] = hsub2_const((w & 0x003C003Cu) | 0x5C005C00u, 256.0f);
		a[1] = hsub2_const((r & 0x03C003C0u) | 0x4C004C00u, 16.0f);
		a[3] = hsub2_const((r & 0x003C003Cu) | 0x5C005C00u, 256.0f);
	}
	__device__ __forceinline__ void group(int gi, uint32_t *a, uint32_t *b) const
	{
		row_scale g = scale_of(s0, gi), g8 = scale_of(s1, gi);

		codes(word_of(q[gi >> 1], gi % 2 * 2), a);
		codes(word_of(q[gi >> 1], gi % 2 * 2 + 1), b);
		scaled_operand(a, g, g8, true);
		scaled_operand(b, g, g8, true);
	}
};

template <> struct Fragments<APR_TILE_Q6_K> : TileQ6K {
	static __device__ __forceinline__ float byte_of(const uint4 &s, int i)
	{
		return (float)(int8_t)(word_of(s, i >> 2) >> (8 * (i & 3)));
	}
	__device__ __forceinline__ void group(int gi, uint32_t *a, uint32_t *b) const
	{
		uint32_t w2 = word_of(f[gi >> 2], gi & 3);

#pragma unroll
		for (int h = 0; h < 2; h++) {
			uint32_t w = word_of(q[gi >> 1], gi % 2 * 2 + h), *o = h ? b : a;
			uint32_t g = (w & 0x0f0f0f0fu) | ((h ? w2 : w2 << 4) & 0x30303030u);
			uint32_t g8 = (w >> 4 & 0x0f0f0f0fu) | ((h ? w2 >> 2 : w2 << 2) & 0x30303030u);

			codes_operand<32>(g, g8, o);
			scaled_operand(o, {low_half(d) * byte_of(s0, gi * 2 + h), 0}, {high_half(d) * byte_of(s1, gi * 2 + h), 0},
			               false);
		}
	}
};

template <> struct Fragments<APR_TILE_Q8_0> {
	uint4 q[2];
	uint32_t d[2];

	__device__ __forceinline__ void load(uint32_t sp, uint32_t lane)
	{
#pragma unroll
		for (int gi = 0; gi < 2; gi++) {
			q[gi] = lds128(sp + gi * 512 + lane * 16);
			d[gi] = lds32(sp + 1024 + gi * 32 + (lane >> 2) * 4);
		}
	}
	__device__ __forceinline__ void group(int gi, uint32_t *a, uint32_t *b) const
	{
		row_scale g = {low_half(d[gi]), 0}, g8 = {high_half(d[gi]), 0};

		codes_operand<128>(q[gi].x, q[gi].y, a);
		codes_operand<128>(q[gi].z, q[gi].w, b);
		scaled_operand(a, g, g8, false);
		scaled_operand(b, g, g8, false);
	}
};

template <> struct Fragments<APR_TILE_Q4_1> {
	uint4 q;
	uint32_t s[2][2]; /* {d, m} of row g, of row g + 8: [group] */

	__device__ __forceinline__ void load(uint32_t sp, uint32_t lane)
	{
		q = lds128(sp + lane * 16);
#pragma unroll
		for (int gi = 0; gi < 2; gi++) {
			s[gi][0] = lds32(sp + 512 + gi * 64 + (lane >> 2) * 8);
			s[gi][1] = lds32(sp + 512 + gi * 64 + (lane >> 2) * 8 + 4);
		}
	}
	__device__ __forceinline__ void group(int gi, uint32_t *a, uint32_t *b) const
	{
		uint32_t w0 = gi ? q.z : q.x, w1 = gi ? q.w : q.y;
		row_scale g = {low_half(s[gi][0]), high_half(s[gi][0])}, g8 = {low_half(s[gi][1]), high_half(s[gi][1])};

		codes_operand<0>(w0 & 0x0f0f0f0fu, w0 >> 4 & 0x0f0f0f0fu, a);
		codes_operand<0>(w1 & 0x0f0f0f0fu, w1 >> 4 & 0x0f0f0f0fu, b);
		scaled_operand(a, g, g8, true);
		scaled_operand(b, g, g8, true);
	}
};

template <> struct Fragments<APR_TILE_Q5_0> {
	uint4 q;
	uint32_t f, d[2];

	__device__ __forceinline__ void load(uint32_t sp, uint32_t lane)
	{
		q = lds128(sp + lane * 16);
		f = lds32(sp + 512 + lane * 4);
		d[0] = lds32(sp + 640 + (lane >> 2) * 4);
		d[1] = lds32(sp + 672 + (lane >> 2) * 4);
	}
	__device__ __forceinline__ void group(int gi, uint32_t *a, uint32_t *b) const
	{
		uint32_t w0 = gi ? q.z : q.x, w1 = gi ? q.w : q.y, h = gi ? f : f << 4; /* fifth bit of part p at 4 + p */
		row_scale g = {low_half(d[gi]), 0}, g8 = {high_half(d[gi]), 0};

		codes_operand<16>((w0 & 0x0f0f0f0fu) | (h & 0x10101010u), (w0 >> 4 & 0x0f0f0f0fu) | (h >> 1 & 0x10101010u), a);
		codes_operand<16>((w1 & 0x0f0f0f0fu) | (h >> 2 & 0x10101010u), (w1 >> 4 & 0x0f0f0f0fu) | (h >> 3 & 0x10101010u),
		                  b);
		scaled_operand(a, g, g8, false);
		scaled_operand(b, g, g8, false);
	}
};

template <bool BF16> struct FragmentsReal {
	uint4 q[4]; /* [group · 2 + product] */

	__device__ __forceinline__ void load(uint32_t sp, uint32_t lane)
	{
#pragma unroll
		for (int j = 0; j < 4; j++)
			q[j] = lds128(sp + j * 512 + lane * 16);
	}
	static __device__ __forceinline__ uint32_t real(uint32_t v)
	{
		return BF16 ? pack_half2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)) : v;
	}
	__device__ __forceinline__ void group(int gi, uint32_t *a, uint32_t *b) const
	{
		const uint4 &v = q[gi * 2], &w = q[gi * 2 + 1];

		a[0] = real(v.x), a[1] = real(v.y), a[2] = real(v.z), a[3] = real(v.w);
		b[0] = real(w.x), b[1] = real(w.y), b[2] = real(w.z), b[3] = real(w.w);
	}
};
template <> struct Fragments<APR_TILE_F16> : FragmentsReal<false> {
};
template <> struct Fragments<APR_TILE_BF16> : FragmentsReal<true> {
};

#endif
