/* SPDX-License-Identifier: MIT */
/*
 * BLAKE2b-256 (RFC 7693, no key), plain and over large data in parallel.
 * Owns nothing else: what is hashed and why is model.c's business.
 */
#ifndef APR_MODEL_HASH_H
#define APR_MODEL_HASH_H

#include <stddef.h>
#include <stdint.h>

#define APR_HASH_LEN 32
#define APR_HASH_LEAF ((size_t)1 << 20)

struct apr_hash {
	uint64_t h[8], n;   /* chain value, bytes taken so far */
	uint8_t block[128]; /* the last block is held back until it is known to be the last */
	size_t n_block;
};

void apr_hash_init(struct apr_hash *s);
void apr_hash_update(struct apr_hash *s, const void *data, size_t len);
void apr_hash_final(struct apr_hash *s, uint8_t out[APR_HASH_LEN]);

/* Hashes each APR_HASH_LEAF bytes of data (the last piece may be shorter) on as many threads as the
 * process may run on, at most 16, and feeds the digests to s in order. 0 or -ENOMEM. */
int apr_hash_tree(struct apr_hash *s, const uint8_t *data, uint64_t len);

#endif
