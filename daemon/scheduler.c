/* SPDX-License-Identifier: MIT */
/*
 * Owns: what lies between requests and the engine: runs and their sequences, the
 * table by which batch.c reaches them, submitting a step and taking its records. Does
 * not own who is next nor what a step is made of: batch.h. See core.h.
 */
#include "daemon/core.h"
#include "daemon/quota.h"
#include <stdlib.h>
#include <string.h>

_Static_assert((int)BATCH_SLOTS == (int)APR_MAX_SLOTS, "a run in the batch has a slot of the engine");

/* scopes of the prefix cache: an identity's are small numbers; these lie above them */
#define SCOPE_ALL (UINT64_C(1) << 61)
#define SCOPE_REQUEST (UINT64_C(1) << 62)
#define SCOPE_SESSION (UINT64_C(1) << 63)

/* What a step with running streams may take where nothing is set; prompt rows while nothing is measured; rows always
 * allowed. A GPU's are one bucket of its graphs. */
enum { STEP_MS_GPU = 12, STEP_MS_CPU = 100, FIRST_GPU = 64, FIRST_CPU = 32, LEAST_GPU = 64, LEAST_CPU = 16 };

static struct run *run_of(const struct batch_run *b)
{
	return HEAP_OF(b, struct run, b);
}

static struct request *request_of(const struct batch_req *b)
{
	return HEAP_OF(b, struct request, b);
}

/* ---- into the queue -------------------------------------------------------------------------- */

static uint64_t scope_of(struct core *c, const struct request *r)
{
	switch (r->model->share) {
	case SHARE_ALL: return SCOPE_ALL;
	case SHARE_SESSION: return SCOPE_SESSION | r->s->id;
	case SHARE_NONE: return SCOPE_REQUEST | c->requests++; /* its own samples share, nobody else */
	default: return r->s->who->scope;
	}
}

static void never_in_time(struct request *r)
{
	snprintf(r->words, sizeof(r->words), "%u tokens of prompt cannot be computed within the %u ms given", r->n_ids,
		 r->sqe.timeout_ms);
}

void sched_enqueue(struct core *c, struct request *r)
{
	static const uint8_t cls[3] = { 1, 2, 0 }; /* of prio: normal, low, high */
	struct batch_req *q = &r->b;

	r->scope = scope_of(c, r);
	q->deadline = r->deadline;
	q->prompt = r->n_ids;
	q->n = op_generates(r->sqe.op) && r->sqe.n > 1 ? r->sqe.n : 1;
	q->cls = cls[r->sqe.prio < 3 ? r->sqe.prio : 0];
	q->max_pages = r->s->who->limits.kv_pages;
	q->after_first = q->n > 1;
	int e = batch_enter(&r->model->batch, q, r->s->who->scope, r->s->who->limits.weight, r->s->id, c->now);
	r->counted = !e;
	if (!e)
		quota_queued(r->s->who, r->n_ids);
	if (e == -ETIME)
		never_in_time(r);
	if (e)
		request_finish(c, r, e, e == -ETIME ? APR_FINISH_TIMEOUT : APR_FINISH_ERROR, r->words[0] ? r->words : NULL);
}

static void uncount(struct request *r)
{
	if (r->counted)
		quota_queued(r->s->who, -(int64_t)r->n_ids);
	r->counted = false;
}

void sched_dequeue(struct request *r)
{
	uncount(r);
	if (r->model)
		batch_stop(&r->model->batch, &r->b);
}

void sched_gone(struct request *r)
{
	if (r->model)
		batch_leave(&r->model->batch, &r->b);
}

/* ---- admission ------------------------------------------------------------------------------ */

static int make_runs(struct request *r)
{
	uint32_t n = op_generates(r->sqe.op) && r->sqe.n > 1 ? r->sqe.n : 1, len, pos = 0;

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

static int new_seq(struct request *r, struct run *run)
{
	bool score = r->sqe.op == APR_OP_SCORE;
	struct apr_seq_params p = {
		.kind = score ? APR_SEQ_SCORE : APR_SEQ_GENERATE,
		.ids = r->ids,
		.kinds = r->kinds,
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
		.scope = r->scope,
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
	return 0;
}

/* batch_ops: the next run of q. */
static int op_start(void *arg, struct batch_req *q, struct batch_run **out, uint32_t *cached)
{
	struct served *m = arg;
	struct core *c = m->core;
	struct request *r = request_of(q);

	if (r->s->gone)
		return batch_stop(&m->batch, q), 1; /* its end is on its way */
	int e = r->runs ? 0 : make_runs(r);
	if (!e && !r->admitted && r->view.n_resume)
		e = replay(r, &r->runs[0]);
	bool all_there = r->view.n_resume && r->view.n_resume >= r->sqe.max_tokens;
	if (e > 0 || (!e && all_there)) { /* it had ended already */
		r->admitted++;
		batch_stop(&m->batch, q);
		run_ended(c, &r->runs[0], e > 0 ? APR_FINISH_STOP_STRING : APR_FINISH_LENGTH);
		deliver_pump(c, r);
		return 1;
	}
	struct run *run = e ? NULL : &r->runs[r->admitted];
	if (!e)
		e = new_seq(r, run);
	if (e == -EAGAIN)
		return e;
	if (e) {
		request_finish(c, r, e, APR_FINISH_ERROR, r->words[0] ? r->words : NULL);
		return e;
	}
	r->admitted++;
	uncount(r);
	quota_run(r->s->who, 1);
	quota_work(r->s->who, r->n_ids - run->cached, c->now);
	__atomic_store_n(&m->prompt_tokens, m->prompt_tokens + r->n_ids, __ATOMIC_RELAXED);
	__atomic_store_n(&m->cached_tokens, m->cached_tokens + run->cached, __ATOMIC_RELAXED);
	run->b.held = r->parked;
	*out = &run->b;
	*cached = run->cached;
	return 0;
}

static void op_look(void *arg, const struct batch_run *b, struct batch_look *l)
{
	const struct run *run = run_of(b);
	struct apr_seq_state st;

	(void)arg;
	apr_seq_state(run->seq, &st);
	*l = (struct batch_look){ .todo = run->r->s->gone ? 0 : st.todo,
				  .known = st.n_prompt + st.n_generated,
				  .computed = st.n_computed,
				  .pages = st.n_pages,
				  .decoding = st.decoding };
}

static int op_reserve(void *arg, struct batch_run *b, uint32_t rows)
{
	(void)arg;
	return apr_seq_reserve(run_of(b)->seq, rows);
}

/* Pages that a run holds, as status and quotas see them. */
static void count_pages(struct run *run, uint32_t pages)
{
	quota_pages(run->r->s->who, (int64_t)pages - run->pages);
	run->pages = pages;
}

static void op_suspend(void *arg, struct batch_run *b)
{
	const struct served *m = arg;

	count_pages(run_of(b), 0);
	quota_run(run_of(b)->r->s->who, -1);

	apr_seq_suspend(run_of(b)->seq);
	if (!b->held)
		COUNT_ALL(m->core, preempted, 1);
}

static int op_resume(void *arg, struct batch_run *b)
{
	(void)arg;
	int e = apr_seq_resume(run_of(b)->seq);
	if (!e)
		quota_run(run_of(b)->r->s->who, 1);
	return e;
}

static bool op_busy(void *arg)
{
	return apr_step_in_flight(((const struct served *)arg)->loaded);
}

static bool op_room(void *arg, uint32_t positions)
{
	return apr_loaded_room(((const struct served *)arg)->loaded, positions);
}

static uint32_t op_peek(void *arg, const struct batch_req *q)
{
	const struct request *r = request_of(q);

	return op_generates(r->sqe.op) && ((const struct served *)arg)->rest == MODEL_AWAKE
		       ? apr_loaded_peek(((const struct served *)arg)->loaded, r->scope, r->ids, r->n_ids, r->kinds)
		       : 0;
}

static void op_fail(void *arg, struct batch_req *q, struct batch_run *b, int err)
{
	const struct served *m = arg;
	struct request *r = request_of(q);
	struct apr_seq_state st = { 0 };

	if (b)
		apr_seq_state(run_of(b)->seq, &st);
	if (err == -ETIME)
		never_in_time(r);
	else if (err == -ENOSPC)
		snprintf(r->words, sizeof(r->words), "%u tokens are more than the KV memory of this model holds (%u pages)",
			 st.n_prompt + st.n_generated + 1, m->info.pages_total);
	else if (err == -EDQUOT)
		snprintf(r->words, sizeof(r->words), "%u tokens are more than the %u KV pages that this user may hold",
			 st.n_prompt + st.n_generated + 1, q->max_pages);
	request_finish(m->core, r, err, err == -ETIME ? APR_FINISH_TIMEOUT : APR_FINISH_ERROR,
		       r->words[0] ? r->words : NULL);
}

static const struct batch_ops batch_ops = {
	.start = op_start,
	.look = op_look,
	.reserve = op_reserve,
	.suspend = op_suspend,
	.resume = op_resume,
	.busy = op_busy,
	.room = op_room,
	.peek = op_peek,
	.fail = op_fail,
};

int sched_model(struct core *c, struct served *m)
{
	bool gpu = c->engine.backend_id != APR_BACKEND_CPU;
	int e = batch_init(&m->batch, &batch_ops, m, apr_step_max_rows(m->loaded));

	m->core = c;
	m->batch.pace.budget_ns = (c->o->step_ms ? c->o->step_ms : gpu ? STEP_MS_GPU : STEP_MS_CPU) * UINT64_C(1000000);
	m->batch.pace.first = gpu ? FIRST_GPU : FIRST_CPU;
	m->batch.pace.least = gpu ? LEAST_GPU : LEAST_CPU;
	return e;
}

/* ---- ends -------------------------------------------------------------------------------------- */

void sched_release(struct core *c, struct run *run)
{
	(void)c;
	if (run->state != RUN_ACTIVE)
		return;
	count_pages(run, 0);
	if (run->b.in)
		quota_run(run->r->s->who, -1);
	batch_run_ended(&run->r->model->batch, &run->b);
	apr_seq_free(run->seq);
	run->seq = NULL;
	run->state = RUN_DONE;
}

/* All of it is computed; what is held may come out. */
static void run_ended(struct core *c, struct run *run, enum apr_finish finish)
{
	struct request *r = run->r;
	uint32_t ended = 0;

	int kept = (r->sqe.flags & APR_SQE_KEEP) && finish != APR_FINISH_NUMERIC ? conversation_keep(r) : 0;
	if (kept) {
		r->result = kept;
		snprintf(r->words, sizeof(r->words), "no room to keep this conversation");
	}
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

/* ---- parked requests: no room for their entries --------------------------------------------------- */

void sched_park(struct request *r)
{
	if (!r->model)
		return;
	batch_pause(&r->model->batch, &r->b);
	for (uint32_t i = 0; i < r->n_runs; i++)
		if (r->runs[i].state == RUN_ACTIVE)
			batch_hold(&r->model->batch, &r->runs[i].b, false);
}

int sched_wake(struct request *r)
{
	int e = 0;

	if (!r->model)
		return 0;
	for (uint32_t i = 0; i < r->n_runs && !e; i++) {
		struct apr_seq_state st;
		if (r->runs[i].state != RUN_ACTIVE)
			continue;
		apr_seq_state(r->runs[i].seq, &st);
		e = st.ended ? -EIO : batch_unhold(&r->model->batch, &r->runs[i].b); /* ended: a step failed meanwhile */
	}
	return e ? e : batch_go_on(&r->model->batch, &r->b);
}

/* Its pages and slots are others' from now on, or from the end of the steps in flight. */
static void give_up(struct request *r)
{
	for (uint32_t i = 0; i < r->n_runs; i++)
		if (r->runs[i].state == RUN_ACTIVE)
			batch_hold(&r->model->batch, &r->runs[i].b, true);
	r->gave_pages = true;
}

static void sweep_session(struct core *c, struct session *s)
{
	uint64_t pages = c->o->park_pages_ms * UINT64_C(1000000), end = c->o->park_end_ms * UINT64_C(1000000);

	for (size_t b = 0; b < sizeof(s->table) / sizeof(s->table[0]); b++) {
		for (struct request *r = s->table[b], *next; r; r = next) {
			next = r->table_next;
			if (!r->parked)
				continue;
			if (c->now - r->parked_at >= end)
				request_finish(c, r, -ETIME, APR_FINISH_TIMEOUT, "its entries waited too long for room");
			else if (!r->gave_pages && c->now - r->parked_at >= pages)
				give_up(r);
		}
	}
}

void sched_sweep(struct core *c)
{
	for (struct session *s = c->all; s; s = s->core_next)
		if (!s->gone && s->stalled)
			sweep_session(c, s);
	c->next_sweep = c->now + 100000000;
}

/* ---- a step ---------------------------------------------------------------------------------------- */

/* Was run in the step that failed? p: one that was never enqueued; NULL: the engine knows. */
static bool is_lost(const struct batch_run *run, const struct batch_plan *p)
{
	struct apr_seq_state st;

	for (uint32_t i = 0; p && i < p->n; i++)
		if (p->part[i].run == run)
			return true;
	if (p)
		return false;
	apr_seq_state(run_of(run)->seq, &st);
	return st.ended;
}

static void fail_step(struct core *c, struct served *m, const struct batch_plan *p, int err)
{
	if (log_allow(&c->rate))
		log_warn("%s: a step failed: %s", m->name, strerror(-err));
	for (uint32_t i = 0; i < m->batch.n_runs;) {
		struct batch_run *run = m->batch.run[i];
		if (is_lost(run, p)) {
			request_finish(c, run_of(run)->r, -EIO, APR_FINISH_ERROR,
				       "the backend failed in a step of this request");
			i = 0;
		} else {
			i++;
		}
	}
	char why[200] = "";
	if (!c->lost && apr_engine_health(c->models->engine, why, sizeof(why))) {
		log_warn("%s: this worker ends, and another one comes", why);
		c->lost = true;
	}
}

static bool start_step(struct core *c, struct served *m)
{
	struct apr_step_part part[APR_MAX_SLOTS];
	struct batch_plan p;
	uint64_t began = apr_now_ns(), submitted;

	if (!batch_make(&m->batch, &p, c->now))
		return false;
	for (uint32_t i = 0; i < p.n; i++) {
		struct run *run = run_of(p.part[i].run);
		part[i] = (struct apr_step_part){ run->seq, p.part[i].rows };
		count_pages(run, run->b.pages);
		if (!run->r->started) {
			run->r->started = c->now;
			metrics_time(&c->metrics.queue, c->now - run->r->accepted);
		}
	}
	submitted = apr_now_ns();
	COUNT_ALL(c, plan_ns, submitted - began);
	int e = apr_step_submit(m->loaded, part, p.n);
	if (e) {
		fail_step(c, m, &p, e);
		return true;
	}
	COUNT_ALL(c, steps, 1);
	m->sent[m->n_sent++] = (struct step_sent){ p.decode_rows, p.prefill_rows, submitted };
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

static void time_token(struct core *c, struct run *run)
{
	if (run->spoke)
		metrics_time(&c->metrics.gap, c->now - run->spoke);
	else if (!run->r->first)
		metrics_time(&c->metrics.first, c->now - run->r->accepted);
	run->spoke = c->now;
}

static void take_record(struct core *c, const struct apr_record *rec)
{
	struct run *run = rec->user;
	struct request *r = run->r;
	int e = 0;

	if (rec->has_token && op_generates(r->sqe.op))
		time_token(c, run);
	if (!r->first)
		r->first = c->now;
	if (rec->has_token && op_generates(r->sqe.op) && rec->index >= r->view.n_resume)
		quota_work(r->s->who, 1, c->now);
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

/* The oldest step in flight is over. One that waited behind another began when that ended. */
static void step_over(struct core *c, struct served *m, bool failed)
{
	const struct step_sent s = m->sent[0];
	uint64_t now = apr_now_ns(), began = s.at > m->step_ended ? s.at : m->step_ended;

	m->n_sent--;
	memmove(&m->sent[0], &m->sent[1], m->n_sent * sizeof(m->sent[0]));
	m->step_ended = now;
	if (failed)
		return;
	batch_done(&m->batch, s.decode_rows, s.prefill_rows, now - began);
	metrics_time(&c->metrics.step, now - began);
	if (now - began > c->t.step_ns_max)
		__atomic_store_n(&c->t.step_ns_max, now - began, __ATOMIC_RELAXED);
}

static bool collect(struct core *c, struct served *m)
{
	struct apr_record rec;
	bool more = true, any = false;

	while (more) {
		/* one at a time: a request that ends takes its other runs' records along */
		int n = apr_step_poll(m->loaded, &rec, 1, &more);
		if (n == -EAGAIN)
			return any;
		if (n < 0) {
			step_over(c, m, true);
			fail_step(c, m, NULL, n);
			return true;
		}
		any = true;
		if (n)
			take_record(c, &rec);
	}
	step_over(c, m, false);
	return any;
}

static void count(struct core *c)
{
	uint32_t running = 0, queued = 0;

	for (uint32_t i = 0; i < c->models->n_rows; i++) {
		running += c->models->rows[i]->batch.n_runs;
		queued += c->models->rows[i]->batch.waiting + c->models->rows[i]->batch.out;
	}
	__atomic_store_n(&c->t.running, running, __ATOMIC_RELAXED);
	__atomic_store_n(&c->t.queued, queued, __ATOMIC_RELAXED);
}

/* ---- models that rest -------------------------------------------------------------------------------- */

void sched_rested(struct core *c, struct served *m, int err, const char *why)
{
	bool wake = m->rest == MODEL_WAKING;

	m->rest = wake == !err ? MODEL_AWAKE : MODEL_RESTING;
	m->idle_since = c->now;
	for (unsigned cls = 0; wake && err && cls < FAIR_CLASSES; cls++) {
		for (struct fair_item *i; (i = fair_first(&m->batch.fair, cls));) {
			struct request *r = request_of(HEAP_OF(i, struct batch_req, wait));
			snprintf(r->words, sizeof(r->words), "the model could not be loaded again: %s", why);
			request_finish(c, r, err == -ENOMEM ? err : -EIO, APR_FINISH_ERROR, r->words);
		}
	}
}

/* True: it has no memory now, and is not stepped. */
static bool rests(struct core *c, struct served *m)
{
	if (m->rest == MODEL_RESTING && m->batch.waiting && !m->leaving)
		core_model_rest(c, m, true);
	if (m->rest != MODEL_AWAKE)
		return true;
	if (m->refs || apr_step_in_flight(m->loaded) || !m->idle_since)
		m->idle_since = c->now;
	else if (m->keep_alive && !m->leaving && !c->draining && c->now - m->idle_since >= m->keep_alive)
		core_model_rest(c, m, false);
	return m->rest != MODEL_AWAKE;
}

/* Nothing names it and nobody is at it: the loader may take it down. */
static bool may_go(const struct served *m)
{
	bool still = m->rest == MODEL_RESTING || (m->rest == MODEL_AWAKE && !apr_step_in_flight(m->loaded));

	return m->leaving && !m->refs && still;
}

bool sched_run(struct core *c)
{
	if (c->lost)
		return false;

	bool any = false;

	for (uint32_t i = 0; i < c->models->n_rows; i++) {
		struct served *m = c->models->rows[i];
		if (may_go(m)) {
			core_model_gone(c, m);
			i--; /* the next one stands here now */
			continue;
		}
		if (rests(c, m))
			continue;
		if (apr_step_in_flight(m->loaded))
			any |= collect(c, m);
		if ((m->batch.n_runs || m->batch.waiting || m->batch.out) && m->n_sent < STEPS_SENT &&
		    apr_step_room(m->loaded))
			any |= start_step(c, m);
	}
	count(c);
	return any;
}

uint64_t sched_next(const struct core *c)
{
	uint64_t at = UINT64_MAX;

	for (uint32_t i = 0; i < c->models->n_rows; i++) {
		const struct served *m = c->models->rows[i];
		uint64_t due = batch_next_due(&m->batch);
		uint64_t rest = m->keep_alive && m->rest == MODEL_AWAKE && !m->refs && !m->leaving && !c->draining
					? m->idle_since + m->keep_alive
					: UINT64_MAX;
		due = rest < due ? rest : due;
		at = due < at ? due : at;
	}
	return at;
}

bool sched_late(struct core *c)
{
	bool any = false;

	for (uint32_t i = 0; i < c->models->n_rows; i++)
		if (batch_next_due(&c->models->rows[i]->batch) < c->now)
			any |= batch_late(&c->models->rows[i]->batch, c->now);
	return any;
}

bool sched_busy(const struct core *c)
{
	for (uint32_t i = 0; i < c->models->n_rows; i++)
		if (c->models->rows[i]->rest == MODEL_AWAKE && apr_step_in_flight(c->models->rows[i]->loaded))
			return true;
	return false;
}
