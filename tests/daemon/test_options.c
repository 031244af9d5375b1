/* SPDX-License-Identifier: MIT */
/* Command line, configuration file, and that the man page knows every option. */
#include "daemon/options.h"
#include "tests/daemon/running.h"

static int parse(struct options *o, ...)
{
	char *argv[24] = { (char *)"aprd" };
	int argc = 1;
	va_list ap;

	va_start(ap, o);
	while ((argv[argc] = va_arg(ap, char *)))
		argc++;
	va_end(ap);
	options_init(o);
	/* what is wrong is told on stderr: not here */
	fflush(stderr);
	int saved = dup(2), nul = open("/dev/null", O_WRONLY | O_CLOEXEC);
	dup2(nul, 2);
	int r = options_parse(o, argc, argv);
	fflush(stderr);
	dup2(saved, 2);
	close(saved);
	close(nul);
	return r;
}

static void values_and_names(void)
{
	struct options o;

	CU_ASSERT_EQUAL(parse(&o, "-m", "chat=/a/b.gguf", "-m", "/x/Big-00001-of-00003.gguf", "-m", "/y=z/plain.gguf",
			      "-c", "100", "--kv-mem", "2G", "--gpu-mem", "80%", "--poll", "never", "-t", "3", NULL),
			0);
	CU_ASSERT_EQUAL_FATAL(o.n_models, 3);
	CU_ASSERT_STRING_EQUAL(o.models[0].name, "chat");
	CU_ASSERT_STRING_EQUAL(o.models[0].path, "/a/b.gguf");
	CU_ASSERT_STRING_EQUAL(o.models[1].name, "Big");
	CU_ASSERT_STRING_EQUAL(o.models[2].name, "plain");
	CU_ASSERT_STRING_EQUAL(o.models[2].path, "/y=z/plain.gguf");
	CU_ASSERT_EQUAL(o.n_ctx, 100);
	CU_ASSERT_EQUAL(o.kv_mem, UINT64_C(2) << 30);
	CU_ASSERT_EQUAL(o.gpu_percent, 80);
	CU_ASSERT_EQUAL(o.poll, POLL_NEVER);
	CU_ASSERT_EQUAL(o.threads, 3);
	options_free(&o);
}

static void wrong_usage(void)
{
	struct options o;

	CU_ASSERT_EQUAL(parse(&o, "-m", "a=x", "-m", "a=y", NULL), 2);
	options_free(&o);
	CU_ASSERT_EQUAL(parse(&o, "-c", "-5", NULL), 2);
	options_free(&o);
	CU_ASSERT_EQUAL(parse(&o, "--kv-mem", "99999999999T", NULL), 2);
	options_free(&o);
	CU_ASSERT_EQUAL(parse(&o, "-m", "=x", NULL), 2);
	options_free(&o);
	CU_ASSERT_EQUAL(parse(&o, "-s", "", NULL), 2);
	options_free(&o);

	static const char *const bad[][2] = { { "--route", "x" },   { "--route", "" },	  { "--route", "-1" },
					      { "--kv-type", "x" }, { "--kv-type", "" },  { "-b", "x" },
					      { "-b", "" },	    { "-b", "cuda:" },	  { "-b", "cuda:1x" },
					      { "-b", "cuda:1024" }, { "--fused-rows", "x" }, { "--fused-rows", "" },
					      { "--fused-rows", "-1" }, { "--fused-rows", "65537" } };
	static const char *const good[][2] = { { "--route", "auto" },  { "--route", "int16" }, { "--route", "fp8-fast" },
					       { "--kv-type", "bf16" }, { "-b", "cuda" },	{ "-b", "cuda:1023" } };
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		CU_ASSERT_EQUAL(parse(&o, bad[i][0], bad[i][1], NULL), 2);
		options_free(&o);
	}
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
		CU_ASSERT_EQUAL(parse(&o, good[i][0], good[i][1], NULL), 0);
		options_free(&o);
	}
	char path[300]; /* the admin socket's path, by six longer, must fit too */
	memset(path, 'p', sizeof(path));
	for (size_t n = 100; n < 300; n += 7) {
		path[n] = '\0';
		CU_ASSERT_EQUAL(parse(&o, "-s", path, NULL), n + 6 < 108 ? 0 : 2);
		options_free(&o);
		path[n] = 'p';
	}
}

static void fused_rows(void)
{
	static const struct { const char *arg; int32_t rows; } given[] = { { "auto", -1 }, { "0", 0 }, { "64", 64 } };
	struct options o;

	CU_ASSERT_EQUAL(parse(&o, "-m", "a=x", NULL), 0);
	CU_ASSERT_EQUAL(o.fused_rows, -1); /* measured */
	options_free(&o);
	for (size_t i = 0; i < sizeof(given) / sizeof(given[0]); i++) {
		CU_ASSERT_EQUAL(parse(&o, "-m", "a=x", "--fused-rows", given[i].arg, NULL), 0);
		CU_ASSERT_EQUAL(o.fused_rows, given[i].rows);
		options_free(&o);
	}
}

static const char *write_config(const char *text)
{
	static char path[160];

	snprintf(path, sizeof(path), "%s/a.conf", apr_test_tmpdir());
	FILE *f = fopen(path, "we");
	fputs(text, f);
	fclose(f);
	return path;
}

static void file_under_command_line(void)
{
	struct options o;
	const char *path = write_config(
		"model = {\"f=/file.gguf\"}\nthreads = 4\nfused-rows = 16\ncontext = 512\nsocket = \"/tmp/x\"\nsocket-mode = \"0600\"\n"
		"drain-ms = 77\nlimits { connections = 5 region-bytes = \"1M\" }\n"
		"listener \"/tmp/web\" { tenant = \"web\" mode = \"0666\" }\n");

	CU_ASSERT_EQUAL(parse(&o, "--config", path, "-t", "2", NULL), 0);
	CU_ASSERT_STRING_EQUAL(o.models[0].name, "f");
	CU_ASSERT_EQUAL(o.fused_rows, 16);
	CU_ASSERT_EQUAL(o.threads, 2);
	CU_ASSERT_EQUAL(o.n_ctx, 512);
	CU_ASSERT_EQUAL(o.socket_mode, 0600);
	CU_ASSERT_EQUAL(o.drain_ms, 77);
	CU_ASSERT_EQUAL(o.limits.connections, 5);
	CU_ASSERT_EQUAL(o.limits.region_bytes, 1 << 20);
	CU_ASSERT_EQUAL(o.limits.sessions, 1024);
	CU_ASSERT_EQUAL_FATAL(o.n_listeners, 1);
	CU_ASSERT_STRING_EQUAL(o.listeners[0].tenant, "web");
	CU_ASSERT_EQUAL(o.listeners[0].mode, 0666);
	options_free(&o);
	CU_ASSERT_EQUAL(parse(&o, "--config", path, "-m", "c=/line.gguf", NULL), 0);
	CU_ASSERT_EQUAL(o.n_models, 1);
	CU_ASSERT_STRING_EQUAL(o.models[0].name, "c");
	options_free(&o);
}

#define LONG "a-name-of-fifty-bytes-----------------------------"

static void file_errors_name_the_line(void)
{
	static const struct { const char *text, *line, *what; } bad[] = {
		{ "threads = 2\nnonsense = 3\n", ":2:", "nonsense" },
		{ "\n\npoll = \"sometimes\"\n", ":3:", "sometimes" },
		{ "kv-mem = \"12Q\"\n", ":1:", "12Q" },
		{ "limits {\n connections = -4\n}\n", ":2:", "connections" },
		{ "socket-mode = \"9\"\n", ":1:", "socket-mode" },
		{ "log-level = \"loud\"\n", ":1:", "loud" },
		{ "\nroute = \"x\"\n", ":2:", "route: " },
		{ "route = \"\"\n", ":1:", "route: " },
		{ "kv-type=\"x\"", ":1:", "kv-type: " },
		{ "backend=\"cuda:\"", ":1:", "backend: " },
		{ "\nfused-rows = few\n", ":2:", "fused-rows: " },
		{ "socket=\"\"", ":1:", "socket: " },
		{ "listener \"\" {}", ":1:", "listener: " },
		{ "listener \"/" LONG LONG LONG LONG LONG LONG "\" {}", ":1:", "listener: " },
	};

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct daemon d;
		daemon_name(&d, "config");
		const char *args[] = { "--config", write_config(bad[i].text), "--check-config", NULL };
		daemon_spawn(&d, args);
		CU_ASSERT_EQUAL(daemon_wait(&d, 10), 1);
		CU_ASSERT_TRUE(log_has(&d, bad[i].line));
		CU_ASSERT_TRUE(log_has(&d, bad[i].what));
	}
	struct options o;
	CU_ASSERT_EQUAL(parse(&o, "--config", "/none/such", NULL), -ENOENT);
	options_free(&o);
}

/* What is no configuration file: one line that names it, status 1, at once. */
static void what_is_no_file_is_refused(void)
{
	char fifo[160], nul[160], big[160];
	const char *paths[] = { fifo, "/dev/zero", apr_test_tmpdir(), nul, big, "/none/such" };
	FILE *f;

	snprintf(fifo, sizeof(fifo), "%s/fifo", apr_test_tmpdir());
	CU_ASSERT_EQUAL(mkfifo(fifo, 0600), 0);
	snprintf(nul, sizeof(nul), "%s/nul", apr_test_tmpdir());
	f = fopen(nul, "we");
	CU_ASSERT_EQUAL(fwrite("\0\0\0", 1, 3, f), 3);
	fclose(f);
	snprintf(big, sizeof(big), "%s/big", apr_test_tmpdir());
	f = fopen(big, "we");
	for (int i = 0; i < (1 << 20) + 1; i++)
		fputc('#', f);
	fclose(f);
	for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
		struct daemon d;
		daemon_name(&d, "no-config");
		const char *args[] = { "--config", paths[i], "--check-config", NULL };
		daemon_spawn(&d, args);
		CU_ASSERT_EQUAL(daemon_wait(&d, 2), 1);
		char *text = file_text(d.log), *line = text ? strchr(text, '\n') : NULL;
		CU_ASSERT_TRUE(line && !line[1]); /* one line */
		CU_ASSERT_PTR_NOT_NULL(strstr(text, paths[i]));
		free(text);
	}
	struct options o;
	CU_ASSERT_EQUAL(parse(&o, "--config", write_config("listener \"/tmp/s\" {}"), "-s", "/tmp/s", NULL), 2);
	options_free(&o);
	CU_ASSERT_EQUAL(parse(&o, "--config", write_config(""), NULL), 0);
	options_free(&o);
}

static void the_man_page_knows_every_option(void)
{
	char path[4200];

	snprintf(path, sizeof(path), "%s", apr_test_program("../man/aprd.8"));
	for (int up = 0; access(path, R_OK) && up < 3; up++)
		snprintf(path, sizeof(path), "%s",
			 up == 0   ? apr_test_program("../../man/aprd.8")
			 : up == 1 ? apr_test_program("../../../man/aprd.8")
				   : "man/aprd.8");
	char *text = file_text(path);
	CU_ASSERT_PTR_NOT_NULL_FATAL(text);
	if (!text)
		return;
	CU_ASSERT_TRUE(strlen(text) > 1000);
	for (size_t i = 0; i < option_rows; i++) {
		const struct option_row *r = &option_table[i];
		char want[64];
		snprintf(want, sizeof(want), r->in & IN_LINE ? "Fl -%s" : ".It Cm %s\n", r->name);
		CU_ASSERT_PTR_NOT_NULL(strstr(text, want));
		if (!strstr(text, want))
			fprintf(stderr, "aprd(8) does not tell of %s\n", r->name);
		snprintf(want, sizeof(want), "It Fl %c", r->letter);
		CU_ASSERT_TRUE(!r->letter || strstr(text, want) != NULL);
	}
	/* and the other way round: what it tells of is there */
	for (const char *at = text; (at = strstr(at, "Fl -")) != NULL;) {
		char name[64];
		at += 4;
		snprintf(name, sizeof(name), "%.*s", (int)strcspn(at, " \n"), at);
		CU_ASSERT_PTR_NOT_NULL(option_named(name));
		if (!option_named(name))
			fprintf(stderr, "aprd(8) tells of --%s, which is not there\n", name);
	}
	free(text);
}

/* --help, the parser and the file take the rows of the table. */
static void parser_help_and_file_agree(void)
{
	char help[8192];
	FILE *f = fmemopen(help, sizeof(help), "w");
	struct options o;

	options_help(f);
	fclose(f);
	for (size_t i = 0; i < option_rows; i++) {
		const struct option_row *r = &option_table[i];
		char want[80], flag[64], text[200], shown[64] = "";
		snprintf(want, sizeof(want), r->in & IN_LINE ? "--%s%s%s" : " %s%s%s", r->name, r->in & IN_LINE && r->arg ? " " : "",
			 r->in & IN_LINE && r->arg ? r->arg : "");
		CU_ASSERT_PTR_NOT_NULL(strstr(help, want));
		/* a value that the row itself shows is one that both take */
		options_init(&o);
		if (r->show)
			r->show(&o, r, shown, sizeof(shown));
		options_free(&o);
		if (!*shown || !r->arg)
			continue;
		snprintf(flag, sizeof(flag), "--%s", r->name);
		CU_ASSERT_EQUAL(parse(&o, flag, shown, NULL), r->in & IN_LINE ? 0 : 2);
		options_free(&o);
		snprintf(text, sizeof(text), "%s = \"%s\"\n", r->name, shown);
		CU_ASSERT_EQUAL(parse(&o, "--config", write_config(text), NULL), r->in & IN_FILE ? 0 : -EINVAL);
		CU_ASSERT_EQUAL(o.from[i], r->in & IN_FILE ? FROM_FILE : FROM_DEFAULT);
		options_free(&o);
	}
}

/* One run names every mistake, each with its line and what was expected, past what the grammar cannot read. */
static void every_mistake_is_told(void)
{
	struct daemon d;
	const char *args[] = { "--config",
			       write_config("threads = lots\nnonsense = 3\nunknown {\n poll = \"x\"\n}\npoll = \"sometimes\"\n"
					    "limits {\n weight = 0\n}\nkv-mem = 12Q\n"),
			       "--check-config", NULL };
	static const char *const told[] = { ":1: threads: expected a number from 0 to 4096, not \"lots\"",
					    ":2: no such option 'nonsense'", ":3: no such option 'unknown'",
					    ":6: poll: expected one of auto, always, never, not \"sometimes\"",
					    ":8: weight: expected a number from 1 to 1000, not 0",
					    ":10: kv-mem: expected a size such as 512M or 4G, not \"12Q\"" };

	daemon_name(&d, "mistakes");
	daemon_spawn(&d, args);
	CU_ASSERT_EQUAL(daemon_wait(&d, 10), 1);
	for (size_t i = 0; i < sizeof(told) / sizeof(told[0]); i++) {
		CU_ASSERT_TRUE(log_has(&d, told[i]));
		if (!log_has(&d, told[i]))
			fprintf(stderr, "not told: %s\n", told[i]);
	}
	CU_ASSERT_FALSE(log_has(&d, ":4:"));

	static char many[4000]; /* a pass for each line is not without end */
	for (size_t i = 0; i + 2 < sizeof(many); i += 2)
		memcpy(many + i, "x\n", 2);
	args[1] = write_config(many);
	daemon_name(&d, "many");
	daemon_spawn(&d, args);
	CU_ASSERT_EQUAL(daemon_wait(&d, 10), 1);
	CU_ASSERT_TRUE(log_has(&d, ":100:") && !log_has(&d, ":101:"));
	CU_ASSERT_TRUE(log_has(&d, "more mistakes than 100"));
}

static const struct apr_test tests[] = {
	{ "values_and_names", values_and_names, KEEPS_HEAP }, /* getopt's and stdio's own */
	{ "fused_rows", fused_rows, 0 },
	{ "wrong_usage", wrong_usage, KEEPS_HEAP },
	{ "file_under_command_line", file_under_command_line, KEEPS_HEAP },
	{ "file_errors_name_the_line", file_errors_name_the_line, KEEPS_HEAP },
	{ "what_is_no_file_is_refused", what_is_no_file_is_refused, KEEPS_HEAP },
	{ "parser_help_and_file_agree", parser_help_and_file_agree, KEEPS_HEAP },
	{ "every_mistake_is_told", every_mistake_is_told, KEEPS_HEAP },
	{ "the_man_page_knows_every_option", the_man_page_knows_every_option, 0 },
};

TEST_MAIN("daemon/options", tests)
