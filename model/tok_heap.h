/* SPDX-License-Identifier: MIT */
/*
 * The heap and the linked list that both tokenizers merge with: a candidate is
 * the pair that starts at symbol `at`; the smallest (order, at) comes out first.
 * A candidate is stale when its symbols have changed since: the caller compares
 * the stamps. n symbols make at most 3 n candidates in all, so n log n.
 */
#ifndef APR_TOK_HEAP_H
#define APR_TOK_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/tok.h"

struct tok_cand {
	uint32_t order, at;
	uint32_t left, right; /* stamps: what the two symbols were */
};

struct tok_heap {
	struct tok_cand *c;
	size_t n;
};

#define TOK_NO_SYM UINT32_MAX

/* Room for n symbols of sym_size bytes and their candidates. 0 or -ENOMEM. */
int tok_scratch_fit(struct tok_scratch *s, size_t n, size_t sym_size);
void tok_scratch_free(struct tok_scratch *s);
void tok_heap_push(struct tok_heap *h, struct tok_cand c);
struct tok_cand tok_heap_pop(struct tok_heap *h); /* n > 0 */

#endif
