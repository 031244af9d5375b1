/* SPDX-License-Identifier: MIT */
/*
 * Sleeping and waking: the full fence, the futex calls, the doorbell.
 *
 * Three hand-shakes, each store - full fence - load on both sides (Dekker), so
 * that at least one side sees the other's store:
 *
 *   W1 client sleeps on the CQ:  client stores wait_seq (odd), fence, loads cq_tail
 *                                daemon stores cq_tail, fence, loads wait_seq
 *   W2 daemon sleeps on the SQ:  daemon sets NEED_WAKEUP, fence, loads sq_tail
 *                                client stores sq_tail, fence, loads flags
 *   W3 daemon waits for CQ room: daemon sets CQ_STALLED, fence, loads cq_head
 *                                client stores cq_head, fence, loads flags
 *
 * Acquire and release are not enough for any of them. tests/shm/test_model_check.c
 * shows each of the six fences to be needed.
 *
 * Owns: fence and system calls. Does not own: when (ring.h).
 */
#ifndef APR_SHM_WAKE_H
#define APR_SHM_WAKE_H

#include <stdint.h>
#include <time.h>

#if defined(__SANITIZE_THREAD__)
#define APR_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define APR_TSAN 1
#endif
#endif

/* Orders every earlier load and store before every later one. */
static inline void apr_fence_full(void)
{
#if defined(__x86_64__)
	/* a locked add to the stack is the cheaper of the two full fences; ThreadSanitizer knows neither */
	__asm__ volatile("lock; addl $0,-4(%%rsp)" ::: "memory", "cc");
#elif defined(APR_TSAN) && defined(__aarch64__)
	__asm__ volatile("dmb ish" ::: "memory");
#else
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

static inline void apr_cpu_relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("isb" ::: "memory");
#endif
}

static inline uint64_t apr_now_ns(void) /* CLOCK_MONOTONIC; never crosses the ABI */
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Sleeps while *addr == val, at most ns (never PRIVATE: the word lies in a memfd).
 * 0 woken, -EAGAIN the value differed, -ETIMEDOUT, -EINTR. */
int apr_futex_wait(const uint32_t *addr, uint32_t val, uint64_t ns);
/* Wakes one. The number woken or -errno. */
int apr_futex_wake(const uint32_t *addr);
/* Rings an eventfd. 0, also where it is saturated; -errno (-EBADF) otherwise. */
int apr_doorbell_ring(int efd);

#endif
