/* SPDX-License-Identifier: MIT */
/*
 * A daemon to its clients and a client to the daemon: both pairs of regions have
 * one geometry, so that every entry, offset and index passes as it is.
 *
 * Owns: the sessions in both directions and what is written down of them. Does
 * not own: the file's head, the program that is captured (cmd_capture.c).
 *
 * It may change when things happen (a wake-up later), never what is said. One
 * thread. The clients' ring words are read as a daemon reads them, through the
 * guard; a word out of range is handed on and left for the daemon to judge.
 */
#include "client/aprctl/capture.h"
#include "shm/guard.h"
#include "shm/wire.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PAIRS = 64 };

struct pair {
	bool used, lame_sq, lame_cq; /* lame: that ring word was out of range and is not read again */
	unsigned number;
	int sock, bell; /* the client's side */
	struct apr_region req, res;
	struct apr_rd rd;
	uint32_t sent; /* SQ index up to which entries went on */
	struct raw up;
};

struct proxy {
	int listener, bells; /* bells: an epoll over all doorbells, edge-triggered, so that they need not be read */
	FILE *out;
	char path[108], daemon[256];
	uint64_t began;
	unsigned sessions;
	struct pair pairs[PAIRS];
};

/* ---- writing down ------------------------------------------------------------------ */

static json_t *event(struct proxy *p, const struct pair *s)
{
	return json_pack("{s:I, s:i}", "t", (json_int_t)((apr_now_ns() - p->began) / 1000), "s", (int)s->number);
}

static void set_hex(json_t *j, const char *key, const void *data, size_t n)
{
	char *hex = malloc(2 * n + 1);

	if (!hex)
		return;
	ctl_hex(data, n, hex);
	json_object_set_new(j, key, json_string(hex));
	free(hex);
}

static void put(struct proxy *p, json_t *j)
{
	json_dumpf(j, p->out, JSON_COMPACT);
	fputc('\n', p->out);
	json_decref(j);
}

static void put_frame(struct proxy *p, const struct pair *s, const char *key, const void *frame, size_t n, const char *by)
{
	char line[512];
	json_t *j = event(p, s);

	set_hex(j, key, frame, n);
	if (by)
		json_object_set_new(j, "by", json_string(by));
	json_object_set_new(j, "is", json_string(apr_wire_frame(frame, n, line, sizeof(line))));
	put(p, j);
}

static void put_word(struct proxy *p, const struct pair *s, const char *key, uint32_t v)
{
	json_t *j = event(p, s);

	json_object_set_new(j, key, json_integer(v));
	put(p, j);
}

static void put_end(struct proxy *p, const struct pair *s, const char *by)
{
	json_t *j = event(p, s);

	json_object_set_new(j, "end", json_string(by));
	put(p, j);
}

/* ---- opening ------------------------------------------------------------------------ */

static int answer_refusal(struct proxy *p, struct pair *s, int err)
{
	struct {
		struct apr_frame h;
		char why[256];
	} f = {{APR_FRAME_MAGIC, APR_FRAME_WELCOME, 0, 0, err}, ""};
	size_t n = strlen(s->up.why);

	memcpy(f.why, s->up.why, n);
	f.h.size = (uint32_t)(sizeof(f.h) + n);
	put_frame(p, s, "welcome", &f, f.h.size, NULL);
	return raw_send(s->sock, &f, f.h.size, NULL, 0);
}

/* Regions for the client with the very geometry that the daemon gave us. */
static int answer_welcome(struct proxy *p, struct pair *s)
{
	struct apr_welcome w = s->up.w;
	const struct apr_res_hdr *up = s->up.res.base;
	struct epoll_event ring = {.events = EPOLLIN | EPOLLET};
	int e = apr_region_create(&s->req, APR_FD_REQ, &s->up.g, w.epoch, w.session), fds[3];
	struct apr_res_hdr *h;

	if (!e)
		e = apr_region_create(&s->res, APR_FD_RES, &s->up.g, w.epoch, w.session);
	if (e)
		return e;
	s->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (s->bell < 0 || epoll_ctl(p->bells, EPOLL_CTL_ADD, s->bell, &ring))
		return -errno;
	apr_rd_init(&s->rd, s->req.base, s->res.base, &s->up.g);
	h = s->res.base;
	h->models_gen = up->models_gen;
	/* we never poll the ring, and want to hear of every entry marked seen */
	apr_rd_flags_set(&s->rd, APR_RES_NEED_WAKEUP | APR_RES_CQ_STALLED);
	w.poll_us = w.spin_us = 0;
	memset(w.fd_kind, 0, sizeof(w.fd_kind));
	w.fd_kind[0] = APR_FD_REQ;
	w.fd_kind[1] = APR_FD_RES;
	w.fd_kind[2] = APR_FD_DOORBELL;
	w.hdr.size = sizeof(w);
	fds[0] = s->req.fd;
	fds[1] = s->res.fd;
	fds[2] = s->bell;
	e = raw_send(s->sock, &w, sizeof(w), fds, 3);
	put_frame(p, s, "welcome", &w, sizeof(w), NULL);
	apr_region_close_fd(&s->req);
	apr_region_close_fd(&s->res);
	return e;
}

static void shut(struct pair *s)
{
	raw_close(&s->up);
	apr_region_unmap(&s->req);
	apr_region_unmap(&s->res);
	close(s->sock);
	if (s->bell >= 0)
		close(s->bell);
	memset(s, 0, sizeof(*s));
}

static void admit(struct proxy *p)
{
	int sock = accept4(p->listener, NULL, NULL, SOCK_CLOEXEC), n, e;
	struct pair *s = p->pairs;
	_Alignas(8) uint8_t hello[1024];

	while (s < p->pairs + PAIRS && s->used)
		s++;
	if (sock < 0 || s == p->pairs + PAIRS) {
		if (sock >= 0)
			close(sock);
		return;
	}
	memset(s, 0, sizeof(*s));
	s->used = true;
	s->number = ++p->sessions;
	s->sock = sock;
	s->bell = -1;
	s->req = s->res = (struct apr_region)APR_REGION_INIT;
	n = raw_recv(sock, hello, sizeof(hello), NULL, 5000);
	if (n <= 0) {
		s->up.sock = s->up.bell = s->up.req_fd = s->up.res_fd = -1;
		shut(s);
		return;
	}
	put_frame(p, s, "hello", hello, (size_t)n, NULL);
	e = raw_open_as(&s->up, p->daemon, hello, (size_t)n);
	if (n >= (int)sizeof(struct apr_hello)) /* such a session's doorbell is rung after every store */
		s->up.ring_always = ((struct apr_hello *)(void *)hello)->flags & APR_HELLO_RING_ALWAYS;
	e = e ? answer_refusal(p, s, e), e : answer_welcome(p, s);
	if (e) {
		put_end(p, s, "daemon");
		shut(s);
	}
}

/* ---- client to daemon ----------------------------------------------------------------- */

/* What the entry points at, to the same place of the daemon's arena; NULL where that is nowhere. */
static const uint8_t *carry(struct pair *s, uint32_t off, uint32_t len)
{
	uint8_t *to = (uint8_t *)s->up.req.base + off;

	if (!len || off < s->up.g.req_arena_off || (uint64_t)off + len > s->up.w.req_size)
		return NULL;
	return apr_guard_copy(to, (const uint8_t *)s->req.base + off, len) ? NULL : to;
}

static int pass_entry(struct proxy *p, struct pair *s)
{
	const uint8_t *from = s->rd.sq + (size_t)(s->sent & s->rd.sq_mask) * s->rd.sqe_size, *data;
	uint8_t buf[256];
	struct apr_sqe q;
	char line[512];
	json_t *j;

	if (apr_guard_copy(buf, from, s->rd.sqe_size))
		return -EFAULT;
	memcpy(&q, buf, sizeof(q));
	j = event(p, s);
	set_hex(j, "sqe", buf, s->rd.sqe_size);
	data = carry(s, q.in_off, q.in_len);
	if (data)
		set_hex(j, "in", data, q.in_len);
	data = carry(s, q.par_off, q.par_len);
	if (data)
		set_hex(j, "par", data, q.par_len);
	json_object_set_new(j, "is", json_string(apr_wire_sqe(&q, line, sizeof(line))));
	put(p, j);
	memcpy(apr_rc_slot(&s->up.rc, s->sent), buf, s->rd.sqe_size);
	s->sent++;
	return 0;
}

static void hand_on(struct proxy *p, struct pair *s, const char *key, uint32_t *word, const uint32_t *theirs)
{
	uint32_t v = 0;

	apr_guard_load32(theirs, &v);
	put_word(p, s, key, v);
	__atomic_store_n(word, v, __ATOMIC_RELEASE);
	raw_ring(&s->up);
}

/* What the client has marked seen; before its entries, as it stored it before them. */
static void pass_head(struct proxy *p, struct pair *s)
{
	uint32_t seen = s->rd.cq_head;

	if (s->lame_cq)
		return;
	if (apr_rd_cq_refresh(&s->rd)) {
		hand_on(p, s, "cq_head", &s->up.rc.req->cq_head, &s->rd.req->cq_head);
		s->lame_cq = true;
	} else if (s->rd.cq_head != seen && apr_rc_cq_advance(&s->up.rc, s->rd.cq_head - seen)) {
		raw_ring(&s->up);
	}
}

static void mirror_sq_head(struct pair *s)
{
	for (uint32_t head = apr_rc_sq_head(&s->up.rc); s->rd.sq_head != head;)
		apr_rd_sq_advance(&s->rd);
}

static void to_daemon(struct proxy *p, struct pair *s)
{
	bool more = false;
	int n;

	pass_head(p, s);
	mirror_sq_head(s);
	if (s->lame_sq)
		return;
	n = apr_rd_sq_ready(&s->rd);
	if (n < 0 || (int32_t)(s->rd.sq_head + (uint32_t)n - s->sent) < 0) {
		hand_on(p, s, "sq_tail", &s->up.rc.req->sq_tail, &s->rd.req->sq_tail);
		s->lame_sq = true;
		return;
	}
	for (; s->sent != s->rd.sq_head + (uint32_t)n; more = true)
		if (pass_entry(p, s)) {
			s->lame_sq = true;
			return;
		}
	if (more) {
		s->up.rc.sq_tail = s->sent;
		apr_rc_publish(&s->up.rc, s->sent);
		if (apr_rc_need_wakeup(&s->up.rc) || s->up.ring_always)
			raw_ring(&s->up);
	}
}

/* ---- daemon to client ----------------------------------------------------------------- */

static void pass_answer(struct proxy *p, struct pair *s, const struct apr_cqe *e)
{
	json_t *j = event(p, s);
	char line[512];
	struct apr_blob b;
	const uint8_t *from = (const uint8_t *)s->up.res.base + e->blob;

	set_hex(j, "cqe", e, sizeof(*e));
	if ((e->flags & APR_CQE_BLOB) && e->blob >= s->up.g.res_arena_off &&
	    e->blob + sizeof(b) <= s->up.w.res_size) {
		memcpy(&b, from, sizeof(b));
		if (b.len <= s->up.w.res_size - e->blob - sizeof(b)) {
			memcpy((uint8_t *)s->res.base + e->blob, from, sizeof(b) + b.len);
			set_hex(j, "blob", from, sizeof(b) + b.len);
		}
	}
	json_object_set_new(j, "is", json_string(apr_wire_cqe(e, line, sizeof(line))));
	put(p, j);
	apr_rd_cq_write(&s->rd, e);
}

/* False: the client's wait words are none, which ends a session. */
static bool wake(struct pair *s)
{
	struct apr_frame f = {APR_FRAME_MAGIC, APR_FRAME_NOTIFY, 0, sizeof(f), 0};
	int how;

	apr_fence_full(); /* pairs with the fence in apr_rc_sleep (W1) */
	how = apr_rd_wake(&s->rd);
	if (how == APR_WAIT_FUTEX)
		apr_futex_wake(&s->rd.res->cq_tail);
	else if (how == APR_WAIT_SOCKET)
		send(s->sock, &f, sizeof(f), MSG_DONTWAIT | MSG_NOSIGNAL);
	return how >= 0;
}

static bool to_client(struct proxy *p, struct pair *s)
{
	uint32_t tail = apr_rc_cq_tail(&s->up.rc), flags;
	const struct apr_res_hdr *up = s->up.res.base;
	bool more = false, good = true;

	mirror_sq_head(s); /* an entry was taken before it is answered */
	for (; s->rd.cq_tail != tail; more = true)
		pass_answer(p, s, apr_rc_cqe(&s->up.rc, s->rd.cq_tail - s->up.rc.cq_head));
	s->rd.res->models_gen = up->models_gen;
	memcpy(s->rd.res->counters, up->counters, sizeof(up->counters));
	if (more) {
		apr_rd_cq_publish(&s->rd);
		good = wake(s);
	}
	flags = __atomic_load_n(&up->flags, __ATOMIC_ACQUIRE);
	if (flags & APR_RES_DRAINING)
		apr_rd_flags_set(&s->rd, APR_RES_DRAINING);
	if ((flags & APR_RES_DEAD) && s->rd.cq_tail == apr_rc_cq_tail(&s->up.rc))
		apr_rd_dead(&s->rd, up->reason);
	return good;
}

/* ---- frames ---------------------------------------------------------------------------- */

/* Every frame that is there, from one socket to the other. False: hang-up. */
static bool pass_frames(struct proxy *p, struct pair *s, bool by_client)
{
	int from = by_client ? s->sock : s->up.sock, to = by_client ? s->up.sock : s->sock, fds[4];
	uint8_t *buf = malloc(APR_FRAME_MAX);
	bool up = true;

	while (buf) {
		struct apr_frame h = {0};
		unsigned n_fds = 0;
		int n = raw_recv(from, buf, APR_FRAME_MAX, fds, 0);

		if (n == -EAGAIN)
			break;
		up = n > 0;
		if (!up)
			break;
		if (n >= (int)sizeof(h))
			memcpy(&h, buf, sizeof(h));
		while (n_fds < 3 && fds[n_fds] >= 0)
			n_fds++;
		if (h.type != APR_FRAME_NOTIFY && h.type != APR_FRAME_READY) {
			put_frame(p, s, "frame", buf, (size_t)n, by_client ? "client" : "daemon");
			raw_send(to, buf, (size_t)n, by_client ? NULL : fds, by_client ? 0 : n_fds);
		}
		for (int i = 0; i < 4; i++)
			if (fds[i] >= 0)
				close(fds[i]);
	}
	free(buf);
	return up;
}

/* One look at everything of a session; false: it is over. */
static bool serve(struct proxy *p, struct pair *s)
{
	bool client = pass_frames(p, s, true), daemon, good;

	to_daemon(p, s);
	daemon = pass_frames(p, s, false);
	good = to_client(p, s);
	if (client && daemon && good)
		return true;
	to_daemon(p, s);
	to_client(p, s);
	if (client && !(__atomic_load_n(&s->rd.res->flags, __ATOMIC_RELAXED) & APR_RES_DEAD))
		apr_rd_dead(&s->rd, good ? APR_REASON_SHUTDOWN : APR_REASON_PROTOCOL);
	put_end(p, s, client && good ? "daemon" : "client");
	return false;
}

/* ---- the loop --------------------------------------------------------------------------- */

/* Announces our sleep to the daemons; milliseconds to sleep at most. */
static int arm(struct proxy *p)
{
	int ms = 100;

	for (struct pair *s = p->pairs; s < p->pairs + PAIRS; s++) {
		uint32_t seen;

		if (!s->used)
			continue;
		if (!apr_rc_sleep(&s->up.rc, s->rd.cq_tail + 1, APR_WAIT_SOCKET, &seen))
			ms = 0;
		if (s->sent != apr_rc_sq_head(&s->up.rc) && ms)
			ms = 1; /* nothing tells of sq_head */
	}
	return ms;
}

static void disarm(struct proxy *p)
{
	for (struct pair *s = p->pairs; s < p->pairs + PAIRS; s++)
		if (s->used && (s->up.rc.req->wait_seq & 1))
			apr_rc_awake(&s->up.rc);
}

int proxy_run(struct proxy *p, int child)
{
	bool running = true;

	for (;;) {
		struct pollfd fds[3 + PAIRS * 2];
		struct epoll_event rung[PAIRS];
		nfds_t n = 0;
		bool sessions = false;

		for (struct pair *s = p->pairs; s < p->pairs + PAIRS; s++) {
			if (s->used && !serve(p, s))
				shut(s);
			sessions = sessions || s->used;
		}
		if (ferror(p->out) || fflush(p->out))
			return -EIO;
		if (!running && !sessions)
			return 0;
		fds[n++] = (struct pollfd){p->listener, POLLIN, 0};
		fds[n++] = (struct pollfd){running ? child : -1, POLLIN, 0};
		fds[n++] = (struct pollfd){p->bells, POLLIN, 0};
		for (struct pair *s = p->pairs; s < p->pairs + PAIRS; s++)
			if (s->used) {
				fds[n++] = (struct pollfd){s->sock, POLLIN, 0};
				fds[n++] = (struct pollfd){s->up.sock, POLLIN, 0};
			}
		if (poll(fds, n, arm(p)) < 0 && errno != EINTR)
			return -errno;
		disarm(p);
		epoll_wait(p->bells, rung, PAIRS, 0);
		if (fds[0].revents & POLLIN)
			admit(p);
		if (fds[1].revents & POLLIN)
			running = false;
	}
}

int proxy_new(struct proxy **out, const char *path, const char *daemon, FILE *file)
{
	struct sockaddr_un sa = {.sun_family = AF_UNIX};
	struct proxy *p = calloc(1, sizeof(*p));
	int e = 0;

	if (!p)
		return -ENOMEM;
	p->out = file;
	p->began = apr_now_ns();
	snprintf(p->path, sizeof(p->path), "%s", path);
	snprintf(p->daemon, sizeof(p->daemon), "%s", daemon);
	memcpy(sa.sun_path, p->path, sizeof(p->path));
	p->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	p->bells = epoll_create1(EPOLL_CLOEXEC);
	if (p->listener < 0 || p->bells < 0 || bind(p->listener, (struct sockaddr *)&sa, sizeof(sa)) || listen(p->listener, 64))
		e = -errno;
	if (!e)
		e = apr_guard_install();
	if (!e)
		e = apr_guard_thread();
	if (e) {
		proxy_free(p);
		return e;
	}
	*out = p;
	return 0;
}

void proxy_free(struct proxy *p)
{
	if (!p)
		return;
	for (struct pair *s = p->pairs; s < p->pairs + PAIRS; s++)
		if (s->used)
			shut(s);
	if (p->listener >= 0)
		close(p->listener);
	if (p->bells >= 0)
		close(p->bells);
	unlink(p->path);
	apr_guard_remove();
	free(p);
}
