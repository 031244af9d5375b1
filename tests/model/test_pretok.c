/* SPDX-License-Identifier: MIT */
/*
 * Where each pre-tokenizer cuts, against the published regular expressions run by
 * another engine (tests/golden/make_pretok.py), and its time on long runs.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "model/pretok.h"
#include "tests/harness.h"

static bool cuts_as(enum apr_pretok kind, const json_t *text, const json_t *cuts)
{
	const char *s = json_string_value(text);
	size_t len = json_string_length(text), pos = 0, i = 0, end;

	for (; pos < len; pos = end, i++) {
		end = apr_pretok_next(kind, s, len, pos);
		if (end <= pos || end > len || end - pos != (size_t)json_integer_value(json_array_get(cuts, i)))
			return false;
	}
	return i == json_array_size(cuts);
}

static void golden(const char *name)
{
	struct gguf_str pre = {name, strlen(name)};
	unsigned lines = 0, wrong = 0;
	enum apr_pretok kind;
	char *line = NULL;
	size_t cap = 0;
	FILE *in = fopen("tests/golden/pretok.jsonl", "r");

	CU_ASSERT_PTR_NOT_NULL_FATAL(in);
	CU_ASSERT_FATAL(apr_pretok_find(pre, &kind));
	while (getline(&line, &cap, in) > 0) {
		json_t *o = json_loads(line, JSON_ALLOW_NUL, NULL);

		CU_ASSERT_PTR_NOT_NULL_FATAL(o);
		if (!strcmp(json_string_value(json_object_get(o, "pre")), name)) {
			lines++;
			if (!cuts_as(kind, json_object_get(o, "text"), json_object_get(o, "cuts"))) {
				wrong++;
				printf("\n  differs: %s", line);
			}
		}
		json_decref(o);
	}
	CU_ASSERT(lines > 400);
	CU_ASSERT_EQUAL(wrong, 0);
	free(line);
	fclose(in);
}

static void case04_gpt2_cuts(void)
{
	golden("gpt-2");
}

static void case04_smollm_cuts(void)
{
	golden("smollm");
}

static void case04_llama_bpe_cuts(void)
{
	golden("llama-bpe");
}

static void case04_qwen2_cuts(void)
{
	golden("qwen2");
}

static void case04_names(void)
{
	static const char *const unknown[] = {"", "default", "gpt2", "llama-bpe ", "qwen", "LLAMA-BPE", "smollm2"};
	enum apr_pretok kind;
	size_t i;

	for (i = 0; i < sizeof unknown / sizeof *unknown; i++)
		CU_ASSERT_FALSE(apr_pretok_find((struct gguf_str){unknown[i], strlen(unknown[i])}, &kind));
	CU_ASSERT(apr_pretok_find((struct gguf_str){"llama3", 6}, &kind) && kind == APR_PRETOK_LLAMA3);
}

static double seconds(enum apr_pretok kind, const char *text, size_t len)
{
	double best = 1e9;
	unsigned i;

	for (i = 0; i < 5; i++) {
		struct timespec a, b;
		size_t pos;
		double t;

		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
		for (pos = 0; pos < len;)
			pos = apr_pretok_next(kind, text, len, pos);
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
		t = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
		best = t < best ? t : best;
	}
	return best;
}

/* Eight times the text may take at most 24 times as long (8 if linear, 64 if quadratic). */
static void case01_time_is_linear(void)
{
	static const char *const units[] = {"A", " ", "\xe4\xb8\xad", "\n", " \n", "\t", "1", "!", "'", "'s", " 1", "\r", "\xff", "\xe3\x80\x80"};
	static const size_t small = 65536, large = 8 * 65536;
	char *text = calloc(large, 3);
	size_t u, i, n;
	int kind;

	if (!text)
		abort();
	for (u = 0; u < sizeof units / sizeof *units; u++) {
		n = strlen(units[u]);
		for (i = 0; i < large; i++)
			memcpy(text + i * n, units[u], n);
		for (kind = APR_PRETOK_GPT2; kind <= APR_PRETOK_QWEN2; kind++) {
			double a = seconds((enum apr_pretok)kind, text, small * n), b = seconds((enum apr_pretok)kind, text, large * n);

			CU_ASSERT(b < 24 * a);
			if (b >= 24 * a)
				printf("\n  kind %d, unit %zu: %.0f and %.0f us", kind, u, a * 1e6, b * 1e6);
		}
	}
	free(text);
}

#define T(f) {#f, f, 0}
static const struct apr_test tests[] = {
	T(case04_gpt2_cuts), T(case04_smollm_cuts), T(case04_llama_bpe_cuts), T(case04_qwen2_cuts), T(case04_names),
	T(case01_time_is_linear),
};

TEST_MAIN("model/pretok", tests)
