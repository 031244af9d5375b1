/* SPDX-License-Identifier: MIT */
/* The memory plan: see plan.h. */
#include "engine/plan.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "engine/internal.h"
#include "engine/kv.h"

#define CONTEXTS 4u /* whole contexts that the default plan holds */

uint32_t apr_plan_add(struct apr_plan *p, const char *purpose, enum apr_place place, uint64_t a, uint64_t b)
{
	uint64_t bytes;

	if (p->n == APR_PLAN_LINES || __builtin_mul_overflow(a, b, &bytes) || bytes > INT64_MAX) {
		p->overflow = true;
		return APR_PLAN_LINES;
	}
	p->line[p->n] = (struct apr_plan_line){.purpose = purpose, .place = place, .bytes = bytes};
	return p->n++;
}

uint64_t apr_plan_bytes(const struct apr_plan *p)
{
	uint64_t sum = 0;
	uint32_t i;

	for (i = 0; i < p->n; i++)
		if (__builtin_add_overflow(sum, p->line[i].bytes, &sum))
			return UINT64_MAX;
	return p->overflow ? UINT64_MAX : sum;
}

uint32_t apr_plan_find(const struct apr_plan *p, const char *purpose)
{
	uint32_t i;

	for (i = 0; i < p->n; i++)
		if (!strcmp(p->line[i].purpose, purpose))
			return i;
	return APR_PLAN_LINES;
}

/* ---- KV ------------------------------------------------------------------------ */

static uint64_t element(enum apr_kv_type t)
{
	return t == APR_KV_F32 ? 4 : 2;
}

static uint64_t page_bytes(const struct apr_kv_group *g) /* head counts and dims are below 2^20: no overflow */
{
	return (uint64_t)g->n_layers * g->layer_bytes;
}

uint64_t apr_plan_kv_token(const struct apr_sizes *s)
{
	uint64_t sum = 0;
	uint32_t g;

	for (g = 0; g < s->n_groups; g++)
		sum += (uint64_t)s->group[g].n_layers * s->group[g].n_kv_heads * (s->group[g].k_dim + s->group[g].v_dim) *
		       element(s->group[g].type);
	return sum;
}

/* Pages of each group when full groups get `pages`: window groups never need more than all slots can hold. */
static uint64_t try_pages(struct apr_sizes *s, uint64_t pages)
{
	uint64_t bytes = 0, part;
	uint32_t g;

	for (g = 0; g < s->n_groups; g++) {
		struct apr_kv_group *gr = &s->group[g];
		uint64_t cap = (uint64_t)apr_kv_group_need(gr, s->n_ctx, s->max_rows) * APR_MAX_SLOTS;
		uint64_t n = pages < cap ? pages : cap;

		if (n > INT32_MAX)
			n = INT32_MAX;
		gr->n_pages = (uint32_t)n;
		if (__builtin_mul_overflow(n, page_bytes(gr), &part) || __builtin_add_overflow(bytes, part, &bytes))
			return UINT64_MAX;
	}
	return bytes;
}

static int too_small(struct apr_sizes *s, uint64_t have, uint64_t need, char *err, size_t errlen)
{
	uint32_t ctx = s->n_ctx, fits = 0, g;
	uint64_t bytes;

	/* the longest context whose one sequence fits: bytes grow with ctx, so halve the interval */
	for (uint32_t lo = 0, hi = ctx / APR_KV_PAGE; lo < hi;) {
		uint32_t mid = lo + (hi - lo + 1) / 2;

		bytes = 0;
		for (g = 0; g < s->n_groups; g++)
			bytes += page_bytes(&s->group[g]) * apr_kv_group_need(&s->group[g], mid * APR_KV_PAGE, s->max_rows);
		if (bytes <= have)
			lo = fits = mid;
		else
			hi = mid - 1;
	}
	if (!fits)
		return apr_engine_fail(-ENOSPC, err, errlen,
		                       "KV of a context of %u needs %llu MiB and %llu MiB are to be had; no context fits", ctx,
		                       (unsigned long long)(need >> 20) + 1, (unsigned long long)(have >> 20));
	return apr_engine_fail(-ENOSPC, err, errlen,
	                       "KV of a context of %u needs %llu MiB and %llu MiB are to be had; -c %u would fit", ctx,
	                       (unsigned long long)(need >> 20) + 1, (unsigned long long)(have >> 20), fits * APR_KV_PAGE);
}

int apr_plan_kv(struct apr_sizes *s, uint64_t kv_mem, uint64_t spare, char *err, size_t errlen)
{
	uint32_t g, per_seq = s->n_ctx / APR_KV_PAGE + (s->n_ctx % APR_KV_PAGE != 0);
	uint64_t limit, lo, hi, need = 0;

	for (g = 0; g < s->n_groups; g++) {
		struct apr_kv_group *gr = &s->group[g];

		gr->max_pages_seq = per_seq;
		if (__builtin_mul_overflow((uint64_t)gr->n_kv_heads * APR_KV_PAGE * element(gr->type),
		                           (uint64_t)gr->k_dim + gr->v_dim, &gr->layer_bytes))
			return apr_engine_fail(-EOVERFLOW, err, errlen, "the size of a KV page overflows");
		if (__builtin_add_overflow(need, page_bytes(gr) * apr_kv_group_need(gr, s->n_ctx, s->max_rows), &need))
			return apr_engine_fail(-EOVERFLOW, err, errlen, "the size of the KV overflows");
	}
	limit = kv_mem ? kv_mem : spare / 2 > need ? spare / 2 : spare;
	if (limit > spare)
		return apr_engine_fail(-ENOSPC, err, errlen, "KV memory of %llu MiB does not fit: %llu MiB are to be had",
		                       (unsigned long long)(limit >> 20), (unsigned long long)(spare >> 20));
	if (need > limit)
		return too_small(s, limit, need, err, errlen);
	/* a window group alone at its need a sequence, full groups at one context: that fits; grow from there */
	hi = kv_mem ? (uint64_t)per_seq * APR_MAX_SLOTS : (uint64_t)per_seq * CONTEXTS;
	for (lo = 1; lo < hi;) {
		uint64_t mid = lo + (hi - lo + 1) / 2;

		if (try_pages(s, mid) <= limit)
			lo = mid;
		else
			hi = mid - 1;
	}
	(void)try_pages(s, lo);
	for (g = 0; g < s->n_groups; g++) { /* the plainest floor: one sequence of the whole context always fits */
		uint32_t least = apr_kv_group_need(&s->group[g], s->n_ctx, s->max_rows);

		if (s->group[g].n_pages < least) {
			uint32_t k;

			for (k = 0; k < s->n_groups; k++)
				s->group[k].n_pages = apr_kv_group_need(&s->group[k], s->n_ctx, s->max_rows);
			break;
		}
	}
	return 0;
}

/* ---- buffers ------------------------------------------------------------------- */

static const char *const x_name[2] = {"x", "x'"};
static const char *const rope_name[APR_MAX_ROPE_TABLES] = {"rope", "rope 2", "rope 3", "rope 4"};
static const char *const kv_name[APR_MAX_KV_GROUPS] = {"kv",    "kv 2",  "kv 3",  "kv 4",  "kv 5",  "kv 6",
                                                       "kv 7",  "kv 8",  "kv 9",  "kv 10", "kv 11", "kv 12",
                                                       "kv 13", "kv 14", "kv 15", "kv 16"};

void apr_plan_buffers(struct apr_plan *p, const struct apr_forward *f, enum apr_place place)
{
	const struct apr_model *m = f->model;
	const struct apr_sizes *s = f->sizes;
	uint64_t rows = s->max_rows, entries = 0;
	uint32_t i;

	for (i = 0; i < s->n_groups; i++)
		apr_plan_add(p, kv_name[i], place, s->group[i].n_pages, page_bytes(&s->group[i]));
	apr_plan_add(p, x_name[0], place, rows * m->n_embd, sizeof(float));
	apr_plan_add(p, x_name[1], place, rows * m->n_embd, sizeof(float));
	apr_plan_add(p, "y", place, rows * m->n_embd, sizeof(float));
	apr_plan_add(p, "q", place, rows * m->n_heads, (uint64_t)m->head_dim * sizeof(float));
	apr_plan_add(p, "o", place, rows * m->n_heads, (uint64_t)m->v_dim * sizeof(float));
	apr_plan_add(p, "activations", place, rows * m->n_ff, sizeof(float));
	apr_plan_add(p, "logits", place, (uint64_t)APR_HEAD_ROWS * s->n_vocab, sizeof(float));
	for (i = 0; i < s->n_groups; i++)
		entries += s->group[i].max_pages_seq;
	apr_plan_add(p, "page tables", place, entries * APR_MAX_SLOTS, sizeof(uint32_t));
	for (i = 0; i < f->n_ropes; i++)
		apr_plan_add(p, rope_name[i], place, (uint64_t)s->n_ctx * (m->rope.n_rot / 2), 2 * sizeof(float));
}

static void *base_of(const struct apr_plan *p, const char *purpose)
{
	uint32_t i = apr_plan_find(p, purpose);

	return i < p->n ? p->line[i].base : NULL;
}

void apr_plan_bind(const struct apr_plan *p, struct apr_forward *f, struct apr_sizes *s)
{
	const uint32_t *table = base_of(p, "page tables");
	uint32_t i;

	for (i = 0; i < s->n_groups; i++) {
		s->group[i].pool = base_of(p, kv_name[i]);
		s->group[i].table = table;
		table += (size_t)s->group[i].max_pages_seq * APR_MAX_SLOTS;
	}
	f->x[0] = base_of(p, x_name[0]);
	f->x[1] = base_of(p, x_name[1]);
	f->y = base_of(p, "y");
	f->q = base_of(p, "q");
	f->o = base_of(p, "o");
	f->a = base_of(p, "activations");
	f->logits = base_of(p, "logits");
	for (i = 0; i < f->n_ropes; i++)
		f->rope_table[i] = base_of(p, rope_name[i]);
}
