/* SPDX-License-Identifier: MIT */
/* KV pages and the prefix tree: see kv.h. */
#include "engine/kv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/hash.h"

#define NONE APR_KV_NONE

struct page {
	uint32_t ref;        /* sequences that hold it */
	uint32_t node;       /* whose KV it has, or NONE */
	uint32_t prev, next; /* LRU list while ref is 0 and node is set; next alone in the free list */
};

struct pool { /* the pages of one group */
	struct page *page;
	uint32_t n, free_head, lru_old, lru_new;
	uint32_t n_free, n_cached; /* n_free: free list and LRU list */
};

struct node {
	uint32_t parent, next; /* next in its bucket, or in the list of unused nodes */
	uint32_t refs;         /* children, and sequences whose tip it is */
	bool used;
	uint64_t scope, kinds; /* scope: of a root's child; 0 deeper, where the parent implies it */
	uint64_t hash;
	uint32_t ids[APR_KV_PAGE];
};

struct apr_kv {
	uint32_t n_groups, max_pages_seq;
	struct apr_kv_group group[APR_MAX_KV_GROUPS]; /* shapes alone are read */
	struct pool pool[APR_MAX_KV_GROUPS];
	struct node *node;
	uint32_t *node_page; /* [n_nodes][n_groups] */
	uint32_t n_nodes, node_free;
	uint32_t *path;      /* [max_pages_seq]: scratch of apr_kv_peek */
	uint32_t *bucket;    /* [mask + 1] */
	uint32_t mask;
	/* Written by the driving thread, read by any: totals for status, ordered with nothing. */
	_Atomic uint32_t total, free, cached;
};

static uint32_t *slot_of(const struct apr_kv *kv, uint32_t node, uint32_t g)
{
	return &kv->node_page[(size_t)node * kv->n_groups + g];
}

static void publish(struct apr_kv *kv)
{
	uint32_t f = 0, c = 0, g;

	for (g = 0; g < kv->n_groups; g++) {
		f += kv->pool[g].n_free;
		c += kv->pool[g].n_cached;
	}
	atomic_store_explicit(&kv->free, f, memory_order_relaxed);
	atomic_store_explicit(&kv->cached, c, memory_order_relaxed);
}

void apr_kv_counts(const struct apr_kv *kv, struct apr_kv_counts *c)
{
	c->total = atomic_load_explicit(&kv->total, memory_order_relaxed);
	c->free = atomic_load_explicit(&kv->free, memory_order_relaxed);
	c->cached = atomic_load_explicit(&kv->cached, memory_order_relaxed);
}

/* ---- setting up ---------------------------------------------------------------- */

static int pool_init(struct pool *p, uint32_t n)
{
	uint32_t i;

	p->page = calloc(n ? n : 1, sizeof *p->page);
	if (!p->page)
		return -ENOMEM;
	p->n = p->n_free = n;
	p->n_cached = 0;
	p->lru_old = p->lru_new = NONE;
	p->free_head = n ? 0 : NONE;
	for (i = 0; i < n; i++) {
		p->page[i].node = p->page[i].prev = NONE;
		p->page[i].next = i + 1 < n ? i + 1 : NONE;
	}
	return 0;
}

static uint32_t nodes_for(const struct apr_sizes *s)
{
	uint32_t most = 0, g;

	for (g = 0; g < s->n_groups; g++)
		if (s->group[g].n_pages > most)
			most = s->group[g].n_pages;
	/* One for each page of the largest group, and as many again: window groups leave nodes without pages behind. */
	return most <= UINT32_MAX / 4 ? 2 * most + 1 : most;
}

static uint32_t buckets_for(uint32_t nodes)
{
	uint32_t n = 64;

	while (n < nodes && n < UINT32_C(1) << 30)
		n *= 2;
	return n;
}

static int nodes_init(struct apr_kv *kv, uint32_t n)
{
	uint32_t buckets = buckets_for(n), i;

	kv->node = calloc(n, sizeof *kv->node);
	kv->node_page = calloc((size_t)n * kv->n_groups + 1, sizeof *kv->node_page);
	kv->bucket = malloc((size_t)buckets * sizeof *kv->bucket);
	kv->path = calloc((size_t)kv->max_pages_seq + 1, sizeof *kv->path);
	if (!kv->node || !kv->node_page || !kv->bucket || !kv->path)
		return -ENOMEM;
	kv->mask = buckets - 1;
	kv->n_nodes = n;
	kv->node_free = 0;
	memset(kv->bucket, 0xff, (size_t)buckets * sizeof *kv->bucket);
	memset(kv->node_page, 0xff, (size_t)n * kv->n_groups * sizeof *kv->node_page);
	for (i = 0; i < n; i++)
		kv->node[i].next = i + 1 < n ? i + 1 : NONE;
	return 0;
}

uint64_t apr_kv_bytes(const struct apr_sizes *s)
{
	uint64_t nodes = nodes_for(s), sum = sizeof(struct apr_kv) + buckets_for((uint32_t)nodes) * sizeof(uint32_t);
	uint32_t g, path = 0;

	for (g = 0; g < s->n_groups; g++) {
		sum += s->group[g].n_pages * sizeof(struct page);
		if (s->group[g].max_pages_seq > path)
			path = s->group[g].max_pages_seq;
	}
	sum += ((uint64_t)path + 1) * sizeof(uint32_t);
	return sum + nodes * (sizeof(struct node) + s->n_groups * sizeof(uint32_t));
}

int apr_kv_new(struct apr_kv **out, const struct apr_sizes *s)
{
	struct apr_kv *kv = calloc(1, sizeof *kv);
	uint32_t g, total = 0;
	int rc = 0;

	if (!kv)
		return -ENOMEM;
	kv->n_groups = s->n_groups;
	for (g = 0; g < s->n_groups && !rc; g++) {
		kv->group[g] = s->group[g];
		if (s->group[g].max_pages_seq > kv->max_pages_seq)
			kv->max_pages_seq = s->group[g].max_pages_seq;
		total += s->group[g].n_pages;
		rc = pool_init(&kv->pool[g], s->group[g].n_pages);
	}
	if (!rc)
		rc = nodes_init(kv, nodes_for(s));
	if (rc) {
		apr_kv_free(kv);
		return rc;
	}
	atomic_store_explicit(&kv->total, total, memory_order_relaxed);
	publish(kv);
	*out = kv;
	return 0;
}

void apr_kv_free(struct apr_kv *kv)
{
	uint32_t g;

	if (!kv)
		return;
	for (g = 0; g < kv->n_groups; g++)
		free(kv->pool[g].page);
	free(kv->node);
	free(kv->node_page);
	free(kv->bucket);
	free(kv->path);
	free(kv);
}

int apr_kv_seq_init(struct apr_kv *kv, struct apr_kv_seq *s)
{
	uint32_t g;

	memset(s, 0, sizeof *s);
	s->node = NONE;
	for (g = 0; g < kv->n_groups; g++) {
		s->page[g] = malloc((size_t)kv->max_pages_seq * sizeof *s->page[g]);
		if (!s->page[g]) {
			while (g-- > 0) {
				free(s->page[g]);
				s->page[g] = NULL;
			}
			return -ENOMEM;
		}
		memset(s->page[g], 0xff, (size_t)kv->max_pages_seq * sizeof *s->page[g]);
	}
	return 0;
}

void apr_kv_seq_fini(struct apr_kv *kv, struct apr_kv_seq *s)
{
	uint32_t g;

	apr_kv_drop(kv, s);
	for (g = 0; g < kv->n_groups; g++) {
		free(s->page[g]);
		s->page[g] = NULL;
	}
}

/* ---- the tree ------------------------------------------------------------------ */

static uint64_t node_hash(uint32_t parent, uint64_t scope, const uint32_t *ids, uint64_t kinds)
{
	return apr_hash_bytes(apr_hash_mix(parent, scope ^ kinds), ids, APR_KV_PAGE * sizeof *ids);
}

static uint64_t page_kinds(uint32_t index, const uint64_t *kinds)
{
	return kinds ? kinds[index] : 0;
}

static uint32_t node_find(const struct apr_kv *kv, uint32_t parent, uint64_t scope, const uint32_t *ids, uint64_t kinds)
{
	uint64_t root_scope = parent == NONE ? scope : 0, h = node_hash(parent, root_scope, ids, kinds);
	uint32_t i;

	for (i = kv->bucket[h & kv->mask]; i != NONE; i = kv->node[i].next) {
		const struct node *n = &kv->node[i];

		if (n->hash == h && n->parent == parent && n->scope == root_scope && n->kinds == kinds &&
		    !memcmp(n->ids, ids, sizeof n->ids))
			return i;
	}
	return NONE;
}

static uint32_t node_make(struct apr_kv *kv, uint32_t parent, uint64_t scope, const uint32_t *ids, uint64_t kinds)
{
	uint32_t i = kv->node_free, *b;
	struct node *n;

	if (i == NONE)
		return NONE;
	n = &kv->node[i];
	kv->node_free = n->next;
	n->parent = parent;
	n->scope = parent == NONE ? scope : 0;
	n->kinds = kinds;
	n->refs = 0;
	n->used = true;
	memcpy(n->ids, ids, sizeof n->ids);
	n->hash = node_hash(parent, n->scope, ids, kinds);
	b = &kv->bucket[n->hash & kv->mask];
	n->next = *b;
	*b = i;
	if (parent != NONE)
		kv->node[parent].refs++;
	return i;
}

/* Frees i, and its ancestors after it, while nothing needs them. */
static void node_collect(struct apr_kv *kv, uint32_t i)
{
	uint32_t g, *link;

	while (i != NONE && kv->node[i].refs == 0) {
		struct node *n = &kv->node[i];
		uint32_t parent = n->parent;

		for (g = 0; g < kv->n_groups; g++)
			if (*slot_of(kv, i, g) != NONE)
				return;
		for (link = &kv->bucket[n->hash & kv->mask]; *link != i; link = &kv->node[*link].next)
			;
		*link = n->next;
		n->used = false;
		n->next = kv->node_free;
		kv->node_free = i;
		if (parent != NONE)
			kv->node[parent].refs--;
		i = parent;
	}
}

static void tip_move(struct apr_kv *kv, struct apr_kv_seq *s, uint32_t to)
{
	uint32_t from = s->node;

	if (to != NONE)
		kv->node[to].refs++;
	s->node = to;
	if (from != NONE) {
		kv->node[from].refs--;
		node_collect(kv, from);
	}
}

/* ---- pages --------------------------------------------------------------------- */

static void lru_unlink(struct pool *p, uint32_t i)
{
	struct page *pg = &p->page[i];

	*(pg->prev == NONE ? &p->lru_old : &p->page[pg->prev].next) = pg->next;
	*(pg->next == NONE ? &p->lru_new : &p->page[pg->next].prev) = pg->prev;
	pg->prev = pg->next = NONE;
	p->n_cached--;
}

static void lru_push(struct pool *p, uint32_t i)
{
	struct page *pg = &p->page[i];

	pg->prev = p->lru_new;
	pg->next = NONE;
	*(p->lru_new == NONE ? &p->lru_old : &p->page[p->lru_new].next) = i;
	p->lru_new = i;
	p->n_cached++;
}

static uint32_t page_take(struct apr_kv *kv, uint32_t g) /* n_free > 0 was checked */
{
	struct pool *p = &kv->pool[g];
	uint32_t i = p->free_head;

	if (i != NONE) {
		p->free_head = p->page[i].next;
		p->page[i].next = NONE;
	} else { /* what was used longest ago is forgotten */
		uint32_t node;

		i = p->lru_old;
		lru_unlink(p, i);
		node = p->page[i].node;
		p->page[i].node = NONE;
		*slot_of(kv, node, g) = NONE;
		node_collect(kv, node);
	}
	p->page[i].ref = 1;
	p->n_free--;
	return i;
}

static void page_hold(struct apr_kv *kv, uint32_t g, uint32_t i)
{
	struct pool *p = &kv->pool[g];

	if (p->page[i].ref++ == 0) {
		lru_unlink(p, i);
		p->n_free--;
	}
}

static void page_release(struct apr_kv *kv, uint32_t g, uint32_t i)
{
	struct pool *p = &kv->pool[g];

	if (--p->page[i].ref)
		return;
	p->n_free++;
	if (p->page[i].node != NONE) {
		lru_push(p, i);
	} else {
		p->page[i].next = p->free_head;
		p->free_head = i;
	}
}

/* First page that a query at position `done` or later can still need. */
static uint32_t needed_from(const struct apr_kv_group *g, uint32_t done)
{
	return g->window && done + 1 > g->window ? (done + 1 - g->window) / APR_KV_PAGE : 0;
}

static uint32_t pages_for(uint32_t positions)
{
	return positions / APR_KV_PAGE + (positions % APR_KV_PAGE != 0);
}

uint32_t apr_kv_group_need(const struct apr_kv_group *g, uint32_t positions, uint32_t rows)
{
	uint32_t all = pages_for(positions);
	uint64_t in_window = ((uint64_t)g->window + rows) / APR_KV_PAGE + 2;

	return g->window && in_window < all ? (uint32_t)in_window : all;
}

bool apr_kv_can_ever(const struct apr_kv *kv, uint32_t positions, uint32_t rows)
{
	uint32_t g;

	for (g = 0; g < kv->n_groups; g++)
		if (apr_kv_group_need(&kv->group[g], positions, rows) > kv->pool[g].n)
			return false;
	return true;
}

bool apr_kv_room(const struct apr_kv *kv, uint32_t positions, uint32_t rows)
{
	uint32_t g;

	for (g = 0; g < kv->n_groups; g++)
		if (apr_kv_group_need(&kv->group[g], positions, rows) > kv->pool[g].n_free)
			return false;
	return true;
}

/* ---- what sequences do --------------------------------------------------------- */

/* Longest number of pages, at most n, that all groups can restore along the path. */
static uint32_t restorable(const struct apr_kv *kv, const uint32_t *path, uint32_t n)
{
	uint32_t g, i, from;

	for (; n; n--) {
		for (g = 0; g < kv->n_groups; g++) {
			from = needed_from(&kv->group[g], n * APR_KV_PAGE);
			for (i = n; i > from && *slot_of(kv, path[i - 1], g) != NONE; i--)
				;
			if (i > from)
				break;
		}
		if (g == kv->n_groups)
			return n;
		if (!kv->group[g].window)
			n = i; /* a full group lacks page i - 1: nothing longer than i - 1 pages can be had */
	}
	return 0;
}

/* The nodes of a prompt's full pages below its last token, as far as the tree has them. */
static uint32_t walk(const struct apr_kv *kv, uint32_t *path, uint64_t scope, const uint32_t *ids, uint32_t n_ids,
                     const uint64_t *kinds)
{
	uint32_t most = n_ids ? (n_ids - 1) / APR_KV_PAGE : 0, n, tip = NONE;

	if (most > kv->max_pages_seq)
		most = kv->max_pages_seq;
	for (n = 0; n < most; n++) {
		uint32_t next = node_find(kv, tip, scope, ids + (size_t)n * APR_KV_PAGE, page_kinds(n, kinds));

		if (next == NONE)
			break;
		path[n] = tip = next;
	}
	return n;
}

uint32_t apr_kv_peek(const struct apr_kv *kv, uint64_t scope, const uint32_t *ids, uint32_t n_ids, const uint64_t *kinds)
{
	return restorable(kv, kv->path, walk(kv, kv->path, scope, ids, n_ids, kinds)) * APR_KV_PAGE;
}

uint32_t apr_kv_lookup(struct apr_kv *kv, struct apr_kv_seq *s, uint64_t scope, const uint32_t *ids, uint32_t n_ids,
                       const uint64_t *kinds)
{
	uint32_t *path = s->page[0]; /* free for use: s holds nothing, and group 0's entries are written last */
	uint32_t n = walk(kv, path, scope, ids, n_ids, kinds), g, i, tip;

	i = n;
	n = restorable(kv, path, n);
	tip = n ? path[n - 1] : NONE;
	for (g = kv->n_groups; g-- > 0;) {
		uint32_t from = needed_from(&kv->group[g], n * APR_KV_PAGE);
		uint32_t k;

		if (from > n)
			from = n;
		for (k = from; k < n; k++) {
			uint32_t p = *slot_of(kv, path[k], g);

			page_hold(kv, g, p);
			s->page[g][k] = p;
		}
		if (g == 0) /* what is left of the path in the array */
			for (k = 0; k < i; k++)
				if (k < from || k >= n)
					s->page[0][k] = NONE;
		s->first[g] = from;
		s->n[g] = n;
	}
	if (n)
		tip_move(kv, s, tip);
	s->committed = n;
	publish(kv);
	return n * APR_KV_PAGE;
}

int apr_kv_reserve(struct apr_kv *kv, struct apr_kv_seq *s, uint32_t end)
{
	uint32_t want = pages_for(end), g;

	if (want > kv->max_pages_seq)
		return -EINVAL;
	for (g = 0; g < kv->n_groups; g++)
		if (want > s->n[g] && want - s->n[g] > kv->pool[g].n_free)
			return -EAGAIN;
	for (g = 0; g < kv->n_groups; g++)
		for (; s->n[g] < want; s->n[g]++)
			s->page[g][s->n[g]] = page_take(kv, g);
	publish(kv);
	return 0;
}

static void commit_page(struct apr_kv *kv, struct apr_kv_seq *s, uint64_t scope, const uint32_t *ids,
                        const uint64_t *kinds)
{
	uint32_t i = s->committed, g, node;
	uint64_t word = page_kinds(i, kinds);

	node = node_find(kv, s->node, scope, ids + (size_t)i * APR_KV_PAGE, word);
	if (node == NONE)
		node = node_make(kv, s->node, scope, ids + (size_t)i * APR_KV_PAGE, word);
	if (node == NONE) {
		s->private_from = true;
		return;
	}
	for (g = 0; g < kv->n_groups; g++) {
		/* Another sequence may have been first: then this page stays private. */
		if (*slot_of(kv, node, g) == NONE && i >= s->first[g] && i < s->n[g]) {
			*slot_of(kv, node, g) = s->page[g][i];
			kv->pool[g].page[s->page[g][i]].node = node;
		}
	}
	tip_move(kv, s, node);
	s->committed++;
}

void apr_kv_commit(struct apr_kv *kv, struct apr_kv_seq *s, uint64_t scope, const uint32_t *ids, uint32_t done,
                   const uint64_t *kinds, bool share)
{
	uint32_t g, from;

	while (share && !s->private_from && s->committed < done / APR_KV_PAGE)
		commit_page(kv, s, scope, ids, kinds);
	for (g = 0; g < kv->n_groups; g++) {
		from = needed_from(&kv->group[g], done);
		if (from > s->n[g])
			from = s->n[g];
		for (; s->first[g] < from; s->first[g]++) {
			page_release(kv, g, s->page[g][s->first[g]]);
			s->page[g][s->first[g]] = NONE;
		}
	}
	publish(kv);
}

void apr_kv_drop(struct apr_kv *kv, struct apr_kv_seq *s)
{
	uint32_t g;

	for (g = 0; g < kv->n_groups; g++) {
		/* The last first: of what is cached, a path's end is forgotten before its beginning. */
		for (; s->n[g] > s->first[g]; s->n[g]--) {
			page_release(kv, g, s->page[g][s->n[g] - 1]);
			s->page[g][s->n[g] - 1] = NONE;
		}
		s->first[g] = s->n[g] = s->sent[g] = 0;
	}
	tip_move(kv, s, NONE);
	s->committed = 0;
	s->private_from = false;
	publish(kv);
}

/* ---- for tests ----------------------------------------------------------------- */

static int check_pool(const struct apr_kv *kv, uint32_t g)
{
	const struct pool *p = &kv->pool[g];
	uint32_t i, n = 0, c = 0, held = 0;

	for (i = p->free_head; i != NONE && n <= p->n; i = p->page[i].next, n++)
		if (p->page[i].ref || p->page[i].node != NONE)
			return __LINE__;
	for (i = p->lru_old; i != NONE && c <= p->n; i = p->page[i].next, c++)
		if (p->page[i].ref || p->page[i].node == NONE || *slot_of(kv, p->page[i].node, g) != i)
			return __LINE__;
	for (i = 0; i < p->n; i++)
		held += p->page[i].ref != 0;
	if (c != p->n_cached || n + c != p->n_free || n + c + held != p->n)
		return __LINE__;
	return 0;
}

int apr_kv_check(const struct apr_kv *kv)
{
	uint32_t g, i, unused = 0, used = 0;
	int rc;

	for (g = 0; g < kv->n_groups; g++) {
		rc = check_pool(kv, g);
		if (rc)
			return rc;
	}
	for (i = kv->node_free; i != NONE && unused <= kv->n_nodes; i = kv->node[i].next)
		unused++;
	for (i = 0; i < kv->n_nodes; i++) {
		bool any = kv->node[i].refs != 0;

		if (!kv->node[i].used)
			continue;
		used++;
		for (g = 0; g < kv->n_groups; g++) {
			uint32_t p = *slot_of(kv, i, g);

			any |= p != NONE;
			if (p != NONE && kv->pool[g].page[p].node != i)
				return __LINE__;
		}
		if (!any)
			return __LINE__;
	}
	return used + unused == kv->n_nodes ? 0 : __LINE__;
}
