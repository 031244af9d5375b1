/* SPDX-License-Identifier: MIT */
/* Owns: datagrams to NOTIFY_SOCKET. See notify.h. */
#include "daemon/notify.h"
#include "daemon/log.h"
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void notify(const char *fmt, ...)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	char text[256];
	va_list ap;

	if (!path || (*path != '/' && *path != '@') || strlen(path) >= sizeof(a.sun_path))
		return;
	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	memcpy(a.sun_path, path, strlen(path));
	socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
	if (*path == '@')
		a.sun_path[0] = '\0';
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return;
	if (sendto(fd, text, strlen(text), MSG_NOSIGNAL, (struct sockaddr *)&a, len) < 0)
		log_warn("NOTIFY_SOCKET %s: %s", path, strerror(errno));
	close(fd);
}

uint64_t notify_watchdog_ms(void)
{
	const char *usec = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
	unsigned long long us = usec ? strtoull(usec, NULL, 10) : 0;

	if (!getenv("NOTIFY_SOCKET") || (pid && strtol(pid, NULL, 10) != (long)getpid()))
		return 0;
	return us && us < 2000 ? 1 : us / 2000;
}
