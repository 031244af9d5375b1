/* SPDX-License-Identifier: MIT */
/* Owns: the target for tokenizer and detokenizer, over one sentence-piece and one byte-pair vocabulary. See fuzz.h. */
#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/gguf_writer.h"
#include <string.h>

/* The byte-pair tables are taken out and a sentence-piece vocabulary is put in. */
static void make_spm(struct gguf_writer *w)
{
	static const char *const more[] = { "\xe2\x96\x81", "t", "h", "e", "a", " ", "\xe2\x96\x81t", "he", "th", "the",
					    "\xe2\x96\x81the", "\xc3\xa9", "12", "1", "2", "<b>", "aa", "aaaa" };
	enum { BYTES = 3, MORE = sizeof(more) / sizeof(more[0]), N = BYTES + 256 + MORE };
	static char byte[256][8];
	const char *tokens[N] = { "<unk>", "<s>", "</s>" };
	int32_t types[N] = { APR_PIECE_UNKNOWN, APR_PIECE_CONTROL, APR_PIECE_CONTROL };
	float scores[N] = { 0 };
	static const char *const drop[] = { "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
					    "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id",
					    "tokenizer.ggml.eos_token_id" };

	for (size_t i = 0; i < sizeof(drop) / sizeof(drop[0]); i++)
		gw_drop(w, drop[i]);
	for (int i = 0; i < 256; i++) {
		snprintf(byte[i], sizeof(byte[i]), "<0x%02X>", (unsigned)i);
		tokens[BYTES + i] = byte[i];
		types[BYTES + i] = APR_PIECE_BYTE;
	}
	for (int i = 0; i < (int)MORE; i++) {
		tokens[BYTES + 256 + i] = more[i];
		types[BYTES + 256 + i] = strcmp(more[i], "<b>") ? APR_PIECE_NORMAL : APR_PIECE_USER;
		scores[BYTES + 256 + i] = (float)i;
	}
	gw_str(w, "tokenizer.ggml.model", "llama");
	gw_arr_str(w, "tokenizer.ggml.tokens", tokens, N);
	gw_arr(w, "tokenizer.ggml.token_type", GW_I32, types, N);
	gw_arr(w, "tokenizer.ggml.scores", GW_F32, scores, N);
	gw_u32(w, "tokenizer.ggml.bos_token_id", 1);
	gw_u32(w, "tokenizer.ggml.eos_token_id", 2);
	gw_u32(w, "tokenizer.ggml.unknown_token_id", 0);
}

static struct apr_tokenizer *made(bool spm)
{
	struct tiny_spec spec = { .n_embd = 32, .n_ff = 32, .n_heads = 1, .n_kv_heads = 1, .head_dim = 32,
				  .n_layers = 1 };
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct apr_model *m;
	struct apr_tokenizer *t;
	uint8_t *bytes;
	size_t n;
	char err[300];

	if (spm)
		make_spm(w);
	gw_finish(w, &bytes, &n);
	gw_free(w);
	MUST(!apr_model_open(&m, fuzz_file(bytes, n), err, sizeof(err)));
	MUST(!apr_tokenizer_new(&t, m, err, sizeof(err)));
	apr_model_close(m);
	free(bytes);
	return t;
}

static void back(const struct apr_tokenizer *t, const char *text, size_t n, const uint32_t *ids, uint32_t n_ids)
{
	struct apr_detok d = { { 0 }, 0 };
	char *whole = NULL, *out = malloc(n * 8 + n_ids * 8 + 512);
	size_t len, at = 0, piece_len;

	MUST(out);
	MUST(!apr_tok_decode(t, ids, n_ids, true, &whole, &len));
	for (uint32_t i = 0; i < n_ids; i++) {
		const char *piece = apr_piece(t, ids[i], true, &piece_len);
		MUST(piece && piece_len < 256);
		at += apr_detok_push(&d, piece, piece_len, out + at);
	}
	at += apr_detok_flush(&d, out + at);
	MUST(at == len && !memcmp(out, whole, len));                 /* streamed is whole */
	MUST(len >= n && !memcmp(whole + (len - n), text, n)); /* a first space may be in front */
	free(whole);
	free(out);
}

int fuzz_tokens(const uint8_t *data, size_t n)
{
	static struct apr_tokenizer *t[2];
	uint32_t *ids = NULL, n_ids = 0;

	if (!t[0]) {
		t[0] = made(false);
		t[1] = made(true);
	}
	if (n < 1 || n > 65536)
		return 0;
	const struct apr_tokenizer *use = t[data[0] & 1];
	unsigned flags = data[0] >> 1 & 3;
	const char *text = (const char *)data + 1;
	int e = apr_tok_encode(use, text, n - 1, flags, 0, &ids, &n_ids);
	MUST(e == 0 || e == -84); /* -EILSEQ */
	if (e)
		return 0;
	for (uint32_t i = 0; i < n_ids; i++) {
		MUST(ids[i] < apr_tokenizer_size(use));
		if (!flags)
			MUST(apr_tokenizer_kind(use, ids[i]) != APR_PIECE_CONTROL);
	}
	/* a sentence-piece vocabulary writes a space as U+2581, so that character itself comes back as a space */
	if (!flags && !((data[0] & 1) && memmem(text, n - 1, "\xe2\x96\x81", 3)))
		back(use, text, n - 1, ids, n_ids);
	free(ids);
	/* any ids, sound or not */
	char *any = NULL;
	size_t len;
	uint32_t some[64], k = (uint32_t)((n - 1) / 2 < 64 ? (n - 1) / 2 : 64);
	for (uint32_t i = 0; i < k; i++)
		some[i] = (uint32_t)data[1 + 2 * i] | (uint32_t)data[2 + 2 * i] << 8;
	e = apr_tok_decode(use, some, k, data[0] & 8, &any, &len);
	MUST(e == 0 || e == -22);
	free(any);
	return 0;
}
