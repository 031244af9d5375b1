/* SPDX-License-Identifier: MIT */
/* Owns: what of an answer's text is held, cut and let out. See stream.h. */
#include "daemon/stream.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

void stream_init(struct stream *t, const struct stop *stops, uint32_t n_stops)
{
	memset(t, 0, sizeof(*t));
	t->stops = stops;
	t->n_stops = n_stops;
}

void stream_free(struct stream *t)
{
	for (uint32_t i = 0; i < t->count; i++)
		free(t->held[(t->first + i) & (t->cap_held - 1)].top);
	free(t->held);
	free(t->buf);
	t->held = NULL;
	t->buf = NULL;
	t->count = t->len = 0;
}

static struct held *held_at(const struct stream *t, uint32_t i)
{
	return &t->held[(t->first + i) & (t->cap_held - 1)];
}

static uint64_t end_of(const struct stream *t)
{
	return t->base + t->len;
}

/* ---- UTF-8 --------------------------------------------------------------------------- */

/* Length of the character at p if all of it is there; 0: it is cut short by the end of the bytes;
 * -n: the n bytes here are no character and never will be (a maximal run, as Unicode has it). */
static int character(const uint8_t *p, size_t n)
{
	uint8_t b = p[0], low = 0x80, high = 0xbf;
	int len;

	if (b < 0x80)
		return 1;
	if (b >= 0xc2 && b <= 0xdf)
		len = 2;
	else if (b >= 0xe0 && b <= 0xef)
		len = 3, low = b == 0xe0 ? 0xa0 : 0x80, high = b == 0xed ? 0x9f : 0xbf;
	else if (b >= 0xf0 && b <= 0xf4)
		len = 4, low = b == 0xf0 ? 0x90 : 0x80, high = b == 0xf4 ? 0x8f : 0xbf;
	else
		return -1;
	for (int i = 1; i < len; i++) {
		if ((size_t)i == n)
			return 0;
		if (p[i] < low || p[i] > high)
			return -i;
		low = 0x80;
		high = 0xbf;
	}
	return len;
}

/* Moves chars on: past every whole character and every byte that cannot become one. */
static void advance_chars(struct stream *t)
{
	while (t->chars < end_of(t)) {
		int n = character(t->buf + (t->chars - t->base), (size_t)(end_of(t) - t->chars));
		if (!n)
			break;
		t->chars += (uint64_t)(n < 0 ? -n : n);
	}
}

/* buf[from, to) as well-formed UTF-8. Returns its length; writes it where it fits. */
static size_t well_formed(const struct stream *t, uint64_t from, uint64_t to, uint8_t *out, size_t cap)
{
	static const uint8_t replacement[3] = { 0xef, 0xbf, 0xbd };
	size_t n = 0;

	while (from < to) {
		const uint8_t *p = t->buf + (from - t->base);
		int len = character(p, (size_t)(to - from));
		size_t used = len ? (size_t)(len < 0 ? -len : len) : (size_t)(to - from);
		const uint8_t *src = len > 0 ? p : replacement;
		size_t put = len > 0 ? used : sizeof(replacement);
		if (n + put <= cap)
			memcpy(out + n, src, put);
		n += put;
		from += used;
	}
	return n;
}

/* ---- stops ----------------------------------------------------------------------------- */

static bool same(const struct stream *t, uint64_t at, const struct stop *s, uint32_t n)
{
	return !memcmp(t->buf + (at - t->base), s->text, n);
}

/* A stop that ends with the byte before `end`: the earliest beginning, or UINT64_MAX. */
static uint64_t stop_ending(const struct stream *t, uint64_t end)
{
	uint64_t best = UINT64_MAX;

	for (uint32_t i = 0; i < t->n_stops; i++) {
		const struct stop *s = &t->stops[i];
		if (s->len && end - t->base >= s->len && same(t, end - s->len, s, s->len) && end - s->len < best)
			best = end - s->len;
	}
	return best;
}

/* From where on the text may be the beginning of a stop. */
static uint64_t safe_end(const struct stream *t)
{
	uint64_t end = end_of(t), safe = end;

	for (uint32_t i = 0; i < t->n_stops; i++) {
		const struct stop *s = &t->stops[i];
		uint32_t n = s->len ? s->len - 1 : 0;
		if (n > t->len)
			n = t->len;
		for (; n > end - safe; n--) {
			if (same(t, end - n, s, n)) {
				safe = end - n;
				break;
			}
		}
	}
	return safe;
}

/* ---- pushing ------------------------------------------------------------------------------ */

static int make_room(struct stream *t, size_t len)
{
	/* text that is out goes, but for what a stop may reach back into */
	uint32_t longest = 0;
	for (uint32_t i = 0; i < t->n_stops; i++)
		if (t->stops[i].len > longest)
			longest = t->stops[i].len;
	uint64_t keep = t->told > t->base + longest ? t->told - longest : t->base;
	if (keep > t->base + t->cap / 2) {
		uint32_t drop = (uint32_t)(keep - t->base);
		memmove(t->buf, t->buf + drop, t->len - drop);
		t->base += drop;
		t->len -= drop;
	}
	if (len > UINT32_MAX / 2 - t->len)
		return -ENOMEM;
	uint32_t need = t->len + (uint32_t)len;
	if (need > t->cap) {
		uint32_t cap = need * 2 < 128 ? 128 : need * 2;
		uint8_t *buf = realloc(t->buf, cap);
		if (!buf)
			return -ENOMEM;
		t->buf = buf;
		t->cap = cap;
	}
	return 0;
}

static int make_held(struct stream *t)
{
	if (t->count < t->cap_held)
		return 0;
	uint32_t cap = t->cap_held ? t->cap_held * 2 : 8; /* powers of two */
	struct held *h = calloc(cap, sizeof(*h));
	if (!h)
		return -ENOMEM;
	for (uint32_t i = 0; i < t->count; i++)
		h[i] = *held_at(t, i);
	free(t->held);
	t->held = h;
	t->first = 0;
	t->cap_held = cap;
	return 0;
}

/* The bytes, one by one as far as stops go. */
static int add_text(struct stream *t, const char *piece, size_t len)
{
	int e = make_room(t, len);

	if (e)
		return e;
	if (!t->n_stops) {
		if (len)
			memcpy(t->buf + t->len, piece, len);
		t->len += (uint32_t)len;
	}
	for (size_t i = 0; t->n_stops && i < len; i++) {
		t->buf[t->len++] = (uint8_t)piece[i];
		uint64_t at = stop_ending(t, end_of(t));
		if (at != UINT64_MAX) {
			t->stopped = t->ended = true;
			t->cut = at;
			break;
		}
	}
	advance_chars(t);
	t->safe = t->stopped ? t->cut : safe_end(t);
	return t->stopped;
}

int stream_push(struct stream *t, uint32_t id, float logprob, const char *piece, size_t len, const struct apr_top *top,
		uint32_t n_top)
{
	struct held h = { .id = id, .logprob = logprob, .n_top = n_top, .begin = end_of(t) };
	int e = make_held(t);

	if (e)
		return e;
	if (n_top) {
		h.top = malloc(n_top * sizeof(*top));
		if (!h.top)
			return -ENOMEM;
		memcpy(h.top, top, n_top * sizeof(*top));
	}
	int stopped = add_text(t, piece, len);
	if (stopped < 0) {
		free(h.top);
		return stopped;
	}
	h.end = h.begin + len; /* as if a stop had not cut it: what lies beyond is inside the stop */
	h.chars = t->chars;
	t->held[(t->first + t->count++) & (t->cap_held - 1)] = h;
	return stopped;
}

int stream_skip(struct stream *t, uint32_t id, const char *piece, size_t len)
{
	(void)id;
	int stopped = add_text(t, piece, len);

	if (stopped < 0)
		return stopped;
	t->pos++;
	t->told = t->chars; /* what was delivered had no text held behind it */
	return stopped;
}

void stream_end(struct stream *t)
{
	t->ended = true;
	if (!t->stopped)
		t->safe = end_of(t);
}

/* ---- coming out ---------------------------------------------------------------------------- */

static void drop_first(struct stream *t)
{
	free(held_at(t, 0)->top);
	t->first = (t->first + 1) & (t->cap_held - 1);
	t->count--;
}

int stream_peek(struct stream *t, struct stream_out *out, uint8_t *text, size_t cap)
{
	memset(out, 0, sizeof(*out));
	out->pos = t->pos;
	/* tokens wholly inside the stop, those after its beginning: never */
	while (t->count && t->stopped && held_at(t, 0)->begin >= t->cut && held_at(t, 0)->end > t->cut)
		drop_first(t);
	if (t->count) {
		const struct held *h = held_at(t, 0);
		bool straddles = t->stopped && h->end > t->cut;
		uint64_t to = straddles ? t->cut : h->chars;
		if (!straddles && h->end > t->safe)
			return 0;
		if (!t->ended && h->end > t->chars)
			return 0;
		if (to > t->safe)
			to = t->safe;
		if (to < t->told)
			to = t->told;
		out->token = true;
		out->id = h->id;
		out->logprob = h->logprob;
		out->top = h->top;
		out->n_top = h->n_top;
		out->len = well_formed(t, t->told, to, text, cap);
		return out->len > cap ? -E2BIG : 1;
	}
	if (!t->ended || t->flushed)
		return 0;
	/* a character that the end cut short */
	uint64_t to = t->stopped ? t->cut : end_of(t);
	out->len = to > t->told ? well_formed(t, t->told, to, text, cap) : 0;
	if (out->len > cap)
		return -E2BIG;
	if (!out->len) {
		t->flushed = true;
		return 0;
	}
	return 1;
}

void stream_take(struct stream *t)
{
	if (!t->count) {
		t->told = t->stopped ? t->cut : end_of(t);
		t->flushed = true;
		return;
	}
	const struct held *h = held_at(t, 0);
	uint64_t to = t->stopped && h->end > t->cut ? t->cut : h->chars;
	if (to > t->safe)
		to = t->safe;
	if (to > t->told)
		t->told = to;
	t->pos++;
	drop_first(t);
}

bool stream_empty(const struct stream *t)
{
	return t->ended && !t->count && t->flushed;
}
