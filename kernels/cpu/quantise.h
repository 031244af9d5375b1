/* SPDX-License-Identifier: MIT */
/*
 * Quantising activations in GCC's vector types, for instruction sets that have no
 * version of their own (AVX2, NEON). The arithmetic is kern.h's.
 */
#ifndef APR_KERNELS_CPU_QUANTISE_H
#define APR_KERNELS_CPU_QUANTISE_H

#include "kernels/cpu/unpack.h"

struct apr_quant_row { /* one block of one row */
	_Alignas(64) int32_t q[32];
	int32_t sum[2];
	float s;
};

APR_INLINE void apr_quantise32(const float *x, struct apr_quant_row *o)
{
	const float magic = 0x1.8p23f; /* added and taken off: rounds to nearest even */
	apr_f32x16 v[2];
	apr_i32x16 m[2], top;
	int32_t lanes[16], bits = 0;
	float amax, inv = 0;

	memcpy(v, x, sizeof v);
	m[0] = (apr_i32x16)v[0] & 0x7fffffff; /* as integers NaN and infinity are above every finite magnitude */
	m[1] = (apr_i32x16)v[1] & 0x7fffffff;
	top = m[0] > m[1];
	top = (m[0] & top) | (m[1] & ~top);
	memcpy(lanes, &top, sizeof lanes);
	for (int i = 0; i < 16; i++)
		bits = lanes[i] > bits ? lanes[i] : bits;
	amax = apr_bits_float((uint32_t)bits);
	memset(o, 0, sizeof *o);
	if (bits >= 0x7f800000) {
		o->s = apr_bits_float(0x7fc00000);
		return;
	}
	if (amax >= APR_ACT_TINY) {
		o->s = amax / (float)APR_ACT_MAX;
		inv = (float)APR_ACT_MAX / amax;
	}
	for (int h = 0; h < 2; h++) {
		v[h] = (v[h] * inv + magic) - magic;
		m[h] = __builtin_convertvector(v[h], apr_i32x16);
		memcpy(o->q + 16 * h, &m[h], 64);
		for (int i = 0; i < 16; i++)
			o->sum[h] += o->q[16 * h + i];
	}
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
			for (unsigned k = 0; k < 32; k += 4) {
				int16_t quad[4] = {(int16_t)o.q[k], (int16_t)o.q[k + 2], (int16_t)o.q[k + 1], (int16_t)o.q[k + 3]};

				memcpy(q + (size_t)(k / 2) * v->width * 2, quad, 4);
				memcpy(q + (size_t)(k / 2 + 1) * v->width * 2, quad + 2, 4);
			}
			if (v->rows > APR_SMALL_ROWS)
				continue;
			for (unsigned k = 0; k < 32; k++) {
				size_t p = (size_t)row * v->n_in + b * 32 + k;

				v->lo[p] = (int8_t)(uint8_t)(o.q[k] & 255);
				v->hi[p] = (int8_t)((o.q[k] - v->lo[p]) >> 8);
			}
			v->sum[0][(size_t)row * v->blocks + b] = o.sum[0];
			v->sum[1][(size_t)row * v->blocks + b] = o.sum[1];
		}
	}
}

#endif
