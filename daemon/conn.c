/* SPDX-License-Identifier: MIT */
/*
 * Client and admin sockets: accepting, HELLO and WELCOME, the frames that follow,
 * hang-ups, processes that end.
 *
 * Owns: struct conn. Does not own sessions' rings (core) nor what admin frames do
 * (admin.c). All on the io thread.
 *
 * At most two WELCOMEs of one identity are without their READY, since descriptors in
 * flight are counted against this daemon's user: the others wait, accepted, in order.
 * READY alone counts as read: an empty send queue would let a client collect sessions
 * that it never answers. While others wait, a WELCOME is given less time for its READY,
 * and a process that holds none goes first: one that opens many connections and says no
 * READY delays its user's others by that time, not by all of its own.
 */
#include "daemon/conn.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
	CLIENT_FRAME = 1024,
	UNREAD_MAX = 2,
	REFILL_MS = 20,
	WANTED_MS = 250, /* for READY, while others wait for their WELCOME */
	LINGER_MS = 250, /* how long a refused connection stays open for its HELLO */
	LINGER_MAX = 256 /* such connections of one identity; further ones are closed at once */
};

#define WANTED_NS (WANTED_MS * UINT64_C(1000000))

static struct worker *worker_of(struct conn *k)
{
	return k->w;
}

/* ---- sending ------------------------------------------------------------------------ */

int conn_send(struct conn *k, const void *frame, size_t n, const int *fds, unsigned n_fds)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(3 * sizeof(int))];
	} control;
	struct iovec iov = { (void *)frame, n };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (n_fds) {
		memset(&control, 0, sizeof(control));
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		struct cmsghdr *h = CMSG_FIRSTHDR(&msg);
		h->cmsg_level = SOL_SOCKET;
		h->cmsg_type = SCM_RIGHTS;
		h->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		memcpy(CMSG_DATA(h), fds, n_fds * sizeof(int));
	}
	return sendmsg(k->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* A frame with a body; above the frame's limit the body goes in a sealed memfd. */
int conn_reply(struct conn *k, uint16_t type, int err, const void *body, size_t n)
{
	struct apr_frame h = { APR_FRAME_MAGIC, type, 0, 0, err };
	uint8_t buf[sizeof(h) + APR_FRAME_MAX];
	int e;

	if (sizeof(h) + n <= APR_FRAME_MAX) {
		h.size = (uint32_t)(sizeof(h) + n);
		memcpy(buf, &h, sizeof(h));
		if (n)
			memcpy(buf + sizeof(h), body, n);
		e = conn_send(k, buf, h.size, NULL, 0);
	} else {
		int fd = apr_bodyfd_create("aprd-body", body, n, NULL, NULL);
		if (fd < 0)
			return fd;
		h.flags = APR_FRAME_FD_BODY;
		h.size = sizeof(h);
		e = conn_send(k, &h, sizeof(h), &fd, 1);
		close(fd);
	}
	return e;
}

/* Later, from the loop: what ends here may be one of many in a row, and nothing may recurse over them. */
static void want_serving(struct worker *w, struct identity *who)
{
	who->serve = w->serve = true;
}

/* ---- ends ------------------------------------------------------------------------------ */

static void unread_done(struct conn *k)
{
	if (k->unread && k->who) {
		k->unread = false;
		k->who->unread--;
	}
}

static void detach(struct worker *w, struct conn *k)
{
	struct session *s = k->session;

	if (!s)
		return;
	s->conn = NULL;
	k->session = NULL;
	s->end_reason = k->reason;
	if (!s->ending) {
		s->ending = true;
		s->detach.fn = core_detach;
		mailbox_post(&w->core.box, &s->detach);
	}
}

void conn_end(struct worker *w, struct conn *k)
{
	struct identity *who = k->who;

	detach(w, k);
	unread_done(k);
	if (who && k->state == CONN_WAITING)
		who->waiting--;
	if (who && k->state == CONN_REFUSED)
		who->refused--;
	loop_unpoll(w->io, k->process);
	if (k->pidfd >= 0)
		close(k->pidfd);
	loop_hangup(w->io, k->watch);
	if (k->next)
		k->next->prev = k->prev;
	if (k->prev)
		k->prev->next = k->next;
	else
		w->conns = k->next;
	w->n_conns--;
	free(k);
	w->ended++;
	if (who) {
		who->connections--;
		want_serving(w, who);
		identity_put(&w->sessions, who);
	}
}

/* err: -errno, with BYE a reason. */
static void conn_refuse(struct worker *w, struct conn *k, uint16_t type, int err, const char *why)
{
	if (type == APR_FRAME_BYE)
		k->reason = (enum apr_reason)err;
	conn_reply(k, type, err, why, strlen(why));
	if (log_allow(&w->refused))
		log_info("uid %u, process %d: refused: %s", (unsigned)k->uid, (int)k->pid, why);
	conn_end(w, k);
}

/* What came is not the protocol. */
static void conn_break(struct worker *w, struct conn *k, const char *why)
{
	if (k->state == CONN_LIVE)
		conn_refuse(w, k, APR_FRAME_BYE, APR_REASON_PROTOCOL, why);
	else
		conn_refuse(w, k, APR_FRAME_WELCOME, -EPROTO, why);
}

/* Time limits are looked at by then. */
static void look_by(struct worker *w, uint64_t ns)
{
	if (ns < w->next_check)
		w->next_check = ns;
}

static uint64_t hello_ns(const struct worker *w)
{
	return w->o.hello_ms * UINT64_C(1000000);
}

static void on_process_end(void *arg, uint32_t events)
{
	struct conn *k = arg;

	(void)events;
	conn_end(worker_of(k), k);
}

/* ---- HELLO and WELCOME -------------------------------------------------------------------- */

static int welcome(struct worker *w, struct conn *k, struct session *s, const struct apr_hello *h)
{
	struct apr_welcome m;
	int fds[3] = { s->req.fd, s->res.fd, s->doorbell };

	(void)h;
	memset(&m, 0, sizeof(m));
	m.hdr = (struct apr_frame){ APR_FRAME_MAGIC, APR_FRAME_WELCOME, 0, sizeof(m), 0 };
	m.major = APR_ABI_MAJOR;
	m.minor = APR_ABI_MINOR;
	m.features = APR_FEATURES;
	m.epoch = w->sessions.epoch;
	m.session = s->id;
	m.req_size = s->geo.req_size;
	m.res_size = s->geo.res_size;
	m.max_inflight = s->geo.max_inflight;
	m.max_input = s->geo.max_input;
	m.max_blob = s->geo.max_blob;
	m.fd_kind[0] = APR_FD_REQ;
	m.fd_kind[1] = APR_FD_RES;
	m.fd_kind[2] = APR_FD_DOORBELL;
	m.opcodes[0] = APR_OPCODES;
	m.poll_us = w->poll_us;
	m.spin_us = w->spin_us;
	pthread_mutex_lock(&w->models.lock);
	struct served *first = models_find(&w->models, 0);
	m.default_model = first ? first->id : 0;
	m.n_models = w->models.n_rows;
	m.models_gen = w->models.gen;
	pthread_mutex_unlock(&w->models.lock);
	__atomic_store_n(&s->ring.res->spin_us, w->spin_us, __ATOMIC_RELAXED);
	__atomic_store_n(&s->ring.res->poll_us, w->poll_us, __ATOMIC_RELAXED);
	__atomic_store_n(&s->ring.res->models_gen, m.models_gen, __ATOMIC_RELAXED);
	return conn_send(k, &m, sizeof(m), fds, 3);
}

static void set_check(struct session *s)
{
	s->check = (struct apr_check){ s->geo.req_arena_off, s->geo.req_arena_len, s->geo.max_input, { APR_OPCODES, 0 },
				       APR_FEATURES, (uint8_t)s->who->may.prio_max };
	s->on_wake = session_on_wake;
	s->on_broken = session_on_broken;
	s->on_bury = session_on_bury;
}

/* Makes k's session and sends WELCOME. */
static void greet(struct worker *w, struct conn *k)
{
	const char *why = "no memory";
	struct session *s;

	if (w->state == STATE_DRAINING) {
		conn_refuse(w, k, APR_FRAME_WELCOME, -ESHUTDOWN, "aprd is draining");
		return;
	}
	k->who->waiting--;
	int e = session_new(&w->sessions, k->who, &k->hello, &s, &why);

	k->state = CONN_LIVE;
	if (e) {
		conn_refuse(w, k, APR_FRAME_WELCOME, e, why);
		return;
	}
	set_check(s);
	s->conn = k;
	k->session = s;
	e = welcome(w, k, s, &k->hello);
	/* the client has them, or it never will */
	apr_region_close_fd(&s->req);
	apr_region_close_fd(&s->res);
	s->attach.fn = core_attach;
	mailbox_post(&w->core.box, &s->attach);
	if (e) {
		if (log_allow(&w->refused))
			log_warn("WELCOME could not be sent: %s", strerror(-e));
		conn_end(w, k);
		return;
	}
	k->unread = true;
	k->who->unread++;
	k->since = apr_now_ns();
	/* a pair is gone from the spares: at once if it was the last, but not before this one is answered */
	look_by(w, w->sessions.n_spare ? k->since + REFILL_MS * UINT64_C(1000000) : 0);
}

/* The one whose HELLO came first, of a process that holds no unread WELCOME where there is such a one. */
static struct conn *next_waiting(const struct worker *w, const struct identity *who)
{
	struct conn *oldest = NULL, *other = NULL;
	pid_t holders[UNREAD_MAX];
	int n = 0;

	for (const struct conn *k = w->conns; k && n < UNREAD_MAX; k = k->next)
		if (k->who == who && k->unread)
			holders[n++] = k->pid;
	for (struct conn *k = w->conns; k; k = k->next) { /* the list begins with the newest */
		if (k->who != who || k->state != CONN_WAITING)
			continue;
		bool holds = false;
		for (int i = 0; i < n; i++)
			holds |= holders[i] == k->pid;
		oldest = k;
		if (!holds)
			other = k;
	}
	return other ? other : oldest;
}

static void serve_waiting(struct worker *w, struct identity *who)
{
	/* a refusal may end the last connection of `who`, so it is looked for before it is looked at */
	uint32_t left = who->connections;

	while (left && (w->state == STATE_DRAINING || (w->models_ready && who->unread < UNREAD_MAX))) {
		left--;
		struct conn *k = next_waiting(w, who);
		if (!k)
			return;
		greet(w, k);
	}
}

static void hello(struct worker *w, struct conn *k, const void *buf, size_t n)
{
	struct apr_fault f = { 0, 0, "not a HELLO" };
	int e = apr_check_hello(buf, n, APR_FEATURES, &k->hello, &f);

	if (e) {
		conn_refuse(w, k, APR_FRAME_WELCOME, e, f.why);
	} else if (w->state == STATE_DRAINING) {
		conn_refuse(w, k, APR_FRAME_WELCOME, -ESHUTDOWN, "aprd is draining");
	} else {
		k->state = CONN_WAITING;
		k->who->waiting++;
		k->since = apr_now_ns();
		look_by(w, k->since + (hello_ns(w) < WANTED_NS ? hello_ns(w) : WANTED_NS));
		want_serving(w, k->who);
	}
}

/* ---- frames after it ------------------------------------------------------------------------ */

static int get_models(struct worker *w, struct conn *k)
{
	struct apr_model_row rows[MODELS_MAX];
	uint32_t n = models_rows(&w->models, rows, MODELS_MAX);

	return conn_reply(k, APR_FRAME_GET_MODELS, 0, rows, n * sizeof(rows[0]));
}

static int get_vocab(struct worker *w, struct conn *k, const uint8_t *body, size_t n)
{
	struct apr_frame h = { APR_FRAME_MAGIC, APR_FRAME_GET_VOCAB, APR_FRAME_FD_BODY, sizeof(h), 0 };
	uint32_t id = 0;

	if (n != sizeof(id))
		return conn_reply(k, APR_FRAME_GET_VOCAB, -EINVAL, "the body is a u32", 17);
	memcpy(&id, body, sizeof(id));
	int fd = models_vocab(&w->models, id);
	if (fd < 0)
		return conn_reply(k, APR_FRAME_GET_VOCAB, fd, "no such model", 13);
	int e = conn_send(k, &h, sizeof(h), &fd, 1);
	close(fd);
	return e;
}

static int status(struct worker *w, struct conn *k)
{
	char *json = status_json(w, k->who);
	int e = json ? conn_reply(k, APR_FRAME_STATUS, 0, json, strlen(json)) : -ENOMEM;

	free(json);
	return e;
}

static void cancel_all(struct worker *w, struct session *s)
{
	bool no = false;

	/* pairs with the store in core_cancel_all: one letter at a time */
	if (s && __atomic_compare_exchange_n(&s->cancelling, &no, true, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
		s->cancel_all.fn = core_cancel_all;
		mailbox_post(&w->core.box, &s->cancel_all);
	}
}

static int not_taken(struct conn *k, uint16_t type)
{
	bool admins = type >= APR_FRAME_LOAD && type <= APR_FRAME_LOG;
	const char *why = admins ? "the admin socket takes this, no other" : "not built";

	return conn_reply(k, type, admins ? -EPERM : -EOPNOTSUPP, why, strlen(why));
}

static void client_frame(struct worker *w, struct conn *k, const struct apr_frame *f, const uint8_t *body, size_t n)
{
	int e = 0;

	if (f->type == APR_FRAME_STATUS) { /* with or without a session */
		e = status(w, k);
	} else if (k->state == CONN_SILENT) {
		hello(w, k, f, n + sizeof(*f));
		return;
	} else if (k->state != CONN_LIVE) {
		conn_refuse(w, k, f->type, -EPROTO, "wait for WELCOME");
		return;
	} else {
		switch (f->type) {
		case APR_FRAME_READY:
			unread_done(k);
			want_serving(w, k->who);
			break;
		case APR_FRAME_GET_MODELS: e = get_models(w, k); break;
		case APR_FRAME_GET_VOCAB: e = get_vocab(w, k, body, n); break;
		case APR_FRAME_CANCEL_ALL: cancel_all(w, k->session); break;
		case APR_FRAME_BYE: conn_end(w, k); return;
		default:
			e = not_taken(k, f->type);
		}
	}
	/* a client that does not read what it asked for */
	if (e == -EAGAIN)
		conn_refuse(w, k, APR_FRAME_BYE, APR_REASON_PROTOCOL, "replies are not read");
	else if (e)
		conn_end(w, k);
}

static void on_frame(void *arg, const void *buf, int len)
{
	struct conn *k = arg;
	struct worker *w = worker_of(k);
	struct apr_frame f;

	if (len <= 0 && len != -EMSGSIZE) {
		conn_end(w, k);
		return;
	}
	if (len < (int)sizeof(f)) {
		conn_break(w, k, len < 0 ? "a frame above what this socket takes" : "not a frame");
		return;
	}
	if (k->state == CONN_REFUSED) { /* it was told; now that this is read, closing takes no frame from it */
		conn_end(w, k);
		return;
	}
	memcpy(&f, buf, sizeof(f));
	if (f.magic != APR_FRAME_MAGIC || f.size != (uint32_t)len) {
		conn_break(w, k, "not a frame of this protocol");
		return;
	}
	if (k->admin)
		admin_frame(w, k, &f, (const char *)buf + sizeof(f), (size_t)len - sizeof(f));
	else
		client_frame(w, k, buf, (const uint8_t *)buf + sizeof(f), (size_t)len - sizeof(f));
}

/* ---- accepting ---------------------------------------------------------------------------- */

static int pidfd_of(pid_t pid)
{
	/* the process may be in another PID namespace (0) or gone; then the hang-up alone tells */
	return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

/* One connection too many. A socket closed with its peer's HELLO unread is a reset there, and the refusal is
 * lost: so it says it, sends no more, and stays until the HELLO is read or its time is over. */
static void refuse_one_more(struct worker *w, struct conn *k)
{
	static const char why[] = "too many connections of this user";

	if (k->who->refused >= LINGER_MAX) {
		conn_refuse(w, k, APR_FRAME_WELCOME, -EDQUOT, why);
		return;
	}
	conn_reply(k, APR_FRAME_WELCOME, -EDQUOT, why, sizeof(why) - 1);
	shutdown(k->fd, SHUT_WR);
	k->state = CONN_REFUSED;
	k->who->refused++;
	look_by(w, k->since + LINGER_MS * UINT64_C(1000000));
	if (log_allow(&w->refused))
		log_info("uid %u, process %d: refused: %s", (unsigned)k->uid, (int)k->pid, why);
}

static void accept_one(struct worker *w, const struct listener *l, int fd)
{
	struct conn *k = calloc(1, sizeof(*k));
	gid_t gid;

	if (!k || apr_peer_cred(fd, &k->pid, &k->uid, &gid)) {
		close(fd);
		free(k);
		return;
	}
	k->w = w;
	k->fd = fd;
	k->admin = l->admin;
	k->pidfd = -1;
	k->id = ++w->next_conn;
	k->since = apr_now_ns();
	k->watch = loop_socket(w->io, fd, l->admin ? APR_FRAME_MAX : CLIENT_FRAME, on_frame, k);
	if (!k->watch) {
		close(fd);
		free(k);
		return;
	}
	k->next = w->conns;
	if (w->conns)
		w->conns->prev = k;
	w->conns = k;
	w->n_conns++;
	if (l->admin) {
		k->state = CONN_LIVE;
		return;
	}
	look_by(w, k->since + REFILL_MS * UINT64_C(1000000));
	k->who = identity_get(&w->sessions, l->tenant, k->uid);
	if (!k->who) {
		conn_end(w, k);
		return;
	}
	identity_groups(&w->sessions, k->who, fd, gid);
	if (++k->who->connections - k->who->refused > k->who->may.connections) {
		refuse_one_more(w, k);
		return;
	}
	k->pidfd = pidfd_of(k->pid);
	if (k->pidfd >= 0)
		k->process = loop_poll(w->io, k->pidfd, POLLIN, true, on_process_end, k);
}

static void on_connect(void *arg, uint32_t events)
{
	struct accepting *a = arg;

	(void)events;
	for (int i = 0; i < 64; i++) { /* then others have their turn; the watch is level-triggered */
		int fd = accept4(a->l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd < 0) {
			if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR && log_allow(&a->w->refused))
				log_warn("accept: %s", strerror(errno));
			if (errno == EMFILE || errno == ENFILE)
				usleep(1000); /* nothing to be done: do not spin on a level-triggered watch */
			return;
		}
		accept_one(a->w, a->l, fd);
	}
}

int conns_listen(struct worker *w)
{
	for (size_t i = 0; i < w->start->n_listeners; i++) {
		w->accepting[i] = (struct accepting){ w, &w->start->listeners[i] };
		w->listeners[i] =
			loop_poll(w->io, w->start->listeners[i].fd, POLLIN, false, on_connect, &w->accepting[i]);
		if (!w->listeners[i])
			return -ENOMEM;
	}
	return 0;
}

void conns_unlisten(struct worker *w)
{
	for (size_t i = 0; i < w->start->n_listeners; i++) {
		loop_unpoll(w->io, w->listeners[i]);
		w->listeners[i] = 0;
	}
}

/* ---- time ----------------------------------------------------------------------------------- */

void conns_serve(struct worker *w)
{
	while (w->serve) {
		w->serve = false;
		for (struct identity *who = w->sessions.identities, *next; who; who = next) {
			next = who->next; /* conn_end may free who, and no other */
			if (who->serve) {
				who->serve = false;
				serve_waiting(w, who);
			}
		}
	}
}

void conns_ready(struct worker *w)
{
	uint64_t now = apr_now_ns();

	/* loading is nobody's fault: their time begins now */
	for (struct conn *k = w->conns; k; k = k->next)
		if (k->state == CONN_WAITING)
			k->since = now;
	look_by(w, now + hello_ns(w));
	for (struct identity *who = w->sessions.identities; who; who = who->next)
		want_serving(w, who);
}

void conns_draining(struct worker *w)
{
	for (struct identity *who = w->sessions.identities; who; who = who->next)
		want_serving(w, who);
}

/* When this connection's time is over; UINT64_MAX: it has a session, or waits for the models. */
static uint64_t due(const struct worker *w, const struct conn *k)
{
	uint64_t all = hello_ns(w);
	bool at_ease = k->state == CONN_LIVE ? !k->unread : k->state == CONN_WAITING && !w->models_ready;

	if (k->admin || at_ease)
		return UINT64_MAX;
	if (k->state == CONN_REFUSED)
		return k->since + LINGER_MS * UINT64_C(1000000);
	if (k->state == CONN_LIVE && k->who->waiting && all > WANTED_NS) {
		struct pollfd p = { k->fd, POLLIN, 0 };
		/* what has come and is not read yet may be READY: then it is we who are late */
		bool came = poll(&p, 1, 0) == 1;
		all = !came ? WANTED_NS : all < 4 * WANTED_NS ? all : 4 * WANTED_NS;
	}
	return k->since + all;
}

static void end_overdue(struct worker *w, enum conn_state state, uint64_t now)
{
	for (struct conn *k = w->conns, *next; k; k = next) {
		next = k->next; /* only k may end here */
		if (k->state != state || due(w, k) > now)
			continue;
		if (state == CONN_LIVE)
			conn_refuse(w, k, APR_FRAME_BYE, APR_REASON_PROTOCOL, "READY did not come in time");
		else if (state == CONN_REFUSED)
			conn_end(w, k);
		else if (state == CONN_SILENT)
			conn_refuse(w, k, APR_FRAME_WELCOME, -ETIMEDOUT, "no HELLO came");
		else
			conn_refuse(w, k, APR_FRAME_WELCOME, -EAGAIN,
				    "too many of this user's connections have not sent READY");
	}
}

uint64_t conns_tick(struct worker *w, uint64_t now)
{
	if (now < w->next_check)
		return w->next_check;
	sessions_refill(&w->sessions);
	end_overdue(w, CONN_REFUSED, now);
	end_overdue(w, CONN_SILENT, now);
	end_overdue(w, CONN_LIVE, now);
	conns_serve(w); /* those that waited for these, before their own time is looked at */
	end_overdue(w, CONN_WAITING, now);
	w->next_check = UINT64_MAX;
	for (const struct conn *k = w->conns; k; k = k->next)
		look_by(w, due(w, k));
	return w->next_check;
}

void conns_bye(struct worker *w, enum apr_reason reason, const char *text)
{
	for (struct conn *k = w->conns, *next; k; k = next) {
		next = k->next;
		if (!k->admin)
			conn_reply(k, APR_FRAME_BYE, (int)reason, text, strlen(text));
		conn_end(w, k);
	}
}

void conns_models_changed(struct worker *w)
{
	struct apr_frame h = { APR_FRAME_MAGIC, APR_FRAME_MODEL_CHANGED, 0, sizeof(h), 0 };

	for (struct conn *k = w->conns; k; k = k->next) {
		if (!k->session)
			continue;
		__atomic_store_n(&k->session->ring.res->models_gen, w->models.gen, __ATOMIC_RELAXED);
		conn_send(k, &h, sizeof(h), NULL, 0); /* models_gen tells it too */
	}
}

void conn_answer(struct worker *w, uint64_t asker, uint16_t type, int err, const char *text)
{
	for (struct conn *k = w->conns; k; k = k->next) {
		if (k->id == asker) {
			if (conn_reply(k, type, err, text, strlen(text)))
				conn_end(w, k);
			return;
		}
	}
}

/* ---- letters from the core -------------------------------------------------------------------- */

void session_on_wake(void *io, struct mail *m)
{
	struct session *s = (struct session *)((char *)m - offsetof(struct session, wake));
	/* pairs with the exchange in wake_by_io: from here on the letter may come again */
	uint32_t how = __atomic_exchange_n(&s->wake_how, 0, __ATOMIC_ACQ_REL);

	(void)io;
	if (how == APR_WAIT_FUTEX) {
		apr_futex_wake(&s->ring.res->cq_tail);
	} else if (s->conn) {
		struct apr_frame h = { APR_FRAME_MAGIC, APR_FRAME_NOTIFY, 0, sizeof(h), 0 };
		conn_send(s->conn, &h, sizeof(h), NULL, 0); /* EAGAIN: it has one to read already */
	}
}

void session_on_broken(void *io, struct mail *m)
{
	struct session *s = (struct session *)((char *)m - offsetof(struct session, broken));
	struct worker *w = io;
	struct conn *k = s->conn;

	if (!k)
		return;
	if (log_allow(&w->broken))
		log_warn("session %llu of uid %u, process %d ends: %s", (unsigned long long)s->id, (unsigned)k->uid,
			 (int)k->pid, s->why);
	conn_reply(k, APR_FRAME_BYE, (int)s->reason, s->why, strlen(s->why));
	conn_end(w, k);
}

void session_on_bury(void *io, struct mail *m)
{
	struct session *s = (struct session *)((char *)m - offsetof(struct session, bury));
	struct worker *w = io;

	session_free(&w->sessions, s);
}
