/* SPDX-License-Identifier: MIT */
/* Owns: the handle's life, its lock, what a fork and a death mean to it. Does not own: sessions (session.c). */
#include "client/handle.h"
#include "shm/errors.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

void apr_say(char *err, size_t errlen, const char *fmt, ...)
{
	va_list ap;

	if (!err || !errlen)
		return;
	va_start(ap, fmt);
	vsnprintf(err, errlen, fmt, ap);
	va_end(ap);
}

bool apr_forked(const struct apr *c)
{
	return !*c->mark;
}

int apr_enter(struct apr *c)
{
	if (apr_forked(c)) /* before the lock: a thread of the parent may have held it */
		return -EOWNERDEAD;
	if (c->locked)
		pthread_mutex_lock(&c->lock);
	return 0;
}

int apr_leave(struct apr *c, int ret)
{
	if (c->locked)
		pthread_mutex_unlock(&c->lock);
	return ret;
}

void apr_died(struct apr *c, const char *why)
{
	if (!c->dead)
		snprintf(c->why, sizeof(c->why), "%s", why);
	c->dead = true;
}

static const char *reason_text(uint32_t reason)
{
	static const char *const text[] = {
		[APR_REASON_NONE] = "the daemon ended the session",
		[APR_REASON_SHUTDOWN] = "the daemon shut down",
		[APR_REASON_RESTART] = "the daemon restarts",
		[APR_REASON_PROTOCOL] = "this client broke a rule of the ring",
		[APR_REASON_FAULT] = "this client's memory could not be read",
		[APR_REASON_QUOTA] = "above what this user may have",
		[APR_REASON_ADMIN] = "an administrator ended the session",
	};
	return reason < sizeof(text) / sizeof(text[0]) ? text[reason] : text[0];
}

void apr_check_dead(struct apr *c)
{
	/* pairs with the release in apr_rd_dead: all entries written before it are visible with it */
	if (!c->dead && c->rc.res && (__atomic_load_n(&c->rc.res->flags, __ATOMIC_ACQUIRE) & APR_RES_DEAD))
		apr_died(c, reason_text(__atomic_load_n(&c->rc.res->reason, __ATOMIC_RELAXED)));
}

uint64_t apr_draw_seed(struct apr *c)
{
	if (!c->n_seeds) {
		uint8_t *p = (uint8_t *)c->seeds;
		size_t left = sizeof(c->seeds);
		while (left) {
			ssize_t n = getrandom(p, left, 0);
			if (n < 0 && errno != EINTR) { /* no such call here: differ at least from run to run */
				for (uint32_t i = 0; i < APR_SEEDS; i++)
					c->seeds[i] = (apr_now_ns() ^ (uintptr_t)c) * UINT64_C(0x9e3779b97f4a7c15) + i;
				break;
			}
			if (n > 0) {
				p += n;
				left -= (size_t)n;
			}
		}
		c->n_seeds = APR_SEEDS;
	}
	return c->seeds[--c->n_seeds];
}

int apr_socket_path(const char *path, char *buf, size_t n)
{
	const char *run = getenv("XDG_RUNTIME_DIR");
	struct stat st;
	int k;

	if (!path || !*path)
		path = getenv("APRD_SOCKET");
	if (path && *path) {
		k = snprintf(buf, n, "%s", path);
		return k < 0 || (size_t)k >= n ? -ENAMETOOLONG : k;
	}
	if (run && *run) {
		k = snprintf(buf, n, "%s/aprd/aprd.sock", run);
		if (k > 0 && (size_t)k < n && !stat(buf, &st))
			return k;
	}
	k = snprintf(buf, n, "/run/aprd/aprd.sock");
	return k < 0 || (size_t)k >= n ? -ENAMETOOLONG : k;
}

static int init_locks(struct apr *c)
{
	pthread_mutexattr_t m;
	pthread_condattr_t a;

	pthread_mutexattr_init(&m);
	pthread_mutexattr_settype(&m, PTHREAD_MUTEX_RECURSIVE);
	int e = pthread_mutex_init(&c->lock, &m);
	pthread_mutexattr_destroy(&m);
	if (!e)
		e = pthread_mutex_init(&c->call, NULL);
	pthread_condattr_init(&a);
	pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
	if (!e)
		e = pthread_cond_init(&c->awake, &a);
	pthread_condattr_destroy(&a);
	return -e;
}

static int init_mark(struct apr *c)
{
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (page == MAP_FAILED)
		return -errno;
	c->mark = page;
	if (madvise(page, 4096, MADV_WIPEONFORK))
		return -errno;
	*c->mark = 1;
	return 0;
}

static void drop(struct apr *c)
{
	if (c->mark)
		munmap((void *)(uintptr_t)c->mark, 4096);
	free(c->path);
	free(c->rows);
	free(c->lost);
	free(c);
}

/* Takes what size says of the caller's options, so that they can grow. */
static int take_opts(struct apr *c, const struct apr_opts *o, char *err, size_t errlen)
{
	static const struct apr_opts defaults = APR_OPTS_INIT;
	char buf[4096];

	c->opts = defaults;
	if (o) {
		if (o->size < offsetof(struct apr_opts, zero) || o->size > sizeof(*o)) {
			apr_say(err, errlen, "options: size %u is not one this library knows", o->size);
			return -EINVAL;
		}
		memcpy(&c->opts, o, o->size);
	}
	o = &c->opts;
	if (o->flags & ~(APR_CONNECT_LOCKED | APR_CONNECT_RECONNECT | APR_CONNECT_RING_ALWAYS)) {
		apr_say(err, errlen, "options: unknown flag in %#x", o->flags);
		return -EINVAL;
	}
	if (o->wait > APR_WAIT_SOCKET || o->zero[0] || o->zero[1] || o->zero[2] || o->zero[3]) {
		apr_say(err, errlen, "options: unknown wait or a reserved field that is not zero");
		return -EINVAL;
	}
	int e = apr_socket_path(o->path, buf, sizeof(buf));
	if (e < 0)
		return e;
	c->path = strdup(buf);
	if (!c->path)
		return -ENOMEM;
	snprintf(c->name, sizeof(c->name), "%s", o->name ? o->name : program_invocation_short_name);
	if (!c->opts.wait)
		c->opts.wait = APR_WAIT_FUTEX;
	if (!c->opts.connect_ms)
		c->opts.connect_ms = 5000;
	if (!c->opts.reconnect_ms)
		c->opts.reconnect_ms = 5000;
	c->opts.path = c->path;
	c->opts.name = c->name;
	c->locked = o->flags & APR_CONNECT_LOCKED;
	c->ring_always = o->flags & APR_CONNECT_RING_ALWAYS;
	const char *debug = getenv("APR_DEBUG");
	c->debug = debug && *debug && strcmp(debug, "0") != 0;
	return 0;
}

int apr_connect(struct apr **out, const struct apr_opts *opts, char *err, size_t errlen)
{
	int state;

	apr_say(err, errlen, "%s", "");
	struct apr *c = calloc(1, sizeof(*c));
	if (!c) {
		apr_say(err, errlen, "out of memory");
		return -ENOMEM;
	}
	c->sock = c->bell = -1;
	c->req.fd = c->res.fd = -1;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	int e = init_mark(c);
	if (!e)
		e = init_locks(c);
	if (!e)
		e = take_opts(c, opts, err, errlen);
	if (!e)
		e = apr_session_open(c, apr_now_ns() + c->opts.connect_ms * UINT64_C(1000000), 0, 0, err, errlen);
	if (e) {
		if (err && errlen && !*err)
			apr_say(err, errlen, "%s", apr_strerror(e));
		drop(c);
	} else {
		*out = c;
	}
	pthread_setcancelstate(state, NULL);
	return e;
}

void apr_close(struct apr *c)
{
	if (!c)
		return;
	/* in a child the regions are not mapped (MADV_DONTFORK); its copies of the descriptors are its own */
	if (apr_forked(c)) {
		c->req.base = c->res.base = NULL;
	} else {
		pthread_cond_destroy(&c->awake);
		pthread_mutex_destroy(&c->call);
		pthread_mutex_destroy(&c->lock);
	}
	apr_session_shut(c);
	apr_flights_free(c);
	drop(c);
}

const struct apr_welcome *apr_info(const struct apr *c)
{
	return apr_forked(c) ? NULL : &c->info;
}

int apr_has(const struct apr *c, uint64_t feature)
{
	return apr_forked(c) ? -EOWNERDEAD : (c->info.features & feature) == feature;
}

int apr_can(const struct apr *c, unsigned opcode)
{
	if (apr_forked(c))
		return -EOWNERDEAD;
	return opcode < APR_OP_LIMIT && (c->info.opcodes[opcode / 64] >> opcode % 64 & 1);
}

int apr_state(const struct apr *c)
{
	if (apr_forked(c))
		return -EOWNERDEAD;
	if (!c->rc.res)
		return APR_RES_DEAD;
	uint32_t flags = __atomic_load_n(&c->rc.res->flags, __ATOMIC_ACQUIRE);
	return (int)(c->dead ? flags | APR_RES_DEAD : flags);
}

const char *apr_why(struct apr *c)
{
	if (apr_enter(c))
		return "this process was forked from the one that connected";
	apr_check_dead(c);
	const char *why = c->dead ? c->why : "";
	apr_leave(c, 0);
	return why;
}

int apr_fd(const struct apr *c)
{
	if (apr_forked(c))
		return -EOWNERDEAD;
	return c->sock >= 0 ? c->sock : -EPIPE;
}

int apr_lock(struct apr *c)
{
	if (apr_forked(c))
		return -EOWNERDEAD;
	return c->locked ? -pthread_mutex_lock(&c->lock) : -EINVAL;
}

int apr_unlock(struct apr *c)
{
	if (apr_forked(c))
		return -EOWNERDEAD;
	return c->locked ? -pthread_mutex_unlock(&c->lock) : -EINVAL;
}

const char *apr_strerror(int err)
{
	const char *text = apr_errno_meaning(err);
	return text ? text : err ? "an error that this protocol has no words for" : "no error";
}
