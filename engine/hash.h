/* SPDX-License-Identifier: MIT */
/*
 * A fast 64-bit hash of bytes, for finding things again and for noticing damage;
 * not against an adversary (the prefix cache compares tokens besides).
 *
 * Owns: the function. Its values are kept in panel files: changing it means a new
 * layout version in engine/panels.c.
 */
#ifndef APR_ENGINE_HASH_H
#define APR_ENGINE_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t apr_hash_mix(uint64_t a, uint64_t b)
{
	__extension__ unsigned __int128 p = (unsigned __int128)(a ^ UINT64_C(0x9e3779b97f4a7c15)) * (b ^ UINT64_C(0xc2b2ae3d27d4eb4f));

	return (uint64_t)p ^ (uint64_t)(p >> 64);
}

/* Four lanes, so that memory and not the multiplier's latency sets the pace. */
static inline uint64_t apr_hash_bytes(uint64_t seed, const void *data, size_t len)
{
	const uint8_t *p = data;
	uint64_t lane[4] = {seed, seed ^ 1, seed ^ 2, seed ^ 3}, w[8], tail = 0;
	size_t left = len;
	unsigned i;

	for (; left >= 64; left -= 64, p += 64) {
		memcpy(w, p, 64);
		for (i = 0; i < 4; i++)
			lane[i] = apr_hash_mix(lane[i] ^ w[2 * i], w[2 * i + 1]) + lane[i];
	}
	for (; left >= 8; left -= 8, p += 8) {
		memcpy(w, p, 8);
		lane[0] = apr_hash_mix(lane[0] ^ w[0], left);
	}
	if (left) /* nothing may be NULL */
		memcpy(&tail, p, left);
	lane[1] = apr_hash_mix(lane[1] ^ tail, len);
	return apr_hash_mix(apr_hash_mix(lane[0], lane[1]), apr_hash_mix(lane[2], lane[3]));
}

#endif
