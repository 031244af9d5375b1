/* SPDX-License-Identifier: MIT */
/* Owns: getting, preparing and publishing entries. Does not own: the credit table (flight.c). */
#include "client/handle.h"
#include "shm/wire.h"
#include <errno.h>
#include <stdio.h>

struct apr_sqe *apr_get_sqe(struct apr *c)
{
	if (apr_enter(c))
		return NULL;
	struct apr_sqe *s = NULL;
	if (!apr_revive(c))
		s = apr_rc_sqe(&c->rc);
	apr_leave(c, 0);
	return s;
}

/* Room in the arena. With the entries before sq_head taken, theirs is free again. */
static uint8_t *place(struct apr *c, size_t len, uint32_t *off, int *e)
{
	*e = 0;
	if (!c->rc.res) {
		*e = -EPIPE;
		return NULL;
	}
	if (len > c->info.max_input || len > c->arena.len) {
		*e = -E2BIG;
		return NULL;
	}
	apr_arena_pass(&c->arena, apr_rc_sq_head(&c->rc));
	*off = apr_arena_alloc(&c->arena, (uint32_t)len);
	if (!*off) {
		*e = -ENOBUFS;
		return NULL;
	}
	return (uint8_t *)c->req.base + *off;
}

static void *space(struct apr *c, struct apr_sqe *s, size_t len, bool params, int *err)
{
	uint32_t off = 0;
	uint8_t *p = NULL;

	int e = apr_enter(c);
	if (!e) {
		if (params && len > APR_PARAMS_MAX)
			e = -E2BIG;
		else
			p = place(c, len, &off, &e);
		apr_leave(c, 0);
	}
	if (err)
		*err = e;
	if (!p)
		return NULL;
	if (params) {
		s->par_off = off;
		s->par_len = (uint32_t)len;
	} else {
		s->in_off = off;
		s->in_len = (uint32_t)len;
	}
	return p;
}

void *apr_sqe_input(struct apr *c, struct apr_sqe *s, size_t len, int *e)
{
	return space(c, s, len, false, e);
}

void *apr_sqe_param_space(struct apr *c, struct apr_sqe *s, size_t len, int *e)
{
	return space(c, s, len, true, e);
}

static int prep(struct apr *c, struct apr_sqe *s, unsigned op, unsigned fmt, const void *data, size_t len)
{
	int e;

	memset(s, 0, sizeof(*s)); /* a NOP until all is well */
	void *p = apr_sqe_input(c, s, len, &e);
	if (!p)
		return e;
	if (len)
		memcpy(p, data, len);
	s->op = (uint8_t)op;
	s->in_fmt = (uint8_t)fmt;
	return 0;
}

static int prep_ids(struct apr *c, struct apr_sqe *s, unsigned op, const uint32_t *ids, size_t n)
{
	if (n > UINT32_MAX / sizeof(*ids)) {
		memset(s, 0, sizeof(*s));
		return -E2BIG;
	}
	return prep(c, s, op, APR_IN_IDS, ids, n * sizeof(*ids));
}

static int finish_generate(struct apr *c, struct apr_sqe *s, uint32_t max_tokens, int e)
{
	if (e || (e = apr_enter(c)))
		return e;
	s->max_tokens = max_tokens;
	s->seed = apr_draw_seed(c);
	return apr_leave(c, 0);
}

int apr_prep_generate(struct apr *c, struct apr_sqe *s, const void *text, size_t len, uint32_t max_tokens)
{
	return finish_generate(c, s, max_tokens, prep(c, s, APR_OP_GENERATE, APR_IN_TEXT, text, len));
}

int apr_prep_generate_ids(struct apr *c, struct apr_sqe *s, const uint32_t *ids, size_t n, uint32_t max_tokens)
{
	return finish_generate(c, s, max_tokens, prep_ids(c, s, APR_OP_GENERATE, ids, n));
}

int apr_prep_chat(struct apr *c, struct apr_sqe *s, const void *json, size_t len, uint32_t max_tokens)
{
	return finish_generate(c, s, max_tokens, prep(c, s, APR_OP_CHAT, APR_IN_MESSAGES, json, len));
}

int apr_prep_score(struct apr *c, struct apr_sqe *s, const uint32_t *ids, size_t n)
{
	return prep_ids(c, s, APR_OP_SCORE, ids, n);
}

int apr_prep_tokenize(struct apr *c, struct apr_sqe *s, const void *text, size_t len)
{
	return prep(c, s, APR_OP_TOKENIZE, APR_IN_TEXT, text, len);
}

int apr_prep_detokenize(struct apr *c, struct apr_sqe *s, const uint32_t *ids, size_t n)
{
	return prep_ids(c, s, APR_OP_DETOKENIZE, ids, n);
}

static void dump_sqe(const struct apr *c, const struct apr_sqe *s)
{
	char line[512];

	if (c->debug)
		fprintf(stderr, "apr > %s\n", apr_wire_sqe(s, line, sizeof(line)));
}

/* Before the first REPLAYABLE: which receipt its text will come from. */
static int learn_models(struct apr *c)
{
	struct apr_model_row *rows;
	size_t n;

	if (c->rows)
		return 0;
	int e = apr_get_models(c, &rows, &n); /* the lock is recursive */
	if (!e) {
		c->rows = rows;
		c->n_rows = n;
	}
	return e;
}

/* Takes the entry at `index` into the books; false: no credit, or *e. */
static bool admit(struct apr *c, const struct apr_sqe *s, int *e)
{
	if (s->op == APR_OP_CANCEL ? c->cancelling : c->unfinished >= c->geo.max_inflight)
		return false;
	if (s->flags & APR_SQE_REPLAYABLE)
		*e = learn_models(c);
	if (!*e)
		*e = apr_flight_add(c, s);
	if (*e)
		return false;
	dump_sqe(c, s);
	return true;
}

static void publish(struct apr *c, uint32_t upto)
{
	/* Input spans belong to the last entry of a batch: which of several entries was filled first is the
	 * caller's affair. With entries held back, what they point at is freed with them. */
	for (uint32_t i = c->rc.sq_pub; i != upto; i++)
		apr_arena_skip(&c->arena, i);
	if (upto == c->rc.sq_tail)
		apr_arena_mark(&c->arena, upto - 1);
	apr_rc_publish(&c->rc, upto);
	if (c->ring_always || apr_rc_need_wakeup(&c->rc))
		apr_doorbell_ring(c->bell);
}

int apr_submit(struct apr *c)
{
	int e = apr_enter(c);
	if (e)
		return e;
	apr_check_dead(c);
	bool lost = c->dead && c->rc.sq_tail != c->rc.sq_pub;
	e = apr_revive(c);
	if (!e && lost)
		e = -ECONNRESET; /* what was prepared lay in the old session's ring */
	if (e)
		return apr_leave(c, e);
	uint32_t at = c->rc.sq_pub, first = at;
	while (at != c->rc.sq_tail && admit(c, apr_rc_slot(&c->rc, at), &e))
		at++;
	if (at != first)
		publish(c, at);
	c->refused = c->rc.sq_tail;
	if (at == first && at != c->rc.sq_tail && !e)
		e = -EBUSY;
	return apr_leave(c, at != first ? (int)(at - first) : e);
}

uint32_t apr_unfinished(const struct apr *c)
{
	return apr_forked(c) ? 0 : c->unfinished + (c->n_lost - c->lost_at);
}

int apr_cancel(struct apr *c, uint64_t target, uint64_t user_data)
{
	int e = apr_enter(c);
	if (e)
		return e;
	apr_check_dead(c);
	if (c->dead)
		return apr_leave(c, -EPIPE);
	uint32_t held = c->rc.sq_tail - c->rc.sq_pub;
	/* an entry got since the last apr_submit may be half prepared and must not move */
	if (c->cancelling || (held && c->refused != c->rc.sq_tail) || !apr_rc_sqe(&c->rc))
		return apr_leave(c, -EBUSY);
	for (uint32_t i = c->rc.sq_tail - 1; i != c->rc.sq_pub; i--)
		memcpy(apr_rc_slot(&c->rc, i), apr_rc_slot(&c->rc, i - 1), c->rc.sqe_size);
	struct apr_sqe *s = apr_rc_slot(&c->rc, c->rc.sq_pub);
	memset(s, 0, c->rc.sqe_size);
	s->op = APR_OP_CANCEL;
	s->arg = target;
	s->user_data = user_data;
	e = apr_flight_add(c, s);
	dump_sqe(c, s);
	publish(c, c->rc.sq_pub + 1);
	c->refused = c->rc.sq_tail;
	return apr_leave(c, e);
}

int apr_cancel_all(struct apr *c)
{
	struct apr_frame f = { APR_FRAME_MAGIC, APR_FRAME_CANCEL_ALL, 0, sizeof(f), 0 };
	int state;

	int e = apr_enter(c);
	if (e)
		return e;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	apr_check_dead(c);
	apr_dump_frame(c, ">", &f, sizeof(f));
	e = c->dead ? -EPIPE : apr_frame_send(c->sock, &f, sizeof(f), apr_now_ns() + APR_ASK_MS * UINT64_C(1000000));
	pthread_setcancelstate(state, NULL);
	return apr_leave(c, e);
}
