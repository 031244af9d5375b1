/* SPDX-License-Identifier: MIT */
/*
 * What the programs share that hold a GPU's answers against the CPU's: jobs over one
 * list of ids, comparisons that count themselves, six small random models.
 *
 * Owns: the count of checks and misses, the ids, the same-bits checks that every route
 * must pass. Does not own bars (each program's) nor the scheduler (drive.h).
 * One thread.
 */
#ifndef APR_TEST_GPU_RUN_H
#define APR_TEST_GPU_RUN_H

#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"

#define RUN_SCORED 300u
#define RUN_IDS 2048u

struct run_state {
	unsigned checks, missed;
	bool chatty; /* lines of the log about single products too */
	uint32_t ids[RUN_IDS];
};
extern struct run_state run_state;

/* Counts; a miss is said with the name of what was tried. */
void run_check(int ok, const char *what, const char *which);
double run_now(void); /* seconds */
/* An engine's log on stdout. */
void run_say(void *arg, enum apr_log_level level, const char *line);

struct run_errors { /* in nats */
	double sum, max;
	unsigned n;
};
void run_add_error(struct run_errors *e, double d);
/* |a - b| of each position's log-probability; as many of both is a check. */
struct run_errors run_compare(const struct drive_job *gpu, const struct drive_job *cpu, const char *which);

struct drive_job run_score_job(bool step, uint64_t scope);
struct drive_job run_gen_job(uint32_t n_prompt, uint32_t n, uint64_t seed, uint64_t scope);
struct drive_job run_pace_job(uint32_t n_prompt, uint32_t n, uint64_t scope); /* greedy, no log-probabilities */
/* All to their ends; a failure of the engine is a miss. */
void run_jobs(struct apr_engine *e, struct apr_loaded *m, struct drive_job *jobs, uint32_t n, const char *which);
/* Seconds of one pace job; that it gave every token is a check. */
double run_time_job(struct apr_engine *e, struct apr_loaded *m, uint32_t n_prompt, uint32_t n, uint64_t scope);
/* Equal ids and bits, and some of them. */
void run_same(const struct drive_job *a, const struct drive_job *b, const char *what, const char *which);
/* One request alone, in chunks, among others, preempted, over a warm cache. */
void run_equal_bits(struct apr_engine *e, struct apr_loaded *m, const char *which);

/* Calls each over a fresh folder and the models' shapes; only: a name, or NULL for all. 0, or 1: no folder. */
typedef void (*run_model_fn)(const char *dir, const char *which, const struct tiny_spec *spec);
int run_random_models(const char *dir_template, const char *only, run_model_fn each, void (*at_end)(void));

#endif
