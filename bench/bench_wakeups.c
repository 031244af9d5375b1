/* SPDX-License-Identifier: MIT */
/*
 * Lost wake-ups at length: a million NOPs and ten thousand one-token requests on a
 * two-layer random model, one at a time with random pauses of 0 to 50 µs, against
 * a daemon that never polls. A wait is timed from apr_wait_cqe_timeout's call to its return.
 *
 *   bench_wakeups [NOPS [GENERATES]]
 */
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/wakeups.h"

#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int report(const char *what, int rc, const struct wakeup_tally *t)
{
	double share = t->requests ? (double)t->slept / (double)t->requests : 0;

	printf("{\"bench\":\"wakeups\",\"what\":\"%s\",\"requests\":%llu,\"slept_share\":%.4f,\"over_1s\":%llu,"
	       "\"failed\":%llu,\"longest_s\":%.6f,\"rc\":%d}\n", what, (unsigned long long)t->requests, share,
	       (unsigned long long)t->over_1s, (unsigned long long)t->failed, t->longest_s, rc);
	fprintf(stderr, "%-20s %9llu requests  %5.1f %% slept  %llu above 1 s  longest %.4f s\n", what,
		(unsigned long long)t->requests, 100 * share, (unsigned long long)t->over_1s, t->longest_s);
	fflush(stdout);
	return rc || t->over_1s || t->failed;
}

int main(int argc, char **argv)
{
	uint64_t nops = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000, gens = argc > 2 ? strtoull(argv[2], NULL, 10) : 10000;
	struct tiny_spec spec = {.n_layers = 2, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32};
	char exe[PATH_MAX], program[PATH_MAX + 8], dir[] = "/tmp/apr-bench.XXXXXX", model[64], arg[80], cmd[64];
	struct wakeup_tally t;
	struct test_aprd d;
	int bad, rc;

	if (!realpath("/proc/self/exe", exe) || !mkdtemp(dir))
		return 1;
	snprintf(program, sizeof program, "%s/aprd", dirname(dirname(exe)));
	snprintf(model, sizeof model, "%s/tiny.gguf", dir);
	snprintf(arg, sizeof arg, "tiny=%s", model);
	rc = apr_test_write_tiny_model(model, &spec);
	if (!rc)
		rc = test_aprd_start(&d, program, dir, (const char *const[]){"-m", arg, "-t", "1", "--poll", "never", NULL});
	if (rc) {
		fprintf(stderr, "bench_wakeups: aprd did not start: %s\n", strerror(-rc));
		return 1;
	}
	rc = wakeup_run(d.sock, nops, 0, 88172645463325252u, &t);
	bad = report("nop", rc, &t);
	rc = wakeup_run(d.sock, gens, 1, 2463534242u, &t);
	bad |= report("generate_1", rc, &t);
	test_aprd_stop(&d);
	snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
	return system(cmd) || bad;
}
