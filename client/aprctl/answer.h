/* SPDX-License-Identifier: MIT */
/*
 * What generate and chat share: a request's parameters from the options, the answer as
 * it comes, and how it is shown.
 */
#ifndef APR_CTL_ANSWER_H
#define APR_CTL_ANSWER_H

#include "client/aprctl/ctl.h"

struct ctl_sample {
	char *text;
	size_t len, cap;
	uint32_t *ids;
	size_t n_ids, cap_ids;
	unsigned finish;
	json_t *logprobs; /* NULL unless asked for */
};

struct ctl_answer {
	struct ctl *c;
	struct ctl_sample *samples;
	uint32_t n;
	uint32_t max;  /* tokens asked for */
	bool stream;   /* print text as it comes */
	char last;     /* byte printed */
};

int ctl_answer_init(struct ctl_answer *a, struct ctl *c, uint32_t n, uint32_t max);
void ctl_answer_free(struct ctl_answer *a);
/* For ctl_run: arg is the answer. */
int ctl_answer_entry(void *arg, struct apr *s, const struct apr_cqe *e);
/* user_data 1, the model, timeout, seed and parameters of the options; then submits. */
int ctl_answer_submit(const struct ctl_answer *a, struct apr *s, struct apr_sqe *q, const struct apr_model_row *row);
/* Prints what is left to print: JSON, the closing newline, several samples. The exit status. */
int ctl_answer_end(struct ctl_answer *a, const struct apr_model_row *row, const struct ctl_last *l);
/* A seed that survives every JSON reader: below 2^53. */
uint64_t ctl_draw_seed(void);

#endif
