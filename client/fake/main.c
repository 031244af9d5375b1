/* SPDX-License-Identifier: MIT */
/* apr-fake-daemon: the fake daemon as a program. Owns the command line alone. */
#include "client/fake/fake.h"
#include <apr/client.h>
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int stop_fd;

static void on_signal(int sig)
{
	static const uint64_t one = 1;
	ssize_t n = write(stop_fd, &one, sizeof(one)); /* cannot block; saturated, it stops already */

	(void)sig;
	(void)n;
}

static int usage(FILE *out, int status)
{
	fprintf(out,
		"usage: apr-fake-daemon [-v]... [-s SOCKET] [SCRIPT.json]\n"
		"  A daemon without a model for testing programs: it speaks the real protocol and\n"
		"  answers from a script (format: <client/fake/fake.h>), else with random words.\n"
		"  -s SOCKET   where to listen (default as aprctl's)\n"
		"  -v          one line an event; twice: one line an entry\n"
		"  -h          this text\n");
	return status;
}

static char *slurp(const char *path)
{
	FILE *f = fopen(path, "r");
	char *buf = NULL;
	size_t n = 0, cap = 0;

	if (!f)
		return NULL;
	for (;;) {
		size_t k;

		if (n + 4096 > cap) {
			char *b = realloc(buf, cap = n + 65536);

			if (!b)
				break;
			buf = b;
		}
		k = fread(buf + n, 1, 4095, f);
		n += k;
		if (!k)
			break;
	}
	if (buf)
		buf[n] = 0;
	fclose(f);
	return buf;
}

int main(int argc, char **argv)
{
	struct fake_opts o = {.may_kill = 1};
	struct fake *running = NULL;
	char err[256] = "", path[108];
	char *script = NULL;
	int c, e;

	while ((c = getopt(argc, argv, "hs:v")) != -1) {
		if (c == 'h')
			return usage(stdout, 0);
		if (c == 's')
			o.path = optarg;
		else if (c == 'v')
			o.verbose++;
		else
			return usage(stderr, 2);
	}
	if (argc - optind > 1)
		return usage(stderr, 2);
	if (optind < argc) {
		script = slurp(argv[optind]);
		if (!script) {
			fprintf(stderr, "apr-fake-daemon: %s: %s\n", argv[optind], strerror(errno));
			return 1;
		}
		o.script = script;
	}
	if (!o.path) {
		if (apr_socket_path(NULL, path, sizeof(path)) < 0) {
			fprintf(stderr, "apr-fake-daemon: no socket path; give one with -s\n");
			free(script);
			return 1;
		}
		o.path = path;
	}
	e = fake_new(&running, &o, err, sizeof(err));
	free(script);
	if (e) {
		fprintf(stderr, "apr-fake-daemon: %s\n", err);
		return 1;
	}
	stop_fd = fake_stop_fd(running);
	signal(SIGINT, on_signal);
	signal(SIGTERM, on_signal);
	signal(SIGPIPE, SIG_IGN);
	printf("listening on %s\n", o.path);
	fflush(stdout);
	e = fake_run(running);
	fake_free(running);
	if (e)
		fprintf(stderr, "apr-fake-daemon: %s\n", strerror(-e));
	return e ? 1 : 0;
}
