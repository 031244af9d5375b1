/* SPDX-License-Identifier: MIT */
/*
 * The engine: loaded models, sequences and steps, whatever the backend.
 *
 * Owns: the memory plan, weights, KV pages and the prefix cache, sequences, the
 * forward pass, sampling parameters. Does not own requests, clients, queues or
 * fairness (daemon/), nor text: it knows token ids alone (the tokenizer hangs
 * from the loaded model for its users' convenience).
 *
 * Threads: open, load, unload and close on one thread at a time. Everything about
 * sequences and steps of an engine from one thread, the one that drives the
 * backend; it never waits for the backend: apr_step_submit enqueues, apr_step_poll
 * looks, apr_engine_fd becomes readable when there is something to poll.
 * Readers (apr_engine_memory, apr_loaded_*) from any thread between load and unload.
 *
 * 0 or -errno; err (where given) gets one line that names the cause.
 */
#ifndef APR_ENGINE_H
#define APR_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/common/sample.h"
#include "kernels/ops.h"
#include "model/model.h"
#include "model/tokenizer.h"

struct apr_engine;
struct apr_loaded; /* a model in the engine */
struct apr_seq;    /* one sequence: a prompt and what was generated after it */

enum apr_log_level { APR_LOG_DEBUG, APR_LOG_INFO, APR_LOG_WARN };

struct apr_engine_config {
	const char *backend;  /* "auto", "cpu", "cuda[:N]" */
	const char *route;    /* NULL or "auto": the backend's default; "f32", "int16", ... */
	const char *kv_type;  /* NULL: f16 (f32 with route f32); "f16", "f32", "bf16" */
	uint64_t kv_mem;      /* bytes a model; 0 = planned from n_ctx */
	uint64_t gpu_mem;     /* bytes; 0 = the backend's default */
	uint32_t n_ctx;       /* 0 = the model's, at most 8192 */
	uint32_t threads;     /* 0 = usable CPUs */
	uint32_t chunk;       /* prefill rows a step; 0 = the backend's: 512, on a GPU 2048 */
	bool no_graphs;       /* a GPU's launches one by one */
	bool set_fused_rows;  /* GPU: see struct apr_backend_config */
	uint32_t fused_rows;
	const char *cache_dir; /* packed panels; NULL = none kept */
	void (*log)(void *arg, enum apr_log_level level, const char *line);
	void *log_arg;
};

int apr_engine_open(struct apr_engine **out, const struct apr_engine_config *cfg, char *err, size_t errlen);
void apr_engine_close(struct apr_engine *e); /* unloads what is loaded; no step in flight */

struct apr_engine_info {
	const char *backend; /* "cpu", "cuda" */
	uint8_t backend_id;  /* enum apr_backend_id of the ABI */
	char device[128];    /* "AMD EPYC …, avx512+vnni, 2 threads" */
	char why[256];       /* why this backend, where it was not asked for by name */
	bool fell_back;
	uint32_t threads, usable_cpus;
};
void apr_engine_info(const struct apr_engine *e, struct apr_engine_info *info);

/* 0; or the backend is of no use any more, whatever is asked of it: its process is to be replaced. Driving thread. */
int apr_engine_health(const struct apr_engine *e, char *err, size_t errlen);

struct apr_memory_row { /* one line of the plan, as status prints it */
	const char *purpose; /* "weights", "kv", "activations", "logits", ... */
	const char *where;   /* "host", "cache file", "device", ... */
	uint64_t bytes;
	const char *model;   /* name, or "" */
};
/* Fills at most max rows; returns how many there are. */
size_t apr_engine_memory(const struct apr_engine *e, struct apr_memory_row *rows, size_t max);

/* ---- models ------------------------------------------------------------- */

/* Opens, checks, plans, allocates everything, repacks weights, records. Blocking (its own thread in the daemon).
 * progress may be NULL: called with 0 … 1. */
int apr_engine_load(struct apr_engine *e, const char *name, const char *path, void (*progress)(void *arg, double done),
                    void *arg, struct apr_loaded **out, char *err, size_t errlen);
int apr_engine_unload(struct apr_engine *e, struct apr_loaded *m); /* -EBUSY while sequences of it live */

/* Gives up the model's memory but for its file, tokenizer and sizes, which readers go on to see; -EBUSY while sequences
 * live. Until it is woken it has no sequence and no step. As a load is: blocking, on one thread at a time. */
int apr_engine_rest(struct apr_loaded *m);
int apr_engine_wake(struct apr_loaded *m, char *err, size_t errlen); /* rests on where it fails */

const struct apr_model *apr_loaded_model(const struct apr_loaded *m);
const struct apr_tokenizer *apr_loaded_tokenizer(const struct apr_loaded *m);
const char *apr_loaded_name(const struct apr_loaded *m);

struct apr_loaded_info {
	uint32_t n_ctx, n_vocab;
	const char *route, *kv_type;
	uint8_t route_id;
	bool equal_bits;      /* equal numerics promise equal bits on this route */
	char how[160];        /* one line from the backend, or "" */
	uint8_t numerics[32]; /* hash; the receipt is its first 16 bytes */
	bool resting;
	uint64_t bytes;       /* everything this model holds; 0 while it rests */
	uint32_t pages_total, pages_free, pages_cached; /* summed over groups; cached ones count as free */
};
void apr_loaded_info(const struct apr_loaded *m, struct apr_loaded_info *info);

/* What is recorded for steps, so that none is put together while requests wait. */
struct apr_graph_row {
	const char *kind; /* "prefill", "decode", "head": wanted rows and sampling; "step": all of them, on a CPU */
	uint32_t rows;    /* for up to so many */
	uint64_t replays;
};
/* Fills at most max rows; returns how many there are. bytes: memory that they hold. Any thread. */
size_t apr_loaded_graphs(const struct apr_loaded *m, struct apr_graph_row *rows, size_t max, uint64_t *bytes);
/* Replays the bucket with the model's weights, beside the steps that run; the best of a few in µs. Blocking; any thread
 * but the driving one. -ENOENT: no such bucket; -EOPNOTSUPP: this backend has nothing to warm. */
int apr_loaded_warm(struct apr_loaded *m, const char *kind, uint32_t rows, double *us, char *err, size_t errlen);

/* ---- sampling parameters -------------------------------------------------- */

/* What a request gives; have: APR_SET_* bits of the ABI for fields that it sets. */
struct apr_sampling_request {
	uint32_t have;
	float temperature, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty;
	int32_t top_k, penalty_window;
	bool ignore_eos;
};
/* Request over file over built-in. -EINVAL with *field naming what is out of range. */
int apr_sampling_resolve(const struct apr_loaded *m, const struct apr_sampling_request *r, struct apr_sample_params *out,
                         const char **field);

/* ---- sequences ------------------------------------------------------------ */

enum apr_seq_kind { APR_SEQ_GENERATE, APR_SEQ_SCORE };

struct apr_seq_params { /* all of it is copied */
	enum apr_seq_kind kind;
	const uint32_t *ids; /* prompt; SCORE: everything to be scored */
	uint32_t n_ids;
	const uint64_t *kinds; /* a bit an id of a prompt: set where it was generated in an earlier turn, and so is computed by
	                        * decode; NULL: all were given */
	const uint32_t *forced; /* generated earlier, given back (resume); computed by decode */
	uint32_t n_forced;
	uint32_t max_tokens;    /* generated tokens, forced included; UINT32_MAX: to the context's end. 0: prefill alone */
	struct apr_sample_params sampling;
	bool ignore_eos, want_logprob;
	bool force_decode;      /* SCORE --step: every id by the decode arithmetic */
	const uint32_t *stop_ids;
	uint32_t n_stop_ids;
	uint32_t n_top;
	uint64_t scope;         /* prefix pages are shared only within equal scopes */
	void *user;             /* given back in records */
};

/* -EINVAL: no ids (*bad = UINT32_MAX), or one outside the vocabulary (*bad = its index, forced ones counted on);
 * -EDOM: a bias or stop id outside it, or a bias that is NaN or +inf (*bad = its index); -E2BIG: longer than the context; -EAGAIN: all
 * APR_MAX_SLOTS slots in use; -ENOSPC: its prompt can never fit the pool; -ENOMEM. Looks up the prefix cache. */
int apr_seq_new(struct apr_loaded *m, const struct apr_seq_params *p, struct apr_seq **out, uint32_t *bad);
/* Takes effect at the end of the last step that names it; no record of it comes afterwards. */
void apr_seq_free(struct apr_seq *s);

struct apr_seq_state {
	uint32_t n_prompt, n_cached; /* cached: prompt tokens not computed thanks to the prefix cache */
	uint32_t n_computed;         /* positions whose KV is there or enqueued */
	uint32_t n_generated;        /* sampled and reported, forced included */
	uint32_t todo;               /* rows that can be computed now: prefill rows left, or 1 when decoding; 0 = ended */
	uint32_t n_pages;            /* held, over all KV groups */
	bool decoding;
	bool ended;                  /* no row will be computed any more */
};
void apr_seq_state(const struct apr_seq *s, struct apr_seq_state *st);

/* All that is known: the prompt and what was reported after it, with their kinds. As long as s is not stepped. */
uint32_t apr_seq_known(const struct apr_seq *s, const uint32_t **ids, const uint64_t **kinds);

/* Makes sure that pages exist for the next n rows. -EAGAIN: none free now (nothing is taken). */
int apr_seq_reserve(struct apr_seq *s, uint32_t rows);
/* Gives up all pages (preemption); the sequence computes everything again, with the same bits, when next stepped. */
void apr_seq_drop(struct apr_seq *s);
/* Gives up its slot too, at the end of the step that names it: it cannot be stepped until it is resumed. */
void apr_seq_suspend(struct apr_seq *s);
int apr_seq_resume(struct apr_seq *s); /* a slot again. -EAGAIN: none is free */

/* Would a prompt of these ids find that many of its positions in the prefix cache? Takes nothing. */
uint32_t apr_loaded_peek(const struct apr_loaded *m, uint64_t scope, const uint32_t *ids, uint32_t n_ids,
                         const uint64_t *kinds);
/* Are pages for so many positions free now, in every KV group? */
bool apr_loaded_room(const struct apr_loaded *m, uint32_t positions);

/* ---- steps ---------------------------------------------------------------- */

struct apr_step_part {
	struct apr_seq *seq;
	uint32_t rows; /* prefill or forced rows; 1 for decode. What exceeds todo is left out (a recomputed prefix may
	                * have been found in the cache since) */
};
uint32_t apr_step_max_rows(const struct apr_loaded *m); /* rows of one step in all */
/* Enqueues one step of m. pages must have been reserved. A backend that is two deep takes a second step while the first
 * one runs: a sequence of both goes on with a token that is not known here yet, and where that turns out to have ended it,
 * or the sequence is freed meanwhile, its row of the second is computed for nothing and reported to nobody.
 * -EBUSY: no more are taken (poll first). */
int apr_step_submit(struct apr_loaded *m, const struct apr_step_part *parts, uint32_t n_parts);
/* It is time to submit a step: none is in flight, or the one that is will end soon and another may wait behind it. */
bool apr_step_room(const struct apr_loaded *m);

enum apr_record_end { APR_END_NONE, APR_END_STOP_ID, APR_END_LENGTH, APR_END_NUMERIC, APR_END_PROMPT /* max_tokens 0: prefill done; SCORE: done */ };

struct apr_record {
	struct apr_seq *seq;
	void *user;
	bool has_token;     /* false: only an end */
	uint32_t index;     /* GENERATE: index among generated; SCORE: pos of the id scored (1 … n - 1) */
	uint32_t id;
	float logprob;
	enum apr_record_end end; /* the sequence ends with this record (a stop id's record has has_token false) */
	uint32_t n_top;
	uint32_t top_id[APR_SAMPLE_TOP_MAX];
	float top_logprob[APR_SAMPLE_TOP_MAX];
};
/* Records of the oldest step in flight, at most max; *more: call again. -EAGAIN: it still runs. 0 records of an idle
 * engine: 0. Negative: the backend failed: every sequence of that step is lost, which its state's `ended` tells. Returns
 * the number filled. */
int apr_step_poll(struct apr_loaded *m, struct apr_record *out, int max, bool *more);
bool apr_step_in_flight(const struct apr_loaded *m);

/* Readable (eventfd) when a step has ended, or there is room for one more, since the last apr_step_poll that saw it. */
int apr_engine_fd(const struct apr_engine *e);

#endif
