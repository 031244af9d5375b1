/* SPDX-License-Identifier: MIT */
/*
 * An event loop with poll(2): lines typed on standard input are continued while
 * others still run; one descriptor tells of tokens, model changes and the daemon's
 * end. Any loop that watches descriptors works the same way: apr_arm before it
 * sleeps, apr_poll after it wakes, entries until -EAGAIN.
 *   cc event_loop.c $(pkg-config --cflags --libs libaprclient) -o event_loop
 */
#include <apr/client.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static uint64_t next_id = 1;

static void submit_line(struct apr *c, const char *line, size_t len)
{
	struct apr_sqe *q = apr_get_sqe(c);

	if (!q || apr_prep_generate(c, q, line, len, 32)) {
		printf("(too much at once: wait for an answer)\n");
		return;
	}
	apr_sqe_flags(q, APR_SQE_ADD_BOS);
	apr_sqe_user_data(q, next_id++);
	apr_submit(c); /* -EBUSY: it goes out with a later apr_submit */
}

static int take_entries(struct apr *c)
{
	const struct apr_cqe *e;
	int r;

	while (!(r = apr_peek_cqe(c, &e))) {
		size_t n = 0;
		const char *text = apr_cqe_text(c, e, &n);

		if (text)
			printf("%llu: \"%.*s\"\n", (unsigned long long)e->user_data, (int)n, text);
		if (apr_cqe_last(e))
			printf("%llu: done (%s)\n", (unsigned long long)e->user_data, apr_strerror(e->res));
		apr_cqe_seen(c, e);
	}
	apr_submit(c); /* what was held back for want of credits */
	return r == -EAGAIN ? 0 : r;
}

int main(void)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;
	char err[256], line[4096];
	int r, typing = 1;

	o.wait = APR_WAIT_SOCKET;
	r = apr_connect(&c, &o, err, sizeof(err));
	if (r) {
		fprintf(stderr, "%s\n", err);
		return 1;
	}
	while (!r && (typing || apr_unfinished(c))) {
		struct pollfd fds[2] = {{apr_fd(c), POLLIN, 0}, {typing ? STDIN_FILENO : -1, POLLIN, 0}};

		r = apr_arm(c);
		if (!r && poll(fds, 2, -1) < 0 && errno != EINTR)
			r = -errno;
		if (r < 0)
			break;
		if (apr_poll(c) == 1)
			printf("(the daemon's models have changed)\n");
		r = take_entries(c);
		if (!r && (fds[1].revents & (POLLIN | POLLHUP))) {
			ssize_t n = read(STDIN_FILENO, line, sizeof(line)); /* whole lines, where a terminal gives them */

			typing = n > 0;
			while (n > 0 && line[n - 1] == '\n')
				n--;
			if (n > 0)
				submit_line(c, line, (size_t)n);
		}
	}
	if (r)
		fprintf(stderr, "%s\n", *apr_why(c) ? apr_why(c) : apr_strerror(r));
	apr_close(c);
	return r ? 1 : 0;
}
