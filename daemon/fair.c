/* SPDX-License-Identifier: MIT */
/* Owns: shares. See fair.h. */
#include "daemon/fair.h"
#include <errno.h>
#include <stdlib.h>

enum { BUCKETS = 256, IDLE_LOOK = 2 };

/* ---- flows ---------------------------------------------------------------------------- */

static uint32_t hash(const struct fair_flow *up, uint64_t id)
{
	uint64_t h = (id + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ (up->id + 3) * UINT64_C(0xc2b2ae3d27d4eb4f);

	return (uint32_t)(h >> 32 ^ h);
}

int fair_init(struct fair *f)
{
	*f = (struct fair){ .mask = BUCKETS - 1 };
	f->idle_tail = &f->idle;
	f->root.weight = 1;
	f->bucket = calloc(BUCKETS, sizeof(struct fair_flow *));
	return f->bucket ? 0 : -ENOMEM;
}

static void flow_free(struct fair_flow *w)
{
	heap_free(&w->active);
	for (int c = 0; c < FAIR_CLASSES; c++)
		heap_free(&w->wait[c]);
	free(w);
}

void fair_fini(struct fair *f)
{
	for (uint32_t i = 0; f->bucket && i <= f->mask; i++) {
		while (f->bucket[i]) {
			struct fair_flow *w = f->bucket[i];
			f->bucket[i] = w->next;
			flow_free(w);
		}
	}
	heap_free(&f->root.active);
	for (int c = 0; c < FAIR_CLASSES; c++)
		heap_free(&f->root.wait[c]);
	free(f->bucket);
	f->bucket = NULL;
}

static void grow(struct fair *f)
{
	uint32_t mask = f->mask * 2 + 1;
	struct fair_flow **b = calloc((size_t)mask + 1, sizeof(struct fair_flow *));

	if (!b) /* longer chains, then */
		return;
	for (uint32_t i = 0; i <= f->mask; i++) {
		for (struct fair_flow *w = f->bucket[i], *next; w; w = next) {
			next = w->next;
			struct fair_flow **to = &b[hash(w->up, w->id) & mask];
			w->next = *to;
			*to = w;
		}
	}
	free(f->bucket);
	f->bucket = b;
	f->mask = mask;
}

static void idle_push(struct fair *f, struct fair_flow *w)
{
	w->idle_next = NULL;
	w->idle_at = f->idle_tail;
	*f->idle_tail = w;
	f->idle_tail = &w->idle_next;
}

static void idle_take(struct fair *f, struct fair_flow *w)
{
	if (!w->idle_at)
		return;
	*w->idle_at = w->idle_next;
	if (w->idle_next)
		w->idle_next->idle_at = w->idle_at;
	else
		f->idle_tail = w->idle_at;
	w->idle_at = NULL;
}

static void forget(struct fair *f, struct fair_flow *w)
{
	struct fair_flow **at = &f->bucket[hash(w->up, w->id) & f->mask], *up = w->up;

	while (*at != w)
		at = &(*at)->next;
	*at = w->next;
	f->n--;
	if (!--up->kids && up != &f->root)
		idle_push(f, up);
	flow_free(w);
}

/* A few of those that nobody names: one whose work the others have caught up with is as good as new. */
static void reap(struct fair *f)
{
	for (int i = 0; i < IDLE_LOOK && f->idle; i++) {
		struct fair_flow *w = f->idle;
		f->idle = w->idle_next;
		if (f->idle)
			f->idle->idle_at = &f->idle;
		else
			f->idle_tail = &f->idle;
		w->idle_at = NULL;
		if (w->work <= w->up->clock)
			forget(f, w);
		else
			idle_push(f, w);
	}
}

static struct fair_flow *flow_of(struct fair *f, struct fair_flow *up, uint64_t id)
{
	struct fair_flow *w = f->bucket[hash(up, id) & f->mask];

	while (w && (w->up != up || w->id != id))
		w = w->next;
	if (w) {
		idle_take(f, w);
		return w;
	}
	w = calloc(1, sizeof(*w));
	if (!w)
		return NULL;
	if (f->n > 2 * f->mask)
		grow(f);
	struct fair_flow **to = &f->bucket[hash(up, id) & f->mask];
	w->up = up;
	w->id = id;
	w->weight = 1;
	w->next = *to;
	*to = w;
	f->n++;
	up->kids++;
	return w;
}

struct fair_flow *fair_hold(struct fair *f, uint64_t identity, uint32_t weight, uint64_t session)
{
	reap(f);
	struct fair_flow *who = flow_of(f, &f->root, identity), *s;

	if (!who)
		return NULL;
	who->weight = weight ? weight : 1;
	s = flow_of(f, who, session);
	if (!s && !who->kids)
		idle_push(f, who);
	if (s)
		s->refs++;
	return s;
}

void fair_let_go(struct fair *f, struct fair_flow *session)
{
	if (!--session->refs)
		idle_push(f, session);
}

/* ---- activity --------------------------------------------------------------------------- */

static bool is_active(const struct fair_flow *w)
{
	return w->waiting || w->running;
}

static void clock_on(struct fair_flow *up)
{
	const struct heap_item *least = heap_first(&up->active);
	uint64_t now = least ? least->key : up->most; /* nobody is there to be owed anything */

	if (now > up->clock)
		up->clock = now;
}

static int activate(struct fair_flow *w)
{
	if (w->act.at || !w->up)
		return 0;
	if (w->work < w->up->clock)
		w->work = w->up->clock;
	if (w->up->most < w->work)
		w->up->most = w->work;
	w->act.key = w->work;
	return heap_add(&w->up->active, &w->act);
}

static void deactivate(struct fair_flow *w)
{
	if (is_active(w))
		return;
	heap_remove(&w->up->active, &w->act);
	clock_on(w->up);
}

/* A session and its identity: active, the upper one first. */
static int activate_both(struct fair_flow *s)
{
	int e = activate(s->up);

	if (!e)
		e = activate(s);
	if (e)
		deactivate(s->up);
	return e;
}

/* ---- what waits ---------------------------------------------------------------------------- */

static int list(struct fair_flow *w, unsigned cls)
{
	if (w->in[cls].at)
		return 0;
	w->in[cls].key = w->work;
	w->in[cls].order = w->turn;
	return heap_add(&w->up->wait[cls], &w->in[cls]);
}

static void unlist(struct fair_flow *w, unsigned cls)
{
	if (!w->wait[cls].n)
		heap_remove(&w->up->wait[cls], &w->in[cls]);
}

int fair_push(struct fair *f, struct fair_item *i, uint64_t key, bool ahead)
{
	struct fair_flow *s = i->session, *who = s->up;
	int e = activate_both(s);

	i->in.key = ahead ? 0 : key ? key : 1;
	i->in.order = f->order++;
	if (!e)
		e = heap_add(&s->wait[i->cls], &i->in);
	if (!e) {
		e = list(s, i->cls);
		if (!e)
			e = list(who, i->cls);
		if (e)
			heap_remove(&s->wait[i->cls], &i->in);
	}
	if (e) {
		unlist(s, i->cls);
		unlist(who, i->cls);
		deactivate(s);
		deactivate(who);
		return e;
	}
	s->waiting++;
	who->waiting++;
	f->waiting[i->cls]++;
	return 0;
}

void fair_take(struct fair *f, struct fair_item *i)
{
	struct fair_flow *s = i->session;

	if (!i->in.at)
		return;
	heap_remove(&s->wait[i->cls], &i->in);
	unlist(s, i->cls);
	unlist(s->up, i->cls);
	s->waiting--;
	s->up->waiting--;
	f->waiting[i->cls]--;
	deactivate(s);
	deactivate(s->up);
}

struct fair_item *fair_first(const struct fair *f, unsigned cls)
{
	const struct heap_item *who = heap_first(&f->root.wait[cls]);

	if (!who)
		return NULL;
	const struct fair_flow *w = HEAP_OF(who - cls, struct fair_flow, in);
	const struct fair_flow *s = HEAP_OF(heap_first(&w->wait[cls]) - cls, struct fair_flow, in);
	return HEAP_OF(heap_first(&s->wait[cls]), struct fair_item, in);
}

/* ---- work ---------------------------------------------------------------------------------- */

/* Its keys in the heaps of up. */
static void rekey(struct fair_flow *w)
{
	if (w->act.at && w->act.key != w->work) {
		w->act.key = w->work;
		heap_moved(&w->up->active, &w->act);
		clock_on(w->up);
	}
	for (unsigned c = 0; c < FAIR_CLASSES; c++) {
		if (!w->in[c].at || (w->in[c].key == w->work && w->in[c].order == w->turn))
			continue;
		w->in[c].key = w->work;
		w->in[c].order = w->turn;
		heap_moved(&w->up->wait[c], &w->in[c]);
	}
}

int fair_starts(struct fair *f, struct fair_flow *session)
{
	int e = activate_both(session);

	if (e)
		return e;
	f->turn++;
	for (struct fair_flow *w = session; w->up; w = w->up) {
		w->running++;
		w->turn = f->turn;
		rekey(w);
	}
	return 0;
}

void fair_stops(struct fair *f, struct fair_flow *session)
{
	(void)f;
	for (struct fair_flow *w = session; w->up; w = w->up) {
		w->running--;
		deactivate(w);
	}
}

void fair_charge(struct fair_flow *session, uint64_t tokens)
{
	uint64_t unit = tokens * FAIR_UNIT / session->up->weight; /* sessions of one identity weigh the same */

	session->work += tokens * FAIR_UNIT;
	session->up->work += unit ? unit : 1;
	for (struct fair_flow *w = session; w->up; w = w->up) {
		if (w->up->most < w->work)
			w->up->most = w->work;
		rekey(w);
	}
}
