/* SPDX-License-Identifier: MIT */
/* Owns: taking completions and sleeping for them. Does not own: what entries hold (entry.c). */
#include "client/handle.h"
#include "shm/wire.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>

/* Without sleeping: entries there to be taken. > 0, -EAGAIN, -EPIPE. */
static int ready(struct apr *c)
{
	if (c->lost_at != c->n_lost)
		return (int)(c->n_lost - c->lost_at);
	if (!c->rc.res)
		return -EPIPE;
	uint32_t n = apr_rc_cq_ready(&c->rc);
	if (n)
		return (int)n;
	apr_check_dead(c);
	if (!c->dead)
		return -EAGAIN;
	n = apr_rc_cq_ready(&c->rc); /* written before DEAD was seen */
	if (n)
		return (int)n;
	if (c->opts.flags & APR_CONNECT_RECONNECT)
		return -EPIPE; /* the session may come back: nothing is lost yet */
	int e = apr_flights_lose(c);
	if (e)
		return e;
	return c->lost_at != c->n_lost ? (int)(c->n_lost - c->lost_at) : -EPIPE;
}

static const struct apr_cqe *front(struct apr *c)
{
	const struct apr_cqe *e = apr_lost_peek(c);
	return e ? e : apr_rc_cqe(&c->rc, 0);
}

int apr_peek_cqe(struct apr *c, const struct apr_cqe **cqe)
{
	int e = apr_enter(c);
	if (e)
		return e;
	e = ready(c);
	if (e > 0) {
		*cqe = front(c);
		e = 0;
	}
	return apr_leave(c, e);
}

const struct apr_cqe *apr_cqe_at(struct apr *c, uint32_t i)
{
	const struct apr_cqe *e = NULL;

	if (apr_enter(c))
		return NULL;
	if (c->lost_at != c->n_lost)
		e = i ? NULL : apr_lost_peek(c); /* made up one at a time */
	else if (c->rc.res && i < apr_rc_cq_ready(&c->rc))
		e = apr_rc_cqe(&c->rc, i);
	apr_leave(c, 0);
	return e;
}

void apr_cqe_seen(struct apr *c, const struct apr_cqe *cqe)
{
	if (!cqe || apr_enter(c))
		return;
	if (c->lost_at != c->n_lost) {
		c->lost_at++;
	} else if (c->rc.res && apr_rc_cq_ready(&c->rc)) {
		const struct apr_cqe *e = apr_rc_cqe(&c->rc, 0);
		if (c->debug) {
			char line[512];
			fprintf(stderr, "apr < %s\n", apr_wire_cqe(e, line, sizeof(line)));
		}
		apr_flight_entry(c, e);
		if (apr_rc_cq_advance(&c->rc, 1) || c->ring_always)
			apr_doorbell_ring(c->bell);
	}
	apr_leave(c, 0);
}

/* ---- sleeping ------------------------------------------------------------------ */

static uint64_t min64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* Polls the tail for the time a client should, before it sleeps. True: it is there. */
static bool spin(const struct apr *c, uint32_t target, uint64_t deadline)
{
	uint32_t us = c->opts.spin_us >= 0 ? (uint32_t)c->opts.spin_us
					   : __atomic_load_n(&c->rc.res->spin_us, __ATOMIC_RELAXED);
	if (!us)
		return false;
	uint64_t end = min64(apr_now_ns() + us * UINT64_C(1000), deadline);
	do {
		for (int i = 0; i < 64; i++) {
			if ((int32_t)(apr_rc_cq_tail(&c->rc) - target) >= 0)
				return true;
			apr_cpu_relax();
		}
	} while (apr_now_ns() < end);
	return false;
}

/* Sleeps on the futex until the tail reaches target, something else happens or `until`. The lock is
 * given back meanwhile: the session stays, as the sleeper flag keeps others from taking it down. */
static void sleep_futex(struct apr *c, uint32_t target, uint64_t until)
{
	uint32_t seen;

	if (!apr_rc_sleep(&c->rc, target, APR_WAIT_FUTEX, &seen))
		return;
	for (;;) {
		uint64_t now = apr_now_ns();
		if (now >= until)
			break;
		c->sleeper = true;
		apr_leave(c, 0);
		apr_futex_wait(&c->rc.res->cq_tail, seen, until - now);
		if (c->locked)
			pthread_mutex_lock(&c->lock);
		c->sleeper = false;
		/* the same announcement stands until the tail is there: an entry too few wakes nobody */
		seen = apr_rc_cq_tail(&c->rc);
		if ((int32_t)(seen - target) >= 0 ||
		    (__atomic_load_n(&c->rc.res->flags, __ATOMIC_RELAXED) & APR_RES_DEAD))
			break;
	}
	apr_rc_awake(&c->rc);
}

static void sleep_socket(struct apr *c, uint32_t target, uint64_t until)
{
	uint32_t seen;
	struct pollfd p = { c->sock, POLLIN, 0 };

	if (!c->ring_always && !apr_rc_sleep(&c->rc, target, APR_WAIT_SOCKET, &seen))
		return;
	uint64_t now = apr_now_ns();
	if (now < until && (!c->ring_always || (int32_t)(apr_rc_cq_tail(&c->rc) - target) < 0)) {
		struct timespec t = { (time_t)((until - now) / 1000000000u), (long)((until - now) % 1000000000u) };
		c->sleeper = true;
		apr_leave(c, 0);
		ppoll(&p, 1, &t, NULL);
		if (c->locked)
			pthread_mutex_lock(&c->lock);
		c->sleeper = false;
	}
	if (!c->ring_always)
		apr_rc_awake(&c->rc);
}

/* Another thread sleeps on this ring already: wait for it to come back. */
static void sleep_behind(struct apr *c, uint64_t until)
{
	struct timespec t = { (time_t)(until / 1000000000u), (long)(until % 1000000000u) };
	pthread_cond_timedwait(&c->awake, &c->lock, &t);
}

/* With the lock held and cancellation disabled; old_state is what the caller's was. */
static int wait_entries(struct apr *c, uint32_t n, int64_t timeout_us, bool cancellable, int old_state)
{
	uint64_t start = timeout_us ? apr_now_ns() : 0;
	uint64_t deadline = timeout_us < 0 ? UINT64_MAX : start + (uint64_t)timeout_us * 1000;
	bool spun = false;

	if (c->armed && c->rc.res)
		apr_rc_awake(&c->rc);
	c->armed = false;
	for (;;) {
		int k = ready(c);
		if (k < (int)n)
			apr_check_dead(c);
		if (k == -EPIPE && timeout_us && (c->opts.flags & APR_CONNECT_RECONNECT)) {
			apr_revive(c);
			k = ready(c);
		}
		if (k >= (int)n || (k > 0 && c->dead) || (k < 0 && k != -EAGAIN) || c->lost_at != c->n_lost)
			return k;
		if (!timeout_us)
			return k > 0 ? k : -EAGAIN;
		uint64_t now = apr_now_ns();
		if (now >= deadline)
			return -ETIMEDOUT;
		uint32_t target = c->rc.cq_head + n;
		if (!spun && !c->sleeper && spin(c, target, deadline))
			continue;
		spun = true;
		uint64_t until = min64(deadline, now + APR_SLICE_MS * UINT64_C(1000000));
		if (c->sleeper) {
			sleep_behind(c, until);
		} else {
			if (c->opts.wait == APR_WAIT_SOCKET || c->ring_always)
				sleep_socket(c, target, until);
			else
				sleep_futex(c, target, until);
			if (c->locked)
				pthread_cond_broadcast(&c->awake);
			/* kill -9 wakes no futex: the socket knows */
			if ((int32_t)(apr_rc_cq_tail(&c->rc) - target) < 0 || c->opts.wait == APR_WAIT_SOCKET)
				apr_drain(c);
		}
		if (cancellable) {
			apr_leave(c, 0);
			pthread_setcancelstate(old_state, NULL);
			pthread_testcancel();
			pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
			if (c->locked)
				pthread_mutex_lock(&c->lock);
		}
	}
}

static int wait_common(struct apr *c, uint32_t n, int64_t timeout_us, bool cancellable)
{
	int state;

	int e = apr_enter(c);
	if (e)
		return e;
	if (!n)
		n = 1;
	if (c->rc.res && n > c->rc.cq_mask + 1)
		return apr_leave(c, -EINVAL);
	int k = ready(c); /* the hot path: no more than this */
	if (k >= (int)n)
		return apr_leave(c, k);
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	k = wait_entries(c, n, timeout_us, cancellable, state);
	pthread_setcancelstate(state, NULL);
	return apr_leave(c, k);
}

int apr_wait_quiet(struct apr *c, uint32_t n, int64_t timeout_us)
{
	return wait_common(c, n, timeout_us, false);
}

int apr_wait_cqes(struct apr *c, uint32_t n, int64_t timeout_us)
{
	return wait_common(c, n, timeout_us, true);
}

int apr_wait_cqe_timeout(struct apr *c, const struct apr_cqe **cqe, int64_t timeout_us)
{
	int k = wait_common(c, 1, timeout_us, true);
	return k > 0 ? apr_peek_cqe(c, cqe) : k;
}

int apr_wait_cqe(struct apr *c, const struct apr_cqe **cqe)
{
	return apr_wait_cqe_timeout(c, cqe, -1);
}

/* ---- event loops --------------------------------------------------------------- */

int apr_arm(struct apr *c)
{
	uint32_t seen;

	int e = apr_enter(c);
	if (e)
		return e;
	e = ready(c);
	if (e == -EAGAIN && c->sleeper) {
		e = -EBUSY; /* another thread sleeps on the ring */
	} else if (e == -EAGAIN) {
		e = 0;
		if (c->armed)
			apr_rc_awake(&c->rc);
		c->armed = !c->ring_always && apr_rc_sleep(&c->rc, c->rc.cq_head + 1, APR_WAIT_SOCKET, &seen);
		if (!c->armed && (!c->ring_always || apr_rc_cq_ready(&c->rc)))
			e = 1;
	} else if (e > 0) {
		e = 1;
	}
	return apr_leave(c, e);
}

int apr_poll(struct apr *c)
{
	int e = apr_enter(c);
	if (e)
		return e;
	if (c->armed && c->rc.res)
		apr_rc_awake(&c->rc);
	c->armed = false;
	e = c->sock >= 0 ? apr_drain(c) : -EPIPE;
	if (!e && c->models_changed) {
		c->models_changed = false;
		e = 1;
	}
	return apr_leave(c, e);
}
