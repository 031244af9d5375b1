/* SPDX-License-Identifier: MIT */
/*
 * The ops' scratch memory, as ops_cpu.c lays it out and attn_cpu.c uses it.
 *
 * Private to kernels/cpu/. All of it is set at init; nothing is allocated later.
 */
#ifndef APR_KERNELS_CPU_SCRATCH_H
#define APR_KERNELS_CPU_SCRATCH_H

#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/ops_isa.h"

struct apr_cpu_scratch {
	struct apr_cpu_limits lim;
	struct apr_pool *pool;
	const struct apr_linear_next *next; /* products after those of the op run now; may be NULL */
	unsigned threads;
	float *h;               /* max(rows, APR_HEAD_ROWS) × n_embd: what the norm gave */
	float *k, *v;           /* rows × n_kv_heads × k_dim, v_dim: before rounding */
	float *up;              /* rows × n_ff */
	void *act;              /* activations prepared for products */
	struct apr_attn_tile *tiles; /* rows */
	uint32_t *order;        /* rows: tiles, heaviest first */
	struct apr_attn_work *work;  /* threads */
	float *part;            /* part_pairs × n_heads × (v_dim + APR_ATTN_PART_HEAD) */
	uint32_t part_pairs;    /* (row, segment) pairs that split attention may leave */
};

const struct apr_ops_isa *apr_cpu_ops_isa(void);

#endif
