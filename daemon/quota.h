/* SPDX-License-Identifier: MIT */
/*
 * What an identity uses, and whether more would be above what it may have.
 *
 * Owns: the counts of queued tokens, of tokens a minute, of what status shows. Does not
 * own the limits (options.h says whose are which) nor the KV pages' limit, which the
 * making of a step keeps (batch.h). Core thread; the counts are relaxed atomics, which
 * the io thread prints.
 */
#ifndef APRD_QUOTA_H
#define APRD_QUOTA_H

#include "daemon/session.h"

/* One more prompt of so many tokens: 0, or -EDQUOT and words say why, and for how long where that is known. */
int quota_prompt(struct identity *who, uint32_t tokens, uint64_t now, char *words, size_t len);
void quota_queued(struct identity *who, int64_t tokens); /* prompts that wait: more, or fewer */
void quota_work(struct identity *who, uint32_t tokens, uint64_t now); /* prompt rows computed, tokens generated */
uint64_t quota_minute(const struct identity *who, uint64_t now); /* work in the last 60 seconds; any thread */
void quota_run(struct identity *who, int runs);          /* in a slot: more, or fewer */
void quota_pages(struct identity *who, int64_t pages);   /* held: more, or fewer */

#endif
