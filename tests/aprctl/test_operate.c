/* SPDX-License-Identifier: MIT */
/* What an administrator reads: settings and where they came from, metrics, completions. Against aprd itself. */
#include "client/aprctl/ctl.h"
#include "daemon/options.h"
#include "tests/aprctl/cli.h"
#include "tests/support/gguf_writer.h"

#include <ctype.h>

static struct cli c;

static bool start(struct test_aprd *d, const char *const *more)
{
	static char model[200];
	struct tiny_spec spec = {.n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32, .seed = 7};
	const char *args[12] = {"-m", model};

	snprintf(model, sizeof(model), "%s/tiny.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL(apr_test_write_tiny_model(model, &spec), 0);
	for (int i = 0; more[i]; i++)
		args[2 + i] = more[i];
	if (test_aprd_start(d, apr_test_program("aprd"), apr_test_tmpdir(), args))
		return false;
	c = (struct cli){.socket = d->sock};
	return true;
}

/* ---- settings ------------------------------------------------------------------------- */

static void says(json_t *j, const char *name, const char *value, const char *from)
{
	json_t *r;
	size_t i;

	json_array_foreach (json_object_get(j, "settings"), i, r)
		if (!strcmp(cli_str(r, "name"), name)) {
			CU_ASSERT_STRING_EQUAL(cli_str(r, "value"), value);
			CU_ASSERT_STRING_EQUAL(cli_str(r, "from"), from);
			return;
		}
	CU_FAIL("a setting is missing");
}

static void config_names_value_and_source(void)
{
	char conf[200];
	struct test_aprd d;
	json_t *j;
	size_t rows = 0;

	snprintf(conf, sizeof(conf), "%s/a.conf", apr_test_tmpdir());
	FILE *f = fopen(conf, "we");
	fputs("threads = 2\ncontext = 128\ndrain-ms = 1234\n", f);
	fclose(f);
	CU_ASSERT_TRUE_FATAL(start(&d, (const char *const[]){"--config", conf, "-c", "64", NULL}));
	CU_ASSERT_EQUAL(CLI(&c, "--json", "config"), 0);
	j = cli_json(&c);
	says(j, "threads", "2", "file");
	says(j, "context", "64", "flag");
	says(j, "drain-ms", "1234", "file");
	says(j, "hello-ms", "10000", "default");
	says(j, "poll", "auto", "default");
	for (size_t i = 0; i < option_rows; i++)
		rows += (option_table[i].in & IN_FILE) != 0;
	CU_ASSERT_EQUAL(json_array_size(json_object_get(j, "settings")), rows);
	json_decref(j);
	CU_ASSERT_EQUAL(CLI(&c, "config"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, conf));
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

/* ---- metrics -------------------------------------------------------------------------- */

struct series {
	char name[80], labels[300];
	double value;
};

static struct series all[2048];
static size_t n_all;

/* One sample's line: NAME, {LABEL="TEXT",...} or nothing, a blank, a number. */
static bool sample(const char *line, struct series *s)
{
	size_t n = strspn(line, "abcdefghijklmnopqrstuvwxyz_0123456789"), at = n;
	char *end;

	if (!n || n >= sizeof(s->name) || isdigit((unsigned char)*line))
		return false;
	memcpy(s->name, line, n);
	s->name[n] = 0;
	s->labels[0] = 0;
	if (line[at] == '{') {
		do {
			size_t k = strspn(line + ++at, "abcdefghijklmnopqrstuvwxyz_");
			at += k;
			if (!k || line[at] != '=' || line[at + 1] != '"')
				return false;
			for (at += 2; line[at] != '"'; at++)
				if (!line[at] || (line[at] == '\\' && !strchr("\\\"n", line[++at])))
					return false;
		} while (line[++at] == ',');
		if (line[at++] != '}' || at - n >= sizeof(s->labels))
			return false;
		memcpy(s->labels, line + n, at - n);
		s->labels[at - n] = 0;
	}
	if (line[at] != ' ')
		return false;
	s->value = strtod(line + at + 1, &end);
	return end != line + at + 1 && !*end;
}

/* Every line is of the format; a family's lines stand together below its HELP and TYPE; no series stands twice. */
static void parse(char *text)
{
	char family[80] = "", type[16] = "";

	n_all = 0;
	for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
		char name[80], kind[16];

		if (!strncmp(line, "# HELP ", 7))
			continue;
		if (sscanf(line, "# TYPE %79s %15s", name, kind) == 2) {
			CU_ASSERT_TRUE(!strcmp(kind, "counter") || !strcmp(kind, "gauge") || !strcmp(kind, "histogram"));
			snprintf(family, sizeof(family), "%s", name);
			snprintf(type, sizeof(type), "%s", kind);
			continue;
		}
		struct series *s = &all[n_all];
		CU_ASSERT_TRUE_FATAL(n_all < sizeof(all) / sizeof(all[0]) && sample(line, s));
		CU_ASSERT_EQUAL(strncmp(s->name, family, strlen(family)), 0);
		CU_ASSERT_TRUE(!strcmp(type, "histogram") || !strcmp(s->name, family));
		if (!strcmp(type, "counter"))
			CU_ASSERT_PTR_NOT_NULL(strstr(s->name, "_total"));
		for (size_t i = 0; i < n_all; i++)
			CU_ASSERT_FALSE(!strcmp(all[i].name, s->name) && !strcmp(all[i].labels, s->labels));
		n_all++;
	}
}

static double value(const char *name, const char *labels)
{
	for (size_t i = 0; i < n_all; i++)
		if (!strcmp(all[i].name, name) && !strcmp(all[i].labels, labels))
			return all[i].value;
	fprintf(stderr, "  no %s%s\n", name, labels);
	CU_FAIL("a metric is missing");
	return -1;
}

/* Buckets rise to +Inf, which is the count. */
static double histogram(const char *name)
{
	char bucket[80], count[80];
	double last = 0, edge = 0;

	snprintf(bucket, sizeof(bucket), "%s_bucket", name);
	snprintf(count, sizeof(count), "%s_count", name);
	for (size_t i = 0; i < n_all; i++) {
		double le;

		if (strcmp(all[i].name, bucket) != 0)
			continue;
		le = strtod(all[i].labels + strlen("{le=\""), NULL);
		CU_ASSERT_TRUE(le > edge && all[i].value >= last);
		edge = le;
		last = all[i].value;
	}
	CU_ASSERT_EQUAL(last, value(count, ""));
	CU_ASSERT_EQUAL(last, value(bucket, "{le=\"+Inf\"}"));
	return last;
}

static void metrics_are_of_the_format_and_count(void)
{
	struct test_aprd d;

	CU_ASSERT_TRUE_FATAL(start(&d, (const char *const[]){NULL}));
	CU_ASSERT_EQUAL(CLI(&c, "metrics"), 0);
	parse(c.out);
	CU_ASSERT_EQUAL(value("aprd_requests_total", "{outcome=\"ok\"}"), 0);
	CU_ASSERT_EQUAL(histogram("aprd_first_token_seconds"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--ignore-eos", "-n", "9", "a"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "generate", "--ignore-eos", "-n", "5", "a"), 0);
	CU_ASSERT_EQUAL(CLI(&c, "metrics"), 0);
	parse(c.out);
	CU_ASSERT_EQUAL(value("aprd_requests_total", "{outcome=\"ok\"}"), 2);
	CU_ASSERT_EQUAL(value("aprd_tokens_total", ""), 14);
	CU_ASSERT_EQUAL(value("aprd_ready", ""), 1);
	CU_ASSERT_TRUE(value("aprd_kv_pages", "{model=\"tiny\"}") > 0);
	CU_ASSERT_TRUE(value("aprd_prompt_tokens_total", "{model=\"tiny\"}") > 0);
	CU_ASSERT_EQUAL(histogram("aprd_first_token_seconds"), 2);
	CU_ASSERT_EQUAL(histogram("aprd_queue_seconds"), 2);
	CU_ASSERT_EQUAL(histogram("aprd_inter_token_seconds"), 12);
	CU_ASSERT_TRUE(histogram("aprd_step_seconds") >= 14);
	CU_ASSERT_TRUE(value("aprd_step_seconds_sum", "") > 0);
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

/* ---- live screens ------------------------------------------------------------------------ */

static size_t times(const char *text, const char *what)
{
	size_t n = 0;

	for (const char *at = strstr(text, what); at; at = strstr(at + 1, what))
		n++;
	return n;
}

static void live_screens_follow_one_another(void)
{
	struct test_aprd d;

	CU_ASSERT_TRUE_FATAL(start(&d, (const char *const[]){NULL}));
	CU_ASSERT_EQUAL(CLI(&c, "top", "-n", "2"), 0);
	CU_ASSERT_EQUAL(times(c.out, "KV pages  "), 2);
	CU_ASSERT_PTR_NULL(strchr(c.out, '\033')); /* into a pipe */
	CU_ASSERT_EQUAL(CLI(&c, "status", "--watch", "-n", "1"), 0);
	CU_ASSERT_EQUAL(times(c.out, "backend"), 1);
	CU_ASSERT_EQUAL(CLI(&c, "clients"), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "tenant"));
	c.signal = SIGINT; /* in mid screen: an ordinary end */
	CU_ASSERT_EQUAL(CLI(&c, "top"), 0);
	c.signal = 0;
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

/* ---- completions ------------------------------------------------------------------------- */

static const char *completion(const char *name, const char *shell)
{
	c = (struct cli){0};
	CU_ASSERT_EQUAL_FATAL(cli_run_program(&c, "scripts/completions",
					(const char *const[]){name, apr_test_program(name), shell, NULL}), 0);
	return c.out;
}

/* As a shell reads it: "--name" in bash and zsh, "-l name" in fish. */
static void has(const char *text, const char *shell, const char *option)
{
	char want[80];

	snprintf(want, sizeof(want), strcmp(shell, "fish") ? "--%s" : "-l %s", option);
	if (!strstr(text, want))
		fprintf(stderr, "  %s's completion has no %s\n", shell, option);
	CU_ASSERT_PTR_NOT_NULL(strstr(text, want));
}

static void completions_agree_with_the_tables(void)
{
	static const char *const shells[] = {"bash", "zsh", "fish"};

	if (access("scripts/completions", X_OK))
		SKIP("run from the source tree: scripts/completions is not here");
	for (int s = 0; s < 3; s++) {
		const char *text = completion("aprd", shells[s]);

		for (size_t i = 0; i < option_rows; i++)
			if (option_table[i].in & IN_LINE)
				has(text, shells[s], option_table[i].name);
		text = completion("aprctl", shells[s]);
		for (size_t i = 0; i < ctl_n_options; i++)
			has(text, shells[s], ctl_options[i].name);
		for (int i = 0; i < N_VERBS; i++)
			CU_ASSERT_PTR_NOT_NULL(strstr(text, ctl_verbs[i].name));
	}
	/* and bash, which is here, takes it */
	char path[200];
	snprintf(path, sizeof(path), "%s/c.bash", apr_test_tmpdir());
	const char *text = completion("aprctl", "bash");
	FILE *f = fopen(path, "we");
	fputs(text, f);
	fputs("COMP_WORDS=(aprctl stat) COMP_CWORD=1; _aprctl; echo \"=${COMPREPLY[*]}=\"\n"
	      "COMP_WORDS=(aprctl drain --ti) COMP_CWORD=2; _aprctl; echo \"=${COMPREPLY[*]}=\"\n", f);
	fclose(f);
	CU_ASSERT_EQUAL(cli_run_program(&c, "/bin/bash", (const char *const[]){path, NULL}), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "=status=\n=--timeout=\n");
}

static const struct apr_test tests[] = {
	{"config_names_value_and_source", config_names_value_and_source, KEEPS_HEAP},
	{"metrics_are_of_the_format_and_count", metrics_are_of_the_format_and_count, KEEPS_HEAP},
	{"live_screens_follow_one_another", live_screens_follow_one_another, KEEPS_HEAP},
	{"completions_agree_with_the_tables", completions_agree_with_the_tables, KEEPS_HEAP},
};
TEST_MAIN("aprctl/operate", tests)
