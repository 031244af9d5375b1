/* SPDX-License-Identifier: MIT */
/* Many clients at once: answers as alone, kills, cancels, limits, what is left behind. */
#include "tests/daemon/running.h"

static struct daemon d;

struct answer {
	uint32_t ids[128];
	unsigned n;
	int e;
};

static int take(void *arg, const struct apr_token *t)
{
	struct answer *a = arg;

	if (t->id != APR_NO_ID && a->n < 128)
		a->ids[a->n++] = t->id;
	return 0;
}

/* Request k of a fixed set: its own prompt length, count and seed. */
static int ask(const struct daemon *where, unsigned k, struct answer *a)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 };
	struct apr *c;
	uint64_t space[16];
	struct apr_params p;
	uint32_t ids[700], n = 3 + k * 97 % 600;
	char err[200];

	memset(a, 0, sizeof(*a));
	o.path = where->sock;
	o.connect_ms = 20000;
	a->e = apr_connect(&c, &o, err, sizeof(err));
	if (a->e)
		return a->e;
	for (uint32_t i = 0; i < n; i++)
		ids[i] = (i * 31 + k / 2) % 300; /* pairs share a prefix */
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	struct apr_gen g = { .size = sizeof(g),
			     .ids = ids,
			     .n_ids = n,
			     .max_tokens = 20 + k * 13 % 100,
			     .has_seed = 1,
			     .seed = k,
			     .params = &p };
	a->e = apr_generate(c, &g, take, a, NULL, err, sizeof(err));
	apr_close(c);
	return a->e;
}

static struct answer alone[16];

/* In a child process: asks k and compares. Exit 0 equal. */
static pid_t ask_in_child(unsigned k)
{
	pid_t pid = fork();

	if (!pid) {
		struct answer a;
		int bad = ask(&d, k, &a) || a.n != alone[k].n || memcmp(a.ids, alone[k].ids, a.n * 4);
		_exit(bad);
	}
	return pid;
}

/* A child that submits and is killed after `us`. */
static pid_t victim(unsigned k)
{
	pid_t pid = fork();

	if (!pid) {
		struct answer a;
		ask(&d, k, &a);
		_exit(0);
	}
	return pid;
}

static long pss_kib(pid_t pid)
{
	char path[64], *text, *p;
	long v = -1;

	snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", (int)pid);
	text = file_text(path);
	p = strstr(text, "\nPss:");
	if (p)
		sscanf(p, "\nPss: %ld", &v);
	free(text);
	return v;
}

static int nothing_left(void)
{
	/* pages of a sequence that was given up in mid-step come back at the step's end */
	return status_becomes(&d, "sessions", 0) && status_becomes(&d, "running", 0) &&
	       status_becomes(&d, "queued", 0) &&
	       status_becomes(&d, "kv.pages_free", status_number(&d, "kv.pages_total"));
}

static void daemon_up(void)
{
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "many", NULL));
	for (unsigned k = 0; k < 16; k++) {
		CU_ASSERT_EQUAL(ask(&d, k, &alone[k]), 0);
		CU_ASSERT_EQUAL(alone[k].n, 20 + k * 13 % 100);
	}
}

static void round_of_16(void)
{
	pid_t pids[16];

	for (unsigned k = 0; k < 16; k++)
		pids[k] = ask_in_child(k);
	for (unsigned k = 0; k < 16; k++) {
		int status = 0;
		waitpid(pids[k], &status, 0);
		CU_ASSERT_EQUAL(status, 0);
	}
}

static void sixteen_processes_as_alone(void)
{
	round_of_16();
	CU_ASSERT_TRUE(nothing_left());
}

static void case12_killed_in_every_state(void)
{
	pid_t worker = (pid_t)status_number(&d, "worker_pid");
	unsigned fds = descriptors_of(worker);

	for (int i = 0; i < 200; i += 4) {
		pid_t v[4], good = 0;
		for (int k = 0; k < 4; k++)
			v[k] = victim((unsigned)(i + k) % 16);
		if (i % 20 == 0)
			good = ask_in_child((unsigned)i % 16);
		for (int k = 0; k < 4; k++) {
			usleep((unsigned)(i * 7919 + k * 104729) % 15000);
			kill(v[k], SIGKILL);
			waitpid(v[k], NULL, 0);
		}
		if (good) {
			int status = 0;
			waitpid(good, &status, 0);
			CU_ASSERT_EQUAL(status, 0); /* nobody else's text in it */
		}
	}
	CU_ASSERT_TRUE(nothing_left());
	CU_ASSERT_EQUAL(status_number(&d, "worker_pid"), (long)worker);
	for (int i = 0; i < 100 && descriptors_of(worker) > fds; i++)
		sleep_ms(20);
	CU_ASSERT_TRUE(descriptors_of(worker) <= fds + 4); /* spare pairs' doorbells come and go */
	round_of_16();
}

static void memory_and_descriptors_come_back(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	SKIP("a sanitizer keeps freed memory back");
#endif
	pid_t worker = (pid_t)status_number(&d, "worker_pid");

	for (int i = 0; i < 3; i++)
		round_of_16();
	CU_ASSERT_TRUE(nothing_left());
	sleep_ms(200);
	long before = pss_kib(worker);
	unsigned fds = descriptors_of(worker);
	for (int i = 0; i < 3; i++)
		round_of_16();
	CU_ASSERT_TRUE(nothing_left());
	sleep_ms(200);
	long after = pss_kib(worker);
	if (after - before > 1024)
		fprintf(stderr, "Pss %ld KiB, then %ld KiB\n", before, after);
	CU_ASSERT_TRUE(before > 0 && after - before <= 1024);
	CU_ASSERT_TRUE(descriptors_of(worker) <= fds + 4);
}

static void case10_one_that_cannot_fit(void)
{
	struct daemon small = { 0 };
	struct answer a;
	struct apr *c;
	char err[200];
	uint32_t ids[1500];
	pid_t pids[6];

	daemon_name(&small, "small");
	/* tiny model: 2 layers, one head of 32, K and V of F16: 256 bytes a token; 640 tokens in all */
	if (!daemon_start(&small, NULL, "-c", "640", "--kv-mem", "160K", NULL))
		return;
	CU_ASSERT_TRUE(status_number(&small, "kv.pages_total") < 24);
	for (unsigned k = 0; k < 6; k++) {
		pids[k] = fork();
		if (!pids[k]) { /* those that fit, all at once: they take turns, preempted as need be */
			int bad = 0;
			for (unsigned i = 0; i < 4 && !bad; i++) {
				unsigned q = i % 2 ? 0 : 7; /* 3 and 82 tokens of prompt */
				bad = ask(&small, q, &a) || a.n != alone[q].n || memcmp(a.ids, alone[q].ids, a.n * 4);
			}
			_exit(bad);
		}
	}
	c = connect_to(&small);
	for (uint32_t i = 0; i < 1500; i++)
		ids[i] = i % 300;
	struct apr_gen g = { .size = sizeof(g), .ids = ids, .n_ids = 1500, .max_tokens = 5 };
	int e = apr_generate(c, &g, NULL, NULL, NULL, err, sizeof(err));
	CU_ASSERT_TRUE(e == -ENOSPC || e == -E2BIG);
	CU_ASSERT_TRUE(strlen(err) > 10);
	for (unsigned k = 0; k < 6; k++) {
		int status = 0;
		waitpid(pids[k], &status, 0);
		CU_ASSERT_EQUAL(status, 0);
	}
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&small), 0);
}

static void case14_a_long_prompt_freezes_nobody(void)
{
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 };
	struct apr *c = connect_to(&d), *big = connect_to(&d);
	const struct apr_cqe *e;
	uint64_t space[16];
	struct apr_params p;
	uint32_t ids[2000];
	double last = 0, longest = 0;
	unsigned n = 0;

	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	struct apr_sqe *sqe = apr_get_sqe(c);
	apr_prep_generate(c, sqe, "run", 3, 400);
	apr_sqe_params(c, sqe, &p);
	apr_submit(c);
	for (;;) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 10000000), 0);
		int end = apr_cqe_last(e);
		apr_cqe_seen(c, e);
		if (end)
			break;
		double now = now_s();
		if (n++)
			longest = now - last > longest ? now - last : longest;
		last = now;
		if (n == 100) {
			for (uint32_t i = 0; i < 2000; i++)
				ids[i] = i % 300;
			sqe = apr_get_sqe(big);
			apr_prep_generate_ids(big, sqe, ids, 2000, 1);
			apr_submit(big);
		}
	}
	/* the whole prompt is 16 chunks: the longest gap must be far from all of them */
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(big, &e, 10000000), 0);
	CU_ASSERT_TRUE(longest < 1.0);
	apr_close(c);
	apr_close(big);
}

static void case24_no_wake_up_is_lost(void)
{
	struct apr *c = connect_to(&d);
	char err[100];
	double worst = 0;

	/* a shortened form: the long one is the ring's own test */
	for (int i = 0; i < 20000; i++) {
		double began = now_s();
		CU_ASSERT_EQUAL_FATAL(apr_ping(c, 5000000, NULL, err, sizeof(err)), 0);
		double t = now_s() - began;
		worst = t > worst ? t : worst;
		if (i % 7 == 0)
			usleep((unsigned)i * 7919 % 50);
	}
	CU_ASSERT_TRUE(worst < 1.0);
	apr_close(c);
}

static void limits_of_one_user(void)
{
	struct daemon l = { 0 };
	struct hand h[10];
	char config[160];

	daemon_name(&l, "limits");
	snprintf(config, sizeof(config), "%s/limits.conf", apr_test_tmpdir());
	FILE *f = fopen(config, "we");
	fputs("hello-ms = 300\nlimits { connections = 6 region-bytes = \"1M\" in-flight = 3 }\n", f);
	fclose(f);
	if (!daemon_start(&l, NULL, "--config", config, NULL))
		return;
	/* 256 KiB a session: four of them */
	for (int i = 0; i < 4; i++)
		CU_ASSERT_EQUAL(hand_open(&h[i], &l, NULL), 0);
	CU_ASSERT_EQUAL(hand_open(&h[4], &l, NULL), -EDQUOT);
	CU_ASSERT_PTR_NOT_NULL(strstr(h[4].why, "limit"));
	hand_close(&h[4]);
	/* connections: two silent ones fill it up */
	int silent[2] = { hand_socket(&l), hand_socket(&l) };
	CU_ASSERT_EQUAL(hand_open(&h[5], &l, NULL), -EDQUOT);
	CU_ASSERT_PTR_NOT_NULL(strstr(h[5].why, "connections"));
	hand_close(&h[5]);
	/* a silent one is told and closed */
	uint8_t buf[200];
	int n = hand_recv(silent[0], buf, sizeof(buf), NULL, 2000);
	CU_ASSERT_TRUE(n > (int)sizeof(struct apr_frame));
	CU_ASSERT_EQUAL(((struct apr_frame *)(void *)buf)->err, -ETIMEDOUT);
	CU_ASSERT_EQUAL(hand_recv(silent[0], buf, sizeof(buf), NULL, 2000), 0);
	close(silent[0]);
	close(silent[1]);
	for (int i = 0; i < 4; i++)
		hand_close(&h[i]);
	CU_ASSERT_TRUE(status_becomes(&l, "sessions", 0));
	CU_ASSERT_TRUE(alive(&l));
	CU_ASSERT_EQUAL(daemon_stop(&l), 0);
}

static void unread_welcomes_wait_in_order(void)
{
	struct daemon l = { 0 };
	int s[5];
	struct apr_hello hello = hand_hello();
	char config[160];

	daemon_name(&l, "unread");
	snprintf(config, sizeof(config), "%s/unread.conf", apr_test_tmpdir());
	FILE *f = fopen(config, "we");
	fputs("hello-ms = 3000\n", f);
	fclose(f);
	if (!daemon_start(&l, NULL, "--config", config, NULL))
		return;
	/* all of it within the 250 ms that an unread WELCOME has while others wait */
	for (int i = 0; i < 5; i++) {
		s[i] = hand_socket(&l);
		CU_ASSERT_EQUAL(send(s[i], &hello, sizeof(hello), 0), (ssize_t)sizeof(hello));
		sleep_ms(2);
	}
	struct apr_frame ready = { APR_FRAME_MAGIC, APR_FRAME_READY, 0, sizeof(ready), 0 };
	struct pollfd p[5];
	for (int i = 0; i < 5; i++)
		p[i] = (struct pollfd){ s[i], POLLIN, 0 };
	CU_ASSERT_EQUAL(poll(&p[0], 1, 1000), 1);
	CU_ASSERT_EQUAL(poll(&p[1], 1, 1000), 1);
	/* both are received, and yet nobody else has one: READY is what counts */
	uint8_t buf[300];
	int fds[3];
	for (int k = 0; k < 2; k++) {
		CU_ASSERT_EQUAL(hand_recv(s[k], buf, sizeof(buf), fds, 1000), 128);
		for (int i = 0; i < 3; i++)
			close(fds[i]);
	}
	CU_ASSERT_EQUAL(poll(p, 5, 40), 0);
	/* one READY, one WELCOME: the next in order */
	CU_ASSERT_EQUAL(send(s[1], &ready, sizeof(ready), 0), (ssize_t)sizeof(ready));
	CU_ASSERT_EQUAL(poll(&p[2], 1, 1000), 1);
	CU_ASSERT_EQUAL(poll(&p[3], 2, 10), 0);
	CU_ASSERT_EQUAL(send(s[0], &ready, sizeof(ready), 0), (ssize_t)sizeof(ready));
	CU_ASSERT_EQUAL(poll(&p[3], 1, 1000), 1);
	CU_ASSERT_EQUAL(poll(&p[4], 1, 10), 0);
	/* the third and fourth never say it: as the fifth waits, their time is short; its own is not */
	double began = now_s();
	CU_ASSERT_EQUAL(hand_recv(s[4], buf, sizeof(buf), fds, 2000), 128);
	CU_ASSERT_TRUE(now_s() - began < 1);
	for (int i = 0; i < 3; i++)
		close(fds[i]);
	CU_ASSERT_EQUAL(hand_recv(s[4], buf, sizeof(buf), NULL, 1000), -ETIMEDOUT);
	/* a new one comes through; those that said it stay */
	CU_ASSERT_TRUE(alive(&l));
	CU_ASSERT_EQUAL(poll(p, 2, 0), 0);
	for (int i = 0; i < 5; i++)
		close(s[i]);
	CU_ASSERT_TRUE(alive(&l));
	CU_ASSERT_EQUAL(daemon_stop(&l), 0);
}

/* 300 connections of one process that took or wait for a WELCOME and say no READY: others of the user get theirs. */
static void case42_many_without_ready(void)
{
	enum { N = 300 };
	struct daemon l = { 0 };
	struct apr_hello hello = hand_hello();
	static int s[N];

	if (!daemon_start(&l, "unsaid", NULL))
		return;
	for (int i = 0; i < N; i++) {
		s[i] = hand_socket(&l);
		CU_ASSERT_EQUAL(send(s[i], &hello, sizeof(hello), 0), (ssize_t)sizeof(hello));
	}
	for (int i = 0; i < 3; i++) {
		pid_t pid = fork();
		if (!pid) {
			double began = now_s();
			struct hand h;
			int e = hand_open(&h, &l, NULL);
			_exit(e ? 1 : now_s() - began < 2 ? 0 : 2);
		}
		int status = -1;
		waitpid(pid, &status, 0);
		CU_ASSERT_EQUAL(status, 0);
	}
	for (int i = 0; i < N; i++)
		close(s[i]);
	CU_ASSERT_TRUE(status_becomes(&l, "sessions", 0));
	CU_ASSERT_EQUAL(daemon_stop(&l), 0);
}

/* Over the cap: each is told why, whether its HELLO was sent before the refusal or after, and by either loop. */
static void refusals_reach_their_peer(void)
{
	struct daemon l = { 0 };
	struct apr_hello hello = hand_hello();
	struct hand h[2];
	char config[160], err[200], buf[300];
	static int s[200];

	for (int loop = 0; loop < 2; loop++) {
		daemon_name(&l, "over");
		if (loop)
			strcpy(l.env_loop, "epoll");
		snprintf(config, sizeof(config), "%s/over.conf", apr_test_tmpdir());
		FILE *f = fopen(config, "we");
		fputs("limits { connections = 2 }\n", f);
		fclose(f);
		if (!daemon_start(&l, NULL, "--config", config, NULL))
			return;
		for (int i = 0; i < 2; i++)
			CU_ASSERT_EQUAL(hand_open(&h[i], &l, NULL), 0);
		unsigned told = 0, hand_told = 0, late_told = 0;
		for (int i = 0; i < 200; i++) {
			struct apr_opts o = APR_OPTS_INIT;
			struct apr *c = NULL;
			struct hand x;
			o.path = l.sock;
			told += apr_connect(&c, &o, err, sizeof(err)) == -EDQUOT && strstr(err, "connections");
			hand_told += hand_open(&x, &l, NULL) == -EDQUOT;
			hand_close(&x);
		}
		CU_ASSERT_EQUAL(told, 200);
		CU_ASSERT_EQUAL(hand_told, 200);
		for (int i = 0; i < 200; i++)
			s[i] = hand_socket(&l);
		for (int i = 0; i < 200; i++)
			(void)!send(s[i], &hello, sizeof(hello), MSG_NOSIGNAL);
		for (int i = 0; i < 200; i++) {
			int n = hand_recv(s[i], buf, sizeof(buf), NULL, 2000);
			struct apr_frame a = { 0 };
			memcpy(&a, buf, n < (int)sizeof(a) ? 0 : sizeof(a));
			late_told += a.err == -EDQUOT;
			CU_ASSERT_EQUAL(hand_recv(s[i], buf, sizeof(buf), NULL, 2000), 0);
			close(s[i]);
		}
		CU_ASSERT_EQUAL(late_told, 200);
		/* they count no more: one leaves, one comes */
		hand_close(&h[0]);
		CU_ASSERT_TRUE(status_becomes(&l, "sessions", 1));
		CU_ASSERT_EQUAL(hand_open(&h[0], &l, NULL), 0);
		/* silent ones are not kept for ever */
		for (int i = 0; i < 200; i++)
			s[i] = hand_socket(&l);
		CU_ASSERT_TRUE(status_becomes(&l, "connections", 3)); /* two, and the one that asks */
		for (int i = 0; i < 200; i++)
			close(s[i]);
		for (int i = 0; i < 2; i++)
			hand_close(&h[i]);
		CU_ASSERT_EQUAL(daemon_stop(&l), 0);
	}
}

static void without_ready_a_session_ends(void)
{
	struct daemon l = { 0 };
	struct apr_hello hello = hand_hello();
	struct apr_region res = APR_REGION_INIT;
	struct apr_welcome w;
	struct apr_frame f;
	char config[160];
	uint8_t buf[300] = { 0 };
	int fds[3];

	daemon_name(&l, "unready");
	snprintf(config, sizeof(config), "%s/unready.conf", apr_test_tmpdir());
	FILE *out = fopen(config, "we");
	fputs("hello-ms = 400\n", out);
	fclose(out);
	if (!daemon_start(&l, NULL, "--config", config, NULL))
		return;
	int s = hand_socket(&l);
	CU_ASSERT_EQUAL(send(s, &hello, sizeof(hello), 0), (ssize_t)sizeof(hello));
	CU_ASSERT_EQUAL_FATAL(hand_recv(s, &w, sizeof(w), fds, 2000), (int)sizeof(w));
	CU_ASSERT_EQUAL(apr_region_map(&res, fds[1], APR_FD_RES, w.res_size), 0);
	int n = hand_recv(s, buf, sizeof(buf) - 1, NULL, 5000);
	CU_ASSERT_TRUE_FATAL(n > (int)sizeof(f));
	memcpy(&f, buf, sizeof(f));
	CU_ASSERT_EQUAL(f.type, APR_FRAME_BYE);
	CU_ASSERT_EQUAL(f.err, APR_REASON_PROTOCOL);
	CU_ASSERT_PTR_NOT_NULL(strstr((char *)buf + sizeof(f), "READY"));
	CU_ASSERT_EQUAL(hand_recv(s, buf, sizeof(buf), NULL, 2000), 0);
	CU_ASSERT_TRUE(status_becomes(&l, "sessions", 0));
	const struct apr_res_hdr *h = res.base;
	CU_ASSERT_TRUE(h && h->flags & APR_RES_DEAD);
	CU_ASSERT_TRUE(h && h->reason == APR_REASON_PROTOCOL);
	apr_region_unmap(&res);
	for (int i = 0; i < 3; i++)
		close(fds[i]);
	close(s);
	/* one that said it may be silent for longer than that */
	struct hand quiet;
	CU_ASSERT_EQUAL(hand_open(&quiet, &l, NULL), 0);
	CU_ASSERT_EQUAL(hand_ended(&quiet, 1000), 0);
	hand_close(&quiet);
	CU_ASSERT_EQUAL(daemon_stop(&l), 0);
}

static void daemon_down(void)
{
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 0);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static const struct apr_test tests[] = {
	{ "daemon_up", daemon_up, KEEPS_HEAP },
	{ "sixteen_processes_as_alone", sixteen_processes_as_alone, 0 },
	{ "case12_killed_in_every_state", case12_killed_in_every_state, 0 },
	{ "memory_and_descriptors_come_back", memory_and_descriptors_come_back, 0 },
	{ "case10_one_that_cannot_fit", case10_one_that_cannot_fit, 0 },
	{ "case14_a_long_prompt_freezes_nobody", case14_a_long_prompt_freezes_nobody, 0 },
	{ "case24_no_wake_up_is_lost", case24_no_wake_up_is_lost, 0 },
	{ "limits_of_one_user", limits_of_one_user, 0 },
	{ "unread_welcomes_wait_in_order", unread_welcomes_wait_in_order, 0 },
	{ "case42_many_without_ready", case42_many_without_ready, 0 },
	{ "refusals_reach_their_peer", refusals_reach_their_peer, 0 },
	{ "without_ready_a_session_ends", without_ready_a_session_ends, 0 },
	{ "daemon_down", daemon_down, KEEPS_HEAP },
};

TEST_MAIN("daemon/many", tests)
