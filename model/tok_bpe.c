/* SPDX-License-Identifier: MIT */
/*
 * Byte-level BPE: text is cut by the pre-tokenizer, each piece starts as single
 * bytes, and the adjacent pair of lowest rank (leftmost first) is merged until
 * none is in the table.
 */
#include <errno.h>

#include "model/tok_heap.h"

struct sym {
	uint32_t id, prev, next; /* a merged-away symbol has id APR_NO_ID */
};

static void consider(const struct apr_tokenizer *t, const struct sym *sym, uint32_t left, struct tok_heap *h)
{
	uint32_t right = left == TOK_NO_SYM ? TOK_NO_SYM : sym[left].next;
	const struct tok_pair *p;

	if (right == TOK_NO_SYM)
		return;
	p = tok_pair_map_get(&t->merges, sym[left].id, sym[right].id);
	if (p)
		tok_heap_push(h, (struct tok_cand){p->rank, left, sym[left].id, sym[right].id});
}

static void merge_all(const struct apr_tokenizer *t, struct sym *sym, uint32_t n, struct tok_heap *h)
{
	uint32_t i;

	for (i = 0; i + 1 < n; i++)
		consider(t, sym, i, h);
	while (h->n) {
		struct tok_cand c = tok_heap_pop(h);
		struct sym *l = &sym[c.at], *r;

		if (l->id != c.left || l->next == TOK_NO_SYM)
			continue;
		r = &sym[l->next];
		if (r->id != c.right)
			continue;
		l->id = tok_pair_map_get(&t->merges, c.left, c.right)->merged;
		r->id = APR_NO_ID;
		l->next = r->next;
		if (l->next != TOK_NO_SYM)
			sym[l->next].prev = c.at;
		consider(t, sym, l->prev, h);
		consider(t, sym, c.at, h);
	}
}

/* Most pieces of text are a piece of the vocabulary, and most of those come out of merging whole:
 * once that is known, one look-up does. (Under llama-bpe it is so by definition.) */
static int encode_piece(const struct apr_tokenizer *t, const char *text, size_t len, struct tok_scratch *s,
                        struct tok_out *o)
{
	uint32_t i, n = (uint32_t)len, id, whole;
	struct tok_heap h;
	struct sym *sym;
	int rc;

	whole = len <= t->max_piece ? tok_text_map_get(&t->by_bytes, text, len) : APR_NO_ID;
	if (whole != APR_NO_ID && atomic_load_explicit(&t->whole[whole], memory_order_relaxed) == TOK_WHOLE)
		return tok_push(o, whole);
	rc = tok_scratch_fit(s, len, sizeof *sym);
	if (rc)
		return rc;
	sym = s->sym;
	for (i = 0; i < n; i++) {
		id = t->byte_id[(uint8_t)text[i]];
		if (id == APR_NO_ID)
			return -EILSEQ;
		sym[i] = (struct sym){id, i ? i - 1 : TOK_NO_SYM, i + 1 < n ? i + 1 : TOK_NO_SYM};
	}
	h = (struct tok_heap){s->heap, 0};
	merge_all(t, sym, n, &h);
	if (whole != APR_NO_ID)
		atomic_store_explicit(&t->whole[whole], sym[0].id == whole ? TOK_WHOLE : TOK_PARTS, memory_order_relaxed);
	for (i = 0; i != TOK_NO_SYM && !rc; i = sym[i].next)
		rc = tok_push(o, sym[i].id);
	return rc;
}

int tok_bpe(const struct apr_tokenizer *t, const char *text, size_t len, struct tok_scratch *s, struct tok_out *o)
{
	size_t pos = 0, end;
	int rc = 0;

	for (; pos < len && !rc; pos = end) {
		end = apr_pretok_next(t->pre, text, len, pos);
		rc = encode_piece(t, text + pos, end - pos, s, o);
	}
	return rc;
}
