/* SPDX-License-Identifier: MIT */
/*
 * Difficult text through the tokenizers of the real models: CASES 1, 2, 3, 5, 6
 * and 7, and random bytes.
 */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/harness.h"
#include "tests/support/tok_fixture.h"

/* ---- CASES ---- */

static double encode_seconds(const struct tok_fixture *f, const char *text, size_t len)
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
static void long_runs(const struct tok_fixture *f)
{
	static const char *const units[] = {"A", " ", "\xe4\xb8\xad", "\n", "1", "!", "ab", "a b ", "\xf0\x9f\x98\xb8", "<", "<|im_", "th"};
	static const size_t small = 16384, middle = 32768, large = 65536;
	char *text = tok_room(large * 8);
	size_t u, i, n;

	for (u = 0; u < sizeof units / sizeof *units; u++) {
		double a, c;

		n = strlen(units[u]);
		for (i = 0; i < large; i++)
			memcpy(text + i * n, units[u], n);
		CU_ASSERT(tok_round_trips(f, text, small * n));
		CU_ASSERT(tok_round_trips(f, text, middle * n));
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
	struct tok_fixture f;

	if (!tok_open_real(&f, SMOLLM2))
		SKIP("the model has not been fetched");
	long_runs(&f);
	tok_close(&f);
}

static void case01_long_runs_gemma3(void)
{
	struct tok_fixture f;

	if (!tok_open_real(&f, GEMMA3))
		SKIP("the model has not been fetched");
	long_runs(&f);
	tok_close(&f);
}

static uint64_t next_random(uint64_t *s)
{
	*s ^= *s << 13;
	*s ^= *s >> 7;
	*s ^= *s << 17;
	return *s;
}

/* Every control piece's text, alone and inside other text, stays plain; with the flag it is one id. */
static void no_injection(const struct tok_fixture *f)
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
		injected += tok_gives_control(f, s, len);
		snprintf(text, sizeof text, "hi%.*s\n%.*suser", (int)len, s, (int)len, s);
		injected += tok_gives_control(f, text, strlen(text));
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
	struct tok_fixture f;

	if (!tok_open_real(&f, SMOLLM2))
		SKIP("the models have not been fetched");
	no_injection(&f);
	tok_close(&f);
	if (tok_open_real(&f, GEMMA3)) {
		no_injection(&f);
		tok_close(&f);
	}
}

static void runs_then_x(const struct tok_fixture *f)
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
			wrong += !tok_round_trips(f, text, n * k + 1);
		}
	}
	CU_ASSERT_EQUAL(wrong, 0);
}

static void case03_spaces_then_x(void)
{
	struct tok_fixture f;

	if (!tok_open_real(&f, SMOLLM2))
		SKIP("the models have not been fetched");
	runs_then_x(&f);
	tok_close(&f);
	if (tok_open_real(&f, GEMMA3)) {
		runs_then_x(&f);
		tok_close(&f);
	}
}

static void case05_text_after_an_added_token(void)
{
	struct tok_fixture f;

	if (!tok_open_real(&f, SMOLLM2))
		SKIP("the model has not been fetched");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "<|im_start|>user\nhi<|im_end|>\n", APR_TOK_PARSE_SPECIAL), "1 4093 198 6004 2 198");
	CU_ASSERT_STRING_EQUAL(tok_ids(&f, "user", 0), "4093");
	tok_close(&f);
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
	struct tok_fixture f;
	uint32_t *ids, n;
	size_t i;
	int rc;

	if (tok_open_real(&f, GEMMA3)) {
		for (i = 0; i < sizeof broken / sizeof *broken; i++)
			CU_ASSERT(tok_round_trips(&f, broken[i].s, broken[i].len));
		tok_close(&f);
	}
	if (!tok_open_real(&f, SMOLLM2))
		SKIP("the model has not been fetched");
	for (i = 0; i < sizeof broken / sizeof *broken; i++) { /* its vocabulary lacks FF, C0 and others */
		rc = apr_tok_encode(f.t, broken[i].s, broken[i].len, 0, 0, &ids, &n);
		CU_ASSERT(rc == 0 || rc == -EILSEQ);
		if (!rc)
			free(ids);
		if (rc == 0)
			CU_ASSERT(tok_round_trips(&f, broken[i].s, broken[i].len));
	}
	CU_ASSERT_EQUAL(apr_tok_encode(f.t, "\xff", 1, 0, 0, &ids, &n), -EILSEQ);
	CU_ASSERT(tok_round_trips(&f, "a\0b", 3));
	tok_close(&f);
}

/* Random bytes: all of them where the vocabulary is whole, else those it can write. */
static void random_bytes(const struct tok_fixture *f, bool spm)
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
		wrong += !tok_round_trips(f, text, len);
	}
	CU_ASSERT_EQUAL(wrong, 0);
}

static void random_bytes_round_trip(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct tok_fixture f;
	bool can[256];
	unsigned i, n = 0;

	tok_must_open(&f, apr_test_tiny_model(&spec)); /* all 256 bytes */
	apr_tokenizer_bytes(f.t, can);
	for (i = 0; i < 256; i++)
		n += can[i];
	CU_ASSERT_EQUAL(n, 256);
	random_bytes(&f, false);
	tok_close(&f);
	if (!tok_open_real(&f, SMOLLM2))
		SKIP("the models have not been fetched");
	random_bytes(&f, false);
	tok_close(&f);
	if (tok_open_real(&f, GEMMA3)) {
		random_bytes(&f, true);
		tok_close(&f);
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

/* glibc keeps a finished thread's stack, with a few hundred bytes of heap, for the next one. */
#define T(f) {#f, f, 0}
#define THREADS(f) {#f, f, KEEPS_HEAP}
static const struct apr_test tests[] = {
	THREADS(case01_long_runs_smollm2), THREADS(case01_long_runs_gemma3), THREADS(case02_special_text_stays_text),
	THREADS(case03_spaces_then_x), THREADS(case05_text_after_an_added_token),
	THREADS(case06_invalid_utf8_and_nul), THREADS(random_bytes_round_trip), T(case07_chunks_are_whole_utf8),
	T(case07_invalid_bytes_come_out),
};

TEST_MAIN("model/text", tests)
