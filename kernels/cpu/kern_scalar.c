/* SPDX-License-Identifier: MIT */
/*
 * Plain C kernels: the reference for every instruction set, and what an unknown CPU runs.
 *
 * Owns: the arithmetic of kern.h said as simply as it can be. Does not own speed.
 */
#include <math.h>

#include "kernels/cpu/kern.h"

/* position of element k in the activations' and tiles' order: each 4 as (0, 2), (1, 3) */
static unsigned pair_of(unsigned k)
{
	return k / 4 * 2 + k % 2;
}
static unsigned slot_of(unsigned k)
{
	return k % 4 / 2;
}

static void quantise_block(const struct apr_act_view *v, const float *x, uint32_t row, uint32_t b)
{
	uint32_t g = row / v->width, c = row % v->width;
	size_t at = ((size_t)g * v->blocks + b) * v->width + c;
	int16_t *q = v->q + ((size_t)g * v->blocks + b) * v->width * 32;
	int32_t sum[2] = {0, 0};
	float amax = 0, s = 0, inv = 0;
	int bad = 0;

	for (unsigned k = 0; k < 32; k++) {
		float m = fabsf(x[k]);

		bad |= !(m <= 0x1.fffffep127f);
		amax = m > amax ? m : amax;
	}
	if (bad) {
		s = NAN;
	} else if (amax >= APR_ACT_TINY) {
		s = amax / (float)APR_ACT_MAX;
		inv = (float)APR_ACT_MAX / amax;
	}
	for (unsigned k = 0; k < 32; k++) {
		/* 1.5 · 2^23 added and taken off rounds to nearest even */
		float r = bad ? 0 : (x[k] * inv + 0x1.8p23f) - 0x1.8p23f;
		int32_t i = (int32_t)r;

		sum[k / 16] += i;
		q[(pair_of(k) * v->width + c) * 2 + slot_of(k)] = (int16_t)i;
		if (v->rows <= APR_SMALL_ROWS) {
			size_t p = (size_t)row * v->n_in + b * 32 + k;

			v->lo[p] = (int8_t)(uint8_t)(i & 255);
			v->hi[p] = (int8_t)((i - v->lo[p]) / 256);
		}
	}
	v->s[at] = s;
	v->xs[at] = s * (float)(sum[0] + sum[1]);
	for (unsigned h = 0; h < 2; h++) {
		v->xh[h][at] = s * (float)sum[h];
		if (v->rows <= APR_SMALL_ROWS)
			v->sum[h][(size_t)row * v->blocks + b] = sum[h];
	}
}

static void quantise(const struct apr_act_view *v, const float *x, size_t ldx, uint32_t first, uint32_t n)
{
	for (uint32_t row = first; row < first + n; row++) {
		for (uint32_t b = 0; b < v->blocks; b++)
			quantise_block(v, x + row * ldx + b * 32, row, b);
	}
}

static void unpack(uint32_t type, const uint8_t *panel, uint32_t b0, uint32_t n, struct apr_tile *t)
{
	struct apr_quant_traits q = apr_quant_traits(type);
	unsigned per_unit = apr_type_info(type).block == 256 ? 8 : 1;

	for (uint32_t b = 0; b < n; b++) {
		const uint8_t *unit = panel + (size_t)((b0 + b) / per_unit) * apr_panel_unit_bytes(type);
		unsigned in_unit = (b0 + b) % per_unit;

		for (unsigned r = 0; r < 16; r++) {
			struct apr_codes c;
			float d, m;

			apr_panel_get(type, unit, r, &c);
			d = apr_f16_float(c.d);
			m = apr_f16_float(c.m);
			t->p[b][r] = q.sub == 16 ? d : d * (float)apr_codes_scale(q, &c, in_unit);
			for (unsigned h = 0; h < 2; h++) {
				unsigned s = q.sub == 16 ? in_unit * 2 + h : in_unit;

				t->m[b][h][r] = q.has_min == 2 ? -(m * (float)c.mn[s]) : m;
			}
			for (unsigned k = 0; k < 32; k++) {
				int w = (int)c.q[in_unit * 32 + k] - q.offset;

				if (q.sub == 16)
					w *= apr_codes_scale(q, &c, in_unit * 2 + k / 16);
				t->w[b][pair_of(k)][r * 2 + slot_of(k)] = (int16_t)w;
			}
		}
	}
}

static int32_t dot(const struct apr_tile *t, uint32_t b, unsigned r, const int16_t *q, unsigned width, unsigned from,
		   unsigned to)
{
	int32_t sum = 0;

	for (unsigned i = from; i < to; i++) {
		sum += (int32_t)t->w[b][i][r * 2] * q[i * width * 2];
		sum += (int32_t)t->w[b][i][r * 2 + 1] * q[i * width * 2 + 1];
	}
	return sum;
}

static void gemm(enum apr_chain chain, const struct apr_tile *t, uint32_t n, const struct apr_act_view *v,
		 uint32_t group, uint32_t b0, uint32_t n_rows, float (*acc)[16])
{
	for (uint32_t b = 0; b < n; b++) {
		size_t block = (size_t)group * v->blocks + b0 + b;

		for (uint32_t c = 0; c < n_rows; c++) {
			const int16_t *q = v->q + block * v->width * 32 + c * 2;
			size_t at = block * v->width + c;

			for (unsigned r = 0; r < 16; r++) {
				float p = v->s[at] * t->p[b][r], a = acc[c][r];

				if (chain == APR_CHAIN_HALVES) {
					a = fmaf(p, (float)dot(t, b, r, q, v->width, 0, 8), a);
					a = fmaf(p, (float)dot(t, b, r, q, v->width, 8, 16), a);
				} else {
					a = fmaf(p, (float)dot(t, b, r, q, v->width, 0, 16), a);
				}
				if (chain == APR_CHAIN_MIN)
					a = fmaf(t->m[b][0][r], v->xs[at], a);
				if (chain == APR_CHAIN_MIN2) {
					a = fmaf(t->m[b][0][r], v->xh[0][at], a);
					a = fmaf(t->m[b][1][r], v->xh[1][at], a);
				}
				acc[c][r] = a;
			}
		}
	}
}

static void gemv(uint32_t type, const uint8_t *panel, const struct apr_act_view *v, float (*acc)[16])
{
	struct apr_tile t;

	memset(acc, 0, v->rows * sizeof acc[0]);
	for (uint32_t b = 0; b < v->blocks; b += APR_SLAB) {
		uint32_t n = v->blocks - b < APR_SLAB ? v->blocks - b : APR_SLAB;

		unpack(type, panel, b, n, &t);
		gemm(apr_chain_of(type), &t, n, v, 0, b, v->rows, acc);
	}
}

static void unpack_f32(uint32_t type, const uint8_t *panel, uint32_t k0, uint32_t n, float (*tile)[16])
{
	struct apr_type_info info = apr_type_info(type);

	for (uint32_t k = 0; k < n && info.block; k += info.block) {
		const uint8_t *unit = panel + (size_t)apr_panel_units(type, k0 + k) * apr_panel_unit_bytes(type);

		if (info.block == 1) {
			apr_dequant_row(type, unit, 16, tile[k]);
			continue;
		}
		for (unsigned r = 0; r < 16; r++) {
			struct apr_codes c;
			float w[256];

			apr_panel_get(type, unit, r, &c);
			apr_codes_float(type, &c, w);
			for (unsigned i = 0; i < info.block; i++)
				tile[k + i][r] = w[i];
		}
	}
}

static void fma_f32(const float (*tile)[16], uint32_t n, const float *const *x, uint32_t n_rows, float (*acc)[16])
{
	for (uint32_t c = 0; c < n_rows; c++) {
		for (uint32_t k = 0; k < n; k++) {
			for (unsigned r = 0; r < 16; r++)
				acc[c][r] = fmaf(x[c][k], tile[k][r], acc[c][r]);
		}
	}
}

static void fma4_f32(const float (*const tile[4])[16], uint32_t n, const float *x, float (*acc)[16])
{
	for (unsigned p = 0; p < 4; p++)
		fma_f32(tile[p], n, &x, 1, acc + p);
}

const struct apr_kern apr_kern_scalar = {quantise, unpack, gemm, gemv, unpack_f32, fma_f32, fma4_f32};
