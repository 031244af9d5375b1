/* SPDX-License-Identifier: MIT */
/* Clients that mean harm or are broken: rings and frames written by hand. The daemon lives, others notice nothing. */
#include "tests/daemon/running.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static struct daemon d;

static struct apr_sqe text_sqe(const struct hand *h, uint8_t op, uint64_t user_data)
{
	struct apr_sqe s = {
		.op = op, .user_data = user_data, .in_len = 5, .max_tokens = op == APR_OP_GENERATE ? 4 : 0
	};

	s.in_off = h->geo.req_arena_off;
	memcpy((char *)h->req.base + s.in_off, "hello", 5);
	return s;
}

static void case23_offsets_and_lengths(void)
{
	static const uint32_t values[] = { 0, 1, 7, 8, 4095, 4096, 131071, 131072, 131073, 1u << 30, 0x7fffffff,
					   0x80000000u, UINT32_MAX - 7, UINT32_MAX - 3, UINT32_MAX };
	struct hand h;
	unsigned refused = 0, served = 0, n = sizeof(values) / sizeof(values[0]);

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	for (unsigned i = 0; i < n; i++)
		for (unsigned k = 0; k < n; k++)
			for (int par = 0; par < 2; par++) {
				struct apr_sqe s = text_sqe(&h, APR_OP_TOKENIZE, 1 + i * 100 + k);
				*(par ? &s.par_off : &s.in_off) = values[i];
				*(par ? &s.par_len : &s.in_len) = values[k];
				hand_submit(&h, &s);
				int r = hand_finish(&h, s.user_data, NULL, NULL, 5000);
				CU_ASSERT_TRUE(r == 0 || r == -EINVAL || r == -E2BIG || r == -EOPNOTSUPP);
				refused += r != 0;
				served += r == 0;
			}
	CU_ASSERT_TRUE(refused > 300);
	CU_ASSERT_TRUE(served > 10);
	hand_close(&h);
	CU_ASSERT_TRUE(alive(&d));
}

static void case23_every_field_flipped(void)
{
	struct hand h;
	uint32_t x = 99;

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	for (int round = 0; round < 3000; round++) {
		struct apr_sqe s = text_sqe(&h, (uint8_t)(round % 10), 1u << 20);
		uint8_t *raw = (uint8_t *)&s;
		x = x * 1664525u + 1013904223u;
		unsigned at = x >> 16 & 63;
		if (at >= 8 && at < 16)
			at = 0; /* user_data: how we know the answer */
		raw[at] ^= (uint8_t)(1u << (x >> 24 & 7));
		if (x >> 28 == 0)
			raw[at] = 0xff;
		s.timeout_ms = s.timeout_ms ? 1000 : 0;
		if (s.op == APR_OP_CANCEL && s.arg == s.user_data)
			continue;
		hand_submit(&h, &s);
		int r = hand_finish(&h, s.user_data, NULL, NULL, 10000);
		CU_ASSERT_NOT_EQUAL(r, -ETIMEDOUT);
		if (r == -ETIMEDOUT)
			break;
	}
	hand_close(&h);
	CU_ASSERT_TRUE(alive(&d));
}

static void case23_heads_and_tails(void)
{
	struct hand h;

	for (int kind = 0; kind < 4; kind++) {
		CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
		struct apr_req_hdr *hdr = h.req.base;
		if (kind == 0)
			__atomic_store_n(&hdr->sq_tail, 65, __ATOMIC_RELEASE); /* one more than there is room for */
		else if (kind == 1)
			__atomic_store_n(&hdr->sq_tail, UINT32_MAX, __ATOMIC_RELEASE);
		else if (kind == 2)
			__atomic_store_n(&hdr->cq_head, 1, __ATOMIC_RELEASE); /* beyond the tail */
		else {
			__atomic_store_n(&hdr->wait_how, 77, __ATOMIC_RELEASE);
			__atomic_store_n(&hdr->wait_seq, 1, __ATOMIC_RELEASE);
			struct apr_sqe nop = { .op = APR_OP_NOP };
			hand_submit(&h, &nop);
		}
		apr_doorbell_ring(h.doorbell);
		CU_ASSERT_TRUE(hand_ended(&h, 3000));
		CU_ASSERT_TRUE(((struct apr_res_hdr *)h.res.base)->flags & APR_RES_DEAD);
		CU_ASSERT_EQUAL(((struct apr_res_hdr *)h.res.base)->reason, APR_REASON_PROTOCOL);
		hand_close(&h);
	}
	CU_ASSERT_TRUE(alive(&d));
}

static void case23_descriptors_cannot_be_changed(void)
{
	struct hand h;

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	CU_ASSERT_NOT_EQUAL(ftruncate(h.req.fd, 0), 0);
	CU_ASSERT_NOT_EQUAL(ftruncate(h.req.fd, 1 << 20), 0);
	CU_ASSERT_NOT_EQUAL(ftruncate(h.res.fd, 0), 0);
	CU_ASSERT_PTR_EQUAL(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, h.res.fd, 0), MAP_FAILED);
	CU_ASSERT_TRUE(pwrite(h.res.fd, "x", 1, 0) < 0);
	CU_ASSERT_NOT_EQUAL(fallocate(h.res.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
	hand_close(&h);
}

static void case23_holes_and_early_unmap(void)
{
	struct hand h;

	for (int round = 0; round < 20; round++) {
		CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
		struct apr_sqe s = text_sqe(&h, APR_OP_TOKENIZE, 1);
		s.in_len = h.geo.req_arena_len;
		hand_submit(&h, &s);
		/* the pages go while they are being read; then the whole map */
		fallocate(h.req.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)h.req.size);
		if (round % 2)
			apr_region_unmap(&h.req);
		hand_close(&h);
	}
	CU_ASSERT_TRUE(alive(&d));
}

#ifdef __SANITIZE_THREAD__
static void case23_length_flips_while_it_is_read(void)
{
	SKIP("this client's own threads race on purpose, which is all that ThreadSanitizer would see of it");
}
#else
struct flipper {
	uint32_t *word, good, bad;
	int stop;
};

static void *flip(void *arg)
{
	struct flipper *f = arg;

	while (!__atomic_load_n(&f->stop, __ATOMIC_RELAXED)) {
		__atomic_store_n(f->word, f->bad, __ATOMIC_RELAXED);
		__atomic_store_n(f->word, f->good, __ATOMIC_RELAXED);
	}
	return NULL;
}

static void case23_length_flips_while_it_is_read(void)
{
	struct hand h;
	struct flipper f;
	pthread_t t;
	unsigned good = 0, bad = 0;
	double end = now_s() + 3; /* the minute of the case, shortened */

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	/* the length in every slot of the SQ is flipped in turn: slot i when i is used */
	f = (struct flipper){ NULL, 5, 0xfffffff0u, 0 };
	while (now_s() < end) {
		struct apr_sqe s = text_sqe(&h, APR_OP_TOKENIZE, 1);
		f.word = &apr_rc_slot(&h.ring, h.ring.sq_tail)->in_len;
		f.stop = 0;
		pthread_create(&t, NULL, flip, &f);
		hand_submit(&h, &s);
		int r = hand_finish(&h, 1, NULL, NULL, 5000);
		__atomic_store_n(&f.stop, 1, __ATOMIC_RELAXED);
		pthread_join(t, NULL);
		CU_ASSERT_TRUE(r == 0 || r == -E2BIG || r == -EINVAL);
		good += r == 0;
		bad += r != 0;
	}
	CU_ASSERT_TRUE(good > 0);
	hand_close(&h);
	CU_ASSERT_TRUE(alive(&d));
	(void)bad;
}
#endif

static void case23_wrong_hello(void)
{
	struct hand h;
	struct apr_hello x = hand_hello();

	x.major = 7;
	CU_ASSERT_EQUAL(hand_open(&h, &d, &x), -EPROTONOSUPPORT);
	hand_close(&h);
	x = hand_hello();
	x.hdr.size = 64;
	CU_ASSERT_TRUE(hand_open(&h, &d, &x) < 0);
	hand_close(&h);
	x = hand_hello();
	x.sq_entries = UINT32_MAX;
	CU_ASSERT_EQUAL(hand_open(&h, &d, &x), -EINVAL);
	hand_close(&h);
	x = hand_hello();
	x.need = UINT64_MAX;
	CU_ASSERT_EQUAL(hand_open(&h, &d, &x), -EOPNOTSUPP);
	hand_close(&h);
	x = hand_hello();
	x.zero1[3] = 1;
	CU_ASSERT_EQUAL(hand_open(&h, &d, &x), -EINVAL);
	hand_close(&h);
	CU_ASSERT_TRUE(alive(&d));
}

static void random_frames(void)
{
	uint32_t x = 5;

	for (int round = 0; round < 300; round++) {
		struct hand h;
		uint8_t buf[2048];
		CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
		for (size_t i = 0; i < sizeof(buf); i++)
			buf[i] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
		size_t n = (x >> 8) % sizeof(buf);
		if (round % 2 && n >= sizeof(struct apr_frame)) {
			struct apr_frame f = { APR_FRAME_MAGIC, (uint16_t)(x % 45), 0, (uint32_t)n, 0 };
			memcpy(buf, &f, sizeof(f));
		}
		send(h.sock, buf, n, MSG_NOSIGNAL);
		hand_close(&h);
	}
	CU_ASSERT_TRUE(alive(&d));
}

/* A descriptor whose closing blocks: a TCP socket with SO_LINGER and unsent data. */
static int lingering_socket(int *peer)
{
	struct linger l = { 1, 20 };
	struct sockaddr_in {
		unsigned short family, port;
		unsigned addr;
		char pad[8];
	} a = { AF_INET, 0, 0x0100007f, { 0 } };
	socklen_t n = sizeof(a);
	char block[65536];
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
	    c = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	memset(block, 0, sizeof(block));
	if (bind(s, (struct sockaddr *)&a, sizeof(a)) || listen(s, 1) || getsockname(s, (struct sockaddr *)&a, &n))
		return -1;
	(void)connect(c, (struct sockaddr *)&a, sizeof(a));
	*peer = s; /* never accepted, never read */
	sleep_ms(10);
	setsockopt(c, SOL_SOCKET, SO_LINGER, &l, sizeof(l));
	while (send(c, block, sizeof(block), MSG_NOSIGNAL) > 0)
		;
	return c;
}

static void passed_descriptors_block_nobody(void)
{
	struct hand h;
	int peer, fd = lingering_socket(&peer);

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	if (fd < 0) {
		hand_close(&h);
		SKIP("no TCP on the loopback");
	}
	struct apr_frame f = { APR_FRAME_MAGIC, APR_FRAME_GET_MODELS, 0, sizeof(f), 0 };
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { .space = { 0 } };
	struct iovec iov = { &f, sizeof(f) };
	struct msghdr msg = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
	};
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &fd, sizeof(fd));
	ssize_t sent = sendmsg(h.sock, &msg, MSG_NOSIGNAL); /* EPERM where SO_PASSRIGHTS is off at the other end */
	if (sent < 0) { /* it is still ours, and would block us */
		struct linger none = { 1, 0 };
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof(none));
	}
	close(fd);
	double began = now_s();
	for (int i = 0; i < 5; i++)
		CU_ASSERT_TRUE(alive(&d));
	CU_ASSERT_TRUE(now_s() - began < 5);
	hand_close(&h);
	close(peer);
}

static void case42_thousand_silent_clients(void)
{
	enum { N = 1000 };
	static int fds[N];
	struct hand h;
	int n = 0;

	for (; n < N; n++) {
		fds[n] = hand_socket(&d);
		if (fds[n] < 0)
			break;
	}
	CU_ASSERT_TRUE(n > 900);
	double began = now_s();
	CU_ASSERT_EQUAL(hand_open(&h, &d, NULL), 0);
	CU_ASSERT_TRUE(now_s() - began < 1);
	hand_close(&h);
	while (n)
		close(fds[--n]);
	CU_ASSERT_TRUE(status_becomes(&d, "connections", 1)); /* the one that asks */
}

static void case42_other_namespaces(void)
{
	/* a client in a user namespace of its own is the overflow uid to the daemon: served, and freed at its end */
	pid_t pid = fork();
	if (!pid) {
		if (unshare(CLONE_NEWUSER | CLONE_NEWPID))
			_exit(77);
		pid_t inner = fork();
		if (!inner)
			_exit(alive(&d) ? 0 : 1);
		int st;
		waitpid(inner, &st, 0);
		_exit(WEXITSTATUS(st));
	}
	int status;
	waitpid(pid, &status, 0);
	if (WEXITSTATUS(status) == 77)
		SKIP("no user namespaces here");
	CU_ASSERT_EQUAL(WEXITSTATUS(status), 0);
	CU_ASSERT_TRUE(status_becomes(&d, "sessions", 0));
}

static void case13_a_client_that_stops_reading(void)
{
	struct hand stuck, good;
	struct {
		struct apr_param p;
		struct apr_sampling s;
	} par = { { APR_PARAM_SAMPLING, 0, sizeof(struct apr_sampling) },
		  { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 } };

	CU_ASSERT_EQUAL_FATAL(hand_open(&stuck, &d, NULL), 0);
	struct apr_sqe s = text_sqe(&stuck, APR_OP_GENERATE, 1);
	s.max_tokens = 1500;
	s.par_off = s.in_off + 64;
	s.par_len = sizeof(par);
	memcpy((char *)stuck.req.base + s.par_off, &par, sizeof(par));
	hand_submit(&stuck, &s);
	CU_ASSERT_TRUE(status_becomes(&d, "totals.parked", 1) || status_number(&d, "totals.parked") > 0);
	/* others go on */
	CU_ASSERT_EQUAL_FATAL(hand_open(&good, &d, NULL), 0);
	struct apr_sqe g = text_sqe(&good, APR_OP_GENERATE, 1);
	double began = now_s();
	hand_submit(&good, &g);
	CU_ASSERT_EQUAL(hand_finish(&good, 1, NULL, NULL, 5000), 0);
	CU_ASSERT_TRUE(now_s() - began < 2);
	hand_close(&good);
	/* its pages are given up after a second, and yet its text goes on when it reads again */
	sleep_ms(1300);
	CU_ASSERT_TRUE(status_becomes(&d, "kv.pages_free", status_number(&d, "kv.pages_total")));
	unsigned tokens = 0;
	CU_ASSERT_EQUAL(hand_finish(&stuck, 1, NULL, &tokens, 20000), 0);
	CU_ASSERT_EQUAL(tokens, 1500);
	hand_close(&stuck);
}

static void credits_are_kept(void)
{
	struct hand h;
	struct apr_cqe e;
	unsigned finals = 0;

	/* a whole SQ of requests, more than max_inflight in all; nothing is read until the end */
	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	for (uint32_t i = 0; i < 1000; i++) {
		struct apr_sqe s = text_sqe(&h, i % 3 ? APR_OP_NOP : APR_OP_TOKENIZE, i + 1);
		if (s.op == APR_OP_NOP)
			s = (struct apr_sqe){ .op = APR_OP_NOP, .user_data = i + 1 };
		double end = now_s() + 5;
		while (!apr_rc_sq_space(&h.ring) && now_s() < end) {
			/* full: the daemon must have stopped taking, and it has kept room for every last entry */
			if (!hand_next(&h, &e, 1))
				finals += e.type == APR_CQE_FINAL || e.type == APR_CQE_ACK;
		}
		hand_submit(&h, &s);
	}
	while (finals < 1000 && !hand_next(&h, &e, 5000))
		finals += e.type == APR_CQE_FINAL || e.type == APR_CQE_ACK;
	CU_ASSERT_EQUAL(finals, 1000);
	hand_close(&h);
}

static void daemon_up(void)
{
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "hostile", NULL));
}

static void daemon_down(void)
{
	CU_ASSERT_TRUE(status_becomes(&d, "sessions", 0));
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 0); /* it never fell */
	CU_ASSERT_TRUE(status_becomes(&d, "kv.pages_free", status_number(&d, "kv.pages_total")));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void epoll_up(void)
{
	daemon_name(&d, "hostile-epoll");
	strcpy(d.env_loop, "epoll");
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, NULL, NULL));
}

#define ATTACKS \
	{ "case13_a_client_that_stops_reading", case13_a_client_that_stops_reading, 0 }, \
	{ "case23_offsets_and_lengths", case23_offsets_and_lengths, 0 }, \
	{ "case23_every_field_flipped", case23_every_field_flipped, 0 }, \
	{ "case23_heads_and_tails", case23_heads_and_tails, 0 }, \
	{ "case23_descriptors_cannot_be_changed", case23_descriptors_cannot_be_changed, 0 }, \
	{ "case23_holes_and_early_unmap", case23_holes_and_early_unmap, 0 }, \
	{ "case23_wrong_hello", case23_wrong_hello, 0 }, \
	{ "random_frames", random_frames, 0 }, \
	{ "passed_descriptors_block_nobody", passed_descriptors_block_nobody, 0 }, \
	{ "credits_are_kept", credits_are_kept, 0 }, \
	{ "case42_thousand_silent_clients", case42_thousand_silent_clients, 0 }, \
	{ "case42_other_namespaces", case42_other_namespaces, 0 }

static const struct apr_test tests[] = {
	{ "daemon_up", daemon_up, KEEPS_HEAP },
	ATTACKS,
	{ "case23_length_flips_while_it_is_read", case23_length_flips_while_it_is_read,
	  KEEPS_HEAP /* threads' stacks */ },
	{ "daemon_down", daemon_down, KEEPS_HEAP },
	{ "epoll_up", epoll_up, KEEPS_HEAP },
	ATTACKS,
	{ "daemon_down_again", daemon_down, KEEPS_HEAP },
};

TEST_MAIN("daemon/hostile", tests)
