/* SPDX-License-Identifier: MIT */
/*
 * Steps: the rows of many sequences in one pass, and what came of them.
 *
 * Owns: the descriptor of the step in flight, the records of a finished one. Does
 * not own which sequences run (the caller's choice) nor their state (seq.c). On
 * the CPU prompt and generated rows share one arithmetic, so a step is one batch; a
 * backend with two is told each row's kind and divides the step itself.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/internal.h"

struct part {
	struct apr_seq *seq;
	uint32_t rows, first_draw, n_draws;
};

struct apr_stepper {
	/* Submitted, and not all of its records are handed out. Atomic since quiet() looks at every model's, also when
	 * it is called by an unload on another thread; it orders nothing. */
	_Atomic bool active;
	bool finished; /* records[] is filled */
	uint32_t n_parts, max_rows;
	struct part part[APR_MAX_SLOTS];
	int32_t *tok;
	uint32_t *pos, *slot, *out;
	uint8_t *kind;
	struct apr_draw *draws;
	struct apr_table_update *updates;
	struct apr_step step;
	struct apr_record *records;
	uint32_t n_records, next_record;
};

/* Records of a step: one a draw, and one a sequence that ends without. */
static uint64_t max_records(const struct apr_sizes *s)
{
	return (uint64_t)s->max_rows + APR_MAX_SLOTS;
}

uint64_t apr_stepper_bytes(const struct apr_sizes *s)
{
	return sizeof(struct apr_stepper) +
	       s->max_rows * (sizeof(int32_t) + 3 * sizeof(uint32_t) + sizeof(uint8_t) + sizeof(struct apr_draw)) +
	       (uint64_t)APR_MAX_SLOTS * s->n_groups * sizeof(struct apr_table_update) + max_records(s) * sizeof(struct apr_record);
}

int apr_stepper_new(struct apr_loaded *m)
{
	struct apr_stepper *st = calloc(1, sizeof *st);
	uint32_t rows = m->sizes.max_rows;

	if (!st)
		return -ENOMEM;
	m->stepper = st;
	st->max_rows = rows;
	st->tok = calloc(rows, sizeof *st->tok);
	st->pos = calloc(rows, sizeof *st->pos);
	st->slot = calloc(rows, sizeof *st->slot);
	st->out = calloc(rows, sizeof *st->out);
	st->kind = calloc(rows, sizeof *st->kind);
	st->draws = calloc(rows, sizeof *st->draws);
	st->updates = calloc((size_t)APR_MAX_SLOTS * m->sizes.n_groups, sizeof *st->updates);
	st->records = calloc(max_records(&m->sizes), sizeof *st->records);
	if (st->tok && st->pos && st->slot && st->out && st->kind && st->draws && st->updates && st->records)
		return 0;
	apr_stepper_free(m);
	return -ENOMEM;
}

void apr_stepper_free(struct apr_loaded *m)
{
	struct apr_stepper *st = m->stepper;

	free(st->tok);
	free(st->pos);
	free(st->slot);
	free(st->out);
	free(st->kind);
	free(st->draws);
	free(st->updates);
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
	return m->stepper->active;
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

		if (s->m != m || s->freed || s->in_step || !r || r > m->sizes.max_rows - rows)
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

static void add_draw(struct apr_stepper *st, const struct apr_seq *s, uint32_t row, uint32_t pos)
{
	struct apr_draw *d = &st->draws[st->step.n_draws];

	memset(d, 0, sizeof *d);
	d->n_top = s->n_top;
	if (s->kind == APR_SEQ_SCORE) {
		d->kind = APR_DRAW_SCORE;
		d->score_id = s->ids[pos + 1];
		d->want_logprob = true;
	} else {
		d->kind = APR_DRAW_SAMPLE;
		d->params = &s->params;
		d->seen = s->seen ? s->seen->list : NULL;
		d->n_seen = s->seen ? s->seen->n : 0;
		d->position = pos + 1;
		d->want_logprob = s->want_logprob;
	}
	st->out[st->step.n_draws++] = row;
}

static void add_updates(struct apr_stepper *st, struct apr_seq *s)
{
	uint32_t g;

	for (g = 0; g < s->m->sizes.n_groups; g++) {
		struct apr_kv_seq *kv = &s->kv;
		uint32_t from = kv->sent[g] > kv->first[g] ? kv->sent[g] : kv->first[g];

		if (from < kv->n[g])
			st->updates[st->step.n_updates++] = (struct apr_table_update){
				.group = g, .slot = s->slot, .first = from, .n = kv->n[g] - from, .pages = kv->page[g] + from};
		kv->sent[g] = kv->n[g];
	}
}

static void add_part(struct apr_stepper *st, const struct apr_step_part *p)
{
	struct apr_seq *s = p->seq;
	uint32_t todo = apr_seq_todo(s), rows = p->rows < todo ? p->rows : todo, i;
	struct part *part = &st->part[st->n_parts++];

	*part = (struct part){.seq = s, .rows = rows, .first_draw = st->step.n_draws};
	add_updates(st, s);
	for (i = 0; i < rows; i++) {
		uint32_t row = st->step.n_rows++, pos = s->n_done + i;

		st->tok[row] = (int32_t)s->ids[pos];
		st->pos[row] = pos;
		st->slot[row] = s->slot;
		st->kind[row] = pos < s->n_prompt && !s->force_decode ? APR_ROW_PROMPT : APR_ROW_GENERATED;
		if (apr_seq_wants_row(s, pos))
			add_draw(st, s, row, pos);
	}
	part->n_draws = st->step.n_draws - part->first_draw;
	s->n_done += rows;
	s->in_step = true;
}

int apr_step_submit(struct apr_loaded *m, const struct apr_step_part *parts, uint32_t n_parts)
{
	struct apr_stepper *st = m->stepper;
	uint32_t i;
	int rc;

	if (st->active)
		return -EBUSY;
	rc = check_parts(m, parts, n_parts);
	if (rc)
		return rc;
	st->step = (struct apr_step){.tok = st->tok, .pos = st->pos, .slot = st->slot, .out = st->out, .draws = st->draws,
	                             .updates = st->updates, .kind = st->kind};
	st->n_parts = st->n_records = st->next_record = 0;
	for (i = 0; i < n_parts; i++)
		add_part(st, &parts[i]);
	st->finished = false;
	rc = m->engine->backend->submit(m->bm, &st->step);
	if (rc) { /* nothing was enqueued: as before */
		for (i = 0; i < st->n_parts; i++) {
			st->part[i].seq->n_done -= st->part[i].rows;
			st->part[i].seq->in_step = false;
		}
		return rc;
	}
	st->active = true;
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
		if (s->n_done == s->n_known && s->n_known >= s->limit)
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

static void finish_score(struct apr_stepper *st, const struct part *p, const struct apr_sample_result *res)
{
	struct apr_seq *s = p->seq;
	uint32_t i;

	for (i = 0; i < p->n_draws; i++) {
		uint32_t pos = st->pos[st->out[p->first_draw + i]] + 1;
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
	if (s->n_done >= s->n_rows)
		end_with(st, s, APR_END_PROMPT);
}

static void finish_part(struct apr_stepper *st, const struct part *p, const struct apr_sample_result *res)
{
	struct apr_seq *s = p->seq;
	bool share = s->kind == APR_SEQ_GENERATE;
	uint32_t known = s->n_done; /* positions computed; ids beyond are not in any page */

	s->in_step = false;
	if (s->freed)
		return;
	if (s->kind == APR_SEQ_SCORE)
		finish_score(st, p, res);
	else
		finish_generate(st, p, res);
	/* a fault in the numbers may be in the pages too: they are not shared then */
	if (s->ended && st->n_records && st->records[st->n_records - 1].end == APR_END_NUMERIC)
		share = false;
	apr_kv_commit(s->m->kv, &s->kv, s->scope, s->ids, known, s->n_prompt, share);
	if (s->drop_after) {
		s->drop_after = false;
		apr_seq_drop(s);
	}
}

static void bury(struct apr_loaded *m)
{
	while (m->zombies) {
		struct apr_seq *s = m->zombies;

		m->zombies = s->next_zombie;
		apr_seq_destroy(s);
	}
}

static int finish(struct apr_loaded *m)
{
	struct apr_stepper *st = m->stepper;
	const struct apr_sample_result *res = NULL;
	int rc = m->engine->backend->records(m->bm, &res);
	uint32_t i;

	for (i = 0; i < st->n_parts; i++) {
		if (rc) {
			st->part[i].seq->in_step = false;
			st->part[i].seq->ended = true;
		} else {
			finish_part(st, &st->part[i], res);
		}
	}
	bury(m);
	st->finished = true;
	return rc;
}

/* The step is over: the descriptor goes quiet unless another model has something too. */
static void quiet(struct apr_loaded *m)
{
	struct apr_engine *e = m->engine;
	const struct apr_loaded *o;
	uint64_t v = 1;

	m->stepper->active = false;
	if (read(e->notify_fd, &v, sizeof v) < 0)
		return; /* was quiet */
	pthread_mutex_lock(&e->lock);
	for (o = e->loaded; o; o = o->next)
		if (o->stepper->active && e->backend->poll(o->bm) == APR_STEP_DONE)
			break;
	pthread_mutex_unlock(&e->lock);
	v = 1;
	if (o && write(e->notify_fd, &v, sizeof v) < 0)
		return; /* cannot be: the counter was just emptied */
}

int apr_step_poll(struct apr_loaded *m, struct apr_record *out, int max, bool *more)
{
	struct apr_stepper *st = m->stepper;
	int n = 0, rc;

	*more = false;
	if (!st->active)
		return 0;
	if (!st->finished) {
		if (m->engine->backend->poll(m->bm) != APR_STEP_DONE)
			return -EAGAIN;
		rc = finish(m);
		if (rc) {
			quiet(m);
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
		quiet(m);
	return n;
}

void apr_stepper_settle(struct apr_loaded *m)
{
	struct apr_stepper *st = m->stepper;

	if (!st || !st->active || m->n_seqs == 0)
		return;
	for (uint32_t i = 0; i < APR_MAX_SLOTS; i++)
		if (m->slot[i] && !m->slot[i]->freed)
			return; /* somebody still owns the step */
	m->engine->backend->fence(m->bm);
	if (!st->finished)
		(void)finish(m);
	quiet(m);
}
