/* SPDX-License-Identifier: MIT */
/* The tokenizer's hash tables: open addressing, at most half full. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "model/tok_map.h"

static uint64_t mix(uint64_t x, uint64_t y)
{
	__uint128_t p = (__uint128_t)(x ^ UINT64_C(0xa0761d6478bd642f)) * (y ^ UINT64_C(0xe7037ed1a0b428db));

	return (uint64_t)p ^ (uint64_t)(p >> 64);
}

static uint64_t hash_text(uint64_t seed, const char *s, size_t len)
{
	uint64_t h = seed ^ len, w;

	for (; len >= 8; s += 8, len -= 8) {
		memcpy(&w, s, 8);
		h = mix(h ^ w, seed);
	}
	w = 0;
	if (len)
		memcpy(&w, s, len);
	return mix(h ^ w, seed + 1);
}

static uint64_t new_seed(void)
{
	uint64_t seed;

	if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) != sizeof seed) /* early in boot: the time has to do */
		seed = (uint64_t)time(NULL) * UINT64_C(0x9e3779b97f4a7c15);
	return seed;
}

static uint32_t table_size(uint32_t n)
{
	uint32_t size = 16;

	while (size < UINT32_C(0x80000000) && size / 2 < n)
		size *= 2;
	return size;
}

int tok_text_map_init(struct tok_text_map *m, uint32_t n)
{
	uint32_t size = table_size(n);

	m->slot = calloc(size, sizeof *m->slot);
	m->mask = size - 1;
	m->used = 0;
	m->seed = new_seed();
	return m->slot ? 0 : -ENOMEM;
}

void tok_text_map_free(struct tok_text_map *m)
{
	free(m->slot);
	m->slot = NULL;
}

void tok_text_map_add(struct tok_text_map *m, const char *s, uint32_t len, uint32_t id)
{
	uint32_t i = (uint32_t)hash_text(m->seed, s, len) & m->mask;

	for (; m->slot[i].s; i = (i + 1) & m->mask) {
		if (m->slot[i].len == len && !memcmp(m->slot[i].s, s, len))
			return;
	}
	m->slot[i] = (struct tok_text){s, len, id};
	m->used++;
}

uint32_t tok_text_map_get(const struct tok_text_map *m, const char *s, size_t len)
{
	uint32_t i = (uint32_t)hash_text(m->seed, s, len) & m->mask;

	for (; m->slot[i].s; i = (i + 1) & m->mask) {
		if (m->slot[i].len == len && !memcmp(m->slot[i].s, s, len))
			return m->slot[i].id;
	}
	return APR_NO_ID;
}

int tok_pair_map_init(struct tok_pair_map *m, uint32_t n)
{
	uint32_t size = table_size(n), i;

	m->slot = calloc(size, sizeof *m->slot);
	m->mask = size - 1;
	m->seed = new_seed();
	if (!m->slot)
		return -ENOMEM;
	for (i = 0; i < size; i++)
		m->slot[i].left = APR_NO_ID;
	return 0;
}

void tok_pair_map_free(struct tok_pair_map *m)
{
	free(m->slot);
	m->slot = NULL;
}

static uint32_t pair_slot(const struct tok_pair_map *m, uint32_t left, uint32_t right)
{
	uint32_t i = (uint32_t)mix((uint64_t)left << 32 | right, m->seed) & m->mask;

	while (m->slot[i].left != APR_NO_ID && (m->slot[i].left != left || m->slot[i].right != right))
		i = (i + 1) & m->mask;
	return i;
}

void tok_pair_map_add(struct tok_pair_map *m, uint32_t left, uint32_t right, uint32_t rank, uint32_t merged)
{
	struct tok_pair *p = &m->slot[pair_slot(m, left, right)];

	if (p->left == APR_NO_ID)
		*p = (struct tok_pair){left, right, rank, merged};
}

const struct tok_pair *tok_pair_map_get(const struct tok_pair_map *m, uint32_t left, uint32_t right)
{
	const struct tok_pair *p = &m->slot[pair_slot(m, left, right)];

	return p->left == APR_NO_ID ? NULL : p;
}
