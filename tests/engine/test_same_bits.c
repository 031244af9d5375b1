/* SPDX-License-Identifier: MIT */
/*
 * The promise of equal bits: a request's tokens and log-probabilities depend on
 * its own ids, parameters and seed alone. Each test computes one answer alone on
 * a fresh engine and compares it, bit for bit, with the same request among others,
 * in other chunks, on other thread counts, with a warm prefix cache, after
 * preemption, given back as forced tokens, and with NaN in every unused page.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"
#include "tests/harness.h"
#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"

#define PROMPT 200u
#define TOKENS 80u
#define N_MODELS 3u

static const char *const arch[N_MODELS] = {"llama", "gemma3", "qwen2"};

static const char *tiny(uint32_t which)
{
	static char path[N_MODELS][256];
	struct tiny_spec spec = {.arch = arch[which], .n_layers = 3, .type = which == 0 ? APR_TYPE_Q4_1 : which == 1 ? APR_TYPE_Q4_K : APR_TYPE_F16,
	                         .seed = 7 + which, .n_vocab = 400, .window = 70, .pattern = 3, .n_ctx = 1024};

	if (!path[which][0]) {
		snprintf(path[which], sizeof path[which], "%s/%s.gguf", apr_test_tmpdir(), arch[which]);
		CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(path[which], &spec), 0);
	}
	return path[which];
}

static uint32_t prompt_ids[1024];

static struct drive_job make_job(uint32_t n_prompt, uint32_t n_tokens, uint64_t seed)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_GENERATE, .ids = prompt_ids, .n_ids = n_prompt, .max_tokens = n_tokens,
	                            .sampling = drive_greedy(), .ignore_eos = true, .want_logprob = true, .n_top = 3}};

	j.p.sampling.temperature = 0.9f;
	j.p.sampling.top_k = 50;
	j.p.sampling.repeat_penalty = 1.1f;
	j.p.sampling.penalty_window = 64;
	j.p.sampling.seed = seed;
	return j;
}

static void open_model(uint32_t which, uint32_t threads, struct apr_engine **e, struct apr_loaded **m)
{
	struct apr_engine_config cfg = drive_config(NULL, 1024, threads);
	char err[256] = "";
	uint32_t i;

	cfg.chunk = 512;
	if (drive_open(&cfg, tiny(which), e, m, err, sizeof err)) {
		printf("\n  %s\n", err);
		CU_FAIL_FATAL("open");
	}
	for (i = 0; i < 1024; i++)
		prompt_ids[i] = (i * 7919u + 13) % 390;
}

/* Cold, alone, in one go, one thread: what all others must equal. */
static struct drive_job alone(uint32_t which, struct drive_job job)
{
	struct apr_engine *e;
	struct apr_loaded *m;

	open_model(which, 1, &e, &m);
	CU_ASSERT(drive_run(m, e, &job, 1) > 0);
	CU_ASSERT_EQUAL(job.end, APR_END_LENGTH);
	drive_close(e, m);
	return job;
}

static void same(const struct drive_job *a, const struct drive_job *b)
{
	uint32_t i;

	CU_ASSERT_EQUAL(a->rc, 0);
	CU_ASSERT_EQUAL(b->rc, 0);
	CU_ASSERT_EQUAL(a->end, b->end);
	CU_ASSERT_EQUAL(b->n_ends, 1);
	CU_ASSERT_EQUAL_FATAL(a->n_tok, b->n_tok);
	for (i = 0; i < a->n_tok; i++) {
		const struct drive_token *x = &a->tok[i], *y = &b->tok[i];

		if (drive_same_token(x, y))
			continue;
		printf("\n  token %u: %u %.9g against %u %.9g", i, x->id, (double)x->logprob, y->id, (double)y->logprob);
		CU_FAIL("other bits");
		return;
	}
}

static void among_others(void)
{
	uint32_t w, i;

	for (w = 0; w < N_MODELS; w++) {
		struct drive_job want = alone(w, make_job(PROMPT, TOKENS, 5)), jobs[12];
		struct apr_engine *e;
		struct apr_loaded *m;

		open_model(w, 2, &e, &m);
		for (i = 0; i < 12; i++) {
			jobs[i] = make_job(17 + 41 * i, 20 + 9 * i, 100 + i);
			jobs[i].start_step = i;
			jobs[i].cancel_at = i % 3 == 1 ? 7 : 0;
		}
		jobs[5] = make_job(PROMPT, TOKENS, 5);
		jobs[5].start_step = 3;
		CU_ASSERT(drive_run(m, e, jobs, 12) > 0);
		same(&want, &jobs[5]);
		drive_done(jobs, 12);
		drive_done(&want, 1);
		CU_ASSERT_EQUAL(apr_kv_check(m->kv), 0);
		drive_close(e, m);
	}
}

static void any_chunking(void)
{
	static const uint32_t chunk[] = {1, 63, 64, 65, 512};
	struct drive_job want = alone(1, make_job(600, 20, 9));
	struct apr_engine *e;
	struct apr_loaded *m;
	size_t i;

	for (i = 0; i < sizeof chunk / sizeof *chunk; i++) {
		struct drive_job job = make_job(600, 20, 9);

		job.chunk = chunk[i];
		open_model(1, 2, &e, &m); /* fresh: nothing cached */
		CU_ASSERT(drive_run(m, e, &job, 1) > 0);
		CU_ASSERT_EQUAL(job.n_cached, 0);
		same(&want, &job);
		drive_done(&job, 1);
		drive_close(e, m);
	}
	drive_done(&want, 1);
}

static void any_threads(void)
{
	static const uint32_t threads[] = {1, 2, 3, 5};
	uint32_t w;
	size_t i;

	for (w = 0; w < N_MODELS; w++) {
		struct drive_job want = alone(w, make_job(PROMPT, TOKENS, 11));

		for (i = 0; i < sizeof threads / sizeof *threads; i++) {
			struct drive_job job = make_job(PROMPT, TOKENS, 11);
			struct apr_engine *e;
			struct apr_loaded *m;

			open_model(w, threads[i], &e, &m);
			CU_ASSERT(drive_run(m, e, &job, 1) > 0);
			same(&want, &job);
			drive_done(&job, 1);
			drive_close(e, m);
		}
		drive_done(&want, 1);
	}
}

static void cold_and_warm_cache(void)
{
	struct apr_engine *e;
	struct apr_loaded *m;
	uint32_t w, n;

	for (w = 0; w < N_MODELS; w++) {
		open_model(w, 2, &e, &m);
		/* tails of every length below, at and above a page boundary, over one and more pages */
		for (n = 62; n < 268; n += n % 64 < 60 ? 29 : 1) {
			struct drive_job want = alone(w, make_job(n, 12, n)), job = make_job(n, 12, n), again = job;

			CU_ASSERT(drive_run(m, e, &job, 1) > 0);
			CU_ASSERT(drive_run(m, e, &again, 1) > 0);
			CU_ASSERT_EQUAL(again.n_cached, (n - 1) / 64 * 64);
			same(&want, &job);
			same(&want, &again);
			drive_done(&job, 1);
			drive_done(&again, 1);
			drive_done(&want, 1);
		}
		CU_ASSERT_EQUAL(apr_kv_check(m->kv), 0);
		drive_close(e, m);
	}
}

/* Given, generated and given again: one kind after the other, each step at most once from given to generated. */
static void turns_by_kind(void)
{
	static const uint32_t at[] = {0, 90, 131, 160, 200, 201, 230}; /* given, generated, given, ... */
	uint32_t w, i, k;

	for (w = 0; w < N_MODELS; w++) {
		struct drive_job want = alone(w, make_job(230, 12, 5)), job = make_job(230, 12, 5);
		uint64_t kinds[4] = {0};
		struct apr_engine *e;
		struct apr_loaded *m;
		struct apr_seq_state st;
		struct apr_seq *s;

		for (k = 1; k < 6; k += 2)
			for (i = at[k]; i < at[k + 1]; i++)
				kinds[i / 64] |= UINT64_C(1) << i % 64;
		open_model(w, 2, &e, &m);
		job.p.kinds = kinds;
		CU_ASSERT_EQUAL_FATAL(apr_seq_new(m, &job.p, &s, &i), 0);
		apr_seq_state(s, &st);
		CU_ASSERT_EQUAL(st.todo, 131); /* up to where given ids follow generated ones */
		apr_seq_free(s);
		CU_ASSERT(drive_run(m, e, &job, 1) > 0);
		same(&want, &job); /* on the CPU both kinds have one arithmetic */
		/* pages are found by kind */
		CU_ASSERT_EQUAL(apr_loaded_peek(m, job.p.scope, job.p.ids, 230, kinds), 192);
		CU_ASSERT_EQUAL(apr_loaded_peek(m, job.p.scope, job.p.ids, 230, NULL), 64);
		drive_done(&job, 1);
		drive_done(&want, 1);
		drive_close(e, m);
	}
}

static void after_drop(void)
{
	struct apr_engine *e;
	struct apr_loaded *m;
	uint32_t w, every;

	for (w = 0; w < N_MODELS; w++) {
		struct drive_job want = alone(w, make_job(PROMPT, TOKENS, 21));

		for (every = 1; every < 70; every += 17) {
			struct drive_job job = make_job(PROMPT, TOKENS, 21);

			open_model(w, 2, &e, &m);
			job.drop_every = every;
			CU_ASSERT(drive_run(m, e, &job, 1) > 0);
			CU_ASSERT(job.drops > 0);
			same(&want, &job);
			drive_done(&job, 1);
			CU_ASSERT_EQUAL(apr_kv_check(m->kv), 0);
			drive_close(e, m);
		}
		drive_done(&want, 1);
	}
}

/* Two sequences that together exceed the pool: one preempts the other again and again. */
static void pool_too_small_for_both(void)
{
	struct drive_job want[2] = {alone(0, make_job(400, 200, 31)), alone(0, make_job(390, 220, 32))};
	struct drive_job jobs[2] = {make_job(400, 200, 31), make_job(390, 220, 32)};
	struct apr_engine_config cfg = drive_config(NULL, 640, 2);
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[256];

	cfg.kv_mem = UINT64_C(3) * 2 * 64 * 2 * 128 * 11; /* 11 pages of 3 layers, 2 heads, 64 dims, F16 */
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny(0), &e, &m, err, sizeof err), 0);
	CU_ASSERT(drive_run(m, e, jobs, 2) > 0);
	same(&want[0], &jobs[0]);
	same(&want[1], &jobs[1]);
	CU_ASSERT_EQUAL(apr_kv_check(m->kv), 0);
	drive_done(jobs, 2);
	drive_done(want, 2);
	drive_close(e, m);
}

/* What a client received before a restart is given back and goes on with the same bits. */
static void forced_tokens(void)
{
	struct drive_job want = alone(0, make_job(PROMPT, TOKENS, 41));
	uint32_t given[TOKENS], k, i;
	struct apr_engine *e;
	struct apr_loaded *m;

	for (i = 0; i < TOKENS; i++)
		given[i] = want.tok[i].id;
	open_model(0, 2, &e, &m);
	for (k = 1; k <= TOKENS; k += 13) {
		struct drive_job job = make_job(PROMPT, TOKENS, 41);

		job.p.forced = given;
		job.p.n_forced = k;
		CU_ASSERT(drive_run(m, e, &job, 1) > 0);
		CU_ASSERT_EQUAL(job.rc, 0);
		CU_ASSERT_EQUAL_FATAL(job.n_tok, TOKENS - k);
		CU_ASSERT_EQUAL(job.end, APR_END_LENGTH);
		for (i = 0; i < job.n_tok; i++) {
			CU_ASSERT_EQUAL(job.tok[i].index, k + i);
			CU_ASSERT_EQUAL(job.tok[i].id, want.tok[k + i].id);
			CU_ASSERT_EQUAL(memcmp(&job.tok[i].logprob, &want.tok[k + i].logprob, sizeof(float)), 0);
		}
		drive_done(&job, 1);
	}
	drive_done(&want, 1);
	drive_close(e, m);
}

/* Whatever lies in pages, tables and activations that nobody uses must not matter. */
static void poisoned_memory(void)
{
	uint32_t w, i;

	for (w = 0; w < N_MODELS; w++) {
		struct drive_job want = alone(w, make_job(PROMPT, TOKENS, 51)), job = make_job(PROMPT, TOKENS, 51);
		struct apr_engine *e;
		struct apr_loaded *m;

		open_model(w, 2, &e, &m);
		for (i = 0; i < m->plan.n; i++) {
			const struct apr_plan_line *l = &m->plan.line[i];

			/* 0xff: NaN in every float type */
			if (l->base && (!strncmp(l->purpose, "kv", 2) || l->purpose[0] == 'x' || !strcmp(l->purpose, "y") ||
			                !strcmp(l->purpose, "q") || !strcmp(l->purpose, "o") || !strcmp(l->purpose, "activations") ||
			                !strcmp(l->purpose, "logits")))
				memset(l->base, 0xff, l->bytes);
		}
		CU_ASSERT(drive_run(m, e, &job, 1) > 0);
		same(&want, &job);
		drive_done(&job, 1);
		drive_done(&want, 1);
		drive_close(e, m);
	}
}

/* score and score --step, in chunks and by drops: one arithmetic. */
static void score_by_step(void)
{
	struct apr_engine *e;
	struct apr_loaded *m;
	uint32_t w;

	for (w = 0; w < N_MODELS; w++) {
		struct drive_job a = {.p = {.kind = APR_SEQ_SCORE, .ids = prompt_ids, .n_ids = 300, .n_top = 4}}, b = a, c = a;

		open_model(w, 2, &e, &m);
		b.p.force_decode = true;
		c.chunk = 37;
		CU_ASSERT(drive_run(m, e, &a, 1) > 0);
		CU_ASSERT(drive_run(m, e, &b, 1) > 0);
		CU_ASSERT(drive_run(m, e, &c, 1) > 0);
		CU_ASSERT_EQUAL(a.n_tok, 299);
		CU_ASSERT_EQUAL(a.end, APR_END_PROMPT);
		same(&a, &b);
		same(&a, &c);
		drive_done(&a, 1);
		drive_done(&b, 1);
		drive_done(&c, 1);
		drive_close(e, m);
	}
}

static const struct apr_test tests[] = {
	{"among_others", among_others, KEEPS_HEAP}, /* stdio's first buffer */
	{"any_chunking", any_chunking, 0},
	{"any_threads", any_threads, KEEPS_HEAP}, /* glibc keeps stacks of ended threads, and what hangs from them */
	{"cold_and_warm_cache", cold_and_warm_cache, 0},
	{"turns_by_kind", turns_by_kind, 0},
	{"after_drop", after_drop, 0},
	{"pool_too_small_for_both", pool_too_small_for_both, 0},
	{"forced_tokens", forced_tokens, 0},
	{"poisoned_memory", poisoned_memory, 0},
	{"score_by_step", score_by_step, 0},
};
TEST_MAIN("engine/same_bits", tests)
