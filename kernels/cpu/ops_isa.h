/* SPDX-License-Identifier: MIT */
/*
 * What ops_cpu.c and attn_cpu.c ask of an instruction set: work on single rows,
 * and attention of one tile of rows with one KV head.
 *
 * Owns: the table of functions that each kernels/cpu/ops_<isa>.c fills in, all from
 * the same two sources (rows_impl.h, attn_impl.h), all to the same bits. Does not
 * own threads or which rows form a tile. Private to kernels/cpu/.
 */
#ifndef APR_KERNELS_CPU_OPS_ISA_H
#define APR_KERNELS_CPU_OPS_ISA_H

#include "kernels/ops.h"

#define APR_ATTN_TILE_HEADS 128u /* rows × query heads of a tile, at most; a tile has at least one row */

/* Consecutive positions of one sequence in consecutive rows. */
struct apr_attn_tile {
	uint32_t row, n;      /* rows row … row + n - 1 */
	uint32_t pos, slot;   /* of the first */
	uint32_t seg, n_segs; /* segments that any of its rows looks at */
	uint32_t part;        /* where its partial results begin, in (row, segment) pairs; split work only */
	uint64_t cost;
};

/* A worker's memory. Row r of a tile is position r / group, head r % group. */
struct apr_attn_work {
	float *q;      /* [rows][k_dim] */
	float *s;      /* [rows][APR_KV_SEGMENT]: scores, then weights */
	float *block;  /* one block as float: K as [k_dim][64], V as [64][ldv] */
	uint16_t *half; /* K as [k_dim][64], not widened */
	float *o;      /* [rows][ldv] of the segment at hand */
	float *total;  /* [rows][ldv] merged so far */
	float *ml;     /* [rows][4]: m and l of the segment, m and l merged so far */
};
/* Partial results of one segment: m, l, then o[v_dim], for each query head of each row. */
#define APR_ATTN_PART_HEAD 2u

struct apr_ops_isa {
	/* x_out = x + post(y); h = norm(x_out) where h is not NULL. y, x_out may be NULL. t: n floats, used where y and
	 * x_out is NULL. */
	void (*add_norm)(const float *x, const float *y, const struct apr_norm *post, float *x_out,
	                 const struct apr_norm *norm, float *h, uint32_t n);
	/* heads of dim floats in place: norm where w is set, then rotation by cs (the position's row of cos_sin) */
	void (*heads)(float *v, uint32_t n_heads, uint32_t dim, const struct apr_norm *norm,
	              const struct apr_rope_table *rope, const float *cs);
	void (*store_kv)(enum apr_kv_type type, const float *src, void *dst, uint32_t n);
	/* a = act(g) · u, or act(g) where u is NULL; a may be g or u. act: enum apr_op_act */
	void (*act)(uint32_t act, float *a, const float *g, const float *u, uint32_t n);
	void (*scale)(float *v, uint32_t n, float scale, float softcap);
	/* segments seg … seg_end - 1 of tile, all query heads of KV head kvh. part NULL: merged into op->o.
	 * Else each (row, segment) leaves its partial results there. */
	void (*attn)(const struct apr_op_attn *op, const struct apr_attn_tile *tile, uint32_t kvh, uint32_t seg,
	             uint32_t seg_end, struct apr_attn_work *w, float *part);
	/* merges partial results of one row and head: n_segs of them, stride floats apart, into o */
	void (*attn_merge)(const float *part, size_t stride, uint32_t n_segs, uint32_t v_dim, float *o);
};

extern const struct apr_ops_isa apr_ops_scalar, apr_ops_avx2, apr_ops_avx512, apr_ops_neon;

static inline uint32_t apr_attn_ldv(uint32_t v_dim)
{
	return (v_dim + 15u) & ~15u;
}

/* First position that a row at pos sees. */
static inline uint32_t apr_attn_first(uint32_t pos, uint32_t window)
{
	return window && pos >= window ? pos + 1 - window : 0;
}

#endif
