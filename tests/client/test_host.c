/* SPDX-License-Identifier: MIT */
/* The library as a guest in other people's programs: forks, signals, threads, cancellation, dlopen. */
#include "client/fake/fake.h"
#include "tests/harness.h"
#include <apr/client.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char path[128];
static __thread char err[256]; /* threads connect too */

static struct fake *start(const char *script)
{
	struct fake_opts o = { .path = path, .script = script };
	struct fake *f = NULL;

	snprintf(path, sizeof(path), "%s/aprd.sock", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(fake_start(&f, &o, err, sizeof(err)), 0);
	return f;
}

static struct apr *join(uint32_t flags)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;

	o.path = path;
	o.flags = flags;
	int e = apr_connect(&c, &o, err, sizeof(err));
	return e ? NULL : c;
}

static uint64_t now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000;
}

/* ---- fork ------------------------------------------------------------------------ */

/* Every call in the child; the number of the first that is wrong, 0 = all well. */
static int child_calls(struct apr *c, struct apr_sqe *sqe, const struct apr_cqe *old)
{
	const struct apr_cqe *q;
	struct apr_model_row *rows;
	uint64_t buf[8];
	struct apr_params p;
	size_t n;
	char *json;
	struct apr_gen g = { .size = sizeof(g), .text = "x", .len = 1 };

	if (apr_get_sqe(c))
		return 1;
	if (apr_submit(c) != -EOWNERDEAD || apr_cancel(c, 1, 2) != -EOWNERDEAD || apr_cancel_all(c) != -EOWNERDEAD)
		return 2;
	if (apr_peek_cqe(c, &q) != -EOWNERDEAD || apr_wait_cqe(c, &q) != -EOWNERDEAD ||
	    apr_wait_cqes(c, 1, 1000) != -EOWNERDEAD)
		return 3;
	if (apr_arm(c) != -EOWNERDEAD || apr_poll(c) != -EOWNERDEAD || apr_fd(c) != -EOWNERDEAD)
		return 4;
	if (apr_get_models(c, &rows, &n) != -EOWNERDEAD || apr_status(c, &json) != -EOWNERDEAD)
		return 5;
	if (apr_generate(c, &g, NULL, NULL, NULL, NULL, 0) != -EOWNERDEAD || apr_ping(c, 1000, NULL, NULL, 0) != -EOWNERDEAD)
		return 6;
	if (apr_info(c) || apr_cqe_at(c, 0) || apr_unfinished(c) || apr_state(c) != -EOWNERDEAD ||
	    apr_has(c, 1) != -EOWNERDEAD || apr_can(c, 1) != -EOWNERDEAD)
		return 7;
	if (apr_reconnect(c, NULL, 0) != -EOWNERDEAD || apr_lock(c) != -EOWNERDEAD)
		return 8;
	if (apr_prep_generate(c, &(struct apr_sqe){ 0 }, "x", 1, 1) != -EOWNERDEAD)
		return 9;
	apr_params_init(&p, buf, sizeof(buf));
	apr_params_logprobs(&p, 1);
	if (apr_sqe_params(c, &(struct apr_sqe){ 0 }, &p) != -EOWNERDEAD)
		return 10;
	apr_cqe_seen(c, old); /* must not touch what is not there */
	(void)sqe;
	return strstr(apr_why(c), "fork") ? 0 : 11;
}

static void case43_fork_in_mid_stream(void)
{
	struct fake *f = start("{\"token_ms\":2,\"answers\":[{\"steps\":[{\"text\":\"t\",\"repeat\":60}]}]}");
	struct apr *c = join(0);
	const struct apr_cqe *q;
	uint32_t tokens = 0;
	bool done = false;
	int status;

	struct apr_sqe *s = apr_get_sqe(c);
	CU_ASSERT_EQUAL(apr_prep_generate(c, s, "x", 1, 100), 0);
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	CU_ASSERT_EQUAL(apr_wait_cqe(c, &q), 0);
	pid_t pid = fork();
	if (!pid) {
		alarm(20);
		int wrong = child_calls(c, s, q);
		apr_close(c);
		struct apr *mine = wrong ? NULL : join(0);
		if (!wrong && (!mine || apr_ping(mine, 2000000, NULL, NULL, 0)))
			wrong = 12;
		apr_close(mine);
		_exit(wrong);
	}
	while (!done) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &q, 5000000), 0);
		if (q->type == APR_CQE_TOKEN)
			CU_ASSERT_EQUAL(q->pos, tokens++);
		done = apr_cqe_last(q);
		CU_ASSERT_EQUAL(done ? q->res : 0, 0);
		apr_cqe_seen(c, q);
	}
	waitpid(pid, &status, 0);
	CU_ASSERT_EQUAL(status, 0);
	if (status)
		fprintf(stderr, "child: %#x\n", (unsigned)status);
	CU_ASSERT_EQUAL(tokens, 60);
	apr_close(c);
	fake_end(f);
}

/* ---- signals ----------------------------------------------------------------------- */

static int alarms; /* the timer's signal comes to any thread; relaxed: a count alone */

static void on_alarm(int sig)
{
	(void)sig;
	__atomic_fetch_add(&alarms, 1, __ATOMIC_RELAXED);
}

static void case44_signals_at_1_khz(void)
{
	struct fake *f = start("{\"token_ms\":1,\"answers\":[{\"steps\":[{\"text\":\"t\",\"repeat\":100}]}]}");
	struct itimerval timer = { { 0, 1000 }, { 0, 1000 } }, off = { { 0, 0 }, { 0, 0 } };
	struct sigaction sa = { .sa_handler = on_alarm }, old; /* no SA_RESTART */

	sigaction(SIGALRM, &sa, &old);
	setitimer(ITIMER_REAL, &timer, NULL);
	struct apr *c = join(0);
	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	struct apr_gen g = { .size = sizeof(g), .text = "x", .len = 1, .max_tokens = 200 };
	struct apr_result r;
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(r.cost.generated, 100);
	char *json;
	CU_ASSERT_EQUAL(apr_status(c, &json), 0);
	free(json);
	const struct apr_cqe *q;
	uint64_t t = now_us();
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(c, &q, 700000), -ETIMEDOUT);
	t = now_us() - t;
	CU_ASSERT(t >= 700000 && t < 1200000);
	setitimer(ITIMER_REAL, &off, NULL);
	CU_ASSERT(__atomic_load_n(&alarms, __ATOMIC_RELAXED) > 300);
	sigaction(SIGALRM, &old, NULL);
	apr_close(c);
	fake_end(f);
}

static void case45_nothing_of_the_host_is_changed(void)
{
	struct sigaction before[65], after[65];
	sigset_t mask_before, mask_after;
	struct fake *f = start("{\"answers\":[{\"steps\":[\"a\",{\"die\":\"drop\"}]}]}");

	/* the fake daemon installs its own SIGBUS handler in this process: look after it did */
	memset(before, 0, sizeof(before));
	memset(after, 0, sizeof(after));
	for (int s = 1; s < 65; s++)
		sigaction(s, NULL, &before[s]);
	pthread_sigmask(SIG_SETMASK, NULL, &mask_before);
	errno = 4711;
	struct apr *c = join(0);
	struct apr_gen g = { .size = sizeof(g), .text = "x", .len = 1, .max_tokens = 9 };
	CU_ASSERT(apr_generate(c, &g, NULL, NULL, NULL, err, sizeof(err)) < 0);
	/* the socket is gone: writing to it raises no SIGPIPE */
	CU_ASSERT(apr_cancel_all(c) < 0);
	CU_ASSERT(apr_status(c, &(char *){ NULL }) < 0);
	apr_close(c);
	for (int s = 1; s < 65; s++)
		sigaction(s, NULL, &after[s]);
	pthread_sigmask(SIG_SETMASK, NULL, &mask_after);
	for (int s = 1; s < 65; s++)
		CU_ASSERT(before[s].sa_handler == after[s].sa_handler && before[s].sa_flags == after[s].sa_flags);
	CU_ASSERT(!memcmp(&mask_before, &mask_after, sizeof(mask_before)));
	fake_end(f);
}

/* ---- threads ------------------------------------------------------------------------- */

struct worker {
	struct apr *c; /* NULL: one of its own */
	int wrong;
};

static int add_one(void *arg, const struct apr_token *t)
{
	(void)t;
	++*(uint32_t *)arg;
	return 0;
}

static void *work(void *arg)
{
	struct worker *w = arg;
	struct apr *c = w->c ? w->c : join(0);

	if (!c) {
		w->wrong = 1000;
		return NULL;
	}
	for (int i = 0; i < 20; i++) {
		struct apr_gen g = { .size = sizeof(g), .text = "x", .len = 1, .max_tokens = 100 };
		struct apr_result r;
		uint32_t tokens = 0;
		char why[128];
		int e = apr_generate(c, &g, add_one, &tokens, &r, why, sizeof(why));
		w->wrong += e != 0 || tokens != 12 || r.cost.generated != 12;
		if (apr_ping(c, 5000000, NULL, NULL, 0))
			w->wrong++;
	}
	if (!w->c)
		apr_close(c);
	return NULL;
}

static void eight_threads(struct apr *shared)
{
	struct worker w[8];
	pthread_t t[8];

	for (int i = 0; i < 8; i++) {
		w[i] = (struct worker){ shared, 0 };
		CU_ASSERT_EQUAL_FATAL(pthread_create(&t[i], NULL, work, &w[i]), 0);
	}
	for (int i = 0; i < 8; i++) {
		pthread_join(t[i], NULL);
		CU_ASSERT_EQUAL(w[i].wrong, 0);
	}
}

#define TWELVE "{\"answers\":[{\"steps\":[{\"text\":\"t\",\"repeat\":12}]}]}"

static void case45_eight_threads_on_their_own_handles(void)
{
	struct fake *f = start(TWELVE);
	eight_threads(NULL);
	fake_end(f);
}

static void case45_eight_threads_on_one_handle(void)
{
	struct fake *f = start(TWELVE);
	struct apr *c = join(APR_CONNECT_LOCKED);
	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	eight_threads(c);
	apr_close(c);
	fake_end(f);
}

/* Low-level sharing: some submit, all wait; each last entry is taken by exactly one. */
static uint32_t taken, submitted;
enum { SHARED_TOTAL = 2000 };

static void *submit_and_take(void *arg)
{
	struct apr *c = arg;
	const struct apr_cqe *q;
	uintptr_t wrong = 0;

	while (__atomic_load_n(&taken, __ATOMIC_RELAXED) < SHARED_TOTAL) {
		apr_lock(c);
		if (submitted < SHARED_TOTAL && apr_unfinished(c) < 32) {
			struct apr_sqe *s = apr_get_sqe(c);
			if (s) {
				apr_prep_nop(s);
				apr_sqe_user_data(s, ++submitted);
				wrong += apr_submit(c) != 1;
			}
		}
		apr_unlock(c);
		int e = apr_wait_cqes(c, 1, 20000);
		wrong += e < 0 && e != -ETIMEDOUT;
		apr_lock(c);
		if (!apr_peek_cqe(c, &q)) {
			wrong += q->type != APR_CQE_ACK;
			apr_cqe_seen(c, q);
			__atomic_add_fetch(&taken, 1, __ATOMIC_RELAXED);
		}
		apr_unlock(c);
	}
	return (void *)wrong;
}

static void case45_low_level_calls_share_a_handle(void)
{
	struct fake *f = start(NULL);
	struct apr *c = join(APR_CONNECT_LOCKED);
	pthread_t t[8];

	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	taken = submitted = 0;
	for (int i = 0; i < 8; i++)
		pthread_create(&t[i], NULL, submit_and_take, c);
	for (int i = 0; i < 8; i++) {
		void *wrong;
		pthread_join(t[i], &wrong);
		CU_ASSERT_PTR_NULL(wrong);
	}
	CU_ASSERT_EQUAL(taken, SHARED_TOTAL);
	CU_ASSERT_EQUAL(apr_unfinished(c), 0);
	apr_close(c);
	c = join(0);
	CU_ASSERT_EQUAL(apr_lock(c), -EINVAL); /* without the flag there is no lock */
	apr_close(c);
	fake_end(f);
}

/* ---- cancellation ---------------------------------------------------------------------- */

static void *wait_for_ever(void *arg)
{
	const struct apr_cqe *q;
	apr_wait_cqe(arg, &q);
	return NULL;
}

static void a_cancelled_wait_leaves_the_handle_whole(void)
{
	struct fake *f = start(NULL);
	struct apr *c = join(APR_CONNECT_LOCKED);
	pthread_t t;
	void *r;

	for (int i = 0; i < 3; i++) {
		pthread_create(&t, NULL, wait_for_ever, c);
		usleep(20000);
		pthread_cancel(t);
		pthread_join(t, &r);
		CU_ASSERT_PTR_EQUAL(r, PTHREAD_CANCELED);
		CU_ASSERT_EQUAL(apr_ping(c, 2000000, NULL, err, sizeof(err)), 0);
	}
	apr_close(c);
	fake_end(f);
}

/* ---- loading ------------------------------------------------------------------------------ */

static unsigned long mapped_kib(void)
{
	unsigned long pages = 0;
	FILE *s = fopen("/proc/self/statm", "r");
	if (s) {
		if (fscanf(s, "%lu", &pages) != 1)
			pages = 0;
		fclose(s);
	}
	return pages * 4;
}

static void case45_dlopen_a_thousand_times(void)
{
	char lib[4200];
	unsigned long before = 0;

	snprintf(lib, sizeof(lib), "%s", apr_test_program("libaprclient.so.0"));
	if (access(lib, R_OK))
		SKIP("libaprclient.so.0 is not built");
	struct fake *f = start(NULL);
	for (int i = 0; i < 1000; i++) {
		void *h = dlopen(lib, RTLD_NOW | RTLD_LOCAL);
		CU_ASSERT_PTR_NOT_NULL_FATAL(h);
		if (i % 10 == 0) {
			int (*connect)(struct apr **, const struct apr_opts *, char *, size_t);
			void (*closed)(struct apr *);
			*(void **)&connect = dlsym(h, "apr_connect");
			*(void **)&closed = dlsym(h, "apr_close");
			CU_ASSERT_FATAL(connect && closed);
			struct apr_opts o = APR_OPTS_INIT;
			struct apr *c;
			o.path = path;
			CU_ASSERT_EQUAL_FATAL(connect(&c, &o, err, sizeof(err)), 0);
			closed(c);
		}
		CU_ASSERT_PTR_NULL(dlsym(h, "apr_region_create")); /* what is not API is not exported */
		CU_ASSERT_EQUAL(dlclose(h), 0);
		if (i == 100)
			before = mapped_kib();
	}
	unsigned long after = mapped_kib();
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) /* their own maps grow with each dlopen */
	CU_ASSERT(after <= before + 2048);
#else
	(void)before;
	(void)after;
#endif
	fake_end(f);
}

static const struct apr_test tests[] = {
	{ "case43_fork_in_mid_stream", case43_fork_in_mid_stream, KEEPS_HEAP }, /* thread stacks */
	{ "case44_signals_at_1_khz", case44_signals_at_1_khz, 0 },
	{ "case45_nothing_of_the_host_is_changed", case45_nothing_of_the_host_is_changed, 0 },
	{ "case45_eight_threads_on_their_own_handles", case45_eight_threads_on_their_own_handles, KEEPS_HEAP },
	{ "case45_eight_threads_on_one_handle", case45_eight_threads_on_one_handle, KEEPS_HEAP },
	{ "case45_low_level_calls_share_a_handle", case45_low_level_calls_share_a_handle, KEEPS_HEAP },
	{ "a_cancelled_wait_leaves_the_handle_whole", a_cancelled_wait_leaves_the_handle_whole, KEEPS_HEAP }, /* unwinder */
	{ "case45_dlopen_a_thousand_times", case45_dlopen_a_thousand_times, KEEPS_HEAP }, /* the loader's own */
};
TEST_MAIN("client/host", tests)
