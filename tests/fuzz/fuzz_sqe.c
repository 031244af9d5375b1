/* SPDX-License-Identifier: MIT */
/* Owns: the target for submission entries and parameter lists. See fuzz.h. */
#include "daemon/request.h" /* APR_FEATURES: what this daemon says in WELCOME */
#include "shm/check.h"
#include "shm/wire.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

/* What an accepted list says lies within it. */
static void within(const struct apr_param_view *v, const uint8_t *list, uint32_t n)
{
	const uint8_t *end = list + n, *text;
	uint32_t pos = 0, len, count = 0;

	MUST(!v->bias || ((const uint8_t *)v->bias >= list && (const uint8_t *)(v->bias + v->n_bias) <= end));
	MUST(!v->stop_ids || (const uint8_t *)(v->stop_ids + v->n_stop_ids) <= end);
	MUST(!v->resume || (const uint8_t *)(v->resume + v->n_resume) <= end);
	MUST(!v->sampling || (const uint8_t *)(v->sampling + 1) <= end);
	MUST(!v->trace_id || v->trace_id + 16 <= end);
	while (apr_param_stop(v, &pos, &text, &len)) {
		MUST(text >= list && text + len <= end);
		MUST(++count <= v->n_stop);
	}
}

int fuzz_sqe(const uint8_t *data, size_t n)
{
	struct apr_check c = { 8192, 65536, 32768, { APR_OPCODES, 0 }, APR_FEATURES, 1 };
	struct apr_fault f = { 0 };
	struct apr_param_view v;
	struct apr_sqe s;
	char words[400];

	if (n < sizeof(s))
		return 0;
	memcpy(&s, data, sizeof(s));
	apr_wire_sqe(&s, words, sizeof(words));
	MUST(memchr(words, 0, sizeof(words)));
	int e = apr_check_sqe(&s, &c, &f);
	if (e) {
		MUST(e == f.err && f.why && f.at < 64);
	} else {
		MUST((uint64_t)s.in_off + s.in_len <= (uint64_t)c.arena_off + c.arena_len || !s.in_len);
		MUST((uint64_t)s.par_off + s.par_len <= (uint64_t)c.arena_off + c.arena_len || !s.par_len);
		MUST(s.in_len <= c.max_input);
	}
	uint32_t len = (uint32_t)(n - sizeof(s));
	uint64_t *list = malloc(len + 8);
	if (!list)
		return 0;
	memcpy(list, data + sizeof(s), len);
	for (uint8_t op = 0; op < 9; op++) {
		memset(&f, 0, sizeof(f));
		e = apr_check_params(list, len, op, APR_FEATURES, &v, &f);
		if (e)
			MUST(e == f.err && f.why);
		else
			within(&v, (uint8_t *)list, len);
	}
	free(list);
	return 0;
}
