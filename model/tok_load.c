/* SPDX-License-Identifier: MIT */
/*
 * The tables tokenizer.ggml.* of a file, checked and turned into those of
 * struct apr_tokenizer. Every refusal names the key.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf_parse.h"
#include "model/tok.h"
#include "model/utf8.h"

#define KEY "tokenizer.ggml."
#define MAX_TEXT (UINT32_C(1) << 30) /* bytes of all pieces together */

struct load { /* what one load carries along */
	struct apr_tokenizer *t;
	const struct gguf *g;
	char *err;
	size_t errlen;
	struct gguf_arr tokens;
	struct tok_text_map by_text; /* every piece by the text in the file */
	int16_t alphabet[0x144];     /* the byte that character U+0000..U+0143 stands for in byte-level text, or -1 */
};

#define FAIL(ld, rc, ...) gguf_fail((ld)->err, (ld)->errlen, rc, __VA_ARGS__)

/* Byte-level BPE writes bytes as printable characters: those of Latin-1 that are printable stand for
 * themselves, the others, in order, for U+0100 and on. */
static void make_alphabet(int16_t alphabet[0x144])
{
	unsigned b, next = 0x100;

	memset(alphabet, 0xff, 0x144 * sizeof *alphabet);
	for (b = 0; b < 256; b++) {
		bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;

		alphabet[itself ? b : next++] = (int16_t)b;
	}
}

/* Byte-level text to bytes: their number, or -1 where a character is not of the alphabet. */
static int64_t from_alphabet(const struct load *ld, struct gguf_str s, char *out)
{
	uint64_t pos = 0;
	int64_t n = 0;
	int32_t cp;

	for (; pos < s.len; n++) {
		pos += apr_utf8_next(s.s + pos, s.len - pos, &cp);
		if (cp < 0 || cp >= 0x144 || ld->alphabet[cp] < 0)
			return -1;
		out[n] = (char)ld->alphabet[cp];
	}
	return n;
}

static uint32_t replace_spaces(struct gguf_str s, char *out) /* U+2581 to ' ' */
{
	uint32_t n = 0;
	uint64_t i;

	for (i = 0; i < s.len; i++) {
		if (s.len - i >= 3 && !memcmp(s.s + i, "\xe2\x96\x81", 3)) {
			out[n++] = ' ';
			i += 2;
		} else {
			out[n++] = s.s[i];
		}
	}
	return n;
}

static int hex(char c)
{
	return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static int byte_piece(const struct load *ld, uint32_t id, struct gguf_str s, char *out)
{
	char shown[32];

	if (s.len != 6 || memcmp(s.s, "<0x", 3) != 0 || s.s[5] != '>' || hex(s.s[3]) < 0 || hex(s.s[4]) < 0)
		return FAIL(ld, -EINVAL, "key " KEY "tokens: piece %u, \"%s\", is of type BYTE but not <0xNN>", id,
		            gguf_printable(s, shown, sizeof shown));
	*out = (char)(hex(s.s[3]) << 4 | hex(s.s[4]));
	return 1;
}

/* The piece as it stands in running text: bytes written to out (s.len at most), or -errno. */
static int64_t piece_bytes(const struct load *ld, uint32_t id, struct gguf_str s, char *out)
{
	uint8_t kind = ld->t->kind[id];
	int64_t n;

	if (kind == APR_PIECE_BYTE)
		return byte_piece(ld, id, s, out);
	if (ld->t->spm)
		return replace_spaces(s, out);
	if (kind == APR_PIECE_NORMAL || kind == APR_PIECE_UNUSED) {
		n = from_alphabet(ld, s, out);
		if (n >= 0)
			return n;
	}
	memcpy(out, s.s, s.len); /* an added token: its text as it is */
	return (int64_t)s.len;
}

static int open_tokens(struct load *ld)
{
	uint64_t total = 0, i;
	const uint8_t *p;
	int rc = gguf_get_arr(ld->g, KEY "tokens", &ld->tokens, ld->err, ld->errlen);

	if (rc)
		return rc == -ENOENT ? FAIL(ld, -EINVAL, "key " KEY "tokens: missing") : rc;
	if (ld->tokens.elem != GGUF_STR)
		return FAIL(ld, -EINVAL, "key " KEY "tokens: not an array of strings");
	if (!ld->tokens.n || ld->tokens.n > INT32_MAX)
		return FAIL(ld, -EINVAL, "key " KEY "tokens: %llu pieces", (unsigned long long)ld->tokens.n);
	for (i = 0, p = ld->tokens.p; i < ld->tokens.n; i++)
		total += gguf_arr_next(&p).len;
	if (total > MAX_TEXT)
		return FAIL(ld, -EINVAL, "key " KEY "tokens: %llu bytes of text", (unsigned long long)total);
	ld->t->n = (uint32_t)ld->tokens.n;
	ld->t->kind = calloc(ld->t->n, sizeof *ld->t->kind);
	ld->t->start = calloc((size_t)ld->t->n + 1, sizeof *ld->t->start);
	ld->t->bytes = malloc(total ? total : 1);
	ld->t->whole = calloc(ld->t->n, sizeof *ld->t->whole);
	if (!ld->t->kind || !ld->t->start || !ld->t->whole || !ld->t->bytes || tok_text_map_init(&ld->by_text, ld->t->n) ||
	    tok_text_map_init(&ld->t->by_bytes, ld->t->n))
		return FAIL(ld, -ENOMEM, "out of memory for %u pieces", ld->t->n);
	return 0;
}

/* token_type, one for each piece; where the key is absent all are NORMAL. */
static int read_kinds(struct load *ld)
{
	struct gguf_arr a;
	uint32_t i, kind;
	int rc = gguf_get_arr(ld->g, KEY "token_type", &a, ld->err, ld->errlen);

	if (rc == -ENOENT) {
		memset(ld->t->kind, APR_PIECE_NORMAL, ld->t->n);
		return 0;
	}
	if (rc)
		return rc;
	if (a.n != ld->t->n)
		return FAIL(ld, -EINVAL, "key " KEY "token_type: %llu values for %u pieces", (unsigned long long)a.n, ld->t->n);
	if (a.elem != GGUF_I32 && a.elem != GGUF_U32)
		return FAIL(ld, -EINVAL, "key " KEY "token_type: not an array of INT32");
	for (i = 0; i < ld->t->n; i++) {
		if (!gguf_arr_u32(&a, i, &kind) || kind < APR_PIECE_NORMAL || kind > APR_PIECE_BYTE)
			return FAIL(ld, -EINVAL, "key " KEY "token_type: value %u is not from 1 to 6", i);
		ld->t->kind[i] = (uint8_t)kind;
	}
	return 0;
}

static int read_pieces(struct load *ld)
{
	struct apr_tokenizer *t = ld->t;
	const uint8_t *p = ld->tokens.p;
	uint32_t i, at = 0;

	for (i = 0; i < t->n; i++) {
		struct gguf_str s = gguf_arr_next(&p);
		int64_t n = piece_bytes(ld, i, s, t->bytes + at);

		if (n < 0)
			return (int)n;
		tok_text_map_add(&ld->by_text, s.s, (uint32_t)s.len, i);
		t->start[i] = at;
		at += (uint32_t)n;
	}
	t->start[t->n] = at;
	return 0;
}

static void set_joins(struct apr_tokenizer *t, uint8_t a, uint8_t b)
{
	unsigned bit = (unsigned)a << 8 | b;

	t->joins[bit / 8] |= (uint8_t)(1u << bit % 8);
}

/* After the delimiters are known: pieces that merging may give, and those of a single byte. */
static void index_pieces(struct load *ld)
{
	struct apr_tokenizer *t = ld->t;
	uint32_t i, len, at;

	memset(t->byte_id, 0xff, sizeof t->byte_id);
	for (i = 0; i < t->n; i++) {
		const char *s = tok_piece(t, i, &len);
		uint8_t want = t->spm ? APR_PIECE_BYTE : APR_PIECE_NORMAL;

		if (len == 1 && t->kind[i] == want && t->byte_id[(uint8_t)*s] == APR_NO_ID)
			t->byte_id[(uint8_t)*s] = i;
		if (t->kind[i] != APR_PIECE_NORMAL || !len)
			continue;
		tok_text_map_add(&t->by_bytes, s, len, i);
		/* llama-bpe takes a pre-token that is a piece as it is, merges or not */
		if (!t->spm && t->pre == APR_PRETOK_LLAMA3)
			atomic_init(&t->whole[i], TOK_WHOLE);
		for (at = 1; t->spm && at < len; at++)
			set_joins(t, (uint8_t)s[at - 1], (uint8_t)s[at]);
		t->max_piece = len > t->max_piece ? len : t->max_piece;
	}
}

static int read_scores(struct load *ld)
{
	struct gguf_arr a;
	uint32_t i;
	int rc = gguf_get_arr(ld->g, KEY "scores", &a, ld->err, ld->errlen);

	if (rc)
		return rc == -ENOENT ? FAIL(ld, -EINVAL, "key " KEY "scores: missing") : rc;
	if (a.elem != GGUF_F32)
		return FAIL(ld, -EINVAL, "key " KEY "scores: not an array of FLOAT32");
	if (a.n != ld->t->n)
		return FAIL(ld, -EINVAL, "key " KEY "scores: %llu values for %u pieces", (unsigned long long)a.n, ld->t->n);
	ld->t->score = calloc(ld->t->n, sizeof *ld->t->score);
	if (!ld->t->score)
		return FAIL(ld, -ENOMEM, "out of memory for %u scores", ld->t->n);
	for (i = 0; i < ld->t->n; i++) {
		if (!gguf_arr_f32(&a, i, &ld->t->score[i]) || !isfinite(ld->t->score[i]))
			return FAIL(ld, -EINVAL, "key " KEY "scores: value %u is not a number", i);
	}
	return 0;
}

/* "left right": both and what they join to are pieces. A merge that would give a delimiter is left out:
 * text could otherwise become one. */
static int read_merge(struct load *ld, uint32_t rank, struct gguf_str s)
{
	const char *gap = s.len > 2 ? memchr(s.s + 1, ' ', s.len - 2) : NULL;
	uint32_t left, right, merged;
	char joined[512], shown[64];
	uint64_t n_left, n_right;

	if (!gap || s.len > sizeof joined)
		return FAIL(ld, -EINVAL, "key " KEY "merges: entry %u, \"%s\", is not a pair", rank,
		            gguf_printable(s, shown, sizeof shown));
	n_left = (uint64_t)(gap - s.s);
	n_right = s.len - n_left - 1;
	memcpy(joined, s.s, n_left);
	memcpy(joined + n_left, gap + 1, n_right);
	left = tok_text_map_get(&ld->by_text, s.s, n_left);
	right = tok_text_map_get(&ld->by_text, gap + 1, n_right);
	merged = tok_text_map_get(&ld->by_text, joined, n_left + n_right);
	if (left == APR_NO_ID || right == APR_NO_ID || merged == APR_NO_ID)
		return FAIL(ld, -EINVAL, "key " KEY "merges: entry %u, \"%s\", names a piece that is not in tokens", rank,
		            gguf_printable(s, shown, sizeof shown));
	if (ld->t->kind[merged] == APR_PIECE_NORMAL)
		tok_pair_map_add(&ld->t->merges, left, right, rank, merged);
	return 0;
}

static int read_merges(struct load *ld)
{
	struct gguf_arr a;
	const uint8_t *p;
	uint32_t i;
	int rc = gguf_get_arr(ld->g, KEY "merges", &a, ld->err, ld->errlen);

	if (rc)
		return rc == -ENOENT ? FAIL(ld, -EINVAL, "key " KEY "merges: missing") : rc;
	if (a.elem != GGUF_STR)
		return FAIL(ld, -EINVAL, "key " KEY "merges: not an array of strings");
	if (a.n > INT32_MAX / 2)
		return FAIL(ld, -EINVAL, "key " KEY "merges: %llu entries", (unsigned long long)a.n);
	if (tok_pair_map_init(&ld->t->merges, (uint32_t)a.n))
		return FAIL(ld, -ENOMEM, "out of memory for %llu merges", (unsigned long long)a.n);
	for (i = 0, p = a.p; i < a.n; i++) {
		rc = read_merge(ld, i, gguf_arr_next(&p));
		if (rc)
			return rc;
	}
	return 0;
}

static int read_model(struct load *ld)
{
	struct gguf_str s;
	char shown[48];
	int rc = gguf_get_str(ld->g, KEY "model", &s, ld->err, ld->errlen);

	if (rc)
		return rc == -ENOENT ? FAIL(ld, -EINVAL, "key " KEY "model: missing") : rc;
	ld->t->spm = gguf_str_is(s, "llama");
	if (!ld->t->spm && !gguf_str_is(s, "gpt2"))
		return FAIL(ld, -ENOTSUP, "key " KEY "model: unknown tokenizer \"%s\"", gguf_printable(s, shown, sizeof shown));
	if (ld->t->spm)
		return 0;
	rc = gguf_get_str(ld->g, KEY "pre", &s, ld->err, ld->errlen);
	if (rc)
		return rc == -ENOENT ? FAIL(ld, -EINVAL, "key " KEY "pre: missing") : rc;
	if (!apr_pretok_find(s, &ld->t->pre))
		return FAIL(ld, -ENOTSUP, "key " KEY "pre: unknown pre-tokenizer \"%s\"",
		            gguf_printable(s, shown, sizeof shown));
	return 0;
}

/* *id -1 where the key is absent; an id outside the pieces is refused. */
static int read_id(struct load *ld, const char *key, int64_t *id)
{
	uint32_t v;
	int rc = gguf_get_u32(ld->g, key, &v, ld->err, ld->errlen);

	*id = -1;
	if (rc)
		return rc == -ENOENT ? 0 : rc;
	if (v >= ld->t->n)
		return FAIL(ld, -EINVAL, "key %s: %u, but there are %u pieces", key, v, ld->t->n);
	*id = v;
	return 0;
}

static void add_end(struct apr_tokenizer *t, int64_t id)
{
	uint32_t i;

	for (i = 0; i < t->n_end; i++) {
		if (t->end[i] == id)
			return;
	}
	if (id >= 0 && t->n_end < TOK_MAX_ENDS)
		t->end[t->n_end++] = (uint32_t)id;
}

static int read_ends(struct load *ld)
{
	static const char *const keys[] = {KEY "eos_token_id", KEY "eot_token_id", KEY "eom_token_id"};
	static const char *const others[] = {KEY "unknown_token_id", KEY "padding_token_id", KEY "seperator_token_id"};
	int64_t id;
	size_t i;
	int rc;

	for (i = 0; i < sizeof keys / sizeof *keys; i++) {
		rc = read_id(ld, keys[i], &id);
		if (rc)
			return rc;
		add_end(ld->t, id);
	}
	for (i = 0; i < sizeof others / sizeof *others; i++) { /* not used, but a wrong one tells of damage */
		rc = read_id(ld, others[i], &id);
		if (rc)
			return rc;
	}
	for (i = 0; tok_end_texts[i]; i++) {
		uint32_t e = tok_text_map_get(&ld->by_text, tok_end_texts[i], strlen(tok_end_texts[i]));

		if (e != APR_NO_ID)
			add_end(ld->t, e);
	}
	return 0;
}

static int read_bos(struct load *ld)
{
	struct apr_tokenizer *t = ld->t;
	bool given;
	int rc = read_id(ld, KEY "bos_token_id", &t->bos);

	if (rc)
		return rc;
	rc = gguf_get_bool(ld->g, KEY "add_bos_token", &t->adds_bos, ld->err, ld->errlen);
	if (rc && rc != -ENOENT)
		return rc;
	given = !rc;
	if (given && t->adds_bos && t->bos < 0)
		return FAIL(ld, -EINVAL, "key " KEY "add_bos_token: true, but there is no bos_token_id");
	if (!given)
		t->adds_bos = t->bos >= 0 && (t->spm || t->pre == APR_PRETOK_LLAMA3);
	t->space_prefix = t->spm;
	rc = gguf_get_bool(ld->g, KEY "add_space_prefix", &t->space_prefix, ld->err, ld->errlen);
	if (!t->spm)
		t->space_prefix = false;
	return rc == -ENOENT ? 0 : rc;
}

static int load_all(struct load *ld)
{
	int rc = read_model(ld);

	if (!rc)
		rc = open_tokens(ld);
	if (!rc)
		rc = read_kinds(ld);
	if (!rc)
		rc = read_pieces(ld);
	if (!rc && tok_special_init(ld->t, ld->g, &ld->by_text))
		rc = FAIL(ld, -ENOMEM, "out of memory for special pieces");
	if (rc)
		return rc;
	index_pieces(ld);
	rc = ld->t->spm ? read_scores(ld) : read_merges(ld);
	if (!rc)
		rc = read_ends(ld);
	return rc ? rc : read_bos(ld);
}

int tok_load(struct apr_tokenizer *t, const struct gguf *g, char *err, size_t errlen)
{
	struct load ld = {.t = t, .g = g, .err = err, .errlen = errlen};
	int rc;

	make_alphabet(ld.alphabet);
	rc = load_all(&ld);
	tok_text_map_free(&ld.by_text);
	return rc;
}
