/* SPDX-License-Identifier: MIT */
/* Owns: the checks of TOKENIZE, DETOKENIZE, SCORE and the vocabulary. */
#include "client/aprctl/conform.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define OP(o) (UINT64_C(1) << (o))
#define TOK OP(APR_OP_TOKENIZE)
#define DETOK OP(APR_OP_DETOKENIZE)

static enum conf_result tokenize(struct conf *k, const char *text, size_t len, unsigned flags)
{
	struct apr_sqe q = conf_text_sqe(k, APR_OP_TOKENIZE, text, len);

	q.flags = (uint16_t)flags;
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res, "TOKENIZE gives %d (%s)", k->a.res, k->a.why);
	CHECK(k, !k->a.data_len || k->a.data_fmt == APR_BLOB_IDS, "the data's format is %u", k->a.data_fmt);
	CHECK(k, k->a.data_len % 4 == 0, "%zu bytes of ids", k->a.data_len);
	for (size_t i = 0; i < k->a.data_len; i += 4)
		CHECK(k, *(uint32_t *)(void *)(k->a.data + i) < k->row.n_vocab, "an id outside the vocabulary");
	return CONF_OK;
}

static enum conf_result round_trip_of(struct conf *k, const char *text, size_t len)
{
	struct apr_sqe q;
	size_t lead;

	PASS(tokenize(k, text, len, 0));
	q = conf_ids_sqe(k, APR_OP_DETOKENIZE, (uint32_t *)(void *)k->a.data, k->a.data_len / 4);
	PASS(conf_do(k, &q, &k->b));
	CHECK(k, !k->b.res, "DETOKENIZE gives %d (%s)", k->b.res, k->b.why);
	CHECK(k, !k->b.data_len || k->b.data_fmt == APR_BLOB_TEXT, "the data's format is %u", k->b.data_fmt);
	/* a vocabulary may put one space in front of a text */
	lead = k->b.data_len == len + 1 && k->b.data[0] == ' ';
	CHECK(k, k->b.data_len == len + lead && !memcmp(k->b.data + lead, text, len), "%zu bytes come back as %zu others", len,
	      k->b.data_len);
	return CONF_OK;
}

static enum conf_result round_trip(struct conf *k)
{
	static const char *const texts[] = {
		"Hello, world! 123", "  two spaces\n\ttab\r\n", "\xc3\xa4\xc3\xb6\xc3\xbc \xe2\x82\xac \xf0\x9f\x98\x80",
		"\xe4\xb8\xad\xe6\x96\x87", "a", " ", "don't; x_1=0.5e-3",
	};
	char bytes[256];

	PASS(conf_open(k));
	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		PASS(round_trip_of(k, texts[i], strlen(texts[i])));
	for (int i = 0; i < 256; i++)
		bytes[i] = (char)(i * 167 + 13); /* every byte once: much of it no UTF-8, with an embedded NUL */
	if (round_trip_of(k, bytes, sizeof(bytes)) != CONF_OK)
		CHECK(k, k->a.res == -EILSEQ, "bytes that are no UTF-8 come back otherwise"); /* a vocabulary may lack some, and says so */
	for (size_t n = 1; n <= 200; n += 21) {
		memset(bytes, ' ', n);
		bytes[n] = 'X';
		PASS(round_trip_of(k, bytes, n + 1));
	}
	return CONF_OK;
}

static enum conf_result empty(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_text_sqe(k, APR_OP_TOKENIZE, "", 0);
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res && !k->a.data_len, "an empty text gives %d and %zu bytes", k->a.res, k->a.data_len);
	if (!(k->w.opcodes[0] & DETOK))
		return CONF_OK;
	q = conf_ids_sqe(k, APR_OP_DETOKENIZE, NULL, 0);
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res && !k->a.data_len, "no ids give %d and %zu bytes", k->a.res, k->a.data_len);
	return CONF_OK;
}

static enum conf_result bos(struct conf *k)
{
	size_t n;

	PASS(conf_open(k));
	PASS(tokenize(k, "The lamp", 8, 0));
	n = k->a.data_len;
	memcpy(k->b.data, k->a.data, n);
	PASS(tokenize(k, "The lamp", 8, APR_SQE_ADD_BOS));
	CHECK(k, k->a.data_len == n || k->a.data_len == n + 4, "with ADD_BOS %zu ids more", (k->a.data_len - n) / 4);
	CHECK(k, !memcmp(k->a.data + k->a.data_len - n, k->b.data, n), "with ADD_BOS other ids");
	return CONF_OK;
}

static enum conf_result long_text(struct conf *k)
{
	enum { N = 60000 };
	char *text = malloc(N);
	enum conf_result r;

	CHECK(k, text, "out of memory");
	memset(text, 'A', N);
	r = conf_open(k);
	if (r == CONF_OK && k->s.w.max_input < N)
		r = conf_skip(k, "the default session is smaller");
	if (r == CONF_OK)
		r = tokenize(k, text, N, 0);
	free(text);
	return r;
}

static enum conf_result bad_id(struct conf *k)
{
	uint32_t ids[3] = {k->row.n_vocab, UINT32_MAX, 0};
	struct apr_sqe q;

	PASS(conf_open(k));
	for (int i = 0; i < 2; i++) {
		q = conf_ids_sqe(k, APR_OP_DETOKENIZE, ids + i, 1);
		PASS(conf_refused(k, &q, -EINVAL, UINT32_MAX));
	}
	return CONF_OK;
}

/* A control piece's own text is plain text, unless PARSE_SPECIAL is set. */
static enum conf_result special_of(struct conf *k, const struct apr_vocab *v)
{
	unsigned kind;
	size_t len;

	for (uint32_t id = 0; id < apr_vocab_size(v); id++) {
		const char *piece = apr_vocab_piece(v, id, &len, &kind);

		if (!piece || kind != 3 || len < 3)
			continue;
		PASS(tokenize(k, piece, len, 0));
		for (size_t i = 0; i < k->a.data_len; i += 4)
			CHECK(k, *(uint32_t *)(void *)(k->a.data + i) != id, "plain text has become control id %u", id);
		PASS(tokenize(k, piece, len, APR_SQE_PARSE_SPECIAL));
		CHECK(k, k->a.data_len == 4 && *(uint32_t *)(void *)k->a.data == id, "with PARSE_SPECIAL \"%.*s\" is not id %u",
		      (int)len, piece, id);
		return CONF_OK;
	}
	return conf_skip(k, "the vocabulary has no control piece");
}

static enum conf_result special(struct conf *k)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;
	struct apr_vocab *v = NULL;
	enum conf_result r;
	int e;

	o.path = k->path;
	PASS(conf_open(k));
	e = apr_connect(&c, &o, NULL, 0);
	CHECK(k, !e, "no session: %s", apr_strerror(e));
	e = apr_get_vocab(c, 0, &v);
	r = e ? conf_no(k, "GET_VOCAB: %s", apr_strerror(e)) : special_of(k, v);
	apr_vocab_free(v);
	apr_close(c);
	return r;
}

static enum conf_result vocab(struct conf *k)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;
	struct apr_vocab *v = NULL;
	uint32_t n = 0, empty_pieces = 0;
	int e, bad;

	o.path = k->path;
	e = apr_connect(&c, &o, NULL, 0);
	CHECK(k, !e, "no session: %s", apr_strerror(e));
	e = apr_get_vocab(c, 0, &v);
	if (!e) {
		n = apr_vocab_size(v);
		for (uint32_t id = 0; id < n; id++) {
			size_t len = 0;

			if (!apr_vocab_piece(v, id, &len, NULL) || !len)
				empty_pieces++;
		}
		apr_vocab_free(v);
		v = NULL;
	}
	bad = apr_get_vocab(c, 0x7fffffff, &v);
	apr_vocab_free(v);
	apr_close(c);
	CHECK(k, !e, "GET_VOCAB: %s", apr_strerror(e));
	CHECK(k, n == k->row.n_vocab, "%u pieces, the model's row says %u", n, k->row.n_vocab);
	CHECK(k, empty_pieces < n / 2, "%u of %u pieces are empty", empty_pieces, n);
	CHECK(k, bad < 0, "a model that never was has a vocabulary");
	return CONF_OK;
}

/* ---- SCORE ------------------------------------------------------------------------ */

static enum conf_result score_ids(struct conf *k, unsigned flags, struct conf_answer *a, size_t *n)
{
	uint32_t ids[64];
	uint64_t buf[8];
	struct apr_params p;
	struct apr_sqe q;

	PASS(tokenize(k, "The river falls over the old stone and sings", 44, 0));
	*n = k->a.data_len / 4 < 64 ? k->a.data_len / 4 : 64;
	memcpy(ids, k->a.data, *n * 4);
	q = conf_ids_sqe(k, APR_OP_SCORE, ids, *n);
	q.flags = (uint16_t)flags;
	apr_params_init(&p, buf, sizeof(buf));
	apr_params_logprobs(&p, 3);
	conf_params(k, &q, &p);
	PASS(conf_do(k, &q, a));
	CHECK(k, !a->res, "SCORE gives %d (%s)", a->res, a->why);
	CHECK(k, a->data_fmt == APR_BLOB_SCORES, "the data's format is %u", a->data_fmt);
	return CONF_OK;
}

static enum conf_result score_checked(struct conf *k, unsigned flags)
{
	const struct apr_score *sc;
	size_t pos = 0, n;
	uint32_t want = 1;

	PASS(conf_open(k));
	PASS(score_ids(k, flags, &k->b, &n));
	while ((sc = apr_score_next(k->b.data, k->b.data_len, &pos))) {
		const struct apr_top *t = apr_score_top(sc);

		CHECK(k, sc->pos == want++, "position %u where %u is due", sc->pos, want - 1);
		CHECK(k, sc->logprob <= 0.0f && isfinite(sc->logprob), "a log-probability of %g", (double)sc->logprob);
		CHECK(k, sc->k == 3, "%u best where 3 were asked for", sc->k);
		CHECK(k, t[0].logprob >= t[1].logprob && t[1].logprob >= t[2].logprob, "the best are not in order");
		CHECK(k, sc->logprob <= t[0].logprob, "the id is likelier than the best");
		for (uint32_t i = 0; i < 3; i++)
			CHECK(k, t[i].id != sc->id || t[i].logprob == sc->logprob, "one id, two log-probabilities");
	}
	CHECK(k, want == n, "%u positions of %zu ids", want - 1, n);
	return CONF_OK;
}

static enum conf_result score(struct conf *k)
{
	return score_checked(k, 0);
}

static enum conf_result score_forced(struct conf *k)
{
	return score_checked(k, APR_SQE_FORCED);
}

static enum conf_result score_again(struct conf *k)
{
	size_t n;

	PASS(conf_open(k));
	PASS(score_ids(k, 0, &k->b, &n));
	uint8_t *first = malloc(k->b.data_len + 1);
	size_t len = k->b.data_len;

	CHECK(k, first, "out of memory");
	memcpy(first, k->b.data, len);
	enum conf_result r = score_ids(k, 0, &k->b, &n);
	bool same = r == CONF_OK && len == k->b.data_len && !memcmp(first, k->b.data, len);

	free(first);
	PASS(r);
	CHECK(k, same, "the same ids score otherwise the second time");
	return CONF_OK;
}

const struct conf_check conf_text_checks[] = {
	{"text-round-trip", TOK | DETOK, 0, round_trip},
	{"text-empty", TOK, 0, empty},
	{"text-add-bos", TOK, 0, bos},
	{"text-long-run", TOK, 0, long_text},
	{"text-special-is-plain", TOK, APR_FEAT_VOCAB, special},
	{"text-bad-id", DETOK, 0, bad_id},
	{"vocabulary", 0, APR_FEAT_VOCAB, vocab},
	{"score", TOK | OP(APR_OP_SCORE), APR_FEAT_LOGPROBS, score},
	{"score-forced", TOK | OP(APR_OP_SCORE), APR_FEAT_LOGPROBS | APR_FEAT_FORCED, score_forced},
	{"score-same-bits", TOK | OP(APR_OP_SCORE), APR_FEAT_LOGPROBS, score_again},
};
const size_t conf_n_text = sizeof(conf_text_checks) / sizeof(conf_text_checks[0]);
