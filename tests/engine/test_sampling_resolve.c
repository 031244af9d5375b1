/* SPDX-License-Identifier: MIT */
/* Request over file over built-in, and ranges (CASES 17 and 32). */
#include <apr/abi.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/sampling.h"
#include "tests/harness.h"

static const struct apr_model_sampling nothing;

static void bits_are_those_of_the_wire(void)
{
	CU_ASSERT_EQUAL(APR_HAVE_TEMPERATURE, APR_SET_TEMPERATURE);
	CU_ASSERT_EQUAL(APR_HAVE_TOP_K, APR_SET_TOP_K);
	CU_ASSERT_EQUAL(APR_HAVE_TOP_P, APR_SET_TOP_P);
	CU_ASSERT_EQUAL(APR_HAVE_MIN_P, APR_SET_MIN_P);
	CU_ASSERT_EQUAL(APR_HAVE_REPEAT, APR_SET_REPEAT);
	CU_ASSERT_EQUAL(APR_HAVE_FREQUENCY, APR_SET_FREQUENCY);
	CU_ASSERT_EQUAL(APR_HAVE_PRESENCE, APR_SET_PRESENCE);
	CU_ASSERT_EQUAL(APR_HAVE_WINDOW, APR_SET_WINDOW);
	CU_ASSERT_EQUAL(APR_HAVE_IGNORE_EOS, APR_SET_IGNORE_EOS);
	CU_ASSERT_EQUAL(APR_HAVE_WINDOW, APR_FILE_WINDOW);
}

static void built_in_values(void)
{
	struct apr_sampling_request r = {.temperature = 7, .top_k = 7}; /* not set, so not looked at */
	struct apr_sample_params p;

	CU_ASSERT_EQUAL(apr_sampling_merge(&nothing, &r, &p, NULL), 0);
	CU_ASSERT(p.temperature == 1.0f && p.top_k == 0 && p.top_p == 1.0f && p.min_p == 0.0f);
	CU_ASSERT(p.repeat_penalty == 1.0f && p.frequency_penalty == 0.0f && p.presence_penalty == 0.0f);
	CU_ASSERT_EQUAL(p.penalty_window, -1);
	CU_ASSERT(!apr_sampling_penalises(&p));
}

static void case32_request_over_file_over_built_in(void)
{
	struct apr_model_sampling file = {.have = APR_FILE_TEMPERATURE | APR_FILE_TOP_K | APR_FILE_TOP_P, .temperature = 0.6f,
	                                  .top_k = 20, .top_p = 0.95f, .min_p = 0.5f /* not in have */};
	/* set to what the built-in happens to be: it counts as given */
	struct apr_sampling_request r = {.have = APR_HAVE_TEMPERATURE | APR_HAVE_TOP_K, .temperature = 1.0f, .top_k = 0};
	struct apr_sample_params p;

	CU_ASSERT_EQUAL(apr_sampling_merge(&file, &r, &p, NULL), 0);
	CU_ASSERT(p.temperature == 1.0f && p.top_k == 0 && p.top_p == 0.95f && p.min_p == 0.0f);
	r.have = 0;
	CU_ASSERT_EQUAL(apr_sampling_merge(&file, &r, &p, NULL), 0);
	CU_ASSERT(p.temperature == 0.6f && p.top_k == 20);
}

static void expect(struct apr_sampling_request r, const char *fault)
{
	struct apr_sample_params p;
	const char *field = NULL;
	int rc = apr_sampling_merge(&nothing, &r, &p, &field);

	CU_ASSERT_EQUAL(rc, fault ? -EINVAL : 0);
	if (fault)
		CU_ASSERT(field && !strcmp(field, fault));
}

static void case17_ranges(void)
{
	static const float temps[] = {0, 1e-7f, -1, NAN, INFINITY, 1e6f}, top_ps[] = {0, 1, 1.5f}, min_ps[] = {0, 1};
	static const bool temp_ok[] = {true, true, false, false, false, true};
	static const int32_t ks[] = {0, -1, 1, 49152, INT32_MAX};
	size_t t, k, p, q;

	for (t = 0; t < 6; t++)
		for (k = 0; k < 5; k++)
			for (p = 0; p < 3; p++)
				for (q = 0; q < 2; q++) {
					struct apr_sampling_request r = {
						.have = APR_HAVE_TEMPERATURE | APR_HAVE_TOP_K | APR_HAVE_TOP_P | APR_HAVE_MIN_P,
						.temperature = temps[t], .top_k = ks[k], .top_p = top_ps[p], .min_p = min_ps[q]};

					expect(r, !temp_ok[t] ? "temperature" : p == 2 ? "top_p" : NULL);
				}
	expect((struct apr_sampling_request){.have = APR_HAVE_REPEAT, .repeat_penalty = 0}, "repeat_penalty");
	expect((struct apr_sampling_request){.have = APR_HAVE_REPEAT, .repeat_penalty = NAN}, "repeat_penalty");
	expect((struct apr_sampling_request){.have = APR_HAVE_FREQUENCY, .frequency_penalty = INFINITY}, "frequency_penalty");
	expect((struct apr_sampling_request){.have = APR_HAVE_PRESENCE, .presence_penalty = -INFINITY}, "presence_penalty");
	expect((struct apr_sampling_request){.have = APR_HAVE_PRESENCE, .presence_penalty = -2}, NULL);
	expect((struct apr_sampling_request){.have = APR_HAVE_WINDOW, .penalty_window = -2}, "penalty_window");
	expect((struct apr_sampling_request){.have = APR_HAVE_WINDOW, .penalty_window = 0}, NULL);
	expect((struct apr_sampling_request){.have = APR_HAVE_MIN_P, .min_p = -0.1f}, "min_p");
}

static void negative_top_k_is_off(void)
{
	struct apr_sampling_request r = {.have = APR_HAVE_TOP_K, .top_k = -1};
	struct apr_sample_params p;

	CU_ASSERT_EQUAL(apr_sampling_merge(&nothing, &r, &p, NULL), 0);
	CU_ASSERT_EQUAL(p.top_k, 0);
}

static const struct apr_test tests[] = {
	{"bits_are_those_of_the_wire", bits_are_those_of_the_wire, 0},
	{"built_in_values", built_in_values, 0},
	{"case32_request_over_file_over_built_in", case32_request_over_file_over_built_in, 0},
	{"case17_ranges", case17_ranges, 0},
	{"negative_top_k_is_off", negative_top_k_is_off, 0},
};
TEST_MAIN("engine/sampling_resolve", tests)
