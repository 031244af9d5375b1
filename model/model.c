/* SPDX-License-Identifier: MIT */
/*
 * Opens a model: the file by gguf.c, its meaning by arch.c and arch_weights.c,
 * and here what is no architecture's own: name, sampling values, content hash.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/arch.h"
#include "model/hash.h"

static int find_arch(struct loader *ld)
{
	struct gguf_str name;
	char shown[64];
	int rc = gguf_get_str(ld->g, "general.architecture", &name, ld->err, ld->errlen);

	if (rc == -ENOENT)
		return gguf_fail(ld->err, ld->errlen, -EINVAL, "key general.architecture: missing");
	if (rc)
		return rc;
	ld->def = apr_arch_find(name);
	if (!ld->def)
		return gguf_fail(ld->err, ld->errlen, -ENOTSUP, "key general.architecture: \"%s\" is not supported",
		                 gguf_printable(name, shown, sizeof shown));
	return 0;
}

/* general.name in printable ASCII, else the file's name without folder and ".gguf". */
static int set_names(struct loader *ld, const char *path)
{
	struct apr_model *m = ld->m;
	struct gguf_str s;
	char shown[256];
	int rc = gguf_get_str(ld->g, "general.name", &s, ld->err, ld->errlen);

	if (rc && rc != -ENOENT)
		return rc;
	if (rc || !s.len) {
		const char *slash = strrchr(path, '/');

		s.s = slash ? slash + 1 : path;
		s.len = strlen(s.s);
		if (s.len > 5 && !strcmp(s.s + s.len - 5, ".gguf"))
			s.len -= 5;
	}
	m->name = strdup(gguf_printable(s, shown, sizeof shown));
	m->path = strdup(path);
	return m->name && m->path ? 0 : gguf_fail(ld->err, ld->errlen, -ENOMEM, "out of memory");
}

static int sampling_f32(struct loader *ld, const char *key, float min, float max, uint32_t bit, float *out)
{
	int rc = gguf_get_f32(ld->g, key, out, ld->err, ld->errlen);

	if (rc)
		return rc == -ENOENT ? 0 : rc;
	if (*out < min || *out > max)
		return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %g is not from %g to %g", key, (double)*out,
		                 (double)min, (double)max);
	ld->m->sampling.have |= bit;
	return 0;
}

static int sampling_i32(struct loader *ld, const char *key, int32_t min, uint32_t bit, int32_t *out)
{
	int rc = gguf_get_i32(ld->g, key, out, ld->err, ld->errlen);

	if (rc)
		return rc == -ENOENT ? 0 : rc;
	if (*out < min)
		return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %d is below %d", key, *out, min);
	ld->m->sampling.have |= bit;
	return 0;
}

static int read_sampling(struct loader *ld)
{
	struct apr_model_sampling *s = &ld->m->sampling;
	int rc = sampling_f32(ld, "general.sampling.temp", 0.0f, 1e6f, APR_FILE_TEMPERATURE, &s->temperature);

	if (!rc)
		rc = sampling_i32(ld, "general.sampling.top_k", 0, APR_FILE_TOP_K, &s->top_k);
	if (!rc)
		rc = sampling_f32(ld, "general.sampling.top_p", 0.0f, 1.0f, APR_FILE_TOP_P, &s->top_p);
	if (!rc)
		rc = sampling_f32(ld, "general.sampling.min_p", 0.0f, 1.0f, APR_FILE_MIN_P, &s->min_p);
	if (!rc)
		rc = sampling_f32(ld, "general.sampling.penalty_repeat", 1e-6f, 1e6f, APR_FILE_REPEAT,
		                  &s->repeat_penalty);
	if (!rc)
		rc = sampling_f32(ld, "general.sampling.penalty_freq", -1e6f, 1e6f, APR_FILE_FREQUENCY,
		                  &s->frequency_penalty);
	if (!rc)
		rc = sampling_f32(ld, "general.sampling.penalty_present", -1e6f, 1e6f, APR_FILE_PRESENCE,
		                  &s->presence_penalty);
	if (!rc)
		rc = sampling_i32(ld, "general.sampling.penalty_last_n", -1, APR_FILE_WINDOW, &s->penalty_window);
	return rc;
}

static int hash_content(struct loader *ld)
{
	const uint8_t *bytes;
	struct apr_hash s;
	uint64_t len;
	uint32_t i;

	apr_hash_init(&s);
	for (i = 0; gguf_part(ld->g, i, &bytes, &len); i++) {
		apr_hash_update(&s, &len, sizeof len);
		if (apr_hash_tree(&s, bytes, len))
			return gguf_fail(ld->err, ld->errlen, -ENOMEM, "out of memory for the content hash");
	}
	apr_hash_final(&s, ld->m->weights_hash);
	return 0;
}

static int load(struct loader *ld, const char *path)
{
	uint32_t n = gguf_n_tensors(ld->g);
	int rc = find_arch(ld);

	if (!rc)
		rc = set_names(ld, path);
	if (!rc)
		rc = apr_arch_hparams(ld);
	if (rc)
		return rc;
	ld->used = calloc(n ? n : 1, 1);
	if (!ld->used)
		return gguf_fail(ld->err, ld->errlen, -ENOMEM, "out of memory for %u tensors", n);
	rc = apr_arch_weights(ld);
	free(ld->used);
	if (!rc)
		rc = read_sampling(ld);
	return rc ? rc : hash_content(ld);
}

int apr_model_open(struct apr_model **out, const char *path, char *err, size_t errlen)
{
	struct loader ld = {.err = err, .errlen = errlen};
	struct gguf *g;
	int rc = gguf_open(&g, path, err, errlen);

	if (rc)
		return rc;
	ld.g = g;
	ld.m = calloc(1, sizeof *ld.m);
	if (!ld.m) {
		gguf_close(g);
		return gguf_fail(err, errlen, -ENOMEM, "out of memory");
	}
	ld.m->gguf = g;
	rc = load(&ld, path);
	if (rc)
		apr_model_close(ld.m);
	else
		*out = ld.m;
	return rc;
}

void apr_model_close(struct apr_model *m)
{
	if (!m)
		return;
	gguf_close(m->gguf);
	free(m->layers);
	free(m->name);
	free(m->path);
	free(m);
}
