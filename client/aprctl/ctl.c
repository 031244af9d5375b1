/* SPDX-License-Identifier: MIT */
/* Owns: one run of aprctl from argv to exit status. */
#include "client/aprctl/ctl.h"
#include <signal.h>
#include <stdlib.h>

int ctl_main(int argc, char **argv)
{
	struct ctl *c = calloc(1, sizeof(*c));
	bool done = false;
	int status;

	if (!c) {
		fprintf(stderr, "aprctl: out of memory\n");
		return CTL_FAIL;
	}
	signal(SIGPIPE, SIG_IGN); /* a reader that went away is an error of stdout, not a death */
	status = ctl_parse(c, argc, argv, &done);
	if (!status && !done)
		status = c->verb->run(c);
	if (done && !status)
		status = ctl_flush(c, CTL_OK);
	free(c);
	return status;
}
