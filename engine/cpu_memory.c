/* SPDX-License-Identifier: MIT */
/* Host memory: see cpu_memory.h. */
#include "engine/cpu_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "engine/internal.h"

#define HUGE_FROM (UINT64_C(4) << 20) /* lines from here on ask for huge pages */

static uint64_t read_number(const char *path, uint64_t otherwise)
{
	char buf[64], *end;
	FILE *f = fopen(path, "re");
	uint64_t v;

	if (!f)
		return otherwise;
	if (!fgets(buf, sizeof buf, f)) {
		fclose(f);
		return otherwise;
	}
	fclose(f);
	v = strtoull(buf, &end, 10);
	return end == buf ? otherwise : v; /* "max" is no number */
}

static uint64_t mem_available(void)
{
	char line[256];
	uint64_t kib = UINT64_MAX / 1024;
	FILE *f = fopen("/proc/meminfo", "re");

	if (!f)
		return UINT64_MAX;
	while (fgets(line, sizeof line, f))
		if (!strncmp(line, "MemAvailable:", 13))
			kib = strtoull(line + 13, NULL, 10);
	fclose(f);
	return kib * 1024;
}

/* What the unified hierarchy still grants this process's group; UINT64_MAX where it sets no limit. */
static uint64_t cgroup_available(void)
{
	char line[1024], path[1200], *nl;
	uint64_t max, now;
	FILE *f = fopen("/proc/self/cgroup", "re");

	if (!f)
		return UINT64_MAX;
	path[0] = 0;
	while (fgets(line, sizeof line, f)) {
		if (strncmp(line, "0::", 3) != 0)
			continue;
		nl = strchr(line, '\n');
		if (nl)
			*nl = 0;
		snprintf(path, sizeof path, "/sys/fs/cgroup%s", strcmp(line + 3, "/") ? line + 3 : "");
	}
	fclose(f);
	if (!path[0])
		return UINT64_MAX;
	nl = path + strlen(path);
	snprintf(nl, sizeof path - (size_t)(nl - path), "/memory.max");
	max = read_number(path, UINT64_MAX);
	snprintf(nl, sizeof path - (size_t)(nl - path), "/memory.current");
	now = read_number(path, 0);
	if (max == UINT64_MAX)
		return max;
	return max > now ? max - now : 0;
}

uint64_t apr_cpu_memory_available(void)
{
	uint64_t a = mem_available(), b = cgroup_available();
	struct rlimit as;

	if (b < a)
		a = b;
	if (getrlimit(RLIMIT_AS, &as) == 0 && as.rlim_cur != RLIM_INFINITY && as.rlim_cur < a)
		a = as.rlim_cur;
	return a;
}

int apr_cpu_memory_reserve(struct apr_plan *plan, char *err, size_t errlen)
{
	uint32_t i;

	for (i = 0; i < plan->n; i++) {
		struct apr_plan_line *l = &plan->line[i];
		void *p;

		if (l->place == APR_PLACE_FILE || l->place == APR_PLACE_HEAP || !l->bytes)
			continue;
		p = mmap(NULL, l->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (p == MAP_FAILED) {
			int rc = apr_engine_fail(-ENOMEM, err, errlen, "%" PRIu64 " bytes for %s: %s", l->bytes, l->purpose,
			                         strerror(errno));

			apr_cpu_memory_release(plan);
			return rc;
		}
		if (l->bytes >= HUGE_FROM)
			(void)madvise(p, l->bytes, MADV_HUGEPAGE); /* a wish */
		/* KV is touched as it fills; all else now, so that no step meets a first touch */
		if (strncmp(l->purpose, "kv", 2) != 0)
			memset(p, 0, l->bytes);
		l->base = p;
	}
	return 0;
}

void apr_cpu_memory_release(struct apr_plan *plan)
{
	uint32_t i;

	for (i = 0; i < plan->n; i++) {
		struct apr_plan_line *l = &plan->line[i];

		if (l->base)
			munmap(l->base, l->bytes);
		l->base = NULL;
	}
}

void apr_cpu_model_name(char *out, size_t len)
{
	char line[256], *s;
	FILE *f = fopen("/proc/cpuinfo", "re");

	snprintf(out, len, "cpu");
	if (!f)
		return;
	while (fgets(line, sizeof line, f)) {
		if (strncmp(line, "model name", 10) != 0)
			continue;
		s = strchr(line, ':');
		line[strcspn(line, "\n")] = 0;
		if (s && s[1])
			snprintf(out, len, "%s", s + 2);
		break;
	}
	fclose(f);
}
