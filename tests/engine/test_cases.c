/* SPDX-License-Identifier: MIT */
/*
 * Inputs that broke other engines, at the engine's level: limits and counts,
 * ids out of range, numeric faults, penalties, ties, one request's settings beside
 * another's.
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

#define CTX 256u
#define VOCAB 320u

static uint32_t ids[40 * CTX];
static struct apr_engine *engine;
static struct apr_loaded *model;

static void open_spec(const struct tiny_spec *spec, uint32_t n_ctx)
{
	struct apr_engine_config cfg = drive_config(NULL, n_ctx, 2);
	char path[256], err[256] = "";
	static unsigned count;
	uint32_t i;

	snprintf(path, sizeof path, "%s/case-%u.gguf", apr_test_tmpdir(), count++);
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(path, spec), 0);
	if (drive_open(&cfg, path, &engine, &model, err, sizeof err)) {
		printf("\n  %s", err);
		CU_FAIL_FATAL("open");
	}
	for (i = 0; i < 40 * CTX; i++)
		ids[i] = (i * 97 + 5) % 300;
}

static void open_tiny(void)
{
	struct tiny_spec spec = {.n_layers = 2};

	open_spec(&spec, CTX);
}

static void close_tiny(void)
{
	CU_ASSERT_EQUAL(apr_kv_check(model->kv), 0);
	drive_close(engine, model);
}

static struct drive_job job_of(uint32_t n_prompt, uint32_t max_tokens)
{
	return (struct drive_job){.p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = n_prompt, .max_tokens = max_tokens,
	                                .sampling = drive_greedy(), .ignore_eos = true, .want_logprob = true}};
}

static void run(struct drive_job *j)
{
	CU_ASSERT(drive_run(model, engine, j, 1) >= 0);
}

static bool same_tokens(const struct drive_job *a, const struct drive_job *b)
{
	uint32_t i;

	if (a->n_tok != b->n_tok || a->end != b->end)
		return false;
	for (i = 0; i < a->n_tok; i++)
		if (a->tok[i].id != b->tok[i].id || memcmp(&a->tok[i].logprob, &b->tok[i].logprob, sizeof(float)) != 0)
			return false;
	return true;
}

static void case09_prompts_about_the_context(void)
{
	static const uint32_t prompt[] = {CTX - 1, CTX, CTX + 1, 40 * CTX};
	static const uint32_t tokens[] = {1, 0, 0, 0};
	size_t i;

	open_tiny();
	for (i = 0; i < 4; i++) {
		struct drive_job j = job_of(prompt[i], UINT32_MAX);

		run(&j);
		if (prompt[i] > CTX) {
			CU_ASSERT_EQUAL(j.rc, -E2BIG);
		} else {
			CU_ASSERT_EQUAL(j.rc, 0);
			CU_ASSERT_EQUAL(j.n_tok, tokens[i]);
			CU_ASSERT_EQUAL(j.n_ends, 1);
			CU_ASSERT_EQUAL(j.end, APR_END_LENGTH);
		}
		drive_done(&j, 1);
	}
	/* prompt + max_tokens beyond the context: all that fit, then length */
	for (i = 1; i < CTX; i += 50) {
		struct drive_job j = job_of((uint32_t)i, CTX);

		run(&j);
		CU_ASSERT_EQUAL(j.n_tok, CTX - i);
		CU_ASSERT(j.n_ends == 1 && j.end == APR_END_LENGTH);
		drive_done(&j, 1);
	}
	close_tiny();
}

static void case15_empty_and_out_of_range(void)
{
	uint32_t bad_ids[3] = {1, VOCAB, 2}, minus[1] = {UINT32_MAX};
	struct drive_job j;

	open_tiny();
	j = job_of(0, 4);
	run(&j);
	CU_ASSERT(j.rc == -EINVAL && j.bad == UINT32_MAX);
	j = job_of(3, 4);
	j.p.ids = bad_ids;
	run(&j);
	CU_ASSERT(j.rc == -EINVAL && j.bad == 1);
	j = job_of(1, 4);
	j.p.ids = minus;
	run(&j);
	CU_ASSERT(j.rc == -EINVAL && j.bad == 0);
	j = job_of(2, 4);
	j.p.forced = bad_ids;
	j.p.n_forced = 3;
	run(&j);
	CU_ASSERT(j.rc == -EINVAL && j.bad == 3);
	j = job_of(5, 2);
	j.p.forced = ids;
	j.p.n_forced = 3; /* more than max_tokens */
	run(&j);
	CU_ASSERT_EQUAL(j.rc, -EINVAL);
	j = job_of(5, 0);
	run(&j);
	CU_ASSERT(j.rc == 0 && j.n_tok == 0 && j.n_ends == 1 && j.end == APR_END_PROMPT);
	drive_done(&j, 1);
	/* one id scored: nothing to report but the end */
	j = job_of(1, 0);
	j.p.kind = APR_SEQ_SCORE;
	run(&j);
	CU_ASSERT(j.rc == 0 && j.n_tok == 0 && j.n_ends == 1 && j.end == APR_END_PROMPT);
	drive_done(&j, 1);
	close_tiny();
}

static void case16_biases(void)
{
	static const float bad[] = {NAN, INFINITY};
	uint32_t bias_id[VOCAB], i;
	float bias[VOCAB];
	struct drive_job j;

	open_tiny();
	for (i = 0; i < 2; i++) {
		j = job_of(4, 4);
		bias_id[0] = 3;
		bias[0] = bad[i];
		j.p.sampling.n_bias = 1;
		j.p.sampling.bias_id = bias_id;
		j.p.sampling.bias = bias;
		run(&j);
		CU_ASSERT(j.rc == -EDOM && j.bad == 0);
	}
	bias[0] = 1;
	bias_id[0] = VOCAB;
	run(&j);
	CU_ASSERT(j.rc == -EDOM && j.bad == 0);
	/* all but one banned: that one; all banned: a numeric end */
	for (i = 0; i < VOCAB; i++) {
		bias_id[i] = i;
		bias[i] = i == 77 ? 0.0f : -INFINITY;
	}
	j = job_of(4, 3);
	j.p.sampling.n_bias = VOCAB;
	j.p.sampling.bias_id = bias_id;
	j.p.sampling.bias = bias;
	run(&j);
	CU_ASSERT(j.n_tok == 3 && j.tok[0].id == 77 && j.tok[2].id == 77);
	drive_done(&j, 1);
	bias[77] = -INFINITY;
	j.n_tok = j.cap = j.n_ends = 0;
	j.end = APR_END_NONE;
	run(&j);
	CU_ASSERT(j.rc == 0 && j.n_tok == 0 && j.end == APR_END_NUMERIC && j.n_ends == 1);
	drive_done(&j, 1);
	close_tiny();
}

/* A weight that is NaN: such a request fails, the model's others of sound rows would too, another model's live. */
static void case18_nan_in_one_weight(void)
{
	struct tiny_spec spec = {.n_layers = 2, .nan_row = 3};
	struct apr_loaded *sound, *broken;
	struct drive_job j = job_of(10, 5), k = job_of(10, 5), l = job_of(10, 0);
	struct tiny_spec good = {.n_layers = 2};
	char path[256], err[256];

	open_spec(&spec, CTX);
	broken = model;
	run(&j);
	CU_ASSERT(j.rc == 0 && j.n_tok == 0 && j.end == APR_END_NUMERIC && j.n_ends == 1);
	l.p.kind = APR_SEQ_SCORE;
	run(&l);
	CU_ASSERT(l.rc == 0 && l.end == APR_END_NUMERIC && l.n_ends == 1);
	snprintf(path, sizeof path, "%s/sound.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(path, &good), 0);
	CU_ASSERT_EQUAL_FATAL(apr_engine_load(engine, "sound", path, NULL, NULL, &sound, err, sizeof err), 0);
	CU_ASSERT(drive_run(sound, engine, &k, 1) > 0);
	CU_ASSERT(k.n_tok == 5 && k.end == APR_END_LENGTH);
	drive_done(&j, 1);
	drive_done(&k, 1);
	drive_done(&l, 1);
	CU_ASSERT_EQUAL(apr_engine_unload(engine, sound), 0);
	model = broken;
	close_tiny();
}

/* An id whose embedding is NaN, in the middle of a prompt: that request fails; those of the same steps, and later ones on
 * its pages, get the bits that they get alone. */
static void case18_nan_in_one_token(void)
{
	struct tiny_spec spec = {.n_layers = 2, .separate_output = true, .nan_token = 311};
	struct drive_job alone = job_of(100, 20), jobs[3], after = job_of(100, 20);
	uint32_t sick[90], i;

	open_spec(&spec, CTX);
	memcpy(sick, ids, sizeof sick);
	sick[70] = 310;
	run(&alone);
	CU_ASSERT(alone.n_tok == 20);
	for (i = 0; i < 3; i++) {
		jobs[i] = job_of(i == 1 ? 90 : 100, 20);
		jobs[i].p.scope = 60 + i;
		jobs[i].chunk = 30;
	}
	jobs[1].p.ids = sick;
	CU_ASSERT(drive_run(model, engine, jobs, 3) > 0);
	CU_ASSERT(jobs[1].rc == 0 && jobs[1].n_tok == 0 && jobs[1].end == APR_END_NUMERIC && jobs[1].n_ends == 1);
	CU_ASSERT(same_tokens(&alone, &jobs[0]) && same_tokens(&alone, &jobs[2]));
	after.p.scope = 70;
	run(&after);
	CU_ASSERT(same_tokens(&alone, &after));
	drive_done(&alone, 1);
	drive_done(jobs, 3);
	drive_done(&after, 1);
	close_tiny();
}

/* NaN that comes from one sequence's own page: the other sequences of the same step live. */
static void case18_nan_in_one_sequence(void)
{
	struct drive_job want, jobs[3];
	uint32_t g, i;

	open_tiny();
	want = job_of(100, 20);
	run(&want);
	for (i = 0; i < 3; i++) {
		jobs[i] = job_of(100, 20);
		jobs[i].p.scope = 50 + i; /* nothing shared */
	}
	CU_ASSERT_EQUAL(apr_seq_new(model, &jobs[1].p, &jobs[1].seq, NULL), 0);
	CU_ASSERT_EQUAL(apr_seq_reserve(jobs[1].seq, 64), 0);
	{
		struct apr_step_part part = {jobs[1].seq, 64};
		struct apr_record rec[4];
		bool more = true;

		CU_ASSERT_EQUAL(apr_step_submit(model, &part, 1), 0);
		while (more) {
			int n = apr_step_poll(model, rec, 4, &more);

			if (n == -EAGAIN) {
				drive_wait(engine);
				more = true;
			}
		}
	}
	for (g = 0; g < model->sizes.n_groups; g++) {
		const struct apr_kv_group *gr = &model->sizes.group[g];

		memset(gr->pool + jobs[1].seq->kv.page[g][0] * gr->layer_bytes * gr->n_layers, 0xff, gr->layer_bytes);
	}
	jobs[1].seq->user = &jobs[1];
	{
		struct apr_seq *poisoned = jobs[1].seq;
		struct apr_step_part parts[3];
		struct apr_record rec[8];
		uint32_t ended = 0, tokens[3] = {0};
		enum apr_record_end end[3] = {APR_END_NONE, APR_END_NONE, APR_END_NONE};
		struct apr_seq *s[3];

		for (i = 0; i < 3; i += 2) {
			jobs[i].p.user = &jobs[i];
			CU_ASSERT_EQUAL(apr_seq_new(model, &jobs[i].p, &jobs[i].seq, NULL), 0);
		}
		for (i = 0; i < 3; i++)
			s[i] = jobs[i].seq;
		while (ended < 3) {
			uint32_t n = 0;
			bool more = true;

			for (i = 0; i < 3; i++) {
				struct apr_seq_state st;

				apr_seq_state(s[i], &st);
				if (st.todo && apr_seq_reserve(s[i], st.todo) == 0)
					parts[n++] = (struct apr_step_part){s[i], st.todo};
			}
			CU_ASSERT_EQUAL_FATAL(apr_step_submit(model, parts, n), 0);
			while (more) {
				int got = apr_step_poll(model, rec, 8, &more), r;

				if (got == -EAGAIN) {
					drive_wait(engine);
					more = true;
					continue;
				}
				for (r = 0; r < got; r++) {
					uint32_t k = (uint32_t)((struct drive_job *)rec[r].user - jobs);

					if (rec[r].has_token && k != 1 && tokens[k] < want.n_tok)
						CU_ASSERT_EQUAL(memcmp(&rec[r].logprob, &want.tok[tokens[k]].logprob, sizeof(float)), 0);
					tokens[k] += rec[r].has_token;
					if (rec[r].end != APR_END_NONE) {
						end[k] = rec[r].end;
						ended++;
					}
				}
			}
		}
		CU_ASSERT(end[0] == APR_END_LENGTH && end[2] == APR_END_LENGTH && end[1] == APR_END_NUMERIC);
		CU_ASSERT(tokens[0] == 20 && tokens[2] == 20 && tokens[1] == 0);
		CU_ASSERT_PTR_EQUAL(poisoned, s[1]);
	}
	drive_done(jobs, 3);
	drive_done(&want, 1);
	close_tiny();
}

/* The model's end id stops; ignore_eos does not; a stop id does in either case; none is reported as a token. */
static void case26_ends(void)
{
	uint32_t eos = VOCAB - 1, bias_id[1] = {eos}, stop[2] = {5, 77};
	float bias[1] = {1000};
	struct drive_job j;

	open_tiny();
	j = job_of(4, 6);
	j.p.sampling.n_bias = 1;
	j.p.sampling.bias_id = bias_id;
	j.p.sampling.bias = bias;
	j.p.ignore_eos = false;
	run(&j);
	CU_ASSERT(j.n_tok == 0 && j.end == APR_END_STOP_ID && j.n_ends == 1);
	drive_done(&j, 1);
	j = (struct drive_job){.p = j.p};
	j.p.ignore_eos = true;
	run(&j);
	CU_ASSERT(j.n_tok == 6 && j.end == APR_END_LENGTH && j.tok[0].id == eos);
	drive_done(&j, 1);
	j = (struct drive_job){.p = j.p};
	bias_id[0] = 77;
	j.p.stop_ids = stop;
	j.p.n_stop_ids = 2;
	run(&j);
	CU_ASSERT(j.n_tok == 0 && j.end == APR_END_STOP_ID);
	drive_done(&j, 1);
	j = (struct drive_job){.p = j.p};
	stop[0] = VOCAB;
	run(&j);
	CU_ASSERT(j.rc == -EDOM && j.bad == 0);
	close_tiny();
}

/* id 0 may be a legal end */
static void case26_end_id_zero(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct apr_engine_config cfg = drive_config(NULL, CTX, 1);
	uint32_t bias_id[1] = {0};
	float bias[1] = {1000};
	char path[256], err[256];
	struct drive_job j = job_of(4, 6);

	gw_drop(w, "tokenizer.ggml.eos_token_id");
	gw_u32(w, "tokenizer.ggml.eos_token_id", 0);
	snprintf(path, sizeof path, "%s/end0.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(gw_write(w, path), 0);
	gw_free(w);
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, path, &engine, &model, err, sizeof err), 0);
	j.p.ignore_eos = false;
	j.p.sampling.n_bias = 1;
	j.p.sampling.bias_id = bias_id;
	j.p.sampling.bias = bias;
	run(&j);
	CU_ASSERT(j.n_tok == 0 && j.end == APR_END_STOP_ID);
	drive_done(&j, 1);
	close_tiny();
}

/* B after A equals B alone, whatever A set, how ever A ended. */
static void case33_settings_do_not_leak(void)
{
	static const uint32_t stop[] = {1, 2, 3}, bias_id[] = {7};
	static const float bias[] = {50};
	struct drive_job want, a[4], b;
	uint32_t i;

	open_tiny();
	want = job_of(30, 25);
	want.p.sampling.temperature = 0.7f;
	want.p.sampling.seed = 4;
	b = want;
	run(&want);
	close_tiny();
	open_tiny();
	for (i = 0; i < 4; i++) {
		a[i] = job_of(30, 25);
		a[i].p.sampling.seed = 99 + i;
		a[i].p.sampling.repeat_penalty = 1.5f;
		a[i].p.sampling.temperature = 5;
	}
	a[0].p.stop_ids = stop;
	a[0].p.n_stop_ids = 3;
	a[1].p.sampling.n_bias = 1;
	a[1].p.sampling.bias_id = bias_id;
	a[1].p.sampling.bias = bias;
	a[2].cancel_at = 5;
	a[3].p.ignore_eos = false;
	CU_ASSERT(drive_run(model, engine, a, 4) > 0);
	run(&b);
	CU_ASSERT(same_tokens(&want, &b));
	drive_done(a, 4);
	drive_done(&b, 1);
	drive_done(&want, 1);
	close_tiny();
}

/* The engine's counts against a plain recount of the window, by asking what the draw was given. */
static void case34_penalty_windows(void)
{
	static const int32_t windows[] = {-1, 0, 1, 7, 64, 1000};
	size_t w;

	open_tiny();
	for (w = 0; w < sizeof windows / sizeof *windows; w++) {
		struct apr_seq_params p = job_of(20, 60).p;
		uint32_t t, i, k;
		struct apr_seq *s;

		p.sampling.repeat_penalty = 1.3f;
		p.sampling.penalty_window = windows[w];
		CU_ASSERT_EQUAL_FATAL(apr_seq_new(model, &p, &s, NULL), 0);
		CU_ASSERT_EQUAL(s->seen != NULL, windows[w] != 0);
		for (t = 0; t < 60 && s->seen; t++) {
			uint32_t from = windows[w] > 0 && s->n_known > (uint32_t)windows[w] ? s->n_known - (uint32_t)windows[w] : 0;
			uint32_t distinct = 0;

			apr_seq_slide(s, s->n_known); /* as a draw of the next token does */
			for (i = from; i < s->n_known; i++) {
				uint32_t prompt = 0, output = 0;
				bool first = true;

				for (k = from; k < s->n_known; k++)
					if (s->ids[k] == s->ids[i]) {
						first &= k >= i;
						*(k < s->n_prompt ? &prompt : &output) += 1;
					}
				if (!first)
					continue;
				distinct++;
				for (k = 0; k < s->seen->n; k++)
					if (s->seen->list[k].id == s->ids[i])
						break;
				CU_ASSERT_FATAL(k < s->seen->n);
				CU_ASSERT(s->seen->list[k].prompt == prompt && s->seen->list[k].output == output);
			}
			CU_ASSERT_EQUAL(s->seen->n, distinct);
			apr_seq_take(s, (t * t * 31 + t) % 23);
		}
		apr_seq_free(s);
	}
	close_tiny();
}

/* Penalties work and are the same cold and warm. */
static void case34_cold_and_warm(void)
{
	struct drive_job a, b, plain;

	open_tiny();
	a = job_of(150, 60);
	a.p.sampling.repeat_penalty = 1.4f;
	a.p.sampling.frequency_penalty = 0.3f;
	a.p.sampling.presence_penalty = 0.2f;
	b = a;
	plain = job_of(150, 60);
	run(&a);
	run(&b);
	CU_ASSERT(b.n_cached == 128 && a.n_cached == 0);
	CU_ASSERT(same_tokens(&a, &b));
	run(&plain);
	CU_ASSERT(!same_tokens(&a, &plain));
	drive_done(&a, 1);
	drive_done(&b, 1);
	drive_done(&plain, 1);
	close_tiny();
}

/* Two rows of the output matrix equal: their logits tie, and the lower id wins. */
static void case35_tie_goes_to_the_lowest_id(void)
{
	struct tiny_spec spec = {.n_layers = 1, .separate_output = true};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct apr_engine_config cfg = drive_config(NULL, CTX, 2);
	float *out = malloc((size_t)VOCAB * 256 * sizeof *out);
	uint64_t ne[2] = {256, VOCAB};
	char path[256], err[256];
	struct drive_job j = job_of(6, 8);
	uint32_t i, k;

	for (k = 0; k < VOCAB; k++)
		for (i = 0; i < 256; i++)
			out[k * 256 + i] = k >= 100 && k < 140 ? 0.0f : -1.0f; /* whatever h is, see below */
	gw_drop_tensor(w, "output.weight");
	gw_tensor(w, "output.weight", APR_TYPE_F32, 2, ne, out, (uint64_t)VOCAB * 256 * sizeof *out);
	free(out);
	snprintf(path, sizeof path, "%s/tie.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(gw_write(w, path), 0);
	gw_free(w);
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, path, &engine, &model, err, sizeof err), 0);
	j.p.n_top = 3;
	run(&j);
	CU_ASSERT_EQUAL_FATAL(j.n_tok, 8);
	for (i = 0; i < 8; i++) /* either the 40 zeros are best, and 100 is their lowest, or the others tie, and 0 is */
		CU_ASSERT(j.tok[i].id == 100 || j.tok[i].id == 0);
	CU_ASSERT(j.tok[0].top_id[1] == j.tok[0].top_id[0] + 1 && j.tok[0].top_id[2] == j.tok[0].top_id[0] + 2);
	drive_done(&j, 1);
	close_tiny();
}

static void case36_exactly_so_many(void)
{
	uint32_t n, warm;

	open_tiny();
	for (warm = 0; warm < 2; warm++)
		for (n = 0; n < 4; n++) {
			struct drive_job j = job_of(130, n);

			j.p.scope = n; /* cold in the first round, warm in the second */
			run(&j);
			CU_ASSERT_EQUAL(j.n_cached, warm ? 128 : 0);
			CU_ASSERT(j.rc == 0 && j.n_tok == n && j.n_ends == 1);
			CU_ASSERT_EQUAL(j.end, n ? APR_END_LENGTH : APR_END_PROMPT);
			drive_done(&j, 1);
		}
	close_tiny();
}

/* The engine's own rules: slots, a step at a time, frees during a step. */
static void slots_and_steps(void)
{
	struct apr_seq *s[APR_MAX_SLOTS], *more_than;
	struct apr_seq_params p = job_of(10, 4).p;
	struct apr_step_part parts[2];
	struct apr_record rec[4];
	struct apr_kv_counts c;
	bool more = true;
	uint32_t i;

	open_tiny();
	for (i = 0; i < APR_MAX_SLOTS; i++)
		CU_ASSERT_EQUAL(apr_seq_new(model, &p, &s[i], NULL), 0);
	CU_ASSERT_EQUAL(apr_seq_new(model, &p, &more_than, NULL), -EAGAIN);
	for (i = 2; i < APR_MAX_SLOTS; i++)
		apr_seq_free(s[i]);
	CU_ASSERT_EQUAL(apr_engine_unload(engine, model), -EBUSY);
	parts[0] = parts[1] = (struct apr_step_part){s[0], 10};
	CU_ASSERT_EQUAL(apr_step_submit(model, parts, 1), -EINVAL); /* nothing reserved */
	CU_ASSERT_EQUAL(apr_seq_reserve(s[0], 10), 0);
	CU_ASSERT_EQUAL(apr_seq_reserve(s[1], 10), 0);
	CU_ASSERT_EQUAL(apr_step_submit(model, parts, 2), -EINVAL); /* twice the same */
	CU_ASSERT_EQUAL(apr_step_submit(model, parts, 0), -EINVAL);
	parts[1].seq = s[1];
	CU_ASSERT_EQUAL(apr_step_poll(model, rec, 4, &more), 0);
	CU_ASSERT_EQUAL(apr_step_submit(model, parts, 2), 0);
	CU_ASSERT_EQUAL(apr_step_submit(model, parts, 2), -EBUSY);
	CU_ASSERT(apr_step_in_flight(model));
	apr_seq_free(s[0]); /* no record of it comes */
	for (more = true; more;) {
		int n = apr_step_poll(model, rec, 4, &more), k;

		if (n == -EAGAIN) {
			drive_wait(engine);
			more = true;
		}
		for (k = 0; k < n; k++)
			CU_ASSERT_PTR_EQUAL(rec[k].seq, s[1]);
	}
	apr_seq_free(s[1]);
	apr_kv_counts(model->kv, &c);
	CU_ASSERT_EQUAL(c.free, c.total);
	/* freed in flight and then unloaded: the unload waits */
	CU_ASSERT_EQUAL(apr_seq_new(model, &p, &s[0], NULL), 0);
	CU_ASSERT_EQUAL(apr_seq_reserve(s[0], 10), 0);
	parts[0].seq = s[0];
	CU_ASSERT_EQUAL(apr_step_submit(model, parts, 1), 0);
	apr_seq_free(s[0]);
	drive_close(engine, model);
}

static const struct apr_test tests[] = {
	{"case09_prompts_about_the_context", case09_prompts_about_the_context, KEEPS_HEAP}, /* stdio, ended threads' stacks */
	{"case15_empty_and_out_of_range", case15_empty_and_out_of_range, 0},
	{"case16_biases", case16_biases, 0},
	{"case18_nan_in_one_weight", case18_nan_in_one_weight, 0},
	{"case18_nan_in_one_token", case18_nan_in_one_token, 0},
	{"case18_nan_in_one_sequence", case18_nan_in_one_sequence, 0},
	{"case26_ends", case26_ends, 0},
	{"case26_end_id_zero", case26_end_id_zero, 0},
	{"case33_settings_do_not_leak", case33_settings_do_not_leak, 0},
	{"case34_penalty_windows", case34_penalty_windows, 0},
	{"case34_cold_and_warm", case34_cold_and_warm, 0},
	{"case35_tie_goes_to_the_lowest_id", case35_tie_goes_to_the_lowest_id, 0},
	{"case36_exactly_so_many", case36_exactly_so_many, 0},
	{"slots_and_steps", slots_and_steps, 0},
};
TEST_MAIN("engine/cases", tests)
