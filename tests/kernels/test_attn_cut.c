/* SPDX-License-Identifier: MIT */
/*
 * Prompt rows cut into tiles for the CUDA backend: every key of every row once, few tiles over many keys divided, and
 * only where that ends sooner. Host code: no device.
 */
#include <stdbool.h>

#include "kernels/cuda/attn_cut.h"
#include "tests/harness.h"

#define SMS 132u
#define MOST_ROWS 4096u
#define SEG APR_CUDA_ATTN_SEG

static struct {
	uint32_t pos[MOST_ROWS], slot[MOST_ROWS], n;
	struct apr_cuda_attn_tile tiles[MOST_ROWS + APR_CUDA_ATTN_MORE];
	uint32_t n_tiles[2];
} s;

static void rows_of(uint32_t slot, uint32_t pos, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++, s.n++) {
		s.pos[s.n] = pos + i;
		s.slot[s.n] = slot;
	}
}

static void cut(uint32_t items, uint32_t parts)
{
	const struct apr_cuda_attn_plan p = {.sms = SMS, .items = items, .parts = parts};

	apr_cuda_attn_cut(&p, s.pos, s.slot, s.n, s.tiles, s.n_tiles);
}

static bool in_tile(const struct apr_cuda_attn_tile *t, uint32_t row)
{
	return row >= t->row && row < t->row + t->rows;
}

/* Rows' segments that are not in exactly one range, rows in a tile of another sequence or position. */
static uint32_t wrong_rows(void)
{
	uint32_t i, k, seg, wrong = 0;

	for (i = 0; i < s.n; i++)
		for (seg = 0; seg <= s.pos[i] / SEG; seg++) {
			uint32_t times = 0;

			for (k = 0; k < s.n_tiles[0]; k++) {
				const struct apr_cuda_attn_tile *t = &s.tiles[k];

				if (!in_tile(t, i))
					continue;
				wrong += t->slot != s.slot[i] || t->pos + (i - t->row) != s.pos[i] || t->rows > 64;
				times += seg >= t->seg && seg < t->seg + t->segs;
			}
			wrong += times != 1;
		}
	return wrong;
}

/* Divided tiles: one entry each after the ranges, which count right; parts that overlap or pass the end. */
static uint32_t wrong_divided(uint32_t parts)
{
	uint32_t i, k, wrong = 0, used = 0;

	for (i = 0; i < s.n_tiles[1]; i++) {
		const struct apr_cuda_attn_tile *d = &s.tiles[s.n_tiles[0] + i];
		uint32_t ranges = 0, segs = 0;

		for (k = 0; k < s.n_tiles[0]; k++)
			if (s.tiles[k].merge == i) {
				ranges++;
				segs += s.tiles[k].segs;
				wrong += s.tiles[k].part != d->part || s.tiles[k].row != d->row || s.tiles[k].rows != d->rows;
			}
		wrong += d->merge != i || d->seg != ranges || ranges < 2 || d->part != used ||
		         segs != (d->pos + d->rows - 1) / SEG + 1;
		used += segs;
	}
	for (k = 0; k < s.n_tiles[0]; k++)
		wrong += s.tiles[k].merge != APR_CUDA_WHOLE && s.tiles[k].merge >= s.n_tiles[1];
	return wrong + (used > parts);
}

static uint32_t keys(const struct apr_cuda_attn_tile *t)
{
	uint32_t last = t->pos + t->rows, end = (t->seg + t->segs) * SEG;

	return (last < end ? last : end) - t->seg * SEG;
}

static void check_all(uint32_t parts)
{
	uint32_t k, wrong = 0;

	CU_ASSERT_EQUAL(wrong_rows(), 0);
	CU_ASSERT_EQUAL(wrong_divided(parts), 0);
	for (k = 1; k < s.n_tiles[0]; k++)
		wrong += keys(&s.tiles[k]) > keys(&s.tiles[k - 1]);
	CU_ASSERT_EQUAL(wrong, 0);
	CU_ASSERT(s.n_tiles[0] + s.n_tiles[1] <= s.n + APR_CUDA_ATTN_MORE);
}

static void divides_where_it_ends_sooner(void)
{
	const struct {
		uint32_t items, parts, rows, pos, divided;
	} one[] = {
		{16, 128, 64, 32704, 1}, /* one tile over 32k keys */
		{16, 128, 2048, 0, 0},   /* tiles enough */
		{16, 32, 64, 4000, 1},   {16, 128, 512, 7680, 0}, /* 128 blocks' worth, all alike */
		{16, 128, 128, 4096, 2}, {4, 8, 64, 200, 0},      /* one segment */
		{4, 3, 64, 3500, 0},                              /* scratch too small for its four segments */
		{6, 64, 300, 5000, 5},   {32, 0, 64, 9000, 0},    {16, 512, 64, 200000, 1},
		{132, 128, 64, 9000, 0}, {1, 128, 4096, 9000, 0},
	};
	uint32_t i;

	for (i = 0; i < sizeof one / sizeof *one; i++) {
		s.n = 0;
		rows_of(3, one[i].pos, one[i].rows);
		cut(one[i].items, one[i].parts);
		check_all(one[i].parts);
		if (one[i].items != 1) /* there parts run out first */
			CU_ASSERT_EQUAL(s.n_tiles[1], one[i].divided);
	}
}

static void never_spans_sequences_or_gaps(void)
{
	s.n = 0;
	rows_of(5, 100, 37);
	rows_of(2, 137, 64); /* the next position, of another sequence */
	rows_of(2, 300, 65); /* the same sequence, further on */
	rows_of(9, 0, 1);
	cut(16, 0);
	check_all(0);
	CU_ASSERT_EQUAL(s.n_tiles[0], 5);
	CU_ASSERT_EQUAL(s.n_tiles[1], 0);
	s.n = 0;
	cut(16, 128);
	CU_ASSERT_EQUAL(s.n_tiles[0], 0);
	CU_ASSERT_EQUAL(s.n_tiles[1], 0);
}

/* Whatever the step: what scratch and table hold is never passed. */
static void holds_at_random(void)
{
	uint32_t seed = 12345, i, k;

	for (i = 0; i < 400; i++) {
		uint32_t parts, n;

		s.n = 0;
		seed = seed * 1664525u + 1013904223u;
		n = 1 + (seed >> 20) % 8;
		for (k = 0; k < n; k++) {
			seed = seed * 1664525u + 1013904223u;
			rows_of(k, (seed >> 8) % 20000, 1 + (seed >> 24) % 130);
		}
		parts = (seed >> 12) % 130;
		cut(1 + (seed >> 4) % 40, parts);
		check_all(parts);
	}
}

static const struct apr_test tests[] = {
	{"divides_where_it_ends_sooner", divides_where_it_ends_sooner, 0},
	{"never_spans_sequences_or_gaps", never_spans_sequences_or_gaps, 0},
	{"holds_at_random", holds_at_random, 0},
};
TEST_MAIN("kernels/attn_cut", tests)
