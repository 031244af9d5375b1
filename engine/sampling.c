/* SPDX-License-Identifier: MIT */
/*
 * Sampling parameters: the request over the file over the built-in values.
 *
 * Owns: ranges and defaults. Does not own what the parameters do
 * (kernels/common/sample.h). Bits of `have` are APR_SET_* of the ABI, which the
 * engine does not see; tests/engine compares the numbers.
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "engine/internal.h"
#include "engine/sampling.h"

static const float f32_huge = 3e38f;

static bool in(float v, float low, float high)
{
	return v >= low && v <= high; /* false for NaN */
}

/* The first field of `have` that is out of range, or NULL. */
const char *apr_sampling_fault(const struct apr_sampling_request *r)
{
	if (r->have & APR_HAVE_TEMPERATURE && !(r->temperature == 0.0f || in(r->temperature, 1e-7f, 1e6f)))
		return "temperature";
	if (r->have & APR_HAVE_TOP_P && !in(r->top_p, 0.0f, 1.0f))
		return "top_p";
	if (r->have & APR_HAVE_MIN_P && !in(r->min_p, 0.0f, 1.0f))
		return "min_p";
	if (r->have & APR_HAVE_REPEAT && !(in(r->repeat_penalty, 1e-6f, 1e6f)))
		return "repeat_penalty";
	if (r->have & APR_HAVE_FREQUENCY && !in(r->frequency_penalty, -1e6f, 1e6f))
		return "frequency_penalty";
	if (r->have & APR_HAVE_PRESENCE && !in(r->presence_penalty, -1e6f, 1e6f))
		return "presence_penalty";
	if (r->have & APR_HAVE_WINDOW && r->penalty_window < -1)
		return "penalty_window";
	return NULL;
}

static void apply(struct apr_sample_params *p, const struct apr_sampling_request *r)
{
	if (r->have & APR_HAVE_TEMPERATURE)
		p->temperature = r->temperature;
	if (r->have & APR_HAVE_TOP_K)
		p->top_k = r->top_k > 0 ? (uint32_t)r->top_k : 0;
	if (r->have & APR_HAVE_TOP_P)
		p->top_p = r->top_p;
	if (r->have & APR_HAVE_MIN_P)
		p->min_p = r->min_p;
	if (r->have & APR_HAVE_REPEAT)
		p->repeat_penalty = r->repeat_penalty;
	if (r->have & APR_HAVE_FREQUENCY)
		p->frequency_penalty = r->frequency_penalty;
	if (r->have & APR_HAVE_PRESENCE)
		p->presence_penalty = r->presence_penalty;
	if (r->have & APR_HAVE_WINDOW)
		p->penalty_window = r->penalty_window;
}

struct apr_sampling_request apr_sampling_of_file(const struct apr_model_sampling *f)
{
	return (struct apr_sampling_request){
		.have = f->have & ~APR_HAVE_IGNORE_EOS, .temperature = f->temperature, .top_p = f->top_p, .min_p = f->min_p,
		.repeat_penalty = f->repeat_penalty, .frequency_penalty = f->frequency_penalty,
		.presence_penalty = f->presence_penalty, .top_k = f->top_k, .penalty_window = f->penalty_window};
}

int apr_sampling_merge(const struct apr_model_sampling *file, const struct apr_sampling_request *r,
                       struct apr_sample_params *out, const char **field)
{
	struct apr_sampling_request f = apr_sampling_of_file(file);
	const char *fault = apr_sampling_fault(r);

	if (fault) {
		if (field)
			*field = fault;
		return -EINVAL;
	}
	memset(out, 0, sizeof *out);
	out->temperature = 1.0f;
	out->top_p = 1.0f;
	out->repeat_penalty = 1.0f;
	out->penalty_window = -1;
	apply(out, &f); /* its ranges were checked at load */
	apply(out, r);
	return 0;
}

int apr_sampling_resolve(const struct apr_loaded *m, const struct apr_sampling_request *r, struct apr_sample_params *out,
                         const char **field)
{
	return apr_sampling_merge(&m->model->sampling, r, out, field);
}

bool apr_sampling_penalises(const struct apr_sample_params *p)
{
	return p->penalty_window != 0 &&
	       (p->repeat_penalty != 1.0f || p->frequency_penalty != 0.0f || p->presence_penalty != 0.0f);
}

/* A bias may ban (-inf), never force by +inf, and is a number. */
bool apr_sampling_bias_ok(float v)
{
	return !isnan(v) && v <= f32_huge;
}
