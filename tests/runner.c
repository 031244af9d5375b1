/* SPDX-License-Identifier: MIT */
/*
 * Runs test programs one after another: a process each, with a timeout.
 *
 * Owns: the time limit, killing a hung suite with all it started, the closing
 * count. Does not own what a suite checks. Exit status of a suite: 0 passed, 77
 * all of it skipped (counted, said), anything else failed.
 *
 *   runner [-t SECONDS] PROGRAM...      APR_TEST_TIMEOUT overrides the default of 900 s, which only a hang exceeds
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static pid_t start(const char *program)
{
	pid_t pid = fork();

	if (pid == 0) {
		setpgid(0, 0);
		execl(program, program, (char *)NULL);
		fprintf(stderr, "runner: %s: %s\n", program, strerror(errno));
		_exit(126);
	}
	return pid;
}

/* Waits for pid; past the limit the whole process group is killed. Returns the wait status, -1 on timeout. */
static int wait_limited(pid_t pid, double limit)
{
	double end = now() + limit;
	int status;

	for (;;) {
		pid_t got = waitpid(pid, &status, WNOHANG);

		if (got == pid || (got < 0 && errno != EINTR))
			break;
		if (now() > end) {
			kill(-pid, SIGKILL);
			waitpid(pid, &status, 0);
			return -1;
		}
		nanosleep(&(struct timespec){0, 5000000}, NULL);
	}
	kill(-pid, SIGKILL); /* what a suite left running does not outlive it */
	return status;
}

int main(int argc, char **argv)
{
	const char *env = getenv("APR_TEST_TIMEOUT");
	double limit = env ? atof(env) : 900, began = now();
	unsigned passed = 0, failed = 0, skipped = 0;
	int first = 1;

	if (argc > 2 && !strcmp(argv[1], "-t")) {
		limit = atof(argv[2]);
		first = 3;
	}
	setvbuf(stdout, NULL, _IOLBF, 1024);
	for (int i = first; i < argc; i++) {
		double t = now();
		pid_t pid = start(argv[i]);
		int status = pid < 0 ? 1 : wait_limited(pid, limit);
		const char *verdict = "passed";

		if (status == 0) {
			passed++;
		} else if (status >= 0 && WIFEXITED(status) && WEXITSTATUS(status) == 77) {
			skipped++;
			verdict = "SKIPPED";
		} else {
			failed++;
			verdict = status == -1 ? "FAILED (timeout)" : "FAILED";
		}
		printf("\n== %s: %s in %.1f s\n", argv[i], verdict, now() - t);
		if (status > 0 && WIFSIGNALED(status))
			printf("   killed by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
	}
	printf("suites, %.0f s in all:\n%u passed, %u failed, %u skipped\n", now() - began, passed, failed, skipped);
	return failed ? 1 : 0;
}
