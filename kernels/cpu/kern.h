/* SPDX-License-Identifier: MIT */
/*
 * What one instruction set must provide for kernels/cpu/linear.c, and the two
 * intermediate forms that all of them share: quantised activations and weight tiles.
 *
 * The integer arithmetic (APR_CPU_INT16), defined here once. Activations: for each
 * row and each 32 elements, s = amax / 32512 and q = x · (32512 / amax) rounded to
 * nearest even, so |q| <= 32512 = 127 · 256 and q splits into two signed bytes;
 * amax < 2^-100 gives s = 0, q = 0; a NaN or infinity in the block gives s = NaN,
 * q = 0. Weights: the integers w of a block and float factors p, m. Per block b,
 * ascending, with dot exact in int32 and every product rounded once:
 *
 *   PLAIN   acc = fma(s·p, dot(w, q), acc)                    Q4_0 Q5_0 Q8_0; Q3_K
 *   MIN     as PLAIN, then acc = fma(m, s·sum(q), acc)         Q4_1 Q5_1 Q4_K Q5_K
 *   HALVES  acc = fma(s·p, dot of each 16, acc), twice         Q6_K
 *   MIN2    as PLAIN, then acc = fma(m, s·sum(q), acc) per 16  Q2_K
 *
 * where w = code - offset and p = d · sub-scale for sub-blocks of 32 (exact), and
 * w = (code - offset) · sub-scale, p = d for sub-blocks of 16. acc starts at +0;
 * a bias is added after the last block.
 *
 * No dot can overflow: |w| · 32512 · elements, by type, is asserted below.
 */
#ifndef APR_KERNELS_CPU_KERN_H
#define APR_KERNELS_CPU_KERN_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/linear.h"
#include "kernels/cpu/panel.h"

#define APR_ACT_MAX 32512
#define APR_ACT_TINY 0x1p-100f
#define APR_GROUP 8u       /* activation rows interleaved */
#define APR_SMALL_ROWS 8u  /* up to here (one group) rows go through gemv and also have byte planes */
#define APR_SLAB 64u       /* blocks of 32 in a weight tile */
#define APR_SLAB_F32 512u  /* elements in a float tile */

#define APR_DOT_FITS(w, n) _Static_assert((int64_t)(w) * APR_ACT_MAX * (n) <= INT32_MAX, "block dot fits int32")
APR_DOT_FITS(15, 32);       /* Q4_0 (-8 … 7), Q4_1, Q4_K; 15 also while Q4_0's offset is not yet taken off */
APR_DOT_FITS(31, 32);       /* Q5_0, Q5_1, Q5_K */
APR_DOT_FITS(255, 32);      /* Q8_0, with its offset of 128 still in */
APR_DOT_FITS(3 * 15, 32);   /* Q2_K times its sub-scale */
APR_DOT_FITS(4 * 32, 32);   /* Q3_K times its sub-scale */
APR_DOT_FITS(32 * 128, 16); /* Q6_K times its sub-scale: 16 elements, not 32 */
APR_DOT_FITS(63, 32);       /* Q6_K, Q3_K, Q2_K before the sub-scale, offset still in */

enum apr_chain { APR_CHAIN_PLAIN, APR_CHAIN_MIN, APR_CHAIN_HALVES, APR_CHAIN_MIN2 };

static inline enum apr_chain apr_chain_of(uint32_t type)
{
	switch (type) {
	case APR_TYPE_Q4_1:
	case APR_TYPE_Q5_1:
	case APR_TYPE_Q4_K:
	case APR_TYPE_Q5_K: return APR_CHAIN_MIN;
	case APR_TYPE_Q6_K: return APR_CHAIN_HALVES;
	case APR_TYPE_Q2_K: return APR_CHAIN_MIN2;
	default: return APR_CHAIN_PLAIN;
	}
}

/* Quantised activations as they lie in apr_act.mem. Rows go in groups of width
 * (8, or the row count where that is less; the last group keeps the width). */
struct apr_act_view {
	uint32_t rows, n_in, blocks, width;
	int16_t *q;      /* [group][n_in / 2][width][2]; each 4 elements as pairs (0, 2), (1, 3) */
	float *s;        /* [group][blocks][width] */
	float *xs;       /* s · sum(q), same shape */
	float *xh[2];    /* s · sum(q) of either 16, same shape */
	int8_t *hi, *lo; /* rows <= APR_SMALL_ROWS: q = 256 hi + lo, [row][n_in] */
	int32_t *sum[2]; /* rows <= APR_SMALL_ROWS: sum(q) of either 16, [row][blocks] */
	size_t bytes;
};
/* Lays the view over mem (which may be NULL to learn bytes). bytes 0: overflow. */
struct apr_act_view apr_act_view(void *mem, uint32_t rows, uint32_t n_in);

/* 16 rows × up to APR_SLAB blocks, unpacked: what GEMM reuses for many rows */
struct apr_tile {
	_Alignas(64) int16_t w[APR_SLAB][16][32]; /* pair i of the activations' order: [row][2] */
	float p[APR_SLAB][16];
	float m[APR_SLAB][2][16]; /* MIN: m[b][0] */
};

struct apr_kern {
	/* rows first … first + n - 1 (all in one group) of x into the view */
	void (*quantise)(const struct apr_act_view *v, const float *x, size_t ldx, uint32_t first, uint32_t n);
	/* blocks b0 … b0 + n - 1 (n <= APR_SLAB) of a panel; b0 at a unit's start */
	void (*unpack)(uint32_t type, const uint8_t *panel, uint32_t b0, uint32_t n, struct apr_tile *t);
	/* acc[i] continued over the tile's n blocks = activation blocks b0 …, for rows 0 … n_rows - 1 of a group;
	 * acc has room for APR_GROUP rows, and those beyond n_rows may be changed */
	void (*gemm)(enum apr_chain chain, const struct apr_tile *t, uint32_t n, const struct apr_act_view *v,
		     uint32_t group, uint32_t b0, uint32_t n_rows, float (*acc)[16]);
	/* one panel, all of k, v->rows <= APR_SMALL_ROWS rows; acc is overwritten */
	void (*gemv)(uint32_t type, const uint8_t *panel, const struct apr_act_view *v, float (*acc)[16]);
	/* elements k0 … k0 + n - 1 (n <= APR_SLAB_F32) of a panel as floats; k0 at a unit's start, any type */
	void (*unpack_f32)(uint32_t type, const uint8_t *panel, uint32_t k0, uint32_t n, float (*tile)[16]);
	/* acc[i] continued: fma over n elements of rows x[0 … n_rows - 1], n_rows <= APR_GROUP */
	void (*fma_f32)(const float (*tile)[16], uint32_t n, const float *const *x, uint32_t n_rows, float (*acc)[16]);
	/* one row against panels tile[0 … 3] at once */
	void (*fma4_f32)(const float (*const tile[4])[16], uint32_t n, const float *x, float (*acc)[16]);
};

extern const struct apr_kern apr_kern_scalar;
#if defined(__x86_64__)
extern const struct apr_kern apr_kern_avx2, apr_kern_avx512, apr_kern_vnni;
#elif defined(__aarch64__)
extern const struct apr_kern apr_kern_neon;
#endif
const struct apr_kern *apr_kern_current(void); /* isa.c */

#endif
