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
#include "tests/support/gpu_run.h"


/* E4M3 has four bits of mantissa: each product's terms are off by up to 6 %, at random. Measured: means of 0.04 to 0.14
 * and at most 0.42, but 2.23 where channels are planted a thousand times larger, which one scale a row cannot follow. */
#define FP8_MEAN 0.2
#define FP8_MAX 3.0

static char cache_dir[300]; /* of the algorithm table; "" none */

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

static struct apr_engine_config config(const char *backend, const char *route, uint32_t n_ctx)
{
	struct apr_engine_config cfg = drive_config(route, n_ctx, 0);

	cfg.backend = backend;
	cfg.log = run_say;
	if (!strcmp(backend, "cuda") && cache_dir[0])
		cfg.cache_dir = cache_dir;
	return cfg;
}

static void check_errors(const struct run_errors *e, const struct route *r, const char *what, const char *which)
{
	printf("  %-28s %-8s %-14s mean %.5f max %.5f of %u\n", which, r->name, what, e->n ? e->sum / e->n : 0.0, e->max, e->n);
	run_check(e->n > 0 && e->sum / e->n <= r->mean && e->max <= r->max, what, which);
}

/* ---- small random models ------------------------------------------------------------- */

static void against_cpu(const struct drive_job *gpu, const struct drive_job *cpu, const struct route *r, const char *what,
                        const char *which)
{
	struct run_errors e = run_compare(gpu, cpu, which);

	check_errors(&e, r, what, which);
}

/* The prompt's score, with this configuration; the caller gives the job back. */
static struct drive_job score_with(const struct apr_engine_config *cfg, const char *path, uint32_t chunk, const char *which)
{
	struct drive_job j = run_score_job(false, 1);
	char err[300] = "";
	struct apr_engine *e;
	struct apr_loaded *m;

	j.chunk = chunk;
	if (drive_open(cfg, path, &e, &m, err, sizeof err)) {
		printf("  %s: %s: %s\n", which, cfg->route ? cfg->route : "cuda", err);
		run_check(0, "loading", which);
		return j;
	}
	run_jobs(e, m, &j, 1, which);
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
	run_check((memcmp(fp16, info.numerics, sizeof fp16) == 0) == r->like_fp16, "numerics", which);
	run_check(!strcmp(info.route, r->name) && info.equal_bits == (strcmp(r->name, "f32") != 0), "what status says", which);
}

/* One route against the CPU's, and, of the same arithmetic, against fp16's own score. */
static void one_route(const char *path, const struct route *r, const struct drive_job *cpu, const struct drive_job *fp16,
                      struct drive_job *gpu, const char *which)
{
	struct apr_engine_config cfg = config("cuda", r->name, 1024);
	struct drive_job step = run_score_job(true, 2), chunked = run_score_job(false, 3);
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[300] = "";
	double t0 = run_now();

	if (drive_open(&cfg, path, &e, &m, err, sizeof err)) {
		printf("  %s: %s: %s\n", which, r->name, err);
		run_check(0, "loading", which);
		return;
	}
	printf("%s by %s: loaded in %.2f s\n", which, r->name, run_now() - t0);
	check_numerics(m, r, which);
	run_jobs(e, m, gpu, 1, which);
	against_cpu(gpu, cpu, r, "score", which);
	run_jobs(e, m, &step, 1, which);
	against_cpu(&step, cpu, r->max < 0.1 ? r : &routes[0], "score --step", which);
	if (fp16)
		run_same(fp16, gpu, "score by fp16", which);
	if (strcmp(r->name, "f32") != 0) {
		chunked.chunk = 37;
		run_jobs(e, m, &chunked, 1, which);
		run_same(gpu, &chunked, "score in chunks of 37", which);
		run_equal_bits(e, m, which);
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
	run_check(f != NULL, "the algorithm table's file", which);
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
	run_same(want, &j, "algorithms timed anew", which);
	drive_done(&j, 1);
	cfg = config("cuda", "fp16", 1024);
	damage(which);
	j = score_with(&cfg, path, 0, which);
	run_same(want, &j, "a damaged table", which);
	drive_done(&j, 1);
	for (i = 0; i < sizeof fused / sizeof *fused; i++) {
		cfg.set_fused_rows = true;
		cfg.fused_rows = fused[i];
		j = score_with(&cfg, path, i ? 7 : 0, which);
		run_same(want, &j, "another --fused-rows", which);
		drive_done(&j, 1);
	}
}

static void random_model(const char *dir, const char *which, const struct tiny_spec *spec)
{
	struct apr_engine_config cpu_cfg = config("cpu", "f32", 1024);
	struct drive_job cpu, gpu[N_ROUTES];
	char path[300];
	size_t i;

	snprintf(cache_dir, sizeof cache_dir, "%s", dir);
	snprintf(path, sizeof path, "%s/%s.gguf", dir, which);
	run_check(apr_test_write_tiny_model(path, spec) == 0, "writing the model", which);
	cpu_cfg.log = NULL;
	cpu = score_with(&cpu_cfg, path, 0, which);
	for (i = 0; i < N_ROUTES; i++) {
		gpu[i] = run_score_job(false, 1);
		one_route(path, &routes[i], &cpu, i && routes[i].like_fp16 ? &gpu[0] : NULL, &gpu[i], which);
	}
	equal_choices(path, &gpu[0], which);
	drive_done(gpu, N_ROUTES);
	drive_done(&cpu, 1);
	unlink(path);
	fflush(stdout);
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
			t[k] = run_time_job(e, m, prompt[i], 1, 1000 + 10 * i + k) * 1e3;
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
		double t0 = run_now();

		if (drive_open(&cfg, model, &e, &m, err, sizeof err)) {
			printf("%s: %s: %s\n", model, route, err);
			return 1;
		}
		printf("{\"bench\":\"load\",\"route\":\"%s\",\"table\":%s,\"s\":%.2f}\n", route, i ? "true" : "false", run_now() - t0);
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
	run_state.chatty = true;
	for (i = 0; i < 2048; i++)
		run_state.ids[i] = 100 + (uint32_t)i % 3000;
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
		rc = run_random_models("/tmp/run_routes.XXXXXX", argc > 2 && !strcmp(argv[1], "-m") ? argv[2] : NULL, random_model,
		                       forget_table);
	printf("run_routes: %u checks, %u missed\n", run_state.checks, run_state.missed);
	return rc || run_state.missed ? 1 : 0;
}
