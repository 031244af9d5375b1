/* SPDX-License-Identifier: MIT */
/*
 * The daemon over a backend that takes two steps: the suites that talk to a running
 * aprd pass as they do over the CPU's, each run again with aprd's own CPU behind a
 * queue of two (tests/support/two_deep_module.c, loaded in the CUDA module's place).
 */
#include "tests/daemon/running.h"

/* Its exit status; what it prints only where it fails. */
static int run_again(const char *suite)
{
	char program[300], log[300];
	int st = -1;
	pid_t pid;

	snprintf(program, sizeof(program), "%s", apr_test_program(suite));
	snprintf(log, sizeof(log), "%s/suite.log", apr_test_tmpdir());
	fflush(NULL);
	pid = fork();
	if (!pid) {
		int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);

		dup2(fd, 1);
		dup2(fd, 2);
		setenv("APR_TEST_TWO_DEEP", "1", 1);
		execl(program, program, (char *)NULL);
		_exit(127);
	}
	while (waitpid(pid, &st, 0) < 0 && errno == EINTR)
		;
	if (st) {
		char *text = file_text(log);

		fprintf(stderr, "%s\n", text);
		free(text);
	}
	return st;
}

static void requests(void)
{
	CU_ASSERT_EQUAL(run_again("tests/daemon/test_requests"), 0);
}

static void many(void)
{
	CU_ASSERT_EQUAL(run_again("tests/daemon/test_many"), 0);
}

/* It is the module that runs, and both steps are used. */
static void the_module_runs(void)
{
	const char *args[] = { "-m", tiny_path(), "-s", NULL, "-t", "1", NULL };
	struct daemon d;
	json_t *j, *b;

	setenv("APR_TEST_TWO_DEEP", "1", 1);
	daemon_name(&d, "deep");
	args[3] = d.sock;
	daemon_spawn(&d, args);
	unsetenv("APR_TEST_TWO_DEEP");
	CU_ASSERT_TRUE_FATAL(daemon_ready(&d));
	j = status_of(&d);
	b = json_object_get(j, "backend");
	CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(b, "name")), "two-deep");
	json_decref(j);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

/* A backend that failed for good: its request is told, the next worker answers the same question. */
static void a_lost_device(void)
{
	const char *args[] = { "-m", tiny_path(), "-s", NULL, "-t", "1", NULL };
	struct apr_gen g = { .size = sizeof(g), .text = "once more", .len = 9, .max_tokens = 20 };
	char once[160];
	struct apr_result r;
	struct daemon d;
	struct apr *c;

	snprintf(once, sizeof(once), "%s/fail-once", apr_test_tmpdir());
	close(open(once, O_WRONLY | O_CREAT, 0600));
	setenv("APR_TEST_TWO_DEEP", "1", 1);
	setenv("APR_TWO_DEEP_FAIL", once, 1);
	daemon_name(&d, "lost");
	args[3] = d.sock;
	daemon_spawn(&d, args);
	unsetenv("APR_TEST_TWO_DEEP");
	unsetenv("APR_TWO_DEEP_FAIL");
	CU_ASSERT_TRUE_FATAL(daemon_ready(&d));
	c = connect_to(&d);
	memset(&r, 0, sizeof(r));
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, NULL, 0), -EIO);
	apr_close(c);
	CU_ASSERT_TRUE(status_becomes(&d, "restarts", 1));
	c = connect_to(&d);
	memset(&r, 0, sizeof(r));
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, NULL, 0), 0);
	apr_close(c);
	CU_ASSERT_TRUE(log_has(&d, "a step failed on purpose"));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static const struct apr_test tests[] = {
	{ "the_module_runs", the_module_runs, KEEPS_HEAP }, /* setenv keeps what it was given */
	{ "a_lost_device", a_lost_device, KEEPS_HEAP },
	{ "requests", requests, KEEPS_HEAP },
	{ "many", many, KEEPS_HEAP },
};

TEST_MAIN("daemon/two_deep", tests)
