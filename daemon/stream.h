/* SPDX-License-Identifier: MIT */
/*
 * An answer's text as it goes out: whole characters, and nothing of a stop string.
 *
 * A token is held while its bytes are part of an unfinished character or may be the
 * beginning of a stop string; then it comes out with its text. The stop that ends
 * first in the stream of bytes matches (of several, the one that began first), so
 * that the cut does not depend on where tokens end. Tokens wholly inside the stop are
 * not delivered, one that straddles its beginning is, with its text cut.
 *
 * Text is always well-formed UTF-8: bytes that cannot be part of a character come out
 * as one U+FFFD a maximal run (the ids say what they were), as does a character that
 * the answer's end cut short; the latter as a piece without a token.
 *
 * Owns: what is held. Does not own the ring. Pure; one thread at a time.
 */
#ifndef APRD_STREAM_H
#define APRD_STREAM_H

#include <apr/abi.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct stop { /* one stop string */
	const uint8_t *text;
	uint32_t len;
};

struct held { /* a token that is not out yet */
	uint32_t id, n_top;
	float logprob;
	uint64_t begin, end; /* its bytes in the answer's stream */
	uint64_t chars;      /* end of the last whole character once it was there */
	struct apr_top *top;
};

struct stream {
	const struct stop *stops;
	uint32_t n_stops;
	uint8_t *buf;        /* bytes from `base` on */
	uint64_t base;
	uint32_t len, cap;
	uint64_t chars;      /* end of the last whole character */
	uint64_t safe;       /* nothing before it can be part of a stop */
	uint64_t told;       /* text before it is out */
	struct held *held;   /* a queue */
	uint32_t first, count, cap_held;
	uint32_t pos;        /* index of the next token to come out */
	bool ended, stopped, flushed;
	uint64_t cut;        /* stopped: the text ends here */
};

struct stream_out {
	bool token;   /* false: a piece */
	uint32_t id, pos, n_top;
	float logprob;
	const struct apr_top *top; /* until the next call */
	size_t len;
};

void stream_init(struct stream *t, const struct stop *stops, uint32_t n_stops);
void stream_free(struct stream *t);
/* A token with its bytes. 1: a stop string is complete, push no more. 0, -ENOMEM. */
int stream_push(struct stream *t, uint32_t id, float logprob, const char *piece, size_t len, const struct apr_top *top,
		uint32_t n_top);
/* A token that was delivered earlier (RESUME): counted, not delivered again. 0, 1, -ENOMEM as above. */
int stream_skip(struct stream *t, uint32_t id, const char *piece, size_t len);
/* No token will come: everything held may go. */
void stream_end(struct stream *t);
/* What may come out next, not yet taken: out and its text (text_cap bytes).
 * 1, 0 nothing now, -E2BIG text_cap too small (out->len = needed). */
int stream_peek(struct stream *t, struct stream_out *out, uint8_t *text, size_t text_cap);
void stream_take(struct stream *t);
bool stream_empty(const struct stream *t); /* ended and all is out */

#endif
