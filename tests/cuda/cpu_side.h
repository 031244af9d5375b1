/* SPDX-License-Identifier: MIT */
/*
 * One layer and the logits by the CPU's ops, for check_layer.cu.
 *
 * Owns: the struct between a C file that sees kernels/cpu and a CUDA file that sees
 * kernels/cuda: both define struct apr_mat, each for itself.
 */
#ifndef APR_TESTS_CUDA_CPU_SIDE_H
#define APR_TESTS_CUDA_CPU_SIDE_H

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SIDE_Q, SIDE_K, SIDE_V, SIDE_O, SIDE_GATE, SIDE_UP, SIDE_DOWN, SIDE_HEAD, SIDE_N };
struct cpu_side {
	uint32_t n_embd, n_ff, n_heads, n_kv_heads, k_dim, v_dim, n_ctx, n_vocab, rows, act;
	struct {
		uint32_t type, n_in, n_out;
		const void *blocks; /* as in the file */
	} w[SIDE_N];
	const float *norm, *post, *head_norm; /* weights of the norms of rows, after attention, of heads (or NULL) */
	const float *bq, *bk, *bv;            /* or NULL */
	struct apr_rope_table rope;
	float softcap;
	const float *x;
	const uint32_t *pos;
	/* results */
	float *y, *a, *y2, *logits; /* after attention, the activation, after the feed-forward, of every row */
};
/* One sequence, F32 keys and values, exact route. 0, or -ENOMEM, -EINVAL. */
int cpu_side_layer(struct cpu_side *s);

#ifdef __cplusplus
}
#endif

#endif
