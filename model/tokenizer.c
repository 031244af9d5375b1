/* SPDX-License-Identifier: MIT */
/*
 * The tokenizer's face: text is cut at special tokens here, what lies between
 * goes to tok_bpe.c or tok_spm.c; pieces and ids back to text.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf_parse.h"
#include "model/model.h"
#include "model/tok_heap.h"
#include "model/utf8.h"

int apr_tokenizer_new(struct apr_tokenizer **out, const struct apr_model *m, char *err, size_t errlen)
{
	struct apr_tokenizer *t = calloc(1, sizeof *t);
	int rc;

	if (!t)
		return gguf_fail(err, errlen, -ENOMEM, "out of memory");
	rc = tok_load(t, m->gguf, err, errlen);
	if (rc)
		apr_tokenizer_free(t);
	else
		*out = t;
	return rc;
}

void apr_tokenizer_free(struct apr_tokenizer *t)
{
	if (!t)
		return;
	free(t->kind);
	free(t->bytes);
	free(t->start);
	free(t->score);
	free(t->whole);
	free(t->always.id);
	free(t->with_flag.id);
	tok_text_map_free(&t->by_bytes);
	tok_pair_map_free(&t->merges);
	free(t);
}

int tok_push(struct tok_out *o, uint32_t id)
{
	uint32_t cap, *p;

	if (o->max && o->n == o->max)
		return -E2BIG;
	if (o->n == o->cap) {
		if (o->cap > INT32_MAX)
			return -E2BIG;
		cap = o->cap ? o->cap * 2 : 64;
		p = realloc(o->id, cap * sizeof *p);
		if (!p)
			return -ENOMEM;
		o->id = p;
		o->cap = cap;
	}
	o->id[o->n++] = id;
	return 0;
}

/* mark NULL: special pieces are found in all of text or, without the flag, nowhere */
static bool next_special(const struct apr_tokenizer *t, const char *text, const uint8_t *mark, size_t len,
                         unsigned flags, size_t pos, size_t *at, size_t *end, uint32_t *id)
{
	if (mark && !(flags & APR_TOK_PARSE_SPECIAL))
		return tok_special_find_marked(t, text, mark, len, pos, at, end, id);
	return tok_special_find(t, flags & APR_TOK_PARSE_SPECIAL ? &t->with_flag : &t->always, text, len, pos, at, end, id);
}

static int encode(const struct apr_tokenizer *t, const char *text, const uint8_t *mark, size_t len, unsigned flags,
                  struct tok_out *o)
{
	struct tok_scratch scratch = {0};
	size_t pos = 0, at = 0, end = 0;
	bool prefix = t->space_prefix, found;
	uint32_t id = 0;
	int rc = 0;

	/* a template may have written it already */
	found = mark && len && next_special(t, text, mark, len, flags, 0, &at, &end, &id) && !at && id == (uint64_t)t->bos;
	if (flags & APR_TOK_ADD_BOS && t->adds_bos && !found)
		rc = tok_push(o, (uint32_t)t->bos);
	while (!rc && pos < len) {
		found = next_special(t, text, mark, len, flags, pos, &at, &end, &id);
		if (!found)
			at = end = len;
		rc = t->spm ? tok_spm(t, text + pos, at - pos, prefix, &scratch, o)
		            : tok_bpe(t, text + pos, at - pos, &scratch, o);
		if (!rc && found) {
			rc = tok_push(o, id);
			prefix = t->space_prefix;
		}
		pos = end;
	}
	tok_scratch_free(&scratch);
	return rc;
}

int apr_tok_encode_marked(const struct apr_tokenizer *t, const char *text, const uint8_t *mark, size_t len,
                          unsigned flags, uint32_t max_ids, uint32_t **ids, uint32_t *n_ids)
{
	struct tok_out o = {.max = max_ids};
	int rc;

	if (len > INT32_MAX)
		return -E2BIG;
	o.id = malloc(64 * sizeof *o.id); /* so that no ids, too, are an array */
	if (!o.id)
		return -ENOMEM;
	o.cap = 64;
	rc = encode(t, text, mark, len, flags, &o);
	if (rc) {
		free(o.id);
		return rc;
	}
	*ids = o.id;
	*n_ids = o.n;
	return 0;
}

int apr_tok_encode(const struct apr_tokenizer *t, const char *text, size_t len, unsigned flags, uint32_t max_ids,
                 uint32_t **ids, uint32_t *n_ids)
{
	return apr_tok_encode_marked(t, text, NULL, len, flags, max_ids, ids, n_ids);
}

const char *apr_piece(const struct apr_tokenizer *t, uint32_t id, bool special, size_t *len)
{
	uint32_t n;
	const char *s;

	*len = 0;
	if (id >= t->n)
		return NULL;
	s = tok_piece(t, id, &n);
	if (special || (t->kind[id] != APR_PIECE_CONTROL && t->kind[id] != APR_PIECE_UNKNOWN))
		*len = n;
	return s;
}

int apr_tok_decode(const struct apr_tokenizer *t, const uint32_t *ids, uint32_t n, bool special, char **text, size_t *len)
{
	size_t total = 0, k;
	uint32_t i;
	char *out;

	for (i = 0; i < n; i++) {
		if (!apr_piece(t, ids[i], special, &k))
			return -EINVAL;
		total += k; /* below 2^32 pieces of below 2^30 bytes */
	}
	out = malloc(total ? total : 1);
	if (!out)
		return -ENOMEM;
	*text = out;
	*len = total;
	for (i = 0; i < n; i++) {
		const char *s = apr_piece(t, ids[i], special, &k);

		memcpy(out, s, k);
		out += k;
	}
	return 0;
}

/* How many bytes at the end of s begin a character that may still become whole: 0 to 3. */
static size_t unfinished(const uint8_t *s, size_t len)
{
	size_t k;

	for (k = 1; k <= 3 && k <= len; k++) {
		uint8_t b = s[len - k];

		if ((b & 0xc0) == 0x80)
			continue;
		if (apr_utf8_want(b) <= k)
			return 0;
		return k == 1 || apr_utf8_second_ok(b, s[len - k + 1]) ? k : 0;
	}
	return 0;
}

size_t apr_detok_push(struct apr_detok *d, const char *piece, size_t len, char *out)
{
	size_t n = d->n_held + len, keep;

	memcpy(out, d->held, d->n_held);
	if (len)
		memcpy(out + d->n_held, piece, len);
	keep = unfinished((const uint8_t *)out, n);
	memcpy(d->held, out + n - keep, keep);
	d->n_held = (uint8_t)keep;
	return n - keep;
}

size_t apr_detok_flush(struct apr_detok *d, char *out)
{
	size_t n = d->n_held;

	memcpy(out, d->held, n);
	d->n_held = 0;
	return n;
}

void apr_tokenizer_bytes(const struct apr_tokenizer *t, bool can[256])
{
	unsigned b;

	for (b = 0; b < 256; b++)
		can[b] = t->byte_id[b] != APR_NO_ID;
}

uint32_t apr_tokenizer_size(const struct apr_tokenizer *t)
{
	return t->n;
}

enum apr_piece_kind apr_tokenizer_kind(const struct apr_tokenizer *t, uint32_t id)
{
	return id < t->n ? (enum apr_piece_kind)t->kind[id] : APR_PIECE_UNUSED;
}

bool apr_tokenizer_is_end(const struct apr_tokenizer *t, uint32_t id)
{
	uint32_t i;

	for (i = 0; i < t->n_end; i++) {
		if (t->end[i] == id)
			return true;
	}
	return false;
}

const uint32_t *apr_tokenizer_end_ids(const struct apr_tokenizer *t, uint32_t *n)
{
	*n = t->n_end;
	return t->end;
}

int64_t apr_tokenizer_bos(const struct apr_tokenizer *t)
{
	return t->bos;
}

bool apr_tokenizer_adds_bos(const struct apr_tokenizer *t)
{
	return t->adds_bos;
}
