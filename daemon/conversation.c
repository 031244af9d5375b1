/* SPDX-License-Identifier: MIT */
/* Owns: kept conversations. See conversation.h. */
#include "daemon/conversation.h"
#include "daemon/core.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint64_t bytes_of(uint32_t n)
{
	return (uint64_t)n * 4 + (n / 64 + 1) * 8;
}

static struct conversation *find(struct conversations *c, uint64_t handle)
{
	uint32_t i = (uint32_t)handle;

	return i < c->n && c->v[i].ids && c->v[i].generation == handle >> 32 ? &c->v[i] : NULL;
}

static void drop(struct session *s, struct conversation *v)
{
	s->who->input_bytes -= bytes_of(v->n);
	free(v->ids);
	free(v->kinds);
	v->ids = NULL;
	v->kinds = NULL;
	v->n = 0;
	v->busy = false;
}

void conversations_end(struct session *s)
{
	struct conversations *c = &s->conversations;

	for (uint32_t i = 0; i < c->n; i++)
		if (c->v[i].ids)
			drop(s, &c->v[i]);
	free(c->v);
	*c = (struct conversations){ NULL, 0, 0 };
}

static int fail(struct request *r, int err, const char *why)
{
	r->fault = (struct apr_fault){ err, offsetof(struct apr_sqe, arg), why };
	return err;
}

int conversation_continue(struct request *r)
{
	struct conversations *c = &r->s->conversations;
	struct conversation *v = find(c, r->sqe.arg);

	if (!v || v->model != r->model->id)
		return fail(r, -ESTALE, v ? "this conversation is with another model" : "no such conversation");
	if (v->busy && (r->sqe.flags & APR_SQE_KEEP))
		return fail(r, -EINVAL, "a request in flight goes on with this conversation");
	if (r->n_ids > UINT32_MAX - v->n)
		return fail(r, -E2BIG, NULL);
	uint32_t n = v->n + r->n_ids;
	uint32_t *ids = calloc((size_t)n + 1, sizeof(*ids));
	uint64_t *kinds = calloc((size_t)n / 64 + 1, sizeof(*kinds));
	if (!ids || !kinds) {
		free(ids);
		free(kinds);
		return fail(r, -ENOMEM, NULL);
	}
	memcpy(ids, v->ids, (size_t)v->n * 4);
	memcpy(kinds, v->kinds, ((size_t)v->n / 64 + 1) * 8);
	if (r->n_ids)
		memcpy(ids + v->n, r->ids, (size_t)r->n_ids * 4);
	free(r->ids);
	r->ids = ids;
	r->kinds = kinds;
	r->n_ids = n;
	v->used = ++c->turn;
	v->busy |= (r->sqe.flags & APR_SQE_KEEP) != 0;
	if (r->sqe.flags & APR_SQE_KEEP)
		r->handle = r->sqe.arg;
	return 0;
}

static struct conversation *oldest(struct conversations *c)
{
	struct conversation *v = NULL;

	for (uint32_t i = 0; i < c->n; i++)
		if (c->v[i].ids && !c->v[i].busy && (!v || c->v[i].used < v->used))
			v = &c->v[i];
	return v;
}

/* A place for a new one: a free one, one more, or that of the one used longest ago. */
static struct conversation *place(struct session *s)
{
	struct conversations *c = &s->conversations;
	struct conversation *v = NULL;

	for (uint32_t i = 0; i < c->n && !v; i++)
		v = c->v[i].ids ? NULL : &c->v[i];
	if (!v && c->n < CONVERSATIONS_MAX) {
		uint32_t n = c->n ? c->n * 2 : 4;
		struct conversation *all = reallocarray(c->v, n, sizeof(*all));
		if (!all)
			return NULL;
		memset(all + c->n, 0, (n - c->n) * sizeof(*all));
		c->v = all;
		v = &all[c->n];
		c->n = n;
	} else if (!v && (v = oldest(c))) {
		drop(s, v);
	}
	if (v)
		v->generation++; /* an old handle of this place is stale; none is 0 */
	return v;
}

/* Copies of all that r's run knows. One that was given back whole had no sequence. */
static int copy_known(const struct request *r, uint32_t **ids, uint64_t **kinds, uint32_t *n)
{
	const struct apr_seq *seq = r->runs[0].seq;
	const uint32_t *from = r->ids;
	const uint64_t *bits = r->kinds;
	uint32_t had = r->n_ids, more = r->view.n_resume;

	if (seq) {
		had = apr_seq_known(seq, &from, &bits);
		more = 0;
	}
	*n = had + more;
	*ids = calloc((size_t)*n + 1, sizeof(**ids));
	*kinds = calloc((size_t)*n / 64 + 1, sizeof(**kinds));
	if (!*ids || !*kinds) {
		free(*ids);
		free(*kinds);
		return -ENOMEM;
	}
	memcpy(*ids, from, (size_t)had * 4);
	if (bits)
		memcpy(*kinds, bits, ((size_t)had / 64 + 1) * 8);
	for (uint32_t i = 0; i < more; i++) {
		(*ids)[had + i] = r->view.resume[i];
		(*kinds)[(had + i) / 64] |= UINT64_C(1) << (had + i) % 64;
	}
	return 0;
}

int conversation_keep(struct request *r)
{
	struct session *s = r->s;
	struct conversations *c = &s->conversations;
	struct conversation *v = r->handle ? find(c, r->handle) : place(s), *old;
	uint32_t *ids, n;
	uint64_t *kinds;
	int e = v ? copy_known(r, &ids, &kinds, &n) : -ENOMEM;

	if (e)
		return e;
	if (v->ids)
		drop(s, v);
	v->model = r->model->id;
	v->n = n;
	v->ids = ids;
	v->kinds = kinds;
	v->used = ++c->turn;
	v->busy = true;
	s->who->input_bytes += bytes_of(n);
	r->handle = (uint64_t)v->generation << 32 | (uint32_t)(v - c->v);
	while (s->who->input_bytes > s->who->limits.region_bytes && (old = oldest(c)))
		drop(s, old);
	if (s->who->input_bytes <= s->who->limits.region_bytes)
		return 0;
	drop(s, v);
	r->handle = 0;
	return -EDQUOT;
}

void conversation_release(struct request *r)
{
	struct conversation *v = r->handle ? find(&r->s->conversations, r->handle) : NULL;

	if (v)
		v->busy = false;
}

int conversation_free(struct session *s, uint64_t handle)
{
	struct conversation *v = find(&s->conversations, handle);

	if (!v)
		return -ESTALE;
	if (v->busy)
		return -EINVAL;
	drop(s, v);
	return 0;
}
