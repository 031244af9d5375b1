/* SPDX-License-Identifier: MIT */
/*
 * Owns: the socket: dialling, sending and receiving frames, asking and hearing.
 * Does not own: what HELLO and WELCOME agree on (session.c).
 */
#include "client/handle.h"
#include "shm/wire.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

void apr_dump_frame(const struct apr *c, const char *dir, const void *frame, size_t len)
{
	char line[512];

	if (c->debug)
		fprintf(stderr, "apr %s %s\n", dir, apr_wire_frame(frame, len, line, sizeof(line)));
}

/* Waits for events on fd until the deadline; 0, -EAGAIN at the deadline. */
static int poll_until(int fd, short events, uint64_t deadline_ns)
{
	for (;;) {
		uint64_t now = apr_now_ns();
		if (now >= deadline_ns)
			return -EAGAIN;
		uint64_t ms = (deadline_ns - now + 999999) / 1000000;
		struct pollfd p = { fd, events, 0 };
		int r = poll(&p, 1, ms > 1000000 ? 1000000 : (int)ms);
		if (r > 0)
			return 0;
		if (r < 0 && errno != EINTR)
			return -errno;
	}
}

/* Is the peer one to hand requests to? root, we ourselves, or who owns the socket's directory and so
 * decides what is in it. */
static int check_peer(int sock, const char *path, char *err, size_t errlen)
{
	char dir[sizeof(((struct sockaddr_un *)0)->sun_path) + 1];
	struct stat st;
	uid_t uid;

	int e = apr_peer_cred(sock, NULL, &uid, NULL);
	if (e)
		return e;
	if (uid == 0 || uid == geteuid())
		return 0;
	snprintf(dir, sizeof(dir), "%s", path);
	char *slash = strrchr(dir, '/');
	if (slash)
		slash[slash == dir] = '\0';
	else
		snprintf(dir, sizeof(dir), ".");
	if (!stat(dir, &st) && st.st_uid == uid)
		return 0;
	apr_say(err, errlen, "%s: its daemon runs as uid %u, which is neither root, ours, nor the directory's owner", path,
		(unsigned)uid);
	return -EPERM;
}

/* Not where something stands that is no socket, which is refused the same way. */
static bool nobody_listens(int e, const char *path)
{
	struct stat st;

	return e == -ENOENT || (e == -ECONNREFUSED && !stat(path, &st) && S_ISSOCK(st.st_mode));
}

int apr_dial(const char *path, uint64_t deadline_ns, char *err, size_t errlen)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };

	size_t len = strnlen(path, sizeof(sa.sun_path));
	if (len == sizeof(sa.sun_path)) {
		apr_say(err, errlen, "%s: too long for a socket's path", path);
		return -ENAMETOOLONG;
	}
	memcpy(sa.sun_path, path, len);
	int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (sock < 0) {
		int e = -errno;
		apr_say(err, errlen, "socket: %s", apr_strerror(e));
		return e;
	}
	int e;
	/* EAGAIN: the listener's queue is full, and nothing tells when it is not */
	while ((e = connect(sock, (const struct sockaddr *)&sa, sizeof(sa)) ? -errno : 0) == -EAGAIN || e == -EINTR) {
		if (apr_now_ns() >= deadline_ns) {
			e = -ETIMEDOUT;
			break;
		}
		if (e == -EAGAIN)
			poll(NULL, 0, 5);
	}
	if (nobody_listens(e, path))
		apr_say(err, errlen, "no daemon at %s: start one with aprd -m FILE.gguf, or name its socket in APRD_SOCKET", path);
	else if (e)
		apr_say(err, errlen, "%s: %s", path, apr_strerror(e));
	else
		e = check_peer(sock, path, err, errlen);
	if (e) {
		close(sock);
		return e;
	}
	return sock;
}

int apr_frame_send(int sock, const void *frame, size_t len, uint64_t deadline_ns)
{
	for (;;) {
		ssize_t n = send(sock, frame, len, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n >= 0)
			return 0;
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN)
			return errno == ECONNRESET || errno == ENOTCONN ? -EPIPE : -errno;
		int e = poll_until(sock, POLLOUT, deadline_ns);
		if (e)
			return e;
	}
}

static void take_fds(struct msghdr *m, int fds[4])
{
	int k = 0;

	for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		size_t n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(fd));
			if (k < 4)
				fds[k++] = fd;
			else
				close(fd);
		}
	}
}

int apr_frame_recv(int sock, void *buf, size_t cap, int fds[4], uint64_t deadline_ns)
{
	union {
		char bytes[CMSG_SPACE(4 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec v = { buf, cap };
	bool reset = false;

	fds[0] = fds[1] = fds[2] = fds[3] = -1;
	for (;;) {
		struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = &control,
				    .msg_controllen = sizeof(control) };
		ssize_t n = recvmsg(sock, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
		if (n >= 0) {
			take_fds(&m, fds);
			if (!(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
				return (int)n;
			for (int i = 0; i < 4; i++)
				if (fds[i] >= 0)
					close(fds[i]);
			return -EPROTO;
		}
		if (errno == EINTR)
			continue;
		/* the peer closed with a frame of ours unread: told once, and ahead of what it had sent us before */
		if (errno == ECONNRESET && !reset) {
			reset = true;
			continue;
		}
		if (errno == ECONNRESET)
			return 0;
		if (errno != EAGAIN)
			return -errno;
		int e = deadline_ns ? poll_until(sock, POLLIN, deadline_ns) : -EAGAIN;
		if (e)
			return e;
	}
}

static void close_fds(int fds[4])
{
	for (int i = 0; i < 4; i++) {
		if (fds[i] >= 0)
			close(fds[i]);
		fds[i] = -1;
	}
}

/* A frame that nobody asked for, or a hang-up. */
static void hear(struct apr *c, const uint8_t *buf, int n)
{
	struct apr_frame f;

	if (n == 0) {
		apr_check_dead(c); /* its reason is better than "hung up" */
		apr_died(c, "the daemon hung up");
		return;
	}
	if ((size_t)n < sizeof(f)) {
		apr_died(c, "the daemon sent a frame shorter than its header");
		return;
	}
	memcpy(&f, buf, sizeof(f));
	if (f.magic != APR_FRAME_MAGIC || f.size != (uint32_t)n) {
		apr_died(c, "the daemon sent a frame that is none");
	} else if (f.type == APR_FRAME_MODEL_CHANGED) {
		c->models_changed = true;
		free(c->rows);
		c->rows = NULL;
	} else if (f.type == APR_FRAME_BYE) {
		char text[256];
		int len = n - (int)sizeof(f) < 255 ? n - (int)sizeof(f) : 255;
		snprintf(text, sizeof(text), "%.*s", len, (const char *)buf + sizeof(f));
		apr_died(c, *text ? text : "the daemon said goodbye");
	} else if (f.type < 16 && c->skip[f.type]) {
		c->skip[f.type]--;
	}
}

int apr_drain(struct apr *c)
{
	uint8_t *buf = NULL;
	uint8_t small[512];

	while (!c->dead) {
		/* long answers to questions given up on are rare: look first */
		ssize_t want = recv(c->sock, small, sizeof(small), MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
		if (want < 0 && errno == EINTR)
			continue;
		if (want < 0 && errno == EAGAIN)
			break;
		size_t cap = sizeof(small);
		uint8_t *to = small;
		if (want > (ssize_t)cap) {
			cap = APR_FRAME_MAX;
			if (!buf)
				buf = malloc(cap);
			if (!buf)
				return -ENOMEM;
			to = buf;
		}
		int fds[4];
		int n = apr_frame_recv(c->sock, to, cap, fds, 0);
		close_fds(fds);
		if (n == -EAGAIN)
			break;
		if (n > 0)
			apr_dump_frame(c, "<", to, (size_t)n);
		if (n < 0)
			apr_died(c, "the socket failed");
		else
			hear(c, to, n);
	}
	free(buf);
	return c->dead ? -EPIPE : 0;
}

static int send_question(struct apr *c, unsigned type, const void *send, size_t len, uint64_t deadline)
{
	uint8_t *out = calloc(1, sizeof(struct apr_frame) + len);
	if (!out)
		return -ENOMEM;
	struct apr_frame f = { APR_FRAME_MAGIC, (uint16_t)type, 0, (uint32_t)(sizeof(f) + len), 0 };
	memcpy(out, &f, sizeof(f));
	if (len)
		memcpy(out + sizeof(f), send, len);
	apr_dump_frame(c, ">", out, sizeof(f) + len);
	int e = apr_frame_send(c->sock, out, sizeof(f) + len, deadline);
	free(out);
	return e;
}

/* The answer in buf becomes the caller's. */
static int take_answer(const uint8_t *buf, int n, int fds[4], void **body, size_t *len, int *fd, char *err,
		       size_t errlen)
{
	struct apr_frame f;

	memcpy(&f, buf, sizeof(f));
	size_t k = (size_t)n - sizeof(f);
	if (f.err) {
		apr_say(err, errlen, "%.*s", (int)k, (const char *)buf + sizeof(f));
		return f.err < 0 ? f.err : -EPROTO;
	}
	char *copy = malloc(k + 1);
	if (!copy)
		return -ENOMEM;
	memcpy(copy, buf + sizeof(f), k);
	copy[k] = '\0';
	*body = copy;
	*len = k;
	*fd = f.flags & APR_FRAME_FD_BODY ? fds[0] : -1;
	if (*fd >= 0)
		fds[0] = -1;
	return 0;
}

int apr_ask(struct apr *c, unsigned type, const void *send, size_t send_len, void **body, size_t *len, int *fd,
	    char *err, size_t errlen)
{
	uint64_t deadline = apr_now_ns() + APR_ASK_MS * UINT64_C(1000000);

	*body = NULL;
	*fd = -1;
	apr_check_dead(c);
	if (c->dead)
		return -EPIPE;
	uint8_t *buf = malloc(APR_FRAME_MAX);
	if (!buf)
		return -ENOMEM;
	int e = send_question(c, type, send, send_len, deadline);
	bool open = !e; /* asked, not answered */
	while (!e) {
		int fds[4];
		int n = apr_frame_recv(c->sock, buf, APR_FRAME_MAX, fds, deadline);
		struct apr_frame f = { 0 };
		if (n >= (int)sizeof(f))
			memcpy(&f, buf, sizeof(f));
		if (n > 0)
			apr_dump_frame(c, "<", buf, (size_t)n);
		bool ours = f.magic == APR_FRAME_MAGIC && f.size == (uint32_t)n && f.type == type && !c->skip[type];
		if (n < 0) {
			e = n == -EAGAIN ? -ETIMEDOUT : n;
		} else if (ours) {
			open = false;
			e = take_answer(buf, n, fds, body, len, fd, err, errlen);
			close_fds(fds);
			break;
		} else {
			hear(c, buf, n);
			if (c->dead)
				e = -EPIPE;
		}
		close_fds(fds);
	}
	if (open && e == -ETIMEDOUT)
		c->skip[type]++; /* it may still come and is then nobody's */
	free(buf);
	return e;
}
