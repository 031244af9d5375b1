/* SPDX-License-Identifier: MIT */
/*
 * What a block of each weight type means: the scalar reference that every kernel matches.
 *
 * Owns: half-precision conversion, the blocks' codes (integers as stored) and how
 * codes become floats. Does not own packed layouts (kernels/cpu/panel.h) nor the
 * sizes of blocks (kernels/types.h).
 *
 * Every quantised weight is scale · (code - offset) + min, where scale and min are
 * constant over a sub-block of 16 or 32 elements. The products d · sub-scale (at
 * most 11 + 8 bits) are exact in float; so scale · code is exact but for Q6_K, and
 * the result has one rounding, whether or not the addition is fused.
 */
#ifndef APR_KERNELS_COMMON_DEQUANT_H
#define APR_KERNELS_COMMON_DEQUANT_H

#include <stdint.h>
#include <string.h>

#include "kernels/types.h"

static inline float apr_bits_float(uint32_t u)
{
	float f;

	memcpy(&f, &u, sizeof f);
	return f;
}

static inline uint32_t apr_float_bits(float f)
{
	uint32_t u;

	memcpy(&u, &f, sizeof u);
	return u;
}

static inline float apr_bf16_float(uint16_t h)
{
	return apr_bits_float((uint32_t)h << 16);
}

static inline float apr_f16_float(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 1023u;

	if (exp == 31) /* infinity; a NaN keeps its payload and becomes quiet, as the hardware does */
		return apr_bits_float(sign | 0x7f800000u | (man << 13) | (man ? 0x400000u : 0));
	if (exp)
		return apr_bits_float(sign | ((exp + 112) << 23) | (man << 13));
	/* subnormal: man · 2^-24, exact */
	return apr_bits_float(sign | apr_float_bits((float)man * 0x1p-24f));
}

/* How a quantised type is built. */
struct apr_quant_traits {
	uint8_t offset;    /* weight = scale · (code - offset) + min */
	uint8_t sub;       /* elements a sub-block, 16 or 32; 0: F32, F16, BF16 and unknown types */
	uint8_t has_min;   /* 1: min is m (an F16 a block); 2: min is -(m · sub-min) */
	uint8_t sc_offset; /* d · (sub-scale code - sc_offset); 0 with has_sc 0: d alone */
	uint8_t has_sc;    /* 0 none, 1 unsigned, 2 int8 */
};

static inline struct apr_quant_traits apr_quant_traits(uint32_t type)
{
	switch (type) {
	case APR_TYPE_Q4_0: return (struct apr_quant_traits){8, 32, 0, 0, 0};
	case APR_TYPE_Q4_1: return (struct apr_quant_traits){0, 32, 1, 0, 0};
	case APR_TYPE_Q5_0: return (struct apr_quant_traits){16, 32, 0, 0, 0};
	case APR_TYPE_Q5_1: return (struct apr_quant_traits){0, 32, 1, 0, 0};
	case APR_TYPE_Q8_0: return (struct apr_quant_traits){128, 32, 0, 0, 0};
	case APR_TYPE_Q2_K: return (struct apr_quant_traits){0, 16, 2, 0, 1};
	case APR_TYPE_Q3_K: return (struct apr_quant_traits){4, 16, 0, 32, 1};
	case APR_TYPE_Q4_K: return (struct apr_quant_traits){0, 32, 2, 0, 1};
	case APR_TYPE_Q5_K: return (struct apr_quant_traits){0, 32, 2, 0, 1};
	case APR_TYPE_Q6_K: return (struct apr_quant_traits){32, 16, 0, 0, 2};
	default: return (struct apr_quant_traits){0, 0, 0, 0, 0};
	}
}

/* One block's integers, out of whatever order they were stored in. */
struct apr_codes {
	uint16_t d, m;       /* F16 bits; m unused where the type has no min */
	uint8_t sc[16];      /* sub-scales as stored (int8 bits for Q6_K) */
	uint8_t mn[16];      /* sub-mins */
	uint8_t q[256];      /* element codes, all unsigned (Q8_0: value + 128), in k order */
};

/* The integer that multiplies d in sub-block s; 1 where the type has no sub-scales. */
static inline int apr_codes_scale(struct apr_quant_traits t, const struct apr_codes *c, unsigned s)
{
	if (!t.has_sc)
		return 1;
	return t.has_sc == 2 ? (int8_t)c->sc[s] : (int)c->sc[s] - t.sc_offset;
}

/* block: one block in the file's layout, of a quantised type. */
void apr_codes_read(uint32_t type, const void *block, struct apr_codes *out);
/* The block's floats. */
void apr_codes_float(uint32_t type, const struct apr_codes *c, float *out);

/* n elements (a multiple of the type's block) in the file's layout to float. Any type of kernels/types.h. */
void apr_dequant_row(uint32_t type, const void *src, uint32_t n, float *dst);

#endif
