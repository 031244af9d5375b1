/* SPDX-License-Identifier: MIT */
/*
 * aprctl: what its files share: the context of one run, the option table, the
 * helpers for input, output and requests.
 *
 * Owns: nothing that lives beyond one command. Does not own: the protocol
 * (libaprclient); capture, replay and conform alone speak it by themselves.
 *
 * Exit status: CTL_OK, CTL_FAIL with one line on stderr, CTL_USAGE, CTL_INTR
 * after Ctrl-C.
 */
#ifndef APR_CTL_H
#define APR_CTL_H

#include <apr/client.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { CTL_OK = 0, CTL_FAIL = 1, CTL_USAGE = 2, CTL_INTR = 130 };

enum ctl_verb_id {
	VERB_STATUS,
	VERB_MODELS,
	VERB_PING,
	VERB_GENERATE,
	VERB_CHAT,
	VERB_SCORE,
	VERB_TOKENIZE,
	VERB_DETOKENIZE,
	VERB_LOAD,
	VERB_UNLOAD,
	VERB_WARMUP,
	VERB_DRAIN,
	VERB_CANCEL,
	VERB_RELOAD,
	VERB_CONFIG,
	VERB_METRICS,
	VERB_CLIENTS,
	VERB_TOP,
	VERB_CAPTURE,
	VERB_REPLAY,
	VERB_CONFORM,
	N_VERBS
};

enum ctl_key { /* one a row of the option table */
	KEY_SOCKET,
	KEY_JSON,
	KEY_HELP,
	KEY_VERSION,
	KEY_COUNT,
	KEY_FILE,
	KEY_IDS,
	KEY_MODEL,
	KEY_SPECIAL,
	KEY_TEMP,
	KEY_TOP_K,
	KEY_TOP_P,
	KEY_MIN_P,
	KEY_REPEAT,
	KEY_FREQUENCY,
	KEY_PRESENCE,
	KEY_BIAS,
	KEY_LOGPROBS,
	KEY_SAMPLES,
	KEY_SEED,
	KEY_STOP,
	KEY_IGNORE_EOS,
	KEY_TOP,
	KEY_STEP,
	KEY_TIMEOUT,
	KEY_LIST,
	KEY_CLIENTS,
	KEY_PRIO,
	KEY_SYSTEM,
	KEY_MESSAGES,
	KEY_WATCH,
	N_KEYS
};

struct ctl_option {
	enum ctl_key key;
	const char *name; /* long */
	char letter;      /* 0 = none */
	const char *arg;  /* NULL = a switch */
	uint32_t verbs;   /* bit a verb; ~0 = all */
	const char *help;
};
extern const struct ctl_option ctl_options[];
extern const size_t ctl_n_options;

struct ctl;
struct ctl_verb {
	const char *name, *args, *help;
	int (*run)(struct ctl *c);
};
extern const struct ctl_verb ctl_verbs[N_VERBS];

enum { CTL_STOPS = APR_STOP_MAX, CTL_BIASES = APR_BIAS_MAX, CTL_SAMPLES = 64 };

struct ctl {
	const struct ctl_verb *verb;
	char **args; /* what stands after the options */
	int n_args;
	uint64_t given; /* bit a key: which options were given */

	const char *socket; /* NULL = default */
	bool json, color;
	uint32_t count; /* -n */
	const char *file, *ids, *model, *system, *messages;
	struct apr_sampling sampling;
	uint32_t bias_ids[CTL_BIASES];
	float bias[CTL_BIASES];
	size_t n_bias;
	uint32_t logprobs, samples, top, prio;
	uint64_t seed;
	const char *stop[CTL_STOPS];
	size_t n_stop;
	uint32_t timeout_ms; /* 0 = none */
	bool special, step, list, clients, watch;
};
#define GIVEN(c, key) ((c)->given >> (key) & 1)

/* options.c. argv[0] is the program. CTL_OK with c filled, or a status to exit with (*done set). */
int ctl_parse(struct ctl *c, int argc, char **argv, bool *done);
int ctl_find_verb(const char *name); /* -1 = none */
/* The whole program but process exit: also what the tests call. */
int ctl_main(int argc, char **argv);

/* input.c. Each prints its own error line and returns CTL_OK, CTL_FAIL or CTL_USAGE. */
struct ctl_input {
	char *text; /* malloc'ed, NUL-terminated besides */
	size_t len;
	uint32_t *ids; /* malloc'ed */
	size_t n_ids;
};
int ctl_read_text(struct ctl *c, struct ctl_input *in); /* TEXT, -f FILE or - */
int ctl_read_ids(struct ctl *c, const char *spec, struct ctl_input *in); /* 1,2,3 or @FILE */
void ctl_input_free(struct ctl_input *in);
int ctl_slurp(const char *path, char **text, size_t *len); /* "-" = stdin; 0 or -errno */
bool ctl_parse_u64(const char *s, uint64_t *v);
bool ctl_parse_float(const char *s, float *v); /* nan and inf too: the daemon judges them */

/* output.c */
int ctl_fail(const struct ctl *c, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* one line; CTL_FAIL */
void ctl_note(const struct ctl *c, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* one line, no error */
int ctl_usage(const struct ctl *c, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* CTL_USAGE */
int ctl_print_json(const struct ctl *c, json_t *j); /* takes j; CTL_FAIL where it is NULL or stdout fails */
int ctl_flush(const struct ctl *c, int status); /* stdout written out, or CTL_FAIL */
json_t *ctl_json_text(const char *text, size_t len); /* invalid bytes as U+FFFD */
json_t *ctl_json_float(float v);                    /* null where not finite */
json_t *ctl_json_ids(const uint32_t *ids, size_t n);
json_t *ctl_json_u64(uint64_t v); /* only under the key "seed" may it pass 2^63 */
void ctl_json_set_text(json_t *obj, const char *text, size_t len); /* "text", and "bytes" where it is not UTF-8 */
bool ctl_is_utf8(const char *text, size_t len);
void ctl_hex(const void *data, size_t n, char *out); /* 2n + 1 bytes */
bool ctl_unhex(const char *hex, void *out, size_t n); /* exactly n bytes */
const char *ctl_size(uint64_t bytes, char buf[32]);
const char *ctl_bold(const struct ctl *c), *ctl_red(const struct ctl *c), *ctl_green(const struct ctl *c),
	*ctl_dim(const struct ctl *c), *ctl_plain(const struct ctl *c);

/* session.c */
int ctl_connect(const struct ctl *c, size_t input, struct apr **s); /* CTL_OK, or CTL_FAIL said */
/* The chosen model's row (--model, else the default). */
int ctl_model(const struct ctl *c, struct apr *s, struct apr_model_row *row);
/* Words for a failure to reach the daemon: client is the client socket named, path the one tried (it or the admin one). */
int ctl_unreachable(const struct ctl *c, int e, const char *client, const char *path, const char *err);
/* Waits for entries of what was submitted and gives each to fn, until the last entry of `user_data`.
 * After Ctrl-C the request is cancelled and *interrupted set. CTL_OK with *last filled. */
struct ctl_last {
	int res;
	uint32_t at;
	unsigned finish, backend, route, fell_back;
	struct apr_cqe_final cost;
	char why[256];
	bool interrupted;
};
typedef int (*ctl_entry_fn)(void *arg, struct apr *s, const struct apr_cqe *e);
int ctl_run(const struct ctl *c, struct apr *s, uint64_t user_data, ctl_entry_fn fn, void *arg, struct ctl_last *last);
/* One line for a request that failed. */
int ctl_request_failed(const struct ctl *c, const struct ctl_last *last);
/* Ctrl-C is looked for from here on; one that came before is forgotten. */
void ctl_catch_interrupt(void);
bool ctl_interrupted(void);
bool ctl_terminated(void); /* SIGTERM, which ends a conversation too */
int ctl_admin(const struct ctl *c, unsigned type, json_t *body, char **reply, int timeout_ms); /* takes body */

/* cmd_status.c: the whole of what the daemon says of itself. CTL_OK, or said. */
int ctl_status(struct ctl *c, json_t **out);
/* cmd_top.c: draws what the daemon says once a second, c->count times (0: until q or Ctrl-C). CTL_OK, or said. */
typedef void (*ctl_screen_fn)(struct ctl *c, json_t *status, void *arg);
int ctl_live(struct ctl *c, ctl_screen_fn draw, void *arg);
int cmd_config(struct ctl *c), cmd_metrics(struct ctl *c), cmd_clients(struct ctl *c), cmd_top(struct ctl *c);
int cmd_status(struct ctl *c), cmd_models(struct ctl *c), cmd_ping(struct ctl *c), cmd_generate(struct ctl *c), cmd_chat(struct ctl *c),
	cmd_score(struct ctl *c), cmd_tokenize(struct ctl *c), cmd_detokenize(struct ctl *c), cmd_load(struct ctl *c),
	cmd_unload(struct ctl *c), cmd_warmup(struct ctl *c), cmd_drain(struct ctl *c), cmd_cancel(struct ctl *c),
	cmd_reload(struct ctl *c),
	cmd_capture(struct ctl *c), cmd_replay(struct ctl *c), cmd_conform(struct ctl *c);

#endif
