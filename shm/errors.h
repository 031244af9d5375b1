/* SPDX-License-Identifier: MIT */
/*
 * One table of errno and what it means in this protocol. The man pages' ERRORS
 * sections are checked against it; tools print from it.
 */
#ifndef APR_SHM_ERRORS_H
#define APR_SHM_ERRORS_H

#include <stddef.h>

enum { /* where a number may appear */
	APR_ERR_FINAL = 1, /* apr_cqe.res of FINAL or ACK */
	APR_ERR_CALL = 2,  /* a library call's return */
	APR_ERR_FRAME = 4  /* apr_frame.err */
};

struct apr_errno_row {
	int err;          /* positive errno */
	const char *name; /* "EINVAL" */
	int where;
	const char *meaning; /* one line */
};

extern const struct apr_errno_row apr_errno_table[];
extern const size_t apr_errno_rows;

/* Either sign. NULL where the table has none. */
const char *apr_errno_name(int err);
const char *apr_errno_meaning(int err);

#endif
