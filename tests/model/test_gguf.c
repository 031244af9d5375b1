/* SPDX-License-Identifier: MIT */
/*
 * Damaged and hostile GGUF files, the list in CASES "GGUF" as far as the format
 * goes: header, keys, tensors, truncation, split parts. Fields with a meaning are
 * test_fields.c, what an architecture makes of a sound file test_model.c.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/types.h"
#include "model/gguf.h"
#include "tests/harness.h"
#include "tests/support/bad_files.h"

static void with_u32(const char *key, uint32_t v)
{
	struct gguf_writer *w = bad_tiny();

	gw_drop(w, key);
	gw_u32(w, key, v);
	bad_refused(w, key);
}

/* ---- the header ---- */

static void magic_only(void)
{
	bad_refused_bytes("GGUF", 4, "version");
	bad_refused_bytes("GGML", 4, "magic");
	bad_refused_bytes("", 0, "magic");
}

static void version_0_1_and_4(void)
{
	static const uint32_t bad[] = {0, 1, 4, 0x03000000};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct gguf_writer *w = bad_tiny();

		gw_set_version(w, bad[i]);
		bad_refused(w, "version");
	}
}

static void version_2_is_read(void)
{
	struct gguf_writer *w = bad_tiny();
	char err[256];

	gw_set_version(w, 2);
	CU_ASSERT_EQUAL(gw_write(w, bad_tmp("v2.gguf")), 0);
	CU_ASSERT_EQUAL(bad_open(bad_tmp("v2.gguf"), err, sizeof err), 0);
	gw_free(w);
}

static void n_tensors_huge(void)
{
	static const uint64_t bad[] = {UINT64_MAX, UINT64_MAX / 2, UINT64_C(1) << 32, 100000};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct gguf_writer *w = bad_tiny();

		gw_set_counts(w, bad[i], 1);
		bad_refused(w, "n_tensors");
	}
}

static void n_kv_huge(void)
{
	static const uint64_t bad[] = {UINT64_MAX, UINT64_MAX / 2, UINT64_C(1) << 32, 60000};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct gguf_writer *w = bad_tiny();

		gw_set_counts(w, 1, bad[i]);
		bad_refused(w, "n_kv");
	}
}

/* ---- keys ---- */

static size_t header(uint8_t *p, uint64_t n_tensors, uint64_t n_kv)
{
	uint32_t version = 3;

	memcpy(p, "GGUF", 4);
	memcpy(p + 4, &version, 4);
	memcpy(p + 8, &n_tensors, 8);
	memcpy(p + 16, &n_kv, 8);
	return 24;
}

static void key_length_huge(void)
{
	static const uint64_t bad[] = {UINT64_MAX, UINT64_MAX - 7, UINT64_C(1) << 40, 0, 65536};
	uint8_t buf[70000] = {0};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		size_t n = header(buf, 0, 1);

		memcpy(buf + n, &bad[i], 8);
		bad_refused_bytes(buf, sizeof buf, "key number 0");
	}
}

static void string_length_huge(void)
{
	static const uint64_t bad[] = {UINT64_MAX, UINT64_MAX - 7, UINT64_C(1) << 40};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct gguf_writer *w = bad_tiny();

		gw_raw(w, "general.author", GW_STR, &bad[i], sizeof bad[i]);
		bad_refused(w, "general.author");
	}
}

/* The last value of a file without tensors says one byte more than there is. */
static void string_one_byte_past_the_end(void)
{
	uint64_t key_len = 14, len;
	uint32_t type = GW_STR;
	uint8_t buf[64] = {0};
	size_t n = header(buf, 0, 1);
	struct gguf *g;
	char err[128];

	memcpy(buf + n, &key_len, 8);
	memcpy(buf + n + 8, "general.author", key_len);
	memcpy(buf + n + 22, &type, 4);
	len = sizeof buf - (n + 34);
	memcpy(buf + n + 26, &len, 8);
	CU_ASSERT_EQUAL_FATAL(gguf_open_memory(&g, buf, sizeof buf, err, sizeof err), 0);
	gguf_close(g);
	len++;
	memcpy(buf + n + 26, &len, 8);
	CU_ASSERT_EQUAL(gguf_open_memory(&g, buf, sizeof buf, err, sizeof err), -EINVAL);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "general.author"));
}

static void duplicate_key(void)
{
	struct gguf_writer *w = bad_tiny();

	gw_u32(w, "llama.context_length", 4096);
	bad_refused(w, "llama.context_length");
}

static void unknown_value_type(void)
{
	struct gguf_writer *w = bad_tiny();

	gw_raw(w, "general.odd", 13, "12345678", 8);
	bad_refused(w, "general.odd");
}

static void bool_neither_0_nor_1(void)
{
	struct gguf_writer *w = bad_tiny();

	gw_raw(w, "general.odd", GW_BOOL, "\2", 1);
	bad_refused(w, "general.odd");
}

static void alignment_bad(void)
{
	static const uint32_t bad[] = {0, 1, 4, 13, 48, UINT32_C(1) << 31, UINT32_MAX};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++)
		with_u32("general.alignment", bad[i]);
}

static void alignment_int32(void)
{
	struct gguf_writer *w = bad_tiny();

	gw_i32(w, "general.alignment", 32);
	bad_refused(w, "general.alignment");
}

static void alignment_64_and_8_are_read(void)
{
	static const uint32_t good[] = {8, 64, 4096};
	char err[256];
	size_t i;

	for (i = 0; i < sizeof good / sizeof *good; i++) {
		struct gguf_writer *w = bad_tiny();

		gw_set_align(w, good[i]);
		gw_u32(w, "general.alignment", good[i]);
		CU_ASSERT_EQUAL(gw_write(w, bad_tmp("aligned.gguf")), 0);
		CU_ASSERT_EQUAL(bad_open(bad_tmp("aligned.gguf"), err, sizeof err), 0);
		gw_free(w);
	}
}

static void array_in_array(void)
{
	struct gguf_writer *w = bad_tiny();
	struct {
		uint32_t elem;
		uint64_t n;
	} __attribute__((packed)) a = {GW_ARR, 1};

	gw_raw(w, "general.nested", GW_ARR, &a, sizeof a);
	bad_refused(w, "general.nested");
}

static void array_count_huge(void)
{
	static const uint64_t bad[] = {UINT64_C(1) << 62, UINT64_C(1) << 61, UINT64_MAX, UINT64_C(1) << 40};
	static const enum gw_type elems[] = {GW_U8, GW_I32, GW_F64, GW_STR, GW_BOOL};
	size_t i, j;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		for (j = 0; j < sizeof elems / sizeof *elems; j++) {
			struct gguf_writer *w = bad_tiny();
			struct {
				uint32_t elem;
				uint64_t n;
			} __attribute__((packed)) a = {elems[j], bad[i]};

			gw_raw(w, "general.numbers", GW_ARR, &a, sizeof a);
			bad_refused(w, "general.numbers");
		}
	}
}

static void array_element_type_unknown(void)
{
	struct gguf_writer *w = bad_tiny();
	uint32_t a[3] = {99, 0, 0};

	gw_raw(w, "general.numbers", GW_ARR, a, sizeof a);
	bad_refused(w, "general.numbers");
}

/* 65,536 keys that all differ in their last bytes: quick, and a pair of equal ones is found. */
static void many_keys(void)
{
	uint32_t n = 60000, i;
	size_t cap = 24 + (size_t)n * 45, len;
	uint8_t *p = malloc(cap);

	if (!p)
		abort();
	len = header(p, 0, n);
	for (i = 0; i < n; i++) {
		uint64_t key_len = 32;
		uint32_t type = GW_U8;
		char key[33];

		snprintf(key, sizeof key, "%032u", i == n - 1 ? 7 : i);
		memcpy(p + len, &key_len, 8);
		memcpy(p + len + 8, key, 32);
		memcpy(p + len + 40, &type, 4);
		p[len + 44] = 1;
		len += 45;
	}
	bad_refused_bytes(p, len, "00000000000000000000000000000007: given twice");
	free(p);
}

/* ---- tensors ---- */

static void extra_tensor(const char *name, uint32_t type, unsigned n_dims, const uint64_t *ne, uint64_t bytes,
                         const char *names)
{
	struct gguf_writer *w = bad_tiny();

	gw_tensor(w, name, type, n_dims, ne, NULL, bytes);
	bad_refused(w, names);
}

static void tensor_name_64_bytes(void)
{
	uint64_t ne[1] = {8};
	char name[65];

	memset(name, 'n', 64);
	name[64] = 0;
	extra_tensor(name, APR_TYPE_F32, 1, ne, 32, "a name of 64 bytes");
	extra_tensor("", APR_TYPE_F32, 1, ne, 32, "a name of 0 bytes");
}

static void n_dims_0_or_5(void)
{
	uint64_t ne[5] = {8, 1, 1, 1, 1};

	extra_tensor("odd", APR_TYPE_F32, 0, ne, 32, "tensor odd");
	extra_tensor("odd", APR_TYPE_F32, 5, ne, 32, "tensor odd");
}

static void dims_product_wraps(void)
{
	uint64_t a[4] = {UINT64_C(1) << 32, UINT64_C(1) << 32, 1, 1}, b[2] = {UINT64_C(1) << 63, 2};
	uint64_t c[4] = {UINT64_C(1) << 16, UINT64_C(1) << 16, UINT64_C(1) << 16, UINT64_C(1) << 16}, d[2] = {UINT64_MAX, 1};

	extra_tensor("odd", APR_TYPE_F32, 4, a, 32, "tensor odd");
	extra_tensor("odd", APR_TYPE_F32, 2, b, 32, "tensor odd");
	extra_tensor("odd", APR_TYPE_F32, 4, c, 32, "tensor odd");
	extra_tensor("odd", APR_TYPE_F32, 2, d, 32, "tensor odd");
}

static void data_just_past_size_max(void)
{
	uint64_t ne[1] = {(UINT64_C(1) << 62) + 8}, q[2] = {256, UINT64_C(1) << 54};

	extra_tensor("odd", APR_TYPE_F32, 1, ne, 32, "tensor odd");
	extra_tensor("odd", APR_TYPE_Q6_K, 2, q, 32, "tensor odd");
}

static void dimension_0(void)
{
	uint64_t a[2] = {0, 8}, b[2] = {8, 0};

	extra_tensor("odd", APR_TYPE_F32, 2, a, 32, "tensor odd");
	extra_tensor("odd", APR_TYPE_F32, 2, b, 32, "tensor odd");
}

static void unknown_tensor_type(void)
{
	static const uint32_t bad[] = {4, 5, 9, 15, 31, 39, 64, 1000, UINT32_MAX /* -1 */, UINT32_C(1) << 31};
	uint64_t ne[1] = {256};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++)
		extra_tensor("odd", bad[i], 1, ne, 1024, "tensor odd");
}

static void row_not_whole_blocks(void)
{
	uint64_t ne[2] = {48, 2}, k[2] = {128, 2};

	extra_tensor("odd", APR_TYPE_Q4_0, 2, ne, 54, "tensor odd");
	extra_tensor("odd", APR_TYPE_Q4_K, 2, k, 144, "tensor odd");
}

static void offset_and_size_past_the_end(void)
{
	static const uint64_t bad[] = {UINT64_C(1) << 40, UINT64_MAX - 31, UINT64_C(1) << 63};
	uint64_t ne[1] = {8};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct gguf_writer *w = bad_tiny();

		gw_tensor_offset(w, gw_tensor(w, "odd", APR_TYPE_F32, 1, ne, NULL, 32), bad[i]);
		bad_refused(w, "tensor odd");
	}
	extra_tensor("odd", APR_TYPE_F32, 1, (const uint64_t[]){1000000}, 32, "tensor odd");
}

static void offset_not_aligned(void)
{
	struct gguf_writer *w = bad_tiny();
	uint64_t ne[1] = {8};

	gw_tensor_offset(w, gw_tensor(w, "odd", APR_TYPE_F32, 1, ne, NULL, 32), 4);
	bad_refused(w, "tensor odd");
}

static void overlapping_tensors(void)
{
	struct gguf_writer *w = bad_tiny();
	uint64_t ne[1] = {8};

	gw_tensor_offset(w, gw_tensor(w, "odd", APR_TYPE_F32, 1, ne, NULL, 32), 64);
	bad_refused(w, "overlaps tensor");
	w = gw_new(); /* by the last block of the first one */
	gw_tensor(w, "first", APR_TYPE_F32, 1, (const uint64_t[]){16}, NULL, 64);
	gw_tensor_offset(w, gw_tensor(w, "odd", APR_TYPE_F32, 1, ne, NULL, 32), 32);
	bad_refused(w, "overlaps tensor");
	w = bad_tiny();
	gw_tensor(w, "first", APR_TYPE_F32, 1, ne, NULL, 32);
	gw_tensor_offset(w, gw_tensor(w, "odd", APR_TYPE_F32, 1, ne, NULL, 32), 0);
	bad_refused(w, "overlaps tensor");
}

static void duplicate_tensor(void)
{
	extra_tensor("output_norm.weight", APR_TYPE_F32, 1, (const uint64_t[]){32}, 128, "tensor output_norm.weight");
}

static void data_one_byte_short(void)
{
	struct gguf_writer *w = bad_tiny();
	uint8_t *p;
	size_t n;

	gw_finish(w, &p, &n);
	bad_refused_bytes(p, n - 1, "tensor blk.0.ffn_down.weight");
	free(p);
	gw_free(w);
}

/* ---- truncation, and good files ---- */

/* Every length of a small sound file: refused, and never read past its end (the buffer is exactly as long). */
static void every_truncation(void)
{
	struct tiny_spec spec = {.n_layers = 1, .n_embd = 32, .n_ff = 32, .n_heads = 1, .n_kv_heads = 1, .head_dim = 32,
	                         .type = APR_TYPE_Q4_0, .n_vocab = 259};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct gguf *g;
	uint8_t *p;
	size_t n, i, opened = 0, unnamed = 0;
	char err[256];

	gw_finish(w, &p, &n);
	for (i = 0; i < n; i++) {
		uint8_t *cut = malloc(i ? i : 1);

		if (!cut)
			abort();
		memcpy(cut, p, i);
		err[0] = 0;
		if (!gguf_open_memory(&g, cut, i, err, sizeof err)) {
			opened++;
			gguf_close(g);
		}
		unnamed += !err[0];
		free(cut);
	}
	CU_ASSERT_EQUAL(opened, 0);
	CU_ASSERT_EQUAL(unnamed, 0);
	CU_ASSERT_EQUAL(gguf_open_memory(&g, p, n, err, sizeof err), 0);
	gguf_close(g);
	free(p);
	gw_free(w);
}

/* Random single-byte damage in the head of the file: opened or refused, never death. */
static void damaged_bytes(void)
{
	struct gguf_writer *w = bad_tiny();
	uint64_t rng = 88172645463325252u;
	uint8_t *p, was;
	size_t n, i;
	char err[256];

	gw_finish(w, &p, &n);
	for (i = 0; i < 20000; i++) {
		struct gguf *g;
		size_t at;

		rng ^= rng << 13;
		rng ^= rng >> 7;
		rng ^= rng << 17;
		at = (size_t)(rng >> 8) % (n < 9000 ? n : 9000);
		was = p[at];
		p[at] = (uint8_t)rng;
		if (!gguf_open_memory(&g, p, n, err, sizeof err))
			gguf_close(g);
		p[at] = was;
	}
	free(p);
	gw_free(w);
	bad_good_file_opens();
}

static void not_a_regular_file(void)
{
	char err[256];

	CU_ASSERT_EQUAL(bad_open(apr_test_tmpdir(), err, sizeof err), -EINVAL);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "not a regular file"));
	CU_ASSERT_EQUAL(mkfifo(bad_tmp("fifo"), 0600), 0);
	CU_ASSERT_EQUAL(bad_open(bad_tmp("fifo"), err, sizeof err), -EINVAL);
	CU_ASSERT_EQUAL(bad_open(bad_tmp("absent.gguf"), err, sizeof err), -ENOENT);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "absent.gguf"));
}

/* Scalars of other widths, as real converters write them. */
static void integers_of_any_width(void)
{
	struct gguf_writer *w = gw_new();
	struct gguf *g;
	uint32_t u;
	int32_t s;
	uint8_t *p;
	size_t n;
	float f;
	double d = 0.5;
	bool b;
	char err[128];

	gw_u64(w, "u64", 77);
	gw_i32(w, "i32", 78);
	gw_raw(w, "u8", GW_U8, "\x4f", 1);
	gw_raw(w, "i16", GW_I16, "\x50\0", 2);
	gw_raw(w, "f64", GW_F64, &d, 8);
	gw_i32(w, "minus", -1);
	gw_u64(w, "large", UINT64_C(1) << 32);
	gw_u64(w, "largest", UINT64_MAX);
	gw_bool(w, "bool", true);
	gw_u32(w, "one", 1);
	gw_finish(w, &p, &n);
	CU_ASSERT_EQUAL_FATAL(gguf_open_memory(&g, p, n, err, sizeof err), 0);
	CU_ASSERT(!gguf_get_u32(g, "u64", &u, err, sizeof err) && u == 77);
	CU_ASSERT(!gguf_get_u32(g, "i32", &u, err, sizeof err) && u == 78);
	CU_ASSERT(!gguf_get_u32(g, "u8", &u, err, sizeof err) && u == 79);
	CU_ASSERT(!gguf_get_i32(g, "i16", &s, err, sizeof err) && s == 80);
	CU_ASSERT(!gguf_get_f32(g, "f64", &f, err, sizeof err) && f == 0.5f);
	CU_ASSERT(!gguf_get_bool(g, "one", &b, err, sizeof err) && b);
	CU_ASSERT(!gguf_get_bool(g, "bool", &b, err, sizeof err) && b);
	CU_ASSERT_EQUAL(gguf_get_u32(g, "minus", &u, err, sizeof err), -EINVAL);
	CU_ASSERT_EQUAL(gguf_get_u32(g, "large", &u, err, sizeof err), -EINVAL);
	CU_ASSERT_EQUAL(gguf_get_u32(g, "largest", &u, err, sizeof err), -EINVAL);
	CU_ASSERT_EQUAL(gguf_get_u32(g, "bool", &u, err, sizeof err), -EINVAL);
	CU_ASSERT_EQUAL(gguf_get_u32(g, "absent", &u, err, sizeof err), -ENOENT);
	CU_ASSERT_EQUAL(gguf_get_i32(g, "minus", &s, err, sizeof err), 0);
	gguf_close(g);
	free(p);
	gw_free(w);
}

/* ---- split files ---- */

struct split_spec {
	unsigned parts, count; /* written; said */
	int wrong_no;          /* part whose split.no is wrong, or -1 */
	uint32_t total_off;    /* added to split.tensors.count */
	bool overlap;          /* the second part holds a tensor of the first, too */
};

static const char *write_split(const struct split_spec *s, unsigned open_part)
{
	static char path[512];
	unsigned i;

	for (i = 0; i < s->parts; i++) {
		struct gguf_writer *w = i ? gw_new() : bad_tiny();
		char name[64];

		if (i) { /* one tensor of the model in each later part */
			static const char *const moved[] = {"output_norm.weight", "blk.0.ffn_norm.weight"};
			float ones[32];
			unsigned k;

			for (k = 0; k < 32; k++)
				ones[k] = 1.0f;
			gw_tensor(w, moved[i - 1], APR_TYPE_F32, 1, (const uint64_t[]){32}, ones, sizeof ones);
		} else {
			gw_drop_tensor(w, "output_norm.weight");
			if (s->parts > 2 && !s->overlap)
				gw_drop_tensor(w, "blk.0.ffn_norm.weight");
		}
		gw_raw(w, "split.no", GW_U16, (const uint16_t[]){(uint16_t)((int)i == s->wrong_no ? 9 : i)}, 2);
		gw_raw(w, "split.count", GW_U16, (const uint16_t[]){(uint16_t)s->count}, 2);
		gw_i32(w, "split.tensors.count", (int32_t)(11 + s->total_off));
		snprintf(name, sizeof name, "m-%05u-of-%05u.gguf", i + 1, s->count);
		CU_ASSERT_EQUAL(gw_write(w, bad_tmp(name)), 0);
		gw_free(w);
	}
	snprintf(path, sizeof path, "%s/m-%05u-of-%05u.gguf", apr_test_tmpdir(), open_part, s->count);
	return path;
}

static void split_opens(void)
{
	struct split_spec s = {.parts = 3, .count = 3, .wrong_no = -1};
	char err[256];
	int rc = bad_open(write_split(&s, 1), err, sizeof err);

	CU_ASSERT_EQUAL(rc, 0);
	if (rc)
		printf("\n  %s\n", err);
}

static void split_refused(const struct split_spec *s, unsigned open_part, const char *names)
{
	char err[256];
	int rc = bad_open(write_split(s, open_part), err, sizeof err);

	CU_ASSERT(rc < 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, names));
	if (!strstr(err, names))
		printf("\n  \"%s\" does not name %s\n", err, names);
}

static void split_damaged(void)
{
	struct split_spec s = {.parts = 3, .count = 3, .wrong_no = 1};
	const char *path;
	char err[256];

	split_refused(&s, 1, "split.no");
	s.wrong_no = -1;
	split_refused(&s, 2, "split.no");
	s.total_off = 1;
	split_refused(&s, 1, "split.tensors.count");
	s.total_off = 0;
	s.overlap = true;
	split_refused(&s, 1, "split.tensors.count");
	s.total_off = 1;
	split_refused(&s, 1, "blk.0.ffn_norm.weight: given twice");
	s = (struct split_spec){.parts = 3, .count = 4, .wrong_no = -1};
	split_refused(&s, 1, "m-00004-of-00004.gguf");
	s = (struct split_spec){.parts = 2, .count = 2, .wrong_no = -1};
	path = write_split(&s, 1);
	CU_ASSERT_EQUAL(rename(path, bad_tmp("renamed.gguf")), 0);
	CU_ASSERT_EQUAL(bad_open(bad_tmp("renamed.gguf"), err, sizeof err), -EINVAL);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "split.count"));
}

#define T(f) {#f, f, 0}
static const struct apr_test tests[] = {
	T(magic_only), T(version_0_1_and_4), T(version_2_is_read), T(n_tensors_huge), T(n_kv_huge),
	T(key_length_huge), T(string_length_huge), T(string_one_byte_past_the_end), T(duplicate_key), T(unknown_value_type), T(bool_neither_0_nor_1),
	T(alignment_bad), T(alignment_int32), T(alignment_64_and_8_are_read), T(array_in_array), T(array_count_huge),
	T(array_element_type_unknown), T(many_keys), T(tensor_name_64_bytes), T(n_dims_0_or_5), T(dims_product_wraps),
	T(data_just_past_size_max), T(dimension_0), T(unknown_tensor_type), T(row_not_whole_blocks),
	T(offset_and_size_past_the_end), T(offset_not_aligned), T(overlapping_tensors), T(duplicate_tensor),
	T(data_one_byte_short), T(every_truncation), T(damaged_bytes), T(not_a_regular_file),
	T(integers_of_any_width), T(split_opens), T(split_damaged),
};

TEST_MAIN("model/gguf", tests)
