/* SPDX-License-Identifier: MIT */
/* The search for lost wake-ups: see wakeups.h. */
#include "tests/support/wakeups.h"

#include <apr/client.h>
#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define PAUSE_MAX_NS 50000u
#define GIVE_UP_US 5000000

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint64_t next_random(uint64_t *s)
{
	*s ^= *s << 13;
	*s ^= *s >> 7;
	*s ^= *s << 17;
	return *s;
}

/* Busy, since a sleep of the kernel's is never as short as this. */
static void pause_ns(uint64_t ns)
{
	uint64_t end = now_ns() + ns;

	while (now_ns() < end)
		;
}

static long switches(void)
{
	struct rusage ru;

	getrusage(RUSAGE_THREAD, &ru);
	return ru.ru_nvcsw;
}

static int submit_one(struct apr *c, uint32_t tokens, uint64_t id)
{
	static const char text[] = "the";
	struct apr_sqe *sqe = apr_get_sqe(c);
	int rc = 0;

	if (!sqe)
		return -EBUSY;
	if (tokens)
		rc = apr_prep_generate(c, sqe, text, sizeof text - 1, tokens);
	else
		apr_prep_nop(sqe);
	apr_sqe_user_data(sqe, id);
	if (rc)
		return rc;
	rc = apr_submit(c);
	return rc < 0 ? rc : 0;
}

/* Takes entries until the request's last one. Right: that it is this request's and ends well. */
static int take_answer(struct apr *c, uint64_t id, struct wakeup_tally *t)
{
	const struct apr_cqe *cqe;
	int last, right;

	do {
		uint64_t began = now_ns();
		long before = switches();
		int rc = apr_wait_cqe_timeout(c, &cqe, GIVE_UP_US);
		double s = (double)(now_ns() - began) * 1e-9;

		t->slept += switches() > before;
		t->over_1s += s > 1;
		if (s > t->longest_s)
			t->longest_s = s;
		if (rc)
			return rc;
		last = apr_cqe_last(cqe);
		right = cqe->user_data == id && (!last || cqe->res == 0);
		t->failed += !right;
		apr_cqe_seen(c, cqe);
	} while (!last);
	return 0;
}

int wakeup_run(const char *sock, uint64_t n, uint32_t tokens, uint64_t seed, struct wakeup_tally *t)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;
	int rc;

	o.path = sock;
	o.spin_us = 0;
	memset(t, 0, sizeof *t);
	rc = apr_connect(&c, &o, NULL, 0);
	if (rc)
		return rc;
	for (uint64_t i = 1; i <= n && !rc; i++) {
		rc = submit_one(c, tokens, i);
		/* The pause lies between submit and wait in half of the rounds, after the answer in the other. */
		if (!rc && (next_random(&seed) & 1))
			pause_ns(next_random(&seed) % PAUSE_MAX_NS);
		if (!rc)
			rc = take_answer(c, i, t);
		if (next_random(&seed) & 1)
			pause_ns(next_random(&seed) % PAUSE_MAX_NS);
		t->requests++;
	}
	apr_close(c);
	return rc;
}
