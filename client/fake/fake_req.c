/* SPDX-License-Identifier: MIT */
/*
 * What requests do: one that computes at once makes its data and sends it; a
 * generation moves step by step through its script, or draws.
 *
 * Owns: the life of struct fake_req after intake. Does not own: rings and
 * credits (fake_session.c).
 */
#include "client/fake/fake_int.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AT(field) ((uint32_t)offsetof(struct apr_sqe, field))

static int refuse(uint32_t *at, const char **why, int err, uint32_t where, const char *words)
{
	*at = where;
	*why = words;
	return err;
}

static void *grow(void *p, uint32_t n, uint32_t *cap, size_t each)
{
	if (n < *cap)
		return p;
	uint32_t want = *cap ? *cap * 2 : 64;
	void *q = realloc(p, want * each);

	if (q)
		*cap = want;
	return q;
}

void fake_req_free(struct fake_req *r)
{
	for (uint32_t i = 0; r->samples && i < r->n_samples; i++) {
		free(r->samples[i].text);
		free(r->samples[i].held);
		free(r->samples[i].ids);
	}
	free(r->samples);
	free(r->in);
	free(r->par);
	free(r->ids);
	free(r->data);
	free(r);
}

unsigned fake_req_reason(int err)
{
	switch (err) {
	case -ECANCELED: return APR_FINISH_CANCELLED;
	case -ETIMEDOUT:
	case -ETIME: return APR_FINISH_TIMEOUT;
	case -ESHUTDOWN: return APR_FINISH_DRAINED;
	case -EDOM: return APR_FINISH_NUMERIC;
	default: return APR_FINISH_ERROR;
	}
}

/* ---- beginning ------------------------------------------------------------ */

static struct fake_answer *find_answer(struct fake *f, const struct fake_req *r)
{
	for (size_t i = 0; i < f->script.n_answers; i++) {
		struct fake_answer *a = &f->script.answers[i];

		if (a->op != r->sqe.op || !a->times)
			continue;
		if (a->match && (r->sqe.in_fmt != APR_IN_TEXT || !r->sqe.in_len ||
				 !memmem(r->in, r->sqe.in_len, a->match, strlen(a->match))))
			continue;
		if (a->times != UINT32_MAX)
			a->times--;
		return a;
	}
	return NULL;
}

static int take_ids(struct fake_session *s, struct fake_req *r, uint32_t *at, const char **why)
{
	uint32_t n = r->sqe.in_len / 4;

	if (r->sqe.in_fmt == APR_IN_TEXT) {
		int e = fake_tokenize(&s->f->script.vocab, (char *)r->in, r->sqe.in_len, r->sqe.flags, &r->ids, &r->n_prompt);

		return e ? refuse(at, why, e, 0, "out of memory") : 0;
	}
	r->ids = malloc((size_t)n * 4 + 4);
	if (!r->ids)
		return refuse(at, why, -ENOMEM, 0, "out of memory");
	if (n)
		memcpy(r->ids, r->in, (size_t)n * 4);
	r->n_prompt = n;
	for (uint32_t i = 0; i < n; i++)
		if (r->ids[i] >= s->f->script.vocab.n)
			return refuse(at, why, -EINVAL, AT(in_off), "an id is outside the vocabulary");
	return 0;
}

static struct fake_conv *conv_of(struct fake_session *s, uint64_t handle)
{
	uint32_t index = (uint32_t)handle, generation = (uint32_t)(handle >> 32);

	if (index >= sizeof(s->convs) / sizeof(*s->convs) || !s->convs[index].ids ||
	    s->convs[index].generation != generation)
		return NULL;
	return &s->convs[index];
}

/* A kept conversation's ids go in front of the prompt. */
static int take_conv(struct fake_session *s, struct fake_req *r, uint32_t *at, const char **why)
{
	struct fake_conv *c = conv_of(s, r->sqe.arg);
	uint32_t *ids;

	if (!c)
		return refuse(at, why, -ESTALE, AT(arg), "no such conversation");
	if (c->busy)
		return refuse(at, why, -EINVAL, AT(arg), "the conversation is in use by a request in flight");
	ids = malloc(((size_t)c->n + r->n_prompt + 1) * 4);
	if (!ids)
		return refuse(at, why, -ENOMEM, 0, "out of memory");
	memcpy(ids, c->ids, (size_t)c->n * 4);
	memcpy(ids + c->n, r->ids, (size_t)r->n_prompt * 4);
	free(r->ids);
	r->ids = ids;
	r->n_prompt += c->n;
	r->cached = c->n;
	r->handle = r->sqe.arg;
	c->busy = true;
	return 0;
}

static int begin_generate(struct fake_session *s, struct fake_req *r, uint32_t *at, const char **why)
{
	uint64_t state = 1;
	int e = take_ids(s, r, at, why);

	if (!e && r->sqe.arg)
		e = take_conv(s, r, at, why);
	if (e)
		return e;
	if (!r->n_prompt)
		return refuse(at, why, -EINVAL, AT(in_len), "an empty prompt");
	if (r->n_prompt > s->f->script.n_ctx)
		return refuse(at, why, -ENOSPC, AT(in_len), "the prompt is longer than the context");
	if (r->sqe.n > 64)
		return refuse(at, why, -EINVAL, AT(n), "more than 64 samples");
	if (r->sqe.n > 1 && (r->sqe.flags & APR_SQE_KEEP))
		return refuse(at, why, -EINVAL, AT(n), "KEEP with several samples");
	for (uint32_t i = 0; i < r->view.n_bias; i++)
		if (r->view.bias[i].id >= s->f->script.vocab.n)
			return refuse(at, why, -EINVAL, r->view.at[APR_PARAM_BIAS] + i * 8, "bias of an id outside the vocabulary");
	for (uint32_t i = 0; i < r->view.n_stop_ids; i++)
		if (r->view.stop_ids[i] >= s->f->script.vocab.n)
			return refuse(at, why, -EINVAL, r->view.at[APR_PARAM_STOP_IDS] + i * 4, "stop id outside the vocabulary");
	r->n_samples = r->sqe.n ? r->sqe.n : 1;
	r->samples = calloc(r->n_samples, sizeof(*r->samples));
	if (!r->samples)
		return refuse(at, why, -ENOMEM, 0, "out of memory");
	for (uint32_t i = 0; i < r->n_prompt; i++)
		state = fake_mix(state, r->ids[i]);
	for (uint32_t i = 0; i < r->view.n_resume; i++)
		state = fake_mix(state, r->view.resume[i]);
	for (uint32_t i = 0; i < r->n_samples; i++) {
		r->samples[i].state = state;
		r->samples[i].pos = r->view.n_resume;
		if (r->answer) /* what was received before is not told again */
			for (uint32_t k = 0; k < r->view.n_resume && r->samples[i].step < r->answer->n_steps; r->samples[i].step++)
				k += r->answer->steps[r->samples[i].step].kind == STEP_TOKEN;
	}
	return 0;
}

static int begin_score(struct fake_session *s, struct fake_req *r, uint32_t *at, const char **why)
{
	uint64_t state = 1;
	size_t each = sizeof(struct apr_score) + r->view.logprobs * sizeof(struct apr_top), len = 0;
	int e = take_ids(s, r, at, why);

	if (e)
		return e;
	if (!r->n_prompt)
		return refuse(at, why, -EINVAL, AT(in_len), "SCORE of nothing");
	if (r->n_prompt > s->f->script.n_ctx)
		return refuse(at, why, -ENOSPC, AT(in_len), "more ids than the context holds");
	r->data = malloc(each * r->n_prompt);
	if (!r->data)
		return refuse(at, why, -ENOMEM, 0, "out of memory");
	for (uint32_t i = 1; i < r->n_prompt; i++) {
		struct fake_dist d;
		struct apr_score *sc = (struct apr_score *)(void *)(r->data + len);

		state = fake_mix(state, r->ids[i - 1]);
		if (fake_dist_make(&d, &s->f->script.vocab, state, true))
			return refuse(at, why, -ENOMEM, 0, "out of memory");
		*sc = (struct apr_score){i, r->ids[i], -20.0f, 0};
		for (uint32_t k = 0; k < d.n; k++)
			if (d.id[k] == r->ids[i])
				sc->logprob = d.logprob[k];
		sc->k = fake_dist_top(&d, (struct apr_top *)(void *)(sc + 1), r->view.logprobs);
		len += sizeof(*sc) + sc->k * sizeof(struct apr_top);
		fake_dist_free(&d);
	}
	r->data_len = len;
	r->data_fmt = APR_BLOB_SCORES;
	return 0;
}

static int begin_detokenize(struct fake_session *s, struct fake_req *r, uint32_t *at, const char **why)
{
	const struct fake_vocab *v = &s->f->script.vocab;
	size_t len = 0;
	int e = take_ids(s, r, at, why);

	if (e)
		return e;
	for (uint32_t i = 0; i < r->n_prompt; i++)
		len += v->len[r->ids[i]];
	r->data = malloc(len + 1);
	if (!r->data)
		return refuse(at, why, -ENOMEM, 0, "out of memory");
	for (uint32_t i = 0; i < r->n_prompt; i++) {
		if (r->ids[i] <= FAKE_EOS && !(r->sqe.flags & APR_SQE_PARSE_SPECIAL))
			continue; /* control ids have no text unless asked for */
		memcpy(r->data + r->data_len, v->piece[r->ids[i]], v->len[r->ids[i]]);
		r->data_len += v->len[r->ids[i]];
	}
	r->data_fmt = APR_BLOB_TEXT;
	return 0;
}

/* A scripted answer of an operation that is not GENERATE can fail it, delay it or stall it. */
static int begin_scripted(struct fake_req *r, uint32_t *at, const char **why)
{
	for (size_t i = 0; i < r->answer->n_steps; i++) {
		const struct fake_step *st = &r->answer->steps[i];

		if (st->kind == STEP_ERROR)
			return refuse(at, why, st->err, 0, st->why);
		if (st->kind == STEP_PAUSE)
			r->due = r->began + st->ms * UINT64_C(1000000);
		if (st->kind == STEP_STALL)
			r->stalled = true;
	}
	return 0;
}

int fake_req_begin(struct fake_session *s, struct fake_req *r, uint32_t *at, const char **why)
{
	int e;

	if (!fake_model_of(s->f, r->sqe.model))
		return refuse(at, why, -ESTALE, AT(model), "no such model, or it was unloaded");
	if (r->sqe.op == APR_OP_CHAT) {
		e = fake_chat(r, why);
		if (e)
			return refuse(at, why, e, AT(in_off), *why);
	}
	r->answer = find_answer(s->f, r);
	if (r->answer && r->sqe.op != APR_OP_GENERATE) {
		e = begin_scripted(r, at, why);
		if (e)
			return e;
	}
	switch (r->sqe.op) {
	case APR_OP_GENERATE:
		return begin_generate(s, r, at, why);
	case APR_OP_SCORE:
		return begin_score(s, r, at, why);
	case APR_OP_DETOKENIZE:
		return begin_detokenize(s, r, at, why);
	case APR_OP_TOKENIZE:
		e = fake_tokenize(&s->f->script.vocab, (char *)r->in, r->sqe.in_len, r->sqe.flags, (uint32_t **)(void *)&r->data,
				  &r->n_prompt);
		r->data_len = (size_t)r->n_prompt * 4;
		r->data_fmt = APR_BLOB_IDS;
		return e ? refuse(at, why, e, 0, "out of memory") : 0;
	case APR_OP_FREE: {
		struct fake_conv *c = conv_of(s, r->sqe.arg);

		if (!c)
			return refuse(at, why, -ESTALE, AT(arg), "no such conversation");
		free(c->ids);
		c->ids = NULL;
		c->generation++;
		return 0;
	}
	default:
		return refuse(at, why, -EOPNOTSUPP, 0, "opcode is not supported here");
	}
}

/* ---- holding text back for stop strings ------------------------------------- */

/* Bytes at the end of text that could still become a stop string. */
static uint32_t maybe_stop(const struct apr_param_view *v, const char *text, uint32_t len)
{
	uint32_t pos = 0, most = 0, n;
	const uint8_t *stop;

	while (apr_param_stop(v, &pos, &stop, &n))
		for (uint32_t k = n - 1 < len ? n - 1 : len; k > most; k--)
			if (!memcmp(text + len - k, stop, k)) {
				most = k;
				break;
			}
	return most;
}

static bool find_stop(const struct apr_param_view *v, const char *text, uint32_t len, uint32_t *start)
{
	uint32_t pos = 0, n;
	const uint8_t *stop;
	bool found = false;

	while (apr_param_stop(v, &pos, &stop, &n)) {
		const char *hit = memmem(text, len, stop, n);

		if (hit && (!found || (uint32_t)(hit - text) < *start)) {
			*start = (uint32_t)(hit - text);
			found = true;
		}
	}
	return found;
}

/* Decides how many of the held tokens may go out. */
static void release(struct fake_req *r, struct fake_sample *m)
{
	uint32_t cut, safe;

	if (m->finish) {
		m->out = m->n_held;
		return;
	}
	if (find_stop(&r->view, m->text, m->text_len, &cut)) {
		m->finish = APR_FINISH_STOP_STRING;
		while (m->n_held && m->held[m->n_held - 1].start >= cut)
			m->n_held--;
		if (m->n_held && m->held[m->n_held - 1].end > cut)
			m->held[m->n_held - 1].end = cut;
		m->out = m->n_held;
		return;
	}
	safe = m->text_len - maybe_stop(&r->view, m->text, m->text_len);
	for (m->out = 0; m->out < m->n_held && m->held[m->out].end <= safe;)
		m->out++;
}

static bool hold(struct fake_session *s, struct fake_sample *m, uint32_t id, float logprob, const struct apr_top *top,
		 uint32_t n_top)
{
	const struct fake_vocab *v = &s->f->script.vocab;
	uint32_t len = v->len[id];

	if (m->text_len + len > m->text_cap) {
		uint32_t cap = (m->text_len + len) * 2 + 64;
		char *t = realloc(m->text, cap);

		if (!t)
			return false;
		m->text = t;
		m->text_cap = cap;
	}
	struct fake_held *h = grow(m->held, m->n_held, &m->cap_held, sizeof(*h));

	if (!h)
		return false;
	m->held = h;
	h = &m->held[m->n_held++];
	*h = (struct fake_held){.id = id, .logprob = logprob, .start = m->text_len, .end = m->text_len + len, .n_top = n_top};
	if (n_top)
		memcpy(h->top, top, n_top * sizeof(*top));
	memcpy(m->text + m->text_len, v->piece[id], len);
	m->text_len += len;
	m->state = fake_mix(m->state, id);
	m->pos++;
	return true;
}

/* ---- writing ----------------------------------------------------------------- */

static size_t sub_blob(uint8_t *out, unsigned fmt, const void *data, size_t len)
{
	struct apr_blob b = {(uint32_t)len, (uint16_t)fmt, 0};

	memcpy(out, &b, sizeof(b));
	memcpy(out + sizeof(b), data, len);
	memset(out + sizeof(b) + len, 0, -len & 7);
	return sizeof(b) + len + (-len & 7);
}

static bool write_token(struct fake_session *s, struct fake_req *r, struct fake_sample *m, uint16_t sample)
{
	const struct fake_held *h = &m->held[0];
	const char *text = m->text + h->start;
	uint32_t len = h->end - h->start;
	struct apr_cqe e = {.user_data = r->sqe.user_data, .res = (int32_t)h->id, .flags = APR_CQE_MORE,
			    .type = APR_CQE_TOKEN, .pos = r->view.n_resume + m->delivered, .logprob = h->logprob,
			    .sample = sample};
	uint8_t *list;
	size_t n = 0;
	bool ok;

	if (len <= APR_CQE_TEXT_MAX) {
		memcpy(e.u.text, text, len);
		e.text_len = (uint8_t)len;
		return fake_emit(s, &e, APR_BLOB_TOP, h->n_top ? h->top : NULL, h->n_top * sizeof(struct apr_top));
	}
	if (!h->n_top)
		return fake_emit(s, &e, APR_BLOB_TEXT, text, len);
	list = malloc(len + sizeof(h->top) + 48);
	if (!list)
		return false;
	n = sub_blob(list, APR_BLOB_TEXT, text, len);
	n += sub_blob(list + n, APR_BLOB_TOP, h->top, h->n_top * sizeof(struct apr_top));
	ok = fake_emit(s, &e, APR_BLOB_LIST, list, n);
	free(list);
	return ok;
}

/* Lets the first releasable token go: into the ring, or into the list of a request that does not stream. */
static int deliver(struct fake_session *s, struct fake_req *r, struct fake_sample *m, uint16_t sample)
{
	uint32_t *ids = grow(m->ids, m->n_ids, &m->cap_ids, sizeof(*ids)), gone = m->held[0].end;

	if (!ids) {
		r->fail = -ENOMEM;
		return 1;
	}
	m->ids = ids;
	if (!(r->sqe.flags & APR_SQE_NO_STREAM) && !write_token(s, r, m, sample))
		return 0;
	m->ids[m->n_ids++] = m->held[0].id;
	m->delivered++;
	s->tokens++;
	m->n_held--;
	m->out--;
	memmove(m->held, m->held + 1, m->n_held * sizeof(*m->held));
	if (!m->n_held) {
		m->text_len = 0;
		return 1;
	}
	if (gone > 4096) { /* keeps the text short without moving it at every token */
		memmove(m->text, m->text + gone, m->text_len - gone);
		m->text_len -= gone;
		for (uint32_t i = 0; i < m->n_held; i++) {
			m->held[i].start -= gone;
			m->held[i].end -= gone;
		}
	}
	return 1;
}

/* ---- drawing ------------------------------------------------------------------ */

static void got(struct fake_session *s, struct fake_req *r, struct fake_sample *m, uint32_t id, float logprob,
		const struct apr_top *top, uint32_t n_top)
{
	bool ignore = r->view.sampling && (r->view.sampling->set & APR_SET_IGNORE_EOS) && r->view.sampling->ignore_eos;
	bool stop = id == FAKE_EOS && !ignore;

	for (uint32_t i = 0; i < r->view.n_stop_ids; i++)
		stop = stop || r->view.stop_ids[i] == id;
	if (stop)
		m->finish = APR_FINISH_STOP;
	else if (!hold(s, m, id, logprob, top, n_top))
		r->fail = -ENOMEM;
	release(r, m);
}

static void draw(struct fake_session *s, struct fake_req *r, struct fake_sample *m, uint32_t sample)
{
	bool ignore = r->view.sampling && (r->view.sampling->set & APR_SET_IGNORE_EOS) && r->view.sampling->ignore_eos;
	struct fake_dist d;
	struct apr_top top[APR_LOGPROBS_MAX];
	int k;

	if (fake_dist_make(&d, &s->f->script.vocab, m->state, !ignore && m->pos >= 8)) {
		r->fail = -ENOMEM;
		return;
	}
	k = fake_dist_draw(&d, &r->view, r->sqe.seed, sample, m->pos);
	if (k < 0) {
		r->fail = -EDOM;
		r->why = "every token is banned";
	} else {
		got(s, r, m, d.id[k], d.logprob[k], top, fake_dist_top(&d, top, r->view.logprobs));
	}
	fake_dist_free(&d);
}

/* A scripted token's companions: itself first, then words that were not taken. */
static uint32_t scripted_top(const struct fake_req *r, uint32_t id, float logprob, struct apr_top *top)
{
	uint32_t n = r->view.logprobs;

	for (uint32_t i = 0; i < n; i++)
		top[i] = (struct apr_top){i ? FAKE_BYTE0 + i : id, i ? logprob - 1.0f - (float)i : logprob};
	return n;
}

static int scripted(struct fake_session *s, struct fake_req *r, struct fake_sample *m, uint64_t now)
{
	struct apr_top top[APR_LOGPROBS_MAX];
	const struct fake_step *st;

	if (m->step >= r->answer->n_steps) {
		m->finish = r->answer->finish;
		release(r, m);
		return 1;
	}
	st = &r->answer->steps[m->step];
	if (st->kind != STEP_TOKEN || ++m->repeated >= st->repeat) {
		m->step++;
		m->repeated = 0;
	}
	switch (st->kind) {
	case STEP_TOKEN:
		got(s, r, m, st->id, st->logprob, top, scripted_top(r, st->id, st->logprob, top));
		return 1;
	case STEP_PAUSE:
		r->due = now + st->ms * UINT64_C(1000000);
		return 0;
	case STEP_STALL:
		r->stalled = true;
		return 0;
	case STEP_ERROR:
		r->fail = st->err;
		r->why = st->why;
		return 1;
	case STEP_BYE:
		fake_session_end(s, APR_REASON_RESTART, "scripted end");
		return 0;
	case STEP_KILL:
		if (s->f->o.may_kill)
			raise(SIGKILL);
		/* fall through */
	case STEP_DROP:
		s->gone = true;
		return 0;
	}
	return 0;
}

static int next_token(struct fake_session *s, struct fake_req *r, struct fake_sample *m, uint32_t sample, uint64_t now)
{
	uint32_t most = r->sqe.max_tokens;

	if (m->pos >= most || r->n_prompt + m->pos >= s->f->script.n_ctx) {
		m->finish = APR_FINISH_LENGTH;
		release(r, m);
		return 1;
	}
	if (s->f->script.token_ms) {
		if (r->due && now >= r->due) {
			r->due = 0;
		} else {
			r->due = now + s->f->script.token_ms * UINT64_C(1000000);
			return 0;
		}
	}
	if (!r->first)
		r->first = now;
	if (r->answer)
		return scripted(s, r, m, now);
	draw(s, r, m, sample);
	return 1;
}

/* ---- moving ------------------------------------------------------------------- */

static int step_sample(struct fake_session *s, struct fake_req *r, uint32_t i, uint64_t now)
{
	struct fake_sample *m = &r->samples[i];

	if (m->out)
		return deliver(s, r, m, (uint16_t)i);
	if (!m->finish)
		return next_token(s, r, m, i, now);
	if (r->n_samples > 1) {
		struct apr_cqe e = {.user_data = r->sqe.user_data, .flags = APR_CQE_MORE, .type = APR_CQE_SAMPLE_END,
				    .pos = m->delivered, .sample = (uint16_t)i,
				    .aux = APR_AUX(m->finish, APR_BACKEND_FAKE, APR_ROUTE_NONE, 0)};
		if (!fake_emit(s, &e, 0, NULL, 0))
			return 0;
	}
	m->told = true;
	return 1;
}

/* One piece of a result made at once; SCORES are cut between records. */
static int send_data(struct fake_session *s, struct fake_req *r, uint16_t sample)
{
	struct apr_cqe e = {.user_data = r->sqe.user_data, .flags = APR_CQE_MORE, .type = APR_CQE_DATA, .sample = sample};
	size_t left = r->data_len - r->data_sent, n = left < s->g.max_blob ? left : s->g.max_blob;

	if (r->data_fmt == APR_BLOB_SCORES) {
		size_t pos = r->data_sent, end = pos;
		const struct apr_score *sc;

		while (end < r->data_len) {
			sc = (const struct apr_score *)(const void *)(r->data + end);
			end += sizeof(*sc) + sc->k * sizeof(struct apr_top);
			if (end - r->data_sent > s->g.max_blob)
				break;
			pos = end;
		}
		n = pos - r->data_sent;
	} else if (r->data_fmt == APR_BLOB_IDS) {
		n &= ~(size_t)3;
	}
	if (!n || !fake_emit(s, &e, r->data_fmt, r->data + r->data_sent, n))
		return 0;
	r->data_sent += n;
	return 1;
}

/* NO_STREAM: the samples' ids, one after the other, as data. */
static bool next_unsent(struct fake_req *r)
{
	while (r->turn < r->n_samples) {
		struct fake_sample *m = &r->samples[r->turn++];

		if (!m->n_ids)
			continue;
		free(r->data);
		r->data = (uint8_t *)m->ids;
		m->ids = NULL;
		r->data_len = (size_t)m->n_ids * 4;
		r->data_sent = 0;
		r->data_fmt = APR_BLOB_IDS;
		return true;
	}
	return false;
}

static int keep(struct fake_session *s, struct fake_req *r)
{
	uint32_t n = r->n_prompt + r->samples[0].n_ids, i = 0;
	struct fake_conv *c;
	uint32_t *ids = malloc((size_t)n * 4 + 4);

	while (i < sizeof(s->convs) / sizeof(*s->convs) && s->convs[i].ids)
		i++;
	if (r->handle)
		i = (uint32_t)r->handle;
	if (!ids || i >= sizeof(s->convs) / sizeof(*s->convs)) {
		free(ids);
		return -ENOSPC;
	}
	memcpy(ids, r->ids, (size_t)r->n_prompt * 4);
	if (r->samples[0].ids)
		memcpy(ids + r->n_prompt, r->samples[0].ids, (size_t)r->samples[0].n_ids * 4);
	c = &s->convs[i];
	free(c->ids);
	if (!c->generation)
		c->generation = 1; /* so that no handle is 0 */
	c->ids = ids;
	c->n = n;
	r->handle = (uint64_t)c->generation << 32 | i;
	return 0;
}

static int step_generate(struct fake_session *s, struct fake_req *r, uint64_t now)
{
	bool busy = false;

	if (r->data && r->data_sent < r->data_len)
		return send_data(s, r, (uint16_t)(r->turn - 1));
	if (!r->data)
		for (uint32_t i = 0; i < r->n_samples; i++) {
			uint32_t k = (r->turn + i) % r->n_samples;

			if (r->samples[k].told)
				continue;
			busy = true;
			if (step_sample(s, r, k, now)) {
				r->turn = (k + 1) % r->n_samples;
				return 1;
			}
			break;
		}
	if (busy || s->dead || s->gone)
		return 0;
	if (r->sqe.flags & APR_SQE_KEEP) {
		int e = keep(s, r);

		if (e) {
			r->fail = e;
			r->why = "no room for another conversation";
			return 1;
		}
	}
	if (r->sqe.flags & APR_SQE_NO_STREAM) {
		if (!r->data)
			r->turn = 0;
		if (next_unsent(r))
			return 1;
	}
	fake_finish(s, r, 0, 0, NULL, r->samples[0].finish);
	return 2;
}

int fake_req_step(struct fake_session *s, struct fake_req *r, uint64_t now)
{
	if (r->deadline && now >= r->deadline)
		r->fail = -ETIMEDOUT;
	if (r->parked && now >= r->parked)
		r->fail = -ETIME;
	if (r->fail) {
		fake_finish(s, r, r->fail, r->fail_at, r->why, fake_req_reason(r->fail));
		return 2;
	}
	if (r->stalled || (r->due && now < r->due))
		return 0;
	if (r->sqe.op == APR_OP_GENERATE) {
		if (!s->f->script.token_ms)
			r->due = 0;
		return step_generate(s, r, now);
	}
	if (r->data_sent < r->data_len)
		return send_data(s, r, 0);
	fake_finish(s, r, 0, 0, NULL, APR_FINISH_NONE);
	return 2;
}
