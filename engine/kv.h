/* SPDX-License-Identifier: MIT */
/*
 * KV pages: who holds which, and which can be found again by their tokens.
 *
 * Owns: free lists, reference counts, the prefix tree, least-recently-used
 * eviction, the window groups' give-back. Does not own the bytes of a page (the
 * plan's pool) nor page tables in the backend's memory (it says what changed).
 *
 * The prefix tree: a node is 64 tokens with their kinds (given or generated)
 * under a parent node; a root's child carries the scope besides. So a node means
 * one exact sequence of tokens, compared and not merely hashed, of one model,
 * numerics and scope; it names the page of each group that holds its KV, or none.
 *
 * One thread, but the counters, which any thread may read.
 */
#ifndef APR_ENGINE_KV_H
#define APR_ENGINE_KV_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/backend.h"

#define APR_KV_NONE UINT32_MAX

struct apr_kv;

struct apr_kv_seq { /* what a sequence holds */
	uint32_t *page[APR_MAX_KV_GROUPS]; /* [max_pages_seq], APR_KV_NONE where none is held */
	uint32_t first[APR_MAX_KV_GROUPS]; /* pages below were given back (window groups) */
	uint32_t n[APR_MAX_KV_GROUPS];     /* pages first … n - 1 are held */
	uint32_t sent[APR_MAX_KV_GROUPS];  /* entries below are in the backend's table */
	uint32_t node;      /* tip of its path in the tree; APR_KV_NONE: at the root */
	uint32_t committed; /* full pages that are in the tree */
	bool private_from;  /* the tree was full: nothing more is committed */
};

uint64_t apr_kv_bytes(const struct apr_sizes *s); /* what apr_kv_new will take */
int apr_kv_new(struct apr_kv **out, const struct apr_sizes *s);
void apr_kv_free(struct apr_kv *kv);

/* Allocates the arrays of s. -ENOMEM. */
int apr_kv_seq_init(struct apr_kv *kv, struct apr_kv_seq *s);
void apr_kv_seq_fini(struct apr_kv *kv, struct apr_kv_seq *s); /* gives up its pages too */

/* Pages one sequence needs at most while it holds `positions` and computes `rows` a step. */
uint32_t apr_kv_group_need(const struct apr_kv_group *g, uint32_t positions, uint32_t rows);
/* Can a sequence of so many positions ever be held, were the pool empty? */
bool apr_kv_can_ever(const struct apr_kv *kv, uint32_t positions, uint32_t rows);

/* Longest page-aligned prefix below n_ids that every group can restore; takes its pages.
 * kinds: a bit a position, set where it was generated, a word a page; NULL: all were given. Returns positions. s holds
 * nothing before. */
uint32_t apr_kv_lookup(struct apr_kv *kv, struct apr_kv_seq *s, uint64_t scope, const uint32_t *ids, uint32_t n_ids,
                       const uint64_t *kinds);
/* What apr_kv_lookup would return for a prompt, taking nothing. */
uint32_t apr_kv_peek(const struct apr_kv *kv, uint64_t scope, const uint32_t *ids, uint32_t n_ids, const uint64_t *kinds);
/* Has every group free pages for so many positions, computed so many rows at a time? */
bool apr_kv_room(const struct apr_kv *kv, uint32_t positions, uint32_t rows);
/* Pages for positions up to end - 1 in every group. -EAGAIN: nothing was taken. */
int apr_kv_reserve(struct apr_kv *kv, struct apr_kv_seq *s, uint32_t end);
/* Positions up to done - 1 are computed: full pages enter the tree, window groups give pages back. */
void apr_kv_commit(struct apr_kv *kv, struct apr_kv_seq *s, uint64_t scope, const uint32_t *ids, uint32_t done,
                   const uint64_t *kinds, bool share);
void apr_kv_drop(struct apr_kv *kv, struct apr_kv_seq *s); /* gives up every page */

struct apr_kv_counts {
	uint32_t total, free, cached; /* free includes cached */
};
void apr_kv_counts(const struct apr_kv *kv, struct apr_kv_counts *c); /* any thread */
/* Tests: every page is in exactly one place and counts add up. Returns 0, or a line number that found a fault. */
int apr_kv_check(const struct apr_kv *kv);

#endif
