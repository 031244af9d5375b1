/* SPDX-License-Identifier: MIT */
/*
 * A backend that is two deep, without a GPU: the CPU's, with a queue of two steps
 * before it, for tests of what the engine and the daemon do about a token that is not
 * known yet.
 *
 * Owns: the queue, each slot's last token and whether anything follows it, the
 * results' delay. Does not own any arithmetic. A dead row is left out of what the CPU
 * computes and its result is rubbish on purpose: whoever looks at it shows. A step that
 * failed leaves the backend unhealthy.
 */
#ifndef APR_TEST_TWO_DEEP_H
#define APR_TEST_TWO_DEEP_H

#include "engine/backend.h"

struct two_deep_counts { /* since the last reset */
	uint32_t steps, behind; /* behind: submitted while another ran */
	uint32_t last_rows, dead_rows, unseen;
};
extern struct two_deep_counts two_deep_counts;
extern uint32_t two_deep_fail_at; /* the so many-th step from here fails; 0: none */

const struct apr_backend *two_deep_backend(void);
void two_deep_notify(int fd); /* the eventfd, where open was the CPU's */

#endif
