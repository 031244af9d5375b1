/* SPDX-License-Identifier: MIT */
/*
 * The fake daemon's loop: listening, accepting, polling, closing.
 *
 * Owns: the sockets' paths and locks, epoll, the life of sessions. Does not own:
 * what frames mean (fake_frames.c), rings (fake_session.c), requests (fake_req.c).
 */
#include "client/fake/fake_int.h"
#include <apr/client.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

void fake_say(const struct fake *f, const char *fmt, ...)
{
	va_list ap;

	if (!f->o.verbose)
		return;
	va_start(ap, fmt);
	fputs("apr-fake-daemon: ", stderr);
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
	va_end(ap);
}

/* ---- beginning and end -------------------------------------------------------- */

static int listen_at(const char *path, int mode)
{
	struct sockaddr_un sa = {.sun_family = AF_UNIX};
	struct stat st;
	int fd, e;

	if (strlen(path) >= sizeof(sa.sun_path))
		return -ENAMETOOLONG;
	memcpy(sa.sun_path, path, strlen(path));
	if (!lstat(path, &st)) {
		if (!S_ISSOCK(st.st_mode))
			return -EEXIST;
		unlink(path);
	}
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	if (bind(fd, (struct sockaddr *)&sa, sizeof(sa)) || chmod(path, (mode_t)mode) || listen(fd, 128)) {
		e = -errno;
		close(fd);
		return e;
	}
	return fd;
}

static int watch(struct fake *f, int fd, uint32_t events, void *what)
{
	struct epoll_event ev = {.events = events, .data.ptr = what};

	return epoll_ctl(f->epoll_fd, EPOLL_CTL_ADD, fd, &ev) ? -errno : 0;
}

/* The owner of SOCKET.lock owns the socket's path; the lock file stays. */
static int lock_path(struct fake *f, char *err, size_t errlen)
{
	char lock[128];

	snprintf(lock, sizeof(lock), "%s.lock", f->path);
	f->lock_fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (f->lock_fd < 0 || flock(f->lock_fd, LOCK_EX | LOCK_NB)) {
		int e = -errno;

		snprintf(err, errlen, "%s: %s", lock, e == -EWOULDBLOCK ? "another daemon owns this socket" : strerror(-e));
		return e;
	}
	return 0;
}

static int open_all(struct fake *f, char *err, size_t errlen)
{
	int e = lock_path(f, err, errlen);

	if (e)
		return e;
	f->listen_fd = listen_at(f->path, 0666);
	f->admin_fd = f->listen_fd < 0 ? -1 : listen_at(f->admin_path, 0600);
	if (f->listen_fd < 0 || f->admin_fd < 0) {
		e = f->listen_fd < 0 ? f->listen_fd : f->admin_fd;
		snprintf(err, errlen, "%s: %s", f->listen_fd < 0 ? f->path : f->admin_path, strerror(-e));
		return e;
	}
	f->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	f->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (f->epoll_fd < 0 || f->stop_fd < 0)
		e = -errno;
	if (!e)
		e = watch(f, f->listen_fd, EPOLLIN, &f->listen_fd);
	if (!e)
		e = watch(f, f->admin_fd, EPOLLIN, &f->admin_fd);
	if (!e)
		e = watch(f, f->stop_fd, EPOLLIN, &f->stop_fd);
	if (e)
		snprintf(err, errlen, "epoll: %s", strerror(-e));
	return e;
}

int fake_new(struct fake **out, const struct fake_opts *o, char *err, size_t errlen)
{
	struct fake *f = calloc(1, sizeof(*f));
	int e;

	if (!f)
		return -ENOMEM;
	f->lock_fd = f->listen_fd = f->admin_fd = f->epoll_fd = f->stop_fd = -1;
	f->o = *o;
	f->started = apr_now_ns();
	f->epoch = fake_mix(f->started, (uint64_t)getpid()) | 1;
	f->next_session = 1;
	e = o->path && strlen(o->path) < sizeof(f->path) ? 0 : -ENAMETOOLONG;
	if (e || apr_admin_path(o->path, f->admin_path, sizeof(f->admin_path)) < 0) {
		snprintf(err, errlen, "socket path is missing or too long");
		free(f);
		return -ENAMETOOLONG;
	}
	memcpy(f->path, o->path, strlen(o->path));
	f->o.path = f->path;
	e = fake_script_read(&f->script, o->script, err, errlen);
	f->o.script = NULL;
	if (!e)
		e = open_all(f, err, errlen);
	if (!e) {
		e = apr_guard_install();
		if (e)
			snprintf(err, errlen, "SIGBUS handler: %s", strerror(-e));
	}
	if (e) {
		fake_free(f);
		return e;
	}
	f->models[0].id = 1;
	f->next_model = 2;
	f->n_models = 1;
	f->models_gen = 1;
	memcpy(f->models[0].name, f->script.model, sizeof(f->models[0].name));
	*out = f;
	return 0;
}

static void free_session(struct fake_session *s)
{
	fake_session_drop_requests(s);
	for (size_t i = 0; i < sizeof(s->convs) / sizeof(*s->convs); i++)
		free(s->convs[i].ids);
	if (s->ready || s->req.base)
		apr_arena_free(&s->arena);
	apr_region_unmap(&s->req);
	apr_region_unmap(&s->res);
	close(s->sock);
	if (s->bell >= 0)
		close(s->bell);
	if (s->pidfd >= 0)
		close(s->pidfd);
	fake_count(&s->f->n_sessions, -1);
	free(s);
}

void fake_free(struct fake *f)
{
	if (!f)
		return;
	while (f->sessions) {
		struct fake_session *s = f->sessions;

		f->sessions = s->next;
		free_session(s);
	}
	while (f->admins) {
		struct fake_client *c = f->admins;

		f->admins = c->next;
		close(c->sock);
		free(c);
	}
	if (f->admin_fd >= 0)
		unlink(f->admin_path);
	if (f->listen_fd >= 0)
		unlink(f->path);
	int fds[] = {f->admin_fd, f->listen_fd, f->epoll_fd, f->stop_fd, f->lock_fd};
	for (size_t i = 0; i < sizeof(fds) / sizeof(*fds); i++)
		if (fds[i] >= 0)
			close(fds[i]);
	fake_script_free(&f->script);
	free(f);
}

int fake_stop_fd(const struct fake *f)
{
	return f->stop_fd;
}

void fake_stop(struct fake *f)
{
	uint64_t one = 1;
	int saved = errno;

	if (write(f->stop_fd, &one, sizeof(one)) < 0)
		errno = saved; /* saturated: it stops already */
}

/* ---- accepting ------------------------------------------------------------------ */

static void accept_client(struct fake *f)
{
	int sock = accept4(f->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct fake_session *s;

	if (sock < 0)
		return;
	s = calloc(1, sizeof(*s));
	if (!s) {
		close(sock);
		return;
	}
	*s = (struct fake_session){.f = f, .sock = sock, .bell = -1, .pidfd = -1, .id = f->next_session++,
				   .opened = apr_now_ns(), .req = APR_REGION_INIT, .res = APR_REGION_INIT};
	fake_count(&f->n_sessions, 1);
	s->next = f->sessions;
	f->sessions = s;
	apr_peer_cred(sock, &s->pid, &s->uid, NULL);
	s->pidfd = (int)syscall(SYS_pidfd_open, s->pid, 0); /* a forked child may keep the socket open */
	if (watch(f, sock, EPOLLIN | EPOLLRDHUP, s) || (s->pidfd >= 0 && watch(f, s->pidfd, EPOLLIN | EPOLLET, s)))
		s->gone = true;
}

static void accept_admin(struct fake *f)
{
	int sock = accept4(f->admin_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct fake_client *c = sock < 0 ? NULL : calloc(1, sizeof(*c));

	if (!c) {
		if (sock >= 0)
			close(sock);
		return;
	}
	c->sock = sock;
	c->next = f->admins;
	f->admins = c;
	if (watch(f, sock, EPOLLIN | EPOLLRDHUP, c))
		c->gone = true;
}

/* ---- the loop ------------------------------------------------------------------- */

static bool process_gone(const struct fake_session *s)
{
	return s->pidfd >= 0 && syscall(SYS_pidfd_send_signal, s->pidfd, 0, NULL, 0) && errno == ESRCH;
}

static void session_event(struct fake *f, struct fake_session *s, uint32_t events)
{
	char byte;

	if (s->gone)
		return;
	if (!s->ready && (events & EPOLLIN)) {
		fake_hello(s);
		/* the doorbell is only polled, edge-triggered, never read: its mode is the client's to change */
		if (s->ready && watch(f, s->bell, EPOLLIN | EPOLLET, s))
			s->gone = true;
	} else if (s->ready) {
		for (int i = 0; i < 16 && !s->gone && recv(s->sock, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0; i++) {
			if (s->dead) /* nothing more is answered */
				break;
			fake_session_frame(s);
		}
	}
	if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) || process_gone(s))
		s->gone = true;
}

static bool is_session(const struct fake *f, const void *p)
{
	for (const struct fake_session *s = f->sessions; s; s = s->next)
		if (s == p)
			return true;
	return false;
}

static bool is_admin(const struct fake *f, const void *p)
{
	for (const struct fake_client *c = f->admins; c; c = c->next)
		if (c == p)
			return true;
	return false;
}

static void event(struct fake *f, const struct epoll_event *ev)
{
	if (ev->data.ptr == &f->listen_fd) {
		accept_client(f);
	} else if (ev->data.ptr == &f->admin_fd) {
		accept_admin(f);
	} else if (ev->data.ptr == &f->stop_fd) {
		f->stopping = true;
	} else if (is_session(f, ev->data.ptr)) {
		session_event(f, ev->data.ptr, ev->events);
	} else if (is_admin(f, ev->data.ptr)) {
		struct fake_client *c = ev->data.ptr;

		if (ev->events & EPOLLIN)
			fake_admin_frame(f, c);
		if (ev->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
			c->gone = true;
	}
}

static void sweep(struct fake *f)
{
	for (struct fake_session **p = &f->sessions; *p;) {
		struct fake_session *s = *p;

		if (s->gone) {
			*p = s->next;
			fake_say(f, "session %llu closed", (unsigned long long)s->id);
			free_session(s);
		} else {
			p = &s->next;
		}
	}
	for (struct fake_client **p = &f->admins; *p;) {
		struct fake_client *c = *p;

		if (c->gone) {
			*p = c->next;
			close(c->sock);
			free(c);
		} else {
			p = &c->next;
		}
	}
}

/* Runs every session; when the first of them has something to do next, 0 = when told. */
static uint64_t run_sessions(struct fake *f)
{
	uint64_t now = apr_now_ns(), next = 0;

	for (struct fake_session *s = f->sessions; s; s = s->next) {
		uint64_t t = 0;

		if (s->ready && !s->dead && !s->gone)
			t = fake_session_run(s, now);
		else if (!s->ready && now > s->opened + UINT64_C(5000000000))
			s->gone = true; /* a silent HELLO */
		else if (!s->ready)
			t = s->opened + UINT64_C(5000000000) + 1;
		if (t && (!next || t < next))
			next = t;
	}
	if (f->draining) {
		if (now >= f->drain_at || !f->n_requests)
			f->stopping = true;
		else if (!next || f->drain_at < next)
			next = f->drain_at;
	}
	return next;
}

static void say_goodbye(struct fake *f)
{
	for (struct fake_session *s = f->sessions; s; s = s->next)
		if (s->ready && !s->dead) {
			fake_session_cancel(s, NULL, -ESHUTDOWN);
			fake_session_flush(s);
			fake_session_end(s, APR_REASON_SHUTDOWN, "the daemon ends");
		}
}

int fake_run(struct fake *f)
{
	struct epoll_event evs[64];
	int e = apr_guard_thread();

	while (!e && !f->stopping) {
		uint64_t next = run_sessions(f), now = apr_now_ns();
		int n, ms = !next ? -1 : next <= now ? 0 : (int)((next - now + 999999) / 1000000);

		sweep(f);
		if (f->stopping)
			break;
		n = epoll_wait(f->epoll_fd, evs, 64, ms);
		if (n < 0 && errno != EINTR)
			e = -errno;
		for (int i = 0; i < n; i++)
			event(f, &evs[i]);
		sweep(f);
	}
	say_goodbye(f);
	return e;
}

/* ---- in a thread ----------------------------------------------------------------- */

static void *thread_main(void *arg)
{
	fake_run(arg);
	return NULL;
}

int fake_start(struct fake **out, const struct fake_opts *o, char *err, size_t errlen)
{
	int e = fake_new(out, o, err, errlen);

	if (e)
		return e;
	(*out)->o.may_kill = 0;
	e = -pthread_create(&(*out)->thread, NULL, thread_main, *out);
	if (e) {
		snprintf(err, errlen, "thread: %s", strerror(-e));
		fake_free(*out);
		*out = NULL;
		return e;
	}
	(*out)->threaded = true;
	return 0;
}

void fake_end(struct fake *f)
{
	if (!f)
		return;
	fake_stop(f);
	if (f->threaded)
		pthread_join(f->thread, NULL);
	fake_free(f);
}

unsigned fake_sessions(const struct fake *f)
{
	return __atomic_load_n(&f->n_sessions, __ATOMIC_RELAXED);
}

unsigned fake_requests(const struct fake *f)
{
	return __atomic_load_n(&f->n_requests, __ATOMIC_RELAXED);
}
