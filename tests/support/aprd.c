/* SPDX-License-Identifier: MIT */
/* A real aprd for tests: see aprd.h. */
#include "tests/support/aprd.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define START_TIMEOUT_MS 120000 /* sanitizer builds repack slowly */
#define MAX_ARGS 40

static int notify_socket(const char *dir, char *path, size_t n)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -errno;
	snprintf(path, n, "%s/notify.%d", dir, (int)getpid());
	unlink(path);
	if (strlen(path) >= sizeof a.sun_path) {
		close(fd);
		return -ENAMETOOLONG;
	}
	strcpy(a.sun_path, path);
	if (bind(fd, (struct sockaddr *)&a, sizeof a)) {
		int e = -errno;
		close(fd);
		return e;
	}
	return fd;
}

const char *test_aprd_backend(void)
{
	const char *name = getenv("APR_TEST_BACKEND");

	return name && *name ? name : "cpu";
}

static void child(const struct test_aprd *d, const char *program, const char *dir, const char *notify,
		  const char *const *args)
{
	const char *argv[MAX_ARGS + 6] = {program, "-b", test_aprd_backend(), "-s", d->sock};
	int log = open(d->log, O_WRONLY | O_CREAT | O_TRUNC, 0600);

	for (int i = 0; i < MAX_ARGS && args && args[i]; i++) {
		argv[5 + i] = args[i];
		if (strstr(args[i], dir)) /* a model made for the test: its packed weights are of no use later */
			setenv("XDG_CACHE_HOME", dir, 1);
	}
	if (log >= 0) {
		dup2(log, 2);
		close(log);
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	setenv("NOTIFY_SOCKET", notify, 1);
	execv(program, (char *const *)argv);
	fprintf(stderr, "%s: %s\n", program, strerror(errno));
	_exit(127);
}

static void show_log(const struct test_aprd *d)
{
	char buf[4096];
	FILE *f = fopen(d->log, "r");
	size_t n;

	while (f && (n = fread(buf, 1, sizeof buf, f)) > 0)
		fwrite(buf, 1, n, stderr);
	if (f)
		fclose(f);
}

static int wait_ready(struct test_aprd *d, int fd)
{
	char buf[512];

	for (int waited = 0; waited < START_TIMEOUT_MS; waited += 10) {
		struct pollfd p = {.fd = fd, .events = POLLIN};
		int status;

		if (poll(&p, 1, 10) > 0) {
			ssize_t n = recv(fd, buf, sizeof buf - 1, 0);

			buf[n > 0 ? n : 0] = 0;
			if (strstr(buf, "READY=1"))
				return 0;
		}
		if (waitpid(d->pid, &status, WNOHANG) == d->pid) {
			d->pid = 0;
			show_log(d);
			return -ECHILD;
		}
	}
	show_log(d);
	return -ETIMEDOUT;
}

int test_aprd_start(struct test_aprd *d, const char *program, const char *dir, const char *const *args)
{
	static unsigned count;
	char notify[108];
	int fd, rc;

	memset(d, 0, sizeof *d);
	count++;
	snprintf(d->sock, sizeof d->sock, "%s/aprd%u.sock", dir, count);
	snprintf(d->log, sizeof d->log, "%s/aprd%u.log", dir, count);
	fd = notify_socket(dir, notify, sizeof notify);
	if (fd < 0)
		return fd;
	d->pid = fork();
	if (d->pid == 0)
		child(d, program, dir, notify, args);
	rc = d->pid < 0 ? -errno : wait_ready(d, fd);
	close(fd);
	unlink(notify);
	if (rc)
		test_aprd_stop(d);
	return rc;
}

int test_aprd_stop(struct test_aprd *d)
{
	int status = 0;

	if (d->pid <= 0)
		return -1;
	kill(d->pid, SIGTERM);
	for (int i = 0; i < 2000; i++) {
		if (waitpid(d->pid, &status, WNOHANG) == d->pid) {
			d->pid = 0;
			if (!WIFEXITED(status) || WEXITSTATUS(status))
				show_log(d);
			return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
		}
		nanosleep(&(struct timespec){0, 10000000}, NULL);
	}
	kill(d->pid, SIGKILL);
	waitpid(d->pid, &status, 0);
	d->pid = 0;
	return -1;
}

static unsigned count_fds(pid_t pid)
{
	char path[64];
	unsigned n = 0;
	DIR *dir;

	snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
	dir = opendir(path);
	if (!dir)
		return 0;
	for (struct dirent *e; (e = readdir(dir));)
		n += e->d_name[0] != '.';
	closedir(dir);
	return n;
}

/* Pss without the file-backed part: the model's pages come and go with the page cache. */
static uint64_t pss_anon(pid_t pid)
{
	char path[64], line[256];
	unsigned long long anon = 0, shmem = 0;
	FILE *f;

	snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)pid);
	f = fopen(path, "r");
	if (!f)
		return 0;
	while (fgets(line, sizeof line, f)) {
		sscanf(line, "Pss_Anon: %llu", &anon);
		sscanf(line, "Pss_Shmem: %llu", &shmem);
	}
	fclose(f);
	return (anon + shmem) * 1024;
}

static void add_process(pid_t pid, struct test_usage *u)
{
	char path[96];
	int child_pid;
	FILE *f;

	u->fds += count_fds(pid);
	u->pss_anon += pss_anon(pid);
	u->processes++;
	snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)pid, (int)pid);
	f = fopen(path, "r");
	if (!f)
		return;
	while (fscanf(f, "%d", &child_pid) == 1)
		add_process((pid_t)child_pid, u);
	fclose(f);
}

int test_aprd_usage(const struct test_aprd *d, struct test_usage *u)
{
	memset(u, 0, sizeof *u);
	if (d->pid <= 0)
		return -ESRCH;
	add_process(d->pid, u);
	return u->processes ? 0 : -ESRCH;
}
