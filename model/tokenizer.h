/* SPDX-License-Identifier: MIT */
/*
 * Text to token ids and back, from the tables of an open model.
 *
 * Owns: vocabulary, merges, the pre-tokenizers, special tokens, end ids.
 * Does not own: chat templates (template/), streaming state of a request
 * (struct apr_detok here is a value that the caller keeps).
 *
 * A struct apr_tokenizer is immutable after creation and may be used by any
 * number of threads at once (scratch is per call). Time is linear in the text
 * (n log n at worst) and no call recurses on its input.
 */
#ifndef APR_TOKENIZER_H
#define APR_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct apr_model;
struct apr_tokenizer;

enum apr_piece_kind { /* as in tokenizer.ggml.token_type */
	APR_PIECE_NORMAL = 1,
	APR_PIECE_UNKNOWN = 2,
	APR_PIECE_CONTROL = 3,
	APR_PIECE_USER = 4,
	APR_PIECE_UNUSED = 5,
	APR_PIECE_BYTE = 6
};

/* Copies what it needs: the model may be closed before the tokenizer is freed. Fills err on
 * failure: -EINVAL damaged or missing tables, -ENOTSUP an unknown tokenizer or pre-tokenizer
 * (named), -ENOMEM. */
int apr_tokenizer_new(struct apr_tokenizer **out, const struct apr_model *m, char *err, size_t errlen);
void apr_tokenizer_free(struct apr_tokenizer *t);

/* Without PARSE_SPECIAL no text whatever gives a CONTROL id. USER pieces (runs of spaces, HTML
 * tags) are matched in any text. Turn delimiters are CONTROL even if the file stores them as
 * NORMAL or USER pieces (model/tok_special.c has the rule).
 * BOS goes in front where add_bos_token says so; where that is left out, SPM and llama-bpe files
 * do it and the others do not; never where the file names no BOS. */
#define APR_TOK_PARSE_SPECIAL 1u /* special-token text becomes its id */
#define APR_TOK_ADD_BOS 2u       /* put BOS in front where the file says so */

/* (Named apart from libaprclient's apr_tokenize, which asks a daemon for the same.)
 * text[len] (any bytes, NUL included) to ids: *ids is malloc'ed, owned by the caller.
 * -E2BIG: more than max_ids (0 = no limit), or 2^31 bytes of text. -ENOMEM.
 * -EILSEQ: a byte that the vocabulary has no piece for (apr_tokenizer_bytes tells which ones
 * it can write: SmolLM2's lacks 21, mostly such as no UTF-8 text has; SPM has all). Such text
 * is refused, since the ids could only stand for another text. */
int apr_tok_encode(const struct apr_tokenizer *t, const char *text, size_t len, unsigned flags, uint32_t max_ids,
                 uint32_t **ids, uint32_t *n_ids);

/* A rendered chat template: mark[i] says of each byte whether it came from outside (not 0). A CONTROL or UNKNOWN
 * piece is found only where all of its bytes are the template's (0); everything else is as it would be in one text.
 * APR_TOK_ADD_BOS puts BOS in front unless the template wrote it there; APR_TOK_PARSE_SPECIAL makes the marks of no
 * account. */
int apr_tok_encode_marked(const struct apr_tokenizer *t, const char *text, const uint8_t *mark, size_t len,
                          unsigned flags, uint32_t max_ids, uint32_t **ids, uint32_t *n_ids);

/* Bytes of one id as it stands in running text (never NUL-terminated; may be half a
 * character). Control pieces give their text only with special true, else 0 bytes.
 * Returns NULL where id >= n_vocab. The bytes live as long as the tokenizer. */
const char *apr_piece(const struct apr_tokenizer *t, uint32_t id, bool special, size_t *len);

/* All of ids to bytes: *text malloc'ed. SPM's first-space rule is not applied
 * (generation goes on from a prompt). -EINVAL: an id outside the vocabulary. */
int apr_tok_decode(const struct apr_tokenizer *t, const uint32_t *ids, uint32_t n, bool special, char **text, size_t *len);

/* Streaming: holds the bytes of an unfinished UTF-8 character. Invalid bytes come out
 * as they are once they cannot become valid. Zero-initialise. */
struct apr_detok {
	uint8_t held[4];
	uint8_t n_held;
};
/* Appends piece to what is held and gives back the longest prefix that ends on a
 * character boundary: out must hold len + 4 bytes. Returns bytes written. */
size_t apr_detok_push(struct apr_detok *d, const char *piece, size_t len, char *out);
size_t apr_detok_flush(struct apr_detok *d, char *out); /* what is left, at most 3 bytes */

/* can[b] for every byte: whether text that holds it can become ids. */
void apr_tokenizer_bytes(const struct apr_tokenizer *t, bool can[256]);

uint32_t apr_tokenizer_size(const struct apr_tokenizer *t); /* n_vocab of real ids */
enum apr_piece_kind apr_tokenizer_kind(const struct apr_tokenizer *t, uint32_t id);
bool apr_tokenizer_is_end(const struct apr_tokenizer *t, uint32_t id); /* eos, eot, end of turn */
const uint32_t *apr_tokenizer_end_ids(const struct apr_tokenizer *t, uint32_t *n);
int64_t apr_tokenizer_bos(const struct apr_tokenizer *t);  /* -1 = none */
bool apr_tokenizer_adds_bos(const struct apr_tokenizer *t);

#endif
