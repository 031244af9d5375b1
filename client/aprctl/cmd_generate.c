/* SPDX-License-Identifier: MIT */
/*
 * generate: submits one request, streams its text, or gathers it into one JSON
 * object. Ctrl-C cancels the request and keeps what came.
 *
 * Owns: the prompt. Does not own: the answer (answer.c), sampling (the daemon's).
 */
#include "client/aprctl/answer.h"
#include <errno.h>

enum { DEFAULT_COUNT = 128 }; /* tokens, without -n */

static int submit(const struct ctl_answer *a, struct apr *s, const struct ctl_input *in, const struct apr_model_row *row)
{
	const struct ctl *c = a->c;
	struct apr_sqe *q = apr_get_sqe(s);
	int e;

	if (!q)
		return ctl_fail(c, "the session ended: %s", apr_why(s));
	e = in->ids ? apr_prep_generate_ids(s, q, in->ids, in->n_ids, a->max) :
		      apr_prep_generate(s, q, in->text, in->len, a->max);
	if (e)
		return ctl_fail(c, "%s", e == -E2BIG ? "the input is longer than this daemon takes" : apr_strerror(e));
	if (!in->ids)
		apr_sqe_flags(q, APR_SQE_ADD_BOS | (c->special ? APR_SQE_PARSE_SPECIAL : 0));
	return ctl_answer_submit(a, s, q, row);
}

int cmd_generate(struct ctl *c)
{
	struct ctl_input in = {0};
	struct apr_model_row row;
	struct ctl_last last;
	struct ctl_answer a = {0};
	struct apr *s = NULL;
	int status;

	if (c->ids && (c->n_args || c->file))
		return ctl_usage(c, "TEXT or --ids, not both");
	status = c->ids ? ctl_read_ids(c, c->ids, &in) : ctl_read_text(c, &in);
	if (!status)
		status = ctl_connect(c, in.ids ? in.n_ids * 4 : in.len, &s);
	if (!GIVEN(c, KEY_SEED))
		c->seed = ctl_draw_seed();
	if (!status)
		status = ctl_answer_init(&a, c, c->samples, GIVEN(c, KEY_COUNT) ? c->count : DEFAULT_COUNT);
	if (!status)
		status = ctl_model(c, s, &row);
	if (!status) {
		ctl_catch_interrupt();
		status = submit(&a, s, &in, &row);
	}
	if (!status)
		status = ctl_run(c, s, 1, ctl_answer_entry, &a, &last);
	if (!status)
		status = ctl_answer_end(&a, &row, &last);
	ctl_answer_free(&a);
	apr_close(s);
	ctl_input_free(&in);
	return status;
}
