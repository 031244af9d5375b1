/* SPDX-License-Identifier: MIT */
/*
 * How many CPUs this process may use: its affinity and its cgroup's quota.
 *
 * Owns: reading /proc/self/cgroup and cpu.max (v2) or cpu.cfs_quota_us (v1) on the
 * way from the process's group to the root. Does not own threads.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpus.h"
#include "kernels/cpu/pool.h"

static unsigned affinity_cpus(void)
{
	for (int n = 1024; n <= 1 << 20; n *= 4) {
		cpu_set_t *set = CPU_ALLOC(n);
		size_t size = CPU_ALLOC_SIZE(n);
		int count = 0, error = 0;

		if (!set)
			break;
		if (sched_getaffinity(0, size, set) == 0)
			count = CPU_COUNT_S(size, set);
		else
			error = errno;
		CPU_FREE(set);
		if (error != EINVAL) /* EINVAL: the kernel's mask is wider */
			return count > 0 ? (unsigned)count : 1;
	}
	return 1;
}

static int read_line(const char *path, char *buf, size_t size)
{
	FILE *f = fopen(path, "re");
	char *ok;

	if (!f)
		return 0;
	ok = fgets(buf, (int)size, f);
	(void)fclose(f);
	return ok != NULL;
}

/* CPUs that quota of each period amounts to, rounded up; 0 where there is no limit */
static unsigned cpus_of(long long quota, long long period)
{
	if (quota <= 0 || period <= 0)
		return 0;
	quota = (quota - 1) / period + 1;
	return quota > 65535 ? 65535 : (unsigned)quota;
}

static unsigned group_limit(const char *dir, int v2)
{
	char path[4200], line[64], *end;
	long long quota;

	if (v2) {
		(void)snprintf(path, sizeof path, "%s/cpu.max", dir);
		if (!read_line(path, line, sizeof line) || strncmp(line, "max", 3) == 0)
			return 0;
		quota = strtoll(line, &end, 10);
		return cpus_of(quota, strtoll(end, NULL, 10));
	}
	(void)snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", dir);
	if (!read_line(path, line, sizeof line))
		return 0;
	quota = strtoll(line, NULL, 10);
	(void)snprintf(path, sizeof path, "%s/cpu.cfs_period_us", dir);
	if (!read_line(path, line, sizeof line))
		return 0;
	return cpus_of(quota, strtoll(line, NULL, 10));
}

/* The smallest limit of root/group and every folder above it; 0 = none */
static unsigned tree_limit(const char *root, const char *group, int v2)
{
	char dir[4160];
	size_t root_len = strlen(root);
	unsigned best = 0;
	int len = snprintf(dir, sizeof dir, "%s%s", root, group);

	if (len < 0 || (size_t)len >= sizeof dir)
		return 0;
	for (;;) {
		unsigned limit = group_limit(dir, v2);
		char *slash;

		if (limit && (!best || limit < best))
			best = limit;
		if (strlen(dir) <= root_len)
			return best;
		slash = strrchr(dir, '/');
		*slash = 0;
		if (strlen(dir) < root_len)
			return best;
	}
}

static int has_cpu_controller(const char *list, const char *end)
{
	while (list < end) {
		size_t n = strcspn(list, ",:");

		if (n == 3 && memcmp(list, "cpu", 3) == 0)
			return 1;
		list += n + 1;
	}
	return 0;
}

unsigned apr_cpus_quota(const char *cgroup_file, const char *root)
{
	FILE *f = fopen(cgroup_file, "re");
	char line[4096], v1[256], v1_both[256];
	unsigned best = 0;

	if (!f)
		return 0;
	(void)snprintf(v1, sizeof v1, "%s/cpu", root);
	(void)snprintf(v1_both, sizeof v1_both, "%s/cpu,cpuacct", root);
	while (fgets(line, sizeof line, f)) { /* id:controllers:path */
		char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
		unsigned limit = 0;

		if (!path)
			continue;
		path++;
		path[strcspn(path, "\n")] = 0;
		if (path == list + 2) {
			limit = tree_limit(root, path, 1);
		} else if (has_cpu_controller(list + 1, path - 1)) {
			limit = tree_limit(v1, path, 0);
			if (!limit)
				limit = tree_limit(v1_both, path, 0);
		}
		if (limit && (!best || limit < best))
			best = limit;
	}
	(void)fclose(f);
	return best;
}

unsigned apr_pool_usable_cpus(void)
{
	unsigned cpus = affinity_cpus(), quota = apr_cpus_quota("/proc/self/cgroup", "/sys/fs/cgroup");

	return quota && quota < cpus ? quota : cpus;
}
