/* SPDX-License-Identifier: MIT */
/*
 * Counts of the ids in a sequence's penalty window, sparse, without allocation
 * after creation.
 *
 * Owns: the list that apr_sample reads and its index by id. Does not own the
 * window (engine/seq.c slides it).
 */
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"

struct apr_seen_set *apr_seen_new(uint32_t max_distinct)
{
	struct apr_seen_set *s = calloc(1, sizeof *s);
	uint64_t size = 16;

	if (!s)
		return NULL;
	while (size < 2 * (uint64_t)max_distinct)
		size *= 2;
	s->list = malloc(max_distinct * sizeof *s->list);
	s->index = size <= UINT32_MAX ? calloc(size, sizeof *s->index) : NULL;
	if (!s->list || !s->index) {
		apr_seen_free(s);
		return NULL;
	}
	s->cap = max_distinct;
	s->mask = (uint32_t)(size - 1);
	return s;
}

void apr_seen_free(struct apr_seen_set *s)
{
	if (!s)
		return;
	free(s->list);
	free(s->index);
	free(s);
}

static uint32_t home(const struct apr_seen_set *s, uint32_t id)
{
	return id * UINT32_C(2654435769) >> 7 & s->mask;
}

static uint32_t find(const struct apr_seen_set *s, uint32_t id) /* its place, or the empty one where it would go */
{
	uint32_t i = home(s, id);

	while (s->index[i] && s->list[s->index[i] - 1].id != id)
		i = (i + 1) & s->mask;
	return i;
}

void apr_seen_add(struct apr_seen_set *s, uint32_t id, bool output)
{
	uint32_t i = find(s, id);
	struct apr_seen *e;

	if (!s->index[i]) {
		if (s->n == s->cap) /* cannot be: cap is the window's length */
			return;
		s->list[s->n] = (struct apr_seen){.id = id};
		s->index[i] = ++s->n;
	}
	e = &s->list[s->index[i] - 1];
	*(output ? &e->output : &e->prompt) += 1;
}

/* Closes the hole at i, so that every later entry of the run stays reachable. */
static void unindex(struct apr_seen_set *s, uint32_t i)
{
	uint32_t j = i, h;

	for (;;) {
		s->index[i] = 0;
		do {
			j = (j + 1) & s->mask;
			if (!s->index[j])
				return;
			h = home(s, s->list[s->index[j] - 1].id);
			/* j may move to i unless its home lies in (i, j] around the ring */
		} while (((j - h) & s->mask) < ((j - i) & s->mask));
		s->index[i] = s->index[j];
		i = j;
	}
}

void apr_seen_remove(struct apr_seen_set *s, uint32_t id, bool output)
{
	uint32_t i = find(s, id), k, last;
	struct apr_seen *e;

	if (!s->index[i])
		return;
	k = s->index[i] - 1;
	e = &s->list[k];
	*(output ? &e->output : &e->prompt) -= 1;
	if (e->prompt || e->output)
		return;
	unindex(s, i);
	last = --s->n;
	if (k != last) {
		s->index[find(s, s->list[last].id)] = k + 1;
		s->list[k] = s->list[last];
	}
}
