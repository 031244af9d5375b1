/* SPDX-License-Identifier: MIT */
/*
 * Who goes next: identities share by the work they have had, the sessions of one
 * likewise, and what waits in one session goes in order.
 *
 * Owns: the counts of work, the waiting lists. Does not own what waits, nor slots,
 * pages or time: no clock, no socket and no engine is seen here.
 *
 * The rule is weighted fair queueing on tokens of work (prompt tokens computed and
 * tokens generated, over the weight): the one that has had least goes first. Whoever
 * has been idle starts at the least of those that are active, so that being idle saves
 * nothing up and costs nothing. It is what deficit round robin comes to with a quantum
 * of one token, without rounds whose number grows with a debt: each operation costs
 * the logarithm of the number of flows.
 */
#ifndef APRD_FAIR_H
#define APRD_FAIR_H

#include "daemon/heap.h"
#include <stdbool.h>

enum { FAIR_CLASSES = 3, FAIR_UNIT = 1 << 10 }; /* classes: 0 high, 1 normal, 2 low: served in this order */

struct fair_flow { /* an identity, a session of one, or the root above them all */
	struct fair_flow *up, *next; /* next: in its bucket */
	struct fair_flow *idle_next, **idle_at;
	uint64_t id;
	uint64_t work;        /* tokens * FAIR_UNIT / weight, ever growing */
	uint64_t clock, most; /* of its children: least work of an active one so far; most of any */
	uint64_t dealt;       /* prompt rows computed, in the same unit; batch.c's */
	uint64_t turn;        /* when it was last picked: among equals the longest ago goes first */
	uint32_t weight, kids;
	uint32_t refs;             /* of a session: requests that name it */
	uint32_t waiting, running; /* at it or below */
	uint32_t count;            /* batch.c's, while it ranks */
	uint32_t pages;            /* batch.c's: KV pages held below it, as of the last plan */
	struct heap active;               /* children that wait or run, by work */
	struct heap wait[FAIR_CLASSES];   /* children that have something of this class waiting, by work; of a session: items */
	struct heap_item act, in[FAIR_CLASSES]; /* its places in those of up */
};

struct fair_item { /* something that waits to be started */
	struct heap_item in;
	struct fair_flow *session;
	unsigned cls;
	bool again; /* the pusher's own: what kind of thing it is */
};

struct fair {
	struct fair_flow root;
	struct fair_flow **bucket;
	uint32_t mask, n; /* flows besides the root */
	struct fair_flow *idle, **idle_tail; /* named by nobody, kept while they owe work */
	uint64_t turn, order;
	uint32_t waiting[FAIR_CLASSES];
};

int fair_init(struct fair *f);
void fair_fini(struct fair *f); /* nothing waits or runs */

/* The flow of a session of an identity, made if need be; weight >= 1. One reference more. NULL: no memory. */
struct fair_flow *fair_hold(struct fair *f, uint64_t identity, uint32_t weight, uint64_t session);
void fair_let_go(struct fair *f, struct fair_flow *session);

/* i->session and i->cls are set. Within a session the least key goes first, then the order of pushing; ahead: before all
 * others of the session (what was running already). -ENOMEM. */
int fair_push(struct fair *f, struct fair_item *i, uint64_t key, bool ahead);
void fair_take(struct fair *f, struct fair_item *i); /* waits, or not */
struct fair_item *fair_first(const struct fair *f, unsigned cls);

/* By one: what runs of this session. -ENOMEM (up alone). */
int fair_starts(struct fair *f, struct fair_flow *session);
void fair_stops(struct fair *f, struct fair_flow *session);
void fair_charge(struct fair_flow *session, uint64_t tokens);

#endif
