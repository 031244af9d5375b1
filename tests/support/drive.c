/* SPDX-License-Identifier: MIT */
/* A small scheduler over the engine: see drive.h. */
#include "tests/support/drive.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define PARTS APR_MAX_SLOTS

bool drive_one_step;

static bool has_room(const struct apr_loaded *m)
{
	return drive_one_step ? !apr_step_in_flight(m) : apr_step_room(m);
}

struct apr_engine_config drive_config(const char *route, uint32_t n_ctx, uint32_t threads)
{
	return (struct apr_engine_config){.backend = "cpu", .route = route, .n_ctx = n_ctx, .threads = threads};
}

int drive_open(const struct apr_engine_config *cfg, const char *path, struct apr_engine **e, struct apr_loaded **m, char *err,
               size_t errlen)
{
	int rc = apr_engine_open(e, cfg, err, errlen);

	if (rc)
		return rc;
	rc = apr_engine_load(*e, "m", path, NULL, NULL, m, err, errlen);
	if (rc)
		apr_engine_close(*e);
	return rc;
}

void drive_close(struct apr_engine *e, struct apr_loaded *m)
{
	if (apr_engine_unload(e, m))
		abort();
	apr_engine_close(e);
}

struct apr_sample_params drive_greedy(void)
{
	return (struct apr_sample_params){.temperature = 0.0f, .top_p = 1.0f, .repeat_penalty = 1.0f, .penalty_window = -1};
}

void drive_wait(struct apr_engine *e)
{
	struct pollfd p = {.fd = apr_engine_fd(e), .events = POLLIN};

	(void)poll(&p, 1, 1000);
}

static void keep(struct drive_job *j, const struct apr_record *r)
{
	struct drive_token *t;

	if (r->end != APR_END_NONE) {
		j->end = r->end;
		j->n_ends++;
	}
	if (!r->has_token)
		return;
	if (j->n_tok == j->cap) {
		j->cap = j->cap ? 2 * j->cap : 64;
		j->tok = realloc(j->tok, j->cap * sizeof *j->tok);
		if (!j->tok)
			abort();
	}
	t = &j->tok[j->n_tok++];
	*t = (struct drive_token){.index = r->index, .id = r->id, .logprob = r->logprob, .n_top = r->n_top};
	memcpy(t->top_id, r->top_id, r->n_top * sizeof *t->top_id);
	memcpy(t->top_logprob, r->top_logprob, r->n_top * sizeof *t->top_logprob);
}

static void begin(struct apr_loaded *m, struct drive_job *j)
{
	struct apr_seq_state st;

	j->begun = true;
	j->p.user = j;
	j->rc = apr_seq_new(m, &j->p, &j->seq, &j->bad);
	if (j->rc) {
		j->seq = NULL;
		return;
	}
	apr_seq_state(j->seq, &st);
	j->n_cached = st.n_cached;
}

static uint32_t gather(struct drive_job *jobs, uint32_t n, uint32_t max_rows, struct apr_step_part *parts)
{
	uint32_t used = 0, n_parts = 0, i;

	for (i = 0; i < n && n_parts < PARTS && used < max_rows; i++) {
		struct apr_seq_state st;
		uint32_t rows;

		if (!jobs[i].seq)
			continue;
		apr_seq_state(jobs[i].seq, &st);
		rows = st.todo;
		if (jobs[i].chunk && rows > jobs[i].chunk)
			rows = jobs[i].chunk;
		if (rows > max_rows - used)
			rows = max_rows - used;
		if (!rows || apr_seq_reserve(jobs[i].seq, rows))
			continue;
		parts[n_parts++] = (struct apr_step_part){jobs[i].seq, rows};
		used += rows;
	}
	return n_parts;
}

/* The records of the oldest step in flight. 1: all of them; 0: it still runs, and there is room for another (early). */
static int collect(struct apr_loaded *m, struct apr_engine *e, bool early)
{
	struct apr_record rec[8];
	bool more = true;
	int n, i;

	while (more) {
		n = apr_step_poll(m, rec, 8, &more);
		if (n == -EAGAIN) {
			if (early && has_room(m))
				return 0;
			drive_wait(e);
			more = true;
			continue;
		}
		if (n < 0)
			return n;
		for (i = 0; i < n; i++)
			keep(rec[i].user, &rec[i]);
	}
	return 1;
}

struct step { /* one in flight */
	struct apr_step_part part[PARTS];
	uint32_t n;
};

static void settle(struct drive_job *jobs, uint32_t n, const struct step *s)
{
	uint32_t i, k;

	for (i = 0; i < s->n; i++) {
		struct drive_job *j = NULL;

		for (k = 0; k < n; k++)
			if (jobs[k].seq == s->part[i].seq)
				j = &jobs[k];
		if (!j)
			continue;
		j->steps++;
		if (j->end != APR_END_NONE || (j->cancel_at && j->n_tok >= j->cancel_at)) {
			apr_seq_free(j->seq);
			j->seq = NULL;
		} else if (j->drop_every && j->steps % j->drop_every == 0) {
			/* dropped only so often that it still gets on: not while it recomputes */
			struct apr_seq_state st;

			apr_seq_state(j->seq, &st);
			if (st.decoding || st.todo <= 1) {
				apr_seq_drop(j->seq);
				j->drops++;
			}
		}
	}
}

/* Nobody has pages or a row: the last one gives its own up. */
static void give_up(struct drive_job *jobs, uint32_t n)
{
	while (n-- > 0 && !jobs[n].seq)
		;
	if (n != UINT32_MAX)
		apr_seq_drop(jobs[n].seq);
}

/* True: all have ended. */
static bool begin_all(struct apr_loaded *m, struct drive_job *jobs, uint32_t n, uint32_t step)
{
	bool left = false;
	uint32_t i;

	for (i = 0; i < n; i++) {
		if (!jobs[i].begun && jobs[i].start_step <= step)
			begin(m, &jobs[i]);
		left |= jobs[i].seq || !jobs[i].begun;
	}
	return !left;
}

int drive_run(struct apr_loaded *m, struct apr_engine *e, struct drive_job *jobs, uint32_t n)
{
	struct step flight[2];
	uint32_t step = 0, n_flights = 0;
	int rc = 1;

	for (uint32_t i = 0; i < n; i++)
		jobs[i].begun = false; /* one may be run again */
	while (!begin_all(m, jobs, n, step) || n_flights) {
		bool room = n_flights < 2 && has_room(m);

		if (room)
			flight[n_flights].n = gather(jobs, n, apr_step_max_rows(m), flight[n_flights].part);
		if (room && flight[n_flights].n) {
			rc = apr_step_submit(m, flight[n_flights].part, flight[n_flights].n);
			if (rc)
				return rc;
			n_flights++;
			step++;
			continue;
		}
		if (!n_flights) {
			give_up(jobs, n);
			step++;
			continue;
		}
		rc = collect(m, e, !room);
		if (rc < 0)
			return rc;
		if (!rc)
			continue;
		settle(jobs, n, &flight[0]);
		flight[0] = flight[1];
		n_flights--;
	}
	return (int)step;
}

void drive_done(struct drive_job *jobs, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++) {
		apr_seq_free(jobs[i].seq);
		free(jobs[i].tok);
		jobs[i].tok = NULL;
		jobs[i].seq = NULL;
	}
}

bool drive_same_token(const struct drive_token *a, const struct drive_token *b)
{
	return a->index == b->index && a->id == b->id && !memcmp(&a->logprob, &b->logprob, sizeof a->logprob) &&
	       a->n_top == b->n_top && !memcmp(a->top_id, b->top_id, a->n_top * sizeof *a->top_id) &&
	       !memcmp(a->top_logprob, b->top_logprob, a->n_top * sizeof *a->top_logprob);
}
