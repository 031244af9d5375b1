/* SPDX-License-Identifier: MIT */
/* Owns: how settings are shown: name, value, and where the value came from. Over the admin socket. */
#include "client/aprctl/ctl.h"
#include <stdlib.h>
#include <string.h>

static void print(const struct ctl *c, json_t *j)
{
	const char *name, *value, *from, *file = json_string_value(json_object_get(j, "file"));
	json_t *r;
	size_t i;

	json_array_foreach (json_object_get(j, "settings"), i, r) {
		if (json_unpack(r, "{s:s,s:s,s:s}", "name", &name, "value", &value, "from", &from))
			continue;
		printf("%-15s %-24s %s%s%s%s%s\n", name, *value ? value : "-", ctl_dim(c), from,
		       !strcmp(from, "file") && file ? " " : "", !strcmp(from, "file") && file ? file : "", ctl_plain(c));
	}
}

int cmd_config(struct ctl *c)
{
	char *reply = NULL;
	json_t *j;
	int status;

	if (c->n_args)
		return ctl_usage(c, "config takes no words");
	status = ctl_admin(c, APR_FRAME_STATUS, json_pack("{s:b}", "config", 1), &reply, 10000);
	if (status)
		return status;
	j = reply ? json_loads(reply, 0, NULL) : NULL;
	free(reply);
	if (!json_is_array(json_object_get(j, "settings"))) {
		json_decref(j);
		return ctl_fail(c, "this daemon does not tell its settings: it is older than this aprctl");
	}
	if (c->json)
		return ctl_print_json(c, j);
	print(c, j);
	json_decref(j);
	return ctl_flush(c, CTL_OK);
}
