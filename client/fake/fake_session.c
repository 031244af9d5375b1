/* SPDX-License-Identifier: MIT */
/*
 * A session's rings from the daemon's side: taking entries, credits, writing
 * entries and blobs, waking, ending.
 *
 * Owns: every access to the two regions. Does not own: what requests compute
 * (fake_req.c), frames (fake_frames.c).
 */
#include "client/fake/fake_int.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PARK_NS (UINT64_C(300) * 1000000000)

static void end_for(struct fake_session *s, int e)
{
	if (e == -EFAULT)
		fake_session_end(s, APR_REASON_FAULT, "the request region could not be read");
	else
		fake_session_end(s, APR_REASON_PROTOCOL, "a ring index is out of range");
}

/* ---- writing ------------------------------------------------------------------ */

static uint32_t room(struct fake_session *s)
{
	int e = apr_rd_cq_refresh(&s->rd);

	if (e) {
		end_for(s, e);
		return 0;
	}
	apr_arena_pass(&s->arena, s->rd.cq_head);
	return apr_rd_cq_free(&s->rd);
}

/* A blob in the result region; its offset, 0 = no room now. */
static uint32_t put_blob(struct fake_session *s, unsigned fmt, const void *data, size_t len)
{
	struct apr_blob b = {(uint32_t)len, (uint16_t)fmt, 0};
	uint32_t off = apr_arena_alloc(&s->arena, (uint32_t)(len + sizeof(b)));
	uint8_t *p = (uint8_t *)s->res.base + off;

	if (!off)
		return 0;
	memcpy(p, &b, sizeof(b));
	memcpy(p + sizeof(b), data, len);
	return off;
}

static void put(struct fake_session *s, const struct apr_cqe *e)
{
	apr_arena_mark(&s->arena, s->rd.cq_tail);
	apr_rd_cq_write(&s->rd, e);
	s->rd.res->counters[APR_COUNT_CQES]++;
	if (e->type == APR_CQE_TOKEN)
		s->rd.res->counters[APR_COUNT_TOKENS]++;
	if (s->f->o.verbose > 1) {
		char line[512];

		fake_say(s->f, "%llu < %s", (unsigned long long)s->id, apr_wire_cqe(e, line, sizeof(line)));
	}
}

bool fake_emit(struct fake_session *s, const struct apr_cqe *e, unsigned fmt, const void *data, size_t len)
{
	struct apr_cqe c = *e;

	if (s->dead || !apr_credit_more(&s->credit, room(s)))
		goto full;
	if (data) {
		c.blob = put_blob(s, fmt, data, len);
		if (!c.blob)
			goto full;
		c.flags |= APR_CQE_BLOB;
	}
	put(s, &c);
	return true;
full:
	s->blocked = true;
	s->rd.res->counters[APR_COUNT_PARKED]++;
	return false;
}

/* The last entry. Its slot is reserved; only its words may find no room. */
static void put_last(struct fake_session *s, struct apr_cqe *e, const char *why)
{
	if (s->dead)
		return;
	room(s);
	if (e->res && why) {
		e->blob = put_blob(s, APR_BLOB_ERROR, why, strlen(why));
		e->flags = e->blob ? APR_CQE_BLOB : 0;
	}
	put(s, e);
}

static uint32_t us(uint64_t from, uint64_t to)
{
	uint64_t d = to > from ? (to - from) / 1000 : 0;

	return d > UINT32_MAX ? UINT32_MAX : (uint32_t)d;
}

/* Takes r out of the session's list, writes its last entry and frees it. */
void fake_finish(struct fake_session *s, struct fake_req *r, int err, uint32_t at, const char *why, unsigned reason)
{
	bool ack = r->sqe.op == APR_OP_NOP || r->sqe.op == APR_OP_CANCEL || r->sqe.op == APR_OP_FREE;
	struct apr_cqe e = {.user_data = r->sqe.user_data, .res = err, .pos = at,
			    .type = ack ? APR_CQE_ACK : APR_CQE_FINAL};
	uint64_t now = apr_now_ns();

	for (struct fake_req **p = &s->reqs; *p; p = &(*p)->next)
		if (*p == r) {
			*p = r->next;
			break;
		}
	if (!ack) {
		e.aux = APR_AUX(reason, APR_BACKEND_FAKE, APR_ROUTE_NONE, 0);
		e.u.final_.prefill_us = us(r->began, r->first ? r->first : now);
		e.u.final_.decode_us = r->first ? us(r->first, now) : 0;
		e.u.final_.prompt = r->n_prompt;
		e.u.final_.cached = r->cached;
		for (uint32_t i = 0; i < r->n_samples; i++)
			e.u.final_.generated += r->samples[i].delivered;
		if (!err && (r->sqe.flags & APR_SQE_KEEP))
			e.u.final_.handle = r->handle;
	}
	if (r->sqe.arg && r->sqe.op == APR_OP_GENERATE && r->cached)
		s->convs[(uint32_t)r->sqe.arg].busy = false;
	put_last(s, &e, why);
	s->credit.unfinished--;
	fake_count(&s->f->n_requests, -1);
	s->f->served++;
	fake_req_free(r);
}

/* ---- taking ------------------------------------------------------------------- */

static struct fake_req *find(struct fake_session *s, uint64_t user_data)
{
	struct fake_req *r = s->reqs;

	while (r && r->sqe.user_data != user_data)
		r = r->next;
	return r;
}

void fake_session_cancel(struct fake_session *s, const uint64_t *user_data, int err)
{
	struct fake_req *r = s->reqs, *next;

	for (; r; r = next) {
		next = r->next;
		if (!user_data || r->sqe.user_data == *user_data)
			fake_finish(s, r, err, 0, NULL, fake_req_reason(err));
	}
}

static void answer_cancel(struct fake_session *s, const struct apr_sqe *q, const struct apr_fault *fault)
{
	struct apr_cqe e = {.user_data = q->user_data, .type = APR_CQE_ACK, .res = fault->err, .pos = fault->at};

	if (!e.res && find(s, q->user_data)) {
		e.res = -EEXIST;
		e.pos = offsetof(struct apr_sqe, user_data);
	}
	if (!e.res && !find(s, q->arg))
		e.res = -ENOENT;
	if (!e.res)
		fake_session_cancel(s, &q->arg, -ECANCELED);
	put_last(s, &e, fault->why);
}

/* The input and parameters, copied once. */
static int copy_in(struct fake_session *s, struct fake_req *r, struct apr_fault *f)
{
	const uint8_t *base = s->req.base;
	int e = 0;

	r->in = malloc((size_t)r->sqe.in_len + 8);
	r->par = malloc((size_t)r->sqe.par_len + 8);
	if (!r->in || !r->par)
		return -ENOMEM;
	if (r->sqe.in_len)
		e = apr_guard_copy(r->in, base + r->sqe.in_off, r->sqe.in_len);
	if (!e && r->sqe.par_len)
		e = apr_guard_copy(r->par, base + r->sqe.par_off, r->sqe.par_len);
	if (!e && r->sqe.par_len)
		e = apr_check_params(r->par, r->sqe.par_len, r->sqe.op, FAKE_FEATURES, &r->view, f);
	return e;
}

static void accept_sqe(struct fake_session *s, const struct apr_sqe *q, struct apr_fault *fault)
{
	struct fake_req *r, **tail = &s->reqs;
	uint64_t now = apr_now_ns();
	int e = fault->err;

	if (q->op == APR_OP_CANCEL) {
		apr_rd_sq_advance(&s->rd);
		answer_cancel(s, q, fault);
		return;
	}
	r = calloc(1, sizeof(*r));
	if (!r) {
		struct apr_cqe c = {.user_data = q->user_data, .type = APR_CQE_FINAL, .res = -ENOMEM};

		apr_rd_sq_advance(&s->rd);
		put_last(s, &c, NULL);
		return;
	}
	r->sqe = *q;
	r->began = now;
	if (!e && find(s, q->user_data)) {
		*fault = (struct apr_fault){-EEXIST, offsetof(struct apr_sqe, user_data), "user_data of a request in flight"};
		e = -EEXIST;
	}
	if (!e)
		e = copy_in(s, r, fault);
	apr_rd_sq_advance(&s->rd);
	while (*tail)
		tail = &(*tail)->next;
	*tail = r;
	s->credit.unfinished++;
	fake_count(&s->f->n_requests, 1);
	if (e == -EFAULT) {
		end_for(s, e);
		return;
	}
	if (!e && s->f->draining) {
		*fault = (struct apr_fault){-ESHUTDOWN, 0, "the daemon is draining"};
		e = -ESHUTDOWN;
	}
	if (!e && q->op == APR_OP_NOP) {
		struct apr_cqe c = {.user_data = q->user_data, .type = APR_CQE_ACK};

		c.u.nop.served_ns = apr_now_ns() - now;
		*tail = NULL;
		put_last(s, &c, NULL);
		s->credit.unfinished--;
		fake_count(&s->f->n_requests, -1);
		fake_req_free(r);
		return;
	}
	if (!e)
		e = fake_req_begin(s, r, &fault->at, &fault->why);
	if (e) {
		fake_finish(s, r, e, fault->at, fault->why, fake_req_reason(e));
		return;
	}
	if (q->timeout_ms)
		r->deadline = now + q->timeout_ms * UINT64_C(1000000);
}

void fake_session_intake(struct fake_session *s)
{
	while (!s->dead) {
		struct apr_sqe q;
		struct apr_fault fault = {0};
		uint32_t free_slots;
		int n = apr_rd_sq_ready(&s->rd), e;

		if (n < 0)
			end_for(s, n);
		if (n <= 0)
			return;
		e = apr_rd_sq_peek(&s->rd, &q);
		if (e == -EFAULT) {
			end_for(s, e);
			return;
		}
		free_slots = room(s);
		if (s->dead)
			return;
		if (!(q.op == APR_OP_CANCEL ? apr_credit_cancel(&s->credit, free_slots) :
					      apr_credit_take(&s->credit, free_slots))) {
			s->blocked = true;
			return;
		}
		if (e)
			fault = (struct apr_fault){e, sizeof(q), "unknown part of the entry is not zero"};
		else
			apr_check_sqe(&q, &s->check, &fault);
		s->rd.res->counters[APR_COUNT_SQES]++;
		if (s->f->o.verbose > 1) {
			char line[512];

			fake_say(s->f, "%llu > %s", (unsigned long long)s->id, apr_wire_sqe(&q, line, sizeof(line)));
		}
		accept_sqe(s, &q, &fault);
	}
}

/* ---- working ------------------------------------------------------------------ */

static void sooner(uint64_t *next, uint64_t t)
{
	if (t && (!*next || t < *next))
		*next = t;
}

static uint64_t run_requests(struct fake_session *s, uint64_t now)
{
	uint64_t next = 0;
	struct fake_req *r = s->reqs, *following;

	for (; r && !s->dead && !s->gone; r = following) {
		int moved = 1;

		following = r->next;
		for (int i = 0; i < 32 && moved == 1 && !s->dead && !s->gone; i++)
			moved = fake_req_step(s, r, now);
		if (moved == 2)
			continue;
		if (moved == 1)
			sooner(&next, now);
		if (r->due > now)
			sooner(&next, r->due);
		if (moved == 0 && s->blocked && !r->stalled && r->due <= now) {
			if (!r->parked)
				r->parked = now + PARK_NS;
		} else {
			r->parked = 0;
		}
		sooner(&next, r->parked);
		sooner(&next, r->deadline);
	}
	return next;
}

uint64_t fake_session_run(struct fake_session *s, uint64_t now)
{
	/* a client that takes entries as fast as they come must not keep all others waiting */
	for (int turn = 0; turn < 4; turn++) {
		uint64_t next;
		uint32_t unfinished;
		int e = 0;

		s->blocked = false;
		fake_session_intake(s);
		next = run_requests(s, now);
		fake_session_flush(s);
		if (s->dead || s->gone)
			return 0;
		unfinished = s->credit.unfinished;
		if (s->blocked) /* by CQ room or by credits; the latter come back when a request ends, here */
			e = apr_rd_cq_stall(&s->rd);
		else
			apr_rd_flags_clear(&s->rd, APR_RES_CQ_STALLED);
		if (!e && !s->blocked)
			e = apr_rd_sq_sleep(&s->rd);
		if (!e && s->blocked && apr_rd_sq_ready(&s->rd) > 0 && unfinished < s->credit.max_inflight &&
		    apr_credit_take(&s->credit, apr_rd_cq_free(&s->rd)))
			e = 1;
		if (e < 0) {
			end_for(s, e);
			return 0;
		}
		if (!e)
			return next;
	}
	return now;
}

void fake_session_flush(struct fake_session *s)
{
	int how;

	if (s->rd.cq_pub == s->rd.cq_tail)
		return;
	apr_rd_cq_publish(&s->rd);
	apr_fence_full(); /* pairs with the fence in apr_rc_sleep (W1) */
	how = apr_rd_wake(&s->rd);
	if (how < 0) {
		end_for(s, how);
	} else if (how == APR_WAIT_FUTEX) {
		apr_futex_wake(&s->rd.res->cq_tail);
		s->rd.res->counters[APR_COUNT_WAKES]++;
	} else if (how == APR_WAIT_SOCKET) {
		fake_send(s->sock, APR_FRAME_NOTIFY, 0, NULL, 0);
		s->rd.res->counters[APR_COUNT_WAKES]++;
	}
}

void fake_session_drop_requests(struct fake_session *s)
{
	while (s->reqs) {
		struct fake_req *r = s->reqs;

		s->reqs = r->next;
		fake_count(&s->f->n_requests, -1);
		fake_req_free(r);
	}
}

void fake_session_end(struct fake_session *s, enum apr_reason why, const char *words)
{
	if (s->dead)
		return;
	if (s->ready) {
		apr_rd_cq_publish(&s->rd);
		apr_rd_dead(&s->rd, why);
	}
	s->dead = true;
	fake_send(s->sock, APR_FRAME_BYE, (int)why, words, strlen(words));
	fake_say(s->f, "session %llu ends: %s", (unsigned long long)s->id, words);
}
