/* SPDX-License-Identifier: MIT */
/*
 * The boundary between the engine and a backend: one table of functions over
 * opaque types. The CPU's is linked in (engine/cpu_backend.c); a module such as
 * libaprd-cuda.so exports one symbol of this type and calls back only through
 * pointers it was given here.
 *
 * Owns: the shapes of what crosses the boundary: memory plan, weights, the
 * recorded forward pass, one step, its results. Does not own sequences, pages'
 * meaning or fairness (the engine's), nor the ops' arithmetic (kernels/).
 *
 * Threads: everything of one backend instance is called from one thread at a
 * time, but submit, poll and records, which the engine's driving thread calls
 * while load or unload of another model may run on a second one. submit and poll never wait.
 *
 * Depth: how many steps of a model may be submitted whose records are not fetched
 * yet. With two, one runs and one waits behind it, and the host has not seen what the
 * first one drew when it submits the second: a row says APR_TOK_LAST, and the backend
 * keeps for each slot the token drawn last and whether anything follows it.
 * 0 or -errno; err (where given) gets one line.
 */
#ifndef APR_ENGINE_BACKEND_H
#define APR_ENGINE_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/common/sample.h"
#include "kernels/ops.h"
#include "model/model.h"

#define APR_BACKEND_ABI 2u
#define APR_PLAN_LINES 40u
#define APR_MAX_KV_GROUPS 16u
#define APR_MAX_DEPTH 2u

/* ---- the memory plan: every byte a model will ever hold, as lines -------------- */

enum apr_place {
	APR_PLACE_HOST, APR_PLACE_DEVICE, APR_PLACE_PINNED,
	APR_PLACE_FILE, /* a mapped file; load makes it */
	APR_PLACE_HEAP  /* host memory that the engine itself takes before load returns */
};

struct apr_plan_line {
	const char *purpose; /* static text, as status prints it */
	enum apr_place place;
	uint64_t bytes;
	void *base;   /* filled by reserve (not FILE, HEAP); 64-aligned, zero-filled */
};
struct apr_plan {
	struct apr_plan_line line[APR_PLAN_LINES];
	uint32_t n;
	bool overflow; /* a line's size did not fit 63 bits, or too many lines */
};

/* What a loaded model was sized for; the engine fixes it before need() is asked. */
struct apr_sizes {
	uint32_t n_ctx, max_rows; /* rows of one step */
	uint32_t n_vocab;         /* rows of the output matrix */
	uint32_t n_real;          /* ids that may be sampled: the first n_real */
	uint8_t route_id;
	enum apr_kv_type kv_type;
	uint32_t n_groups;
	struct apr_kv_group group[APR_MAX_KV_GROUPS]; /* pool filled by the engine from the plan */
};

/* ---- weights as the backend keeps them ----------------------------------------- */

struct apr_layer_weights { /* NULL where the model has none */
	const struct apr_mat *wq, *wk, *wv, *wo, *gate, *up, *down;
	const float *attn_norm, *post_attn_norm, *ffn_norm, *post_ffn_norm;
	const float *bq, *bk, *bv, *bo, *q_norm, *k_norm;
};
struct apr_weights {
	const struct apr_mat *tok_embd, *output; /* equal where tied */
	const float *output_norm;
	const struct apr_layer_weights *layers;
};

/* ---- a step -------------------------------------------------------------------- */

enum apr_draw_kind { APR_DRAW_SAMPLE, APR_DRAW_SCORE };

struct apr_draw { /* one wanted row of logits and what to do with it; all pointers live until the step ends */
	enum apr_draw_kind kind;
	const struct apr_sample_params *params; /* SAMPLE */
	const struct apr_seen *seen;
	uint32_t n_seen;
	uint32_t position;  /* SAMPLE: of the token drawn */
	uint32_t score_id;  /* SCORE: whose log-probability */
	uint32_t n_top;
	bool want_logprob;
	/* SAMPLE: what becomes of the slot; read by a backend that is two deep */
	uint32_t slot;
	bool last;            /* the limit: nothing follows, whatever is drawn */
	const uint32_t *ends; /* [n_ends] nothing follows one of these */
	uint32_t n_ends;
	/* the row's own token is APR_TOK_LAST, so that seen cannot have it: it counts once more there, as output */
	bool unseen;
};
struct apr_table_update { /* page-table entries that changed since the slot's last step */
	uint32_t group, slot, first, n;
	const uint32_t *pages; /* [n] */
};
/* In tok: what the slot's last draw chose, in the step submitted just before. Where nothing follows that token the row is
 * dead: it writes no KV, and its results mean nothing. */
#define APR_TOK_LAST (-1)
enum apr_row_kind { APR_ROW_PROMPT, APR_ROW_GENERATED }; /* which arithmetic: ENGINE, section 1 */
struct apr_step {
	uint32_t n_rows, n_draws, n_updates;
	const int32_t *tok;      /* [n_rows] */
	const uint32_t *pos, *slot;
	const uint32_t *out;     /* [n_draws] row of each draw, ascending */
	const struct apr_draw *draws;
	const struct apr_table_update *updates;
	const uint8_t *kind;     /* [n_rows] enum apr_row_kind; a sequence's PROMPT rows precede its GENERATED ones */
};
/* NEAR: it runs and will end soon, so that it is time to submit the next one. */
enum apr_step_state { APR_STEP_IDLE, APR_STEP_RUNNING, APR_STEP_NEAR, APR_STEP_DONE };

/* ---- the table ----------------------------------------------------------------- */

struct apr_backend_ctx;   /* an open backend */
struct apr_backend_model; /* a model in it */

struct apr_backend_config {
	uint32_t threads;  /* CPU; 0 = usable */
	uint32_t device;   /* ordinal */
	uint64_t memory;   /* bytes to take at open; 0 = the backend's default */
	bool set_fused_rows; /* GPU: fused_rows prompt rows, at most, read the tiles themselves; else as measured */
	uint32_t fused_rows;
	int notify_fd;     /* an eventfd that gets 1 when a step ends or is near its end; the caller's */
	bool no_graphs;    /* the launches of a step one by one, for comparison */
	void (*log)(void *arg, int level, const char *line);
	void *log_arg;
};
struct apr_backend_load {
	const struct apr_model *model;
	const struct apr_sizes *sizes;
	struct apr_plan *plan;  /* reserved */
	const char *cache_dir;  /* or NULL */
	void (*progress)(void *arg, double done); /* or NULL */
	void *progress_arg;
	struct apr_weights *weights; /* filled: as long-lived as the model in the backend */
};
struct apr_backend_route {
	const char *name;
	uint8_t id;             /* enum apr_route_id of the ABI */
	enum apr_kv_type kv_type; /* its default */
	const char *arithmetic;   /* routes of one name give equal bits: a part of numerics */
	bool equal_bits;          /* the promise of ENGINE, section 1, holds on it */
};
enum apr_graph_kind { APR_GRAPH_STEP, APR_GRAPH_DECODE, APR_GRAPH_PREFILL, APR_GRAPH_HEAD };
struct apr_bucket { /* what was recorded for steps of up to so many rows */
	enum apr_graph_kind kind;
	uint32_t rows;
	uint64_t replays;
};
typedef int (*apr_build_fn)(void *arg, const struct apr_ops *ops);

enum apr_op_kind { APR_OP_EMBED, APR_OP_ATTN_IN, APR_OP_ATTN, APR_OP_PROJ, APR_OP_FFN_IN, APR_OP_HEAD };

struct apr_backend {
	uint32_t abi, size; /* APR_BACKEND_ABI, sizeof(struct apr_backend) */
	const char *name;   /* "cpu" */
	uint8_t id;         /* enum apr_backend_id of the ABI */
	const struct apr_backend_route *routes; /* the first is the default; ends with name NULL */
	uint32_t depth;       /* 1 … APR_MAX_DEPTH */
	enum apr_place place; /* of the buffers that the ops compute in: HOST or DEVICE */

	/* Is there a device that this backend can drive? device: one line about it. */
	int (*probe)(const struct apr_backend_config *cfg, char *device, size_t devlen, char *err, size_t errlen);
	int (*open)(struct apr_backend_ctx **out, const struct apr_backend_config *cfg, char *err, size_t errlen);
	/* -ENOTSUP: this op with these arguments cannot be computed; err says why (the caller adds the layer). */
	int (*supports)(struct apr_backend_ctx *c, enum apr_op_kind kind, const void *args, uint8_t route_id, char *err,
	                size_t errlen);
	uint32_t (*threads)(const struct apr_backend_ctx *c); /* compute threads; 0 where that means nothing */
	uint64_t (*available)(struct apr_backend_ctx *c);     /* bytes a plan may take now */
	/* Adds the backend's own lines (weights, scratch, workspaces). */
	int (*need)(struct apr_backend_ctx *c, const struct apr_model *m, const struct apr_sizes *s, bool have_cache,
	            struct apr_plan *plan);
	/* Fills base of every line but FILE and HEAP ones; unreserve undoes it. */
	int (*reserve)(struct apr_backend_ctx *c, struct apr_plan *plan, char *err, size_t errlen);
	void (*unreserve)(struct apr_backend_ctx *c, struct apr_plan *plan);
	int (*load)(struct apr_backend_ctx *c, const struct apr_backend_load *in, struct apr_backend_model **out, char *err,
	            size_t errlen);
	void (*unload)(struct apr_backend_model *m);
	int (*upload)(struct apr_backend_ctx *c, void *dst, const void *src, uint64_t bytes); /* into a line of the plan */
	/* Runs build once over the recorder's ops; replayed with the live rows of each step. */
	int (*record)(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t bucket, apr_build_fn build, void *arg,
	              char *err, size_t errlen);
	/* What is recorded; fills at most max, returns how many there are. bytes: what it holds in the backend's memory beside the
	 * plan. Any thread. */
	uint32_t (*buckets)(const struct apr_backend_model *m, struct apr_bucket *out, uint32_t max, uint64_t *bytes);
	/* Replays one with the real weights and rows that are nobody's; waits for it; the best of a few in µs. Any thread but
	 * the driving one; steps go on beside it. NULL: this backend has nothing to warm. */
	int (*warm)(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t rows, double *us, char *err, size_t errlen);
	/* Enqueues. The step and what it points at stay untouched until its records are fetched; what draws point at, and a
	 * table update's pages, are read by submit alone where the depth is above 1. -EBUSY: as many as the depth are there. */
	int (*submit)(struct apr_backend_model *m, const struct apr_step *step);
	/* Of the oldest step whose records are not fetched; IDLE: there is none. */
	enum apr_step_state (*poll)(struct apr_backend_model *m);
	/* Fetches that step's, which is DONE: one result a draw, valid until the next submit. Negative: the step failed. */
	int (*records)(struct apr_backend_model *m, const struct apr_sample_result **out);
	void (*fence)(struct apr_backend_model *m); /* waits until no step runs (unload, close) */
	/* n pages of a group, all its layers: to zero, or copied. No step in flight may name them. */
	int (*kv_zero)(struct apr_backend_model *m, uint32_t group, const uint32_t *pages, uint32_t n);
	int (*kv_copy)(struct apr_backend_model *m, uint32_t group, const uint32_t *from, const uint32_t *to, uint32_t n);
	int (*health)(struct apr_backend_ctx *c, char *err, size_t errlen); /* 0, or a sticky error */
	void (*close)(struct apr_backend_ctx *c);
	/* What besides the engine's own build decides an answer's bits: module, device, driver, libraries. One line that
	 * lives as long as c; NULL (the CPU): nothing. */
	const char *(*identity)(const struct apr_backend_ctx *c);
	/* One line about how a model is computed, for status; or NULL. */
	int (*describe)(const struct apr_backend_model *m, char *buf, size_t len);
};

extern const struct apr_backend apr_cpu_backend;

#endif
