/* SPDX-License-Identifier: MIT */
/*
 * libaprclient: talk to aprd through shared memory.
 *
 * Reads like liburing: get an entry, prepare it, submit, wait, look, mark seen.
 * Above that a handful of one-call conveniences. The wire itself is <apr/abi.h>
 * and aprd-protocol(7).
 *
 * Errors: every call that can fail returns -errno and leaves errno alone. "The
 * call failed" (its return) and "the request failed" (res of its FINAL entry)
 * are two things. Calls with an err buffer fill it with one line on failure.
 *
 * Threads: a handle is for one thread at a time, different handles are
 * independent. With APR_CONNECT_LOCKED a handle may be shared: each call then
 * takes the handle's lock (a wait gives it back while it sleeps), apr_lock and
 * apr_unlock bracket what must go together (get_sqe .. submit; peek .. seen),
 * and the conveniences run one at a time.
 *
 * Forks: in a child of the process that connected every call but apr_close
 * returns -EOWNERDEAD (NULL, 0 where there is no int) and touches nothing of
 * the parent's session; apr_close frees the child's own memory. A new
 * apr_connect in the child works.
 *
 * Signals: no disposition or mask is changed, no SIGPIPE is raised, EINTR is
 * handled inside and timeouts run on in all. No call is async-signal-safe but
 * those marked so.
 *
 * Cancellation (pthread_cancel): no call is a cancellation point but those marked
 * [cancel], which act on a request within 100 ms and leave the handle as if the
 * wait had timed out.
 */
#ifndef APR_CLIENT_H
#define APR_CLIENT_H

#include <apr/abi.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef APR_API
#if defined(__GNUC__)
#define APR_API __attribute__((visibility("default")))
#else
#define APR_API
#endif
#endif

/* The inlines below; a library that exports them for other languages defines this away. */
#ifndef APR_INLINE
#define APR_INLINE static inline
#endif

struct apr;       /* a session with a daemon */
struct apr_admin; /* the admin socket */
struct apr_vocab; /* a model's pieces, mapped */

/* ---- connecting ---------------------------------------------------------- */

#define APR_CONNECT_LOCKED 0x1u       /* the handle may be shared by threads */
#define APR_CONNECT_RECONNECT 0x2u    /* reconnect on demand; see apr_reconnect */
#define APR_CONNECT_RING_ALWAYS 0x4u  /* ring and poll always, as a script would (tests) */

struct apr_opts { /* zero = default, but for spin_us */
	uint32_t size;  /* sizeof(struct apr_opts) */
	uint32_t flags; /* APR_CONNECT_* */
	const char *path; /* NULL: APRD_SOCKET, $XDG_RUNTIME_DIR/aprd/aprd.sock if it exists, /run/aprd/aprd.sock */
	const char *name; /* shown in status; at most 31 bytes; NULL: the program's */
	uint64_t need, want; /* APR_FEAT_*; need unmet is -EOPNOTSUPP */
	uint32_t sq_entries, cq_entries; /* rounded up to a power of two */
	uint32_t req_size, res_size;     /* bytes of the two regions */
	uint32_t wait;    /* APR_WAIT_FUTEX (default) or APR_WAIT_SOCKET (for event loops on apr_fd) */
	int32_t spin_us;  /* poll that long before sleeping; -1 = what the daemon suggests */
	uint32_t connect_ms;   /* the whole handshake; 0 = 5000 */
	uint32_t reconnect_ms; /* how long apr_reconnect tries; 0 = 5000 */
	uint64_t zero[4];
};
#define APR_OPTS_INIT { sizeof(struct apr_opts), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0, 0, { 0, 0, 0, 0 } }

/* opts NULL: all defaults. *c is set on success alone. err may be NULL.
 * -ENOENT, -ECONNREFUSED no daemon; -EACCES; -EPERM the daemon's user is neither root, we, nor the socket's
 * owner; -EDQUOT, -EAGAIN too many connections; -ETIMEDOUT; -EPROTO, -EPROTONOSUPPORT, -EOPNOTSUPP, -EINVAL. */
APR_API int apr_connect(struct apr **c, const struct apr_opts *opts, char *err, size_t errlen);
/* Ends the session; the daemon cancels what is unfinished. NULL is allowed. */
APR_API void apr_close(struct apr *c);
/* The path that opts->path NULL means: into buf; its length or -ENAMETOOLONG. */
APR_API int apr_socket_path(const char *path, char *buf, size_t n);

/* What the daemon granted; valid until close (apr_reconnect updates it). NULL in a forked child. */
APR_API const struct apr_welcome *apr_info(const struct apr *c);
APR_API int apr_has(const struct apr *c, uint64_t feature);  /* 1 all of these bits, 0, -EOWNERDEAD */
APR_API int apr_can(const struct apr *c, unsigned opcode);   /* 1 served, 0, -EOWNERDEAD */
/* Flags of the result header (APR_RES_*), or -errno; async-signal-safe. */
APR_API int apr_state(const struct apr *c);
/* Why the session ended: one line, "" while it lives. Valid until the next call. */
APR_API const char *apr_why(struct apr *c);
/* The pollable descriptor (the session's socket; do not read from it): readable when entries came
 * after apr_arm, or when anything else needs apr_poll. Or -errno. */
APR_API int apr_fd(const struct apr *c);

/* After the daemon ended the session: a new one under the same handle. Requests that were
 * unfinished end with a FINAL of res -ECONNRESET, made by the library; those submitted with
 * APR_SQE_REPLAYABLE are submitted again and go on where they stopped (-ESTALE if the model's
 * receipt changed). Handles of KEEP are gone. A late entry of the old session is never delivered.
 * Tries for reconnect_ms. 0 (also where the session lives), or as apr_connect; the handle then stays
 * dead. apr_fd may be another number afterwards.
 * With APR_CONNECT_RECONNECT apr_get_sqe, apr_submit and the waits call it themselves. */
APR_API int apr_reconnect(struct apr *c, char *err, size_t errlen);

APR_API int apr_lock(struct apr *c);   /* only with APR_CONNECT_LOCKED, else -EINVAL; recursive */
APR_API int apr_unlock(struct apr *c);

/* ---- submitting ---------------------------------------------------------- */

/* The next free entry, zeroed; NULL: queue full, session dead, or
 * forked (apr_submit tells which). The pointer is good until the next apr_submit or apr_cancel. */
APR_API struct apr_sqe *apr_get_sqe(struct apr *c);

/* Room for len bytes of input in the arena; sets in_off and in_len. The caller writes there before
 * apr_submit. 8-aligned. NULL: *e (may be NULL) is -E2BIG above max_input, -ENOBUFS no room now. */
APR_API void *apr_sqe_input(struct apr *c, struct apr_sqe *sqe, size_t len, int *e);
/* The same for a parameter list. */
APR_API void *apr_sqe_param_space(struct apr *c, struct apr_sqe *sqe, size_t len, int *e);

/* Prepare an entry; the input is copied into the arena. generate draws a seed (apr_sqe_seed after it sets another). On failure (-E2BIG, -ENOBUFS) the entry is
 * a NOP with user_data 0 that the caller may prepare anew. They set no user_data. */
APR_API int apr_prep_generate(struct apr *c, struct apr_sqe *sqe, const void *text, size_t len, uint32_t max_tokens);
APR_API int apr_prep_generate_ids(struct apr *c, struct apr_sqe *sqe, const uint32_t *ids, size_t n,
				  uint32_t max_tokens);
/* json[len]: messages for the model's own template, as aprd-protocol(7) has them under MESSAGES. */
APR_API int apr_prep_chat(struct apr *c, struct apr_sqe *sqe, const void *json, size_t len, uint32_t max_tokens);
APR_API int apr_prep_score(struct apr *c, struct apr_sqe *sqe, const uint32_t *ids, size_t n);
APR_API int apr_prep_tokenize(struct apr *c, struct apr_sqe *sqe, const void *text, size_t len);
APR_API int apr_prep_detokenize(struct apr *c, struct apr_sqe *sqe, const uint32_t *ids, size_t n);

APR_INLINE void apr_prep_nop(struct apr_sqe *sqe)
{
	sqe->op = APR_OP_NOP;
}
/* Its answer (ACK): 0 the target's FINAL (-ECANCELED) came before it, -ENOENT no such request. */
APR_INLINE void apr_prep_cancel(struct apr_sqe *sqe, uint64_t target)
{
	sqe->op = APR_OP_CANCEL;
	sqe->arg = target;
}
APR_INLINE void apr_prep_free(struct apr_sqe *sqe, uint64_t handle)
{
	sqe->op = APR_OP_FREE;
	sqe->arg = handle;
}
/* Goes on with a kept conversation: call after apr_prep_generate. */
APR_INLINE void apr_sqe_continue(struct apr_sqe *sqe, uint64_t handle)
{
	sqe->arg = handle;
}
APR_INLINE void apr_sqe_user_data(struct apr_sqe *sqe, uint64_t user_data)
{
	sqe->user_data = user_data;
}
APR_INLINE void apr_sqe_model(struct apr_sqe *sqe, uint32_t model)
{
	sqe->model = model;
}
APR_INLINE void apr_sqe_flags(struct apr_sqe *sqe, unsigned flags)
{
	sqe->flags = (uint16_t)(sqe->flags | flags);
}
APR_INLINE void apr_sqe_timeout(struct apr_sqe *sqe, uint32_t ms)
{
	sqe->timeout_ms = ms;
}
APR_INLINE void apr_sqe_seed(struct apr_sqe *sqe, uint64_t seed)
{
	sqe->seed = seed;
}

/* Publishes what was prepared, as far as credits go: max_inflight unfinished requests, one CANCEL at a
 * time. The number submitted (0 if nothing was prepared); what is left stays prepared.
 * -EBUSY nothing could be: take completions first. -EPIPE the session is dead; -ECONNRESET it was, there is a new
 * one, and what was prepared is gone (prepare it again). -ENOMEM (REPLAYABLE). */
APR_API int apr_submit(struct apr *c);
/* Requests submitted whose last entry was not yet marked seen. */
APR_API uint32_t apr_unfinished(const struct apr *c);
/* Submits a CANCEL at once, ahead of what apr_submit held back for want of credits; its ACK carries
 * user_data. -EBUSY: an earlier CANCEL is unanswered, the queue is full, or entries were got since
 * the last apr_submit. */
APR_API int apr_cancel(struct apr *c, uint64_t target, uint64_t user_data);
/* Asks the daemon, past the queue, to cancel all of this session. */
APR_API int apr_cancel_all(struct apr *c);

/* Parameter lists: built in a buffer of the caller's, then copied into the arena. An error sticks
 * in p->err and apr_sqe_params returns it. */
struct apr_params {
	unsigned char *buf;
	uint32_t len, cap;
	int32_t err;
	uint32_t types; /* bit a type present */
};
APR_API void apr_params_init(struct apr_params *p, void *buf, size_t cap); /* buf 8-aligned */
APR_API void apr_params_raw(struct apr_params *p, unsigned type, unsigned flags, const void *data, size_t len);
APR_API void apr_params_sampling(struct apr_params *p, const struct apr_sampling *s);
APR_API void apr_params_logprobs(struct apr_params *p, uint32_t k);
APR_API void apr_params_bias(struct apr_params *p, const uint32_t *ids, const float *bias, size_t n);
APR_API void apr_params_stop(struct apr_params *p, const char *const *text, const size_t *len, size_t n);
APR_API void apr_params_stop_ids(struct apr_params *p, const uint32_t *ids, size_t n);
APR_API void apr_params_trace_id(struct apr_params *p, const unsigned char id[16]);
/* 0, p->err (-EINVAL a type twice or too much of it, -ENOSPC buf too small), -E2BIG, -ENOBUFS. */
APR_API int apr_sqe_params(struct apr *c, struct apr_sqe *sqe, const struct apr_params *p);

/* ---- completions ---------------------------------------------------------- */

/* The next entry, not yet marked seen. 0; -EAGAIN none; -EPIPE the session is dead and all entries,
 * the library's own FINALs of what was unfinished included, have been seen. */
APR_API int apr_peek_cqe(struct apr *c, const struct apr_cqe **cqe);
/* Waits: polls spin_us, then sleeps. As apr_peek_cqe, and -ETIMEDOUT after timeout_us in all (< 0 for ever, 0
 * = peek). A dead daemon is noticed within 100 ms. [cancel] */
APR_API int apr_wait_cqe(struct apr *c, const struct apr_cqe **cqe);
APR_API int apr_wait_cqe_timeout(struct apr *c, const struct apr_cqe **cqe, int64_t timeout_us);
/* Waits until n entries are there (n at most the ring's; one wake-up for all). The number there, or as above. */
APR_API int apr_wait_cqes(struct apr *c, uint32_t n, int64_t timeout_us);
/* Entry i after the next one, NULL if it is not there. */
APR_API const struct apr_cqe *apr_cqe_at(struct apr *c, uint32_t i);
/* Gives the next entry and its blob back. */
APR_API void apr_cqe_seen(struct apr *c, const struct apr_cqe *cqe);

/* Event loops: apr_arm, then poll apr_fd for reading, then apr_poll, then take entries until -EAGAIN.
 * apr_arm: 1 an entry is already there, do not sleep; 0 armed; -errno. */
APR_API int apr_arm(struct apr *c);
/* Reads what came on the socket (never blocks). 0; 1 models changed (apr_get_models); -EPIPE. */
APR_API int apr_poll(struct apr *c);

/* An entry's text: inside it or in its blob; *len bytes, not terminated. NULL if it has none. */
APR_API const char *apr_cqe_text(struct apr *c, const struct apr_cqe *cqe, size_t *len);
/* Its blob's data of one format (itself, or the part of a LIST). NULL if there is none. */
APR_API const void *apr_cqe_blob(struct apr *c, const struct apr_cqe *cqe, unsigned fmt, size_t *len);
APR_API const struct apr_top *apr_cqe_top(struct apr *c, const struct apr_cqe *cqe, size_t *n);
APR_API const uint32_t *apr_cqe_ids(struct apr *c, const struct apr_cqe *cqe, size_t *n);

/* The request's very last entry? */
APR_INLINE int apr_cqe_last(const struct apr_cqe *cqe)
{
	return cqe->type == APR_CQE_FINAL || cqe->type == APR_CQE_ACK;
}
/* Walks SCORES data: *pos from 0; NULL at the end. The top entries follow the returned struct. */
APR_INLINE const struct apr_score *apr_score_next(const void *scores, size_t len, size_t *pos)
{
	const struct apr_score *s;
	size_t left = len - *pos, size;

	if (*pos > len || left < sizeof(*s))
		return NULL;
	s = (const struct apr_score *)(const void *)((const char *)scores + *pos);
	if (s->k > (left - sizeof(*s)) / sizeof(struct apr_top))
		return NULL;
	size = sizeof(*s) + s->k * sizeof(struct apr_top);
	*pos += size;
	return s;
}
APR_INLINE const struct apr_top *apr_score_top(const struct apr_score *s)
{
	return (const struct apr_top *)(const void *)(s + 1);
}

/* ---- asking the daemon (over the socket; blocks up to 5 s) ------------ */

/* *rows is malloc'd (free it), *n of them. */
APR_API int apr_get_models(struct apr *c, struct apr_model_row **rows, size_t *n);
/* id of a name; 0 name NULL. -ENOENT. */
APR_API int apr_find_model(struct apr *c, const char *name, uint32_t *id);
APR_API int apr_get_vocab(struct apr *c, uint32_t model, struct apr_vocab **v);
APR_API void apr_vocab_free(struct apr_vocab *v);
APR_API uint32_t apr_vocab_size(const struct apr_vocab *v);
/* A piece's bytes; NULL if id is none. kind (may be NULL): the file's token type. */
APR_API const char *apr_vocab_piece(const struct apr_vocab *v, uint32_t id, size_t *len, unsigned *kind);
/* Own sessions and totals as JSON: *json is malloc'd, terminated. */
APR_API int apr_status(struct apr *c, char **json);

/* The admin socket. path: the admin socket itself; NULL: beside the default client socket.
 * One thread at a time; -EOWNERDEAD in a forked child. */
APR_API int apr_admin_open(struct apr_admin **a, const char *path, char *err, size_t errlen);
/* admin.sock for aprd.sock, NAME.admin for another NAME. Length or -ENAMETOOLONG. */
APR_API int apr_admin_path(const char *socket_path, char *buf, size_t n);
/* type: APR_FRAME_STATUS, LOAD .. LOG; json: the body or NULL. *reply (may be NULL) malloc'd text, "" if none.
 * The daemon's refusal is its -errno with its words in err. timeout_ms < 0 for ever. */
APR_API int apr_admin_call(struct apr_admin *a, unsigned type, const char *json, char **reply, int timeout_ms,
			   char *err, size_t errlen);
APR_API void apr_admin_close(struct apr_admin *a);

/* ---- one-call conveniences ------------------------------------------------------
 * Each needs a handle with nothing in flight (-EBUSY), and blocks. The return is -errno of the
 * call or of the request; err gets the daemon's words. No cancellation points: fn can end a request. */

struct apr_token {
	uint32_t id;     /* APR_NO_ID: text with no token of its own */
	uint32_t pos;
	uint32_t sample;
	float logprob;
	const char *text; /* len bytes of whole UTF-8, not terminated; may be empty */
	size_t len;
	const struct apr_top *top; /* with LOGPROBS; else NULL */
	size_t n_top;
};
#define APR_NO_ID UINT32_MAX
/* Not zero: cancel the request; apr_generate then returns 0 with finish CANCELLED. */
typedef int (*apr_token_fn)(void *arg, const struct apr_token *t);

struct apr_gen { /* zero = default */
	uint32_t size;  /* sizeof(struct apr_gen) */
	uint32_t model;
	const void *text; /* or ids */
	size_t len;
	const uint32_t *ids;
	size_t n_ids;
	uint32_t max_tokens; /* as the wire: 0 none, UINT32_MAX up to the context */
	uint32_t timeout_ms;
	uint32_t flags;      /* APR_SQE_* */
	uint32_t samples;    /* 0 = 1 */
	uint32_t prio;
	uint32_t has_seed;   /* 0: the library draws one, result.seed tells it */
	uint64_t seed;
	uint64_t handle;
	const struct apr_params *params;
};

struct apr_result {
	uint32_t finish;  /* enum apr_finish */
	uint32_t backend, route, fell_back;
	uint32_t at;      /* the culprit's offset, for -EINVAL */
	uint32_t zero;
	uint64_t seed;
	struct apr_cqe_final cost;
};

/* fn may be NULL. r may be NULL. */
APR_API int apr_generate(struct apr *c, const struct apr_gen *g, apr_token_fn fn, void *arg, struct apr_result *r,
			 char *err, size_t errlen);
/* The same for a conversation: g->text[g->len] is JSON as for apr_prep_chat, g->ids is NULL. */
APR_API int apr_chat(struct apr *c, const struct apr_gen *g, apr_token_fn fn, void *arg, struct apr_result *r, char *err,
		     size_t errlen);
/* flags: APR_SQE_PARSE_SPECIAL, APR_SQE_ADD_BOS. *ids malloc'd. */
APR_API int apr_tokenize(struct apr *c, uint32_t model, const void *text, size_t len, uint32_t flags, uint32_t **ids,
			 size_t *n, char *err, size_t errlen);
/* *text malloc'd, len bytes and a NUL more. */
APR_API int apr_detokenize(struct apr *c, uint32_t model, const uint32_t *ids, size_t n, char **text, size_t *len,
			   char *err, size_t errlen);
typedef int (*apr_score_fn)(void *arg, const struct apr_score *s, const struct apr_top *top);
/* top: K best a position; flags: APR_SQE_FORCED. fn not zero: cancel. */
APR_API int apr_score_ids(struct apr *c, uint32_t model, const uint32_t *ids, size_t n, uint32_t top, uint32_t flags,
			  apr_score_fn fn, void *arg, struct apr_result *r, char *err, size_t errlen);
/* One NOP there and back; *ns (may be NULL) how long. */
APR_API int apr_ping(struct apr *c, int64_t timeout_us, uint64_t *ns, char *err, size_t errlen);

/* Words for an errno of either sign, in this protocol's sense. */
APR_API const char *apr_strerror(int err);

#ifdef __cplusplus
}
#endif
#endif
