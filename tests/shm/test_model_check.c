/* SPDX-License-Identifier: MIT */
/*
 * An exhaustive check of the sleeping and waking protocol under weak stores.
 *
 * Each side is a short program over shared words. A side's stores do not reach
 * memory at once: they sit in its buffer and drain in order, one at a time, at any
 * moment (x86's TSO); with `reorder` they may also drain out of order unless a
 * store is a release, which leaves only after everything before it. A full fence
 * waits for its side's buffer to be empty; a system call is not taken for one (the
 * kernel has fences inside, but promises none). Every interleaving of steps and
 * drains is visited once.
 *
 * The wake-up is lost when both sides have come to rest, a side sleeps, and what it
 * waits for is there. All three hand-shakes of shm/wake.h are modelled after the
 * code of shm/ring.[ch], each in full and with each fence taken out: with a fence
 * missing the search must find the lost wake-up, or it could find nothing.
 */
#include "tests/harness.h"
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS = 4, REGS = 3, BUF = 6, MAX_OPS = 16 };

enum op_kind {
	STORE,     /* mem[word] = value */
	RELEASE,   /* the same, never before an earlier store of its side */
	INC_REL,   /* mem[word] = ++reg[a], as RELEASE */
	LOAD,      /* reg[a] = mem[word], its own buffer first */
	FENCE,     /* full */
	SKIP_LT,   /* if reg[a] < value: go to `to` */
	SKIP_GE,   /* if reg[a] >= value: go to `to` */
	SKIP_EVEN, /* if reg[a] is even: go to `to` */
	SLEEP,     /* futex wait: sleeps if memory's word equals reg[a]; else goes on */
	SLEEP_EV,  /* waits for the doorbell, a count: goes on if it was rung */
	WAKE,      /* wakes the other side's futex sleep */
	RING,      /* rings the doorbell */
	END
};

struct op {
	enum op_kind kind;
	uint8_t word, a;
	int8_t value;
	uint8_t to;
};

struct side_state {
	uint8_t pc, n_buf;
	bool asleep, rung;
	int8_t reg[REGS];
	uint8_t buf_word[BUF];
	int8_t buf_value[BUF];
	bool buf_release[BUF];
};

struct state {
	int8_t mem[WORDS];
	struct side_state side[2];
};

struct model {
	const struct op *prog[2];
	bool reorder;
	/* lost: nothing can move any more and this holds */
	bool (*lost)(const struct state *s);
};

/* ---- the search -------------------------------------------------------------- */

struct search {
	const struct model *m;
	struct state *seen; /* open addressing */
	bool *used;
	size_t cap, n;
	struct state *todo;
	size_t n_todo, cap_todo;
	bool lost;
};

static uint64_t hash_state(const struct state *s)
{
	const uint8_t *p = (const uint8_t *)s;
	uint64_t h = 1469598103934665603u;
	for (size_t i = 0; i < sizeof(*s); i++)
		h = (h ^ p[i]) * 1099511628211u;
	return h;
}

static void push(struct search *q, const struct state *s)
{
	size_t at = hash_state(s) & (q->cap - 1);
	while (q->used[at]) {
		if (!memcmp(&q->seen[at], s, sizeof(*s)))
			return;
		at = (at + 1) & (q->cap - 1);
	}
	q->used[at] = true;
	q->seen[at] = *s;
	q->n++;
	CU_ASSERT_FATAL(q->n < q->cap / 2);
	if (q->n_todo == q->cap_todo) {
		q->cap_todo *= 2;
		q->todo = realloc(q->todo, q->cap_todo * sizeof(*q->todo));
		CU_ASSERT_PTR_NOT_NULL_FATAL(q->todo);
	}
	q->todo[q->n_todo++] = *s;
}

/* Takes entry i out of a side's buffer into memory. */
static void drain(struct state *s, int w, int i)
{
	struct side_state *t = &s->side[w];
	s->mem[t->buf_word[i]] = t->buf_value[i];
	for (int k = i; k + 1 < t->n_buf; k++) {
		t->buf_word[k] = t->buf_word[k + 1];
		t->buf_value[k] = t->buf_value[k + 1];
		t->buf_release[k] = t->buf_release[k + 1];
	}
	t->n_buf--;
	t->buf_word[t->n_buf] = 0;
	t->buf_value[t->n_buf] = 0;
	t->buf_release[t->n_buf] = false;
}

/* May entry i leave now? In order, or (reorder) past earlier ones to other words if it is no release. */
static bool may_drain(const struct side_state *t, int i, bool reorder)
{
	if (i == 0)
		return true;
	if (!reorder || t->buf_release[i])
		return false;
	for (int k = 0; k < i; k++)
		if (t->buf_word[k] == t->buf_word[i])
			return false;
	return true;
}

static void buffer(struct side_state *t, uint8_t word, int8_t value, bool release)
{
	CU_ASSERT_FATAL(t->n_buf < BUF);
	t->buf_word[t->n_buf] = word;
	t->buf_value[t->n_buf] = value;
	t->buf_release[t->n_buf++] = release;
}

static int8_t load(const struct state *s, int w, uint8_t word)
{
	const struct side_state *t = &s->side[w];
	for (int i = t->n_buf - 1; i >= 0; i--)
		if (t->buf_word[i] == word)
			return t->buf_value[i];
	return s->mem[word];
}

/* One step of side w into s; false: it cannot move. */
static bool step(const struct model *m, struct state *s, int w)
{
	struct side_state *t = &s->side[w], *o = &s->side[!w];
	const struct op *op = &m->prog[w][t->pc];

	if (t->asleep)
		return false;
	switch (op->kind) {
	case STORE:
	case RELEASE:
		buffer(t, op->word, op->value, op->kind == RELEASE);
		break;
	case INC_REL:
		buffer(t, op->word, ++t->reg[op->a], true);
		break;
	case LOAD:
		t->reg[op->a] = load(s, w, op->word);
		break;
	case FENCE:
		if (t->n_buf)
			return false;
		break;
	case SKIP_LT:
		t->pc = t->reg[op->a] < op->value ? op->to : t->pc + 1;
		return true;
	case SKIP_GE:
		t->pc = t->reg[op->a] >= op->value ? op->to : t->pc + 1;
		return true;
	case SKIP_EVEN:
		t->pc = t->reg[op->a] & 1 ? t->pc + 1 : op->to;
		return true;
	case SLEEP: /* the kernel compares in memory */
		if (s->mem[op->word] == t->reg[op->a])
			t->asleep = true;
		break;
	case SLEEP_EV:
		t->asleep = !t->rung;
		t->rung = false;
		break;
	case WAKE:
		o->asleep = false;
		break;
	case RING:
		if (o->asleep)
			o->asleep = false;
		else
			o->rung = true;
		break;
	case END:
		return false;
	}
	t->pc++;
	return true;
}

static void expand(struct search *q, const struct state *s)
{
	bool moved = false;

	for (int w = 0; w < 2; w++) {
		struct state n = *s;
		if (step(q->m, &n, w)) {
			push(q, &n);
			moved = true;
		}
		for (int i = 0; i < s->side[w].n_buf; i++) {
			if (!may_drain(&s->side[w], i, q->m->reorder))
				continue;
			n = *s;
			drain(&n, w, i);
			push(q, &n);
			moved = true;
		}
	}
	if (!moved && q->m->lost(s))
		q->lost = true;
}

/* Is there an interleaving that loses the wake-up? */
static bool finds_lost(const struct model *m, size_t *states)
{
	struct search q = { .m = m, .cap = 1u << 20, .cap_todo = 1024 };
	struct state start;

	q.seen = malloc(q.cap * sizeof(*q.seen));
	q.used = calloc(q.cap, sizeof(*q.used));
	q.todo = malloc(q.cap_todo * sizeof(*q.todo));
	CU_ASSERT_FATAL(q.seen && q.used && q.todo);
	memset(&start, 0, sizeof(start));
	push(&q, &start);
	while (q.n_todo && !q.lost) {
		struct state s = q.todo[--q.n_todo];
		expand(&q, &s);
	}
	*states = q.n;
	free(q.seen);
	free(q.used);
	free(q.todo);
	return q.lost;
}

/* Copies a program without the op at `drop` (jumps follow). */
static void without(struct op *to, const struct op *from, int drop)
{
	int n = 0;
	for (int i = 0;; i++) {
		if (i != drop) {
			to[n] = from[i];
			if ((from[i].kind == SKIP_LT || from[i].kind == SKIP_GE || from[i].kind == SKIP_EVEN) &&
			    from[i].to > drop)
				to[n].to--;
			n++;
		}
		if (from[i].kind == END)
			break;
	}
}

static int fence_of(const struct op *p)
{
	for (int i = 0; p[i].kind != END; i++)
		if (p[i].kind == FENCE)
			return i;
	return -1;
}

/* Nothing is lost with all fences, and with each one gone something is. */
static void check_handshake(const char *name, const struct op *a, const struct op *b, bool (*lost)(const struct state *))
{
	struct op cut[MAX_OPS];
	size_t states = 0;

	for (int reorder = 0; reorder < 2; reorder++) {
		struct model m = { { a, b }, reorder, lost };
		CU_ASSERT(!finds_lost(&m, &states));
		printf("\n  %s%s: %zu states", name, reorder ? ", stores reordered" : "", states);
		for (int w = 0; w < 2; w++) {
			int f = fence_of(m.prog[w]);
			CU_ASSERT_FATAL(f >= 0);
			struct model without_one = m;
			without(cut, m.prog[w], f);
			without_one.prog[w] = cut;
			CU_ASSERT(finds_lost(&without_one, &states));
		}
	}
	printf(" ");
}

/* ---- W1: the client sleeps on cq_tail ------------------------------------------- */

enum { CQ_TAIL, WAIT_SEQ, WAKE_AT, W1_UNUSED };

/* apr_rc_sleep, futex, and again if woken too early */
static const struct op w1_client[] = {
	{ STORE, WAKE_AT, 0, 2, 0 },
	{ RELEASE, WAIT_SEQ, 0, 1, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, CQ_TAIL, 0, 0, 0 },
	{ SKIP_GE, 0, 0, 2, 7 },
	{ SLEEP, CQ_TAIL, 0, 0, 0 },
	{ SKIP_LT, 0, 0, 2, 3 }, /* always: looks again, the same announcement stands */
	{ RELEASE, WAIT_SEQ, 0, 2, 0 },
	{ END, 0, 0, 0, 0 },
};

/* two publications; after each one, apr_rd_wake (reg 2: the sleep already answered) */
static const struct op w1_daemon[] = {
	{ RELEASE, CQ_TAIL, 0, 1, 0 },
	{ RELEASE, CQ_TAIL, 0, 2, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, WAIT_SEQ, 0, 0, 0 },
	{ SKIP_EVEN, 0, 0, 0, 8 },
	{ LOAD, WAKE_AT, 1, 0, 0 },
	{ SKIP_GE, 0, 1, 3, 8 }, /* cq_tail 2 has not reached it */
	{ WAKE, 0, 0, 0, 0 },
	{ END, 0, 0, 0, 0 },
};

/* the same with poll on the socket instead of the futex (apr_arm, SOCKET mode) */
static const struct op w1_client_socket[] = {
	{ STORE, WAKE_AT, 0, 2, 0 },
	{ RELEASE, WAIT_SEQ, 0, 1, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, CQ_TAIL, 0, 0, 0 },
	{ SKIP_GE, 0, 0, 2, 6 },
	{ SLEEP_EV, 0, 0, 0, 0 },
	{ RELEASE, WAIT_SEQ, 0, 2, 0 },
	{ END, 0, 0, 0, 0 },
};

static const struct op w1_daemon_socket[] = {
	{ RELEASE, CQ_TAIL, 0, 1, 0 },
	{ RELEASE, CQ_TAIL, 0, 2, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, WAIT_SEQ, 0, 0, 0 },
	{ SKIP_EVEN, 0, 0, 0, 8 },
	{ LOAD, WAKE_AT, 1, 0, 0 },
	{ SKIP_GE, 0, 1, 3, 8 },
	{ RING, 0, 0, 0, 0 }, /* NOTIFY: it stays in the socket until it is read */
	{ END, 0, 0, 0, 0 },
};

static bool w1_lost(const struct state *s)
{
	return s->side[0].asleep && s->mem[CQ_TAIL] >= 2;
}

static void client_sleeps_on_cq(void)
{
	check_handshake("W1 client on cq_tail", w1_client, w1_daemon, w1_lost);
	check_handshake("W1 client on its socket", w1_client_socket, w1_daemon_socket, w1_lost);
}

/* one entry is not what the client waits for: it must not be woken, and the second must still wake it */
static const struct op w1_daemon_two_steps[] = {
	{ RELEASE, CQ_TAIL, 0, 1, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, WAIT_SEQ, 0, 0, 0 },
	{ SKIP_EVEN, 0, 0, 0, 7 },
	{ LOAD, WAKE_AT, 1, 0, 0 },
	{ SKIP_GE, 0, 1, 2, 7 },
	{ WAKE, 0, 0, 0, 0 },
	{ RELEASE, CQ_TAIL, 0, 2, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, WAIT_SEQ, 0, 0, 0 },
	{ SKIP_EVEN, 0, 0, 0, 14 },
	{ LOAD, WAKE_AT, 1, 0, 0 },
	{ SKIP_GE, 0, 1, 3, 14 },
	{ WAKE, 0, 0, 0, 0 },
	{ END, 0, 0, 0, 0 },
};

static void two_steps_of_the_daemon(void)
{
	size_t states;
	struct op cut[MAX_OPS];
	struct model m = { { w1_client, w1_daemon_two_steps }, true, w1_lost };

	CU_ASSERT(!finds_lost(&m, &states));
	/* the second publication's fence is the one that counts */
	without(cut, w1_daemon_two_steps, 8);
	m.prog[1] = cut;
	CU_ASSERT(finds_lost(&m, &states));
}

/* a daemon that sees wait_seq beside the wake_at of an earlier sleep wakes nobody, and nobody sleeps */
static void an_old_wake_at_loses_nothing(void)
{
	struct op client[MAX_OPS];
	size_t states;

	memcpy(client, w1_client, sizeof(w1_client));
	/* an earlier sleep waited for entry 3 and that word is still there */
	client[0] = (struct op){ STORE, WAKE_AT, 0, 3, 0 };
	client[1] = (struct op){ FENCE, 0, 0, 0, 0 };
	client[2] = (struct op){ STORE, WAKE_AT, 0, 2, 0 };
	client[3] = (struct op){ RELEASE, WAIT_SEQ, 0, 1, 0 };
	client[4] = (struct op){ FENCE, 0, 0, 0, 0 };
	client[5] = (struct op){ LOAD, CQ_TAIL, 0, 0, 0 };
	client[6] = (struct op){ SKIP_GE, 0, 0, 2, 9 };
	client[7] = (struct op){ SLEEP, CQ_TAIL, 0, 0, 0 };
	client[8] = (struct op){ SKIP_LT, 0, 0, 2, 5 };
	client[9] = (struct op){ END, 0, 0, 0, 0 };
	struct model m = { { client, w1_daemon }, true, w1_lost };
	CU_ASSERT(!finds_lost(&m, &states));
	client[3].kind = STORE; /* overtaking wake_at */
	CU_ASSERT(!finds_lost(&m, &states));
	client[4] = (struct op){ STORE, W1_UNUSED, 0, 1, 0 }; /* the fence gone, the jumps as they were */
	CU_ASSERT(finds_lost(&m, &states));
}

/* ---- W2: the daemon sleeps on sq_tail -------------------------------------------- */

enum { SQ_TAIL, FLAGS };

static const struct op w2_daemon[] = { /* apr_rd_sq_sleep, then the event loop */
	{ RELEASE, FLAGS, 0, 1, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, SQ_TAIL, 0, 0, 0 },
	{ SKIP_GE, 0, 0, 1, 6 },
	{ SLEEP_EV, 0, 0, 0, 0 },
	{ SKIP_LT, 0, 0, 1, 2 },
	{ RELEASE, FLAGS, 0, 0, 0 },
	{ END, 0, 0, 0, 0 },
};

static const struct op w2_client[] = { /* apr_rc_publish, apr_rc_need_wakeup */
	{ RELEASE, SQ_TAIL, 0, 1, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, FLAGS, 0, 0, 0 },
	{ SKIP_LT, 0, 0, 1, 5 },
	{ RING, 0, 0, 0, 0 },
	{ END, 0, 0, 0, 0 },
};

static bool w2_lost(const struct state *s)
{
	return s->side[0].asleep && s->mem[SQ_TAIL] >= 1;
}

static void daemon_sleeps_on_sq(void)
{
	check_handshake("W2 daemon on sq_tail", w2_daemon, w2_client, w2_lost);
}

/* ---- W3: the daemon waits for room in the CQ --------------------------------------- */

enum { CQ_HEAD, STALLED };

static const struct op w3_daemon[] = { /* apr_rd_cq_stall, then the event loop */
	{ RELEASE, STALLED, 0, 1, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, CQ_HEAD, 0, 0, 0 },
	{ SKIP_GE, 0, 0, 1, 6 },
	{ SLEEP_EV, 0, 0, 0, 0 },
	{ SKIP_LT, 0, 0, 1, 2 },
	{ RELEASE, STALLED, 0, 0, 0 },
	{ END, 0, 0, 0, 0 },
};

static const struct op w3_client[] = { /* apr_rc_cq_advance */
	{ RELEASE, CQ_HEAD, 0, 1, 0 },
	{ FENCE, 0, 0, 0, 0 },
	{ LOAD, STALLED, 0, 0, 0 },
	{ SKIP_LT, 0, 0, 1, 5 },
	{ RING, 0, 0, 0, 0 },
	{ END, 0, 0, 0, 0 },
};

static bool w3_lost(const struct state *s)
{
	return s->side[0].asleep && s->mem[CQ_HEAD] >= 1;
}

static void daemon_waits_for_room(void)
{
	check_handshake("W3 daemon for cq_head", w3_daemon, w3_client, w3_lost);
}

static const struct apr_test tests[] = {
	{ "case24_client_sleeps_on_cq", client_sleeps_on_cq, 0 },
	{ "case24_two_steps_of_the_daemon", two_steps_of_the_daemon, 0 },
	{ "case24_an_old_wake_at_loses_nothing", an_old_wake_at_loses_nothing, 0 },
	{ "case24_daemon_sleeps_on_sq", daemon_sleeps_on_sq, 0 },
	{ "case24_daemon_waits_for_room", daemon_waits_for_room, 0 },
};
TEST_MAIN("shm/model_check", tests)
