/* SPDX-License-Identifier: MIT */
/* Owns: requests' lives and deadlines. See request.h. */
#include "daemon/core.h"
#include <stdlib.h>
#include <string.h>

static struct request **bucket(struct session *s, uint64_t user_data)
{
	uint64_t h = user_data * UINT64_C(0x9e3779b97f4a7c15);

	return &s->table[h >> 58];
}

struct request *request_find(const struct session *s, uint64_t user_data)
{
	struct request *r = s->unfinished ? *bucket((struct session *)s, user_data) : NULL;

	while (r && r->sqe.user_data != user_data)
		r = r->table_next;
	return r;
}

struct request *request_new(struct core *c, struct session *s, const struct apr_sqe *sqe)
{
	struct request *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	r->s = s;
	r->sqe = *sqe;
	r->accepted = c->now;
	struct request **b = bucket(s, sqe->user_data);
	r->table_next = *b;
	*b = r;
	s->unfinished++;
	s->credit.unfinished++;
	__atomic_store_n(&s->who->in_flight, s->who->in_flight + 1, __ATOMIC_RELAXED); /* status looks at it */
	s->who->input_bytes += sqe->in_len + (uint64_t)sqe->par_len;
	c->unfinished++;
	if (sqe->timeout_ms) {
		r->deadline = c->now + sqe->timeout_ms * UINT64_C(1000000);
		timer_set(c, r);
	}
	return r;
}

static void request_free(struct request *r)
{
	for (uint32_t i = 0; i < r->n_runs; i++) {
		stream_free(&r->runs[i].text);
		free(r->runs[i].ids);
	}
	free(r->stops);
	free(r->runs);
	free(r->params);
	free(r->input);
	free(r->ids);
	free(r->kinds);
	free(r->out);
	free(r->bias_id);
	free(r->bias);
	free(r);
}

/* Out of every list; what is computed is given up. */
static void retire(struct core *c, struct request *r)
{
	struct session *s = r->s;

	sched_dequeue(r);
	for (uint32_t i = 0; i < r->n_runs; i++)
		sched_release(c, &r->runs[i]);
	sched_gone(r);
	conversation_release(r);
	timer_clear(c, r);
	if (r->parked) {
		r->parked = false;
		c->n_parked--;
	}
	struct request **p = bucket(s, r->sqe.user_data);
	while (*p && *p != r)
		p = &(*p)->table_next;
	if (*p)
		*p = r->table_next;
	s->unfinished--;
	s->credit.unfinished--;
	__atomic_store_n(&s->who->in_flight, s->who->in_flight - 1, __ATOMIC_RELAXED);
	s->who->input_bytes -= r->sqe.in_len + (uint64_t)r->sqe.par_len;
	c->unfinished--;
	r->finished = true;
}

static void let_go(struct request *r)
{
	if (r->at_intake) /* when it comes back; until then it needs its model's tokenizer */
		return;
	if (r->model)
		r->model->refs--;
	request_free(r);
}

void request_finish(struct core *c, struct request *r, int err, enum apr_finish finish, const char *why)
{
	if (r->finished)
		return;
	retire(c, r);
	deliver_final(c, r, err, finish, why);
	COUNT_ALL(c, finished, 1);
	metrics_add(&c->metrics.outcomes[metrics_outcome(err)], 1);
	if (err && err != -ECANCELED)
		COUNT_ALL(c, failed, 1);
	let_go(r);
}

void request_forget(struct core *c, struct request *r)
{
	if (r->finished)
		return;
	retire(c, r);
	let_go(r);
}

void request_returned(struct request *r)
{
	let_go(r);
}

void request_end_all(struct core *c, struct session *s, int err, enum apr_finish finish, const char *why)
{
	for (size_t i = 0; i < sizeof(s->table) / sizeof(s->table[0]); i++) {
		while (s->table[i]) {
			if (s->gone)
				request_forget(c, s->table[i]);
			else
				request_finish(c, s->table[i], err, finish, why);
		}
	}
}

/* ---- deadlines: a binary heap by time ---------------------------------------------- */

static void place(struct core *c, struct request *r, uint32_t i)
{
	c->heap[i] = r;
	r->timer = i + 1;
}

static void sift_up(struct core *c, uint32_t i)
{
	struct request *r = c->heap[i];

	while (i && c->heap[(i - 1) / 2]->deadline > r->deadline) {
		place(c, c->heap[(i - 1) / 2], i);
		i = (i - 1) / 2;
	}
	place(c, r, i);
}

static void sift_down(struct core *c, uint32_t i)
{
	struct request *r = c->heap[i];

	for (;;) {
		uint32_t k = 2 * i + 1;
		if (k >= c->n_heap)
			break;
		if (k + 1 < c->n_heap && c->heap[k + 1]->deadline < c->heap[k]->deadline)
			k++;
		if (c->heap[k]->deadline >= r->deadline)
			break;
		place(c, c->heap[k], i);
		i = k;
	}
	place(c, r, i);
}

void timer_set(struct core *c, struct request *r)
{
	if (c->n_heap == c->cap_heap) {
		uint32_t cap = c->cap_heap ? c->cap_heap * 2 : 64;
		struct request **heap = reallocarray(c->heap, cap, sizeof(struct request *));
		if (!heap) /* late beats lost: the deadline is looked at when the request next moves */
			return;
		c->heap = heap;
		c->cap_heap = cap;
	}
	c->heap[c->n_heap] = r;
	sift_up(c, c->n_heap++);
}

void timer_clear(struct core *c, struct request *r)
{
	if (!r->timer)
		return;
	uint32_t i = r->timer - 1;
	r->timer = 0;
	struct request *last = c->heap[--c->n_heap];
	if (last == r)
		return;
	place(c, last, i);
	sift_up(c, i);
	sift_down(c, last->timer - 1);
}

bool timers_run(struct core *c)
{
	bool any = false;

	for (; c->n_heap && c->heap[0]->deadline <= c->now; any = true)
		request_finish(c, c->heap[0], -ETIMEDOUT, APR_FINISH_TIMEOUT, "the request's timeout is over");
	return any;
}

uint64_t timers_next(const struct core *c)
{
	return c->n_heap ? c->heap[0]->deadline : UINT64_MAX;
}
