/* SPDX-License-Identifier: MIT */
/* Owns: the futex and eventfd calls. See wake.h. Does not own: when they are made. */
#include "shm/wake.h"
#include <errno.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

int apr_futex_wait(const uint32_t *addr, uint32_t val, uint64_t ns)
{
	struct timespec t = { (time_t)(ns / 1000000000u), (long)(ns % 1000000000u) };

	/* FUTEX_WAIT only reads the word: a read-only map does */
	if (syscall(SYS_futex, addr, FUTEX_WAIT, val, &t, NULL, 0) == 0)
		return 0;
	return -errno;
}

int apr_futex_wake(const uint32_t *addr)
{
	/* one: a word may have thousands of hostile waiters, and a session has one thread that sleeps */
	long n = syscall(SYS_futex, addr, FUTEX_WAKE, 1, NULL, NULL, 0);
	return n < 0 ? -errno : (int)n;
}

int apr_doorbell_ring(int efd)
{
	static const uint64_t one = 1;
	ssize_t n;

	do
		n = write(efd, &one, sizeof(one));
	while (n < 0 && errno == EINTR);
	if (n >= 0 || errno == EAGAIN) /* saturated: it is rung already */
		return 0;
	return -errno;
}
