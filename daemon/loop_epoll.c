/* SPDX-License-Identifier: MIT */
/*
 * Owns: the loop on epoll, and the threads on which descriptors of clients are
 * closed there. See loop.h.
 *
 * A closing thread can hang for as long as a client's descriptor makes it. So a
 * thread that is not back within CLOSE_SLOW_MS is left to itself and another takes
 * over, up to CLOSERS.
 */
#include "daemon/loop.h"
#include "shm/wake.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BATCH = 64, CLOSERS = 8, CLOSE_SLOW_MS = 100, MAX_FDS = 253 };

struct doomed {
	struct doomed *next;
	int fd;
	uint64_t watch; /* 0 = a descriptor that a client sent */
};

/* shared by loop and closers; the last to leave frees it */
struct closer {
	pthread_mutex_t lock;
	pthread_cond_t some;
	struct doomed *todo, **tail, *done;
	unsigned threads, idle, refs;
	bool stop;
	int efd; /* tells the loop that something is done */
};

struct impl {
	int ep;
	struct closer *closer;
	uint64_t waiting_since; /* ns: something to close and nobody idle; 0 = not so */
};

static struct impl *impl_of(const struct loop *l)
{
	return l->impl;
}

static void closer_unref(struct closer *c) /* with the lock held; gives it back */
{
	bool last = --c->refs == 0;

	pthread_mutex_unlock(&c->lock);
	if (!last)
		return;
	while (c->done) {
		struct doomed *d = c->done;
		c->done = d->next;
		free(d);
	}
	close(c->efd);
	pthread_cond_destroy(&c->some);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

static void *closer_main(void *arg)
{
	struct closer *c = arg;

	pthread_mutex_lock(&c->lock);
	for (;;) {
		while (!c->todo && !c->stop) {
			c->idle++;
			pthread_cond_wait(&c->some, &c->lock);
			c->idle--;
		}
		struct doomed *d = c->todo;
		if (!d)
			break;
		c->todo = d->next;
		if (!c->todo)
			c->tail = &c->todo;
		pthread_mutex_unlock(&c->lock);
		close(d->fd);
		pthread_mutex_lock(&c->lock);
		d->next = c->done;
		c->done = d;
		apr_doorbell_ring(c->efd);
	}
	c->threads--;
	closer_unref(c);
	return NULL;
}

static void closer_more(struct closer *c) /* with the lock held */
{
	pthread_t t;
	pthread_attr_t a;
	sigset_t all, old;

	if (c->threads >= CLOSERS || pthread_attr_init(&a))
		return;
	pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&a, 65536);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	if (!pthread_create(&t, &a, closer_main, c)) {
		c->threads++;
		c->refs++;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&a);
}

static void doom(struct loop *l, int fd, uint64_t watch)
{
	struct closer *c = impl_of(l)->closer;
	struct doomed *d = malloc(sizeof(*d));

	if (!d) { /* nothing better is left */
		close(fd);
		if (watch)
			watch_release(l, watch_find(l, watch));
		return;
	}
	d->next = NULL;
	d->fd = fd;
	d->watch = watch;
	pthread_mutex_lock(&c->lock);
	*c->tail = d;
	c->tail = &d->next;
	if (!c->threads)
		closer_more(c);
	pthread_cond_signal(&c->some);
	pthread_mutex_unlock(&c->lock);
}

static void reap(struct loop *l)
{
	struct closer *c = impl_of(l)->closer;
	uint64_t n, now = apr_now_ns();

	(void)!read(c->efd, &n, sizeof(n));
	pthread_mutex_lock(&c->lock);
	struct doomed *done = c->done;
	c->done = NULL;
	if (!c->todo || c->idle) {
		impl_of(l)->waiting_since = 0;
	} else if (!impl_of(l)->waiting_since) {
		impl_of(l)->waiting_since = now;
	} else if (now - impl_of(l)->waiting_since > CLOSE_SLOW_MS * 1000000ull) {
		closer_more(c);
		impl_of(l)->waiting_since = now;
	}
	pthread_mutex_unlock(&c->lock);
	while (done) {
		struct doomed *d = done;
		struct watch *w = d->watch ? watch_find(l, d->watch) : NULL;
		done = d->next;
		if (w)
			watch_release(l, w);
		free(d);
	}
}

static int init(struct loop *l)
{
	struct impl *m = calloc(1, sizeof(*m));
	struct closer *c = calloc(1, sizeof(*c));
	int e = -ENOMEM;

	if (!m || !c)
		goto fail;
	c->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	m->ep = epoll_create1(EPOLL_CLOEXEC);
	e = -errno;
	if (c->efd < 0 || m->ep < 0)
		goto fail_fds;
	struct epoll_event ev = { .events = EPOLLIN, .data.u64 = 0 };
	if (epoll_ctl(m->ep, EPOLL_CTL_ADD, c->efd, &ev)) {
		e = -errno;
		goto fail_fds;
	}
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->some, NULL);
	c->tail = &c->todo;
	c->refs = 1;
	m->closer = c;
	l->impl = m;
	return 0;
fail_fds:
	if (c->efd >= 0)
		close(c->efd);
	if (m->ep >= 0)
		close(m->ep);
fail:
	free(m);
	free(c);
	return e;
}

static void fini(struct loop *l)
{
	struct impl *m = impl_of(l);

	pthread_mutex_lock(&m->closer->lock);
	m->closer->stop = true;
	pthread_cond_broadcast(&m->closer->some);
	closer_unref(m->closer);
	close(m->ep);
	free(m);
}

static int add(struct loop *l, struct watch *w)
{
	struct epoll_event ev = { .events = w->kind == WATCH_SOCKET ? EPOLLIN | EPOLLRDHUP : w->events,
				  .data.u64 = watch_id(w) };

	if (w->edge)
		ev.events |= EPOLLET;
	return epoll_ctl(impl_of(l)->ep, EPOLL_CTL_ADD, w->fd, &ev) ? -errno : 0;
}

static void remove_poll(struct loop *l, struct watch *w)
{
	epoll_ctl(impl_of(l)->ep, EPOLL_CTL_DEL, w->fd, NULL);
	watch_release(l, w);
}

static void hangup(struct loop *l, struct watch *w)
{
	epoll_ctl(impl_of(l)->ep, EPOLL_CTL_DEL, w->fd, NULL);
	doom(l, w->fd, watch_id(w));
}

/* One datagram. Whatever descriptors came with it are received, not dropped, and then doomed. */
static int receive(struct loop *l, struct watch *w)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(MAX_FDS * sizeof(int))];
	} control;
	struct iovec iov = { w->buf, w->cap };
	struct msghdr msg = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
	};
	ssize_t n = recvmsg(w->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC | MSG_TRUNC);

	if (n < 0)
		return -errno;
	for (struct cmsghdr *h = CMSG_FIRSTHDR(&msg); h; h = CMSG_NXTHDR(&msg, h)) {
		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		size_t fds = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < fds; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(h) + i * sizeof(fd), sizeof(fd));
			doom(l, fd, 0);
		}
	}
	return (size_t)n > w->cap ? -EMSGSIZE : (int)n;
}

static void dispatch(struct loop *l, uint64_t id, uint32_t events)
{
	struct watch *w = id ? watch_find(l, id) : NULL;

	if (!id) {
		reap(l);
	} else if (w && w->kind == WATCH_POLL) {
		w->ready(w->arg, events);
	} else if (w && w->kind == WATCH_SOCKET) {
		int n = receive(l, w); /* one a turn: no client has the loop for itself */
		if (n != -EAGAIN && n != -EINTR)
			w->frame(w->arg, w->buf, n);
	}
}

static void run(struct loop *l, uint64_t timeout_ns)
{
	struct epoll_event ev[BATCH];
	int ms = timeout_ns == UINT64_MAX	   ? -1
		 : timeout_ns / 1000000u > 3600000 ? 3600000
						   : (int)((timeout_ns + 999999) / 1000000);

	if (l->closing && (ms < 0 || ms > CLOSE_SLOW_MS)) /* looks after the closers */
		ms = CLOSE_SLOW_MS;
	int n = epoll_wait(impl_of(l)->ep, ev, BATCH, ms);
	for (int i = 0; i < n; i++)
		dispatch(l, ev[i].data.u64, ev[i].events);
	if (l->closing)
		reap(l);
}

static bool maybe(const struct loop *l)
{
	(void)l;
	return true;
}

const struct loop_kind loop_epoll = { "epoll", init, fini, add, remove_poll, hangup, run, maybe };
