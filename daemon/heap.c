/* SPDX-License-Identifier: MIT */
/* Owns: the heap. See heap.h. */
#include "daemon/heap.h"
#include <errno.h>
#include <stdlib.h>

static int before(const struct heap_item *a, const struct heap_item *b)
{
	return a->key != b->key ? a->key < b->key : a->order < b->order;
}

static void place(struct heap *h, struct heap_item *i, uint32_t at)
{
	h->v[at] = i;
	i->at = at + 1;
}

static void sift_up(struct heap *h, uint32_t at)
{
	struct heap_item *i = h->v[at];

	for (; at && before(i, h->v[(at - 1) / 2]); at = (at - 1) / 2)
		place(h, h->v[(at - 1) / 2], at);
	place(h, i, at);
}

static void sift_down(struct heap *h, uint32_t at)
{
	struct heap_item *i = h->v[at];

	for (uint32_t k; (k = 2 * at + 1) < h->n; at = k) {
		if (k + 1 < h->n && before(h->v[k + 1], h->v[k]))
			k++;
		if (!before(h->v[k], i))
			break;
		place(h, h->v[k], at);
	}
	place(h, i, at);
}

int heap_add(struct heap *h, struct heap_item *i)
{
	if (h->n == h->cap) {
		uint32_t cap = h->cap ? h->cap * 2 : 4;
		struct heap_item **v = reallocarray(h->v, cap, sizeof(struct heap_item *));
		if (!v)
			return -ENOMEM;
		h->v = v;
		h->cap = cap;
	}
	h->v[h->n++] = i;
	sift_up(h, h->n - 1);
	return 0;
}

void heap_remove(struct heap *h, struct heap_item *i)
{
	uint32_t at = i->at;

	if (!at)
		return;
	i->at = 0;
	struct heap_item *last = h->v[--h->n];
	if (last == i)
		return;
	place(h, last, at - 1);
	heap_moved(h, last);
}

void heap_moved(struct heap *h, struct heap_item *i)
{
	sift_up(h, i->at - 1);
	sift_down(h, i->at - 1);
}

void heap_free(struct heap *h)
{
	free(h->v);
	*h = (struct heap){ NULL, 0, 0 };
}
