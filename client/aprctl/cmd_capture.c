/* SPDX-License-Identifier: MIT */
/* Owns: the program that capture runs, its folder and socket, the file's first line. */
#include "client/aprctl/capture.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Which models there are, so that replay can tell other numerics from a fault. */
static int write_head(struct ctl *c, FILE *f)
{
	json_t *command = json_array(), *models = json_array(), *j;
	struct apr_model_row *rows = NULL;
	struct apr *s;
	size_t n = 0;
	int status = ctl_connect(c, 0, &s);

	if (!status) {
		int e = apr_get_models(s, &rows, &n);

		if (e)
			status = ctl_fail(c, "asking for the models: %s", apr_strerror(e));
		apr_close(s);
	}
	for (size_t i = 0; i < n; i++) {
		char hex[33];

		ctl_hex(rows[i].receipt, sizeof(rows[i].receipt), hex);
		json_array_append_new(models, json_pack("{s:I, s:s, s:s}", "id", (json_int_t)rows[i].id, "name", rows[i].name,
							"numerics", hex));
	}
	free(rows);
	for (int i = 1; i < c->n_args; i++)
		json_array_append_new(command, ctl_json_text(c->args[i], strlen(c->args[i])));
	j = json_pack("{s:i, s:s, s:o, s:o}", "aprctl_capture", 1, "abi", "0.1", "command", command, "models", models);
	if (!status && (json_dumpf(j, f, JSON_COMPACT) || fputc('\n', f) == EOF))
		status = ctl_fail(c, "%s: %s", c->args[0], strerror(errno));
	json_decref(j);
	return status;
}

/* In the child: aprctl's own verb, or a program that finds the socket in its environment. */
static void become(struct ctl *c, char *socket)
{
	char **argv = calloc((size_t)c->n_args + 5, sizeof(*argv));
	int n = 0;

	if (!argv)
		_exit(126);
	signal(SIGPIPE, SIG_DFL);
	setenv("APRD_SOCKET", socket, 1);
	if (ctl_find_verb(c->args[1]) >= 0) {
		argv[n++] = (char *)"aprctl";
		argv[n++] = (char *)"-s";
		argv[n++] = socket;
		if (c->json)
			argv[n++] = (char *)"--json";
	}
	memcpy(argv + n, c->args + 1, (size_t)(c->n_args - 1) * sizeof(*argv));
	if (n)
		execv("/proc/self/exe", argv);
	else
		execvp(argv[0], argv);
	fprintf(stderr, "aprctl: capture: %s: %s\n", c->args[1], strerror(errno));
	_exit(127);
}

static int run(struct ctl *c, FILE *f, const char *daemon, char *socket)
{
	struct sigaction ignore = {.sa_handler = SIG_IGN}, before;
	struct proxy *p;
	int e = proxy_new(&p, socket, daemon, f), child, status = 0;
	pid_t pid;

	if (e)
		return ctl_fail(c, "%s: %s", socket, strerror(-e));
	fflush(stdout);
	pid = fork();
	if (pid == 0)
		become(c, socket);
	child = pid < 0 ? -1 : (int)syscall(SYS_pidfd_open, pid, 0);
	if (child < 0) {
		proxy_free(p);
		return ctl_fail(c, "starting %s: %s", c->args[1], strerror(errno));
	}
	sigaction(SIGINT, &ignore, &before); /* Ctrl-C is for the program: its last words are wanted */
	e = proxy_run(p, child);
	sigaction(SIGINT, &before, NULL);
	proxy_free(p);
	if (e)
		kill(pid, SIGTERM);
	waitpid(pid, &status, 0);
	close(child);
	if (e)
		return ctl_fail(c, "%s: %s", c->args[0], strerror(-e));
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int cmd_capture(struct ctl *c)
{
	const char *tmp = getenv("TMPDIR");
	char dir[80], path[108], daemon[256];
	FILE *f;
	int status;

	/* FILE may stand before or after a --; getopt has taken one of them */
	if (c->n_args > 1 && !strcmp(c->args[1], "--")) {
		c->args[1] = c->args[0];
		c->args++;
		c->n_args--;
	}
	if (c->n_args < 2)
		return ctl_usage(c, "give FILE and, after --, a verb or a program to run");
	if (apr_socket_path(c->socket, daemon, sizeof(daemon)) < 0)
		return ctl_fail(c, "the socket's path is too long");
	if (snprintf(dir, sizeof(dir), "%s/aprctl.XXXXXX", tmp && *tmp ? tmp : "/tmp") >= (int)sizeof(dir))
		return ctl_fail(c, "TMPDIR is too long for a socket's path");
	if (!mkdtemp(dir))
		return ctl_fail(c, "%s: %s", dir, strerror(errno));
	snprintf(path, sizeof(path), "%s/aprd.sock", dir);
	f = fopen(c->args[0], "we");
	status = f ? write_head(c, f) : ctl_fail(c, "%s: %s", c->args[0], strerror(errno));
	if (!status)
		status = run(c, f, daemon, path);
	if (f && fclose(f) && !status)
		status = ctl_fail(c, "%s: %s", c->args[0], strerror(errno));
	rmdir(dir);
	return status;
}
