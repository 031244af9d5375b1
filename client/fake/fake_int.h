/* SPDX-License-Identifier: MIT */
/* What the files of the fake daemon share. Private to client/fake. */
#ifndef APR_FAKE_INT_H
#define APR_FAKE_INT_H

#include "client/fake/fake.h"
#include "shm/check.h"
#include "shm/ring.h"
#include "shm/wire.h"
#include <apr/abi.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

/* ---- script (fake_script.c) ---- */

enum { FAKE_BOS = 0, FAKE_EOS = 1, FAKE_BYTE0 = 2, FAKE_WORD0 = 258 };

struct fake_vocab {
	char **piece; /* malloc'ed, len[] bytes */
	uint32_t *len;
	uint32_t n, cap;
};

enum fake_step_kind { STEP_TOKEN, STEP_PAUSE, STEP_STALL, STEP_ERROR, STEP_BYE, STEP_DROP, STEP_KILL };

struct fake_step {
	enum fake_step_kind kind;
	uint32_t id, repeat, ms;
	float logprob;
	int err; /* negative */
	char *why;
};

struct fake_answer {
	unsigned op, finish;
	char *match; /* NULL = any */
	uint32_t times; /* UINT32_MAX = for ever */
	struct fake_step *steps;
	size_t n_steps;
};

struct fake_script {
	struct fake_vocab vocab;
	struct fake_answer *answers;
	size_t n_answers;
	char model[64];
	uint32_t n_ctx, token_ms, max_sessions;
	uint64_t opcodes[2];
};

int fake_script_read(struct fake_script *s, const char *json, char *err, size_t errlen);
void fake_script_free(struct fake_script *s);
/* The id of a text, added where it is new. -ENOMEM. */
int64_t fake_vocab_add(struct fake_vocab *v, const char *text, size_t len);
/* Greedy longest match. flags: APR_SQE_PARSE_SPECIAL, APR_SQE_ADD_BOS. -ENOMEM. */
int fake_tokenize(const struct fake_vocab *v, const char *text, size_t len, unsigned flags, uint32_t **ids, uint32_t *n);

/* ---- the stand-in for a model (fake_draw.c) ---- */

struct fake_dist {
	uint32_t *id; /* candidates */
	float *logit, *logprob;
	uint32_t n;
};
uint64_t fake_mix(uint64_t a, uint64_t b);
/* Logits of the words and the end id, given the hash of what came before. eos: may it end here? */
int fake_dist_make(struct fake_dist *d, const struct fake_vocab *v, uint64_t state, bool eos);
void fake_dist_free(struct fake_dist *d);
/* The k best by log-probability, ties to the lower id. Returns how many. */
uint32_t fake_dist_top(const struct fake_dist *d, struct apr_top *top, uint32_t k);
/* Index drawn, or -1 where every candidate is banned. */
int fake_dist_draw(const struct fake_dist *d, const struct apr_param_view *p, uint64_t seed, uint32_t sample,
		   uint32_t pos);

/* ---- sessions ---- */

struct fake_held { /* a token not yet let out */
	uint32_t id;
	float logprob;
	uint32_t start, end; /* its text in sample.text */
	struct apr_top top[APR_LOGPROBS_MAX];
	uint32_t n_top;
};

struct fake_sample {
	uint32_t pos;       /* tokens drawn */
	uint32_t delivered; /* TOKEN entries written */
	uint64_t state;     /* hash of prompt and answer */
	size_t step;        /* in the answer */
	uint32_t repeated;
	char *text;         /* of the held tokens */
	uint32_t text_len, text_cap;
	struct fake_held *held;
	uint32_t n_held, cap_held, out; /* [0, out) may be written */
	uint32_t *ids;      /* delivered, for NO_STREAM and KEEP */
	uint32_t n_ids, cap_ids;
	unsigned finish;    /* enum apr_finish once it is over */
	bool told;          /* SAMPLE_END written (n > 1) */
};

struct fake_req {
	struct fake_req *next;
	struct apr_sqe sqe;
	uint8_t *in; /* private copies */
	uint8_t *par;
	struct apr_param_view view;
	struct fake_answer *answer;
	uint64_t began, due, deadline, parked; /* ns; 0 = none. parked: when waiting for room becomes -ETIME */
	uint64_t first; /* when its first token came */
	uint32_t *ids; /* the prompt */
	uint32_t n_prompt, cached;
	struct fake_sample *samples;
	uint32_t n_samples, turn;
	uint8_t *data; /* a result made at once */
	size_t data_len, data_sent, data_cap;
	uint16_t data_fmt;
	uint64_t handle;
	bool stalled;
	int fail; /* ends with this */
	uint32_t fail_at;
	const char *why;
};

struct fake_conv { /* a kept conversation */
	uint32_t generation;
	uint32_t *ids; /* NULL = free slot */
	uint32_t n;
	bool busy;
};

struct fake_session {
	struct fake_session *next;
	struct fake *f;
	int sock, bell, pidfd;
	int ready; /* 0 awaiting HELLO, 1 rings live */
	bool dead, gone;
	uint64_t id, opened;
	pid_t pid;
	uid_t uid;
	char name[32];
	struct apr_geometry g;
	struct apr_region req, res;
	struct apr_rd rd;
	struct apr_arena arena;
	struct apr_credit credit;
	struct apr_check check;
	struct fake_req *reqs; /* unfinished, oldest first */
	struct fake_conv convs[64];
	bool blocked; /* something waits for CQ room */
	uint64_t tokens;
};

struct fake_model {
	uint32_t id; /* 0 = unloaded */
	char name[64];
};

struct fake_client { /* an accepted socket of the admin listener */
	struct fake_client *next;
	int sock;
	bool gone;
};

struct fake {
	struct fake_opts o;
	struct fake_script script;
	char path[108], admin_path[108];
	int lock_fd, listen_fd, admin_fd, epoll_fd, stop_fd;
	struct fake_session *sessions;
	struct fake_client *admins;
	struct fake_model models[8];
	uint32_t n_models, next_model, models_gen;
	uint64_t epoch, next_session, started;
	bool stopping, draining, crashed;
	uint64_t drain_at;
	unsigned n_sessions, n_requests;
	pthread_t thread;
	bool threaded;
	uint64_t served;
};

#define FAKE_FEATURES \
	(APR_FEAT_SAMPLING | APR_FEAT_LOGPROBS | APR_FEAT_SAMPLES | APR_FEAT_HANDLES | APR_FEAT_REPLAY | \
	 APR_FEAT_MESSAGES | APR_FEAT_FORCED | APR_FEAT_VOCAB)

/* fake_session.c: the ring's side */
void fake_session_intake(struct fake_session *s);   /* takes what credits allow */
uint64_t fake_session_run(struct fake_session *s, uint64_t now); /* works; when it next has something to do, or 0 */
void fake_session_flush(struct fake_session *s);    /* publish, wake, arm */
void fake_session_end(struct fake_session *s, enum apr_reason why, const char *words); /* DEAD, BYE */
void fake_session_cancel(struct fake_session *s, const uint64_t *user_data, int err);  /* NULL = all */
void fake_session_drop_requests(struct fake_session *s);

/* Writes one entry with an optional blob if credits and arena allow it. */
bool fake_emit(struct fake_session *s, const struct apr_cqe *e, unsigned fmt, const void *data, size_t len);
void fake_finish(struct fake_session *s, struct fake_req *r, int err, uint32_t at, const char *why, unsigned reason);

/* fake_req.c: what requests do */
/* A CHAT becomes the GENERATE of its messages' text. 0, -EINVAL, -E2BIG, -ENOMEM; *why: one line. */
int fake_chat(struct fake_req *r, const char **why);
int fake_req_begin(struct fake_session *s, struct fake_req *r, uint32_t *at, const char **why);
/* One move. 1: again at once; 0: waits for r->due or for room; 2: it is finished (freed). */
int fake_req_step(struct fake_session *s, struct fake_req *r, uint64_t now);
void fake_req_free(struct fake_req *r);
unsigned fake_req_reason(int err);

/* fake_frames.c: the sockets' side */
int fake_send(int sock, unsigned type, int err, const void *body, size_t len);
void fake_hello(struct fake_session *s);
void fake_session_frame(struct fake_session *s);
void fake_admin_frame(struct fake *f, struct fake_client *c);
char *fake_status_json(struct fake *f, const struct fake_session *own);
const struct fake_model *fake_model_of(const struct fake *f, uint32_t id);

/* The loop's thread alone counts; fake_sessions and fake_requests look on from others. */
static inline void fake_count(unsigned *n, int by)
{
	__atomic_store_n(n, *n + (unsigned)by, __ATOMIC_RELAXED);
}

void fake_say(const struct fake *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
