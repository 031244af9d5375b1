/* SPDX-License-Identifier: MIT */
/* The tables that the preloaded library and the test that preloads it share: mapped files, zero at first. */
#ifndef APR_TEST_INJECT_H
#define APR_TEST_INJECT_H

#include <stdint.h>

#define FAULT_ROWS 8192u
#define FAULT_PROCESSES 4096u

struct fault_row {
	uint64_t stack, n; /* 0 = free; its calls so far */
};

struct fault_counts {
	struct fault_row row[FAULT_ROWS];
};

struct fault_heap_row { /* of process pid, at pid % FAULT_PROCESSES */
	int32_t pid, blocks;
	int64_t bytes;
};

struct fault_heap {
	struct fault_heap_row row[FAULT_PROCESSES];
};

#endif
