/* SPDX-License-Identifier: MIT */
/* Owns: the target for tokenizer and detokenizer, over one SPM-like and one byte-pair vocabulary. See fuzz.h. */
#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/gguf_writer.h"
#include <string.h>

static struct apr_tokenizer *made(const char *arch)
{
	struct tiny_spec spec = { .arch = arch, .n_embd = 32, .n_ff = 32, .n_heads = 1, .n_kv_heads = 1, .head_dim = 32,
				  .n_layers = 1 };
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct apr_model *m;
	struct apr_tokenizer *t;
	uint8_t *bytes;
	size_t n;
	char err[300];

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
		t[0] = made("llama");
		t[1] = made("gemma3");
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
	if (!flags)
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
