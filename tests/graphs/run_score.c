/* SPDX-License-Identifier: MIT */
/*
 * The CUDA backend against the CPU's f32 route and against golden files, on a
 * machine that has a GPU and little else: no daemon, no sockets, no packages.
 *
 *   run_score                   small random models: score and score --step within the bars of
 *                               the CPU's, equal bits in a crowd, in chunks and after preemption
 *   run_score -m NAME           one of them
 *   run_score MODEL GOLDEN...   a model file against golden files: both scores, greedy text
 *   -r ROUTE before these       by that route, and to its bars
 *
 * Exit: 0; 1 where a bar was missed; 77 where there is no module, no device or no such route, loudly.
 */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/types.h"
#include "tests/support/gpu_run.h"


/* Nats, of teacher-forced log-probabilities; decode is the same whatever the route, but for f32. */
static const struct bar {
	const char *route; /* NULL: the default */
	double mean, max, step_mean, step_max;
	bool same_bits; /* the promise holds */
} bars[] = {
	{NULL, 0.015, 0.1, 0.015, 0.1, true},     {"fp16", 0.015, 0.1, 0.015, 0.1, true},
	{"quant", 0.015, 0.1, 0.015, 0.1, true},  {"fused", 0.015, 0.1, 0.015, 0.1, true},
	{"f32", 0.005, 0.01, 0.005, 0.01, false}, {"fp8", 0.2, 3.0, 0.015, 0.1, true},
	{"fp8-fast", 0.2, 3.0, 0.015, 0.1, true},
};
static const struct bar *bar = &bars[0];


static struct apr_engine_config config(const char *backend, const char *route, uint32_t n_ctx)
{
	struct apr_engine_config cfg = drive_config(route, n_ctx, 0);

	cfg.backend = backend;
	cfg.log = run_say;
	return cfg;
}

static void check_errors(const struct run_errors *e, bool step, const char *which)
{
	const char *what = step ? "score --step" : "score";
	double mean = step ? bar->step_mean : bar->mean, max = step ? bar->step_max : bar->max;

	printf("  %-28s %-14s mean %.5f max %.5f of %u (bars %g, %g)\n", which, what, e->n ? e->sum / e->n : 0.0, e->max, e->n,
	       mean, max);
	run_check(e->n > 0 && e->sum / e->n <= mean && e->max <= max, what, which);
}

/* ---- small random models ------------------------------------------------------------- */

static void against_cpu(const struct drive_job *gpu, const struct drive_job *cpu, bool step, const char *which)
{
	struct run_errors e = run_compare(gpu, cpu, which);

	check_errors(&e, step, which);
}

/* The same job, not run yet. */
static struct drive_job fresh(const struct drive_job *j)
{
	struct drive_job out = {.p = j->p, .chunk = j->chunk, .start_step = j->start_step};

	return out;
}

/* Biases, penalties and ends reach the device, the token that the host does not know yet among them. */
static void lists(struct apr_engine *e, struct apr_loaded *m, const char *which)
{
	struct drive_job plain = run_gen_job(90, 60, 9, 400), j;
	uint32_t ban = 0, i, k;
	float never = -INFINITY;

	plain.p.sampling.temperature = 0.0f;
	plain.p.sampling.repeat_penalty = 1.0f;
	run_jobs(e, m, &plain, 1, which);
	run_check(plain.n_tok == 60, "60 tokens", which);
	ban = plain.n_tok ? plain.tok[0].id : 0;
	j = fresh(&plain);
	j.p.sampling.n_bias = 1;
	j.p.sampling.bias_id = &ban;
	j.p.sampling.bias = &never;
	run_jobs(e, m, &j, 1, which);
	for (i = 0; i < j.n_tok && j.tok[i].id != ban; i++)
		;
	run_check(j.n_tok == 60 && i == 60, "a banned token is not drawn", which);
	drive_done(&j, 1);
	j = fresh(&plain);
	j.p.sampling.presence_penalty = 1000.0f;
	j.p.sampling.penalty_window = -1;
	run_jobs(e, m, &j, 1, which);
	for (i = 0, k = 0; i < j.n_tok; i++)
		for (ban = 0; ban < i; ban++)
			k += j.tok[ban].id == j.tok[i].id;
	run_check(j.n_tok == 60 && k == 0, "a present token is not drawn again", which);
	drive_done(&j, 1);
	for (i = 0; i < 60; i += 13) {
		uint32_t stop[12] = {390, 391, 392, 393, 394, 395, 396, 397, 398, 399}; /* more than lie in a draw itself */

		stop[i % 2 ? 11 : 1] = plain.tok[i].id;
		for (k = 0; k < i && plain.tok[k].id != plain.tok[i].id; k++)
			;
		j = fresh(&plain);
		j.p.stop_ids = stop;
		j.p.n_stop_ids = i % 2 ? 12 : 2;
		stop[0] = 390;
		run_jobs(e, m, &j, 1, which);
		run_check(j.n_tok <= k && j.n_ends == 1 && j.end == APR_END_STOP_ID, "a stop id", which);
		drive_done(&j, 1);
	}
	drive_done(&plain, 1);
}

/* Penalised, in a crowd: a step at a time, two at a time, every launch by itself. */
static void crowd(struct apr_engine *e, struct apr_loaded *m, struct drive_job jobs[8], uint64_t scope, const char *which)
{
	uint32_t i;

	for (i = 0; i < 8; i++) {
		jobs[i] = run_gen_job(20 + 37 * i, 30 + 5 * i, 40 + i, scope + i);
		jobs[i].start_step = 3 * i;
		jobs[i].p.sampling.penalty_window = i % 2 ? -1 : 5;
		jobs[i].p.sampling.frequency_penalty = 0.3f;
		jobs[i].p.sampling.presence_penalty = 0.2f;
	}
	run_jobs(e, m, jobs, 8, which);
}

static void same_crowd(struct drive_job *want, struct drive_job *got, const char *what, const char *which)
{
	uint32_t i;

	for (i = 0; i < 8; i++)
		run_same(&want[i], &got[i], what, which);
	drive_done(got, 8);
}

static void steps_and_launches(struct apr_engine *e, struct apr_loaded *m, const char *path, const char *which)
{
	struct apr_engine_config cfg = config("cuda", bar->route, 1024);
	struct drive_job want[8], got[8];
	struct apr_engine *eager;
	struct apr_loaded *em;
	char err[300] = "";

	drive_one_step = true;
	crowd(e, m, want, 500, which);
	drive_one_step = false;
	crowd(e, m, got, 600, which);
	same_crowd(want, got, "two steps in flight", which);
	cfg.no_graphs = true;
	cfg.log = NULL;
	if (drive_open(&cfg, path, &eager, &em, err, sizeof err)) {
		printf("  %s: no graphs: %s\n", which, err);
		run_check(0, "without graphs", which);
	} else {
		crowd(eager, em, got, 700, which);
		same_crowd(want, got, "without graphs", which);
		drive_close(eager, em);
	}
	drive_done(want, 8);
}

static void random_model(const char *dir, const char *which, const struct tiny_spec *spec)
{
	struct apr_engine_config cpu_cfg = config("cpu", "f32", 1024), cfg = config("cuda", bar->route, 1024);
	struct drive_job cpu = run_score_job(false, 1), gpu = cpu, step = run_score_job(true, 2), chunked = run_score_job(false, 3);
	struct apr_engine *e;
	struct apr_loaded *m;
	char path[300], err[300] = "";
	double t0;

	snprintf(path, sizeof path, "%s/%s.gguf", dir, which);
	run_check(apr_test_write_tiny_model(path, spec) == 0, "writing the model", which);
	cpu_cfg.log = NULL;
	if (drive_open(&cpu_cfg, path, &e, &m, err, sizeof err)) {
		printf("  %s: cpu: %s\n", which, err);
		run_check(0, "the cpu backend", which);
		return;
	}
	run_jobs(e, m, &cpu, 1, which);
	drive_close(e, m);
	t0 = run_now();
	if (drive_open(&cfg, path, &e, &m, err, sizeof err)) {
		printf("  %s: cuda: %s\n", which, err);
		run_check(0, "the cuda backend", which);
		drive_done(&cpu, 1);
		return;
	}
	printf("%s: loaded in %.2f s\n", which, run_now() - t0);
	run_jobs(e, m, &gpu, 1, which);
	against_cpu(&gpu, &cpu, false, which);
	run_jobs(e, m, &step, 1, which);
	against_cpu(&step, &cpu, true, which);
	chunked.chunk = 37;
	run_jobs(e, m, &chunked, 1, which);
	if (bar->same_bits) {
		run_same(&gpu, &chunked, "score in chunks of 37", which);
		run_equal_bits(e, m, which);
		steps_and_launches(e, m, path, which);
	}
	lists(e, m, which);
	drive_close(e, m);
	drive_done(&cpu, 1);
	drive_done(&gpu, 1);
	drive_done(&step, 1);
	drive_done(&chunked, 1);
	unlink(path);
	fflush(stdout);
}

/* ---- a model against golden files --------------------------------------------------------- */

static uint32_t *take_ids(const json_t *a, const json_t *b, uint32_t *n)
{
	size_t na = json_array_size(a), nb = json_array_size(b), i;
	uint32_t *out = calloc(na + nb + 1, sizeof *out); /* one id more, so that the last golden row is scored */

	if (!out)
		abort();
	for (i = 0; i < na; i++)
		out[i] = (uint32_t)json_integer_value(json_array_get(a, i));
	for (i = 0; i < nb; i++)
		out[na + i] = (uint32_t)json_integer_value(json_array_get(b, i));
	*n = (uint32_t)(na + nb + 1);
	return out;
}

static void golden_row(const json_t *row, const struct drive_token *t, struct run_errors *e)
{
	const json_t *top = json_object_get(row, "top");
	double lse = json_real_value(json_object_get(row, "lse"));
	uint32_t i, k;

	for (i = 0; i < 3; i++) {
		const json_t *pair = json_array_get(top, i);
		uint32_t id = (uint32_t)json_integer_value(json_array_get(pair, 0));
		double d = 1e3; /* not among our best twenty */

		for (k = 0; k < t->n_top; k++)
			if (t->top_id[k] == id)
				d = fabs((double)t->top_logprob[k] - (json_real_value(json_array_get(pair, 1)) - lse));
		run_add_error(e, d);
	}
}

static void golden_score(struct apr_engine *e, struct apr_loaded *m, const json_t *j, bool step, const char *which)
{
	const json_t *in = json_object_get(j, "ids"), *prompt = json_object_get(j, "prompt");
	const json_t *steps = json_object_get(j, "steps");
	struct drive_job job = {.p = {.kind = APR_SEQ_SCORE, .n_top = APR_SAMPLE_TOP_MAX, .force_decode = step,
	                              .scope = step}};
	struct run_errors err = {0};
	uint32_t n, n_ids = (uint32_t)json_array_size(in), i, *all = take_ids(in, json_object_get(j, "generated"), &n);

	job.p.ids = all;
	job.p.n_ids = n;
	run_jobs(e, m, &job, 1, which);
	run_check(job.n_tok == n - 1, "every position", which);
	for (i = 0; job.n_tok == n - 1 && i < json_array_size(prompt); i++)
		golden_row(json_array_get(prompt, i), &job.tok[n_ids - json_array_size(prompt) + i], &err);
	for (i = 0; job.n_tok == n - 1 && i < json_array_size(steps); i++)
		golden_row(json_array_get(steps, i), &job.tok[n_ids + i], &err);
	check_errors(&err, step, which);
	drive_done(&job, 1);
	free(all);
}

static void golden_text(struct apr_engine *e, struct apr_loaded *m, const json_t *j, const char *which)
{
	const json_t *gen = json_object_get(j, "generated");
	struct drive_job job = {.p = {.kind = APR_SEQ_GENERATE, .sampling = drive_greedy(), .ignore_eos = true, .scope = 7}};
	uint32_t n, i, *all = take_ids(json_object_get(j, "ids"), NULL, &n);
	double t0 = run_now();

	job.p.ids = all;
	job.p.n_ids = n - 1;
	job.p.max_tokens = (uint32_t)json_array_size(gen);
	run_jobs(e, m, &job, 1, which);
	for (i = 0; i < job.n_tok && job.tok[i].id == (uint32_t)json_integer_value(json_array_get(gen, i)); i++)
		;
	printf("  %-28s greedy text    %u of %u ids equal from the start, %.1f ms in all\n", which, i, job.p.max_tokens,
	       (run_now() - t0) * 1e3);
	run_check(job.n_tok == job.p.max_tokens && (i == job.n_tok || bar->max > 0.1), "greedy text", which);
	drive_done(&job, 1);
	free(all);
}

static double decode_rate(struct apr_engine *e, struct apr_loaded *m, uint32_t n_prompt, uint64_t scope)
{
	double first = run_time_job(e, m, n_prompt, 1, scope);

	return 255 / (run_time_job(e, m, n_prompt, 256, scope + 1) - first);
}

/* Not a bar: what a client of the engine sees, host and all. */
static void pace(struct apr_engine *e, struct apr_loaded *m)
{
	static const uint32_t prompt[] = {128, 512, 1920};
	struct drive_job j[16];
	double t0;
	uint32_t i, k;

	for (i = 0; i < 2048; i++)
		run_state.ids[i] = 100 + i % 3000;
	for (i = 0; i < 3; i++)
		printf("  first token of %u: %.2f ms\n", prompt[i], run_time_job(e, m, prompt[i], 1, 20 + i) * 1e3);
	for (i = 0; i < 6; i++) { /* by turns: the device's clock moves */
		drive_one_step = i % 2;
		printf("  decode at batch 1, %s in flight: %.1f tok/s\n", i % 2 ? "one step " : "two steps", decode_rate(e, m, 128, 25 + 2 * i));
	}
	for (i = 0; i < 4; i++) {
		drive_one_step = i % 2;
		for (k = 0; k < 16; k++)
			j[k] = run_pace_job(64, 128, 40 + 16 * i + k);
		t0 = run_now();
		run_jobs(e, m, j, 16, "pace");
		t0 = run_now() - t0;
		printf("  16 prompts of 64 with 128 tokens each, %s in flight: %.1f ms, %.0f tok/s\n", i % 2 ? "one step " : "two steps",
		       t0 * 1e3, 16 * 128 / t0);
		drive_done(j, 16);
	}
	drive_one_step = false;
}

/* The same launches one by one. */
static int pace_eagerly(struct apr_engine_config *cfg, const char *model)
{
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[300] = "";

	cfg->no_graphs = true;
	if (drive_open(cfg, model, &e, &m, err, sizeof err)) {
		printf("%s: %s\n", model, err);
		return 1;
	}
	printf("  without graphs: first token of 128: %.2f ms, decode at batch 1: %.1f tok/s\n", run_time_job(e, m, 128, 1, 20) * 1e3,
	       decode_rate(e, m, 128, 25));
	drive_close(e, m);
	return 0;
}

static void print_plan(const struct apr_engine *e)
{
	struct apr_memory_row row[64];
	size_t n = apr_engine_memory(e, row, 64), i;

	for (i = 0; i < n && i < 64; i++)
		printf("  %-20s %-12s %12llu\n", row[i].purpose, row[i].where, (unsigned long long)row[i].bytes);
}

static int golden_files(const char *model, char **file, int n)
{
	struct apr_engine_config cfg = config("cuda", bar->route, 2048);
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[300] = "";
	double t0 = run_now();
	int i;

	if (drive_open(&cfg, model, &e, &m, err, sizeof err)) {
		printf("%s: %s\n", model, err);
		return 1;
	}
	printf("%s: loaded in %.2f s\n", model, run_now() - t0);
	print_plan(e);
	for (i = 0; i < n; i++) {
		const char *which = strrchr(file[i], '/') ? strrchr(file[i], '/') + 1 : file[i];
		json_t *j = json_load_file(file[i], 0, NULL);

		run_check(j != NULL, "reading the golden file", which);
		if (!j)
			continue;
		golden_score(e, m, j, false, which);
		golden_score(e, m, j, true, which);
		golden_text(e, m, j, which);
		json_decref(j);
	}
	pace(e, m);
	drive_close(e, m);
	return pace_eagerly(&cfg, model);
}

/* -r ROUTE: 0, or -1 where that is no route's name. */
static int choose_route(const char *name)
{
	size_t i;

	for (i = 1; i < sizeof bars / sizeof *bars; i++)
		if (!strcmp(bars[i].route, name)) {
			bar = &bars[i];
			return 0;
		}
	fprintf(stderr, "run_score: %s: not a route\n", name);
	return -1;
}

/* Does the module that is here have the route? The engine tells where a model is loaded. */
static bool has_route(void)
{
	static const struct tiny_spec spec = {.type = APR_TYPE_F16};
	struct apr_engine_config cfg = config("cuda", bar->route, 256);
	char path[] = "/tmp/run_score.XXXXXX", err[300] = "";
	struct apr_engine *e;
	struct apr_loaded *m;
	int fd, rc;

	if (!bar->route)
		return true;
	fd = mkstemp(path);
	if (fd < 0)
		return true;
	close(fd);
	cfg.log = NULL;
	rc = apr_test_write_tiny_model(path, &spec);
	if (!rc)
		rc = drive_open(&cfg, path, &e, &m, err, sizeof err);
	unlink(path);
	if (!rc)
		drive_close(e, m);
	else
		printf("run_score: SKIPPED: %s\n", err);
	return rc != -EINVAL;
}

int main(int argc, char **argv)
{
	struct apr_engine_config cfg = config("cuda", NULL, 0);
	struct apr_engine_info info;
	struct apr_engine *e;
	char err[300] = "";
	int rc;

	if (argc > 2 && !strcmp(argv[1], "-r")) {
		if (choose_route(argv[2]))
			return 2;
		argv += 2;
		argc -= 2;
	}
	rc = apr_engine_open(&e, &cfg, err, sizeof err);
	if (rc) {
		printf("run_score: SKIPPED: %s\n", err);
		return rc == -ENODEV ? 77 : 1;
	}
	apr_engine_info(e, &info);
	printf("%s: %s\n", info.backend, info.device);
	apr_engine_close(e);
	if (!has_route())
		return 77;
	if (argc == 1 || !strcmp(argv[1], "-m"))
		rc = run_random_models("/tmp/run_score.XXXXXX", argc > 2 ? argv[2] : NULL, random_model, NULL);
	else
		rc = golden_files(argv[1], argv + 2, argc - 2);
	printf("run_score: %u checks, %u missed\n", run_state.checks, run_state.missed);
	return rc || run_state.missed ? 1 : 0;
}
