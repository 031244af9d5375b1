/* SPDX-License-Identifier: MIT */
/* Owns: the checks of GENERATE: counts, seeds, sampling, stops, samples, conversations, replay. */
#include "client/aprctl/conform.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) ((uint32_t)offsetof(struct apr_sqe, field))
#define OP(o) (UINT64_C(1) << (o))
#define GEN OP(APR_OP_GENERATE)

static bool same_bits(const float *a, const float *b, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t x, y;

		memcpy(&x, &a[i], 4);
		memcpy(&y, &b[i], 4);
		if (x != y)
			return false;
	}
	return true;
}

/* Greedy, no end token, n tokens, into a. */
static enum conf_result greedy(struct conf *k, uint32_t n, struct conf_answer *a)
{
	uint64_t buf[32];
	struct apr_params p;
	struct apr_sqe q = conf_generate(k, n, 1);

	apr_params_init(&p, buf, sizeof(buf));
	conf_greedy(&p, true);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, a));
	CHECK(k, !a->res, "res %d (%s)", a->res, a->why);
	CHECK(k, a->n == n && a->finish == APR_FINISH_LENGTH, "%u of %u tokens, finish %u", a->n, n, a->finish);
	return CONF_OK;
}

static enum conf_result plain(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_generate(k, 8, 3);
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res, "res %d (%s)", k->a.res, k->a.why);
	CHECK(k, k->a.type == APR_CQE_FINAL, "the last entry's type is %u", k->a.type);
	CHECK(k, k->a.n <= 8, "%u tokens of at most 8", k->a.n);
	CHECK(k, !k->a.n || !k->a.first_pos, "the first token has position %u", k->a.first_pos);
	CHECK(k, k->a.finish == APR_FINISH_STOP || k->a.finish == APR_FINISH_LENGTH, "finish %u", k->a.finish);
	CHECK(k, k->a.backend, "no backend named");
	CHECK(k, k->a.cost.prompt, "no prompt tokens counted");
	CHECK(k, !k->a.broken, "a chunk of text is not whole UTF-8");
	CHECK(k, !k->a.cost.handle, "a handle without KEEP");
	for (uint32_t i = 0; i < k->a.n; i++)
		CHECK(k, k->a.ids[i] < k->row.n_vocab && k->a.logprob[i] <= 0.0f && isfinite(k->a.logprob[i]),
		      "token %u: id %u, log-probability %g", i, k->a.ids[i], (double)k->a.logprob[i]);
	return CONF_OK;
}

static enum conf_result counts(struct conf *k)
{
	PASS(conf_open(k));
	for (uint32_t n = 0; n <= 3; n++)
		PASS(greedy(k, n, &k->a));
	return greedy(k, 17, &k->a);
}

static enum conf_result seeds(struct conf *k)
{
	bool differ = false;

	PASS(conf_open(k));
	for (uint64_t seed = 0; seed < 3; seed++) {
		struct apr_sqe q = conf_generate(k, 12, seed);

		PASS(conf_do(k, &q, &k->a));
		q = conf_generate(k, 12, seed);
		PASS(conf_do(k, &q, &k->b));
		CHECK(k, k->a.n == k->b.n && !memcmp(k->a.ids, k->b.ids, k->a.n * 4), "seed %d: other ids the second time",
		      (int)seed);
		CHECK(k, same_bits(k->a.logprob, k->b.logprob, k->a.n), "seed %d: other log-probability bits", (int)seed);
	}
	for (uint64_t seed = 10; seed < 18 && !differ; seed++) {
		struct apr_sqe q = conf_generate(k, 12, seed);

		PASS(conf_do(k, &q, &k->b));
		differ = k->a.n != k->b.n || memcmp(k->a.ids, k->b.ids, k->a.n * 4);
	}
	CHECK(k, differ, "eight seeds, one text: the seed does nothing");
	return CONF_OK;
}

static enum conf_result zero_temperature(struct conf *k)
{
	struct apr_sampling s = {.set = APR_SET_TOP_K | APR_SET_IGNORE_EOS, .top_k = 1, .ignore_eos = 1};
	uint64_t buf[32];
	struct apr_params p;
	struct apr_sqe q;

	PASS(conf_open(k));
	PASS(greedy(k, 10, &k->a));
	apr_params_init(&p, buf, sizeof(buf));
	apr_params_sampling(&p, &s);
	q = conf_generate(k, 10, 77);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, k->b.n == 10 && !memcmp(k->a.ids, k->b.ids, 40), "temperature 0 and top-k 1 differ");
	return CONF_OK;
}

static enum conf_result settings_do_not_stick(struct conf *k)
{
	struct apr_sampling s = {.set = APR_SET_TEMPERATURE | APR_SET_PRESENCE, .temperature = 5, .presence_penalty = 2};
	uint64_t buf[32];
	struct apr_params p;
	struct apr_sqe q;

	PASS(conf_open(k));
	PASS(greedy(k, 10, &k->a));
	apr_params_init(&p, buf, sizeof(buf));
	apr_params_sampling(&p, &s);
	q = conf_generate(k, 10, 3);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->b));
	PASS(greedy(k, 10, &k->b));
	CHECK(k, !memcmp(k->a.ids, k->b.ids, 40) && same_bits(k->a.logprob, k->b.logprob, 10),
	      "a request's settings touch the next one");
	return CONF_OK;
}

static enum conf_result stop_string(struct conf *k)
{
	uint64_t buf[64];
	struct apr_params p;
	struct apr_sqe q;
	char stop[5] = {0};
	const char *s = stop, *at;
	size_t len = 4, from;

	PASS(conf_open(k));
	PASS(greedy(k, 16, &k->a));
	CHECK(k, k->a.len > 12, "16 tokens have %zu bytes of text", k->a.len);
	for (from = k->a.len / 2; from && (k->a.text[from] & 0xc0) == 0x80; from--)
		;
	memcpy(stop, k->a.text + from, 4);
	at = memmem(k->a.text, k->a.len, stop, 4);
	apr_params_init(&p, buf, sizeof(buf));
	conf_greedy(&p, true);
	apr_params_stop(&p, &s, &len, 1);
	q = conf_generate(k, 16, 1);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, !k->b.res && k->b.finish == APR_FINISH_STOP_STRING, "res %d, finish %u", k->b.res, k->b.finish);
	CHECK(k, k->b.len == (size_t)(at - k->a.text) && !memcmp(k->b.text, k->a.text, k->b.len),
	      "stopped at byte %zu of the text, the stop stands at %zu", k->b.len, (size_t)(at - k->a.text));
	return CONF_OK;
}

/* A stop that never comes holds nothing back for good. */
static enum conf_result stop_never(struct conf *k)
{
	uint64_t buf[64];
	struct apr_params p;
	struct apr_sqe q;
	char stop[16];
	const char *s = stop;
	size_t len;

	PASS(conf_open(k));
	PASS(greedy(k, 12, &k->a));
	len = k->a.len < 8 ? k->a.len : 8;
	memcpy(stop, k->a.text + k->a.len - len, len); /* the end of the text, and one byte more */
	stop[len++] = '\x01';
	apr_params_init(&p, buf, sizeof(buf));
	conf_greedy(&p, true);
	apr_params_stop(&p, &s, &len, 1);
	q = conf_generate(k, 12, 1);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, k->b.n == 12 && k->b.len == k->a.len && !memcmp(k->a.text, k->b.text, k->a.len),
	      "%zu bytes of text without a stop, %zu with one that does not come", k->a.len, k->b.len);
	return CONF_OK;
}

static enum conf_result stop_ids(struct conf *k)
{
	uint64_t buf[64];
	struct apr_params p;
	struct apr_sqe q;
	uint32_t first = 0;

	PASS(conf_open(k));
	PASS(greedy(k, 8, &k->a));
	while (k->a.ids[first] != k->a.ids[5])
		first++;
	apr_params_init(&p, buf, sizeof(buf));
	conf_greedy(&p, true);
	apr_params_stop_ids(&p, &k->a.ids[5], 1);
	q = conf_generate(k, 8, 1);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, !k->b.res && k->b.finish == APR_FINISH_STOP, "res %d, finish %u", k->b.res, k->b.finish);
	CHECK(k, k->b.n == first && !memcmp(k->a.ids, k->b.ids, first * 4), "%u tokens, the stop id is token %u", k->b.n, first);
	return CONF_OK;
}

static enum conf_result bias(struct conf *k)
{
	uint64_t buf[64];
	struct apr_params p;
	struct apr_sqe q;
	float ban = -INFINITY, up = 1e4f;
	uint32_t other;

	PASS(conf_open(k));
	PASS(greedy(k, 3, &k->a));
	apr_params_init(&p, buf, sizeof(buf));
	conf_greedy(&p, true);
	apr_params_bias(&p, &k->a.ids[0], &ban, 1);
	q = conf_generate(k, 3, 1);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, !k->b.res && k->b.n == 3, "res %d", k->b.res);
	for (int i = 0; i < 3; i++)
		CHECK(k, k->b.ids[i] != k->a.ids[0], "a banned id comes all the same");
	other = k->b.ids[0];
	apr_params_init(&p, buf, sizeof(buf));
	conf_greedy(&p, true);
	apr_params_bias(&p, &other, &up, 1);
	q = conf_generate(k, 3, 1);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, k->b.n == 3 && k->b.ids[0] == other && k->b.ids[2] == other, "an id pushed up by 10,000 does not come");
	return CONF_OK;
}

static enum conf_result logprobs(struct conf *k)
{
	uint64_t buf[32];
	struct apr_params p;
	struct apr_sqe q;

	PASS(conf_open(k));
	apr_params_init(&p, buf, sizeof(buf));
	conf_greedy(&p, true);
	apr_params_logprobs(&p, 4);
	q = conf_generate(k, 6, 1);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res && k->a.n == 6, "res %d, %u tokens", k->a.res, k->a.n);
	for (uint32_t i = 0; i < 6; i++) {
		const struct apr_top *t = k->a.top[i];

		CHECK(k, k->a.n_top[i] == 4, "token %u: %u best where 4 were asked for", i, k->a.n_top[i]);
		CHECK(k, t[0].logprob >= t[1].logprob && t[1].logprob >= t[2].logprob && t[2].logprob >= t[3].logprob,
		      "token %u: the best are not in order", i);
		CHECK(k, t[0].id == k->a.ids[i] && t[0].logprob == k->a.logprob[i], "token %u: greedy, and not the best", i);
	}
	return CONF_OK;
}

static enum conf_result samples(struct conf *k)
{
	struct apr_sqe q;
	uint32_t of[3] = {0, 0, 0};

	PASS(conf_open(k));
	q = conf_generate(k, 6, 9);
	q.n = 3;
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res, "res %d (%s)", k->a.res, k->a.why);
	CHECK(k, k->a.ended == 3, "%u SAMPLE_END entries for 3 samples", k->a.ended);
	for (uint32_t i = 0; i < k->a.n; i++) {
		CHECK(k, k->a.sample[i] < 3, "sample %u of 3", k->a.sample[i]);
		of[k->a.sample[i]]++;
	}
	CHECK(k, of[0] <= 6 && of[1] <= 6 && of[2] <= 6, "a sample has more than 6 tokens");
	q = conf_generate(k, 6, 9);
	PASS(conf_do(k, &q, &k->b));
	for (uint32_t i = 0, j = 0; i < k->a.n; i++)
		if (!k->a.sample[i])
			CHECK(k, j < k->b.n && k->a.ids[i] == k->b.ids[j++], "sample 0 is not what one sample alone is");
	return CONF_OK;
}

static enum conf_result no_stream(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_generate(k, 9, 4);
	PASS(conf_do(k, &q, &k->a));
	q = conf_generate(k, 9, 4);
	q.flags |= APR_SQE_NO_STREAM;
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, !k->b.res, "res %d (%s)", k->b.res, k->b.why);
	CHECK(k, !k->b.n, "%u TOKEN entries with NO_STREAM", k->b.n);
	CHECK(k, k->b.data_len == k->a.n * 4u && !memcmp(k->b.data, k->a.ids, k->b.data_len),
	      "%zu bytes of ids, streamed it was %u ids", k->b.data_len, k->a.n);
	return CONF_OK;
}

static enum conf_result conversation(struct conf *k)
{
	struct apr_sqe q;
	struct raw mine;
	uint64_t handle;

	PASS(conf_open(k));
	q = conf_generate(k, 4, 2);
	q.flags |= APR_SQE_KEEP;
	PASS(conf_do(k, &q, &k->a));
	handle = k->a.cost.handle;
	CHECK(k, !k->a.res && handle, "KEEP gives res %d, handle %llx", k->a.res, (unsigned long long)handle);
	q = conf_generate(k, 4, 2);
	q.arg = handle;
	q.flags = APR_SQE_KEEP;
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, !k->b.res, "going on gives %d (%s)", k->b.res, k->b.why);
	CHECK(k, k->b.cost.prompt > k->a.cost.prompt, "%u prompt tokens, then %u: what was kept does not count",
	      k->a.cost.prompt, k->b.cost.prompt);
	handle = k->b.cost.handle;
	mine = k->s; /* another session must not have it */
	PASS(conf_open(k));
	q = conf_generate(k, 1, 1);
	q.arg = handle;
	enum conf_result r = conf_do(k, &q, &k->a);
	raw_close(&k->s);
	k->s = mine;
	PASS(r);
	CHECK(k, k->a.res == -ESTALE, "another session's handle gives %d", k->a.res);
	q = conf_sqe(k, APR_OP_FREE);
	q.arg = handle;
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res && k->a.type == APR_CQE_ACK, "FREE gives %d, type %u", k->a.res, k->a.type);
	q = conf_sqe(k, APR_OP_FREE);
	q.arg = handle;
	PASS(conf_refused(k, &q, -ESTALE, AT(arg)));
	q = conf_generate(k, 1, 1);
	q.arg = handle;
	return conf_refused(k, &q, -ESTALE, AT(arg));
}

static enum conf_result resume(struct conf *k)
{
	uint64_t buf[32];
	struct apr_params p;
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_generate(k, 10, 6);
	q.flags |= APR_SQE_REPLAYABLE;
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res, "res %d (%s)", k->a.res, k->a.why);
	if (k->a.n < 5)
		return conf_skip(k, "the answer is too short");
	apr_params_init(&p, buf, sizeof(buf));
	apr_params_raw(&p, APR_PARAM_RESUME, 0, k->a.ids, 16);
	q = conf_generate(k, 10, 6);
	q.flags |= APR_SQE_REPLAYABLE;
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, !k->b.res, "res %d (%s)", k->b.res, k->b.why);
	CHECK(k, k->b.n == k->a.n - 4 && !memcmp(k->b.ids, k->a.ids + 4, k->b.n * 4), "resumed after 4 of %u: %u others",
	      k->a.n, k->b.n);
	CHECK(k, k->b.first_pos == 4, "the first token after 4 has position %u", k->b.first_pos);
	CHECK(k, same_bits(k->b.logprob, k->a.logprob + 4, k->b.n), "other log-probability bits");
	return CONF_OK;
}

static enum conf_result no_prompt(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_ids_sqe(k, APR_OP_GENERATE, NULL, 0);
	q.max_tokens = 1;
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, k->a.res < 0, "an empty prompt gives %d", k->a.res);
	return conf_nop(k);
}

static enum conf_result bad_ids(struct conf *k)
{
	uint32_t ids[2] = {0, k->row.n_vocab};
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_ids_sqe(k, APR_OP_GENERATE, ids, 2);
	q.max_tokens = 1;
	PASS(conf_refused(k, &q, -EINVAL, UINT32_MAX));
	ids[1] = UINT32_MAX;
	q = conf_ids_sqe(k, APR_OP_GENERATE, ids, 2);
	q.max_tokens = 1;
	return conf_refused(k, &q, -EINVAL, UINT32_MAX);
}

static enum conf_result too_long(struct conf *k)
{
	uint32_t *ids, n = k->row.n_ctx + 1;
	struct apr_sqe q;

	PASS(conf_open(k));
	if ((uint64_t)n * 4 > k->s.w.max_input)
		return conf_skip(k, "the context is larger than a default session's input");
	ids = malloc((size_t)n * 4);
	CHECK(k, ids, "out of memory");
	for (uint32_t i = 0; i < n; i++)
		ids[i] = 300 < k->row.n_vocab ? 300 : k->row.n_vocab - 1;
	q = conf_ids_sqe(k, APR_OP_GENERATE, ids, n);
	free(ids);
	q.max_tokens = 1;
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, k->a.res < 0 && !k->a.n, "a prompt of context + 1 gives %d and %u tokens", k->a.res, k->a.n);
	return conf_nop(k);
}

/* Several at once, each as it is alone. */
static enum conf_result together(struct conf *k)
{
	enum { N = 4 };
	uint32_t ids[N][16], n[N] = {0}, got[N] = {0}, ended = 0;
	struct apr_sqe q[N];

	PASS(conf_open(k));
	for (uint32_t i = 0; i < N; i++) {
		q[i] = conf_generate(k, 10 + i, 40 + i);
		PASS(conf_do(k, &q[i], &k->a));
		n[i] = k->a.n;
		memcpy(ids[i], k->a.ids, k->a.n * 4);
	}
	for (uint32_t i = 0; i < N; i++) {
		q[i] = conf_generate(k, 10 + i, 40 + i);
		q[i].user_data = 9000 + i;
		raw_push(&k->s, &q[i]);
	}
	while (ended < N) {
		int e = raw_next(&k->s, CONF_MS);
		uint64_t i = k->s.cqe.user_data - 9000;

		CHECK(k, !e && i < N, "%s", apr_strerror(e));
		if (k->s.cqe.type == APR_CQE_TOKEN)
			CHECK(k, got[i] < n[i] && (uint32_t)k->s.cqe.res == ids[i][got[i]++], "request %d has other ids in company",
			      (int)i);
		ended += k->s.cqe.type == APR_CQE_FINAL;
	}
	for (uint32_t i = 0; i < N; i++)
		CHECK(k, got[i] == n[i], "request %u has %u tokens in company, %u alone", i, got[i], n[i]);
	return CONF_OK;
}

/* ---- CHAT --------------------------------------------------------------------------- */

static struct apr_sqe chat_sqe(struct conf *k, const char *json)
{
	struct apr_sqe q = conf_text_sqe(k, APR_OP_CHAT, json, strlen(json));

	q.in_fmt = APR_IN_MESSAGES;
	q.seed = 5;
	return q;
}

/* A model without a template may refuse it, in words. */
static enum conf_result chat(struct conf *k)
{
	static const char array[] = "[{\"role\":\"user\",\"content\":\"Say hello.\"}]";
	static const char object[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"Say hello.\"}]}";
	struct apr_sqe q;

	PASS(conf_open(k));
	q = chat_sqe(k, array);
	q.max_tokens = 8;
	PASS(conf_do(k, &q, &k->a));
	if (k->a.res == -EOPNOTSUPP) {
		CHECK(k, *k->a.why, "refused without a word");
		return conf_skip(k, "the model has no chat template");
	}
	CHECK(k, !k->a.res, "res %d (%s)", k->a.res, k->a.why);
	CHECK(k, k->a.n <= 8 && k->a.cost.prompt, "%u tokens of at most 8, %u of prompt", k->a.n, k->a.cost.prompt);
	CHECK(k, !k->a.broken, "a chunk of text is not whole UTF-8");
	q = chat_sqe(k, object);
	q.max_tokens = 8;
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, k->b.n == k->a.n && !memcmp(k->a.ids, k->b.ids, k->a.n * 4),
	      "messages alone and messages in an object give different answers");
	return conf_nop(k);
}

static enum conf_result chat_malformed(struct conf *k)
{
	static const char *const bad[] = {"", "{", "[]", "{}", "5", "[1]", "[{\"content\":\"x\"}]", "{\"messages\":{}}",
					  "[{\"role\":\"u\"}", "[{\"role\":\"u\",\"role\":\"v\"}]", "\xff"};

	PASS(conf_open(k));
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		struct apr_sqe q = chat_sqe(k, bad[i]);
		PASS(conf_do(k, &q, &k->a));
		if (k->a.res == -EOPNOTSUPP)
			return conf_skip(k, "the model has no chat template");
		CHECK(k, k->a.res == -EINVAL, "messages %s: res %d", bad[i], k->a.res);
		CHECK(k, *k->a.why, "messages %s: refused without a word", bad[i]);
	}
	return conf_nop(k);
}

const struct conf_check conf_generate_checks[] = {
	{"generate", GEN, 0, plain},
	{"generate-max-tokens", GEN, APR_FEAT_SAMPLING, counts},
	{"generate-seed", GEN, 0, seeds},
	{"generate-together-as-alone", GEN, 0, together},
	{"generate-temperature-0", GEN, APR_FEAT_SAMPLING, zero_temperature},
	{"generate-settings-do-not-stick", GEN, APR_FEAT_SAMPLING, settings_do_not_stick},
	{"generate-stop-string", GEN, APR_FEAT_SAMPLING, stop_string},
	{"generate-stop-never-comes", GEN, APR_FEAT_SAMPLING, stop_never},
	{"generate-stop-ids", GEN, APR_FEAT_SAMPLING, stop_ids},
	{"generate-bias", GEN, APR_FEAT_SAMPLING, bias},
	{"generate-logprobs", GEN, APR_FEAT_LOGPROBS | APR_FEAT_SAMPLING, logprobs},
	{"generate-samples", GEN, APR_FEAT_SAMPLES, samples},
	{"generate-no-stream", GEN, 0, no_stream},
	{"generate-empty-prompt", GEN, 0, no_prompt},
	{"generate-bad-ids", GEN, 0, bad_ids},
	{"generate-too-long", GEN, 0, too_long},
	{"conversation", GEN | OP(APR_OP_FREE), APR_FEAT_HANDLES, conversation},
	{"chat", OP(APR_OP_CHAT), APR_FEAT_MESSAGES, chat},
	{"chat-malformed", OP(APR_OP_CHAT), APR_FEAT_MESSAGES, chat_malformed},
	{"resume", GEN, APR_FEAT_REPLAY, resume},
};
const size_t conf_n_generate = sizeof(conf_generate_checks) / sizeof(conf_generate_checks[0]);
