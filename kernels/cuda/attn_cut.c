/* SPDX-License-Identifier: MIT */
/*
 * Prompt rows cut into the tiles that attention takes.
 *
 * Owns: tiles of at most 64 consecutive positions of a sequence, heaviest first, and
 * the division of few tiles over many keys among the multiprocessors. What a row
 * comes to does not depend on either.
 */
#include "kernels/cuda/attn_cut.h"

#define SEG APR_CUDA_ATTN_SEG

static uint32_t segs_of(const struct apr_cuda_attn_tile *t)
{
	return (t->pos + t->rows - 1) / SEG + 1;
}

static uint32_t keys_of(const struct apr_cuda_attn_tile *t)
{
	uint32_t last = t->pos + t->rows - 1, end = (t->seg + t->segs) * SEG;

	return (last < end ? last + 1 : end) - t->seg * SEG;
}

/* Few, and nearly sorted backwards. */
static void heaviest_first(struct apr_cuda_attn_tile *t, uint32_t n)
{
	uint32_t i, k;

	for (i = 1; i < n; i++) {
		struct apr_cuda_attn_tile one = t[i];

		for (k = i; k > 0 && keys_of(&t[k - 1]) < keys_of(&one); k--)
			t[k] = t[k - 1];
		t[k] = one;
	}
}

/* The most segments a range may have so that the last multiprocessor ends soonest; 0: undivided tiles do as well. */
static uint32_t range_of(const struct apr_cuda_attn_plan *p, const struct apr_cuda_attn_tile *t, uint32_t n)
{
	uint32_t i, c, most = 1, best = 0;
	uint64_t cost;

	if (!p->parts || (uint64_t)n * p->items > p->sms)
		return 0;
	for (i = 0; i < n; i++)
		most = segs_of(&t[i]) > most ? segs_of(&t[i]) : most;
	cost = most;
	for (c = most - 1; c > 0; c--) {
		uint64_t ranges = 0, rounds;

		for (i = 0; i < n; i++)
			ranges += (segs_of(&t[i]) + c - 1) / c;
		rounds = (ranges * p->items + p->sms - 1) / p->sms;
		if (rounds * c < cost) {
			cost = rounds * c;
			best = c;
		}
	}
	return best;
}

/* Tiles of more than c segments become ranges of c; the divided ones follow the n, which is returned. */
static uint32_t divide(const struct apr_cuda_attn_plan *p, struct apr_cuda_attn_tile *t, uint32_t n, uint32_t c, uint32_t *n_divided)
{
	struct apr_cuda_attn_tile divided[APR_CUDA_ATTN_DIVIDED];
	uint32_t i, k, whole = n, parts = 0, d = 0;

	for (i = 0; i < whole; i++) {
		uint32_t segs = segs_of(&t[i]), ranges = (segs + c - 1) / c;

		if (ranges < 2 || d == APR_CUDA_ATTN_DIVIDED || segs > p->parts - parts || n + ranges - 1 > whole + APR_CUDA_ATTN_RANGES)
			continue;
		t[i].part = parts;
		t[i].merge = d;
		divided[d] = t[i];
		divided[d].seg = ranges;
		divided[d++].segs = 0;
		for (k = 0; k < ranges; k++) {
			struct apr_cuda_attn_tile *r = k ? &t[n++] : &t[i];

			*r = t[i];
			r->seg = k * c;
			r->segs = segs - k * c < c ? segs - k * c : c;
		}
		parts += segs;
	}
	heaviest_first(t, n);
	for (i = 0; i < d; i++)
		t[n + i] = divided[i];
	*n_divided = d;
	return n;
}

void apr_cuda_attn_cut(const struct apr_cuda_attn_plan *p, const uint32_t *pos, const uint32_t *slot, uint32_t n,
                                  struct apr_cuda_attn_tile *tiles, uint32_t *n_tiles)
{
	uint32_t i, k, c;

	n_tiles[0] = n_tiles[1] = 0;
	for (i = 0; i < n; i += k) {
		for (k = 1; k < APR_CUDA_ATTN_ROWS && i + k < n; k++)
			if (slot[i + k] != slot[i] || pos[i + k] != pos[i] + k)
				break;
		tiles[n_tiles[0]++] = (struct apr_cuda_attn_tile){.slot = slot[i], .row = i, .rows = k, .pos = pos[i],
		                                                  .segs = APR_CUDA_ATTN_SEGS, .merge = APR_CUDA_WHOLE};
	}
	heaviest_first(tiles, n_tiles[0]);
	c = range_of(p, tiles, n_tiles[0]);
	if (c)
		n_tiles[0] = divide(p, tiles, n_tiles[0], c, &n_tiles[1]);
}
