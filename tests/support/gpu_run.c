/* SPDX-License-Identifier: MIT */
/* See gpu_run.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/types.h"
#include "tests/support/gpu_run.h"

struct run_state run_state;

void run_check(int ok, const char *what, const char *which)
{
	run_state.checks++;
	if (ok)
		return;
	run_state.missed++;
	printf("  MISSED: %s: %s\n", which, what);
}

double run_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void run_say(void *arg, enum apr_log_level level, const char *line)
{
	(void)arg;
	if (level >= APR_LOG_INFO || run_state.chatty)
		printf("    log: %s\n", line);
}

void run_add_error(struct run_errors *e, double d)
{
	e->sum += d;
	e->n++;
	if (!(d <= e->max))
		e->max = d;
}

struct run_errors run_compare(const struct drive_job *gpu, const struct drive_job *cpu, const char *which)
{
	struct run_errors e = {0};
	uint32_t i;

	run_check(gpu->rc == 0 && gpu->n_tok == cpu->n_tok, "as many positions", which);
	for (i = 0; i < gpu->n_tok && i < cpu->n_tok; i++)
		run_add_error(&e, fabs((double)gpu->tok[i].logprob - (double)cpu->tok[i].logprob));
	return e;
}

struct drive_job run_score_job(bool step, uint64_t scope)
{
	return (struct drive_job){.p = {.kind = APR_SEQ_SCORE, .ids = run_state.ids, .n_ids = RUN_SCORED, .n_top = 4, .force_decode = step,
	                                .scope = scope}};
}

struct drive_job run_gen_job(uint32_t n_prompt, uint32_t n, uint64_t seed, uint64_t scope)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_GENERATE, .ids = run_state.ids, .n_ids = n_prompt, .max_tokens = n,
	                            .sampling = drive_greedy(), .ignore_eos = true, .want_logprob = true, .n_top = 3,
	                            .scope = scope}};

	j.p.sampling.temperature = 0.9f;
	j.p.sampling.top_k = 50;
	j.p.sampling.repeat_penalty = 1.1f;
	j.p.sampling.penalty_window = 64;
	j.p.sampling.seed = seed;
	return j;
}

void run_jobs(struct apr_engine *e, struct apr_loaded *m, struct drive_job *jobs, uint32_t n, const char *which)
{
	run_check(drive_run(m, e, jobs, n) > 0, "the engine failed", which);
}

void run_same(const struct drive_job *a, const struct drive_job *b, const char *what, const char *which)
{
	uint32_t i;

	if (a->rc || b->rc || a->n_tok != b->n_tok || !a->n_tok) {
		printf("  %s: %s: rc %d %d, %u and %u tokens\n", which, what, a->rc, b->rc, a->n_tok, b->n_tok);
		run_check(0, what, which);
		return;
	}
	for (i = 0; i < a->n_tok; i++) {
		const struct drive_token *x = &a->tok[i], *y = &b->tok[i];

		if (drive_same_token(x, y))
			continue;
		printf("  %s: %s: token %u: %u %.9g against %u %.9g\n", which, what, i, x->id, (double)x->logprob, y->id,
		       (double)y->logprob);
		break;
	}
	run_check(i == a->n_tok, what, which);
}

struct drive_job run_pace_job(uint32_t n_prompt, uint32_t n, uint64_t scope)
{
	return (struct drive_job){.p = {.kind = APR_SEQ_GENERATE, .ids = run_state.ids, .n_ids = n_prompt, .max_tokens = n,
	                                .sampling = drive_greedy(), .ignore_eos = true, .scope = scope}};
}

double run_time_job(struct apr_engine *e, struct apr_loaded *m, uint32_t n_prompt, uint32_t n, uint64_t scope)
{
	struct drive_job j = run_pace_job(n_prompt, n, scope);
	double t0 = run_now();

	run_jobs(e, m, &j, 1, "pace");
	run_check(j.n_tok == n, "every token", "pace");
	t0 = run_now() - t0;
	drive_done(&j, 1);
	return t0;
}

void run_equal_bits(struct apr_engine *e, struct apr_loaded *m, const char *which)
{
	static const uint32_t chunk[] = {1, 63, 64, 65, 200};
	struct drive_job want = run_gen_job(200, 40, 5, 100), jobs[12];
	uint32_t i;
	char what[48];

	run_jobs(e, m, &want, 1, which);
	for (i = 0; i < sizeof chunk / sizeof *chunk; i++) {
		struct drive_job j = run_gen_job(200, 40, 5, 101 + i);

		j.chunk = chunk[i];
		run_jobs(e, m, &j, 1, which);
		snprintf(what, sizeof what, "chunks of %u", chunk[i]);
		run_same(&want, &j, what, which);
		drive_done(&j, 1);
	}
	for (i = 0; i < 12; i++) {
		jobs[i] = run_gen_job(17 + 41 * i, 20 + 9 * i, 100 + i, 200 + i);
		jobs[i].start_step = i;
	}
	jobs[5] = run_gen_job(200, 40, 5, 205);
	jobs[5].start_step = 3;
	run_jobs(e, m, jobs, 12, which);
	run_same(&want, &jobs[5], "among others", which);
	drive_done(jobs, 12);
	jobs[0] = run_gen_job(200, 40, 5, 300);
	jobs[0].drop_every = 9;
	run_jobs(e, m, jobs, 1, which);
	run_same(&want, &jobs[0], "after preemption", which);
	drive_done(jobs, 1);
	jobs[0] = run_gen_job(200, 40, 5, 300); /* that one's pages */
	run_jobs(e, m, jobs, 1, which);
	run_check(jobs[0].n_cached == 192, "a prefix hit", which);
	run_same(&want, &jobs[0], "warm cache", which);
	drive_done(jobs, 1);
	drive_done(&want, 1);
}

int run_random_models(const char *dir_template, const char *only, run_model_fn each, void (*at_end)(void))
{
	static const struct {
		const char *name;
		struct tiny_spec spec;
	} model[] = {
		{"llama-q4_1", {.arch = "llama", .n_layers = 3, .type = APR_TYPE_Q4_1, .seed = 7, .n_vocab = 400, .n_ctx = 1024}},
		{"llama-576-q4_1", {.arch = "llama", .n_layers = 3, .n_embd = 576, .n_ff = 1536, .n_heads = 9, .n_kv_heads = 3,
		                    .type = APR_TYPE_Q4_1, .seed = 3, .n_vocab = 2000, .n_ctx = 1024}},
		{"qwen2-f16", {.arch = "qwen2", .n_layers = 3, .type = APR_TYPE_F16, .seed = 9, .n_vocab = 400, .n_ctx = 1024}},
		{"qwen3-q8_0", {.arch = "qwen3", .n_layers = 3, .type = APR_TYPE_Q8_0, .seed = 11, .n_vocab = 400, .n_ctx = 1024}},
		{"gemma3-q4_k", {.arch = "gemma3", .n_layers = 3, .type = APR_TYPE_Q4_K, .seed = 8, .n_vocab = 400, .window = 70,
		                 .pattern = 3, .n_ctx = 1024}},
		{"planted-q6_k", {.arch = "llama", .n_layers = 3, .type = APR_TYPE_Q6_K, .seed = 13, .n_vocab = 400, .n_ctx = 1024,
		                  .planted = 2, .separate_output = true}},
	};
	char dir[300];
	size_t i;

	snprintf(dir, sizeof dir, "%s", dir_template);
	if (!mkdtemp(dir)) {
		perror(dir);
		return 1;
	}
	for (i = 0; i < 1024; i++)
		run_state.ids[i] = (uint32_t)(i * 7919u + 13) % 390;
	for (i = 0; i < sizeof model / sizeof *model; i++)
		if (!only || !strcmp(only, model[i].name))
			each(dir, model[i].name, &model[i].spec);
	if (at_end)
		at_end();
	rmdir(dir);
	return 0;
}
