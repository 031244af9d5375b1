/* SPDX-License-Identifier: MIT */
/*
 * What every test program shares: a list of named tests run by CUnit in one process.
 *
 * Owns: registration, the closing report, the descriptor and heap checks around
 * each test, paths of fixtures. Does not own timeouts or the process a suite
 * (tests/runner.c). A suite ends in TEST_MAIN("folder/name", tests).
 *
 * After each test the number of open descriptors and the bytes in use on the heap
 * must be what they were before it (KEEPS_HEAP for a test that warms a cache on
 * purpose; say why beside it). Skipping: SKIP("reason") returns from the test and
 * is counted; a suite in which all tests skip exits 77.
 */
#ifndef APR_TESTS_HARNESS_H
#define APR_TESTS_HARNESS_H

#include <CUnit/CUnit.h>
#include <stddef.h>

struct apr_test {
	const char *name;
	void (*run)(void);
	unsigned flags;
};
#define KEEPS_HEAP 1u

int apr_test_main(const char *suite, const struct apr_test *tests, size_t n, int argc, char **argv);
void apr_test_skip(const char *why);

/* Path of a fetched model file ("SmolLM2-135M-Instruct.Q4_1.gguf"), or NULL where it is not there. Static storage. */
const char *apr_test_model(const char *file);
/* A fresh folder for this test program, removed at its end. */
const char *apr_test_tmpdir(void);
/* build/…/ folder of the programs under test (from argv[0]): "…/aprd" etc. */
const char *apr_test_program(const char *name);

#define SMOLLM2 "SmolLM2-135M-Instruct.Q4_1.gguf"
#define GEMMA3 "gemma-3-270m-q4_k_m.gguf"

#define SKIP(why) \
	do { \
		apr_test_skip(why); \
		return; \
	} while (0)
#define TEST_MAIN(suite, tests) \
	int main(int argc, char **argv) \
	{ \
		return apr_test_main(suite, tests, sizeof(tests) / sizeof((tests)[0]), argc, argv); \
	}

#endif
