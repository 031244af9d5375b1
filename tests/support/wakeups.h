/* SPDX-License-Identifier: MIT */
/*
 * Looks for lost wake-ups: many requests, one at a time, each followed by a random
 * pause of 0 to 50 µs, so that client and daemon fall asleep at every moment of
 * the other's wake-up. Shared by the test (short) and the bench (a million).
 */
#ifndef APR_TEST_WAKEUPS_H
#define APR_TEST_WAKEUPS_H

#include <stdint.h>

struct wakeup_tally {
	uint64_t requests;
	uint64_t slept;     /* waits in which this thread really slept (voluntary context switches) */
	uint64_t over_1s;   /* waits above a second: a lost wake-up that a time slice mended, or worse */
	uint64_t failed;    /* wrong answers and time-outs of 5 s */
	double longest_s;
};

/* One-by-one NOPs (tokens 0) or generate requests of one token each over a session that never spins. 0 or -errno. */
int wakeup_run(const char *sock, uint64_t n, uint32_t tokens, uint64_t seed, struct wakeup_tally *t);

#endif
