/* SPDX-License-Identifier: MIT */
/*
 * A client that was written from aprd-protocol(7) alone, in a language that has no
 * memory fence, speaks with a real aprd: tests/python/test_client.py must pass.
 */
#include "tests/harness.h"
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"

#include <spawn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#define SCRIPT "tests/python/test_client.py"

extern char **environ;

/* The exit status of argv, -1 where it died by a signal, 127 where there is no such program. */
static int run(const char *const *argv)
{
	int status;
	pid_t pid;

	if (posix_spawnp(&pid, argv[0], NULL, NULL, (char *const *)argv, environ))
		return 127;
	if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status))
		return -1;
	return WEXITSTATUS(status);
}

static int have_python(void)
{
	return run((const char *const[]){"python3", "-c", "import sys; sys.exit(sys.version_info < (3, 9))", NULL}) == 0;
}

static void script_passes(const char *model)
{
	struct test_aprd d;

	CU_ASSERT_EQUAL_FATAL(access(SCRIPT, R_OK), 0);
	CU_ASSERT_EQUAL_FATAL(test_aprd_start(&d, apr_test_program("aprd"), apr_test_tmpdir(),
					      (const char *const[]){"-m", model, "-b", "cpu", "-t", "2", NULL}), 0);
	fflush(stdout);
	CU_ASSERT_EQUAL(run((const char *const[]){"python3", "-B", SCRIPT, d.sock, NULL}), 0);
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

static void tiny_model(void)
{
	struct tiny_spec spec = {.n_layers = 2, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32};
	char model[160], arg[200];

	if (!have_python())
		SKIP("no python3 of 3.9 or later: the protocol page's client is NOT TESTED");
	snprintf(model, sizeof model, "%s/tiny.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(model, &spec), 0);
	snprintf(arg, sizeof arg, "tiny=%s", model);
	script_passes(arg);
}

static void smollm2(void)
{
	const char *model = apr_test_model(SMOLLM2);

	if (!have_python())
		SKIP("no python3 of 3.9 or later: the protocol page's client is NOT TESTED");
	if (!model)
		SKIP("no " SMOLLM2);
	script_passes(model);
}

static const struct apr_test tests[] = {
	{"tiny_model", tiny_model, 0},
	{"smollm2", smollm2, 0},
};
TEST_MAIN("system/python_client", tests)
