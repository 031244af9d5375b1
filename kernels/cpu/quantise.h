/* SPDX-License-Identifier: MIT */
/*
 * Quantising activations, for instruction sets that have no version of their own of
 * the whole (AVX2, NEON). The arithmetic is kern.h's. The including file provides
 * apr_abs_max32() (the largest magnitude's bits as an integer: NaN and infinity are
 * above every finite one) and apr_round32() (x · inv to nearest even, as int16 in the
 * pairs' order, and the sums of either half).
 */
#ifndef APR_KERNELS_CPU_QUANTISE_H
#define APR_KERNELS_CPU_QUANTISE_H

#include "kernels/cpu/unpack.h"

APR_INLINE int apr_abs_max32(const float *x);
APR_INLINE void apr_round32(const float *x, float inv, int16_t q[32], int32_t sum[2]);

struct apr_quant_row { /* one block of one row */
	_Alignas(64) int16_t q[32];
	int32_t sum[2];
	float s;
};

APR_INLINE void apr_quantise32(const float *x, struct apr_quant_row *o)
{
	int bits = apr_abs_max32(x);
	float amax = apr_bits_float((uint32_t)bits);

	if (bits < 0x7f800000 && amax >= APR_ACT_TINY) {
		o->s = amax / (float)APR_ACT_MAX;
		apr_round32(x, (float)APR_ACT_MAX / amax, o->q, o->sum);
		return;
	}
	memset(o, 0, sizeof *o);
	if (bits >= 0x7f800000)
		o->s = apr_bits_float(0x7fc00000);
}

/* the byte planes that few rows have besides */
static void apr_store_planes(const struct apr_act_view *v, uint32_t row, uint32_t b, const struct apr_quant_row *o)
{
	size_t at = (size_t)row * v->n_in + b * 32;

	for (unsigned k = 0; k < 32; k++) {
		int q = o->q[k / 4 * 4 + k % 2 * 2 + k % 4 / 2];

		v->lo[at + k] = (int8_t)(uint8_t)(q & 255);
		v->hi[at + k] = (int8_t)((q - v->lo[at + k]) / 256);
	}
	v->sum[0][(size_t)row * v->blocks + b] = o->sum[0];
	v->sum[1][(size_t)row * v->blocks + b] = o->sum[1];
}

static void apr_quantise_rows(const struct apr_act_view *v, const float *x, size_t ldx, uint32_t first, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t row = first + i, c = row % v->width;

		for (uint32_t b = 0; b < v->blocks; b++) {
			size_t block = (size_t)(row / v->width) * v->blocks + b, at = block * v->width + c;
			int16_t *q = v->q + (block * 16 * v->width + c) * 2;
			struct apr_quant_row o;

			apr_quantise32(x + row * ldx + b * 32, &o);
			v->s[at] = o.s;
			v->xs[at] = o.s * (float)(o.sum[0] + o.sum[1]);
			v->xh[0][at] = o.s * (float)o.sum[0];
			v->xh[1][at] = o.s * (float)o.sum[1];
			for (unsigned pair = 0; pair < 16; pair++)
				memcpy(q + (size_t)pair * v->width * 2, o.q + 2 * pair, 4);
			if (v->rows <= APR_SMALL_ROWS)
				apr_store_planes(v, row, b, &o);
		}
	}
}

#endif
