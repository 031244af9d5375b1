/* SPDX-License-Identifier: MIT */
/*
 * No wake-up is lost between a real aprd and its clients: the short form of
 * bench/bench_wakeups.c (CASE 24). Timing is judged only against a whole second,
 * which nothing but a lost wake-up explains.
 */
#include "tests/harness.h"
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/wakeups.h"

#include <stdio.h>
#include <stdlib.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define NOPS 5000u
#define GENERATES 300u
#else
#define NOPS 100000u
#define GENERATES 2000u
#endif

static void check_tally(const char *what, const struct wakeup_tally *t)
{
	printf("  %s: %llu requests, %.1f %% slept, longest wait %.3f s\n", what, (unsigned long long)t->requests,
	       100.0 * (double)t->slept / (double)t->requests, t->longest_s);
	CU_ASSERT_EQUAL(t->over_1s, 0);
	CU_ASSERT_EQUAL(t->failed, 0);
}

static void with_daemon(const char *poll, uint64_t nops, uint64_t generates)
{
	char model[160], arg[200];
	struct tiny_spec spec = {.n_layers = 2, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32};
	struct wakeup_tally t;
	struct test_aprd d;
	uint64_t slept = 0;

	snprintf(model, sizeof model, "%s/tiny.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(model, &spec), 0);
	snprintf(arg, sizeof arg, "tiny=%s", model);
	CU_ASSERT_EQUAL_FATAL(test_aprd_start(&d, apr_test_program("aprd"), apr_test_tmpdir(),
					      (const char *const[]){"-m", arg, "-t", "1", "--poll", poll, NULL}), 0);
	CU_ASSERT_EQUAL(wakeup_run(d.sock, nops, 0, 88172645463325252u, &t), 0);
	check_tally("NOPs", &t);
	slept += t.slept;
	CU_ASSERT_EQUAL(wakeup_run(d.sock, generates, 1, 2463534242u, &t), 0);
	check_tally("one-token requests", &t);
	slept += t.slept;
	/* A run in which nobody slept would have looked for nothing. How often they do is the machine's affair. */
	CU_ASSERT(slept * 100 >= nops + generates);
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

static void case24_daemon_sleeps_too(void)
{
	with_daemon("never", NOPS, GENERATES);
}

static void case24_daemon_polls_a_while(void)
{
	/* poll_us runs out at random moments of the pauses: the daemon falls asleep as a request arrives. */
	with_daemon("always", NOPS / 2, GENERATES / 2);
}

static const struct apr_test tests[] = {
	{"case24_daemon_sleeps_too", case24_daemon_sleeps_too, 0},
	{"case24_daemon_polls_a_while", case24_daemon_polls_a_while, 0},
};
TEST_MAIN("system/wakeups", tests)
