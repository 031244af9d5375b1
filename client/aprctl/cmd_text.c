/* SPDX-License-Identifier: MIT */
/* Owns: tokenize, detokenize, score, ping. */
#include "client/aprctl/ctl.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct bytes { /* DATA of one format, put together */
	unsigned fmt;
	char *data;
	size_t len, cap;
};

static int collect(void *arg, struct apr *s, const struct apr_cqe *e)
{
	struct bytes *b = arg;
	size_t n = 0;
	const void *p = apr_cqe_blob(s, e, b->fmt, &n);

	if (!p)
		return CTL_OK;
	if (b->len + n > b->cap) {
		size_t cap = (b->len + n) * 2 + 256;
		char *more = realloc(b->data, cap);

		if (!more)
			return CTL_FAIL;
		b->data = more;
		b->cap = cap;
	}
	memcpy(b->data + b->len, p, n);
	b->len += n;
	return CTL_OK;
}

/* Submits what was prepared and gathers its data. CTL_OK with b filled. */
static int gather(struct ctl *c, struct apr *s, struct apr_sqe *q, int prepared, struct bytes *b, struct ctl_last *last)
{
	int e = prepared, status;

	if (e)
		return ctl_fail(c, "%s", e == -E2BIG ? "the input is longer than this daemon takes" : apr_strerror(e));
	apr_sqe_timeout(q, c->timeout_ms);
	apr_sqe_user_data(q, 1);
	e = apr_submit(s);
	if (e < 0)
		return ctl_fail(c, "submitting: %s", apr_strerror(e));
	ctl_catch_interrupt();
	status = ctl_run(c, s, 1, collect, b, last);
	if (status)
		return status;
	if (last->interrupted)
		return CTL_INTR;
	return last->res ? ctl_request_failed(c, last) : CTL_OK;
}

/* The entry for a request of model c->model; NULL said. */
static struct apr_sqe *begin(struct ctl *c, struct apr *s, struct apr_model_row *row)
{
	struct apr_sqe *q;

	if (ctl_model(c, s, row))
		return NULL;
	q = apr_get_sqe(s);
	if (!q)
		ctl_fail(c, "the session ended: %s", apr_why(s));
	return q;
}

int cmd_tokenize(struct ctl *c)
{
	struct ctl_input in;
	struct apr_model_row row;
	struct ctl_last last;
	struct bytes b = {.fmt = APR_BLOB_IDS};
	struct apr *s = NULL;
	struct apr_sqe *q;
	int status = ctl_read_text(c, &in), e;

	if (!status)
		status = ctl_connect(c, in.len, &s);
	if (!status) {
		q = begin(c, s, &row);
		e = q ? apr_prep_tokenize(s, q, in.text, in.len) : 0;
		if (q && !e) {
			apr_sqe_model(q, row.id);
			apr_sqe_flags(q, c->special ? APR_SQE_PARSE_SPECIAL : 0);
		}
		status = q ? gather(c, s, q, e, &b, &last) : CTL_FAIL;
	}
	const uint32_t *ids = (const uint32_t *)(const void *)b.data;
	if (!status && c->json) {
		status = ctl_print_json(c, json_pack("{s:o}", "ids", ctl_json_ids(ids, b.len / 4)));
	} else if (!status) {
		for (size_t i = 0; i < b.len / 4; i++)
			printf("%s%u", i ? "," : "", ids[i]);
		putchar('\n');
		status = ctl_flush(c, CTL_OK);
	}
	free(b.data);
	apr_close(s);
	ctl_input_free(&in);
	return status;
}

int cmd_detokenize(struct ctl *c)
{
	struct ctl_input in = {0};
	struct apr_model_row row;
	struct ctl_last last;
	struct bytes b = {.fmt = APR_BLOB_TEXT};
	struct apr *s = NULL;
	struct apr_sqe *q;
	int status, e;

	if (c->n_args != 1)
		return ctl_usage(c, "give IDS once, such as 1,2,3 or @FILE");
	status = ctl_read_ids(c, c->args[0], &in);
	if (!status)
		status = ctl_connect(c, in.n_ids * 4, &s);
	if (!status) {
		q = begin(c, s, &row);
		e = q ? apr_prep_detokenize(s, q, in.ids, in.n_ids) : 0;
		if (q && !e) {
			apr_sqe_model(q, row.id);
			apr_sqe_flags(q, c->special ? APR_SQE_PARSE_SPECIAL : 0);
		}
		status = q ? gather(c, s, q, e, &b, &last) : CTL_FAIL;
	}
	if (!status && c->json) {
		json_t *j = json_object();

		ctl_json_set_text(j, b.data ? b.data : "", b.len);
		status = ctl_print_json(c, j);
	} else if (!status) {
		fwrite(b.data ? b.data : "", 1, b.len, stdout);
		if (isatty(STDOUT_FILENO)) /* to a file or pipe: these bytes alone */
			putchar('\n');
		status = ctl_flush(c, CTL_OK);
	}
	free(b.data);
	apr_close(s);
	ctl_input_free(&in);
	return status;
}

/* ---- score --------------------------------------------------------------------- */

static json_t *score_json(const struct bytes *b)
{
	json_t *positions = json_array();
	const struct apr_score *sc;
	size_t pos = 0;

	while ((sc = apr_score_next(b->data, b->len, &pos))) {
		json_t *top = json_array();
		const struct apr_top *t = apr_score_top(sc);

		for (uint32_t k = 0; k < sc->k; k++)
			json_array_append_new(top, json_pack("[I, o]", (json_int_t)t[k].id, ctl_json_float(t[k].logprob)));
		json_array_append_new(positions, json_pack("{s:I, s:I, s:o, s:o}", "pos", (json_int_t)sc->pos, "id",
							   (json_int_t)sc->id, "logprob", ctl_json_float(sc->logprob), "top",
							   top));
	}
	return json_pack("{s:o}", "positions", positions);
}

static void score_print(const struct bytes *b, bool best)
{
	const struct apr_score *sc;
	size_t pos = 0, n = 0;
	double sum = 0;

	printf("%6s %8s %10s%s\n", "pos", "id", "logprob", best ? "   best" : "");
	while ((sc = apr_score_next(b->data, b->len, &pos))) {
		const struct apr_top *t = apr_score_top(sc);

		printf("%6u %8u %10.5f", sc->pos, sc->id, (double)sc->logprob);
		for (uint32_t k = 0; k < sc->k; k++)
			printf("%s%u:%.5f", k ? " " : "   ", t[k].id, (double)t[k].logprob);
		putchar('\n');
		sum += (double)sc->logprob;
		n++;
	}
	if (n)
		printf("mean %.5f over %zu ids\n", sum / (double)n, n);
}

int cmd_score(struct ctl *c)
{
	struct ctl_input in = {0};
	struct apr_model_row row;
	struct ctl_last last;
	struct bytes b = {.fmt = APR_BLOB_SCORES};
	uint64_t buf[8];
	struct apr_params p;
	struct apr *s = NULL;
	struct apr_sqe *q;
	int status, e = 0;

	if (!c->ids || c->n_args)
		return ctl_usage(c, "give --ids IDS");
	status = ctl_read_ids(c, c->ids, &in);
	if (!status)
		status = ctl_connect(c, in.n_ids * 4, &s);
	if (!status) {
		q = begin(c, s, &row);
		e = q ? apr_prep_score(s, q, in.ids, in.n_ids) : 0;
		if (q && !e) {
			apr_sqe_model(q, row.id);
			apr_sqe_flags(q, c->step ? APR_SQE_FORCED : 0);
			apr_params_init(&p, buf, sizeof(buf));
			apr_params_logprobs(&p, c->top);
			e = apr_sqe_params(s, q, &p);
		}
		status = q ? gather(c, s, q, e, &b, &last) : CTL_FAIL;
	}
	if (!status && c->json) {
		status = ctl_print_json(c, score_json(&b));
	} else if (!status) {
		if (in.n_ids > 1)
			score_print(&b, c->top);
		else
			ctl_note(c, "one id has nothing to score: the first follows nothing");
		status = ctl_flush(c, CTL_OK);
	}
	free(b.data);
	apr_close(s);
	ctl_input_free(&in);
	return status;
}

/* ---- ping ---------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
	const uint64_t *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int ping_print(struct ctl *c, uint64_t *ns, uint32_t n, uint64_t connect_ns)
{
	uint64_t p50, p99;

	qsort(ns, n, sizeof(*ns), by_value);
	p50 = ns[n / 2];
	p99 = ns[(size_t)n * 99 / 100];
	if (c->json)
		return ctl_print_json(c, json_pack("{s:I, s:f, s:f, s:f, s:f, s:f}", "n", (json_int_t)n, "connect_us",
						   (double)connect_ns / 1e3, "min_us", (double)ns[0] / 1e3, "p50_us",
						   (double)p50 / 1e3, "p99_us", (double)p99 / 1e3, "max_us",
						   (double)ns[n - 1] / 1e3));
	printf("%u round trips: min %.1f, median %.1f, p99 %.1f, max %.1f µs; connecting took %.0f µs\n", n,
	       (double)ns[0] / 1e3, (double)p50 / 1e3, (double)p99 / 1e3, (double)ns[n - 1] / 1e3,
	       (double)connect_ns / 1e3);
	return ctl_flush(c, CTL_OK);
}

int cmd_ping(struct ctl *c)
{
	uint32_t n = GIVEN(c, KEY_COUNT) ? c->count : 10;
	uint64_t *ns, began = now_ns(), connected;
	struct apr *s;
	char err[256] = "";
	int status;

	if (c->n_args || !n || n > 10000000)
		return ctl_usage(c, c->n_args ? "ping takes no words" : "-n: give a number from 1 to 10000000");
	ns = calloc(n, sizeof(*ns));
	if (!ns)
		return ctl_fail(c, "out of memory");
	status = ctl_connect(c, 0, &s);
	if (status) {
		free(ns);
		return status;
	}
	connected = now_ns() - began;
	for (uint32_t i = 0; i < n && !status; i++) {
		int e = apr_ping(s, 5000000, &ns[i], err, sizeof(err));

		if (e)
			status = ctl_fail(c, "round trip %u: %s", i + 1, *err ? err : apr_strerror(e));
	}
	apr_close(s);
	if (!status)
		status = ping_print(c, ns, n, connected);
	free(ns);
	return status;
}
