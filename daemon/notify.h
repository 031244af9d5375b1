/* SPDX-License-Identifier: MIT */
/*
 * What the service manager is told, over NOTIFY_SOCKET: state, progress, signs of life.
 *
 * Owns: the datagrams and the watchdog's interval. Does not own when there is something to tell. The supervisor's one
 * thread.
 */
#ifndef APRD_NOTIFY_H
#define APRD_NOTIFY_H

#include <stdint.h>

/* sd_notify: one datagram, or nothing where nobody asked for it. */
void notify(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Half of WATCHDOG_USEC, in ms; 0: no watchdog, or another process's. */
uint64_t notify_watchdog_ms(void);

#endif
