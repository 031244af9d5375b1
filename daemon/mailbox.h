/* SPDX-License-Identifier: MIT */
/*
 * How the worker's threads hand things to each other: letters that run on the thread
 * that reads them.
 *
 * Owns: the list, and waking a reader that sleeps. Does not own what letters carry:
 * a struct mail lies inside what it is about, and may be posted again once its fn runs.
 */
#ifndef APRD_MAILBOX_H
#define APRD_MAILBOX_H

#include <pthread.h>
#include <stdbool.h>

struct mail {
	struct mail *next;
	void (*fn)(void *reader, struct mail *m);
};

struct mailbox {
	pthread_mutex_t lock;
	struct mail *head, **tail;
	bool some;     /* atomic; something is in the list */
	bool sleeping; /* atomic; the reader waits on efd */
	int efd;
};

int mailbox_init(struct mailbox *b); /* 0 or -errno */
void mailbox_fini(struct mailbox *b);
void mailbox_post(struct mailbox *b, struct mail *m); /* any thread; in order */
static inline bool mailbox_some(const struct mailbox *b)
{
	return __atomic_load_n(&b->some, __ATOMIC_RELAXED);
}
bool mailbox_read(struct mailbox *b, void *reader); /* runs all; false: there was none */
/* Before the reader sleeps: true, go to sleep (efd becomes readable when mail comes). */
bool mailbox_sleep(struct mailbox *b);
void mailbox_awake(struct mailbox *b);

#endif
