/* SPDX-License-Identifier: MIT */
/*
 * SentencePiece's BPE: the whole text starts as single characters, and the
 * adjacent pair whose joined text is the piece of highest score (leftmost first)
 * is merged until none is a piece. A character that is no piece is written byte
 * by byte. U+2581 is the format's space: pieces hold ' ' for it here, and a
 * U+2581 in the text is taken as a space too.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model/tok_heap.h"
#include "model/utf8.h"

struct sym {
	uint32_t start, len, prev, next; /* merged away: len 0 */
};

/* Floats as unsigned integers of the opposite order, so that the highest score is the smallest. -0 is 0. */
static uint32_t order_of(float score)
{
	uint32_t x;

	score += 0.0f;
	memcpy(&x, &score, sizeof x);
	return x & 0x80000000 ? x : ~x & 0x7fffffff;
}

static void consider(const struct apr_tokenizer *t, const char *text, const struct sym *sym, uint32_t left,
                     struct tok_heap *h)
{
	uint32_t right = left == TOK_NO_SYM ? TOK_NO_SYM : sym[left].next, len, id;

	if (right == TOK_NO_SYM)
		return;
	len = sym[left].len + sym[right].len;
	if (len > t->max_piece)
		return;
	id = tok_text_map_get(&t->by_bytes, text + sym[left].start, len);
	if (id != APR_NO_ID)
		tok_heap_push(h, (struct tok_cand){order_of(t->score[id]), left, sym[left].len, sym[right].len});
}

static void merge_all(const struct apr_tokenizer *t, const char *text, struct sym *sym, uint32_t n, struct tok_heap *h)
{
	uint32_t i;

	for (i = 0; i + 1 < n; i++)
		consider(t, text, sym, i, h);
	while (h->n) {
		struct tok_cand c = tok_heap_pop(h);
		struct sym *l = &sym[c.at], *r;

		if (l->len != c.left || l->next == TOK_NO_SYM)
			continue;
		r = &sym[l->next];
		if (r->len != c.right)
			continue;
		l->len += r->len;
		r->len = 0;
		l->next = r->next;
		if (l->next != TOK_NO_SYM)
			sym[l->next].prev = c.at;
		consider(t, text, sym, l->prev, h);
		consider(t, text, sym, c.at, h);
	}
}

static int emit(const struct apr_tokenizer *t, const char *text, uint32_t len, struct tok_out *o)
{
	uint32_t id = tok_text_map_get(&t->by_bytes, text, len), i;
	int rc = 0;

	if (id != APR_NO_ID)
		return tok_push(o, id);
	for (i = 0; i < len && !rc; i++) {
		id = t->byte_id[(uint8_t)text[i]];
		rc = id == APR_NO_ID ? -EILSEQ : tok_push(o, id);
	}
	return rc;
}

/* A copy of text with ' ' for U+2581, and one in front if asked for. */
static char *with_spaces(const char *text, size_t len, bool prefix, size_t *out_len)
{
	char *copy = calloc(len + 1, 1);
	size_t n = 0, i;

	if (!copy)
		return NULL;
	if (prefix)
		copy[n++] = ' ';
	for (i = 0; i < len; i++) {
		if (len - i >= 3 && !memcmp(text + i, "\xe2\x96\x81", 3)) {
			copy[n++] = ' ';
			i += 2;
		} else {
			copy[n++] = text[i];
		}
	}
	*out_len = n;
	return copy;
}

static uint32_t split(const char *text, size_t len, struct sym *sym)
{
	uint32_t n = 0;
	size_t pos = 0;
	int32_t cp;

	for (; pos < len; n++) {
		unsigned k = apr_utf8_next(text + pos, len - pos, &cp);

		sym[n] = (struct sym){(uint32_t)pos, k, n ? n - 1 : TOK_NO_SYM, n + 1};
		pos += k;
	}
	if (n)
		sym[n - 1].next = TOK_NO_SYM;
	return n;
}

/* One stretch that no merge can cross. As in tok_bpe.c, what is known to come out whole is not merged again. */
static int encode_stretch(const struct apr_tokenizer *t, const char *text, size_t len, struct tok_scratch *s,
                          struct tok_out *o)
{
	uint32_t whole = len <= t->max_piece ? tok_text_map_get(&t->by_bytes, text, len) : APR_NO_ID, i;
	struct tok_heap h;
	struct sym *sym;
	int rc;

	if (whole != APR_NO_ID && atomic_load_explicit(&t->whole[whole], memory_order_relaxed) == TOK_WHOLE)
		return tok_push(o, whole);
	rc = tok_scratch_fit(s, len, sizeof *sym);
	if (rc)
		return rc;
	sym = s->sym;
	h = (struct tok_heap){s->heap, 0};
	merge_all(t, text, sym, split(text, len, sym), &h);
	if (whole != APR_NO_ID)
		atomic_store_explicit(&t->whole[whole], sym[0].len == len ? TOK_WHOLE : TOK_PARTS, memory_order_relaxed);
	for (i = 0; i != TOK_NO_SYM && !rc; i = sym[i].next)
		rc = emit(t, text + sym[i].start, sym[i].len, o);
	return rc;
}

/* The end of the stretch that starts at pos: the first place where two bytes meet that do so in no piece, so
 * that no merge can reach over it and both sides may be merged on their own. (Most often before a space.) */
static size_t stretch_end(const struct apr_tokenizer *t, const char *text, size_t len, size_t pos)
{
	int32_t cp;

	do {
		pos += apr_utf8_next(text + pos, len - pos, &cp);
		if (pos < len) {
			unsigned bit = (unsigned)(uint8_t)text[pos - 1] << 8 | (uint8_t)text[pos];

			if (!(t->joins[bit / 8] >> bit % 8 & 1))
				break;
		}
	} while (pos < len);
	return pos;
}

int tok_spm(const struct apr_tokenizer *t, const char *text, size_t len, bool prefix, struct tok_scratch *s,
            struct tok_out *o)
{
	size_t n_bytes, pos, end;
	char *copy;
	int rc = 0;

	if (!len)
		return 0;
	copy = with_spaces(text, len, prefix, &n_bytes);
	if (!copy)
		return -ENOMEM;
	for (pos = 0; pos < n_bytes && !rc; pos = end) {
		end = stretch_end(t, copy, n_bytes, pos);
		rc = encode_stretch(t, copy + pos, end - pos, s, o);
	}
	free(copy);
	return rc;
}
