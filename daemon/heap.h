/* SPDX-License-Identifier: MIT */
/*
 * A binary heap of pointers whose items know their place, so that any one can be
 * taken out or moved in O(log n). The least (key, then order) is first.
 *
 * Owns: its array. Does not own the items, which lie in what they stand for.
 */
#ifndef APRD_HEAP_H
#define APRD_HEAP_H

#include <stddef.h>
#include <stdint.h>

struct heap_item {
	uint64_t key, order;
	uint32_t at; /* its place + 1; 0 = in no heap */
};

struct heap {
	struct heap_item **v;
	uint32_t n, cap;
};

#define HEAP_OF(item, type, member) ((type *)(void *)((char *)(item) - offsetof(type, member)))

int heap_add(struct heap *h, struct heap_item *i); /* key and order are set; -ENOMEM */
void heap_remove(struct heap *h, struct heap_item *i); /* in h, or in none */
void heap_moved(struct heap *h, struct heap_item *i);  /* its key has changed */
void heap_free(struct heap *h);

static inline struct heap_item *heap_first(const struct heap *h)
{
	return h->n ? h->v[0] : NULL;
}

#endif
