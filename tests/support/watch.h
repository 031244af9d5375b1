/* SPDX-License-Identifier: MIT */
/*
 * A watch over the CUDA driver calls of another process: tests/graphs/watch_driver.c,
 * a library that the driver loads into it (CUDA_INJECTION64_PATH), and the asking side.
 *
 * Owns: the page that both map, and the asking side's calls. Does not own what is
 * counted as what (watch_driver.c).
 */
#ifndef APR_TEST_WATCH_H
#define APR_TEST_WATCH_H

#include <stdbool.h>
#include <stdint.h>

#define WATCH_ENV "APR_WATCH_DRIVER" /* path of the page */

enum watch_state { WATCH_NONE, WATCH_ON, WATCH_NO_CUPTI, WATCH_FAILED };
enum watch_kind { WATCH_ALLOC, WATCH_FREE, WATCH_SYNC, WATCH_LEGACY, WATCH_CREATE, WATCH_LAUNCH, WATCH_COPY, WATCH_OTHER, WATCH_KINDS };
/* What a process may not do after READY: the first WATCH_FORBIDDEN kinds */
#define WATCH_FORBIDDEN 5

enum watch_order {
	WATCH_RESET = 1,   /* counts to zero */
	WATCH_MEMORY,      /* free_bytes: cuMemGetInfo */
	WATCH_PLANT_ALLOC, /* does what is forbidden, to be caught */
	WATCH_PLANT_FREE,
	WATCH_PLANT_SYNC,
	WATCH_PLANT_LEGACY,
	WATCH_PLANT_CREATE,
	WATCH_ARM,         /* an event before the next graph, another after each from then on */
	WATCH_SPAN         /* span_us: between the two */
};

struct watch_page {
	uint32_t state;        /* enum watch_state; stored with release by the library when the rest is set up */
	uint32_t order, what;  /* order: stored with release by the asker after what; loaded with acquire there */
	uint32_t done;         /* the last order carried out: stored with release there, loaded with acquire by the asker */
	int32_t result;        /* of it: a CUresult */
	float span_us;
	uint64_t free_bytes;
	uint64_t count[WATCH_KINDS]; /* atomic adds; they order nothing */
	char first[WATCH_KINDS][64]; /* name of the first call of each kind since RESET */
};

struct watch {
	struct watch_page *page;
	char path[200];
};
/* Makes the page in folder dir and sets both variables for the programs started from now on. 0 or -errno. */
int watch_open(struct watch *w, const char *dir, const char *library);
void watch_close(struct watch *w); /* also unsets them */
/* Carries one order out; the library's result, or -ETIMEDOUT. */
int watch_order(struct watch *w, enum watch_order what);
enum watch_state watch_state(const struct watch *w);
const char *watch_kind_name(unsigned kind);

#endif
