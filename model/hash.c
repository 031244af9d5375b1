/* SPDX-License-Identifier: MIT */
/*
 * BLAKE2b-256. A cryptographic hash, since a file that someone else made must not
 * be able to pass for another in the panel cache; cheap enough because leaves are
 * hashed side by side: about 1 GB/s a thread.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "model/hash.h"

#define MAX_THREADS 16

static const uint64_t iv[8] = {
	UINT64_C(0x6a09e667f3bcc908), UINT64_C(0xbb67ae8584caa73b), UINT64_C(0x3c6ef372fe94f82b),
	UINT64_C(0xa54ff53a5f1d36f1), UINT64_C(0x510e527fade682d1), UINT64_C(0x9b05688c2b3e6c1f),
	UINT64_C(0x1f83d9abfb41bd6b), UINT64_C(0x5be0cd19137e2179),
};

static inline uint64_t rotr(uint64_t x, unsigned n)
{
	return x >> n | x << (64 - n);
}

static inline void mix(uint64_t v[16], unsigned a, unsigned b, unsigned c, unsigned d, uint64_t x, uint64_t y)
{
	v[a] += v[b] + x;
	v[d] = rotr(v[d] ^ v[a], 32);
	v[c] += v[d];
	v[b] = rotr(v[b] ^ v[c], 24);
	v[a] += v[b] + y;
	v[d] = rotr(v[d] ^ v[a], 16);
	v[c] += v[d];
	v[b] = rotr(v[b] ^ v[c], 63);
}

#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf) \
	do { \
		mix(v, 0, 4, 8, 12, m[s0], m[s1]); \
		mix(v, 1, 5, 9, 13, m[s2], m[s3]); \
		mix(v, 2, 6, 10, 14, m[s4], m[s5]); \
		mix(v, 3, 7, 11, 15, m[s6], m[s7]); \
		mix(v, 0, 5, 10, 15, m[s8], m[s9]); \
		mix(v, 1, 6, 11, 12, m[sa], m[sb]); \
		mix(v, 2, 7, 8, 13, m[sc], m[sd]); \
		mix(v, 3, 4, 9, 14, m[se], m[sf]); \
	} while (0)

static void compress(struct apr_hash *s, const uint8_t *block, uint64_t n, uint64_t last)
{
	uint64_t m[16], v[16];
	unsigned i;

	memcpy(m, block, sizeof m); /* little-endian, as gguf_parse.c insists */
	memcpy(v, s->h, sizeof s->h);
	memcpy(v + 8, iv, sizeof iv);
	v[12] ^= n;
	v[14] ^= last;
	ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
	ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
	ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
	ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
	ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
	ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
	ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
	ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
	ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
	ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
	ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
	ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
	for (i = 0; i < 8; i++)
		s->h[i] ^= v[i] ^ v[i + 8];
}

void apr_hash_init(struct apr_hash *s)
{
	memset(s, 0, sizeof *s);
	memcpy(s->h, iv, sizeof iv);
	s->h[0] ^= 0x01010000 ^ APR_HASH_LEN; /* fan-out 1, depth 1, no key */
}

void apr_hash_update(struct apr_hash *s, const void *data, size_t len)
{
	const uint8_t *p = data;

	while (len) {
		size_t n = sizeof s->block - s->n_block;

		if (!n) {
			s->n += sizeof s->block;
			compress(s, s->block, s->n, 0);
			s->n_block = 0;
			while (len > sizeof s->block) { /* whole blocks straight from the data */
				s->n += sizeof s->block;
				compress(s, p, s->n, 0);
				p += sizeof s->block;
				len -= sizeof s->block;
			}
			continue;
		}
		n = n < len ? n : len;
		memcpy(s->block + s->n_block, p, n);
		s->n_block += n;
		p += n;
		len -= n;
	}
}

void apr_hash_final(struct apr_hash *s, uint8_t out[APR_HASH_LEN])
{
	memset(s->block + s->n_block, 0, sizeof s->block - s->n_block);
	compress(s, s->block, s->n + s->n_block, UINT64_MAX);
	memcpy(out, s->h, APR_HASH_LEN);
}

struct job {
	const uint8_t *data;
	uint64_t len, n_leaves;
	uint8_t (*digest)[APR_HASH_LEN];
	_Atomic uint64_t next; /* the next leaf to take; digests are published by pthread_join */
};

static void *hash_leaves(void *arg)
{
	struct job *job = arg;
	struct apr_hash s;
	uint64_t i;

	while ((i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->n_leaves) {
		uint64_t start = i * APR_HASH_LEAF, n = job->len - start;

		apr_hash_init(&s);
		apr_hash_update(&s, job->data + start, n < APR_HASH_LEAF ? n : APR_HASH_LEAF);
		apr_hash_final(&s, job->digest[i]);
	}
	return NULL;
}

static unsigned n_threads(uint64_t n_leaves)
{
	cpu_set_t set;
	unsigned n = 1;

	if (!sched_getaffinity(0, sizeof set, &set))
		n = (unsigned)CPU_COUNT(&set);
	n = n < MAX_THREADS ? n : MAX_THREADS;
	return n_leaves / 8 < n ? (unsigned)(n_leaves / 8) : n; /* a thread is worth 8 MiB at least */
}

int apr_hash_tree(struct apr_hash *s, const uint8_t *data, uint64_t len)
{
	struct job job = {.data = data, .len = len, .n_leaves = (len + APR_HASH_LEAF - 1) / APR_HASH_LEAF};
	pthread_t thread[MAX_THREADS];
	unsigned n = n_threads(job.n_leaves), started = 0, i;

	job.digest = calloc(job.n_leaves ? job.n_leaves : 1, sizeof *job.digest);
	if (!job.digest)
		return -ENOMEM;
	/* This thread works too; one that cannot be started only costs time. */
	for (i = 1; i < n; i++) {
		if (!pthread_create(&thread[started], NULL, hash_leaves, &job))
			started++;
	}
	hash_leaves(&job);
	for (i = 0; i < started; i++)
		pthread_join(thread[i], NULL);
	apr_hash_update(s, job.digest, job.n_leaves * sizeof *job.digest);
	free(job.digest);
	return 0;
}
