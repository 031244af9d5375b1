/* SPDX-License-Identifier: MIT */
/* Owns: an answer as it grows, and showing it. See answer.h. Does not own: sampling (the daemon's). */
#include "client/aprctl/answer.h"
#include "shm/wire.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static bool add_text(struct ctl_sample *m, const char *text, size_t len)
{
	if (m->len + len > m->cap) {
		size_t cap = (m->len + len) * 2 + 256;
		char *more = realloc(m->text, cap);

		if (!more)
			return false;
		m->text = more;
		m->cap = cap;
	}
	memcpy(m->text + m->len, text, len);
	m->len += len;
	return true;
}

static bool add_id(struct ctl_sample *m, uint32_t id)
{
	if (m->n_ids == m->cap_ids) {
		size_t cap = m->cap_ids ? m->cap_ids * 2 : 256;
		uint32_t *more = realloc(m->ids, cap * sizeof(*more));

		if (!more)
			return false;
		m->ids = more;
		m->cap_ids = cap;
	}
	m->ids[m->n_ids++] = id;
	return true;
}

static json_t *logprob_json(struct apr *s, const struct apr_cqe *e)
{
	size_t n = 0;
	const struct apr_top *top = apr_cqe_top(s, e, &n);
	json_t *list = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(list, json_pack("[I, o]", (json_int_t)top[i].id, ctl_json_float(top[i].logprob)));
	return json_pack("{s:i, s:o, s:o}", "id", e->res, "logprob", ctl_json_float(e->logprob), "top", list);
}

static void print_logprob(const struct ctl_answer *a, struct apr *s, const struct apr_cqe *e, const char *text, size_t len)
{
	size_t n = 0;
	const struct apr_top *top = apr_cqe_top(s, e, &n);

	printf("%8d %9.4f  %.*s", e->res, (double)e->logprob, (int)len, text ? text : "");
	printf("%s\t%s", ctl_plain(a->c), ctl_dim(a->c));
	for (size_t i = 0; i < n; i++)
		printf(" %u:%.4f", top[i].id, (double)top[i].logprob);
	printf("%s\n", ctl_plain(a->c));
}

int ctl_answer_entry(void *arg, struct apr *s, const struct apr_cqe *e)
{
	struct ctl_answer *a = arg;
	struct ctl_sample *m = &a->samples[e->sample < a->n ? e->sample : 0];
	size_t len = 0;
	const char *text;

	if (e->type == APR_CQE_SAMPLE_END)
		m->finish = APR_AUX_REASON(e->aux);
	if (e->type != APR_CQE_TOKEN && e->type != APR_CQE_PIECE)
		return CTL_OK;
	text = apr_cqe_text(s, e, &len);
	if (e->type == APR_CQE_TOKEN && !add_id(m, (uint32_t)e->res))
		return ctl_fail(a->c, "out of memory");
	if (text && !add_text(m, text, len))
		return ctl_fail(a->c, "out of memory");
	if (m->logprobs && e->type == APR_CQE_TOKEN)
		json_array_append_new(m->logprobs, logprob_json(s, e));
	if (a->stream && GIVEN(a->c, KEY_LOGPROBS)) {
		if (e->type == APR_CQE_TOKEN)
			print_logprob(a, s, e, text, len);
		a->last = '\n';
	} else if (a->stream && text && len) {
		fwrite(text, 1, len, stdout);
		fflush(stdout);
		a->last = text[len - 1];
		if (ferror(stdout)) /* no use in going on; a reader that went away has had enough and is told nothing */
			return errno == EPIPE ? CTL_FAIL : ctl_fail(a->c, "standard output: %s", strerror(errno));
	}
	return CTL_OK;
}

/* ---- the request ------------------------------------------------------------------ */

static int add_params(const struct ctl *c, struct apr *s, struct apr_sqe *q)
{
	size_t lens[CTL_STOPS], cap = 1024 + c->n_bias * 8;
	struct apr_params p;
	void *buf;
	int e;

	for (size_t i = 0; i < c->n_stop; i++) {
		lens[i] = strlen(c->stop[i]);
		cap += lens[i] + 8;
	}
	cap = (cap + 7) & ~(size_t)7;
	buf = malloc(cap);
	if (!buf)
		return -ENOMEM;
	apr_params_init(&p, buf, cap);
	if (c->sampling.set)
		apr_params_sampling(&p, &c->sampling);
	if (GIVEN(c, KEY_LOGPROBS))
		apr_params_logprobs(&p, c->logprobs);
	if (c->n_bias)
		apr_params_bias(&p, c->bias_ids, c->bias, c->n_bias);
	if (c->n_stop)
		apr_params_stop(&p, c->stop, lens, c->n_stop);
	e = p.len || p.err ? apr_sqe_params(s, q, &p) : 0;
	free(buf);
	return e;
}

uint64_t ctl_draw_seed(void)
{
	uint64_t v = 0;

	if (getrandom(&v, sizeof(v), 0) != sizeof(v))
		v = (uint64_t)(uintptr_t)&v * UINT64_C(0x9e3779b97f4a7c15);
	return v >> 11;
}

int ctl_answer_submit(const struct ctl_answer *a, struct apr *s, struct apr_sqe *q, const struct apr_model_row *row)
{
	const struct ctl *c = a->c;
	int e;

	apr_sqe_user_data(q, 1);
	apr_sqe_model(q, row->id);
	apr_sqe_timeout(q, c->timeout_ms);
	apr_sqe_seed(q, c->seed);
	q->n = (uint16_t)(a->n > 1 ? a->n : 0);
	q->prio = (uint8_t)c->prio;
	e = add_params(c, s, q);
	if (e)
		return ctl_fail(c, "the options: %s", apr_strerror(e));
	e = apr_submit(s);
	return e < 0 ? ctl_fail(c, "submitting: %s", apr_strerror(e)) : CTL_OK;
}

/* ---- printing --------------------------------------------------------------------- */

static void set_sample(json_t *j, const struct ctl_sample *m)
{
	ctl_json_set_text(j, m->text ? m->text : "", m->len);
	json_object_set_new(j, "ids", ctl_json_ids(m->ids, m->n_ids));
	if (m->logprobs)
		json_object_set(j, "logprobs", m->logprobs);
}

static int print_json(struct ctl *c, const struct ctl_answer *a, const struct apr_model_row *row, const struct ctl_last *l)
{
	json_t *j = json_object(), *list;
	char receipt[33];

	ctl_hex(row->receipt, sizeof(row->receipt), receipt);
	set_sample(j, &a->samples[0]);
	json_object_set_new(j, "seed", ctl_json_u64(c->seed));
	json_object_set_new(j, "numerics", json_string(receipt));
	json_object_set_new(j, "prompt_tokens", json_integer(l->cost.prompt));
	json_object_set_new(j, "cached_tokens", json_integer(l->cost.cached));
	json_object_set_new(j, "finish", json_string(apr_wire_finish(l->finish)));
	json_object_set_new(j, "queue_us", json_integer(l->cost.queue_us));
	json_object_set_new(j, "prefill_us", json_integer(l->cost.prefill_us));
	json_object_set_new(j, "decode_us", json_integer(l->cost.decode_us));
	json_object_set_new(j, "backend", json_string(apr_wire_backend(l->backend)));
	if (a->n > 1) {
		list = json_array();
		for (uint32_t i = 0; i < a->n; i++) {
			json_t *one = json_object();

			set_sample(one, &a->samples[i]);
			json_object_set_new(one, "finish", json_string(apr_wire_finish(a->samples[i].finish)));
			json_array_append_new(list, one);
		}
		json_object_set_new(j, "samples", list);
	}
	return ctl_print_json(c, j);
}

/* Of a request that broke off, those samples that gave something. */
static void print_samples(struct ctl *c, const struct ctl_answer *a, bool broke)
{
	for (uint32_t i = 0; i < a->n; i++) {
		const struct ctl_sample *m = &a->samples[i];

		if (broke && !m->len && !m->n_ids)
			continue;
		printf("%s--- %u of %u (%s)%s\n%.*s\n", ctl_dim(c), i + 1, a->n, apr_wire_finish(m->finish), ctl_plain(c),
		       (int)m->len, m->text ? m->text : "");
	}
}

/* An answer that ended by its length before the tokens asked for: the context was full. */
static void note_cut_answers(const struct ctl *c, const struct ctl_answer *a, const struct ctl_last *l)
{
	uint32_t max = a->max;

	for (uint32_t i = 0; i < a->n && max != UINT32_MAX; i++)
		if ((a->n > 1 ? a->samples[i].finish : l->finish) == APR_FINISH_LENGTH && a->samples[i].n_ids < max) {
			ctl_note(c, "stopped at the context's end: %zu of %u tokens", a->samples[i].n_ids, max);
			return; /* once: the samples share one prompt, so that all end there */
		}
}

int ctl_answer_end(struct ctl_answer *a, const struct apr_model_row *row, const struct ctl_last *l)
{
	struct ctl *c = a->c;
	bool broke = l->res && !l->interrupted;
	int status = CTL_OK;

	if (c->json && !(broke && !a->samples[0].n_ids))
		status = print_json(c, a, row, l);
	else if (a->stream && a->last && a->last != '\n')
		putchar('\n');
	else if (!a->stream && !c->json)
		print_samples(c, a, broke);
	status = ctl_flush(c, status);
	if (!status && !l->res)
		note_cut_answers(c, a, l);
	if (l->interrupted)
		return CTL_INTR;
	return broke ? ctl_request_failed(c, l) : status;
}

/* ---- the whole ---------------------------------------------------------------------- */

int ctl_answer_init(struct ctl_answer *a, struct ctl *c, uint32_t n, uint32_t max)
{
	*a = (struct ctl_answer){.c = c, .n = n, .max = max, .stream = !c->json && n == 1};
	a->samples = calloc(n, sizeof(*a->samples));
	if (!a->samples)
		return ctl_fail(c, "out of memory");
	for (uint32_t i = 0; i < n; i++)
		a->samples[i].logprobs = c->json && GIVEN(c, KEY_LOGPROBS) ? json_array() : NULL;
	return CTL_OK;
}

void ctl_answer_free(struct ctl_answer *a)
{
	for (uint32_t i = 0; a->samples && i < a->n; i++) {
		free(a->samples[i].text);
		free(a->samples[i].ids);
		json_decref(a->samples[i].logprobs);
	}
	free(a->samples);
	a->samples = NULL;
}
