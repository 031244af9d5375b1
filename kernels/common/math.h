/* SPDX-License-Identifier: MIT */
/*
 * The few functions that C and CUDA must compute to the last bit alike: exp2,
 * log2, Philox, and the 16-bit float formats.
 *
 * Owns: formulas and constants, as scalar inlines of explicit fmaf (contraction
 * off). kernels/common/vec.h repeats each formula 16 lanes wide, step for step;
 * tests/kernels/test_math.c holds the two equal bit for bit. Does not own where
 * they are used.
 */
#ifndef APR_KERNELS_COMMON_MATH_H
#define APR_KERNELS_COMMON_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define APR_MATH static __host__ __device__ __forceinline__
#else
#define APR_MATH static inline
#endif

#define APR_LOG2E 0x1.715476p+0f
#define APR_LN2 0x1.62e43p-1f

APR_MATH uint32_t apr_f32_bits(float x)
{
	uint32_t u;

	memcpy(&u, &x, sizeof(u));
	return u;
}

APR_MATH float apr_bits_f32(uint32_t u)
{
	float x;

	memcpy(&x, &u, sizeof(x));
	return x;
}

/* ---- exp2: 2^x = 2^n · (1 + f·P(f)), f in [-1/2, 1/2] ---------------------- */
/* Within 1 ulp; exp2(n) is exact for whole n; NaN stays NaN; ±inf and overflow as libm. */
#define APR_EXP2_C0 0x1.62e43p-1f
#define APR_EXP2_C1 0x1.ebfbdcp-3f
#define APR_EXP2_C2 0x1.c6aee8p-5f
#define APR_EXP2_C3 0x1.3b2d4ap-7f
#define APR_EXP2_C4 0x1.5f3e2cp-10f
#define APR_EXP2_C5 0x1.41fd02p-13f
#define APR_EXP2_LIMIT 160.0f   /* beyond it all results are 0 or inf already */
#define APR_ROUND_MAGIC 0x1.8p23f /* adding it rounds |x| < 2^22 to a whole number */
#define APR_ROUND_MAGIC_BITS 0x4b400000u

APR_MATH float apr_exp2(float x)
{
	float t, f, p;
	int32_t n, n1;

	x = -APR_EXP2_LIMIT > x ? -APR_EXP2_LIMIT : x; /* so written that NaN passes */
	x = APR_EXP2_LIMIT < x ? APR_EXP2_LIMIT : x;
	t = x + APR_ROUND_MAGIC;
	f = x - (t - APR_ROUND_MAGIC);
	n = (int32_t)(apr_f32_bits(t) - APR_ROUND_MAGIC_BITS);
	p = fmaf(APR_EXP2_C5, f, APR_EXP2_C4);
	p = fmaf(p, f, APR_EXP2_C3);
	p = fmaf(p, f, APR_EXP2_C2);
	p = fmaf(p, f, APR_EXP2_C1);
	p = fmaf(p, f, APR_EXP2_C0);
	p = fmaf(p, f, 1.0f);
	n1 = n >> 1; /* two exact halves, so that subnormal results round once */
	p *= apr_bits_f32((uint32_t)(n1 + 127) << 23);
	return p * apr_bits_f32((uint32_t)(n - n1 + 127) << 23);
}

/* ---- log2: x = 2^e · (1 + f); log2(1 + f) = s·P(s²), s = f / (2 + f) -------- */
/* Within 3 ulp everywhere, also next to 1; log2(2^n) is exact; 0 gives -inf, below 0 NaN. */
#define APR_LOG2_C0 0x1.715476p+1f
#define APR_LOG2_C1 0x1.ec70e6p-1f
#define APR_LOG2_C2 0x1.2746d4p-1f
#define APR_LOG2_C3 0x1.ba275ap-2f
#define APR_SQRT_HALF_BITS 0x3f3504f3u

APR_MATH float apr_log2_tail(float f, float e)
{
	float s = f / (2.0f + f), z = s * s, p;

	p = fmaf(APR_LOG2_C3, z, APR_LOG2_C2);
	p = fmaf(p, z, APR_LOG2_C1);
	p = fmaf(p, z, APR_LOG2_C0);
	return fmaf(s, p, e);
}

/* x normal and > 0: the part that the vector form shares */
APR_MATH float apr_log2_normal(float x)
{
	uint32_t u = apr_f32_bits(x) - APR_SQRT_HALF_BITS;
	int32_t e = (int32_t)u >> 23;

	return apr_log2_tail(apr_bits_f32((u & 0x7fffffu) + APR_SQRT_HALF_BITS) - 1.0f, (float)e);
}

APR_MATH float apr_log2(float x)
{
	if (!(x > 0.0f))
		return x == 0.0f ? -INFINITY : NAN;
	if (apr_f32_bits(x) >= 0x7f800000u)
		return x;
	if (x < 0x1p-126f)
		return apr_log2_normal(x * 0x1p24f) - 24.0f;
	return apr_log2_normal(x);
}

/* log2(1 - t) for t in [2^-34, 1 - 2^-24], as exact for tiny t as for large */
APR_MATH float apr_log2_1m(float t)
{
	if (t < 0.25f)
		return apr_log2_tail(-t, 0.0f);
	return apr_log2_normal(1.0f - t);
}

APR_MATH float apr_sigmoid(float x) /* 1 / (1 + e^-x) */
{
	return 1.0f / (1.0f + apr_exp2(x * -APR_LOG2E));
}

/* 1 - 2 / (1 + e^2x): absolute error below 2^-22, which is what soft caps need */
APR_MATH float apr_tanh(float x)
{
	return fmaf(-2.0f, 1.0f / (1.0f + apr_exp2(x * (2.0f * APR_LOG2E))), 1.0f);
}

/* ---- Philox4x32-10 ---------------------------------------------------------- */
#define APR_PHILOX_M0 0xd2511f53u
#define APR_PHILOX_M1 0xcd9e8d57u
#define APR_PHILOX_W0 0x9e3779b9u
#define APR_PHILOX_W1 0xbb67ae85u

APR_MATH void apr_philox4x32(const uint32_t ctr[4], uint32_t k0, uint32_t k1, uint32_t out[4])
{
	uint32_t c0 = ctr[0], c1 = ctr[1], c2 = ctr[2], c3 = ctr[3];
	int i;

	for (i = 0; i < 10; i++) {
		uint64_t p0 = (uint64_t)APR_PHILOX_M0 * c0, p1 = (uint64_t)APR_PHILOX_M1 * c2;

		c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
		c1 = (uint32_t)p1;
		c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
		c3 = (uint32_t)p0;
		k0 += APR_PHILOX_W0;
		k1 += APR_PHILOX_W1;
	}
	out[0] = c0;
	out[1] = c1;
	out[2] = c2;
	out[3] = c3;
}

/* A word of Philox as a number in (0, 1): 32 bits near 0, where the largest draws are; never 1. */
APR_MATH float apr_unit(uint32_t r)
{
	float t = fmaf((float)r, 0x1p-32f, 0x1p-33f);

	return t < 0x1.fffffep-1f ? t : 0x1.fffffep-1f;
}

/* Standard Gumbel from t uniform: -ln(-ln(1 - t)). At most APR_GUMBEL_MAX, at least -2.9. */
#define APR_GUMBEL_MAX 22.9f
APR_MATH float apr_gumbel(float t)
{
	return apr_log2_normal(apr_log2_1m(t) * -APR_LN2) * -APR_LN2;
}

/* ---- 16-bit floats: round to nearest even ----------------------------------- */
APR_MATH float apr_half_to_f32(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000u) << 16, mag = h & 0x7fffu;

	if (mag >= 0x7c00u) /* inf, NaN (made quiet, as the hardware does) */
		return apr_bits_f32(sign | 0x7f800000u | (mag & 0x3ffu) << 13 | (mag > 0x7c00u ? 0x400000u : 0));
	if (mag < 0x400u) /* subnormal: mag · 2^-24, exact */
		return apr_bits_f32(apr_f32_bits((float)mag * 0x1p-24f) | sign);
	return apr_bits_f32(sign | ((mag << 13) + (112u << 23)));
}

APR_MATH uint16_t apr_half_from_f32(float x)
{
	uint32_t u = apr_f32_bits(x), sign = u >> 16 & 0x8000u, mag = u & 0x7fffffffu;

	if (mag > 0x7f800000u)
		return (uint16_t)(sign | 0x7e00u | (mag >> 13 & 0x3ffu));
	if (mag >= 0x477ff000u) /* rounds to 65536 or more */
		return (uint16_t)(sign | 0x7c00u);
	if (mag < 0x38800000u) /* subnormal: adding 1/2 puts the last kept bit at the unit */
		return (uint16_t)(sign | (apr_f32_bits(apr_bits_f32(mag) + 0.5f) - 0x3f000000u));
	return (uint16_t)(sign | ((mag - (112u << 23) + 0xfffu + (mag >> 13 & 1u)) >> 13));
}

APR_MATH float apr_bfloat_to_f32(uint16_t h)
{
	return apr_bits_f32((uint32_t)h << 16);
}

APR_MATH uint16_t apr_bfloat_from_f32(float x)
{
	uint32_t u = apr_f32_bits(x);

	if ((u & 0x7fffffffu) > 0x7f800000u)
		return (uint16_t)(u >> 16 | 0x40u);
	return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

#endif
