/* SPDX-License-Identifier: MIT */
/*
 * What the engine's files share and nobody else sees (tests/engine/ apart).
 *
 * Owns: the structs behind engine.h's opaque names and who writes which field.
 */
#ifndef APR_ENGINE_INTERNAL_H
#define APR_ENGINE_INTERNAL_H

#include <pthread.h>

#include "engine/backend.h"
#include "engine/engine.h"
#include "engine/forward.h"
#include "engine/kv.h"

#define APR_DEFAULT_CTX 8192u
#define APR_DEFAULT_CHUNK 512u
#define APR_DEVICE_CHUNK 2048u /* where its buffers fit: most prompts are one chunk, at full speed */
#define APR_NO_SLOT UINT32_MAX

struct apr_engine {
	struct apr_engine_config cfg; /* strings are this struct's copies */
	char *backend_name, *route_name, *kv_name, *cache_dir;
	const struct apr_backend *backend;
	struct apr_backend_ctx *ctx;
	uint32_t device; /* ordinal, of a backend that has several */
	struct apr_engine_info info;
	int notify_fd;
	pthread_mutex_t lock;     /* guards loaded's links and resting: readers from any thread hold it while they look */
	struct apr_loaded *loaded;
};

struct apr_loaded {
	struct apr_engine *engine;
	struct apr_loaded *next;
	char *name;
	struct apr_model *model;
	struct apr_tokenizer *tok;
	struct apr_sizes sizes;
	struct apr_plan plan;
	bool reserved;
	bool resting; /* weights, pages and buffers are given up; file, tokenizer and sizes are there */
	const struct apr_backend_route *route;
	struct apr_weights weights;
	struct apr_backend_model *bm;
	struct apr_forward forward;
	uint8_t numerics[32];
	struct apr_kv *kv;

	/* the driving thread's from here on */
	struct apr_seq *slot[APR_MAX_SLOTS];
	uint32_t n_seqs;
	struct apr_seq *zombies; /* freed while a step named them */
	struct apr_stepper *stepper;
};

struct apr_seq {
	struct apr_loaded *m;
	struct apr_seq *next_zombie;
	void *user;
	enum apr_seq_kind kind;
	uint32_t slot; /* APR_NO_SLOT: suspended */
	uint64_t scope;

	uint32_t *ids;     /* [capacity]: prompt, then generated */
	uint64_t *kinds;   /* a bit each: set where it was generated */
	bool turns;        /* some of the prompt was: an earlier turn's answer */
	uint32_t capacity, n_prompt, n_known;
	uint32_t n_done;   /* positions whose KV is there or enqueued */
	uint32_t n_cached; /* of the prompt, by the first look-up */
	uint32_t n_scored; /* SCORE: rows whose result was reported or is on its way */
	uint32_t n_rows;   /* SCORE: rows to compute in all */
	uint32_t limit;    /* n_known at which generation ends */
	bool looked_up;    /* the prefix cache was asked since the KV was last empty */
	bool prefill_only; /* max_tokens 0 */
	bool force_decode, want_logprob;
	bool ended, freed, drop_after, suspend_after;
	uint32_t in_steps; /* steps in flight that name it */
	uint32_t pending;  /* tokens drawn by those, not known here yet */
	uint32_t seen_from; /* ids below have left the penalty window */

	struct apr_sample_params params;
	uint32_t *bias_id;
	float *bias;
	uint32_t *ends, n_ends; /* stop ids, and the end tokens that count */
	uint32_t n_top;
	struct apr_seen_set *seen; /* NULL where no penalty is on */
	struct apr_kv_seq kv;
};

/* engine/seq.c, for step.c */
void apr_seq_take(struct apr_seq *s, uint32_t id); /* a sampled token becomes known */
bool apr_seq_is_stop(const struct apr_seq *s, uint32_t id);
void apr_seq_slide(struct apr_seq *s, uint32_t pos); /* the penalty window, for a draw at pos */
void apr_seq_look_up(struct apr_seq *s); /* the prefix cache, once while nothing is computed */
uint32_t apr_seq_todo(const struct apr_seq *s);
bool apr_seq_given(const struct apr_seq *s, uint32_t pos); /* else it was generated, or is about to be */
bool apr_seq_wants_row(const struct apr_seq *s, uint32_t pos); /* logits of that position are wanted */
void apr_seq_given_up(struct apr_seq *s); /* no step names it any more: what waited for that */
void apr_seq_destroy(struct apr_seq *s);

/* engine/step.c */
uint64_t apr_stepper_bytes(const struct apr_sizes *s, uint32_t depth);
int apr_stepper_new(struct apr_loaded *m);
void apr_stepper_free(struct apr_loaded *m);
void apr_stepper_settle(struct apr_loaded *m); /* waits for the steps in flight and forgets their records */
void apr_stepper_forget(struct apr_loaded *m, const struct apr_seq *s); /* drops its records not yet handed out */

/* engine/module.c: finds libaprd-cuda.so, checks that it is of this build and can drive that device. The module stays
 * loaded until the process ends. -ENODEV, -ENOTSUP with err saying why. */
int apr_module_open(const struct apr_backend **out, uint32_t device, char *err, size_t errlen);

/* engine/numerics.c */
void apr_numerics(const struct apr_loaded *m, uint8_t out[32]);

/* engine/seen.c: counts of ids inside a sliding window, as apr_sample wants them */
struct apr_seen_set {
	struct apr_seen *list;
	uint32_t n, cap;
	uint32_t *index;  /* open addressing: position in list + 1, 0 = empty */
	uint32_t mask;
};
struct apr_seen_set *apr_seen_new(uint32_t max_distinct);
void apr_seen_free(struct apr_seen_set *s);
void apr_seen_add(struct apr_seen_set *s, uint32_t id, bool output);
void apr_seen_remove(struct apr_seen_set *s, uint32_t id, bool output);

__attribute__((format(printf, 3, 4))) void apr_engine_log(const struct apr_engine *e, enum apr_log_level level,
                                                          const char *fmt, ...);
__attribute__((format(printf, 3, 4))) void apr_engine_say(char *err, size_t errlen, const char *fmt, ...);
static inline int apr_engine_rc(int rc)
{
	return rc;
}
/* Fills err (which may be NULL) and is rc. A macro, so that whoever analyses a caller sees which rc that is. */
#define apr_engine_fail(rc, err, errlen, ...) (apr_engine_say(err, errlen, __VA_ARGS__), apr_engine_rc(rc))

#endif
