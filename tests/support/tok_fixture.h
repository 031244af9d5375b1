/* SPDX-License-Identifier: MIT */
/* What the tokenizer's suites share: a model with its tokenizer, ids as text, the round trip. */
#ifndef APR_TEST_TOK_FIXTURE_H
#define APR_TEST_TOK_FIXTURE_H

#include <stdbool.h>
#include <stddef.h>

#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/support/gguf_writer.h"

struct tok_fixture {
	struct apr_model *m;
	struct apr_tokenizer *t;
};

bool tok_open_real(struct tok_fixture *f, const char *file); /* false: it has not been fetched */
void tok_must_open(struct tok_fixture *f, struct gguf_writer *w);      /* takes w */
void tok_must_refuse(struct gguf_writer *w, const char *names); /* takes w; err must hold `names` */
void tok_close(struct tok_fixture *f);

/* The ids of text as "1 2 3", or "error -N"; static storage. */
const char *tok_ids(const struct tok_fixture *f, const char *text, unsigned flags);
/* text to ids and back, whole and streamed, gives text. */
bool tok_round_trips(const struct tok_fixture *f, const char *text, size_t len);
/* Does text, as a user's, give an id of a control piece? */
bool tok_gives_control(const struct tok_fixture *f, const char *text, size_t len);

void *tok_room(size_t n); /* zeroed; out of memory ends the program */

#endif
