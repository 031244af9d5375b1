/* SPDX-License-Identifier: MIT */
/*
 * Conversations that a session keeps: the ids of all turns, each with its kind, so that
 * the next turn need not send them and is computed with the same bits.
 *
 * Owns: their handles and ids. Does not own KV pages: those stay in the prefix cache
 * while there is room, and are computed again, by kind, when there was none. Core
 * thread.
 */
#ifndef APRD_CONVERSATION_H
#define APRD_CONVERSATION_H

#include <stdbool.h>
#include <stdint.h>

struct core;
struct request;
struct session;

enum { CONVERSATIONS_MAX = 256 }; /* of one session; beyond, the one used longest ago is given up */

struct conversation {
	uint32_t generation; /* of its place; 0: never used */
	uint32_t model, n;
	uint32_t *ids; /* NULL: free */
	uint64_t *kinds;
	uint64_t used;
	bool busy; /* a request with KEEP goes on with it */
};

struct conversations {
	struct conversation *v;
	uint32_t n;
	uint64_t turn;
};

/* What r->sqe.arg names goes in front of r's ids. 0, or r->fault is set: -ESTALE, -EINVAL (it is in use), -ENOMEM. */
int conversation_continue(struct request *r);
/* r's run has ended: what it knows is kept, r->handle names it. 0; -EDQUOT: above what its user's inputs may have. */
int conversation_keep(struct request *r);
void conversation_release(struct request *r); /* r ends: what it went on with may be used by others */
int conversation_free(struct session *s, uint64_t handle); /* 0; -ESTALE; -EINVAL: a request goes on with it */
void conversations_end(struct session *s); /* all of them; no request is left */

#endif
