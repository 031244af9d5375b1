/* SPDX-License-Identifier: MIT */
/* What a client may send, rule by rule: entries, parameter lists, HELLO. Each fault names its byte. */
#include "shm/check.h"
#include "tests/harness.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ALL_FEATURES UINT64_MAX
#define OP_BIT(op) (UINT64_C(1) << (op))

static const struct apr_check limits = { 8192, 65536, 65536, { 0x1ff, 0 }, ALL_FEATURES, 2 };

static int judge(struct apr_sqe s, const struct apr_check *c, uint32_t *at)
{
	struct apr_fault f;
	int e = apr_check_sqe(&s, c, &f);
	CU_ASSERT_EQUAL(e, f.err);
	CU_ASSERT(e == 0 || f.why != NULL);
	*at = f.at;
	return e;
}

#define WANT(entry, error, field) \
	do { \
		uint32_t at_; \
		struct apr_sqe s_ = entry; \
		CU_ASSERT_EQUAL(judge(s_, &limits, &at_), error); \
		if (error) \
			CU_ASSERT_EQUAL(at_, offsetof(struct apr_sqe, field)); \
	} while (0)
#define SQE(...) ((struct apr_sqe){ __VA_ARGS__ })
#define GEN(...) SQE(.op = APR_OP_GENERATE, .in_off = 8192, .in_len = 16, __VA_ARGS__)

static void good_entries(void)
{
	WANT(SQE(.op = APR_OP_NOP), 0, op);
	WANT(GEN(.max_tokens = 0), 0, op);
	WANT(GEN(.max_tokens = UINT32_MAX, .n = 5, .flags = APR_SQE_KEEP | APR_SQE_ADD_BOS, .prio = 2), 0, op);
	WANT(GEN(.arg = 77, .seed = UINT64_MAX, .timeout_ms = UINT32_MAX), 0, op);
	WANT(SQE(.op = APR_OP_GENERATE), 0, op); /* an empty prompt is for the model to judge */
	WANT(GEN(.in_fmt = APR_IN_IDS), 0, op);
	WANT(GEN(.in_fmt = APR_IN_PARTS), 0, op);
	WANT(SQE(.op = APR_OP_CHAT, .in_fmt = APR_IN_MESSAGES, .in_off = 8192, .in_len = 2), 0, op);
	WANT(SQE(.op = APR_OP_SCORE, .in_fmt = APR_IN_IDS, .in_off = 8192, .in_len = 8, .flags = APR_SQE_FORCED), 0, op);
	WANT(SQE(.op = APR_OP_CANCEL, .arg = 0), 0, op);
	WANT(SQE(.op = APR_OP_FREE, .arg = 1), 0, op);
	WANT(GEN(.par_off = 8192, .par_len = 65536), 0, op);
}

static void case23_offsets_and_lengths(void)
{
	WANT(SQE(.op = APR_OP_GENERATE, .in_off = 8192, .in_len = 65536), 0, in_off);
	WANT(SQE(.op = APR_OP_GENERATE, .in_off = 8192, .in_len = 65537), -E2BIG, in_len);
	WANT(SQE(.op = APR_OP_GENERATE, .in_off = 8191, .in_len = 1), -EINVAL, in_off);
	WANT(SQE(.op = APR_OP_GENERATE, .in_off = 8193, .in_len = 65536), -EINVAL, in_off);
	WANT(SQE(.op = APR_OP_GENERATE, .in_off = UINT32_MAX - 7, .in_len = 16), -EINVAL, in_off); /* would wrap in 32 bits */
	WANT(SQE(.op = APR_OP_GENERATE, .in_off = UINT32_MAX, .in_len = UINT32_MAX), -E2BIG, in_len);
	WANT(SQE(.op = APR_OP_GENERATE, .in_off = 0, .in_len = 16), -EINVAL, in_off); /* the header */
	WANT(SQE(.op = APR_OP_DETOKENIZE, .in_fmt = APR_IN_IDS, .in_off = 8193, .in_len = 8), -EINVAL, in_off);
	WANT(SQE(.op = APR_OP_DETOKENIZE, .in_fmt = APR_IN_IDS, .in_off = 8192, .in_len = 7), -EINVAL, in_len);
	WANT(GEN(.par_off = 8196, .par_len = 8), -EINVAL, par_off);
	WANT(GEN(.par_off = 8192, .par_len = 12), -EINVAL, par_len);
	WANT(GEN(.par_off = 8192, .par_len = 65544), -E2BIG, par_len);
	WANT(GEN(.par_off = UINT32_MAX - 7, .par_len = 64), -EINVAL, par_off);
	WANT(GEN(.par_off = 8200, .par_len = 65536), -EINVAL, par_off);
}

static void case23_opcodes(void)
{
	uint32_t at;
	struct apr_check some = limits;

	for (unsigned op = 0; op < 256; op++) {
		int e = judge(SQE(.op = (uint8_t)op, .arg = op == APR_OP_FREE,
				  .in_fmt = op == APR_OP_CHAT ? APR_IN_MESSAGES
					    : op == APR_OP_SCORE || op == APR_OP_DETOKENIZE ? APR_IN_IDS
											   : 0),
			      &limits, &at);
		CU_ASSERT_EQUAL(e, op <= APR_OP_FREE ? 0 : op < 128 ? -EOPNOTSUPP : -EINVAL);
		CU_ASSERT_EQUAL(at, 0);
	}
	some.opcodes[0] &= ~OP_BIT(APR_OP_EMBED);
	CU_ASSERT_EQUAL(judge(SQE(.op = APR_OP_EMBED), &some, &at), -EOPNOTSUPP);
	some.opcodes[0] = some.opcodes[1] = UINT64_MAX; /* a bit that no rule stands behind */
	CU_ASSERT_EQUAL(judge(SQE(.op = 100), &some, &at), -EOPNOTSUPP);
}

static void every_field_is_judged(void)
{
	WANT(SQE(.op = APR_OP_NOP, .prio = 3), -EINVAL, prio);
	WANT(SQE(.op = APR_OP_NOP, .flags = 0x8000), -EINVAL, flags);
	WANT(SQE(.op = APR_OP_NOP, .flags = APR_SQE_KEEP), -EINVAL, flags);
	WANT(GEN(.flags = APR_SQE_FORCED), -EINVAL, flags);
	WANT(GEN(.flags = APR_SQE_REPLAYABLE, .arg = 5), -EINVAL, flags);
	WANT(GEN(.flags = APR_SQE_REPLAYABLE, .n = 2), -EINVAL, n);
	WANT(GEN(.flags = APR_SQE_ADD_BOS, .in_fmt = APR_IN_IDS), -EINVAL, flags);
	WANT(GEN(.in_fmt = 4), -EINVAL, in_fmt);
	WANT(GEN(.in_fmt = APR_IN_MESSAGES), -EINVAL, in_fmt);
	WANT(SQE(.op = APR_OP_TOKENIZE, .in_fmt = APR_IN_IDS), -EINVAL, in_fmt);
	WANT(SQE(.op = APR_OP_NOP, .in_fmt = 1), -EINVAL, in_fmt);
	WANT(SQE(.op = APR_OP_NOP, .in_len = 1), -EINVAL, in_len);
	WANT(SQE(.op = APR_OP_NOP, .par_len = 8), -EINVAL, par_len);
	WANT(SQE(.op = APR_OP_NOP, .arg = 1), -EINVAL, arg);
	WANT(SQE(.op = APR_OP_FREE), -EINVAL, arg);
	WANT(SQE(.op = APR_OP_TOKENIZE, .max_tokens = 1), -EINVAL, max_tokens);
	WANT(SQE(.op = APR_OP_TOKENIZE, .n = 2), -EINVAL, n);
	WANT(SQE(.op = APR_OP_CANCEL, .timeout_ms = 1), -EINVAL, timeout_ms);
	WANT(SQE(.op = APR_OP_NOP, .zero = 1), -EINVAL, zero);
}

static void what_is_not_there_is_eopnotsupp(void)
{
	struct apr_check none = limits;
	uint32_t at;

	none.features = 0;
#define NOT_THERE(entry, field) \
	do { \
		CU_ASSERT_EQUAL(judge(entry, &none, &at), -EOPNOTSUPP); \
		CU_ASSERT_EQUAL(at, offsetof(struct apr_sqe, field)); \
	} while (0)
	NOT_THERE(GEN(.flags = APR_SQE_REPLAYABLE), flags);
	NOT_THERE(GEN(.flags = APR_SQE_KEEP), flags);
	NOT_THERE(SQE(.op = APR_OP_SCORE, .in_fmt = APR_IN_IDS, .flags = APR_SQE_FORCED), flags);
	NOT_THERE(GEN(.in_fmt = APR_IN_PARTS), in_fmt);
	NOT_THERE(SQE(.op = APR_OP_CHAT, .in_fmt = APR_IN_MESSAGES), in_fmt);
	NOT_THERE(GEN(.arg = 9), arg);
	NOT_THERE(GEN(.n = 2), n);
	NOT_THERE(GEN(.region = 1), region);
	CU_ASSERT_EQUAL(judge(GEN(.n = 1), &none, &at), 0);
}

/* ---- parameters ------------------------------------------------------------------- */

struct list {
	_Alignas(8) uint8_t b[APR_PARAMS_MAX + 64];
	uint32_t n;
};
static struct list L;

static void start(void)
{
	memset(&L, 0, sizeof(L));
}

static uint32_t put(unsigned type, unsigned flags, const void *data, uint32_t len)
{
	struct apr_param p = { (uint16_t)type, (uint16_t)flags, len };
	uint32_t at = L.n;
	memcpy(L.b + L.n, &p, 8);
	if (len)
		memcpy(L.b + L.n + 8, data, len);
	L.n += 8 + ((len + 7) & ~7u);
	return at;
}

static struct apr_param_view V;

static int params(uint8_t op, uint64_t features, uint32_t *at)
{
	struct apr_fault f;
	int e = apr_check_params(L.b, L.n, op, features, &V, &f);
	CU_ASSERT_EQUAL(e, f.err);
	CU_ASSERT(e == 0 || (f.why != NULL && f.at >= 28));
	*at = f.at;
	return e;
}

static void all_parameters_together(void)
{
	struct apr_sampling s = { .set = APR_SET_ALL, .temperature = 0.7f, .top_k = -1, .top_p = 1, .min_p = 0,
				  .repeat_penalty = 1, .penalty_window = -1, .ignore_eos = 1 };
	uint32_t k = 20, ids[3] = { 5, 6, 7 }, at, pos = 0, len;
	struct apr_bias bias[2] = { { 1, -INFINITY }, { 2, 3.5f } };
	const char stop[] = "\3\0\0\0end\0\5\0\0\0stop!\0\0";
	const uint8_t *text;

	start();
	put(APR_PARAM_SAMPLING, 0, &s, sizeof(s));
	put(APR_PARAM_LOGPROBS, 0, &k, 4);
	uint32_t b = put(APR_PARAM_BIAS, 0, bias, sizeof(bias));
	put(APR_PARAM_STOP, 0, stop, 20);
	put(APR_PARAM_STOP_IDS, 0, ids, sizeof(ids));
	put(APR_PARAM_RESUME, 0, ids, 8);
	put(APR_PARAM_TRACE_ID, 0, "0123456789abcdef", 16);
	put(99, APR_PARAM_OPTIONAL, "?", 1);
	put(APR_PARAM_GRAMMAR, APR_PARAM_OPTIONAL, "?", 1);
	CU_ASSERT_EQUAL(params(APR_OP_GENERATE, ALL_FEATURES, &at), 0);
	CU_ASSERT_EQUAL(V.sampling->temperature, 0.7f);
	CU_ASSERT_EQUAL(V.logprobs, 20);
	CU_ASSERT(V.n_bias == 2 && V.bias[1].id == 2);
	CU_ASSERT_EQUAL(V.at[APR_PARAM_BIAS], 64 + b + 8);
	CU_ASSERT(V.n_stop_ids == 3 && V.stop_ids[2] == 7);
	CU_ASSERT(V.n_resume == 2 && V.resume[0] == 5);
	CU_ASSERT(!memcmp(V.trace_id, "0123456789abcdef", 16));
	CU_ASSERT_EQUAL(V.n_stop, 2);
	CU_ASSERT(apr_param_stop(&V, &pos, &text, &len) && len == 3 && !memcmp(text, "end", 3));
	CU_ASSERT(apr_param_stop(&V, &pos, &text, &len) && len == 5 && !memcmp(text, "stop!", 5));
	CU_ASSERT(!apr_param_stop(&V, &pos, &text, &len));
	start();
	CU_ASSERT_EQUAL(params(APR_OP_GENERATE, 0, &at), 0);
	CU_ASSERT_PTR_NULL(V.sampling);
}

static void one(unsigned type, const void *data, uint32_t len, int want, uint32_t want_at)
{
	uint32_t at;
	start();
	put(type, 0, data, len);
	CU_ASSERT_EQUAL(params(APR_OP_GENERATE, ALL_FEATURES, &at), want);
	if (want)
		CU_ASSERT_EQUAL(at, 64 + want_at);
}

static void sampling_at(struct apr_sampling s, int want, size_t field)
{
	one(APR_PARAM_SAMPLING, &s, sizeof(s), want, 8 + (uint32_t)field);
}

static void case17_sampling_ranges(void)
{
	static const float temps[] = { 0, 1e-7f, 1e6f, 0.5f }, bad_temps[] = { -1, -1e-9f, NAN, INFINITY, -INFINITY };
	static const int32_t ks[] = { 0, -1, 1, 49152, INT32_MAX, INT32_MIN };
	static const float ps[] = { 0, 1, 0.5f }, bad_ps[] = { 1.5f, -0.1f, NAN, INFINITY };

	for (size_t t = 0; t < 4; t++)
		for (size_t k = 0; k < 6; k++)
			for (size_t p = 0; p < 3; p++)
				for (size_t m = 0; m < 3; m++)
					sampling_at((struct apr_sampling){ .set = 15, .temperature = temps[t], .top_k = ks[k],
									   .top_p = ps[p], .min_p = ps[m] },
						    0, 0);
	for (size_t t = 0; t < 5; t++) {
		sampling_at((struct apr_sampling){ .set = APR_SET_TEMPERATURE, .temperature = bad_temps[t] }, -EINVAL,
			    offsetof(struct apr_sampling, temperature));
		sampling_at((struct apr_sampling){ .set = 0, .temperature = bad_temps[t] }, 0, 0); /* not given */
	}
	for (size_t p = 0; p < 4; p++) {
		sampling_at((struct apr_sampling){ .set = APR_SET_TOP_P, .top_p = bad_ps[p] }, -EINVAL,
			    offsetof(struct apr_sampling, top_p));
		sampling_at((struct apr_sampling){ .set = APR_SET_MIN_P, .min_p = bad_ps[p] }, -EINVAL,
			    offsetof(struct apr_sampling, min_p));
	}
	sampling_at((struct apr_sampling){ .set = APR_SET_REPEAT }, -EINVAL, offsetof(struct apr_sampling, repeat_penalty));
	sampling_at((struct apr_sampling){ .set = APR_SET_REPEAT, .repeat_penalty = NAN }, -EINVAL,
		    offsetof(struct apr_sampling, repeat_penalty));
	sampling_at((struct apr_sampling){ .set = APR_SET_REPEAT, .repeat_penalty = 1.1f }, 0, 0);
	sampling_at((struct apr_sampling){ .set = APR_SET_FREQUENCY, .frequency_penalty = NAN }, -EINVAL,
		    offsetof(struct apr_sampling, frequency_penalty));
	sampling_at((struct apr_sampling){ .set = APR_SET_PRESENCE, .presence_penalty = -INFINITY }, -EINVAL,
		    offsetof(struct apr_sampling, presence_penalty));
	sampling_at((struct apr_sampling){ .set = APR_SET_WINDOW, .penalty_window = -2 }, -EINVAL,
		    offsetof(struct apr_sampling, penalty_window));
	sampling_at((struct apr_sampling){ .set = APR_SET_WINDOW, .penalty_window = -1 }, 0, 0);
	sampling_at((struct apr_sampling){ .set = APR_SET_IGNORE_EOS, .ignore_eos = 2 }, -EINVAL,
		    offsetof(struct apr_sampling, ignore_eos));
	sampling_at((struct apr_sampling){ .set = 0x200 }, -EINVAL, 0);
}

static void case16_biases(void)
{
	struct apr_bias b[2] = { { 1, 0 }, { 2, 0 } };
	static struct apr_bias many[APR_BIAS_MAX + 1];

	one(APR_PARAM_BIAS, b, 16, 0, 0);
	b[1].bias = NAN;
	one(APR_PARAM_BIAS, b, 16, -EINVAL, 8 + 8 + 4);
	b[1].bias = INFINITY;
	one(APR_PARAM_BIAS, b, 16, -EINVAL, 8 + 8 + 4);
	b[1].bias = -INFINITY;
	one(APR_PARAM_BIAS, b, 16, 0, 0);
	one(APR_PARAM_BIAS, b, 12, -EINVAL, 8);
	one(APR_PARAM_BIAS, b, 0, -EINVAL, 8);
	one(APR_PARAM_BIAS, many, sizeof(many), -E2BIG, 8);
	one(APR_PARAM_BIAS, many, sizeof(many) - 8, 0, 0);
}

static void case08_stop_strings(void)
{
	uint8_t b[400] = { 0 };

	one(APR_PARAM_STOP, "\0\0\0\0", 4, -EINVAL, 8); /* the empty stop */
	one(APR_PARAM_STOP, "", 0, -EINVAL, 8);
	one(APR_PARAM_STOP, "\5\0\0\0abcd", 8, -EINVAL, 8); /* longer than it is */
	one(APR_PARAM_STOP, "\3\0\0\0abcX", 8, -EINVAL, 8 + 7); /* padding */
	one(APR_PARAM_STOP, "\1\0\0\0a\0\0\0\1\0", 10, -EINVAL, 8 + 8);
	one(APR_PARAM_STOP, "\377\377\377\377abcd", 8, -E2BIG, 8);
	one(APR_PARAM_STOP, "\1\0\0\0a\0\0\0\2\0\0\0ab\0\0", 16, 0, 0); /* one the prefix of the other */
	b[0] = 0;
	b[1] = 1; /* 256 */
	one(APR_PARAM_STOP, b, 260, 0, 0);
	b[0] = 1; /* 257 */
	one(APR_PARAM_STOP, b, 264, -E2BIG, 8);
	start();
	for (int i = 0; i < 17; i++)
		memcpy(b + i * 8, "\1\0\0\0a\0\0\0", 8);
	one(APR_PARAM_STOP, b, 16 * 8, 0, 0);
	one(APR_PARAM_STOP, b, 17 * 8, -E2BIG, 8 + 16 * 8);
}

static void the_rest_of_the_parameters(void)
{
	uint32_t k = 0, ids[17] = { 0 };
	uint8_t grown[48] = { 0 };

	one(APR_PARAM_LOGPROBS, &k, 4, 0, 0);
	k = 21;
	one(APR_PARAM_LOGPROBS, &k, 4, -EINVAL, 8);
	one(APR_PARAM_LOGPROBS, &k, 3, -EINVAL, 8);
	one(APR_PARAM_STOP_IDS, ids, 64, 0, 0);
	one(APR_PARAM_STOP_IDS, ids, 68, -E2BIG, 8);
	one(APR_PARAM_STOP_IDS, ids, 0, -EINVAL, 8);
	one(APR_PARAM_STOP_IDS, ids, 6, -EINVAL, 8);
	one(APR_PARAM_RESUME, ids, 0, 0, 0);
	one(APR_PARAM_RESUME, ids, 7, -EINVAL, 8);
	one(APR_PARAM_TRACE_ID, ids, 15, -EINVAL, 8);
	one(APR_PARAM_SAMPLING, grown, 48, 0, 0); /* grown, the new part zero */
	grown[45] = 1;
	one(APR_PARAM_SAMPLING, grown, 48, -EINVAL, 8 + 45);
	one(APR_PARAM_SAMPLING, grown, 39, -EINVAL, 8);
	one(APR_PARAM_GRAMMAR, "x", 1, -EOPNOTSUPP, 0);
	one(99, "x", 1, -EOPNOTSUPP, 0);
	one(0, "x", 1, -EINVAL, 0);
}

static void lists_that_are_none(void)
{
	uint32_t at;
	struct apr_fault f;

	start();
	put(APR_PARAM_TRACE_ID, 0, "0123456789abcdef", 16);
	put(APR_PARAM_TRACE_ID, 0, "0123456789abcdef", 16);
	CU_ASSERT_EQUAL(params(APR_OP_GENERATE, ALL_FEATURES, &at), -EINVAL); /* twice */
	CU_ASSERT_EQUAL(at, 64 + 24);
	start();
	put(APR_PARAM_LOGPROBS, 2, "\1\0\0\0", 4);
	CU_ASSERT_EQUAL(params(APR_OP_GENERATE, ALL_FEATURES, &at), -EINVAL);
	CU_ASSERT_EQUAL(at, 64 + 2);
	start();
	put(APR_PARAM_LOGPROBS, 0, "\1\0\0\0", 4);
	L.b[15] = 1; /* padding */
	CU_ASSERT_EQUAL(params(APR_OP_GENERATE, ALL_FEATURES, &at), -EINVAL);
	CU_ASSERT_EQUAL(at, 64 + 15);
	L.b[15] = 0;
	for (L.n = 1; L.n < 16; L.n++)
		CU_ASSERT_EQUAL(params(APR_OP_GENERATE, ALL_FEATURES, &at), -EINVAL); /* cut anywhere */
	L.n = 16;
	memset(L.b + 4, 0xff, 4); /* a length near 2^32 */
	CU_ASSERT_EQUAL(params(APR_OP_GENERATE, ALL_FEATURES, &at), -EINVAL);
	CU_ASSERT_EQUAL(at, 64 + 4);
	CU_ASSERT_EQUAL(apr_check_params(L.b, APR_PARAMS_MAX + 8, 1, 0, &V, &f), -E2BIG);
	/* for which opcode, with which features */
	start();
	put(APR_PARAM_LOGPROBS, 0, "\1\0\0\0", 4);
	CU_ASSERT_EQUAL(params(APR_OP_SCORE, ALL_FEATURES, &at), 0);
	CU_ASSERT_EQUAL(params(APR_OP_TOKENIZE, ALL_FEATURES, &at), -EINVAL);
	CU_ASSERT_EQUAL(params(200, ALL_FEATURES, &at), -EINVAL);
	CU_ASSERT_EQUAL(params(APR_OP_SCORE, 0, &at), -EOPNOTSUPP);
	start();
	put(APR_PARAM_STOP, 0, "\1\0\0\0a\0\0\0", 8);
	CU_ASSERT_EQUAL(params(APR_OP_SCORE, ALL_FEATURES, &at), -EINVAL);
}

static void random_lists_never_read_beyond(void)
{
	unsigned seed = 3;
	uint32_t at;

	for (int i = 0; i < 100000; i++) {
		uint32_t n = (uint32_t)rand_r(&seed) % 12 * 8;
		uint8_t *exact = malloc(n + 1); /* so that a sanitizer sees one byte too many */
		for (uint32_t k = 0; k < n; k++)
			exact[k] = rand_r(&seed) % 3 ? 0 : (uint8_t)(rand_r(&seed) % 24);
		struct apr_fault f;
		int e = apr_check_params(exact, n, APR_OP_GENERATE, ALL_FEATURES, &V, &f);
		if (!e && V.n_stop) {
			uint32_t pos = 0, len;
			const uint8_t *text;
			while (apr_param_stop(&V, &pos, &text, &len))
				CU_ASSERT(text + len <= exact + n);
		}
		free(exact);
	}
	(void)at;
}

/* ---- HELLO ------------------------------------------------------------------------- */

static void case23_hello(void)
{
	struct apr_hello h = { .hdr = { APR_FRAME_MAGIC, APR_FRAME_HELLO, 0, 128, 0 }, .major = APR_ABI_MAJOR }, out;
	struct apr_fault f;
	uint8_t longer[136] = { 0 };

#define HELLO(change, n_bytes, want) \
	do { \
		struct apr_hello g = h; \
		h.hdr.size = 128; \
		change; \
		CU_ASSERT_EQUAL(apr_check_hello(&h, n_bytes, APR_FEAT_LOGPROBS, &out, &f), want); \
		h = g; \
	} while (0)
	HELLO((void)0, 128, 0);
	HELLO(h.hdr.magic++, 128, -EPROTO);
	HELLO(h.hdr.type = APR_FRAME_READY, 128, -EPROTO);
	HELLO(h.hdr.size = 127, 128, -EPROTO);
	HELLO(h.major = 99, 128, -EPROTONOSUPPORT);
	HELLO((h.major = 99, h.hdr.size = 20), 20, -EPROTONOSUPPORT); /* another version may have another size */
	HELLO(h.minor = 99, 128, 0);
	HELLO((void)0, 15, -EPROTO);
	HELLO((void)0, 19, -EPROTO);
	HELLO(h.hdr.size = 120, 120, -EPROTO);
	HELLO(h.hdr.flags = 1, 128, -EINVAL);
	HELLO(h.hdr.err = 1, 128, -EINVAL);
	HELLO(h.flags = 2, 128, -EINVAL);
	HELLO(h.flags = APR_HELLO_RING_ALWAYS, 128, 0);
	HELLO(h.zero0 = 1, 128, -EINVAL);
	HELLO(h.zero1[15] = 1, 128, -EINVAL);
	HELLO(h.need = APR_FEAT_LOGPROBS, 128, 0);
	HELLO(h.need = APR_FEAT_TOOLS, 128, -EOPNOTSUPP);
	HELLO(h.want = UINT64_MAX, 128, 0);
	h.hdr.size = 136;
	memcpy(longer, &h, 128);
	CU_ASSERT_EQUAL(apr_check_hello(longer, 136, 0, &out, &f), 0);
	longer[133] = 1;
	CU_ASSERT_EQUAL(apr_check_hello(longer, 136, 0, &out, &f), -EINVAL);
	CU_ASSERT_EQUAL(f.at, 133);
}

static const struct apr_test tests[] = {
	{ "case15_good_entries", good_entries, 0 },
	{ "case23_offsets_and_lengths", case23_offsets_and_lengths, 0 },
	{ "case23_opcodes", case23_opcodes, 0 },
	{ "every_field_is_judged", every_field_is_judged, 0 },
	{ "what_is_not_there_is_eopnotsupp", what_is_not_there_is_eopnotsupp, 0 },
	{ "all_parameters_together", all_parameters_together, 0 },
	{ "case17_sampling_ranges", case17_sampling_ranges, 0 },
	{ "case16_biases", case16_biases, 0 },
	{ "case08_stop_strings", case08_stop_strings, 0 },
	{ "the_rest_of_the_parameters", the_rest_of_the_parameters, 0 },
	{ "lists_that_are_none", lists_that_are_none, 0 },
	{ "random_lists_never_read_beyond", random_lists_never_read_beyond, 0 },
	{ "case23_hello", case23_hello, 0 },
};
TEST_MAIN("shm/check", tests)
