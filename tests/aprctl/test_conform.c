/* SPDX-License-Identifier: MIT */
/* The conformance program: every check passes against the fake daemon and against aprd, and can fail. */
#include "tests/aprctl/cli.h"

static struct cli c;

static void passes(int least)
{
	json_t *j, *ch;
	size_t i;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "conform"), 0);
	j = cli_json(&c);
	json_array_foreach (json_object_get(j, "checks"), i, ch)
		if (!strcmp(cli_str(ch, "result"), "not ok")) {
			fprintf(stderr, "  %s: %s\n", cli_str(ch, "name"), cli_str(ch, "why"));
			CU_FAIL("a check of the protocol fails");
		}
	CU_ASSERT(json_integer_value(json_object_get(j, "passed")) >= least);
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(j, "failed")), 0);
	json_decref(j);
}

static void fake_daemon_conforms(void)
{
	struct fake *f = cli_fake(&c, NULL);

	passes(105);
	CU_ASSERT_EQUAL(fake_requests(f), 0);
	CU_ASSERT_EQUAL(fake_sessions(f), 0);
	fake_end(f);
}

/* A daemon that serves less says so, and what it does not serve is skipped. */
static void less_is_skipped(void)
{
	struct fake *f = cli_fake(&c, "{\"ops\": [\"NOP\"]}");
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "conform"), 0);
	j = cli_json(&c);
	CU_ASSERT(json_integer_value(json_object_get(j, "skipped")) > 20);
	CU_ASSERT(json_integer_value(json_object_get(j, "passed")) > 40);
	json_decref(j);
	fake_end(f);
}

/* A daemon whose GENERATE is broken fails by name, with exit status 1. */
static void a_broken_daemon_fails(void)
{
	struct fake *f = cli_fake(&c, "{\"answers\": [{\"steps\": [{\"error\": \"EIO\", \"why\": \"broken\"}]}]}");

	CU_ASSERT_EQUAL(CLI(&c, "conform", "generate", "ring-nop", "generate-no-stream"), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "1..3\n"));
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "not ok 2 - generate\n# res -5"));
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "ok 1 - ring-nop\n"));
	CU_ASSERT(cli_one_line(&c));
	fake_end(f);
}

static void checks_are_listed(void)
{
	size_t lines = 0;

	memset(&c, 0, sizeof(c));
	CU_ASSERT_EQUAL(CLI(&c, "conform", "--list"), 0);
	for (const char *p = c.out; *p; p++)
		lines += *p == '\n';
	CU_ASSERT(lines > 100);
}

static void aprd_conforms(void)
{
	struct test_aprd d;
	const char *why = cli_aprd(&d, &c);

	if (why)
		SKIP(why);
	passes(100);
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

static const struct apr_test tests[] = {
	/* the first thread and the first JSON object of a process allocate what stays */
	{"fake_daemon_conforms", fake_daemon_conforms, KEEPS_HEAP},
	{"less_is_skipped", less_is_skipped, 0},
	{"a_broken_daemon_fails", a_broken_daemon_fails, 0},
	{"checks_are_listed", checks_are_listed, 0},
	{"aprd_conforms", aprd_conforms, 0},
};
TEST_MAIN("aprctl/conform", tests)
