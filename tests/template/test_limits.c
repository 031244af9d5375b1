/* SPDX-License-Identifier: MIT */
/*
 * Templates that mean harm, or nothing at all: each limit is one line, random text and
 * random trees neither crash nor run on. Under the sanitizers this is where memory is
 * proved. And whose text is whose: marks of what came in variables.
 */
#include "template/template.h"
#include "tests/harness.h"
#include "tests/support/drive.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char err[256];

static int run(const char *text, size_t len, const char *vars, struct apr_template_limits limits,
	       struct apr_template_text *out)
{
	json_t *j = json_loads(vars, JSON_ALLOW_NUL, NULL), *value;
	struct apr_template_var v[32];
	struct apr_template_args a = { .vars = v, .limits = limits };
	struct apr_template *t;
	const char *name;

	CU_ASSERT_PTR_NOT_NULL_FATAL(j);
	json_object_foreach(j, name, value) {
		CU_ASSERT_FATAL(a.n_vars < 32);
		v[a.n_vars++] = (struct apr_template_var){ .name = name, .value = value,
							   .own = !strcmp(name, "bos_token"),
							   .messages = !strcmp(name, "messages") };
	}
	memset(out, 0, sizeof(*out));
	int e = apr_template_compile(&t, text, len, err, sizeof(err));
	if (!e) {
		e = apr_template_render(t, &a, out, err, sizeof(err));
		apr_template_free(t);
	}
	json_decref(j);
	return e;
}

static void refused(const char *text, struct apr_template_limits limits, int want, const char *words)
{
	struct apr_template_text out;
	int e = run(text, strlen(text), "{\"l\":[1,2,3],\"s\":\"abc\"}", limits, &out);

	if (e != want || !strstr(err, words))
		fprintf(stderr, "\n%.80s: %d, %s\n", text, e, err);
	CU_ASSERT_EQUAL(e, want);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, words));
	CU_ASSERT_PTR_NULL(strchr(err, '\n'));
	apr_template_text_free(&out);
}

static const struct apr_template_limits none;

static void steps_end(void)
{
	refused("{% for a in range(9999) %}{% for b in range(99) %}{{ b }}{% endfor %}{% endfor %}", none, -EINVAL, "steps");
	refused("\n\n{% for a in range(50) %}{{ a }}{% endfor %}", (struct apr_template_limits){ .steps = 60 }, -EINVAL,
		"line 3: the template goes on for more than 60 steps");
	/* work that is no statement of its own is counted too */
	refused("{% set ns = namespace(s='aaaaaaaaaaaaaaaa') %}{% for a in range(14) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"
		"{% for a in range(99999) %}{% if ns.s.count('aab') %}{% endif %}{% endfor %}", none, -EINVAL, "steps");
	refused("{% set x = range(90000)|list %}{% for a in range(900) %}{% if 'q' in x %}{% endif %}{% endfor %}", none, -EINVAL,
		"steps");
	refused("{{ 'a'.ljust(9000000000) }}", none, -EINVAL, "steps");
}

static void memory_and_output_end(void)
{
	refused("{% set ns = namespace(s='aaaaaaaaaaaaaaaa') %}{% for a in range(90) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
		none, -E2BIG, "bytes");
	refused("{{ 'xxxxxxxxxxxxxxxx' * 99999999999 }}", none, -E2BIG, "bytes");
	refused("{{ 'xxxxxxxxxxxxxxxx' * 10 }}", (struct apr_template_limits){ .output = 100 }, -E2BIG, "above 100 bytes");
	refused("{{ l * 99999999 }}", none, -EINVAL, "steps");
	refused("{{ (l * 500000) is string }}", (struct apr_template_limits){ .memory = 1 << 20 }, -E2BIG,
		"more than 1024 KiB of memory");
	refused("{{ l * 9999999999999 }}", none, -E2BIG, "a list above 2^32 items");
	refused("{% set ns = namespace(l=l) %}{% for a in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}", none, -EINVAL, "");
}

/* text = times * part */
static char *many(const char *before, const char *part, size_t times, const char *after)
{
	size_t n = strlen(part), at = strlen(before);
	char *text = malloc(at + n * times + strlen(after) + 1);

	CU_ASSERT_PTR_NOT_NULL_FATAL(text);
	strcpy(text, before);
	for (size_t i = 0; i < times; i++, at += n)
		memcpy(text + at, part, n);
	strcpy(text + at, after);
	return text;
}

static void refused_many(const char *before, const char *part, const char *after, int want, const char *words)
{
	char *text = many(before, part, 20000, after);

	refused(text, none, want, words);
	free(text);
}

static void depth_ends(void)
{
	refused_many("{{ ", "(", "", -E2BIG, "nested deeper");
	refused_many("{{ ", "[", "", -E2BIG, "nested deeper");
	refused_many("{{ ", "not ", "1 }}", -E2BIG, "nested deeper");
	refused_many("{{ ", "-", "1 }}", -E2BIG, "nested deeper");
	refused_many("{{ ", "1 if 1 else ", "1 }}", -E2BIG, "nested deeper");
	refused_many("{{ 1", " + 1", " }}", -E2BIG, "operators or blocks");
	refused_many("{{ s", ".s", " }}", -E2BIG, "operators or blocks");
	refused_many("{{ s", "[0]", " }}", -E2BIG, "operators or blocks");
	refused_many("{{ s", "|trim", " }}", -E2BIG, "operators or blocks");
	refused_many("{{ s", "|e is string", " }}", -E2BIG, "operators or blocks");
	refused_many("{{ s", "()", " }}", -E2BIG, "operators or blocks");
	refused_many("{{ 1", " or 1", " }}", -E2BIG, "operators or blocks");
	refused_many("{{ 1", " if 1", " }}", -E2BIG, "operators or blocks");
	refused_many("", "{% if s %}", "", -E2BIG, "nested deeper");
	refused_many("", "{% for a in l %}", "", -E2BIG, "nested deeper");
	refused_many("", "{% set x %}", "", -E2BIG, "nested deeper");
	refused_many("{% set ", "(", "a = 1 %}", -EINVAL, "too many brackets");
	refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", none, -EINVAL, "nested deeper than 600 levels");
	refused("{% for x in l recursive %}{{ loop(l) }}{% endfor %}", none, -EINVAL, "nested deeper");
	refused("{% set ns = namespace(l=[]) %}{% for a in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}", none,
		-EINVAL, "nested deeper");
	refused("{% set ns = namespace(l=[]) %}{% for a in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l|tojson }}",
		none, -EINVAL, "nested deeper");
	refused("{% set ns = namespace(l=[], m=[]) %}{% for a in range(9999) %}{% set ns.l = [ns.l] %}{% set ns.m = [ns.m] %}"
		"{% endfor %}{{ ns.l == ns.m }}", none, -EINVAL, "nested deeper");
}

static void *depth_thread(void *arg)
{
	depth_ends();
	return arg;
}

/* What the deepest costs of the C stack is bounded, too. */
static void depth_fits_a_small_stack(void)
{
	pthread_attr_t a;
	pthread_t t;

	if (DRIVE_SANITIZED)
		SKIP("the sanitizers' frames are of another size");
	pthread_attr_init(&a);
	CU_ASSERT_EQUAL_FATAL(pthread_attr_setstacksize(&a, 512 << 10), 0);
	CU_ASSERT_EQUAL_FATAL(pthread_create(&t, &a, depth_thread, NULL), 0);
	pthread_join(t, NULL);
	pthread_attr_destroy(&a);
}

static void a_row_is_not_deep(void)
{
	struct apr_template_text out;
	char *text = many("{{ 1", " ~ 1", 20000, " }}");

	CU_ASSERT_EQUAL(run(text, strlen(text), "{}", none, &out), 0);
	CU_ASSERT_EQUAL(out.len, 20001);
	apr_template_text_free(&out);
	free(text);
	text = many("{% if 0 %}", "{% elif 0 %}", 20000, "{% else %}x{% endif %}");
	CU_ASSERT_EQUAL(run(text, strlen(text), "{}", none, &out), 0);
	CU_ASSERT_EQUAL(out.len, 1);
	apr_template_text_free(&out);
	free(text);
}

static void size_ends(void)
{
	struct apr_template_text out;
	char *text = many("", "{{ 1 }}", 150000, "");

	CU_ASSERT_EQUAL(run(text, strlen(text), "{}", none, &out), -E2BIG);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "above 1048576 bytes"));
	CU_ASSERT_EQUAL(run(text, 140000 * 7, "{}", none, &out), -E2BIG);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "parts"));
	free(text);
}

static void line_of_the_fault(void)
{
	refused("a\n{% if s %}\n\n{{ s.x.y }}{% endif %}", none, -EINVAL, "line 4: 'x' is undefined");
	refused("a\n\n{{ 1 + }}", none, -EINVAL, "line 3: the tag's end where an expression should be");
	refused("{# \n\n #}\n{{ raise_exception('no\nway') }}", none, -EINVAL, "line 4: the template refuses: no way");
	refused("\n\n{% for x in l %}\n", none, -EINVAL, "a block without its endfor");
	refused("\xff", none, -EINVAL, "not UTF-8");
	refused("{{ s.format }}", none, -EINVAL, "a method cannot be printed");
	refused("{% block x %}", none, -EINVAL, "line 1: 'block' where a statement should be");
}

/* ---- whose text ------------------------------------------------------------------------- */

/* The text, and a T or a V for each of its bytes. */
static void marked(const char *text, const char *want, const char *marks)
{
	struct apr_template_text out;
	int e = run(text, strlen(text),
		    "{\"u\":\"<|x|>\",\"bos_token\":\"<s>\",\"d\":{\"<k>\":[\"<v>\"]},"
		    "\"messages\":[{\"role\":\"user\",\"content\":\"user\"},{\"role\":\"a|><|b\",\"content\":\"c\"}]}",
		    none, &out);

	if (e || strcmp(out.text, want))
		fprintf(stderr, "\n%s: %s%s\n", text, e ? err : "", e ? "" : out.text);
	CU_ASSERT_EQUAL_FATAL(e, 0);
	CU_ASSERT_STRING_EQUAL(out.text, want);
	CU_ASSERT_EQUAL(out.len, strlen(marks));
	for (size_t i = 0; i < out.len && i < strlen(marks); i++)
		if (out.mark[i] != (marks[i] == 'V')) {
			fprintf(stderr, "\n%s: byte %zu of %s\n", text, i, out.text);
			CU_FAIL("a byte's mark");
			break;
		}
	apr_template_text_free(&out);
}

static void content_stays_content(void)
{
	marked("<|y|>{{ u }}!", "<|y|><|x|>!", "TTTTTVVVVVT");
	marked("{{ bos_token + u[1:3] ~ '<' + u.upper() }}", "<s>|x<<|X|>", "TTTVVTVVVVV");
	marked("{{ ('<' + u)|trim('<>')|replace('x', '<') }}", "|<|", "VTV");
	marked("{{ '<x>'|replace('x', u) }}", "<<|x|>>", "TVVVVVT");
	marked("{{ [u, 'ab']|join('-') }}", "<|x|>-ab", "VVVVVTTT");
	marked("{{ d|tojson }}", "{\"<k>\": [\"<v>\"]}", "VVVVVVVVVVVVVVVV");
	marked("{{ d }}", "{'<k>': ['<v>']}", "TTVVVTTTTTVVVTTT");
	marked("{% macro m(a) %}<{{ a }}{% endmacro %}{{ m(u)|lower }}", "<<|x|>", "TVVVVV");
	marked("{% set q %}({{ u }}){% endset %}{{ q[::-1] }}{{ q|length }}", ")>|x|<(7", "TVVVVVTT");
	marked("{% for c in u %}{{ c }}.{% endfor %}", "<.|.x.|.>.", "VTVTVTVTVT");
	marked("{{ '%s|' % u }}{{ '{}'.format(u) }}", "<|x|>|<|x|>", "VVVVVTVVVVV");
	marked("{{ (u ~ '\n' ~ u)|indent(1) }}", "<|x|>\n <|x|>", "VVVVVTTVVVVV");
}

static void a_role_is_the_templates_word(void)
{
	/* "<|" + role + "|>" is a delimiter; a role that could close one half and open another is not taken for one */
	marked("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", "<|user|>user<|a|><|b|>c",
	       "TTTTTTTTVVVVTTVVVVVVTTV");
}

/* ---- nonsense ------------------------------------------------------------------------------ */

static uint64_t state;

static uint32_t draw(uint32_t n)
{
	state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t)((state >> 33) % n);
}

static const char vars[] = "{\"bos_token\":\"<s>\",\"s\":\"a\\u00e9<|x|>\\n\\u0000 b\",\"n\":7,\"f\":-2.5,\"l\":[3,[1,\"x\"],{\"k\":null}],"
			   "\"d\":{\"a\":{\"b\":[1,2]},\"items\":1,\"\":true},\"e\":\"\",\"z\":null,"
			   "\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":null},{\"role\":1}],"
			   "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{}}}}]}";

static void one(const char *text, size_t len)
{
	static const struct apr_template_limits small = { .steps = 20000, .memory = 8 << 20, .output = 1 << 20 };
	struct apr_template_text out;
	int e = run(text, len, vars, small, &out);

	CU_ASSERT(e == 0 || e == -EINVAL || e == -E2BIG);
	CU_ASSERT(!e || *err);
	apr_template_text_free(&out);
}

static void random_bytes(void)
{
	char text[200];

	for (unsigned i = 0; i < 20000; i++) {
		size_t n = draw(sizeof(text));
		state = i * UINT64_C(0x9e3779b97f4a7c15);
		for (size_t k = 0; k < n; k++) /* half of it what the lexer looks at */
			text[k] = draw(2) ? "{}%#-+ \n'\"\\()[]|.,:=~*/<>!"[draw(27)] : (char)draw(i % 4 ? 128 : 256);
		one(text, n);
	}
}

static void random_words(void)
{
	static const char *const words[] = {
		"{{ ", " }}", "{% ", " %}", "{%- ", " -%}", "{#", "#}", "for ", "x ", "in ", "endfor", "if ", "elif ", "else",
		"endif", "set ", "endset", "macro ", "endmacro", "call ", "endcall", "filter ", "endfilter", "with ", "endwith",
		"generation", "endgeneration", "break", "continue", "raw", "endraw", "not ", "and ", "or ", "is ", "defined", "none",
		"true", "(", ")", "[", "]", "{", "}", "|", ".", ",", ":", "=", "==", "<", ">", "+", "-", "*", "**", "/", "//", "%",
		"~", "'a'", "\"\\u00e9\"", "0", "1", "-1", "9223372036854775807", "2.5", "1e308", "s", "n", "f", "l", "d", "e", "z",
		"messages", "tools", "loop", "loop.index", "namespace", "range", "dict", "ns", "a", "caller", "varargs", "kwargs",
		"tojson", "join", "map", "select", "selectattr", "length", "first", "last", "list", "sort", "unique", "batch",
		"groupby", "indent", "replace", "trim", "int", "float", "round", "upper", "title", "default", "dictsort", "items",
		"split", "strip", "find", "rfind", "format", "get", "keys", "values", "center", "rsplit", "string", "mapping",
		"recursive", "(1)", "(2, 3)", "()", "[0]", "[::-1]", "[-1:]", "\n", "  ", "m", "m(", "b", "attribute=", "%s",
	};
	char text[2048];

	for (unsigned i = 0; i < 30000; i++) {
		size_t n = 0;
		unsigned count;
		state = i * UINT64_C(0xd1342543de82ef95) + 1;
		count = 1 + draw(40);
		for (unsigned k = 0; k < count && n < sizeof(text) - 64; k++)
			n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%s", words[draw(sizeof(words) / sizeof(words[0]))],
					      draw(4) ? "" : " ");
		one(text, n);
	}
}

/* An expression that parses, of random parts. */
static size_t expression(char *to, size_t room, unsigned depth)
{
	static const char *const leaves[] = { "s", "n", "f", "l", "d", "e", "z", "messages", "tools", "0", "-3", "'ab'", "''", "2.5",
					      "[]", "{}", "none", "true", "nothing", "9223372036854775807", "loop", "range" };
	static const char *const forms[] = {
		"(@ + @)", "(@ - @)", "(@ * @)", "(@ / @)", "(@ // @)", "(@ % @)", "(@ ** @)", "(@ ~ @)", "(@ == @)", "(@ < @)",
		"(@ in @)", "(@ and @)", "(@ or @)", "(not @)", "(-@)", "(@ if @ else @)", "@[@]", "@[@:@]", "@[@:@:@]", "@.a", "@.items()",
		"@.get(@, @)", "[@, @]", "{'a': @, 'b': @}", "(@, @)", "(@|length)", "(@|tojson(indent=@))", "(@|join(@))", "(@|list)",
		"(@|sort)", "(@|unique|list)", "(@|map(attribute=@)|list)", "(@|select('in', @)|list)", "(@|selectattr(@)|list)",
		"(@|default(@, true))", "(@|trim(@))", "(@|replace(@, @, @))", "(@|indent(@))", "(@|int)", "(@|int(@, @))", "(@|float)",
		"(@|round(@))", "(@|batch(@, @)|list)", "(@|groupby(@))", "(@|dictsort)", "(@|min)", "(@|max)", "(@|sum(start=@))", "(@|first)",
		"(@|last)", "(@|reverse)", "(@|string)", "(@|title)", "(@|upper)", "(@|center(@))", "(@|format(@, @))", "(@|e)", "(@|abs)",
		"@.split(@)", "@.split(@, @)", "@.rsplit(@, @)", "@.strip(@)", "@.find(@, @, @)", "@.rfind(@)", "@.count(@)", "@.startswith(@)",
		"@.endswith((@, @))", "@.replace(@, @)", "@.splitlines(@)", "@.partition(@)", "@.join(@)", "@.zfill(@)", "@.ljust(@)",
		"@.format(@, @)", "@.title()", "@.swapcase()", "(@ is divisibleby(@))", "(@ is sameas(@))", "(@ is mapping)", "(@ is lower)",
		"range(@, @, @)", "namespace(a=@)", "dict(@)", "strftime_now(@)", "(@|tojson(separators=[@, @], sort_keys=true, ensure_ascii=@))",
	};
	size_t n = 0;

	if (!depth || room < 256 || !draw(4))
		return (size_t)snprintf(to, room, "%s", leaves[draw(sizeof(leaves) / sizeof(leaves[0]))]);
	for (const char *f = forms[draw(sizeof(forms) / sizeof(forms[0]))]; *f && n + 64 < room; f++) {
		if (*f == '@')
			n += expression(to + n, (room - n) / 2, depth - 1);
		else
			to[n++] = *f;
	}
	to[n] = 0;
	return n;
}

static void random_trees(void)
{
	char text[4096];

	for (unsigned i = 0; i < 40000; i++) {
		size_t n;
		state = i * UINT64_C(0x9e3779b97f4a7c15) + 7;
		n = (size_t)snprintf(text, sizeof(text), "%s", draw(2) ? "{% for x in l %}{{ " : "{{ ");
		bool loop = n > 3;
		n += expression(text + n, 3000, 4);
		n += (size_t)snprintf(text + n, sizeof(text) - n, " }}%s", loop ? "{% endfor %}" : "");
		one(text, n);
	}
}

/* Families of templates with a few bytes changed. */
static void changed_families(void)
{
	DIR *d = opendir("tests/template/families");
	struct dirent *f;

	CU_ASSERT_PTR_NOT_NULL_FATAL(d);
	while ((f = readdir(d))) {
		char path[512], text[16384], copy[16384];
		snprintf(path, sizeof(path), "tests/template/families/%s", f->d_name);
		FILE *in = f->d_name[0] == '.' ? NULL : fopen(path, "rb");
		if (!in)
			continue;
		size_t n = fread(text, 1, sizeof(text), in);
		fclose(in);
		for (unsigned i = 0; n && i < 300; i++) {
			size_t from, len;
			memcpy(copy, text, n);
			state = i + n * UINT64_C(0x9e3779b97f4a7c15);
			for (unsigned k = 1 + draw(4); k; k--)
				copy[draw((uint32_t)n)] = "{}%'\"()[]|.- an1\n"[draw(17)];
			from = draw(4) ? 0 : draw((uint32_t)n);
			len = draw(4) ? n - from : draw((uint32_t)(n - from));
			one(copy + from, len);
		}
	}
	closedir(d);
}

static const struct apr_test tests[] = {
	{ "steps_end", steps_end, 0 },
	{ "memory_and_output_end", memory_and_output_end, 0 },
	{ "depth_ends", depth_ends, 0 },
	{ "depth_fits_a_small_stack", depth_fits_a_small_stack, KEEPS_HEAP }, /* a thread's own pool of memory */
	{ "a_row_is_not_deep", a_row_is_not_deep, 0 },
	{ "size_ends", size_ends, 0 },
	{ "line_of_the_fault", line_of_the_fault, 0 },
	{ "content_stays_content", content_stays_content, 0 },
	{ "a_role_is_the_templates_word", a_role_is_the_templates_word, 0 },
	{ "random_bytes", random_bytes, 0 },
	{ "random_words", random_words, 0 },
	{ "random_trees", random_trees, KEEPS_HEAP }, /* local time's zone */
	{ "changed_families", changed_families, 0 },
};
TEST_MAIN("template/limits", tests)
