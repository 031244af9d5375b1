/* SPDX-License-Identifier: MIT */
/* aprctl as a user and a script meet it: what it prints, what it refuses, how it ends. */
#include "client/aprctl/ctl.h"
#include "tests/aprctl/cli.h"
#include <sys/socket.h>
#include <sys/un.h>

static struct cli c;

/* ---- the command line itself -------------------------------------------------------- */

static void usage_errors_exit_2_with_one_line(void)
{
	static const char *const cases[][6] = {
		{"generate"},          {"nosuchverb"},           {"generate", "a", "b"},    {"generate", "-n", "x", "a"},
		{"generate", "-n", "-1", "a"}, {"generate", "--bias", "7", "a"}, {"generate", "--nosuch", "a"}, {"tokenize"},
		{"detokenize", "1,,2"}, {"detokenize", "1,-2"},  {"detokenize", "4294967296"}, {"detokenize", ""},
		{"detokenize", "1,2,"}, {"score"},               {"score", "--ids"},        {"score", "--ids", "1", "--top", "21"},
		{"generate", "--ids", "1", "a"}, {"generate", "--seed", "18446744073709551616", "a"},
		{"generate", "--samples", "0", "a"}, {"generate", "--samples", "65", "a"}, {"generate", "--stop", "", "a"},
		{"help", "nosuch"}, {"generate", "--prio", "urgent", "a"}, {"generate", "--timeout", "0", "a"}, {"status", "x"}, {"load"},
		{"cancel", "x"},       {"ping", "-n", "0"},      {"capture", "f"},          {"conform", "no-such-check"},
		{"status", "--temp", "1"}, {"generate", "-f", "/dev/null", "text"},
	};

	memset(&c, 0, sizeof(c));
	CU_ASSERT_EQUAL(cli_run_args(&c, (const char *const[]){NULL}), 2);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		if (cli_run_args(&c, cases[i]) != 2 || !cli_one_line(&c)) {
			fprintf(stderr, "  %s %s: status %d\n", cases[i][0], cases[i][1] ? cases[i][1] : "", c.status);
			CU_FAIL("not a usage error");
		}
		CU_ASSERT_STRING_EQUAL(c.out, "");
	}
}

static void help_and_version_exit_0(void)
{
	memset(&c, 0, sizeof(c));
	CU_ASSERT_EQUAL(CLI(&c, "--help"), 0);
	for (int i = 0; i < N_VERBS; i++)
		CU_ASSERT_PTR_NOT_NULL(strstr(c.out, ctl_verbs[i].name));
	CU_ASSERT_EQUAL(CLI(&c, "help"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "detokenize   [--special] IDS"));
	CU_ASSERT_EQUAL(CLI(&c, "models", "--help"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "--json] models\n"));
	CU_ASSERT_EQUAL(CLI(&c, "help", "generate"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "at most 64"));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--help"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "--repeat-penalty R"));
	CU_ASSERT_PTR_NULL(strstr(c.out, "--step"));
	CU_ASSERT_EQUAL(CLI(&c, "--version"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, APR_VERSION));
}

/* A closed standard output must not become the daemon's socket: the answer would be sent there. */
static void closed_stdout(void)
{
	static const char script[] = "exec \"$0\" \"$@\" >&-", all[] = "exec \"$0\" \"$@\" <&- >&- 2>&-",
			  input[] = "exec \"$0\" \"$@\" <&-";
	struct fake *f = cli_fake(&c, NULL);
	char sock[160], program[4096];

	snprintf(sock, sizeof(sock), "%s", c.socket);
	snprintf(program, sizeof(program), "%s", apr_test_program("aprctl"));
	c.socket = NULL;
#define WITH(how, text) cli_run_program(&c, "/bin/sh", \
	(const char *const[]){"-c", how, program, "-s", sock, "tokenize", text, NULL})
	CU_ASSERT_EQUAL(WITH(script, "hi"), 1);
	CU_ASSERT_STRING_EQUAL(c.err, "aprctl: standard output is closed\n");
	CU_ASSERT_EQUAL(WITH(all, "hi"), 1);
	CU_ASSERT_EQUAL(WITH(input, "-"), 1);
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_EQUAL(WITH(input, "hi"), 0);
#undef WITH
	CU_ASSERT(c.out_len > 1);
	fake_end(f);
}

static void no_daemon_says_what_to_do(void)
{
	memset(&c, 0, sizeof(c));
	c.socket = "/nonexistent/aprd.sock";
	CU_ASSERT_EQUAL(CLI(&c, "status"), 1);
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "/nonexistent/aprd.sock"));
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "aprd -m"));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "x"), 1);
	CU_ASSERT_EQUAL(CLI(&c, "load", "/etc/passwd"), 1);
	CU_ASSERT(cli_one_line(&c));
}

/* -s names something, and not the client socket. */
static void not_the_client_socket_is_said(void)
{
	static const char *const verbs[][2] = {{"status"}, {"ping"}, {"load", "/etc/passwd"}, {"conform"}};
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	struct fake *f = cli_fake(&c, NULL);
	char client[128], admin[160];
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(client, sizeof(client), "%s", c.socket);
	snprintf(admin, sizeof(admin), "%s.admin", client);
	snprintf(a.sun_path, sizeof(a.sun_path), "%s/stream.sock", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	CU_ASSERT_EQUAL_FATAL(listen(fd, 1), 0);
	for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
		bool last = i + 1 == sizeof(verbs) / sizeof(verbs[0]);

		c.socket = admin;
		CU_ASSERT_EQUAL(CLI(&c, verbs[i][0], verbs[i][1]), 1);
		CU_ASSERT(last || cli_one_line(&c));
		CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "is the admin socket"));
		CU_ASSERT_PTR_NOT_NULL(strstr(c.err, client));
		c.socket = "/etc/passwd";
		CU_ASSERT_EQUAL(CLI(&c, verbs[i][0], verbs[i][1]), 1);
		CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "/etc/passwd is a file, not a socket"));
		c.socket = apr_test_tmpdir();
		CU_ASSERT_EQUAL(CLI(&c, verbs[i][0], verbs[i][1]), 1);
		CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "is a folder, not a socket"));
	}
	c.socket = a.sun_path;
	CU_ASSERT_EQUAL(CLI(&c, "status"), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "another program's socket"));
	close(fd);
	fake_end(f);
}

static char *read_file(const char *path)
{
	FILE *f = fopen(path, "r");
	char *buf = f ? calloc(1, 65536) : NULL;

	if (buf && !fread(buf, 1, 65535, f))
		buf[0] = 0;
	if (f)
		fclose(f);
	return buf;
}

static bool in_man(const char *man, const char *fmt, const char *name)
{
	char want[96];

	snprintf(want, sizeof(want), fmt, name);
	for (const char *at = strstr(man, want); at; at = strstr(at + 1, want)) {
		char after = at[strlen(want)];

		if (after == ' ' || after == '\n')
			return true;
	}
	fprintf(stderr, "  aprctl(1) has no \"%s\"\n", want);
	return false;
}

/* One option table feeds getopt, --help and, held together here, the man page. */
static void options_and_man_page_agree(void)
{
	char *man = read_file("man/aprctl.1");

	if (!man)
		SKIP("run from the source tree: man/aprctl.1 is not here");
	for (size_t i = 0; i < ctl_n_options; i++)
		CU_ASSERT(in_man(man, "Fl -%s", ctl_options[i].name));
	for (int i = 0; i < N_VERBS; i++)
		CU_ASSERT(in_man(man, ".It Cm %s", ctl_verbs[i].name));
	for (const char *at = strstr(man, "Fl -"); at; at = strstr(at + 1, "Fl -")) {
		char name[64];
		size_t k = 0;

		if (sscanf(at, "Fl -%63[a-z-]", name) != 1)
			continue;
		while (k < ctl_n_options && strcmp(ctl_options[k].name, name))
			k++;
		if (k == ctl_n_options)
			fprintf(stderr, "  aprctl(1) has --%s, aprctl has not\n", name);
		CU_ASSERT(k < ctl_n_options);
	}
	free(man);
}

/* ---- against the fake daemon ---------------------------------------------------------- */

static void status_has_the_promised_fields(void)
{
	struct fake *f = cli_fake(&c, NULL);
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "status"), 0);
	j = cli_json(&c);
	CU_ASSERT(cli_keys(j, "version abi pid uptime_s state state_why backend models loading memory sessions running queued kv graphs"));
	CU_ASSERT(cli_keys(json_object_get(j, "backend"), "name device why"));
	CU_ASSERT(cli_keys(json_object_get(j, "kv"), "pages_total pages_free"));
	CU_ASSERT(cli_keys(json_object_get(j, "graphs"), "prefill decode bytes replays"));
	CU_ASSERT(cli_keys(json_array_get(json_object_get(j, "models"), 0),
			   "name path arch n_ctx n_vocab numerics route bytes state"));
	CU_ASSERT(cli_keys(json_array_get(json_object_get(j, "memory"), 0), "purpose where bytes model"));
	CU_ASSERT_STRING_EQUAL(cli_str(j, "state"), "ready");
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "status"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "polling  off; "));
	CU_ASSERT_EQUAL(strncmp(c.out, "ready", 5), 0); /* what matters first, and no colours into a pipe */
	CU_ASSERT_PTR_NULL(strchr(c.out, '\033'));
	size_t lines = 0;
	for (const char *p = c.out; *p; p++)
		lines += *p == '\n';
	CU_ASSERT(lines < 24);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "models"), 0);
	j = cli_json(&c);
	CU_ASSERT_PTR_NOT_NULL(json_object_get(json_array_get(json_object_get(j, "models"), 0), "sampling"));
	json_decref(j);
	fake_end(f);
}

static const char scripted[] =
	"{\"answers\": ["
	"{\"match\": \"greet\", \"steps\": [\"Hello\", \" wide\", \" world\"]},"
	"{\"match\": \"fail\", \"steps\": [\"partly\", {\"error\": \"EIO\", \"why\": \"a wheel came off\"}]},"
	"{\"match\": \"stall\", \"steps\": [\"one\", {\"stall\": true}]},"
	"{\"match\": \"end\", \"steps\": [\"one\", {\"error\": \"ESHUTDOWN\", \"why\": \"it ended first\"}]},"
	"{\"match\": \"bye\", \"steps\": [\"one\", {\"die\": \"bye\"}]},"
	"{\"match\": \"drop\", \"steps\": [\"one\", {\"die\": \"drop\"}]},"
	"{\"match\": \"long\", \"steps\": [{\"text\": \" a piece of text that is longer than an entry holds\","
	" \"repeat\": 3}]}]}";

static void generate_streams_text(void)
{
	struct fake *f = cli_fake(&c, scripted);

	CU_ASSERT_EQUAL(CLI(&c, "generate", "greet me"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "Hello wide world\n");
	CU_ASSERT_EQUAL(CLI(&c, "generate", "-n", "2", "greet me"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "Hello wide\n");
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--stop", "de wor", "greet me"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "Hello wi\n");
	CU_ASSERT_EQUAL(CLI(&c, "generate", "long"), 0);
	CU_ASSERT_EQUAL(c.out_len, 3 * strlen(" a piece of text that is longer than an entry holds") + 1);
	fake_end(f);
}

static void generate_json_has_the_promised_fields(void)
{
	static const char fields[] =
		"text ids seed numerics prompt_tokens cached_tokens finish queue_us prefill_us decode_us backend";
	struct fake *f = cli_fake(&c, scripted);
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "generate", "--seed", "18446744073709551615", "greet me"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "\"seed\": 18446744073709551615,"));
	CU_ASSERT_EQUAL(CLI(&c, "--json", "generate", "--seed", "7", "greet me"), 0);
	j = cli_json(&c);
	CU_ASSERT(cli_keys(j, fields));
	CU_ASSERT_STRING_EQUAL(cli_str(j, "text"), "Hello wide world");
	CU_ASSERT_STRING_EQUAL(cli_str(j, "finish"), "stop");
	CU_ASSERT_STRING_EQUAL(cli_str(j, "backend"), "fake");
	CU_ASSERT_EQUAL(strlen(cli_str(j, "numerics")), 32);
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(j, "seed")), 7);
	CU_ASSERT_EQUAL(json_array_size(json_object_get(j, "ids")), 3);
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--json", "--samples", "2", "-n", "3", "--logprobs", "2", "x"), 0);
	j = cli_json(&c);
	CU_ASSERT_EQUAL(json_array_size(json_object_get(j, "samples")), 2);
	CU_ASSERT_EQUAL(json_array_size(json_object_get(j, "logprobs")), 3);
	CU_ASSERT_EQUAL(json_array_size(json_object_get(json_array_get(json_object_get(j, "logprobs"), 0), "top")), 2);
	json_decref(j);
	fake_end(f);
}

static void case35_reply_names_the_seed_that_reproduces_it(void)
{
	struct fake *f = cli_fake(&c, NULL);
	char seed[32], text[512];
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "generate", "-n", "12", "x"), 0);
	j = cli_json(&c);
	snprintf(seed, sizeof(seed), "%lld", (long long)json_integer_value(json_object_get(j, "seed")));
	snprintf(text, sizeof(text), "%s", cli_str(j, "text"));
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "generate", "-n", "12", "x"), 0);
	j = cli_json(&c);
	CU_ASSERT_STRING_NOT_EQUAL(cli_str(j, "text"), text);
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "generate", "-n", "12", "--seed", seed, "x"), 0);
	j = cli_json(&c);
	CU_ASSERT_STRING_EQUAL(cli_str(j, "text"), text);
	json_decref(j);
	fake_end(f);
}

static void options_reach_the_daemon(void)
{
	struct fake *f = cli_fake(&c, NULL);
	char first[4096];

	CU_ASSERT_EQUAL(CLI(&c, "generate", "--temp", "0", "-n", "6", "x"), 0);
	snprintf(first, sizeof(first), "%.4000s", c.out);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--top-k", "1", "-n", "6", "--seed", "3", "x"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, first);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--top-p", "0", "-n", "6", "--seed", "4", "x"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, first);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--min-p", "1", "-n", "6", "--seed", "5", "x"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, first);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--bias", "260:1000", "--repeat-penalty", "1.1", "--frequency-penalty", "0.5",
			    "--presence-penalty", "0.5", "--ignore-eos", "-n", "3", "x"),
			0);
	CU_ASSERT_STRING_EQUAL(c.out, " lamp lamp lamp\n");
	CU_ASSERT_EQUAL(CLI(&c, "generate", "-m", "fake", "-n", "1", "x"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "-m", "other", "-n", "1", "x"), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "no model other"));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--timeout", "60", "--ignore-eos", "-n", "4294967295", "--json", "x"), 0);
	fake_end(f);
}

static void case17_sampling_values_out_of_range(void)
{
	static const char *const cases[][2] = {{"--temp", "-1"}, {"--temp", "nan"},      {"--temp", "inf"},
					       {"--top-p", "1.5"}, {"--min-p", "-0.1"}, {"--repeat-penalty", "0"}};
	struct fake *f = cli_fake(&c, NULL);

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		CU_ASSERT_EQUAL(CLI(&c, "generate", cases[i][0], cases[i][1], "x"), 2);
		CU_ASSERT(cli_one_line(&c));
		CU_ASSERT_PTR_NOT_NULL(strstr(c.err, cases[i][0]));
	}
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--bias", "290:1", "x"), 1); /* case 16: an id outside the vocabulary */
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--bias", "5:nan", "x"), 1);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--stop", "", "x"), 2); /* case 8: the empty stop is refused */
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "--stop: the text is empty"));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "-n", "1", "x"), 0);
	fake_end(f);
}

static void errors_of_requests(void)
{
	struct fake *f = cli_fake(&c, scripted);

	CU_ASSERT_EQUAL(CLI(&c, "generate", "fail"), 1);
	CU_ASSERT_STRING_EQUAL(c.out, "partly\n"); /* what came is kept */
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "a wheel came off"));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--timeout", "0.1", "stall"), 1);
	CU_ASSERT_STRING_EQUAL(c.out, "one\n");
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "--timeout"));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "end"), 1);
	CU_ASSERT_STRING_EQUAL(c.err, "aprctl: generate: it ended first (drained)\n");
	CU_ASSERT_EQUAL(CLI(&c, "generate", "bye"), 1);
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "drop"), 1);
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "greet"), 0); /* and the daemon lives */
	fake_end(f);
}

/* Samples that gave nothing and were refused are not printed. */
static void refused_samples_print_nothing(void)
{
	struct fake *f = cli_fake(&c, NULL);

	CU_ASSERT_EQUAL(CLI(&c, "generate", "--samples", "3", "--bias", "290:1", "x"), 1);
	CU_ASSERT_STRING_EQUAL(c.out, "");
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--samples", "3", "-n", "1", "x"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "--- 3 of 3"));
	fake_end(f);
}

static void ctrl_c_cancels_and_keeps_what_came(void)
{
	struct fake *f = cli_fake(&c, scripted);
	json_t *j;

	c.signal = SIGINT;
	CU_ASSERT_EQUAL(CLI(&c, "generate", "stall"), 130);
	CU_ASSERT_STRING_EQUAL(c.out, "one\n");
	c.signal = SIGINT;
	c.busy = f;
	CU_ASSERT_EQUAL(CLI(&c, "--json", "generate", "stall"), 130);
	j = cli_json(&c);
	CU_ASSERT_STRING_EQUAL(cli_str(j, "finish"), "cancelled");
	CU_ASSERT_STRING_EQUAL(cli_str(j, "text"), "one");
	json_decref(j);
	CU_ASSERT_EQUAL(fake_requests(f), 0);
	fake_end(f);
}

static void tokenize_and_back(void)
{
	struct fake *f = cli_fake(&c, NULL);
	char ids[256];
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "tokenize", "The lamp</s>"), 0);
	snprintf(ids, sizeof(ids), "%.*s", (int)strcspn(c.out, "\n"), c.out);
	CU_ASSERT_STRING_EQUAL(ids, "282,260,62,49,117,64"); /* no BOS, and no control id from plain text */
	CU_ASSERT_EQUAL(CLI(&c, "detokenize", ids), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "The lamp</s>");
	CU_ASSERT_EQUAL(CLI(&c, "--json", "tokenize", "--special", "The</s>"), 0);
	j = cli_json(&c);
	CU_ASSERT(cli_keys(j, "ids"));
	CU_ASSERT_EQUAL(json_integer_value(json_array_get(json_object_get(j, "ids"), 1)), 1);
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "detokenize", "260,131"), 0); /* 131 is byte 0x81 */
	j = cli_json(&c);
	CU_ASSERT(cli_keys(j, "text bytes"));
	CU_ASSERT_STRING_EQUAL(cli_str(j, "bytes"), "206c616d7081");
	CU_ASSERT_STRING_EQUAL(cli_str(j, "text"), " lamp\xef\xbf\xbd");
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "detokenize", "260"), 0);
	j = cli_json(&c);
	CU_ASSERT(cli_keys(j, "text"));
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "detokenize", "290"), 1); /* case 15: id = vocabulary size */
	CU_ASSERT(cli_one_line(&c));
	fake_end(f);
}

static void text_from_files_and_standard_input(void)
{
	struct fake *f = cli_fake(&c, NULL);
	char path[160], at[161];
	FILE *out;

	c.input = "The lamp";
	CU_ASSERT_EQUAL(CLI(&c, "tokenize", "-"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "282,260\n");
	c.input = NULL;
	snprintf(path, sizeof(path), "%s/text", apr_test_tmpdir());
	out = fopen(path, "w");
	CU_ASSERT_PTR_NOT_NULL_FATAL(out);
	fputs("282, 260\n 258", out);
	fclose(out);
	CU_ASSERT_EQUAL(CLI(&c, "tokenize", "-f", path), 0);
	CU_ASSERT_EQUAL(CLI(&c, "tokenize", "-f", "/nonexistent"), 1);
	CU_ASSERT(cli_one_line(&c));
	snprintf(at, sizeof(at), "@%s", path);
	CU_ASSERT_EQUAL(CLI(&c, "detokenize", at), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "The lamp the");
	CU_ASSERT_EQUAL(CLI(&c, "tokenize", "--", "-f"), 0);
	fake_end(f);
}

static void generate_says_that_the_context_ended(void)
{
	struct fake *f = cli_fake(&c, NULL);
	const char *at;
	unsigned made = 0;
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "generate", "--ignore-eos", "-n", "4294967294", "x"), 0);
	CU_ASSERT(cli_one_line(&c));
	at = strstr(c.err, "stopped at the context's end: ");
	CU_ASSERT_PTR_NOT_NULL_FATAL(at);
	CU_ASSERT_EQUAL(sscanf(at, "stopped at the context's end: %u of 4294967294 tokens", &made), 1);
	j = cli_json(&c);
	CU_ASSERT_EQUAL(json_array_size(json_object_get(j, "ids")), made);
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--samples", "2", "--ignore-eos", "-n", "4294967294", "x"), 0);
	CU_ASSERT(cli_one_line(&c));
	/* as many as fit were asked for, or as many as were asked for came */
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--ignore-eos", "-n", "4294967295", "x"), 0);
	CU_ASSERT_STRING_EQUAL(c.err, "");
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--ignore-eos", "-n", "3", "x"), 0);
	CU_ASSERT_STRING_EQUAL(c.err, "");
	fake_end(f);
}

static void a_reader_that_went_away_ends_it_quietly(void)
{
	static const char script[] = "{ \"$0\" \"$@\"; echo $? >&2; } | head -c 3";
	struct fake *f = cli_fake(&c, "{\"token_ms\": 1}");
	char sock[160], program[4096];

	snprintf(sock, sizeof(sock), "%s", c.socket);
	snprintf(program, sizeof(program), "%s", apr_test_program("aprctl"));
	c.socket = NULL;
	cli_run_program(&c, "/bin/sh", (const char *const[]){"-c", script, program, "-s", sock, "generate", "--ignore-eos",
			"-n", "4294967295", "x", NULL});
	CU_ASSERT_EQUAL(c.out_len, 3);
	CU_ASSERT_STRING_EQUAL(c.err, "1\n");
	fake_end(f);
}

/* The session is as large as its input: a megabyte through a default of 128 KiB. */
static void large_input(void)
{
	struct fake *f = cli_fake(&c, NULL);
	char path[160];
	FILE *out;

	snprintf(path, sizeof(path), "%s/large", apr_test_tmpdir());
	out = fopen(path, "w");
	CU_ASSERT_PTR_NOT_NULL_FATAL(out);
	for (int i = 0; i < 1 << 20; i++)
		fputc('x', out);
	fclose(out);
	CU_ASSERT_EQUAL(CLI(&c, "tokenize", "-f", path), 0);
	CU_ASSERT(c.out_len > 200000);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "-f", path), 1); /* longer than the context: said, not cut */
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "context"));
	fake_end(f);
}

static void score_has_a_row_for_each_id_but_the_first(void)
{
	struct fake *f = cli_fake(&c, NULL);
	json_t *j, *p;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "score", "--ids", "258,260,261", "--top", "2"), 0);
	j = cli_json(&c);
	CU_ASSERT(cli_keys(j, "positions"));
	p = json_object_get(j, "positions");
	CU_ASSERT_EQUAL(json_array_size(p), 2);
	p = json_array_get(p, 0);
	CU_ASSERT(cli_keys(p, "pos id logprob top"));
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(p, "pos")), 1);
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(p, "id")), 260);
	CU_ASSERT_EQUAL(json_array_size(json_object_get(p, "top")), 2);
	CU_ASSERT_EQUAL(json_array_size(json_array_get(json_object_get(p, "top"), 0)), 2);
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "score", "--step", "--ids", "258,260,261"), 0);
	CU_ASSERT_PTR_NULL(strstr(c.out, "best"));
	CU_ASSERT_PTR_NULL(strstr(c.out, " \n"));
	CU_ASSERT_EQUAL(CLI(&c, "score", "--top", "2", "--ids", "258,260,261"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "best"));
	CU_ASSERT_EQUAL(CLI(&c, "score", "--ids", "258"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "");
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "nothing to score"));
	fake_end(f);
}

static void ping_counts(void)
{
	struct fake *f = cli_fake(&c, NULL);
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "ping", "-n", "50"), 0);
	j = cli_json(&c);
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(j, "n")), 50);
	CU_ASSERT(json_real_value(json_object_get(j, "min_us")) > 0);
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "ping"), 0);
	fake_end(f);
}

static void admin_verbs(void)
{
	struct fake *f = cli_fake(&c, NULL);
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "load", "second=/dev/null"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "load", "second=/dev/null"), 1);
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_EQUAL(CLI(&c, "generate", "-m", "second", "-n", "1", "x"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "load", "third=/nonexistent.gguf"), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "/nonexistent.gguf"));
	CU_ASSERT_EQUAL(CLI(&c, "unload", "second"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "unload", "second"), 1);
	CU_ASSERT_EQUAL(CLI(&c, "warmup"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "reload"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "reload"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "{}\n");
	CU_ASSERT_EQUAL(CLI(&c, "reload", "x"), 2);
	CU_ASSERT_EQUAL(CLI(&c, "cancel", "999999"), 1);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "models"), 0);
	j = cli_json(&c);
	CU_ASSERT_EQUAL(json_array_size(json_object_get(j, "models")), 1);
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "drain"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "x"), 1);
	CU_ASSERT(cli_one_line(&c));
	fake_end(f);
}

static void unserved_opcodes_are_said(void)
{
	struct fake *f = cli_fake(&c, "{\"ops\": [\"NOP\"]}");

	CU_ASSERT_EQUAL(CLI(&c, "tokenize", "x"), 1);
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_EQUAL(CLI(&c, "ping"), 0);
	fake_end(f);
}

static void bad_scripts_are_refused(void)
{
	static const char *const scripts[] = {"{", "[]", "{\"nosuch\": 1}", "{\"answers\": [{}]}", "{\"token_ms\": -1}",
					      "{\"answers\": [{\"steps\": [{\"error\": \"ENOSUCH\"}]}]}",
					      "{\"answers\": [{\"steps\": [\"\"]}]}", "{\"ops\": [\"EMBED\"]}"};
	char path[128], err[256];

	snprintf(path, sizeof(path), "%s/bad.sock", apr_test_tmpdir());
	for (size_t i = 0; i < sizeof(scripts) / sizeof(scripts[0]); i++) {
		struct fake_opts o = {.path = path, .script = scripts[i]};
		struct fake *f = NULL;

		err[0] = 0;
		CU_ASSERT_EQUAL(fake_new(&f, &o, err, sizeof(err)), -EINVAL);
		CU_ASSERT_EQUAL(strncmp(err, "script: ", 8), 0);
	}
}

/* The fake daemon as a program: its script from a file, and a death in mid-stream. */
static void a_daemon_killed_in_mid_stream(void)
{
	static const char script[] = "{\"token_ms\": 5, \"answers\": [{\"steps\": [\"one\", \" two\", {\"die\": \"kill\"}]}]}";
	char sock[160], file[160], program[4096];
	char *argv[] = {(char *)"apr-fake-daemon", (char *)"-s", sock, file, NULL};
	int status = 0;
	pid_t pid;
	FILE *f;

	snprintf(sock, sizeof(sock), "%s/killed.sock", apr_test_tmpdir());
	snprintf(file, sizeof(file), "%s/script.json", apr_test_tmpdir());
	snprintf(program, sizeof(program), "%s", apr_test_program("apr-fake-daemon"));
	if (access(program, X_OK))
		SKIP("apr-fake-daemon is not built");
	f = fopen(file, "w");
	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	fputs(script, f);
	fclose(f);
	CU_ASSERT_EQUAL_FATAL(posix_spawn(&pid, program, NULL, NULL, argv, environ), 0);
	memset(&c, 0, sizeof(c));
	c.socket = sock;
	for (int i = 0; i < 200 && CLI(&c, "ping", "-n", "1"); i++)
		usleep(20000);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "x"), 1);
	CU_ASSERT_STRING_EQUAL(c.out, "one two\n");
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_EQUAL(waitpid(pid, &status, 0), pid);
	CU_ASSERT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	CU_ASSERT_EQUAL(CLI(&c, "status"), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "no daemon"));
}

/* ---- against aprd with a real model ------------------------------------------------------ */

static void real_text(json_t *(*one)(const char *what), const char *ids)
{
	json_t *j, *p;

	CU_ASSERT_EQUAL(CLI(&c, "--json", "detokenize", ids), 0);
	j = one("detokenize");
	CU_ASSERT_STRING_EQUAL(cli_str(j, "text"), "The capital of France is Paris.");
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "score", "--ids", ids, "--top", "3"), 0);
	j = one("score");
	p = json_object_get(j, "positions");
	CU_ASSERT_EQUAL(json_array_size(p), 6);
	p = json_array_get(p, 4); /* "is" after "The capital of France" */
	CU_ASSERT(json_real_value(json_object_get(json_array_get(json_object_get(j, "positions"), 3), "logprob")) > -2.0);
	CU_ASSERT(cli_keys(p, "pos id logprob top"));
	json_decref(j);
}

static json_t *parse(const char *what)
{
	json_t *j = cli_json(&c);

	if (!j)
		fprintf(stderr, "  %s\n", what);
	return j;
}

static void real_model(void)
{
	struct test_aprd d;
	const char *why = cli_aprd(&d, &c);
	char first[2048];
	json_t *j;

	if (why)
		SKIP(why);
	CU_ASSERT_EQUAL(CLI(&c, "--json", "status"), 0);
	j = parse("status");
	CU_ASSERT(cli_keys(j, "version abi pid uptime_s state state_why backend models loading memory sessions running queued kv graphs"));
	CU_ASSERT(json_array_size(json_object_get(j, "memory")) > 1);
	CU_ASSERT_STRING_EQUAL(cli_str(json_object_get(j, "backend"), "name"), "cpu");
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "tokenize", "The capital of France is Paris."), 0);
	c.out[strcspn(c.out, "\n")] = 0;
	CU_ASSERT_STRING_EQUAL(c.out, "504,3575,282,4649,314,7042,30");
	real_text(parse, "504,3575,282,4649,314,7042,30");
	CU_ASSERT_EQUAL(CLI(&c, "--json", "generate", "--temp", "0", "-n", "8", "The capital of France is"), 0);
	j = parse("generate");
	CU_ASSERT(cli_keys(j, "text ids seed numerics prompt_tokens cached_tokens finish queue_us prefill_us decode_us backend"));
	CU_ASSERT_PTR_NOT_NULL(strstr(cli_str(j, "text"), "Paris"));
	CU_ASSERT_STRING_EQUAL(cli_str(j, "finish"), "length");
	CU_ASSERT_STRING_EQUAL(cli_str(j, "backend"), "cpu");
	CU_ASSERT_EQUAL(json_array_size(json_object_get(j, "ids")), 8);
	snprintf(first, sizeof(first), "%s", cli_str(j, "text"));
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--temp", "0", "-n", "8", "The capital of France is"), 0);
	CU_ASSERT_EQUAL(strncmp(c.out, first, strlen(first)), 0);
	c.signal = SIGINT;
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--ignore-eos", "-n", "4294967295", "Once upon a time"), 130);
	CU_ASSERT(c.out_len > 1); /* a first piece and the newline at least */
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

static const struct apr_test tests[] = {
	{"usage_errors_exit_2_with_one_line", usage_errors_exit_2_with_one_line, 0},
	{"help_and_version_exit_0", help_and_version_exit_0, 0},
	{"no_daemon_says_what_to_do", no_daemon_says_what_to_do, 0},
	{"options_and_man_page_agree", options_and_man_page_agree, 0},
	/* the first JSON object of a process, and the first thread, allocate what stays */
	{"closed_stdout", closed_stdout, KEEPS_HEAP},
	{"status_has_the_promised_fields", status_has_the_promised_fields, KEEPS_HEAP},
	{"not_the_client_socket_is_said", not_the_client_socket_is_said, 0},
	{"generate_streams_text", generate_streams_text, 0},
	{"generate_json_has_the_promised_fields", generate_json_has_the_promised_fields, 0},
	{"case35_reply_names_the_seed_that_reproduces_it", case35_reply_names_the_seed_that_reproduces_it, 0},
	{"options_reach_the_daemon", options_reach_the_daemon, 0},
	{"case17_sampling_values_out_of_range", case17_sampling_values_out_of_range, 0},
	{"errors_of_requests", errors_of_requests, 0},
	{"refused_samples_print_nothing", refused_samples_print_nothing, 0},
	{"ctrl_c_cancels_and_keeps_what_came", ctrl_c_cancels_and_keeps_what_came, 0},
	{"tokenize_and_back", tokenize_and_back, 0},
	{"text_from_files_and_standard_input", text_from_files_and_standard_input, 0},
	{"generate_says_that_the_context_ended", generate_says_that_the_context_ended, 0},
	{"a_reader_that_went_away_ends_it_quietly", a_reader_that_went_away_ends_it_quietly, 0},
	{"large_input", large_input, 0},
	{"score_has_a_row_for_each_id_but_the_first", score_has_a_row_for_each_id_but_the_first, 0},
	{"ping_counts", ping_counts, 0},
	{"admin_verbs", admin_verbs, 0},
	{"unserved_opcodes_are_said", unserved_opcodes_are_said, 0},
	{"bad_scripts_are_refused", bad_scripts_are_refused, 0},
	{"a_daemon_killed_in_mid_stream", a_daemon_killed_in_mid_stream, 0},
	{"real_model", real_model, 0},
};
TEST_MAIN("aprctl/cli", tests)
