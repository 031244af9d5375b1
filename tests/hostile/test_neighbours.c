/* SPDX-License-Identifier: MIT */
/*
 * A hostile client beside two honest ones: everything it sends and writes is a mutation of what would be right, drawn
 * from a seed. Only its own sessions may suffer; the neighbours' answers are compared byte by byte all the while.
 *
 * Six seconds; APR_HOSTILE_S=SECONDS for more, APR_HOSTILE_SEED=N for another series (the seed is printed).
 */
#include "tests/daemon/running.h"
#include <sys/mman.h>

enum { NEIGHBOURS = 2, ROOM = 2048, ATTACKS = 8 };

struct neighbour { /* shared with its process */
	uint32_t over, done, wrong, error;
};

struct text {
	size_t n;
	char s[ROOM];
};

static uint64_t state;

static uint32_t draw(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 32) % below;
}

static uint32_t odd(void)
{
	static const uint32_t v[] = { 0, 1, 7, 63, 64, 65, 4095, 4096, 131072, 0x7fffffff, 0x80000000u, 0xfffffff8u, 0xffffffffu };

	return draw(4) ? v[draw(13)] : (uint32_t)(state >> 13);
}

/* ---- those who must not notice ------------------------------------------------------------------ */

static int keep(void *arg, const struct apr_token *k)
{
	struct text *t = arg;

	for (size_t i = 0; i < k->len && t->n < ROOM; i++)
		t->s[t->n++] = k->text[i];
	return 0;
}

static void honest(const struct daemon *d, struct neighbour *me)
{
	struct apr_gen g = {
		.size = sizeof(g), .text = "my neighbour", .len = 12, .max_tokens = 60, .has_seed = 1, .seed = 77
	};
	static struct text right, t;
	struct apr *c = connect_to(d);

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (c && !__atomic_load_n(&me->over, __ATOMIC_RELAXED)) {
		t.n = 0;
		int e = apr_generate(c, &g, keep, me->done ? &t : &right, NULL, NULL, 0);
		if (e)
			me->error = (uint32_t)-e;
		if (e || (me->done && (t.n != right.n || memcmp(t.s, right.s, t.n) != 0)))
			me->wrong++;
		me->done++;
	}
	apr_close(c);
	_exit(c && right.n ? 0 : 1);
}

/* ---- the attacks: each opens what it needs and leaves it as it likes ----------------------------------- */

static void entries(struct hand *h)
{
	for (uint32_t i = 0, n = 1 + draw(40); i < n && apr_rc_sq_space(&h->ring); i++) {
		struct apr_sqe s = { .op = (uint8_t)draw(10), .user_data = draw(20), .in_off = h->geo.req_arena_off,
				     .in_len = draw(200), .max_tokens = draw(30), .timeout_ms = 200 };
		for (uint32_t k = draw(4); k; k--) {
			uint32_t v = odd();
			memcpy((uint8_t *)&s + 4 * draw(16), &v, 4);
		}
		hand_submit(h, &s);
	}
	sleep_ms(draw(3));
}

static void words(struct hand *h)
{
	struct apr_req_hdr *r = h->req.base;
	uint32_t *const at[] = { &r->sq_tail, &r->cq_head, &r->wait_seq, &r->wake_at, &r->wait_how };

	entries(h);
	for (uint32_t i = draw(30); i; i--)
		__atomic_store_n(at[draw(5)], draw(2) ? odd() : draw(64), __ATOMIC_RELEASE);
	apr_doorbell_ring(h->doorbell);
}

static void bytes(struct hand *h) /* the whole region, while it is read */
{
	entries(h);
	for (uint32_t i = draw(300); i; i--)
		((volatile uint8_t *)h->req.base)[4096 + draw((uint32_t)h->req.size - 4096)] = (uint8_t)odd();
	if (!draw(3))
		fallocate(h->req.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096 * draw(8), 4096 * (1 + draw(16)));
	apr_doorbell_ring(h->doorbell);
}

static void frames(struct hand *h)
{
	uint8_t b[1200];

	for (uint32_t i = 1 + draw(8); i; i--) {
		uint32_t n = draw(sizeof(b));
		for (uint32_t k = 0; k < n; k++)
			b[k] = (uint8_t)draw(256);
		struct apr_frame f = { APR_FRAME_MAGIC, (uint16_t)draw(48), (uint16_t)(draw(4) ? 0 : odd()),
				       draw(3) ? n : odd(), draw(4) ? 0 : (int32_t)odd() };
		if (n >= sizeof(f))
			memcpy(b, &f, sizeof(f));
		send(h->sock, b, n, MSG_NOSIGNAL | MSG_DONTWAIT);
	}
}

static void doorbells(struct hand *h)
{
	uint64_t most = UINT64_MAX - 1;

	(void)!write(h->doorbell, &most, sizeof(most)); /* full: a blocking write of the daemon's would hang */
	entries(h);
}

static void hellos(const struct daemon *d)
{
	struct apr_hello x = hand_hello();

	for (uint32_t k = 1 + draw(4); k; k--) {
		uint32_t v = odd();
		memcpy((uint8_t *)&x + 16 + 4 * draw(28), &v, 4);
	}
	int s = hand_socket(d);
	if (s < 0)
		return;
	send(s, &x, draw(3) ? sizeof(x) : draw(sizeof(x)), MSG_NOSIGNAL | MSG_DONTWAIT);
	if (draw(2))
		sleep_ms(draw(3));
	close(s);
}

static void half_open(const struct daemon *d)
{
	int s[40];
	uint32_t n = draw(40);

	for (uint32_t i = 0; i < n; i++)
		s[i] = hand_socket(d);
	for (uint32_t i = 0; i < n; i++)
		if (s[i] >= 0)
			close(s[i]);
}

static void killed(const struct daemon *d) /* a process that is stopped, then dies with requests under way */
{
	pid_t pid = fork();

	if (!pid) {
		struct hand h;
		if (!hand_open(&h, d, NULL))
			entries(&h);
		raise(SIGSTOP);
		_exit(0);
	}
	sleep_ms(draw(12));
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

static void attack(const struct daemon *d, uint32_t tally[ATTACKS])
{
	static void (*const with[])(struct hand *) = { entries, words, bytes, frames, doorbells };
	uint32_t which = draw(ATTACKS);
	struct hand h;

	tally[which]++;
	if (which == 5) {
		hellos(d);
	} else if (which == 6) {
		half_open(d);
	} else if (which == 7) {
		killed(d);
	} else {
		if (!hand_open(&h, d, NULL))
			with[which](&h);
		hand_close(&h);
	}
}

static void neighbours_notice_nothing(void)
{
	const char *s = getenv("APR_HOSTILE_S"), *seed = getenv("APR_HOSTILE_SEED");
	struct neighbour *n = mmap(NULL, NEIGHBOURS * sizeof(*n), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint32_t tally[ATTACKS] = { 0 }, answers = 0;
	pid_t pid[NEIGHBOURS];
	struct daemon d;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "neighbours", NULL));
	long worker = status_number(&d, "worker_pid");
	unsigned fds = descriptors_of((pid_t)worker);
	for (int i = 0; i < NEIGHBOURS; i++) {
		pid[i] = fork();
		if (!pid[i])
			honest(&d, &n[i]);
	}
	state = seed ? strtoull(seed, NULL, 0) | 1 : UINT64_C(0x9e3779b97f4a7c15);
	printf("seed %#llx: ", (unsigned long long)state);
	for (double end = now_s() + (s ? atof(s) : 6); now_s() < end;)
		attack(&d, tally);
	for (int i = 0; i < NEIGHBOURS; i++)
		__atomic_store_n(&n[i].over, 1, __ATOMIC_RELAXED);
	for (int i = 0; i < NEIGHBOURS; i++) {
		int status = -1;
		waitpid(pid[i], &status, 0);
		CU_ASSERT_EQUAL(status, 0);
		CU_ASSERT_EQUAL(n[i].wrong, 0);
		CU_ASSERT_EQUAL(n[i].error, 0);
		CU_ASSERT_TRUE(n[i].done > 1);
		answers += n[i].done;
	}
	printf("entries %u, words %u, bytes %u, frames %u, doorbells %u, hellos %u, half open %u, killed %u; %u answers right ",
	       tally[0], tally[1], tally[2], tally[3], tally[4], tally[5], tally[6], tally[7], answers);
	CU_ASSERT_TRUE(status_becomes(&d, "sessions", 0));
	CU_ASSERT_TRUE(status_becomes(&d, "connections", 1));
	CU_ASSERT_TRUE(status_becomes(&d, "kv.pages_free", status_number(&d, "kv.pages_total")));
	CU_ASSERT_EQUAL(status_number(&d, "worker_pid"), worker);
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 0);
	for (int i = 0; i < 100 && descriptors_of((pid_t)worker) > fds; i++)
		sleep_ms(20);
	CU_ASSERT_TRUE(descriptors_of((pid_t)worker) <= fds + 4);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
	munmap(n, NEIGHBOURS * sizeof(*n));
}

static const struct apr_test tests[] = {
	{ "neighbours_notice_nothing", neighbours_notice_nothing, 0 },
};
TEST_MAIN("hostile/neighbours", tests)
