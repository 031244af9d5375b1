/* SPDX-License-Identifier: MIT */
/*
 * The tests' own ground: the runner and the harness, tried on suites that fail on purpose.
 *
 * Owns: a sample suite, which is this program called again under APR_RUNNER_SAMPLE, and
 * what runner must make of it. Does not own any test of aprd.
 */
#include "tests/harness.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the sample: one of each end, with others after it -------------------------- */

static void passes(void)
{
	CU_ASSERT_EQUAL(1 + 1, 2);
}

static void fails_and_does_not_come_back(void)
{
	CU_ASSERT_EQUAL_FATAL(1 + 1, 3);
}

static void keeps_a_descriptor(void)
{
	CU_ASSERT_NOT_EQUAL(dup(2), -1);
}

static void is_skipped(void)
{
	SKIP("on purpose");
}

static const struct apr_test sample[] = {
	{ "passes", passes, 0 },
	{ "fails", fails_and_does_not_come_back, 0 },
	{ "keeps_a_descriptor", keeps_a_descriptor, 0 },
	{ "is_skipped", is_skipped, 0 },
	{ "passes_too", passes, 0 },
};

/* ---- the tests -------------------------------------------------------------------- */

/* What the runner prints for these programs; its exit status in *status. */
static char *run(const char *options, const char *programs, int *status)
{
	char command[2048], *text = NULL;
	size_t size = 0, n;
	FILE *to = open_memstream(&text, &size), *p;
	char buf[4096];

	snprintf(command, sizeof command, "APR_RUNNER_SAMPLE=1 %s -j2 -t 2 %s %s 2>&1", apr_test_program("tests/runner"), options, programs);
	p = popen(command, "r");
	CU_ASSERT_FATAL(p && to);
	while ((n = fread(buf, 1, sizeof buf, p)) > 0)
		fwrite(buf, 1, n, to);
	*status = pclose(p);
	fclose(to);
	return text;
}

static const char *script(const char *name, const char *body)
{
	static char path[4][256];
	static unsigned at;
	char *p = path[at++ % 4];
	FILE *f;

	snprintf(p, sizeof path[0], "%s/%s", apr_test_tmpdir(), name);
	f = fopen(p, "w");
	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	fprintf(f, "#!/bin/sh\n%s\n", body);
	fclose(f);
	chmod(p, 0755);
	return p;
}

static void every_test_runs_after_one_that_fails(void)
{
	char self[512];
	int status;
	char *text;

	snprintf(self, sizeof self, "%s", apr_test_program("tests/system/test_runner"));
	text = run("", self, &status);
	CU_ASSERT_NOT_EQUAL(status, 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "sample: 2 passed, 2 failed, 1 skipped"));
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "tests in the suites: 2 passed, 2 failed, 1 skipped"));
	free(text);
}

static void failures_are_the_last_that_is_said(void)
{
	int status;
	char list[600], *text, *again;

	snprintf(list, sizeof list, "%s %s", script("good", "echo 'a/good: 1 passed, 0 failed, 0 skipped'"),
	         script("bad", "echo '  Test: one ...FAILED'; echo '    1. bad.c:7  - CU_FAIL'; exit 1"));
	text = run("", list, &status);
	CU_ASSERT_NOT_EQUAL(status, 0);
	again = strstr(text, "\nfailed:\n-- ");
	CU_ASSERT_PTR_NOT_NULL_FATAL(again);
	CU_ASSERT_PTR_NOT_NULL(strstr(again, "/bad\n  Test: one ...FAILED\n    1. bad.c:7"));
	CU_ASSERT_PTR_NULL(strstr(again, "good"));
	free(text);
}

static void one_that_hangs_is_ended(void)
{
	int status;
	char *text = run("", script("hangs", "sleep 60"), &status);

	CU_ASSERT_NOT_EQUAL(status, 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "FAILED (timeout)"));
	free(text);
}

static void all_skipped_is_no_failure(void)
{
	int status;
	char *text = run("", script("skips", "exit 77"), &status);

	CU_ASSERT_EQUAL(status, 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "0 passed, 0 failed, 1 skipped"));
	CU_ASSERT_PTR_NULL(strstr(text, "\nfailed:"));
	free(text);
}

static void a_second_try_alone(void)
{
	char once[400], *text;
	int status;

	snprintf(once, sizeof once, "if [ -e %s/mark ]; then echo 'a/once: 3 passed, 0 failed, 0 skipped'; exit 0; fi; touch %s/mark; exit 1",
	         apr_test_tmpdir(), apr_test_tmpdir());
	text = run("-a", script("once", once), &status);
	CU_ASSERT_EQUAL(status, 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "tests in the suites: 3 passed, 0 failed"));
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "1 passed, 0 failed, 0 skipped\n1 shaky"));
	free(text);
	text = run("-a", script("never", "exit 1"), &status);
	CU_ASSERT_NOT_EQUAL(status, 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "0 passed, 1 failed, 0 skipped"));
	CU_ASSERT_PTR_NULL(strstr(text, "shaky"));
	free(text);
}

static const struct apr_test tests[] = {
	{ "every_test_runs_after_one_that_fails", every_test_runs_after_one_that_fails, 0 },
	{ "failures_are_the_last_that_is_said", failures_are_the_last_that_is_said, 0 },
	{ "one_that_hangs_is_ended", one_that_hangs_is_ended, 0 },
	{ "a_second_try_alone", a_second_try_alone, 0 },
	{ "all_skipped_is_no_failure", all_skipped_is_no_failure, 0 },
};

int main(int argc, char **argv)
{
	if (getenv("APR_RUNNER_SAMPLE"))
		return apr_test_main("sample", sample, sizeof sample / sizeof *sample, argc, argv);
	return apr_test_main("system/runner", tests, sizeof tests / sizeof *tests, argc, argv);
}
