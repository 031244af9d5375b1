/* SPDX-License-Identifier: MIT */
/*
 * Several requests in flight on one session: every word of the command line is
 * continued, all at once, and each answer is printed when it is whole. The second
 * is cancelled after five tokens, to show how.
 *   cc several.c $(pkg-config --cflags --libs libaprclient) -o several
 */
#include <apr/client.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { MOST = 16, CANCEL = 1000 };

static struct answer {
	char text[4096];
	size_t len;
	unsigned tokens;
} answers[MOST];

static void on_token(struct apr *c, const struct apr_cqe *e)
{
	struct answer *a = &answers[e->user_data];
	size_t n = 0;
	const char *text = apr_cqe_text(c, e, &n);

	if (text && a->len + n < sizeof(a->text)) {
		memcpy(a->text + a->len, text, n);
		a->len += n;
	}
	if (e->type == APR_CQE_TOKEN && ++a->tokens == 5 && e->user_data == 1)
		apr_cancel(c, e->user_data, CANCEL); /* its answer comes after the request's last entry */
}

/* One entry; 1 if it was a request's last. */
static int on_entry(struct apr *c, const struct apr_cqe *e, char **argv)
{
	if (e->user_data == CANCEL || e->user_data >= MOST)
		return 0;
	if (e->type != APR_CQE_FINAL) {
		on_token(c, e);
		return 0;
	}
	if (e->res && e->res != -ECANCELED)
		printf("%s: %s\n", argv[e->user_data + 1], apr_strerror(e->res));
	else
		printf("%s%.*s%s\n", argv[e->user_data + 1], (int)answers[e->user_data].len, answers[e->user_data].text,
		       e->res ? " [cancelled]" : "");
	return 1;
}

int main(int argc, char **argv)
{
	const struct apr_cqe *e;
	struct apr *c;
	char err[256];
	int n = argc - 1, open = 0, r;

	if (n < 1 || n > MOST) {
		fprintf(stderr, "usage: several TEXT... (1 to %d of them, answered all at once)\n", MOST);
		return 2;
	}
	r = apr_connect(&c, NULL, err, sizeof(err));
	if (r) {
		fprintf(stderr, "%s\n", err);
		return 1;
	}
	for (int i = 0; i < n; i++) {
		struct apr_sqe *q = apr_get_sqe(c);

		if (!q || apr_prep_generate(c, q, argv[i + 1], strlen(argv[i + 1]), 24))
			break;
		apr_sqe_flags(q, APR_SQE_ADD_BOS);
		apr_sqe_user_data(q, (uint64_t)i);
		open++;
	}
	r = open ? apr_submit(c) : 0; /* one store and at most one system call for all of them */
	while (r >= 0 && open > 0) {
		r = apr_wait_cqe(c, &e);
		if (r)
			break;
		open -= on_entry(c, e, argv);
		apr_cqe_seen(c, e); /* the entry and its text are the daemon's again */
	}
	if (r < 0)
		fprintf(stderr, "%s\n", *apr_why(c) ? apr_why(c) : apr_strerror(r));
	apr_close(c);
	return r < 0 ? 1 : 0;
}
