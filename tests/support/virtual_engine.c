/* SPDX-License-Identifier: MIT */
/* See virtual_engine.h. */
#include "tests/support/virtual_engine.h"
#include <errno.h>
#include <string.h>
#include <time.h>

static struct vrun *run_of(const struct batch_run *b)
{
	return HEAP_OF(b, struct vrun, b);
}

static struct vreq *req_of(const struct batch_req *q)
{
	return HEAP_OF(q, struct vreq, q);
}

static uint32_t pages_for(uint32_t positions)
{
	return (positions + 63) / 64;
}

static void give_back(struct vengine *v, struct vrun *run)
{
	v->pages_free += run->pages;
	run->pages = 0;
}

static void run_over(struct vengine *v, struct vrun *run)
{
	if (!run->live)
		return;
	if (run->b.in)
		v->slots_free++;
	batch_run_ended(&v->b, &run->b);
	give_back(v, run);
	run->live = false;
	run->r->running--;
}

static void end(struct vengine *v, struct vreq *r, int result)
{
	batch_stop(&v->b, &r->q);
	for (uint32_t i = 0; i < r->q.n; i++)
		run_over(v, &r->run[i]);
	batch_leave(&v->b, &r->q);
	r->result = result;
	r->ended = v->now;
	r->ended_step = v->step;
	if (v->on_end)
		v->on_end(v, r);
}

static int op_start(void *arg, struct batch_req *q, struct batch_run **out, uint32_t *cached)
{
	struct vengine *v = arg;
	struct vreq *r = req_of(q);
	struct vrun *run = &r->run[q->started];

	if (pages_for(q->prompt + 1) > v->pages_total) {
		end(v, r, -ENOSPC);
		return -ENOSPC;
	}
	if (!v->slots_free)
		return -EAGAIN;
	v->slots_free--;
	memset(run, 0, sizeof(*run));
	run->r = r;
	run->known = q->prompt;
	run->end = q->prompt + r->tokens;
	/* samples after the first find their prompt's full pages */
	*cached = q->started ? (q->prompt - 1) / 64 * 64 : r->cached;
	run->computed = *cached;
	run->shared = *cached / 64;
	run->live = true;
	r->running++;
	*out = &run->b;
	return 0;
}

static void op_look(void *arg, const struct batch_run *b, struct batch_look *l)
{
	const struct vrun *run = run_of(b);

	(void)arg;
	*l = (struct batch_look){ .todo = run->known - run->computed,
				  .known = run->known,
				  .computed = run->computed,
				  .pages = run->pages,
				  .decoding = run->known > run->r->q.prompt && run->known - run->computed <= 1 };
}

static int op_reserve(void *arg, struct batch_run *b, uint32_t rows)
{
	struct vengine *v = arg;
	struct vrun *run = run_of(b);
	uint32_t all = pages_for(run->computed + rows), want = all > run->shared ? all - run->shared : 0;

	if (want <= run->pages)
		return 0;
	if (want - run->pages > v->pages_free)
		return -EAGAIN;
	v->pages_free -= want - run->pages;
	run->pages = want;
	return 0;
}

static void op_suspend(void *arg, struct batch_run *b)
{
	struct vengine *v = arg;
	struct vrun *run = run_of(b);

	give_back(v, run);
	run->computed = run->shared = 0;
	v->slots_free++;
}

static int op_resume(void *arg, struct batch_run *b)
{
	struct vengine *v = arg;

	(void)b;
	if (!v->slots_free)
		return -EAGAIN;
	v->slots_free--;
	return 0;
}

static bool op_busy(void *arg)
{
	(void)arg;
	return false;
}

static bool op_room(void *arg, uint32_t positions)
{
	return pages_for(positions) <= ((const struct vengine *)arg)->pages_free;
}

static uint32_t op_peek(void *arg, const struct batch_req *q)
{
	(void)arg;
	return q->started ? (q->prompt - 1) / 64 * 64 : req_of(q)->cached;
}

static void op_fail(void *arg, struct batch_req *q, struct batch_run *run, int err)
{
	(void)run;
	end(arg, req_of(q), err);
}

static const struct batch_ops ops = { .start = op_start,
				      .look = op_look,
				      .reserve = op_reserve,
				      .suspend = op_suspend,
				      .resume = op_resume,
				      .busy = op_busy,
				      .room = op_room,
				      .peek = op_peek,
				      .fail = op_fail };

int vengine_init(struct vengine *v, uint32_t pages, uint32_t max_rows)
{
	memset(v, 0, sizeof(*v));
	v->pages_total = v->pages_free = pages;
	v->slots_free = BATCH_SLOTS;
	v->now = 1;
	return batch_init(&v->b, &ops, v, max_rows);
}

void vengine_fini(struct vengine *v)
{
	batch_fini(&v->b);
}

int vengine_submit(struct vengine *v, struct vreq *r)
{
	r->arrived = v->now;
	r->arrived_step = v->step;
	r->result = 1;
	r->q.after_first = r->q.n > 1;
	int e = batch_enter(&v->b, &r->q, r->identity, r->weight ? r->weight : 1, r->session, v->now);
	if (e) {
		r->result = e;
		r->ended = v->now;
	}
	return e;
}

void vengine_cancel(struct vengine *v, struct vreq *r)
{
	if (r->result == 1)
		end(v, r, -ECANCELED);
}

static uint64_t real_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void take_token(struct vengine *v, struct vrun *run)
{
	struct vreq *r = run->r;

	run->known++;
	v->tokens++;
	if (!r->first)
		r->first = v->now;
	if (v->on_token)
		v->on_token(v, run, run->last ? v->now - run->last : 0);
	run->last = v->now;
	if (run->known < run->end)
		return;
	run_over(v, run);
	if (++r->done == r->q.n)
		end(v, r, 0);
}

bool vengine_step(struct vengine *v)
{
	struct batch_plan *p = &v->plan;
	uint64_t began = real_ns();
	bool any = batch_make(&v->b, p, v->now);
	uint64_t took = real_ns() - began;

	v->plan_ns += took;
	v->plan_ns_most = took > v->plan_ns_most ? took : v->plan_ns_most;
	if (!any)
		return false;
	uint64_t ns = (uint64_t)v->step_ns(v->step_arg, p->decode_rows, p->prefill_rows);
	v->now += ns;
	v->busy_ns += ns;
	v->step++;
	v->rows += p->prefill_rows;
	batch_done(&v->b, p->decode_rows, p->prefill_rows, ns);
	for (uint32_t i = 0; i < p->n; i++) {
		struct vrun *run = run_of(p->part[i].run);
		if (!run->live)
			continue;
		run->computed += p->part[i].rows;
		run->last_step = v->step;
		if (!run->r->started_step)
			run->r->started_step = v->step;
		if (run->computed == run->known)
			take_token(v, run);
	}
	return true;
}
