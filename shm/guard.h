/* SPDX-License-Identifier: MIT */
/*
 * Reading memory that a client can take away.
 *
 * The seals of the request region allow PUNCH_HOLE, and a hole that cannot be
 * filled again (memory limit) raises SIGBUS. Every read of client memory by the
 * daemon goes through these functions; a fault in one of them comes back as
 * -EFAULT and the session is then poisoned by the caller.
 *
 * Owns: the SIGBUS handler and the copy routines. Does not own: what is done
 * with a poisoned session.
 *
 * Threads: after apr_guard_install any number of threads may copy at once. The
 * handler keeps no state of its own: it recognises a fault by the address of the
 * faulting instruction (x86-64, aarch64), else by a per-thread jump buffer.
 * SIGBUS faults from anywhere else go to the handler that was there before.
 */
#ifndef APR_SHM_GUARD_H
#define APR_SHM_GUARD_H

#include <apr/abi.h>
#include <stddef.h>
#include <stdint.h>

/* Once a process, before the first session. Idempotent. 0 or -errno. */
int apr_guard_install(void);
/* Puts the earlier disposition back (tests, plug-ins). */
void apr_guard_remove(void);
/* Once a thread that copies: SIGBUS must not be blocked there. 0 or -errno. */
int apr_guard_thread(void);

/* Copies n bytes out of client memory, once, in ascending order. 0 or -EFAULT (dst is then undefined). */
int apr_guard_copy(void *dst, const void *src, size_t n);
/* One aligned 32-bit load with acquire order. 0 or -EFAULT. */
int apr_guard_load32(const uint32_t *src, uint32_t *out);

#endif
