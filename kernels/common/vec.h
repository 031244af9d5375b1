/* SPDX-License-Identifier: MIT */
/*
 * Sixteen lanes of float, int32 and masks, with the same results to the last bit
 * on every instruction set.
 *
 * Owns: the lane operations and the 16-lane forms of kernels/common/math.h. A
 * file picks its form with one of APR_VEC_AVX512, APR_VEC_AVX2, APR_VEC_NEON or
 * none (plain C, the reference). Does not own any algorithm: those are in
 * *_impl.h files, compiled once for each form.
 *
 * What needs care: max and min give the second operand when either is NaN or both
 * are zero; a sum over lanes is always the tree (l, l+8), (l, l+4), (l, l+2), (l, l+1).
 */
#ifndef APR_KERNELS_COMMON_VEC_H
#define APR_KERNELS_COMMON_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/common/math.h"

#define VL 16u
#if defined(APR_VEC_AVX512) || defined(APR_VEC_AVX2) || defined(APR_VEC_NEON)
#define VEC static inline __attribute__((always_inline))
#ifdef __clang__
#define APR_UNROLL _Pragma("clang loop unroll(full)")
#else
#define APR_UNROLL _Pragma("GCC unroll 16")
#endif
#else /* plain C: lanes are loops already; forcing them open only costs the compiler minutes under sanitizers */
#define VEC static inline
#define APR_UNROLL
#endif

#if defined(APR_VEC_AVX512)
#include "kernels/common/vec_avx512.h"
#elif defined(APR_VEC_AVX2)
#include "kernels/common/vec_avx2.h"
#elif defined(APR_VEC_NEON)
#include "kernels/common/vec_neon.h"
#else
#include "kernels/common/vec_scalar.h"
#endif

/* ---- what follows from the above ------------------------------------------- */
VEC vf vf_loadn(const float *p, uint32_t n) /* n < 16 lanes, the rest 0 */
{
	float t[VL] = {0};

	memcpy(t, p, n * sizeof(*p));
	return vf_load(t);
}

VEC void vf_storen(float *p, uint32_t n, vf v)
{
	float t[VL];

	vf_store(t, v);
	memcpy(p, t, n * sizeof(*p));
}

/* All 16 lanes where at least 16 are left, else what there is. */
VEC vf vf_load_upto(const float *p, uint32_t left)
{
	return left >= VL ? vf_load(p) : vf_loadn(p, left);
}

VEC void vf_store_upto(float *p, uint32_t left, vf v)
{
	if (left >= VL)
		vf_store(p, v);
	else
		vf_storen(p, left, v);
}

VEC vf vf_exp2(vf x)
{
	vf t, f, p;
	vi n, n1;

	x = vf_max(vf_set1(-APR_EXP2_LIMIT), x);
	x = vf_min(vf_set1(APR_EXP2_LIMIT), x);
	t = vf_add(x, vf_set1(APR_ROUND_MAGIC));
	f = vf_sub(x, vf_sub(t, vf_set1(APR_ROUND_MAGIC)));
	n = vi_sub(vi_of_bits(t), vi_set1((int32_t)APR_ROUND_MAGIC_BITS));
	p = vf_fma(vf_set1(APR_EXP2_C5), f, vf_set1(APR_EXP2_C4));
	p = vf_fma(p, f, vf_set1(APR_EXP2_C3));
	p = vf_fma(p, f, vf_set1(APR_EXP2_C2));
	p = vf_fma(p, f, vf_set1(APR_EXP2_C1));
	p = vf_fma(p, f, vf_set1(APR_EXP2_C0));
	p = vf_fma(p, f, vf_set1(1.0f));
	n1 = vi_sra1(n);
	p = vf_mul(p, vf_of_bits(vi_sll23(vi_add(n1, vi_set1(127)))));
	return vf_mul(p, vf_of_bits(vi_sll23(vi_add(vi_sub(n, n1), vi_set1(127)))));
}

VEC vf vf_log2_tail(vf f, vf e)
{
	vf s = vf_div(f, vf_add(vf_set1(2.0f), f)), z = vf_mul(s, s), p;

	p = vf_fma(vf_set1(APR_LOG2_C3), z, vf_set1(APR_LOG2_C2));
	p = vf_fma(p, z, vf_set1(APR_LOG2_C1));
	p = vf_fma(p, z, vf_set1(APR_LOG2_C0));
	return vf_fma(s, p, e);
}

/* f and e of a normal x > 0 */
VEC vf vf_log2_split(vf x, vf *e)
{
	vi u = vi_sub(vi_of_bits(x), vi_set1((int32_t)APR_SQRT_HALF_BITS));

	*e = vf_of_int(vi_sra23(u));
	u = vi_add(vi_and(u, vi_set1(0x7fffff)), vi_set1((int32_t)APR_SQRT_HALF_BITS));
	return vf_sub(vf_of_bits(u), vf_set1(1.0f));
}

VEC vf vf_log2_normal(vf x)
{
	vf e, f = vf_log2_split(x, &e);

	return vf_log2_tail(f, e);
}

VEC vf vf_log2_1m(vf t)
{
	vf e, f = vf_log2_split(vf_sub(vf_set1(1.0f), t), &e);
	vm small = vf_lt(t, vf_set1(0.25f)); /* then e is 0 already */

	return vf_log2_tail(vf_select(small, vf_sub(vf_set1(0.0f), t), f), e);
}

VEC vf vf_sigmoid(vf x)
{
	return vf_div(vf_set1(1.0f), vf_add(vf_set1(1.0f), vf_exp2(vf_mul(x, vf_set1(-APR_LOG2E)))));
}

VEC vf vf_tanh(vf x)
{
	vf d = vf_add(vf_set1(1.0f), vf_exp2(vf_mul(x, vf_set1(2.0f * APR_LOG2E))));

	return vf_fma(vf_set1(-2.0f), vf_div(vf_set1(1.0f), d), vf_set1(1.0f));
}

VEC vf vf_unit(vi r)
{
	vf t = vf_fma(vf_of_uint(r), vf_set1(0x1p-32f), vf_set1(0x1p-33f));

	return vf_min(t, vf_set1(0x1.fffffep-1f));
}

VEC vf vf_gumbel(vf t)
{
	return vf_mul(vf_log2_normal(vf_mul(vf_log2_1m(t), vf_set1(-APR_LN2))), vf_set1(-APR_LN2));
}

/* Sixteen Philox counters c0[lane]; the other three words and the key are common to all. */
VEC void vu_philox(vi c0, uint32_t w1, uint32_t w2, uint32_t w3, uint32_t k0, uint32_t k1, vi out[4])
{
	vi c1 = vi_set1((int32_t)w1), c2 = vi_set1((int32_t)w2), c3 = vi_set1((int32_t)w3);
	int i;

	for (i = 0; i < 10; i++) {
		vi h0, l0, h1, l1;

		vu_mul_wide(c0, APR_PHILOX_M0, &h0, &l0);
		vu_mul_wide(c2, APR_PHILOX_M1, &h1, &l1);
		c0 = vi_xor(vi_xor(h1, c1), vi_set1((int32_t)k0));
		c1 = l1;
		c2 = vi_xor(vi_xor(h0, c3), vi_set1((int32_t)k1));
		c3 = l0;
		k0 += APR_PHILOX_W0;
		k1 += APR_PHILOX_W1;
	}
	out[0] = c0;
	out[1] = c1;
	out[2] = c2;
	out[3] = c3;
}

#endif
