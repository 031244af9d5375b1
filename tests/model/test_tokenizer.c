/* SPDX-License-Identifier: MIT */
/*
 * Tokenizers: merging against another engine on a small vocabulary, the CASES
 * 1 to 7, 26 and 27, round trips of random bytes, many threads at once.
 */
#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/harness.h"
#include "tests/support/gguf_writer.h"

struct fixture {
	struct apr_model *m;
	struct apr_tokenizer *t;
};

static void *room(size_t n)
{
	void *p = calloc(1, n);

	if (!p)
		abort();
	return p;
}

static const char *tmp_file(void)
{
	static char path[512];

	snprintf(path, sizeof path, "%s/model.gguf", apr_test_tmpdir());
	return path;
}

static int open_path(struct fixture *f, const char *path, char *err, size_t errlen)
{
	int rc;

	*f = (struct fixture){0};
	rc = apr_model_open(&f->m, path, err, errlen);
	if (!rc)
		rc = apr_tokenizer_new(&f->t, f->m, err, errlen);
	return rc;
}

static void close_model(struct fixture *f)
{
	apr_tokenizer_free(f->t);
	apr_model_close(f->m);
}

static bool open_real(struct fixture *f, const char *file)
{
	const char *path = apr_test_model(file);
	char err[256] = "";

	if (!path)
		return false;
	CU_ASSERT_EQUAL_FATAL(open_path(f, path, err, sizeof err), 0);
	return true;
}

/* Takes w. */
static int open_writer(struct fixture *f, struct gguf_writer *w, char *err, size_t errlen)
{
	CU_ASSERT_EQUAL(gw_write(w, tmp_file()), 0);
	gw_free(w);
	err[0] = 0;
	return open_path(f, tmp_file(), err, errlen);
}

static void must_open(struct fixture *f, struct gguf_writer *w)
{
	char err[256];
	int rc = open_writer(f, w, err, sizeof err);

	if (rc)
		printf("\n  %s\n", err);
	CU_ASSERT_EQUAL_FATAL(rc, 0);
}

/* Takes w: the file is refused and err holds `names`. */
static void must_refuse(struct gguf_writer *w, const char *names)
{
	struct fixture f;
	char err[256];

	CU_ASSERT(open_writer(&f, w, err, sizeof err) < 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, names));
	if (!strstr(err, names))
		printf("\n  \"%s\" does not name %s\n", err, names);
	close_model(&f);
}

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

/* ids as "1 2 3" */
static const char *encode(const struct fixture *f, const char *text, unsigned flags)
{
	static char out[8192];
	uint32_t *ids, n, i;
	size_t at = 0;
	int rc = apr_tok_encode(f->t, text, strlen(text), flags, 0, &ids, &n);

	if (rc) {
		snprintf(out, sizeof out, "error %d", rc);
		return out;
	}
	out[0] = 0;
	for (i = 0; i < n && at < sizeof out - 16; i++)
		at += (size_t)snprintf(out + at, sizeof out - at, i ? " %u" : "%u", ids[i]);
	free(ids);
	return out;
}

static bool round_trips(const struct fixture *f, const char *text, size_t len)
{
	uint32_t *ids, n, i;
	struct apr_detok d = {0};
	char *back, out[512];
	size_t back_len, at = 0, k, got;
	bool same;

	if (apr_tok_encode(f->t, text, len, 0, 0, &ids, &n))
		return false;
	same = !apr_tok_decode(f->t, ids, n, false, &back, &back_len);
	if (same) {
		same = back_len == len && !memcmp(back, text, len);
		free(back);
	}
	for (i = 0; i < n && same; i++) { /* streamed, it is the same text */
		const char *piece = apr_piece(f->t, ids[i], false, &k);

		same = k + 4 <= sizeof out;
		got = same ? apr_detok_push(&d, piece, k, out) : 0;
		same = same && at + got <= len && !memcmp(out, text + at, got);
		at += got;
	}
	got = apr_detok_flush(&d, out);
	same = same && at + got == len && !memcmp(out, text + at, got);
	free(ids);
	return same;
}

/* ---- merging, against another engine ---- */

static const char **strings(const json_t *a, uint32_t *n)
{
	const char **v = room(json_array_size(a) * sizeof *v);
	size_t i;

	*n = (uint32_t)json_array_size(a);
	for (i = 0; i < *n; i++)
		v[i] = json_string_value(json_array_get(a, i));
	return v;
}

static bool line_agrees(const struct fixture *f, const json_t *line)
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
	struct fixture f;
	int32_t *kinds;

	CU_ASSERT_PTR_NOT_NULL_FATAL(o);
	tokens = strings(json_object_get(o, "tokens"), &n_tokens);
	merges = strings(json_object_get(o, "merges"), &n_merges);
	kinds = room(n_tokens * sizeof *kinds);
	for (i = 0; i < n_tokens; i++)
		kinds[i] = APR_PIECE_NORMAL;
	w = tiny_with_vocab("gpt2", tokens, kinds, n_tokens);
	gw_str(w, "tokenizer.ggml.pre", pre);
	gw_arr_str(w, "tokenizer.ggml.merges", merges, n_merges);
	must_open(&f, w);
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
	close_model(&f);
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
	struct fixture f;

	gw_bool(w, "tokenizer.ggml.add_space_prefix", false);
	must_open(&f, w);
	CU_ASSERT_STRING_EQUAL(encode(&f, "abc", 0), "265");           /* ab and bc tie: the left one, then abc */
	CU_ASSERT_STRING_EQUAL(encode(&f, "bca", 0), "264 260");       /* bc, a: bca is no piece */
	CU_ASSERT_STRING_EQUAL(encode(&f, "cabc", 0), "266 262");      /* ab, cab (above abc), c */
	CU_ASSERT_STRING_EQUAL(encode(&f, " a", 0), "267");
	CU_ASSERT_STRING_EQUAL(encode(&f, "  a", 0), "269 260");       /* the USER piece is cut out first */
	CU_ASSERT_STRING_EQUAL(encode(&f, "\xe2\x96\x81\xe2\x96\x81" "a", 0), "259 267");
	CU_ASSERT_STRING_EQUAL(encode(&f, "a\xc3\xa9", 0), "260 195 169");
	CU_ASSERT_STRING_EQUAL(encode(&f, "<0x41>", 0), "60 48 120 52 49 62"); /* byte pieces are not text */
	CU_ASSERT_STRING_EQUAL(encode(&f, "a", APR_TOK_ADD_BOS), "257 260");   /* SPM does so unless told otherwise */
	CU_ASSERT(round_trips(&f, "abc  cab \xff\xe4", 12));
	close_model(&f);
}

/* Where the file asks for a space in front (as SPM does unless told otherwise): at the start and after a special piece. */
static void spm_space_prefix(void)
{
	struct fixture f;

	must_open(&f, spm_writer());
	CU_ASSERT_STRING_EQUAL(encode(&f, "a", 0), "267");
	CU_ASSERT_STRING_EQUAL(encode(&f, "", 0), "");
	CU_ASSERT_STRING_EQUAL(encode(&f, "b<s>a", APR_TOK_PARSE_SPECIAL), "259 261 257 267");
	CU_ASSERT_STRING_EQUAL(encode(&f, "b<s>a", 0), "259 261 60 115 62 260");
	close_model(&f);
}

/* ---- CASES ---- */

static double encode_seconds(const struct fixture *f, const char *text, size_t len)
{
	double best = 1e9;
	unsigned i;

	for (i = 0; i < 3; i++) {
		struct timespec a, b;
		uint32_t *ids, n;
		double t;

		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
		CU_ASSERT_EQUAL_FATAL(apr_tok_encode(f->t, text, len, 0, 0, &ids, &n), 0);
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
		free(ids);
		t = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
		best = t < best ? t : best;
	}
	return best;
}

/* Four times the text, 16k to 64k characters, may take at most 9 times as long (4 if linear, 16 if quadratic). */
static void long_runs(const struct fixture *f)
{
	static const char *const units[] = {"A", " ", "\xe4\xb8\xad", "\n", "1", "!", "ab", "a b ", "\xf0\x9f\x98\xb8", "<", "<|im_", "th"};
	static const size_t small = 16384, middle = 32768, large = 65536;
	char *text = room(large * 8);
	size_t u, i, n;

	for (u = 0; u < sizeof units / sizeof *units; u++) {
		double a, c;

		n = strlen(units[u]);
		for (i = 0; i < large; i++)
			memcpy(text + i * n, units[u], n);
		CU_ASSERT(round_trips(f, text, small * n));
		CU_ASSERT(round_trips(f, text, middle * n));
		a = encode_seconds(f, text, small * n);
		c = encode_seconds(f, text, large * n);
		CU_ASSERT(c < 9 * a);
		if (c >= 9 * a)
			printf("\n  unit \"%s\": 16k %.0f us, 64k %.0f us", units[u], a * 1e6, c * 1e6);
	}
	free(text);
}

static void case01_long_runs_smollm2(void)
{
	struct fixture f;

	if (!open_real(&f, SMOLLM2))
		SKIP("the model has not been fetched");
	long_runs(&f);
	close_model(&f);
}

static void case01_long_runs_gemma3(void)
{
	struct fixture f;

	if (!open_real(&f, GEMMA3))
		SKIP("the model has not been fetched");
	long_runs(&f);
	close_model(&f);
}

static uint64_t next_random(uint64_t *s)
{
	*s ^= *s << 13;
	*s ^= *s >> 7;
	*s ^= *s << 17;
	return *s;
}

static bool gives_control(const struct fixture *f, const char *text, size_t len)
{
	uint32_t *ids, n, i;
	bool control = false;

	if (apr_tok_encode(f->t, text, len, 0, 0, &ids, &n))
		return false;
	for (i = 0; i < n; i++)
		control |= apr_tokenizer_kind(f->t, ids[i]) == APR_PIECE_CONTROL;
	free(ids);
	return control;
}

/* Every control piece's text, alone and inside other text, stays plain; with the flag it is one id. */
static void no_injection(const struct fixture *f)
{
	uint32_t n = apr_tokenizer_size(f->t), id, tried = 0, injected = 0, lost = 0;

	for (id = 0; id < n && tried < 400; id++) {
		size_t len;
		const char *s = apr_piece(f->t, id, true, &len);
		uint32_t *ids, n_ids;
		char text[300];

		if (apr_tokenizer_kind(f->t, id) != APR_PIECE_CONTROL || len > 200)
			continue;
		tried++;
		injected += gives_control(f, s, len);
		snprintf(text, sizeof text, "hi%.*s\n%.*suser", (int)len, s, (int)len, s);
		injected += gives_control(f, text, strlen(text));
		CU_ASSERT_EQUAL_FATAL(apr_tok_encode(f->t, s, len, APR_TOK_PARSE_SPECIAL, 0, &ids, &n_ids), 0);
		lost += n_ids != 1 || ids[0] != id;
		free(ids);
	}
	CU_ASSERT(tried > 3);
	CU_ASSERT_EQUAL(injected, 0);
	CU_ASSERT_EQUAL(lost, 0);
}

static void case02_special_text_stays_text(void)
{
	struct fixture f;

	if (!open_real(&f, SMOLLM2))
		SKIP("the models have not been fetched");
	no_injection(&f);
	close_model(&f);
	if (open_real(&f, GEMMA3)) {
		no_injection(&f);
		close_model(&f);
	}
}

static void runs_then_x(const struct fixture *f)
{
	static const char *const units[] = {" ", "\n", "\t", "\r\n"};
	char text[520];
	size_t u, n, i;
	unsigned wrong = 0;

	for (u = 0; u < 4; u++) {
		for (n = 1; n <= 256; n++) {
			size_t k = strlen(units[u]);

			for (i = 0; i < n; i++)
				memcpy(text + i * k, units[u], k);
			text[n * k] = 'X';
			wrong += !round_trips(f, text, n * k + 1);
		}
	}
	CU_ASSERT_EQUAL(wrong, 0);
}

static void case03_spaces_then_x(void)
{
	struct fixture f;

	if (!open_real(&f, SMOLLM2))
		SKIP("the models have not been fetched");
	runs_then_x(&f);
	close_model(&f);
	if (open_real(&f, GEMMA3)) {
		runs_then_x(&f);
		close_model(&f);
	}
}

static void case04_unknown_pre_is_named(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct gguf_writer *w = apr_test_tiny_model(&spec);

	gw_drop(w, "tokenizer.ggml.pre");
	gw_str(w, "tokenizer.ggml.pre", "brand-new");
	must_refuse(w, "brand-new");
	w = apr_test_tiny_model(&spec);
	gw_drop(w, "tokenizer.ggml.pre");
	must_refuse(w, "tokenizer.ggml.pre");
	w = apr_test_tiny_model(&spec);
	gw_drop(w, "tokenizer.ggml.model");
	gw_str(w, "tokenizer.ggml.model", "rwkv");
	must_refuse(w, "rwkv");
}

static void case05_text_after_an_added_token(void)
{
	struct fixture f;

	if (!open_real(&f, SMOLLM2))
		SKIP("the model has not been fetched");
	CU_ASSERT_STRING_EQUAL(encode(&f, "<|im_start|>user\nhi<|im_end|>\n", APR_TOK_PARSE_SPECIAL), "1 4093 198 6004 2 198");
	CU_ASSERT_STRING_EQUAL(encode(&f, "user", 0), "4093");
	close_model(&f);
}

static const struct {
	const char *s;
	size_t len;
} broken[] = {
	{"\xe2\x80", 2}, {"\xff", 1}, {"\xc0\x80", 2}, {"\xed\xa0\x80", 3}, {"\xf0\x9f\x98", 3}, {"a\0b", 3}, {"\0", 1},
	{"\x80", 1}, {"\xf4\x90\x80\x80", 4}, {"x\xe4\xb8", 3}, {"\xe4 \xb8\xad", 4},
};

static void case06_invalid_utf8_and_nul(void)
{
	struct fixture f;
	uint32_t *ids, n;
	size_t i;
	int rc;

	if (open_real(&f, GEMMA3)) {
		for (i = 0; i < sizeof broken / sizeof *broken; i++)
			CU_ASSERT(round_trips(&f, broken[i].s, broken[i].len));
		close_model(&f);
	}
	if (!open_real(&f, SMOLLM2))
		SKIP("the model has not been fetched");
	for (i = 0; i < sizeof broken / sizeof *broken; i++) { /* its vocabulary lacks FF, C0 and others */
		rc = apr_tok_encode(f.t, broken[i].s, broken[i].len, 0, 0, &ids, &n);
		CU_ASSERT(rc == 0 || rc == -EILSEQ);
		if (!rc)
			free(ids);
		if (rc == 0)
			CU_ASSERT(round_trips(&f, broken[i].s, broken[i].len));
	}
	CU_ASSERT_EQUAL(apr_tok_encode(f.t, "\xff", 1, 0, 0, &ids, &n), -EILSEQ);
	CU_ASSERT(round_trips(&f, "a\0b", 3));
	close_model(&f);
}

/* Random bytes: all of them where the vocabulary is whole, else those it can write. */
static void random_bytes(const struct fixture *f, bool spm)
{
	uint64_t s = 20260701;
	bool can[256];
	char text[64];
	unsigned i, k, wrong = 0;

	apr_tokenizer_bytes(f->t, can);
	for (i = 0; i < 20000; i++) {
		size_t len = next_random(&s) % sizeof text;

		for (k = 0; k < len; k++) {
			do {
				text[k] = (char)(next_random(&s) >> 20);
			} while (!can[(uint8_t)text[k]]);
		}
		if (spm && memmem(text, len, "\xe2\x96\x81", 3))
			continue;
		wrong += !round_trips(f, text, len);
	}
	CU_ASSERT_EQUAL(wrong, 0);
}

static void random_bytes_round_trip(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct fixture f;
	bool can[256];
	unsigned i, n = 0;

	must_open(&f, apr_test_tiny_model(&spec)); /* all 256 bytes */
	apr_tokenizer_bytes(f.t, can);
	for (i = 0; i < 256; i++)
		n += can[i];
	CU_ASSERT_EQUAL(n, 256);
	random_bytes(&f, false);
	close_model(&f);
	if (!open_real(&f, SMOLLM2))
		SKIP("the models have not been fetched");
	random_bytes(&f, false);
	close_model(&f);
	if (open_real(&f, GEMMA3)) {
		random_bytes(&f, true);
		close_model(&f);
	}
}

static bool whole_utf8(const char *p, size_t n)
{
	json_t *s = json_stringn(p, n); /* jansson takes valid UTF-8 only */

	json_decref(s);
	return s != NULL;
}

/* Valid text cut at every pair of places: every chunk is whole UTF-8 and the chunks give the text. */
static void case07_chunks_are_whole_utf8(void)
{
	static const char text[] = "a\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\xb8" "b\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9";
	size_t len = sizeof text - 1, i, j, k;
	unsigned wrong = 0;

	for (i = 0; i <= len; i++) {
		for (j = i; j <= len; j++) {
			size_t cut[4] = {0, i, j, len}, at = 0;
			struct apr_detok d = {0};
			char out[64];

			for (k = 0; k < 3; k++) {
				size_t n = apr_detok_push(&d, text + cut[k], cut[k + 1] - cut[k], out);

				wrong += !whole_utf8(out, n) || memcmp(out, text + at, n) != 0;
				at += n;
			}
			wrong += d.n_held != 0 || at != len;
		}
	}
	CU_ASSERT_EQUAL(wrong, 0);
}

/* What cannot become whole comes out as it is, as soon as that is known; the rest at the flush. */
static void case07_invalid_bytes_come_out(void)
{
	struct apr_detok d = {0};
	char out[16];

	CU_ASSERT_EQUAL(apr_detok_push(&d, "\xf0\x9f\x98", 3, out), 0);
	CU_ASSERT_EQUAL(apr_detok_push(&d, "\xb8", 1, out), 4);
	CU_ASSERT_EQUAL(memcmp(out, "\xf0\x9f\x98\xb8", 4), 0);
	CU_ASSERT_EQUAL(apr_detok_push(&d, "\xe2\x80", 2, out), 0);
	CU_ASSERT_EQUAL(apr_detok_push(&d, "x", 1, out), 3);
	CU_ASSERT_EQUAL(apr_detok_push(&d, "\xff", 1, out), 1);
	CU_ASSERT_EQUAL(apr_detok_push(&d, "\xc0", 1, out), 1);       /* never a lead byte */
	CU_ASSERT_EQUAL(apr_detok_push(&d, "\xed\xa0", 2, out), 2);   /* a surrogate: cannot become valid */
	CU_ASSERT_EQUAL(apr_detok_push(&d, "\xf4\x90", 2, out), 2);   /* above U+10FFFF */
	CU_ASSERT_EQUAL(apr_detok_push(&d, "\x80\x80", 2, out), 2);
	CU_ASSERT_EQUAL(apr_detok_push(&d, "a\xf0\x9f", 3, out), 1);
	CU_ASSERT_EQUAL(apr_detok_push(&d, "", 0, out), 0);
	CU_ASSERT_EQUAL(apr_detok_flush(&d, out), 2);
	CU_ASSERT_EQUAL(memcmp(out, "\xf0\x9f", 2), 0);
	CU_ASSERT_EQUAL(apr_detok_flush(&d, out), 0);
}

static void case26_no_bos(void)
{
	struct tiny_spec spec = {.n_layers = 1, .arch = "qwen2", .no_bos = true};
	struct gguf_writer *w;
	struct fixture f;

	must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_EQUAL(apr_tokenizer_bos(f.t), -1);
	CU_ASSERT_FALSE(apr_tokenizer_adds_bos(f.t));
	CU_ASSERT_STRING_EQUAL(encode(&f, "th", APR_TOK_ADD_BOS), "256");
	close_model(&f);
	w = apr_test_tiny_model(&spec);
	gw_drop(w, "tokenizer.ggml.add_bos_token");
	must_open(&f, w);
	CU_ASSERT_STRING_EQUAL(encode(&f, "th", APR_TOK_ADD_BOS), "256");
	close_model(&f);
	w = apr_test_tiny_model(&spec);
	gw_drop(w, "tokenizer.ggml.add_bos_token");
	gw_bool(w, "tokenizer.ggml.add_bos_token", true);
	must_refuse(w, "tokenizer.ggml.add_bos_token");
	spec.no_bos = false;
	must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_STRING_EQUAL(encode(&f, "th", APR_TOK_ADD_BOS), "318 256");
	CU_ASSERT_STRING_EQUAL(encode(&f, "th", 0), "256");
	close_model(&f);
}

static void case26_end_ids(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct fixture f;
	uint32_t n;

	gw_drop(w, "tokenizer.ggml.eos_token_id");
	gw_u32(w, "tokenizer.ggml.eos_token_id", 0);
	gw_u32(w, "tokenizer.ggml.eot_token_id", 319);
	must_open(&f, w);
	apr_tokenizer_end_ids(f.t, &n);
	CU_ASSERT_EQUAL(n, 2);
	CU_ASSERT(apr_tokenizer_is_end(f.t, 0)); /* 0 is an id like others */
	CU_ASSERT(apr_tokenizer_is_end(f.t, 319));
	CU_ASSERT_FALSE(apr_tokenizer_is_end(f.t, 1));
	CU_ASSERT_STRING_EQUAL(encode(&f, "!", 0), "0"); /* and the text of piece 0 is still text */
	close_model(&f);
	if (open_real(&f, SMOLLM2)) {
		CU_ASSERT(apr_tokenizer_is_end(f.t, 2) && apr_tokenizer_is_end(f.t, 0) && !apr_tokenizer_is_end(f.t, 1));
		close_model(&f);
	}
	if (open_real(&f, GEMMA3)) {
		CU_ASSERT(apr_tokenizer_is_end(f.t, 1) && apr_tokenizer_is_end(f.t, 106) && !apr_tokenizer_is_end(f.t, 105));
		close_model(&f);
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
	struct fixture f;
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
	must_open(&f, w);
	CU_ASSERT_STRING_EQUAL(encode(&f, "<|turn|>a[END]<|im_end|>", APR_TOK_PARSE_SPECIAL), "271 260 272 274");
	for (i = 271; i < 276; i++) {
		bool delimiter = i != 273 && i != 275;

		CU_ASSERT_EQUAL(apr_tokenizer_kind(f.t, i) == APR_PIECE_CONTROL, delimiter);
		CU_ASSERT_EQUAL(gives_control(&f, tokens[i], strlen(tokens[i])), false);
		CU_ASSERT(round_trips(&f, tokens[i], strlen(tokens[i])));
	}
	if (kind == APR_PIECE_USER) /* a USER piece that is no delimiter is still matched in any text */
		CU_ASSERT_STRING_EQUAL(encode(&f, "a[0]<other>", 0), "260 273 275");
	CU_ASSERT(apr_tokenizer_is_end(f.t, 274));
	close_model(&f);
}

static void case27_delimiters_stored_as_normal_or_user(void)
{
	delimiters_of_kind(APR_PIECE_NORMAL);
	delimiters_of_kind(APR_PIECE_USER);
}

/* Byte-level BPE whose merges lead to the delimiter: the last merge is not done. */
static void case27_merges_do_not_make_delimiters(void)
{
	static const char *const merges[] = {"t h", "x y", "< xy", "<xy >"};
	struct tiny_spec spec = {.n_layers = 1, .n_vocab = 262};
	static const char tmpl[] = "<xy>{{ messages }}";
	static char text[262][4];
	const char *tokens[262];
	int32_t kinds[262];
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct fixture f;
	uint32_t i;

	must_open(&f, w);
	for (i = 0; i < 256; i++) { /* the byte alphabet, back from the pieces of the tiny model */
		size_t len;
		const uint8_t *b = (const uint8_t *)apr_piece(f.t, i, true, &len);
		bool itself = (*b >= 0x21 && *b <= 0x7e) || (*b >= 0xa1 && *b <= 0xac) || *b >= 0xae;
		unsigned c = itself ? *b : i - 188 + 256;

		snprintf(text[i], 4, c < 128 ? "%c" : "%c%c", c < 128 ? (int)c : (int)(0xc0 | c >> 6), (int)(0x80 | (c & 63)));
		tokens[i] = text[i];
		kinds[i] = APR_PIECE_NORMAL;
	}
	close_model(&f);
	tokens[256] = "th";
	tokens[257] = "xy";
	tokens[258] = "<xy";
	tokens[259] = "<xy>";
	tokens[260] = "p";
	tokens[261] = "q";
	for (i = 256; i < 262; i++)
		kinds[i] = APR_PIECE_NORMAL;
	w = tiny_with_vocab("gpt2", tokens, kinds, 262);
	gw_str(w, "tokenizer.ggml.pre", "gpt-2");
	gw_arr_str(w, "tokenizer.ggml.merges", merges, 4);
	gw_str(w, "tokenizer.chat_template", tmpl);
	must_open(&f, w);
	CU_ASSERT_EQUAL(apr_tokenizer_kind(f.t, 259), APR_PIECE_CONTROL);
	CU_ASSERT_FALSE(gives_control(&f, "<xy>", 4));
	CU_ASSERT_STRING_EQUAL(encode(&f, "<xy>", APR_TOK_PARSE_SPECIAL), "259");
	close_model(&f);
}

/* ---- limits, pieces ---- */

static void max_ids_is_a_limit(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct fixture f;
	uint32_t *ids, n;

	must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_EQUAL(apr_tok_encode(f.t, "abc", 3, 0, 3, &ids, &n), 0);
	CU_ASSERT_EQUAL(n, 3);
	free(ids);
	CU_ASSERT_EQUAL(apr_tok_encode(f.t, "abc", 3, 0, 2, &ids, &n), -E2BIG);
	CU_ASSERT_EQUAL(apr_tok_encode(f.t, "", 0, 0, 2, &ids, &n), 0);
	CU_ASSERT_EQUAL(n, 0);
	free(ids);
	close_model(&f);
}

static void pieces(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	uint32_t bad[1] = {320};
	struct fixture f;
	size_t len;
	char *text;

	must_open(&f, apr_test_tiny_model(&spec));
	CU_ASSERT_PTR_NULL(apr_piece(f.t, 320, true, &len));
	CU_ASSERT_PTR_NULL(apr_piece(f.t, UINT32_MAX, true, &len));
	CU_ASSERT(!memcmp(apr_piece(f.t, 256, false, &len), "th", 2) && len == 2);
	CU_ASSERT(apr_piece(f.t, 319, false, &len) && len == 0);
	CU_ASSERT(apr_piece(f.t, 319, true, &len) && len == 7);
	CU_ASSERT_EQUAL(apr_tok_decode(f.t, bad, 1, true, &text, &len), -EINVAL);
	CU_ASSERT_EQUAL(apr_tokenizer_size(f.t), 320);
	close_model(&f);
}

/* ---- threads ---- */

struct crowd {
	const struct fixture *f;
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
	struct fixture f;
	uint32_t *want, n;
	size_t i;

	must_open(&f, apr_test_tiny_model(&spec));
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
	close_model(&f);
}

/* glibc keeps a finished thread's stack, with a few hundred bytes of heap, for the next one. */
#define T(f) {#f, f, 0}
#define THREADS(f) {#f, f, KEEPS_HEAP}
static const struct apr_test tests[] = {
	T(merges_gpt2), T(merges_smollm), T(merges_llama_bpe_whole_first), T(merges_qwen2), T(spm_merges_by_score),
	T(spm_space_prefix), THREADS(case01_long_runs_smollm2), THREADS(case01_long_runs_gemma3),
	THREADS(case02_special_text_stays_text), THREADS(case03_spaces_then_x), T(case04_unknown_pre_is_named),
	THREADS(case05_text_after_an_added_token), THREADS(case06_invalid_utf8_and_nul), THREADS(random_bytes_round_trip),
	T(case07_chunks_are_whole_utf8), T(case07_invalid_bytes_come_out), T(case26_no_bos), THREADS(case26_end_ids),
	T(case27_delimiters_stored_as_normal_or_user), T(case27_merges_do_not_make_delimiters), T(max_ids_is_a_limit),
	T(pieces), THREADS(many_threads_at_once),
};

TEST_MAIN("model/tokenizer", tests)
