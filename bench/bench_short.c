/* SPDX-License-Identifier: MIT */
/*
 * A short-lived process: how much aprd adds to one token from a cached prompt.
 *
 * Window: in a fresh process, from apr_connect's call to the return of apr_close;
 * exec and ld.so are timed apart (from fork in the parent to main in the child).
 * The model's own step is what FINAL says (prefill_us + decode_us); the figure is
 * the window less that. The prompt is 257 ids, four full pages of it cached.
 *
 *   bench_short [MODEL.gguf [RUNS]]      default: a tiny random model, 200 runs
 */
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"

#include <apr/client.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define N_IDS 257u

struct sample { /* µs */
	double start, window, connect, model, added;
};

static double now_us(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec * 1e-3;
}

/* The short-lived process itself. Writes its figures to stdout as bytes. */
static int child_main(const char *sock, double forked)
{
	double began = now_us(), connected, ended;
	struct apr_opts o = APR_OPTS_INIT;
	struct apr_result r;
	uint32_t ids[N_IDS];
	struct apr_gen g = {.size = sizeof g, .ids = ids, .n_ids = N_IDS, .max_tokens = 1, .has_seed = 1};
	struct sample s;
	struct apr *c;

	for (uint32_t i = 0; i < N_IDS; i++)
		ids[i] = 33 + i % 90;
	o.path = sock;
	if (apr_connect(&c, &o, NULL, 0))
		return 1;
	connected = now_us();
	if (apr_generate(c, &g, NULL, NULL, &r, NULL, 0) || r.cost.cached != 256)
		return 1;
	apr_close(c);
	ended = now_us();
	s = (struct sample){.start = began - forked, .window = ended - began, .connect = connected - began,
			    .model = (double)r.cost.prefill_us + (double)r.cost.decode_us};
	s.added = s.window - s.model;
	return write(1, &s, sizeof s) != sizeof s;
}

static int run_child(const char *self, const char *sock, struct sample *s)
{
	char forked[40];
	int fds[2], status;
	ssize_t n;
	pid_t pid;

	if (pipe(fds))
		return -errno;
	snprintf(forked, sizeof forked, "%.3f", now_us());
	pid = fork();
	if (pid == 0) {
		dup2(fds[1], 1);
		close(fds[0]);
		close(fds[1]);
		execl(self, self, "--child", sock, forked, (char *)NULL);
		_exit(127);
	}
	close(fds[1]);
	n = read(fds[0], s, sizeof *s);
	close(fds[0]);
	waitpid(pid, &status, 0);
	return n == sizeof *s && status == 0 ? 0 : -EIO;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double quantile(const struct sample *s, unsigned n, size_t field, double q)
{
	double v[4096];

	for (unsigned i = 0; i < n; i++)
		memcpy(&v[i], (const char *)&s[i] + field, sizeof v[i]);
	qsort(v, n, sizeof v[0], by_value);
	return v[(unsigned)(q * (n - 1))];
}

static void report(const char *model, const char *poll, const struct sample *s, unsigned n)
{
#define Q(field, q) quantile(s, n, offsetof(struct sample, field), q)
	printf("{\"bench\":\"short\",\"model\":\"%s\",\"poll\":\"%s\",\"runs\":%u,\"exec_us\":%.0f,\"connect_us\":%.0f,\"window_us\":%.0f,"
	       "\"model_us\":%.0f,\"added_us\":%.0f,\"added_p90_us\":%.0f}\n", model, poll, n, Q(start, .5), Q(connect, .5), Q(window, .5),
	       Q(model, .5), Q(added, .5), Q(added, .9));
	fprintf(stderr, "short-lived process (%s, --poll %s): exec %.0f µs, connect %.0f, connect to close %.0f, of it the model %.0f; "
		"added %.0f µs (p90 %.0f)\n", model, poll, Q(start, .5), Q(connect, .5), Q(window, .5), Q(model, .5), Q(added, .5), Q(added, .9));
#undef Q
}

static int bench(const char *self, const char *dir, const char *model, const char *poll, unsigned runs)
{
	char program[PATH_MAX + 8], copy[PATH_MAX], arg[PATH_MAX + 8];
	static struct sample s[4096];
	struct test_aprd d;
	unsigned n = 0;
	int rc;

	snprintf(copy, sizeof copy, "%s", self);
	snprintf(program, sizeof program, "%s/aprd", dirname(dirname(copy)));
	snprintf(arg, sizeof arg, "m=%s", model);
	rc = test_aprd_start(&d, program, dir, (const char *const[]){"-m", arg, "-t", "1", "--poll", poll, NULL});
	if (rc)
		return rc;
	/* The first run fills the prefix cache and so fails its check of 256 cached ids. */
	run_child(self, d.sock, &s[0]);
	for (unsigned i = 0; i < runs && !rc; i++)
		rc = run_child(self, d.sock, &s[n++]);
	test_aprd_stop(&d);
	if (!rc) {
		snprintf(copy, sizeof copy, "%s", model);
		report(basename(copy), poll, s, n);
	}
	return rc;
}

int main(int argc, char **argv)
{
	struct tiny_spec spec = {.n_layers = 2, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32};
	unsigned runs = argc > 2 ? (unsigned)atoi(argv[2]) : 200;
	char self[PATH_MAX], dir[] = "/tmp/apr-bench.XXXXXX", tiny[64], cmd[64];
	const char *model = tiny;
	int rc;

	if (argc == 4 && !strcmp(argv[1], "--child"))
		return child_main(argv[2], atof(argv[3]));
	if (!realpath("/proc/self/exe", self) || !mkdtemp(dir))
		return 1;
	if (runs < 1 || runs > 4096)
		runs = 200;
	snprintf(tiny, sizeof tiny, "%s/tiny.gguf", dir);
	if (argc > 1)
		model = argv[1];
	rc = argc > 1 ? 0 : apr_test_write_tiny_model(tiny, &spec);
	if (!rc)
		rc = bench(self, dir, model, "never", runs);
	if (!rc)
		rc = bench(self, dir, model, "always", runs);
	if (rc)
		fprintf(stderr, "bench_short: %s\n", strerror(-rc));
	snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
	return system(cmd) || rc;
}
