/* SPDX-License-Identifier: MIT */
/*
 * One submission entry from its acceptance to its last entry, and the sequences that
 * answer it.
 *
 * Owns: struct request, struct run, their allocation, the table of unfinished
 * requests, deadlines. Does not own how entries are written (deliver.c), input is
 * taken in (intake.c), or runs are scheduled (scheduler.c). Core thread, but for the
 * fields that the intake fills in before it posts.
 */
#ifndef APRD_REQUEST_H
#define APRD_REQUEST_H

#include "daemon/models.h"
#include "daemon/session.h"
#include "daemon/stream.h"

struct core;

/* what WELCOME says is built */
#define APR_FEATURES                                                                                                   \
	(APR_FEAT_SAMPLING | APR_FEAT_LOGPROBS | APR_FEAT_SAMPLES | APR_FEAT_HANDLES | APR_FEAT_REPLAY | APR_FEAT_MESSAGES | APR_FEAT_VOCAB | \
	 APR_FEAT_FORCED)
#define APR_OPCODES (UINT64_C(1) << APR_OP_NOP | UINT64_C(1) << APR_OP_GENERATE | UINT64_C(1) << APR_OP_CHAT | \
		     UINT64_C(1) << APR_OP_SCORE | \
		     UINT64_C(1) << APR_OP_TOKENIZE | UINT64_C(1) << APR_OP_DETOKENIZE | UINT64_C(1) << APR_OP_CANCEL | \
		     UINT64_C(1) << APR_OP_FREE)

static inline bool op_generates(uint8_t op)
{
	return op == APR_OP_GENERATE || op == APR_OP_CHAT;
}

enum run_state { RUN_WAITING, RUN_ACTIVE, RUN_FLUSHING, RUN_DONE };

struct run { /* one sample of a GENERATE, or a SCORE */
	struct request *r;
	struct apr_seq *seq; /* ACTIVE alone */
	struct stream text;
	enum run_state state;
	enum apr_finish finish;
	uint16_t sample;
	struct batch_run b; /* ACTIVE alone */
	uint32_t pages;     /* counted as its identity's */
	uint32_t *ids;  /* NO_STREAM */
	uint32_t n_ids, cap_ids, sent_ids;
	uint32_t prompt, cached;
	uint64_t spoke; /* ns: its last token */
};

struct request {
	struct session *s;
	struct served *model; /* a reference is held; NULL where none is needed */
	struct apr_sqe sqe;
	struct request *table_next, *job_next;
	struct batch_req b;
	uint64_t scope; /* of the prefix cache */

	uint64_t accepted, started, first, ended; /* ns; 0 = not yet */
	uint64_t deadline;
	uint32_t timer; /* its place in the heap, + 1 */

	/* intake */
	uint8_t *params, *input; /* private copies */
	struct apr_param_view view;
	uint32_t *ids;
	uint32_t n_ids;
	uint64_t *kinds;       /* of ids: set where an earlier turn generated them; NULL: nowhere */
	uint64_t handle;       /* of the conversation that it keeps, or will */
	bool copy_here;        /* the intake copies, and the session's SQ waits for it */
	struct apr_fault fault;
	char words[192];       /* fault.why where it is not constant */
	int copy_err;
	struct mail copied, taken_in;
	bool at_intake;

	/* what is to be delivered of TOKENIZE, DETOKENIZE and SCORE: whole units of out */
	uint8_t *out;
	uint32_t out_len, out_pos, out_cap;
	uint32_t delivered; /* ids or bytes or positions so far */
	uint16_t out_fmt;

	struct apr_sample_params sampling;
	bool ignore_eos, draining; /* draining: all is computed, entries wait for room */
	bool parked, gave_pages;
	uint64_t parked_at;
	bool finished, counted; /* counted: among its identity's queued tokens */
	int result; /* what the FINAL will say */
	struct stop *stops; /* of view, for all runs */
	struct run *runs;
	uint32_t n_runs, admitted, done;
	uint32_t generated;
	uint32_t *bias_id;
	float *bias;
};

struct request *request_new(struct core *c, struct session *s, const struct apr_sqe *sqe); /* NULL: no memory */
struct request *request_find(const struct session *s, uint64_t user_data);
/* Its last entry, whatever state it is in, and its end. err 0 or -errno; r->words or why (may be NULL) is the text. */
void request_finish(struct core *c, struct request *r, int err, enum apr_finish finish, const char *why);
/* Its end without an entry: the session is gone. */
void request_forget(struct core *c, struct request *r);
/* A finished one comes back from the intake. */
void request_returned(struct request *r);
/* All of a session's, with the given FINAL; gone: without. */
void request_end_all(struct core *c, struct session *s, int err, enum apr_finish finish, const char *why);

void timer_set(struct core *c, struct request *r);
void timer_clear(struct core *c, struct request *r);
bool timers_run(struct core *c); /* true: a deadline was over */
uint64_t timers_next(const struct core *c); /* ns; UINT64_MAX none */

#endif
