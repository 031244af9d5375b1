/* SPDX-License-Identifier: MIT */
/* Owns: the checks of the rings: order, credits, cancelling, waking, and what happens to a client that breaks a rule. */
#include "client/aprctl/conform.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define AT(field) ((uint32_t)offsetof(struct apr_sqe, field))
#define OP(o) (UINT64_C(1) << (o))
#define GEN (OP(APR_OP_GENERATE) | OP(APR_OP_CANCEL))

/* ---- NOP ------------------------------------------------------------------------- */

static enum conf_result nop(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_sqe(k, APR_OP_NOP);
	q.user_data = UINT64_MAX;
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res && k->a.type == APR_CQE_ACK, "res %d, type %u", k->a.res, k->a.type);
	return CONF_OK;
}

/* Full batches through a small ring, often enough that every index wraps. */
static enum conf_result nop_batches(struct conf *k)
{
	PASS(conf_open_rings(k, 8, 16));
	for (uint64_t round = 0; round < 200; round++) {
		uint32_t n = k->s.w.max_inflight < 8 ? k->s.w.max_inflight : 8;

		for (uint32_t i = 0; i < n; i++) {
			struct apr_sqe q = {.op = APR_OP_NOP, .user_data = round * 8 + i};

			CHECK(k, raw_push(&k->s, &q), "round %d: the queue is full with %u entries in it", (int)round, i);
		}
		for (uint32_t i = 0; i < n; i++) {
			int e = raw_next(&k->s, CONF_MS);

			CHECK(k, !e, "round %d: %s", (int)round, apr_strerror(e));
			CHECK(k, k->s.cqe.user_data == round * 8 + i && !k->s.cqe.res, "round %d: user_data %llu, res %d",
			      (int)round, (unsigned long long)k->s.cqe.user_data, k->s.cqe.res);
		}
	}
	CHECK(k, apr_rc_sq_head(&k->s.rc) == k->s.rc.sq_tail, "sq_head %u, tail %u", apr_rc_sq_head(&k->s.rc), k->s.rc.sq_tail);
	return CONF_OK;
}

static enum conf_result counters(struct conf *k)
{
	const uint64_t *count;

	PASS(conf_open(k));
	count = ((const struct apr_res_hdr *)k->s.res.base)->counters;
	for (int i = 0; i < 5; i++)
		PASS(conf_nop(k));
	CHECK(k, count[APR_COUNT_SQES] == 5 && count[APR_COUNT_CQES] == 5, "counters say %llu and %llu after 5 NOPs",
	      (unsigned long long)count[APR_COUNT_SQES], (unsigned long long)count[APR_COUNT_CQES]);
	return CONF_OK;
}

/* The daemon only polls the doorbell: what the client rang is still in it. */
static enum conf_result doorbell(struct conf *k)
{
	uint64_t v = 0;

	PASS(conf_open(k));
	raw_ring(&k->s);
	raw_ring(&k->s);
	PASS(conf_nop(k));
	usleep(20000);
	CHECK(k, !fcntl(k->s.bell, F_SETFL, O_NONBLOCK), "fcntl");
	CHECK(k, read(k->s.bell, &v, sizeof(v)) == sizeof(v) && v >= 2, "the daemon has read the doorbell (%llu left)",
	      (unsigned long long)v);
	CHECK(k, !fcntl(k->s.bell, F_SETFL, 0), "fcntl"); /* blocking now: no matter to a daemon that never calls on it */
	return conf_nop(k);
}

/* ---- credits ---------------------------------------------------------------------- */

/* A long request of the smallest session's; ends only by cancel or its limit. */
static struct apr_sqe endless(struct conf *k)
{
	uint64_t buf[16];
	struct apr_params p;
	struct apr_sqe q = conf_generate(k, APR_MAX_TOKENS_CONTEXT, 5);

	if (k->w.features & APR_FEAT_SAMPLING) {
		apr_params_init(&p, buf, sizeof(buf));
		conf_greedy(&p, true);
		conf_params(k, &q, &p);
	}
	return q;
}

/* Waits until cq_tail stands still, and if asked until the daemon says that it waits for room; how many entries
 * lie unread. */
static uint32_t settle(struct conf *k, bool full)
{
	uint32_t last = apr_rc_cq_ready(&k->s.rc), still = 0;
	uint64_t until = apr_now_ns() + CONF_MS * UINT64_C(1000000);

	while (still < 15 && apr_now_ns() < until) {
		bool stalled = __atomic_load_n(&k->s.rc.res->flags, __ATOMIC_RELAXED) & APR_RES_CQ_STALLED;

		usleep(20000);
		still = apr_rc_cq_ready(&k->s.rc) == last && last && (stalled || !full) ? still + 1 : 0;
		last = apr_rc_cq_ready(&k->s.rc);
	}
	return last;
}

static enum conf_result inflight_limit(struct conf *k)
{
	uint32_t n, taken, finals = 0;
	struct apr_frame f = {APR_FRAME_MAGIC, APR_FRAME_CANCEL_ALL, 0, sizeof(f), 0};

	PASS(conf_open_rings(k, 16, 8));
	n = k->s.w.max_inflight + 4;
	for (uint32_t i = 0; i < n; i++) {
		struct apr_sqe q = endless(k);

		CHECK(k, raw_push(&k->s, &q), "the submission queue is full");
	}
	settle(k, true);
	taken = apr_rc_sq_head(&k->s.rc);
	CHECK(k, taken <= k->s.w.max_inflight, "%u entries taken, max_inflight is %u", taken, k->s.w.max_inflight);
	CHECK(k, taken, "no entry is taken");
	PASS(conf_alive(k));
	for (int tries = 0; finals < n && tries < 4000; tries++) {
		int e;

		if (tries % 50 == 0)
			raw_send(k->s.sock, &f, sizeof(f), NULL, 0); /* whatever was taken since the last one */
		e = raw_next(&k->s, 100);
		CHECK(k, !e || e == -ETIMEDOUT, "%s", apr_strerror(e));
		if (!e && k->s.cqe.type == APR_CQE_FINAL)
			finals++;
	}
	CHECK(k, finals == n, "%u of %u requests ended", finals, n);
	return conf_nop(k);
}

/* An unread queue parks the request; nothing is lost and nobody else waits. */
static enum conf_result full_queue(struct conf *k)
{
	struct apr_sqe q;
	uint32_t ready;

	PASS(conf_open_rings(k, 4, 8));
	q = endless(k);
	q.max_tokens = 40;
	CHECK(k, raw_push(&k->s, &q), "the submission queue is full");
	ready = settle(k, true);
	CHECK(k, ready && ready <= 8 - 2, "%u of 8 entries are written: one for the last and one for a CANCEL stay free", ready);
	PASS(conf_alive(k));
	PASS(conf_answer(k, q.user_data, &k->a));
	CHECK(k, !k->a.res && k->a.n, "res %d after %u tokens", k->a.res, k->a.n);
	if (k->w.features & APR_FEAT_SAMPLING)
		CHECK(k, k->a.n == 40, "%u of 40 tokens came", k->a.n);
	return conf_nop(k);
}

static enum conf_result cancel_full_queue(struct conf *k)
{
	struct apr_sqe q, c;
	uint32_t unread;
	int e;

	PASS(conf_open_rings(k, 4, 8));
	q = endless(k);
	CHECK(k, raw_push(&k->s, &q), "the submission queue is full");
	unread = settle(k, true);
	c = conf_sqe(k, APR_OP_CANCEL);
	c.arg = q.user_data;
	raw_push(&k->s, &c);
	for (uint32_t i = 0; i < 200 && apr_rc_cq_ready(&k->s.rc) < unread + 2; i++)
		usleep(20000);
	CHECK(k, apr_rc_cq_ready(&k->s.rc) == unread + 2, "after a CANCEL %u entries lie unread, not %u",
	      apr_rc_cq_ready(&k->s.rc), unread + 2);
	PASS(conf_answer(k, q.user_data, &k->a));
	CHECK(k, k->a.res == -ECANCELED && k->a.finish == APR_FINISH_CANCELLED, "res %d, finish %u", k->a.res, k->a.finish);
	e = raw_next(&k->s, CONF_MS);
	CHECK(k, !e && k->s.cqe.type == APR_CQE_ACK && k->s.cqe.user_data == c.user_data && !k->s.cqe.res,
	      "the CANCEL's answer does not follow with 0");
	return conf_nop(k);
}

/* ---- cancelling ------------------------------------------------------------------- */

static enum conf_result cancel_running(struct conf *k)
{
	struct apr_sqe q, c;
	bool final = false;

	PASS(conf_open(k));
	q = endless(k);
	raw_push(&k->s, &q);
	CHECK(k, !raw_next(&k->s, CONF_MS), "no first token");
	c = conf_sqe(k, APR_OP_CANCEL);
	c.arg = q.user_data;
	raw_push(&k->s, &c);
	for (;;) {
		int e = raw_next(&k->s, CONF_MS);

		CHECK(k, !e, "%s", apr_strerror(e));
		if (k->s.cqe.user_data == c.user_data)
			break;
		CHECK(k, !final, "an entry after the last one");
		final = k->s.cqe.type == APR_CQE_FINAL;
		if (final)
			CHECK(k, k->s.cqe.res == -ECANCELED, "FINAL's res is %d", k->s.cqe.res);
	}
	CHECK(k, k->s.cqe.type == APR_CQE_ACK && !k->s.cqe.res, "the CANCEL's answer is type %u, res %d", k->s.cqe.type,
	      k->s.cqe.res);
	CHECK(k, final, "the CANCEL's answer came before the request's last entry");
	c.user_data++;
	return conf_refused(k, &c, -ENOENT, UINT32_MAX);
}

static enum conf_result cancel_unknown(struct conf *k)
{
	struct apr_sqe c;

	PASS(conf_open(k));
	c = conf_sqe(k, APR_OP_CANCEL);
	c.arg = 424242;
	PASS(conf_refused(k, &c, -ENOENT, UINT32_MAX));
	c = conf_sqe(k, APR_OP_CANCEL);
	c.arg = c.user_data; /* itself */
	return conf_refused(k, &c, -ENOENT, UINT32_MAX);
}

static enum conf_result cancel_other_session(struct conf *k)
{
	struct raw other;
	struct apr_sqe q, c;
	int e;

	PASS(conf_open(k));
	q = endless(k);
	raw_push(&k->s, &q);
	CHECK(k, !raw_next(&k->s, CONF_MS), "no first token");
	e = raw_open(&other, k->path, NULL);
	CHECK(k, !e, "a second session is refused");
	c = conf_sqe(k, APR_OP_CANCEL);
	c.arg = q.user_data;
	raw_push(&other, &c);
	e = raw_next(&other, CONF_MS);
	int res = other.cqe.res;
	raw_close(&other);
	CHECK(k, !e && res == -ENOENT, "another session's CANCEL gets %d", res);
	return CONF_OK;
}

static enum conf_result cancel_all(struct conf *k)
{
	struct apr_frame f = {APR_FRAME_MAGIC, APR_FRAME_CANCEL_ALL, 0, sizeof(f), 0};
	uint32_t n = 4, finals = 0;

	PASS(conf_open(k));
	for (uint32_t i = 0; i < n; i++) {
		struct apr_sqe q = endless(k);

		raw_push(&k->s, &q);
	}
	CHECK(k, !raw_next(&k->s, CONF_MS), "no first token");
	for (int i = 0; i < 200 && apr_rc_sq_head(&k->s.rc) != k->s.rc.sq_tail; i++)
		usleep(10000);
	raw_send(k->s.sock, &f, sizeof(f), NULL, 0);
	while (finals < n) {
		int e = raw_next(&k->s, CONF_MS);

		CHECK(k, !e, "%u of %u ended, then %s", finals, n, apr_strerror(e));
		if (k->s.cqe.type == APR_CQE_FINAL) {
			CHECK(k, k->s.cqe.res == -ECANCELED, "res %d", k->s.cqe.res);
			finals++;
		}
	}
	return conf_nop(k);
}

static enum conf_result duplicate(struct conf *k)
{
	struct apr_sqe q, again, c;
	bool refused = false;

	PASS(conf_open(k));
	q = endless(k);
	raw_push(&k->s, &q);
	CHECK(k, !raw_next(&k->s, CONF_MS), "no first token");
	again = endless(k);
	again.user_data = q.user_data;
	raw_push(&k->s, &again);
	for (int i = 0; i < 4096 && !refused; i++) {
		int e = raw_next(&k->s, CONF_MS);

		CHECK(k, !e, "%s", apr_strerror(e));
		if (k->s.cqe.type != APR_CQE_FINAL)
			continue;
		CHECK(k, k->s.cqe.res == -EEXIST, "the last entry's res is %d", k->s.cqe.res);
		CHECK(k, k->s.cqe.pos == AT(user_data), "pos is %u", k->s.cqe.pos);
		refused = true;
	}
	CHECK(k, refused, "no refusal");
	c = conf_sqe(k, APR_OP_CANCEL);
	c.arg = q.user_data;
	raw_push(&k->s, &c);
	for (;;) {
		int e = raw_next(&k->s, CONF_MS);

		CHECK(k, !e, "%s", apr_strerror(e));
		if (k->s.cqe.user_data == c.user_data)
			break;
	}
	CHECK(k, !k->s.cqe.res, "the first request of that user_data is gone: CANCEL gives %d", k->s.cqe.res);
	return CONF_OK;
}

/* A request that waits for room in the queue ends at its time all the same. */
static enum conf_result timeout(struct conf *k)
{
	struct apr_sqe q;
	uint64_t began = apr_now_ns();

	PASS(conf_open_rings(k, 4, 8));
	q = endless(k);
	q.timeout_ms = 50;
	CHECK(k, raw_push(&k->s, &q), "the submission queue is full");
	settle(k, false);
	PASS(conf_answer(k, q.user_data, &k->a));
	/* ETIME: known before it was over that the first token could not come in time */
	CHECK(k, (k->a.res == -ETIMEDOUT || k->a.res == -ETIME) && k->a.finish == APR_FINISH_TIMEOUT, "res %d, finish %u", k->a.res, k->a.finish);
	CHECK(k, apr_now_ns() - began < 10000000000u, "50 ms took %u ms", (unsigned)((apr_now_ns() - began) / 1000000));
	return conf_nop(k);
}

static enum conf_result last_once(struct conf *k)
{
	PASS(conf_open(k));
	for (int i = 0; i < 5; i++) {
		struct apr_sqe q = conf_generate(k, 2, (uint64_t)i);

		PASS(conf_do(k, &q, &k->a));
	}
	CHECK(k, raw_next(&k->s, 200) == -ETIMEDOUT, "an entry of type %u after the last one", k->s.cqe.type);
	return CONF_OK;
}

/* ---- waiting ---------------------------------------------------------------------- */

static void push_nops(struct conf *k, uint32_t n)
{
	while (n--) {
		struct apr_sqe q = conf_sqe(k, APR_OP_NOP);

		raw_push(&k->s, &q);
	}
}

static enum conf_result wait_futex(struct conf *k)
{
	PASS(conf_open(k));
	for (int i = 0; i < 50; i++) {
		uint32_t seen, tail = k->s.rc.cq_head + 1;
		uint64_t began;
		int e;

		CHECK(k, apr_rc_sleep(&k->s.rc, tail, APR_WAIT_FUTEX, &seen), "an entry that nobody asked for");
		push_nops(k, 1);
		began = apr_now_ns();
		do
			e = apr_futex_wait(&k->s.rc.res->cq_tail, seen, 5000000000u);
		while (e == -EINTR);
		apr_rc_awake(&k->s.rc);
		CHECK(k, e != -ETIMEDOUT, "round %d: no wake-up within 5 s", i);
		CHECK(k, apr_now_ns() - began < 1000000000u, "round %d: a wake-up after a second", i);
		CHECK(k, !raw_next(&k->s, CONF_MS), "no entry");
	}
	return CONF_OK;
}

/* Frames of type NOTIFY that come within ms. */
static int notifies(struct conf *k, int ms)
{
	uint8_t buf[256];
	struct apr_frame h;
	int n, count = 0;

	while ((n = raw_recv(k->s.sock, buf, sizeof(buf), NULL, ms)) >= (int)sizeof(h)) {
		memcpy(&h, buf, sizeof(h));
		if (h.type == APR_FRAME_NOTIFY)
			count += n == (int)sizeof(h) && h.size == sizeof(h) ? 1 : 1000;
		ms = 100;
	}
	return count;
}

static enum conf_result wait_socket(struct conf *k)
{
	uint32_t seen;
	int n;

	PASS(conf_open(k));
	for (int i = 0; i < 10; i++) {
		CHECK(k, apr_rc_sleep(&k->s.rc, k->s.rc.cq_head + 1, APR_WAIT_SOCKET, &seen), "an entry nobody asked for");
		push_nops(k, 3);
		n = notifies(k, 5000);
		apr_rc_awake(&k->s.rc);
		CHECK(k, n == 1, "%d NOTIFY frames for one sleep (1000 = of a wrong size)", n);
		for (int j = 0; j < 3; j++)
			CHECK(k, !raw_next(&k->s, CONF_MS), "no entry");
	}
	push_nops(k, 3);
	CHECK(k, notifies(k, 200) == 0, "a NOTIFY for a client that is awake");
	return CONF_OK;
}

/* wake_at: nobody is woken for less than it asks for. */
static enum conf_result wake_at(struct conf *k)
{
	uint32_t seen;

	PASS(conf_open(k));
	CHECK(k, apr_rc_sleep(&k->s.rc, k->s.rc.cq_head + 3, APR_WAIT_SOCKET, &seen), "an entry nobody asked for");
	push_nops(k, 1);
	CHECK(k, notifies(k, 200) == 0, "woken at the first entry, wanted at the third");
	push_nops(k, 2);
	CHECK(k, notifies(k, 5000) == 1, "not woken at the third entry");
	apr_rc_awake(&k->s.rc);
	return CONF_OK;
}

static enum conf_result wait_always(struct conf *k)
{
	struct apr_hello h;
	int e;

	raw_hello(&h);
	h.flags = APR_HELLO_RING_ALWAYS;
	e = raw_open(&k->s, k->path, &h);
	CHECK(k, !e, "refused: %s", k->s.why);
	for (int i = 0; i < 20; i++) {
		struct pollfd p = {k->s.sock, POLLIN, 0};

		push_nops(k, 1);
		CHECK(k, poll(&p, 1, 5000) == 1, "round %d: no NOTIFY", i);
		e = raw_next(&k->s, CONF_MS);
		CHECK(k, !e, "round %d: %s", i, apr_strerror(e));
		while (notifies(k, 0))
			;
	}
	return CONF_OK;
}

/* ---- breaking rules ---------------------------------------------------------------- */

static enum conf_result bad_sq_tail(struct conf *k)
{
	PASS(conf_open(k));
	__atomic_store_n(&k->s.rc.req->sq_tail, k->s.g.sq_entries + 1, __ATOMIC_RELEASE);
	raw_ring(&k->s);
	PASS(conf_dies(k, &k->s));
	return conf_alive(k);
}

static enum conf_result bad_sq_tail_back(struct conf *k)
{
	PASS(conf_open(k));
	PASS(conf_nop(k));
	PASS(conf_nop(k));
	__atomic_store_n(&k->s.rc.req->sq_tail, 1u, __ATOMIC_RELEASE);
	raw_ring(&k->s);
	PASS(conf_dies(k, &k->s));
	return conf_alive(k);
}

static enum conf_result bad_cq_head(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	__atomic_store_n(&k->s.rc.req->cq_head, 77u, __ATOMIC_RELEASE);
	q = conf_sqe(k, APR_OP_NOP);
	raw_push(&k->s, &q);
	raw_ring(&k->s);
	PASS(conf_dies(k, &k->s));
	return conf_alive(k);
}

static enum conf_result bad_wait_how(struct conf *k)
{
	PASS(conf_open(k));
	k->s.rc.req->wait_how = 99;
	__atomic_store_n(&k->s.rc.req->wake_at, 1u, __ATOMIC_RELEASE);
	__atomic_store_n(&k->s.rc.req->wait_seq, 1u, __ATOMIC_RELEASE);
	push_nops(k, 1);
	PASS(conf_dies(k, &k->s));
	return conf_alive(k);
}

static enum conf_result punched_hole(struct conf *k)
{
	PASS(conf_open(k));
	PASS(conf_nop(k));
	fallocate(k->s.req_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, k->s.w.req_size);
	raw_ring(&k->s);
	usleep(50000);
	return conf_alive(k);
}

static enum conf_result reason_told(struct conf *k)
{
	const struct apr_res_hdr *h;

	PASS(conf_open(k));
	h = k->s.res.base;
	__atomic_store_n(&k->s.rc.req->sq_tail, UINT32_MAX, __ATOMIC_RELEASE);
	raw_ring(&k->s);
	for (int i = 0; i < 500 && !raw_dead(&k->s); i++)
		usleep(10000);
	CHECK(k, raw_dead(&k->s), "DEAD is not set");
	CHECK(k, h->reason == APR_REASON_PROTOCOL, "reason is %u", h->reason);
	return conf_alive(k);
}

/* Entries rewritten while the daemon reads them: anything but a crash. */
static enum conf_result flipping(struct conf *k)
{
	PASS(conf_open(k));
	for (uint32_t i = 0; i < 400; i++) {
		struct apr_sqe q = conf_text_sqe(k, APR_OP_TOKENIZE, "flip", 4);
		struct apr_sqe *slot = apr_rc_slot(&k->s.rc, k->s.rc.sq_tail);

		raw_push(&k->s, &q);
		for (int j = 0; j < 200; j++)
			__atomic_store_n(&slot->in_len, j & 1 ? UINT32_MAX : 4, __ATOMIC_RELAXED);
		for (;;) {
			int e = raw_next(&k->s, CONF_MS);

			CHECK(k, !e, "%s", apr_strerror(e));
			if (k->s.cqe.type == APR_CQE_FINAL)
				break;
		}
		CHECK(k, !k->s.cqe.res || k->s.cqe.res == -E2BIG || k->s.cqe.res == -EINVAL, "res %d", k->s.cqe.res);
	}
	return conf_alive(k);
}

static enum conf_result crowd(struct conf *k)
{
	enum { N = 12 };
	struct raw s[N];
	enum conf_result r = CONF_OK;
	int opened = 0, e = 0;

	while (opened < N && !(e = raw_open(&s[opened], k->path, NULL)))
		opened++;
	for (int round = 0; round < 20 && !e && r == CONF_OK; round++) {
		for (int i = 0; i < opened; i++) {
			struct apr_sqe q = {.op = APR_OP_NOP, .user_data = (uint64_t)i * 1000 + (uint64_t)round};

			raw_push(&s[i], &q);
		}
		for (int i = 0; i < opened && r == CONF_OK; i++)
			if (raw_next(&s[i], CONF_MS) || s[i].cqe.user_data != (uint64_t)i * 1000 + (uint64_t)round)
				r = conf_no(k, "session %d of %d is not answered, or with another's entry", i, N);
	}
	while (opened)
		raw_close(&s[--opened]);
	CHECK(k, !e, "only some sessions are let in: %s", apr_strerror(e));
	return r;
}

const struct conf_check conf_ring_checks[] = {
	{"ring-nop", OP(APR_OP_NOP), 0, nop},
	{"ring-nop-batches", OP(APR_OP_NOP), 0, nop_batches},
	{"ring-many-sessions", OP(APR_OP_NOP), 0, crowd},
	{"ring-counters", OP(APR_OP_NOP), 0, counters},
	{"ring-doorbell-never-read", OP(APR_OP_NOP), 0, doorbell},
	{"wait-futex", OP(APR_OP_NOP), 0, wait_futex},
	{"wait-socket", OP(APR_OP_NOP), 0, wait_socket},
	{"wait-wake-at", OP(APR_OP_NOP), 0, wake_at},
	{"wait-socket-always", OP(APR_OP_NOP), 0, wait_always},
	{"credits-max-inflight", GEN, 0, inflight_limit},
	{"credits-full-queue-parks", GEN, 0, full_queue},
	{"credits-cancel-with-full-queue", GEN, APR_FEAT_SAMPLING, cancel_full_queue},
	{"cancel-running", GEN, APR_FEAT_SAMPLING, cancel_running},
	{"cancel-unknown", OP(APR_OP_CANCEL), 0, cancel_unknown},
	{"cancel-other-session", GEN, APR_FEAT_SAMPLING, cancel_other_session},
	{"cancel-all", GEN, APR_FEAT_SAMPLING, cancel_all},
	{"duplicate-user-data", GEN, APR_FEAT_SAMPLING, duplicate},
	{"timeout", GEN, APR_FEAT_SAMPLING, timeout},
	{"last-entry-once", GEN, 0, last_once},
	{"abuse-sq-tail-beyond", 0, 0, bad_sq_tail},
	{"abuse-sq-tail-back", OP(APR_OP_NOP), 0, bad_sq_tail_back},
	{"abuse-cq-head-beyond", OP(APR_OP_NOP), 0, bad_cq_head},
	{"abuse-wait-how", OP(APR_OP_NOP), 0, bad_wait_how},
	{"abuse-punched-hole", OP(APR_OP_NOP), 0, punched_hole},
	{"abuse-reason-is-told", 0, 0, reason_told},
	{"abuse-entry-rewritten", OP(APR_OP_TOKENIZE), 0, flipping},
};
const size_t conf_n_ring = sizeof(conf_ring_checks) / sizeof(conf_ring_checks[0]);
