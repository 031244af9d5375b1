/* SPDX-License-Identifier: MIT */
/* The test harness: see tests/harness.h. */
#include "tests/harness.h"

#include <CUnit/Basic.h>
#include <dirent.h>
#include <ftw.h>
#include <libgen.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct { /* the one context of a test process */
	const struct apr_test **queue; /* in the order of their running */
	const struct apr_test *current;
	size_t n_queue;
	unsigned skipped, run;
	char build_dir[PATH_MAX];
	char tmpdir[64];
} harness;

static unsigned open_descriptors(void)
{
	unsigned n = 0;
	DIR *d = opendir("/proc/self/fd");

	if (!d)
		return 0;
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static size_t heap_in_use(void)
{
	/* Sanitizers replace malloc: mallinfo2 then says 0 and their own leak check takes over. */
	struct mallinfo2 m = mallinfo2();

	return m.uordblks + m.hblkhd;
}

void apr_test_skip(const char *why)
{
	harness.skipped++;
	printf("\n  SKIPPED %s: %s\n", harness.current ? harness.current->name : "?", why);
}

static void run_next(void)
{
	unsigned fds = open_descriptors(), skipped = harness.skipped;
	unsigned failures = CU_get_number_of_failures();
	size_t heap, after;

	harness.current = harness.queue[harness.run++]; /* before it runs: a fatal assertion does not come back here */
	heap = heap_in_use();
	harness.current->run();
	CU_ASSERT_EQUAL(open_descriptors(), fds);
	after = heap_in_use();
	/* A failed assertion is kept by CUnit on the heap, so only a clean test is judged. */
	if (!(harness.current->flags & KEEPS_HEAP) && skipped == harness.skipped && failures == CU_get_number_of_failures() &&
	    after > heap) {
		fprintf(stderr, "  %s: %zu bytes of heap not given back\n", harness.current->name, after - heap);
		CU_FAIL("heap not given back");
	}
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static void remove_tmpdir(void)
{
	if (harness.tmpdir[0])
		nftw(harness.tmpdir, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

const char *apr_test_tmpdir(void)
{
	if (!harness.tmpdir[0]) {
		strcpy(harness.tmpdir, "/tmp/apr-test.XXXXXX");
		if (!mkdtemp(harness.tmpdir)) {
			perror("mkdtemp");
			exit(1);
		}
		atexit(remove_tmpdir);
	}
	return harness.tmpdir;
}

const char *apr_test_model(const char *file)
{
	static char path[PATH_MAX];
	const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

	if (cache && *cache)
		snprintf(path, sizeof path, "%s/aprd/models/%s", cache, file);
	else
		snprintf(path, sizeof path, "%s/.cache/aprd/models/%s", home ? home : "", file);
	return access(path, R_OK) ? NULL : path;
}

const char *apr_test_program(const char *name)
{
	static char path[PATH_MAX + 64];

	snprintf(path, sizeof path, "%s/%s", harness.build_dir, name);
	return path;
}

/* The program lies in BUILD/tests/FOLDER/NAME: three up is the build folder. */
static void find_build_dir(const char *argv0)
{
	char real[PATH_MAX];

	if (!realpath("/proc/self/exe", real) && !realpath(argv0, real))
		return;
	snprintf(harness.build_dir, sizeof harness.build_dir, "%s", dirname(dirname(dirname(real))));
}

/* glibc counts chunks in a thread's cache as in use, so that the heap check needs a malloc without such
 * caches: a tunable, read at start alone. */
static void without_thread_cache(char **argv)
{
	if (getenv("GLIBC_TUNABLES"))
		return;
	setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1);
	execv("/proc/self/exe", argv); /* where that fails, the check is less exact */
}

int apr_test_main(const char *suite, const struct apr_test *tests, size_t n, int argc, char **argv)
{
	CU_pSuite s;
	unsigned failed;

	without_thread_cache(argv);
	setvbuf(stdout, NULL, _IOLBF, 1024);
	find_build_dir(argv[0]);
	if (CU_initialize_registry() != CUE_SUCCESS)
		return 1;
	s = CU_add_suite(suite, NULL, NULL);
	harness.queue = calloc(n, sizeof *harness.queue);
	if (!s || !harness.queue)
		return 1;
	/* A name on the command line runs that test alone. CUnit runs them in the order added. */
	for (size_t i = 0; i < n; i++) {
		if (argc > 1 && strcmp(argv[1], tests[i].name) != 0)
			continue;
		harness.queue[harness.n_queue++] = &tests[i];
		CU_add_test(s, tests[i].name, run_next);
	}
	CU_basic_set_mode(CU_BRM_VERBOSE);
	CU_basic_run_tests();
	failed = CU_get_number_of_tests_failed();
	printf("%s: %u passed, %u failed, %u skipped\n", suite, harness.run - failed - harness.skipped, failed, harness.skipped);
	CU_cleanup_registry();
	free(harness.queue);
	if (failed || !harness.n_queue)
		return 1;
	return harness.skipped == harness.run ? 77 : 0;
}
