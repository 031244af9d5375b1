/* SPDX-License-Identifier: MIT */
/* What becomes of requests when the daemon goes: made-up last entries, a second session, resumed answers. */
#include "client/fake/fake.h"
#include "tests/harness.h"
#include <apr/client.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

static struct apr *join(uint32_t flags, uint32_t wait)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;

	o.path = path;
	o.flags = flags;
	o.wait = wait;
	o.reconnect_ms = 3000;
	CU_ASSERT_EQUAL_FATAL(apr_connect(&c, &o, err, sizeof(err)), 0);
	return c;
}

static void send_gen(struct apr *c, uint64_t user_data, unsigned flags)
{
	struct apr_sqe *s = apr_get_sqe(c);
	CU_ASSERT_PTR_NOT_NULL_FATAL(s);
	CU_ASSERT_EQUAL_FATAL(apr_prep_generate(c, s, "hello", 5, 100), 0);
	apr_sqe_user_data(s, user_data);
	apr_sqe_flags(s, flags);
	CU_ASSERT_EQUAL_FATAL(apr_submit(c), 1);
}

static void send_chat(struct apr *c, uint64_t user_data, unsigned flags)
{
	static const char json[] = "[{\"role\":\"user\",\"content\":\"hello\"}]";
	struct apr_sqe *s = apr_get_sqe(c);

	CU_ASSERT_PTR_NOT_NULL_FATAL(s);
	CU_ASSERT_EQUAL_FATAL(apr_prep_chat(c, s, json, sizeof(json) - 1, 100), 0);
	apr_sqe_user_data(s, user_data);
	apr_sqe_flags(s, flags);
	CU_ASSERT_EQUAL_FATAL(apr_submit(c), 1);
}

static uint64_t now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000;
}

#define STALL "{\"answers\":[{\"steps\":[\"a\",{\"stall\":true}]}]}"

/* Both ways to go, both ways to wait: every request gets its one last entry, soon, and then -EPIPE. */
static void case46_each_request_ends_once(void)
{
	for (int how = 0; how < 4; how++) {
		struct fake *f = start(how & 1 ? STALL
					       : "{\"answers\":[{\"match\":\"hello\",\"times\":3,\"steps\":[{\"stall\":true}]},"
						 "{\"steps\":[{\"die\":\"drop\"}]}]}");
		struct apr *c = join(0, how & 2 ? APR_WAIT_SOCKET : APR_WAIT_FUTEX);
		const struct apr_cqe *q;
		unsigned ended[5] = { 0 };
		int e;

		for (uint64_t i = 0; i < 4; i++)
			send_gen(c, i, 0);
		uint64_t t = now_ms();
		if (how & 1) {
			usleep(20000);
			fake_end(f); /* BYE and DEAD */
			f = NULL;
		}
		while (!(e = apr_wait_cqe_timeout(c, &q, 5000000))) {
			CU_ASSERT_FATAL(q->user_data < 4);
			if (apr_cqe_last(q)) {
				ended[q->user_data]++;
				CU_ASSERT(q->res < 0);
			}
			apr_cqe_seen(c, q);
		}
		CU_ASSERT_EQUAL(e, -EPIPE);
		CU_ASSERT(now_ms() - t < 1000);
		for (int i = 0; i < 4; i++)
			CU_ASSERT_EQUAL(ended[i], 1);
		CU_ASSERT_EQUAL(apr_unfinished(c), 0);
		CU_ASSERT_PTR_NULL(apr_get_sqe(c));
		CU_ASSERT_EQUAL(apr_submit(c), -EPIPE);
		CU_ASSERT(strlen(apr_why(c)) > 0);
		CU_ASSERT(apr_state(c) & APR_RES_DEAD);
		apr_close(c);
		fake_end(f);
	}
}

static void case46_explicit_reconnect(void)
{
	struct fake *f = start(STALL);
	struct apr *c = join(0, 0);
	const struct apr_cqe *q;
	uint64_t epoch = apr_info(c)->epoch;

	CU_ASSERT_EQUAL(apr_reconnect(c, err, sizeof(err)), 0); /* it lives: nothing to do */
	CU_ASSERT_EQUAL(apr_info(c)->epoch, epoch);
	send_gen(c, 5, 0);
	usleep(20000);
	fake_end(f);
	f = start(STALL);
	CU_ASSERT_EQUAL(apr_reconnect(c, err, sizeof(err)), 0);
	CU_ASSERT_NOT_EQUAL(apr_info(c)->epoch, epoch);
	/* the new session's request has the old one's id */
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(c, &q, 2000000), 0);
	CU_ASSERT_EQUAL(q->user_data, 5);
	CU_ASSERT_EQUAL(q->res, -ECONNRESET);
	CU_ASSERT_EQUAL(q->type, APR_CQE_FINAL);
	send_gen(c, 5, 0);
	apr_cqe_seen(c, q);
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(c, &q, 2000000), 0);
	CU_ASSERT_EQUAL(q->user_data, 5);
	CU_ASSERT_EQUAL(q->type, APR_CQE_TOKEN);
	CU_ASSERT_EQUAL(q->pos, 0);
	apr_cqe_seen(c, q);
	CU_ASSERT_EQUAL(apr_unfinished(c), 1);
	apr_close(c);
	fake_end(f);
}

static void reconnect_gives_up_in_time(void)
{
	struct fake *f = start(NULL);
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;

	o.path = path;
	o.reconnect_ms = 300;
	CU_ASSERT_EQUAL_FATAL(apr_connect(&c, &o, err, sizeof(err)), 0);
	fake_end(f);
	uint64_t t = now_ms();
	CU_ASSERT_EQUAL(apr_reconnect(c, err, sizeof(err)), -ENOENT);
	t = now_ms() - t;
	CU_ASSERT(t < 1000);
	CU_ASSERT(strlen(err) > 0);
	const struct apr_cqe *q;
	CU_ASSERT_EQUAL(apr_peek_cqe(c, &q), -EPIPE);
	CU_ASSERT_EQUAL(apr_wait_cqe(c, &q), -EPIPE);
	CU_ASSERT_EQUAL(apr_submit(c), -EPIPE);
	CU_ASSERT_EQUAL(apr_fd(c), -EPIPE);
	CU_ASSERT_EQUAL(apr_poll(c), -EPIPE);
	f = start(NULL);
	CU_ASSERT_EQUAL(apr_reconnect(c, err, sizeof(err)), 0); /* and may be tried again */
	CU_ASSERT_EQUAL(apr_ping(c, 1000000, NULL, err, sizeof(err)), 0);
	apr_close(c);
	fake_end(f);
}

static void on_demand(void)
{
	struct fake *f = start(STALL);
	struct apr *c = join(APR_CONNECT_RECONNECT, 0);
	const struct apr_cqe *q;
	uint32_t lost = 0;

	send_gen(c, 1, 0);
	send_gen(c, 2, 0);
	CU_ASSERT_EQUAL(apr_wait_cqes(c, 2, 2000000), 2);
	fake_end(f);
	f = start(NULL);
	/* two tokens of the old session, then its two last entries, made up */
	while (lost < 2) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &q, 3000000), 0);
		if (apr_cqe_last(q)) {
			CU_ASSERT(q->res < 0);
			lost++;
		}
		apr_cqe_seen(c, q);
	}
	CU_ASSERT_EQUAL(apr_ping(c, 1000000, NULL, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(apr_state(c) & APR_RES_DEAD, 0);
	apr_close(c);
	fake_end(f);
}

/* REPLAYABLE: the daemon drops the session in mid-answer; the text goes on where it was. */
static void goes_on(void (*send)(struct apr *c, uint64_t user_data, unsigned flags))
{
	static const char *const steps[2] = {
		"{\"answers\":[{\"steps\":[\"a\",\"b\",\"c\",{\"die\":\"drop\"}]}]}",
		"{\"answers\":[{\"steps\":[\"a\",\"b\",\"c\",\"d\",\"e\",\"f\"]}]}",
	};
	struct fake *f = start(steps[0]);
	struct apr *c = join(APR_CONNECT_RECONNECT, 0);
	const struct apr_cqe *q;
	char text[64] = "";
	uint32_t pos = 0;
	bool done = false;

	send(c, 77, APR_SQE_REPLAYABLE);
	for (int i = 0; i < 3; i++) { /* seen before the end */
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &q, 2000000), 0);
		size_t len;
		const char *piece = apr_cqe_text(c, q, &len);
		strncat(text, piece, len);
		CU_ASSERT_EQUAL(q->pos, pos++);
		apr_cqe_seen(c, q);
	}
	usleep(20000);
	fake_end(f);
	f = start(steps[1]);
	while (!done) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &q, 3000000), 0);
		CU_ASSERT_EQUAL(q->user_data, 77);
		size_t len;
		const char *piece = apr_cqe_text(c, q, &len);
		if (q->type == APR_CQE_TOKEN)
			CU_ASSERT_EQUAL(q->pos, pos++);
		if (piece && !apr_cqe_last(q))
			strncat(text, piece, len);
		done = apr_cqe_last(q);
		if (done)
			CU_ASSERT_EQUAL(q->res, 0);
		apr_cqe_seen(c, q);
	}
	CU_ASSERT_STRING_EQUAL(text, "abcdef");
	apr_close(c);
	fake_end(f);
}

static void an_answer_goes_on(void)
{
	goes_on(send_gen);
}

static void an_answer_in_a_conversation_goes_on(void)
{
	goes_on(send_chat);
}

static void another_model_of_that_name_is_estale(void)
{
	struct fake *f = start("{\"model\":{\"name\":\"one\"},\"answers\":[{\"steps\":[\"a\",{\"stall\":true}]}]}");
	struct apr *c = join(APR_CONNECT_RECONNECT, 0);
	const struct apr_cqe *q;

	send_gen(c, 3, APR_SQE_REPLAYABLE);
	CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &q, 2000000), 0);
	apr_cqe_seen(c, q);
	/* without a word: an orderly end would have answered it */
	fake_stop(f);
	fake_end(f);
	f = start("{\"model\":{\"name\":\"two\"}}");
	bool stale = false;
	while (!apr_wait_cqe_timeout(c, &q, 300000)) {
		if (apr_cqe_last(q)) {
			/* ended by the old daemon, or refused a second life: never another model's text */
			CU_ASSERT(q->res == -ESTALE || q->res == -ESHUTDOWN || q->res == -ECANCELED);
			stale = true;
		} else {
			CU_FAIL("text of another model");
		}
		apr_cqe_seen(c, q);
	}
	CU_ASSERT(stale);
	apr_close(c);
	fake_end(f);
}

/* ---- twenty clients over a restart ------------------------------------------------------- */

static bool over;

static void *client_life(void *arg)
{
	uintptr_t wrong = 0, me = (uintptr_t)arg;
	struct apr *c = join(APR_CONNECT_RECONNECT, 0);
	uint64_t id = me << 32;
	const struct apr_cqe *q;

	while (!__atomic_load_n(&over, __ATOMIC_RELAXED)) {
		struct apr_sqe *s = apr_get_sqe(c);
		if (!s) {
			wrong += 1000;
			break;
		}
		apr_prep_nop(s);
		apr_sqe_user_data(s, ++id);
		int n = apr_submit(c);
		if (n == -ECONNRESET)
			continue; /* it died between the two: the entry went with it */
		wrong += n != 1;
		uint64_t t = now_ms();
		int e = apr_wait_cqe_timeout(c, &q, 4000000);
		if (e || q->user_data != id || (q->res && q->res != -ECONNRESET && q->res != -ESHUTDOWN && q->res != -ECANCELED))
			wrong++;
		if (!e)
			apr_cqe_seen(c, q);
		wrong += now_ms() - t > 3500;
		usleep(200);
	}
	apr_close(c);
	return (void *)wrong;
}

static void case46_restart_under_twenty_clients(void)
{
	struct fake *f = start(NULL);
	pthread_t t[20];

	__atomic_store_n(&over, false, __ATOMIC_RELAXED);
	for (uintptr_t i = 0; i < 20; i++)
		CU_ASSERT_EQUAL_FATAL(pthread_create(&t[i], NULL, client_life, (void *)(i + 1)), 0);
	for (int round = 0; round < 3; round++) {
		usleep(150000);
		fake_end(f);
		usleep(50000);
		f = start(NULL);
	}
	usleep(300000);
	__atomic_store_n(&over, true, __ATOMIC_RELAXED);
	for (int i = 0; i < 20; i++) {
		void *wrong;
		pthread_join(t[i], &wrong);
		CU_ASSERT_PTR_NULL(wrong);
		if (wrong)
			fprintf(stderr, "client %d: %zu wrong\n", i, (size_t)wrong);
	}
	fake_end(f);
}

static const struct apr_test tests[] = {
	{ "case46_each_request_ends_once", case46_each_request_ends_once, KEEPS_HEAP }, /* thread stacks */
	{ "case46_explicit_reconnect", case46_explicit_reconnect, 0 },
	{ "reconnect_gives_up_in_time", reconnect_gives_up_in_time, 0 },
	{ "on_demand", on_demand, 0 },
	{ "an_answer_goes_on", an_answer_goes_on, 0 },
	{ "an_answer_in_a_conversation_goes_on", an_answer_in_a_conversation_goes_on, 0 },
	{ "another_model_of_that_name_is_estale", another_model_of_that_name_is_estale, 0 },
	{ "case46_restart_under_twenty_clients", case46_restart_under_twenty_clients, KEEPS_HEAP },
};
TEST_MAIN("client/reconnect", tests)
