/* SPDX-License-Identifier: MIT */
/*
 * The AVX-512 kernels, compiled twice: kern_avx512.c (vpmaddwd) and kern_vnni.c
 * (vpdpwssd on int16, vpdpbusd on two byte planes). Integer sums are exact, so both
 * give the same bits.
 *
 * Owns: quantising, GEMM and GEMV loops in 512-bit registers. Does not own panel
 * unpacking (unpack.h).
 */
#ifndef APR_KERNELS_CPU_KERN512_H
#define APR_KERNELS_CPU_KERN512_H

#include <immintrin.h>
#include <stdbool.h>

#define APR_V 64
#include "kernels/cpu/unpack.h"

APR_INLINE void apr_halves(const uint8_t *src, apr_f32v *out)
{
	*out = (apr_f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)src));
}

APR_INLINE void apr_widen_u8(const uint8_t *src, apr_i32v *out)
{
	*out = (apr_i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)src));
}

APR_INLINE void apr_widen_i8(const uint8_t *src, apr_i32v *out)
{
	*out = (apr_i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)src));
}

APR_INLINE int load32(const void *p)
{
	int v;

	memcpy(&v, p, sizeof v);
	return v;
}

/* acc + the dot of int16 pairs */
APR_INLINE __m512i dot16(__m512i acc, __m512i a, __m512i b)
{
#ifdef __AVX512VNNI__
	return _mm512_dpwssd_epi32(acc, a, b);
#else
	return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
}

/* ---- activations ---- */

struct quant_row { /* one block of one row */
	__m512i q;  /* int16 in the pairs' order */
	float s;
	int sum[2];
};

APR_INLINE void quantise32(const float *x, struct quant_row *o)
{
	const __m512i abs = _mm512_set1_epi32(0x7fffffff);
	const __m512i order = _mm512_set_epi64(0x0f0e0b0a0d0c0908, 0x0706030205040100, 0x0f0e0b0a0d0c0908, 0x0706030205040100,
					       0x0f0e0b0a0d0c0908, 0x0706030205040100, 0x0f0e0b0a0d0c0908, 0x0706030205040100);
	const __m512 magic = _mm512_set1_ps(0x1.8p23f);
	__m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
	/* as integers: NaN and infinity compare above every finite magnitude */
	__m512i m = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), abs),
				     _mm512_and_si512(_mm512_castps_si512(b), abs));
	int bits = _mm512_reduce_max_epi32(m);
	float amax = apr_bits_float((uint32_t)bits), inv = 0;
	__m512i ia, ib;

	o->s = 0;
	if (bits >= 0x7f800000) { /* inv 0 is not enough: 0 · NaN */
		o->s = apr_bits_float(0x7fc00000);
		o->q = _mm512_setzero_si512();
		o->sum[0] = o->sum[1] = 0;
		return;
	}
	if (amax >= APR_ACT_TINY) {
		o->s = amax / (float)APR_ACT_MAX;
		inv = (float)APR_ACT_MAX / amax;
	}
	a = _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(a, _mm512_set1_ps(inv)), magic), magic);
	b = _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(b, _mm512_set1_ps(inv)), magic), magic);
	ia = _mm512_cvttps_epi32(a);
	ib = _mm512_cvttps_epi32(b);
	o->sum[0] = _mm512_reduce_add_epi32(ia);
	o->sum[1] = _mm512_reduce_add_epi32(ib);
	m = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(ia)), _mm512_cvtepi32_epi16(ib), 1);
	o->q = _mm512_shuffle_epi8(m, order);
}

APR_INLINE void put_factors(const struct apr_act_view *v, size_t at, const struct quant_row *o)
{
	v->s[at] = o->s;
	v->xs[at] = o->s * (float)(o->sum[0] + o->sum[1]);
	v->xh[0][at] = o->s * (float)o->sum[0];
	v->xh[1][at] = o->s * (float)o->sum[1];
}

/* 8 rows of 16 pairs to 16 × 8 */
APR_INLINE void store_group8(int16_t *dst, const struct quant_row o[8])
{
	__m512i t[8], u[8];

	for (int i = 0; i < 8; i += 2) {
		t[i] = _mm512_unpacklo_epi32(o[i].q, o[i + 1].q);
		t[i + 1] = _mm512_unpackhi_epi32(o[i].q, o[i + 1].q);
	}
	for (int h = 0; h < 8; h += 4) { /* u[h + j], lane l: pair 4 l + j of rows h … h + 3 */
		u[h] = _mm512_unpacklo_epi64(t[h], t[h + 2]);
		u[h + 1] = _mm512_unpackhi_epi64(t[h], t[h + 2]);
		u[h + 2] = _mm512_unpacklo_epi64(t[h + 1], t[h + 3]);
		u[h + 3] = _mm512_unpackhi_epi64(t[h + 1], t[h + 3]);
	}
	for (int j = 0; j < 4; j++) {
		for (int h = 0; h < 2; h++) {
			__m128i *p = (__m128i *)(dst + j * 16 + h * 8);

			_mm_storeu_si128(p, _mm512_castsi512_si128(u[h * 4 + j]));
			_mm_storeu_si128(p + 8, _mm512_extracti32x4_epi32(u[h * 4 + j], 1));
			_mm_storeu_si128(p + 16, _mm512_extracti32x4_epi32(u[h * 4 + j], 2));
			_mm_storeu_si128(p + 24, _mm512_extracti32x4_epi32(u[h * 4 + j], 3));
		}
	}
}

/* fewer than 8 rows */
APR_INLINE void store_few(int16_t *dst, uint32_t width, const struct quant_row *o, uint32_t n)
{
	_Alignas(64) int16_t q[32];

	if (width == 1) {
		_mm512_storeu_si512(dst, o->q);
		return;
	}
	for (uint32_t r = 0; r < n; r++) {
		_mm512_store_si512((__m512i *)q, o[r].q);
		for (unsigned i = 0; i < 16; i++)
			memcpy(dst + (size_t)(i * width + r) * 2, q + 2 * i, 4);
	}
}

APR_INLINE void store_planes(const struct apr_act_view *v, uint32_t row, uint32_t b, const struct quant_row *o)
{
	const __m512i order = _mm512_set_epi64(0x0f0e0b0a0d0c0908, 0x0706030205040100, 0x0f0e0b0a0d0c0908, 0x0706030205040100,
					       0x0f0e0b0a0d0c0908, 0x0706030205040100, 0x0f0e0b0a0d0c0908, 0x0706030205040100);
	__m512i n = _mm512_shuffle_epi8(o->q, order); /* the order is its own inverse */
	__m256i lo = _mm512_cvtepi16_epi8(n), hi;

	hi = _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_sub_epi16(n, _mm512_cvtepi8_epi16(lo)), 8));
	_mm256_storeu_si256((__m256i *)(v->lo + (size_t)row * v->n_in + b * 32), lo);
	_mm256_storeu_si256((__m256i *)(v->hi + (size_t)row * v->n_in + b * 32), hi);
	v->sum[0][(size_t)row * v->blocks + b] = o->sum[0];
	v->sum[1][(size_t)row * v->blocks + b] = o->sum[1];
}

#define ROW_BLOCKS 16u /* of a single row, done together: one division for all */

/* magnitudes' bits of n <= ROW_BLOCKS blocks; false where one of them has a NaN or infinity */
APR_INLINE bool largest(const float *x, uint32_t n, int32_t *bits)
{
	const __m512i abs = _mm512_set1_epi32(0x7fffffff);
	int32_t most = 0;

	for (uint32_t b = 0; b < n; b++, x += 32) {
		__m512i p = _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x)), abs);
		__m512i q = _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x + 16)), abs);

		bits[b] = _mm512_reduce_max_epi32(_mm512_max_epi32(p, q));
		most = bits[b] > most ? bits[b] : most;
	}
	return most < 0x7f800000;
}

/* A single row's blocks b0 … b0 + n - 1, by the same arithmetic as quantise32; false and nothing done where that must
 * do it. */
APR_INLINE bool quantise_run(const struct apr_act_view *v, const float *x, uint32_t b0, uint32_t n)
{
	const __m512i order = _mm512_set_epi64(0x0f0e0b0a0d0c0908, 0x0706030205040100, 0x0f0e0b0a0d0c0908, 0x0706030205040100,
					       0x0f0e0b0a0d0c0908, 0x0706030205040100, 0x0f0e0b0a0d0c0908, 0x0706030205040100);
	const __m512 magic = _mm512_set1_ps(0x1.8p23f), top = _mm512_set1_ps((float)APR_ACT_MAX);
	const __mmask16 some = (__mmask16)((1u << n) - 1);
	_Alignas(64) int32_t bits[ROW_BLOCKS] = {0};
	_Alignas(64) float inv[ROW_BLOCKS];
	__m512 amax, s;
	__m512i sum0, sum1;
	__mmask16 live;

	if (!largest(x, n, bits))
		return false;
	amax = _mm512_castsi512_ps(_mm512_load_si512(bits));
	live = _mm512_cmp_ps_mask(amax, _mm512_set1_ps(APR_ACT_TINY), _CMP_GE_OQ);
	s = _mm512_maskz_div_ps(live, amax, top);
	_mm512_store_ps(inv, _mm512_maskz_div_ps(live, top, amax));
	for (uint32_t b = 0; b < n; b++, x += 32) {
		__m512 i = _mm512_set1_ps(inv[b]);
		__m512 lower = _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x), i), magic), magic);
		__m512 upper = _mm512_sub_ps(_mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16), i), magic), magic);
		__m512i q = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_cvttps_epi32(lower))), sums;
		__m256i lo;

		q = _mm512_inserti64x4(q, _mm512_cvtepi32_epi16(_mm512_cvttps_epi32(upper)), 1);
		_mm512_storeu_si512(v->q + (size_t)(b0 + b) * 32, _mm512_shuffle_epi8(q, order));
		lo = _mm512_cvtepi16_epi8(q);
		_mm256_storeu_si256((__m256i *)(v->lo + (b0 + b) * 32), lo);
		_mm256_storeu_si256((__m256i *)(v->hi + (b0 + b) * 32),
				    _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_sub_epi16(q, _mm512_cvtepi8_epi16(lo)), 8)));
		sums = _mm512_madd_epi16(q, _mm512_set1_epi16(1)); /* 8 sums of two of either half */
		sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
		sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
		sums = _mm512_add_epi32(sums, _mm512_shuffle_i64x2(sums, sums, 0xb1));
		v->sum[0][b0 + b] = _mm_cvtsi128_si32(_mm512_castsi512_si128(sums));
		v->sum[1][b0 + b] = _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(sums, 2));
	}
	sum0 = _mm512_maskz_loadu_epi32(some, v->sum[0] + b0);
	sum1 = _mm512_maskz_loadu_epi32(some, v->sum[1] + b0);
	_mm512_mask_storeu_ps(v->s + b0, some, s);
	_mm512_mask_storeu_ps(v->xs + b0, some, _mm512_mul_ps(s, _mm512_cvtepi32_ps(_mm512_add_epi32(sum0, sum1))));
	_mm512_mask_storeu_ps(v->xh[0] + b0, some, _mm512_mul_ps(s, _mm512_cvtepi32_ps(sum0)));
	_mm512_mask_storeu_ps(v->xh[1] + b0, some, _mm512_mul_ps(s, _mm512_cvtepi32_ps(sum1)));
	return true;
}

static void quantise_blocks(const struct apr_act_view *v, const float *x, size_t ldx, uint32_t first, uint32_t n,
			    uint32_t b0, uint32_t end)
{
	size_t group = first / v->width;

	for (uint32_t b = b0; b < end; b++) {
		size_t block = group * v->blocks + b;
		int16_t *dst = v->q + block * 16 * 2 * v->width;
		struct quant_row o[8];

		for (uint32_t i = 0; i < n; i++) {
			quantise32(x + (first + i) * ldx + b * 32, &o[i]);
			put_factors(v, block * v->width + i, &o[i]);
			if (v->rows <= APR_SMALL_ROWS)
				store_planes(v, first + i, b, &o[i]);
		}
		for (uint32_t i = n; i < v->width; i++) { /* rows that fill up the last group */
			o[i] = (struct quant_row){.q = _mm512_setzero_si512()};
			put_factors(v, block * v->width + i, &o[i]);
		}
		if (v->width == APR_GROUP)
			store_group8(dst, o);
		else
			store_few(dst, v->width, o, n);
	}
}

static void quantise(const struct apr_act_view *v, const float *x, size_t ldx, uint32_t first, uint32_t n)
{
	uint32_t nb;

	if (v->rows > 1) {
		quantise_blocks(v, x, ldx, first, n, 0, v->blocks);
		return;
	}
	for (uint32_t b = 0; b < v->blocks; b += nb) {
		nb = v->blocks - b < ROW_BLOCKS ? v->blocks - b : ROW_BLOCKS;
		if (!quantise_run(v, x + (size_t)b * 32, b, nb))
			quantise_blocks(v, x, ldx, 0, 1, b, b + nb);
	}
}

/* ---- many rows ---- */

#define UNPACK_TILE(T, ...) apr_unpack_tile(T, __VA_ARGS__)
static void unpack(uint32_t type, const uint8_t *panel, uint32_t b0, uint32_t n, struct apr_tile *t)
{
	APR_EACH_TYPE(type, UNPACK_TILE, panel, b0, n, t);
}

APR_INLINE void gemm_rows(const enum apr_chain chain, const int R, const struct apr_tile *t, uint32_t n,
			  const struct apr_act_view *v, uint32_t group, uint32_t b0, float (*out)[16])
{
	const size_t width = APR_GROUP; /* GEMM has more than APR_SMALL_ROWS rows */
	const size_t block = (size_t)group * v->blocks + b0;
	const int16_t *x = v->q + block * width * 32;
	const float *s = v->s + block * width, *xs = v->xs + block * width;
	const float *xh0 = v->xh[0] + block * width, *xh1 = v->xh[1] + block * width;
	__m512 acc[8];

	for (int r = 0; r < R; r++)
		acc[r] = _mm512_load_ps(out[r]);
	for (uint32_t b = 0; b < n; b++) {
		__m512 p = _mm512_load_ps(t->p[b]);

		for (int h = 0; h < (chain == APR_CHAIN_HALVES ? 2 : 1); h++) {
			const int pairs = chain == APR_CHAIN_HALVES ? 8 : 16;
			__m512i d[8];

			for (int r = 0; r < R; r++)
				d[r] = _mm512_setzero_si512();
			APR_UNROLL(16)
			for (int i = 0; i < pairs; i++) {
				__m512i w = _mm512_load_si512(t->w[b][h * 8 + i]);

				APR_UNROLL(8)
				for (int r = 0; r < R; r++)
					d[r] = dot16(d[r], w, _mm512_set1_epi32(load32(x + r * 2)));
				x += width * 2;
			}
			APR_UNROLL(8)
			for (int r = 0; r < R; r++)
				acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(p, _mm512_set1_ps(s[r])), _mm512_cvtepi32_ps(d[r]), acc[r]);
		}
		if (chain == APR_CHAIN_MIN) {
			__m512 m = _mm512_load_ps(t->m[b][0]);

			APR_UNROLL(8)
			for (int r = 0; r < R; r++)
				acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(xs[r]), acc[r]);
		}
		if (chain == APR_CHAIN_MIN2) {
			__m512 m0 = _mm512_load_ps(t->m[b][0]), m1 = _mm512_load_ps(t->m[b][1]);

			APR_UNROLL(8)
			for (int r = 0; r < R; r++) {
				acc[r] = _mm512_fmadd_ps(m0, _mm512_set1_ps(xh0[r]), acc[r]);
				acc[r] = _mm512_fmadd_ps(m1, _mm512_set1_ps(xh1[r]), acc[r]);
			}
		}
		s += width;
		xs += width;
		xh0 += width;
		xh1 += width;
	}
	for (int r = 0; r < R; r++)
		_mm512_store_ps(out[r], acc[r]);
}

/* A last group that is not full is computed with the zero rows that fill it up. */
#define GEMM_CHAIN(chain) \
	case chain: \
		if (n_rows > 4) \
			gemm_rows(chain, 8, t, n, v, group, b0, acc); \
		else \
			gemm_rows(chain, 4, t, n, v, group, b0, acc); \
		break;

static void gemm(enum apr_chain chain, const struct apr_tile *t, uint32_t n, const struct apr_act_view *v,
		 uint32_t group, uint32_t b0, uint32_t n_rows, float (*acc)[16])
{
#ifdef APR_ONE_BODY
	gemm_rows(chain, n_rows > 4 ? 8 : 4, t, n, v, group, b0, acc);
	return;
#endif
	switch (chain) {
	GEMM_CHAIN(APR_CHAIN_PLAIN)
	GEMM_CHAIN(APR_CHAIN_MIN)
	GEMM_CHAIN(APR_CHAIN_HALVES)
	GEMM_CHAIN(APR_CHAIN_MIN2)
	}
}

/* ---- few rows: weights stream from memory and are unpacked in registers ---- */

/* dot over quads t0 … t1 - 1 of block b with row r, plus start */
APR_INLINE __m512i dot_quads(const apr_u8v q[8], int t0, int t1, const struct apr_act_view *v, uint32_t r, uint32_t b,
			     int start)
{
#ifdef __AVX512VNNI__
	const int8_t *lo = v->lo + (size_t)r * v->n_in + b * 32, *hi = v->hi + (size_t)r * v->n_in + b * 32;
	__m512i l = _mm512_set1_epi32(start), h = _mm512_setzero_si512();

	APR_UNROLL(8)
	for (int t = t0; t < t1; t++) {
		l = _mm512_dpbusd_epi32(l, (__m512i)q[t], _mm512_set1_epi32(load32(lo + 4 * t)));
		h = _mm512_dpbusd_epi32(h, (__m512i)q[t], _mm512_set1_epi32(load32(hi + 4 * t)));
	}
	return _mm512_add_epi32(l, _mm512_slli_epi32(h, 8));
#else
	const int16_t *x = v->q + ((size_t)b * 16 * v->width + r) * 2;
	__m512i d = _mm512_set1_epi32(start);

	APR_UNROLL(8)
	for (int t = t0; t < t1; t++) {
		__m512i even = _mm512_and_si512((__m512i)q[t], _mm512_set1_epi16(255));

		d = dot16(d, even, _mm512_set1_epi32(load32(x + (size_t)(2 * t) * v->width * 2)));
		d = dot16(d, _mm512_srli_epi16((__m512i)q[t], 8), _mm512_set1_epi32(load32(x + (size_t)(2 * t + 1) * v->width * 2)));
	}
	return d;
#endif
}

#define GEMV_ROWS 4u /* done together; for more the panel is read again, from L1 */

APR_INLINE void gemv_rows(const uint32_t type, const uint32_t R, const uint8_t *panel, const struct apr_act_view *v,
			  uint32_t r0, float (*out)[16])
{
	const struct apr_quant_traits tr = apr_quant_traits(type);
	const struct apr_panel_layout l = apr_panel_layout(type);
	const unsigned per_unit = apr_type_info(type).block / 32u;
	const size_t unit_bytes = apr_panel_unit_bytes(type);
	const enum apr_chain chain = apr_chain_of(type);
	__m512 acc[GEMV_ROWS];

	for (uint32_t r = 0; r < R; r++)
		acc[r] = _mm512_setzero_ps();
	for (uint32_t b = 0; b < v->blocks; panel += unit_bytes) {
		struct apr_unit_scales s;

		apr_unpack_scales(type, panel, &s);
		for (unsigned i = 0; i < per_unit; i++, b++) {
			apr_u8v q[8];
			apr_f32v p, m[2] = {{0}};

			apr_prefetch_block(type, panel, i);
			apr_unpack_codes(type, panel + l.body + i * l.stride, 0, q);
			apr_block_factors(type, &s, i, 0, &p, m);
			APR_UNROLL(4)
			for (uint32_t r = 0; r < R; r++) {
				size_t at = (size_t)b * v->width + r0 + r, sum_at = (size_t)(r0 + r) * v->blocks + b;
				int s0 = v->sum[0][sum_at] * -tr.offset, s1 = v->sum[1][sum_at] * -tr.offset;
				__m512 f = _mm512_mul_ps((__m512)p, _mm512_set1_ps(v->s[at]));

				if (tr.sub == 32) {
					__m512i d = dot_quads(q, 0, 8, v, r0 + r, b, s0 + s1);

					acc[r] = _mm512_fmadd_ps(f, _mm512_cvtepi32_ps(d), acc[r]);
				} else {
					apr_i32v c0, c1;
					__m512i d0 = dot_quads(q, 0, 4, v, r0 + r, b, s0), d1 = dot_quads(q, 4, 8, v, r0 + r, b, s1);

					apr_sub_scale(type, &s, 2 * i, 0, &c0);
					apr_sub_scale(type, &s, 2 * i + 1, 0, &c1);
					d0 = _mm512_mullo_epi32(d0, (__m512i)c0);
					d1 = _mm512_mullo_epi32(d1, (__m512i)c1);
					if (chain == APR_CHAIN_HALVES) {
						acc[r] = _mm512_fmadd_ps(f, _mm512_cvtepi32_ps(d0), acc[r]);
						acc[r] = _mm512_fmadd_ps(f, _mm512_cvtepi32_ps(d1), acc[r]);
					} else {
						acc[r] = _mm512_fmadd_ps(f, _mm512_cvtepi32_ps(_mm512_add_epi32(d0, d1)), acc[r]);
					}
				}
				if (chain == APR_CHAIN_MIN)
					acc[r] = _mm512_fmadd_ps((__m512)m[0], _mm512_set1_ps(v->xs[at]), acc[r]);
				if (chain == APR_CHAIN_MIN2) {
					acc[r] = _mm512_fmadd_ps((__m512)m[0], _mm512_set1_ps(v->xh[0][at]), acc[r]);
					acc[r] = _mm512_fmadd_ps((__m512)m[1], _mm512_set1_ps(v->xh[1][at]), acc[r]);
				}
			}
		}
	}
	for (uint32_t r = 0; r < R; r++)
		_mm512_store_ps(out[r], acc[r]);
}

#define GEMV_TYPE(T, ...) \
	do { \
		switch (n) { \
		case 1: gemv_rows(T, 1, __VA_ARGS__); break; \
		case 2: gemv_rows(T, 2, __VA_ARGS__); break; \
		default: gemv_rows(T, GEMV_ROWS, __VA_ARGS__); break; \
		} \
	} while (0)

static void gemv(uint32_t type, const uint8_t *panel, const struct apr_act_view *v, float (*acc)[16])
{
	uint32_t n;

	for (uint32_t r0 = 0; r0 < v->rows; r0 += n) {
		uint32_t left = v->rows - r0;

		n = left >= GEMV_ROWS ? GEMV_ROWS : left >= 2 ? 2 : 1;
		APR_EACH_TYPE(type, GEMV_TYPE, panel, v, r0, acc + r0);
	}
}

/* ---- floats ---- */

#define UNPACK_FLOATS(T, ...) apr_unpack_floats(T, __VA_ARGS__)
static void unpack_f32(uint32_t type, const uint8_t *panel, uint32_t k0, uint32_t n, float (*tile)[16])
{
	const uint8_t *p = panel + (size_t)k0 * apr_panel_unit_bytes(type);

	switch (type) {
	case APR_TYPE_F32: memcpy(tile, p, (size_t)n * 64); return;
	case APR_TYPE_F16:
		for (uint32_t k = 0; k < n; k++)
			_mm512_store_ps(tile[k], _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + k * 32))));
		return;
	case APR_TYPE_BF16:
		for (uint32_t k = 0; k < n; k++) {
			__m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p + k * 32)));

			_mm512_store_si512((__m512i *)tile[k], _mm512_slli_epi32(w, 16));
		}
		return;
	default: break;
	}
	APR_EACH_TYPE(type, UNPACK_FLOATS, panel, k0, n, tile);
}

APR_INLINE void fma_rows(const int R, const float (*tile)[16], uint32_t n, const float *const *x, float (*out)[16])
{
	__m512 acc[8];

	for (int r = 0; r < R; r++)
		acc[r] = _mm512_load_ps(out[r]);
	for (uint32_t k = 0; k < n; k++) {
		__m512 w = _mm512_load_ps(tile[k]);

		APR_UNROLL(8)
		for (int r = 0; r < R; r++)
			acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(x[r][k]), w, acc[r]);
	}
	for (int r = 0; r < R; r++)
		_mm512_store_ps(out[r], acc[r]);
}

static void fma_f32(const float (*tile)[16], uint32_t n, const float *const *x, uint32_t n_rows, float (*acc)[16])
{
	uint32_t r = 0;

	if (n_rows == 8) {
		fma_rows(8, tile, n, x, acc);
		return;
	}
	if (n_rows >= 4) {
		fma_rows(4, tile, n, x, acc);
		r = 4;
	}
	for (; r < n_rows; r++)
		fma_rows(1, tile, n, x + r, acc + r);
}

static void fma4_f32(const float (*const tile[4])[16], uint32_t n, const float *x, float (*out)[16])
{
	__m512 acc[4];

	for (int p = 0; p < 4; p++)
		acc[p] = _mm512_load_ps(out[p]);
	for (uint32_t k = 0; k < n; k++) {
		__m512 a = _mm512_set1_ps(x[k]);

		APR_UNROLL(4)
		for (int p = 0; p < 4; p++)
			acc[p] = _mm512_fmadd_ps(a, _mm512_load_ps(tile[p][k]), acc[p]);
	}
	for (int p = 0; p < 4; p++)
		_mm512_store_ps(out[p], acc[p]);
}

#endif
