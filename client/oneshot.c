/* SPDX-License-Identifier: MIT */
/*
 * Owns: the one-call conveniences: submit one request, take its entries until the
 * last. Does not own: anything a program could not do with the calls below it.
 */
#include "client/handle.h"
#include <errno.h>
#include <stdlib.h>

enum { USER_DATA = 1, CANCEL_DATA = 2 };

/* What the entries of one request are handed to. Not zero: cancel it (> 0) or fail with it (< 0). */
typedef int (*entry_fn)(struct apr *c, const struct apr_cqe *e, void *arg);

struct call {
	char *err;
	size_t errlen;
	int state; /* the thread's cancel state before */
};

/* One convenience at a time on a handle, and nothing else in flight. */
static int begin(struct apr *c, struct call *k, char *err, size_t errlen)
{
	k->err = err;
	k->errlen = errlen;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &k->state);
	apr_say(err, errlen, "%s", "");
	if (apr_forked(c))
		return -EOWNERDEAD; /* a thread of the parent may have held the lock */
	if (c->locked)
		pthread_mutex_lock(&c->call);
	int e = apr_enter(c);
	if (!e) {
		if (apr_unfinished(c) || c->rc.sq_tail != c->rc.sq_pub)
			e = -EBUSY;
		apr_leave(c, 0);
	}
	return e;
}

static int end(struct apr *c, struct call *k, int e)
{
	if (e < 0 && k->err && k->errlen && !*k->err) {
		const char *why = e == -EPIPE ? apr_why(c) : "";
		apr_say(k->err, k->errlen, "%s", *why ? why : apr_strerror(e));
	}
	pthread_setcancelstate(k->state, NULL);
	if (c->locked && !apr_forked(c))
		pthread_mutex_unlock(&c->call);
	return e;
}

static int entry_or_why(struct apr *c, struct apr_sqe **s)
{
	*s = apr_get_sqe(c);
	if (*s)
		return 0;
	int e = apr_submit(c); /* says why there was none */
	return e < 0 ? e : -EBUSY;
}

static void take_error(struct apr *c, struct call *k, const struct apr_cqe *e)
{
	size_t len;
	const char *text = apr_cqe_blob(c, e, APR_BLOB_ERROR, &len);

	if (text)
		apr_say(k->err, k->errlen, "%.*s", (int)(len < 4096 ? len : 4096), text);
}

/* Submits what was prepared and takes its entries. *last is its last one. 0 = it has come; e < 0 = the call failed. */
static int run(struct apr *c, struct call *k, entry_fn fn, void *arg, struct apr_cqe *last)
{
	bool stopped = false, ended = false, cancel_open = false;
	int failed = 0;

	int e = apr_submit(c);
	if (e < 0)
		return e;
	while (!ended || cancel_open) {
		const struct apr_cqe *q;
		e = apr_wait_quiet(c, 1, -1);
		if (e < 0)
			return e;
		e = apr_peek_cqe(c, &q);
		if (e)
			return e;
		if (q->user_data == CANCEL_DATA && q->type == APR_CQE_ACK) {
			cancel_open = false;
		} else if (q->user_data == USER_DATA) {
			int r = !stopped && fn ? fn(c, q, arg) : 0;
			if (apr_cqe_last(q)) {
				*last = *q;
				ended = true;
				if (q->res < 0)
					take_error(c, k, q);
			} else if (r) {
				stopped = true;
				failed = r < 0 ? r : 0;
			}
			/* asked again until it is in: an earlier -EBUSY passes with the next entries */
			if (stopped && !ended && !cancel_open)
				cancel_open = !apr_cancel(c, USER_DATA, CANCEL_DATA);
		}
		apr_cqe_seen(c, q);
	}
	return failed;
}

static void fill_result(struct apr_result *r, const struct apr_cqe *last, uint64_t seed)
{
	memset(r, 0, sizeof(*r));
	r->finish = APR_AUX_REASON(last->aux);
	r->backend = APR_AUX_BACKEND(last->aux);
	r->route = APR_AUX_ROUTE(last->aux);
	r->fell_back = APR_AUX_FELL_BACK(last->aux);
	r->at = last->pos;
	r->seed = seed;
	r->cost = last->u.final_;
}

/* ---- generate --------------------------------------------------------------------- */

struct gen_state {
	apr_token_fn fn;
	void *arg;
};

static int on_generated(struct apr *c, const struct apr_cqe *e, void *arg)
{
	struct gen_state *g = arg;
	struct apr_token t = { .id = APR_NO_ID, .pos = e->pos, .sample = e->sample, .logprob = e->logprob };
	size_t n_ids;

	if (e->type != APR_CQE_TOKEN && e->type != APR_CQE_PIECE && e->type != APR_CQE_DATA)
		return 0;
	t.text = apr_cqe_text(c, e, &t.len);
	if (!t.text)
		t.text = "";
	t.top = apr_cqe_top(c, e, &t.n_top);
	if (e->type == APR_CQE_TOKEN)
		t.id = (uint32_t)e->res;
	const uint32_t *ids = e->type == APR_CQE_DATA ? apr_cqe_ids(c, e, &n_ids) : NULL;
	if (!ids)
		return !!g->fn(g->arg, &t);
	/* NO_STREAM: the ids at once, with the text after the last of them */
	const char *text = t.text;
	size_t len = t.len;
	for (size_t i = 0; i < n_ids; i++) {
		bool final = i + 1 == n_ids;
		t.id = ids[i];
		t.pos = e->pos + (uint32_t)i;
		t.text = final ? text : "";
		t.len = final ? len : 0;
		if (g->fn(g->arg, &t))
			return 1;
	}
	return 0;
}

static int prepare_gen(struct apr *c, const struct apr_gen *g, bool chat, uint64_t *seed)
{
	struct apr_sqe *s;

	if (g->size != sizeof(*g) || ((g->text || chat) && g->ids) || g->samples > UINT16_MAX || g->prio > UINT8_MAX ||
	    g->flags & ~APR_SQE_FLAGS_ALL)
		return -EINVAL;
	int e = entry_or_why(c, &s);
	if (e)
		return e;
	e = chat     ? apr_prep_chat(c, s, g->text, g->len, g->max_tokens)
	    : g->ids ? apr_prep_generate_ids(c, s, g->ids, g->n_ids, g->max_tokens)
		     : apr_prep_generate(c, s, g->text, g->len, g->max_tokens);
	if (!e && g->params)
		e = apr_sqe_params(c, s, g->params);
	if (e) {
		memset(s, 0, sizeof(*s)); /* a NOP in its place; withdrawn by undo */
		return e;
	}
	s->user_data = USER_DATA;
	s->model = g->model;
	s->timeout_ms = g->timeout_ms;
	s->flags = (uint16_t)g->flags;
	s->n = (uint16_t)g->samples;
	s->prio = (uint8_t)g->prio;
	s->arg = g->handle;
	if (g->has_seed)
		s->seed = g->seed;
	*seed = s->seed;
	return 0;
}

/* Gives back the entry that could not be prepared: nothing else is queued (begin saw to it). */
static void undo(struct apr *c)
{
	if (!apr_enter(c)) {
		if (c->rc.sq_tail != c->rc.sq_pub)
			c->rc.sq_tail = c->rc.sq_pub;
		apr_leave(c, 0);
	}
}

static int generate(struct apr *c, const struct apr_gen *g, bool chat, apr_token_fn fn, void *arg, struct apr_result *r,
		    char *err, size_t errlen)
{
	struct gen_state st = { fn, arg };
	struct apr_cqe last;
	struct call k;
	uint64_t seed = 0;

	int e = begin(c, &k, err, errlen);
	if (e)
		return end(c, &k, e);
	e = prepare_gen(c, g, chat, &seed);
	if (e) {
		undo(c);
		return end(c, &k, e);
	}
	e = run(c, &k, fn ? on_generated : NULL, &st, &last);
	if (!e) {
		struct apr_result mine;
		fill_result(r ? r : &mine, &last, seed);
		e = last.res;
		/* the caller's own wish is no failure */
		if (e == -ECANCELED && APR_AUX_REASON(last.aux) == APR_FINISH_CANCELLED)
			e = 0;
	}
	return end(c, &k, e);
}

int apr_generate(struct apr *c, const struct apr_gen *g, apr_token_fn fn, void *arg, struct apr_result *r, char *err,
		 size_t errlen)
{
	return generate(c, g, false, fn, arg, r, err, errlen);
}

int apr_chat(struct apr *c, const struct apr_gen *g, apr_token_fn fn, void *arg, struct apr_result *r, char *err,
	     size_t errlen)
{
	return generate(c, g, true, fn, arg, r, err, errlen);
}

/* ---- tokenize, detokenize ------------------------------------------------------------ */

struct bytes {
	uint8_t *p;
	size_t n, cap;
	bool ids;
};

static int append(struct bytes *b, const void *p, size_t n)
{
	if (n > b->cap - b->n) {
		size_t cap = b->cap ? b->cap : 256;
		while (cap - b->n < n)
			cap *= 2;
		uint8_t *more = realloc(b->p, cap);
		if (!more)
			return -ENOMEM;
		b->p = more;
		b->cap = cap;
	}
	if (n)
		memcpy(b->p + b->n, p, n);
	b->n += n;
	return 0;
}

static int on_bytes(struct apr *c, const struct apr_cqe *e, void *arg)
{
	struct bytes *b = arg;
	size_t n;

	if (b->ids) {
		const uint32_t *ids = apr_cqe_ids(c, e, &n);
		return ids ? append(b, ids, n * sizeof(*ids)) : 0;
	}
	const char *text = apr_cqe_text(c, e, &n);
	return text ? append(b, text, n) : 0;
}

static int collect(struct apr *c, struct call *k, struct apr_sqe *s, struct bytes *b)
{
	struct apr_cqe last;

	s->user_data = USER_DATA;
	int e = append(b, "", 0); /* a buffer even for an empty answer */
	if (!e && !b->p)
		e = (b->p = malloc(b->cap = 256)) ? 0 : -ENOMEM;
	if (e) {
		undo(c);
		return e;
	}
	e = run(c, k, on_bytes, b, &last);
	if (!e)
		e = last.res < 0 ? last.res : 0;
	if (!e && !b->ids) {
		e = append(b, "", 1);
		b->n--;
	}
	return e;
}

int apr_tokenize(struct apr *c, uint32_t model, const void *text, size_t len, uint32_t flags, uint32_t **ids,
		 size_t *n, char *err, size_t errlen)
{
	struct bytes b = { NULL, 0, 0, true };
	struct apr_sqe *s;
	struct call k;

	int e = begin(c, &k, err, errlen);
	if (!e)
		e = entry_or_why(c, &s);
	if (e)
		return end(c, &k, e);
	e = apr_prep_tokenize(c, s, text, len);
	if (e) {
		undo(c);
		return end(c, &k, e);
	}
	s->model = model;
	s->flags = (uint16_t)flags;
	e = collect(c, &k, s, &b);
	if (e) {
		free(b.p);
		return end(c, &k, e);
	}
	*ids = (uint32_t *)(void *)b.p;
	*n = b.n / sizeof(**ids);
	return end(c, &k, 0);
}

int apr_detokenize(struct apr *c, uint32_t model, const uint32_t *ids, size_t n, char **text, size_t *len, char *err,
		   size_t errlen)
{
	struct bytes b = { NULL, 0, 0, false };
	struct apr_sqe *s;
	struct call k;

	int e = begin(c, &k, err, errlen);
	if (!e)
		e = entry_or_why(c, &s);
	if (e)
		return end(c, &k, e);
	e = apr_prep_detokenize(c, s, ids, n);
	if (e) {
		undo(c);
		return end(c, &k, e);
	}
	s->model = model;
	e = collect(c, &k, s, &b);
	if (e) {
		free(b.p);
		return end(c, &k, e);
	}
	*text = (char *)b.p;
	*len = b.n;
	return end(c, &k, 0);
}

/* ---- score -------------------------------------------------------------------------- */

struct score_state {
	apr_score_fn fn;
	void *arg;
};

static int on_score(struct apr *c, const struct apr_cqe *e, void *arg)
{
	struct score_state *st = arg;
	size_t len, pos = 0;
	const void *data = apr_cqe_blob(c, e, APR_BLOB_SCORES, &len);
	const struct apr_score *s;

	while (data && (s = apr_score_next(data, len, &pos)))
		if (st->fn(st->arg, s, apr_score_top(s)))
			return 1;
	return data && pos != len ? -EPROTO : 0;
}

static int prepare_score(struct apr *c, uint32_t model, const uint32_t *ids, size_t n, uint32_t top, uint32_t flags)
{
	uint64_t room[4];
	struct apr_params p;
	struct apr_sqe *s;

	int e = entry_or_why(c, &s);
	if (!e)
		e = apr_prep_score(c, s, ids, n);
	apr_params_init(&p, room, sizeof(room));
	if (top)
		apr_params_logprobs(&p, top);
	if (!e)
		e = apr_sqe_params(c, s, &p);
	if (e)
		return e;
	s->user_data = USER_DATA;
	s->model = model;
	s->flags = (uint16_t)flags;
	return 0;
}

int apr_score_ids(struct apr *c, uint32_t model, const uint32_t *ids, size_t n, uint32_t top, uint32_t flags,
		  apr_score_fn fn, void *arg, struct apr_result *r, char *err, size_t errlen)
{
	struct score_state st = { fn, arg };
	struct apr_cqe last;
	struct call k;

	int e = begin(c, &k, err, errlen);
	if (e)
		return end(c, &k, e);
	e = prepare_score(c, model, ids, n, top, flags);
	if (e) {
		undo(c);
		return end(c, &k, e);
	}
	e = run(c, &k, fn ? on_score : NULL, &st, &last);
	if (!e) {
		struct apr_result mine;
		fill_result(r ? r : &mine, &last, 0);
		e = last.res == -ECANCELED && APR_AUX_REASON(last.aux) == APR_FINISH_CANCELLED ? 0 : last.res;
	}
	return end(c, &k, e < 0 ? e : 0);
}

int apr_ping(struct apr *c, int64_t timeout_us, uint64_t *ns, char *err, size_t errlen)
{
	const struct apr_cqe *q = NULL;
	struct apr_sqe *s;
	struct call k;

	int e = begin(c, &k, err, errlen);
	if (!e)
		e = entry_or_why(c, &s);
	if (e)
		return end(c, &k, e);
	apr_prep_nop(s);
	s->user_data = USER_DATA;
	uint64_t start = apr_now_ns();
	e = apr_submit(c);
	if (e > 0)
		e = apr_wait_quiet(c, 1, timeout_us);
	if (e > 0)
		e = apr_peek_cqe(c, &q);
	if (!e && q) {
		if (ns)
			*ns = apr_now_ns() - start;
		e = q->res;
		apr_cqe_seen(c, q);
	}
	return end(c, &k, e);
}
