/* SPDX-License-Identifier: MIT */
/*
 * Compute threads: hand-off of parallel regions by a short spin, then futex.
 *
 * Owns: the workers, how a region's items are taken and how its end is seen. Does
 * not own which CPUs the process may use (cpus.c) nor any work.
 *
 * A region is one 64-bit ticket: its number above, the items not yet taken below.
 * An item is taken by a compare-and-swap that lowers the ticket. A region ends when
 * all its items are done; a worker that the kernel has put aside in the meantime is
 * not waited for: its swap fails later, since the number has changed. So fn, arg and
 * n may be read only after a successful swap, when the region cannot end.
 */
#include "kernels/cpu/pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define POOL_MAX_THREADS 1024u
#define AHEAD_STEP 1024u /* bytes prefetched a pause */
#define SPIN_NS 50000 /* longest busy wait before a futex: about two hand-offs by futex */

struct pool_worker {
	struct apr_pool *pool;
	pthread_t thread;
	unsigned index;
	/* what to prefetch while waiting; the worker's own */
	const char *ahead;
	size_t ahead_bytes;
};

struct apr_pool {
	/* F1: the caller's release store pairs with the acquire half of T1 in take() */
	_Alignas(64) _Atomic uint64_t ticket; /* region number << 32 | items left to take */
	/* P1: fetch_sub (release) in work() pairs with the caller's acquire loads in wait_done() */
	_Alignas(64) _Atomic uint32_t pending; /* items not yet done; a futex word */
	/* W1/W2: caller_waits and pending, both seq_cst: see wait_done() and work() */
	_Atomic uint32_t caller_waits;
	/* E1/E2: epoch and sleepers, both seq_cst: see idle() and apr_pool_run() */
	_Alignas(64) _Atomic uint32_t epoch; /* futex word of idle workers */
	_Atomic uint32_t sleepers;
	_Atomic bool stop; /* stored before epoch is raised (release), read after it (acquire) */
	/* the region's own: plain, ordered by F1/T1 and P1 */
	_Alignas(64) void (*fn)(void *arg, uint32_t i, unsigned worker);
	void *arg;
	uint32_t n;
	uint32_t number;
	unsigned threads;
	long spin_ns;
	struct pool_worker workers[];
};

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("isb" ::: "memory");
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
	(void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n)
{
	(void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static long long now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* One turn of a busy wait. A prefetch that finds no place in the queue to memory is dropped, so they are not issued
 * faster than memory answers: some lines a pause. */
static inline void idle_turn(struct pool_worker *w)
{
	if (w->ahead_bytes) {
		size_t n = w->ahead_bytes < AHEAD_STEP ? w->ahead_bytes : AHEAD_STEP;

		for (size_t i = 0; i < n; i += 64)
			__builtin_prefetch(w->ahead + i, 0, 2);
		w->ahead += n;
		w->ahead_bytes -= n;
	}
	relax();
}

/* Busy-waits at most spin_ns for *word to differ from value (or to equal it: until_equal). */
static bool spin_for(_Atomic uint32_t *word, uint32_t value, bool until_equal, long spin_ns, struct pool_worker *w)
{
	long long end = 0;

	if (!spin_ns)
		return (atomic_load_explicit(word, memory_order_acquire) == value) == until_equal;
	for (unsigned i = 0;; i++) {
		if ((atomic_load_explicit(word, memory_order_acquire) == value) == until_equal)
			return true;
		idle_turn(w);
		if (i % 32 == 31) {
			long long t = now_ns();

			if (!end)
				end = t + spin_ns;
			else if (t >= end)
				return false;
		}
	}
}

/* One item of whatever region is open; its index, or -1 where nothing is left. */
static int64_t take(struct apr_pool *p)
{
	uint64_t t = atomic_load_explicit(&p->ticket, memory_order_relaxed);

	while ((uint32_t)t) {
		/* T1: acquire pairs with F1, the store of this very region's ticket: the swap compares its number */
		if (atomic_compare_exchange_weak_explicit(&p->ticket, &t, t - 1, memory_order_acquire,
							  memory_order_relaxed))
			return (int64_t)(p->n - (uint32_t)t);
	}
	return -1;
}

static void work(struct apr_pool *p, unsigned worker)
{
	int64_t i;

	while ((i = take(p)) >= 0) {
		p->fn(p->arg, (uint32_t)i, worker);
		/* P1; seq_cst since W1: the caller stores caller_waits, then reads pending; here the other way round,
		 * so one of the two sees the other */
		if (atomic_fetch_sub(&p->pending, 1) == 1 && worker && atomic_load(&p->caller_waits))
			futex_wake(&p->pending, 1);
	}
}

static void wait_done(struct apr_pool *p)
{
	uint32_t left;

	if (spin_for(&p->pending, 0, true, p->spin_ns, &p->workers[0]))
		return;
	atomic_store(&p->caller_waits, 1); /* W1, pairs with the fetch_sub and load in work() */
	while ((left = atomic_load(&p->pending)) != 0)
		futex_wait(&p->pending, left);
	atomic_store_explicit(&p->caller_waits, 0, memory_order_relaxed); /* a late reader wakes nobody: harmless */
}

/* Waits until the epoch differs from seen. */
static void idle(struct apr_pool *p, struct pool_worker *w, uint32_t seen)
{
	if (spin_for(&p->epoch, seen, false, p->spin_ns, w))
		return;
	/* E2: count ourselves, then look at the epoch; apr_pool_run raises the epoch, then looks at the count */
	atomic_fetch_add(&p->sleepers, 1);
	while (atomic_load(&p->epoch) == seen)
		futex_wait(&p->epoch, seen);
	atomic_fetch_sub(&p->sleepers, 1);
}

static void *worker_main(void *arg)
{
	struct pool_worker *w = arg;
	struct apr_pool *p = w->pool;
	uint32_t seen = 0;

	for (;;) {
		idle(p, w, seen);
		/* acquire pairs with E1 in apr_pool_run and apr_pool_free; a later epoch only means more to do */
		seen = atomic_load_explicit(&p->epoch, memory_order_acquire);
		if (atomic_load_explicit(&p->stop, memory_order_relaxed))
			return NULL;
		work(p, w->index);
	}
}

static void wake_workers(struct apr_pool *p)
{
	atomic_fetch_add(&p->epoch, 1); /* E1, seq_cst: pairs with E2 in idle() and releases the ticket and stop */
	if (atomic_load(&p->sleepers))
		futex_wake(&p->epoch, INT_MAX);
}

void apr_pool_run(struct apr_pool *p, uint32_t n, void (*fn)(void *arg, uint32_t i, unsigned worker), void *arg)
{
	if (!p || p->threads == 1 || n < 2) {
		for (uint32_t i = 0; i < n; i++)
			fn(arg, i, 0);
		return;
	}
	p->fn = fn;
	p->arg = arg;
	p->n = n;
	atomic_store_explicit(&p->pending, n, memory_order_relaxed); /* published by F1 */
	atomic_store_explicit(&p->ticket, (uint64_t)++p->number << 32 | n, memory_order_release); /* F1, pairs with T1 */
	wake_workers(p);
	work(p, 0);
	wait_done(p);
}

static void stop_workers(struct apr_pool *p, unsigned started)
{
	atomic_store_explicit(&p->stop, true, memory_order_relaxed); /* published by E1 */
	wake_workers(p);
	for (unsigned i = 1; i < started; i++)
		pthread_join(p->workers[i].thread, NULL);
}

int apr_pool_new(struct apr_pool **out, unsigned threads)
{
	unsigned usable = apr_pool_usable_cpus();
	unsigned n = threads ? threads : usable;
	struct apr_pool *p;
	sigset_t all, old;
	size_t bytes;

	*out = NULL;
	if (n > POOL_MAX_THREADS)
		return -EAGAIN;
	bytes = (sizeof *p + n * sizeof p->workers[0] + 63) / 64 * 64;
	p = aligned_alloc(64, bytes);
	if (!p)
		return -ENOMEM;
	__builtin_memset(p, 0, bytes);
	p->threads = n;
	p->spin_ns = n > usable ? 0 : SPIN_NS; /* a spinner must not hold the CPU that the work needs */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old); /* signals stay with the process's own threads */
	for (unsigned i = 1; i < n; i++) {
		p->workers[i] = (struct pool_worker){.pool = p, .index = i};
		if (pthread_create(&p->workers[i].thread, NULL, worker_main, &p->workers[i])) {
			pthread_sigmask(SIG_SETMASK, &old, NULL);
			stop_workers(p, i);
			free(p);
			return -EAGAIN;
		}
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	*out = p;
	return 0;
}

void apr_pool_free(struct apr_pool *p)
{
	if (!p)
		return;
	stop_workers(p, p->threads);
	free(p);
}

unsigned apr_pool_threads(const struct apr_pool *p)
{
	return p ? p->threads : 1;
}

void apr_pool_ahead(struct apr_pool *p, unsigned worker, const void *mem, size_t bytes)
{
	if (!p)
		return;
	p->workers[worker].ahead = mem;
	p->workers[worker].ahead_bytes = bytes;
}
