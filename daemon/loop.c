/* SPDX-License-Identifier: MIT */
/* Owns: the table of watches and the choice of a kind. See loop.h. */
#include "daemon/loop.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

int loop_new(struct loop **out, char *why, size_t n)
{
	const char *env = getenv("APR_LOOP");
	struct loop *l = calloc(1, sizeof(*l));
	int e = -EOPNOTSUPP;

	if (!l)
		return -ENOMEM;
	if (why && n)
		*why = '\0';
	if (env && !strcmp(env, "epoll")) {
		if (why)
			snprintf(why, n, "APR_LOOP=epoll");
	} else {
		l->kind = &loop_uring;
		e = l->kind->init(l);
		if (e && why)
			snprintf(why, n, "io_uring: %s", strerror(-e));
	}
	if (e) {
		l->kind = &loop_epoll;
		e = l->kind->init(l);
	}
	if (e) {
		free(l);
		return e;
	}
	*out = l;
	return 0;
}

void loop_free(struct loop *l)
{
	if (!l)
		return;
	l->kind->fini(l);
	for (uint32_t i = 0; i < l->n_watches; i++) {
		free(l->watches[i]->buf);
		free(l->watches[i]);
	}
	free(l->watches);
	free(l->free_list);
	free(l);
}

const char *loop_name(const struct loop *l)
{
	return l->kind->name;
}

uint64_t watch_id(const struct watch *w)
{
	return (uint64_t)w->gen << 32 | w->index;
}

struct watch *watch_find(const struct loop *l, uint64_t id)
{
	uint32_t index = (uint32_t)id;

	if (index >= l->n_watches)
		return NULL;
	struct watch *w = l->watches[index];
	return w->kind != WATCH_FREE && w->gen == (uint32_t)(id >> 32) ? w : NULL;
}

static int grow(struct loop *l)
{
	uint32_t cap = l->cap_watches ? l->cap_watches * 2 : 64;
	struct watch **all = reallocarray(l->watches, cap, sizeof(struct watch *));

	if (!all)
		return -ENOMEM;
	l->watches = all;
	uint32_t *spare = reallocarray(l->free_list, cap, sizeof(*spare));
	if (!spare)
		return -ENOMEM;
	l->free_list = spare;
	l->cap_watches = cap;
	return 0;
}

static struct watch *watch_new(struct loop *l)
{
	if (l->n_free) {
		struct watch *w = l->watches[l->free_list[--l->n_free]];
		uint32_t gen = w->gen, index = w->index;
		memset(w, 0, sizeof(*w));
		w->gen = gen;
		w->index = index;
		return w;
	}
	if (l->n_watches == l->cap_watches && grow(l))
		return NULL;
	struct watch *w = calloc(1, sizeof(*w));
	if (!w)
		return NULL;
	w->index = l->n_watches;
	w->gen = 1;
	l->watches[l->n_watches++] = w;
	return w;
}

void watch_release(struct loop *l, struct watch *w)
{
	free(w->buf);
	w->buf = NULL;
	if (w->kind == WATCH_CLOSING)
		l->closing--;
	w->kind = WATCH_FREE;
	w->gen = (w->gen + 1) & 0x7fffffff; /* the top bit is the kinds' own */
	if (!w->gen)
		w->gen = 1;
	l->free_list[l->n_free++] = w->index;
}

static uint64_t add(struct loop *l, struct watch *w)
{
	if (l->kind->add(l, w)) {
		watch_release(l, w);
		return 0;
	}
	return watch_id(w);
}

uint64_t loop_poll(struct loop *l, int fd, uint32_t events, bool edge, loop_ready_fn fn, void *arg)
{
	struct watch *w = watch_new(l);

	if (!w)
		return 0;
	w->kind = WATCH_POLL;
	w->fd = fd;
	w->events = events;
	w->edge = edge;
	w->ready = fn;
	w->arg = arg;
	return add(l, w);
}

void loop_unpoll(struct loop *l, uint64_t id)
{
	struct watch *w = id ? watch_find(l, id) : NULL;

	if (w && w->kind == WATCH_POLL)
		l->kind->remove(l, w);
}

uint64_t loop_socket(struct loop *l, int fd, uint32_t cap, loop_frame_fn fn, void *arg)
{
	struct watch *w = watch_new(l);

	if (!w)
		return 0;
	w->kind = WATCH_SOCKET;
	w->fd = fd;
	w->frame = fn;
	w->arg = arg;
	w->cap = cap;
	w->buf = malloc(cap);
	if (!w->buf) {
		watch_release(l, w);
		return 0;
	}
	return add(l, w);
}

void loop_hangup(struct loop *l, uint64_t id)
{
	struct watch *w = id ? watch_find(l, id) : NULL;

	if (!w || w->kind != WATCH_SOCKET)
		return;
	w->kind = WATCH_CLOSING;
	l->closing++;
	shutdown(w->fd, SHUT_RDWR); /* the peer sees it now, whatever closing takes */
	l->kind->hangup(l, w);
}

size_t loop_closing(const struct loop *l)
{
	return l->closing;
}

void loop_run(struct loop *l, uint64_t timeout_ns)
{
	l->kind->run(l, timeout_ns);
}

bool loop_maybe(const struct loop *l)
{
	return l->kind->maybe(l);
}
