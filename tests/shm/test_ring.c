/* SPDX-License-Identifier: MIT */
/*
 * Both sides of the rings as threads over one mapping (ThreadSanitizer sees nothing
 * between two mappings of one memfd), the credit rules against every small
 * situation, and the arenas against a model.
 */
#include "shm/ring.h"
#include "tests/harness.h"
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct pair {
	struct apr_geometry g;
	void *req, *res;
	struct apr_rc c;
	struct apr_rd d;
	int bell;
};

static void setup(struct pair *p, struct apr_wish w)
{
	memset(p, 0, sizeof(*p));
	CU_ASSERT_EQUAL_FATAL(apr_geometry_plan(&w, NULL, &p->g, NULL), 0);
	p->req = calloc(1, p->g.req_size);
	p->res = calloc(1, p->g.res_size);
	CU_ASSERT_FATAL(p->req && p->res);
	apr_rc_init(&p->c, p->req, p->res, &p->g);
	apr_rd_init(&p->d, p->req, p->res, &p->g);
	p->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

static void teardown(struct pair *p)
{
	close(p->bell);
	free(p->req);
	free(p->res);
}

static void submission_in_order(void)
{
	struct pair p;
	struct apr_sqe out;

	setup(&p, (struct apr_wish){ .sq_entries = 4 });
	CU_ASSERT_EQUAL(apr_rd_sq_ready(&p.d), 0);
	for (uint32_t i = 0; i < 4; i++)
		apr_rc_sqe(&p.c)->user_data = i;
	CU_ASSERT_PTR_NULL(apr_rc_sqe(&p.c));
	CU_ASSERT_EQUAL(apr_rd_sq_ready(&p.d), 0); /* not published */
	apr_rc_publish(&p.c, p.c.sq_tail);
	CU_ASSERT_EQUAL(apr_rd_sq_ready(&p.d), 4);
	for (uint32_t i = 0; i < 4; i++) {
		CU_ASSERT_EQUAL(apr_rd_sq_peek(&p.d, &out), 0);
		CU_ASSERT_EQUAL(out.user_data, i);
		CU_ASSERT_EQUAL(apr_rc_sq_space(&p.c), i);
		apr_rd_sq_advance(&p.d);
	}
	CU_ASSERT_EQUAL(apr_rc_sq_space(&p.c), 4);
	teardown(&p);
}

static void case23_indexes_out_of_range(void)
{
	struct pair p;

	setup(&p, (struct apr_wish){ .sq_entries = 64 });
	p.c.req->sq_tail = 65;
	CU_ASSERT_EQUAL(apr_rd_sq_ready(&p.d), -EPROTO);
	p.c.req->sq_tail = UINT32_MAX; /* head beyond tail */
	CU_ASSERT_EQUAL(apr_rd_sq_ready(&p.d), -EPROTO);
	CU_ASSERT_EQUAL(apr_rd_sq_sleep(&p.d), -EPROTO);
	p.c.req->sq_tail = 64;
	CU_ASSERT_EQUAL(apr_rd_sq_ready(&p.d), 64);

	struct apr_cqe e = { .type = APR_CQE_ACK };
	apr_rd_cq_write(&p.d, &e);
	apr_rd_cq_write(&p.d, &e);
	p.c.req->cq_head = 1; /* of what is written, not yet published */
	CU_ASSERT_EQUAL(apr_rd_cq_refresh(&p.d), -EPROTO);
	apr_rd_cq_publish(&p.d);
	CU_ASSERT_EQUAL(apr_rd_cq_refresh(&p.d), 0);
	CU_ASSERT_EQUAL(p.d.cq_head, 1);
	p.c.req->cq_head = 0; /* backwards */
	CU_ASSERT_EQUAL(apr_rd_cq_refresh(&p.d), -EPROTO);
	p.c.req->cq_head = 3;
	CU_ASSERT_EQUAL(apr_rd_cq_refresh(&p.d), -EPROTO);
	CU_ASSERT_EQUAL(apr_rd_cq_stall(&p.d), -EPROTO);
	p.c.req->wait_how = 77;
	p.c.req->wait_seq = 1;
	CU_ASSERT_EQUAL(apr_rd_wake(&p.d), -EPROTO);
	teardown(&p);
}

static void indexes_wrap(void)
{
	struct pair p;
	struct apr_sqe s;

	setup(&p, (struct apr_wish){ .sq_entries = 4, .cq_entries = 8 });
	p.c.sq_tail = p.c.sq_pub = p.c.sq_head = p.d.sq_head = p.c.req->sq_tail = p.c.res->sq_head == 0 ? UINT32_MAX - 5 : 0;
	((struct apr_res_hdr *)p.res)->sq_head = p.d.sq_head;
	p.c.cq_head = p.d.cq_head = p.d.cq_tail = p.d.cq_pub = p.c.req->cq_head = UINT32_MAX - 5;
	((struct apr_res_hdr *)p.res)->cq_tail = p.d.cq_tail;
	for (uint64_t i = 0; i < 50; i++) {
		apr_rc_sqe(&p.c)->user_data = i;
		apr_rc_publish(&p.c, p.c.sq_tail);
		CU_ASSERT_EQUAL(apr_rd_sq_ready(&p.d), 1);
		CU_ASSERT_EQUAL(apr_rd_sq_peek(&p.d, &s), 0);
		apr_rd_sq_advance(&p.d);
		struct apr_cqe e = { .user_data = s.user_data };
		CU_ASSERT_EQUAL(apr_rd_cq_refresh(&p.d), 0);
		CU_ASSERT_EQUAL(apr_rd_cq_free(&p.d), 8);
		apr_rd_cq_write(&p.d, &e);
		apr_rd_cq_publish(&p.d);
		CU_ASSERT_EQUAL(apr_rc_cq_ready(&p.c), 1);
		CU_ASSERT_EQUAL(apr_rc_cqe(&p.c, 0)->user_data, i);
		CU_ASSERT(!apr_rc_cq_advance(&p.c, 1));
	}
	teardown(&p);
}

static void longer_entries(void)
{
	struct pair p;
	struct apr_sqe s;

	setup(&p, (struct apr_wish){ .sqe_size = 128, .cqe_size = 192 });
	struct apr_sqe *e = apr_rc_sqe(&p.c);
	e->user_data = 5;
	apr_rc_publish(&p.c, p.c.sq_tail);
	CU_ASSERT_EQUAL(apr_rd_sq_peek(&p.d, &s), 0);
	CU_ASSERT_EQUAL(s.user_data, 5);
	((uint8_t *)e)[127] = 1; /* something we do not know */
	CU_ASSERT_EQUAL(apr_rd_sq_peek(&p.d, &s), -EINVAL);
	teardown(&p);
}

/* ---- waking -------------------------------------------------------------------- */

static void each_sleep_is_answered_once(void)
{
	struct pair p;
	struct apr_cqe e = { .type = APR_CQE_TOKEN };
	uint32_t seen;

	setup(&p, (struct apr_wish){ 0 });
	CU_ASSERT_EQUAL(apr_rd_wake(&p.d), APR_WAIT_NONE);
	CU_ASSERT(apr_rc_sleep(&p.c, 2, APR_WAIT_FUTEX, &seen));
	CU_ASSERT_EQUAL(seen, 0);
	apr_rd_cq_write(&p.d, &e);
	apr_rd_cq_publish(&p.d);
	CU_ASSERT_EQUAL(apr_rd_wake(&p.d), APR_WAIT_NONE); /* one is too few */
	apr_rd_cq_write(&p.d, &e);
	apr_rd_cq_publish(&p.d);
	CU_ASSERT_EQUAL(apr_rd_wake(&p.d), APR_WAIT_FUTEX);
	CU_ASSERT_EQUAL(apr_rd_wake(&p.d), APR_WAIT_NONE);
	apr_rc_awake(&p.c);
	CU_ASSERT(!apr_rc_sleep(&p.c, 2, APR_WAIT_FUTEX, &seen)); /* it is there */
	CU_ASSERT(apr_rc_sleep(&p.c, 3, APR_WAIT_SOCKET, &seen));
	apr_rd_cq_write(&p.d, &e);
	apr_rd_cq_publish(&p.d);
	CU_ASSERT_EQUAL(apr_rd_wake(&p.d), APR_WAIT_SOCKET);
	apr_rc_awake(&p.c);
	p.c.req->wait_how = APR_WAIT_SOCKET_ALWAYS;
	CU_ASSERT_EQUAL(apr_rd_wake(&p.d), APR_WAIT_SOCKET);
	CU_ASSERT_EQUAL(apr_rd_wake(&p.d), APR_WAIT_SOCKET);
	apr_rd_dead(&p.d, APR_REASON_SHUTDOWN);
	CU_ASSERT(!apr_rc_sleep(&p.c, 9, APR_WAIT_FUTEX, &seen)); /* nothing will come */
	teardown(&p);
}

enum { ROUNDS = 100000 };

static void ring_bell(struct pair *p)
{
	apr_doorbell_ring(p->bell);
}

/* The daemon's loop in small: take NOPs, answer, wake; sleep on the doorbell when there is nothing. */
static void *answer(void *arg)
{
	struct pair *p = arg;
	uint64_t done = 0, sum = 0;
	struct apr_credit credit = { .max_inflight = p->g.max_inflight };

	while (done < ROUNDS) {
		int n = apr_rd_sq_ready(&p->d);
		if (n == 0)
			n = apr_rd_sq_sleep(&p->d);
		if (n == 0) {
			struct pollfd f = { p->bell, POLLIN, 0 };
			poll(&f, 1, 2000);
			uint64_t v;
			if (read(p->bell, &v, 8) < 0)
				sum += UINT64_C(1) << 40; /* a lost doorbell */
			apr_rd_flags_clear(&p->d, APR_RES_NEED_WAKEUP);
			continue;
		}
		if (n < 0)
			break;
		struct apr_sqe s;
		if (apr_rd_cq_refresh(&p->d))
			break;
		if (!apr_credit_take(&credit, apr_rd_cq_free(&p->d))) {
			if (apr_rd_cq_stall(&p->d) == 0) {
				struct pollfd f = { p->bell, POLLIN, 0 };
				poll(&f, 1, 2000);
				uint64_t v;
				if (read(p->bell, &v, 8) < 0)
					sum += UINT64_C(1) << 40;
				apr_rd_flags_clear(&p->d, APR_RES_CQ_STALLED);
			}
			continue;
		}
		if (apr_rd_sq_peek(&p->d, &s))
			break;
		const uint64_t *input = (const void *)((const uint8_t *)p->req + s.in_off);
		uint64_t got;
		if (apr_guard_copy(&got, input, 8))
			break;
		apr_rd_sq_advance(&p->d);
		sum += got == s.user_data * 3 ? 0 : 1;
		struct apr_cqe e = { .user_data = s.user_data, .type = APR_CQE_ACK };
		apr_rd_cq_write(&p->d, &e);
		apr_rd_cq_publish(&p->d);
		done++;
		apr_fence_full();
		if (apr_rd_wake(&p->d) == APR_WAIT_FUTEX)
			apr_futex_wake(&p->d.res->cq_tail);
	}
	return (void *)(uintptr_t)(sum + (done != ROUNDS));
}

static bool wait_one(struct pair *p)
{
	uint32_t seen;

	while (!apr_rc_cq_ready(&p->c)) {
		if (!apr_rc_sleep(&p->c, p->c.cq_head + 1, APR_WAIT_FUTEX, &seen))
			continue;
		int e = apr_futex_wait(&p->c.res->cq_tail, seen, UINT64_C(2000000000));
		apr_rc_awake(&p->c);
		if (e == -ETIMEDOUT)
			return false; /* a lost wake-up */
	}
	return true;
}

static void case24_both_sides_as_threads(void)
{
	struct pair p;
	struct apr_arena arena;
	pthread_t t;
	uint64_t sent = 0, got = 0;
	void *wrong;
	unsigned seed = 1;

	setup(&p, (struct apr_wish){ .sq_entries = 8, .cq_entries = 16, .req_size = 12288 });
	CU_ASSERT_EQUAL(apr_arena_init(&arena, p.g.req_arena_off, p.g.req_arena_len, p.g.sq_entries), 0);
	pthread_create(&t, NULL, answer, &p);
	while (got < ROUNDS) {
		uint32_t burst = (uint32_t)rand_r(&seed) % 6 + 1;
		while (burst-- && sent < ROUNDS && sent - got < p.g.max_inflight) {
			struct apr_sqe *s = apr_rc_sqe(&p.c);
			if (!s)
				break;
			apr_arena_pass(&arena, apr_rc_sq_head(&p.c));
			uint32_t off = apr_arena_alloc(&arena, 8 + (uint32_t)rand_r(&seed) % 100);
			CU_ASSERT_FATAL(off != 0);
			*(uint64_t *)(void *)((uint8_t *)p.req + off) = sent * 3;
			s->in_off = off;
			s->in_len = 8;
			s->user_data = sent++;
			apr_arena_mark(&arena, p.c.sq_tail - 1);
			apr_rc_publish(&p.c, p.c.sq_tail);
			if (apr_rc_need_wakeup(&p.c))
				ring_bell(&p);
		}
		if (!wait_one(&p)) {
			CU_FAIL("lost wake-up");
			break;
		}
		uint32_t take = (uint32_t)rand_r(&seed) % apr_rc_cq_ready(&p.c) + 1;
		for (uint32_t i = 0; i < take; i++)
			CU_ASSERT_EQUAL(apr_rc_cqe(&p.c, i)->user_data, got + i);
		got += take;
		if (apr_rc_cq_advance(&p.c, take))
			ring_bell(&p);
	}
	pthread_join(t, &wrong);
	CU_ASSERT_PTR_NULL(wrong);
	apr_arena_free(&arena);
	teardown(&p);
}

/* ---- credits --------------------------------------------------------------------- */

/*
 * A daemon and a client over a ring of 8 as numbers: every reachable state. Whatever
 * happened, all finals and one cancel's answer must still go through while the client
 * reads nothing.
 */
struct cstate {
	uint8_t unfinished, used, cancel;
};

static void finals_always_go_through(void)
{
	enum { ENTRIES = 8, MAX = 4 };
	bool seen[MAX + 1][ENTRIES + 1][2] = { 0 };
	struct cstate todo[2048];
	unsigned n = 0, states = 0;

	todo[n++] = (struct cstate){ 0, 0, 0 };
	while (n) {
		struct cstate s = todo[--n];
		CU_ASSERT_FATAL(s.unfinished <= MAX && s.used <= ENTRIES);
		if (seen[s.unfinished][s.used][s.cancel])
			continue;
		seen[s.unfinished][s.used][s.cancel] = true;
		states++;
		struct apr_credit c = { MAX, s.unfinished, s.cancel };
		uint32_t free = ENTRIES - s.used;
		CU_ASSERT(s.unfinished + (uint32_t)s.cancel <= free);
		if (apr_credit_take(&c, free))
			todo[n++] = (struct cstate){ (uint8_t)(s.unfinished + 1), s.used, s.cancel };
		if (apr_credit_cancel(&c, free))
			todo[n++] = (struct cstate){ s.unfinished, s.used, 1 };
		if (apr_credit_more(&c, free))
			todo[n++] = (struct cstate){ s.unfinished, (uint8_t)(s.used + 1), s.cancel };
		if (s.unfinished)
			todo[n++] = (struct cstate){ (uint8_t)(s.unfinished - 1), (uint8_t)(s.used + 1), s.cancel };
		if (s.cancel)
			todo[n++] = (struct cstate){ s.unfinished, (uint8_t)(s.used + 1), 0 };
		if (s.used)
			todo[n++] = (struct cstate){ s.unfinished, (uint8_t)(s.used - 1), s.cancel };
	}
	CU_ASSERT(states > 30);
	struct apr_credit c = { 4, 2, false };
	CU_ASSERT_EQUAL(apr_credit_more(&c, 8), 5);
	CU_ASSERT_EQUAL(apr_credit_more(&c, 3), 0);
	CU_ASSERT_EQUAL(apr_credit_more(&c, 0), 0);
	c.unfinished = 4;
	CU_ASSERT(!apr_credit_take(&c, 8));
	CU_ASSERT(apr_credit_cancel(&c, 5));
	CU_ASSERT(!apr_credit_cancel(&c, 4));
	c.cancel = true;
	CU_ASSERT(!apr_credit_cancel(&c, 8));
}

/* ---- arenas ------------------------------------------------------------------------ */

static void arena_never_overlaps(void)
{
	enum { LEN = 4096, QUEUE = 16 };
	struct apr_arena a;
	struct {
		uint32_t off, len;
	} live[QUEUE];
	uint32_t head = 0, tail = 0;
	unsigned seed = 7, full = 0, total = 0;

	CU_ASSERT_EQUAL_FATAL(apr_arena_init(&a, 8192, LEN, QUEUE), 0);
	for (int i = 0; i < 200000; i++) {
		if (rand_r(&seed) % 2 && tail - head < QUEUE) {
			uint32_t len = (uint32_t)rand_r(&seed) % 900 + 1, off = 0;
			bool names = rand_r(&seed) % 4; /* some entries name nothing */
			if (names) {
				off = apr_arena_alloc(&a, len);
				if (!off) {
					full++;
					goto free_some;
				}
				CU_ASSERT_EQUAL(off % 8, 0);
				CU_ASSERT(off >= 8192 && off + len <= 8192 + LEN);
				for (uint32_t k = head; k != tail; k++)
					if (live[k % QUEUE].off)
						CU_ASSERT(off + len <= live[k % QUEUE].off ||
							  live[k % QUEUE].off + live[k % QUEUE].len <= off);
				total++;
			}
			live[tail % QUEUE].off = off;
			live[tail % QUEUE].len = len;
			apr_arena_mark(&a, tail++);
			continue;
		}
free_some:
		if (head != tail) {
			head += (uint32_t)rand_r(&seed) % (tail - head) + 1;
			apr_arena_pass(&a, head);
		}
	}
	CU_ASSERT(full > 100);
	CU_ASSERT(total > 10000);
	/* empty again: all of it fits at once, wherever the cursor stands */
	apr_arena_pass(&a, tail);
	CU_ASSERT_NOT_EQUAL(apr_arena_alloc(&a, LEN), 0);
	CU_ASSERT_EQUAL(apr_arena_alloc(&a, 1), 0);
	CU_ASSERT_EQUAL(apr_arena_alloc(&a, LEN + 1), 0);
	CU_ASSERT_EQUAL(apr_arena_alloc(&a, UINT32_MAX), 0);
	apr_arena_free(&a);
}

static void arena_skip_frees_with_the_last(void)
{
	struct apr_arena a;

	CU_ASSERT_EQUAL_FATAL(apr_arena_init(&a, 4096, 64, 4), 0);
	CU_ASSERT_EQUAL(apr_arena_alloc(&a, 32), 4096);
	CU_ASSERT_EQUAL(apr_arena_alloc(&a, 32), 4128);
	/* entries 0 and 1 are one batch: what they name is freed by entry 1 */
	apr_arena_skip(&a, 0);
	apr_arena_mark(&a, 1);
	apr_arena_pass(&a, 1);
	CU_ASSERT_EQUAL(apr_arena_alloc(&a, 8), 0);
	apr_arena_pass(&a, 2);
	CU_ASSERT_NOT_EQUAL(apr_arena_alloc(&a, 64), 0);
	apr_arena_free(&a);
}

static const struct apr_test tests[] = {
	{ "submission_in_order", submission_in_order, 0 },
	{ "case23_indexes_out_of_range", case23_indexes_out_of_range, 0 },
	{ "indexes_wrap", indexes_wrap, 0 },
	{ "longer_entries", longer_entries, 0 },
	{ "each_sleep_is_answered_once", each_sleep_is_answered_once, 0 },
	{ "case24_both_sides_as_threads", case24_both_sides_as_threads, KEEPS_HEAP }, /* a thread's stack */
	{ "case13_finals_always_go_through", finals_always_go_through, 0 },
	{ "arena_never_overlaps", arena_never_overlaps, 0 },
	{ "arena_skip_frees_with_the_last", arena_skip_frees_with_the_last, 0 },
};
TEST_MAIN("shm/ring", tests)
