/* SPDX-License-Identifier: MIT */
/*
 * Steps: the rows of many sequences in one pass, and what came of them.
 *
 * Owns: the descriptors of the steps in flight, the records of the oldest when it is
 * finished. Does not own which sequences run (the caller's choice) nor their state
 * (seq.c). On the CPU prompt and generated rows share one arithmetic, so a step is one
 * batch; a backend with two is told each row's kind and divides the step itself.
 *
 * Two steps may be in flight, one behind the other. The second is made while what the
 * first one draws is unknown: a sequence of both has tokens pending, and its row of the
 * second says APR_TOK_LAST. Where the first turns out to end it, the second's row and
 * draw are passed over: no record, no page shared, no count. Pages and parameters of a
 * sequence stay until no step in flight names it.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/internal.h"

struct part {
	struct apr_seq *seq;
	uint32_t rows, end; /* end: positions computed when it is over */
	uint32_t first_draw, n_draws;
};

struct flight { /* one step */
	uint32_t n_parts;
	struct part part[APR_MAX_SLOTS];
	int32_t *tok;
	uint32_t *pos, *slot, *out;
	uint8_t *kind;
	struct apr_draw *draws;
	struct apr_table_update *updates;
	struct apr_step step;
};

struct apr_stepper {
	struct flight flight[APR_MAX_DEPTH]; /* the backend's depth of them */
	uint32_t depth, oldest;
	/* Submitted, and not all of their records are handed out. Atomic since hush() looks at every model's, also when
	 * it is called by an unload on another thread; it orders nothing. */
	_Atomic uint32_t n_flights;
	_Atomic bool near; /* the oldest was seen to be near its end; atomic for the same reason */
	bool finished; /* records[] holds the oldest one's */
	struct apr_record *records;
	uint32_t n_records, next_record;
};

/* Records of a step: one a draw, and one a sequence that ends without. */
static uint64_t max_records(const struct apr_sizes *s)
{
	return (uint64_t)s->max_rows + APR_MAX_SLOTS;
}

uint64_t apr_stepper_bytes(const struct apr_sizes *s, uint32_t depth)
{
	uint64_t each = s->max_rows * (sizeof(int32_t) + 3 * sizeof(uint32_t) + sizeof(uint8_t) + sizeof(struct apr_draw)) +
	                (uint64_t)APR_MAX_SLOTS * s->n_groups * sizeof(struct apr_table_update);

	return sizeof(struct apr_stepper) + depth * each + max_records(s) * sizeof(struct apr_record);
}

static bool flight_init(struct flight *f, const struct apr_sizes *s)
{
	uint32_t rows = s->max_rows;

	f->tok = calloc(rows, sizeof *f->tok);
	f->pos = calloc(rows, sizeof *f->pos);
	f->slot = calloc(rows, sizeof *f->slot);
	f->out = calloc(rows, sizeof *f->out);
	f->kind = calloc(rows, sizeof *f->kind);
	f->draws = calloc(rows, sizeof *f->draws);
	f->updates = calloc((size_t)APR_MAX_SLOTS * s->n_groups, sizeof *f->updates);
	return f->tok && f->pos && f->slot && f->out && f->kind && f->draws && f->updates;
}

static void flight_fini(struct flight *f)
{
	free(f->tok);
	free(f->pos);
	free(f->slot);
	free(f->out);
	free(f->kind);
	free(f->draws);
	free(f->updates);
}

int apr_stepper_new(struct apr_loaded *m)
{
	struct apr_stepper *st = calloc(1, sizeof *st);
	bool all = true;
	uint32_t i;

	if (!st)
		return -ENOMEM;
	m->stepper = st;
	st->depth = m->engine->backend->depth;
	for (i = 0; i < st->depth; i++)
		all &= flight_init(&st->flight[i], &m->sizes);
	st->records = calloc(max_records(&m->sizes), sizeof *st->records);
	if (all && st->records)
		return 0;
	apr_stepper_free(m);
	return -ENOMEM;
}

void apr_stepper_free(struct apr_loaded *m)
{
	struct apr_stepper *st = m->stepper;
	uint32_t i;

	for (i = 0; i < st->depth; i++)
		flight_fini(&st->flight[i]);
	free(st->records);
	free(st);
	m->stepper = NULL;
}

void apr_stepper_forget(struct apr_loaded *m, const struct apr_seq *s)
{
	struct apr_stepper *st = m->stepper;
	uint32_t i;

	for (i = st->next_record; i < st->n_records; i++)
		if (st->records[i].seq == s)
			st->records[i].seq = NULL;
}

uint32_t apr_step_max_rows(const struct apr_loaded *m)
{
	return m->sizes.max_rows;
}

bool apr_step_in_flight(const struct apr_loaded *m)
{
	return m->stepper && m->stepper->n_flights != 0; /* none while it rests */
}

bool apr_step_room(const struct apr_loaded *m)
{
	const struct apr_stepper *st = m->stepper;

	return !st->n_flights || (st->n_flights < st->depth && (st->finished || st->near));
}

/* ---- building -------------------------------------------------------------------- */

static int check_parts(const struct apr_loaded *m, const struct apr_step_part *parts, uint32_t n)
{
	uint32_t rows = 0, i, j, g;

	if (!n || n > APR_MAX_SLOTS)
		return -EINVAL;
	for (i = 0; i < n; i++) {
		const struct apr_seq *s = parts[i].seq;
		uint32_t todo = apr_seq_todo(s), r = parts[i].rows < todo ? parts[i].rows : todo;

		if (s->m != m || s->freed || s->slot == APR_NO_SLOT || !r || r > m->sizes.max_rows - rows)
			return -EINVAL;
		rows += r;
		for (g = 0; g < m->sizes.n_groups; g++)
			if ((uint64_t)s->kv.n[g] * APR_KV_PAGE < (uint64_t)s->n_done + r)
				return -EINVAL; /* not reserved */
		for (j = 0; j < i; j++)
			if (parts[j].seq == s)
				return -EINVAL;
	}
	return 0;
}

static void add_draw(struct flight *f, struct apr_seq *s, uint32_t row, uint32_t pos)
{
	struct apr_draw *d = &f->draws[f->step.n_draws];

	memset(d, 0, sizeof *d);
	d->n_top = s->n_top;
	if (s->kind == APR_SEQ_SCORE) {
		d->kind = APR_DRAW_SCORE;
		d->score_id = s->ids[pos + 1];
		d->want_logprob = true;
	} else {
		apr_seq_slide(s, pos + 1);
		d->kind = APR_DRAW_SAMPLE;
		d->params = &s->params;
		d->seen = s->seen ? s->seen->list : NULL;
		d->n_seen = s->seen ? s->seen->n : 0;
		d->position = pos + 1;
		d->want_logprob = s->want_logprob;
		d->slot = s->slot;
		d->last = pos + 2 == s->limit;
		d->ends = s->ends;
		d->n_ends = s->n_ends;
		d->unseen = s->seen && pos >= s->n_known;
	}
	f->out[f->step.n_draws++] = row;
}

static void add_updates(struct flight *f, struct apr_seq *s)
{
	uint32_t g;

	for (g = 0; g < s->m->sizes.n_groups; g++) {
		struct apr_kv_seq *kv = &s->kv;
		uint32_t from = kv->sent[g] > kv->first[g] ? kv->sent[g] : kv->first[g];

		if (from < kv->n[g])
			f->updates[f->step.n_updates++] = (struct apr_table_update){
				.group = g, .slot = s->slot, .first = from, .n = kv->n[g] - from, .pages = kv->page[g] + from};
		kv->sent[g] = kv->n[g];
	}
}

static void add_part(struct flight *f, const struct apr_step_part *p)
{
	struct apr_seq *s = p->seq;
	uint32_t todo = apr_seq_todo(s), rows = p->rows < todo ? p->rows : todo, i;
	struct part *part = &f->part[f->n_parts++];

	*part = (struct part){.seq = s, .rows = rows, .end = s->n_done + rows, .first_draw = f->step.n_draws};
	add_updates(f, s);
	for (i = 0; i < rows; i++) {
		uint32_t row = f->step.n_rows++, pos = s->n_done + i;

		f->tok[row] = pos < s->n_known ? (int32_t)s->ids[pos] : APR_TOK_LAST;
		f->pos[row] = pos;
		f->slot[row] = s->slot;
		f->kind[row] = apr_seq_given(s, pos) && !s->force_decode ? APR_ROW_PROMPT : APR_ROW_GENERATED;
		if (apr_seq_wants_row(s, pos))
			add_draw(f, s, row, pos);
	}
	part->n_draws = f->step.n_draws - part->first_draw;
	s->n_done += rows;
	s->pending += s->kind == APR_SEQ_GENERATE ? part->n_draws : 0;
	s->in_steps++;
}

/* The part's step is over, or was never enqueued. */
static void leave(const struct part *p)
{
	p->seq->in_steps--;
	p->seq->pending -= p->seq->kind == APR_SEQ_GENERATE ? p->n_draws : 0;
}

int apr_step_submit(struct apr_loaded *m, const struct apr_step_part *parts, uint32_t n_parts)
{
	struct apr_stepper *st = m->stepper;
	struct flight *f = &st->flight[(st->oldest + st->n_flights) % st->depth];
	uint32_t i;
	int rc;

	if (st->n_flights == st->depth)
		return -EBUSY;
	rc = check_parts(m, parts, n_parts);
	if (rc)
		return rc;
	f->step = (struct apr_step){.tok = f->tok, .pos = f->pos, .slot = f->slot, .out = f->out, .draws = f->draws,
	                            .updates = f->updates, .kind = f->kind};
	f->n_parts = 0;
	for (i = 0; i < n_parts; i++)
		add_part(f, &parts[i]);
	rc = m->engine->backend->submit(m->bm, &f->step);
	if (rc) { /* nothing was enqueued: as before */
		for (i = 0; i < f->step.n_updates; i++)
			m->slot[f->updates[i].slot]->kv.sent[f->updates[i].group] = f->updates[i].first;
		for (i = 0; i < f->n_parts; i++) {
			f->part[i].seq->n_done -= f->part[i].rows;
			leave(&f->part[i]);
		}
		return rc;
	}
	st->n_flights++;
	return 0;
}

/* ---- finishing ------------------------------------------------------------------- */

static struct apr_record *add_record(struct apr_stepper *st, struct apr_seq *s)
{
	struct apr_record *r = &st->records[st->n_records++];

	r->seq = s;
	r->user = s->user;
	r->has_token = false;
	r->index = s->n_known - s->n_prompt;
	r->id = 0;
	r->logprob = 0.0f;
	r->end = APR_END_NONE;
	r->n_top = 0;
	return r;
}

static void end_with(struct apr_stepper *st, struct apr_seq *s, enum apr_record_end end)
{
	add_record(st, s)->end = end;
	s->ended = true;
}

static void fill_token(struct apr_record *r, uint32_t id, const struct apr_sample_result *res)
{
	r->has_token = true;
	r->id = id;
	r->logprob = res->logprob;
	r->n_top = res->n_top;
	memcpy(r->top_id, res->top_id, res->n_top * sizeof *r->top_id);
	memcpy(r->top_logprob, res->top_logprob, res->n_top * sizeof *r->top_logprob);
}

static void finish_generate(struct apr_stepper *st, const struct part *p, const struct apr_sample_result *res)
{
	struct apr_seq *s = p->seq;
	struct apr_record *r;

	if (!p->n_draws) {
		/* the whole prompt is there and no token is wanted, or more rows are to come */
		if (p->end == s->n_known && s->n_known >= s->limit)
			end_with(st, s, s->prefill_only ? APR_END_PROMPT : APR_END_LENGTH);
		return;
	}
	res += p->first_draw;
	if (res->numeric) {
		end_with(st, s, APR_END_NUMERIC);
	} else if (apr_seq_is_stop(s, res->id)) {
		r = add_record(st, s);
		r->id = res->id;
		r->end = APR_END_STOP_ID;
		s->ended = true;
	} else {
		r = add_record(st, s);
		fill_token(r, res->id, res);
		apr_seq_take(s, res->id);
		if (s->n_known == s->limit) {
			r->end = APR_END_LENGTH;
			s->ended = true;
		}
	}
}

static void finish_score(struct apr_stepper *st, const struct flight *f, const struct part *p,
                         const struct apr_sample_result *res)
{
	struct apr_seq *s = p->seq;
	uint32_t i;

	for (i = 0; i < p->n_draws; i++) {
		uint32_t pos = f->pos[f->out[p->first_draw + i]] + 1;
		struct apr_record *r;

		if (res[p->first_draw + i].numeric) {
			end_with(st, s, APR_END_NUMERIC);
			return;
		}
		r = add_record(st, s);
		r->index = pos;
		fill_token(r, s->ids[pos], &res[p->first_draw + i]);
		s->n_scored = pos;
	}
	if (p->end >= s->n_rows)
		end_with(st, s, APR_END_PROMPT);
}

static void finish_part(struct apr_stepper *st, const struct flight *f, const struct part *p,
                        const struct apr_sample_result *res)
{
	struct apr_seq *s = p->seq;
	bool share = s->kind == APR_SEQ_GENERATE;

	if (s->kind == APR_SEQ_SCORE)
		finish_score(st, f, p, res);
	else
		finish_generate(st, p, res);
	/* a fault in the numbers may be in the pages too: they are not shared then */
	if (s->ended && st->n_records && st->records[st->n_records - 1].end == APR_END_NUMERIC)
		share = false;
	/* ids beyond p->end are in no page, or in one that a step in flight still fills */
	apr_kv_commit(s->m->kv, &s->kv, s->scope, s->ids, p->end, s->kinds, share);
}

static void bury(struct apr_loaded *m)
{
	struct apr_seq **at = &m->zombies;

	while (*at) {
		struct apr_seq *s = *at;

		if (s->in_steps) {
			at = &s->next_zombie;
			continue;
		}
		*at = s->next_zombie;
		apr_seq_destroy(s);
	}
}

/* The oldest step is done: its records, and what its sequences become. */
static int finish(struct apr_loaded *m)
{
	struct apr_stepper *st = m->stepper;
	const struct flight *f = &st->flight[st->oldest];
	const struct apr_sample_result *res = NULL;
	int rc = m->engine->backend->records(m->bm, &res);
	uint32_t i;

	st->n_records = st->next_record = 0;
	for (i = 0; i < f->n_parts; i++) {
		struct apr_seq *s = f->part[i].seq;

		leave(&f->part[i]);
		if (rc)
			s->ended = true;
		else if (!s->freed && !s->ended)
			finish_part(st, f, &f->part[i], res);
		if (!s->in_steps && !s->freed)
			apr_seq_given_up(s);
	}
	bury(m);
	st->finished = true;
	return rc;
}

/* What the descriptor told is known: it goes quiet, unless there is something else to look at. */
static void hush(struct apr_loaded *m)
{
	struct apr_engine *e = m->engine;
	const struct apr_loaded *o;
	uint64_t v = 1;

	if (read(e->notify_fd, &v, sizeof v) < 0)
		return; /* was quiet */
	pthread_mutex_lock(&e->lock);
	for (o = e->loaded; o; o = o->next)
		if (o->stepper->n_flights && e->backend->poll(o->bm) >= APR_STEP_NEAR &&
		    (!o->stepper->near || e->backend->poll(o->bm) == APR_STEP_DONE))
			break;
	pthread_mutex_unlock(&e->lock);
	v = 1;
	if (o && write(e->notify_fd, &v, sizeof v) < 0)
		return; /* cannot be: the counter was just emptied */
}

/* All of the oldest step is handed out. */
static void retire(struct apr_loaded *m)
{
	struct apr_stepper *st = m->stepper;

	st->finished = false;
	st->near = false;
	st->oldest = (st->oldest + 1) % st->depth;
	st->n_flights--;
	hush(m);
}

/* 0: the oldest step is done. */
static int look(struct apr_loaded *m)
{
	struct apr_stepper *st = m->stepper;
	enum apr_step_state state = m->engine->backend->poll(m->bm);

	if (state == APR_STEP_DONE)
		return 0;
	if (state == APR_STEP_NEAR && !st->near) {
		st->near = true;
		hush(m);
	}
	return -EAGAIN;
}

int apr_step_poll(struct apr_loaded *m, struct apr_record *out, int max, bool *more)
{
	struct apr_stepper *st = m->stepper;
	int n = 0, rc;

	*more = false;
	if (!st->n_flights)
		return 0;
	if (!st->finished) {
		if (look(m))
			return -EAGAIN;
		rc = finish(m);
		if (rc) {
			retire(m);
			return rc;
		}
	}
	while (n < max && st->next_record < st->n_records) {
		const struct apr_record *r = &st->records[st->next_record++];

		if (r->seq)
			out[n++] = *r;
	}
	*more = st->next_record < st->n_records;
	if (!*more)
		retire(m);
	return n;
}

void apr_stepper_settle(struct apr_loaded *m)
{
	struct apr_stepper *st = m->stepper;

	if (!st || !st->n_flights || m->n_seqs == 0)
		return;
	for (uint32_t i = 0; i < APR_MAX_SLOTS; i++)
		if (m->slot[i] && !m->slot[i]->freed)
			return; /* somebody still owns the steps */
	m->engine->backend->fence(m->bm);
	while (st->n_flights) {
		if (!st->finished)
			(void)finish(m);
		retire(m);
	}
}
