/* SPDX-License-Identifier: MIT */
/*
 * How long a step takes, learnt from those that were: what decode rows cost, and what
 * prompt rows add to them, by row count.
 *
 * Owns: the estimates, and the choice of a chunk by time. Does not own the clock.
 *
 * An estimate rises by half of what it was short and falls by an eighth of what it was
 * over, so it lies near the slow end. A count that was never seen is reckoned on the
 * line through the two next smaller ones, and tried one at a time; one that is believed
 * dear is brought down by what smaller counts show, so that one bad moment does not rule
 * it out for good.
 */
#ifndef APRD_PACE_H
#define APRD_PACE_H

#include <stdint.h>

enum { PACE_DECODE = 7, PACE_PREFILL = 18 };

extern const uint32_t pace_edge[PACE_PREFILL]; /* the row counts that prefill[] is for */

struct pace {
	uint64_t budget_ns;      /* a step with running streams in it shall not take longer; 0 = no limit */
	uint32_t first, least;   /* prompt rows while nothing is known; rows that are always allowed */
	uint64_t decode[PACE_DECODE];   /* ns of a step of 1, 2, 4 … 64 decode rows; 0 = not seen */
	uint64_t prefill[PACE_PREFILL]; /* ns that so many prompt rows add */
	uint64_t best_row, best_step;   /* the least seen: ps a prompt row; ns a step */
};

void pace_learn(struct pace *p, uint32_t decode_rows, uint32_t prefill_rows, uint64_t ns);
uint64_t pace_decode_ns(const struct pace *p, uint32_t rows); /* 0: nothing is known */
uint64_t pace_prefill_ns(const struct pace *p, uint32_t rows);
/* Prompt rows that fit beside so many decode rows: all of max where there are none. part: of the budget, in 16ths. */
uint32_t pace_chunk(const struct pace *p, uint32_t decode_rows, uint32_t max, uint32_t part);
/* The first token after so many prompt rows takes no less than this; 0 while nothing is known. */
uint64_t pace_least_ns(const struct pace *p, uint32_t prompt);

#endif
