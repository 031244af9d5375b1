/* SPDX-License-Identifier: MIT */
/*
 * The forward pass of every architecture, written once over kernels/ops.h.
 *
 * Owns: which ops make up a model and in which order; the RoPE tables' contents.
 * Does not own the buffers (the plan's) nor when it runs (a backend records it).
 */
#ifndef APR_ENGINE_FORWARD_H
#define APR_ENGINE_FORWARD_H

#include "engine/backend.h"

#define APR_MAX_ROPE_TABLES 4u

struct apr_rope_spec { /* one distinct table */
	float base;
	bool scaled;
};

struct apr_forward {
	const struct apr_model *model;
	const struct apr_weights *weights;
	const struct apr_sizes *sizes;
	float *x[2], *y, *q, *o, *a, *logits; /* the plan's, in the backend's memory */
	uint32_t n_ropes;
	struct apr_rope_spec rope[APR_MAX_ROPE_TABLES];
	float *rope_table[APR_MAX_ROPE_TABLES]; /* [n_ctx][n_rot / 2][2] */
	struct apr_kv_layer *kv;                /* [n_layers] */
	uint8_t *rope_of;                       /* [n_layers] */
};

/* Groups layers by KV shape and finds the distinct RoPE tables. -ENOTSUP with err; -ENOMEM. */
int apr_forward_init(struct apr_forward *f, const struct apr_model *m, struct apr_sizes *s, char *err, size_t errlen);
void apr_forward_free(struct apr_forward *f);
/* The build function of apr_backend.record; arg is a struct apr_forward. */
int apr_forward_build(void *arg, const struct apr_ops *ops);
/* A readable name of the layer and op that a recorder refused: "blk.3 attn_in". */
const char *apr_forward_where(char *buf, size_t len, uint32_t call);

/* Fills out[n_ctx][n_rot / 2][2] with cosine and sine (yarn's magnitude included), from F64. */
void apr_rope_fill(const struct apr_rope *r, float base, bool scaled, uint32_t n_ctx, float *out);

#endif
