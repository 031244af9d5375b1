/* SPDX-License-Identifier: MIT */
/* Owns: what identities use. See quota.h. */
#include "daemon/quota.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#define MINUTE_NS UINT64_C(60000000000)

#define TALLY(field, n) __atomic_store_n(&(field), (field) + (n), __ATOMIC_RELAXED)

/* A bucket that holds a minute's worth; what runs may overdraw it, and the debt is paid first. */
static void refill(struct identity *who, uint64_t now)
{
	uint64_t most = who->limits.tokens_minute * 1000, since = now - who->minute_at;

	if (!who->minute_at || since >= 4 * MINUTE_NS) /* of a debt, too, no more than that is paid */
		since = who->minute_at ? 4 * MINUTE_NS : MINUTE_NS;
	if (who->minute_at && now <= who->minute_at)
		return;
	int64_t more = (int64_t)((double)most * ((double)since / (double)MINUTE_NS));
	if (!more)
		return;
	who->minute_at = now;
	who->minute_left += more;
	if (who->minute_left > (int64_t)most)
		who->minute_left = (int64_t)most;
}

int quota_prompt(struct identity *who, uint32_t tokens, uint64_t now, char *words, size_t len)
{
	const struct limits *l = &who->limits;

	if (l->queued_tokens && who->queued_tokens + tokens > l->queued_tokens) {
		TALLY(who->refused_quota, 1);
		snprintf(words, len, "%u tokens more would be above the %" PRIu64 " that this user's waiting prompts may have",
			 tokens, l->queued_tokens);
		return -EDQUOT;
	}
	if (!l->tokens_minute)
		return 0;
	refill(who, now);
	if (who->minute_left > 0)
		return 0;
	TALLY(who->refused_quota, 1);
	snprintf(words, len, "this user's %" PRIu64 " tokens a minute are used up: again in %.1f s", l->tokens_minute,
		 ((double)-who->minute_left + 1) / ((double)l->tokens_minute * 1000 / 60));
	return -EDQUOT;
}

void quota_queued(struct identity *who, int64_t tokens)
{
	TALLY(who->queued_tokens, (uint64_t)tokens);
}

enum { SECONDS = sizeof(((struct identity *)0)->by_second) / sizeof(uint32_t) };

/* What is older than a minute is forgotten, then this second has so many more. */
static void count_second(struct identity *who, uint32_t tokens, uint64_t now)
{
	uint64_t at = now / UINT64_C(1000000000), was = who->second_at;

	if (at > was) {
		for (uint64_t t = at - was < SECONDS ? was + 1 : at - SECONDS + 1; t <= at; t++)
			__atomic_store_n(&who->by_second[t % SECONDS], 0, __ATOMIC_RELAXED);
		__atomic_store_n(&who->second_at, at, __ATOMIC_RELAXED); /* quota_minute reads it */
	}
	TALLY(who->by_second[who->second_at % SECONDS], tokens);
}

uint64_t quota_minute(const struct identity *who, uint64_t now)
{
	uint64_t at = now / UINT64_C(1000000000), last = __atomic_load_n(&who->second_at, __ATOMIC_RELAXED), sum = 0;

	for (uint64_t t = at > SECONDS ? at - SECONDS + 1 : 0; t <= last; t++)
		if (last - t < SECONDS)
			sum += __atomic_load_n(&who->by_second[t % SECONDS], __ATOMIC_RELAXED);
	return sum;
}

void quota_work(struct identity *who, uint32_t tokens, uint64_t now)
{
	TALLY(who->tokens, tokens);
	count_second(who, tokens, now);
	if (!who->limits.tokens_minute)
		return;
	refill(who, now);
	who->minute_left -= (int64_t)tokens * 1000;
}

void quota_run(struct identity *who, int runs)
{
	TALLY(who->running, (uint32_t)runs);
}

void quota_pages(struct identity *who, int64_t pages)
{
	TALLY(who->kv_pages, (uint64_t)pages);
}
