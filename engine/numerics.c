/* SPDX-License-Identifier: MIT */
/*
 * The numerics hash: equal values promise equal tokens and log-probabilities.
 *
 * Owns: what goes into it. Not into it on a CPU: the instruction set, the number
 * of threads, the context and the batch, none of which changes a bit.
 */
#include <link.h>
#include <string.h>

#include "engine/internal.h"
#include "model/hash.h"

/* Hash of the engine's, kernels' and model's objects, where the build makes one. */
extern const uint8_t apr_engine_build_id[32] __attribute__((weak));

static int hash_image(struct dl_phdr_info *info, size_t size, void *arg)
{
	uintptr_t here = (uintptr_t)&apr_numerics;
	ElfW(Half) i;
	bool ours = false;

	(void)size;
	for (i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *ph = &info->dlpi_phdr[i];
		uintptr_t at = info->dlpi_addr + ph->p_vaddr;

		ours |= ph->p_type == PT_LOAD && here >= at && here < at + ph->p_memsz;
	}
	for (i = 0; ours && i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *ph = &info->dlpi_phdr[i];

		if (ph->p_type == PT_LOAD && ph->p_flags & PF_X)
			apr_hash_update(arg, (const void *)(info->dlpi_addr + ph->p_vaddr), ph->p_filesz);
	}
	return ours;
}

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
	struct apr_hash h;

	apr_hash_init(&h);
	if (apr_engine_build_id)
		field(&h, "build", apr_engine_build_id, 32);
	else /* the code of the whole program: never equal by mistake, if sometimes different without need */
		dl_iterate_phdr(hash_image, &h);
	field(&h, "backend", m->engine->backend->name, strlen(m->engine->backend->name));
	field(&h, "model", m->model->weights_hash, sizeof m->model->weights_hash);
	field(&h, "route", m->route->name, strlen(m->route->name));
	field(&h, "chunks", chunks, sizeof chunks);
	field(&h, "kv", kv, strlen(kv));
	apr_hash_final(&h, out);
}
