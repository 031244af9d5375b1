/* SPDX-License-Identifier: MIT */
/*
 * Every weight route of the CUDA backend, on a machine that has a GPU and little else.
 *
 *   run_routes                  small random models: each route's score and score --step within its bars of
 *                               the CPU's f32 route; equal bits of fp16, quant and fused, in a crowd, in chunks,
 *                               after preemption, with algorithms timed anew or another --fused-rows
 *   run_routes -m NAME          one of them
 *   run_routes -p MODEL [ROUTE...]  not a check: times of loading and of prompts, what the table chose
 *
 * Golden files are run_score's (-r ROUTE). Exit: 0; 1 where a bar was missed; 77 where there is no module or no device,
 * loudly.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/types.h"
#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"


#define SCORED 300u
/* E4M3 has four bits of mantissa: each product's terms are off by up to 6 %, at random. Measured: means of 0.04 to 0.14
 * and at most 0.42, but 2.23 where channels are planted a thousand times larger, which one scale a row cannot follow. */
#define FP8_MEAN 0.2
#define FP8_MAX 3.0

static unsigned n_checks, n_missed;
static char cache_dir[300]; /* of the algorithm table; "" none */
static bool chatty;         /* lines about single products too */

struct route { /* and the error it may have, in nats */
	const char *name;
	double mean, max;
	bool like_fp16; /* its bits */
};
static const struct route routes[] = {
	{"fp16", 0.015, 0.1, true},   {"quant", 0.015, 0.1, true},   {"fused", 0.015, 0.1, true},
	{"f32", 0.002, 0.01, false}, {"fp8", FP8_MEAN, FP8_MAX, false}, {"fp8-fast", FP8_MEAN, FP8_MAX, false},
};
#define N_ROUTES (sizeof routes / sizeof *routes)

static void check(int ok, const char *what, const char *which)
{
	n_checks++;
	if (ok)
		return;
	n_missed++;
	printf("  MISSED: %s: %s\n", which, what);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void say(void *arg, enum apr_log_level level, const char *line)
{
	(void)arg;
	if (level >= APR_LOG_INFO || chatty)
		printf("    log: %s\n", line);
}

static struct apr_engine_config config(const char *backend, const char *route, uint32_t n_ctx)
{
	struct apr_engine_config cfg = drive_config(route, n_ctx, 0);

	cfg.backend = backend;
	cfg.log = say;
	if (!strcmp(backend, "cuda") && cache_dir[0])
		cfg.cache_dir = cache_dir;
	return cfg;
}

struct errors {
	double sum, max;
	unsigned n;
};

static void add_error(struct errors *e, double d)
{
	e->sum += d;
	e->n++;
	if (!(d <= e->max))
		e->max = d;
}

static void check_errors(const struct errors *e, const struct route *r, const char *what, const char *which)
{
	printf("  %-28s %-8s %-14s mean %.5f max %.5f of %u\n", which, r->name, what, e->n ? e->sum / e->n : 0.0, e->max, e->n);
	check(e->n > 0 && e->sum / e->n <= r->mean && e->max <= r->max, what, which);
}

/* ---- small random models ------------------------------------------------------------- */

static uint32_t ids[2048];

static struct drive_job score_job(bool step, uint64_t scope)
{
	return (struct drive_job){.p = {.kind = APR_SEQ_SCORE, .ids = ids, .n_ids = SCORED, .n_top = 4, .force_decode = step,
	                                .scope = scope}};
}

static struct drive_job gen_job(uint32_t n_prompt, uint32_t n, uint64_t seed, uint64_t scope)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = n_prompt, .max_tokens = n,
	                            .sampling = drive_greedy(), .ignore_eos = true, .want_logprob = true, .n_top = 3,
	                            .scope = scope}};

	j.p.sampling.temperature = 0.9f;
	j.p.sampling.top_k = 50;
	j.p.sampling.repeat_penalty = 1.1f;
	j.p.sampling.penalty_window = 64;
	j.p.sampling.seed = seed;
	return j;
}

static void run(struct apr_engine *e, struct apr_loaded *m, struct drive_job *jobs, uint32_t n, const char *which)
{
	check(drive_run(m, e, jobs, n) > 0, "the engine failed", which);
}

static void same(const struct drive_job *a, const struct drive_job *b, const char *what, const char *which)
{
	uint32_t i;

	if (a->rc || b->rc || a->n_tok != b->n_tok || !a->n_tok) {
		printf("  %s: %s: rc %d %d, %u and %u tokens\n", which, what, a->rc, b->rc, a->n_tok, b->n_tok);
		check(0, what, which);
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
	check(i == a->n_tok, what, which);
}

static void against_cpu(const struct drive_job *gpu, const struct drive_job *cpu, const struct route *r, const char *what,
                        const char *which)
{
	struct errors e = {0};
	uint32_t i;

	check(gpu->rc == 0 && gpu->n_tok == cpu->n_tok, "as many positions", which);
	for (i = 0; i < gpu->n_tok && i < cpu->n_tok; i++)
		add_error(&e, fabs((double)gpu->tok[i].logprob - (double)cpu->tok[i].logprob));
	check_errors(&e, r, what, which);
}

static void equal_bits(struct apr_engine *e, struct apr_loaded *m, const char *which)
{
	static const uint32_t chunk[] = {1, 63, 64, 65, 200};
	struct drive_job want = gen_job(200, 40, 5, 100), jobs[12];
	uint32_t i;
	char what[48];

	run(e, m, &want, 1, which);
	for (i = 0; i < sizeof chunk / sizeof *chunk; i++) {
		struct drive_job j = gen_job(200, 40, 5, 101 + i);

		j.chunk = chunk[i];
		run(e, m, &j, 1, which);
		snprintf(what, sizeof what, "chunks of %u", chunk[i]);
		same(&want, &j, what, which);
		drive_done(&j, 1);
	}
	for (i = 0; i < 12; i++) {
		jobs[i] = gen_job(17 + 41 * i, 20 + 9 * i, 100 + i, 200 + i);
		jobs[i].start_step = i;
	}
	jobs[5] = gen_job(200, 40, 5, 205);
	jobs[5].start_step = 3;
	run(e, m, jobs, 12, which);
	same(&want, &jobs[5], "among others", which);
	drive_done(jobs, 12);
	jobs[0] = gen_job(200, 40, 5, 300);
	jobs[0].drop_every = 9;
	run(e, m, jobs, 1, which);
	same(&want, &jobs[0], "after preemption", which);
	drive_done(jobs, 1);
	jobs[0] = gen_job(200, 40, 5, 300); /* that one's pages */
	run(e, m, jobs, 1, which);
	check(jobs[0].n_cached == 192, "a prefix hit", which);
	same(&want, &jobs[0], "warm cache", which);
	drive_done(jobs, 1);
	drive_done(&want, 1);
}

/* The prompt's score, with this configuration; the caller gives the job back. */
static struct drive_job score_with(const struct apr_engine_config *cfg, const char *path, uint32_t chunk, const char *which)
{
	struct drive_job j = score_job(false, 1);
	char err[300] = "";
	struct apr_engine *e;
	struct apr_loaded *m;

	j.chunk = chunk;
	if (drive_open(cfg, path, &e, &m, err, sizeof err)) {
		printf("  %s: %s: %s\n", which, cfg->route ? cfg->route : "cuda", err);
		check(0, "loading", which);
		return j;
	}
	run(e, m, &j, 1, which);
	drive_close(e, m);
	return j;
}

/* Routes of equal bits have equal receipts, all others have their own; which promise them is said. */
static void check_numerics(const struct apr_loaded *m, const struct route *r, const char *which)
{
	static uint8_t fp16[32];
	struct apr_loaded_info info;

	apr_loaded_info(m, &info);
	if (r == routes)
		memcpy(fp16, info.numerics, sizeof fp16);
	check((memcmp(fp16, info.numerics, sizeof fp16) == 0) == r->like_fp16, "numerics", which);
	check(!strcmp(info.route, r->name) && info.equal_bits == (strcmp(r->name, "f32") != 0), "what status says", which);
}

/* One route against the CPU's, and, of the same arithmetic, against fp16's own score. */
static void one_route(const char *path, const struct route *r, const struct drive_job *cpu, const struct drive_job *fp16,
                      struct drive_job *gpu, const char *which)
{
	struct apr_engine_config cfg = config("cuda", r->name, 1024);
	struct drive_job step = score_job(true, 2), chunked = score_job(false, 3);
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[300] = "";
	double t0 = now();

	if (drive_open(&cfg, path, &e, &m, err, sizeof err)) {
		printf("  %s: %s: %s\n", which, r->name, err);
		check(0, "loading", which);
		return;
	}
	printf("%s by %s: loaded in %.2f s\n", which, r->name, now() - t0);
	check_numerics(m, r, which);
	run(e, m, gpu, 1, which);
	against_cpu(gpu, cpu, r, "score", which);
	run(e, m, &step, 1, which);
	against_cpu(&step, cpu, r->max < 0.1 ? r : &routes[0], "score --step", which);
	if (fp16)
		same(fp16, gpu, "score by fp16", which);
	if (strcmp(r->name, "f32") != 0) {
		chunked.chunk = 37;
		run(e, m, &chunked, 1, which);
		same(gpu, &chunked, "score in chunks of 37", which);
		equal_bits(e, m, which);
	}
	drive_close(e, m);
	drive_done(&step, 1);
	drive_done(&chunked, 1);
	fflush(stdout);
}

static void forget_table(void)
{
	char path[400];

	snprintf(path, sizeof path, "%s/cublaslt-0.algorithms", cache_dir);
	unlink(path);
}

static void damage(const char *which)
{
	char path[400];
	FILE *f;

	snprintf(path, sizeof path, "%s/cublaslt-0.algorithms", cache_dir);
	f = fopen(path, "r+b");
	check(f != NULL, "the algorithm table's file", which);
	if (!f)
		return;
	fseek(f, 700, SEEK_SET);
	fputc('!', f);
	fclose(f);
}

/* The same bits whatever was chosen: by timing anew, after damage, with our own kernel for few rows or never. */
static void equal_choices(const char *path, const struct drive_job *want, const char *which)
{
	static const uint32_t fused[] = {0, 8, 1000};
	struct apr_engine_config cfg = config("cuda", "fp16", 1024);
	struct drive_job j;
	size_t i;

	cfg.cache_dir = NULL;
	j = score_with(&cfg, path, 0, which);
	same(want, &j, "algorithms timed anew", which);
	drive_done(&j, 1);
	cfg = config("cuda", "fp16", 1024);
	damage(which);
	j = score_with(&cfg, path, 0, which);
	same(want, &j, "a damaged table", which);
	drive_done(&j, 1);
	for (i = 0; i < sizeof fused / sizeof *fused; i++) {
		cfg.set_fused_rows = true;
		cfg.fused_rows = fused[i];
		j = score_with(&cfg, path, i ? 7 : 0, which);
		same(want, &j, "another --fused-rows", which);
		drive_done(&j, 1);
	}
}

static void random_model(const char *dir, const char *which, const struct tiny_spec *spec)
{
	struct apr_engine_config cpu_cfg = config("cpu", "f32", 1024);
	struct drive_job cpu, gpu[N_ROUTES];
	char path[300];
	size_t i;

	snprintf(path, sizeof path, "%s/%s.gguf", dir, which);
	check(apr_test_write_tiny_model(path, spec) == 0, "writing the model", which);
	cpu_cfg.log = NULL;
	cpu = score_with(&cpu_cfg, path, 0, which);
	for (i = 0; i < N_ROUTES; i++) {
		gpu[i] = score_job(false, 1);
		one_route(path, &routes[i], &cpu, i && routes[i].like_fp16 ? &gpu[0] : NULL, &gpu[i], which);
	}
	equal_choices(path, &gpu[0], which);
	drive_done(gpu, N_ROUTES);
	drive_done(&cpu, 1);
	unlink(path);
	fflush(stdout);
}

static int random_models(const char *only)
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
	char dir[] = "/tmp/run_routes.XXXXXX";
	size_t i;

	if (!mkdtemp(dir)) {
		perror(dir);
		return 1;
	}
	snprintf(cache_dir, sizeof cache_dir, "%s", dir);
	for (i = 0; i < 1024; i++)
		ids[i] = (uint32_t)(i * 7919u + 13) % 390;
	for (i = 0; i < sizeof model / sizeof *model; i++)
		if (!only || !strcmp(only, model[i].name))
			random_model(dir, model[i].name, &model[i].spec);
	forget_table();
	rmdir(dir);
	return 0;
}

static struct drive_job pace_job(uint32_t n_prompt, uint32_t n, uint64_t scope)
{
	return (struct drive_job){.p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = n_prompt, .max_tokens = n,
	                                .sampling = drive_greedy(), .ignore_eos = true, .scope = scope}};
}

/* Seconds of one job. */
static double time_job(struct apr_engine *e, struct apr_loaded *m, uint32_t n_prompt, uint32_t n, uint64_t scope)
{
	struct drive_job j = pace_job(n_prompt, n, scope);
	double t0 = now();

	run(e, m, &j, 1, "pace");
	check(j.n_tok == n, "every token", "pace");
	t0 = now() - t0;
	drive_done(&j, 1);
	return t0;
}

/* ---- times ---------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static void prefill_times(struct apr_engine *e, struct apr_loaded *m, const char *route)
{
	static const uint32_t prompt[] = {4, 16, 64, 128, 512, 2048};
	double t[7];
	uint32_t i, k;

	for (i = 0; i < sizeof prompt / sizeof *prompt; i++) {
		for (k = 0; k < 7; k++)
			t[k] = time_job(e, m, prompt[i], 1, 1000 + 10 * i + k) * 1e3;
		qsort(t, 7, sizeof *t, compare);
		printf("{\"bench\":\"prefill\",\"route\":\"%s\",\"rows\":%u,\"ms\":%.2f,\"least\":%.2f,\"most\":%.2f}\n", route,
		       prompt[i], t[3], t[0], t[6]);
	}
}

static int time_route(const char *model, const char *route)
{
	struct apr_engine_config cfg = config("cuda", route, 4096);
	struct apr_loaded_info info;
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[300] = "";
	int i;

	cfg.chunk = 2048;
	for (i = 0; i < 2; i++) { /* without its algorithms in the table, then with them */
		double t0 = now();

		if (drive_open(&cfg, model, &e, &m, err, sizeof err)) {
			printf("%s: %s: %s\n", model, route, err);
			return 1;
		}
		printf("{\"bench\":\"load\",\"route\":\"%s\",\"table\":%s,\"s\":%.2f}\n", route, i ? "true" : "false", now() - t0);
		if (i)
			break;
		drive_close(e, m);
	}
	apr_loaded_info(m, &info);
	printf("%s: %s\n", route, info.how);
	prefill_times(e, m, route);
	drive_close(e, m);
	fflush(stdout);
	return 0;
}

static int times(const char *model, char **route, int n)
{
	char dir[] = "/tmp/run_routes.XXXXXX";
	int rc = 0, i;

	if (!mkdtemp(dir))
		return 1;
	snprintf(cache_dir, sizeof cache_dir, "%s", dir);
	chatty = true;
	for (i = 0; i < 2048; i++)
		ids[i] = 100 + (uint32_t)i % 3000;
	for (i = 0; i < n; i++)
		rc |= time_route(model, route[i]);
	for (i = 0; !n && i < (int)N_ROUTES; i++)
		rc |= time_route(model, routes[i].name);
	forget_table();
	rmdir(dir);
	return rc;
}

int main(int argc, char **argv)
{
	struct apr_engine_config cfg = config("cuda", NULL, 0);
	struct apr_engine_info info;
	struct apr_engine *e;
	char err[300] = "";
	int rc = apr_engine_open(&e, &cfg, err, sizeof err);

	if (rc) {
		printf("run_routes: SKIPPED: %s\n", err);
		return rc == -ENODEV ? 77 : 1;
	}
	apr_engine_info(e, &info);
	printf("%s: %s\n", info.backend, info.device);
	apr_engine_close(e);
	if (argc > 2 && !strcmp(argv[1], "-p"))
		rc = times(argv[2], argv + 3, argc - 3);
	else
		rc = random_models(argc > 2 && !strcmp(argv[1], "-m") ? argv[2] : NULL);
	printf("run_routes: %u checks, %u missed\n", n_checks, n_missed);
	return rc || n_missed ? 1 : 0;
}
