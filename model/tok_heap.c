/* SPDX-License-Identifier: MIT */
/* A binary heap in an array that is large enough from the start. */
#include <errno.h>
#include <stdlib.h>

#include "model/tok_heap.h"

int tok_scratch_fit(struct tok_scratch *s, size_t n, size_t sym_size)
{
	void *p;

	if (n <= s->sym_cap)
		return 0;
	n = n < 64 ? 64 : n;
	if (n > SIZE_MAX / 64)
		return -ENOMEM;
	p = realloc(s->sym, n * sym_size);
	if (!p)
		return -ENOMEM;
	s->sym = p;
	p = realloc(s->heap, 3 * n * sizeof(struct tok_cand));
	if (!p)
		return -ENOMEM;
	s->heap = p;
	s->sym_cap = n;
	return 0;
}

void tok_scratch_free(struct tok_scratch *s)
{
	free(s->sym);
	free(s->heap);
}

static bool before(const struct tok_cand *a, const struct tok_cand *b)
{
	return a->order != b->order ? a->order < b->order : a->at < b->at;
}

void tok_heap_push(struct tok_heap *h, struct tok_cand c)
{
	size_t i = h->n++;

	while (i && before(&c, &h->c[(i - 1) / 2])) {
		h->c[i] = h->c[(i - 1) / 2];
		i = (i - 1) / 2;
	}
	h->c[i] = c;
}

struct tok_cand tok_heap_pop(struct tok_heap *h)
{
	struct tok_cand top = h->c[0], last = h->c[--h->n];
	size_t i = 0, child;

	while ((child = 2 * i + 1) < h->n) {
		if (child + 1 < h->n && before(&h->c[child + 1], &h->c[child]))
			child++;
		if (!before(&h->c[child], &last))
			break;
		h->c[i] = h->c[child];
		i = child;
	}
	h->c[i] = last;
	return top;
}
