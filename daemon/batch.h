/* SPDX-License-Identifier: MIT */
/*
 * What a step of one model is made of: admission, priority, fairness, preemption,
 * deadlines, the chunk.
 *
 * Owns: which requests wait, which runs have a slot, in what order they are served.
 * Does not own requests and sequences (struct batch_ops leads to them), nor a clock:
 * each call is told the time. So the daemon (scheduler.c) and bench/simulate drive the
 * same code, one by an engine, the other by a table of step times.
 *
 * A step is one row of every run that decodes, then prompt rows up to what the time
 * budget allows. Prompt rows go by class, then to the identity that has had fewest,
 * QUANTUM rows at a time, so short prompts share a step with a piece of a long one.
 *
 * Slots and pages go by rank: class, then a run's number among those of its identity
 * over the weight, then age. So everybody's first run stands before anybody's second:
 * whoever has fewer than others finds a slot and pages at once, taken from the run that
 * ranks last, which is suspended and goes on later with the same bits. The first in
 * rank is never suspended and always moves.
 */
#ifndef APRD_BATCH_H
#define APRD_BATCH_H

#include "daemon/fair.h"
#include "daemon/pace.h"

enum { BATCH_SLOTS = 64, BATCH_FORCED = 64, BATCH_QUANTUM = 128 };

struct batch_req { /* n runs of one prompt */
	struct fair_item wait; /* while it has runs to start */
	struct heap_item due;  /* while it waits and has a deadline: when it is too late to begin */
	struct fair_flow *session; /* held */
	uint64_t deadline;     /* ns, of its first token; 0 none */
	uint32_t prompt;       /* tokens */
	uint32_t n, started;
	uint32_t max_pages;    /* of its identity at once; 0 no limit */
	unsigned cls;          /* 0 high, 1 normal, 2 low */
	bool stopped, paused;
	bool after_first;      /* the other runs wait until the first has computed the prompt */
	struct batch_run *first; /* for which they do */
};

struct batch_run {
	struct batch_req *q;
	struct fair_item wait; /* suspended: until it has a slot again */
	uint64_t age, nth;     /* smaller: admitted earlier; its number in its identity, over the weight */
	uint32_t pages;        /* as of the last look */
	bool in;               /* has a slot */
	bool out;              /* suspended */
	bool held;             /* neither stepped nor resumed: its output has no room */
};

struct batch_look {
	uint32_t todo;            /* rows that can be computed now; 0: it has ended */
	uint32_t known, computed; /* positions */
	uint32_t pages;           /* that it holds */
	bool decoding;
};

struct batch_ops {
	/* The next run of q, into a slot. 0: *run, and the rows of the prompt that were there already. 1 or -errno: there
	 * is none, and what was to be told is told; q may be gone. */
	int (*start)(void *arg, struct batch_req *q, struct batch_run **run, uint32_t *cached);
	void (*look)(void *arg, const struct batch_run *run, struct batch_look *l);
	/* Pages for the next rows: 0; -EAGAIN none are free; -ENOSPC there can never be enough. */
	int (*reserve)(void *arg, struct batch_run *run, uint32_t rows);
	void (*suspend)(void *arg, struct batch_run *run); /* gives up slot and pages */
	int (*resume)(void *arg, struct batch_run *run);   /* a slot again */
	bool (*busy)(void *arg);                           /* is a step in flight? Then nothing is suspended */
	bool (*room)(void *arg, uint32_t positions);       /* are pages for so many free now? */
	uint32_t (*peek)(void *arg, const struct batch_req *q); /* rows of its prompt that need not be computed */
	/* q cannot go on: -ETIME its deadline cannot be met; -ENOSPC, -EDQUOT its pages can never be had; -ENOMEM. It
	 * leaves by batch_leave before this returns. run: which, or NULL. */
	void (*fail)(void *arg, struct batch_req *q, struct batch_run *run, int err);
};

struct batch_part {
	struct batch_run *run;
	uint32_t rows;
	bool decode;
};

struct batch_plan {
	struct batch_part part[BATCH_SLOTS];
	uint32_t n, rows_left, decode_rows, prefill_rows;
	bool wait; /* somebody must give way: the steps in flight end first, and nothing is planned */
};

struct batch {
	const struct batch_ops *ops;
	void *arg;
	struct fair fair;
	struct pace pace;
	struct heap due;
	struct batch_run *run[BATCH_SLOTS];  /* oldest first */
	struct batch_run *rank[BATCH_SLOTS]; /* the first in rank first */
	uint32_t n_runs, max_rows;
	bool ranked;       /* rank is as it should be */
	uint64_t admitted; /* runs so far: their age */
	uint64_t dealt;    /* the least dealt of any identity that has prompts, so far */
	uint64_t suspended; /* how often, for status */
	uint32_t waiting;  /* requests with runs to start */
	uint32_t out;      /* suspended runs */
};

int batch_init(struct batch *b, const struct batch_ops *ops, void *arg, uint32_t max_rows);
void batch_fini(struct batch *b); /* no request is left */

/* q's fields up to cls are set, but session. -ETIME: its deadline cannot be met; -ENOMEM. */
int batch_enter(struct batch *b, struct batch_req *q, uint64_t identity, uint32_t weight, uint64_t session, uint64_t now);
/* Nothing of q starts any more. */
void batch_stop(struct batch *b, struct batch_req *q);
void batch_run_ended(struct batch *b, struct batch_run *run); /* in a slot, suspended or neither */
void batch_leave(struct batch *b, struct batch_req *q);        /* its runs have ended */
void batch_hold(struct batch *b, struct batch_run *run, bool give_up); /* no row for it; give_up: nor pages */
int batch_unhold(struct batch *b, struct batch_run *run);
void batch_pause(struct batch *b, struct batch_req *q); /* no more of its runs start until batch_go_on */
int batch_go_on(struct batch *b, struct batch_req *q);

/* Fails what is too late, gives slots to who is next, and makes a step, also while one is in flight. False: there is
 * nothing to compute now. */
bool batch_make(struct batch *b, struct batch_plan *p, uint64_t now);
/* A step of so many rows took so long. */
void batch_done(struct batch *b, uint32_t decode_rows, uint32_t prefill_rows, uint64_t ns);
uint64_t batch_next_due(const struct batch *b); /* when batch_late has something to do; UINT64_MAX never */
bool batch_late(struct batch *b, uint64_t now);

#endif
