/* SPDX-License-Identifier: MIT */
/*
 * The numerics hash: equal values promise equal tokens and log-probabilities.
 *
 * Owns: what goes into it. Not into it on a CPU: the instruction set, the number
 * of threads, the context and the batch, none of which changes a bit.
 */
#include <string.h>

#include "engine/internal.h"
#include "model/hash.h"

/* Hash of the engine's, kernels' and model's objects; the build makes it (scripts/build-id). A change of the
 * daemon or of the client changes no bit of an answer and so no receipt. */
extern const uint8_t apr_engine_build_id[32];

static void field(struct apr_hash *h, const char *name, const void *value, size_t len)
{
	apr_hash_update(h, name, strlen(name) + 1);
	apr_hash_update(h, &len, sizeof len);
	apr_hash_update(h, value, len);
}

void apr_numerics(const struct apr_loaded *m, uint8_t out[32])
{
	static const char *const kv_name[] = {"f16", "f32", "bf16"};
	const uint32_t chunks[2] = {APR_KV_PAGE, APR_KV_SEGMENT}; /* of keys; a projection is one chain over K */
	const char *kv = kv_name[m->sizes.kv_type];
	const char *id = m->engine->backend->identity ? m->engine->backend->identity(m->engine->ctx) : NULL;
	struct apr_hash h;

	apr_hash_init(&h);
	field(&h, "build", apr_engine_build_id, sizeof apr_engine_build_id);
	field(&h, "backend", m->engine->backend->name, strlen(m->engine->backend->name));
	field(&h, "model", m->model->weights_hash, sizeof m->model->weights_hash);
	field(&h, "route", m->route->arithmetic, strlen(m->route->arithmetic));
	field(&h, "chunks", chunks, sizeof chunks);
	field(&h, "kv", kv, strlen(kv));
	if (id)
		field(&h, "backend identity", id, strlen(id));
	apr_hash_final(&h, out);
}
