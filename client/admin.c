/* SPDX-License-Identifier: MIT */
/* Owns: the admin socket: one frame there, one frame back. Does not own: what the JSON says. */
#include "client/handle.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct apr_admin {
	int sock;
	pid_t pid; /* this is no hot path: a system call may tell a fork */
};

int apr_admin_path(const char *socket_path, char *buf, size_t n)
{
	const char *slash = strrchr(socket_path, '/');
	const char *name = slash ? slash + 1 : socket_path;
	int dir = (int)(name - socket_path), k;

	if (!strcmp(name, "aprd.sock"))
		k = snprintf(buf, n, "%.*sadmin.sock", dir, socket_path);
	else
		k = snprintf(buf, n, "%s.admin", socket_path);
	return k < 0 || (size_t)k >= n ? -ENAMETOOLONG : k;
}

int apr_admin_open(struct apr_admin **out, const char *path, char *err, size_t errlen)
{
	char client[4096], beside[4096];
	int state;

	apr_say(err, errlen, "%s", "");
	if (!path) {
		int e = apr_socket_path(NULL, client, sizeof(client));
		if (e >= 0)
			e = apr_admin_path(client, beside, sizeof(beside));
		if (e < 0)
			return e;
		path = beside;
	}
	struct apr_admin *a = malloc(sizeof(*a));
	if (!a)
		return -ENOMEM;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	int sock = apr_dial(path, apr_now_ns() + APR_ASK_MS * UINT64_C(1000000), err, errlen);
	pthread_setcancelstate(state, NULL);
	if (sock < 0) {
		free(a);
		return sock;
	}
	a->sock = sock;
	a->pid = getpid();
	*out = a;
	return 0;
}

void apr_admin_close(struct apr_admin *a)
{
	if (!a)
		return;
	close(a->sock);
	free(a);
}

static char *text_of(const void *p, size_t n)
{
	char *s = malloc(n + 1);
	if (s) {
		if (n)
			memcpy(s, p, n);
		s[n] = '\0';
	}
	return s;
}

static int take_reply(const uint8_t *buf, int n, int fd, char **reply, char *err, size_t errlen)
{
	struct apr_frame f;
	struct apr_region r = APR_REGION_INIT;
	const void *body = buf + sizeof(f);
	size_t len = (size_t)n - sizeof(f);

	memcpy(&f, buf, sizeof(f));
	if (f.err) {
		apr_say(err, errlen, "%.*s", (int)len, (const char *)body);
		if (err && errlen && !*err)
			apr_say(err, errlen, "%s", apr_strerror(f.err));
		return f.err < 0 ? f.err : -EPROTO;
	}
	if (!reply)
		return 0;
	if (f.flags & APR_FRAME_FD_BODY) {
		int e = fd < 0 ? -EPROTO : apr_bodyfd_map(&r, fd);
		if (e)
			return e;
		body = r.base;
		len = r.size;
	}
	*reply = text_of(body, len);
	apr_region_unmap(&r);
	return *reply ? 0 : -ENOMEM;
}

static int exchange(struct apr_admin *a, unsigned type, const char *json, char **reply, uint64_t deadline, char *err,
		    size_t errlen)
{
	size_t body = json ? strnlen(json, APR_FRAME_MAX) : 0;
	int fds[4];

	if (body > APR_FRAME_MAX - sizeof(struct apr_frame))
		return -E2BIG;
	uint8_t *buf = malloc(APR_FRAME_MAX);
	if (!buf)
		return -ENOMEM;
	struct apr_frame f = { APR_FRAME_MAGIC, (uint16_t)type, 0, (uint32_t)(sizeof(f) + body), 0 };
	memcpy(buf, &f, sizeof(f));
	if (body)
		memcpy(buf + sizeof(f), json, body);
	int e = apr_frame_send(a->sock, buf, sizeof(f) + body, deadline);
	while (!e) {
		int n = apr_frame_recv(a->sock, buf, APR_FRAME_MAX, fds, deadline);
		if (n <= 0) {
			e = n == -EAGAIN ? -ETIMEDOUT : n ? n : -EPIPE;
			break;
		}
		if (n >= (int)sizeof(f))
			memcpy(&f, buf, sizeof(f));
		if (n < (int)sizeof(f) || f.magic != APR_FRAME_MAGIC || f.size != (uint32_t)n)
			e = -EPROTO;
		bool done = !e && f.type == type; /* others, such as BYE, come unasked */
		if (done)
			e = take_reply(buf, n, fds[0], reply, err, errlen);
		for (int i = 0; i < 4; i++)
			if (fds[i] >= 0)
				close(fds[i]);
		if (done)
			break;
	}
	free(buf);
	return e;
}

int apr_admin_call(struct apr_admin *a, unsigned type, const char *json, char **reply, int timeout_ms, char *err,
		   size_t errlen)
{
	int state;

	apr_say(err, errlen, "%s", "");
	if (a->pid != getpid())
		return -EOWNERDEAD;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	int e = exchange(a, type, json, reply,
			 timeout_ms < 0 ? UINT64_MAX : apr_now_ns() + (uint64_t)timeout_ms * 1000000, err, errlen);
	pthread_setcancelstate(state, NULL);
	if (e && err && errlen && !*err)
		apr_say(err, errlen, "%s", apr_strerror(e));
	return e;
}
