/* SPDX-License-Identifier: MIT */
/*
 * The wire in words: one line an entry or frame, for APR_DEBUG=1, capture and
 * failing tests. Never on the hot path unless asked for.
 *
 * Text is quoted with everything but printable ASCII escaped, so a line is a line.
 * Each returns buf, always terminated, cut where it is too short.
 */
#ifndef APR_SHM_WIRE_H
#define APR_SHM_WIRE_H

#include <apr/abi.h>
#include <stddef.h>

char *apr_wire_sqe(const struct apr_sqe *s, char *buf, size_t n);
char *apr_wire_cqe(const struct apr_cqe *e, char *buf, size_t n);
char *apr_wire_frame(const void *frame, size_t len, char *buf, size_t n);

const char *apr_wire_op(unsigned op); /* "GENERATE"; "?" */
const char *apr_wire_cqe_type(unsigned type);
const char *apr_wire_frame_type(unsigned type);
const char *apr_wire_finish(unsigned reason); /* the words of aprctl: "stop", "stop_string", ... */
const char *apr_wire_backend(unsigned id);
const char *apr_wire_route(unsigned id);

#endif
