/* SPDX-License-Identifier: MIT */
/*
 * conform: what the files of the conformance program share.
 *
 * Each check opens its own sessions, so that one that fails disturbs no other.
 * A check returns CONF_OK, CONF_NO (k->why says what was seen) or CONF_SKIP.
 */
#ifndef APR_CTL_CONFORM_H
#define APR_CTL_CONFORM_H

#include "client/aprctl/ctl.h"
#include "client/aprctl/raw.h"

enum conf_result { CONF_OK, CONF_NO, CONF_SKIP };

enum { CONF_TOKENS = 1024 };
struct conf_answer { /* everything that came for one request */
	uint32_t ids[CONF_TOKENS], n;
	float logprob[CONF_TOKENS];
	struct apr_top top[CONF_TOKENS][4];
	uint32_t n_top[CONF_TOKENS];
	uint16_t sample[CONF_TOKENS];
	char text[65536];
	size_t len;
	bool broken; /* a chunk was not whole UTF-8 */
	uint32_t ended; /* SAMPLE_END entries */
	uint8_t data[262144];
	size_t data_len;
	unsigned data_fmt;
	int res;
	uint32_t at, first_pos;
	unsigned type, finish, backend;
	struct apr_cqe_final cost;
	char why[256];
};

struct conf {
	struct ctl *c;
	char path[256];
	struct apr_welcome w;     /* of a first, default session */
	struct apr_model_row row; /* of the default model; id 0 = there is none */
	struct raw s;             /* the check's session, closed after it */
	uint64_t next;            /* user_data for conf_ helpers */
	char why[512];
	struct conf_answer a, b; /* room for two answers */
};

struct conf_check {
	const char *name;
	uint64_t ops, features; /* needs all of these; ops: bit an opcode */
	enum conf_result (*run)(struct conf *k);
};
extern const struct conf_check conf_hello_checks[], conf_ring_checks[], conf_sqe_checks[], conf_text_checks[],
	conf_generate_checks[];
extern const size_t conf_n_hello, conf_n_ring, conf_n_sqe, conf_n_text, conf_n_generate;

enum conf_result conf_no(struct conf *k, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
enum conf_result conf_skip(struct conf *k, const char *why);
#define CHECK(k, cond, ...) \
	do { \
		if (!(cond)) \
			return conf_no(k, __VA_ARGS__); \
	} while (0)
/* For helpers that return a result of their own. */
#define PASS(expr) \
	do { \
		enum conf_result r_ = (expr); \
		if (r_ != CONF_OK) \
			return r_; \
	} while (0)

#define CONF_MS 20000 /* how long anything may take: a large model on a small machine */

/* The check's session: default, or with these rings. */
enum conf_result conf_open(struct conf *k);
enum conf_result conf_open_rings(struct conf *k, uint32_t sq, uint32_t cq);
/* Another client is served: a whole new session and one NOP. */
enum conf_result conf_alive(struct conf *k);
/* One NOP on the check's own session. */
enum conf_result conf_nop(struct conf *k);
/* The daemon ends this session (DEAD, BYE or hang-up) within CONF_MS. */
enum conf_result conf_dies(struct conf *k, struct raw *r);

/* Reads the entries of `user_data`, alone in flight, to the last one; the rules that hold for every request are
 * checked on the way: MORE, positions, one last entry, counts. */
enum conf_result conf_answer(struct conf *k, uint64_t user_data, struct conf_answer *a);
/* Pushes and reads. */
enum conf_result conf_do(struct conf *k, struct apr_sqe *q, struct conf_answer *a);
/* Pushes q and wants this refusal (and position, unless at is UINT32_MAX) and then a NOP served. */
enum conf_result conf_refused(struct conf *k, struct apr_sqe *q, int err, uint32_t at);

/* Entries with their input in the arena. */
struct apr_sqe conf_sqe(struct conf *k, unsigned op);
struct apr_sqe conf_text_sqe(struct conf *k, unsigned op, const char *text, size_t len);
struct apr_sqe conf_ids_sqe(struct conf *k, unsigned op, const uint32_t *ids, size_t n);
struct apr_sqe conf_generate(struct conf *k, uint32_t max_tokens, uint64_t seed); /* of a fixed short prompt */
void conf_params(struct conf *k, struct apr_sqe *q, const struct apr_params *p);
/* temperature 0 and, if asked, no end token */
void conf_greedy(struct apr_params *p, bool ignore_eos);

#endif
