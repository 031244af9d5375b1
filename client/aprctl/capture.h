/* SPDX-License-Identifier: MIT */
/*
 * The capture file: one JSON object a line, bytes in hex.
 *
 *   {"aprctl_capture": 1, "abi": "0.1", "command": [...], "models": [{"id", "name", "numerics"}]}
 *   {"t": us, "s": session, "hello": HEX}             a client connects
 *   {"t", "s", "welcome": HEX}                        the daemon's answer, or its refusal (err in the frame)
 *   {"t", "s", "frame": HEX, "by": "client"|"daemon"} any later frame but READY and NOTIFY
 *   {"t", "s", "sqe": HEX, "in": HEX, "par": HEX}     an entry with what it points at, as far as that can be read
 *   {"t", "s", "cqe": HEX, "blob": HEX}               an answer with its blob, header and all
 *   {"t", "s", "sq_tail": N} {"t", "s", "cq_head": N} a ring word out of range
 *   {"t", "s", "end": "client"|"daemon"}
 *
 * t counts from the capture's start. Lines may carry "is", the entry in words,
 * which replay does not read; unknown fields and lines are passed over.
 */
#ifndef APR_CTL_CAPTURE_H
#define APR_CTL_CAPTURE_H

#include "client/aprctl/ctl.h"
#include "client/aprctl/raw.h"

/* proxy.c: stands between the clients of a socket and the daemon, and writes down what passes. */
struct proxy;
int proxy_new(struct proxy **p, const char *listen_path, const char *daemon_path, FILE *out);
/* Serves until `child` (a pidfd) ends and its sessions are closed. 0 or -errno. */
int proxy_run(struct proxy *p, int child);
void proxy_free(struct proxy *p);

#endif
