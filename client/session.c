/* SPDX-License-Identifier: MIT */
/* Owns: HELLO, WELCOME, mapping, READY, and taking a session down. Does not own: the handle (handle.c). */
#include "client/handle.h"
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static void fill_hello(const struct apr *c, struct apr_hello *h, uint64_t old_epoch, uint64_t old_session)
{
	memset(h, 0, sizeof(*h));
	h->hdr = (struct apr_frame){ APR_FRAME_MAGIC, APR_FRAME_HELLO, 0, sizeof(*h), 0 };
	h->major = APR_ABI_MAJOR;
	h->minor = APR_ABI_MINOR;
	h->flags = c->ring_always ? APR_HELLO_RING_ALWAYS : 0;
	h->need = c->opts.need;
	h->want = c->opts.want | c->opts.need;
	h->sq_entries = c->opts.sq_entries;
	h->cq_entries = c->opts.cq_entries;
	h->req_size = c->opts.req_size;
	h->res_size = c->opts.res_size;
	h->sqe_size = sizeof(struct apr_sqe);
	h->cqe_size = sizeof(struct apr_cqe);
	h->old_epoch = old_epoch;
	h->old_session = old_session;
	memcpy(h->name, c->name, sizeof(h->name));
}

/* The answer to HELLO. Longer than we know is fine; its descriptors in fds. */
static int read_welcome(struct apr *c, uint64_t deadline, int fds[4], char *err, size_t errlen)
{
	union {
		uint8_t bytes[4096];
		struct apr_frame f;
		struct apr_welcome w;
	} u;

	memset(&u, 0, sizeof(u.w));
	int n = apr_frame_recv(c->sock, &u, sizeof(u), fds, deadline);
	if (n == -EAGAIN) {
		apr_say(err, errlen, "%s: no answer to HELLO in time", c->path);
		return -ETIMEDOUT;
	}
	if (n == 0) {
		apr_say(err, errlen, "%s: the daemon hung up", c->path);
		return -ECONNRESET;
	}
	if (n < 0)
		return n;
	apr_dump_frame(c, "<", &u, (size_t)n);
	if (n < (int)sizeof(u.f) || u.f.magic != APR_FRAME_MAGIC || u.f.size != (uint32_t)n) {
		apr_say(err, errlen, "%s: the answer is no aprd frame", c->path);
		return -EPROTO;
	}
	if (u.f.err) {
		apr_say(err, errlen, "%.*s", n - (int)sizeof(u.f), (const char *)u.bytes + sizeof(u.f));
		return u.f.type == APR_FRAME_BYE ? -ESHUTDOWN : u.f.err < 0 ? u.f.err : -EPROTO;
	}
	if (u.f.type != APR_FRAME_WELCOME || n < (int)sizeof(u.w)) {
		apr_say(err, errlen, "%s: the answer is no WELCOME", c->path);
		return -EPROTO;
	}
	if (u.w.major != APR_ABI_MAJOR) {
		apr_say(err, errlen, "%s: the daemon speaks version %u.%u, this library %u.%u", c->path, u.w.major,
			u.w.minor, APR_ABI_MAJOR, APR_ABI_MINOR);
		return -EPROTONOSUPPORT;
	}
	if (c->opts.need & ~u.w.features) {
		apr_say(err, errlen, "%s: the daemon lacks features %#llx", c->path,
			(unsigned long long)(c->opts.need & ~u.w.features));
		return -EOPNOTSUPP;
	}
	c->info = u.w;
	return 0;
}

static int map_all(struct apr *c, int fds[4], char *err, size_t errlen)
{
	const char *why = "the regions are not sealed as they must be";
	int req = -1, res = -1;

	for (int i = 0; i < 4; i++) {
		if (fds[i] < 0)
			continue;
		if (c->info.fd_kind[i] == APR_FD_REQ)
			req = fds[i];
		else if (c->info.fd_kind[i] == APR_FD_RES)
			res = fds[i];
		else if (c->info.fd_kind[i] == APR_FD_DOORBELL && c->bell < 0) {
			c->bell = fds[i];
			fds[i] = -1;
		}
	}
	if (req < 0 || res < 0 || c->bell < 0) {
		apr_say(err, errlen, "%s: WELCOME came without its descriptors", c->path);
		return -EPROTO;
	}
	int e = apr_region_map(&c->req, req, APR_FD_REQ, c->info.req_size);
	if (!e)
		e = apr_region_map(&c->res, res, APR_FD_RES, c->info.res_size);
	if (!e)
		e = apr_geometry_read(c->res.base, c->info.req_size, c->info.res_size, &c->geo, &why);
	if (!e) {
		const struct apr_res_hdr *h = c->res.base;
		why = "WELCOME and the result region disagree";
		if (h->epoch != c->info.epoch || h->session != c->info.session ||
		    h->max_inflight != c->info.max_inflight)
			e = -EPROTO;
	}
	if (e)
		apr_say(err, errlen, "%s: %s", c->path, e == -EPROTO ? why : apr_strerror(e));
	return e;
}

int apr_session_open(struct apr *c, uint64_t deadline, uint64_t old_epoch, uint64_t old_session, char *err,
		     size_t errlen)
{
	int fds[4] = { -1, -1, -1, -1 };
	struct apr_hello h;

	int sock = apr_dial(c->path, deadline, err, errlen);
	if (sock < 0)
		return sock;
	c->sock = sock;
	fill_hello(c, &h, old_epoch, old_session);
	apr_dump_frame(c, ">", &h, sizeof(h));
	int e = apr_frame_send(sock, &h, sizeof(h), deadline);
	/* a daemon that refuses may have answered and hung up before HELLO: its words are worth reading */
	if (!e || e == -EPIPE)
		e = read_welcome(c, deadline, fds, err, errlen);
	if (!e)
		e = map_all(c, fds, err, errlen);
	for (int i = 0; i < 4; i++)
		if (fds[i] >= 0)
			close(fds[i]);
	if (!e)
		e = apr_arena_init(&c->arena, c->geo.req_arena_off, c->geo.req_arena_len, c->geo.sq_entries);
	if (!e)
		e = apr_flights_init(c, c->geo.max_inflight + 1);
	if (!e) {
		struct apr_frame ready = { APR_FRAME_MAGIC, APR_FRAME_READY, 0, sizeof(ready), 0 };
		apr_rc_init(&c->rc, c->req.base, c->res.base, &c->geo);
		if (c->ring_always)
			__atomic_store_n(&c->rc.req->wait_how, APR_WAIT_SOCKET_ALWAYS, __ATOMIC_RELAXED);
		apr_dump_frame(c, ">", &ready, sizeof(ready));
		e = apr_frame_send(sock, &ready, sizeof(ready), deadline);
	}
	if (e) {
		apr_session_shut(c);
		apr_flights_free(c);
		return e;
	}
	c->dead = false;
	c->why[0] = '\0';
	return 0;
}

void apr_session_shut(struct apr *c)
{
	if (c->sock >= 0)
		close(c->sock);
	if (c->bell >= 0)
		close(c->bell);
	c->sock = c->bell = -1;
	apr_region_unmap(&c->req);
	apr_region_unmap(&c->res);
	apr_arena_free(&c->arena);
	memset(&c->rc, 0, sizeof(c->rc));
	memset(c->skip, 0, sizeof(c->skip));
	c->armed = false;
	c->refused = 0;
}
