/* SPDX-License-Identifier: MIT */
/*
 * Kernels for AVX2 with FMA and F16C.
 *
 * Owns: the GEMM loops in 256-bit registers; a GEMV is the same loops over a tile of
 * one unit that stays in L1. Does not own unpacking (unpack.h) nor quantising.
 */
#include <immintrin.h>

#define APR_V 32
#include "kernels/cpu/quantise.h"

#define GEMV_BLOCKS 8u /* one unit of the 256-element types */

APR_INLINE void apr_halves(const uint8_t *src, apr_f32v *out)
{
	*out = (apr_f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)src));
}

APR_INLINE void apr_widen_u8(const uint8_t *src, apr_i32v *out)
{
	*out = (apr_i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)src));
}

APR_INLINE void apr_widen_i8(const uint8_t *src, apr_i32v *out)
{
	*out = (apr_i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)src));
}

APR_INLINE int sum8(__m256i v)
{
	__m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

	s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
	s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
	return _mm_cvtsi128_si32(s);
}

APR_INLINE int max8(__m256i v)
{
	__m128i s = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

	s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
	s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1));
	return _mm_cvtsi128_si32(s);
}

APR_INLINE int apr_abs_max32(const float *x)
{
	__m256i m = _mm256_setzero_si256();

	for (int i = 0; i < 32; i += 8)
		m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i)), _mm256_set1_epi32(0x7fffffff)));
	return max8(m);
}

APR_INLINE void apr_round32(const float *x, float inv, int16_t q[32], int32_t sum[2])
{
	const __m256 magic = _mm256_set1_ps(0x1.8p23f); /* added and taken off: rounds to nearest even */
	const __m256i order = _mm256_set_epi64x(0x0f0e0b0a0d0c0908, 0x0706030205040100, 0x0f0e0b0a0d0c0908, 0x0706030205040100);
	__m256i v[4];

	for (int i = 0; i < 4; i++) {
		__m256 f = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inv));

		v[i] = _mm256_cvttps_epi32(_mm256_sub_ps(_mm256_add_ps(f, magic), magic));
	}
	for (int h = 0; h < 2; h++) {
		__m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[2 * h], v[2 * h + 1]), 0xd8);

		_mm256_store_si256((__m256i *)(q + 16 * h), _mm256_shuffle_epi8(w, order));
		sum[h] = sum8(_mm256_add_epi32(v[2 * h], v[2 * h + 1]));
	}
}

#define UNPACK_TILE(T, ...) apr_unpack_tile(T, __VA_ARGS__)
static void unpack(uint32_t type, const uint8_t *panel, uint32_t b0, uint32_t n, struct apr_tile *t)
{
	APR_EACH_TYPE(type, UNPACK_TILE, panel, b0, n, t);
}

APR_INLINE int load32(const void *p)
{
	int v;

	memcpy(&v, p, sizeof v);
	return v;
}

/* acc[0 … 15] += factor[r] · m[0 … 15] */
APR_INLINE void add_scaled(float *acc, const float *m, float factor)
{
	for (int v = 0; v < 16; v += 8)
		_mm256_store_ps(acc + v, _mm256_fmadd_ps(_mm256_load_ps(m + v), _mm256_set1_ps(factor), _mm256_load_ps(acc + v)));
}

/* R rows, at most 4, from row r0 of the group on: their 2 R integer accumulators stay in registers */
APR_INLINE void gemm_rows(const enum apr_chain chain, const int R, const struct apr_tile *t, uint32_t n,
			  const struct apr_act_view *v, uint32_t group, uint32_t b0, uint32_t r0, float (*acc)[16])
{
	for (uint32_t b = 0; b < n; b++) {
		const size_t at = ((size_t)group * v->blocks + b0 + b) * v->width + r0;
		const int16_t *x = v->q + (((size_t)group * v->blocks + b0 + b) * 16 * v->width + r0) * 2;

		for (int h = 0; h < (chain == APR_CHAIN_HALVES ? 2 : 1); h++) {
			const int pairs = chain == APR_CHAIN_HALVES ? 8 : 16;
			__m256i d[4][2];

			for (int r = 0; r < R; r++)
				d[r][0] = d[r][1] = _mm256_setzero_si256();
			for (int i = 0; i < pairs; i++, x += v->width * 2) {
				__m256i w0 = _mm256_load_si256((const __m256i *)t->w[b][h * 8 + i]);
				__m256i w1 = _mm256_load_si256((const __m256i *)t->w[b][h * 8 + i] + 1);

				APR_UNROLL(4)
				for (int r = 0; r < R; r++) {
					__m256i a = _mm256_set1_epi32(load32(x + r * 2));

					d[r][0] = _mm256_add_epi32(d[r][0], _mm256_madd_epi16(w0, a));
					d[r][1] = _mm256_add_epi32(d[r][1], _mm256_madd_epi16(w1, a));
				}
			}
			APR_UNROLL(4)
			for (int r = 0; r < R; r++) {
				for (int c = 0; c < 2; c++) {
					__m256 p = _mm256_mul_ps(_mm256_load_ps(t->p[b] + 8 * c), _mm256_set1_ps(v->s[at + r]));

					_mm256_store_ps(acc[r] + 8 * c, _mm256_fmadd_ps(p, _mm256_cvtepi32_ps(d[r][c]),
											_mm256_load_ps(acc[r] + 8 * c)));
				}
			}
		}
		for (int r = 0; r < R; r++) {
			if (chain == APR_CHAIN_MIN)
				add_scaled(acc[r], t->m[b][0], v->xs[at + r]);
			if (chain == APR_CHAIN_MIN2) {
				add_scaled(acc[r], t->m[b][0], v->xh[0][at + r]);
				add_scaled(acc[r], t->m[b][1], v->xh[1][at + r]);
			}
		}
	}
}

#define GEMM_CHAIN(chain) \
	case chain: \
		switch (n_rows - r) { \
		case 1: gemm_rows(chain, 1, t, n, v, group, b0, r, acc + r); break; \
		case 2: gemm_rows(chain, 2, t, n, v, group, b0, r, acc + r); break; \
		case 3: gemm_rows(chain, 3, t, n, v, group, b0, r, acc + r); break; \
		default: gemm_rows(chain, 4, t, n, v, group, b0, r, acc + r); break; \
		} \
		break;

static void gemm(enum apr_chain chain, const struct apr_tile *t, uint32_t n, const struct apr_act_view *v,
		 uint32_t group, uint32_t b0, uint32_t n_rows, float (*acc)[16])
{
	for (uint32_t r = 0; r < n_rows; r += 4) {
		switch (chain) {
		GEMM_CHAIN(APR_CHAIN_PLAIN)
		GEMM_CHAIN(APR_CHAIN_MIN)
		GEMM_CHAIN(APR_CHAIN_HALVES)
		GEMM_CHAIN(APR_CHAIN_MIN2)
		}
	}
}

static void gemv(uint32_t type, const uint8_t *panel, const struct apr_act_view *v, float (*acc)[16])
{
	struct apr_tile t;

	memset(acc, 0, v->rows * sizeof acc[0]);
	for (uint32_t b = 0; b < v->blocks; b += GEMV_BLOCKS) {
		uint32_t n = v->blocks - b < GEMV_BLOCKS ? v->blocks - b : GEMV_BLOCKS;

		unpack(type, panel, b, n, &t);
		gemm(apr_chain_of(type), &t, n, v, 0, b, v->rows, acc);
	}
}

#define UNPACK_FLOATS(T, ...) apr_unpack_floats(T, __VA_ARGS__)
static void unpack_f32(uint32_t type, const uint8_t *panel, uint32_t k0, uint32_t n, float (*tile)[16])
{
	const uint8_t *p = panel + (size_t)k0 * apr_panel_unit_bytes(type);

	switch (type) {
	case APR_TYPE_F32: memcpy(tile, p, (size_t)n * 64); return;
	case APR_TYPE_F16:
		for (uint32_t k = 0; k < 2 * n; k++)
			_mm256_store_ps(tile[0] + 8 * k, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + k * 16))));
		return;
	case APR_TYPE_BF16:
		for (uint32_t k = 0; k < 2 * n; k++) {
			__m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + k * 16)));

			_mm256_store_si256((__m256i *)(tile[0] + 8 * k), _mm256_slli_epi32(w, 16));
		}
		return;
	default: break;
	}
	APR_EACH_TYPE(type, UNPACK_FLOATS, panel, k0, n, tile);
}

APR_INLINE void fma_rows(const int R, const float (*tile)[16], uint32_t n, const float *const *x, float (*out)[16])
{
	__m256 acc[4][2];

	for (int r = 0; r < R; r++) {
		acc[r][0] = _mm256_load_ps(out[r]);
		acc[r][1] = _mm256_load_ps(out[r] + 8);
	}
	for (uint32_t k = 0; k < n; k++) {
		__m256 w0 = _mm256_load_ps(tile[k]), w1 = _mm256_load_ps(tile[k] + 8);

		APR_UNROLL(4)
		for (int r = 0; r < R; r++) {
			__m256 a = _mm256_set1_ps(x[r][k]);

			acc[r][0] = _mm256_fmadd_ps(a, w0, acc[r][0]);
			acc[r][1] = _mm256_fmadd_ps(a, w1, acc[r][1]);
		}
	}
	for (int r = 0; r < R; r++) {
		_mm256_store_ps(out[r], acc[r][0]);
		_mm256_store_ps(out[r] + 8, acc[r][1]);
	}
}

static void fma_f32(const float (*tile)[16], uint32_t n, const float *const *x, uint32_t n_rows, float (*acc)[16])
{
	for (uint32_t r = 0; r < n_rows; r += 4) {
		switch (n_rows - r) {
		case 1: fma_rows(1, tile, n, x + r, acc + r); break;
		case 2: fma_rows(2, tile, n, x + r, acc + r); break;
		case 3: fma_rows(3, tile, n, x + r, acc + r); break;
		default: fma_rows(4, tile, n, x + r, acc + r); break;
		}
	}
}

static void fma4_f32(const float (*const tile[4])[16], uint32_t n, const float *x, float (*out)[16])
{
	__m256 acc[8];

	for (int p = 0; p < 8; p++)
		acc[p] = _mm256_load_ps(out[p / 2] + p % 2 * 8);
	for (uint32_t k = 0; k < n; k++) {
		__m256 a = _mm256_set1_ps(x[k]);

		APR_UNROLL(8)
		for (int p = 0; p < 8; p++)
			acc[p] = _mm256_fmadd_ps(a, _mm256_load_ps(tile[p / 2][k] + p % 2 * 8), acc[p]);
	}
	for (int p = 0; p < 8; p++)
		_mm256_store_ps(out[p / 2] + p % 2 * 8, acc[p]);
}

const struct apr_kern apr_kern_avx2 = {apr_quantise_rows, unpack, gemm, gemv, unpack_f32, fma_f32, fma4_f32};
