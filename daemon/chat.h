/* SPDX-License-Identifier: MIT */
/*
 * Messages to ids: the JSON of a CHAT, the model's own template, its special tokens.
 *
 * Owns: struct chat, made once a model; what the JSON may hold. Does not own: the
 * template language (template/), finding tokens (model/), when it is done (intake.c).
 */
#ifndef APRD_CHAT_H
#define APRD_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct apr_loaded;
struct chat;

/* Reads tokenizer.chat_template. A file without one, or with one that cannot be read, is no reason not to serve the
 * model: chat_why says what a CHAT will be told, NULL where all is well. -ENOMEM. */
int chat_new(struct chat **out, const struct apr_loaded *m);
void chat_free(struct chat *c);
const char *chat_why(const struct chat *c);

struct chat_input {
	const char *json; /* the messages, or an object with them; need not end in NUL */
	size_t len;
	bool parse_special; /* special tokens spelt in contents count */
	bool replayable;
	uint32_t most; /* ids */
};

/* *ids is malloc'ed. -EOPNOTSUPP no template; -EINVAL the JSON or the template complains; -E2BIG more than most ids, or
 * a limit of the template's; -EILSEQ as apr_tok_encode; -ENOMEM. why: one line, may be left empty. */
int chat_ids(const struct chat *c, const struct chat_input *in, uint32_t **ids, uint32_t *n, char *why, size_t whylen);

#endif
