/* SPDX-License-Identifier: MIT */
/*
 * The session handle, private to client/.
 *
 * Owns: struct apr and the calls that the library's own files share. Does not
 * own: anything a program may see (apr/client.h).
 *
 * Lock order: call, then lock. lock is only taken with APR_CONNECT_LOCKED.
 */
#ifndef APR_CLIENT_HANDLE_H
#define APR_CLIENT_HANDLE_H

#include "shm/region.h"
#include "shm/ring.h"
#include <apr/client.h>
#include <pthread.h>
#include <stdbool.h>

enum { APR_SLICE_MS = 100, APR_ASK_MS = 5000, APR_SEEDS = 32 };

/* what REPLAYABLE keeps until its last entry */
struct apr_replay {
	struct apr_sqe sqe;
	uint8_t *input, *params; /* in_len and par_len bytes of their own */
	uint32_t *ids;           /* received and seen */
	uint32_t n_ids, cap_ids;
	bool broken; /* out of memory while recording: ends with -ECONNRESET */
	char model[64];
	uint8_t receipt[16];
};

/* one submitted request */
struct apr_flight {
	uint64_t user_data;
	uint64_t serial; /* order of submission; 0 = free */
	uint32_t next;   /* in its bucket or the free list; UINT32_MAX = end */
	uint8_t op;
	struct apr_replay *replay;
};

/* a request whose last entry the library makes up */
struct apr_lost {
	uint64_t user_data;
	int32_t res;
	uint8_t type;
};

struct apr {
	volatile uint32_t *mark; /* on a page that a fork wipes: 0 = this is a child */
	bool locked, debug, ring_always;
	bool dead;    /* the session ended; entries may still be unread */
	bool sleeper; /* a thread sleeps on the ring (LOCKED) */
	bool models_changed;
	pthread_mutex_t lock, call;
	pthread_cond_t awake; /* the sleeper came back */

	struct apr_opts opts; /* pointers replaced by the copies below */
	char *path;
	char name[32];
	char why[256];

	int sock, bell;
	struct apr_welcome info;
	struct apr_geometry geo;
	struct apr_region req, res;
	struct apr_rc rc;
	struct apr_arena arena;
	uint32_t refused; /* sq_tail when apr_submit last held entries back; see apr_cancel */
	bool armed;       /* apr_arm announced a sleep */
	uint32_t skip[16]; /* answers of each frame type still to come that nobody waits for */

	struct apr_flight *flights;
	uint32_t *buckets, n_buckets, n_flights, free_flight;
	uint64_t serial;
	uint32_t unfinished, replays;
	bool cancelling; /* a CANCEL is unanswered */

	struct apr_lost *lost;
	uint32_t n_lost, lost_at;
	struct apr_cqe lost_cqe;

	struct apr_model_row *rows; /* for REPLAYABLE; NULL = not asked yet */
	size_t n_rows;
	uint64_t seeds[APR_SEEDS];
	uint32_t n_seeds;
};

/* handle.c: 0 and the lock held, or -EOWNERDEAD */
int apr_enter(struct apr *c);
int apr_leave(struct apr *c, int ret); /* gives the lock back; returns ret */
bool apr_forked(const struct apr *c);
void apr_say(char *err, size_t errlen, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void apr_died(struct apr *c, const char *why); /* idempotent: the first reason stays */
void apr_check_dead(struct apr *c);            /* looks at the result header's DEAD */
uint64_t apr_draw_seed(struct apr *c);

/* session.c: one session up and down; the handle's own things stay */
int apr_session_open(struct apr *c, uint64_t deadline_ns, uint64_t old_epoch, uint64_t old_session, char *err,
		     size_t errlen);
void apr_session_shut(struct apr *c);

/* frames.c */
int apr_dial(const char *path, uint64_t deadline_ns, char *err, size_t errlen); /* a checked, connected socket */
int apr_frame_send(int sock, const void *frame, size_t len, uint64_t deadline_ns);
/* Bytes received (0 = hang-up), -EAGAIN at the deadline (0 = do not wait). fds: up to 4, -1 filled. */
int apr_frame_recv(int sock, void *buf, size_t cap, int fds[4], uint64_t deadline_ns);
int apr_drain(struct apr *c); /* everything unasked-for on the socket; 0 or -EPIPE */
/* Sends type with a body and returns its answer: *body malloc'd and terminated, *fd or -1. */
int apr_ask(struct apr *c, unsigned type, const void *send, size_t send_len, void **body, size_t *len, int *fd,
	    char *err, size_t errlen);
void apr_dump_frame(const struct apr *c, const char *dir, const void *frame, size_t len);

/* flight.c */
int apr_flights_init(struct apr *c, uint32_t max);
void apr_flights_free(struct apr *c);
int apr_flight_add(struct apr *c, const struct apr_sqe *s); /* 0 or -ENOMEM */
void apr_flight_entry(struct apr *c, const struct apr_cqe *e); /* an entry is seen */
/* All but the replayable to c->lost, in order of submission. 0 or -ENOMEM. */
int apr_flights_lose(struct apr *c);
int apr_lost_add(struct apr *c, uint64_t user_data, unsigned op, int res);
void apr_replay_free(struct apr_replay *r);
const struct apr_cqe *apr_lost_peek(struct apr *c);

/* reconnect.c */
int apr_reconnect_locked(struct apr *c, char *err, size_t errlen);
int apr_revive(struct apr *c); /* policy: 0 alive (again), -EPIPE or why it could not be */

/* wait.c: without being a cancellation point */
int apr_wait_quiet(struct apr *c, uint32_t n, int64_t timeout_us);

#endif
