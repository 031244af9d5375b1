/* SPDX-License-Identifier: MIT */
/* kernels/common/vec.h on AVX2, FMA and F16C: two halves of eight. Included by vec.h alone. */
#ifndef APR_KERNELS_COMMON_VEC_AVX2_H
#define APR_KERNELS_COMMON_VEC_AVX2_H

#include <immintrin.h>

typedef struct {
	__m256 a, b;
} vf;
typedef struct {
	__m256i a, b;
} vi;
typedef vf vm; /* all ones or all zeros a lane */

#define VEC2(type, name, args, ea, eb) \
	VEC type name args \
	{ \
		return (type){ea, eb}; \
	}
#define VEC2_FF(name, op) VEC2(vf, name, (vf x, vf y), op(x.a, y.a), op(x.b, y.b))
#define VEC2_II(name, op) VEC2(vi, name, (vi x, vi y), op(x.a, y.a), op(x.b, y.b))
#define VEC2_CMP(name, how) VEC2(vm, name, (vf x, vf y), _mm256_cmp_ps(x.a, y.a, how), _mm256_cmp_ps(x.b, y.b, how))

VEC2(vf, vf_load, (const float *p), _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8))
VEC2(vf, vf_set1, (float x), _mm256_set1_ps(x), _mm256_set1_ps(x))
VEC2_FF(vf_add, _mm256_add_ps)
VEC2_FF(vf_sub, _mm256_sub_ps)
VEC2_FF(vf_mul, _mm256_mul_ps)
VEC2_FF(vf_div, _mm256_div_ps)
VEC2_FF(vf_max, _mm256_max_ps)
VEC2_FF(vf_min, _mm256_min_ps)
VEC2(vf, vf_fma, (vf x, vf y, vf z), _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b))
VEC2(vf, vf_select, (vm m, vf x, vf y), _mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b))
VEC2(vf, vf_of_bits, (vi x), _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b))
VEC2(vf, vf_of_int, (vi x), _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b))
VEC2(vi, vi_set1, (int32_t x), _mm256_set1_epi32(x), _mm256_set1_epi32(x))
VEC2(vi, vi_load, (const int32_t *p), _mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8)))
VEC2_II(vi_add, _mm256_add_epi32)
VEC2_II(vi_sub, _mm256_sub_epi32)
VEC2_II(vi_and, _mm256_and_si256)
VEC2_II(vi_xor, _mm256_xor_si256)
VEC2(vi, vi_sra1, (vi x), _mm256_srai_epi32(x.a, 1), _mm256_srai_epi32(x.b, 1))
VEC2(vi, vi_sra23, (vi x), _mm256_srai_epi32(x.a, 23), _mm256_srai_epi32(x.b, 23))
VEC2(vi, vi_sll23, (vi x), _mm256_slli_epi32(x.a, 23), _mm256_slli_epi32(x.b, 23))
VEC2(vi, vi_of_bits, (vf x), _mm256_castps_si256(x.a), _mm256_castps_si256(x.b))
VEC2(vi, vi_trunc, (vf x), _mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b))
VEC2_CMP(vf_lt, _CMP_LT_OQ)
VEC2_CMP(vf_le, _CMP_LE_OQ)
VEC2(vm, vf_unordered, (vf x), _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))
VEC2_FF(vm_or, _mm256_or_ps)
VEC2_FF(vm_and, _mm256_and_ps)

VEC vm vi_gt(vi x, vi y)
{
	return (vm){_mm256_castsi256_ps(_mm256_cmpgt_epi32(x.a, y.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(x.b, y.b))};
}
VEC uint32_t vm_bits(vm m)
{
	return (uint32_t)_mm256_movemask_ps(m.a) | (uint32_t)_mm256_movemask_ps(m.b) << 8;
}
VEC void vf_store(float *p, vf v)
{
	_mm256_storeu_ps(p, v.a);
	_mm256_storeu_ps(p + 8, v.b);
}
VEC void vi_store(int32_t *p, vi v)
{
	_mm256_storeu_si256((__m256i *)p, v.a);
	_mm256_storeu_si256((__m256i *)(p + 8), v.b);
}
VEC __m256 vec8_of_uint(__m256i x) /* both parts exact, one rounding: what a true conversion gives */
{
	__m256 hi = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
	__m256 lo = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));

	return _mm256_fmadd_ps(hi, _mm256_set1_ps(65536.0f), lo);
}
VEC2(vf, vf_of_uint, (vi x), vec8_of_uint(x.a), vec8_of_uint(x.b))

VEC vf vf_load_half(const uint16_t *p)
{
	return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
VEC void vf_store_half(uint16_t *p, vf v)
{
	_mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
	_mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
VEC __m256 vec8_load_bfloat(const uint16_t *p)
{
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
VEC vf vf_load_bfloat(const uint16_t *p)
{
	return (vf){vec8_load_bfloat(p), vec8_load_bfloat(p + 8)};
}
VEC __m256i vec8_round_bfloat(__m256 v)
{
	__m256i u = _mm256_castps_si256(v), even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
	__m256i r = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), even);
	__m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));

	r = _mm256_blendv_epi8(r, nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
	return _mm256_srli_epi32(r, 16);
}
VEC void vf_store_bfloat(uint16_t *p, vf v)
{
	__m256i w = _mm256_packus_epi32(vec8_round_bfloat(v.a), vec8_round_bfloat(v.b));

	_mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(w, 0xd8));
}
VEC float vf_sum(vf v)
{
	__m256 a = _mm256_add_ps(v.a, v.b);
	__m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

	b = _mm_add_ps(b, _mm_movehl_ps(b, b));
	return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
VEC float vf_hmax(vf v)
{
	__m256 a = _mm256_max_ps(v.a, v.b);
	__m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));

	b = _mm_max_ps(b, _mm_movehl_ps(b, b));
	return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
VEC void vec8_load_pairs(const float *p, __m256 *a, __m256 *b)
{
	__m256 x = _mm256_loadu_ps(p), y = _mm256_loadu_ps(p + 8);
	__m256 lo = _mm256_permute2f128_ps(x, y, 0x20), hi = _mm256_permute2f128_ps(x, y, 0x31);

	*a = _mm256_shuffle_ps(lo, hi, 0x88);
	*b = _mm256_shuffle_ps(lo, hi, 0xdd);
}
VEC void vf_load_pairs(const float *p, vf *a, vf *b)
{
	vec8_load_pairs(p, &a->a, &b->a);
	vec8_load_pairs(p + 16, &a->b, &b->b);
}
VEC void vec8_store_pairs(float *p, __m256 a, __m256 b)
{
	__m256 lo = _mm256_unpacklo_ps(a, b), hi = _mm256_unpackhi_ps(a, b);

	_mm256_storeu_ps(p, _mm256_permute2f128_ps(lo, hi, 0x20));
	_mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(lo, hi, 0x31));
}
VEC void vf_store_pairs(float *p, vf a, vf b)
{
	vec8_store_pairs(p, a.a, b.a);
	vec8_store_pairs(p + 16, a.b, b.b);
}
VEC void vec8_transpose(__m256 r[8])
{
	__m256 t[8];
	uint32_t i;

	APR_UNROLL
	for (i = 0; i < 8; i += 4) {
		__m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
		__m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);

		t[i] = _mm256_shuffle_ps(a, c, 0x44);
		t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
		t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
		t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
	}
	APR_UNROLL
	for (i = 0; i < 4; i++) {
		r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
		r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
	}
}
VEC void vf_transpose(vf r[VL])
{
	__m256 q[4][8]; /* upper left, upper right, lower left, lower right */
	uint32_t i;

	APR_UNROLL
	for (i = 0; i < 8; i++) {
		q[0][i] = r[i].a;
		q[1][i] = r[i].b;
		q[2][i] = r[i + 8].a;
		q[3][i] = r[i + 8].b;
	}
	vec8_transpose(q[0]);
	vec8_transpose(q[1]);
	vec8_transpose(q[2]);
	vec8_transpose(q[3]);
	APR_UNROLL
	for (i = 0; i < 8; i++) {
		r[i] = (vf){q[0][i], q[2][i]};
		r[i + 8] = (vf){q[1][i], q[3][i]};
	}
}
/* Sixteen rows of at least 16 columns of 16 bits, ld apart, to columns of 16, ldd apart; returns the columns done.
 * One interleaving of rows i and i + 8 turns the bits of (row, column) left by one; four of them, and a register
 * holds eight rows of one column a 128-bit lane. */
VEC uint32_t vh_turn(const uint16_t *src, size_t ld, uint32_t left, uint16_t *dst, size_t ldd)
{
	__m256i r[VL], t[VL];
	uint32_t i, round;

	(void)left;
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
	return 16;
}
VEC void vec8_mul_wide(__m256i a, __m256i k, __m256i *hi, __m256i *lo)
{
	__m256i even = _mm256_mul_epu32(a, k), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), k);

	*hi = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
	*lo = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
VEC void vu_mul_wide(vi x, uint32_t m, vi *hi, vi *lo)
{
	__m256i k = _mm256_set1_epi32((int32_t)m);

	vec8_mul_wide(x.a, k, &hi->a, &lo->a);
	vec8_mul_wide(x.b, k, &hi->b, &lo->b);
}

#endif
