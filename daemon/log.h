/* SPDX-License-Identifier: MIT */
/*
 * What aprd says: one line an event, on stderr.
 *
 * Owns: the level, the rule that nobody ever waits for the log (a line that stderr
 * cannot take at once is dropped and counted), rate limits. Does not own where
 * stderr leads. Any thread may call.
 */
#ifndef APRD_LOG_H
#define APRD_LOG_H

#include <stdbool.h>
#include <stdint.h>

enum log_level { LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

#define LOG_FORMAT __attribute__((format(printf, 1, 2)))
/* Each says which it is: "aprd: error: ...", "aprd: warning: ...", "aprd: debug: ..."; information says nothing. */
void log_error(const char *fmt, ...) LOG_FORMAT; /* why aprd ends or does not start, or what is wrong with its file */
void log_warn(const char *fmt, ...) LOG_FORMAT;
void log_info(const char *fmt, ...) LOG_FORMAT;
void log_debug(const char *fmt, ...) LOG_FORMAT;

void log_set_level(enum log_level level);
int log_parse_level(const char *name, enum log_level *level); /* warn, info, debug; -EINVAL */

/* For lines that a peer can cause: true at most LOG_RATE_BURST times in LOG_RATE_SECONDS. What was
 * held back is told when the next one passes. Zero-initialise. Any thread. */
#define LOG_RATE_BURST 5u
#define LOG_RATE_SECONDS 10u
struct log_rate {
	uint64_t window; /* monotonic seconds / LOG_RATE_SECONDS, + 1 */
	uint32_t used, held;
};
bool log_allow(struct log_rate *r);

#endif
