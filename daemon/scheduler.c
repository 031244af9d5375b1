/* SPDX-License-Identifier: MIT */
/*
 * Owns: which request runs next and what a step is made of. See core.h.
 *
 * A step of a model is one decode row of each of its running sequences and the
 * prompts' next chunks, oldest first. Identities take turns for slots, then the
 * sessions of one; a higher prio goes first. Where pages are short the runs ranking
 * lowest (low prio, then youngest) give theirs up and are computed again later, so
 * the one ranking highest always moves.
 *
 * Where the backend takes two steps, the next is made while one runs; before pages are
 * taken from anybody, the steps in flight end.
 */
#include "daemon/core.h"
#include <stdlib.h>
#include <string.h>

enum { RECORDS = 32, FORCED_ROWS = 64, LOW_ROWS = 64, CPU_CHUNK = 128 };

static const int prio_order[3] = { 2, 0, 1 }; /* high, normal, low */

static unsigned rank_of(const struct request *r)
{
	return r->sqe.prio == 2 ? 2 : r->sqe.prio == 0 ? 1 : 0;
}

/* Does a give way to b? */
static bool ranks_below(const struct run *a, const struct run *b)
{
	unsigned ra = rank_of(a->r), rb = rank_of(b->r);

	return ra != rb ? ra < rb : a->age > b->age;
}

/* ---- the queue -------------------------------------------------------------------------- */

void sched_enqueue(struct core *c, struct request *r)
{
	struct session *s = r->s;
	unsigned p = r->sqe.prio < 3 ? r->sqe.prio : 0;

	r->queue_next = NULL;
	*s->queue_tail[p] = r;
	s->queue_tail[p] = &r->queue_next;
	r->queued = true;
	COUNT_ALL(c, queued, 1);
	if (s->in_queue)
		return;
	s->in_queue = true;
	s->queue_prev = NULL;
	s->queue_next = c->queue;
	if (c->queue)
		c->queue->queue_prev = s;
	c->queue = s;
}

void sched_dequeue(struct core *c, struct request *r)
{
	struct session *s = r->s;
	unsigned p = r->sqe.prio < 3 ? r->sqe.prio : 0;
	struct request **at = &s->queue[p];

	while (*at != r)
		at = &(*at)->queue_next;
	*at = r->queue_next;
	if (s->queue_tail[p] == &r->queue_next)
		s->queue_tail[p] = at;
	r->queued = false;
	COUNT_ALL(c, queued, -1u);
	if (s->queue[0] || s->queue[1] || s->queue[2])
		return;
	s->in_queue = false;
	if (s->queue_next)
		s->queue_next->queue_prev = s->queue_prev;
	if (s->queue_prev)
		s->queue_prev->queue_next = s->queue_next;
	else
		c->queue = s->queue_next;
}

static bool has_slot(const struct request *r)
{
	return r->model->n_runs < APR_MAX_SLOTS && !r->model->starved;
}

/* Who is next: the identity served longest ago, and of it the session. */
static struct request *pick(struct core *c, int p)
{
	struct session *best = NULL;

	for (struct session *s = c->queue; s; s = s->queue_next) {
		if (s->gone || !s->queue[p] || s->queue[p]->parked || !has_slot(s->queue[p]))
			continue;
		if (!best || s->who->turn < best->who->turn || (s->who == best->who && s->turn < best->turn))
			best = s;
	}
	return best ? best->queue[p] : NULL;
}

/* ---- admission ------------------------------------------------------------------------------ */

static int make_runs(struct request *r)
{
	uint32_t n = r->sqe.op == APR_OP_GENERATE && r->sqe.n > 1 ? r->sqe.n : 1, len, pos = 0;

	r->stops = r->view.n_stop ? calloc(r->view.n_stop, sizeof(*r->stops)) : NULL;
	r->runs = calloc(n, sizeof(*r->runs));
	if (!r->runs || (r->view.n_stop && !r->stops))
		return -ENOMEM; /* the request ends, and they with it */
	const uint8_t *text;
	for (uint32_t i = 0; i < r->view.n_stop && apr_param_stop(&r->view, &pos, &text, &len); i++)
		r->stops[i] = (struct stop){ text, len };
	r->n_runs = n;
	for (uint32_t i = 0; i < n; i++) {
		r->runs[i].r = r;
		r->runs[i].sample = (uint16_t)i;
		stream_init(&r->runs[i].text, r->stops, r->view.n_stop);
	}
	return 0;
}

/* What the client has already, as if it had just been generated. */
static int replay(struct request *r, struct run *run)
{
	const struct apr_tokenizer *t = apr_loaded_tokenizer(r->model->loaded);
	int e = 0;

	for (uint32_t i = 0; i < r->view.n_resume && !e; i++) {
		size_t len = 0;
		const char *piece = apr_piece(t, r->view.resume[i], false, &len);
		e = stream_skip(&run->text, r->view.resume[i], piece, len);
	}
	return e;
}

static void run_ended(struct core *c, struct run *run, enum apr_finish finish);

static int new_seq(struct core *c, struct request *r, struct run *run)
{
	bool score = r->sqe.op == APR_OP_SCORE;
	struct apr_seq_params p = {
		.kind = score ? APR_SEQ_SCORE : APR_SEQ_GENERATE,
		.ids = r->ids,
		.n_ids = r->n_ids,
		.forced = r->view.resume,
		.n_forced = r->view.n_resume,
		.max_tokens = r->sqe.max_tokens,
		.sampling = r->sampling,
		.ignore_eos = r->ignore_eos,
		.want_logprob = true,
		.force_decode = score && (r->sqe.flags & APR_SQE_FORCED),
		.stop_ids = r->view.stop_ids,
		.n_stop_ids = r->view.n_stop_ids,
		.n_top = r->view.logprobs,
		.scope = r->s->who->scope,
		.user = run,
	};
	uint32_t bad = 0;

	p.sampling.sample = run->sample;
	int e = apr_seq_new(r->model->loaded, &p, &run->seq, &bad);
	if (e == -E2BIG)
		snprintf(r->words, sizeof(r->words), "%u tokens are more than the context of %u", r->n_ids,
			 r->model->info.n_ctx);
	else if (e == -ENOSPC)
		snprintf(r->words, sizeof(r->words), "%u tokens never fit the pool of %u KV pages", r->n_ids,
			 r->model->info.pages_total);
	else if (e == -EINVAL)
		snprintf(r->words, sizeof(r->words), "the id at index %u is outside the vocabulary", bad);
	if (e)
		return e;
	struct apr_seq_state st;
	apr_seq_state(run->seq, &st);
	run->prompt = st.n_prompt;
	run->cached = st.n_cached;
	run->state = RUN_ACTIVE;
	run->age = r->model->admitted++;
	r->model->runs[r->model->n_runs++] = run;
	COUNT_ALL(c, running, 1);
	return 0;
}

/* One request's samples, as far as there are slots. */
static void admit_one(struct core *c, struct request *r)
{
	int e = r->runs ? 0 : make_runs(r);

	r->s->turn = r->s->who->turn = ++c->turn;
	if (!e && !r->admitted && r->view.n_resume)
		e = replay(r, &r->runs[0]);
	while (e >= 0 && r->admitted < r->n_runs) {
		struct run *run = &r->runs[r->admitted];
		bool all_there = r->view.n_resume && r->view.n_resume >= r->sqe.max_tokens;
		if (e > 0 || all_there) { /* it had ended already */
			r->admitted++;
			sched_dequeue(c, r);
			run_ended(c, run, e > 0 ? APR_FINISH_STOP_STRING : APR_FINISH_LENGTH);
			deliver_pump(c, r);
			return;
		}
		e = r->model->n_runs < APR_MAX_SLOTS ? new_seq(c, r, run) : -EAGAIN;
		if (e == -EAGAIN)
			return;
		r->admitted += !e;
	}
	if (e < 0)
		request_finish(c, r, e, APR_FINISH_ERROR, r->words[0] ? r->words : NULL);
	else
		sched_dequeue(c, r);
}

static bool admit(struct core *c)
{
	bool any = false;

	for (int i = 0; i < 3; i++) {
		struct request *r, *last = NULL;
		while ((r = pick(c, prio_order[i])) && r != last) {
			last = r; /* met twice in a row: it waits for slots */
			admit_one(c, r);
			any = true;
		}
	}
	return any;
}

/* ---- ends -------------------------------------------------------------------------------------- */

void sched_release(struct core *c, struct run *run)
{
	struct served *m = run->r->model;

	if (run->state != RUN_ACTIVE)
		return;
	for (uint32_t i = 0; i < m->n_runs; i++) {
		if (m->runs[i] == run) {
			memmove(&m->runs[i], &m->runs[i + 1], (m->n_runs - i - 1) * sizeof(struct run *));
			m->n_runs--;
			break;
		}
	}
	apr_seq_free(run->seq);
	run->seq = NULL;
	run->state = RUN_DONE;
	if (!m->n_runs)
		m->starved = false;
	COUNT_ALL(c, running, -1u);
}

/* All of it is computed; what is held may come out. */
static void run_ended(struct core *c, struct run *run, enum apr_finish finish)
{
	struct request *r = run->r;
	uint32_t ended = 0;

	sched_release(c, run);
	stream_end(&run->text);
	run->state = RUN_FLUSHING;
	run->finish = finish;
	if (finish == APR_FINISH_NUMERIC) {
		r->result = -EDOM;
		snprintf(r->words, sizeof(r->words), "the model's numbers are not finite, or nothing is left to draw");
	}
	for (uint32_t i = 0; i < r->n_runs; i++)
		ended += r->runs[i].state == RUN_FLUSHING || r->runs[i].state == RUN_DONE;
	r->draining = ended == r->n_runs;
}

void sched_wake(struct core *c, struct request *r)
{
	(void)c;
	(void)r; /* the next step looks at every run */
}

void sched_sweep(struct core *c)
{
	uint64_t pages = c->o->park_pages_ms * UINT64_C(1000000), end = c->o->park_end_ms * UINT64_C(1000000);

	for (struct session *s = c->all; s; s = s->core_next) {
		for (size_t b = 0; !s->gone && s->stalled && b < sizeof(s->table) / sizeof(s->table[0]); b++) {
			for (struct request *r = s->table[b], *next; r; r = next) {
				next = r->table_next;
				if (!r->parked)
					continue;
				if (c->now - r->parked_at >= end) {
					request_finish(c, r, -ETIME, APR_FINISH_TIMEOUT,
						       "its entries waited too long for room");
					continue;
				}
				if (r->gave_pages || c->now - r->parked_at < pages)
					continue;
				r->gave_pages = true;
				for (uint32_t i = 0; i < r->n_runs; i++) {
					if (r->runs[i].state == RUN_ACTIVE) {
						apr_seq_drop(r->runs[i].seq);
						r->runs[i].dropped = true;
					}
				}
			}
		}
	}
	c->next_sweep = c->now + 100000000;
}

/* ---- making a step ------------------------------------------------------------------------------- */

struct plan {
	struct apr_step_part part[APR_MAX_SLOTS];
	struct run *run[APR_MAX_SLOTS];
	uint32_t n, rows_left, decode_rows;
	bool normal_prefill;
	bool wait; /* somebody must give pages up: not while a step may name them */
};

static void plan_add(struct plan *p, struct run *run, uint32_t rows)
{
	p->part[p->n] = (struct apr_step_part){ run->seq, rows };
	p->run[p->n++] = run;
	p->rows_left -= rows;
}

static void plan_remove(struct plan *p, const struct run *run)
{
	for (uint32_t i = 0; i < p->n; i++) {
		if (p->run[i] == run) {
			p->rows_left += p->part[i].rows;
			p->n--;
			p->part[i] = p->part[p->n];
			p->run[i] = p->run[p->n];
			return;
		}
	}
}

static bool holds_pages(const struct run *run)
{
	struct apr_seq_state st;

	if (run->dropped)
		return false;
	apr_seq_state(run->seq, &st);
	return st.n_computed > 0;
}

/* Who gives way to `run`? *others: somebody else holds pages at all. */
static struct run *victim_for(const struct served *m, const struct run *run, bool *others)
{
	struct run *worst = NULL;

	*others = false;
	for (uint32_t i = 0; i < m->n_runs; i++) {
		struct run *v = m->runs[i];
		if (v == run || !holds_pages(v))
			continue;
		*others = true;
		if (ranks_below(v, run) && (!worst || ranks_below(v, worst)))
			worst = v;
	}
	return worst;
}

/* Pages for the next rows, taken from those ranking below if need be. 0; -EAGAIN: wait; -ENOSPC: never. */
static int get_pages(struct core *c, struct served *m, struct run *run, uint32_t rows, struct plan *p)
{
	int e;

	while ((e = apr_seq_reserve(run->seq, rows)) == -EAGAIN) {
		bool others;
		struct run *v = victim_for(m, run, &others);
		if (apr_step_in_flight(m->loaded)) { /* what ended meanwhile holds its pages until then, too */
			p->wait |= v != NULL;
			m->starved = true;
			return -EAGAIN;
		}
		if (!v) {
			m->starved = true;
			/* parts of this very step have pages too, and have computed nothing yet */
			return others || p->n ? -EAGAIN : -ENOSPC;
		}
		plan_remove(p, v);
		apr_seq_drop(v->seq);
		v->dropped = true;
		m->starved = true;
		COUNT_ALL(c, preempted, 1);
	}
	return e;
}

/* A run that gave up its pages starts over only where all it had has room, or it would lose them again. */
static bool may_resume(const struct served *m, const struct run *run)
{
	struct apr_loaded_info info;
	struct apr_seq_state st;

	if (!run->dropped)
		return true;
	apr_loaded_info(m->loaded, &info);
	apr_seq_state(run->seq, &st);
	return (uint64_t)info.pages_free * 64 > (uint64_t)st.n_prompt + st.n_generated || m->n_runs == 1;
}

static uint32_t rows_for(struct core *c, const struct run *run, const struct apr_seq_state *st, const struct plan *p)
{
	uint32_t rows = st->todo < p->rows_left ? st->todo : p->rows_left;
	bool low = rank_of(run->r) == 0;

	if (st->decoding)
		return rows < FORCED_ROWS ? rows : FORCED_ROWS;
	if (low && p->normal_prefill)
		return 0;
	/* others wait for this step: on a CPU its time grows with its rows */
	if (p->decode_rows && c->engine.backend_id == APR_BACKEND_CPU && rows > CPU_CHUNK)
		rows = CPU_CHUNK;
	if (low && p->decode_rows && rows > LOW_ROWS)
		rows = LOW_ROWS;
	return rows;
}

/* Tries to give one run its rows. False: the request is gone (it can never fit), look at the runs anew. */
static bool plan_run(struct core *c, struct served *m, struct run *run, const struct apr_seq_state *st, struct plan *p)
{
	uint32_t rows = rows_for(c, run, st, p);

	if (!rows)
		return true;
	int e = get_pages(c, m, run, rows, p);
	if (!e) {
		run->dropped = false;
		plan_add(p, run, rows);
		if (st->decoding)
			p->decode_rows += rows;
		else
			p->normal_prefill |= rank_of(run->r) > 0;
		return true;
	}
	if (e == -EAGAIN)
		return true;
	snprintf(run->r->words, sizeof(run->r->words),
		 "%u tokens are more than the KV memory of this model holds (%u pages)",
		 st->n_prompt + st->n_generated + 1, m->info.pages_total);
	request_finish(c, run->r, e, APR_FINISH_ERROR, run->r->words);
	return false;
}

/* One kind of rows: decode first, then prefill by prio. False: start over. */
static bool plan_rows(struct core *c, struct served *m, struct plan *p, bool decode, unsigned rank)
{
	for (uint32_t i = 0; i < m->n_runs && p->rows_left; i++) {
		struct run *run = m->runs[i];
		struct apr_seq_state st;
		if (run->r->parked || run->r->s->gone || (!decode && rank_of(run->r) != rank))
			continue;
		apr_seq_state(run->seq, &st);
		if (!st.todo || (st.decoding && !run->dropped) != decode ||
		    (run->dropped && (m->starved || !may_resume(m, run))))
			continue;
		if (!plan_run(c, m, run, &st, p))
			return false;
	}
	return true;
}

static void make_plan(struct core *c, struct served *m, struct plan *p)
{
	bool whole = false;

	while (!whole) {
		memset(p, 0, sizeof(*p));
		p->rows_left = apr_step_max_rows(m->loaded);
		m->starved = false;
		whole = plan_rows(c, m, p, true, 0) && plan_rows(c, m, p, false, 2) && plan_rows(c, m, p, false, 1) &&
			plan_rows(c, m, p, false, 0);
	}
	for (uint32_t i = 0; i < m->n_runs; i++)
		m->starved |= m->runs[i]->dropped && !m->runs[i]->r->parked;
}

/* Was run in the step that failed? p: one that was never enqueued; NULL: the engine knows. */
static bool is_lost(const struct run *run, const struct plan *p)
{
	struct apr_seq_state st;

	for (uint32_t i = 0; p && i < p->n; i++)
		if (p->run[i] == run)
			return true;
	if (p)
		return false;
	apr_seq_state(run->seq, &st);
	return st.ended;
}

static void fail_step(struct core *c, struct served *m, const struct plan *p, int err)
{
	if (log_allow(&c->rate))
		log_warn("%s: a step failed: %s", m->name, strerror(-err));
	for (uint32_t i = 0; i < m->n_runs;) {
		struct run *run = m->runs[i];
		if (is_lost(run, p)) {
			request_finish(c, run->r, -EIO, APR_FINISH_ERROR,
				       "the backend failed in a step of this request");
			i = 0;
		} else {
			i++;
		}
	}
}

static bool start_step(struct core *c, struct served *m)
{
	struct plan p;
	bool starved = m->starved;

	make_plan(c, m, &p);
	if (p.wait)
		return false;
	if (!p.n)
		return starved && !m->starved && c->queue; /* there may be room for another now */
	for (uint32_t i = 0; i < p.n; i++)
		if (!p.run[i]->r->started)
			p.run[i]->r->started = c->now;
	int e = apr_step_submit(m->loaded, p.part, p.n);
	if (e)
		fail_step(c, m, &p, e);
	else
		COUNT_ALL(c, steps, 1);
	return true;
}

/* ---- what a step gave ------------------------------------------------------------------------------ */

static int add_score(struct request *r, const struct apr_record *rec)
{
	struct apr_score s = { rec->index, rec->id, rec->logprob, rec->n_top };
	uint32_t unit = (uint32_t)(sizeof(s) + rec->n_top * sizeof(struct apr_top));

	if (r->out_len + unit > r->out_cap) {
		if (r->out_pos) { /* what is delivered goes first */
			memmove(r->out, r->out + r->out_pos, r->out_len - r->out_pos);
			r->out_len -= r->out_pos;
			r->out_pos = 0;
		}
		uint32_t cap = r->out_len + unit < 4096 ? 4096 : (r->out_len + unit) * 2;
		uint8_t *out = realloc(r->out, cap);
		if (!out)
			return -ENOMEM;
		r->out = out;
		r->out_cap = cap;
	}
	r->out_fmt = APR_BLOB_SCORES;
	memcpy(r->out + r->out_len, &s, sizeof(s));
	r->out_len += (uint32_t)sizeof(s);
	for (uint32_t i = 0; i < rec->n_top; i++) {
		struct apr_top t = { rec->top_id[i], rec->top_logprob[i] };
		memcpy(r->out + r->out_len, &t, sizeof(t));
		r->out_len += (uint32_t)sizeof(t);
	}
	return 0;
}

/* 1: a stop string is complete. */
static int add_token(struct run *run, const struct apr_record *rec)
{
	struct apr_top top[APR_LOGPROBS_MAX];
	size_t len = 0;
	uint32_t n = rec->n_top < APR_LOGPROBS_MAX ? rec->n_top : APR_LOGPROBS_MAX;

	if (rec->index < run->r->view.n_resume)
		return 0; /* the client has it */
	const char *piece = apr_piece(apr_loaded_tokenizer(run->r->model->loaded), rec->id, false, &len);
	for (uint32_t i = 0; i < n; i++)
		top[i] = (struct apr_top){ rec->top_id[i], rec->top_logprob[i] };
	return stream_push(&run->text, rec->id, rec->logprob, piece, piece ? len : 0, top, n);
}

static enum apr_finish finish_of(const struct request *r, enum apr_record_end end)
{
	switch (end) {
	case APR_END_STOP_ID: return APR_FINISH_STOP;
	case APR_END_NUMERIC: return APR_FINISH_NUMERIC;
	case APR_END_PROMPT: return r->sqe.op == APR_OP_SCORE ? APR_FINISH_NONE : APR_FINISH_LENGTH;
	default: return APR_FINISH_LENGTH;
	}
}

static void take_record(struct core *c, const struct apr_record *rec)
{
	struct run *run = rec->user;
	struct request *r = run->r;
	int e = 0;

	if (!r->first)
		r->first = c->now;
	if (rec->has_token)
		e = r->sqe.op == APR_OP_SCORE ? add_score(r, rec) : add_token(run, rec);
	if (e < 0) {
		request_finish(c, r, e, APR_FINISH_ERROR, NULL);
		return;
	}
	if (e > 0)
		run_ended(c, run, APR_FINISH_STOP_STRING);
	else if (rec->end != APR_END_NONE)
		run_ended(c, run, finish_of(r, rec->end));
	if (!r->parked) /* else the doorbell comes first */
		deliver_pump(c, r);
}

static bool is_running(const struct served *m, const void *run)
{
	for (uint32_t i = 0; i < m->n_runs; i++)
		if (m->runs[i] == run)
			return true;
	return false;
}

static bool collect(struct core *c, struct served *m)
{
	struct apr_record rec[RECORDS];
	bool more = true, any = false;

	while (more) {
		int n = apr_step_poll(m->loaded, rec, RECORDS, &more);
		if (n == -EAGAIN)
			return any;
		if (n < 0) {
			fail_step(c, m, NULL, n);
			return true;
		}
		any = true;
		/* a request that ends takes all its runs along: later records may be of one of those */
		for (int i = 0; i < n; i++)
			if (is_running(m, rec[i].user))
				take_record(c, &rec[i]);
	}
	return any;
}

bool sched_run(struct core *c)
{
	bool any = false;

	if (c->queue)
		any = admit(c);
	for (uint32_t i = 0; i < c->models->n_rows; i++) {
		struct served *m = c->models->rows[i];
		if (m->leaving && !m->refs && !apr_step_in_flight(m->loaded)) {
			core_model_gone(c, m);
			i--; /* the next one stands here now */
			continue;
		}
		if (apr_step_in_flight(m->loaded))
			any |= collect(c, m);
		if (m->n_runs && apr_step_room(m->loaded))
			any |= start_step(c, m);
	}
	return any;
}

bool sched_busy(const struct core *c)
{
	for (uint32_t i = 0; i < c->models->n_rows; i++)
		if (apr_step_in_flight(c->models->rows[i]->loaded))
			return true;
	return false;
}
