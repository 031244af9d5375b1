/* SPDX-License-Identifier: MIT */
/* Owns: the target for the configuration file. See fuzz.h. */
#include "daemon/options.h"
#include "tests/fuzz/fuzz.h"
#include <string.h>

int fuzz_config(const uint8_t *data, size_t n)
{
	struct options o;

	if (n > 65536)
		return 0;
	options_init(&o);
	o.config = strdup(fuzz_file(data, n));
	if (o.config && !config_read(&o)) {
		MUST(o.n_models == 0 || o.models);
		for (size_t i = 0; i < o.n_models; i++)
			MUST(o.models[i].name && o.models[i].path);
		for (size_t i = 0; i < o.n_listeners; i++)
			MUST(o.listeners[i].path && o.listeners[i].tenant);
	}
	options_free(&o);
	return 0;
}
