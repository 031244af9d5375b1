/* SPDX-License-Identifier: MIT */
/*
 * What the attention kernels share: arguments, scores, the merge of segments.
 *
 * Owns: struct attn_args; the arithmetic around the products. Keys are taken in
 * segments of 256 aligned to absolute position; each starts with a fresh (m, l, o);
 * segments are merged ascending. Does not own the kernels.
 */
#ifndef APR_KERNELS_CUDA_ATTN_CUH
#define APR_KERNELS_CUDA_ATTN_CUH

#include "kernels/cuda/proj.cuh"

struct attn_args {
	const float *q;
	float *o;
	uint32_t n_heads, group; /* group: query heads a KV head */
	float scale, softcap;
	uint32_t window;
	proj_kv kv;
	apr_cuda_rows rows;
	uint32_t bucket;
	/* decode: partial results [row][segment][head], counters [row][KV head][head tile] */
	float *part_o;
	float2 *part_ml;
	uint32_t *count;
	uint32_t segs; /* segments a row can have */
	/* prefill */
	const apr_cuda_attn_tile *tiles;
	const uint32_t *n_tiles;
};

/* A score in units of log2: s is q · k times 1 / unit, a power of two. factor: attn_factor of the row. */
DEV float attn_factor(const attn_args &a, float unit)
{
	return a.softcap != 0.0f ? unit * a.scale / a.softcap : unit * a.scale * APR_LOG2E;
}
template <bool CAP> DEV float attn_score_as(const attn_args &a, float s, float factor)
{
	return CAP ? a.softcap * apr_tanh(s * factor) * APR_LOG2E : s * factor;
}
DEV float attn_score(const attn_args &a, float s, float unit)
{
	return a.softcap != 0.0f ? attn_score_as<true>(a, s, attn_factor(a, unit))
	                         : attn_score_as<false>(a, s, attn_factor(a, unit));
}
/* First key that the row at pos sees */
DEV uint32_t attn_first(uint32_t pos, uint32_t window)
{
	return window && pos >= window ? pos + 1 - window : 0;
}

struct attn_merge { /* of one row and head: (M, L) so far; factors for the accumulated and for the new segment */
	float m, l, keep, add;

	__device__ __forceinline__ void segment(float ms, float ls)
	{
		float mn = fmaxf(m, ms), base = mn == -INFINITY ? 0.0f : mn;

		keep = exp2_fast(m - base);
		add = exp2_fast(ms - base);
		l = fmaf(l, keep, ls * add);
		m = mn;
	}
	__device__ __forceinline__ float sum(float total, float o) const { return fmaf(total, keep, o * add); }
};

static inline attn_args attn_args_of(const apr_cuda_launch *l, const apr_op_attn *op)
{
	const apr_kv_group *g = op->kv.group;
	attn_args a = {};

	a.q = op->q, a.o = op->o;
	a.n_heads = op->n_heads, a.group = op->n_heads / op->n_kv_heads;
	a.scale = op->scale, a.softcap = op->softcap, a.window = op->window;
	a.kv = {g->pool,           g->table,       g->max_pages_seq, g->n_layers, op->kv.index,
	        (uint32_t)g->type, op->n_kv_heads, op->k_dim,        op->v_dim,   g->layer_bytes};
	a.rows = l->rows, a.bucket = l->bucket;
	return a;
}
/* Shapes of the tensor-core kernels */
static inline bool attn_on_tensor_cores(const apr_op_attn *op)
{
	return op->kv.group->type == APR_KV_F16 && op->k_dim % 16 == 0 && op->v_dim % 16 == 0 && op->k_dim <= 256 &&
	       op->v_dim <= 256;
}

/* Shapes of the kernel by warpgroups, which reads queries that are F16 already (ops_cuda.h) */
static inline bool attn_queries_half(const apr_kv_group *g, uint32_t k_dim, uint32_t v_dim)
{
	return g->type == APR_KV_F16 && k_dim == v_dim && (k_dim == 64 || k_dim == 128 || k_dim == 256);
}
/* The inverses that follow the heads of a row of such queries */
HD const float *attn_units(const void *q, uint32_t row, uint32_t n_heads, uint32_t k_dim)
{
	return (const float *)((const uint8_t *)q + (size_t)row * n_heads * k_dim * 4 + n_heads * k_dim * 2);
}

int attn_mma_launch(const apr_cuda_launch *l, const apr_op_attn *op, const attn_args *a, uint32_t max_tiles);
int attn_plain_launch(const apr_cuda_launch *l, const attn_args *a);

#endif
