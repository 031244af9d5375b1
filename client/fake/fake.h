/* SPDX-License-Identifier: MIT */
/*
 * A daemon without a model, for testing programs that use aprd: the real
 * sockets, regions, seals, credits and wake-ups, with answers from a script.
 *
 * Owns: one fake daemon, in a thread or a process of the caller's. Does not own:
 * anything about real models; it computes nothing worth reading.
 *
 * What it serves: NOP, GENERATE, SCORE, TOKENIZE, DETOKENIZE, CANCEL, FREE; the
 * features SAMPLING, LOGPROBS, SAMPLES, HANDLES, REPLAY, FORCED, VOCAB. All else is
 * refused with -EOPNOTSUPP and its bit is clear. Of a scripted answer sampling
 * parameters change nothing (stop strings and ids do); an unscripted one is drawn
 * from a small vocabulary by temperature, top-k, top-p, min-p, bias and seed.
 * Penalties are checked and then have no effect.
 *
 * The script is one JSON object; every field may be left out:
 *
 *   { "model": {"name": "fake", "n_ctx": 4096},
 *     "words": [" lamp", " river"],          vocabulary beside the bytes
 *     "token_ms": 5,                         pause before each token
 *     "ops": ["NOP", "GENERATE"],            serve only these (CANCEL always)
 *     "max_sessions": 64,
 *     "answers": [ANSWER, ...] }
 *
 *   ANSWER: { "op": "GENERATE",              which requests (default GENERATE)
 *             "match": "hello",              text that the input must contain
 *             "times": 1,                    how often it serves, then never more
 *             "finish": "stop",              stop or length
 *             "steps": [STEP, ...] }
 *
 *   STEP: "text"                             one token with that text
 *         {"text": "x", "logprob": -0.5, "repeat": 20}
 *         {"ms": 250}                        silence
 *         {"stall": true}                    nothing more, until cancel or timeout
 *         {"error": "EIO", "why": "words"}   FINAL with that errno
 *         {"die": "bye"|"drop"|"kill"}       session ended in order, socket closed
 *                                            without a word, process killed
 *
 * The first answer that fits is taken; where none does, GENERATE draws words and the
 * other operations are computed.
 */
#ifndef APR_FAKE_H
#define APR_FAKE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct fake;

struct fake_opts { /* zero = default */
	const char *path;     /* client socket; required. The admin socket lies beside it */
	const char *script;   /* JSON text, or NULL */
	uint32_t req_size_max, res_size_max; /* bytes of a session's regions; 0 = 16 MiB */
	uint32_t sq_max, cq_max;             /* entries; 0 = the ABI's */
	int may_kill;         /* {"die": "kill"} kills the process; else it ends as drop */
	int verbose;          /* one line an event on stderr */
};

/* Reads the script and listens. 0 or -errno with one line in err. */
int fake_new(struct fake **f, const struct fake_opts *o, char *err, size_t errlen);
/* Serves until fake_stop or DRAIN; in the caller's thread. 0 or -errno. */
int fake_run(struct fake *f);
/* Makes fake_run end: every session gets BYE. Any thread, and signal handlers. */
void fake_stop(struct fake *f);
/* An eventfd: a write to it does the same, for signal handlers that may call nothing else. */
int fake_stop_fd(const struct fake *f);
/* Ends what is left without a word and removes the sockets. */
void fake_free(struct fake *f);

/* The two together, in a thread of its own: for test programs. */
int fake_start(struct fake **f, const struct fake_opts *o, char *err, size_t errlen);
void fake_end(struct fake *f); /* stop, join, free */
/* Sessions and unfinished requests at this moment (approximate while it runs). */
unsigned fake_sessions(const struct fake *f);
unsigned fake_requests(const struct fake *f);

#ifdef __cplusplus
}
#endif
#endif
