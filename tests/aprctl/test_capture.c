/* SPDX-License-Identifier: MIT */
/* Capture and replay: what passes is written down whole, changes nothing, and comes again. */
#include "tests/aprctl/cli.h"

static struct cli c;

static const char *file(const char *name)
{
	static char path[2][160];
	static int at;

	at = !at;
	snprintf(path[at], sizeof(path[at]), "%s/%s", apr_test_tmpdir(), name);
	return path[at];
}

/* Lines of the file that hold this text. */
static unsigned count(const char *path, const char *text)
{
	static char line[1 << 20];
	FILE *f = fopen(path, "r");
	unsigned n = 0;

	while (f && fgets(line, sizeof(line), f))
		n += strstr(line, text) != NULL;
	if (f)
		fclose(f);
	return n;
}

static void what_passes_is_written_down(void)
{
	struct fake *f = cli_fake(&c, "{\"answers\": [{\"steps\": [\"Hello\", \" world\"]}]}");
	const char *path = file("one");

	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "generate", "abc"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "Hello world\n");
	CU_ASSERT_EQUAL(count(path, "\"aprctl_capture\":1"), 1);
	CU_ASSERT_EQUAL(count(path, "\"hello\":"), 1);
	CU_ASSERT_EQUAL(count(path, "\"welcome\":"), 1);
	CU_ASSERT_EQUAL(count(path, "\"in\":\"616263\""), 1);
	CU_ASSERT_EQUAL(count(path, "CQE TOKEN"), 2);
	CU_ASSERT_EQUAL(count(path, "CQE FINAL"), 1);
	CU_ASSERT_EQUAL(count(path, "\"end\":\"client\""), 1);
	fake_end(f);
}

static void replay_finds_no_difference(void)
{
	struct fake *f = cli_fake(&c, NULL);
	const char *path = file("two");
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "generate", "-n", "40", "--logprobs", "3", "hello"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "replay", path), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "1 requests, 0 differences\n");
	CU_ASSERT_EQUAL(CLI(&c, "--json", "replay", path), 0);
	j = cli_json(&c);
	CU_ASSERT(cli_keys(j, "requests differences same_numerics list"));
	CU_ASSERT(json_is_true(json_object_get(j, "same_numerics")));
	json_decref(j);
	fake_end(f);
}

static void replay_finds_a_difference(void)
{
	struct fake *f = cli_fake(&c, "{\"answers\": [{\"times\": 1, \"steps\": [\"one\"]}, {\"steps\": [\"other\"]}]}");
	const char *path = file("three");

	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "generate", "hello"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "replay", path), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "other ids"));
	CU_ASSERT(cli_one_line(&c));
	fake_end(f);
	f = cli_fake(&c, "{\"answers\": [{\"steps\": [{\"error\": \"EIO\"}]}]}");
	CU_ASSERT_EQUAL(CLI(&c, "replay", path), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "res is -5"));
	fake_end(f);
}

/* Other numerics: outcomes are compared, texts are not. */
static void other_models_are_said(void)
{
	struct fake *f = cli_fake(&c, "{\"answers\": [{\"steps\": [\"one\"]}]}");
	const char *path = file("four");

	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "generate", "hello"), 0);
	fake_end(f);
	f = cli_fake(&c, "{\"model\": {\"name\": \"another\"}, \"answers\": [{\"steps\": [\"two\"]}]}");
	CU_ASSERT_EQUAL(CLI(&c, "replay", path), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "not compared"));
	fake_end(f);
}

static void the_exit_status_is_the_programs(void)
{
	struct fake *f = cli_fake(&c, NULL);
	const char *path = file("five");

	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "detokenize", "99999"), 1);
	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "sh", "-c", "exit 7"), 7);
	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "/nonexistent/program"), 127);
	CU_ASSERT_EQUAL(CLI(&c, "capture", "/nonexistent/file", "--", "status"), 1);
	CU_ASSERT(cli_one_line(&c));
	fake_end(f);
}

/* Any program that finds its daemon in the environment. */
static void other_programs_are_captured(void)
{
	struct fake *f = cli_fake(&c, NULL);
	char program[4096];
	const char *path = file("six");

	snprintf(program, sizeof(program), "%s", apr_test_program("examples/several"));
	if (access(program, X_OK)) {
		fake_end(f);
		SKIP("the examples are not built");
	}
	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", program, "one", "two", "three"), 0);
	CU_ASSERT_EQUAL(count(path, "SQE GENERATE"), 3);
	CU_ASSERT_EQUAL(count(path, "SQE CANCEL"), 1);
	CU_ASSERT_EQUAL(CLI(&c, "replay", path), 0);
	fake_end(f);
}

/* The whole conformance program through the proxy: hostile sessions are captured and come again. */
static void hostile_sessions(void)
{
	struct fake *f = cli_fake(&c, NULL);
	const char *path = file("seven");

	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "conform"), 0);
	if (c.status)
		fprintf(stderr, "%s", c.out);
	CU_ASSERT(count(path, "\"sq_tail\":") >= 2);
	CU_ASSERT(count(path, "\"cq_head\":") >= 1);
	CU_ASSERT_EQUAL(CLI(&c, "replay", path), 0);
	if (c.status)
		fprintf(stderr, "%s%s", c.out, c.err);
	fake_end(f);
}

static void files_that_are_no_capture(void)
{
	struct fake *f = cli_fake(&c, NULL);
	const char *path = file("eight");
	static const char *const texts[] = {"", "{}\n", "no json\n", "{\"aprctl_capture\": 2}\n",
					    "{\"aprctl_capture\": 1}\n{\"s\": 1, \"hello\"\n"};

	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
		FILE *out = fopen(path, "w");

		CU_ASSERT_PTR_NOT_NULL_FATAL(out);
		fputs(texts[i], out);
		fclose(out);
		CU_ASSERT_EQUAL(CLI(&c, "replay", path), 1);
		CU_ASSERT(cli_one_line(&c));
	}
	CU_ASSERT_EQUAL(CLI(&c, "replay", "/nonexistent"), 1);
	fake_end(f);
}

static void aprd_is_captured_and_replayed(void)
{
	struct test_aprd d;
	const char *why = cli_aprd(&d, &c), *path = file("nine");

	if (why)
		SKIP(why);
	CU_ASSERT_EQUAL(CLI(&c, "capture", path, "--", "generate", "-n", "12", "--seed", "5", "The lamp"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "replay", path), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "1 requests, 0 differences\n");
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

static const struct apr_test tests[] = {
	/* the first thread of a process allocates what stays */
	{"what_passes_is_written_down", what_passes_is_written_down, KEEPS_HEAP},
	{"replay_finds_no_difference", replay_finds_no_difference, KEEPS_HEAP},
	{"replay_finds_a_difference", replay_finds_a_difference, 0},
	{"other_models_are_said", other_models_are_said, 0},
	{"the_exit_status_is_the_programs", the_exit_status_is_the_programs, 0},
	{"other_programs_are_captured", other_programs_are_captured, 0},
	{"hostile_sessions", hostile_sessions, 0},
	{"files_that_are_no_capture", files_that_are_no_capture, 0},
	{"aprd_is_captured_and_replayed", aprd_is_captured_and_replayed, 0},
};
TEST_MAIN("aprctl/capture", tests)
