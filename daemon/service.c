/* SPDX-License-Identifier: MIT */
/*
 * Owns: taking submission entries: credits, the checks that need state, NOP and
 * CANCEL on the spot, the rest to the intake. See core.h.
 */
#include "daemon/core.h"
#include "daemon/quota.h"
#include <stdlib.h>
#include <string.h>

static void refuse(struct core *c, struct session *s, const struct apr_sqe *sqe, const struct apr_fault *f)
{
	struct apr_cqe e = { .user_data = sqe->user_data, .res = f->err, .type = APR_CQE_FINAL, .pos = f->at };

	if (sqe->op == APR_OP_NOP || sqe->op == APR_OP_CANCEL || sqe->op == APR_OP_FREE)
		e.type = APR_CQE_ACK;
	else
		e.aux = APR_AUX(APR_FINISH_ERROR, 0, 0, 0);
	if (f->why) {
		e.blob = deliver_blob(c, s, APR_BLOB_ERROR, f->why, (uint32_t)strlen(f->why));
		e.flags = e.blob ? APR_CQE_BLOB : 0;
	}
	deliver_entry(c, s, &e);
	COUNT_ALL(c, failed, 1);
	metrics_add(&c->metrics.refused, 1);
}

/* picked: when it was picked up; 0 = just now. */
static void do_nop(struct core *c, struct session *s, const struct apr_sqe *sqe, uint64_t picked)
{
	struct apr_cqe e = { .user_data = sqe->user_data, .type = APR_CQE_ACK };

	if (!picked)
		picked = apr_now_ns();
	e.u.nop.waited_ns = picked - s->seen;
	e.u.nop.served_ns = apr_now_ns() - picked;
	deliver_entry(c, s, &e);
}

static void do_cancel(struct core *c, struct session *s, const struct apr_sqe *sqe)
{
	struct request *r = request_find(s, sqe->arg);

	if (r)
		request_finish(c, r, -ECANCELED, APR_FINISH_CANCELLED, NULL);
	deliver_ack(c, s, sqe->user_data, r ? 0 : -ENOENT, 0);
}

static void do_free(struct core *c, struct session *s, const struct apr_sqe *sqe)
{
	int e = conversation_free(s, sqe->arg);
	struct apr_fault f = { e, offsetof(struct apr_sqe, arg),
			       e == -ESTALE ? "no such conversation" : "a request in flight goes on with it" };

	if (e)
		refuse(c, s, sqe, &f);
	else
		deliver_ack(c, s, sqe->user_data, 0, 0);
}

/* What a request needs that only the daemon's state can tell. */
static int admit(struct core *c, struct session *s, const struct apr_sqe *sqe, struct served **m, struct apr_fault *f)
{
	*m = models_find(c->models, sqe->model);
	if (c->draining) {
		*f = (struct apr_fault){ -ESHUTDOWN, 0, "aprd is draining: nothing new is taken" };
	} else if (s->who->in_flight >= s->who->limits.in_flight) {
		*f = (struct apr_fault){ -EDQUOT, 0, "too many unfinished requests of this user" };
		__atomic_store_n(&s->who->refused_quota, s->who->refused_quota + 1, __ATOMIC_RELAXED);
	} else if (s->who->input_bytes + sqe->in_len + sqe->par_len > s->who->limits.region_bytes) {
		*f = (struct apr_fault){ -EDQUOT, offsetof(struct apr_sqe, in_len),
					 "the inputs of this user's unfinished requests are at their limit" };
	} else if (sqe->n > APR_MAX_SLOTS) {
		*f = (struct apr_fault){ -EINVAL, offsetof(struct apr_sqe, n), "n is at most 64" };
	} else if (!*m || (*m)->leaving) {
		uint32_t at = offsetof(struct apr_sqe, model);
		if (!sqe->model)
			*f = (struct apr_fault){ -ENODEV, at, "no model is loaded" };
		else if (sqe->model < c->models->next_id)
			*f = (struct apr_fault){ -ESTALE, at, "this model has been unloaded" };
		else
			*f = (struct apr_fault){ -ENOENT, at, "no model has this id" };
	} else if (sqe->n > 1 && !op_generates(sqe->op)) {
		*f = (struct apr_fault){ -EINVAL, offsetof(struct apr_sqe, n), "n is for GENERATE and CHAT alone" };
	} else if (sqe->n > 1 && (sqe->flags & APR_SQE_KEEP)) {
		*f = (struct apr_fault){ -EINVAL, offsetof(struct apr_sqe, n), "KEEP goes with one sample" };
	} else if (sqe->arg && sqe->op == APR_OP_CHAT) {
		*f = (struct apr_fault){ -EOPNOTSUPP, offsetof(struct apr_sqe, arg),
					 "CHAT begins a conversation: GENERATE goes on with it" };
	} else {
		return 0;
	}
	return f->err;
}

static bool is_small(const struct apr_sqe *sqe)
{
	return (uint64_t)sqe->in_len + sqe->par_len <= INTAKE_SMALL;
}

/* False: the entry stays at the head until its input is copied. */
static bool do_request(struct core *c, struct session *s, const struct apr_sqe *sqe)
{
	struct apr_fault f = { 0 };
	struct served *m;

	if (admit(c, s, sqe, &m, &f)) {
		refuse(c, s, sqe, &f);
		return true;
	}
	struct request *r = request_new(c, s, sqe);
	if (!r) {
		f = (struct apr_fault){ -ENOMEM, 0, NULL };
		refuse(c, s, sqe, &f);
		return true;
	}
	r->model = m;
	m->refs++;
	r->copy_here = !is_small(sqe);
	if (!r->copy_here && intake_copy(r)) {
		if (r->fault.err == -EFAULT)
			core_broken(c, s, APR_REASON_FAULT, "the request region could not be read");
		else
			request_finish(c, r, r->fault.err, APR_FINISH_ERROR, NULL);
		return true;
	}
	r->at_intake = true;
	s->jobs_out++;
	s->blocked = r->copy_here;
	intake_post(c->intake, r);
	return !s->blocked;
}

static void stall(struct core *c, struct session *s, bool *again)
{
	int e = apr_rd_cq_stall(&s->ring);

	*again = e > 0;
	if (e < 0)
		core_broken(c, s, e == -EFAULT ? APR_REASON_FAULT : APR_REASON_PROTOCOL,
			    "cq_head is outside the queue");
	else if (e > 0)
		apr_arena_pass(&s->arena, s->ring.cq_head);
	else
		deliver_stalled(s);
}

static bool may_take(struct core *c, struct session *s, const struct apr_sqe *sqe)
{
	bool cancel = sqe->op == APR_OP_CANCEL;
	bool (*may)(const struct apr_credit *, uint32_t) = cancel ? apr_credit_cancel : apr_credit_take;

	if (may(&s->credit, apr_rd_cq_free(&s->ring)))
		return true;
	return !deliver_refresh(c, s) && may(&s->credit, apr_rd_cq_free(&s->ring));
}

/* One entry. 1 taken, 0 it stays, -errno the session is broken. */
static int take_one(struct core *c, struct session *s, uint64_t picked)
{
	struct apr_sqe sqe;
	struct apr_fault f = { 0 };
	int e = apr_rd_sq_peek(&s->ring, &sqe);

	if (e == -EFAULT)
		return e;
	while (!may_take(c, s, &sqe)) {
		bool again = false;
		if (!s->gone)
			stall(c, s, &again);
		if (!again)
			return 0;
	}
	if (e)
		f = (struct apr_fault){ e, sizeof(sqe), "bytes beyond the known entry are not zero" };
	else
		e = apr_check_sqe(&sqe, &s->check, &f);
	if (!e && request_find(s, sqe.user_data)) {
		f = (struct apr_fault){ -EEXIST, offsetof(struct apr_sqe, user_data), "this user_data is in flight" };
		e = f.err;
	}
	bool taken = true;
	if (e)
		refuse(c, s, &sqe, &f);
	else if (sqe.op == APR_OP_NOP)
		do_nop(c, s, &sqe, picked);
	else if (sqe.op == APR_OP_CANCEL)
		do_cancel(c, s, &sqe);
	else if (sqe.op == APR_OP_FREE)
		do_free(c, s, &sqe);
	else
		taken = do_request(c, s, &sqe);
	if (taken && !s->gone) {
		apr_rd_sq_advance(&s->ring);
		COUNT(c, s, sqes, APR_COUNT_SQES, 1);
	}
	return taken;
}

bool service_session(struct core *c, struct session *s)
{
	bool any = false;

	if (s->stalled)
		deliver_unstall(c, s);
	if (s->gone || s->blocked)
		return false;
	int n = apr_rd_sq_ready(&s->ring);
	uint64_t picked = 0;
	if (n > 0 && !s->left)
		s->seen = picked = apr_now_ns(); /* not the pass's time: others were served since */
	while (n > 0 && !s->gone && !s->blocked) {
		int r = take_one(c, s, picked);
		if (r < 0) {
			n = r;
			break;
		}
		if (!r)
			break;
		any = true;
		picked = 0;
		n--;
	}
	s->left = n > 0;
	if (n < 0)
		core_broken(c, s, n == -EFAULT ? APR_REASON_FAULT : APR_REASON_PROTOCOL,
			    n == -EFAULT ? "the request region could not be read" : "sq_tail is outside the queue");
	return any || s->blocked;
}

void service_until_quiet(struct core *c, struct session *s)
{
	/* awake anyway: a cq_head that cannot be is found now, not when room runs out */
	if (s->gone || deliver_refresh(c, s))
		return;
	for (;;) {
		service_session(c, s);
		if (s->gone || s->hot || s->blocked || s->stalled)
			break; /* the copy's letter or the doorbell of CQ_STALLED brings us back */
		int n = apr_rd_sq_sleep(&s->ring);
		if (n < 0)
			core_broken(c, s, n == -EFAULT ? APR_REASON_FAULT : APR_REASON_PROTOCOL,
				    "sq_tail is outside the queue");
		if (n <= 0)
			return;
	}
	if (!s->gone && !s->hot)
		apr_rd_flags_set(&s->ring, APR_RES_NEED_WAKEUP);
}

void service_copied(void *core, struct mail *m)
{
	struct core *c = core;
	struct request *r = (struct request *)((char *)m - offsetof(struct request, copied));
	struct session *s = r->s;

	s->blocked = false;
	if (s->gone)
		return;
	if (r->copy_err == -EFAULT) {
		core_broken(c, s, APR_REASON_FAULT, "the request region could not be read");
		return;
	}
	apr_rd_sq_advance(&s->ring);
	COUNT(c, s, sqes, APR_COUNT_SQES, 1);
	service_until_quiet(c, s);
}

void service_taken_in(void *core, struct mail *m)
{
	struct core *c = core;
	struct request *r = (struct request *)((char *)m - offsetof(struct request, taken_in));
	struct session *s = r->s;

	r->at_intake = false;
	s->jobs_out--;
	if (r->finished) { /* cancelled, timed out or hung up meanwhile */
		request_returned(r);
		core_may_bury(c, s);
		return;
	}
	if (r->fault.err) {
		const char *words = r->words[0] ? r->words : NULL;
		request_finish(c, r, r->fault.err, APR_FINISH_ERROR, r->fault.why ? r->fault.why : words);
	} else if (op_generates(r->sqe.op) || r->sqe.op == APR_OP_SCORE) {
		int e = r->sqe.arg ? conversation_continue(r) : 0;
		if (e) {
			request_finish(c, r, e, APR_FINISH_ERROR, r->fault.why);
			return;
		}
		e = quota_prompt(s->who, r->n_ids, c->now, r->words, sizeof(r->words));
		if (e)
			request_finish(c, r, e, APR_FINISH_ERROR, r->words);
		else
			sched_enqueue(c, r);
	} else {
		r->draining = true;
		deliver_pump(c, r);
	}
}
