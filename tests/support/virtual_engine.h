/* SPDX-License-Identifier: MIT */
/*
 * The other side of batch.h on a virtual clock: sequences that are counts, pages that
 * are counted, steps that take what a function says. For tests/daemon/test_batch.c and
 * bench/bench_simulate.c, which drive the daemon's own scheduling code by it.
 */
#ifndef TESTS_SUPPORT_VIRTUAL_ENGINE_H
#define TESTS_SUPPORT_VIRTUAL_ENGINE_H

#include "daemon/batch.h"

struct vreq;

struct vrun {
	struct batch_run b;
	struct vreq *r;
	uint32_t known, computed, end; /* positions; end: known at which it ends */
	uint32_t pages, shared;        /* its own; those it found */
	uint64_t last;      /* ns: when its last token came */
	uint64_t last_step; /* number of the last step that had a row of it */
	bool live;
};

struct vreq {
	struct batch_req q;
	struct vrun *run; /* [n], the caller's */
	void *user;
	uint64_t identity, session, arrived, first, ended; /* ns; 0 not yet */
	uint64_t arrived_step, started_step, ended_step;
	uint32_t weight, tokens; /* tokens it generates, a run */
	uint32_t cached;         /* rows of its prompt that the prefix cache has */
	uint32_t running;        /* runs that have begun and not ended */
	uint32_t done;
	int result;              /* 1 unfinished, 0, or -errno */
};

struct vengine {
	struct batch b;
	uint64_t now, step, busy_ns;
	uint32_t pages_total, pages_free, slots_free;
	double (*step_ns)(void *arg, uint32_t decode, uint32_t prefill);
	void *step_arg;
	void (*on_token)(struct vengine *v, struct vrun *run, uint64_t gap_ns); /* gap 0: the first; may be NULL */
	void (*on_end)(struct vengine *v, struct vreq *r);                      /* may be NULL */
	struct batch_plan plan;
	uint64_t plan_ns, plan_ns_most, tokens, rows; /* real time that making plans took; tokens and prompt rows given */
	void *user;
};

int vengine_init(struct vengine *v, uint32_t pages, uint32_t max_rows);
void vengine_fini(struct vengine *v);
/* q.prompt, q.n, q.cls, q.deadline, q.max_pages, identity, session, weight, tokens and run are set. 0 or -errno. */
int vengine_submit(struct vengine *v, struct vreq *r);
void vengine_cancel(struct vengine *v, struct vreq *r);
/* One step: false: nothing to do. */
bool vengine_step(struct vengine *v);

#endif
