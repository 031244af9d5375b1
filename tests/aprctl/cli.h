/* SPDX-License-Identifier: MIT */
/*
 * What the suites of aprctl share: running it as a process, reading what it
 * printed, a daemon to run it against.
 */
#ifndef APR_TESTS_CLI_H
#define APR_TESTS_CLI_H

#include "client/fake/fake.h"
#include "tests/harness.h"
#include "tests/support/aprd.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

struct cli {
	const char *socket; /* put behind -s; NULL = none */
	const char *input;  /* standard input's content; NULL = /dev/null */
	int signal; /* sends it this once: when it has printed something, or `busy` has a request */
	const struct fake *busy;
	int status;         /* exit status; 128 + signal */
	char out[262144], err[8192];
	size_t out_len;
};

static inline void cli_slurp_pipe(int fd, char *buf, size_t cap, size_t *n)
{
	char sink[4096];
	ssize_t k = *n + 1 < cap ? read(fd, buf + *n, cap - 1 - *n) : read(fd, sink, sizeof(sink));

	if (k > 0 && *n + 1 < cap)
		*n += (size_t)k;
	buf[*n] = 0;
}

static inline int cli_input_fd(const char *text)
{
	char path[128];
	int fd;

	if (!text)
		return open("/dev/null", O_RDONLY | O_CLOEXEC);
	snprintf(path, sizeof(path), "%s/stdin", apr_test_tmpdir());
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd >= 0 && (write(fd, text, strlen(text)) < 0 || lseek(fd, 0, SEEK_SET)))
		perror(path);
	return fd;
}

/* Runs program with args (NULL at the end) to its end; its status. */
static inline int cli_run_program(struct cli *c, const char *program, const char *const *args)
{
	char path[4096];
	const char *argv[48] = {path};
	int out[2], err[2], in = cli_input_fd(c->input), n = 1, status = 0, open_pipes = 2;
	size_t err_len = 0;
	posix_spawn_file_actions_t fa;
	pid_t pid = -1;

	snprintf(path, sizeof(path), "%s", program);
	if (c->socket) {
		argv[n++] = "-s";
		argv[n++] = c->socket;
	}
	while (*args && n < 47)
		argv[n++] = *args++;
	if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC))
		return -1;
	posix_spawn_file_actions_init(&fa);
	posix_spawn_file_actions_adddup2(&fa, in, 0);
	posix_spawn_file_actions_adddup2(&fa, out[1], 1);
	posix_spawn_file_actions_adddup2(&fa, err[1], 2);
	c->status = posix_spawn(&pid, path, &fa, NULL, (char *const *)(void *)argv, environ) ? 127 : 0;
	posix_spawn_file_actions_destroy(&fa);
	close(in);
	close(out[1]);
	close(err[1]);
	c->out_len = 0;
	c->out[0] = c->err[0] = 0;
	while (open_pipes && !c->status) {
		struct pollfd p[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};

		poll(p, 2, 10);
		if (c->signal && (c->busy ? fake_requests(c->busy) > 0 : c->out_len > 0)) {
			kill(pid, c->signal);
			c->signal = 0;
		}
		if (p[0].revents & POLLIN)
			cli_slurp_pipe(out[0], c->out, sizeof(c->out), &c->out_len);
		if (p[1].revents & POLLIN)
			cli_slurp_pipe(err[0], c->err, sizeof(c->err), &err_len);
		open_pipes = !((p[0].revents & POLLHUP) && (p[1].revents & POLLHUP) && !(p[0].revents & POLLIN) &&
			       !(p[1].revents & POLLIN));
	}
	close(out[0]);
	close(err[0]);
	if (pid > 0 && waitpid(pid, &status, 0) == pid)
		c->status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	return c->status;
}

static inline int cli_run_args(struct cli *c, const char *const *args)
{
	return cli_run_program(c, apr_test_program("aprctl"), args);
}
/* CLI(&c, "status") */
#define CLI(c, ...) cli_run_args(c, (const char *const[]){__VA_ARGS__, NULL})

/* What it printed as one JSON object on one line; NULL and a failed assertion where it is none. */
static inline json_t *cli_json(const struct cli *c)
{
	json_error_t je;
	json_t *j = json_loads(c->out, 0, &je);
	const char *nl = strchr(c->out, '\n');

	if (!j || !json_is_object(j) || !nl || nl[1]) {
		fprintf(stderr, "  status %d, no JSON object on one line: %s%s\n", c->status, c->out, c->err);
		CU_FAIL("no JSON object");
		json_decref(j);
		return NULL;
	}
	return j;
}

/* The object has exactly these keys. */
static inline bool cli_keys(json_t *j, const char *names)
{
	char buf[1024];
	size_t n = 0;
	bool all = json_is_object(j);

	snprintf(buf, sizeof(buf), "%s", names);
	for (char *save, *k = strtok_r(buf, " ", &save); k; k = strtok_r(NULL, " ", &save), n++)
		if (!json_object_get(j, k)) {
			fprintf(stderr, "  no \"%s\"\n", k);
			all = false;
		}
	if (json_object_size(j) != n) {
		char *text = json_dumps(j, 0);

		fprintf(stderr, "  keys other than %s: %.600s\n", names, text ? text : "");
		free(text);
		all = false;
	}
	return all;
}

static inline const char *cli_str(json_t *j, const char *key)
{
	const char *s = json_string_value(json_object_get(j, key));

	return s ? s : "";
}

/* One error line and nothing on stdout. */
static inline bool cli_one_line(const struct cli *c)
{
	const char *nl = strchr(c->err, '\n');

	if (strncmp(c->err, "aprctl: ", 8) || !nl || nl[1]) {
		fprintf(stderr, "  stderr is \"%s\"\n", c->err);
		return false;
	}
	return true;
}

/* A fake daemon in a thread of this process. */
static inline struct fake *cli_fake(struct cli *c, const char *script)
{
	static char path[128];
	static unsigned count;
	struct fake_opts o = {.path = path, .script = script};
	struct fake *f = NULL;
	char err[256] = "";
	int e;

	snprintf(path, sizeof(path), "%s/fake%u.sock", apr_test_tmpdir(), count++);
	memset(c, 0, sizeof(*c));
	c->socket = path;
	e = fake_start(&f, &o, err, sizeof(err));
	if (e)
		fprintf(stderr, "  fake daemon: %s\n", err);
	CU_ASSERT_EQUAL_FATAL(e, 0);
	return f;
}

/* The real daemon with a real model. NULL reason where it runs. */
static inline const char *cli_aprd(struct test_aprd *d, struct cli *c)
{
	static char model[4096], program[4096];
	const char *args[] = {"-m", model, "-c", "2048", NULL}, *found = apr_test_model(SMOLLM2);

	snprintf(program, sizeof(program), "%s", apr_test_program("aprd"));
	if (access(program, X_OK))
		return "aprd is not built";
	if (!found)
		return "the model is not there: scripts/get-model smollm2-135m";
	snprintf(model, sizeof(model), "%s", found);
	memset(c, 0, sizeof(*c));
	c->socket = d->sock;
	CU_ASSERT_EQUAL_FATAL(test_aprd_start(d, program, apr_test_tmpdir(), args), 0);
	return NULL;
}

#endif
