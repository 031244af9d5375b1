/* SPDX-License-Identifier: MIT */
/* What of an answer's text goes out when: characters, stops, cuts. */
#include "daemon/stream.h"
#include "tests/harness.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct got {
	char text[8192];
	size_t len;
	char chunks[4096]; /* each chunk's text, parted by | */
	unsigned ids[512], n_ids, pieces;
	int bad; /* chunks that are not well-formed */
};

static int well_formed(const uint8_t *p, size_t n)
{
	for (size_t i = 0; i < n;) {
		int len = p[i] < 0x80 ? 1 : p[i] < 0xe0 ? 2 : p[i] < 0xf0 ? 3 : 4;
		if ((p[i] >= 0x80 && p[i] < 0xc2) || p[i] > 0xf4 || i + (size_t)len > n)
			return 0;
		for (int k = 1; k < len; k++)
			if ((p[i + (size_t)k] & 0xc0) != 0x80)
				return 0;
		i += (size_t)len;
	}
	return 1;
}

static void drain(struct stream *t, struct got *g)
{
	struct stream_out o;
	uint8_t text[512];

	while (stream_peek(t, &o, text, sizeof(text)) == 1) {
		g->bad += !well_formed(text, o.len);
		memcpy(g->text + g->len, text, o.len);
		g->len += o.len;
		snprintf(g->chunks + strlen(g->chunks), sizeof(g->chunks) - strlen(g->chunks), "%.*s|", (int)o.len,
			 (char *)text);
		if (o.token)
			g->ids[g->n_ids++] = o.id;
		else
			g->pieces++;
		stream_take(t);
	}
}

/* Pieces parted by 0x01; ids are their order. Returns 1 where a stop matched. */
static int feed(const char *const *stops, const char *pieces, struct got *g)
{
	struct stop s[8];
	struct stream t;
	uint32_t n = 0, id = 0;
	int stopped = 0;

	memset(g, 0, sizeof(*g));
	while (stops && stops[n]) {
		s[n] = (struct stop){ (const uint8_t *)stops[n], (uint32_t)strlen(stops[n]) };
		n++;
	}
	stream_init(&t, s, n);
	while (*pieces && !stopped) {
		size_t len = strcspn(pieces, "\1");
		stopped = stream_push(&t, id++, -1.0f, pieces, len, NULL, 0);
		drain(&t, g);
		pieces += len + (pieces[len] == 1);
	}
	stream_end(&t);
	drain(&t, g);
	CU_ASSERT_TRUE(stream_empty(&t));
	stream_free(&t);
	CU_ASSERT_EQUAL(g->bad, 0);
	g->text[g->len] = 0;
	return stopped;
}

static void case07_split_character(void)
{
	struct got g;

	feed(NULL, "a\1\xF0\x9F\x98\1\xB8\1" "b", &g);
	CU_ASSERT_STRING_EQUAL(g.chunks, "a||\xF0\x9F\x98\xB8|b|");
	CU_ASSERT_EQUAL(g.n_ids, 4);
	/* a chain in which no token ends on a boundary */
	feed(NULL, "\xC3\1\xA9\xC3\1\xA8", &g);
	CU_ASSERT_STRING_EQUAL(g.text, "\xC3\xA9\xC3\xA8");
	CU_ASSERT_EQUAL(g.n_ids, 3);
}

static void case07_held_until_whole(void)
{
	struct stream t;
	struct got g = { 0 };

	stream_init(&t, NULL, 0);
	stream_push(&t, 1, 0, "x\xF0\x9F", 3, NULL, 0);
	drain(&t, &g);
	CU_ASSERT_EQUAL(g.n_ids, 0); /* its id would tell half a character */
	stream_push(&t, 2, 0, "\x98\xB8", 2, NULL, 0);
	drain(&t, &g);
	CU_ASSERT_EQUAL(g.n_ids, 2);
	CU_ASSERT_STRING_EQUAL(g.chunks, "x|\xF0\x9F\x98\xB8|");
	stream_free(&t);
}

static void case07_end_inside_a_character(void)
{
	struct got g;

	feed(NULL, "ok\1\xF0\x9F\1\x98", &g);
	CU_ASSERT_STRING_EQUAL(g.text, "ok\xEF\xBF\xBD"); /* the stated rule: one U+FFFD, as a piece */
	CU_ASSERT_EQUAL(g.n_ids, 3);
	CU_ASSERT_EQUAL(g.pieces, 1);
}

static void case07_invalid_bytes(void)
{
	struct got g;

	feed(NULL, "\xFF\1" "a\1\xC0\x80\1\xED\xA0\x80\1\xF0\x9F\1" "b", &g);
	CU_ASSERT_STRING_EQUAL(g.text, "\xEF\xBF\xBD" "a" "\xEF\xBF\xBD\xEF\xBF\xBD"
			       "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD" "\xEF\xBF\xBD" "b");
	CU_ASSERT_EQUAL(g.n_ids, 6);
}

static void case08_stop_straddles(void)
{
	const char *stops[] = { "STOP", NULL };
	struct got g;

	CU_ASSERT_EQUAL(feed(stops, "hello ST\1OP more", &g), 1);
	CU_ASSERT_STRING_EQUAL(g.text, "hello ");
	CU_ASSERT_EQUAL(g.n_ids, 1); /* the one that straddles; the one that lies inside is not delivered */
	CU_ASSERT_EQUAL(feed(stops, "ab\1S\1T\1O\1P", &g), 1);
	CU_ASSERT_STRING_EQUAL(g.text, "ab");
	CU_ASSERT_EQUAL(g.n_ids, 1);
}

static void case08_held_text_comes_out(void)
{
	const char *stops[] = { "STOP", NULL };
	struct got g;

	CU_ASSERT_EQUAL(feed(stops, "x ST\1O", &g), 0);
	CU_ASSERT_STRING_EQUAL(g.text, "x STO");
	CU_ASSERT_EQUAL(g.n_ids, 2);
	CU_ASSERT_EQUAL(feed(stops, "ST\1ART", &g), 0);
	CU_ASSERT_STRING_EQUAL(g.text, "START");
}

static void case08_nothing_leaks_early(void)
{
	const char *stops[] = { "\n\nUser:", NULL };
	struct stop s = { (const uint8_t *)stops[0], 7 };
	struct stream t;
	struct got g = { 0 };

	stream_init(&t, &s, 1);
	stream_push(&t, 0, 0, "yes\n", 4, NULL, 0);
	drain(&t, &g);
	CU_ASSERT_EQUAL(g.len, 0);
	CU_ASSERT_EQUAL(g.n_ids, 0);
	stream_push(&t, 1, 0, "no", 2, NULL, 0);
	drain(&t, &g);
	CU_ASSERT_EQUAL(g.len, 6);
	CU_ASSERT_EQUAL(g.n_ids, 2);
	stream_free(&t);
}

static void case08_prefix_of_the_other(void)
{
	const char *stops[] = { "ab", "abc", NULL }, *other[] = { "abc", "ab", NULL };
	struct got g;

	CU_ASSERT_EQUAL(feed(stops, "xabc", &g), 1);
	CU_ASSERT_STRING_EQUAL(g.text, "x");
	CU_ASSERT_EQUAL(feed(other, "x\1a\1bc", &g), 1);
	CU_ASSERT_STRING_EQUAL(g.text, "x");
}

static void case08_cut_does_not_depend_on_tokens(void)
{
	const char *stops[] = { "abcd", "c", NULL };
	struct got one, many;

	feed(stops, "zabcdz", &one);
	feed(stops, "z\1a\1b\1c\1d\1z", &many);
	CU_ASSERT_STRING_EQUAL(one.text, many.text);
	CU_ASSERT_STRING_EQUAL(one.text, "zab"); /* "c" is complete first */
}

static void case08_repeating_stop(void)
{
	const char *stops[] = { "aab", NULL };
	struct got g;

	CU_ASSERT_EQUAL(feed(stops, "a\1a\1a\1b", &g), 1);
	CU_ASSERT_STRING_EQUAL(g.text, "a");
	CU_ASSERT_EQUAL(feed(stops, "aaaaaaaa", &g), 0);
	CU_ASSERT_STRING_EQUAL(g.text, "aaaaaaaa");
}

static void tokens_without_text_keep_their_order(void)
{
	struct stream t;
	struct got g = { 0 };

	stream_init(&t, NULL, 0);
	stream_push(&t, 5, 0, "", 0, NULL, 0);
	stream_push(&t, 6, 0, "a", 1, NULL, 0);
	stream_push(&t, 7, 0, NULL, 0, NULL, 0);
	drain(&t, &g);
	CU_ASSERT_EQUAL(g.n_ids, 3);
	CU_ASSERT_EQUAL(g.ids[0], 5);
	CU_ASSERT_EQUAL(g.ids[2], 7);
	stream_free(&t);
}

/* Random cuts and stops against a search in the whole text. */
static void random_cuts_against_whole_text(void)
{
	uint32_t x = 12345;

	for (int round = 0; round < 20000; round++) {
		char text[64], pieces[128], want[64];
		const char *stops[4] = { NULL };
		char s[3][5];
		unsigned n = 0, at = 0;
#define RND(k) (x = x * 1664525u + 1013904223u, (x >> 16) % (k))
		unsigned len = 5 + RND(40), n_stops = RND(4);
		for (unsigned i = 0; i < len; i++)
			text[i] = (char)('a' + RND(3));
		text[len] = 0;
		for (n = 0; n < n_stops; n++) {
			unsigned sl = 1 + RND(4);
			for (unsigned i = 0; i < sl; i++)
				s[n][i] = (char)('a' + RND(3));
			s[n][sl] = 0;
			stops[n] = s[n];
		}
		for (unsigned i = 0; i < len; i++) {
			pieces[at++] = text[i];
			if (RND(3) == 0)
				pieces[at++] = 1;
		}
		pieces[at] = 0;
		strcpy(want, text);
		for (unsigned end = 1; end <= len; end++) {
			unsigned cut = len + 1;
			for (unsigned k = 0; k < n_stops; k++) {
				unsigned sl = (unsigned)strlen(s[k]);
				if (sl <= end && !memcmp(text + end - sl, s[k], sl) && end - sl < cut)
					cut = end - sl;
			}
			if (cut <= len) {
				want[cut] = 0;
				break;
			}
		}
		struct got g;
		feed(stops, pieces, &g);
		CU_ASSERT_STRING_EQUAL_FATAL(g.text, want);
	}
}

static void a_long_answer_keeps_little(void)
{
	const char *stop = "never";
	struct stop s = { (const uint8_t *)stop, 5 };
	struct stream t;

	stream_init(&t, &s, 1);
	for (int i = 0; i < 100000; i++) {
		struct stream_out o;
		uint8_t text[64];
		stream_push(&t, 1, 0, "word ne ", 8, NULL, 0);
		while (stream_peek(&t, &o, text, sizeof(text)) == 1)
			stream_take(&t);
	}
	CU_ASSERT_TRUE(t.cap < 4096);
	CU_ASSERT_TRUE(t.cap_held < 64);
	stream_free(&t);
}

static const struct apr_test tests[] = {
	{ "case07_split_character", case07_split_character, 0 },
	{ "case07_held_until_whole", case07_held_until_whole, 0 },
	{ "case07_end_inside_a_character", case07_end_inside_a_character, 0 },
	{ "case07_invalid_bytes", case07_invalid_bytes, 0 },
	{ "case08_stop_straddles", case08_stop_straddles, 0 },
	{ "case08_held_text_comes_out", case08_held_text_comes_out, 0 },
	{ "case08_nothing_leaks_early", case08_nothing_leaks_early, 0 },
	{ "case08_prefix_of_the_other", case08_prefix_of_the_other, 0 },
	{ "case08_cut_does_not_depend_on_tokens", case08_cut_does_not_depend_on_tokens, 0 },
	{ "case08_repeating_stop", case08_repeating_stop, 0 },
	{ "tokens_without_text_keep_their_order", tokens_without_text_keep_their_order, 0 },
	{ "random_cuts_against_whole_text", random_cuts_against_whole_text, 0 },
	{ "a_long_answer_keeps_little", a_long_answer_keeps_little, 0 },
};

TEST_MAIN("daemon/stream", tests)
