/* SPDX-License-Identifier: MIT */
/* Sampling parameters within the engine: see sampling.c. */
#ifndef APR_ENGINE_SAMPLING_H
#define APR_ENGINE_SAMPLING_H

#include "engine/engine.h"

/* Numbers of APR_SET_* in the ABI. */
enum {
	APR_HAVE_TEMPERATURE = 0x001,
	APR_HAVE_TOP_K = 0x002,
	APR_HAVE_TOP_P = 0x004,
	APR_HAVE_MIN_P = 0x008,
	APR_HAVE_REPEAT = 0x010,
	APR_HAVE_FREQUENCY = 0x020,
	APR_HAVE_PRESENCE = 0x040,
	APR_HAVE_WINDOW = 0x080,
	APR_HAVE_IGNORE_EOS = 0x100
};

const char *apr_sampling_fault(const struct apr_sampling_request *r);
struct apr_sampling_request apr_sampling_of_file(const struct apr_model_sampling *f);
int apr_sampling_merge(const struct apr_model_sampling *file, const struct apr_sampling_request *r,
                       struct apr_sample_params *out, const char **field);
bool apr_sampling_penalises(const struct apr_sample_params *p);
bool apr_sampling_bias_ok(float v);

#endif
