/* SPDX-License-Identifier: MIT */
/*
 * The memory plan: every byte a model will hold, decided before any is taken.
 *
 * Owns: the sizes of KV pools and of the step's buffers, the overflow-safe sums,
 * the refusal with what would fit. Does not own taking the memory (a backend's
 * reserve) nor what is in it.
 */
#ifndef APR_ENGINE_PLAN_H
#define APR_ENGINE_PLAN_H

#include "engine/backend.h"
#include "engine/forward.h"

/* Adds a line of a · b bytes. Returns its index; sets overflow where it cannot. */
uint32_t apr_plan_add(struct apr_plan *p, const char *purpose, enum apr_place place, uint64_t a, uint64_t b);
/* Bytes of all lines (FILE lines too); UINT64_MAX where the plan overflowed. */
uint64_t apr_plan_bytes(const struct apr_plan *p);
uint32_t apr_plan_find(const struct apr_plan *p, const char *purpose); /* APR_PLAN_LINES where there is none */

/* Sizes the KV pools of s->group: kv_mem bytes in all, or, for 0, four whole contexts or what fits into half of
 * `spare` bytes, whichever is less, and one whole context at least. -ENOSPC with err naming what would fit. */
int apr_plan_kv(struct apr_sizes *s, uint64_t kv_mem, uint64_t spare, char *err, size_t errlen);
/* KV bytes of one position, summed over layers. */
uint64_t apr_plan_kv_token(const struct apr_sizes *s);

/* The engine's own lines: KV by group, x, y, q, activations, logits, page and RoPE tables. place: where a backend computes. */
void apr_plan_buffers(struct apr_plan *p, const struct apr_forward *f, enum apr_place place);
/* After reserve: the forward's pointers, the groups' pools and page tables, from the lines. */
void apr_plan_bind(const struct apr_plan *p, struct apr_forward *f, struct apr_sizes *s);

#endif
