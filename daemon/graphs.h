/* SPDX-License-Identifier: MIT */
/*
 * What status and WARMUP say about recorded steps.
 *
 * Owns: their JSON. Does not own the replays (engine/). graphs_json is the io
 * thread's, under models.lock; graphs_warm_all the loader's.
 */
#ifndef APRD_GRAPHS_H
#define APRD_GRAPHS_H

#include "daemon/models.h"
#include <jansson.h>

json_t *graphs_json(const struct models *m);
/* Replays all buckets of all models, or those of `model`, or of these the one of that kind and so many rows (kind NULL:
 * all). Fills *reply (which the caller frees), or err. Blocking; a model that is met is not freed meanwhile, since the
 * loader does that. */
int graphs_warm_all(struct models *m, const char *model, const char *kind, uint32_t rows, char **reply, char *err,
		    size_t errlen);

#endif
