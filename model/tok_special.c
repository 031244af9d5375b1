/* SPDX-License-Identifier: MIT */
/*
 * Which pieces are special, and finding them in text, the leftmost and there the
 * longest.
 *
 * CONTROL and UNKNOWN pieces are matched only with APR_TOK_PARSE_SPECIAL; USER
 * pieces (runs of spaces, HTML tags) always. Some files store turn delimiters as
 * NORMAL or USER pieces; matched always, a user could write them, and matched
 * never, a template could not. So a NORMAL or USER piece is made CONTROL here if
 * it has a delimiter's form (<...> without blanks or quotes, or [CAPITALS]) and
 *   - the file's chat template writes it, or
 *   - it is the file's bos, eos, eot or eom, or
 *   - it is one of the well-known turn delimiters.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model/tok.h"

#define MAX_DELIMITER 64u

const char *const tok_end_texts[] = {
	"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>",
	"<|end_of_turn|>", NULL,
};

static const char *const start_texts[] = {
	"<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", NULL,
};

static bool has_form(const char *s, size_t len)
{
	size_t i;

	if (len < 3 || len > MAX_DELIMITER)
		return false;
	if (s[0] == '<' && s[len - 1] == '>') {
		for (i = 1; i + 1 < len; i++) {
			if ((uint8_t)s[i] <= ' ' || strchr("<>'\"", s[i]))
				return false;
		}
		return true;
	}
	if (s[0] != '[' || s[len - 1] != ']' || len < 5)
		return false;
	for (i = 1; i + 1 < len; i++) {
		if (!(s[i] >= 'A' && s[i] <= 'Z') && s[i] != '_' && s[i] != '/')
			return false;
	}
	return true;
}

static void make_control(struct apr_tokenizer *t, uint32_t id)
{
	uint32_t len;
	const char *s;

	if (id >= t->n || (t->kind[id] != APR_PIECE_NORMAL && t->kind[id] != APR_PIECE_USER))
		return;
	s = tok_piece(t, id, &len);
	if (has_form(s, len))
		t->kind[id] = APR_PIECE_CONTROL;
}

static void from_template(struct apr_tokenizer *t, const struct tok_text_map *by_text, struct gguf_str tmpl)
{
	uint64_t i, j;

	for (i = 0; i < tmpl.len; i++) {
		char close = tmpl.s[i] == '<' ? '>' : tmpl.s[i] == '[' ? ']' : 0;

		for (j = i + 1; close && j < tmpl.len && j - i < MAX_DELIMITER && tmpl.s[j] != tmpl.s[i]; j++) {
			if (tmpl.s[j] == close) {
				make_control(t, tok_text_map_get(by_text, tmpl.s + i, j + 1 - i));
				break;
			}
		}
	}
}

static void mark_delimiters(struct apr_tokenizer *t, const struct gguf *g, const struct tok_text_map *by_text)
{
	static const char *const keys[] = {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
	                                   "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
	struct gguf_str tmpl;
	uint32_t id;
	size_t i;

	for (i = 0; tok_end_texts[i]; i++)
		make_control(t, tok_text_map_get(by_text, tok_end_texts[i], strlen(tok_end_texts[i])));
	for (i = 0; start_texts[i]; i++)
		make_control(t, tok_text_map_get(by_text, start_texts[i], strlen(start_texts[i])));
	for (i = 0; i < sizeof keys / sizeof *keys; i++) {
		if (!gguf_get_u32(g, keys[i], &id, NULL, 0))
			make_control(t, id);
	}
	if (!gguf_get_str(g, "tokenizer.chat_template", &tmpl, NULL, 0))
		from_template(t, by_text, tmpl);
}

static int compare(const void *a, const void *b, void *ctx)
{
	const struct apr_tokenizer *t = ctx;
	uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b, ni, nj;
	const char *si = tok_piece(t, i, &ni), *sj = tok_piece(t, j, &nj);
	int cmp = memcmp(si, sj, ni < nj ? ni : nj);

	if (cmp)
		return cmp;
	if (ni != nj)
		return ni < nj ? -1 : 1;
	return i < j ? -1 : i > j; /* of equal texts, the lowest id */
}

static bool belongs(uint8_t kind, bool with_flag)
{
	return kind == APR_PIECE_USER || (with_flag && (kind == APR_PIECE_CONTROL || kind == APR_PIECE_UNKNOWN));
}

static int make_set(const struct apr_tokenizer *t, struct tok_special *set, bool with_flag)
{
	uint32_t i, b, n = 0, len;

	for (i = 0; i < t->n; i++)
		n += belongs(t->kind[i], with_flag) && t->start[i + 1] > t->start[i];
	set->id = calloc(n ? n : 1, sizeof *set->id);
	if (!set->id)
		return -ENOMEM;
	for (i = 0; i < t->n; i++) {
		if (belongs(t->kind[i], with_flag) && t->start[i + 1] > t->start[i])
			set->id[set->n++] = i;
	}
	qsort_r(set->id, n, sizeof *set->id, compare, (void *)(uintptr_t)t);
	for (i = 0, b = 0; b < 256; b++) {
		while (i < n && (uint8_t)*tok_piece(t, set->id[i], &len) < b)
			i++;
		set->first[b] = i;
	}
	set->first[256] = n;
	return 0;
}

int tok_special_init(struct apr_tokenizer *t, const struct gguf *g, const struct tok_text_map *by_text)
{
	int rc;

	mark_delimiters(t, g, by_text);
	rc = make_set(t, &t->always, false);
	return rc ? rc : make_set(t, &t->with_flag, true);
}

/* Within set[lo, hi), whose pieces agree in their first `depth` bytes and are longer (or lo is exactly
 * that long): the first index whose byte at depth is >= want. */
static uint32_t lower(const struct apr_tokenizer *t, const struct tok_special *set, uint32_t lo, uint32_t hi,
                      uint32_t depth, unsigned want)
{
	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2, len;
		const char *s = tok_piece(t, set->id[mid], &len);

		if (len <= depth || (uint8_t)s[depth] < want)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

/* The longest piece that text begins with: its length, or 0. */
static uint32_t match(const struct apr_tokenizer *t, const struct tok_special *set, const char *text, size_t len,
                      uint32_t *id)
{
	unsigned b = (uint8_t)text[0];
	uint32_t lo = set->first[b], hi = set->first[b + 1], depth = 1, best = 0, n;

	while (lo < hi) {
		tok_piece(t, set->id[lo], &n);
		if (n == depth) { /* shorter pieces sort first */
			best = depth;
			*id = set->id[lo];
		}
		if (depth >= len)
			break;
		b = (uint8_t)text[depth];
		lo = lower(t, set, lo, hi, depth, b);
		hi = lower(t, set, lo, hi, depth, b + 1);
		depth++;
	}
	return best;
}

bool tok_special_find(const struct apr_tokenizer *t, const struct tok_special *set, const char *text, size_t len,
                      size_t pos, size_t *at, size_t *end, uint32_t *id)
{
	for (; pos < len; pos++) {
		unsigned b = (uint8_t)text[pos];
		uint32_t n;

		if (set->first[b] == set->first[b + 1])
			continue;
		n = match(t, set, text + pos, len - pos, id);
		if (n) {
			*at = pos;
			*end = pos + n;
			return true;
		}
	}
	return false;
}

bool tok_special_find_marked(const struct apr_tokenizer *t, const char *text, const uint8_t *mark, size_t len,
                             size_t pos, size_t *at, size_t *end, uint32_t *id)
{
	size_t own = pos; /* where the template's bytes around pos end */

	for (; pos < len; pos++) {
		unsigned b = (uint8_t)text[pos];
		uint32_t n = 0, k = 0, user = 0;

		if (own < pos)
			own = pos;
		while (own < len && !mark[own])
			own++;
		if (own > pos && t->with_flag.first[b] < t->with_flag.first[b + 1])
			n = match(t, &t->with_flag, text + pos, own - pos, id);
		if (t->always.first[b] < t->always.first[b + 1])
			k = match(t, &t->always, text + pos, len - pos, &user);
		if (k > n) { /* goes on beyond the template's bytes */
			n = k;
			*id = user;
		}
		if (n) {
			*at = pos;
			*end = pos + n;
			return true;
		}
	}
	return false;
}
