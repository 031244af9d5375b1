/* SPDX-License-Identifier: MIT */
/*
 * The tokenizers of the two real models against ids made by others: every line of
 * tests/golden/ *-tokens.jsonl, both columns, and back to text again.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/harness.h"

struct fixture {
	struct apr_model *m;
	struct apr_tokenizer *t;
};

static bool open_model(struct fixture *f, const char *file)
{
	const char *path = apr_test_model(file);
	char err[256] = "";

	if (!path)
		return false;
	if (apr_model_open(&f->m, path, err, sizeof err)) {
		CU_FAIL_FATAL(err);
		return false;
	}
	if (apr_tokenizer_new(&f->t, f->m, err, sizeof err)) {
		printf("%s\n", err);
		CU_FAIL_FATAL("tokenizer");
		return false;
	}
	return true;
}

static void close_model(struct fixture *f)
{
	apr_tokenizer_free(f->t);
	apr_model_close(f->m);
}

static bool same_ids(const struct fixture *f, const char *text, size_t len, unsigned flags, const json_t *want)
{
	uint32_t *ids, n, i;
	size_t back_len;
	char *back;
	bool same;

	if (apr_tok_encode(f->t, text, len, flags, 0, &ids, &n))
		return false;
	same = n == json_array_size(want);
	for (i = 0; same && i < n; i++)
		same = ids[i] == json_integer_value(json_array_get(want, i));
	if (!same) {
		printf("\n  %.*s:", (int)(len < 60 ? len : 60), text);
		for (i = 0; i < n && i < 20; i++)
			printf(" %u", ids[i]);
		printf("\n");
	}
	if (apr_tok_decode(f->t, ids, n, true, &back, &back_len)) {
		same = false;
	} else {
		same = same && back_len == len && !memcmp(back, text, len);
		free(back);
	}
	free(ids);
	return same;
}

static void golden_file(const char *model, const char *path)
{
	struct fixture f;
	char *line = NULL;
	size_t cap = 0;
	unsigned lines = 0, wrong = 0;
	FILE *in;

	if (!open_model(&f, model))
		SKIP("the model has not been fetched");
	in = fopen(path, "r");
	CU_ASSERT_PTR_NOT_NULL_FATAL(in);
	while (getline(&line, &cap, in) > 0) {
		json_t *o = json_loads(line, JSON_ALLOW_NUL, NULL), *text = json_object_get(o, "text");
		const json_t *special = json_object_get(o, "ids_parse_special"), *plain = json_object_get(o, "ids");
		const char *s = json_string_value(text);
		size_t len = json_string_length(text);

		CU_ASSERT_PTR_NOT_NULL_FATAL(o);
		lines++;
		wrong += !same_ids(&f, s, len, 0, plain);
		wrong += !same_ids(&f, s, len, APR_TOK_PARSE_SPECIAL, special ? special : plain);
		json_decref(o);
	}
	CU_ASSERT_EQUAL(wrong, 0);
	CU_ASSERT(lines > 50);
	free(line);
	fclose(in);
	close_model(&f);
}

static void smollm2_golden_ids(void)
{
	golden_file(SMOLLM2, "tests/golden/smollm2-tokens.jsonl");
}

static void gemma3_golden_ids(void)
{
	golden_file(GEMMA3, "tests/golden/gemma3-tokens.jsonl");
}

static const struct apr_test tests[] = {
	/* The content hash works on threads; glibc keeps their stacks, with a few bytes of heap, for the next. */
	{"smollm2_golden_ids", smollm2_golden_ids, KEEPS_HEAP},
	{"gemma3_golden_ids", gemma3_golden_ids, KEEPS_HEAP},
};

TEST_MAIN("model/golden", tests)
