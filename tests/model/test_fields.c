/* SPDX-License-Identifier: MIT */
/*
 * The rest of CASES "GGUF": sound files whose fields are not: the tokenizer's
 * tables and the hyper-parameters. Each is refused by the field's name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/harness.h"
#include "tests/support/bad_files.h"

static void with_u32(const char *key, uint32_t v)
{
	struct gguf_writer *w = bad_tiny();

	gw_drop(w, key);
	gw_u32(w, key, v);
	bad_refused(w, key);
}

/* ---- the tokenizer's tables ---- */

static void replaced_array(const char *key, enum gw_type elem, uint64_t n)
{
	struct gguf_writer *w = bad_tiny();
	uint8_t zero[8 * 320] = {0};

	gw_drop(w, key);
	gw_arr(w, key, elem, zero, n);
	bad_refused(w, key);
}

static void token_types_wrong(void)
{
	replaced_array("tokenizer.ggml.token_type", GW_I32, 319);
	replaced_array("tokenizer.ggml.token_type", GW_F32, 320);
	replaced_array("tokenizer.ggml.token_type", GW_U8, 320);
	replaced_array("tokenizer.ggml.token_type", GW_I32, 320); /* of type 0 */
	with_u32("tokenizer.ggml.token_type", 1);
}

static void tokens_wrong(void)
{
	static const char *const many[322] = {"a"};
	struct gguf_writer *w = bad_tiny();
	const char *v[322];
	size_t i;

	for (i = 0; i < 322; i++)
		v[i] = many[0];
	gw_drop(w, "tokenizer.ggml.tokens");
	gw_arr_str(w, "tokenizer.ggml.tokens", v, 321);
	bad_refused(w, "tokenizer.ggml.tokens");
	replaced_array("tokenizer.ggml.tokens", GW_U32, 320);
	replaced_array("tokenizer.ggml.tokens", GW_STR, 0);
	with_u32("tokenizer.ggml.tokens", 1);
}

static struct gguf_writer *spm(void)
{
	struct gguf_writer *w = bad_tiny();
	float scores[320] = {0};

	gw_drop(w, "tokenizer.ggml.model");
	gw_drop(w, "tokenizer.ggml.merges");
	gw_str(w, "tokenizer.ggml.model", "llama");
	gw_arr(w, "tokenizer.ggml.scores", GW_F32, scores, 320);
	return w;
}

static void scores_wrong(void)
{
	float nan[320] = {0};
	struct gguf_writer *w = spm();

	CU_ASSERT_EQUAL(gw_write(w, bad_tmp("spm.gguf")), 0);
	gw_drop(w, "tokenizer.ggml.scores");
	bad_refused(w, "tokenizer.ggml.scores");
	w = spm();
	gw_drop(w, "tokenizer.ggml.scores");
	gw_arr(w, "tokenizer.ggml.scores", GW_F32, nan, 319);
	bad_refused(w, "tokenizer.ggml.scores");
	w = spm();
	gw_drop(w, "tokenizer.ggml.scores");
	gw_arr(w, "tokenizer.ggml.scores", GW_I32, nan, 320);
	bad_refused(w, "tokenizer.ggml.scores");
	w = spm();
	nan[7] = 0.0f / nan[8];
	gw_drop(w, "tokenizer.ggml.scores");
	gw_arr(w, "tokenizer.ggml.scores", GW_F32, nan, 320);
	bad_refused(w, "tokenizer.ggml.scores");
}

static void merges_missing_or_wrong(void)
{
	static const char *const bad[] = {"th", " t", "t ", "", "t zz", "zz h", "h t", "t  h"};
	struct gguf_writer *w = bad_tiny();
	size_t i;

	gw_drop(w, "tokenizer.ggml.merges");
	bad_refused(w, "tokenizer.ggml.merges");
	replaced_array("tokenizer.ggml.merges", GW_I32, 4);
	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		w = bad_tiny();
		gw_drop(w, "tokenizer.ggml.merges");
		gw_arr_str(w, "tokenizer.ggml.merges", &bad[i], 1);
		bad_refused(w, "tokenizer.ggml.merges");
	}
}

/* Byte pieces: two hex digits and nothing else. */
static void piece_0x_minus_1(void)
{
	static const char *const bad[] = {"<0x-1>", "<0x0>", "<0x100>", "<0xGG>", "<0X41>", "0x41", "<0x 1>", ""};
	static char text[320][16];
	const char *v[320];
	int32_t kinds[320];
	size_t i, j;

	for (i = 0; i < 320; i++) {
		snprintf(text[i], sizeof text[i], "p%zu", i);
		v[i] = text[i];
		kinds[i] = 1;
	}
	kinds[5] = 6;
	for (j = 0; j < sizeof bad / sizeof *bad; j++) {
		struct gguf_writer *w = spm();

		v[5] = bad[j];
		gw_drop(w, "tokenizer.ggml.tokens");
		gw_drop(w, "tokenizer.ggml.token_type");
		gw_arr_str(w, "tokenizer.ggml.tokens", v, 320);
		gw_arr(w, "tokenizer.ggml.token_type", GW_I32, kinds, 320);
		bad_refused(w, "tokenizer.ggml.tokens: piece 5");
	}
}

static void special_ids_past_the_vocabulary(void)
{
	static const char *const keys[] = {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
	                                   "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id"};
	size_t i;

	for (i = 0; i < sizeof keys / sizeof *keys; i++) {
		struct gguf_writer *w = bad_tiny();

		with_u32(keys[i], 320);
		with_u32(keys[i], UINT32_MAX);
		gw_drop(w, keys[i]);
		gw_i32(w, keys[i], -1);
		bad_refused(w, keys[i]);
	}
}

/* ---- hyper-parameters ---- */

static void head_counts(void)
{
	with_u32("llama.attention.head_count", 0);
	with_u32("llama.attention.head_count", UINT32_MAX);
	with_u32("llama.attention.head_count_kv", 0);
	with_u32("llama.attention.head_count_kv", 3);
	with_u32("llama.attention.head_count_kv", 4);
	with_u32("llama.attention.key_length", 0);
	with_u32("llama.attention.value_length", 0);
}

static void block_count(void)
{
	with_u32("llama.block_count", 0);
	with_u32("llama.block_count", 1431655766);
	with_u32("llama.block_count", 513);
}

static void embedding_and_ffn_length(void)
{
	with_u32("llama.embedding_length", 0);
	with_u32("llama.embedding_length", UINT32_MAX);
	with_u32("llama.feed_forward_length", 0);
	with_u32("llama.feed_forward_length", UINT32_MAX);
	with_u32("llama.vocab_size", 321);
}

static void rope_dimension(void)
{
	with_u32("llama.rope.dimension_count", 0);
	with_u32("llama.rope.dimension_count", 15);
	with_u32("llama.rope.dimension_count", 18);
	with_u32("llama.rope.dimension_count", UINT32_MAX);
}

static void context_length(void)
{
	with_u32("llama.context_length", 0);
	with_u32("llama.context_length", UINT32_MAX);
}

static void keys_of_the_wrong_type(void)
{
	static const char *const keys[] = {"llama.context_length", "llama.embedding_length", "llama.block_count",
	                                   "llama.feed_forward_length", "llama.attention.head_count", "general.architecture",
	                                   "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.model"};
	size_t i;

	for (i = 0; i < sizeof keys / sizeof *keys; i++) {
		struct gguf_writer *w = bad_tiny();

		gw_drop(w, keys[i]);
		bad_refused(w, keys[i]);
		w = bad_tiny();
		gw_drop(w, keys[i]);
		gw_bool(w, keys[i], true);
		bad_refused(w, keys[i]);
	}
}

/* ---- any byte ---- */

/* Random damage to the file's head, one byte or four at a time: opened or refused, with its tokenizer; never death. */
static void damaged_fields(void)
{
	struct gguf_writer *w = bad_tiny();
	uint64_t rng = 0x2545f4914f6cdd1d;
	unsigned i, opened = 0;
	uint8_t *p, was[4];
	char err[256];
	size_t n;

	gw_finish(w, &p, &n);
	for (i = 0; i < 4000; i++) {
		size_t at, k = i % 2 ? 4 : 1;
		FILE *f = fopen(bad_tmp("damaged.gguf"), "wb");

		CU_ASSERT_PTR_NOT_NULL_FATAL(f);
		rng ^= rng << 13;
		rng ^= rng >> 7;
		rng ^= rng << 17;
		at = (size_t)(rng >> 36) % (n < 8000 ? n - 4 : 8000);
		memcpy(was, p + at, k);
		memcpy(p + at, &rng, k);
		CU_ASSERT_EQUAL(fwrite(p, 1, n, f), n);
		fclose(f);
		memcpy(p + at, was, k);
		opened += !bad_open(bad_tmp("damaged.gguf"), err, sizeof err);
	}
	CU_ASSERT(opened < 4000);
	free(p);
	gw_free(w);
	bad_good_file_opens();
}

#define T(f) {#f, f, 0}
static const struct apr_test tests[] = {
	T(token_types_wrong), T(tokens_wrong), T(scores_wrong), T(merges_missing_or_wrong), T(piece_0x_minus_1),
	T(special_ids_past_the_vocabulary), T(head_counts), T(block_count), T(embedding_and_ffn_length),
	T(rope_dimension), T(context_length), T(keys_of_the_wrong_type), T(damaged_fields),
};

TEST_MAIN("model/fields", tests)
