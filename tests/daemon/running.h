/* SPDX-License-Identifier: MIT */
/*
 * A running aprd for the tests of this folder: started as a program, stopped, asked.
 * And a client written by hand over the sockets and rings, for what libaprclient
 * would never do. Every suite includes it once.
 */
#ifndef TESTS_DAEMON_RUNNING_H
#define TESTS_DAEMON_RUNNING_H

#include "shm/region.h"
#include "shm/ring.h"
#include "tests/harness.h"
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"
#include <apr/client.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UNUSED __attribute__((unused))

struct daemon {
	pid_t pid;
	char sock[108], log[128], env_loop[16];
	int stderr_fd; /* -1: to the log file */
};

/* ---- time, files ---------------------------------------------------------------- */

static inline double now_s(void)
{
	return (double)apr_now_ns() * 1e-9;
}

static inline void sleep_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

/* The tiny model that most suites serve; written once. */
UNUSED static const char *tiny_path(void)
{
	static char path[128];
	struct tiny_spec spec = { .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32 };

	if (!path[0]) {
		snprintf(path, sizeof(path), "%s/tiny.gguf", apr_test_tmpdir());
		if (apr_test_write_tiny_model(path, &spec))
			abort();
	}
	return path;
}

UNUSED static char *file_text(const char *path)
{
	FILE *f = fopen(path, "re");
	char *text = calloc(1, 65536);

	if (f && text) {
		(void)!fread(text, 1, 65535, f);
		fclose(f);
	}
	return text;
}

UNUSED static int log_has(const struct daemon *d, const char *what)
{
	char *text = file_text(d->log);
	int has = text && strstr(text, what) != NULL;

	free(text);
	return has;
}

/* ---- starting and stopping ----------------------------------------------------------- */

/* Arguments after the program's name and a -b that they may override; the last is NULL. stderr goes to d->log. Does not wait. */
UNUSED static void daemon_spawn(struct daemon *d, const char *const *args)
{
	const char *argv[44] = { "aprd", "-b", test_aprd_backend() };
	char program[4200];
	int n = 3;

	while (args[n - 3]) {
		argv[n] = args[n - 3];
		n++;
	}
	if (getenv("APR_TEST_TWO_DEEP")) { /* test_two_deep.c runs a suite again */
		argv[n++] = "-b";
		argv[n++] = "cuda";
	}
	argv[n] = NULL;
	snprintf(program, sizeof(program), "%s",
		 apr_test_program(getenv("APR_TEST_TWO_DEEP") ? "two_deep/aprd" : "aprd"));
	fflush(NULL);
	unlink(d->log); /* what an earlier one said is no news */
	d->pid = fork();
	if (d->pid)
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	int fd = d->stderr_fd >= 0 ? d->stderr_fd : open(d->log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
	dup2(fd, 2);
	if (d->stderr_fd == -2)
		close(2);
	setenv("XDG_CACHE_HOME", apr_test_tmpdir(), 1);
	if (d->env_loop[0])
		setenv("APR_LOOP", d->env_loop, 1);
	execv(program, (char *const *)argv);
	_exit(127);
}

UNUSED static void daemon_name(struct daemon *d, const char *name)
{
	memset(d, 0, sizeof(*d));
	d->stderr_fd = -1;
	snprintf(d->sock, sizeof(d->sock), "%s/%s.sock", apr_test_tmpdir(), name);
	snprintf(d->log, sizeof(d->log), "%s/%s.log", apr_test_tmpdir(), name);
}

/* 1 once "ready" is in the log; 0 it ended or 20 s are over. */
UNUSED static int daemon_ready(struct daemon *d)
{
	for (int i = 0; i < 2000; i++) {
		if (log_has(d, "ready on"))
			return 1;
		if (waitpid(d->pid, NULL, WNOHANG) == d->pid) {
			d->pid = 0;
			return 0;
		}
		sleep_ms(10);
	}
	return 0;
}

/* The tiny model, one compute thread, and what else is given (NULL-terminated). */
UNUSED static int daemon_start(struct daemon *d, const char *name, ...)
{
	const char *args[36] = { "-m", NULL, "-s", d->sock, "-t", "1" };
	int n = 6;
	va_list ap;

	if (name)
		daemon_name(d, name);
	args[1] = tiny_path();
	va_start(ap, name);
	while ((args[n] = va_arg(ap, const char *)))
		n++;
	va_end(ap);
	daemon_spawn(d, args);
	int ok = daemon_ready(d);
	CU_ASSERT_TRUE(ok);
	if (!ok) {
		char *text = file_text(d->log);
		fprintf(stderr, "aprd did not start: %s\n", text);
		free(text);
	}
	return ok;
}

/* Its exit status, 128 + signal, -1 still alive after `seconds` (then it is killed). */
UNUSED static int daemon_wait(struct daemon *d, double seconds)
{
	double end = now_s() + seconds;
	int status;

	while (d->pid > 0) {
		if (waitpid(d->pid, &status, WNOHANG) == d->pid) {
			d->pid = 0;
			return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
		}
		if (now_s() > end) {
			kill(d->pid, SIGKILL);
			waitpid(d->pid, NULL, 0);
			d->pid = 0;
			return -1;
		}
		sleep_ms(5);
	}
	return -1;
}

UNUSED static int daemon_stop(struct daemon *d)
{
	if (d->pid <= 0)
		return -1;
	kill(d->pid, SIGTERM);
	int status = daemon_wait(d, 10);
	if (getenv("APR_TEST_LOG")) {
		char *text = file_text(d->log);
		fprintf(stderr, "%s", text);
		free(text);
	}
	return status;
}

/* ---- asking ------------------------------------------------------------------------------ */

UNUSED static int admin(const struct daemon *d, unsigned type, const char *json, char **reply, char *err, size_t errlen)
{
	char path[140];
	struct apr_admin *a;

	if (reply)
		*reply = NULL;
	if (apr_admin_path(d->sock, path, sizeof(path)) < 0)
		return -ENAMETOOLONG;
	int e = apr_admin_open(&a, path, err, errlen);
	if (e)
		return e;
	e = apr_admin_call(a, type, json, reply, 20000, err, errlen);
	apr_admin_close(a);
	return e;
}

UNUSED static json_t *status_of(const struct daemon *d)
{
	char *text = NULL, err[200];

	if (admin(d, APR_FRAME_STATUS, NULL, &text, err, sizeof(err)))
		return NULL;
	json_t *j = json_loads(text, 0, NULL);
	free(text);
	return j;
}

/* A number of status by a path of keys: "kv.pages_free". -1 where there is none. */
UNUSED static long status_number(const struct daemon *d, const char *path)
{
	json_t *j = status_of(d), *at = j;
	char key[64];
	long v = -1;

	while (at && *path) {
		size_t n = strcspn(path, ".");
		snprintf(key, sizeof(key), "%.*s", (int)n, path);
		at = json_object_get(at, key);
		path += n + (path[n] == '.');
	}
	if (json_is_integer(at))
		v = (long)json_integer_value(at);
	json_decref(j);
	return v;
}

/* Waits until it has this value, 5 s at most. */
UNUSED static int status_becomes(const struct daemon *d, const char *path, long want)
{
	for (int i = 0; i < 500; i++) {
		if (status_number(d, path) == want)
			return 1;
		sleep_ms(10);
	}
	return status_number(d, path) == want;
}

UNUSED static unsigned descriptors_of(pid_t pid)
{
	char path[64];
	unsigned n = 0;

	snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	DIR *dir = opendir(path);
	while (dir && readdir(dir))
		n++;
	if (dir)
		closedir(dir);
	return n;
}

UNUSED static struct apr *connect_to(const struct daemon *d)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;
	char err[200] = "";

	o.path = d->sock;
	int e = apr_connect(&c, &o, err, sizeof(err));
	if (e)
		fprintf(stderr, "connect: %d %s\n", e, err);
	CU_ASSERT_EQUAL(e, 0);
	return c;
}

/* ---- a client by hand ----------------------------------------------------------------------- */

struct hand {
	int sock, doorbell;
	struct apr_region req, res;
	struct apr_geometry geo;
	struct apr_rc ring;
	struct apr_welcome welcome;
	int err;         /* of the WELCOME */
	char why[512];
};

UNUSED static int hand_socket(const struct daemon *d)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	memcpy(a.sun_path, d->sock, strlen(d->sock) + 1);
	if (connect(fd, (struct sockaddr *)&a, sizeof(a))) {
		int e = -errno;
		close(fd);
		return e;
	}
	return fd;
}

UNUSED static struct apr_hello hand_hello(void)
{
	struct apr_hello h;

	memset(&h, 0, sizeof(h));
	h.hdr = (struct apr_frame){ APR_FRAME_MAGIC, APR_FRAME_HELLO, 0, sizeof(h), 0 };
	h.major = APR_ABI_MAJOR;
	h.minor = APR_ABI_MINOR;
	strcpy(h.name, "hand");
	return h;
}

/* A frame within ms: its length, 0 hang-up, -ETIMEDOUT. fds: -1 filled. */
UNUSED static int hand_recv(int sock, void *buf, size_t n, int fds[3], int ms)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(3 * sizeof(int))];
	} control;
	struct iovec iov = { buf, n };
	struct msghdr msg = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
	};
	struct pollfd p = { sock, POLLIN, 0 };

	if (fds)
		fds[0] = fds[1] = fds[2] = -1;
	if (poll(&p, 1, ms) != 1)
		return -ETIMEDOUT;
	ssize_t got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
	if (got < 0)
		return errno == ECONNRESET ? 0 : -errno;
	struct cmsghdr *h = CMSG_FIRSTHDR(&msg);
	if (h && fds)
		memcpy(fds, CMSG_DATA(h), h->cmsg_len - CMSG_LEN(0));
	return (int)got;
}

UNUSED static void hand_close(struct hand *h)
{
	apr_region_unmap(&h->req);
	apr_region_unmap(&h->res);
	if (h->doorbell >= 0)
		close(h->doorbell);
	if (h->sock >= 0)
		close(h->sock);
	h->sock = h->doorbell = -1;
}

/* 0, or the WELCOME's err (h->why says its words). */
UNUSED static int hand_open(struct hand *h, const struct daemon *d, const struct apr_hello *hello)
{
	struct apr_hello usual = hand_hello();
	uint8_t buf[512];
	int fds[3];

	memset(h, 0, sizeof(*h));
	h->req = h->res = (struct apr_region)APR_REGION_INIT;
	h->doorbell = -1;
	h->sock = hand_socket(d);
	if (h->sock < 0)
		return h->sock;
	if (!hello)
		hello = &usual;
	if (send(h->sock, hello, sizeof(*hello), MSG_NOSIGNAL) < 0)
		return -errno;
	int n = hand_recv(h->sock, buf, sizeof(buf) - 1, fds, 15000);
	if (n < (int)sizeof(struct apr_frame))
		return n ? n : -EPIPE;
	memcpy(&h->welcome, buf, n < (int)sizeof(h->welcome) ? (size_t)n : sizeof(h->welcome));
	h->err = h->welcome.hdr.err;
	if (h->err) {
		buf[n] = 0;
		snprintf(h->why, sizeof(h->why), "%s", (char *)buf + sizeof(struct apr_frame));
		return h->err;
	}
	int e = apr_region_map(&h->req, fds[0], APR_FD_REQ, h->welcome.req_size);
	if (!e)
		e = apr_region_map(&h->res, fds[1], APR_FD_RES, h->welcome.res_size);
	h->req.fd = fds[0]; /* kept: some tests attack it */
	h->res.fd = fds[1];
	h->doorbell = fds[2];
	if (!e)
		e = apr_geometry_read(h->res.base, h->welcome.req_size, h->welcome.res_size, &h->geo, NULL);
	if (e)
		return e;
	apr_rc_init(&h->ring, h->req.base, h->res.base, &h->geo);
	struct apr_frame ready = { APR_FRAME_MAGIC, APR_FRAME_READY, 0, sizeof(ready), 0 };
	return send(h->sock, &ready, sizeof(ready), MSG_NOSIGNAL) < 0 ? -errno : 0;
}

/* Into the queue, and seen with what is submitted next. */
UNUSED static void hand_write(struct hand *h, const struct apr_sqe *sqe)
{
	struct apr_sqe *slot = apr_rc_sqe(&h->ring);

	CU_ASSERT_PTR_NOT_NULL_FATAL(slot);
	memcpy(slot, sqe, sizeof(*sqe));
}

UNUSED static void hand_submit(struct hand *h, const struct apr_sqe *sqe)
{
	hand_write(h, sqe);
	apr_rc_publish(&h->ring, h->ring.sq_tail);
	if (apr_rc_need_wakeup(&h->ring))
		apr_doorbell_ring(h->doorbell);
}

/* The next entry within ms, copied; 0 or -ETIMEDOUT. */
UNUSED static int hand_next(struct hand *h, struct apr_cqe *out, int ms)
{
	double end = now_s() + ms * 1e-3;

	while (!apr_rc_cq_ready(&h->ring)) {
		if (now_s() > end)
			return -ETIMEDOUT;
		sleep_ms(1);
	}
	memcpy(out, apr_rc_cqe(&h->ring, 0), sizeof(*out));
	if (apr_rc_cq_advance(&h->ring, 1))
		apr_doorbell_ring(h->doorbell);
	return 0;
}

/* Entries until the last one of user_data. Its res, or -ETIMEDOUT. tokens (may be NULL) counts TOKENs. */
UNUSED static int hand_finish(struct hand *h, uint64_t user_data, struct apr_cqe *last, unsigned *tokens, int ms)
{
	struct apr_cqe e;

	for (;;) {
		int r = hand_next(h, &e, ms);
		if (r)
			return r;
		if (tokens && e.user_data == user_data && e.type == APR_CQE_TOKEN)
			++*tokens;
		if (e.user_data == user_data && (e.type == APR_CQE_FINAL || e.type == APR_CQE_ACK)) {
			if (last)
				*last = e;
			return e.res;
		}
	}
}

/* Has the daemon ended this session? Waits for the hang-up. */
UNUSED static int hand_ended(struct hand *h, int ms)
{
	uint8_t buf[512];
	double end = now_s() + ms * 1e-3;

	while (now_s() < end) {
		int n = hand_recv(h->sock, buf, sizeof(buf), NULL, 50);
		if (n == 0)
			return 1;
		if (n < 0 && n != -ETIMEDOUT)
			return 1;
	}
	return 0;
}

/* A NOP of a fresh session is answered: the daemon lives and serves. */
UNUSED static int alive(const struct daemon *d)
{
	struct hand h;
	struct apr_sqe nop = { .op = APR_OP_NOP, .user_data = 7 };
	int ok = 0;

	if (!hand_open(&h, d, NULL)) {
		hand_submit(&h, &nop);
		ok = hand_finish(&h, 7, NULL, NULL, 5000) == 0;
	}
	hand_close(&h);
	return ok;
}

#endif
