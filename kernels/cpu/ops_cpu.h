/* SPDX-License-Identifier: MIT */
/*
 * The ops of kernels/ops.h computed on the CPU, and their scratch memory.
 *
 * Owns: running one op over the live rows on a pool. Does not own the list of
 * calls (engine/cpu_backend.c) nor matrix products (kernels/cpu/linear.h).
 * struct apr_mat is struct apr_linear here. No allocation after apr_cpu_scratch_new.
 */
#ifndef APR_KERNELS_CPU_OPS_CPU_H
#define APR_KERNELS_CPU_OPS_CPU_H

#include <stddef.h>

#include "kernels/cpu/linear.h"
#include "kernels/ops.h"

struct apr_mat {
	struct apr_linear lin;
};

struct apr_cpu_limits { /* the largest values any op call of the model has */
	uint32_t rows, n_embd, n_ff, n_heads, n_kv_heads, k_dim, v_dim, n_ctx;
	enum apr_cpu_math math;
};
struct apr_cpu_scratch;
size_t apr_cpu_scratch_bytes(const struct apr_cpu_limits *l, unsigned threads); /* 0: overflow */
/* mem: that many bytes, 64-aligned, owned by the caller for the scratch's life */
struct apr_cpu_scratch *apr_cpu_scratch_init(const struct apr_cpu_limits *l, struct apr_pool *pool, void *mem);

/* Which products follow those of the op run next, for apr_linear_run_then; NULL: unknown. Not copied. */
void apr_cpu_next(struct apr_cpu_scratch *s, const struct apr_linear_next *next);

void apr_cpu_embed(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_embed *op);
void apr_cpu_attn_in(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_attn_in *op);
void apr_cpu_attn(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_attn *op);
void apr_cpu_proj(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_proj *op);
void apr_cpu_ffn_in(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_ffn_in *op);
/* n rows of r->out from first on (n <= APR_HEAD_ROWS) into op->logits[0 … n - 1] */
void apr_cpu_head(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_head *op, uint32_t first, uint32_t n);

#endif
