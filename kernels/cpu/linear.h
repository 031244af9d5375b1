/* SPDX-License-Identifier: MIT */
/*
 * y = x · Wᵀ for every weight type, one or many rows, on CPU threads.
 *
 * Owns: the panel layout of weights, prepared activations, GEMM and GEMV, the
 * choice of instruction set at run time. Does not own threads (kernels/cpu/pool.h)
 * nor what a projection is for.
 *
 * Bits: an output y[r][o] is one ascending chain over k that depends on row r of
 * x and on row o of W alone: not on how many rows are given, on the number of
 * threads, on which of y's columns a thread computes, nor on the instruction set
 * (tests compare all of them with the scalar reference bit for bit).
 *
 * Two kinds of arithmetic:
 *   APR_CPU_F32    weights widened to float, acc = fmaf(x, w, acc), k ascending
 *   APR_CPU_INT16  for block types: each 32 activations become int16 with one
 *                  float scale; the block's dot product is exact in int32; then
 *                  acc = fmaf(scale product, (float)dot, acc) (and the block's
 *                  minimum times the sum of activations), blocks ascending.
 *                  F32, F16 and BF16 weights take the F32 chain in both.
 */
#ifndef APR_KERNELS_CPU_LINEAR_H
#define APR_KERNELS_CPU_LINEAR_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/types.h"

struct apr_pool;

enum apr_cpu_math { APR_CPU_F32, APR_CPU_INT16 };
enum apr_cpu_isa { APR_ISA_SCALAR, APR_ISA_AVX2, APR_ISA_AVX512, APR_ISA_VNNI, APR_ISA_NEON };

enum apr_cpu_isa apr_cpu_isa_best(void);         /* what this CPU and OS can run */
int apr_cpu_isa_force(enum apr_cpu_isa isa);     /* tests; -ENOTSUP where it cannot run; not thread-safe */
enum apr_cpu_isa apr_cpu_isa_current(void);
const char *apr_cpu_isa_name(enum apr_cpu_isa isa);

/* A weight in panels: 16 output rows interleaved block by block, no byte added but
 * the last panel's padding rows (zero weights). */
struct apr_linear {
	uint32_t type; /* enum apr_type */
	uint32_t n_in, n_out;
	const void *panels; /* 64-aligned, apr_panel_bytes() long */
};
/* 0 where n_in is not a multiple of the type's block, or the size overflows */
size_t apr_panel_bytes(uint32_t type, uint32_t n_in, uint32_t n_out);
/* Packs n_out rows from the file's layout. dst and src do not overlap. pool may be NULL. */
int apr_panel_pack(struct apr_pool *pool, uint32_t type, const void *src, uint32_t n_in, uint32_t n_out, void *dst);
/* One row back to float, from panels (embedding rows are read so). */
void apr_panel_row(const struct apr_linear *w, uint32_t row, float *out);

/* Activations made ready once for all projections that read them. */
struct apr_act {
	enum apr_cpu_math math;
	uint32_t rows, n_in;
	void *mem; /* apr_act_bytes() bytes, 64-aligned, the caller's */
	const float *x; /* the floats themselves: what the F32 chain reads */
	size_t ldx;
};
/* Serves that many rows and any fewer. 0: overflow. */
size_t apr_act_bytes(enum apr_cpu_math math, uint32_t rows, uint32_t n_in);
/* x: rows of n_in floats, ldx floats apart. Fills a (mem given by the caller). x stays as it is
 * until the last apr_linear_run that reads a: nothing is copied for the F32 chain. */
void apr_act_prepare(struct apr_pool *pool, struct apr_act *a, enum apr_cpu_math math, const float *x, size_t ldx,
                     uint32_t rows, uint32_t n_in, void *mem);

/* y[i] = a · w[i]ᵀ + bias[i] for n weights that share n_in, in one parallel region.
 * y[i]: a->rows rows of w[i]->n_out floats, ldy[i] apart; bias[i] may be NULL. */
void apr_linear_run(struct apr_pool *pool, const struct apr_act *a, uint32_t n, const struct apr_linear *const w[],
                    const float *const bias[], float *const y[], const size_t ldy[]);

/* The products that follow, in the order of their weights; n 0: none known. */
struct apr_linear_next {
	uint32_t n;
	const struct apr_linear *w[3];
};
/* As apr_linear_run; threads that wait afterwards prefetch what they will read of next (NULL: nothing). */
void apr_linear_run_then(struct apr_pool *pool, const struct apr_act *a, uint32_t n, const struct apr_linear *const w[],
			 const float *const bias[], float *const y[], const size_t ldy[],
			 const struct apr_linear_next *next);

#endif
