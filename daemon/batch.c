/* SPDX-License-Identifier: MIT */
/* Owns: what a step is made of. See batch.h. */
#include "daemon/batch.h"
#include <errno.h>
#include <string.h>

enum { PAGE = 64, WHOLE = 16, LOW_PART = 4 }; /* of the time budget, in 16ths: a low prompt beside running streams */

int batch_init(struct batch *b, const struct batch_ops *ops, void *arg, uint32_t max_rows)
{
	memset(b, 0, sizeof(*b));
	b->ops = ops;
	b->arg = arg;
	b->max_rows = max_rows;
	return fair_init(&b->fair);
}

void batch_fini(struct batch *b)
{
	fair_fini(&b->fair);
	heap_free(&b->due);
}

/* ---- waiting ---------------------------------------------------------------------------------- */

static bool waits(const struct batch_req *q)
{
	return q->wait.in.at != 0;
}

static int push(struct batch *b, struct batch_req *q)
{
	if (q->stopped || q->paused || q->first || q->started == q->n || waits(q))
		return 0;
	int e = fair_push(&b->fair, &q->wait, q->deadline ? q->deadline : UINT64_MAX, q->started != 0);

	b->waiting += !e;
	return e;
}

static void take(struct batch *b, struct batch_req *q)
{
	b->waiting -= waits(q);
	fair_take(&b->fair, &q->wait);
	heap_remove(&b->due, &q->due);
}

int batch_enter(struct batch *b, struct batch_req *q, uint64_t identity, uint32_t weight, uint64_t session, uint64_t now)
{
	q->session = fair_hold(&b->fair, identity, weight, session);
	if (!q->session)
		return -ENOMEM;
	q->wait.session = q->session;
	q->wait.cls = q->cls;
	q->wait.again = false;
	int e = push(b, q);
	if (!e && q->deadline) {
		uint64_t least = pace_least_ns(&b->pace, q->prompt);
		q->due.key = q->deadline > least ? q->deadline - least : 0;
		/* what the prefix cache has need not be computed: only a look at it makes the refusal sure */
		e = q->due.key < now && now + pace_least_ns(&b->pace, q->prompt - b->ops->peek(b->arg, q)) >
						q->deadline
			    ? -ETIME
			    : heap_add(&b->due, &q->due);
	}
	if (e) {
		take(b, q);
		fair_let_go(&b->fair, q->session);
		q->session = NULL;
	}
	return e;
}

void batch_stop(struct batch *b, struct batch_req *q)
{
	if (!q->session)
		return;
	q->stopped = true;
	q->first = NULL;
	take(b, q);
}

void batch_pause(struct batch *b, struct batch_req *q)
{
	if (!q->session)
		return;
	q->paused = true;
	b->waiting -= waits(q);
	fair_take(&b->fair, &q->wait);
}

int batch_go_on(struct batch *b, struct batch_req *q)
{
	q->paused = false;
	return q->session ? push(b, q) : 0;
}

void batch_leave(struct batch *b, struct batch_req *q)
{
	if (!q->session)
		return;
	take(b, q);
	fair_let_go(&b->fair, q->session);
	q->session = NULL;
}

/* ---- slots -------------------------------------------------------------------------------------- */

static void slot_take(struct batch *b, struct batch_run *run)
{
	uint32_t i = b->n_runs++;

	for (; i && b->run[i - 1]->age > run->age; i--)
		b->run[i] = b->run[i - 1];
	b->run[i] = run;
	run->in = true;
	run->pages = 0;
	b->ranked = false;
}

static void slot_leave(struct batch *b, struct batch_run *run)
{
	uint32_t i = 0;

	while (b->run[i] != run)
		i++;
	b->n_runs--;
	memmove(&b->run[i], &b->run[i + 1], (b->n_runs - i) * sizeof(struct batch_run *));
	run->in = false;
	b->ranked = false;
	fair_stops(&b->fair, run->q->session);
}

/* The samples after the first: its prompt is there, or will never be. */
static void first_done(struct batch *b, struct batch_req *q)
{
	q->first = NULL;
	q->after_first = false;
	if (push(b, q))
		b->ops->fail(b->arg, q, NULL, -ENOMEM);
}

void batch_run_ended(struct batch *b, struct batch_run *run)
{
	struct batch_req *q = run->q;

	if (run->in)
		slot_leave(b, run);
	if (run->out)
		b->out--;
	run->out = false;
	fair_take(&b->fair, &run->wait);
	if (q->first == run)
		first_done(b, q);
}

static bool suspend(struct batch *b, struct batch_run *run)
{
	struct batch_req *q = run->q;

	b->ops->suspend(b->arg, run);
	slot_leave(b, run);
	run->out = true;
	run->pages = 0;
	b->out++;
	run->wait = (struct fair_item){ .session = q->session, .cls = q->cls, .again = true };
	if (run->held || !fair_push(&b->fair, &run->wait, 0, true))
		return true;
	b->ops->fail(b->arg, q, run, -ENOMEM);
	return false;
}

void batch_hold(struct batch *b, struct batch_run *run, bool give_up)
{
	run->held = true;
	fair_take(&b->fair, &run->wait);
	if (give_up && run->in)
		suspend(b, run);
}

int batch_unhold(struct batch *b, struct batch_run *run)
{
	if (!run->held)
		return 0;
	run->held = false;
	return run->out ? fair_push(&b->fair, &run->wait, 0, true) : 0;
}

/* ---- rank ------------------------------------------------------------------------------------------ */

static bool ranks_before(const struct batch_run *a, const struct batch_run *b)
{
	if (a->q->cls != b->q->cls)
		return a->q->cls < b->q->cls;
	return a->nth != b->nth ? a->nth < b->nth : a->age < b->age;
}

static uint64_t nth_of(const struct fair_flow *who, uint32_t count)
{
	return (uint64_t)count * FAIR_UNIT / who->weight;
}

static void rank(struct batch *b)
{
	if (b->ranked)
		return;
	for (uint32_t i = 0; i < b->n_runs; i++)
		b->run[i]->q->session->up->count = 0;
	for (unsigned cls = 0; cls < FAIR_CLASSES; cls++) {
		for (uint32_t i = 0; i < b->n_runs; i++) {
			struct batch_run *run = b->run[i];
			if (run->q->cls == cls)
				run->nth = nth_of(run->q->session->up, run->q->session->up->count++);
		}
	}
	for (uint32_t i = 0; i < b->n_runs; i++) {
		uint32_t at = i;
		for (; at && ranks_before(b->run[i], b->rank[at - 1]); at--)
			b->rank[at] = b->rank[at - 1];
		b->rank[at] = b->run[i];
	}
	b->ranked = true;
}

/* The last in rank, if it gives way to a newcomer of this session. */
static struct batch_run *gives_way_to(struct batch *b, const struct fair_flow *session, unsigned cls)
{
	rank(b);
	if (!b->n_runs)
		return NULL;
	struct batch_run *last = b->rank[b->n_runs - 1];
	if (last->q->cls != cls)
		return last->q->cls > cls ? last : NULL;
	/* one number above: else they would take the slot from each other in turn */
	return last->nth > nth_of(session->up, session->up->running) ? last : NULL;
}

/* ---- admission -------------------------------------------------------------------------------------- */

/* Positions of those that have a slot which are still to be computed. */
static uint64_t promised(const struct batch *b)
{
	struct batch_look l;
	uint64_t n = 0;

	for (uint32_t i = 0; i < b->n_runs; i++) {
		b->ops->look(b->arg, b->run[i], &l);
		n += l.known > l.computed ? l.known - l.computed : 0;
	}
	return n;
}

static bool may_enter(struct batch *b, struct batch_plan *p, const struct fair_item *i, uint64_t positions, uint64_t due)
{
	struct batch_run *last = gives_way_to(b, i->session, i->cls);
	uint64_t all = positions + due;
	bool room = !b->n_runs || b->ops->room(b->arg, all < UINT32_MAX ? (uint32_t)all : UINT32_MAX);

	if (b->n_runs < BATCH_SLOTS)
		return room || last; /* the pages that are short will be last's */
	if (!last)
		return false;
	if (b->ops->busy(b->arg)) {
		p->wait = true;
		return false;
	}
	b->suspended++;
	return suspend(b, last);
}

static int enter_again(struct batch *b, struct batch_run *run)
{
	int e = b->ops->resume(b->arg, run);

	if (!e)
		e = fair_starts(&b->fair, run->q->session);
	if (e && e != -EAGAIN)
		b->ops->fail(b->arg, run->q, run, e);
	if (e)
		return e;
	fair_take(&b->fair, &run->wait);
	run->out = false;
	b->out--;
	slot_take(b, run);
	return 0;
}

static int enter_new(struct batch *b, struct batch_req *q)
{
	struct batch_run *run = NULL;
	uint32_t cached = 0;
	int e = fair_starts(&b->fair, q->session);

	if (e) {
		b->ops->fail(b->arg, q, NULL, e);
		return e;
	}
	struct fair_flow *session = q->session;
	session->refs++; /* q may go */
	e = b->ops->start(b->arg, q, &run, &cached);
	if (!e) {
		run->q = q;
		run->age = b->admitted++;
		slot_take(b, run);
		fair_charge(session, q->prompt - cached);
		q->started++;
		if (q->started == q->n || q->after_first)
			take(b, q);
		if (q->started < q->n && q->after_first)
			q->first = run;
	} else {
		fair_stops(&b->fair, session);
	}
	fair_let_go(&b->fair, session);
	return e;
}

/* Slots for those that wait, as far as there are slots and pages. Who is first and has to wait lets nobody pass. */
static void admit(struct batch *b, struct batch_plan *p)
{
	uint64_t due = promised(b);

	for (unsigned cls = 0; cls < FAIR_CLASSES; cls++) {
		for (struct fair_item *i; (i = fair_first(&b->fair, cls));) {
			struct batch_look l = { 0 };
			uint64_t need;
			int e;
			if (i->again) {
				b->ops->look(b->arg, HEAP_OF(i, struct batch_run, wait), &l);
				need = (uint64_t)l.known + 1;
			} else {
				const struct batch_req *q = HEAP_OF(i, struct batch_req, wait);
				need = (uint64_t)q->prompt + 1 - b->ops->peek(b->arg, q);
			}
			if (!may_enter(b, p, i, need, due))
				return;
			e = i->again ? enter_again(b, HEAP_OF(i, struct batch_run, wait))
				     : enter_new(b, HEAP_OF(i, struct batch_req, wait));
			if (e == -EAGAIN) /* slots that a step still names */
				return;
			if (!e)
				due += need;
		}
	}
}

/* ---- deadlines ----------------------------------------------------------------------------------------- */

uint64_t batch_next_due(const struct batch *b)
{
	const struct heap_item *i = heap_first(&b->due);

	return i ? i->key : UINT64_MAX;
}

bool batch_late(struct batch *b, uint64_t now)
{
	bool any = false;

	for (struct heap_item *i; (i = heap_first(&b->due)) && i->key < now; any = true) {
		struct batch_req *q = HEAP_OF(i, struct batch_req, due);
		uint32_t rows = q->prompt - b->ops->peek(b->arg, q);
		uint64_t least = pace_least_ns(&b->pace, rows);
		heap_remove(&b->due, i);
		if (now + least <= q->deadline) { /* much of it is cached by now */
			i->key = q->deadline - least;
			if (i->key >= now && !heap_add(&b->due, i))
				continue;
		}
		b->ops->fail(b->arg, q, NULL, -ETIME);
	}
	return any;
}

/* ---- a step ---------------------------------------------------------------------------------------------- */

struct making { /* one attempt at a plan */
	struct batch_plan *p;
	struct batch_run *run[BATCH_SLOTS]; /* by rank */
	struct batch_look look[BATCH_SLOTS];
	uint32_t got[BATCH_SLOTS]; /* prompt rows dealt */
	bool blocked[BATCH_SLOTS]; /* no pages for it in this step */
	uint32_t n;
	bool quotas;
};

static struct batch_run *holder_below(const struct making *m, uint32_t at, const struct fair_flow *who)
{
	for (uint32_t i = m->n; i-- > at + 1;)
		if (m->run[i]->in && m->run[i]->pages && (!who || m->run[i]->q->session->up == who))
			return m->run[i];
	return NULL;
}

static bool others_hold(const struct making *m, uint32_t at, const struct fair_flow *who)
{
	for (uint32_t i = 0; i < m->n; i++)
		if (i != at && m->run[i]->in && m->run[i]->pages && (!who || m->run[i]->q->session->up == who))
			return true;
	return false;
}

static void unplan(struct making *m, const struct batch_run *run)
{
	struct batch_plan *p = m->p;

	for (uint32_t i = 0; i < m->n; i++)
		if (m->run[i] == run)
			m->blocked[i] = true;
	for (uint32_t i = 0; i < p->n; i++) {
		if (p->part[i].run != run)
			continue;
		p->rows_left += p->part[i].rows;
		p->decode_rows -= p->part[i].decode ? p->part[i].rows : 0;
		p->prefill_rows -= p->part[i].decode ? 0 : p->part[i].rows;
		p->part[i] = p->part[--p->n];
		return;
	}
}

static uint32_t pages_of(uint32_t positions)
{
	return positions / PAGE + (positions % PAGE != 0);
}

static bool wait_for_end(const struct batch *b, const struct making *m)
{
	m->p->wait |= b->ops->busy(b->arg);
	return m->p->wait;
}

/* Pages for rows more than are computed, taken from those below if need be. 0; -EAGAIN: it waits; -ECANCELED: look at
 * everything anew; else it can never have them. */
static int get_pages(struct batch *b, struct making *m, uint32_t at, uint32_t rows)
{
	struct batch_run *run = m->run[at], *v;
	struct fair_flow *who = run->q->session->up;
	uint32_t want = pages_of(m->look[at].computed + rows);
	uint32_t extra = want > run->pages ? want - run->pages : 0;
	int e;

	while (run->q->max_pages && who->pages + extra > run->q->max_pages) {
		v = holder_below(m, at, who);
		if (!v)
			return others_hold(m, at, who) || b->ops->busy(b->arg) ? -EAGAIN : -EDQUOT;
		if (wait_for_end(b, m))
			return -EAGAIN;
		who->pages -= v->pages;
		unplan(m, v);
		b->suspended++;
		if (!suspend(b, v))
			return -ECANCELED;
	}
	while ((e = b->ops->reserve(b->arg, run, rows)) == -EAGAIN) {
		v = holder_below(m, at, NULL);
		if (!v) /* what has ended holds its pages until no step names them */
			return others_hold(m, at, NULL) || b->ops->busy(b->arg) ? -EAGAIN : -ENOSPC;
		if (wait_for_end(b, m))
			return -EAGAIN;
		v->q->session->up->pages -= v->pages;
		unplan(m, v);
		b->suspended++;
		if (!suspend(b, v))
			return -ECANCELED;
	}
	if (!e) {
		run->pages += extra;
		who->pages += extra;
	}
	return e;
}

static void add_part(struct making *m, uint32_t at, uint32_t rows, bool decode)
{
	struct batch_plan *p = m->p;
	uint32_t i = 0;

	while (i < p->n && p->part[i].run != m->run[at])
		i++;
	if (i == p->n)
		p->part[p->n++] = (struct batch_part){ m->run[at], 0, decode };
	p->part[i].rows += rows;
	p->rows_left -= rows;
	p->decode_rows += decode ? rows : 0;
	p->prefill_rows += decode ? 0 : rows;
}

/* False: a request has gone, start over. */
static bool give(struct batch *b, struct making *m, uint32_t at, uint32_t rows, bool decode)
{
	int e = get_pages(b, m, at, m->got[at] + rows);

	if (e == -EAGAIN || e == 0) {
		m->blocked[at] = e != 0;
		if (!e) {
			m->got[at] += rows;
			add_part(m, at, rows, decode);
		}
		return true;
	}
	if (e != -ECANCELED)
		b->ops->fail(b->arg, m->run[at]->q, m->run[at], e);
	return false;
}

static bool gather(struct batch *b, struct making *m, uint64_t now)
{
	rank(b);
	m->n = b->n_runs;
	for (uint32_t i = 0; i < m->n; i++)
		b->rank[i]->q->session->up->pages = 0;
	for (uint32_t i = 0; i < m->n; i++) {
		struct batch_run *run = m->run[i] = b->rank[i];
		struct batch_look *l = &m->look[i];
		b->ops->look(b->arg, run, l);
		run->pages = l->pages;
		run->q->session->up->pages += l->pages;
		m->got[i] = 0;
		m->blocked[i] = run->held || !l->todo;
		if (run->q->deadline && !l->decoding && l->todo &&
		    now + pace_least_ns(&b->pace, l->todo) > run->q->deadline) {
			b->ops->fail(b->arg, run->q, run, -ETIME);
			return false;
		}
	}
	return true;
}

static bool add_decode(struct batch *b, struct making *m)
{
	for (uint32_t i = 0; i < m->n; i++) {
		if (m->blocked[i] || !m->look[i].decoding || !m->p->rows_left)
			continue;
		uint32_t rows = m->look[i].todo < BATCH_FORCED ? m->look[i].todo : BATCH_FORCED;
		if (!give(b, m, i, rows < m->p->rows_left ? rows : m->p->rows_left, true))
			return false;
	}
	return true;
}

static bool wants_prompt(const struct making *m, uint32_t i, unsigned cls)
{
	return !m->blocked[i] && m->run[i]->in && !m->look[i].decoding && m->run[i]->q->cls == cls &&
	       m->got[i] < m->look[i].todo;
}

/* Who has had the fewest prompt rows; of an identity the session that has had least, then the oldest. */
static int fewest(const struct making *m, unsigned cls)
{
	int best = -1;

	for (uint32_t i = 0; i < m->n; i++) {
		if (!wants_prompt(m, i, cls))
			continue;
		const struct fair_flow *s = m->run[i]->q->session, *o = best < 0 ? NULL : m->run[best]->q->session;
		if (!o || s->up->dealt < o->up->dealt ||
		    (s->up == o->up &&
		     (s->work < o->work || (s == o && m->run[i]->age < m->run[best]->age))))
			best = (int)i;
	}
	return best;
}

/* An identity that had no prompts lately starts where the others are. */
static void catch_up(struct batch *b, const struct making *m)
{
	uint64_t least = UINT64_MAX;

	for (uint32_t i = 0; i < m->n; i++) {
		struct fair_flow *who = m->run[i]->q->session->up;
		if (m->look[i].decoding || !m->look[i].todo)
			continue;
		if (who->dealt < b->dealt)
			who->dealt = b->dealt;
		least = who->dealt < least ? who->dealt : least;
	}
	if (least != UINT64_MAX)
		b->dealt = least;
}

static bool add_prompts(struct batch *b, struct making *m, unsigned cls)
{
	struct batch_plan *p = m->p;
	bool low = cls == FAIR_CLASSES - 1;
	uint32_t most = pace_chunk(&b->pace, p->decode_rows, b->max_rows, low ? LOW_PART : WHOLE);
	int i;

	if (low && p->prefill_rows)
		return true; /* somebody waits for this step */
	while (p->rows_left && p->prefill_rows < most && (i = fewest(m, cls)) >= 0) {
		struct fair_flow *who = m->run[i]->q->session->up;
		uint32_t rows = m->look[i].todo - m->got[i], had = m->got[i];
		uint32_t left = most - p->prefill_rows < p->rows_left ? most - p->prefill_rows : p->rows_left;
		rows = rows < BATCH_QUANTUM ? rows : BATCH_QUANTUM;
		if (!give(b, m, (uint32_t)i, rows < left ? rows : left, false))
			return false;
		who->dealt += (uint64_t)(m->got[i] - had) * FAIR_UNIT / who->weight;
	}
	return true;
}

static bool attempt(struct batch *b, struct making *m, uint64_t now)
{
	*m->p = (struct batch_plan){ .rows_left = b->max_rows };
	if (!gather(b, m, now))
		return false;
	catch_up(b, m);
	if (!add_decode(b, m))
		return false;
	for (unsigned cls = 0; cls < FAIR_CLASSES; cls++)
		if (!add_prompts(b, m, cls))
			return false;
	return true;
}

/* Samples that wait for their prompt to be computed by the first. */
static void look_at_firsts(struct batch *b)
{
	for (uint32_t i = 0; i < b->n_runs; i++) {
		struct batch_look l;
		struct batch_run *run = b->run[i];
		if (run->q->first != run)
			continue;
		b->ops->look(b->arg, run, &l);
		if (l.known > run->q->prompt) {
			first_done(b, run->q);
			i = UINT32_MAX; /* anew: a request may have gone */
		}
	}
}

bool batch_make(struct batch *b, struct batch_plan *p, uint64_t now)
{
	struct making m = { .p = p };

	p->wait = false;
	p->n = 0;
	batch_late(b, now);
	look_at_firsts(b);
	if (b->waiting || b->out)
		admit(b, p);
	if (p->wait)
		return false;
	while (!attempt(b, &m, now))
		;
	if (p->wait)
		return false;
	for (uint32_t i = 0; i < p->n; i++)
		if (p->part[i].decode)
			fair_charge(p->part[i].run->q->session, p->part[i].rows);
	return p->n != 0;
}

void batch_done(struct batch *b, uint32_t decode_rows, uint32_t prefill_rows, uint64_t ns)
{
	pace_learn(&b->pace, decode_rows, prefill_rows, ns);
}
