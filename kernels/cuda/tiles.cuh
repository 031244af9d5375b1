/* SPDX-License-Identifier: MIT */
/*
 * Decode tiles: 16 rows of a weight over 64 or 256 k, in the order in which the
 * tensor cores take them.
 *
 * Owns: the geometry and the bytes of each tile type, packing and unpacking one
 * element. Does not own the products (products.cuh) nor the launches (repack.cu).
 *
 * A tensor-core lane is 4 g + t. In each group of 32 k, lane t holds k 4t … 4t + 3
 * (first product of 16) and 16 + 4t … 16 + 4t + 3 (second), of rows g and g + 8; so
 * each product stays within one sub-block of 16. No byte is added to the file's
 * blocks, but rows are padded to 32 and k to the tile, with zero weights.
 *
 *   Q4_K  256 k, 2304 B  word (lane, 32-group, product): 8 nibbles where FP16's
 *                        mantissa wants them (see products.cuh); 16 × 16 B of d,
 *                        dmin and the 12 scale bytes as in the file
 *   Q6_K  256 k, 3360 B  nibbles 2048, two-bit fields 1024, 16 × 16 scales, d[8][2]
 *   Q8_0   64 k, 1088 B  code bytes 1024, d[2][8][2] (rows g, g + 8)
 *   Q4_1   64 k,  640 B  nibbles 512, {d,m}[2][8][2]
 *   Q5_0   64 k,  704 B  nibbles 512, fifth bits 128, d[2][8][2]
 *   F16, BF16 64 k, 2048 B
 *
 * Tiles of a pair of row tiles lie together: [pair][k tile][2][bytes].
 */
#ifndef APR_KERNELS_CUDA_TILES_CUH
#define APR_KERNELS_CUDA_TILES_CUH

#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/cuda/ptx.cuh"

HD constexpr uint32_t tile_k(uint32_t tile)
{
	return tile == APR_TILE_Q4_K || tile == APR_TILE_Q6_K ? 256 : 64;
}
HD constexpr uint32_t tile_size(uint32_t tile)
{
	switch (tile) {
	case APR_TILE_Q4_K: return 2304;
	case APR_TILE_Q6_K: return 3360;
	case APR_TILE_Q8_0: return 1088;
	case APR_TILE_Q4_1: return 640;
	case APR_TILE_Q5_0: return 704;
	default: return 2048;
	}
}
/* k that a warp takes at a time: one refill of its ring */
HD constexpr uint32_t stage_k(uint32_t tile)
{
	switch (tile) {
	case APR_TILE_Q8_0: return 128;
	case APR_TILE_F16:
	case APR_TILE_BF16: return 64;
	default: return 256;
	}
}
HD constexpr uint32_t stage_size(uint32_t tile)
{
	return stage_k(tile) / tile_k(tile) * 2 * tile_size(tile);
}
HD uint32_t tiles_along_k(uint32_t tile, uint32_t n_in)
{
	return (n_in + tile_k(tile) - 1) / tile_k(tile);
}
HD uint32_t row_pairs(uint32_t n_out)
{
	return (n_out + 31) / 32;
}

/* Where row p of the tiles comes from: which matrix, which of its rows. */
struct row_home {
	uint32_t which, row;
};
HD row_home row_home_of(uint32_t order, uint32_t dim, uint32_t half, uint32_t p)
{
	uint32_t head, r;

	if (order == APR_ORDER_GATE_UP)
		return {p >> 3 & 1, (p >> 4) * 8 + (p & 7)};
	if (order != APR_ORDER_ROPE_HALVES)
		return {0, p};
	head = p / dim;
	r = p % dim;
	return {0, r < 2 * half ? head * dim + (r >> 1) + (r & 1) * half : p};
}
/* The row of the tiles that holds row `row` of matrix `which`: the inverse. */
HD uint32_t row_place(uint32_t order, uint32_t dim, uint32_t half, uint32_t which, uint32_t row)
{
	uint32_t r;

	if (order == APR_ORDER_GATE_UP)
		return (row >> 3) * 16 + which * 8 + (row & 7);
	if (order != APR_ORDER_ROPE_HALVES)
		return row;
	r = row % dim;
	if (r >= 2 * half)
		return row;
	return row - r + (r < half ? 2 * r : 2 * (r - half) + 1);
}

/* ---- packing: the words of one tile, from the codes of 16 rows ----------------------- */

/* Rows of one tile in the file's layout: row[r] is the block that holds the tile's first k, which is element `first` of
 * it; NULL: a padding row. n: k that exist from there on. */
struct tile_source {
	const uint8_t *row[16];
	uint32_t type, first, n;
};

HD uint32_t source_code(const tile_source &s, uint32_t r, uint32_t k, uint32_t zero)
{
	uint32_t n = block_elems(s.type);

	if (!s.row[r] || k >= s.n)
		return zero;
	k += s.first;
	return block_code(s.type, s.row[r] + (size_t)(k / n) * block_size(s.type), k % n);
}
/* k, within the tile, of byte i of product `half` of 32-group gi, lane column t */
HD uint32_t lane_k(uint32_t gi, uint32_t half, uint32_t t, uint32_t i)
{
	return gi * 32 + half * 16 + 4 * t + i;
}

/* Word (lane, gi, half) of Q4_K: nibbles of rows g, g + 8 at the bits that products.cuh masks out. */
HD uint32_t pack_q4k(const tile_source &s, uint32_t lane, uint32_t gi, uint32_t half)
{
	/* row g: k0, k1 at bits 6, 22; k2, k3 at 2, 18. Row g + 8: the same eight higher, k1 and k3 wrapping round. */
	uint32_t g = lane >> 2, t = lane & 3, v = 0, i, r;
	const uint32_t at[4] = {6, 22, 2, 18};

	for (r = 0; r < 2; r++)
		for (i = 0; i < 4; i++) {
			uint32_t c = source_code(s, g + 8 * r, lane_k(gi, half, t, i), 0), b = at[i] + 8 * r;

			v |= c << b;
			if (b > 28)
				v |= c >> (32 - b);
		}
	return v;
}
/* Word of nibbles (lane, gi, half): byte i = code of row g | code of row g + 8 << 4, of the low four bits. */
HD uint32_t pack_nibbles(const tile_source &s, uint32_t lane, uint32_t gi, uint32_t half, uint32_t zero)
{
	uint32_t g = lane >> 2, t = lane & 3, v = 0, i;

	for (i = 0; i < 4; i++) {
		uint32_t k = lane_k(gi, half, t, i);

		v |= ((source_code(s, g, k, zero) & 15) | (source_code(s, g + 8, k, zero) & 15) << 4) << (8 * i);
	}
	return v;
}
/* Word of bytes (lane, gi, part): part 0, 1 = rows g, g + 8 of the first product, 2, 3 of the second. */
HD uint32_t pack_bytes(const tile_source &s, uint32_t lane, uint32_t gi, uint32_t part, uint32_t zero)
{
	uint32_t g = lane >> 2, t = lane & 3, v = 0, i;

	for (i = 0; i < 4; i++)
		v |= source_code(s, g + 8 * (part & 1), lane_k(gi, part >> 1, t, i), zero) << (8 * i);
	return v;
}
/* Q6_K's two-bit fields of a group: byte i holds those of parts 0 … 3 from the lowest bits up. */
HD uint32_t pack_twos(const tile_source &s, uint32_t lane, uint32_t gi)
{
	uint32_t v = 0, part;

	for (part = 0; part < 4; part++)
		v |= (pack_bytes(s, lane, gi, part, 32) >> 4 & 0x03030303u) << (2 * part);
	return v;
}
/* Q5_0's fifth bits of a tile: bit 8 i + 4 gi + part. */
HD uint32_t pack_fifths(const tile_source &s, uint32_t lane)
{
	uint32_t v = 0, gi, part;

	for (gi = 0; gi < 2; gi++)
		for (part = 0; part < 4; part++)
			v |= (pack_bytes(s, lane, gi, part, 16) >> 4 & 0x01010101u) << (4 * gi + part);
	return v;
}
HD uint32_t source_real16(const tile_source &s, uint32_t r, uint32_t k, bool bf16)
{
	float v;

	if (!s.row[r] || k >= s.n)
		return 0;
	v = block_value(s.type, s.row[r], s.first + k);
	return bf16 ? apr_bfloat_from_f32(v) : apr_half_from_f32(v);
}
/* Word j of product (lane, gi, half) of F16 and BF16: the tensor core's own register j. */
HD uint32_t pack_reals(const tile_source &s, uint32_t lane, uint32_t gi, uint32_t half, uint32_t j, bool bf16)
{
	uint32_t r = (lane >> 2) + 8 * (j & 1), k = lane_k(gi, half, lane & 3, j & 2);

	return source_real16(s, r, k, bf16) | source_real16(s, r, k + 1, bf16) << 16;
}
/* F16 at byte `at` of the block of row r that holds k; 0 for padding */
HD uint32_t source_half(const tile_source &s, uint32_t r, uint32_t k, uint32_t at)
{
	uint32_t n = block_elems(s.type);

	return s.row[r] && k < s.n ? le16(s.row[r] + (size_t)(k / n) * block_size(s.type) + at) : 0;
}

/* Scales of rows g and g + 8, 32-group gi */
HD uint32_t pack_scale_pair(const tile_source &s, uint32_t g, uint32_t gi)
{
	return source_half(s, g, gi * 32, 0) | source_half(s, g + 8, gi * 32, 0) << 16;
}

HD uint32_t pack_word_64(uint32_t tile, const tile_source &s, uint32_t w)
{
	uint32_t lane, gi, r;

	switch (tile) {
	case APR_TILE_Q8_0: /* lane's 2 × 16 B: [gi][lane][part] */
		if (w < 256)
			return pack_bytes(s, w >> 2 & 31, w >> 7, w & 3, 128);
		return pack_scale_pair(s, (w - 256) & 7, (w - 256) >> 3);
	case APR_TILE_Q4_1: /* [lane][gi][half] */
		if (w < 128)
			return pack_nibbles(s, w >> 2, w >> 1 & 1, w & 1, 0);
		w -= 128; /* [gi][g][row g or g + 8] */
		gi = w >> 4;
		r = (w >> 1 & 7) + 8 * (w & 1);
		return source_half(s, r, gi * 32, 0) | source_half(s, r, gi * 32, 2) << 16;
	case APR_TILE_Q5_0:
		if (w < 128)
			return pack_nibbles(s, w >> 2, w >> 1 & 1, w & 1, 16);
		if (w < 160)
			return pack_fifths(s, w - 128);
		return pack_scale_pair(s, (w - 160) & 7, (w - 160) >> 3);
	default: /* [gi][half][lane][j] */
		lane = w >> 2 & 31;
		return pack_reals(s, lane, w >> 8, w >> 7 & 1, w & 3, tile == APR_TILE_BF16);
	}
}
/* Word w of a tile. */
HD uint32_t pack_word(uint32_t tile, const tile_source &s, uint32_t w)
{
	uint32_t j, v;

	if (tile == APR_TILE_Q4_K) {
		if (w < 512) /* [gi / 2][lane][gi % 2][half] */
			return pack_q4k(s, w >> 2 & 31, (w >> 7) * 2 + (w >> 1 & 1), w & 1);
		w -= 512;
		return s.row[w >> 2] ? le32(s.row[w >> 2] + (w & 3) * 4) : 0;
	}
	if (tile != APR_TILE_Q6_K)
		return pack_word_64(tile, s, w);
	if (w < 512)
		return pack_nibbles(s, w >> 2 & 31, (w >> 7) * 2 + (w >> 1 & 1), w & 1, 32);
	w -= 512;
	if (w < 256) /* [gi / 4][lane][gi % 4] */
		return pack_twos(s, w >> 2 & 31, (w >> 7) * 4 + (w & 3));
	w -= 256;
	if (w < 64) {
		for (v = 0, j = 0; j < 4; j++)
			v |= s.row[w >> 2] ? (uint32_t)s.row[w >> 2][192 + (w & 3) * 4 + j] << (8 * j) : 0;
		return v;
	}
	w -= 64;
	return source_half(s, w, 0, 208) | source_half(s, w + 8, 0, 208) << 16;
}

/* ---- unpacking: one weight back to float, the same bits as the file's dequantiser -------- */

HD float unpack_value(uint32_t tile, const uint8_t *b, uint32_t r, uint32_t k)
{
	uint32_t g = r & 7, hi = r >> 3, gi = k >> 5, half = k >> 4 & 1, t = k >> 2 & 3, i = k & 3, lane = 4 * g + t;
	uint32_t code, part = half * 2 + hi, at, d = (g * 2 + hi) * 2; /* d: of scales kept in pairs of rows g, g + 8 */
	const uint32_t q4[4] = {6, 22, 2, 18};

	switch (tile) {
	case APR_TILE_Q4_K: {
		uint32_t w = le32(b + ((gi >> 1) * 128 + lane * 4 + (gi & 1) * 2 + half) * 4);
		const uint8_t *s = b + 2048 + r * 16;

		at = q4[i] + 8 * hi;
		code = (w >> at | (at > 28 ? w << (32 - at) : 0)) & 15;
		return block_join({apr_half_to_f32(le16(s)) * (float)scale6(s + 4, gi),
		                   -(apr_half_to_f32(le16(s + 2)) * (float)min6(s + 4, gi)), 0, true},
		                  code);
	}
	case APR_TILE_Q6_K:
		code = b[((gi >> 1) * 128 + lane * 4 + (gi & 1) * 2 + half) * 4 + i] >> (4 * hi) & 15;
		code |= (b[2048 + ((gi >> 2) * 128 + lane * 4 + (gi & 3)) * 4 + i] >> (2 * part) & 3) << 4;
		return block_join(
				{apr_half_to_f32(le16(b + 3328 + d)) * (float)(int8_t)b[3072 + r * 16 + (k >> 4)], 0, 32, false}, code);
	case APR_TILE_Q8_0:
		code = b[(gi * 128 + lane * 4 + part) * 4 + i];
		return block_join({apr_half_to_f32(le16(b + 1024 + gi * 32 + d)), 0, 128, false}, code);
	case APR_TILE_Q4_1:
		code = b[(lane * 4 + gi * 2 + half) * 4 + i] >> (4 * hi) & 15;
		at = 512 + gi * 64 + d * 2;
		return block_join({apr_half_to_f32(le16(b + at)), apr_half_to_f32(le16(b + at + 2)), 0, true}, code);
	case APR_TILE_Q5_0:
		code = b[(lane * 4 + gi * 2 + half) * 4 + i] >> (4 * hi) & 15;
		code |= (le32(b + 512 + lane * 4) >> (8 * i + 4 * gi + part) & 1) << 4;
		return block_join({apr_half_to_f32(le16(b + 640 + gi * 32 + d)), 0, 16, false}, code);
	default:
		at = ((gi * 2 + half) * 128 + lane * 4 + hi + (i & 2)) * 4 + (i & 1) * 2;
		return tile == APR_TILE_BF16 ? apr_bfloat_to_f32((uint16_t)le16(b + at))
		                             : apr_half_to_f32((uint16_t)le16(b + at));
	}
}
/* Weight (p, k) of a matrix in tiles, p in the tiles' row order. */
HD float tile_value(uint32_t tile, const uint8_t *tiles, uint32_t n_in, uint32_t p, uint32_t k)
{
	uint32_t kt = tile_k(tile);
	size_t at = ((size_t)(p >> 5) * tiles_along_k(tile, n_in) + k / kt) * 2 + (p >> 4 & 1);

	return unpack_value(tile, tiles + at * tile_size(tile), p & 15, k % kt);
}

/* ---- a tile in registers ------------------------------------------------------------------ */

DEV uint32_t word_of(const uint4 &v, int i)
{
	return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
/* A lane's part of a tile of APR_TILE_Q6_K */
struct TileQ6K {
	uint4 q[4], f[2], s0, s1; /* low four bits, high two; scales of rows g and g + 8 */
	uint32_t d;               /* both rows' */

	__device__ __forceinline__ void load(uint32_t sp, uint32_t lane)
	{
#pragma unroll
		for (int j = 0; j < 4; j++)
			q[j] = lds128(sp + j * 512 + lane * 16);
		f[0] = lds128(sp + 2048 + lane * 16);
		f[1] = lds128(sp + 2560 + lane * 16);
		s0 = lds128(sp + 3072 + (lane >> 2) * 16);
		s1 = lds128(sp + 3072 + (lane >> 2) * 16 + 128);
		d = lds32(sp + 3328 + (lane >> 2) * 4);
	}
};

#endif
