/* SPDX-License-Identifier: MIT */
/*
 * Counters that an operator watches: times as histograms, ends by outcome.
 *
 * Owns: the buckets and outcomes. One thread, the core's, counts (two plain additions, no lock and no call); the io
 * thread reads what stands there (status.c), its loads being the partners of these stores. Does not own how they
 * are printed: aprctl metrics does.
 */
#ifndef APRD_METRICS_H
#define APRD_METRICS_H

#include <errno.h>
#include <stdint.h>

enum { TIMES = 24, TIMES_FIRST_US = 32 }; /* bucket i: at most 32 us << i; the last one: whatever is longer */

struct times {
	uint64_t n[TIMES], sum_ns;
};

enum outcome { OUTCOME_OK, OUTCOME_CANCELLED, OUTCOME_TIMEOUT, OUTCOME_QUOTA, OUTCOME_SHUTDOWN, OUTCOME_ERROR, OUTCOMES };

struct metrics {
	struct times step, queue, first, gap;
	uint64_t outcomes[OUTCOMES], refused;
};

static inline void metrics_add(uint64_t *to, uint64_t n)
{
	__atomic_store_n(to, *to + n, __ATOMIC_RELAXED);
}

static inline void metrics_time(struct times *t, uint64_t ns)
{
	uint64_t over = (ns ? ns - 1 : 0) / (TIMES_FIRST_US * UINT64_C(1000));
	int i = over ? 64 - __builtin_clzll(over) : 0;

	metrics_add(&t->n[i < TIMES ? i : TIMES - 1], 1);
	metrics_add(&t->sum_ns, ns);
}

static inline enum outcome metrics_outcome(int err)
{
	switch (err) {
	case 0: return OUTCOME_OK;
	case -ECANCELED: return OUTCOME_CANCELLED;
	case -ETIME:
	case -ETIMEDOUT: return OUTCOME_TIMEOUT;
	case -EDQUOT: return OUTCOME_QUOTA;
	case -ESHUTDOWN: return OUTCOME_SHUTDOWN;
	default: return OUTCOME_ERROR;
	}
}

#endif
