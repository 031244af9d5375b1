/* SPDX-License-Identifier: MIT */
/*
 * From the GPU's store to the client's load: half a round trip by a resident kernel,
 * not two clocks.
 *
 * Windows. "host": from before the host's store that the kernel waits for to after the
 * load that sees the kernel's. "client": another process, whose NOP goes through a real
 * submission ring to a thread that polls it as aprd's does; that thread asks the
 * kernel, waits for its 64-byte record, writes the entry into the real completion
 * ring; from before apr_rc_sqe to after the client's load of the new tail. Half of it
 * is the way from the kernel's store to the client's load. Both sides poll, each on a
 * CPU of its own.
 *
 *   gpu_ring [ROUND TRIPS]     default 20000; exit 77 where there is no device
 */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench/gpu_echo.h"
#include "shm/ring.h"

enum { WARM = 1000 };

struct shared { /* between the two processes, beside the ring */
	uint32_t go;    /* stored with release by the server when the kernel runs; loaded with acquire by the client */
	uint32_t n;     /* round trips recorded by the client, before it ends */
	uint32_t ns[1 << 20];
};

struct ring {
	struct apr_geometry g;
	void *req, *res;
};

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void pin(int nth)
{
	cpu_set_t set, one;
	int i;

	if (sched_getaffinity(0, sizeof set, &set))
		return;
	for (i = 0; i < CPU_SETSIZE && (!CPU_ISSET(i, &set) || nth-- > 0); i++)
		;
	if (i == CPU_SETSIZE)
		return;
	CPU_ZERO(&one);
	CPU_SET(i, &one);
	(void)sched_setaffinity(0, sizeof one, &one);
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

/* Microseconds of half a round trip, at that place among n sorted ones */
static double half_us(const uint32_t *ns, uint32_t n, double place)
{
	uint32_t i = (uint32_t)((double)n * place);

	return ns[i < n ? i : n - 1] * 0.5e-3;
}

static void report(const char *what, uint32_t *ns, uint32_t n)
{
	if (!n)
		return;
	qsort(ns, n, sizeof *ns, by_value);
	printf("{\"bench\":\"gpu_ring\",\"what\":\"GPU's store to %s\",\"n\":%u,\"median\":%.3f,\"p99\":%.3f,\"p999\":%.3f,"
	       "\"min\":%.3f,\"unit\":\"µs\"}\n", what, n, half_us(ns, n, 0.5), half_us(ns, n, 0.99), half_us(ns, n, 0.999),
	       half_us(ns, n, 0));
	fflush(stdout);
	fprintf(stderr, "GPU's store to %-28s median %.2f µs, p99 %.2f\n", what, half_us(ns, n, 0.5), half_us(ns, n, 0.99));
}

/* ---- the two sides ----------------------------------------------------------------------- */

static void ask_gpu(uint32_t *ask, const uint32_t *answer, uint32_t k)
{
	__atomic_store_n(ask, k, __ATOMIC_RELEASE); /* pairs with the kernel's acquire */
	while (__atomic_load_n(answer, __ATOMIC_ACQUIRE) != k) /* pairs with the kernel's release */
		apr_cpu_relax();
}

static void client(struct ring *r, struct shared *s, uint32_t n)
{
	struct apr_rc c;
	uint32_t k;

	pin(2);
	apr_rc_init(&c, r->req, r->res, &r->g);
	while (!__atomic_load_n(&s->go, __ATOMIC_ACQUIRE))
		apr_cpu_relax();
	for (k = 0; k < n + WARM; k++) {
		uint64_t t0 = now_ns();
		struct apr_sqe *q = apr_rc_sqe(&c);

		q->op = APR_OP_NOP;
		q->user_data = k;
		apr_rc_publish(&c, c.sq_tail);
		while (!apr_rc_cq_ready(&c))
			apr_cpu_relax();
		if (apr_rc_cqe(&c, 0)->user_data != k)
			_exit(1);
		if (k >= WARM)
			s->ns[s->n++] = (uint32_t)(now_ns() - t0);
		(void)apr_rc_cq_advance(&c, 1);
	}
	_exit(0);
}

static int serve(struct ring *r, uint32_t n, uint32_t *ask, const uint32_t *answer, uint32_t k)
{
	struct apr_rd d;
	uint32_t done;

	apr_rd_init(&d, r->req, r->res, &r->g);
	for (done = 0; done < n + WARM; done++) {
		struct apr_cqe e = {.type = APR_CQE_TOKEN};
		struct apr_sqe q;
		int ready;

		while (!(ready = apr_rd_sq_ready(&d)))
			apr_cpu_relax();
		if (ready < 0 || apr_rd_sq_peek(&d, &q) || apr_rd_cq_refresh(&d))
			return -EPROTO;
		apr_rd_sq_advance(&d);
		ask_gpu(ask, answer, ++k);
		e.user_data = q.user_data;
		e.res = (int32_t)k;
		apr_rd_cq_write(&d, &e);
		apr_rd_cq_publish(&d);
	}
	return 0;
}

static void *shared_memory(size_t n)
{
	void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		abort();
	return p;
}

static int measure(struct ring *r, struct shared *s, pid_t child, uint32_t n)
{
	uint32_t *ask, *answer, *ns = calloc(n, sizeof *ns), k;
	int e = ns ? gpu_echo_start(&ask, &answer) : -ENOMEM, status = 1;

	if (!e) {
		pin(0);
		for (k = 1; k <= WARM; k++)
			ask_gpu(ask, answer, k);
		for (; k <= WARM + n; k++) {
			uint64_t t0 = now_ns();

			ask_gpu(ask, answer, k);
			ns[k - WARM - 1] = (uint32_t)(now_ns() - t0);
		}
		report("the host thread's load", ns, n);
		__atomic_store_n(&s->go, 1, __ATOMIC_RELEASE); /* pairs with client's acquire */
		e = serve(r, n, ask, answer, k);
		__atomic_store_n(ask, GPU_ECHO_STOP, __ATOMIC_RELEASE);
		if (!e && waitpid(child, &status, 0) == child && status == 0)
			report("the client's load", s->ns, s->n);
		e = e ? e : status ? -EPROTO : gpu_echo_end();
	}
	free(ns);
	return e;
}

int main(int argc, char **argv)
{
	uint32_t n = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 20000;
	struct shared *s = shared_memory(sizeof *s);
	struct apr_wish wish = {0};
	struct ring r;
	pid_t child;
	int e;

	if (n < 1 || n > sizeof s->ns / sizeof *s->ns || apr_geometry_plan(&wish, NULL, &r.g, NULL)) {
		fprintf(stderr, "usage: gpu_ring [ROUND TRIPS]\n");
		return 2;
	}
	r.req = shared_memory(r.g.req_size);
	r.res = shared_memory(r.g.res_size);
	child = fork(); /* before CUDA is touched */
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		client(&r, s, n);
	}
	e = child < 0 ? -errno : measure(&r, s, child, n);
	if (e && child > 0) {
		kill(child, SIGKILL);
		waitpid(child, NULL, 0);
	}
	if (e)
		fprintf(stderr, "gpu_ring: %s%s\n", e == -ENODEV ? "SKIPPED: " : "", e == -ENODEV ? "no device here" : strerror(-e));
	return e == -ENODEV ? 77 : e != 0;
}
