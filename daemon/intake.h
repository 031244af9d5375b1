/* SPDX-License-Identifier: MIT */
/*
 * What is done with an input before anything can be computed: copying it out of the
 * client's memory, taking its parameters apart, text to ids and ids to text.
 *
 * Owns: the threads that do it, in order within a session, sessions in turn. Does not
 * own what follows: each request goes back to the core by letter.
 */
#ifndef APRD_INTAKE_H
#define APRD_INTAKE_H

#include "daemon/mailbox.h"
#include "daemon/request.h"

struct intake {
	pthread_mutex_t lock;
	pthread_cond_t some;
	struct session *pool, **pool_tail; /* sessions that have jobs and no thread */
	struct mailbox *core;
	pthread_t threads[8];
	uint32_t n_threads;
	bool stop;
};

int intake_start(struct intake *in, struct mailbox *core, uint32_t threads);
void intake_stop(struct intake *in);
void intake_post(struct intake *in, struct request *r); /* core thread */

/* Parameters and input into private memory. 0, or r->fault is set: -EFAULT (the session is broken), -ENOMEM. */
int intake_copy(struct request *r);
enum { INTAKE_SMALL = 4096 }; /* inputs up to here are copied by the core itself: cheaper than a hand-over */

#endif
