/* SPDX-License-Identifier: MIT */
/*
 * aprctl's entry. Owns: descriptors 0 to 2 at start. Does not own: all else, which
 * is in the other files of this folder.
 */
#include "client/aprctl/ctl.h"
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* A descriptor below 3 that is closed would become the daemon's socket, and what is printed would go there.
 * Each gets /dev/null, standard input for writing alone, so that reading it is an error and no empty text. */
static int fill_standard(bool *no_stdout)
{
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
		if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF)
			continue;
		*no_stdout |= fd == STDOUT_FILENO;
		if (open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDWR) != fd)
			return -1;
	}
	return 0;
}

int main(int argc, char **argv)
{
	bool no_stdout = false;

	if (fill_standard(&no_stdout))
		return CTL_FAIL;
	if (no_stdout) { /* before anything is done: who wants no answer gives /dev/null */
		fprintf(stderr, "aprctl: standard output is closed\n");
		return CTL_FAIL;
	}
	return ctl_main(argc, argv);
}
