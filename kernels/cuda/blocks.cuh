/* SPDX-License-Identifier: MIT */
/*
 * One element of a block of each weight type, as the file has it.
 *
 * Owns: the same meaning as kernels/common/dequant.c, element by element, so that a
 * thread takes what it needs (tests hold both equal bit for bit over every type).
 * Does not own tiles.
 */
#ifndef APR_KERNELS_CUDA_BLOCKS_CUH
#define APR_KERNELS_CUDA_BLOCKS_CUH

#include "kernels/common/math.h"
#include "kernels/types.h"

#define HD static __host__ __device__ __forceinline__

HD uint32_t block_elems(uint32_t type)
{
	switch (type) {
	case APR_TYPE_F32:
	case APR_TYPE_F16:
	case APR_TYPE_BF16: return 1;
	case APR_TYPE_Q4_0:
	case APR_TYPE_Q4_1:
	case APR_TYPE_Q5_0:
	case APR_TYPE_Q5_1:
	case APR_TYPE_Q8_0: return 32;
	case APR_TYPE_Q2_K:
	case APR_TYPE_Q3_K:
	case APR_TYPE_Q4_K:
	case APR_TYPE_Q5_K:
	case APR_TYPE_Q6_K: return 256;
	default: return 0;
	}
}
HD uint32_t block_size(uint32_t type)
{
	switch (type) {
	case APR_TYPE_F32: return 4;
	case APR_TYPE_F16:
	case APR_TYPE_BF16: return 2;
	case APR_TYPE_Q4_0: return 18;
	case APR_TYPE_Q4_1: return 20;
	case APR_TYPE_Q5_0: return 22;
	case APR_TYPE_Q5_1: return 24;
	case APR_TYPE_Q8_0: return 34;
	case APR_TYPE_Q2_K: return 84;
	case APR_TYPE_Q3_K: return 110;
	case APR_TYPE_Q4_K: return 144;
	case APR_TYPE_Q5_K: return 176;
	case APR_TYPE_Q6_K: return 210;
	default: return 0;
	}
}

HD uint32_t le16(const uint8_t *p)
{
	return p[0] | (uint32_t)p[1] << 8;
}
HD uint32_t le32(const uint8_t *p)
{
	return le16(p) | le16(p + 2) << 16;
}

/* The unsigned code of element k of block b (Q8_0: value + 128). */
HD uint32_t block_code(uint32_t type, const uint8_t *b, uint32_t k)
{
	uint32_t j = k % 16, sub = k / 32, l = k % 32, half = k / 128;

	switch (type) {
	case APR_TYPE_Q4_0: return b[2 + j] >> (k < 16 ? 0 : 4) & 15;
	case APR_TYPE_Q4_1: return b[4 + j] >> (k < 16 ? 0 : 4) & 15;
	case APR_TYPE_Q5_0: return (b[6 + j] >> (k < 16 ? 0 : 4) & 15) | (le32(b + 2) >> k & 1) << 4;
	case APR_TYPE_Q5_1: return (b[8 + j] >> (k < 16 ? 0 : 4) & 15) | (le32(b + 4) >> k & 1) << 4;
	case APR_TYPE_Q8_0: return b[2 + k] ^ 0x80u;
	case APR_TYPE_Q2_K: return b[16 + half * 32 + l] >> (2 * (sub % 4)) & 3;
	case APR_TYPE_Q3_K: return (b[32 + half * 32 + l] >> (2 * (sub % 4)) & 3) | (b[l] >> sub & 1) << 2;
	case APR_TYPE_Q4_K: return b[16 + sub / 2 * 32 + l] >> (sub % 2 * 4) & 15;
	case APR_TYPE_Q5_K: return (b[48 + sub / 2 * 32 + l] >> (sub % 2 * 4) & 15) | (b[16 + l] >> sub & 1) << 4;
	case APR_TYPE_Q6_K:
		return (b[half * 64 + sub % 2 * 32 + l] >> (sub % 4 / 2 * 4) & 15) |
		       (b[128 + half * 32 + l] >> (sub % 4 * 2) & 3) << 4;
	default: return 0;
	}
}

/* Six-bit scale and minimum of sub-block j of Q4_K and Q5_K; s: the 12 bytes. */
HD uint32_t scale6(const uint8_t *s, uint32_t j)
{
	return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
}
HD uint32_t min6(const uint8_t *s, uint32_t j)
{
	return j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
}

struct block_scale {
	float scale, min; /* weight = scale · (code - offset) + min, min added only where has_min */
	int offset;
	bool has_min;
};
HD block_scale block_scale_of(uint32_t type, const uint8_t *b, uint32_t k)
{
	uint32_t s = k / 16, j = k / 32;
	const uint8_t *t = b + 96;

	switch (type) {
	case APR_TYPE_Q4_0: return {apr_half_to_f32(le16(b)), 0, 8, false};
	case APR_TYPE_Q5_0: return {apr_half_to_f32(le16(b)), 0, 16, false};
	case APR_TYPE_Q8_0: return {apr_half_to_f32(le16(b)), 0, 128, false};
	case APR_TYPE_Q4_1:
	case APR_TYPE_Q5_1: return {apr_half_to_f32(le16(b)), apr_half_to_f32(le16(b + 2)), 0, true};
	case APR_TYPE_Q2_K:
		return {apr_half_to_f32(le16(b + 80)) * (float)(b[s] & 15),
		        -(apr_half_to_f32(le16(b + 82)) * (float)(b[s] >> 4)), 0, true};
	case APR_TYPE_Q3_K:
		return {apr_half_to_f32(le16(b + 108)) *
		                (float)((int)((t[s % 8] >> (s < 8 ? 0 : 4) & 15) | (t[8 + s % 4] >> (2 * (s / 4)) & 3) << 4) -
		                        32),
		        0, 4, false};
	case APR_TYPE_Q4_K:
	case APR_TYPE_Q5_K:
		return {apr_half_to_f32(le16(b)) * (float)scale6(b + 4, j),
		        -(apr_half_to_f32(le16(b + 2)) * (float)min6(b + 4, j)), 0, true};
	case APR_TYPE_Q6_K: return {apr_half_to_f32(le16(b + 208)) * (float)(int8_t)b[192 + s], 0, 32, false};
	default: return {0, 0, 0, false};
	}
}

HD float block_join(block_scale s, uint32_t code)
{
	float w = s.scale * (float)((int)code - s.offset);

	return s.has_min ? w + s.min : w;
}

/* Element k of a row of the file's blocks. (No product here is inexact but Q6_K's, so contraction changes nothing.) */
HD float block_value(uint32_t type, const uint8_t *row, uint32_t k)
{
	uint32_t n = block_elems(type);
	const uint8_t *b = row + (size_t)(k / n) * block_size(type);

	switch (type) {
	case APR_TYPE_F32: return apr_bits_f32(le32(b));
	case APR_TYPE_F16: return apr_half_to_f32((uint16_t)le16(b));
	case APR_TYPE_BF16: return apr_bfloat_to_f32((uint16_t)le16(b));
	default: return block_join(block_scale_of(type, b, k % n), block_code(type, b, k % n));
	}
}

#endif
