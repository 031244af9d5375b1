/* SPDX-License-Identifier: MIT */
/*
 * Owns: every entry that goes into a CQ and every blob beside it; waiting for room.
 * See core.h.
 */
#include "daemon/core.h"
#include "shm/errors.h"
#include <stdlib.h>
#include <string.h>

enum { TEXT_ROOM = 4096 };

int deliver_refresh(struct core *c, struct session *s)
{
	int e = apr_rd_cq_refresh(&s->ring);

	if (e)
		core_broken(c, s, e == -EFAULT ? APR_REASON_FAULT : APR_REASON_PROTOCOL,
			    "cq_head is outside the queue");
	else
		apr_arena_pass(&s->arena, s->ring.cq_head);
	return e;
}

bool deliver_room(struct core *c, struct session *s)
{
	if (apr_credit_more(&s->credit, apr_rd_cq_free(&s->ring)))
		return true;
	return !deliver_refresh(c, s) && apr_credit_more(&s->credit, apr_rd_cq_free(&s->ring));
}

uint32_t deliver_blob(struct core *c, struct session *s, uint16_t fmt, const void *data, uint32_t n)
{
	struct apr_blob head = { n, fmt, 0 };
	uint32_t at = s->gone ? 0 : apr_arena_alloc(&s->arena, n + (uint32_t)sizeof(head));

	if (!at) {
		if (s->gone || deliver_refresh(c, s))
			return 0;
		at = apr_arena_alloc(&s->arena, n + (uint32_t)sizeof(head));
		if (!at)
			return 0;
	}
	uint8_t *to = (uint8_t *)s->res.base + at;
	memcpy(to, &head, sizeof(head));
	if (data)
		memcpy(to + sizeof(head), data, n);
	return at;
}

void deliver_entry(struct core *c, struct session *s, const struct apr_cqe *e)
{
	uint32_t index = s->ring.cq_tail;

	if (s->gone)
		return;
	if (e->blob)
		apr_arena_mark(&s->arena, index);
	else
		apr_arena_skip(&s->arena, index);
	apr_rd_cq_write(&s->ring, e);
	COUNT(c, s, cqes, APR_COUNT_CQES, 1);
	if (!s->dirty) {
		s->dirty = true;
		s->dirty_next = c->dirty;
		c->dirty = s;
	}
}

/* Words for the person at the other end: never worth waiting for room. */
static void add_words(struct core *c, struct session *s, struct apr_cqe *e, const char *why)
{
	size_t n = why ? strlen(why) : 0;

	if (!n)
		return;
	e->blob = deliver_blob(c, s, APR_BLOB_ERROR, why, (uint32_t)n);
	if (e->blob)
		e->flags |= APR_CQE_BLOB;
}

void deliver_ack(struct core *c, struct session *s, uint64_t user_data, int res, uint32_t at)
{
	struct apr_cqe e = { .user_data = user_data, .res = res, .type = APR_CQE_ACK, .pos = at };

	deliver_entry(c, s, &e);
}

static uint32_t us(uint64_t from, uint64_t to)
{
	uint64_t d = to > from ? (to - from) / 1000 : 0;

	return d > UINT32_MAX ? UINT32_MAX : (uint32_t)d;
}

static uint16_t aux_of(const struct core *c, const struct request *r, enum apr_finish finish)
{
	bool ran = r->model && r->n_runs && r->admitted;

	return APR_AUX(finish, ran ? c->engine.backend_id : APR_BACKEND_NONE,
		       ran ? r->model->info.route_id : APR_ROUTE_NONE, ran && c->engine.fell_back);
}

void deliver_final(struct core *c, struct request *r, int err, enum apr_finish finish, const char *why)
{
	struct session *s = r->s;
	struct apr_cqe e = { .user_data = r->sqe.user_data, .res = err, .type = APR_CQE_FINAL };
	uint64_t started = r->started ? r->started : c->now, first = r->first ? r->first : c->now;

	e.aux = aux_of(c, r, finish);
	/* what the intake is still at is not ours to read */
	e.pos = !r->at_intake && r->fault.err == err ? r->fault.at : 0;
	e.u.final_.queue_us = us(r->accepted, started);
	if (r->started) {
		e.u.final_.prefill_us = us(started, first);
		e.u.final_.decode_us = us(first, c->now);
	}
	e.u.final_.prompt = r->at_intake ? 0 : r->n_ids;
	e.u.final_.cached = r->n_runs && r->admitted ? r->runs[0].cached : 0;
	e.u.final_.generated = r->generated;
	e.u.final_.handle = r->handle;
	add_words(c, s, &e, err ? why ? why : apr_errno_meaning(err) : NULL);
	deliver_entry(c, s, &e);
}

/* ---- waiting for room ------------------------------------------------------------ */

void deliver_stalled(struct session *s)
{
	if (!s->stalled)
		s->stall_head = s->ring.cq_head;
	s->stalled = true;
}

static bool park(struct core *c, struct request *r)
{
	struct session *s = r->s;
	int e = s->stalled ? 0 : apr_rd_cq_stall(&s->ring);

	if (e < 0) {
		core_broken(c, s, e == -EFAULT ? APR_REASON_FAULT : APR_REASON_PROTOCOL,
			    "cq_head is outside the queue");
		return false;
	}
	if (e > 0) {
		apr_arena_pass(&s->arena, s->ring.cq_head);
		return true; /* try again */
	}
	deliver_stalled(s);
	if (!r->parked) {
		r->parked = true;
		r->parked_at = c->now;
		if (!c->n_parked++)
			c->next_sweep = c->now;
		sched_park(r);
		COUNT(c, s, parked, APR_COUNT_PARKED, 1);
	}
	return false;
}

static int unpark(struct core *c, struct request *r)
{
	if (!r->parked)
		return 0;
	r->parked = r->gave_pages = false;
	c->n_parked--;
	return sched_wake(r);
}

void deliver_unstall(struct core *c, struct session *s)
{
	if (!s->stalled || deliver_refresh(c, s) || s->ring.cq_head == s->stall_head)
		return;
	s->stalled = false;
	apr_rd_flags_clear(&s->ring, APR_RES_CQ_STALLED);
	for (size_t i = 0; i < sizeof(s->table) / sizeof(s->table[0]); i++) {
		for (struct request *r = s->table[i], *next; r && !s->gone; r = next) {
			next = r->table_next; /* pump may finish r */
			if (r->parked)
				deliver_pump(c, r);
		}
	}
}

/* ---- results ---------------------------------------------------------------------- */

/* How much of out goes into one blob: whole units of its format. */
static uint32_t slice(const struct request *r)
{
	uint32_t max = r->s->geo.max_blob, left = r->out_len - r->out_pos, n = 0;

	if (r->out_fmt != APR_BLOB_SCORES) {
		n = left < max ? left : max;
		return r->out_fmt == APR_BLOB_IDS && n < left ? n & ~3u : n;
	}
	while (n < left) {
		struct apr_score sc;
		memcpy(&sc, r->out + r->out_pos + n, sizeof(sc));
		uint32_t unit = (uint32_t)(sizeof(sc) + sc.k * sizeof(struct apr_top));
		if (n + unit > max)
			break;
		n += unit;
	}
	return n;
}

static uint32_t units(const struct request *r, uint32_t n)
{
	uint32_t count = 0;

	if (r->out_fmt != APR_BLOB_SCORES)
		return r->out_fmt == APR_BLOB_IDS ? n / 4 : n;
	for (uint32_t at = 0; at < n; count++) {
		struct apr_score sc;
		memcpy(&sc, r->out + r->out_pos + at, sizeof(sc));
		at += (uint32_t)(sizeof(sc) + sc.k * sizeof(struct apr_top));
	}
	return count;
}

/* 1 one entry written, 0 nothing to write now, -EAGAIN no room. */
static int pump_out(struct core *c, struct request *r)
{
	struct session *s = r->s;
	uint32_t n = slice(r);

	/* while more is being computed only full blobs go out */
	if (!n || (!r->draining && r->out_len - r->out_pos < s->geo.max_blob))
		return 0;
	if (!deliver_room(c, s))
		return -EAGAIN;
	uint32_t blob = deliver_blob(c, s, r->out_fmt, r->out + r->out_pos, n);
	if (!blob)
		return -EAGAIN;
	struct apr_cqe e = { .user_data = r->sqe.user_data, .flags = APR_CQE_MORE | APR_CQE_BLOB, .type = APR_CQE_DATA,
			     .pos = r->delivered, .blob = blob };
	deliver_entry(c, s, &e);
	r->delivered += units(r, n);
	r->out_pos += n;
	if (r->out_pos == r->out_len)
		r->out_pos = r->out_len = 0;
	return 1;
}

/* NO_STREAM: the ids at the end. */
static int pump_ids(struct core *c, struct run *run)
{
	struct request *r = run->r;
	struct session *s = r->s;
	uint32_t left = run->n_ids - run->sent_ids, n = s->geo.max_blob / 4;

	if (!left || run->state != RUN_FLUSHING)
		return 0;
	n = left < n ? left : n;
	if (!deliver_room(c, s))
		return -EAGAIN;
	uint32_t blob = deliver_blob(c, s, APR_BLOB_IDS, run->ids + run->sent_ids, n * 4);
	if (!blob)
		return -EAGAIN;
	struct apr_cqe e = { .user_data = r->sqe.user_data, .flags = APR_CQE_MORE | APR_CQE_BLOB, .type = APR_CQE_DATA,
			     .pos = run->sent_ids, .sample = run->sample, .blob = blob };
	deliver_entry(c, s, &e);
	run->sent_ids += n;
	return 1;
}

/* A token's or piece's text and best others: inside the entry, or in a blob. 0 or -EAGAIN. */
static int attach(struct core *c, struct session *s, struct apr_cqe *e, const struct stream_out *o, const uint8_t *text)
{
	uint8_t list[TEXT_ROOM + 2 * sizeof(struct apr_blob) + APR_LOGPROBS_MAX * sizeof(struct apr_top) + 8];
	uint32_t top_len = o->n_top * (uint32_t)sizeof(struct apr_top), n = 0;

	if (o->len <= APR_CQE_TEXT_MAX) {
		memcpy(e->u.text, text, o->len);
		e->text_len = (uint8_t)o->len;
		if (!o->n_top)
			return 0;
		e->blob = deliver_blob(c, s, APR_BLOB_TOP, o->top, top_len);
	} else if (!o->n_top) {
		e->blob = deliver_blob(c, s, APR_BLOB_TEXT, text, (uint32_t)o->len);
	} else {
		struct apr_blob head = { (uint32_t)o->len, APR_BLOB_TEXT, 0 };
		memset(list, 0, sizeof(list));
		memcpy(list, &head, sizeof(head));
		memcpy(list + sizeof(head), text, o->len);
		n = (uint32_t)(sizeof(head) + ((o->len + 7) & ~(size_t)7));
		head = (struct apr_blob){ top_len, APR_BLOB_TOP, 0 };
		memcpy(list + n, &head, sizeof(head));
		memcpy(list + n + sizeof(head), o->top, top_len);
		e->blob = deliver_blob(c, s, APR_BLOB_LIST, list, n + (uint32_t)sizeof(head) + top_len);
	}
	if (!e->blob)
		return -EAGAIN;
	e->flags |= APR_CQE_BLOB;
	return 0;
}

static int keep_id(struct run *run, uint32_t id)
{
	if (run->n_ids == run->cap_ids) {
		uint32_t cap = run->cap_ids ? run->cap_ids * 2 : 64;
		uint32_t *ids = reallocarray(run->ids, cap, sizeof(*ids));
		if (!ids)
			return -ENOMEM;
		run->ids = ids;
		run->cap_ids = cap;
	}
	run->ids[run->n_ids++] = id;
	return 0;
}

/* The next token or piece of a run. */
static int pump_text(struct core *c, struct run *run)
{
	struct request *r = run->r;
	struct session *s = r->s;
	struct stream_out o;
	uint8_t text[TEXT_ROOM];
	int got = stream_peek(&run->text, &o, text, sizeof(text));

	if (got <= 0)
		return got;
	if (r->sqe.flags & APR_SQE_NO_STREAM) {
		if (o.token && keep_id(run, o.id))
			return -ENOMEM;
		r->generated += o.token;
		stream_take(&run->text);
		return 1;
	}
	if (!deliver_room(c, s))
		return -EAGAIN;
	struct apr_cqe e = {
		.user_data = r->sqe.user_data, .flags = APR_CQE_MORE, .pos = o.pos, .sample = run->sample
	};
	e.type = o.token ? APR_CQE_TOKEN : APR_CQE_PIECE;
	e.res = o.token ? (int32_t)o.id : 0;
	e.logprob = o.token ? o.logprob : 0;
	if (attach(c, s, &e, &o, text))
		return -EAGAIN;
	deliver_entry(c, s, &e);
	r->generated += o.token;
	COUNT(c, s, tokens, APR_COUNT_TOKENS, o.token); /* what is left of a cut character is none */
	stream_take(&run->text);
	return 1;
}

static int sample_end(struct core *c, struct run *run)
{
	struct request *r = run->r;

	if (r->n_runs > 1) {
		if (!deliver_room(c, r->s))
			return -EAGAIN;
		struct apr_cqe e = { .user_data = r->sqe.user_data, .flags = APR_CQE_MORE, .type = APR_CQE_SAMPLE_END,
				     .pos = run->text.pos, .sample = run->sample, .aux = aux_of(c, r, run->finish) };
		deliver_entry(c, r->s, &e);
	}
	run->state = RUN_DONE;
	r->done++;
	return 0;
}

static int pump_run(struct core *c, struct run *run)
{
	int e;

	if (op_generates(run->r->sqe.op)) {
		while ((e = pump_text(c, run)) > 0)
			;
		if (!e && run->state == RUN_FLUSHING)
			while ((e = pump_ids(c, run)) > 0)
				;
		if (e)
			return e;
	}
	return run->state == RUN_FLUSHING ? sample_end(c, run) : 0;
}

static int pump_all(struct core *c, struct request *r)
{
	int e;

	while ((e = pump_out(c, r)) > 0)
		;
	for (uint32_t i = 0; !e && i < r->admitted; i++)
		if (r->runs[i].state == RUN_ACTIVE || r->runs[i].state == RUN_FLUSHING)
			e = pump_run(c, &r->runs[i]);
	return e;
}

bool deliver_pump(struct core *c, struct request *r)
{
	int e;

	do
		e = pump_all(c, r);
	while (e == -EAGAIN && !r->s->gone && park(c, r));
	if (r->s->gone)
		return false;
	if (e && e != -EAGAIN) {
		request_finish(c, r, e, APR_FINISH_ERROR, NULL);
		return false;
	}
	if (e)
		return false;
	e = unpark(c, r);
	if (e) {
		request_finish(c, r, e, APR_FINISH_ERROR, NULL);
		return false;
	}
	if (r->n_runs ? r->done == r->n_runs && r->draining && !r->out_len : r->draining)
		request_finish(c, r, r->result, r->n_runs ? r->runs[0].finish : APR_FINISH_NONE,
			       r->words[0] ? r->words : NULL);
	return true;
}
