/* SPDX-License-Identifier: MIT */
/*
 * Lines of a conversation as they are typed.
 *
 * Owns: the prompt, editing and the lines typed before, on a terminal; on a pipe just
 * lines. Does not own: what a line means.
 */
#ifndef APR_CTL_LINE_H
#define APR_CTL_LINE_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>

struct ctl_line {
	bool terminal;
	const char *bold, *plain; /* of the prompt */
	char **past;              /* lines typed before, oldest first */
	size_t n_past, cap_past;
	char *buf; /* the line being typed */
	size_t len, cap, at;
	sigset_t signals; /* those blocked before the line */
};

void ctl_line_init(struct ctl_line *l, bool terminal, const char *bold, const char *plain);
void ctl_line_free(struct ctl_line *l);
/* The next line without its newline; one that ends with a backslash takes the next one in. *text is malloc'ed.
 * 1; 0 the end of input; -EINTR Ctrl-C, the line is given up; -ECANCELED SIGTERM; -errno. */
int ctl_line_read(struct ctl_line *l, char **text, size_t *len);

#endif
