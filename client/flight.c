/* SPDX-License-Identifier: MIT */
/*
 * Owns: the table of submitted requests, by user_data; what REPLAYABLE records;
 * the last entries that the library makes up when a session dies.
 * Does not own: submitting again (reconnect.c).
 *
 * user_data may stand twice: the daemon refuses the younger with -EEXIST, so an
 * -EEXIST ends the youngest and everything else the oldest.
 */
#include "client/handle.h"
#include <errno.h>
#include <stdlib.h>

enum { NONE = UINT32_MAX };

static uint32_t bucket(const struct apr *c, uint64_t user_data)
{
	return (uint32_t)(user_data * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (c->n_buckets - 1);
}

int apr_flights_init(struct apr *c, uint32_t max)
{
	apr_flights_free(c);
	c->n_buckets = 1;
	while (c->n_buckets < max * 2)
		c->n_buckets *= 2;
	c->flights = calloc(max, sizeof(*c->flights));
	c->buckets = malloc(c->n_buckets * sizeof(*c->buckets));
	if (!c->flights || !c->buckets) {
		apr_flights_free(c);
		return -ENOMEM;
	}
	memset(c->buckets, 0xff, c->n_buckets * sizeof(*c->buckets));
	c->n_flights = max;
	for (uint32_t i = 0; i < max; i++)
		c->flights[i].next = i + 1 < max ? i + 1 : NONE;
	c->free_flight = 0;
	return 0;
}

void apr_flights_free(struct apr *c)
{
	for (uint32_t i = 0; c->flights && i < c->n_flights; i++)
		apr_replay_free(c->flights[i].replay);
	free(c->flights);
	free(c->buckets);
	c->flights = NULL;
	c->buckets = NULL;
	c->n_flights = c->n_buckets = 0;
	c->free_flight = NONE;
	c->unfinished = c->replays = 0;
	c->cancelling = false;
}

static void *copy_of(const void *p, size_t n)
{
	void *q = malloc(n ? n : 1);
	if (q && n)
		memcpy(q, p, n);
	return q;
}

static struct apr_replay *record(const struct apr *c, const struct apr_sqe *s)
{
	const uint8_t *base = c->req.base;
	struct apr_replay *r = calloc(1, sizeof(*r));

	if (!r)
		return NULL;
	r->sqe = *s;
	/* the caller may have set offsets by hand: read only what is ours to read */
	bool whole = (uint64_t)s->in_off + s->in_len <= c->req.size && (uint64_t)s->par_off + s->par_len <= c->req.size;
	r->broken = !whole;
	if (whole) {
		r->input = copy_of(base + s->in_off, s->in_len);
		r->params = copy_of(base + s->par_off, s->par_len);
		if (!r->input || !r->params) {
			apr_replay_free(r);
			return NULL;
		}
	}
	for (size_t i = 0; c->rows && i < c->n_rows; i++) {
		const struct apr_model_row *row = &c->rows[i];
		if (row->id == s->model || (!s->model && row->id == c->info.default_model)) {
			memcpy(r->model, row->name, sizeof(r->model));
			memcpy(r->receipt, row->receipt, sizeof(r->receipt));
		}
	}
	return r;
}

int apr_flight_add(struct apr *c, const struct apr_sqe *s)
{
	struct apr_replay *replay = NULL;

	if (s->flags & APR_SQE_REPLAYABLE) {
		replay = record(c, s);
		if (!replay)
			return -ENOMEM;
	}
	uint32_t i = c->free_flight; /* there is one: credits bound the number */
	struct apr_flight *f = &c->flights[i];
	c->free_flight = f->next;
	uint32_t b = bucket(c, s->user_data);
	*f = (struct apr_flight){ s->user_data, ++c->serial, c->buckets[b], s->op, replay };
	c->buckets[b] = i;
	if (replay)
		c->replays++;
	if (s->op == APR_OP_CANCEL)
		c->cancelling = true;
	else
		c->unfinished++;
	return 0;
}

static bool ends_with_ack(uint8_t op)
{
	return op == APR_OP_NOP || op == APR_OP_CANCEL || op == APR_OP_FREE;
}

/* The link that leads to the request an entry belongs to, or NULL. */
static uint32_t *find(struct apr *c, const struct apr_cqe *e)
{
	bool ack = e->type == APR_CQE_ACK, last = apr_cqe_last(e);
	bool youngest = last && e->res == -EEXIST;
	uint32_t *found = NULL;

	for (uint32_t *at = &c->buckets[bucket(c, e->user_data)]; *at != NONE; at = &c->flights[*at].next) {
		const struct apr_flight *f = &c->flights[*at];
		if (f->user_data != e->user_data || (last && ends_with_ack(f->op) != ack))
			continue;
		found = at; /* newest first in a bucket */
		if (youngest)
			break;
	}
	return found;
}

static void remember_id(struct apr_replay *r, const struct apr_cqe *e)
{
	if (r->n_ids == r->cap_ids) {
		uint32_t cap = r->cap_ids ? r->cap_ids * 2 : 64;
		uint32_t *more = realloc(r->ids, cap * sizeof(*more));
		if (!more) {
			r->broken = true;
			return;
		}
		r->ids = more;
		r->cap_ids = cap;
	}
	r->ids[r->n_ids++] = (uint32_t)e->res;
}

void apr_flight_entry(struct apr *c, const struct apr_cqe *e)
{
	if (!apr_cqe_last(e)) {
		if (!c->replays || e->type != APR_CQE_TOKEN)
			return;
		uint32_t *at = find(c, e);
		if (at && c->flights[*at].replay)
			remember_id(c->flights[*at].replay, e);
		return;
	}
	uint32_t *at = find(c, e);
	if (!at)
		return;
	uint32_t i = *at;
	struct apr_flight *f = &c->flights[i];
	*at = f->next;
	if (f->op == APR_OP_CANCEL)
		c->cancelling = false;
	else
		c->unfinished--;
	if (f->replay) {
		c->replays--;
		apr_replay_free(f->replay);
	}
	*f = (struct apr_flight){ 0, 0, c->free_flight, 0, NULL };
	c->free_flight = i;
}

int apr_lost_add(struct apr *c, uint64_t user_data, unsigned op, int res)
{
	struct apr_lost *more = realloc(c->lost, (c->n_lost + 1) * sizeof(*more));
	if (!more)
		return -ENOMEM;
	c->lost = more;
	more[c->n_lost++] =
		(struct apr_lost){ user_data, res, ends_with_ack((uint8_t)op) ? APR_CQE_ACK : APR_CQE_FINAL };
	return 0;
}

static int by_serial(const void *a, const void *b)
{
	const struct apr_flight *x = a, *y = b;
	return x->serial < y->serial ? -1 : x->serial > y->serial;
}

int apr_flights_lose(struct apr *c)
{
	if (!c->flights)
		return 0;
	qsort(c->flights, c->n_flights, sizeof(*c->flights), by_serial); /* free ones, serial 0, first */
	/* the chains are void now: rebuild them around what stays */
	memset(c->buckets, 0xff, c->n_buckets * sizeof(*c->buckets));
	c->free_flight = NONE;
	c->unfinished = 0;
	c->cancelling = false;
	for (uint32_t i = 0; i < c->n_flights; i++) {
		struct apr_flight *f = &c->flights[i];
		if (f->replay) {
			uint32_t b = bucket(c, f->user_data);
			f->next = c->buckets[b];
			c->buckets[b] = i;
			c->unfinished++;
			continue;
		}
		if (f->serial && apr_lost_add(c, f->user_data, f->op, -ECONNRESET))
			return -ENOMEM; /* out of memory for 16 bytes: the rest end unheard */
		*f = (struct apr_flight){ 0, 0, c->free_flight, 0, NULL };
		c->free_flight = i;
	}
	return 0;
}

void apr_replay_free(struct apr_replay *r)
{
	if (!r)
		return;
	free(r->input);
	free(r->params);
	free(r->ids);
	free(r);
}

const struct apr_cqe *apr_lost_peek(struct apr *c)
{
	if (c->lost_at == c->n_lost)
		return NULL;
	const struct apr_lost *l = &c->lost[c->lost_at];
	memset(&c->lost_cqe, 0, sizeof(c->lost_cqe));
	c->lost_cqe.user_data = l->user_data;
	c->lost_cqe.res = l->res;
	c->lost_cqe.type = l->type;
	c->lost_cqe.aux = APR_AUX(APR_FINISH_ERROR, 0, 0, 0);
	return &c->lost_cqe;
}
