/* SPDX-License-Identifier: MIT */
/*
 * Attention over the live rows: rows into tiles, tiles × KV heads onto threads.
 *
 * Owns: how work is cut. Where there are few tiles, segments are computed apart and
 * merged afterwards in ascending order. No cut changes a bit: a segment starts
 * fresh and the merge is the same either way. Does not own the arithmetic
 * (attn_impl.h) nor the writing of K and V (ops_cpu.c).
 */
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/pool.h"
#include "kernels/cpu/scratch.h"

/* Multiply-adds that take about as long as handing out a region. */
#define REGION_FMAS 65536u
#define MIN_ITEMS 4u /* a thread, before segments are taken apart */

struct attn_region {
	const struct apr_ops_isa *isa;
	const struct apr_op_attn *op;
	struct apr_cpu_scratch *s;
	uint32_t n_tiles;
	uint32_t segs; /* split: the most segments of any tile; else 0 */
};

/* Runs of rows that hold consecutive positions of one sequence, at most max rows each. */
static uint32_t make_tiles(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_attn *op, uint32_t max,
                           uint64_t *cost)
{
	uint32_t n = 0, i, j, part = 0;

	*cost = 0;
	for (i = 0; i < r->n; i = j) {
		struct apr_attn_tile *t = &s->tiles[n++];
		uint32_t last, from = apr_attn_first(r->pos[i], op->window);

		for (j = i + 1; j < r->n && j - i < max && r->slot[j] == r->slot[i] && r->pos[j] == r->pos[j - 1] + 1; j++)
			;
		last = r->pos[j - 1];
		*t = (struct apr_attn_tile){.row = i, .n = j - i, .pos = r->pos[i], .slot = r->slot[i], .part = part};
		t->seg = from / APR_KV_SEGMENT;
		t->n_segs = last / APR_KV_SEGMENT - t->seg + 1;
		t->cost = (uint64_t)(j - i) * (last + 1 - from);
		part += t->n * t->n_segs; /* rows × segments: may wrap, then it is not used */
		*cost += t->cost;
	}
	return n;
}

/* Heaviest first, so that the last items to start are short. Ties keep their order. */
static void sort_tiles(struct apr_cpu_scratch *s, uint32_t n)
{
	uint32_t i, j;

	for (i = 0; i < n; i++) {
		uint64_t cost = s->tiles[i].cost;

		for (j = i; j && s->tiles[s->order[j - 1]].cost < cost; j--)
			s->order[j] = s->order[j - 1];
		s->order[j] = i;
	}
}

static void attn_item(void *arg, uint32_t i, unsigned worker)
{
	const struct attn_region *a = arg;
	uint32_t heads = a->op->n_kv_heads;
	const struct apr_attn_tile *t;

	if (!a->segs) {
		t = &a->s->tiles[a->s->order[i / heads]];
		a->isa->attn(a->op, t, i % heads, 0, t->n_segs, &a->s->work[worker], NULL);
		return;
	}
	t = &a->s->tiles[a->s->order[i / (heads * a->segs)]];
	i %= heads * a->segs;
	if (i / heads < t->n_segs)
		a->isa->attn(a->op, t, i % heads, i / heads, i / heads + 1, &a->s->work[worker], a->s->part);
}

static void merge_tiles(const struct attn_region *a)
{
	const struct apr_op_attn *op = a->op;
	size_t head = op->v_dim + APR_ATTN_PART_HEAD, pair = head * op->n_heads;
	uint32_t i, j, h;

	for (i = 0; i < a->n_tiles; i++) {
		const struct apr_attn_tile *t = &a->s->tiles[i];

		for (j = 0; j < t->n; j++)
			for (h = 0; h < op->n_heads; h++)
				a->isa->attn_merge(a->s->part + ((size_t)t->part + (size_t)j * t->n_segs) * pair + h * head, pair,
				                   t->n_segs, op->v_dim, op->o + ((size_t)(t->row + j) * op->n_heads + h) * op->v_dim);
	}
}

void apr_cpu_attn(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_attn *op)
{
	struct attn_region a = {.isa = apr_cpu_ops_isa(), .op = op, .s = s};
	uint32_t group = op->n_heads / op->n_kv_heads, most = 1, i;
	uint32_t max = APR_ATTN_TILE_HEADS / group < APR_KV_PAGE ? APR_ATTN_TILE_HEADS / group : APR_KV_PAGE;
	uint64_t cost, pairs = 0, items;

	if (!r->n)
		return;
	a.n_tiles = make_tiles(s, r, op, max ? max : 1, &cost);
	sort_tiles(s, a.n_tiles);
	for (i = 0; i < a.n_tiles; i++) {
		pairs += (uint64_t)s->tiles[i].n * s->tiles[i].n_segs;
		most = s->tiles[i].n_segs > most ? s->tiles[i].n_segs : most;
	}
	items = (uint64_t)a.n_tiles * op->n_kv_heads;
	cost *= (uint64_t)op->n_heads * (op->k_dim + op->v_dim);
	if (s->threads < 2 || cost < REGION_FMAS) {
		apr_pool_run(NULL, (uint32_t)items, attn_item, &a);
		return;
	}
	if (items < (uint64_t)MIN_ITEMS * s->threads && most > 1 && pairs <= s->part_pairs) {
		a.segs = most;
		apr_pool_run(s->pool, (uint32_t)(items * most), attn_item, &a);
		merge_tiles(&a);
		return;
	}
	apr_pool_run(s->pool, (uint32_t)items, attn_item, &a);
}
