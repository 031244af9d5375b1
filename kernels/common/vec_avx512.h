/* SPDX-License-Identifier: MIT */
/* kernels/common/vec.h on AVX-512 (F, BW, VL, DQ). Included by vec.h alone. */
#ifndef APR_KERNELS_COMMON_VEC_AVX512_H
#define APR_KERNELS_COMMON_VEC_AVX512_H

#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

VEC vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
VEC void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
VEC vf vf_set1(float x) { return _mm512_set1_ps(x); }
VEC vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
VEC vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
VEC vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
VEC vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
VEC vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
VEC vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
VEC vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
VEC vf vf_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
VEC vf vf_of_bits(vi a) { return _mm512_castsi512_ps(a); }
VEC vf vf_of_int(vi a) { return _mm512_cvtepi32_ps(a); }
VEC vf vf_of_uint(vi a) { return _mm512_cvtepu32_ps(a); }
VEC vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
VEC vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
VEC void vi_store(int32_t *p, vi v) { _mm512_storeu_si512(p, v); }
VEC vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
VEC vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
VEC vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
VEC vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
VEC vi vi_sra1(vi a) { return _mm512_srai_epi32(a, 1); }
VEC vi vi_sra23(vi a) { return _mm512_srai_epi32(a, 23); }
VEC vi vi_sll23(vi a) { return _mm512_slli_epi32(a, 23); }
VEC vi vi_of_bits(vf a) { return _mm512_castps_si512(a); }
VEC vi vi_trunc(vf a) { return _mm512_cvttps_epi32(a); }
VEC vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
VEC vm vf_le(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
VEC vm vf_unordered(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
VEC vm vi_gt(vi a, vi b) { return _mm512_cmpgt_epi32_mask(a, b); }
VEC vm vm_or(vm a, vm b) { return (vm)(a | b); }
VEC vm vm_and(vm a, vm b) { return (vm)(a & b); }
VEC uint32_t vm_bits(vm m) { return m; }

VEC vf vf_load_half(const uint16_t *p)
{
	return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
VEC void vf_store_half(uint16_t *p, vf v)
{
	_mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
VEC vf vf_load_bfloat(const uint16_t *p)
{
	__m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));

	return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
VEC void vf_store_bfloat(uint16_t *p, vf v)
{
	__m512i u = _mm512_castps_si512(v), even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
	__m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even);
	__m512i nan = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));

	r = _mm512_mask_mov_epi32(r, vf_unordered(v), nan);
	_mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
VEC float vf_sum(vf v)
{
	__m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
	__m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

	b = _mm_add_ps(b, _mm_movehl_ps(b, b));
	return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
VEC float vf_hmax(vf v)
{
	__m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
	__m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

	b = _mm_max_ps(b, _mm_movehl_ps(b, b));
	return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
VEC void vf_load_pairs(const float *p, vf *a, vf *b)
{
	__m512 lo = _mm512_loadu_ps(p), hi = _mm512_loadu_ps(p + 16);
	__m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);

	*a = _mm512_permutex2var_ps(lo, even, hi);
	*b = _mm512_permutex2var_ps(lo, _mm512_add_epi32(even, _mm512_set1_epi32(1)), hi);
}
VEC void vf_store_pairs(float *p, vf a, vf b)
{
	__m512i lo = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);

	_mm512_storeu_ps(p, _mm512_permutex2var_ps(a, lo, b));
	_mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(a, _mm512_add_epi32(lo, _mm512_set1_epi32(8)), b));
}
VEC void vf_transpose(vf r[VL])
{
	__m512 t[VL];
	uint32_t i;

	APR_UNROLL
	for (i = 0; i < 16; i += 4) { /* 4 × 4 within each 128-bit lane */
		__m512 a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
		__m512 c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);

		t[i] = _mm512_shuffle_ps(a, c, 0x44);
		t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
		t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
		t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
	}
	APR_UNROLL
	for (i = 0; i < 4; i++) { /* then the 4 × 4 of lanes */
		__m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
		__m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);

		r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
		r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
		r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
		r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
	}
}
VEC void vh_turn16(const uint16_t *src, size_t ld, uint16_t *dst, size_t ldd)
{
	__m256i r[VL], t[VL];
	uint32_t i, round;

	APR_UNROLL
	for (i = 0; i < VL; i++)
		r[i] = _mm256_loadu_si256((const __m256i *)(src + i * ld));
	APR_UNROLL
	for (round = 0; round < 4; round++) {
		APR_UNROLL
		for (i = 0; i < 8; i++) {
			t[2 * i] = _mm256_unpacklo_epi16(r[i], r[i + 8]);
			t[2 * i + 1] = _mm256_unpackhi_epi16(r[i], r[i + 8]);
		}
		APR_UNROLL
		for (i = 0; i < VL; i++)
			r[i] = t[i];
	}
	APR_UNROLL
	for (i = 0; i < 8; i++) {
		_mm256_storeu_si256((__m256i *)(dst + i * ldd), _mm256_permute2x128_si256(r[2 * i], r[2 * i + 1], 0x20));
		_mm256_storeu_si256((__m256i *)(dst + (i + 8) * ldd), _mm256_permute2x128_si256(r[2 * i], r[2 * i + 1], 0x31));
	}
}
/* Sixteen rows of at least 16 columns of 16 bits, ld apart, to columns of 16, ldd apart; returns the columns done.
 * One interleaving of rows i and i + 8 turns the bits of (row, column) left by one; four of them, and a register
 * holds eight rows of one column a 128-bit lane. */
VEC uint32_t vh_turn(const uint16_t *src, size_t ld, uint32_t left, uint16_t *dst, size_t ldd)
{
	const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
	__m512i r[VL], t[VL];
	uint32_t i, round;

	if (left < 32) {
		vh_turn16(src, ld, dst, ldd);
		return 16;
	}
	APR_UNROLL
	for (i = 0; i < VL; i++)
		r[i] = _mm512_loadu_si512(src + i * ld);
	APR_UNROLL
	for (round = 0; round < 4; round++) {
		APR_UNROLL
		for (i = 0; i < 8; i++) {
			t[2 * i] = _mm512_unpacklo_epi16(r[i], r[i + 8]);
			t[2 * i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 8]);
		}
		APR_UNROLL
		for (i = 0; i < VL; i++)
			r[i] = t[i];
	}
	APR_UNROLL
	for (i = 0; i < 8; i++) { /* lanes hold columns i, i + 8, i + 16, i + 24 */
		__m512i a = _mm512_permutex2var_epi64(r[2 * i], low, r[2 * i + 1]);
		__m512i b = _mm512_permutex2var_epi64(r[2 * i], high, r[2 * i + 1]);

		_mm256_storeu_si256((__m256i *)(dst + i * ldd), _mm512_castsi512_si256(a));
		_mm256_storeu_si256((__m256i *)(dst + (i + 8) * ldd), _mm512_extracti64x4_epi64(a, 1));
		_mm256_storeu_si256((__m256i *)(dst + (i + 16) * ldd), _mm512_castsi512_si256(b));
		_mm256_storeu_si256((__m256i *)(dst + (i + 24) * ldd), _mm512_extracti64x4_epi64(b, 1));
	}
	return 32;
}
VEC void vu_mul_wide(vi a, uint32_t m, vi *hi, vi *lo)
{
	__m512i k = _mm512_set1_epi32((int32_t)m);
	__m512i even = _mm512_mul_epu32(a, k), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), k);

	*hi = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
	*lo = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
}

#endif
