/* SPDX-License-Identifier: MIT */
/*
 * Private to the tokenizer: its tables, and the output and scratch of one call.
 *
 * tok_load.c fills struct apr_tokenizer from the file; tokenizer.c owns it and cuts
 * text at special tokens; tok_bpe.c and tok_spm.c turn the plain text between them into ids;
 * tok_special.c decides what is special and finds it.
 */
#ifndef APR_TOK_H
#define APR_TOK_H

#include <stdatomic.h>

#include "model/gguf.h"
#include "model/pretok.h"
#include "model/tok_map.h"
#include "model/tokenizer.h"

#define TOK_MAX_ENDS 16

struct apr_model;

struct tok_special { /* pieces matched in text as a whole, sorted by their bytes */
	uint32_t *id, n;
	uint32_t first[257]; /* those that begin with byte b: first[b] .. first[b + 1] */
};

/* What merging a piece's own bytes gives. Found when first needed and then kept: whichever thread finds it,
 * finds the same, so relaxed loads and stores are enough and the tokenizer is still immutable to its callers. */
enum tok_whole { TOK_NOT_YET, TOK_WHOLE /* the piece alone */, TOK_PARTS };

struct apr_tokenizer {
	uint32_t n;
	bool spm;
	uint8_t *kind;    /* enum apr_piece_kind, by id; turn delimiters are CONTROL whatever the file says */
	char *bytes;      /* all pieces as they stand in running text */
	uint32_t *start;  /* n + 1 offsets into bytes */
	uint32_t byte_id[256]; /* APR_NO_ID: the vocabulary cannot write this byte alone */
	struct tok_text_map by_bytes; /* NORMAL pieces by their bytes */
	_Atomic uint8_t *whole;       /* enum tok_whole, by id */
	struct tok_special always, with_flag; /* USER pieces; those and CONTROL ones */
	/* BPE */
	enum apr_pretok pre;
	struct tok_pair_map merges;
	/* SPM */
	float *score;
	bool space_prefix;
	uint32_t max_piece; /* bytes of the longest NORMAL piece */
	uint8_t joins[8192]; /* bit (a << 8 | b): byte b follows a somewhere in a NORMAL piece */

	int64_t bos;
	bool adds_bos;
	uint32_t end[TOK_MAX_ENDS], n_end;
};

static inline const char *tok_piece(const struct apr_tokenizer *t, uint32_t id, uint32_t *len)
{
	*len = t->start[id + 1] - t->start[id];
	return t->bytes + t->start[id];
}

struct tok_out { /* ids of one call, growing */
	uint32_t *id;
	uint32_t n, cap, max; /* max 0: no limit */
};

int tok_push(struct tok_out *o, uint32_t id); /* 0, -E2BIG, -ENOMEM */

struct tok_scratch { /* grows to the longest piece of text of one call */
	void *sym, *heap;
	size_t sym_cap; /* in symbols */
};

/* The plain text of one stretch between special tokens. 0 or -errno. */
int tok_bpe(const struct apr_tokenizer *t, const char *text, size_t len, struct tok_scratch *s, struct tok_out *o);
int tok_spm(const struct apr_tokenizer *t, const char *text, size_t len, bool prefix, struct tok_scratch *s,
            struct tok_out *o);

/* Makes CONTROL of the delimiters (see tok_special.c), then the two sorted sets. by_text: every piece by the
 * text in the file. 0 or -ENOMEM. */
int tok_special_init(struct apr_tokenizer *t, const struct gguf *g, const struct tok_text_map *by_text);
/* The first special piece in text[pos..len): its place, id and end; false where there is none. */
bool tok_special_find(const struct apr_tokenizer *t, const struct tok_special *set, const char *text, size_t len,
                      size_t pos, size_t *at, size_t *end, uint32_t *id);
/* The same in a text of which some bytes (mark not 0) come from outside: those are in no CONTROL or UNKNOWN piece. */
bool tok_special_find_marked(const struct apr_tokenizer *t, const char *text, const uint8_t *mark, size_t len,
                             size_t pos, size_t *at, size_t *end, uint32_t *id);
/* Reads the file's tables into t (tok_load.c). Fills err. */
int tok_load(struct apr_tokenizer *t, const struct gguf *g, char *err, size_t errlen);
/* End-of-turn pieces that go by their text: NULL-terminated. */
extern const char *const tok_end_texts[];

#endif
