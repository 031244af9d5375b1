/* SPDX-License-Identifier: MIT */
/*
 * Choosing a token from one row of logits: the reference that every backend matches.
 *
 * Owns: the order (bias and mask; penalties; temperature; top-k; top-p; min-p;
 * draw), the formulas, exp2, log2 and Philox that C and CUDA share. Does not own
 * where parameters come from (engine/sampling.h resolves request over file over
 * built-in). Pure functions; no allocation.
 *
 * The filters, exactly (kernels/common/sample_math.h has them for one id): ids are
 * ranked by value, then by lowest id; top-k keeps the first k, so that k = 1 is
 * greedy; top-p keeps the fewest first ids whose weights reach top_p of those of
 * all that top-k kept, in 2^-40ths; min-p keeps by the ratio to the best.
 */
#ifndef APR_KERNELS_COMMON_SAMPLE_H
#define APR_KERNELS_COMMON_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define APR_SAMPLE_TOP_MAX 20u

struct apr_sample_params { /* resolved and checked: every value in range */
	float temperature; /* 0 = greedy */
	uint32_t top_k;    /* 0 = off */
	float top_p;       /* 1 = off; 0 keeps the best alone */
	float min_p;       /* 0 = off */
	float repeat_penalty, frequency_penalty, presence_penalty;
	int32_t penalty_window; /* -1 = whole context */
	uint64_t seed;
	uint32_t sample; /* which of n */
	uint32_t n_bias;
	const uint32_t *bias_id;
	const float *bias; /* finite or -inf */
};
/* Penalty counts of one sequence, sparse, kept by the engine: ids seen in the window. */
struct apr_seen {
	uint32_t id;
	uint32_t prompt, output; /* occurrences in the window in prompt and output */
};
struct apr_sample_result {
	uint32_t id;
	float logprob;  /* of the raw logits: logit - log-sum-exp */
	bool numeric;   /* NaN or +inf among the logits, or nothing left to draw: id is meaningless */
	uint32_t n_top; /* best of the raw logits, descending, ties to the lowest id */
	uint32_t top_id[APR_SAMPLE_TOP_MAX];
	float top_logprob[APR_SAMPLE_TOP_MAX];
};
/* logits: n_vocab floats, not changed. work: apr_sample_work_bytes(n_vocab). position: of the token drawn.
 * raw log-probabilities are computed where want_logprob or n_top > 0. */
size_t apr_sample_work_bytes(uint32_t n_vocab); /* 0: more than 2^22 ids; work is 8-aligned */
void apr_sample(const float *logits, uint32_t n_vocab, const struct apr_sample_params *p, const struct apr_seen *seen,
                uint32_t n_seen, uint32_t position, bool want_logprob, uint32_t n_top, void *work,
                struct apr_sample_result *out);
/* Log-probability of a given id and the n_top best (SCORE). -EDOM: not finite. */
int apr_score_row(const float *logits, uint32_t n_vocab, uint32_t id, uint32_t n_top, struct apr_sample_result *out);

#endif
