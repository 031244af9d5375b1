/* SPDX-License-Identifier: MIT */
/*
 * Who is there: identities and what each may have, and sessions with their regions.
 *
 * Owns: struct identity, struct session, accounting, fresh region pairs kept ready.
 * Does not own sockets (conn.c) nor what is in the rings (service.c).
 *
 * Threads: made and buried on the io thread. Between attach and bury the fields under
 * "core" belong to the core thread; geometry and regions are constant.
 */
#ifndef APRD_SESSION_H
#define APRD_SESSION_H

#include "daemon/conversation.h"
#include "daemon/mailbox.h"
#include "daemon/options.h"
#include "shm/check.h"
#include "shm/region.h"
#include "shm/ring.h"

struct conn;
struct core;
struct request;

struct identity {
	struct identity *next;
	char tenant[32];
	uid_t uid;
	uint64_t scope; /* prefix pages are shared within it alone */
	/* io thread */
	uint32_t connections, sessions;
	uint32_t waiting, unread, refused; /* of its connections: HELLO without WELCOME, WELCOME without READY, over the cap */
	uint64_t region_bytes;
	bool serve; /* somebody who waits for WELCOME may have one */
	gid_t groups[32];
	uint32_t n_groups;
	struct limits may;
	/* core thread; those that status shows are relaxed atomics */
	struct limits limits; /* as of the newest session, or RELOAD */
	uint32_t in_flight, running;
	uint64_t queued_tokens, kv_pages, tokens, refused_quota;
	uint64_t minute_at;  /* ns: when minute_left was reckoned */
	int64_t minute_left; /* thousandths of tokens; below 0: a debt */
	uint32_t by_second[60]; /* tokens in each of the last 60 seconds up to second_at; quota.c's, relaxed atomics */
	uint64_t second_at;
	uint64_t input_bytes; /* private copies of unfinished requests' inputs */
};

struct session {
	uint64_t id;
	struct identity *who;
	struct apr_geometry geo;
	struct apr_region req, res;
	int doorbell;
	char name[32];
	bool ring_always;

	/* io thread */
	struct conn *conn; /* NULL: hung up */
	struct session *io_next, *io_prev;
	bool ending;       /* detach was posted */
	enum apr_reason end_reason; /* set before that, for DEAD */
	bool cancelling;   /* atomic: the cancel_all letter is on its way */
	struct mail attach, detach, cancel_all, bury;
	struct limits limits; /* of its identity, for attach */

	/* core thread to io thread */
	struct mail wake;
	void (*on_wake)(void *io, struct mail *m);
	void (*on_broken)(void *io, struct mail *m);
	void (*on_bury)(void *io, struct mail *m);
	uint32_t wake_how;  /* atomic; 0 = the letter is free */
	struct mail broken; /* the client broke a rule: the io thread ends the session */
	uint32_t reason;    /* why, enum apr_reason */
	const char *why;

	/* core */
	struct core *core;
	struct apr_rd ring;
	struct apr_credit credit;
	struct apr_arena arena;
	struct apr_check check;
	uint64_t door;      /* watch of the doorbell */
	uint64_t hot_until; /* ns */
	uint64_t seen;      /* ns: when the first entry that is still in the SQ was seen */
	bool left;          /* some seen entry is still there */
	bool gone, detached, hot, dirty, stalled;
	uint32_t stall_head; /* cq_head when it stalled */
	bool blocked; /* an input is being copied */
	struct session *dirty_next;
	struct session *core_next, *core_prev; /* all that are attached */
	uint32_t unfinished;               /* requests in the table */
	struct conversations conversations;
	struct request *table[64]; /* unfinished ones by user_data */

	/* intake's lock */
	struct request *jobs, **jobs_tail;
	bool in_pool;
	struct session *pool_next;
	uint32_t jobs_out; /* core: given to the intake and not yet back */
};

struct sessions {
	const struct options *o;
	uint64_t epoch, next_id, next_scope;
	struct identity *identities;
	struct session *all;
	uint32_t n; /* those not yet buried */
	uint64_t region_bytes;
	struct session *spare[4]; /* of default geometry, unused */
	uint32_t n_spare;
	struct apr_limits limits;
};

int sessions_init(struct sessions *t, const struct options *o);
void sessions_fini(struct sessions *t);
/* Makes spare pairs until there are enough: for quiet moments. */
void sessions_refill(struct sessions *t);
uint64_t sessions_spare_bytes(const struct sessions *t);

/* The identity of a peer, made if need be. The overflow uid is nobody in particular: each of its
 * connections is an identity of its own. NULL: no memory. */
struct identity *identity_get(struct sessions *t, const char *tenant, uid_t uid);
/* Its groups, as of its newest connection, and what it may have by them. */
void identity_groups(struct sessions *t, struct identity *who, int sock, gid_t gid);
bool identity_is_nobody(const struct identity *who); /* of the overflow uid */
void identities_limits(struct sessions *t); /* the options' limits have changed */
void identity_put(struct sessions *t, struct identity *who); /* frees it when nothing is left */

/* -EDQUOT, -EINVAL, -ENOMEM, ...; *why then says what. */
int session_new(struct sessions *t, struct identity *who, const struct apr_hello *h, struct session **out,
		const char **why);
void session_free(struct sessions *t, struct session *s);

#endif
