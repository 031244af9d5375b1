/* SPDX-License-Identifier: MIT */
/* What the parameter builder writes is what the daemon's judge reads; its own refusals; score records. */
#include "shm/check.h"
#include "tests/harness.h"
#include <apr/client.h>
#include <errno.h>
#include <math.h>
#include <string.h>

static uint64_t room[512];
static struct apr_params p;
static struct apr_param_view v;

static int judge(void)
{
	struct apr_fault f;
	return apr_check_params(p.buf, p.len, APR_OP_GENERATE, UINT64_MAX, &v, &f);
}

static void what_is_built_is_read(void)
{
	struct apr_sampling s = { .set = APR_SET_TOP_K | APR_SET_MIN_P, .top_k = 40, .min_p = 0.05f };
	static const uint32_t ids[] = { 3, 4, 5 };
	static const float bias[] = { 1.5f, -2, -INFINITY };
	static const char *const stops[] = { "end", "a longer stop", "x" };
	static const size_t lens[] = { 3, 13, 1 };
	const uint8_t *text;
	uint32_t pos = 0, len;

	apr_params_init(&p, room, sizeof(room));
	CU_ASSERT_EQUAL(judge(), 0); /* nothing is a list too */
	apr_params_sampling(&p, &s);
	apr_params_logprobs(&p, 5);
	apr_params_bias(&p, ids, bias, 3);
	apr_params_stop(&p, stops, lens, 3);
	apr_params_stop_ids(&p, ids, 3);
	apr_params_trace_id(&p, (const unsigned char *)"0123456789abcdef");
	apr_params_raw(&p, 300, APR_PARAM_OPTIONAL, "later", 5);
	CU_ASSERT_EQUAL(p.err, 0);
	CU_ASSERT_EQUAL_FATAL(judge(), 0);
	CU_ASSERT(v.sampling->top_k == 40 && v.sampling->min_p == 0.05f);
	CU_ASSERT_EQUAL(v.logprobs, 5);
	CU_ASSERT(v.n_bias == 3 && v.bias[0].id == 3 && v.bias[1].bias == -2);
	CU_ASSERT(v.n_stop_ids == 3 && v.stop_ids[1] == 4);
	CU_ASSERT(!memcmp(v.trace_id, "0123456789abcdef", 16));
	for (int i = 0; i < 3; i++) {
		CU_ASSERT(apr_param_stop(&v, &pos, &text, &len));
		CU_ASSERT(len == lens[i] && !memcmp(text, stops[i], len));
	}
	CU_ASSERT(!apr_param_stop(&v, &pos, &text, &len));
}

static void errors_stick(void)
{
	static const char *const stops[] = { "", "a" };
	static const size_t lens[] = { 0, 1 }, too_long[] = { 257 };
	static const uint32_t many[APR_BIAS_MAX + 1];
	static const float biases[APR_BIAS_MAX + 1];
	uint64_t small[3];

	apr_params_init(&p, room, sizeof(room));
	apr_params_logprobs(&p, 1);
	uint32_t len = p.len;
	apr_params_logprobs(&p, 1);
	CU_ASSERT_EQUAL(p.err, -EINVAL);
	apr_params_stop_ids(&p, many, 1);
	CU_ASSERT_EQUAL(p.len, len); /* nothing is added after an error */

	apr_params_init(&p, room, sizeof(room));
	apr_params_stop(&p, stops, lens, 2);
	CU_ASSERT_EQUAL(p.err, -EINVAL);
	apr_params_init(&p, room, sizeof(room));
	apr_params_stop(&p, stops, too_long, 1);
	CU_ASSERT_EQUAL(p.err, -EINVAL);
	apr_params_init(&p, room, sizeof(room));
	apr_params_bias(&p, many, biases, APR_BIAS_MAX + 1);
	CU_ASSERT_EQUAL(p.err, -EINVAL);
	apr_params_init(&p, room, sizeof(room));
	apr_params_stop_ids(&p, many, 17);
	CU_ASSERT_EQUAL(p.err, -EINVAL);
	apr_params_init(&p, room, sizeof(room));
	apr_params_raw(&p, 0, 0, "x", 1);
	CU_ASSERT_EQUAL(p.err, -EINVAL);
	apr_params_init(&p, room, sizeof(room));
	apr_params_raw(&p, 5, 2, "x", 1);
	CU_ASSERT_EQUAL(p.err, -EINVAL);
	apr_params_init(&p, small, sizeof(small));
	apr_params_logprobs(&p, 1);
	CU_ASSERT_EQUAL(p.err, 0);
	apr_params_logprobs(&p, 1);
	apr_params_init(&p, small, sizeof(small));
	apr_params_raw(&p, 5, 0, room, 17);
	CU_ASSERT_EQUAL(p.err, -ENOSPC);
	apr_params_init(&p, small, sizeof(small));
	apr_params_raw(&p, 5, 0, room, SIZE_MAX - 3);
	CU_ASSERT_EQUAL(p.err, -ENOSPC);
}

static void score_records_are_bounded(void)
{
	struct {
		struct apr_score s;
		struct apr_top top[2];
		struct apr_score t;
	} data = { { 1, 7, -1, 2 }, { { 7, -1 }, { 8, -2 } }, { 2, 8, -3, 0 } };
	size_t pos = 0;

	const struct apr_score *s = apr_score_next(&data, sizeof(data), &pos);
	CU_ASSERT_PTR_EQUAL_FATAL(s, &data.s);
	CU_ASSERT_EQUAL(apr_score_top(s)[1].id, 8);
	CU_ASSERT_PTR_EQUAL(apr_score_next(&data, sizeof(data), &pos), &data.t);
	CU_ASSERT_PTR_NULL(apr_score_next(&data, sizeof(data), &pos));
	CU_ASSERT_EQUAL(pos, sizeof(data));
	for (size_t n = 0; n < 32; n++) { /* cut short */
		pos = 0;
		CU_ASSERT_PTR_NULL(apr_score_next(&data, n, &pos));
	}
	data.s.k = UINT32_MAX;
	pos = 0;
	CU_ASSERT_PTR_NULL(apr_score_next(&data, sizeof(data), &pos));
	pos = sizeof(data) + 1;
	CU_ASSERT_PTR_NULL(apr_score_next(&data, sizeof(data), &pos));
}

static const struct apr_test tests[] = {
	{ "what_is_built_is_read", what_is_built_is_read, 0 },
	{ "errors_stick", errors_stick, 0 },
	{ "score_records_are_bounded", score_records_are_bounded, 0 },
};
TEST_MAIN("client/params", tests)
