/* SPDX-License-Identifier: MIT */
/*
 * The operations of a forward pass, as one table that a backend fills in.
 *
 * Owns: the arguments of each op, their shapes and meaning. Does not own how a
 * backend computes them, nor which ops make up a model (engine/forward.c).
 *
 * Ops are recorded: engine/forward.c calls them once per graph; the backend keeps
 * the calls (CUDA captures them, the CPU keeps the list) and replays them with the
 * live rows of each step. So args hold addresses that never change, and what
 * changes from step to step (row count, tokens, positions, page tables) is read
 * through struct apr_rows at replay. Arg structs are copied by the recorder; the
 * structs they point to (apr_mat, apr_kv_layer, tables) live as long as the model.
 *
 * Shapes: x, x_out, y are rows × n_embd F32. Between ops a layer carries x (the
 * residual) and y (not yet added). q and o are rows × n_heads × head dim, F32.
 * A pointer marked "or NULL" is absent when NULL.
 */
#ifndef APR_KERNELS_OPS_H
#define APR_KERNELS_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/types.h"

#define APR_KV_PAGE 64u      /* tokens a KV page */
#define APR_KV_SEGMENT 256u  /* keys a softmax segment; see ENGINE: fresh (m, l, o), merged ascending */
#define APR_MAX_SLOTS 64u    /* sequences that run at once */
#define APR_HEAD_ROWS 64u    /* logits rows at a time */

struct apr_mat; /* a weight as the backend keeps it (CPU: struct apr_linear) */

/* The rows of a step, in the backend's memory; rewritten between steps, never moved. */
struct apr_rows {
	uint32_t n;            /* live rows */
	uint32_t n_out;        /* rows whose logits are wanted (indices in out[]) */
	const int32_t *tok;    /* [n] ids */
	const uint32_t *pos;   /* [n] absolute positions */
	const uint32_t *slot;  /* [n] page-table row */
	const uint32_t *out;   /* [n_out] row indices, ascending */
};

/* Numbers as enum apr_ffn_act and enum apr_rope_kind of model/model.h, which kernels/ does not see. */
enum apr_op_act { APR_OP_SILU, APR_OP_GELU_TANH, APR_OP_GELU, APR_OP_RELU2 };
enum apr_op_rope { APR_OP_ROPE_NONE, APR_OP_ROPE_PAIRS, APR_OP_ROPE_HALVES };

enum apr_kv_type { APR_KV_F16, APR_KV_F32, APR_KV_BF16 };

/* One group of layers with equal KV shape, its pages and its page table. */
struct apr_kv_group {
	enum apr_kv_type type;
	uint32_t n_layers, n_kv_heads, k_dim, v_dim;
	uint32_t window;       /* 0 = full */
	uint32_t n_pages, max_pages_seq;
	uint64_t layer_bytes;  /* K[kv_head][64][k_dim] then V[kv_head][64][v_dim], one layer of a page */
	uint8_t *pool;         /* page p, layer l at pool + (p * n_layers + l) * layer_bytes */
	const uint32_t *table; /* [APR_MAX_SLOTS][max_pages_seq]: page of positions 64 i … 64 i + 63 */
};
struct apr_kv_layer {
	const struct apr_kv_group *group;
	uint32_t index; /* layer within the group */
};

struct apr_norm { /* RMS: x · w / sqrt(mean(x²) + eps) */
	const float *w;
	float eps;
};
struct apr_rope_table {
	uint32_t kind;          /* enum apr_rope_kind: 0 none, 1 neighbouring pairs, 2 halves */
	uint32_t n_rot;
	const float *cos_sin;   /* [n_ctx][n_rot / 2][2] */
};

struct apr_op_embed {
	float *x;
	const struct apr_mat *w;
	uint32_t n_embd;
	float scale;
};
/* x_out = x + post(y); h = norm(x_out); q, k, v = h·W + b; q, k normed per head, rotated; k, v to pages */
struct apr_op_attn_in {
	const float *x, *y; /* y or NULL (first layer: x_out = x) */
	float *x_out;
	struct apr_norm post; /* w NULL: y is added as it is */
	struct apr_norm norm;
	uint32_t n_embd, n_heads, n_kv_heads, k_dim, v_dim;
	const struct apr_mat *wq, *wk, *wv;
	const float *bq, *bk, *bv;     /* or NULL */
	struct apr_norm q_norm, k_norm; /* w NULL: none */
	struct apr_rope_table rope;
	float *q;
	struct apr_kv_layer kv;
};
struct apr_op_attn { /* o = softmax(scale · q·K, causal, window) · V, keys from pages only */
	const float *q;
	float *o;
	uint32_t n_heads, n_kv_heads, k_dim, v_dim;
	float scale, softcap; /* softcap 0 = none */
	uint32_t window;      /* 0 = all earlier positions; else pos - window < key <= pos */
	struct apr_kv_layer kv;
};
struct apr_op_proj { /* y = in · W + bias */
	const float *in;
	float *y;
	uint32_t n_in, n_out;
	const struct apr_mat *w;
	const float *bias; /* or NULL */
};
/* x_out = x + post(y); h = norm(x_out); a = act(h·Wgate) * (h·Wup) */
struct apr_op_ffn_in {
	const float *x, *y;
	float *x_out;
	struct apr_norm post, norm;
	uint32_t n_embd, n_ff;
	const struct apr_mat *gate, *up; /* gate or NULL: a = act(h·Wup) */
	uint32_t act;                    /* enum apr_ffn_act */
	float *a;
};
/* logits[i] = norm(x + post(y))[rows.out[i]] · W, i in first … first + APR_HEAD_ROWS - 1 */
struct apr_op_head {
	const float *x, *y;
	struct apr_norm post, norm;
	uint32_t n_embd, n_vocab;
	const struct apr_mat *w;
	float *logits; /* APR_HEAD_ROWS × n_vocab */
	float scale, softcap;
};

struct apr_ops {
	void *ctx; /* the recorder */
	int (*embed)(void *ctx, const struct apr_op_embed *);
	int (*attn_in)(void *ctx, const struct apr_op_attn_in *);
	int (*attn)(void *ctx, const struct apr_op_attn *);
	int (*proj)(void *ctx, const struct apr_op_proj *);
	int (*ffn_in)(void *ctx, const struct apr_op_ffn_in *);
	int (*head)(void *ctx, const struct apr_op_head *);
};

#endif
