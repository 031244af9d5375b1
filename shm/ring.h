/* SPDX-License-Identifier: MIT */
/*
 * The two rings over the two regions, client's side (apr_rc_) and daemon's side
 * (apr_rd_), the credit rules, and the allocator of both arenas.
 *
 * Owns: every load and store of a shared index or wait word, and their order.
 * Does not own: mapping (region.h), sleeping (wake.h), what entries mean (check.h).
 *
 * Indexes are free-running u32, masked on use. Each ring side may be used by one
 * thread at a time: of the daemon one thread takes SQEs (the SQ words) and one
 * at a time writes CQEs (the CQ words); of the client, one thread at a time.
 */
#ifndef APR_SHM_RING_H
#define APR_SHM_RING_H

#include "shm/guard.h"
#include "shm/region.h"
#include "shm/wake.h"
#include <apr/abi.h>
#include <errno.h>
#include <stdbool.h>
#include <string.h>

/* ---- the client's side --------------------------------------------------- */

struct apr_rc {
	struct apr_req_hdr *req;
	const struct apr_res_hdr *res;
	uint8_t *sq;
	const uint8_t *cq;
	uint32_t sq_mask, sqe_size;
	uint32_t cq_mask, cqe_size;
	uint32_t sq_tail; /* handed out by apr_rc_sqe */
	uint32_t sq_pub;  /* stored in req->sq_tail */
	uint32_t sq_head; /* as last looked at: the daemon's line comes over only when this says full */
	uint32_t cq_head; /* stored in req->cq_head */
};

void apr_rc_init(struct apr_rc *r, void *req_base, const void *res_base, const struct apr_geometry *g);

static inline uint32_t apr_rc_sq_head(struct apr_rc *r)
{
	/* pairs with the release in apr_rd_sq_advance: the daemon has copied all before it */
	return r->sq_head = __atomic_load_n(&r->res->sq_head, __ATOMIC_ACQUIRE);
}

static inline uint32_t apr_rc_sq_space(struct apr_rc *r)
{
	return r->sq_mask + 1 - (r->sq_tail - apr_rc_sq_head(r));
}

static inline struct apr_sqe *apr_rc_slot(const struct apr_rc *r, uint32_t index)
{
	return (struct apr_sqe *)(void *)(r->sq + (size_t)(index & r->sq_mask) * r->sqe_size);
}

/* The next free slot, zeroed, or NULL. It is published by apr_rc_publish. */
static inline struct apr_sqe *apr_rc_sqe(struct apr_rc *r)
{
	if (r->sq_tail - r->sq_head > r->sq_mask && !apr_rc_sq_space(r))
		return NULL;
	struct apr_sqe *s = apr_rc_slot(r, r->sq_tail++);
	memset(s, 0, r->sqe_size);
	return s;
}

/* Publishes the entries before index `tail`. */
static inline void apr_rc_publish(struct apr_rc *r, uint32_t tail)
{
	r->sq_pub = tail;
	/* pairs with the acquire in apr_rd_sq_ready: entries and arena before the tail */
	__atomic_store_n(&r->req->sq_tail, tail, __ATOMIC_RELEASE);
}

/* After apr_rc_publish: must the doorbell be rung? (W2) */
static inline bool apr_rc_need_wakeup(const struct apr_rc *r)
{
	apr_fence_full(); /* pairs with the fence in apr_rd_sq_sleep (W2) */
	return __atomic_load_n(&r->res->flags, __ATOMIC_RELAXED) & APR_RES_NEED_WAKEUP;
}

static inline uint32_t apr_rc_cq_tail(const struct apr_rc *r)
{
	/* pairs with the release in apr_rd_cq_publish: entries and blobs before the tail */
	return __atomic_load_n(&r->res->cq_tail, __ATOMIC_ACQUIRE);
}

static inline uint32_t apr_rc_cq_ready(const struct apr_rc *r)
{
	__builtin_prefetch(r->cq + (size_t)(r->cq_head & r->cq_mask) * r->cqe_size); /* as in apr_rd_sq_ready */
	return apr_rc_cq_tail(r) - r->cq_head;
}

/* Entry i after the head; valid for i < apr_rc_cq_ready. */
static inline const struct apr_cqe *apr_rc_cqe(const struct apr_rc *r, uint32_t i)
{
	return (const struct apr_cqe *)(const void *)(r->cq + (size_t)((r->cq_head + i) & r->cq_mask) * r->cqe_size);
}

/* Gives n entries and their blobs back. True: something waits for the room, ring the doorbell (W3). */
static inline bool apr_rc_cq_advance(struct apr_rc *r, uint32_t n)
{
	r->cq_head += n;
	/* pairs with the acquire in apr_rd_cq_refresh: our reads before the daemon's next writes */
	__atomic_store_n(&r->req->cq_head, r->cq_head, __ATOMIC_RELEASE);
	apr_fence_full(); /* pairs with the fence in apr_rd_cq_stall (W3) */
	return __atomic_load_n(&r->res->flags, __ATOMIC_RELAXED) & APR_RES_CQ_STALLED;
}

/* Announces a sleep until cq_tail reaches wake_at. True: go to sleep on *seen (the futex value);
 * false: it is there already (or DEAD) and the announcement is withdrawn. */
static inline bool apr_rc_sleep(struct apr_rc *r, uint32_t wake_at, enum apr_wait_how how, uint32_t *seen)
{
	__atomic_store_n(&r->req->wake_at, wake_at, __ATOMIC_RELAXED);
	__atomic_store_n(&r->req->wait_how, (uint32_t)how, __ATOMIC_RELAXED);
	uint32_t seq = r->req->wait_seq + 1; /* only this side writes it */
	/* pairs with the acquire in apr_rd_wake: wake_at and wait_how before an odd wait_seq */
	__atomic_store_n(&r->req->wait_seq, seq, __ATOMIC_RELEASE);
	apr_fence_full(); /* pairs with the fence of the daemon's step before apr_rd_wake (W1) */
	*seen = apr_rc_cq_tail(r);
	if ((int32_t)(*seen - wake_at) < 0 && !(__atomic_load_n(&r->res->flags, __ATOMIC_RELAXED) & APR_RES_DEAD))
		return true;
	__atomic_store_n(&r->req->wait_seq, seq + 1, __ATOMIC_RELEASE);
	return false;
}

static inline void apr_rc_awake(struct apr_rc *r)
{
	__atomic_store_n(&r->req->wait_seq, r->req->wait_seq + 1, __ATOMIC_RELEASE);
}

/* ---- the daemon's side ---------------------------------------------------- */

struct apr_rd {
	const struct apr_req_hdr *req; /* client memory: only by apr_guard_* */
	struct apr_res_hdr *res;
	const uint8_t *sq;
	uint8_t *cq;
	uint32_t sq_mask, sqe_size;
	uint32_t cq_mask, cqe_size;
	uint32_t sq_head;  /* taken; stored in res->sq_head */
	uint32_t cq_tail;  /* written */
	uint32_t cq_pub;   /* stored in res->cq_tail */
	uint32_t cq_head;  /* last one seen and found valid */
	uint32_t woken;    /* wait_seq last woken */
};

void apr_rd_init(struct apr_rd *r, const void *req_base, void *res_base, const struct apr_geometry *g);

/* How many entries wait: read the tail once. 0..sq_entries; -EPROTO tail out of range, -EFAULT:
 * either ends the session. */
static inline int apr_rd_sq_ready(const struct apr_rd *r)
{
	uint32_t tail;
	/* a new tail means a new entry, in a line of its own: fetch both at once, not one after the other */
	__builtin_prefetch(r->sq + (size_t)(r->sq_head & r->sq_mask) * r->sqe_size);
	/* acquire; pairs with the release in apr_rc_publish */
	int e = apr_guard_load32(&r->req->sq_tail, &tail);
	if (e)
		return e;
	uint32_t n = tail - r->sq_head;
	return n <= r->sq_mask + 1 ? (int)n : -EPROTO;
}

/* Copies the entry at the head, once, without taking it. Call only when apr_rd_sq_ready said > 0.
 * 0, -EFAULT; -EINVAL when a longer entry's tail is not zero. */
int apr_rd_sq_peek(const struct apr_rd *r, struct apr_sqe *out);

/* Takes the entry at the head; what it points at must have been copied. */
static inline void apr_rd_sq_advance(struct apr_rd *r)
{
	/* pairs with the acquire in apr_rc_sq_head: our copies before the client's reuse */
	__atomic_store_n(&r->res->sq_head, ++r->sq_head, __ATOMIC_RELEASE);
}

/* Before the daemon stops polling this SQ (W2). 0: sleep, the doorbell will ring. > 0: that many
 * entries are there, NEED_WAKEUP is down again. -EPROTO, -EFAULT. */
int apr_rd_sq_sleep(struct apr_rd *r);
void apr_rd_flags_set(struct apr_rd *r, uint32_t bits);
void apr_rd_flags_clear(struct apr_rd *r, uint32_t bits);

/* Reads cq_head once. 0; -EPROTO outside [last head, tail], -EFAULT. */
static inline int apr_rd_cq_refresh(struct apr_rd *r)
{
	uint32_t head;
	/* acquire; pairs with the release in apr_rc_cq_advance */
	int e = apr_guard_load32(&r->req->cq_head, &head);
	if (e)
		return e;
	if (head - r->cq_head > r->cq_pub - r->cq_head)
		return -EPROTO;
	r->cq_head = head;
	return 0;
}

static inline uint32_t apr_rd_cq_free(const struct apr_rd *r)
{
	return r->cq_mask + 1 - (r->cq_tail - r->cq_head);
}

/* Writes the next entry (not yet visible). The caller has seen to it that one is free. */
static inline void apr_rd_cq_write(struct apr_rd *r, const struct apr_cqe *e)
{
	uint8_t *slot = r->cq + (size_t)(r->cq_tail++ & r->cq_mask) * r->cqe_size;
	memcpy(slot, e, sizeof(*e));
}

/* Makes all written entries visible. After the last session's, one apr_fence_full, then apr_rd_wake each. */
static inline void apr_rd_cq_publish(struct apr_rd *r)
{
	r->cq_pub = r->cq_tail;
	/* pairs with the acquire in apr_rc_cq_tail */
	__atomic_store_n(&r->res->cq_tail, r->cq_tail, __ATOMIC_RELEASE);
}

/* After apr_rd_cq_publish and apr_fence_full (W1): how to wake the client. APR_WAIT_NONE not at all,
 * APR_WAIT_FUTEX apr_futex_wake(&res->cq_tail), APR_WAIT_SOCKET a NOTIFY frame. Each announced
 * sleep is answered once. Call it only after something new was published: a client in
 * SOCKET_ALWAYS gets a NOTIFY for each call. -EFAULT, -EPROTO (unknown wait_how). */
int apr_rd_wake(struct apr_rd *r);

/* Before the daemon leaves a session waiting for CQ room (W3): 0 wait, the doorbell will ring;
 * 1 room was made meanwhile, CQ_STALLED is down again; -EPROTO, -EFAULT. */
int apr_rd_cq_stall(struct apr_rd *r);

/* Sets DEAD and the reason, bumps cq_tail's futex awake. No call but unmapping after it. */
void apr_rd_dead(struct apr_rd *r, enum apr_reason reason);

/* ---- credits ---------------------------------------------------------------
 * Every SQE taken but CANCEL keeps one CQ slot for its last entry; one slot more is
 * kept for the answer to one CANCEL at a time. Pure. `free` is apr_rd_cq_free. */

struct apr_credit {
	uint32_t max_inflight;
	uint32_t unfinished; /* taken, last entry not yet written; CANCELs not counted */
	bool cancel;         /* a CANCEL is taken and not yet answered */
};

/* May an SQE other than CANCEL be taken? */
static inline bool apr_credit_take(const struct apr_credit *c, uint32_t free)
{
	return c->unfinished < c->max_inflight && free >= c->unfinished + 2;
}

/* May a CANCEL be taken? */
static inline bool apr_credit_cancel(const struct apr_credit *c, uint32_t free)
{
	return !c->cancel && free >= c->unfinished + 1;
}

/* How many entries that are nobody's last (TOKEN, PIECE, DATA, SAMPLE_END) may be written now? */
static inline uint32_t apr_credit_more(const struct apr_credit *c, uint32_t free)
{
	return free > c->unfinished + 1 ? free - c->unfinished - 1 : 0;
}

/* ---- arenas ----------------------------------------------------------------
 * Ring-order allocator, freed in ring order as a queue's head passes the entries that name the
 * spans. The result arena in the daemon (cq_head frees) and the request arena in the client
 * (sq_head frees) both use it. The cursors are the owner's private memory. Not thread-safe. */

struct apr_arena {
	uint32_t off, len;  /* in the region; multiples of 8 */
	uint64_t cursor;    /* next free byte, free-running */
	uint64_t freed;     /* everything before it may be reused */
	uint64_t *mark;     /* a queue slot each: the cursor once that entry is passed */
	uint32_t mask;      /* queue entries - 1 */
	uint32_t passed;    /* queue head at the last apr_arena_pass */
};

/* -ENOMEM. entries = the queue's, a power of two. */
int apr_arena_init(struct apr_arena *a, uint32_t off, uint32_t len, uint32_t entries);
void apr_arena_free(struct apr_arena *a);
/* n bytes, 8-aligned. Their offset from the region's start; 0 = no room now (never a valid offset). */
uint32_t apr_arena_alloc(struct apr_arena *a, uint32_t n);
/* Entry `index` of the queue is the last that may name what was allocated so far. Every entry must
 * be marked, in order. */
void apr_arena_mark(struct apr_arena *a, uint32_t index);
/* Entry `index` names nothing new (or what it names is marked by a later one). */
void apr_arena_skip(struct apr_arena *a, uint32_t index);
/* The queue's head is now `head`. */
void apr_arena_pass(struct apr_arena *a, uint32_t head);

#endif
