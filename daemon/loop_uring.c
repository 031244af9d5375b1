/* SPDX-License-Identifier: MIT */
/*
 * Owns: the loop on io_uring. See loop.h.
 *
 * The ring is made disabled and restricted to the four operations below before it
 * is enabled, since io_uring works beside a seccomp filter. Readiness comes from
 * multishot polls, which tell of changes and so are edge-triggered by nature; a
 * level-triggered watch is a one-shot poll armed again after each callback. A
 * socket's poll is followed by receives on the kernel's workers until it is empty.
 */
#include "daemon/loop.h"
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ENTRIES = 256, BATCH = 64 };

/* user_data: a watch's id, the top bit set for a receive or a close; 0 = nobody waits for it */
#define DATA_OP (UINT64_C(1) << 63)

static struct io_uring *ring_of(const struct loop *l)
{
	return l->impl;
}

/* liburing 2.3's shared library exports no call for these two registrations */
static int registrar(struct io_uring *ring, unsigned op, const void *arg, unsigned n)
{
	return syscall(SYS_io_uring_register, ring->ring_fd, op, arg, n) < 0 ? -errno : 0;
}

static int restrict_to(struct io_uring *ring)
{
	struct io_uring_restriction r[] = {
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_POLL_ADD },
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_ASYNC_CANCEL },
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_RECV },
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_CLOSE },
		{ .opcode = IORING_RESTRICTION_SQE_FLAGS_ALLOWED, .sqe_flags = IOSQE_ASYNC },
		/* a restricted ring takes no registration at all but this one */
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = IORING_REGISTER_ENABLE_RINGS },
	};

	return registrar(ring, IORING_REGISTER_RESTRICTIONS, r, sizeof(r) / sizeof(r[0]));
}

static int init(struct loop *l)
{
	struct io_uring *ring = calloc(1, sizeof(*ring));
	struct io_uring_params p = { .flags = IORING_SETUP_R_DISABLED | IORING_SETUP_CQSIZE,
				     .cq_entries = 8 * ENTRIES };

	if (!ring)
		return -ENOMEM;
	int e = io_uring_queue_init_params(ENTRIES, ring, &p);
	if (e) {
		free(ring);
		return e;
	}
	if (!(p.features & IORING_FEAT_EXT_ARG) || !(p.features & IORING_FEAT_NODROP)) /* before Linux 5.11 */
		e = -EOPNOTSUPP;
	if (!e)
		e = restrict_to(ring);
	if (!e)
		e = registrar(ring, IORING_REGISTER_ENABLE_RINGS, NULL, 0);
	if (e) {
		io_uring_queue_exit(ring);
		free(ring);
		return e < 0 ? e : -EINVAL;
	}
	l->impl = ring;
	return 0;
}

static void fini(struct loop *l)
{
	io_uring_queue_exit(ring_of(l));
	free(l->impl);
}

static struct io_uring_sqe *sqe(struct loop *l)
{
	struct io_uring_sqe *s = io_uring_get_sqe(ring_of(l));

	if (!s) { /* full: the kernel takes what is there */
		io_uring_submit(ring_of(l));
		s = io_uring_get_sqe(ring_of(l));
	}
	return s;
}

static int arm(struct loop *l, struct watch *w)
{
	struct io_uring_sqe *s = sqe(l);

	if (!s)
		return -EBUSY;
	if (w->kind == WATCH_SOCKET || w->edge) {
		io_uring_prep_poll_multishot(s, w->fd, w->kind == WATCH_SOCKET ? POLLIN | POLLRDHUP : w->events);
	} else {
		io_uring_prep_poll_add(s, w->fd, w->events);
	}
	io_uring_sqe_set_data64(s, watch_id(w));
	w->armed = true;
	return 0;
}

static void receive(struct loop *l, struct watch *w)
{
	struct io_uring_sqe *s = sqe(l);

	if (!s)
		return;
	/* MSG_TRUNC: the true length comes back, so that a frame too long is known for one */
	io_uring_prep_recv(s, w->fd, w->buf, w->cap, MSG_DONTWAIT | MSG_TRUNC);
	io_uring_sqe_set_flags(s, IOSQE_ASYNC);
	io_uring_sqe_set_data64(s, watch_id(w) | DATA_OP);
	w->receiving = true;
}

static void cancel(struct loop *l, struct watch *w)
{
	struct io_uring_sqe *s = w->armed ? sqe(l) : NULL;

	if (!s)
		return;
	io_uring_prep_cancel64(s, watch_id(w), 0);
	io_uring_sqe_set_data64(s, 0);
	w->armed = false;
}

static void remove_poll(struct loop *l, struct watch *w)
{
	cancel(l, w);
	/* out before the caller closes the descriptor: the cancel names the request, not the file */
	watch_release(l, w);
}

static void close_now(struct loop *l, struct watch *w)
{
	struct io_uring_sqe *s = sqe(l);

	if (!s)
		return;
	io_uring_prep_close(s, w->fd);
	io_uring_sqe_set_flags(s, IOSQE_ASYNC);
	io_uring_sqe_set_data64(s, watch_id(w) | DATA_OP);
}

static void hangup(struct loop *l, struct watch *w)
{
	cancel(l, w);
	if (!w->receiving) /* else when the receive has come back, and with it our buffer */
		close_now(l, w);
}

static void on_receive(struct loop *l, struct watch *w, int res)
{
	w->receiving = false;
	if (res == -EAGAIN || res == -EINTR) {
		if (!w->armed)
			arm(l, w);
		return;
	}
	uint64_t id = watch_id(w);
	w->frame(w->arg, w->buf, res > 0 && (uint32_t)res > w->cap ? -EMSGSIZE : res);
	w = watch_find(l, id); /* the callback may have hung up */
	if (w && w->kind == WATCH_SOCKET && res > 0)
		receive(l, w);
}

static void on_op(struct loop *l, struct watch *w, int res)
{
	if (w->kind == WATCH_SOCKET) {
		on_receive(l, w, res);
	} else if (w->receiving) { /* a hang-up waited for this */
		w->receiving = false;
		close_now(l, w);
	} else {
		watch_release(l, w);
	}
}

static void on_poll(struct loop *l, struct watch *w, const struct io_uring_cqe *c)
{
	if (!(c->flags & IORING_CQE_F_MORE))
		w->armed = false;
	if (w->kind == WATCH_SOCKET) {
		if (!w->receiving)
			receive(l, w);
		return;
	}
	uint64_t id = watch_id(w);
	w->ready(w->arg, c->res < 0 ? POLLERR : (uint32_t)c->res);
	w = watch_find(l, id);
	if (w && !w->armed && c->res != -ECANCELED)
		arm(l, w);
}

static void run(struct loop *l, uint64_t timeout_ns)
{
	struct io_uring *ring = ring_of(l);
	struct io_uring_cqe *cqes[BATCH], *one;
	struct __kernel_timespec t = { (long long)(timeout_ns / 1000000000u), (long long)(timeout_ns % 1000000000u) };
	unsigned n = 0;

	if (!io_uring_cq_ready(ring)) {
		if (!timeout_ns)
			io_uring_submit_and_get_events(ring);
		else
			io_uring_submit_and_wait_timeout(ring, &one, 1, timeout_ns == UINT64_MAX ? NULL : &t, NULL);
	} else if (io_uring_sq_ready(ring)) {
		io_uring_submit(ring);
	}
	while ((n = io_uring_peek_batch_cqe(ring, cqes, BATCH))) {
		for (unsigned i = 0; i < n; i++) {
			uint64_t data = io_uring_cqe_get_data64(cqes[i]);
			struct watch *w = data ? watch_find(l, data & ~DATA_OP) : NULL;
			if (w && (data & DATA_OP))
				on_op(l, w, cqes[i]->res);
			else if (w && w->kind != WATCH_CLOSING)
				on_poll(l, w, cqes[i]);
		}
		io_uring_cq_advance(ring, n);
	}
	if (io_uring_sq_ready(ring))
		io_uring_submit(ring);
}

static bool maybe(const struct loop *l)
{
	return io_uring_cq_ready(ring_of(l)) || io_uring_sq_ready(ring_of(l));
}

const struct loop_kind loop_uring = { "io_uring", init, fini, arm, remove_poll, hangup, run, maybe };
