/* SPDX-License-Identifier: MIT */
/* A session spoken by hand. See raw.h. */
#include "client/aprctl/raw.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void raw_hello(struct apr_hello *h)
{
	memset(h, 0, sizeof(*h));
	h->hdr = (struct apr_frame){APR_FRAME_MAGIC, APR_FRAME_HELLO, 0, sizeof(*h), 0};
	h->major = APR_ABI_MAJOR;
	h->minor = APR_ABI_MINOR;
	h->sqe_size = sizeof(struct apr_sqe);
	h->cqe_size = sizeof(struct apr_cqe);
	memcpy(h->name, "aprctl", 6);
}

int raw_dial(const char *path)
{
	struct sockaddr_un sa = {.sun_family = AF_UNIX};
	int fd, e;

	if (strlen(path) >= sizeof(sa.sun_path))
		return -ENAMETOOLONG;
	memcpy(sa.sun_path, path, strlen(path));
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	if (connect(fd, (struct sockaddr *)&sa, sizeof(sa))) {
		e = -errno;
		close(fd);
		return e;
	}
	return fd;
}

int raw_send(int sock, const void *frame, size_t n, const int *fds, unsigned n_fds)
{
	union {
		char buf[CMSG_SPACE(3 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec iov = {(void *)(uintptr_t)frame, n};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};

	if (n_fds) {
		struct cmsghdr *c;

		memset(&control, 0, sizeof(control));
		m.msg_control = control.buf;
		m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
	}
	return sendmsg(sock, &m, MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static void take_fds(struct msghdr *m, int *fds)
{
	int k = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
		size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < n; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
			if (fds && k < 4)
				fds[k++] = fd;
			else
				close(fd);
		}
	}
}

int raw_recv(int sock, void *buf, size_t cap, int *fds, int ms)
{
	union {
		char buf[CMSG_SPACE(8 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec iov = {buf, cap};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf,
			   .msg_controllen = sizeof(control.buf)};
	struct pollfd p = {sock, POLLIN, 0};
	ssize_t n;

	for (int i = 0; fds && i < 4; i++)
		fds[i] = -1;
	do
		n = poll(&p, 1, ms);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return n ? -errno : -EAGAIN;
	n = recvmsg(sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0)
		return errno == ECONNRESET ? 0 : -errno;
	take_fds(&m, fds);
	return (int)n;
}

/* ---- opening ------------------------------------------------------------------- */

static int read_welcome(struct raw *r, int fds[4])
{
	union {
		uint8_t bytes[4096];
		struct apr_frame f;
		struct apr_welcome w;
	} u;
	int n = raw_recv(r->sock, &u, sizeof(u), fds, 10000);

	if (n <= 0) {
		snprintf(r->why, sizeof(r->why), n ? "no answer to HELLO" : "the daemon hung up");
		return n ? -ETIMEDOUT : -ECONNRESET;
	}
	if (n < (int)sizeof(u.f) || u.f.magic != APR_FRAME_MAGIC || u.f.size != (uint32_t)n) {
		snprintf(r->why, sizeof(r->why), "the answer to HELLO is no frame");
		return -EPROTO;
	}
	if (u.f.err) {
		snprintf(r->why, sizeof(r->why), "%.*s", n - (int)sizeof(u.f) > 250 ? 250 : n - (int)sizeof(u.f),
			 (char *)u.bytes + sizeof(u.f));
		return u.f.err < 0 ? u.f.err : -EPROTO;
	}
	if (u.f.type != APR_FRAME_WELCOME || n < (int)sizeof(u.w)) {
		snprintf(r->why, sizeof(r->why), "the answer to HELLO is no WELCOME");
		return -EPROTO;
	}
	r->w = u.w;
	return 0;
}

static int map_all(struct raw *r, const int fds[4])
{
	const char *why = "the regions cannot be mapped";
	int e;

	for (int i = 0; i < 4; i++) {
		if (fds[i] < 0)
			continue;
		if (r->w.fd_kind[i] == APR_FD_REQ && r->req_fd < 0)
			r->req_fd = fds[i];
		else if (r->w.fd_kind[i] == APR_FD_RES && r->res_fd < 0)
			r->res_fd = fds[i];
		else if (r->w.fd_kind[i] == APR_FD_DOORBELL && r->bell < 0)
			r->bell = fds[i];
		else
			close(fds[i]);
	}
	if (r->req_fd < 0 || r->res_fd < 0 || r->bell < 0) {
		snprintf(r->why, sizeof(r->why), "WELCOME came without its descriptors");
		return -EPROTO;
	}
	e = apr_region_map(&r->req, r->req_fd, APR_FD_REQ, r->w.req_size);
	if (!e)
		e = apr_region_map(&r->res, r->res_fd, APR_FD_RES, r->w.res_size);
	if (!e)
		e = apr_geometry_read(r->res.base, r->w.req_size, r->w.res_size, &r->g, &why);
	if (e) {
		snprintf(r->why, sizeof(r->why), "%s", why);
		return e;
	}
	apr_rc_init(&r->rc, r->req.base, r->res.base, &r->g);
	r->arena_at = r->g.req_arena_off;
	return 0;
}

int raw_open_as(struct raw *r, const char *path, const void *hello, size_t n)
{
	struct apr_frame ready = {APR_FRAME_MAGIC, APR_FRAME_READY, 0, sizeof(ready), 0};
	int fds[4] = {-1, -1, -1, -1}, e;

	memset(r, 0, sizeof(*r));
	r->bell = r->req_fd = r->res_fd = -1;
	r->req = r->res = (struct apr_region)APR_REGION_INIT;
	r->sock = raw_dial(path);
	if (r->sock < 0) {
		e = r->sock;
		snprintf(r->why, sizeof(r->why), "%s: %s", path, strerror(-e));
		return e;
	}
	e = raw_send(r->sock, hello, n, NULL, 0);
	if (!e || e == -EPIPE)
		e = read_welcome(r, fds);
	if (!e)
		e = map_all(r, fds);
	if (!e)
		e = raw_send(r->sock, &ready, sizeof(ready), NULL, 0);
	if (e) {
		char why[sizeof(r->why)];

		memcpy(why, r->why, sizeof(why));
		raw_close(r);
		memcpy(r->why, why, sizeof(why));
	}
	return e;
}

int raw_open(struct raw *r, const char *path, const struct apr_hello *h)
{
	struct apr_hello mine;
	int e;

	if (!h) {
		raw_hello(&mine);
		h = &mine;
	}
	e = raw_open_as(r, path, h, sizeof(*h));
	r->ring_always = h->flags & APR_HELLO_RING_ALWAYS;
	if (!e && r->ring_always)
		__atomic_store_n(&r->rc.req->wait_how, APR_WAIT_SOCKET_ALWAYS, __ATOMIC_RELAXED);
	return e;
}

void raw_close(struct raw *r)
{
	int fds[] = {r->sock, r->bell, r->req_fd, r->res_fd};

	apr_region_unmap(&r->req);
	apr_region_unmap(&r->res);
	for (int i = 0; i < 4; i++)
		if (fds[i] >= 0)
			close(fds[i]);
	free(r->blob);
	memset(r, 0, sizeof(*r));
	r->sock = r->bell = r->req_fd = r->res_fd = -1;
	r->req = r->res = (struct apr_region)APR_REGION_INIT;
}

/* ---- frames -------------------------------------------------------------------- */

int raw_ask(struct raw *r, unsigned type, const void *body, size_t len)
{
	uint8_t buf[4096];
	struct apr_frame h = {APR_FRAME_MAGIC, (uint16_t)type, 0, (uint32_t)(sizeof(h) + len), 0};

	if (len > sizeof(buf) - sizeof(h))
		return -E2BIG;
	memcpy(buf, &h, sizeof(h));
	if (len)
		memcpy(buf + sizeof(h), body, len);
	return raw_send(r->sock, buf, h.size, NULL, 0);
}

int raw_frame(struct raw *r, void *buf, size_t cap, int *fds, int ms)
{
	for (;;) {
		struct apr_frame h;
		int n = raw_recv(r->sock, buf, cap, fds, ms);

		if (n < (int)sizeof(h))
			return n;
		memcpy(&h, buf, sizeof(h));
		if (h.type == APR_FRAME_NOTIFY)
			r->notified++;
		else if (h.type != APR_FRAME_MODEL_CHANGED)
			return n;
	}
}

/* ---- the ring ------------------------------------------------------------------- */

uint32_t raw_put(struct raw *r, const void *data, size_t len)
{
	uint32_t off = (r->arena_at + 7) & ~7u;

	if (len > r->g.req_arena_len)
		return 0;
	if ((uint64_t)off + len > (uint64_t)r->g.req_arena_off + r->g.req_arena_len)
		off = r->g.req_arena_off;
	if (len)
		memcpy((uint8_t *)r->req.base + off, data, len);
	r->arena_at = off + (uint32_t)len;
	return off;
}

void raw_ring(struct raw *r)
{
	apr_doorbell_ring(r->bell);
}

bool raw_push(struct raw *r, const struct apr_sqe *q)
{
	return raw_push_bytes(r, q, sizeof(*q));
}

bool raw_push_bytes(struct raw *r, const void *entry, size_t n)
{
	struct apr_sqe *slot = apr_rc_sqe(&r->rc);

	if (!slot)
		return false;
	memcpy(slot, entry, n < r->g.sqe_size ? n : r->g.sqe_size);
	apr_rc_publish(&r->rc, r->rc.sq_tail);
	if (apr_rc_need_wakeup(&r->rc) || r->ring_always)
		raw_ring(r);
	return true;
}

bool raw_dead(const struct raw *r)
{
	return __atomic_load_n(&r->rc.res->flags, __ATOMIC_ACQUIRE) & APR_RES_DEAD;
}

/* The blob that the entry names, copied; false: it lies outside the arena. */
static bool copy_blob(struct raw *r)
{
	struct apr_blob b;
	uint64_t end = (uint64_t)r->g.res_arena_off + r->g.res_arena_len;
	uint8_t *more;

	r->blob_len = 0;
	r->blob_fmt = 0;
	if (!(r->cqe.flags & APR_CQE_BLOB))
		return !r->cqe.blob;
	if (r->cqe.blob % 8 || r->cqe.blob < r->g.res_arena_off || r->cqe.blob + sizeof(b) > end)
		return false;
	memcpy(&b, (uint8_t *)r->res.base + r->cqe.blob, sizeof(b));
	if (b.len > end - r->cqe.blob - sizeof(b))
		return false;
	more = realloc(r->blob, (size_t)b.len + 1);
	if (!more)
		return false;
	r->blob = more;
	memcpy(r->blob, (uint8_t *)r->res.base + r->cqe.blob + sizeof(b), b.len);
	r->blob[b.len] = 0;
	r->blob_len = b.len;
	r->blob_fmt = b.fmt;
	return true;
}

static int sleep_for(struct raw *r, uint64_t until)
{
	uint64_t now = apr_now_ns(), ns;
	uint32_t seen;
	uint8_t buf[256];
	int n;

	if (now >= until)
		return -ETIMEDOUT;
	ns = until - now < 50000000 ? until - now : 50000000;
	if (r->ring_always) {
		struct pollfd p = {r->sock, POLLIN, 0};

		poll(&p, 1, (int)(ns / 1000000) + 1);
	} else if (apr_rc_sleep(&r->rc, r->rc.cq_head + 1, APR_WAIT_FUTEX, &seen)) {
		apr_futex_wait(&r->rc.res->cq_tail, seen, ns);
		apr_rc_awake(&r->rc);
	}
	if (apr_rc_cq_ready(&r->rc))
		return 0;
	n = (int)recv(r->sock, buf, sizeof(buf), MSG_DONTWAIT | MSG_PEEK);
	if (!n || (n < 0 && errno != EAGAIN))
		return -EPIPE;
	if (n >= (int)sizeof(struct apr_frame) && ((struct apr_frame *)(void *)buf)->type == APR_FRAME_NOTIFY) {
		recv(r->sock, buf, sizeof(buf), MSG_DONTWAIT);
		r->notified++;
	}
	return 0;
}

int raw_next(struct raw *r, int ms)
{
	uint64_t until = apr_now_ns() + (uint64_t)ms * 1000000;
	int e;

	while (!apr_rc_cq_ready(&r->rc)) {
		if (raw_dead(r) && !apr_rc_cq_ready(&r->rc))
			return -EPIPE;
		e = sleep_for(r, until);
		if (e && !apr_rc_cq_ready(&r->rc))
			return e;
	}
	if (apr_rc_cq_ready(&r->rc) > r->rc.cq_mask + 1) {
		snprintf(r->why, sizeof(r->why), "cq_tail has run past the ring");
		return -EPROTO;
	}
	memcpy(&r->cqe, apr_rc_cqe(&r->rc, 0), sizeof(r->cqe));
	if (!copy_blob(r)) {
		snprintf(r->why, sizeof(r->why), "an entry's blob lies outside the result arena");
		return -EPROTO;
	}
	if (apr_rc_cq_advance(&r->rc, 1) || r->ring_always)
		raw_ring(r);
	return 0;
}
