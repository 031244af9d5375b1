/* SPDX-License-Identifier: MIT */
/*
 * Two steps in flight: a step made while the one before it runs, over a backend that
 * is two deep (tests/support/two_deep.h). Every answer equals the one that the CPU's
 * backend gives a step at a time, bit for bit, and what was computed for nothing is
 * neither reported nor counted nor cached.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"
#include "tests/harness.h"
#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/two_deep.h"

#define CTX 512u
#define VOCAB 400u

static uint32_t ids[CTX];
static struct apr_engine *engine;
static struct apr_loaded *model;

static const char *tiny(void)
{
	static char path[256];
	struct tiny_spec spec = {.arch = "gemma3", .n_layers = 3, .type = APR_TYPE_Q4_1, .seed = 7, .n_vocab = VOCAB, .window = 70,
	                         .pattern = 3, .n_ctx = CTX};
	uint32_t i;

	for (i = 0; i < CTX; i++)
		ids[i] = (i * 7919u + 13) % 390;
	if (!path[0]) {
		snprintf(path, sizeof path, "%s/two.gguf", apr_test_tmpdir());
		CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(path, &spec), 0);
	}
	return path;
}

static void open_as(bool deep, uint64_t kv_mem)
{
	struct apr_engine_config cfg = drive_config(NULL, CTX, 1);
	const char *path = tiny();
	char err[256] = "";

	cfg.kv_mem = kv_mem;
	CU_ASSERT_EQUAL_FATAL(apr_engine_open(&engine, &cfg, err, sizeof err), 0);
	if (deep) {
		engine->backend = two_deep_backend();
		two_deep_notify(engine->notify_fd);
	}
	if (apr_engine_load(engine, "m", path, NULL, NULL, &model, err, sizeof err)) {
		printf("\n  %s\n", err);
		CU_FAIL_FATAL("load");
	}
	memset(&two_deep_counts, 0, sizeof two_deep_counts);
}

static void close_it(void)
{
	struct apr_kv_counts c;

	CU_ASSERT_EQUAL(apr_kv_check(model->kv), 0);
	CU_ASSERT_EQUAL(model->n_seqs, 0);
	apr_kv_counts(model->kv, &c);
	CU_ASSERT_EQUAL(c.free, c.total);
	drive_close(engine, model);
}

static struct drive_job job_of(uint32_t n_prompt, uint32_t n, uint64_t seed)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = n_prompt, .max_tokens = n,
	                            .sampling = drive_greedy(), .ignore_eos = true, .want_logprob = true, .n_top = 3}};

	j.p.sampling.temperature = 0.9f;
	j.p.sampling.top_k = 50;
	j.p.sampling.seed = seed;
	return j;
}

static void same(const struct drive_job *a, const struct drive_job *b)
{
	uint32_t i;

	CU_ASSERT(a->rc == 0 && b->rc == 0);
	CU_ASSERT_EQUAL(a->end, b->end);
	CU_ASSERT_EQUAL(a->n_ends, b->n_ends);
	CU_ASSERT_EQUAL(a->n_cached, b->n_cached);
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

/* The same jobs on either backend; what both leave in the cache is as much, too. */
static void both(const struct drive_job *jobs, uint32_t n, uint64_t kv_mem)
{
	struct drive_job a[12], b[12];
	struct apr_kv_counts ca, cb;
	uint32_t i;

	memcpy(a, jobs, n * sizeof *jobs);
	memcpy(b, jobs, n * sizeof *jobs);
	open_as(false, kv_mem);
	CU_ASSERT(drive_run(model, engine, a, n) > 0);
	apr_kv_counts(model->kv, &ca);
	close_it();
	open_as(true, kv_mem);
	CU_ASSERT(drive_run(model, engine, b, n) > 0);
	apr_kv_counts(model->kv, &cb);
	close_it();
	for (i = 0; i < n; i++)
		same(&a[i], &b[i]);
	if (n == 1 && !jobs[0].cancel_at && !jobs[0].drop_every)
		CU_ASSERT_EQUAL(ca.cached, cb.cached);
	drive_done(a, n);
	drive_done(b, n);
}

static void one_behind_the_other(void)
{
	struct drive_job j = job_of(100, 40, 5);

	both(&j, 1, 0);
	CU_ASSERT_EQUAL(two_deep_counts.last_rows, 39);
	CU_ASSERT(two_deep_counts.behind >= 39);
	CU_ASSERT_EQUAL(two_deep_counts.dead_rows, 0); /* the limit is known before */
}

static void a_crowd(void)
{
	struct drive_job jobs[12];
	uint32_t i;

	for (i = 0; i < 12; i++) {
		jobs[i] = job_of(17 + 31 * i, 20 + 9 * i, 100 + i);
		jobs[i].start_step = 2 * i;
		jobs[i].chunk = i % 2 ? 40 : 0;
		jobs[i].p.scope = i;
		jobs[i].p.sampling.repeat_penalty = i % 3 ? 1.0f : 1.2f;
		jobs[i].p.sampling.penalty_window = 64;
	}
	jobs[3].p.kind = jobs[7].p.kind = APR_SEQ_SCORE;
	jobs[7].p.force_decode = true;
	both(jobs, 12, 0);
	CU_ASSERT(two_deep_counts.behind > 0 && two_deep_counts.last_rows > 0 && two_deep_counts.unseen > 0);
}

static void stop_ids(void)
{
	struct drive_job want = job_of(70, 60, 9), j;
	uint32_t stop[2] = {0, 0}, at, first;

	open_as(false, 0);
	CU_ASSERT(drive_run(model, engine, &want, 1) > 0);
	close_it();
	CU_ASSERT_EQUAL_FATAL(want.n_tok, 60);
	for (at = 0; at < 60; at += 7) {
		j = job_of(70, 60, 9);
		stop[1] = want.tok[at].id;
		for (first = 0; want.tok[first].id != stop[1]; first++)
			;
		stop[0] = 399; /* of a pair the other one may be drawn as well */
		j.p.stop_ids = stop;
		j.p.n_stop_ids = 2;
		both(&j, 1, 0);
		CU_ASSERT(two_deep_counts.dead_rows == 1 || first > at);
	}
	drive_done(&want, 1);
}

static void the_end_token(void)
{
	struct drive_job j = job_of(20, 50, 3);
	uint32_t eos = VOCAB - 1, k;
	float bias = 5.0f;

	j.p.ignore_eos = false;
	j.p.sampling.n_bias = 1;
	j.p.sampling.bias_id = &eos;
	j.p.sampling.bias = &bias;
	for (k = 0; k < 6; k++) {
		bias = 3.0f * (float)k;
		both(&j, 1, 0);
	}
	CU_ASSERT_EQUAL(two_deep_counts.dead_rows, 1);
}

static void limits(void)
{
	uint32_t n;

	for (n = 0; n < 5; n++) {
		struct drive_job j = job_of(65, n, 4);

		both(&j, 1, 0);
		CU_ASSERT_EQUAL(two_deep_counts.dead_rows, 0);
		j = job_of(CTX - n, UINT32_MAX, 4); /* to the context's end */
		both(&j, 1, 0);
		CU_ASSERT_EQUAL(two_deep_counts.dead_rows, 0);
	}
}

static void penalties(void)
{
	static const int32_t window[] = {-1, 1, 2, 7, 64};
	size_t w;

	for (w = 0; w < sizeof window / sizeof *window; w++) {
		struct drive_job j = job_of(40, 60, 17 + w);

		j.p.sampling.temperature = w % 2 ? 0.0f : 1.5f;
		j.p.sampling.repeat_penalty = 1.3f;
		j.p.sampling.frequency_penalty = 0.4f;
		j.p.sampling.presence_penalty = 0.3f;
		j.p.sampling.penalty_window = window[w];
		both(&j, 1, 0);
		CU_ASSERT_EQUAL(two_deep_counts.unseen, 59);
	}
}

static void samples_of_one_prompt(void)
{
	struct drive_job jobs[6];
	uint32_t i;

	for (i = 0; i < 6; i++) {
		jobs[i] = job_of(130, 30, 77);
		jobs[i].p.sampling.sample = i;
	}
	both(jobs, 6, 0);
}

static void scores(void)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_SCORE, .ids = ids, .n_ids = 300, .n_top = 4}};

	both(&j, 1, 0);
	j.chunk = 37;
	both(&j, 1, 0);
	CU_ASSERT(two_deep_counts.behind > 0);
	j.chunk = 0;
	j.p.force_decode = true;
	both(&j, 1, 0);
	CU_ASSERT(two_deep_counts.behind > 0);
}

static void preempted(void)
{
	struct drive_job jobs[2];
	uint32_t every, i;

	for (every = 1; every < 40; every += 6) {
		struct drive_job want = job_of(150, 60, 21), j = want;

		j.drop_every = every;
		open_as(false, 0);
		CU_ASSERT(drive_run(model, engine, &want, 1) > 0);
		close_it();
		open_as(true, 0);
		CU_ASSERT(drive_run(model, engine, &j, 1) > 0);
		close_it();
		CU_ASSERT(j.drops > 0);
		same(&want, &j);
		drive_done(&want, 1);
		drive_done(&j, 1);
	}
	for (i = 0; i < 2; i++) {
		jobs[i] = job_of(300 - 10 * i, 150, 31 + i);
		jobs[i].p.scope = i;
	}
	both(jobs, 2, UINT64_C(3) * 2 * 64 * 2 * 128 * 11);
}

/* Cancelled while a step names it: no record comes, its pages are free when that step has ended. */
static void freed_in_flight(void)
{
	struct drive_job jobs[4];
	uint32_t i;

	for (i = 0; i < 4; i++) {
		jobs[i] = job_of(60 + i, 40, 50 + i);
		jobs[i].p.scope = i;
		jobs[i].cancel_at = i % 2 ? 1 + i : 0;
	}
	open_as(true, 0);
	CU_ASSERT(drive_run(model, engine, jobs, 4) > 0);
	CU_ASSERT(jobs[1].n_tok == 2 && jobs[3].n_tok == 4 && !jobs[1].n_ends && !jobs[3].n_ends);
	CU_ASSERT(jobs[0].n_tok == 40 && jobs[2].n_tok == 40);
	close_it();
	drive_done(jobs, 4);
}

/* What no step has written is never found again: the row behind the end was for nothing. */
static void nothing_more_is_cached(void)
{
	struct drive_job first = job_of(100, 28, 8), again = job_of(129, 1, 8), j;
	uint32_t all[129], i;

	open_as(false, 0);
	CU_ASSERT(drive_run(model, engine, &first, 1) > 0);
	close_it();
	CU_ASSERT_EQUAL_FATAL(first.n_tok, 28);
	memcpy(all, ids, 100 * sizeof *all);
	for (i = 0; i < 28; i++)
		all[100 + i] = first.tok[i].id;
	all[128] = 7;
	/* freed with 27 tokens known: position 127 is in flight or not begun, so the second page is not whole */
	open_as(true, 0);
	j = job_of(100, 60, 8);
	j.cancel_at = 27;
	CU_ASSERT(drive_run(model, engine, &j, 1) > 0);
	CU_ASSERT_EQUAL(j.n_tok, 27);
	again.p.ids = all;
	again.p.n_ids = 100;
	again.p.forced = all + 100;
	again.p.n_forced = 28;
	again.p.max_tokens = 29;
	CU_ASSERT(drive_run(model, engine, &again, 1) > 0);
	CU_ASSERT_EQUAL(again.n_cached, 64);
	close_it();
	drive_done(&first, 1);
	drive_done(&j, 1);
	drive_done(&again, 1);
}

static void numeric_faults(void)
{
	struct drive_job j = job_of(30, 20, 6);
	uint32_t ban[VOCAB], i;
	float bias[VOCAB];

	for (i = 0; i < VOCAB; i++) {
		ban[i] = i;
		bias[i] = -INFINITY;
	}
	j.p.sampling.n_bias = VOCAB;
	j.p.sampling.bias_id = ban;
	j.p.sampling.bias = bias;
	both(&j, 1, 0);
	CU_ASSERT_EQUAL(two_deep_counts.dead_rows, 1);
}

/* ---- by hand ------------------------------------------------------------------------------ */

static int next_records(struct apr_record *rec, int max)
{
	bool more;
	int n;

	while ((n = apr_step_poll(model, rec, max, &more)) == -EAGAIN)
		drive_wait(engine);
	CU_ASSERT_FALSE(more);
	return n;
}

static struct apr_seq *begin(uint32_t n_prompt, uint64_t scope)
{
	struct apr_seq_params p = job_of(n_prompt, 20, 5).p;
	struct apr_seq *s = NULL;

	p.scope = scope;
	CU_ASSERT_EQUAL_FATAL(apr_seq_new(model, &p, &s, NULL), 0);
	CU_ASSERT_EQUAL(apr_seq_reserve(s, n_prompt), 0);
	return s;
}

static void step(struct apr_seq *a, struct apr_seq *b)
{
	struct apr_step_part part[2] = {{a, CTX}, {b, CTX}};

	CU_ASSERT_EQUAL(apr_seq_reserve(a, CTX), 0);
	CU_ASSERT_EQUAL_FATAL(apr_step_submit(model, part, b ? 2 : 1), 0);
}

static void a_failed_step(void)
{
	struct apr_seq *a, *b;
	struct apr_seq_state st;
	struct apr_record rec[4];

	open_as(true, 0);
	a = begin(20, 1);
	b = begin(30, 2);
	two_deep_fail_at = 1;
	step(a, NULL);
	while (!apr_step_room(model)) {
		bool more;

		CU_ASSERT_EQUAL_FATAL(apr_step_poll(model, rec, 4, &more), -EAGAIN);
	}
	step(a, b); /* a goes on with a token that never comes */
	CU_ASSERT_EQUAL(next_records(rec, 4), -EIO);
	apr_seq_state(a, &st);
	CU_ASSERT(st.ended && st.todo == 0 && st.n_generated == 0);
	apr_seq_state(b, &st);
	CU_ASSERT_FALSE(st.ended);
	CU_ASSERT(apr_step_in_flight(model));
	CU_ASSERT_EQUAL(next_records(rec, 4), 1); /* b's alone */
	CU_ASSERT(rec[0].seq == b && rec[0].has_token && rec[0].index == 0);
	CU_ASSERT_FALSE(apr_step_in_flight(model));
	apr_seq_free(a);
	apr_seq_free(b);
	close_it();
}

static void room_and_busy(void)
{
	struct apr_seq *a, *b;
	struct apr_seq_state st;
	struct apr_record rec[4];
	struct apr_step_part part;
	uint32_t i;

	open_as(true, 0);
	a = begin(20, 1);
	b = begin(30, 2);
	CU_ASSERT_TRUE(apr_step_room(model));
	step(a, NULL);
	apr_seq_state(a, &st);
	CU_ASSERT(st.todo == 1 && st.decoding && st.n_generated == 0 && st.n_computed == 20);
	step(b, NULL);
	CU_ASSERT_FALSE(apr_step_room(model));
	part = (struct apr_step_part){a, 1};
	CU_ASSERT_EQUAL(apr_step_submit(model, &part, 1), -EBUSY);
	CU_ASSERT_EQUAL(next_records(rec, 4), 1);
	CU_ASSERT_PTR_EQUAL(rec[0].seq, a);
	apr_seq_free(b); /* in the step that is in flight */
	CU_ASSERT_EQUAL(next_records(rec, 4), 0);
	for (i = 1; i < 4; i++) {
		step(a, NULL);
		CU_ASSERT_EQUAL(next_records(rec, 4), 1);
		CU_ASSERT_EQUAL(rec[0].index, i);
	}
	/* given up in flight: nothing of it is stepped until that step is over, and then all of it again */
	step(a, NULL);
	apr_seq_drop(a);
	apr_seq_state(a, &st);
	CU_ASSERT_EQUAL(st.todo, 0);
	CU_ASSERT_EQUAL(apr_step_submit(model, &part, 1), -EINVAL);
	CU_ASSERT_EQUAL(next_records(rec, 4), 1);
	apr_seq_state(a, &st);
	CU_ASSERT(st.n_computed == 0 && st.todo == 25);
	/* both freed with two steps in flight: unloading waits for them */
	step(a, NULL);
	step(a, NULL);
	apr_seq_free(a);
	drive_close(engine, model);
}

static const struct apr_test tests[] = {
	{"one_behind_the_other", one_behind_the_other, KEEPS_HEAP}, /* stdio's first buffer, ended threads' stacks */
	{"a_crowd", a_crowd, KEEPS_HEAP},
	{"stop_ids", stop_ids, 0},
	{"the_end_token", the_end_token, 0},
	{"limits", limits, 0},
	{"penalties", penalties, 0},
	{"samples_of_one_prompt", samples_of_one_prompt, 0},
	{"scores", scores, 0},
	{"preempted", preempted, 0},
	{"freed_in_flight", freed_in_flight, 0},
	{"nothing_more_is_cached", nothing_more_is_cached, 0},
	{"numeric_faults", numeric_faults, 0},
	{"a_failed_step", a_failed_step, 0},
	{"room_and_busy", room_and_busy, 0},
};
TEST_MAIN("engine/two_steps", tests)
