/* SPDX-License-Identifier: MIT */
/* Owns: the verbs that change something: load, unload, drain, cancel, reload. They use the admin socket alone. */
#include "client/aprctl/ctl.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Runs one command and prints what the daemon said to it. */
static int command(struct ctl *c, unsigned type, json_t *body, const char *done, int timeout_ms)
{
	char *reply = NULL;
	json_t *j;
	int status = ctl_admin(c, type, body, &reply, timeout_ms);

	if (status)
		return status;
	if (c->json) {
		j = reply && *reply ? json_loads(reply, 0, NULL) : NULL;
		status = ctl_print_json(c, j ? j : json_object());
	} else {
		printf("%s\n", done);
		status = ctl_flush(c, CTL_OK);
	}
	free(reply);
	return status;
}

/* The model's name where none is given: the file's, without folder and .gguf. */
static void name_of(const char *path, char *name, size_t n)
{
	const char *base = strrchr(path, '/');
	size_t len;

	base = base ? base + 1 : path;
	len = strlen(base);
	if (len > 5 && !strcmp(base + len - 5, ".gguf"))
		len -= 5;
	snprintf(name, n, "%.*s", (int)len, base);
}

int cmd_load(struct ctl *c)
{
	char name[256], path[PATH_MAX], done[512];
	const char *eq, *file;

	if (c->n_args != 1)
		return ctl_usage(c, "give one [NAME=]FILE");
	eq = strchr(c->args[0], '=');
	file = eq ? eq + 1 : c->args[0];
	if (!realpath(file, path)) /* the daemon stands in another folder */
		return ctl_fail(c, "%s: %s", file, strerror(errno));
	if (eq)
		snprintf(name, sizeof(name), "%.*s", (int)(eq - c->args[0]), c->args[0]);
	else
		name_of(path, name, sizeof(name));
	if (!*name || strlen(name) > 63)
		return ctl_usage(c, "the model's name must have 1 to 63 bytes: give NAME=FILE");
	snprintf(done, sizeof(done), "loaded %s", name);
	return command(c, APR_FRAME_LOAD, json_pack("{s:s, s:s}", "name", name, "path", path), done, -1);
}

int cmd_unload(struct ctl *c)
{
	char done[512];

	if (c->n_args != 1)
		return ctl_usage(c, "give one model's NAME: aprctl models lists them");
	snprintf(done, sizeof(done), "unloaded %s", c->args[0]);
	return command(c, APR_FRAME_UNLOAD, json_pack("{s:s}", "name", c->args[0]), done, -1);
}

int cmd_drain(struct ctl *c)
{
	if (c->n_args)
		return ctl_usage(c, "drain takes no words");
	return command(c, APR_FRAME_DRAIN,
		       GIVEN(c, KEY_TIMEOUT) ? json_pack("{s:I}", "timeout_ms", (json_int_t)c->timeout_ms) : json_object(),
		       "draining", -1);
}

int cmd_reload(struct ctl *c)
{
	if (c->n_args)
		return ctl_usage(c, "reload takes no words");
	return command(c, APR_FRAME_RELOAD, NULL, "read again: limits, times and log level are in force", 10000);
}

int cmd_cancel(struct ctl *c)
{
	uint64_t session, user_data = 0;
	json_t *body;

	if (c->n_args < 1 || c->n_args > 2 || !ctl_parse_u64(c->args[0], &session) || session > INT64_MAX ||
	    (c->n_args == 2 && (!ctl_parse_u64(c->args[1], &user_data) || user_data > INT64_MAX)))
		return ctl_usage(c, "give SESSION [USER_DATA] as numbers");
	body = json_pack("{s:I}", "session", (json_int_t)session);
	if (c->n_args == 2)
		json_object_set_new(body, "user_data", json_integer((json_int_t)user_data));
	return command(c, APR_FRAME_CANCEL, body, "cancelled", 10000);
}
