/* SPDX-License-Identifier: MIT */
/*
 * Two hash tables of the tokenizer, built once and then only read: text to id,
 * and a pair of ids to what merging them gives. Seeded at random, so that a file
 * cannot be made whose pieces all collide.
 */
#ifndef APR_TOK_MAP_H
#define APR_TOK_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define APR_NO_ID UINT32_MAX

struct tok_text {
	const char *s;
	uint32_t len, id;
};

struct tok_text_map {
	struct tok_text *slot; /* s == NULL: free */
	uint32_t mask, used;
	uint64_t seed;
};

struct tok_pair {
	uint32_t left, right, rank, merged; /* left == APR_NO_ID: free */
};

struct tok_pair_map {
	struct tok_pair *slot;
	uint32_t mask;
	uint64_t seed;
};

/* Room for n entries. 0 or -ENOMEM. */
int tok_text_map_init(struct tok_text_map *m, uint32_t n);
void tok_text_map_free(struct tok_text_map *m);
/* Keeps the pointer. A text that is there already keeps its first id. */
void tok_text_map_add(struct tok_text_map *m, const char *s, uint32_t len, uint32_t id);
uint32_t tok_text_map_get(const struct tok_text_map *m, const char *s, size_t len); /* APR_NO_ID: none */

int tok_pair_map_init(struct tok_pair_map *m, uint32_t n);
void tok_pair_map_free(struct tok_pair_map *m);
void tok_pair_map_add(struct tok_pair_map *m, uint32_t left, uint32_t right, uint32_t rank, uint32_t merged);
const struct tok_pair *tok_pair_map_get(const struct tok_pair_map *m, uint32_t left, uint32_t right); /* or NULL */

#endif
