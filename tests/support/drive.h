/* SPDX-License-Identifier: MIT */
/*
 * Drives an engine as the daemon would, for tests and benchmarks: several
 * sequences at once, chunks, preemption, cancels.
 *
 * Owns: the small scheduler here and the results it collects. Out of memory ends
 * the program.
 */
#ifndef APR_TEST_DRIVE_H
#define APR_TEST_DRIVE_H

#include "engine/engine.h"

/* Set in a sanitizer build, where minutes matter and malloc is not ours. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DRIVE_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define DRIVE_SANITIZED 1
#endif
#endif
#ifndef DRIVE_SANITIZED
#define DRIVE_SANITIZED 0
#endif

struct drive_token {
	uint32_t index, id;
	float logprob;
	uint32_t n_top, top_id[APR_SAMPLE_TOP_MAX];
	float top_logprob[APR_SAMPLE_TOP_MAX];
};

struct drive_job {
	struct apr_seq_params p;
	uint32_t chunk;      /* prefill rows a step; 0 = as many as fit */
	uint32_t start_step; /* joins at this step */
	uint32_t drop_every; /* preempted after so many of its steps; 0 = never */
	uint32_t cancel_at;  /* freed after so many tokens; 0 = never */

	/* results */
	int rc;              /* of apr_seq_new */
	uint32_t bad;
	struct drive_token *tok;
	uint32_t n_tok, cap;
	enum apr_record_end end;
	uint32_t n_ends, n_cached, drops;
	struct apr_seq *seq; /* while it runs */
	uint32_t steps;
	bool begun;
};

/* Fills a config for the CPU with the given values; no cache folder. */
struct apr_engine_config drive_config(const char *route, uint32_t n_ctx, uint32_t threads);
/* Opens an engine and loads one model into it. Ends the program with a message on failure where must is true. */
int drive_open(const struct apr_engine_config *cfg, const char *path, struct apr_engine **e, struct apr_loaded **m, char *err,
               size_t errlen);
void drive_close(struct apr_engine *e, struct apr_loaded *m);

/* Greedy, everything off. */
struct apr_sample_params drive_greedy(void);
/* No step is submitted while one is in flight, whatever the backend takes. */
extern bool drive_one_step;
/* Runs all jobs to their ends, with as many steps in flight as there is room for. Returns steps run; negative: a failure of the engine. */
int drive_run(struct apr_loaded *m, struct apr_engine *e, struct drive_job *jobs, uint32_t n);
void drive_done(struct drive_job *jobs, uint32_t n); /* frees results */
/* Equal ids and equal bits of every log-probability? */
bool drive_same_token(const struct drive_token *a, const struct drive_token *b);
/* Waits until there is something to poll. */
void drive_wait(struct apr_engine *e);

#endif
