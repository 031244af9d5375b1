/* SPDX-License-Identifier: MIT */
/*
 * The kind of each row that a backend is told: what decides its arithmetic where
 * prompt and generated tokens have one each. Seen through a table that hands on to
 * the CPU's, so no GPU is needed.
 */
#include <stdio.h>
#include <string.h>

#include "engine/internal.h"
#include "tests/harness.h"
#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"

#define PROMPT 150u

static struct { /* what the steps since the last reset held */
	uint32_t prompt, generated, wrong, mixed;
	uint32_t n_prompt; /* positions below it are the prompt's */
	bool forced;       /* score --step: none are */
} seen;

static int watch_submit(struct apr_backend_model *m, const struct apr_step *s)
{
	uint32_t i, before = seen.prompt, generated = 0;

	for (i = 0; i < s->n_rows; i++) {
		uint8_t want = s->pos[i] < seen.n_prompt && !seen.forced ? APR_ROW_PROMPT : APR_ROW_GENERATED;

		seen.wrong += s->kind[i] != want;
		seen.prompt += s->kind[i] == APR_ROW_PROMPT;
		generated += s->kind[i] == APR_ROW_GENERATED;
	}
	seen.mixed += generated && seen.prompt > before;
	seen.generated += generated;
	return apr_cpu_backend.submit(m, s);
}

static uint32_t ids[PROMPT];

/* Runs one job and leaves its counts in seen. */
static void watch(struct drive_job *job, uint32_t n_prompt, bool forced)
{
	static struct apr_backend table;
	struct tiny_spec spec = {.type = APR_TYPE_Q4_1, .n_vocab = 400, .n_ctx = 1024};
	struct apr_engine_config cfg = drive_config(NULL, 1024, 1);
	char path[300], err[256] = "";
	struct apr_engine *e;
	struct apr_loaded *m;
	uint32_t i;

	for (i = 0; i < PROMPT; i++)
		ids[i] = (i * 7919u + 13) % 390;
	snprintf(path, sizeof path, "%s/tiny.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(path, &spec), 0);
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, path, &e, &m, err, sizeof err), 0);
	table = apr_cpu_backend;
	table.submit = watch_submit;
	e->backend = &table;
	memset(&seen, 0, sizeof seen);
	seen.n_prompt = n_prompt;
	seen.forced = forced;
	CU_ASSERT(drive_run(m, e, job, 1) > 0);
	CU_ASSERT_EQUAL(job->rc, 0);
	CU_ASSERT_EQUAL(seen.wrong, 0);
	drive_done(job, 1);
	e->backend = &apr_cpu_backend;
	drive_close(e, m);
}

static struct drive_job generate(uint32_t n)
{
	return (struct drive_job){.p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = PROMPT, .max_tokens = n,
	                                .sampling = drive_greedy(), .ignore_eos = true}};
}

static void a_prompt_and_what_follows(void)
{
	struct drive_job job = generate(20);

	watch(&job, PROMPT, false);
	CU_ASSERT_EQUAL(seen.prompt, PROMPT);
	CU_ASSERT_EQUAL(seen.generated, 19); /* the last token drawn is in no row */
}

static void computed_again_it_keeps_its_kind(void)
{
	struct drive_job job = generate(60);

	job.drop_every = 25;
	watch(&job, PROMPT, false);
	CU_ASSERT(job.drops > 0);
	CU_ASSERT(seen.mixed > 0); /* both kinds of one sequence in a step */
	CU_ASSERT(seen.generated > 59);
}

static void given_back_after_a_restart(void)
{
	static const uint32_t given[] = {5, 6, 7, 8, 9};
	struct drive_job job = generate(12);

	job.p.forced = given;
	job.p.n_forced = 5;
	watch(&job, PROMPT, false);
	CU_ASSERT_EQUAL(seen.prompt, PROMPT);
	CU_ASSERT_EQUAL(seen.generated, 11);
}

static void scores(void)
{
	struct drive_job job = {.p = {.kind = APR_SEQ_SCORE, .ids = ids, .n_ids = PROMPT}}, step = job;

	step.p.force_decode = true;
	watch(&job, PROMPT, false);
	CU_ASSERT_EQUAL(seen.generated, 0);
	watch(&step, PROMPT, true);
	CU_ASSERT_EQUAL(seen.prompt, 0);
	CU_ASSERT(seen.generated >= PROMPT - 1);
}

static const struct apr_test tests[] = {
	{"a_prompt_and_what_follows", a_prompt_and_what_follows, KEEPS_HEAP}, /* stdio's first buffer */
	{"computed_again_it_keeps_its_kind", computed_again_it_keeps_its_kind, 0},
	{"given_back_after_a_restart", given_back_after_a_restart, 0},
	{"scores", scores, 0},
};
TEST_MAIN("graphs/row_kinds", tests)
