/* SPDX-License-Identifier: MIT */
/*
 * An event loop: descriptors to watch, frames to receive, sockets to close.
 *
 * Owns: io_uring (loop_uring.c) and, where the kernel or the container does not
 * allow it, epoll (loop_epoll.c), behind the same few calls. Does not own what an
 * event means.
 *
 * A loop belongs to one thread. A watch is named by a u64 that is never used again,
 * so a late event of a removed watch reaches nobody. Callbacks may add and remove
 * watches, their own included.
 *
 * Client sockets: a client can pass a descriptor whose mere closing blocks (a TCP
 * socket with SO_LINGER), and dropping it from a message or a queue closes it. So
 * receiving and closing never happen on the loop's own thread: io_uring does them
 * on its workers (IOSQE_ASYNC), epoll receives descriptors instead of dropping them
 * and leaves closing to threads of its own.
 */
#ifndef APRD_LOOP_H
#define APRD_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct loop;
typedef void (*loop_ready_fn)(void *arg, uint32_t events); /* POLLIN, ... */
/* A datagram of len bytes (more than its buffer holds: -EMSGSIZE); 0 = hang-up; else -errno. */
typedef void (*loop_frame_fn)(void *arg, const void *buf, int len);

/* why: one line where io_uring was wanted and could not be had. Where it is NULL or env APR_LOOP=epoll
 * says so, epoll. 0 or -errno. */
int loop_new(struct loop **out, char *why, size_t n);
void loop_free(struct loop *l); /* nothing may be watched but polls */
const char *loop_name(const struct loop *l); /* "io_uring", "epoll" */

/* Level-triggered unless edge (then fn runs once a change, and nothing is read). 0 = out of memory. */
uint64_t loop_poll(struct loop *l, int fd, uint32_t events, bool edge, loop_ready_fn fn, void *arg);
void loop_unpoll(struct loop *l, uint64_t id); /* then close the descriptor when you like; 0 is ignored */

/* Takes fd over: every datagram of at most cap bytes goes to fn. */
uint64_t loop_socket(struct loop *l, int fd, uint32_t cap, loop_frame_fn fn, void *arg);
/* No callback any more; shut down and closed in its own time. 0 is ignored. */
void loop_hangup(struct loop *l, uint64_t id);
/* Sockets that are being closed. */
size_t loop_closing(const struct loop *l);

/* Runs callbacks. timeout_ns 0 = only what is there, UINT64_MAX = until something is. */
void loop_run(struct loop *l, uint64_t timeout_ns);
/* May something be there? Costs no system call with io_uring; always true with epoll. */
bool loop_maybe(const struct loop *l);

/* ---- between loop.c and the two kinds ------------------------------------------ */

enum watch_kind { WATCH_FREE, WATCH_POLL, WATCH_SOCKET, WATCH_CLOSING };
struct watch {
	enum watch_kind kind;
	uint32_t gen, index;
	int fd;
	uint32_t events;
	bool edge, receiving, armed; /* armed: a multishot poll stands */
	loop_ready_fn ready;
	loop_frame_fn frame;
	void *arg;
	uint8_t *buf;
	uint32_t cap;
};

struct loop_kind {
	const char *name;
	int (*init)(struct loop *l);
	void (*fini)(struct loop *l);
	int (*add)(struct loop *l, struct watch *w);
	void (*remove)(struct loop *l, struct watch *w);  /* a poll; then watch_release */
	void (*hangup)(struct loop *l, struct watch *w);  /* a socket; then watch_release, in time */
	void (*run)(struct loop *l, uint64_t timeout_ns);
	bool (*maybe)(const struct loop *l);
};
extern const struct loop_kind loop_uring, loop_epoll;

struct loop {
	const struct loop_kind *kind;
	void *impl;
	struct watch **watches;
	uint32_t n_watches, cap_watches;
	uint32_t *free_list; /* cap_watches entries */
	uint32_t n_free;
	size_t closing;
};
struct watch *watch_find(const struct loop *l, uint64_t id);
uint64_t watch_id(const struct watch *w);
void watch_release(struct loop *l, struct watch *w);

#endif
