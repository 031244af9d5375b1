/* SPDX-License-Identifier: MIT */
/*
 * Owns: a second session under the same handle: when, how long it is tried, what
 * becomes of the requests of the first. Does not own: recording (flight.c).
 *
 * Nothing of the old session survives: its regions are unmapped before the new
 * ones are mapped, so an old entry cannot be mistaken for a new one.
 */
#include "client/handle.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>

struct stash {
	struct apr_flight *f;
	uint32_t n;
};

/* Takes the replayable requests out of the table, oldest first. */
static int stash_replays(struct apr *c, struct stash *s)
{
	s->n = 0;
	s->f = NULL;
	int e = apr_flights_lose(c); /* also sorts what stays */
	if (e || !c->replays)
		return e;
	s->f = calloc(c->replays, sizeof(*s->f));
	if (!s->f)
		return -ENOMEM;
	for (uint32_t i = 0; i < c->n_flights; i++)
		if (c->flights[i].replay) {
			s->f[s->n++] = c->flights[i];
			c->flights[i].replay = NULL;
		}
	return 0;
}

static void end_stash(struct apr *c, struct stash *s, uint32_t from, int res)
{
	for (uint32_t i = from; i < s->n; i++) {
		apr_lost_add(c, s->f[i].user_data, s->f[i].op, res);
		apr_replay_free(s->f[i].replay);
	}
}

static bool worth_another_try(int e)
{
	return e == -ENOENT || e == -ECONNREFUSED || e == -EAGAIN || e == -ECONNRESET || e == -EPIPE ||
	       e == -ESHUTDOWN || e == -EBUSY;
}

static int open_until(struct apr *c, uint64_t deadline, char *err, size_t errlen)
{
	uint64_t epoch = c->info.epoch, session = c->info.session;
	int pause = 5;

	for (;;) {
		int e = apr_session_open(c, deadline, epoch, session, err, errlen);
		if (!e || !worth_another_try(e) || apr_now_ns() + (uint64_t)pause * 1000000 >= deadline)
			return e;
		poll(NULL, 0, pause);
		pause = pause < 160 ? pause * 2 : 200;
	}
}

/* The model that a recorded request was for, in the new session: by name, and only with equal bits. */
static int find_again(struct apr *c, const struct apr_replay *r, uint32_t *model)
{
	if (!c->rows) {
		struct apr_model_row *rows;
		size_t n;
		int e = apr_get_models(c, &rows, &n);
		if (e)
			return e;
		c->rows = rows;
		c->n_rows = n;
	}
	for (size_t i = 0; i < c->n_rows; i++)
		if (!strncmp(c->rows[i].name, r->model, sizeof(r->model))) {
			*model = c->rows[i].id;
			return memcmp(c->rows[i].receipt, r->receipt, sizeof(r->receipt)) ? -ESTALE : 0;
		}
	return -ESTALE;
}

static int wait_arena(struct apr *c, uint64_t deadline)
{
	if (c->rc.sq_pub != c->rc.sq_tail)
		apr_submit(c);
	apr_drain(c);
	if (c->dead)
		return -ECONNRESET;
	if (apr_now_ns() >= deadline)
		return -ENOBUFS;
	poll(NULL, 0, 1);
	return 0;
}

/* The recorded parameters without an older RESUME, then the ids received since. */
static int put_params(struct apr *c, struct apr_sqe *s, const struct apr_replay *r)
{
	uint32_t ids = r->n_ids * 4, padded = (ids + 7) & ~7u;
	uint32_t more = r->n_ids ? (uint32_t)sizeof(struct apr_param) + padded : 0;
	int e;

	if (!r->sqe.par_len && !more)
		return 0;
	uint8_t *p = apr_sqe_param_space(c, s, (size_t)r->sqe.par_len + more, &e);
	if (!p)
		return e;
	memcpy(p, r->params, r->sqe.par_len);
	if (more) {
		struct apr_param head = { APR_PARAM_RESUME, 0, ids };
		p += r->sqe.par_len;
		memcpy(p, &head, sizeof(head));
		memset(p + sizeof(head), 0, padded);
		memcpy(p + sizeof(head), r->ids, ids);
	}
	return 0;
}

static int submit_again(struct apr *c, const struct apr_flight *f, uint64_t deadline)
{
	const struct apr_replay *r = f->replay;
	uint32_t model;

	if (r->broken)
		return -ECONNRESET;
	int e = find_again(c, r, &model);
	if (e)
		return e == -ESTALE ? e : -ECONNRESET;
	for (;;) {
		struct apr_sqe *s = apr_rc_sqe(&c->rc);
		if (s) {
			*s = r->sqe;
			s->model = r->sqe.model ? model : 0;
			s->in_off = s->par_off = s->par_len = 0;
			void *p = apr_sqe_input(c, s, r->sqe.in_len, &e);
			if (p && r->sqe.in_len)
				memcpy(p, r->input, r->sqe.in_len);
			if (p)
				e = put_params(c, s, r);
			if (!e)
				break;
			memset(s, 0, sizeof(*s));
			c->rc.sq_tail--; /* the slot was not shown to anybody */
			if (e != -ENOBUFS)
				return e;
		}
		e = wait_arena(c, deadline);
		if (e)
			return e;
	}
	return apr_submit(c) < 0 ? -ECONNRESET : 0;
}

/* What the new record lacks: the ids of the life before. */
static void inherit(struct apr *c, struct apr_replay *old, uint64_t user_data)
{
	for (uint32_t i = 0; i < c->n_flights; i++) {
		struct apr_replay *r = c->flights[i].replay;
		if (!r || c->flights[i].user_data != user_data)
			continue;
		/* the first submission's parameters, so that RESUME does not pile up */
		free(r->params);
		r->params = old->params;
		r->sqe.par_len = old->sqe.par_len;
		free(r->ids);
		r->ids = old->ids;
		r->n_ids = old->n_ids;
		r->cap_ids = old->cap_ids;
		old->params = NULL;
		old->ids = NULL;
		return;
	}
}

int apr_reconnect_locked(struct apr *c, char *err, size_t errlen)
{
	uint64_t deadline = apr_now_ns() + c->opts.reconnect_ms * UINT64_C(1000000);
	struct stash s;

	while (c->sleeper) /* it notices the death within a slice */
		pthread_cond_wait(&c->awake, &c->lock);
	apr_check_dead(c);
	if (!c->dead)
		apr_drain(c);
	if (!c->dead)
		return 0;
	int e = stash_replays(c, &s);
	if (e)
		return e;
	apr_session_shut(c);
	apr_flights_free(c);
	free(c->rows);
	c->rows = NULL;
	e = open_until(c, deadline, err, errlen);
	if (e) {
		end_stash(c, &s, 0, -ECONNRESET);
		free(s.f);
		return e;
	}
	for (uint32_t i = 0; i < s.n; i++) {
		int r = submit_again(c, &s.f[i], deadline);
		if (r)
			apr_lost_add(c, s.f[i].user_data, s.f[i].op, r);
		else
			inherit(c, s.f[i].replay, s.f[i].user_data);
		apr_replay_free(s.f[i].replay);
	}
	free(s.f);
	return 0;
}

int apr_reconnect(struct apr *c, char *err, size_t errlen)
{
	int state;

	apr_say(err, errlen, "%s", "");
	int e = apr_enter(c);
	if (e) {
		apr_say(err, errlen, "%s", apr_strerror(e));
		return e;
	}
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	e = apr_reconnect_locked(c, err, errlen);
	pthread_setcancelstate(state, NULL);
	if (e && err && errlen && !*err)
		apr_say(err, errlen, "%s", apr_strerror(e));
	return apr_leave(c, e);
}

int apr_revive(struct apr *c)
{
	int state;

	apr_check_dead(c);
	if (!c->dead)
		return 0;
	if (!(c->opts.flags & APR_CONNECT_RECONNECT))
		return -EPIPE;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	int e = apr_reconnect_locked(c, NULL, 0);
	pthread_setcancelstate(state, NULL);
	return e ? -EPIPE : 0;
}
