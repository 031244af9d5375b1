/* SPDX-License-Identifier: MIT */
/* Owns: the target for frames and for what a session wishes. See fuzz.h. */
#include "daemon/request.h" /* APR_FEATURES: what this daemon says in WELCOME */
#include "shm/check.h"
#include "shm/region.h"
#include "shm/wire.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

int fuzz_hello(const uint8_t *data, size_t n)
{
	struct apr_fault f = { 0 };
	struct apr_hello h;
	struct apr_geometry g;
	const char *why = NULL;
	char words[400];

	apr_wire_frame(data, n, words, sizeof(words));
	MUST(memchr(words, 0, sizeof(words)));
	int e = apr_check_hello(data, n, APR_FEATURES, &h, &f);
	if (e) {
		MUST(e == f.err && f.why);
		return 0;
	}
	struct apr_wish wish = { h.sq_entries, h.cq_entries, h.req_size, h.res_size, h.sqe_size, h.cqe_size };
	e = apr_geometry_plan(&wish, NULL, &g, &why);
	if (e) {
		MUST(why);
		return 0;
	}
	MUST((uint64_t)g.req_arena_off + g.req_arena_len <= g.req_size);
	MUST((uint64_t)g.res_arena_off + g.res_arena_len <= g.res_size);
	MUST((uint64_t)g.sq_off + (uint64_t)g.sq_entries * sizeof(struct apr_sqe) <= g.req_arena_off);
	MUST((uint64_t)g.cq_off + (uint64_t)g.cq_entries * sizeof(struct apr_cqe) <= g.res_arena_off);
	MUST(g.max_inflight && g.max_inflight <= g.cq_entries / 2);
	MUST(!(g.sq_entries & (g.sq_entries - 1)) && !(g.cq_entries & (g.cq_entries - 1)));
	return 0;
}
