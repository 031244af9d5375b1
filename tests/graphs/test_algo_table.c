/* SPDX-License-Identifier: MIT */
/*
 * The file of the algorithm table: what is written comes back; a file that is stale,
 * damaged anywhere, cut anywhere or no file at all gives nothing and says why. No GPU.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "graphs/algo_table.h"
#include "tests/harness.h"

#define ENTRIES 150u

static char path[300];

static struct algo_entry entry(uint32_t i)
{
	struct algo_entry e = {.type = i % 3, .n = 4096 + i / 12 * 64, .k = 4096, .rows = 64u << (i / 3 % 4), .ns = 1000 * i,
	                       .first_ns = 2000 * i, .candidates = i, .admitted = i % 5 != 0};
	uint32_t k;

	for (k = 0; k < ALGO_WORDS; k++)
		e.algo[k] = UINT64_C(0x9e3779b97f4a7c15) * (i * ALGO_WORDS + k + 1);
	return e;
}

static struct algo_table fresh(const char *key)
{
	struct algo_table t = {0};

	snprintf(t.key, sizeof t.key, "%s", key);
	return t;
}

static void write_one(const char *key)
{
	struct algo_table t = fresh(key);
	uint32_t i;

	snprintf(path, sizeof path, "%s/cache/of/one/table", apr_test_tmpdir());
	for (i = 0; i < ENTRIES; i++) {
		struct algo_entry e = entry(i);

		CU_ASSERT_EQUAL(algo_table_put(&t, &e), 0);
	}
	CU_ASSERT_TRUE(t.changed);
	CU_ASSERT_EQUAL(algo_table_write(&t, path), 0);
	CU_ASSERT_FALSE(t.changed);
	algo_table_free(&t);
}

/* Reads with this key; true: refused with words, and nothing is in the table. */
static bool refused(const char *key, char *why, size_t len)
{
	struct algo_table t = fresh(key);
	int rc;

	why[0] = 0;
	rc = algo_table_read(&t, path, why, len);
	bool ok = rc < 0 && t.n == 0 && !t.entry && why[0];

	algo_table_free(&t);
	return ok;
}

static void what_is_written_comes_back(void)
{
	struct algo_table t = fresh("a GPU, a driver");
	char why[120];
	uint32_t i, wrong = 0;

	write_one("a GPU, a driver");
	CU_ASSERT_EQUAL_FATAL(algo_table_read(&t, path, why, sizeof why), 0);
	CU_ASSERT_EQUAL(t.n, ENTRIES);
	for (i = 0; i < ENTRIES; i++) {
		struct algo_entry e = entry(i);
		const struct algo_entry *f = algo_table_find(&t, e.type, e.n, e.k, e.rows);

		wrong += !f || memcmp(f, &e, sizeof e) != 0;
	}
	CU_ASSERT_EQUAL(wrong, 0);
	CU_ASSERT_PTR_NULL(algo_table_find(&t, 0, 4096, 4096, 63));
	algo_table_free(&t);
}

static void a_second_choice_replaces_the_first(void)
{
	struct algo_table t = fresh("k");
	struct algo_entry e = entry(7);

	CU_ASSERT_EQUAL(algo_table_put(&t, &e), 0);
	e.ns = 5;
	CU_ASSERT_EQUAL(algo_table_put(&t, &e), 0);
	CU_ASSERT_EQUAL(t.n, 1);
	CU_ASSERT_EQUAL(algo_table_find(&t, e.type, e.n, e.k, e.rows)->ns, 5);
	algo_table_free(&t);
}

static void an_empty_table_is_a_good_file(void)
{
	struct algo_table t = fresh("k"), back = fresh("k");
	char why[120];

	snprintf(path, sizeof path, "%s/empty", apr_test_tmpdir());
	CU_ASSERT_EQUAL(algo_table_write(&t, path), 0);
	CU_ASSERT_EQUAL(algo_table_read(&back, path, why, sizeof why), 0);
	CU_ASSERT_EQUAL(back.n, 0);
	algo_table_free(&back);
}

static void another_key_is_stale(void)
{
	char why[120];

	write_one("driver 580");
	CU_ASSERT_TRUE(refused("driver 581", why, sizeof why));
	CU_ASSERT_PTR_NOT_NULL(strstr(why, "stale"));
	CU_ASSERT_FALSE(refused("driver 580", why, sizeof why));
}

static uint8_t *slurp(size_t *len)
{
	FILE *f = fopen(path, "rb");
	uint8_t *b;

	if (!f)
		abort();
	fseek(f, 0, SEEK_END);
	*len = (size_t)ftell(f);
	rewind(f);
	b = malloc(*len);
	if (!b || fread(b, 1, *len, f) != *len)
		abort();
	fclose(f);
	return b;
}

static void spit(const uint8_t *b, size_t len)
{
	FILE *f = fopen(path, "wb");

	if (!f || fwrite(b, 1, len, f) != len)
		abort();
	fclose(f);
}

static void any_flipped_bit_is_seen(void)
{
	char why[120];
	uint32_t missed = 0;
	size_t len, i;
	uint8_t *b;

	write_one("k");
	b = slurp(&len);
	for (i = 0; i < len; i += i < 600 ? 1 : 41) {
		b[i] ^= (uint8_t)(1u << (i % 8));
		spit(b, len);
		missed += !refused("k", why, sizeof why);
		b[i] ^= (uint8_t)(1u << (i % 8));
	}
	CU_ASSERT_EQUAL(missed, 0);
	free(b);
}

static void any_other_length_is_seen(void)
{
	char why[120];
	uint32_t missed = 0;
	size_t len, i;
	uint8_t *b;

	write_one("k");
	b = slurp(&len);
	for (i = 0; i < len; i += i < 600 ? 13 : 401) {
		spit(b, i);
		missed += !refused("k", why, sizeof why);
	}
	b = realloc(b, len + 96);
	if (!b)
		abort();
	memset(b + len, 0, 96);
	for (i = 1; i <= 96; i += 19) {
		spit(b, len + i);
		missed += !refused("k", why, sizeof why);
	}
	CU_ASSERT_EQUAL(missed, 0);
	free(b);
}

static void what_is_no_file_is_refused(void)
{
	struct algo_table t = fresh("k");
	char why[120];

	snprintf(path, sizeof path, "%s/none", apr_test_tmpdir());
	CU_ASSERT_EQUAL(algo_table_read(&t, path, why, sizeof why), -ENOENT);
	CU_ASSERT_EQUAL(mkdir(path, 0700), 0);
	CU_ASSERT_TRUE(refused("k", why, sizeof why));
	CU_ASSERT_EQUAL(rmdir(path), 0);
	CU_ASSERT_EQUAL(mkfifo(path, 0600), 0); /* not waited for */
	CU_ASSERT_TRUE(refused("k", why, sizeof why));
	CU_ASSERT_EQUAL(unlink(path), 0);
	CU_ASSERT_EQUAL(symlink("/etc/passwd", path), 0);
	CU_ASSERT_TRUE(refused("k", why, sizeof why));
	CU_ASSERT_EQUAL(unlink(path), 0);
}

static void a_folder_that_cannot_be_written_is_an_error(void)
{
	struct algo_table t = fresh("k");
	char in[300];

	snprintf(in, sizeof in, "%s/file", apr_test_tmpdir());
	close(open(in, O_WRONLY | O_CREAT, 0600));
	snprintf(path, sizeof path, "%s/file/table", apr_test_tmpdir());
	CU_ASSERT_TRUE(algo_table_write(&t, path) < 0);
	CU_ASSERT_EQUAL(unlink(in), 0);
}

static const struct apr_test tests[] = {
	{"what_is_written_comes_back", what_is_written_comes_back, 0},
	{"a_second_choice_replaces_the_first", a_second_choice_replaces_the_first, 0},
	{"an_empty_table_is_a_good_file", an_empty_table_is_a_good_file, 0},
	{"another_key_is_stale", another_key_is_stale, 0},
	{"any_flipped_bit_is_seen", any_flipped_bit_is_seen, 0},
	{"any_other_length_is_seen", any_other_length_is_seen, 0},
	{"what_is_no_file_is_refused", what_is_no_file_is_refused, 0},
	{"a_folder_that_cannot_be_written_is_an_error", a_folder_that_cannot_be_written_is_an_error, 0},
};

TEST_MAIN("graphs/test_algo_table", tests)
