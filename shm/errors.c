/* SPDX-License-Identifier: MIT */
/* Owns: the table of errno and meaning; man/aprd-protocol.7 lists the same rows, held together by a test. */
#include "shm/errors.h"
#include <errno.h>

#define FINAL APR_ERR_FINAL
#define CALL APR_ERR_CALL
#define FRAME APR_ERR_FRAME
#define ROW(e, where, text) { e, #e, where, text }

const struct apr_errno_row apr_errno_table[] = {
	ROW(EPERM, CALL | FRAME, "the other side's user may not do that, or is not one to trust"),
	ROW(ENOENT, FINAL | CALL | FRAME, "no such request, model, handle or socket"),
	ROW(EINTR, CALL, "never returned: interrupted waits go on"),
	ROW(EIO, FINAL, "the backend failed while it computed this request"),
	ROW(E2BIG, FINAL | CALL, "input, parameter or result is above its limit"),
	ROW(EBADF, CALL, "the descriptor is none"),
	ROW(EAGAIN, CALL | FRAME, "nothing there now; try again"),
	ROW(ENOMEM, FINAL | CALL | FRAME, "out of memory"),
	ROW(EACCES, CALL | FRAME, "the socket's permissions forbid it"),
	ROW(EFAULT, FINAL, "the client's memory could not be read; the session ends"),
	ROW(EBUSY, CALL | FRAME, "no credit left, or requests are in flight: take completions first"),
	ROW(EEXIST, FINAL | FRAME, "user_data of a request in flight, or a name already used"),
	ROW(EINVAL, FINAL | CALL | FRAME, "a field is wrong; pos is the byte offset of it"),
	ROW(EMFILE, CALL, "too many open descriptors here"),
	ROW(ENOSPC, FINAL | CALL | FRAME, "no room: the context, a buffer or the daemon's memory is full"),
	ROW(EPIPE, CALL, "the session is dead and all its entries have been seen"),
	ROW(EDOM, FINAL, "the model's numbers are not finite"),
	ROW(ENOBUFS, CALL, "no room in the arena until submitted entries are taken"),
	ROW(ENAMETOOLONG, CALL, "a path is too long for a socket"),
	ROW(EPROTO, CALL | FRAME, "the other side broke the protocol"),
	ROW(EPROTONOSUPPORT, CALL | FRAME, "the other side speaks another major version"),
	ROW(EOPNOTSUPP, FINAL | CALL | FRAME, "not built, or not for this model"),
	ROW(ECONNREFUSED, CALL, "a socket is there but no daemon behind it"),
	ROW(ECONNRESET, FINAL | CALL, "the session ended before this request did"),
	ROW(ETIME, FINAL, "the time limit cannot be met, or waited too long for room in the completion queue"),
	ROW(ETIMEDOUT, FINAL | CALL, "the time given is over"),
	ROW(ESTALE, FINAL | CALL, "the model or conversation is gone, or its receipt changed"),
	ROW(EDQUOT, FINAL | FRAME, "above what this user may have"),
	ROW(ECANCELED, FINAL, "cancelled"),
	ROW(EOWNERDEAD, CALL, "this process was forked from the one that connected"),
	ROW(ESHUTDOWN, FINAL | FRAME, "the daemon is draining and takes nothing new"),
	ROW(ENODEV, FINAL | FRAME, "no model is loaded, or the backend is absent"),
	ROW(EILSEQ, FINAL, "the input is not what its format says"),
};
const size_t apr_errno_rows = sizeof(apr_errno_table) / sizeof(apr_errno_table[0]);

static const struct apr_errno_row *find(int err)
{
	for (size_t i = 0; i < apr_errno_rows; i++)
		if (err == apr_errno_table[i].err || err == -apr_errno_table[i].err)
			return &apr_errno_table[i];
	return NULL;
}

const char *apr_errno_name(int err)
{
	const struct apr_errno_row *r = find(err);
	return r ? r->name : NULL;
}

const char *apr_errno_meaning(int err)
{
	const struct apr_errno_row *r = find(err);
	return r ? r->meaning : NULL;
}
