/* SPDX-License-Identifier: MIT */
/*
 * Tokenizers built for the test: merging against another engine on a small
 * vocabulary, SPM by hand, CASES 4, 26 and 27, limits, many threads at once.
 */
#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/harness.h"
#include "tests/support/tok_fixture.h"

static struct gguf_writer *tiny_with_vocab(const char *model, const char *const *tokens, const int32_t *kinds, uint32_t n)
{
	struct tiny_spec spec = {.n_layers = 1, .n_embd = 32, .n_ff = 32, .n_heads = 1, .n_kv_heads = 1, .head_dim = 32,
	                         .n_vocab = n < 259 ? 259 : n};
	static const char *const keys[] = {"tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
	                                   "tokenizer.ggml.token_type", "tokenizer.ggml.merges",
	                                   "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
	                                   "tokenizer.ggml.add_bos_token"};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	size_t i;

	for (i = 0; i < sizeof keys / sizeof *keys; i++)
		gw_drop(w, keys[i]);
	gw_str(w, "tokenizer.ggml.model", model);
	gw_arr_str(w, "tokenizer.ggml.tokens", tokens, n);
	gw_arr(w, "tokenizer.ggml.token_type", GW_I32, kinds, n);
	return w;
}

/* ---- merging, against another engine ---- */

static const char **strings(const json_t *a, uint32_t *n)
{
	const char **v = tok_room(json_array_size(a) * sizeof *v);
	size_t i;

	*n = (uint32_t)json_array_size(a);
	for (i = 0; i < *n; i++)
		v[i] = json_string_value(json_array_get(a, i));
	return v;
}

static bool line_agrees(const struct tok_fixture *f, const json_t *line)
{
	const json_t *text = json_object_get(line, "text"), *want = json_object_get(line, "ids");
	uint32_t *ids, n, i;
	bool same;

	if (apr_tok_encode(f->t, json_string_value(text), json_string_length(text), 0, 0, &ids, &n))
		return false;
	same = n == json_array_size(want);
	for (i = 0; same && i < n; i++)
		same = ids[i] == json_integer_value(json_array_get(want, i));
	free(ids);
	return same;
}

static void merges_as(const char *pre)
{
	json_t *o = json_load_file("tests/golden/bpe.json", JSON_ALLOW_NUL, NULL), *lines = json_object_get(o, "lines");
	uint32_t n_tokens, n_merges, i, seen = 0, wrong = 0;
	const char **tokens, **merges;
	struct gguf_writer *w;
	struct tok_fixture f;
	int32_t *kinds;

	CU_ASSERT_PTR_NOT_NULL_FATAL(o);
	tokens = strings(json_object_get(o, "tokens"), &n_tokens);
	merges = strings(json_object_get(o, "merges"), &n_merges);
	kinds = tok_room(n_tokens * sizeof *kinds);
	for (i = 0; i < n_tokens; i++)
		kinds[i] = APR_PIECE_NORMAL;
	w = tiny_with_vocab("gpt2", tokens, kinds, n_tokens);
	gw_str(w, "tokenizer.ggml.pre", pre);
	gw_arr_str(w, "tokenizer.ggml.merges", merges, n_merges);
	tok_must_open(&f, w);
	for (i = 0; i < json_array_size(lines); i++) {
		const json_t *line = json_array_get(lines, i);

		if (strcmp(json_string_value(json_object_get(line, "pre")), pre) != 0)
			continue;
		seen++;
		if (!line_agrees(&f, line)) {
			wrong++;
			printf("\n  %s differs: %s", pre, json_string_value(json_object_get(line, "text")));
		}
	}
	CU_ASSERT(seen > 100);
	CU_ASSERT_EQUAL(wrong, 0);
	tok_close(&f);
	free(tokens);
	free(merges);
	free(kinds);
	json_decref(o);
}

static void merges_gpt2(void)
{
	merges_as("gpt-2");
}

static void merges_smollm(void)
{
	merges_as("smollm");
}

static void merges_llama_bpe_whole_first(void)
{
	merges_as("llama-bpe");
}

static void merges_qwen2(void)
{
	merges_as("qwen2");
}

/* ---- SPM on a vocabulary small enough to work out by hand ---- */

static void spm_vocab(const char **tokens, int32_t *kinds, float *scores, char (*bytes)[8])
{
	static const struct {
		const char *text;
		int32_t kind;
		float score;
	} head[] = {
		{"<unk>", 2, 0},  {"<s>", 3, 0},     {"</s>", 3, 0},   {"\xe2\x96\x81", 1, -9}, {"a", 1, -10}, {"b", 1, -11},
		{"c", 1, -12},    {"ab", 1, -1},     {"bc", 1, -1},    {"abc", 1, -5},          {"cab", 1, -0.5f},
		{"\xe2\x96\x81" "a", 1, -3}, {"\xe2\x96\x81\xe2\x96\x81", 1, -4}, {"  ", 4, 0}, {"<s>a", 5, 0},
	};
	uint32_t i;

	for (i = 0; i < 256; i++) {
		snprintf(bytes[i], 8, "<0x%02X>", i);
		tokens[i] = bytes[i];
		kinds[i] = APR_PIECE_BYTE;
		scores[i] = 0;
	}
	for (i = 0; i < sizeof head / sizeof *head; i++) {
		tokens[256 + i] = head[i].text;
		kinds[256 + i] = head[i].kind;
		scores[256 + i] = head[i].score;
	}
}

static struct gguf_writer *spm_writer(void)
{
	static char bytes[256][8];
	const char *tokens[271];
	int32_t kinds[271];
	float scores[271];
	struct gguf_writer *w;

	spm_vocab(tokens, kinds, scores, bytes);
	w = tiny_with_vocab("llama", tokens, kinds, 271);
	gw_arr(w, "tokenizer.ggml.scores", GW_F32, scores, 271);
	gw_u32(w, "tokenizer.ggml.bos_token_id", 257);
	gw_u32(w, "tokenizer.ggml.eos_token_id", 258);
	return w;
}

static void spm_merges_by_score(void)
{
	struct gguf_writer *w = spm_writer();
	struct tok_fixture f;

	gw_bool(w, "tokenizer.ggml.add_space_prefix", false);
	tok_must_open(&f, w);
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "abc", 0), "265");           /* ab and bc tie: the left one, then abc */
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "bca", 0), "264 260");       /* bc, a: bca is no piece */
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "cabc", 0), "266 262");      /* ab, cab (above abc), c */
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, " a", 0), "267");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "  a", 0), "269 260");       /* the USER piece is cut out first */
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "\xe2\x96\x81\xe2\x96\x81" "a", 0), "259 267");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "\xe2\x96\x81\xe2\x96\x81" "b", 0), "268 261");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "a\xc3\xa9", 0), "260 195 169");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "<0x41>", 0), "60 48 120 52 49 62"); /* byte pieces are not text */
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "a", APR_TOK_ADD_BOS), "257 260");   /* SPM does so unless told otherwise */
	CU_ASSERT(tok_round_trips(&f, "abc  cab \xff\xe4", 12));
	tok_close(&f);
}

/* Scores above zero come before those below, the higher first. */
static void spm_scores_of_either_sign(void)
{
	struct gguf_writer *w = spm_writer();
	float scores[271] = {0};
	struct tok_fixture f;

	scores[263] = 1.0f;  /* ab */
	scores[264] = 2.0f;  /* bc */
	scores[265] = -5.0f; /* abc */
	scores[266] = -0.5f; /* cab */
	gw_drop(w, "tokenizer.ggml.scores");
	gw_arr(w, "tokenizer.ggml.scores", GW_F32, scores, 271);
	gw_bool(w, "tokenizer.ggml.add_space_prefix", false);
	tok_must_open(&f, w);
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "cabc", 0), "262 265"); /* bc, abc, c */
	tok_close(&f);
}

/* Where the file asks for a space in front (as SPM does unless told otherwise): at the start and after a special piece. */
static void spm_space_prefix(void)
{
	struct tok_fixture f;

	tok_must_open(&f, spm_writer());
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "a", 0), "267");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "", 0), "");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "b<s>a", APR_TOK_PARSE_SPECIAL), "259 261 257 267");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "b<s>a", 0), "259 261 60 115 62 260");
	tok_close(&f);
}

static void case04_unknown_pre_is_named(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct gguf_writer *w = apr_test_tiny_model(&spec);

	gw_drop(w, "tokenizer.ggml.pre");
	gw_str(w, "tokenizer.ggml.pre", "brand-new");
	tok_must_refuse(w, "brand-new");
	w = apr_test_tiny_model(&spec);
	gw_drop(w, "tokenizer.ggml.pre");
	tok_must_refuse(w, "tokenizer.ggml.pre");
	w = apr_test_tiny_model(&spec);
	gw_drop(w, "tokenizer.ggml.model");
	gw_str(w, "tokenizer.ggml.model", "rwkv");
	tok_must_refuse(w, "rwkv");
}

static void case26_no_bos(void)
{
	struct tiny_spec spec = {.n_layers = 1, .arch = "qwen2", .no_bos = true};
	struct gguf_writer *w;
	struct tok_fixture f;

	tok_must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_EQUAL(apr_tokenizer_bos(f.t), -1);
	CU_ASSERT_FALSE(apr_tokenizer_adds_bos(f.t));
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "th", APR_TOK_ADD_BOS), "256");
	tok_close(&f);
	w = apr_test_tiny_model(&spec);
	gw_drop(w, "tokenizer.ggml.add_bos_token");
	tok_must_open(&f, w);
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "th", APR_TOK_ADD_BOS), "256");
	tok_close(&f);
	w = apr_test_tiny_model(&spec);
	gw_drop(w, "tokenizer.ggml.add_bos_token");
	gw_bool(w, "tokenizer.ggml.add_bos_token", true);
	tok_must_refuse(w, "tokenizer.ggml.add_bos_token");
	spec.no_bos = false;
	tok_must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "th", APR_TOK_ADD_BOS), "318 256");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "th", 0), "256");
	tok_close(&f);
}

static void case26_end_ids(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct tok_fixture f;
	uint32_t n;

	gw_drop(w, "tokenizer.ggml.eos_token_id");
	gw_u32(w, "tokenizer.ggml.eos_token_id", 0);
	gw_u32(w, "tokenizer.ggml.eot_token_id", 319);
	tok_must_open(&f, w);
	apr_tokenizer_end_ids(f.t, &n);
	CU_ASSERT_EQUAL(n, 2);
	CU_ASSERT(apr_tokenizer_is_end(f.t, 0)); /* 0 is an id like others */
	CU_ASSERT(apr_tokenizer_is_end(f.t, 319));
	CU_ASSERT_FALSE(apr_tokenizer_is_end(f.t, 1));
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "!", 0), "0"); /* and the text of piece 0 is still text */
	tok_close(&f);
	if (tok_open_real(&f, SMOLLM2)) {
		CU_ASSERT(apr_tokenizer_is_end(f.t, 2) && apr_tokenizer_is_end(f.t, 0) && !apr_tokenizer_is_end(f.t, 1));
		tok_close(&f);
	}
	if (tok_open_real(&f, GEMMA3)) {
		CU_ASSERT(apr_tokenizer_is_end(f.t, 1) && apr_tokenizer_is_end(f.t, 106) && !apr_tokenizer_is_end(f.t, 105));
		tok_close(&f);
	}
}

/* Delimiters of kind `kind`: through the template one id each, from a user never; other pieces are as before. */
static void delimiters_of_kind(int32_t kind)
{
	static char bytes[256][8];
	static const char tmpl[] = "{% for m in messages %}{{ '<|turn|>' + m['role'] + m['content'] }}[END]{% endfor %}{{ messages[0] }}";
	const char *tokens[280];
	int32_t kinds[280];
	float scores[280];
	struct gguf_writer *w;
	struct tok_fixture f;
	uint32_t i;

	spm_vocab(tokens, kinds, scores, bytes);
	tokens[271] = "<|turn|>";
	tokens[272] = "[END]";
	tokens[273] = "[0]";
	tokens[274] = "<|im_end|>"; /* known, though this template does not write it */
	tokens[275] = "<other>";
	tokens[276] = "<|turn";     /* steps on the way to the delimiter */
	tokens[277] = "|>";
	tokens[278] = "<|";
	tokens[279] = "[0";
	for (i = 271; i < 280; i++) {
		kinds[i] = i < 276 ? kind : APR_PIECE_NORMAL;
		scores[i] = -1;
	}
	w = tiny_with_vocab("llama", tokens, kinds, 280);
	gw_arr(w, "tokenizer.ggml.scores", GW_F32, scores, 280);
	gw_bool(w, "tokenizer.ggml.add_space_prefix", false);
	gw_str(w, "tokenizer.chat_template", tmpl);
	tok_must_open(&f, w);
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "<|turn|>a[END]<|im_end|>", APR_TOK_PARSE_SPECIAL), "271 260 272 274");
	for (i = 271; i < 276; i++) {
		bool delimiter = i != 273 && i != 275;

		CU_ASSERT_EQUAL(apr_tokenizer_kind(f.t, i) == APR_PIECE_CONTROL, delimiter);
		CU_ASSERT_EQUAL(tok_gives_control(&f, tokens[i], strlen(tokens[i])), false);
		CU_ASSERT(tok_round_trips(&f, tokens[i], strlen(tokens[i])));
	}
	if (kind == APR_PIECE_USER) /* a USER piece that is no delimiter is still matched in any text */
		CU_ASSERT_STRING_EQUAL(tok_ids(&f, "a[0]<other>", 0), "260 273 275");
	CU_ASSERT(apr_tokenizer_is_end(f.t, 274));
	tok_close(&f);
}

static void case27_delimiters_stored_as_normal_or_user(void)
{
	delimiters_of_kind(APR_PIECE_NORMAL);
	delimiters_of_kind(APR_PIECE_USER);
}

/* Byte-level BPE whose merges lead to the delimiter: the last merge is not done. */
static void case27_merges_do_not_make_delimiters(void)
{
	static const char *const merges[] = {"t h", "x y", "< |", "<| >"};
	struct tiny_spec spec = {.n_layers = 1, .n_vocab = 262};
	static const char tmpl[] = "<|>{{ messages }}";
	static char text[262][4];
	const char *tokens[262];
	int32_t kinds[262];
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct tok_fixture f;
	uint32_t i;

	tok_must_open(&f, w);
	for (i = 0; i < 256; i++) { /* the byte alphabet, back from the pieces of the tiny model */
		size_t len;
		const uint8_t *b = (const uint8_t *)apr_piece(f.t, i, true, &len);
		bool itself = (*b >= 0x21 && *b <= 0x7e) || (*b >= 0xa1 && *b <= 0xac) || *b >= 0xae;
		unsigned c = itself ? *b : i - 188 + 256;

		snprintf(text[i], 4, c < 128 ? "%c" : "%c%c", c < 128 ? (int)c : (int)(0xc0 | c >> 6), (int)(0x80 | (c & 63)));
		tokens[i] = text[i];
		kinds[i] = APR_PIECE_NORMAL;
	}
	tok_close(&f);
	tokens[256] = "th";
	tokens[257] = "xy";
	tokens[258] = "<|";
	tokens[259] = "<|>";
	tokens[260] = "p";
	tokens[261] = "q";
	for (i = 256; i < 262; i++)
		kinds[i] = APR_PIECE_NORMAL;
	w = tiny_with_vocab("gpt2", tokens, kinds, 262);
	gw_str(w, "tokenizer.ggml.pre", "gpt-2");
	gw_arr_str(w, "tokenizer.ggml.merges", merges, 4);
	gw_str(w, "tokenizer.chat_template", tmpl);
	tok_must_open(&f, w);
	CU_ASSERT_EQUAL(apr_tokenizer_kind(f.t, 259), APR_PIECE_CONTROL);
	CU_ASSERT_FALSE(tok_gives_control(&f, "<|>", 3));
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "<|>", APR_TOK_PARSE_SPECIAL), "259");
	tok_close(&f);
}

/* ---- limits, pieces ---- */

static void max_ids_is_a_limit(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct tok_fixture f;
	uint32_t *ids, n;

	tok_must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_EQUAL(apr_tok_encode(f.t, "abc", 3, 0, 3, &ids, &n), 0);
	CU_ASSERT_EQUAL(n, 3);
	free(ids);
	CU_ASSERT_EQUAL(apr_tok_encode(f.t, "abc", 3, 0, 2, &ids, &n), -E2BIG);
	CU_ASSERT_EQUAL(apr_tok_encode(f.t, "", 0, 0, 2, &ids, &n), 0);
	CU_ASSERT_EQUAL(n, 0);
	free(ids);
	tok_close(&f);
}

static void pieces(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	uint32_t bad[1] = {320};
	struct tok_fixture f;
	size_t len;
	char *text;

	tok_must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_PTR_NULL(apr_piece(f.t, 320, true, &len));
	CU_ASSERT_PTR_NULL(apr_piece(f.t, UINT32_MAX, true, &len));
	CU_ASSERT(!memcmp(apr_piece(f.t, 256, false, &len), "th", 2) && len == 2);
	CU_ASSERT(apr_piece(f.t, 319, false, &len) && len == 0);
	CU_ASSERT(apr_piece(f.t, 319, true, &len) && len == 7);
	CU_ASSERT_EQUAL(apr_tok_decode(f.t, bad, 1, true, &text, &len), -EINVAL);
	CU_ASSERT_EQUAL(apr_tokenizer_size(f.t), 320);
	tok_close(&f);
}

/* ---- threads ---- */

struct crowd {
	const struct tok_fixture *f;
	const char *text;
	const uint32_t *want;
	uint32_t n;
	unsigned wrong;
};

static void *one_of_many(void *arg)
{
	struct crowd *c = arg;
	unsigned i;

	for (i = 0; i < 40; i++) {
		uint32_t *ids, n;

		if (apr_tok_encode(c->f->t, c->text, strlen(c->text), 0, 0, &ids, &n)) {
			c->wrong++;
			continue;
		}
		c->wrong += n != c->n || memcmp(ids, c->want, n * sizeof *ids) != 0;
		free(ids);
	}
	return NULL;
}

static void many_threads_at_once(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	static const char text[] = "the other thing is there, 12345 \xe4\xb8\xad\xe6\x96\x87 and    so on\n\n";
	struct crowd c[8];
	pthread_t thread[8];
	struct tok_fixture f;
	uint32_t *want, n;
	size_t i;

	tok_must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_EQUAL_FATAL(apr_tok_encode(f.t, text, sizeof text - 1, 0, 0, &want, &n), 0);
	for (i = 0; i < 8; i++) {
		c[i] = (struct crowd){&f, text, want, n, 0};
		CU_ASSERT_EQUAL_FATAL(pthread_create(&thread[i], NULL, one_of_many, &c[i]), 0);
	}
	for (i = 0; i < 8; i++) {
		pthread_join(thread[i], NULL);
		CU_ASSERT_EQUAL(c[i].wrong, 0);
	}
	free(want);
	tok_close(&f);
}

/* glibc keeps a finished thread's stack, with a few hundred bytes of heap, for the next one. */
#define T(f) {#f, f, 0}
#define THREADS(f) {#f, f, KEEPS_HEAP}
static const struct apr_test tests[] = {
	T(merges_gpt2), T(merges_smollm), T(merges_llama_bpe_whole_first), T(merges_qwen2), T(spm_merges_by_score),
	T(spm_scores_of_either_sign), T(spm_space_prefix), T(case04_unknown_pre_is_named), T(case26_no_bos), THREADS(case26_end_ids),
	T(case27_delimiters_stored_as_normal_or_user), T(case27_merges_do_not_make_delimiters), T(max_ids_is_a_limit),
	T(pieces), THREADS(many_threads_at_once),
};

TEST_MAIN("model/tokenizer", tests)
