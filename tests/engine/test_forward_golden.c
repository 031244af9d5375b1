/* SPDX-License-Identifier: MIT */
/*
 * The forward pass against the float32 reference's answers (tests/golden), by
 * score and by score --step, in exact and in default mode. Compared: the
 * log-probability (logit - lse) of the best three of each kept row.
 *
 * Bars: exact mode, max 0.01 nats. Default mode, mean at most half of llama.cpp's
 * own error on the same file and max at most its max; argmax equal wherever the
 * golden margin exceeds twice the row's error.
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/harness.h"
#include "tests/support/drive.h"

#define BEST 3u

struct golden {
	const char *file, *model;
	double peer_mean, peer_max; /* llama.cpp: 8-bit activations, F16 KV */
};

static const struct golden golden[] = {
	{"smollm2-forward-capital", SMOLLM2, 0.077, 0.458}, {"smollm2-forward-haiku", SMOLLM2, 0.084, 0.623},
	{"smollm2-forward-long", SMOLLM2, 0.088, 0.400},    {"gemma3-forward-capital", GEMMA3, 0.049, 0.246},
	{"gemma3-forward-window", GEMMA3, 0.136, 0.544},
};

struct errors {
	double sum, max;
	unsigned n, argmax_wrong, argmax_near, rows;
};

static double logprob_of(const struct drive_token *t, uint32_t id, int *found)
{
	uint32_t i;

	for (i = 0; i < t->n_top; i++)
		if (t->top_id[i] == id) {
			*found = 1;
			return (double)t->top_logprob[i];
		}
	*found = 0;
	return 0;
}

/* One golden row against one scored position. */
static void compare(const json_t *row, const struct drive_token *t, struct errors *e)
{
	const json_t *top = json_object_get(row, "top");
	double lse = json_real_value(json_object_get(row, "lse")), worst = 0, margin;
	uint32_t i;

	e->rows++;
	for (i = 0; i < BEST; i++) {
		const json_t *pair = json_array_get(top, i);
		int found;
		double want = json_real_value(json_array_get(pair, 1)) - lse;
		double got = logprob_of(t, (uint32_t)json_integer_value(json_array_get(pair, 0)), &found);
		double d = found ? fabs(got - want) : 1e3; /* not among our best twenty */

		e->sum += d;
		e->n++;
		if (!(d <= worst))
			worst = d;
	}
	if (!(worst <= e->max))
		e->max = worst;
	margin = json_real_value(json_array_get(json_array_get(top, 0), 1)) - json_real_value(json_array_get(json_array_get(top, 1), 1));
	if (t->top_id[0] != (uint32_t)json_integer_value(json_object_get(row, "argmax"))) {
		if (margin > 2 * worst)
			e->argmax_wrong++;
		else
			e->argmax_near++;
	}
}

static void check_file(const struct golden *g, struct apr_engine *e, struct apr_loaded *m, bool step, struct errors *err)
{
	char path[128];
	json_t *j;
	const json_t *ids, *gen, *prompt, *steps;
	uint32_t n_ids, n, i, *all;
	struct drive_job job = {.p = {.kind = APR_SEQ_SCORE, .n_top = APR_SAMPLE_TOP_MAX, .force_decode = step}};

	memset(err, 0, sizeof *err);
	snprintf(path, sizeof path, "tests/golden/%s.json", g->file);
	j = json_load_file(path, 0, NULL);
	CU_ASSERT_PTR_NOT_NULL_FATAL(j);
	ids = json_object_get(j, "ids");
	gen = json_object_get(j, "generated");
	prompt = json_object_get(j, "prompt");
	steps = json_object_get(j, "steps");
	n_ids = (uint32_t)json_array_size(ids);
	n = n_ids + (uint32_t)json_array_size(gen) + 1; /* one id more, so that the last golden row is scored */
	all = calloc(n, sizeof *all);
	for (i = 0; i < n_ids; i++)
		all[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
	for (i = 0; i + n_ids + 1 < n; i++)
		all[n_ids + i] = (uint32_t)json_integer_value(json_array_get(gen, i));
	job.p.ids = all;
	job.p.n_ids = n;
	CU_ASSERT(drive_run(m, e, &job, 1) > 0);
	CU_ASSERT_EQUAL(job.rc, 0);
	CU_ASSERT_EQUAL(job.end, APR_END_PROMPT);
	CU_ASSERT_EQUAL_FATAL(job.n_tok, n - 1);
	/* position p predicts the id at p + 1 and stands in tok[p] */
	for (i = 0; i < json_array_size(prompt); i++)
		compare(json_array_get(prompt, i), &job.tok[n_ids - json_array_size(prompt) + i], err);
	for (i = 0; i < json_array_size(steps); i++)
		compare(json_array_get(steps, i), &job.tok[n_ids + i], err);
	drive_done(&job, 1);
	free(all);
	json_decref(j);
}

/* Exact mode's greedy text is the reference's, id for id. */
static void check_text(const struct golden *g, struct apr_engine *e, struct apr_loaded *m)
{
	struct drive_job job = {.p = {.kind = APR_SEQ_GENERATE, .sampling = drive_greedy(), .ignore_eos = true}};
	char path[128];
	json_t *j;
	const json_t *ids, *gen;
	uint32_t i, *prompt;

	snprintf(path, sizeof path, "tests/golden/%s.json", g->file);
	j = json_load_file(path, 0, NULL);
	CU_ASSERT_PTR_NOT_NULL_FATAL(j);
	ids = json_object_get(j, "ids");
	gen = json_object_get(j, "generated");
	job.p.n_ids = (uint32_t)json_array_size(ids);
	job.p.max_tokens = (uint32_t)json_array_size(gen);
	prompt = calloc(job.p.n_ids, sizeof *prompt);
	for (i = 0; i < job.p.n_ids; i++)
		prompt[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
	job.p.ids = prompt;
	CU_ASSERT(drive_run(m, e, &job, 1) > 0);
	CU_ASSERT_EQUAL_FATAL(job.n_tok, job.p.max_tokens);
	for (i = 0; i < job.n_tok; i++)
		CU_ASSERT_EQUAL(job.tok[i].id, (uint32_t)json_integer_value(json_array_get(gen, i)));
	drive_done(&job, 1);
	free(prompt);
	json_decref(j);
}

static void check_model(const char *model, const char *route)
{
	struct apr_engine_config cfg = drive_config(route, 2048, 0);
	const char *path = apr_test_model(model);
	bool exact = route != NULL;
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[256];
	size_t i;
	int step;

	if (!path)
		SKIP("the model file is not there");
	if (drive_open(&cfg, path, &e, &m, err, sizeof err)) {
		CU_FAIL_FATAL("open");
		return;
	}
	for (i = 0; i < sizeof golden / sizeof *golden; i++) {
		/* Longer prompts say nothing more to a sanitizer than the short one does. */
		if (strcmp(golden[i].model, model) != 0 || (DRIVE_SANITIZED && !strstr(golden[i].file, "capital")))
			continue;
		for (step = 0; step < 2; step++) {
			struct errors er;

			check_file(&golden[i], e, m, step, &er);
			printf("\n  %-24s %-5s %-12s mean %.4f max %.4f (llama.cpp %.3f %.3f) argmax: %u wrong, %u near ties of %u",
			       golden[i].file, exact ? "f32" : "int16", step ? "score --step" : "score", er.sum / er.n, er.max,
			       golden[i].peer_mean, golden[i].peer_max, er.argmax_wrong, er.argmax_near, er.rows);
			CU_ASSERT(er.max <= (exact ? 0.01 : golden[i].peer_max));
			CU_ASSERT(er.sum / er.n <= (exact ? 0.01 : golden[i].peer_mean / 2));
			CU_ASSERT_EQUAL(er.argmax_wrong, 0);
		}
		if (exact)
			check_text(&golden[i], e, m);
	}
	drive_close(e, m);
}

static void smollm2_exact(void)
{
	check_model(SMOLLM2, "f32");
}
static void smollm2_default(void)
{
	check_model(SMOLLM2, NULL);
}
static void gemma3_exact(void)
{
	check_model(GEMMA3, "f32");
}
static void gemma3_default(void)
{
	check_model(GEMMA3, NULL);
}

static const struct apr_test tests[] = {
	{"smollm2_exact", smollm2_exact, KEEPS_HEAP}, /* stdio keeps its buffers, glibc the stacks of ended threads */
	{"smollm2_default", smollm2_default, 0},
	{"gemma3_exact", gemma3_exact, 0},
	{"gemma3_default", gemma3_default, 0},
};
TEST_MAIN("engine/forward_golden", tests)
