/* SPDX-License-Identifier: MIT */
/* Owns: letters between threads. See mailbox.h. */
#include "daemon/mailbox.h"
#include "shm/wake.h"
#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

int mailbox_init(struct mailbox *b)
{
	memset(b, 0, sizeof(*b));
	b->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (b->efd < 0)
		return -errno;
	b->tail = &b->head;
	pthread_mutex_init(&b->lock, NULL);
	return 0;
}

void mailbox_fini(struct mailbox *b)
{
	if (b->tail) {
		close(b->efd);
		pthread_mutex_destroy(&b->lock);
		b->tail = NULL;
	}
}

void mailbox_post(struct mailbox *b, struct mail *m)
{
	m->next = NULL;
	pthread_mutex_lock(&b->lock);
	*b->tail = m;
	b->tail = &m->next;
	__atomic_store_n(&b->some, true, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&b->lock);
	apr_fence_full(); /* pairs with the fence in mailbox_sleep: some before sleeping */
	if (__atomic_load_n(&b->sleeping, __ATOMIC_RELAXED))
		apr_doorbell_ring(b->efd);
}

bool mailbox_read(struct mailbox *b, void *reader)
{
	if (!mailbox_some(b))
		return false;
	pthread_mutex_lock(&b->lock);
	struct mail *m = b->head;
	b->head = NULL;
	b->tail = &b->head;
	__atomic_store_n(&b->some, false, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&b->lock);
	bool any = m != NULL;
	while (m) {
		struct mail *next = m->next; /* fn may free m or post it again */
		m->fn(reader, m);
		m = next;
	}
	return any;
}

bool mailbox_sleep(struct mailbox *b)
{
	__atomic_store_n(&b->sleeping, true, __ATOMIC_RELAXED);
	apr_fence_full(); /* pairs with the fence in mailbox_post */
	if (!mailbox_some(b))
		return true;
	__atomic_store_n(&b->sleeping, false, __ATOMIC_RELAXED);
	return false;
}

void mailbox_awake(struct mailbox *b)
{
	__atomic_store_n(&b->sleeping, false, __ATOMIC_RELAXED);
}
