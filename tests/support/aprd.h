/* SPDX-License-Identifier: MIT */
/*
 * A real aprd for a test or bench: started on a socket of its own, waited for, ended.
 *
 * Owns: the child process and the socket's path. Does not own what is asked of it.
 */
#ifndef APR_TEST_APRD_H
#define APR_TEST_APRD_H

#include <stdint.h>
#include <sys/types.h>

struct test_aprd {
	pid_t pid;
	char sock[128];
	char log[160]; /* its stderr goes here */
};

/* The backend that tests ask for where they name none: the CPU, also where there is a GPU; APR_TEST_BACKEND names another. */
const char *test_aprd_backend(void);
/* Runs `program -b BACKEND -s SOCKET args...` (args ends with NULL; another -b among them wins) in folder dir and waits until READY=1 came on a
 * NOTIFY_SOCKET made for it. 0, -ETIMEDOUT, or -ECHILD when it ended first (its log goes to stderr). */
int test_aprd_start(struct test_aprd *d, const char *program, const char *dir, const char *const *args);
/* SIGTERM and wait; its exit status, or -1 when it had to be killed or died by a signal. */
int test_aprd_stop(struct test_aprd *d);

struct test_usage { /* of the daemon and all its children, summed */
	unsigned fds, processes;
	uint64_t pss_anon; /* bytes of private and shared memory without file pages */
};
int test_aprd_usage(const struct test_aprd *d, struct test_usage *u);

#endif
