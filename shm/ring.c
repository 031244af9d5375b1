/* SPDX-License-Identifier: MIT */
/* Owns: the parts of the rings that are not worth inlining. See ring.h. */
#include "shm/ring.h"
#include <stdlib.h>

void apr_rc_init(struct apr_rc *r, void *req_base, const void *res_base, const struct apr_geometry *g)
{
	memset(r, 0, sizeof(*r));
	r->req = req_base;
	r->res = res_base;
	r->sq = (uint8_t *)req_base + g->sq_off;
	r->cq = (const uint8_t *)res_base + g->cq_off;
	r->sq_mask = g->sq_entries - 1;
	r->sqe_size = g->sqe_size;
	r->cq_mask = g->cq_entries - 1;
	r->cqe_size = g->cqe_size;
}

void apr_rd_init(struct apr_rd *r, const void *req_base, void *res_base, const struct apr_geometry *g)
{
	memset(r, 0, sizeof(*r));
	r->req = req_base;
	r->res = res_base;
	r->sq = (const uint8_t *)req_base + g->sq_off;
	r->cq = (uint8_t *)res_base + g->cq_off;
	r->sq_mask = g->sq_entries - 1;
	r->sqe_size = g->sqe_size;
	r->cq_mask = g->cq_entries - 1;
	r->cqe_size = g->cqe_size;
}

int apr_rd_sq_peek(const struct apr_rd *r, struct apr_sqe *out)
{
	const uint8_t *slot = r->sq + (size_t)(r->sq_head & r->sq_mask) * r->sqe_size;
	int e = apr_guard_copy(out, slot, sizeof(*out));

	/* a client with longer entries must leave what we do not know at zero */
	for (uint32_t at = sizeof(*out); !e && at < r->sqe_size; at += 8) {
		uint64_t word;
		e = apr_guard_copy(&word, slot + at, sizeof(word));
		if (!e && word)
			return -EINVAL;
	}
	return e;
}

void apr_rd_flags_set(struct apr_rd *r, uint32_t bits)
{
	/* read-modify-write: the threads of SQ and CQ both have bits here */
	__atomic_fetch_or(&r->res->flags, bits, __ATOMIC_RELEASE);
}

void apr_rd_flags_clear(struct apr_rd *r, uint32_t bits)
{
	__atomic_fetch_and(&r->res->flags, ~bits, __ATOMIC_RELEASE);
}

int apr_rd_sq_sleep(struct apr_rd *r)
{
	apr_rd_flags_set(r, APR_RES_NEED_WAKEUP);
	apr_fence_full(); /* pairs with the fence in apr_rc_need_wakeup (W2) */
	int n = apr_rd_sq_ready(r);
	if (n)
		apr_rd_flags_clear(r, APR_RES_NEED_WAKEUP);
	return n;
}

int apr_rd_cq_stall(struct apr_rd *r)
{
	uint32_t before = r->cq_head;

	apr_rd_flags_set(r, APR_RES_CQ_STALLED);
	apr_fence_full(); /* pairs with the fence in apr_rc_cq_advance (W3) */
	int e = apr_rd_cq_refresh(r);
	if (!e && r->cq_head != before)
		e = 1;
	if (e)
		apr_rd_flags_clear(r, APR_RES_CQ_STALLED);
	return e;
}

int apr_rd_wake(struct apr_rd *r)
{
	uint32_t seq, at, how;
	/* acquire; pairs with the release of wait_seq in apr_rc_sleep */
	int e = apr_guard_load32(&r->req->wait_seq, &seq);
	if (!e)
		e = apr_guard_load32(&r->req->wait_how, &how);
	if (!e)
		e = apr_guard_load32(&r->req->wake_at, &at);
	if (e)
		return e;
	if (how == APR_WAIT_SOCKET_ALWAYS)
		return APR_WAIT_SOCKET;
	if (!(seq & 1) || seq == r->woken || (int32_t)(r->cq_pub - at) < 0)
		return APR_WAIT_NONE;
	if (how != APR_WAIT_FUTEX && how != APR_WAIT_SOCKET)
		return -EPROTO;
	r->woken = seq;
	return (int)how;
}

void apr_rd_dead(struct apr_rd *r, enum apr_reason reason)
{
	__atomic_store_n(&r->res->reason, (uint32_t)reason, __ATOMIC_RELAXED);
	/* pairs with the load of flags in apr_rc_sleep, and by the fence with its wait_seq */
	apr_rd_flags_set(r, APR_RES_DEAD);
	apr_fence_full();
	apr_futex_wake(&r->res->cq_tail);
}

/* ---- arenas ---------------------------------------------------------------- */

int apr_arena_init(struct apr_arena *a, uint32_t off, uint32_t len, uint32_t entries)
{
	memset(a, 0, sizeof(*a));
	a->mark = calloc(entries, sizeof(*a->mark));
	if (!a->mark)
		return -ENOMEM;
	a->off = off;
	a->len = len & ~7u;
	a->mask = entries - 1;
	return 0;
}

void apr_arena_free(struct apr_arena *a)
{
	free(a->mark);
	memset(a, 0, sizeof(*a));
}

uint32_t apr_arena_alloc(struct apr_arena *a, uint32_t n)
{
	if (!n)
		n = 1;
	if (n > a->len)
		return 0;
	uint64_t need = ((uint64_t)n + 7) & ~UINT64_C(7);
	uint64_t pos = a->cursor % a->len;

	/* empty: start over at the front, so that whatever fits the arena fits now */
	if (a->cursor == a->freed && pos) {
		a->cursor += a->len - pos;
		a->freed = a->cursor;
		pos = 0;
	}
	uint64_t skip = pos + need > a->len ? a->len - pos : 0; /* a span never wraps */
	if (a->cursor - a->freed + skip + need > a->len)
		return 0;
	a->cursor += skip;
	pos = a->cursor % a->len;
	a->cursor += need;
	return a->off + (uint32_t)pos;
}

void apr_arena_mark(struct apr_arena *a, uint32_t index)
{
	a->mark[index & a->mask] = a->cursor;
}

void apr_arena_skip(struct apr_arena *a, uint32_t index)
{
	/* what the entry before frees, and no more */
	a->mark[index & a->mask] = index == a->passed ? a->freed : a->mark[(index - 1) & a->mask];
}

void apr_arena_pass(struct apr_arena *a, uint32_t head)
{
	if (head == a->passed)
		return;
	uint64_t upto = a->mark[(head - 1) & a->mask];
	if (upto > a->freed)
		a->freed = upto;
	a->passed = head;
}
