/* SPDX-License-Identifier: MIT */
/* Owns: the core thread's passes, hot sessions, wakes, drain. See core.h. */
#include "daemon/core.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define LOOK_NS UINT64_C(50000) /* how often a loop that costs a system call is asked while rings are hot */

/* ---- sessions --------------------------------------------------------------------- */

static void cool(struct core *c, struct session *s)
{
	if (!s->hot)
		return;
	s->hot = false;
	for (uint32_t i = 0; i < c->n_hot; i++) {
		if (c->hot[i] == s) {
			c->hot[i] = c->hot[--c->n_hot];
			return;
		}
	}
}

static void warm(struct core *c, struct session *s)
{
	if (!c->poll_ns || s->gone)
		return;
	s->hot_until = c->now + c->poll_ns;
	if (s->hot || c->n_hot == HOT_MAX)
		return;
	s->hot = true;
	c->hot[c->n_hot++] = s;
	apr_rd_flags_clear(&s->ring, APR_RES_NEED_WAKEUP);
}

static void on_doorbell(void *arg, uint32_t events)
{
	struct session *s = arg;
	struct core *c = s->core;

	(void)events;
	COUNT(c, s, doorbells, APR_COUNT_DOORBELLS, 1);
	if (s->gone)
		return;
	c->now = apr_now_ns(); /* the pass may have slept for this: what comes now was not accepted before that */
	warm(c, s);
	service_until_quiet(c, s);
}

void core_broken(struct core *c, struct session *s, enum apr_reason reason, const char *why)
{
	if (s->gone)
		return;
	s->gone = true; /* nothing of it is read or written from here on */
	s->reason = reason;
	s->why = why;
	apr_rd_dead(&s->ring, reason);
	s->broken.fn = s->on_broken;
	mailbox_post(c->io, &s->broken);
}

void core_attach(void *core, struct mail *m)
{
	struct core *c = core;
	struct session *s = (struct session *)((char *)m - offsetof(struct session, attach));

	s->core = c;
	s->who->limits = s->limits;
	s->credit.max_inflight = s->geo.max_inflight;
	s->core_next = c->all;
	if (c->all)
		c->all->core_prev = s;
	c->all = s;
	COUNT_ALL(c, sessions, 1);
	__atomic_store_n(&s->ring.res->poll_us, (uint32_t)(c->poll_ns / 1000), __ATOMIC_RELAXED);
	apr_rd_flags_set(&s->ring, APR_RES_NEED_WAKEUP | (c->draining ? APR_RES_DRAINING : 0));
	s->door = loop_poll(c->loop, s->doorbell, POLLIN, true, on_doorbell, s);
	if (!s->door)
		core_broken(c, s, APR_REASON_QUOTA, "no memory to watch the doorbell");
	else
		service_until_quiet(c, s); /* it may have submitted before we looked */
}

void core_may_bury(struct core *c, struct session *s)
{
	if (!s->detached || s->unfinished || s->jobs_out || s->dirty)
		return;
	s->bury.fn = s->on_bury;
	mailbox_post(c->io, &s->bury);
}

void core_detach(void *core, struct mail *m)
{
	struct core *c = core;
	struct session *s = (struct session *)((char *)m - offsetof(struct session, detach));

	if (!s->gone)
		apr_rd_dead(&s->ring, s->end_reason);
	s->gone = true;
	loop_unpoll(c->loop, s->door);
	cool(c, s);
	request_end_all(c, s, 0, APR_FINISH_NONE, NULL);
	conversations_end(s);
	if (s->core_next)
		s->core_next->core_prev = s->core_prev;
	if (s->core_prev)
		s->core_prev->core_next = s->core_next;
	else
		c->all = s->core_next;
	COUNT_ALL(c, sessions, -1u);
	s->detached = true;
	core_may_bury(c, s);
}

void core_cancel_all(void *core, struct mail *m)
{
	struct session *s = (struct session *)((char *)m - offsetof(struct session, cancel_all));

	__atomic_store_n(&s->cancelling, false, __ATOMIC_RELEASE); /* the letter may be posted again */
	if (!s->gone)
		request_end_all(core, s, -ECANCELED, APR_FINISH_CANCELLED, NULL);
}

/* ---- publishing and waking ----------------------------------------------------------- */

static void wake_by_io(struct core *c, struct session *s, uint32_t how)
{
	uint32_t none = 0;

	/* still pending from before: that one will do. Pairs with the exchange in the io thread's on_wake */
	if (!__atomic_compare_exchange_n(&s->wake_how, &none, how, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
		return;
	s->wake.fn = s->on_wake;
	mailbox_post(c->io, &s->wake);
}

static void flush(struct core *c)
{
	struct session *list = c->dirty, *one = NULL;
	uint32_t wakes = 0;

	if (!list)
		return;
	c->dirty = NULL;
	for (struct session *s = list; s; s = s->dirty_next)
		if (!s->gone)
			apr_rd_cq_publish(&s->ring);
	apr_fence_full(); /* W1: pairs with the fence in apr_rc_sleep */
	for (struct session *s = list, *next; s; s = next) {
		next = s->dirty_next;
		s->dirty = false;
		if (s->gone) {
			core_may_bury(c, s);
			continue;
		}
		int how = apr_rd_wake(&s->ring);
		if (how < 0) {
			core_broken(c, s, how == -EFAULT ? APR_REASON_FAULT : APR_REASON_PROTOCOL,
				    "wait_how is not known");
		} else if (how) {
			COUNT(c, s, wakes, APR_COUNT_WAKES, 1);
			if (how == APR_WAIT_FUTEX && !wakes)
				one = s;
			else
				wake_by_io(c, s, (uint32_t)how);
			wakes++;
		}
	}
	if (one && wakes == 1)
		apr_futex_wake(&one->ring.res->cq_tail);
	else if (one)
		wake_by_io(c, one, APR_WAIT_FUTEX);
}

/* ---- draining --------------------------------------------------------------------------- */

void core_drain(void *core, struct mail *m)
{
	struct core *c = core;
	uint64_t until = apr_now_ns() + c->drain_ms * UINT64_C(1000000);

	(void)m;
	if (c->draining && until > c->drain_until)
		return;
	c->draining = true;
	c->drain_until = until;
	for (struct session *s = c->all; s; s = s->core_next)
		if (!s->gone)
			apr_rd_flags_set(&s->ring, APR_RES_DRAINING);
}

void core_drain_now(void *core, struct mail *m)
{
	((struct core *)core)->drain_ms = 0;
	core_drain(core, m);
}

/* No ring is read or written from here on. */
static void leave_all(struct core *c, enum apr_reason reason)
{
	for (struct session *s = c->all; s; s = s->core_next) {
		if (!s->gone)
			apr_rd_dead(&s->ring, reason);
		s->gone = true;
	}
}

/* The device is of no use any more: everybody is told, and another worker comes in this one's place. */
static void lose(struct core *c)
{
	if (c->lost_told)
		return;
	for (struct session *s = c->all; s; s = s->core_next)
		request_end_all(c, s, -EIO, APR_FINISH_ERROR, "the device failed: aprd starts over");
	flush(c);
	leave_all(c, APR_REASON_RESTART);
	c->lost_told = true;
	c->losing.fn = c->on_lost;
	mailbox_post(c->io, &c->losing);
}

static void drain(struct core *c)
{
	if (c->drained_told || (c->unfinished && c->now < c->drain_until))
		return;
	for (struct session *s = c->all; s; s = s->core_next) {
		request_end_all(c, s, -ESHUTDOWN, APR_FINISH_DRAINED, "aprd ended before this request did");
		service_session(c, s); /* what came too late is told so */
	}
	flush(c);
	leave_all(c, APR_REASON_SHUTDOWN);
	c->drained_told = true;
	c->drained.fn = c->on_drained;
	mailbox_post(c->io, &c->drained);
}

void core_stop(void *core, struct mail *m)
{
	(void)m;
	((struct core *)core)->stop = true;
}

/* ---- the thread -------------------------------------------------------------------------- */

static void nothing(void *arg, uint32_t events)
{
	(void)arg;
	(void)events; /* it woke us: that was all */
}

static void on_mail(void *arg, uint32_t events)
{
	struct core *c = arg;
	uint64_t n;

	(void)events;
	(void)!read(c->box.efd, &n, sizeof(n));
}

static bool serve_hot(struct core *c)
{
	bool any = false;

	for (uint32_t i = 0; i < c->n_hot;) {
		struct session *s = c->hot[i];
		if (service_session(c, s)) {
			any = true;
			s->hot_until = c->now + c->poll_ns;
		}
		if (!s->gone && c->now < s->hot_until) {
			i++;
			continue;
		}
		cool(c, s); /* another one stands at i now */
		if (!s->gone)
			service_until_quiet(c, s);
	}
	return any;
}

static bool look(struct core *c)
{
	bool dear = loop_maybe(c->loop) && c->loop->kind == &loop_epoll;

	if (!loop_maybe(c->loop) || (dear && c->now - c->looked < LOOK_NS))
		return false;
	c->looked = c->now;
	loop_run(c->loop, 0);
	return !dear;
}

static void sleep_until_something(struct core *c)
{
	uint64_t at = timers_next(c), due = sched_next(c), now;

	at = due < at ? due + 1 : at;
	if (c->n_parked && c->next_sweep < at)
		at = c->next_sweep;
	if (c->draining && !c->drained_told && c->drain_until < at)
		at = c->drain_until;
	if (!mailbox_sleep(&c->box))
		return;
	now = apr_now_ns();
	if (at > now)
		loop_run(c->loop, at == UINT64_MAX ? UINT64_MAX : at - now);
	mailbox_awake(&c->box);
}

static bool pass(struct core *c)
{
	c->now = apr_now_ns();
	bool busy = mailbox_read(&c->box, c);
	busy |= look(c);
	busy |= serve_hot(c);
	busy |= sched_run(c);
	if (c->n_heap)
		busy |= timers_run(c); /* what it freed may let others run: another pass */
	busy |= sched_late(c);
	if (c->n_parked && c->now >= c->next_sweep) {
		sched_sweep(c);
		busy = true;
	}
	if (c->draining)
		drain(c);
	if (c->lost)
		lose(c);
	flush(c);
	return busy;
}

static void *core_main(void *arg)
{
	struct core *c = arg;

	prctl(PR_SET_NAME, "aprd-core");
	apr_guard_thread();
	while (!c->stop) {
		if (pass(c))
			continue;
		if (c->n_hot || (c->poll_steps && sched_busy(c)))
			apr_cpu_relax();
		else
			sleep_until_something(c);
	}
	loop_unpoll(c->loop, c->mail_watch);
	loop_unpoll(c->loop, c->step_watch);
	return NULL;
}

int core_start(struct core *c)
{
	sigset_t all, old;

	c->next_sweep = UINT64_MAX;
	/* here, where there is somebody to tell: a thread deaf to its mail would sleep for ever */
	c->mail_watch = loop_poll(c->loop, c->box.efd, POLLIN, false, on_mail, c);
	c->step_watch = loop_poll(c->loop, apr_engine_fd(c->models->engine), POLLIN, true, nothing, c);
	if (!c->mail_watch || !c->step_watch)
		return -ENOMEM;
	/* signals are the supervisor's; SIGBUS is unblocked by apr_guard_thread */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	int e = -pthread_create(&c->thread, NULL, core_main, c);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	c->started = !e;
	return e;
}

void core_join(struct core *c)
{
	if (c->started)
		pthread_join(c->thread, NULL);
	c->started = false;
	free(c->heap);
	c->heap = NULL;
}
