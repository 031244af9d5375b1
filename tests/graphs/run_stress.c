/* SPDX-License-Identifier: MIT */
/*
 * The same-bits promise on a GPU: whatever else runs, wherever pages and slots lie,
 * however often a graph is replayed, after restarts and re-tuning, tokens and
 * log-probabilities are those that a request alone got.
 *
 *   run_stress [-b BACKEND] [-r ROUTE] [-n REPLAYS] [-a ARCH] [-l] [-s] [TEST]...
 *     BACKEND default cuda; cpu holds the same promise and shows that the tests are right
 *     REPLAYS of every bucket, default 300 (the long form: 10000)
 *     ARCH    llama (default), gemma3, qwen2
 *     -l      lists the tests
 *     -s      instead of them a few requests through every kind of graph, for slow tools (compute-sanitizer)
 *
 * Owns: those tests over the engine, with no daemon. Its last line but one is a
 * hash of what requests alone got, so that two runs can be compared. Exit: 0; 1 a
 * difference; 77 no module, device or route, loudly.
 */
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/types.h"
#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"

#define N_BASE 12u
#define N_GEN 24u
#define N_VOCAB 3000u
#define NAN_ID 2990u
#define CTX 4096u

static const uint32_t base_len[N_BASE] = {1, 5, 17, 63, 64, 65, 100, 128, 129, 200, 333, 511};
static struct drive_job want[N_BASE]; /* what each got alone */
static uint32_t ids[CTX];
static struct apr_engine *engine;
static struct apr_loaded *model;
static struct apr_engine_config cfg;
static char dir[] = "/tmp/run_stress.XXXXXX", path[300];
static struct tiny_spec spec;
static uint64_t next_scope = 1000;
static unsigned replays = 300, n_checks, n_failed;
static const char *current;

static void check(int ok, const char *what)
{
	n_checks++;
	if (!ok && n_failed++ < 40)
		printf("  FAILED: %s: %s\n", current, what);
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
	if (level >= APR_LOG_WARN)
		printf("    log: %s\n", line);
}

/* ---- jobs ------------------------------------------------------------------------------ */

static struct drive_job base_job(uint32_t i)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_GENERATE, .ids = ids + 7 * i, .n_ids = base_len[i], .max_tokens = N_GEN,
	                            .sampling = drive_greedy(), .ignore_eos = true, .want_logprob = true, .n_top = 4,
	                            .scope = next_scope++}};

	if (i % 3) {
		j.p.sampling.temperature = 0.8f + 0.1f * (float)(i % 4);
		j.p.sampling.top_k = i % 2 ? 50 : 0;
		j.p.sampling.top_p = 0.95f;
		j.p.sampling.repeat_penalty = 1.1f;
		j.p.sampling.penalty_window = 64;
		j.p.sampling.seed = 77 + i;
	}
	return j;
}

static struct drive_job other_job(uint32_t k, uint32_t n_prompt, uint32_t n)
{
	return (struct drive_job){.p = {.kind = APR_SEQ_GENERATE, .ids = ids + 100 + 11 * (k % 64), .n_ids = n_prompt,
	                                .max_tokens = n, .sampling = drive_greedy(), .ignore_eos = true,
	                                .scope = next_scope++}};
}

/* n rows in one step: the logarithms of what follows each */
static struct drive_job rows_job(uint32_t n, bool step)
{
	return (struct drive_job){.p = {.kind = APR_SEQ_SCORE, .ids = ids, .n_ids = n + 1, .n_top = 1, .force_decode = step,
	                                .scope = next_scope++}};
}

static void run(struct drive_job *jobs, uint32_t n)
{
	if (drive_run(model, engine, jobs, n) < 0) {
		check(0, "the engine failed");
		printf("run_stress: %u checks, %u failed\n", n_checks, n_failed);
		exit(1);
	}
}

static bool same(const struct drive_job *a, const struct drive_job *b, const char *what)
{
	uint32_t i = 0;
	bool ok = !a->rc && !b->rc && a->n_tok == b->n_tok && a->n_tok && a->end == b->end;

	while (ok && i < a->n_tok && drive_same_token(&a->tok[i], &b->tok[i]))
		i++;
	ok = ok && i == a->n_tok;
	check(ok, what);
	if (!ok && n_failed < 20)
		printf("    prompt %u: rc %d %d, %u and %u tokens, ends %d %d, first difference at %u\n", a->p.n_ids, a->rc, b->rc,
		       a->n_tok, b->n_tok, (int)a->end, (int)b->end, i);
	return ok;
}

/* All base jobs at once, in any order among others: each as alone. */
static void crowd(const uint32_t *order, uint32_t n_others, uint32_t stagger, const char *what)
{
	struct drive_job jobs[64];
	uint32_t i, at[N_BASE];

	for (i = 0; i < n_others + N_BASE; i++) {
		if (i < n_others / 2 || i >= n_others / 2 + N_BASE) {
			jobs[i] = other_job(i, 1 + i * 37 % 700, 5 + i % 40);
		} else {
			at[order[i - n_others / 2]] = i;
			jobs[i] = base_job(order[i - n_others / 2]);
		}
		jobs[i].start_step = stagger ? i % stagger : 0;
	}
	run(jobs, n_others + N_BASE);
	for (i = 0; i < N_BASE; i++)
		same(&want[i], &jobs[at[i]], what);
	drive_done(jobs, n_others + N_BASE);
}

static void each_alone(const char *what)
{
	uint32_t i;

	for (i = 0; i < N_BASE; i++) {
		struct drive_job j = base_job(i);

		run(&j, 1);
		same(&want[i], &j, what);
		drive_done(&j, 1);
	}
}

static const uint32_t forward[N_BASE] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
static const uint32_t backward[N_BASE] = {11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
static const uint32_t mixed[N_BASE] = {5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6};

/* ---- tests ------------------------------------------------------------------------------- */

static void packed_prompts(void) /* in one prefill, and decoded in one batch */
{
	crowd(forward, 0, 0, "all prompts in one step");
	crowd(mixed, 0, 3, "joining at different steps");
}

static void permuted_slots(void)
{
	crowd(backward, 0, 0, "slots backwards");
	crowd(mixed, 9, 0, "slots among others");
}

static void batch_sizes(void)
{
	static const uint32_t n[] = {1, 3, 4, 5, 20, 21, 52};
	uint32_t i;

	for (i = 0; i < sizeof n / sizeof *n; i++)
		crowd(mixed, n[i], 5, "beside others, lengths mixed");
}

static void permuted_pages(void)
{
	struct drive_job jobs[40];
	uint32_t i;

	for (i = 0; i < 40; i++) { /* ends in an order that leaves the free list unsorted */
		jobs[i] = other_job(i, 50 + i * 83 % 900, 4 + i * 29 % 90);
		jobs[i].cancel_at = i % 3 ? 0 : 2;
		jobs[i].start_step = i * 13 % 31;
	}
	run(jobs, 40);
	drive_done(jobs, 40);
	each_alone("on other pages");
	crowd(mixed, 7, 2, "on other pages, among others");
}

static void chunks(void)
{
	static const uint32_t size[] = {1, 63, 64, 65, 200, 512};
	uint32_t i, k;

	for (i = 0; i < sizeof size / sizeof *size; i++)
		for (k = N_BASE - 4; k < N_BASE; k++) {
			struct drive_job j = base_job(k);

			j.chunk = size[i];
			run(&j, 1);
			same(&want[k], &j, "chunks");
			drive_done(&j, 1);
		}
}

/* Across two page boundaries, given up again and again */
static void preempted(void)
{
	static const uint32_t every[] = {1, 7, 16, 63, 64, 65};
	struct drive_job a = base_job(6), b;
	uint32_t i;

	a.p.max_tokens = 170;
	run(&a, 1);
	for (i = 0; i < sizeof every / sizeof *every; i++) {
		b = base_job(6);
		b.p.max_tokens = 170;
		b.drop_every = every[i];
		run(&b, 1);
		check(b.drops > 0, "it was preempted");
		same(&a, &b, "after preemption");
		drive_done(&b, 1);
	}
	drive_done(&a, 1);
}

static void cold_is_warm(void)
{
	static const uint32_t tail[] = {1, 2, 31, 63, 64};
	uint32_t pages, i;

	for (pages = 1; pages <= 4; pages++)
		for (i = 0; i < sizeof tail / sizeof *tail; i++) {
			struct drive_job cold = other_job(3, 64 * pages + tail[i], 8), warm = cold;

			cold.p.want_logprob = warm.p.want_logprob = true;
			run(&cold, 1);
			run(&warm, 1);
			check(cold.n_cached == 0 && warm.n_cached == 64 * pages, "the prefix was found");
			same(&cold, &warm, "cold and warm");
			drive_done(&cold, 1);
			drive_done(&warm, 1);
		}
}

/* A row of NaN in the batch: its request fails, the others' bits are those of requests alone, also on its pages. */
static void case18_nan_in_one_row(void)
{
	struct drive_job jobs[N_BASE + 2];
	uint32_t sick[40], i, k;

	memcpy(sick, ids, sizeof sick);
	sick[20] = NAN_ID;
	for (k = 0; k < 2; k++) {
		for (i = 0; i < N_BASE; i++)
			jobs[i + 1] = base_job(i);
		jobs[0] = other_job(0, 40, 20);
		jobs[N_BASE + 1] = other_job(0, 40, 20);
		jobs[0].p.ids = jobs[N_BASE + 1].p.ids = sick;
		if (k) /* as generated rows: by the decode kernels */
			jobs[0].p = (struct apr_seq_params){.kind = APR_SEQ_SCORE, .ids = sick, .n_ids = 40, .force_decode = true,
			                                    .scope = next_scope++};
		run(jobs, N_BASE + 2);
		check(jobs[0].rc == 0 && jobs[0].end == APR_END_NUMERIC && jobs[0].n_ends == 1, "the sick row's request fails");
		check(jobs[N_BASE + 1].n_tok == 0 && jobs[N_BASE + 1].end == APR_END_NUMERIC, "the other one too");
		for (i = 0; i < N_BASE; i++)
			same(&want[i], &jobs[i + 1], "beside a row of NaN");
		drive_done(jobs, N_BASE + 2);
	}
	each_alone("on pages that held NaN");
	crowd(mixed, 5, 2, "on pages that held NaN, among others");
}

/* A weight that is NaN: that model's requests fail, another model's live. */
static void case18_nan_in_one_weight(void)
{
	struct tiny_spec s = {.type = APR_TYPE_Q8_0, .nan_row = 3};
	struct drive_job j = other_job(1, 30, 5);
	struct apr_loaded *sick;
	uint32_t few[30]; /* its vocabulary is small */
	char file[320], err[300] = "";

	snprintf(file, sizeof file, "%s/nan.gguf", dir);
	check(apr_test_write_tiny_model(file, &s) == 0, "writing the model");
	if (apr_engine_load(engine, "sick", file, NULL, NULL, &sick, err, sizeof err)) {
		printf("    %s\n", err);
		check(0, "a second model loads beside the first");
		return;
	}
	for (uint32_t i = 0; i < 30; i++)
		few[i] = i * 7;
	j.p.ids = few;
	check(drive_run(sick, engine, &j, 1) > 0 && j.rc == 0 && j.n_tok == 0 && j.end == APR_END_NUMERIC && j.n_ends == 1,
	      "its request fails with a numeric error");
	drive_done(&j, 1);
	check(apr_engine_unload(engine, sick) == 0, "it can be unloaded");
	each_alone("the first model's, after");
	unlink(file);
}

/* n prompt rows in one step, of which the last is wanted */
static struct drive_job last_row_job(uint32_t n)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = n, .max_tokens = 1, .ignore_eos = true,
	                            .sampling = drive_greedy(), .want_logprob = true, .n_top = 20, .scope = next_scope++}};

	return j;
}

/* Every bucket again and again, others in between: the bits of the first time. Wide prompts are looked at in their last
 * row, which has read all of them, and in every row once in 16. */
static void replayed(void)
{
	static const uint32_t rows[] = {1, 2, 4, 8, 16, 32, 64, 3, 11, 50};
	static const uint32_t prompt[] = {64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 7, 65, 700};
	enum { N = sizeof rows / sizeof *rows, P = sizeof prompt / sizeof *prompt };
	struct drive_job first[2][N + P];
	uint32_t max = apr_step_max_rows(model), r, k;
	double t0 = now();
	unsigned steps = 0;

	memset(first, 0, sizeof first);
	for (r = 0; r <= replays; r++)
		for (k = 0; k < N + P; k++) {
			uint32_t n = k < N ? rows[k] : prompt[k - N];
			bool all = n <= 64 || r % 16 == 1;
			struct drive_job j;

			if (n > max)
				continue;
			j = all ? rows_job(n, k < N) : last_row_job(n);
			run(&j, 1);
			steps++;
			if (!first[all][k].n_tok) {
				first[all][k] = j;
				continue;
			}
			if (!same(&first[all][k], &j, "a replay"))
				printf("    bucket of %u %s rows, replay %u\n", n, k < N ? "generated" : "prompt", r);
			drive_done(&j, 1);
		}
	drive_done(first[0], N + P);
	drive_done(first[1], N + P);
	printf("    %u steps, %.1f s\n", steps, now() - t0);
}

/* ---- restarts -------------------------------------------------------------------------------- */

static int open_model(void)
{
	char err[300] = "";
	int rc = drive_open(&cfg, path, &engine, &model, err, sizeof err);

	if (rc)
		printf("    %s\n", err);
	return rc;
}

static void restarted(void) /* the cache folder and what was measured in it stay */
{
	drive_close(engine, model);
	if (open_model()) {
		check(0, "it opens again");
		exit(1);
	}
	each_alone("after a restart");
}

static void empty_cache(void)
{
	DIR *d = opendir(cfg.cache_dir);
	struct dirent *e;
	char file[600];

	while (d && (e = readdir(d)))
		if (e->d_name[0] != '.') {
			snprintf(file, sizeof file, "%s/%s", cfg.cache_dir, e->d_name);
			(void)remove(file);
		}
	if (d)
		closedir(d);
}

static _Atomic bool enough; /* set by the tuned engine's thread; orders nothing */

static void *load_the_gpu(void *arg) /* a second engine whose prompts keep the device busy */
{
	struct apr_engine_config c = cfg;
	struct apr_engine *e;
	struct apr_loaded *m;

	(void)arg;
	c.cache_dir = NULL;
	if (drive_open(&c, path, &e, &m, NULL, 0))
		return NULL;
	while (!atomic_load_explicit(&enough, memory_order_relaxed)) {
		struct drive_job j = other_job(1, 900, 2);

		if (drive_run(m, e, &j, 1) < 0)
			break;
		drive_done(&j, 1);
	}
	drive_close(e, m);
	return NULL;
}

static void tuned_again_under_load(void)
{
	pthread_t t;
	unsigned k;

	for (k = 0; k < 2; k++) {
		drive_close(engine, model);
		empty_cache();
		atomic_store_explicit(&enough, false, memory_order_relaxed);
		if (pthread_create(&t, NULL, load_the_gpu, NULL)) {
			check(0, "a thread");
			exit(1);
		}
		usleep(400000); /* its own load is over */
		if (open_model()) {
			check(0, "it opens under load");
			exit(1);
		}
		each_alone("tuned again under load");
		atomic_store_explicit(&enough, true, memory_order_relaxed);
		pthread_join(t, NULL);
	}
}

/* ---- main ---------------------------------------------------------------------------------------- */

static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	{"packed_prompts", packed_prompts},
	{"permuted_slots", permuted_slots},
	{"batch_sizes", batch_sizes},
	{"permuted_pages", permuted_pages},
	{"chunks", chunks},
	{"preempted", preempted},
	{"cold_is_warm", cold_is_warm},
	{"case18_nan_in_one_row", case18_nan_in_one_row},
	{"case18_nan_in_one_weight", case18_nan_in_one_weight},
	{"replayed", replayed},
	{"restarted", restarted},
	{"tuned_again_under_load", tuned_again_under_load},
};
#define N_TESTS (sizeof tests / sizeof *tests)

static int set_up(const char *arch)
{
	char cache[320], err[300] = "";
	int rc;

	spec = (struct tiny_spec){.arch = arch, .n_layers = 3, .n_embd = 512, .n_ff = 1024, .n_heads = 8, .n_kv_heads = 2,
	                          .type = APR_TYPE_Q4_K, .wo_down_type = APR_TYPE_Q6_K + 1, .embd_type = APR_TYPE_F16 + 1,
	                          .separate_output = true, .n_vocab = N_VOCAB, .n_ctx = CTX, .seed = 21, .planted = 1,
	                          .window = 130, .pattern = 3, .nan_token = NAN_ID + 1};
	for (uint32_t i = 0; i < CTX; i++)
		ids[i] = (uint32_t)((i * 7919u + 13) % 2900u);
	if (!mkdtemp(dir)) {
		perror(dir);
		return 1;
	}
	snprintf(path, sizeof path, "%s/model.gguf", dir);
	snprintf(cache, sizeof cache, "%s/cache", dir);
	mkdir(cache, 0700);
	cfg.cache_dir = strdup(cache);
	if (apr_test_write_tiny_model(path, &spec)) {
		printf("%s: cannot be written\n", path);
		return 1;
	}
	rc = drive_open(&cfg, path, &engine, &model, err, sizeof err);
	if (rc)
		printf("run_stress: SKIPPED: %s\n", err);
	return !rc ? 0 : rc == -ENODEV || rc == -EINVAL ? 77 : 1;
}

static void clean_up(void)
{
	char command[400];

	drive_done(want, N_BASE);
	if (engine)
		drive_close(engine, model);
	snprintf(command, sizeof command, "rm -rf '%s'", dir);
	if (system(command))
		fprintf(stderr, "run_stress: %s stays\n", dir);
}

/* FNV-1a over what requests alone got: equal in every run with equal numerics. */
static uint64_t hash_of_alone(void)
{
	uint64_t h = UINT64_C(0xcbf29ce484222325);

	for (uint32_t i = 0; i < N_BASE; i++)
		for (uint32_t k = 0; k < want[i].n_tok; k++) {
			uint32_t word[2] = {want[i].tok[k].id};

			memcpy(&word[1], &want[i].tok[k].logprob, 4);
			for (unsigned b = 0; b < sizeof word; b++)
				h = (h ^ ((const uint8_t *)word)[b]) * UINT64_C(0x100000001b3);
		}
	return h;
}

static void run_test(size_t i)
{
	unsigned checks = n_checks, failed = n_failed;
	double t0 = now();

	current = tests[i].name;
	tests[i].run();
	printf("%-26s %5u checks, %u failed, %.1f s\n", current, n_checks - checks, n_failed - failed, now() - t0);
	fflush(stdout);
}

/* Prompts packed and in chunks, generated rows in three buckets, every control of the sampler, both scores: twice. */
static void few_requests(void)
{
	struct drive_job jobs[2][6];
	uint32_t k, i;

	current = "few requests";
	for (k = 0; k < 2; k++) {
		for (i = 0; i < 4; i++) {
			jobs[k][i] = base_job(i + 2);
			jobs[k][i].p.max_tokens = 3;
			jobs[k][i].chunk = 40;
		}
		jobs[k][4] = rows_job(9, true);
		jobs[k][5] = rows_job(20, false);
		run(jobs[k], 6);
	}
	for (i = 0; i < 6; i++)
		same(&jobs[0][i], &jobs[1][i], "the second time");
	drive_done(jobs[0], 6);
	drive_done(jobs[1], 6);
}

static void all_tests(char **names)
{
	current = "alone";
	for (uint32_t i = 0; i < N_BASE; i++) {
		want[i] = base_job(i);
		run(&want[i], 1);
		check(want[i].rc == 0 && want[i].n_tok == N_GEN, "every token");
	}
	for (size_t i = 0; i < N_TESTS; i++) {
		bool wanted = !*names;

		for (char **n = names; *n; n++)
			wanted |= !strcmp(*n, tests[i].name);
		if (wanted)
			run_test(i);
	}
	printf("bits of requests alone: %016llx\n", (unsigned long long)hash_of_alone());
}

static int usage(void)
{
	fprintf(stderr, "usage: run_stress [-b BACKEND] [-r ROUTE] [-n REPLAYS] [-a ARCH] [-l] [-s] [TEST]...\n");
	return 2;
}

int main(int argc, char **argv)
{
	const char *arch = "llama";
	bool few = false;
	int o, rc;

	cfg = drive_config(NULL, CTX, 0);
	cfg.backend = "cuda";
	cfg.chunk = 2048;
	cfg.log = say;
	while ((o = getopt(argc, argv, "b:r:n:a:ls")) != -1)
		switch (o) {
		case 'b': cfg.backend = optarg; break;
		case 'r': cfg.route = optarg; break;
		case 'n': replays = (unsigned)strtoul(optarg, NULL, 10); break;
		case 'a': arch = optarg; break;
		case 's':
			few = true;
			cfg.chunk = 64;
			cfg.n_ctx = 512;
			break;
		case 'l':
			for (size_t i = 0; i < N_TESTS; i++)
				puts(tests[i].name);
			return 0;
		default: return usage();
		}
	rc = set_up(arch);
	if (!rc) {
		if (few)
			few_requests();
		else
			all_tests(argv + optind);
		printf("run_stress%s%s, %s: %u checks, %u failed\n", cfg.route ? " -r " : "", cfg.route ? cfg.route : "", arch,
		       n_checks, n_failed);
	}
	clean_up();
	return rc ? rc : n_failed ? 1 : 0;
}
