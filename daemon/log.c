/* SPDX-License-Identifier: MIT */
/*
 * Owns: writing a line or dropping it. See log.h.
 *
 * stderr is shared with whoever started aprd, so O_NONBLOCK (which lives in the
 * shared description) is not ours to set. poll says whether a pipe, terminal or
 * socket takes a line now; a line is at most PIPE_BUF bytes, so that it goes in
 * whole. A full disk is an error of write, which is ignored.
 */
#include "daemon/log.h"
#include "shm/wake.h"
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 1024 };

static struct {
	int level;
	uint32_t dropped;
} logger = { LOG_LEVEL_INFO, 0 };

void log_set_level(enum log_level level)
{
	__atomic_store_n(&logger.level, (int)level, __ATOMIC_RELAXED);
}

int log_parse_level(const char *name, enum log_level *level)
{
	static const char *const names[] = { "warn", "info", "debug" };

	for (int i = 0; i < 3; i++) {
		if (!strcmp(name, names[i])) {
			*level = (enum log_level)i;
			return 0;
		}
	}
	return -EINVAL;
}

static void put(const char *line, size_t n)
{
	struct pollfd p = { STDERR_FILENO, POLLOUT, 0 };

	if (poll(&p, 1, 0) != 1 || !(p.revents & POLLOUT) || (p.revents & (POLLERR | POLLHUP | POLLNVAL)) ||
	    write(STDERR_FILENO, line, n) != (ssize_t)n)
		__atomic_fetch_add(&logger.dropped, 1, __ATOMIC_RELAXED);
}

static void say(const char *what, const char *fmt, va_list ap)
{
	char line[LINE_MAX_BYTES];
	int at = snprintf(line, sizeof(line), "aprd: %s", what);
	int saved = errno;
	uint32_t dropped = __atomic_exchange_n(&logger.dropped, 0, __ATOMIC_RELAXED);

	if (dropped)
		at += snprintf(line + at, sizeof(line) - (size_t)at, "[%u lines lost] ", dropped);
	int n = vsnprintf(line + at, sizeof(line) - (size_t)at - 1, fmt, ap);
	size_t len = (size_t)at + (n < 0 ? 0 : (size_t)n);
	if (len > sizeof(line) - 2)
		len = sizeof(line) - 2;
	/* a line is a line, whatever a peer or a file put into it */
	for (size_t i = 0; i < len; i++)
		if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
			line[i] = '?';
	line[len++] = '\n';
	put(line, len);
	errno = saved;
}

#define LOG_FUNCTION(name, at, what) \
	void name(const char *fmt, ...) \
	{ \
		va_list ap; \
		if (__atomic_load_n(&logger.level, __ATOMIC_RELAXED) < (int)(at)) \
			return; \
		va_start(ap, fmt); \
		say(what, fmt, ap); \
		va_end(ap); \
	}
LOG_FUNCTION(log_error, LOG_LEVEL_WARN, "error: ") /* always said */
LOG_FUNCTION(log_warn, LOG_LEVEL_WARN, "warning: ")
LOG_FUNCTION(log_info, LOG_LEVEL_INFO, "")
LOG_FUNCTION(log_debug, LOG_LEVEL_DEBUG, "debug: ")

bool log_allow(struct log_rate *r)
{
	uint64_t window = apr_now_ns() / 1000000000u / LOG_RATE_SECONDS + 1;
	uint64_t old = __atomic_load_n(&r->window, __ATOMIC_RELAXED);

	/* a race lets one line more or fewer through; the limit needs no exactness */
	if (old != window &&
	    __atomic_compare_exchange_n(&r->window, &old, window, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
		__atomic_store_n(&r->used, 0, __ATOMIC_RELAXED);
		uint32_t held = __atomic_exchange_n(&r->held, 0, __ATOMIC_RELAXED);
		if (held)
			log_warn("%u lines like the next were held back", held);
	}
	if (__atomic_fetch_add(&r->used, 1, __ATOMIC_RELAXED) < LOG_RATE_BURST)
		return true;
	__atomic_fetch_add(&r->held, 1, __ATOMIC_RELAXED);
	return false;
}
