/* SPDX-License-Identifier: MIT */
/*
 * The interpreter against jinja2, byte for byte: the templates of families/ over the
 * conversations of conversations.json, and every construct of snippets.txt.
 * golden.jsonl has what jinja2 makes of them (make-golden.py writes it).
 */
#include "template/template.h"
#include "tests/harness.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AT "tests/template/"
enum { VARS_MAX = 64 };

struct vars {
	struct apr_template_var v[VARS_MAX];
	size_t n;
};

static void add_all(struct vars *to, json_t *object)
{
	const char *name;
	json_t *value;

	json_object_foreach(object, name, value) {
		CU_ASSERT_FATAL(to->n < VARS_MAX);
		to->v[to->n++] = (struct apr_template_var){ .name = name, .value = value,
							     .messages = !strcmp(name, "messages") };
	}
}

static json_t *load(const char *path)
{
	json_error_t e;
	json_t *j = json_load_file(path, JSON_ALLOW_NUL, &e);

	if (!j)
		fprintf(stderr, "%s: line %d: %s\n", path, e.line, e.text);
	CU_ASSERT_PTR_NOT_NULL_FATAL(j);
	return j;
}

static char *slurp(const char *path, size_t *len)
{
	FILE *f = fopen(path, "rb");
	char *text;
	long n;

	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	fseek(f, 0, SEEK_END);
	n = ftell(f);
	rewind(f);
	CU_ASSERT_FATAL(n >= 0);
	text = malloc((size_t)n + 1);
	CU_ASSERT_PTR_NOT_NULL_FATAL(text);
	*len = fread(text, 1, (size_t)n, f);
	text[*len] = 0;
	fclose(f);
	return text;
}

/* 0, or what compile or render said */
static int render(const char *text, size_t len, const struct vars *vars, struct apr_template_text *out, char *err,
		  size_t errlen)
{
	/* 2026-03-05 14:07:09, as make-golden.py has it */
	struct apr_template_args a = { .vars = vars->v, .n_vars = vars->n, .now = 1772719629 };
	struct apr_template *t;
	int e = apr_template_compile(&t, text, len, err, errlen);

	memset(out, 0, sizeof(*out));
	if (e)
		return e;
	e = apr_template_render(t, &a, out, err, errlen);
	apr_template_free(t);
	return e;
}

/* One line of golden.jsonl; name is for the complaint. */
static bool as_golden(const json_t *line, const char *name, const char *text, size_t len, const struct vars *vars)
{
	const json_t *want = json_object_get(line, "text");
	struct apr_template_text got;
	char err[256] = "";
	int e = render(text, len, vars, &got, err, sizeof(err));
	bool same = want ? !e && got.len == json_string_length(want) && !memcmp(got.text, json_string_value(want), got.len)
			 : e != 0;

	if (!same)
		fprintf(stderr, "\n%s:\n  want %s%s\n  got  %s\n", name, want ? "" : "an error",
			want ? json_string_value(want) : "", e ? err : got.text);
	if (e && !*err) {
		fprintf(stderr, "\n%s: refused without a word\n", name);
		same = false;
	}
	apr_template_text_free(&got);
	return same;
}

static void each_line(bool (*check)(const json_t *line, json_t *given), bool (*mine)(const json_t *line), unsigned least)
{
	json_t *given = load(AT "conversations.json");
	FILE *f = fopen(AT "golden.jsonl", "r");
	char *text = NULL;
	size_t cap = 0;
	unsigned n = 0, bad = 0;

	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	while (getline(&text, &cap, f) > 0) {
		json_t *line = json_loads(text, JSON_ALLOW_NUL, NULL);
		CU_ASSERT_PTR_NOT_NULL_FATAL(line);
		if (mine(line)) {
			n++;
			bad += !check(line, given);
		}
		json_decref(line);
	}
	free(text);
	fclose(f);
	json_decref(given);
	CU_ASSERT(n >= least);
	CU_ASSERT_EQUAL(bad, 0);
}

static bool is_family(const json_t *line)
{
	return json_object_get(line, "template") != NULL;
}

static bool is_snippet(const json_t *line)
{
	return json_object_get(line, "snippet") != NULL;
}

static bool check_family(const json_t *line, json_t *given)
{
	const char *file = json_string_value(json_object_get(line, "template"));
	size_t talk = (size_t)json_integer_value(json_object_get(line, "talk")), len;
	json_t *null = json_null();
	struct vars vars = { .v = { { .name = "tools", .value = null }, { .name = "documents", .value = null } }, .n = 2 };
	char path[PATH_MAX], name[PATH_MAX];

	snprintf(path, sizeof(path), AT "families/%s", file);
	snprintf(name, sizeof(name), "%s, conversation %zu", file, talk);
	char *text = slurp(path, &len);
	add_all(&vars, json_object_get(given, "common"));
	add_all(&vars, json_array_get(json_object_get(given, "talks"), talk));
	bool ok = as_golden(line, name, text, len, &vars);
	free(text);
	return ok;
}

static bool check_snippet(const json_t *line, json_t *given)
{
	const json_t *s = json_object_get(line, "snippet");
	struct vars vars = { .n = 0 };

	add_all(&vars, json_object_get(given, "snippets"));
	add_all(&vars, json_object_get(line, "vars"));
	return as_golden(line, json_string_value(s), json_string_value(s), json_string_length(s), &vars);
}

static void families_by_twenty_conversations(void)
{
	each_line(check_family, is_family, 20 * 20);
}

static void every_construct(void)
{
	each_line(check_snippet, is_snippet, 150);
}

/* Where jinja2 is installed the golden file is made anew, and must be the one that is kept. */
static void golden_is_what_jinja2_says_now(void)
{
	char path[PATH_MAX], command[PATH_MAX * 2];
	size_t n, m;

	if (system("python3 -c 'import jinja2, sys; sys.exit(jinja2.__version__ < \"3.1\")' 2>/dev/null") != 0)
		SKIP("there is no python3 with jinja2 3.1 or later here");
	snprintf(path, sizeof(path), "%s/golden.jsonl", apr_test_tmpdir());
	snprintf(command, sizeof(command), "python3 " AT "make-golden.py %s", path);
	CU_ASSERT_EQUAL_FATAL(system(command), 0);
	char *now = slurp(path, &n), *kept = slurp(AT "golden.jsonl", &m);
	CU_ASSERT_EQUAL(n, m);
	CU_ASSERT(n == m && !memcmp(now, kept, n));
	free(now);
	free(kept);
}

static const struct apr_test tests[] = {
	{ "families_by_twenty_conversations", families_by_twenty_conversations, KEEPS_HEAP },
	{ "every_construct", every_construct, 0 },
	{ "golden_is_what_jinja2_says_now", golden_is_what_jinja2_says_now, KEEPS_HEAP },
};
/* KEEPS_HEAP: the first use of local time reads its zone; the harness's folder has a name. */

int main(int argc, char **argv)
{
	setenv("TZ", "UTC", 1);
	return apr_test_main("template/golden", tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
