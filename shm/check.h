/* SPDX-License-Identifier: MIT */
/*
 * Judging what a client sent: a copied submission entry, a copied parameter
 * list, a HELLO. Pure functions over private copies.
 *
 * Owns: every rule of the wire that needs no model and no session state. Does
 * not own: ids against a vocabulary, handles, duplicates, quotas (daemon/).
 */
#ifndef APR_SHM_CHECK_H
#define APR_SHM_CHECK_H

#include <apr/abi.h>
#include <stdbool.h>

/* What was wrong. `at` goes into the FINAL's pos. */
struct apr_fault {
	int err;         /* -EINVAL, -EOPNOTSUPP, -E2BIG, -EBADMSG ... */
	uint32_t at;     /* byte offset of the culprit: below 64 in the SQE, else 64 + offset in the parameter list */
	const char *why; /* constant, one line */
};

struct apr_check {
	uint32_t arena_off, arena_len; /* request arena */
	uint32_t max_input;
	uint64_t opcodes[2]; /* as in WELCOME */
	uint64_t features;   /* as in WELCOME */
	uint8_t prio_max;    /* 0: only 0 allowed ... 2: all; a higher one is lowered, not refused */
};

/* 0 or f->err. */
int apr_check_sqe(const struct apr_sqe *s, const struct apr_check *c, struct apr_fault *f);

struct apr_bias {
	uint32_t id;
	float bias;
};

/* A parameter list taken apart; pointers lead into the list. Absent = NULL or 0. */
struct apr_param_view {
	const struct apr_sampling *sampling;
	uint32_t logprobs;
	const struct apr_bias *bias;
	uint32_t n_bias;
	const uint8_t *stop; /* {u32 len; bytes; pad to 4}[n_stop]: apr_param_stop walks it */
	uint32_t stop_bytes, n_stop;
	const uint32_t *stop_ids;
	uint32_t n_stop_ids;
	const uint32_t *resume;
	uint32_t n_resume;
	const uint8_t *trace_id; /* 16 bytes */
	uint32_t at[12]; /* where each type's data lies, as apr_fault.at, for faults found later; 0 = absent */
};

/* list: 8-aligned private copy of len bytes. op: which parameters make sense for (GENERATE, CHAT:
 * all; SCORE: LOGPROBS, TRACE_ID; others TRACE_ID). 0 or f->err. */
int apr_check_params(const void *list, uint32_t len, uint8_t op, uint64_t features, struct apr_param_view *v,
		     struct apr_fault *f);
/* Walks the stop strings: *pos starts at 0. False at the end. */
bool apr_param_stop(const struct apr_param_view *v, uint32_t *pos, const uint8_t **text, uint32_t *len);

/* A whole HELLO datagram of n bytes: magic, type, size, version, zero fields, needed features.
 * 0; -EPROTO not a HELLO; -EPROTONOSUPPORT major; -EOPNOTSUPP a needed feature; -EINVAL. */
int apr_check_hello(const void *buf, size_t n, uint64_t features, struct apr_hello *out, struct apr_fault *f);

#endif
