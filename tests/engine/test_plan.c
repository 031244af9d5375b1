/* SPDX-License-Identifier: MIT */
/*
 * The memory plan, what is refused and what would fit; panel files; the choice of
 * backend and route; and that no step allocates.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/internal.h"
#include "engine/plan.h"
#include "tests/harness.h"
#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"

/* ---- counting allocations ---------------------------------------------------------- */

#if !DRIVE_SANITIZED
static _Atomic bool counting;
static _Atomic uint32_t allocations;

/* glibc's own entry points; these names win over its malloc in the whole program */
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t align, size_t n);

static void note(void)
{
	if (atomic_load(&counting))
		atomic_fetch_add(&allocations, 1);
}

__attribute__((visibility("default"))) void *malloc(size_t n)
{
	note();
	return __libc_malloc(n);
}
__attribute__((visibility("default"))) void *calloc(size_t n, size_t size)
{
	note();
	return __libc_calloc(n, size);
}
__attribute__((visibility("default"))) void *realloc(void *p, size_t n)
{
	note();
	return __libc_realloc(p, n);
}
__attribute__((visibility("default"))) void *aligned_alloc(size_t align, size_t n)
{
	note();
	return __libc_memalign(align, n);
}
__attribute__((visibility("default"))) int posix_memalign(void **p, size_t align, size_t n)
{
	note();
	*p = __libc_memalign(align, n);
	return *p ? 0 : ENOMEM;
}
#endif

/* ---- models and engines ------------------------------------------------------------ */

static char log_text[4096];

static void keep_log(void *arg, enum apr_log_level level, const char *line)
{
	(void)arg;
	(void)level;
	snprintf(log_text + strlen(log_text), sizeof log_text - strlen(log_text), "%s\n", line);
}

static const char *tiny(const char *arch, uint64_t seed)
{
	static char path[256];
	struct tiny_spec spec = {.arch = arch, .n_layers = 3, .seed = seed, .type = APR_TYPE_Q8_0, .pattern = 3, .window = 128,
	                         .n_ctx = 4096};

	snprintf(path, sizeof path, "%s/%s-%llu.gguf", apr_test_tmpdir(), arch, (unsigned long long)seed);
	if (access(path, F_OK))
		CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(path, &spec), 0);
	return path;
}

/* err of a load that must fail with rc */
static const char *refused(struct apr_engine_config cfg, const char *path, int rc)
{
	static char err[256];
	struct apr_engine *e;
	struct apr_loaded *m;

	err[0] = 0;
	CU_ASSERT_EQUAL(drive_open(&cfg, path, &e, &m, err, sizeof err), rc);
	return err;
}

/* What opening that backend says where no device can be seen, on a machine that has the module and a GPU as on any: in a
 * process of its own, since a CUDA runtime that looked once stays. Its words, "" where the return is not rc. */
static const char *says_unseen(const char *backend, int rc)
{
	static char line[300];
	struct apr_engine_config cfg = drive_config(NULL, 256, 1);
	struct apr_engine_info info;
	struct apr_engine *e;
	int fds[2], status = -1;
	pid_t pid;
	ssize_t n;

	line[0] = 0;
	if (pipe(fds))
		return line;
	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		char err[256] = "";
		int got;

		setenv("CUDA_VISIBLE_DEVICES", "-1", 1);
		cfg.backend = backend;
		got = apr_engine_open(&e, &cfg, err, sizeof err);
		if (!got) {
			apr_engine_info(e, &info);
			snprintf(err, sizeof err, "%s: %.200s", info.backend, info.why);
		}
		_exit(got != rc || write(fds[1], err, strlen(err)) < 0);
	}
	close(fds[1]);
	n = read(fds[0], line, sizeof line - 1);
	close(fds[0]);
	waitpid(pid, &status, 0);
	line[n > 0 && status == 0 ? n : 0] = 0;
	return line;
}

static bool says(const char *err, const char *word)
{
	if (strstr(err, word))
		return true;
	printf("\n  \"%s\" does not say \"%s\"", err, word);
	return false;
}

/* ---- sizes ------------------------------------------------------------------------- */

static void sums_never_wrap(void)
{
	struct apr_plan p = {0};

	CU_ASSERT_EQUAL(apr_plan_add(&p, "a", APR_PLACE_HOST, UINT64_C(1) << 40, UINT64_C(1) << 40), APR_PLAN_LINES);
	CU_ASSERT(p.overflow);
	CU_ASSERT_EQUAL(apr_plan_bytes(&p), UINT64_MAX);
	p = (struct apr_plan){0};
	apr_plan_add(&p, "a", APR_PLACE_HOST, INT64_MAX, 1);
	apr_plan_add(&p, "b", APR_PLACE_HOST, INT64_MAX, 1);
	apr_plan_add(&p, "c", APR_PLACE_HOST, INT64_MAX, 1);
	CU_ASSERT_EQUAL(apr_plan_bytes(&p), UINT64_MAX);
}

static void kv_is_the_sum_over_layers(void)
{
	struct apr_engine_config cfg = drive_config(NULL, 1024, 1);
	struct apr_memory_row rows[64];
	struct apr_loaded_info info;
	struct apr_engine *e;
	struct apr_loaded *m;
	uint64_t sum = 0, kv = 0;
	char err[256];
	size_t n, i;

	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("gemma3", 1), &e, &m, err, sizeof err), 0);
	/* F16, 2 heads, 64 + 64 dims, 3 layers */
	CU_ASSERT_EQUAL(apr_plan_kv_token(&m->sizes), 3 * 2 * 128 * 2);
	CU_ASSERT_EQUAL(m->sizes.n_groups, 2);
	n = apr_engine_memory(e, rows, 64);
	CU_ASSERT(n > 8 && n < 64);
	for (i = 0; i < n; i++) {
		sum += rows[i].bytes;
		if (!strncmp(rows[i].purpose, "kv", 2))
			kv += rows[i].bytes;
		CU_ASSERT_STRING_EQUAL(rows[i].model, "m");
	}
	apr_loaded_info(m, &info);
	CU_ASSERT_EQUAL(info.bytes, sum);
	CU_ASSERT_EQUAL(kv, (uint64_t)m->sizes.group[0].n_pages * m->sizes.group[0].layer_bytes * m->sizes.group[0].n_layers +
	                        (uint64_t)m->sizes.group[1].n_pages * m->sizes.group[1].layer_bytes * m->sizes.group[1].n_layers);
	CU_ASSERT_EQUAL(info.n_ctx, 1024);
	CU_ASSERT_EQUAL(info.pages_free, info.pages_total);
	drive_close(e, m);
}

static void kv_mem_is_kept(void)
{
	struct apr_engine_config cfg = drive_config(NULL, 512, 1);
	struct apr_engine *e;
	struct apr_loaded *m;
	uint64_t page = UINT64_C(3) * 2 * 128 * 2 * 64, n;
	char err[256];

	for (n = 8; n < 40; n += 5) {
		cfg.kv_mem = page * n + 100;
		CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("llama", 1), &e, &m, err, sizeof err), 0);
		CU_ASSERT_EQUAL(m->sizes.group[0].n_pages, n);
		drive_close(e, m);
	}
}

static void what_does_not_fit_is_refused_with_what_would(void)
{
	struct apr_engine_config cfg = drive_config(NULL, 4096, 1);
	uint64_t page = UINT64_C(3) * 2 * 128 * 2 * 64;
	const char *err;
	struct apr_engine *e;
	struct apr_loaded *m;
	char text[256];

	cfg.kv_mem = page * 20;
	err = refused(cfg, tiny("llama", 1), -ENOSPC);
	CU_ASSERT(says(err, "-c 1280 would fit"));
	cfg.n_ctx = 1280;
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("llama", 1), &e, &m, text, sizeof text), 0);
	drive_close(e, m);
	cfg.kv_mem = 1000;
	CU_ASSERT(says(refused(cfg, tiny("llama", 1), -ENOSPC), "no context fits"));
	cfg.kv_mem = UINT64_C(1) << 60;
	CU_ASSERT(says(refused(cfg, tiny("llama", 1), -ENOSPC), "does not fit"));
	cfg.kv_mem = 0;
	cfg.n_ctx = UINT32_MAX;
	CU_ASSERT(says(refused(cfg, tiny("llama", 1), -EINVAL), "too large"));
}

/* ---- choices ----------------------------------------------------------------------- */

static void backends_and_routes_by_name(void)
{
	static const char *const gpu_routes[] = {"quant", "fp16", "fp8", "fp8-fast", "fused", "nonsense", ""};
	struct apr_engine_config cfg = drive_config(NULL, 256, 1);
	struct apr_loaded_info li, lj;
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[256];
	size_t i;

	for (i = 0; i < sizeof gpu_routes / sizeof *gpu_routes; i++) {
		cfg.route = gpu_routes[i];
		CU_ASSERT(says(refused(cfg, tiny("llama", 1), -EINVAL), "int16, f32"));
	}
	cfg.route = "auto";
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("llama", 1), &e, &m, err, sizeof err), 0);
	apr_loaded_info(m, &li);
	CU_ASSERT_STRING_EQUAL(li.route, "int16");
	CU_ASSERT_STRING_EQUAL(li.kv_type, "f16");
	drive_close(e, m);
	cfg.route = "f32";
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("llama", 1), &e, &m, err, sizeof err), 0);
	apr_loaded_info(m, &lj);
	CU_ASSERT_STRING_EQUAL(lj.kv_type, "f32");
	CU_ASSERT_NOT_EQUAL(memcmp(li.numerics, lj.numerics, sizeof li.numerics), 0);
	drive_close(e, m);
	cfg.route = NULL;
	cfg.kv_type = "f8";
	CU_ASSERT(says(refused(cfg, tiny("llama", 1), -EINVAL), "f16, f32, bf16"));
	cfg.kv_type = NULL;
	CU_ASSERT(says(says_unseen("cuda", -ENODEV), "libaprd-cuda.so"));
	CU_ASSERT(says(says_unseen("cuda:1", -ENODEV), "cuda:1"));
	cfg.backend = "vulkan";
	CU_ASSERT(says(refused(cfg, tiny("llama", 1), -EINVAL), "vulkan"));
	CU_ASSERT(says(says_unseen("auto", 0), "cpu: auto: "));
}

/* Equal numerics: other threads, context, chunk; not: another model, KV type. */
static void numerics_name_what_changes_bits(void)
{
	struct apr_engine_config cfg = drive_config(NULL, 256, 1);
	struct apr_loaded_info a, b;
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[256];

	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("llama", 1), &e, &m, err, sizeof err), 0);
	apr_loaded_info(m, &a);
	drive_close(e, m);
	cfg = drive_config(NULL, 512, 2);
	cfg.chunk = 64;
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("llama", 1), &e, &m, err, sizeof err), 0);
	apr_loaded_info(m, &b);
	drive_close(e, m);
	CU_ASSERT_EQUAL(memcmp(a.numerics, b.numerics, sizeof a.numerics), 0);
	cfg.kv_type = "bf16";
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("llama", 1), &e, &m, err, sizeof err), 0);
	apr_loaded_info(m, &b);
	drive_close(e, m);
	CU_ASSERT_NOT_EQUAL(memcmp(a.numerics, b.numerics, sizeof a.numerics), 0);
	cfg.kv_type = NULL;
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("llama", 2), &e, &m, err, sizeof err), 0);
	apr_loaded_info(m, &b);
	drive_close(e, m);
	CU_ASSERT_NOT_EQUAL(memcmp(a.numerics, b.numerics, sizeof a.numerics), 0);
}

/* ---- panel files ------------------------------------------------------------------- */

static uint32_t ids[200];

/* The bits of a short answer, so that two ways of getting the weights can be compared. */
static uint64_t answer(struct apr_engine *e, struct apr_loaded *m)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_SCORE, .ids = ids, .n_ids = 40, .n_top = 1}};
	uint64_t h = 0;
	uint32_t i, bits;

	for (i = 0; i < 200; i++)
		ids[i] = i % 250;
	CU_ASSERT(drive_run(m, e, &j, 1) > 0);
	for (i = 0; i < j.n_tok; i++) {
		memcpy(&bits, &j.tok[i].logprob, sizeof bits);
		h = h * 31 + bits;
	}
	drive_done(&j, 1);
	return h;
}

static char panel_path[512];

static uint64_t load_with_cache(const char *dir, bool *from_file)
{
	struct apr_engine_config cfg = drive_config(NULL, 256, 2);
	struct apr_memory_row rows[64];
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[256] = "";
	struct dirent *d;
	uint64_t h;
	size_t i, n;
	DIR *dp;

	log_text[0] = 0;
	cfg.cache_dir = dir;
	cfg.log = keep_log;
	if (drive_open(&cfg, tiny("llama", 3), &e, &m, err, sizeof err)) {
		printf("\n  %s", err);
		CU_FAIL_FATAL("open");
		return 0;
	}
	*from_file = false;
	n = apr_engine_memory(e, rows, 64);
	for (i = 0; i < n; i++)
		*from_file |= !strcmp(rows[i].where, "cache file");
	h = answer(e, m);
	drive_close(e, m);
	dp = opendir(dir);
	while (dp && (d = readdir(dp)))
		if (strstr(d->d_name, ".panels") && !strstr(d->d_name, ".new"))
			snprintf(panel_path, sizeof panel_path, "%s/%s", dir, d->d_name);
	if (dp)
		closedir(dp);
	return h;
}

static void damage(off_t at, int how)
{
	int fd = open(panel_path, O_RDWR | O_CLOEXEC);
	struct stat st;
	uint8_t b;

	CU_ASSERT_FATAL(fd >= 0 && fstat(fd, &st) == 0);
	if (at < 0)
		at = st.st_size + at;
	if (how == 0) {
		CU_ASSERT_EQUAL(pread(fd, &b, 1, at), 1);
		b ^= 0x10;
		CU_ASSERT_EQUAL(pwrite(fd, &b, 1, at), 1);
	} else {
		CU_ASSERT_EQUAL(ftruncate(fd, at), 0);
	}
	close(fd);
}

static void panel_file_is_made_used_and_mended(void)
{
	char dir[256];
	uint64_t want;
	struct stat st;
	bool file;

	snprintf(dir, sizeof dir, "%s/cache/panels", apr_test_tmpdir());
	want = load_with_cache(dir, &file);
	CU_ASSERT(file);
	CU_ASSERT(says(log_text, "packed into"));
	CU_ASSERT(stat(panel_path, &st) == 0 && (st.st_mode & 0777) == 0600);
	CU_ASSERT_EQUAL(load_with_cache(dir, &file), want);
	CU_ASSERT(file && log_text[0] == 0); /* used as it is */
	damage(9, 0); /* the head */
	CU_ASSERT_EQUAL(load_with_cache(dir, &file), want);
	CU_ASSERT(says(log_text, "damaged head"));
	damage(-5000, 0); /* a weight */
	CU_ASSERT_EQUAL(load_with_cache(dir, &file), want);
	CU_ASSERT(says(log_text, "damaged; making it again"));
	damage(-4096, 1);
	CU_ASSERT_EQUAL(load_with_cache(dir, &file), want);
	CU_ASSERT(says(log_text, "cut short"));
	damage(100, 1);
	CU_ASSERT_EQUAL(load_with_cache(dir, &file), want);
	CU_ASSERT(file && says(log_text, "packed into"));
	damage(4096, 1); /* a head alone */
	CU_ASSERT_EQUAL(load_with_cache(dir, &file), want);
	CU_ASSERT(says(log_text, "cut short"));
}

static void no_cache_folder_is_said(void)
{
	char dir[256], with[256];
	uint64_t want;
	bool file;
	FILE *f;

	snprintf(with, sizeof with, "%s/cache/panels", apr_test_tmpdir());
	want = load_with_cache(with, &file);
	snprintf(dir, sizeof dir, "%s/a-file", apr_test_tmpdir());
	f = fopen(dir, "we");
	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	fclose(f);
	strcat(dir, "/panels"); /* below a file: cannot be made, not even by root */
	CU_ASSERT_EQUAL(load_with_cache(dir, &file), want);
	CU_ASSERT(!file);
	CU_ASSERT(says(log_text, "stay in this process's memory"));
}

/* ---- steps ------------------------------------------------------------------------- */

#if DRIVE_SANITIZED
static void no_step_allocates(void)
{
	SKIP("a sanitizer owns malloc");
}
#else
static void drain(struct apr_engine *e, struct apr_loaded *m, uint32_t *tokens)
{
	struct apr_record rec[4];
	bool more = true;

	while (more) {
		int n = apr_step_poll(m, rec, 4, &more);

		if (n == -EAGAIN) {
			drive_wait(e);
			more = true;
			continue;
		}
		CU_ASSERT_FATAL(n >= 0);
		for (int i = 0; i < n; i++)
			*tokens += rec[i].has_token;
	}
}

static void no_step_allocates(void)
{
	struct apr_engine_config cfg = drive_config(NULL, 1024, 2);
	struct apr_seq_params p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = 150, .max_tokens = 100, .ignore_eos = true,
	                           .sampling = drive_greedy(), .want_logprob = true, .n_top = 3};
	struct apr_step_part parts[5];
	struct apr_seq *seq[5];
	struct apr_engine *e;
	struct apr_loaded *m;
	uint32_t tokens = 0, i, s;
	char err[256];
	void *volatile planted;

	for (i = 0; i < 200; i++)
		ids[i] = i;
	p.sampling.temperature = 0.8f;
	p.sampling.top_p = 0.9f;
	p.sampling.repeat_penalty = 1.2f;
	CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, tiny("gemma3", 1), &e, &m, err, sizeof err), 0);
	for (i = 0; i < 5; i++) {
		p.sampling.seed = i;
		p.ids = ids + i;
		if (i == 4) { /* one that scores */
			p.kind = APR_SEQ_SCORE;
			p.n_ids = 190;
		}
		CU_ASSERT_EQUAL_FATAL(apr_seq_new(m, &p, &seq[i], NULL), 0);
	}
	atomic_store(&counting, true);
	for (s = 0; s < 102; s++) {
		uint32_t n = 0;

		for (i = 0; i < 5; i++) {
			struct apr_seq_state st;
			uint32_t rows;

			apr_seq_state(seq[i], &st);
			rows = st.todo < 60 ? st.todo : 60;
			if (rows && apr_seq_reserve(seq[i], rows) == 0)
				parts[n++] = (struct apr_step_part){seq[i], rows};
		}
		if (s == 20)
			apr_seq_drop(seq[1]);
		if (n > 0 && s != 20 && apr_step_submit(m, parts, n) == 0)
			drain(e, m, &tokens);
	}
	atomic_store(&counting, false);
	CU_ASSERT_EQUAL(allocations, 0);
	CU_ASSERT(tokens > 400);
	atomic_store(&counting, true); /* the counter counts: else the line above says nothing */
	planted = malloc(1);
	atomic_store(&counting, false);
	free(planted);
	CU_ASSERT_EQUAL(allocations, 1);
	for (i = 0; i < 5; i++)
		apr_seq_free(seq[i]);
	drive_close(e, m);
}
#endif

static const struct apr_test tests[] = {
	{"sums_never_wrap", sums_never_wrap, 0},
	{"kv_is_the_sum_over_layers", kv_is_the_sum_over_layers, KEEPS_HEAP}, /* stdio, stacks of ended threads */
	{"kv_mem_is_kept", kv_mem_is_kept, 0},
	{"what_does_not_fit_is_refused_with_what_would", what_does_not_fit_is_refused_with_what_would, KEEPS_HEAP}, /* stdio */
	{"backends_and_routes_by_name", backends_and_routes_by_name, 0},
	{"numerics_name_what_changes_bits", numerics_name_what_changes_bits, KEEPS_HEAP}, /* one more thread's stack */
	{"panel_file_is_made_used_and_mended", panel_file_is_made_used_and_mended, 0},
	{"no_cache_folder_is_said", no_cache_folder_is_said, 0},
	{"no_step_allocates", no_step_allocates, 0},
};
TEST_MAIN("engine/plan", tests)
