/* SPDX-License-Identifier: MIT */
/*
 * Pages, reference counts and the prefix tree, without a model: what is shared,
 * with whom, what is forgotten first, and that nothing is ever lost.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kv.h"
#include "tests/harness.h"

static struct apr_sizes sizes_of(uint32_t full_pages, uint32_t window_pages, uint32_t window)
{
	struct apr_sizes s = {.n_ctx = 1024, .max_rows = 64, .n_groups = window ? 2 : 1};

	s.group[0] = (struct apr_kv_group){.n_layers = 1, .n_kv_heads = 1, .k_dim = 4, .v_dim = 4, .n_pages = full_pages,
	                                   .max_pages_seq = 16};
	s.group[1] = (struct apr_kv_group){.n_layers = 1, .n_kv_heads = 1, .k_dim = 4, .v_dim = 4, .window = window,
	                                   .n_pages = window_pages, .max_pages_seq = 16};
	return s;
}

static void count_up(uint32_t *ids, uint32_t n, uint32_t from)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		ids[i] = from + i;
}

/* As the engine does: look up, reserve, compute, commit. Returns the cached positions. */
static uint32_t run_seq(struct apr_kv *kv, struct apr_kv_seq *s, uint64_t scope, const uint32_t *ids, uint32_t n,
                        uint32_t generated_from)
{
	uint64_t kinds[32] = {0};
	uint32_t hit, i;

	for (i = generated_from; i < n; i++)
		kinds[i / 64] |= UINT64_C(1) << i % 64;

	CU_ASSERT_EQUAL_FATAL(apr_kv_seq_init(kv, s), 0);
	hit = apr_kv_lookup(kv, s, scope, ids, n, kinds);
	CU_ASSERT_EQUAL_FATAL(apr_kv_reserve(kv, s, n), 0);
	apr_kv_commit(kv, s, scope, ids, n, kinds, true);
	CU_ASSERT_EQUAL(apr_kv_check(kv), 0);
	return hit;
}

static void prefix_is_found_below_the_last_token(void)
{
	struct apr_sizes z = sizes_of(64, 0, 0);
	struct apr_kv_seq a, b;
	struct apr_kv *kv;
	uint32_t ids[1024], n;

	count_up(ids, 1024, 0);
	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	CU_ASSERT_EQUAL(run_seq(kv, &a, 1, ids, 300, UINT32_MAX), 0);
	for (n = 1; n <= 320; n++) {
		uint32_t pages = (n - 1) / 64 < 4 ? (n - 1) / 64 : 4; /* 300 positions make 4 full pages */

		CU_ASSERT_EQUAL(run_seq(kv, &b, 1, ids, n, UINT32_MAX), pages * 64);
		apr_kv_seq_fini(kv, &b);
		if (n > 300) { /* b has made the fifth page known: forget it again by filling the pool */
			break;
		}
	}
	apr_kv_seq_fini(kv, &a);
	CU_ASSERT_EQUAL(apr_kv_check(kv), 0);
	apr_kv_free(kv);
}

static void other_tokens_kinds_and_scopes_are_not_found(void)
{
	struct apr_sizes z = sizes_of(64, 0, 0);
	struct apr_kv_seq a, b;
	struct apr_kv *kv;
	uint32_t ids[256], other[256];

	count_up(ids, 256, 0);
	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	run_seq(kv, &a, 1, ids, 200, UINT32_MAX);
	/* one token differs in the second page */
	memcpy(other, ids, sizeof ids);
	other[100] = 9999;
	CU_ASSERT_EQUAL(run_seq(kv, &b, 1, other, 200, UINT32_MAX), 64);
	apr_kv_seq_fini(kv, &b);
	/* another user */
	CU_ASSERT_EQUAL(run_seq(kv, &b, 2, ids, 200, UINT32_MAX), 0);
	apr_kv_seq_fini(kv, &b);
	/* the same ids, but those from 70 on were generated */
	CU_ASSERT_EQUAL(run_seq(kv, &b, 1, ids, 200, 70), 64);
	apr_kv_seq_fini(kv, &b);
	/* the second page's tokens as a first page */
	CU_ASSERT_EQUAL(run_seq(kv, &b, 1, ids + 64, 100, UINT32_MAX), 0);
	apr_kv_seq_fini(kv, &b);
	apr_kv_seq_fini(kv, &a);
	apr_kv_free(kv);
}

static void generated_pages_are_found_by_kind(void)
{
	struct apr_sizes z = sizes_of(64, 0, 0);
	struct apr_kv_seq a, b;
	struct apr_kv *kv;
	uint32_t ids[256];

	count_up(ids, 256, 0);
	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	run_seq(kv, &a, 1, ids, 200, 70);
	apr_kv_seq_fini(kv, &a);
	CU_ASSERT_EQUAL(run_seq(kv, &b, 1, ids, 200, 70), 192);
	apr_kv_seq_fini(kv, &b);
	CU_ASSERT_EQUAL(run_seq(kv, &b, 1, ids, 200, 71), 64);
	apr_kv_seq_fini(kv, &b);
	apr_kv_free(kv);
}

static void pages_are_shared_and_counted(void)
{
	struct apr_sizes z = sizes_of(10, 0, 0);
	struct apr_kv_counts c;
	struct apr_kv_seq a, b;
	struct apr_kv *kv;
	uint32_t ids[512];

	count_up(ids, 512, 0);
	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	run_seq(kv, &a, 1, ids, 300, UINT32_MAX); /* 5 pages, the last half full */
	apr_kv_counts(kv, &c);
	CU_ASSERT(c.total == 10 && c.free == 5 && c.cached == 0);
	CU_ASSERT_EQUAL(run_seq(kv, &b, 1, ids, 300, UINT32_MAX), 256); /* 4 shared, 1 its own */
	apr_kv_counts(kv, &c);
	CU_ASSERT_EQUAL(c.free, 4);
	CU_ASSERT_EQUAL(a.page[0][3], b.page[0][3]);
	CU_ASSERT_NOT_EQUAL(a.page[0][4], b.page[0][4]);
	apr_kv_seq_fini(kv, &a);
	apr_kv_counts(kv, &c);
	CU_ASSERT(c.free == 5 && c.cached == 0); /* b still holds what it shared */
	apr_kv_seq_fini(kv, &b);
	apr_kv_counts(kv, &c);
	CU_ASSERT(c.free == 10 && c.cached == 4);
	apr_kv_free(kv);
}

static void reserve_takes_all_or_nothing(void)
{
	struct apr_sizes z = sizes_of(6, 3, 100);
	struct apr_kv_counts c;
	struct apr_kv_seq a, b;
	struct apr_kv *kv;

	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	CU_ASSERT_EQUAL(apr_kv_seq_init(kv, &a), 0);
	CU_ASSERT_EQUAL(apr_kv_seq_init(kv, &b), 0);
	CU_ASSERT_EQUAL(apr_kv_reserve(kv, &a, 128), 0);
	CU_ASSERT_EQUAL(apr_kv_reserve(kv, &b, 128), -EAGAIN); /* the full group could, the window group has one page */
	apr_kv_counts(kv, &c);
	CU_ASSERT_EQUAL(c.free, 9 - 4);
	CU_ASSERT_EQUAL(apr_kv_reserve(kv, &b, 64), 0);
	CU_ASSERT_EQUAL(apr_kv_reserve(kv, &a, 2000), -EINVAL); /* beyond the context */
	apr_kv_seq_fini(kv, &a);
	apr_kv_seq_fini(kv, &b);
	CU_ASSERT_EQUAL(apr_kv_check(kv), 0);
	apr_kv_free(kv);
}

static void least_recently_used_goes_first(void)
{
	struct apr_sizes z = sizes_of(8, 0, 0);
	struct apr_kv_seq s;
	struct apr_kv *kv;
	uint32_t a[256], b[256], c[512];

	count_up(a, 256, 0);
	count_up(b, 256, 1000);
	count_up(c, 512, 2000);
	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	run_seq(kv, &s, 1, a, 192, UINT32_MAX); /* 3 pages each */
	apr_kv_seq_fini(kv, &s);
	run_seq(kv, &s, 1, b, 192, UINT32_MAX);
	apr_kv_seq_fini(kv, &s);
	CU_ASSERT_EQUAL(run_seq(kv, &s, 1, a, 193, UINT32_MAX), 192); /* a was used last */
	apr_kv_seq_fini(kv, &s);
	run_seq(kv, &s, 1, c, 256, UINT32_MAX); /* 4 pages: 2 were never used, so 2 of b's must go: its last ones */
	apr_kv_seq_fini(kv, &s);
	CU_ASSERT_EQUAL(apr_kv_seq_init(kv, &s), 0);
	CU_ASSERT_EQUAL(apr_kv_lookup(kv, &s, 1, b, 193, NULL), 64);
	apr_kv_seq_fini(kv, &s);
	CU_ASSERT_EQUAL(apr_kv_seq_init(kv, &s), 0);
	CU_ASSERT_EQUAL(apr_kv_lookup(kv, &s, 1, a, 193, NULL), 192);
	apr_kv_seq_fini(kv, &s);
	CU_ASSERT_EQUAL(apr_kv_check(kv), 0);
	apr_kv_free(kv);
}

static void window_pages_come_back(void)
{
	struct apr_sizes z = sizes_of(16, 16, 100);
	struct apr_kv_counts c;
	struct apr_kv_seq s;
	struct apr_kv *kv;
	uint32_t ids[1024], done;

	count_up(ids, 1024, 0);
	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	CU_ASSERT_EQUAL(apr_kv_seq_init(kv, &s), 0);
	for (done = 0; done < 1024; done += 32) {
		CU_ASSERT_EQUAL_FATAL(apr_kv_reserve(kv, &s, done + 32), 0);
		apr_kv_commit(kv, &s, 1, ids, done + 32, NULL, true);
		/* a query at done + 32 sees keys from done + 32 - 99 on: their page is held, the one before is not */
		CU_ASSERT_EQUAL(s.first[1], done + 33 > 100 ? (done + 33 - 100) / 64 : 0);
		CU_ASSERT(s.n[1] - s.first[1] <= apr_kv_group_need(&z.group[1], 1024, 32));
		CU_ASSERT_EQUAL(apr_kv_check(kv), 0);
	}
	apr_kv_seq_fini(kv, &s);
	apr_kv_counts(kv, &c);
	CU_ASSERT_EQUAL(c.free, c.total);
	apr_kv_free(kv);
}

/* With few window pages only the end of a prefix is left in that group: a hit needs all groups. */
static void hit_needs_every_group(void)
{
	struct apr_sizes z = sizes_of(32, 6, 100);
	struct apr_kv_seq s;
	struct apr_kv *kv;
	uint32_t ids[1024], done, hit;

	count_up(ids, 1024, 0);
	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	CU_ASSERT_EQUAL(apr_kv_seq_init(kv, &s), 0);
	for (done = 0; done < 640; done += 64) {
		CU_ASSERT_EQUAL_FATAL(apr_kv_reserve(kv, &s, done + 64), 0);
		apr_kv_commit(kv, &s, 1, ids, done + 64, NULL, true);
	}
	apr_kv_seq_fini(kv, &s);
	/* the first pages of the window group were taken again long ago: a short prefix cannot be restored */
	CU_ASSERT_EQUAL(apr_kv_seq_init(kv, &s), 0);
	CU_ASSERT_EQUAL(apr_kv_lookup(kv, &s, 1, ids, 129, NULL), 0);
	apr_kv_seq_fini(kv, &s);
	/* the longest can: its window's pages are the youngest */
	CU_ASSERT_EQUAL(apr_kv_seq_init(kv, &s), 0);
	hit = apr_kv_lookup(kv, &s, 1, ids, 641, NULL);
	CU_ASSERT_EQUAL(hit, 640);
	CU_ASSERT_EQUAL(s.first[1], (641 - 100) / 64);
	CU_ASSERT_EQUAL(s.first[0], 0);
	CU_ASSERT_EQUAL(apr_kv_check(kv), 0);
	apr_kv_seq_fini(kv, &s);
	apr_kv_free(kv);
}

/* Random sequences with shared beginnings, drops and ends; the counts must always add up and every hit be true. */
static void random_lives(void)
{
	enum { SEQS = 12, ROUNDS = 6000 };
	struct apr_sizes z = sizes_of(40, 24, 100);
	struct apr_kv_seq s[SEQS];
	uint32_t done[SEQS] = {0}, ids[SEQS][1024], live[SEQS] = {0};
	uint64_t rng = 42;
	struct apr_kv_counts c;
	struct apr_kv *kv;
	int r, k;

	CU_ASSERT_EQUAL_FATAL(apr_kv_new(&kv, &z), 0);
	for (r = 0; r < ROUNDS; r++) {
		rng = rng * UINT64_C(6364136223846793005) + 1442695040888963407u;
		k = (int)((rng >> 33) % SEQS);
		if (!live[k]) {
			uint32_t family = (uint32_t)(rng >> 40) % 3, i;

			for (i = 0; i < 1024; i++)
				ids[k][i] = i < 64 * (1 + (rng >> 50) % 6) ? family * 10000 + i : (uint32_t)(rng >> 20) + i;
			CU_ASSERT_EQUAL_FATAL(apr_kv_seq_init(kv, &s[k]), 0);
			done[k] = apr_kv_lookup(kv, &s[k], 7, ids[k], 1024, NULL);
			live[k] = 1;
		} else if ((rng >> 60) == 0) {
			apr_kv_drop(kv, &s[k]);
			done[k] = 0;
		} else if ((rng >> 60) == 1 || done[k] + 64 > 1024) {
			apr_kv_seq_fini(kv, &s[k]);
			live[k] = 0;
		} else {
			uint32_t rows = 1 + (uint32_t)(rng >> 45) % 64;

			if (apr_kv_reserve(kv, &s[k], done[k] + rows) == 0) {
				done[k] += rows;
				apr_kv_commit(kv, &s[k], 7, ids[k], done[k], NULL, true);
			} else if ((rng >> 58 & 3) == 0) {
				apr_kv_drop(kv, &s[k]);
				done[k] = 0;
			}
		}
		if (apr_kv_check(kv)) {
			printf("\n  round %d: check says line %d\n", r, apr_kv_check(kv));
			CU_FAIL_FATAL("pages lost");
		}
	}
	for (k = 0; k < SEQS; k++)
		if (live[k])
			apr_kv_seq_fini(kv, &s[k]);
	apr_kv_counts(kv, &c);
	CU_ASSERT_EQUAL(c.free, c.total);
	CU_ASSERT_EQUAL(apr_kv_check(kv), 0);
	apr_kv_free(kv);
}

static const struct apr_test tests[] = {
	{"prefix_is_found_below_the_last_token", prefix_is_found_below_the_last_token, KEEPS_HEAP}, /* stdio's buffer */
	{"other_tokens_kinds_and_scopes_are_not_found", other_tokens_kinds_and_scopes_are_not_found, 0},
	{"generated_pages_are_found_by_kind", generated_pages_are_found_by_kind, 0},
	{"pages_are_shared_and_counted", pages_are_shared_and_counted, 0},
	{"reserve_takes_all_or_nothing", reserve_takes_all_or_nothing, 0},
	{"least_recently_used_goes_first", least_recently_used_goes_first, 0},
	{"window_pages_come_back", window_pages_come_back, 0},
	{"hit_needs_every_group", hit_needs_every_group, 0},
	{"random_lives", random_lives, 0},
};
TEST_MAIN("engine/kv", tests)
