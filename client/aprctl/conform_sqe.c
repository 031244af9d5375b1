/* SPDX-License-Identifier: MIT */
/* Owns: the checks of submission entries and parameter lists: what is refused, with which error and offset. */
#include "client/aprctl/conform.h"
#include <errno.h>
#include <math.h>
#include <string.h>

#define AT(field) ((uint32_t)offsetof(struct apr_sqe, field))
#define OP(o) (UINT64_C(1) << (o))
enum { LIST = sizeof(struct apr_sqe) }; /* offsets in the parameter list count on from the entry's */

static enum conf_result reserved(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_sqe(k, APR_OP_NOP);
	q.zero = 1;
	return conf_refused(k, &q, -EINVAL, AT(zero));
}

static enum conf_result unknown_flag(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	for (unsigned bit = 6; bit < 16; bit++) {
		q = conf_sqe(k, APR_OP_NOP);
		q.flags = (uint16_t)(1u << bit);
		PASS(conf_refused(k, &q, -EINVAL, AT(flags)));
	}
	return CONF_OK;
}

static enum conf_result foreign_flag(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_sqe(k, APR_OP_NOP);
	q.flags = APR_SQE_KEEP;
	return conf_refused(k, &q, -EINVAL, AT(flags));
}

static enum conf_result never_assigned(struct conf *k)
{
	PASS(conf_open(k));
	for (unsigned op = APR_OP_LIMIT; op < 256; op += 31) {
		struct apr_sqe q = conf_sqe(k, op);

		PASS(conf_refused(k, &q, -EINVAL, AT(op)));
	}
	CHECK(k, !(k->w.opcodes[1] >> 63), "a bit above 127 is set");
	return CONF_OK;
}

/* Every opcode whose bit is clear is refused, whatever else the entry says. */
static enum conf_result opcode_bits(struct conf *k)
{
	PASS(conf_open(k));
	for (unsigned op = 0; op < APR_OP_LIMIT; op++) {
		struct apr_sqe q = conf_sqe(k, op);

		if (k->w.opcodes[op / 64] >> op % 64 & 1) {
			CHECK(k, op <= APR_OP_FREE, "the bit of opcode %u, which this protocol does not have, is set", op);
			continue;
		}
		PASS(conf_refused(k, &q, -EOPNOTSUPP, AT(op)));
	}
	return CONF_OK;
}

static enum conf_result priority(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	for (unsigned p = 0; p <= 2; p++) {
		q = conf_sqe(k, APR_OP_NOP);
		q.prio = (uint8_t)p;
		PASS(conf_do(k, &q, &k->a));
		CHECK(k, !k->a.res, "priority %u gives %d", p, k->a.res);
	}
	q = conf_sqe(k, APR_OP_NOP);
	q.prio = 3;
	return conf_refused(k, &q, -EINVAL, AT(prio));
}

static enum conf_result region(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	if (k->w.features & APR_FEAT_ATTACH)
		return conf_skip(k, "the daemon has the feature");
	q = conf_text_sqe(k, APR_OP_TOKENIZE, "x", 1);
	q.region = 1;
	return conf_refused(k, &q, -EOPNOTSUPP, AT(region));
}

static enum conf_result input_bounds(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_sqe(k, APR_OP_TOKENIZE);
	q.in_off = 0; /* the ring's own words */
	q.in_len = 16;
	PASS(conf_refused(k, &q, -EINVAL, AT(in_off)));
	q = conf_sqe(k, APR_OP_TOKENIZE);
	q.in_off = k->s.g.req_arena_off + k->s.g.req_arena_len - 8;
	q.in_len = 9;
	PASS(conf_refused(k, &q, -EINVAL, AT(in_off)));
	q = conf_sqe(k, APR_OP_TOKENIZE);
	q.in_off = UINT32_MAX - 3; /* off + len wraps in 32 bits */
	q.in_len = 16;
	PASS(conf_refused(k, &q, -EINVAL, AT(in_off)));
	q = conf_sqe(k, APR_OP_TOKENIZE);
	q.in_off = k->s.g.req_arena_off;
	q.in_len = UINT32_MAX;
	PASS(conf_refused(k, &q, -E2BIG, AT(in_len)));
	q = conf_sqe(k, APR_OP_TOKENIZE);
	q.in_off = k->s.g.req_arena_off;
	q.in_len = k->s.w.max_input + 1;
	return conf_refused(k, &q, -E2BIG, AT(in_len));
}

static enum conf_result input_format(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_text_sqe(k, APR_OP_TOKENIZE, "x", 1);
	q.in_fmt = 200;
	PASS(conf_refused(k, &q, -EINVAL, AT(in_fmt)));
	q = conf_text_sqe(k, APR_OP_TOKENIZE, "x", 1);
	q.in_fmt = APR_IN_IDS; /* known, but not to this opcode */
	q.in_len = 4;
	return conf_refused(k, &q, -EINVAL, AT(in_fmt));
}

static enum conf_result ids_aligned(struct conf *k)
{
	uint32_t ids[4] = {1, 1, 1, 1};
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_ids_sqe(k, APR_OP_DETOKENIZE, ids, 3);
	q.in_len = 11;
	PASS(conf_refused(k, &q, -EINVAL, AT(in_len)));
	q = conf_ids_sqe(k, APR_OP_DETOKENIZE, ids, 3);
	q.in_off += 2;
	return conf_refused(k, &q, -EINVAL, AT(in_off));
}

static enum conf_result no_input(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_text_sqe(k, APR_OP_NOP, "x", 1);
	PASS(conf_refused(k, &q, -EINVAL, AT(in_len)));
	q = conf_sqe(k, APR_OP_NOP);
	q.max_tokens = 1;
	PASS(conf_refused(k, &q, -EINVAL, AT(max_tokens)));
	q = conf_sqe(k, APR_OP_NOP);
	q.arg = 1;
	return conf_refused(k, &q, -EINVAL, AT(arg));
}

static enum conf_result model_unknown(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_text_sqe(k, APR_OP_TOKENIZE, "x", 1);
	q.model = 0x7fffffff;
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, k->a.res == -ESTALE || k->a.res == -ENOENT, "a model that never was gives %d (%s)", k->a.res,
	      apr_strerror(k->a.res));
	CHECK(k, k->a.at == AT(model), "pos is %u, not %u", k->a.at, AT(model));
	return conf_nop(k);
}

/* ---- parameters ------------------------------------------------------------------- */

static struct apr_sqe with_list(struct conf *k, const void *list, uint32_t len)
{
	struct apr_sqe q = conf_generate(k, 1, 1);

	q.par_off = raw_put(&k->s, list, len);
	q.par_len = len;
	return q;
}

/* One parameter alone is refused, its data at offset `off` being the culprit. */
static enum conf_result bad_param(struct conf *k, unsigned type, const void *data, size_t len, int err, uint32_t off)
{
	uint64_t buf[64];
	struct apr_params p;
	struct apr_sqe q;

	apr_params_init(&p, buf, sizeof(buf));
	apr_params_raw(&p, type, 0, data, len);
	q = with_list(k, buf, p.len);
	return conf_refused(k, &q, err, off == UINT32_MAX ? off : LIST + (uint32_t)sizeof(struct apr_param) + off);
}

static enum conf_result param_place(struct conf *k)
{
	uint64_t zeros[2] = {0, 0};
	struct apr_sqe q;

	PASS(conf_open(k));
	q = with_list(k, zeros, 16);
	q.par_off += 4;
	PASS(conf_refused(k, &q, -EINVAL, AT(par_off)));
	q = with_list(k, zeros, 16);
	q.par_len = 12;
	PASS(conf_refused(k, &q, -EINVAL, AT(par_len)));
	q = with_list(k, zeros, 16);
	q.par_off = 0;
	PASS(conf_refused(k, &q, -EINVAL, AT(par_off)));
	q = with_list(k, zeros, 16);
	q.par_len = APR_PARAMS_MAX + 8;
	return conf_refused(k, &q, -E2BIG, AT(par_len));
}

static enum conf_result param_unknown(struct conf *k)
{
	uint64_t buf[16];
	struct apr_params p;
	struct apr_sqe q;

	PASS(conf_open(k));
	apr_params_init(&p, buf, sizeof(buf));
	apr_params_raw(&p, 4000, 0, "abc", 3);
	q = with_list(k, buf, p.len);
	PASS(conf_refused(k, &q, -EOPNOTSUPP, LIST));
	apr_params_init(&p, buf, sizeof(buf));
	apr_params_raw(&p, 4000, APR_PARAM_OPTIONAL, "abc", 3);
	q = with_list(k, buf, p.len);
	PASS(conf_do(k, &q, &k->a));
	CHECK(k, !k->a.res, "an unknown parameter marked as optional gives %d", k->a.res);
	return CONF_OK;
}

static enum conf_result param_flags(struct conf *k)
{
	struct {
		struct apr_param p;
		uint64_t data;
	} list = {{APR_PARAM_TRACE_ID, 0x8000, 8}, 0};
	struct apr_sqe q;

	PASS(conf_open(k));
	q = with_list(k, &list, sizeof(list));
	return conf_refused(k, &q, -EINVAL, LIST + 2);
}

static enum conf_result param_twice(struct conf *k)
{
	struct {
		struct apr_param p;
		uint8_t id[16];
	} list[2] = {{{APR_PARAM_TRACE_ID, 0, 16}, {1}}, {{APR_PARAM_TRACE_ID, 0, 16}, {2}}};
	struct apr_sqe q;

	PASS(conf_open(k));
	q = with_list(k, list, sizeof(list));
	return conf_refused(k, &q, -EINVAL, LIST + sizeof(list[0]));
}

static enum conf_result param_cut(struct conf *k)
{
	struct {
		struct apr_param p;
		uint8_t id[16];
	} list = {{APR_PARAM_TRACE_ID, 0, 4096}, {0}};
	struct apr_sqe q;

	PASS(conf_open(k));
	q = with_list(k, &list, sizeof(list));
	PASS(conf_refused(k, &q, -EINVAL, LIST + 4));
	list.p.len = UINT32_MAX;
	q = with_list(k, &list, sizeof(list));
	return conf_refused(k, &q, -EINVAL, LIST + 4);
}

static enum conf_result param_sampling(struct conf *k)
{
	struct {
		uint32_t set, at;
		float v;
	} cases[] = {
		{APR_SET_TEMPERATURE, offsetof(struct apr_sampling, temperature), NAN},
		{APR_SET_TEMPERATURE, offsetof(struct apr_sampling, temperature), INFINITY},
		{APR_SET_TEMPERATURE, offsetof(struct apr_sampling, temperature), -1},
		{APR_SET_TOP_P, offsetof(struct apr_sampling, top_p), 1.5f},
		{APR_SET_TOP_P, offsetof(struct apr_sampling, top_p), NAN},
		{APR_SET_MIN_P, offsetof(struct apr_sampling, min_p), -0.5f},
		{APR_SET_REPEAT, offsetof(struct apr_sampling, repeat_penalty), 0},
		{APR_SET_FREQUENCY, offsetof(struct apr_sampling, frequency_penalty), INFINITY},
		{APR_SET_PRESENCE, offsetof(struct apr_sampling, presence_penalty), NAN},
	};
	struct apr_sampling s;

	PASS(conf_open(k));
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		memset(&s, 0, sizeof(s));
		s.set = cases[i].set;
		memcpy((uint8_t *)&s + cases[i].at, &cases[i].v, sizeof(float));
		PASS(bad_param(k, APR_PARAM_SAMPLING, &s, sizeof(s), -EINVAL, cases[i].at));
	}
	memset(&s, 0, sizeof(s));
	s.set = 0x80000000u;
	PASS(bad_param(k, APR_PARAM_SAMPLING, &s, sizeof(s), -EINVAL, 0));
	return bad_param(k, APR_PARAM_SAMPLING, &s, 8, -EINVAL, UINT32_MAX);
}

static enum conf_result param_bias(struct conf *k)
{
	struct {
		uint32_t id;
		float v;
	} b = {1, INFINITY};

	PASS(conf_open(k));
	PASS(bad_param(k, APR_PARAM_BIAS, &b, sizeof(b), -EINVAL, 4));
	b.v = NAN;
	PASS(bad_param(k, APR_PARAM_BIAS, &b, sizeof(b), -EINVAL, 4));
	b.v = 1;
	b.id = UINT32_MAX;
	PASS(bad_param(k, APR_PARAM_BIAS, &b, sizeof(b), -EINVAL, 0));
	b.id = k->row.n_vocab;
	return bad_param(k, APR_PARAM_BIAS, &b, sizeof(b), -EINVAL, 0);
}

static enum conf_result param_stop(struct conf *k)
{
	uint32_t empty[1] = {0}, cut[2] = {100, 0}, ids[1] = {UINT32_MAX};

	PASS(conf_open(k));
	PASS(bad_param(k, APR_PARAM_STOP, empty, sizeof(empty), -EINVAL, 0));
	PASS(bad_param(k, APR_PARAM_STOP, cut, sizeof(cut), -EINVAL, 0));
	return bad_param(k, APR_PARAM_STOP_IDS, ids, sizeof(ids), -EINVAL, 0);
}

static enum conf_result param_logprobs(struct conf *k)
{
	uint32_t n = APR_LOGPROBS_MAX + 1;

	PASS(conf_open(k));
	return bad_param(k, APR_PARAM_LOGPROBS, &n, sizeof(n), -EINVAL, 0);
}

static enum conf_result param_opcode(struct conf *k)
{
	uint64_t buf[16];
	struct apr_params p;
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_text_sqe(k, APR_OP_TOKENIZE, "x", 1);
	apr_params_init(&p, buf, sizeof(buf));
	apr_params_logprobs(&p, 1);
	conf_params(k, &q, &p);
	return conf_refused(k, &q, -EINVAL, LIST);
}

/* A parameter whose feature bit is clear is refused, one marked as optional ignored. */
static enum conf_result param_feature(struct conf *k)
{
	static const struct {
		uint64_t feature;
		unsigned type;
	} cases[] = {{APR_FEAT_GRAMMAR, APR_PARAM_GRAMMAR}, {APR_FEAT_GRAMMAR, APR_PARAM_JSON_SCHEMA},
		     {APR_FEAT_GRAMMAR, APR_PARAM_MASK}, {APR_FEAT_TOOLS, APR_PARAM_TOOLS}};

	PASS(conf_open(k));
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		if (!(k->w.features & cases[i].feature)) {
			uint64_t buf[8];
			struct apr_params p;
			struct apr_sqe q;

			apr_params_init(&p, buf, sizeof(buf));
			apr_params_raw(&p, cases[i].type, 0, "{}", 2);
			q = with_list(k, buf, p.len);
			PASS(conf_refused(k, &q, -EOPNOTSUPP, LIST));
		}
	return CONF_OK;
}

/* What a feature bit that is clear stands for is refused, not done half. */
static enum conf_result without_features(struct conf *k)
{
	struct apr_sqe q;
	uint32_t ids[2] = {1, 2};

	PASS(conf_open(k));
	if (!(k->w.features & APR_FEAT_SAMPLES)) {
		q = conf_generate(k, 1, 1);
		q.n = 2;
		PASS(conf_refused(k, &q, -EOPNOTSUPP, AT(n)));
	}
	if (!(k->w.features & APR_FEAT_HANDLES)) {
		q = conf_generate(k, 1, 1);
		q.flags |= APR_SQE_KEEP;
		PASS(conf_refused(k, &q, -EOPNOTSUPP, AT(flags)));
		q = conf_generate(k, 1, 1);
		q.arg = 1;
		PASS(conf_refused(k, &q, -EOPNOTSUPP, AT(arg)));
	}
	if (!(k->w.features & APR_FEAT_REPLAY)) {
		q = conf_generate(k, 1, 1);
		q.flags |= APR_SQE_REPLAYABLE;
		PASS(conf_refused(k, &q, -EOPNOTSUPP, AT(flags)));
	}
	if (!(k->w.features & APR_FEAT_PARTS)) {
		q = conf_generate(k, 1, 1);
		q.in_fmt = APR_IN_PARTS;
		q.flags = 0;
		PASS(conf_refused(k, &q, -EOPNOTSUPP, AT(in_fmt)));
	}
	if (!(k->w.features & APR_FEAT_FORCED) && (k->w.opcodes[0] & OP(APR_OP_SCORE))) {
		q = conf_ids_sqe(k, APR_OP_SCORE, ids, 2);
		q.flags = APR_SQE_FORCED;
		PASS(conf_refused(k, &q, -EOPNOTSUPP, AT(flags)));
	}
	return CONF_OK;
}

static enum conf_result handle_bad(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_generate(k, 1, 1);
	q.arg = UINT64_C(0x7777777700000003);
	PASS(conf_refused(k, &q, -ESTALE, AT(arg)));
	q = conf_sqe(k, APR_OP_FREE);
	q.arg = UINT64_C(0x7777777700000003);
	return conf_refused(k, &q, -ESTALE, AT(arg));
}

static enum conf_result handle_replayable(struct conf *k)
{
	struct apr_sqe q;

	PASS(conf_open(k));
	q = conf_generate(k, 1, 1);
	q.arg = 1;
	q.flags |= APR_SQE_REPLAYABLE;
	return conf_refused(k, &q, -EINVAL, AT(flags));
}

const struct conf_check conf_sqe_checks[] = {
	{"sqe-reserved", OP(APR_OP_NOP), 0, reserved},
	{"sqe-unknown-flags", OP(APR_OP_NOP), 0, unknown_flag},
	{"sqe-flag-of-another-opcode", OP(APR_OP_NOP), 0, foreign_flag},
	{"sqe-opcodes-never-assigned", 0, 0, never_assigned},
	{"sqe-opcode-bits", 0, 0, opcode_bits},
	{"sqe-priority", OP(APR_OP_NOP), 0, priority},
	{"sqe-region", OP(APR_OP_TOKENIZE), 0, region},
	{"sqe-input-bounds", OP(APR_OP_TOKENIZE), 0, input_bounds},
	{"sqe-input-format", OP(APR_OP_TOKENIZE), 0, input_format},
	{"sqe-ids-aligned", OP(APR_OP_DETOKENIZE), 0, ids_aligned},
	{"sqe-nop-takes-nothing", OP(APR_OP_NOP), 0, no_input},
	{"sqe-model-unknown", OP(APR_OP_TOKENIZE), 0, model_unknown},
	{"sqe-without-feature", OP(APR_OP_GENERATE), 0, without_features},
	{"sqe-handle-unknown", OP(APR_OP_GENERATE) | OP(APR_OP_FREE), APR_FEAT_HANDLES, handle_bad},
	{"sqe-handle-with-replayable", OP(APR_OP_GENERATE), APR_FEAT_HANDLES | APR_FEAT_REPLAY, handle_replayable},
	{"param-place", OP(APR_OP_GENERATE), 0, param_place},
	{"param-unknown", OP(APR_OP_GENERATE), 0, param_unknown},
	{"param-flags", OP(APR_OP_GENERATE), 0, param_flags},
	{"param-twice", OP(APR_OP_GENERATE), 0, param_twice},
	{"param-cut-short", OP(APR_OP_GENERATE), 0, param_cut},
	{"param-sampling-values", OP(APR_OP_GENERATE), APR_FEAT_SAMPLING, param_sampling},
	{"param-bias-values", OP(APR_OP_GENERATE), APR_FEAT_SAMPLING, param_bias},
	{"param-stop-values", OP(APR_OP_GENERATE), APR_FEAT_SAMPLING, param_stop},
	{"param-logprobs-values", OP(APR_OP_GENERATE), APR_FEAT_LOGPROBS, param_logprobs},
	{"param-of-another-opcode", OP(APR_OP_TOKENIZE), APR_FEAT_LOGPROBS, param_opcode},
	{"param-without-feature", OP(APR_OP_GENERATE), 0, param_feature},
};
const size_t conf_n_sqe = sizeof(conf_sqe_checks) / sizeof(conf_sqe_checks[0]);
