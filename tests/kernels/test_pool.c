/* SPDX-License-Identifier: MIT */
/*
 * The compute pool: each item once, no busy idling, CPUs as affinity and quota allow.
 */
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cpu/cpus.h"
#include "kernels/cpu/pool.h"
#include "tests/harness.h"

struct counts {
	uint32_t plain[512]; /* not atomic: the pool must order them */
	_Atomic unsigned bad_worker;
	unsigned threads;
};

static void count(void *arg, uint32_t i, unsigned worker)
{
	struct counts *c = arg;

	c->plain[i]++;
	if (worker >= c->threads)
		atomic_fetch_add(&c->bad_worker, 1);
}

static void each_item_once(void)
{
	for (unsigned threads = 1; threads <= 6; threads++) {
		struct apr_pool *p;
		struct counts c = {.threads = threads};
		uint32_t n, wrong = 0, regions[513] = {0};

		CU_ASSERT_EQUAL_FATAL(apr_pool_new(&p, threads), 0);
		CU_ASSERT_EQUAL(apr_pool_threads(p), threads);
		for (unsigned round = 0; round < 1500; round++) {
			n = round * 7 % 513;
			regions[n]++;
			apr_pool_run(p, n, count, &c);
		}
		for (uint32_t i = 0; i < 512; i++) {
			uint32_t want = 0;

			for (n = i + 1; n <= 512; n++)
				want += regions[n];
			wrong += c.plain[i] != want;
		}
		CU_ASSERT_EQUAL(wrong, 0);
		CU_ASSERT_EQUAL(atomic_load(&c.bad_worker), 0);
		apr_pool_free(p);
	}
}

static void no_pool_runs_here(void)
{
	struct counts c = {.threads = 1};

	CU_ASSERT_EQUAL(apr_pool_threads(NULL), 1);
	apr_pool_run(NULL, 3, count, &c);
	CU_ASSERT(c.plain[0] == 1 && c.plain[1] == 1 && c.plain[2] == 1 && c.plain[3] == 0);
	CU_ASSERT_EQUAL(atomic_load(&c.bad_worker), 0);
	apr_pool_free(NULL);
}

/* What a region wrote is seen by the next, whoever runs it: a chain over many regions. */
struct chain {
	uint64_t v[64], next[64];
};

static void chain_step(void *arg, uint32_t i, unsigned worker)
{
	struct chain *c = arg;

	(void)worker;
	c->next[i] = c->v[i] * 3 + c->v[(i + 1) % 64];
}

static void regions_are_ordered(void)
{
	struct chain a = {{0}, {0}}, b;
	struct apr_pool *p;

	CU_ASSERT_EQUAL_FATAL(apr_pool_new(&p, 4), 0);
	for (uint32_t i = 0; i < 64; i++)
		a.v[i] = i;
	b = a;
	for (int round = 0; round < 2000; round++) {
		apr_pool_run(p, 64, chain_step, &a);
		apr_pool_run(NULL, 64, chain_step, &b);
		memcpy(a.v, a.next, sizeof a.v);
		memcpy(b.v, b.next, sizeof b.v);
	}
	CU_ASSERT_EQUAL(memcmp(&a, &b, sizeof a), 0);
	apr_pool_free(p);
}

static double cpu_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void case40_idle_uses_no_cpu(void)
{
	struct apr_pool *p;
	struct counts c = {.threads = 3};
	double before;

	CU_ASSERT_EQUAL_FATAL(apr_pool_new(&p, 3), 0);
	apr_pool_run(p, 64, count, &c);
	usleep(20000);
	before = cpu_seconds();
	usleep(300000);
	CU_ASSERT(cpu_seconds() - before < 0.003); /* a spinner would use 0.3 s or more */
	for (int i = 0; i < 20; i++) { /* asleep each time, woken each time */
		usleep(1000);
		apr_pool_run(p, 64, count, &c);
	}
	CU_ASSERT_EQUAL(c.plain[63], 21);
	apr_pool_free(p);
}

static void case39_affinity_counts(void)
{
	cpu_set_t all, one;

	CU_ASSERT_EQUAL_FATAL(sched_getaffinity(0, sizeof all, &all), 0);
	CU_ASSERT(apr_pool_usable_cpus() >= 1 && apr_pool_usable_cpus() <= (unsigned)CPU_COUNT(&all));
	CPU_ZERO(&one);
	for (int i = 0; i < CPU_SETSIZE && !CPU_COUNT(&one); i++) {
		if (CPU_ISSET(i, &all))
			CPU_SET(i, &one);
	}
	CU_ASSERT_EQUAL(sched_setaffinity(0, sizeof one, &one), 0);
	CU_ASSERT_EQUAL(apr_pool_usable_cpus(), 1);
	CU_ASSERT_EQUAL(sched_setaffinity(0, sizeof all, &all), 0);
}

static void write_file(const char *dir, const char *name, const char *text)
{
	char path[512];
	FILE *f;

	(void)snprintf(path, sizeof path, "%s/%s", dir, name);
	f = fopen(path, "we");
	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	CU_ASSERT(fputs(text, f) >= 0);
	(void)fclose(f);
}

static void case39_quota_counts(void)
{
	char root[256], dir[300], sub[320], file[320];

	(void)snprintf(root, sizeof root, "%s/cg", apr_test_tmpdir());
	(void)snprintf(dir, sizeof dir, "%s/a", root);
	(void)snprintf(sub, sizeof sub, "%s/b", dir);
	CU_ASSERT(!mkdir(root, 0700) && !mkdir(dir, 0700) && !mkdir(sub, 0700));
	(void)snprintf(file, sizeof file, "%s/self", root);

	write_file(root, "self", "0::/a/b\n");
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 0); /* no cpu.max at all */
	write_file(sub, "cpu.max", "max 100000\n");
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 0);
	write_file(sub, "cpu.max", "250000 100000\n"); /* 2.5 CPUs */
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 3);
	write_file(dir, "cpu.max", "200000 100000\n"); /* a parent's limit holds too */
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 2);
	write_file(root, "cpu.max", "50000 100000\n"); /* half a CPU is one thread */
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 1);
	write_file(root, "self", "0::/\n");
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 1);
	write_file(root, "cpu.max", "junk\n");
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 0);

	(void)snprintf(dir, sizeof dir, "%s/cpu", root); /* version 1 */
	(void)snprintf(sub, sizeof sub, "%s/g", dir);
	CU_ASSERT(!mkdir(dir, 0700) && !mkdir(sub, 0700));
	write_file(root, "self", "5:memory:/g\n4:cpuacct,cpu:/g\n");
	write_file(sub, "cpu.cfs_quota_us", "-1\n");
	write_file(sub, "cpu.cfs_period_us", "100000\n");
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 0);
	write_file(sub, "cpu.cfs_quota_us", "400000\n");
	CU_ASSERT_EQUAL(apr_cpus_quota(file, root), 4);
	CU_ASSERT_EQUAL(apr_cpus_quota("/nonexistent/cgroup", root), 0);
}

static void too_many_threads_is_refused(void)
{
	struct apr_pool *p = (struct apr_pool *)&p;

	CU_ASSERT_EQUAL(apr_pool_new(&p, 1u << 20), -EAGAIN);
	CU_ASSERT_PTR_NULL(p);
}

static const struct apr_test tests[] = {
	{"no_pool_runs_here", no_pool_runs_here, 0},
	{"each_item_once", each_item_once, KEEPS_HEAP}, /* glibc keeps a few thread-local blocks for later threads */
	{"regions_are_ordered", regions_are_ordered, KEEPS_HEAP},
	{"case40_idle_uses_no_cpu", case40_idle_uses_no_cpu, KEEPS_HEAP},
	{"case39_affinity_counts", case39_affinity_counts, 0},
	{"case39_quota_counts", case39_quota_counts, KEEPS_HEAP}, /* the test's folder is made on first use */
	{"too_many_threads_is_refused", too_many_threads_is_refused, 0},
};
TEST_MAIN("kernels/pool", tests)
