/* SPDX-License-Identifier: MIT */
/*
 * What sampling means for one id, as scalar inlines that C and CUDA share.
 *
 * Owns: rank, weight, target and draw. z is a logit after bias and penalties, max
 * the largest of them (finite), T the temperature (> 0). Does not own how the ids
 * are gone through (kernels/common/sample.c).
 */
#ifndef APR_KERNELS_COMMON_SAMPLE_MATH_H
#define APR_KERNELS_COMMON_SAMPLE_MATH_H

#include "kernels/common/math.h"

/* Ranks ids best first: a smaller key is a larger z, then a lower id. +0 and -0 tie. */
APR_MATH uint64_t apr_rank(float z, uint32_t id)
{
	uint32_t u = apr_f32_bits(z + 0.0f);

	u = u & 0x80000000u ? u : ~u & 0x7fffffffu;
	return (uint64_t)u << 32 | id;
}

APR_MATH float apr_rank_value(uint64_t rank)
{
	uint32_t u = (uint32_t)(rank >> 32);

	return apr_bits_f32(u & 0x80000000u ? u : ~u & 0x7fffffffu);
}

/* (z - max) / T: 0 for the best; overflow ends at -inf, which is where it belongs */
APR_MATH float apr_tempered(float z, float max, float T)
{
	return (z - max) / T;
}

/* exp(tempered), in units of 2^-40, rounded down: sums of it are exact in any order */
APR_MATH uint64_t apr_weight_fixed(float z, float max, float T)
{
	float p = apr_exp2(apr_tempered(z, max, T) * APR_LOG2E) * 0x1p20f;
	uint32_t hi = (uint32_t)p;

	return (uint64_t)hi << 20 | (uint32_t)((p - (float)hi) * 0x1p20f);
}

/* top_p of a total below 2^63, rounded down: the best ids are kept until their weights reach it */
APR_MATH uint64_t apr_top_p_target(uint64_t total, float top_p)
{
	uint64_t p = (uint64_t)((double)top_p * 0x1p32);

	return (total >> 32) * p + (((total & 0xffffffffu) * p) >> 32);
}

/* min-p keeps an id where tempered · log2 e >= log2(min_p); min_p > 0 */
APR_MATH int apr_min_p_keeps(float z, float max, float T, float log2_min_p)
{
	return apr_tempered(z, max, T) * APR_LOG2E >= log2_min_p;
}

/* The draw: the id with the largest of these wins, ties to the lowest id. */
APR_MATH float apr_draw(float z, float max, float T, uint64_t seed, uint32_t sample, uint32_t position, uint32_t id)
{
	uint32_t ctr[4] = {id >> 2, position, sample, 0}, out[4];

	apr_philox4x32(ctr, (uint32_t)seed, (uint32_t)(seed >> 32), out);
	return apr_tempered(z, max, T) + apr_gumbel(apr_unit(out[id & 3]));
}

#endif
