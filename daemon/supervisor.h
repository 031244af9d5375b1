/* SPDX-License-Identifier: MIT */
/*
 * The process that outlives a crash: it owns the listening sockets and their locks,
 * signals and start-up notices, and runs the worker as a child.
 *
 * Owns: fork, restart with back-off, drain and its deadline, the exit status. Does
 * not own sessions, models or threads: it has one thread, maps no model and loads no
 * driver, which is why a plain fork is a clean start for each worker: it has the
 * settings as they were checked, and no thread, lock or device of an earlier one.
 */
#ifndef APRD_SUPERVISOR_H
#define APRD_SUPERVISOR_H

#include "daemon/options.h"
#include "daemon/sockets.h"

/* Between supervisor and worker, one SOCK_SEQPACKET datagram each. */
enum ctl_type {
	/* from the worker */
	CTL_READY = 1, /* every model is loaded */
	CTL_FAILED,    /* cannot start; text says why (told already) */
	CTL_DRAIN,     /* an administrator wants aprd to end; value = ms */
	CTL_DRAINED,   /* nothing runs any more */
	CTL_LOADED,    /* value per cent of the first models are loaded */
	CTL_ALIVE,     /* io thread and core have answered a CTL_PING */
	/* to the worker */
	CTL_STOP,      /* drain for value ms */
	CTL_NOW,       /* end at once */
	CTL_RELOAD,
	CTL_PING
};
struct ctl {
	uint32_t type, value;
};

struct worker_start {
	const struct options *options;
	struct listener *listeners; /* the admin socket last */
	size_t n_listeners;
	int ctl;
	uint32_t restarts;
	pid_t supervisor;
};

/* Runs aprd; the exit status. */
int supervisor_run(const struct options *o);
/* main of it all; tests call it too. */
int aprd_main(int argc, char **argv);

#endif
