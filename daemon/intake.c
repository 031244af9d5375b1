/* SPDX-License-Identifier: MIT */
/* Owns: the intake's threads and their work. See intake.h. */
#include "daemon/intake.h"
#include "daemon/chat.h"
#include "daemon/core.h"
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

static int fail(struct request *r, int err, uint32_t at, const char *why)
{
	r->fault = (struct apr_fault){ err, at, why };
	return err;
}

/* One private copy, a NUL more so that nobody runs over its end. */
static uint8_t *copy_in(const struct session *s, uint32_t off, uint32_t len, int *e)
{
	uint8_t *to = malloc((size_t)len + 8);

	*e = to ? apr_guard_copy(to, (const uint8_t *)s->req.base + off, len) : -ENOMEM;
	if (*e) {
		free(to);
		return NULL;
	}
	memset(to + len, 0, 8);
	return to;
}

int intake_copy(struct request *r)
{
	int e = 0;

	if (r->sqe.par_len)
		r->params = copy_in(r->s, r->sqe.par_off, r->sqe.par_len, &e);
	if (!e)
		r->input = copy_in(r->s, r->sqe.in_off, r->sqe.in_len, &e);
	return e ? fail(r, e, 0, NULL) : 0;
}

static int say(struct request *r, int err, uint32_t at, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
static int say(struct request *r, int err, uint32_t at, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(r->words, sizeof(r->words), fmt, ap);
	va_end(ap);
	return fail(r, err, at, NULL);
}

/* ids given as they are: u32 each, 4-aligned by the check */
static int take_ids(struct request *r)
{
	uint32_t n = r->sqe.in_len / 4, vocab = r->model->info.n_vocab;

	if (r->sqe.in_len % 4)
		return fail(r, -EINVAL, offsetof(struct apr_sqe, in_len), "ids are 4 bytes each");
	r->ids = (uint32_t *)(void *)r->input;
	r->input = NULL;
	r->n_ids = n;
	for (uint32_t i = 0; i < n; i++)
		if (r->ids[i] >= vocab)
			return say(r, -EINVAL, r->sqe.in_off + 4 * i,
				   "id %u at index %u is outside the vocabulary of %u", r->ids[i], i, vocab);
	return 0;
}

static int take_text(struct request *r)
{
	unsigned flags = (r->sqe.flags & APR_SQE_PARSE_SPECIAL ? APR_TOK_PARSE_SPECIAL : 0) |
			 (r->sqe.flags & APR_SQE_ADD_BOS ? APR_TOK_ADD_BOS : 0);
	/* what cannot run anyway is not tokenised to its end */
	uint32_t most = r->sqe.op == APR_OP_TOKENIZE ? 0 : r->model->info.n_ctx;
	int e = apr_tok_encode(apr_loaded_tokenizer(r->model->loaded), (const char *)r->input, r->sqe.in_len, flags,
			       most, &r->ids, &r->n_ids);

	if (e == -E2BIG && most)
		return say(r, e, offsetof(struct apr_sqe, in_len), "the text is more than the context of %u tokens",
			   most);
	if (e)
		return fail(r, e, offsetof(struct apr_sqe, in_off),
			    e == -EILSEQ ? "a byte of the text has no piece in this model's vocabulary" : NULL);
	return 0;
}

static int take_messages(struct request *r)
{
	const struct chat_input in = { .json = (const char *)r->input,
				       .len = r->sqe.in_len,
				       .parse_special = r->sqe.flags & APR_SQE_PARSE_SPECIAL,
				       .replayable = r->sqe.flags & APR_SQE_REPLAYABLE,
				       .most = r->model->info.n_ctx };
	int e = chat_ids(r->model->chat, &in, &r->ids, &r->n_ids, r->words, sizeof(r->words));

	return e ? fail(r, e, e == -EOPNOTSUPP ? offsetof(struct apr_sqe, op) : offsetof(struct apr_sqe, in_off), NULL) : 0;
}

static int take_input(struct request *r)
{
	switch (r->sqe.in_fmt) {
	case APR_IN_TEXT: return take_text(r);
	case APR_IN_IDS: return take_ids(r);
	case APR_IN_MESSAGES: return take_messages(r);
	default: return fail(r, -EOPNOTSUPP, offsetof(struct apr_sqe, in_fmt), "this input format is not built");
	}
}

static int take_bias(struct request *r)
{
	uint32_t n = r->view.n_bias, vocab = r->model->info.n_vocab;

	if (!n)
		return 0;
	r->bias_id = calloc(n, sizeof(*r->bias_id));
	r->bias = calloc(n, sizeof(*r->bias));
	if (!r->bias_id || !r->bias)
		return fail(r, -ENOMEM, 0, NULL);
	for (uint32_t i = 0; i < n; i++) {
		r->bias_id[i] = r->view.bias[i].id;
		r->bias[i] = r->view.bias[i].bias;
		if (r->bias_id[i] >= vocab)
			return say(r, -EINVAL, r->view.at[APR_PARAM_BIAS] + i * (uint32_t)sizeof(struct apr_bias),
				   "bias: id %u is outside the vocabulary of %u", r->bias_id[i], vocab);
	}
	r->sampling.n_bias = n;
	r->sampling.bias_id = r->bias_id;
	r->sampling.bias = r->bias;
	return 0;
}

static int take_sampling(struct request *r)
{
	struct apr_sampling_request q = { 0 };
	const struct apr_sampling *s = r->view.sampling;
	const char *field = NULL;

	if (s)
		q = (struct apr_sampling_request){ s->set,
						   s->temperature,
						   s->top_p,
						   s->min_p,
						   s->repeat_penalty,
						   s->frequency_penalty,
						   s->presence_penalty,
						   s->top_k,
						   s->penalty_window,
						   s->ignore_eos != 0 };
	int e = apr_sampling_resolve(r->model->loaded, &q, &r->sampling, &field);
	if (e)
		return say(r, e, r->view.at[APR_PARAM_SAMPLING], "sampling: %s is out of range",
			   field ? field : "a value");
	r->ignore_eos = s && (s->set & APR_SET_IGNORE_EOS) && s->ignore_eos;
	r->sampling.seed = r->sqe.seed;
	return take_bias(r);
}

static int check_ids(struct request *r, const uint32_t *ids, uint32_t n, enum apr_param_type type, const char *what)
{
	for (uint32_t i = 0; i < n; i++)
		if (ids[i] >= r->model->info.n_vocab)
			return say(r, -EINVAL, r->view.at[type] + 4 * i, "%s: id %u is outside the vocabulary of %u",
				   what, ids[i], r->model->info.n_vocab);
	return 0;
}

static int take_params(struct request *r)
{
	int e = 0;

	if (r->params)
		e = apr_check_params(r->params, r->sqe.par_len, r->sqe.op, APR_FEATURES, &r->view, &r->fault);
	if (e || !op_generates(r->sqe.op))
		return e;
	e = take_sampling(r);
	if (!e)
		e = check_ids(r, r->view.stop_ids, r->view.n_stop_ids, APR_PARAM_STOP_IDS, "stop ids");
	if (!e)
		e = check_ids(r, r->view.resume, r->view.n_resume, APR_PARAM_RESUME, "resume");
	if (!e && r->view.n_resume && r->sqe.n > 1)
		e = fail(r, -EINVAL, offsetof(struct apr_sqe, n), "RESUME goes with one sample");
	if (!e && r->view.logprobs && (r->sqe.flags & APR_SQE_NO_STREAM))
		e = fail(r, -EINVAL, offsetof(struct apr_sqe, flags), "LOGPROBS needs the stream: not with NO_STREAM");
	return e;
}

static void give_out(struct request *r, void *data, size_t n, uint16_t fmt)
{
	r->out = data;
	r->out_len = (uint32_t)n;
	r->out_fmt = fmt;
}

static int do_tokenize(struct request *r)
{
	int e = take_input(r);

	if (e)
		return e;
	give_out(r, r->ids, (size_t)r->n_ids * 4, APR_BLOB_IDS);
	r->ids = NULL;
	return 0;
}

static int do_detokenize(struct request *r)
{
	char *text = NULL;
	size_t n = 0;
	int e = take_input(r);

	if (e)
		return e;
	e = apr_tok_decode(apr_loaded_tokenizer(r->model->loaded), r->ids, r->n_ids,
			   r->sqe.flags & APR_SQE_PARSE_SPECIAL, &text, &n);
	if (e)
		return fail(r, e, offsetof(struct apr_sqe, in_off), NULL);
	if (n > UINT32_MAX) {
		free(text);
		return fail(r, -E2BIG, 0, "the text is above 4 GiB");
	}
	give_out(r, text, n, APR_BLOB_TEXT);
	return 0;
}

static void take_in(struct request *r)
{
	if (take_params(r))
		return;
	switch (r->sqe.op) {
	case APR_OP_TOKENIZE:
		do_tokenize(r);
		break;
	case APR_OP_DETOKENIZE:
		do_detokenize(r);
		break;
	default:
		if (!take_input(r) && !r->n_ids && !r->sqe.arg) /* a conversation may go on by itself */
			fail(r, -EINVAL, offsetof(struct apr_sqe, in_len), "the prompt is empty: not one token");
	}
}

static void work(struct intake *in, struct request *r)
{
	if (r->copy_here) {
		r->copy_err = intake_copy(r);
		r->copied.fn = service_copied;
		mailbox_post(in->core, &r->copied);
		if (r->copy_err)
			return;
	}
	take_in(r);
}

static void pool_push(struct intake *in, struct session *s)
{
	s->pool_next = NULL;
	*in->pool_tail = s;
	in->pool_tail = &s->pool_next;
	pthread_cond_signal(&in->some);
}

static struct request *next_job(struct intake *in)
{
	struct session *s = in->pool;
	struct request *r = s->jobs;

	in->pool = s->pool_next;
	if (!in->pool)
		in->pool_tail = &in->pool;
	s->jobs = r->job_next;
	if (!s->jobs)
		s->jobs_tail = &s->jobs;
	return r;
}

static void *intake_main(void *arg)
{
	struct intake *in = arg;

	prctl(PR_SET_NAME, "aprd-intake");
	apr_guard_thread();
	pthread_mutex_lock(&in->lock);
	for (;;) {
		while (!in->pool && !in->stop)
			pthread_cond_wait(&in->some, &in->lock);
		if (!in->pool)
			break;
		struct request *r = next_job(in);
		struct session *s = r->s;
		pthread_mutex_unlock(&in->lock);
		work(in, r);
		pthread_mutex_lock(&in->lock);
		/* one job of a session at a time, then its turn comes again: order within, fairness between */
		if (s->jobs)
			pool_push(in, s);
		else
			s->in_pool = false;
		/* last and under the lock: with this letter r, and the session, may be gone */
		r->taken_in.fn = service_taken_in;
		mailbox_post(in->core, &r->taken_in);
	}
	pthread_mutex_unlock(&in->lock);
	return NULL;
}

void intake_post(struct intake *in, struct request *r)
{
	struct session *s = r->s;

	r->job_next = NULL;
	pthread_mutex_lock(&in->lock);
	*s->jobs_tail = r;
	s->jobs_tail = &r->job_next;
	if (!s->in_pool) {
		s->in_pool = true;
		pool_push(in, s);
	}
	pthread_mutex_unlock(&in->lock);
}

int intake_start(struct intake *in, struct mailbox *core, uint32_t threads)
{
	enum { STACK = 2 << 20 }; /* whatever ulimit says: a template nests to a bounded depth, which takes a tenth of it */
	pthread_attr_t a;
	sigset_t all, old;
	int e;

	memset(in, 0, sizeof(*in));
	pthread_mutex_init(&in->lock, NULL);
	pthread_cond_init(&in->some, NULL);
	in->pool_tail = &in->pool;
	in->core = core;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	e = -pthread_attr_init(&a);
	if (!e)
		e = -pthread_attr_setstacksize(&a, STACK);
	while (!e && in->n_threads < threads && in->n_threads < sizeof(in->threads) / sizeof(in->threads[0])) {
		e = -pthread_create(&in->threads[in->n_threads], &a, intake_main, in);
		in->n_threads += !e;
	}
	pthread_attr_destroy(&a);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return in->n_threads ? 0 : e;
}

void intake_stop(struct intake *in)
{
	pthread_mutex_lock(&in->lock);
	in->stop = true;
	pthread_cond_broadcast(&in->some);
	pthread_mutex_unlock(&in->lock);
	while (in->n_threads)
		pthread_join(in->threads[--in->n_threads], NULL);
	pthread_cond_destroy(&in->some);
	pthread_mutex_destroy(&in->lock);
}
