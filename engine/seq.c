/* SPDX-License-Identifier: MIT */
/*
 * Sequences: what is known, what is computed, what comes next. See engine.h.
 *
 * Owns: their copies of parameters, slots, penalty windows, limits. Does not own
 * pages (kv.c) nor the building of steps (step.c).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"
#include "engine/sampling.h"

/* ---- penalty window -------------------------------------------------------------- */

/* The window before pos. Its newest id need not be known: what leaves always is. */
void apr_seq_slide(struct apr_seq *s, uint32_t pos)
{
	int32_t window = s->params.penalty_window;

	if (!s->seen || window <= 0)
		return;
	for (; pos - s->seen_from > (uint32_t)window; s->seen_from++)
		apr_seen_remove(s->seen, s->ids[s->seen_from], s->seen_from >= s->n_prompt);
}

static int start_window(struct apr_seq *s)
{
	uint32_t n = s->capacity, i = 0;
	int32_t window = s->params.penalty_window;

	if (s->kind != APR_SEQ_GENERATE || !apr_sampling_penalises(&s->params))
		return 0;
	if (window > 0 && (uint32_t)window < n)
		n = (uint32_t)window;
	if (s->m->sizes.n_real < n)
		n = s->m->sizes.n_real;
	s->seen = apr_seen_new(n + 1); /* + 1: the newest enters before nothing else leaves when window is 1 */
	if (!s->seen)
		return -ENOMEM;
	if (window > 0 && s->n_known > (uint32_t)window)
		i = s->n_known - (uint32_t)window;
	s->seen_from = i;
	for (; i < s->n_known; i++)
		apr_seen_add(s->seen, s->ids[i], i >= s->n_prompt);
	return 0;
}

/* ---- making ---------------------------------------------------------------------- */

static int check_ids(const struct apr_loaded *m, const struct apr_seq_params *p, uint32_t *bad)
{
	uint32_t i, n = m->sizes.n_real;

	*bad = UINT32_MAX;
	if (!p->n_ids)
		return -EINVAL;
	for (i = 0; i < p->n_ids; i++)
		if (p->ids[i] >= n)
			break;
	if (i == p->n_ids) {
		for (i = 0; i < p->n_forced; i++)
			if (p->forced[i] >= n)
				break;
		i += p->n_ids;
	}
	if ((uint64_t)i < (uint64_t)p->n_ids + p->n_forced) {
		*bad = i;
		return -EINVAL;
	}
	for (i = 0; i < p->sampling.n_bias; i++)
		if (p->sampling.bias_id[i] >= n || !apr_sampling_bias_ok(p->sampling.bias[i])) {
			*bad = i;
			return -EDOM;
		}
	for (i = 0; i < p->n_stop_ids; i++)
		if (p->stop_ids[i] >= n) {
			*bad = i;
			return -EDOM;
		}
	return 0;
}

static int check(const struct apr_loaded *m, const struct apr_seq_params *p, uint32_t *bad)
{
	uint64_t given = (uint64_t)p->n_ids + p->n_forced;
	int rc = check_ids(m, p, bad);

	if (rc)
		return rc;
	if (p->n_top > APR_SAMPLE_TOP_MAX || (p->kind == APR_SEQ_SCORE && p->n_forced) ||
	    (p->kind == APR_SEQ_GENERATE && p->max_tokens != UINT32_MAX && p->n_forced > p->max_tokens))
		return -EINVAL;
	if (given > m->sizes.n_ctx)
		return -E2BIG;
	return apr_kv_can_ever(m->kv, (uint32_t)given, m->sizes.max_rows) ? 0 : -ENOSPC;
}

static void *copy(const void *src, size_t n, size_t size)
{
	void *p = malloc(n * size + 1); /* + 1: NULL means failure, also for none */

	if (p && n)
		memcpy(p, src, n * size);
	return p;
}

static int copy_ends(struct apr_seq *s, const struct apr_seq_params *p)
{
	uint32_t n = 0;
	const uint32_t *end = apr_tokenizer_end_ids(s->m->tok, &n);

	if (p->ignore_eos)
		n = 0;
	s->ends = malloc(((size_t)p->n_stop_ids + n) * sizeof *s->ends + 1); /* + 1: NULL means failure, also for none */
	if (!s->ends)
		return -ENOMEM;
	if (p->n_stop_ids)
		memcpy(s->ends, p->stop_ids, p->n_stop_ids * sizeof *s->ends);
	if (n)
		memcpy(s->ends + p->n_stop_ids, end, n * sizeof *s->ends);
	s->n_ends = p->n_stop_ids + n;
	return 0;
}

static void set_generated(uint64_t *kinds, uint32_t i)
{
	kinds[i / 64] |= UINT64_C(1) << i % 64;
}

static bool is_generated(const uint64_t *kinds, uint32_t i)
{
	return kinds[i / 64] >> i % 64 & 1;
}

static int copy_kinds(struct apr_seq *s, const struct apr_seq_params *p)
{
	uint32_t i;

	s->kinds = calloc(s->capacity / 64 + 1, sizeof *s->kinds);
	if (!s->kinds)
		return -ENOMEM;
	for (i = 0; p->kinds && i < p->n_ids; i++)
		if (is_generated(p->kinds, i)) {
			set_generated(s->kinds, i);
			s->turns = true;
		}
	for (i = 0; i < p->n_forced; i++)
		set_generated(s->kinds, p->n_ids + i);
	return 0;
}

static int copy_params(struct apr_seq *s, const struct apr_seq_params *p)
{
	s->params = p->sampling;
	s->bias_id = copy(p->sampling.bias_id, p->sampling.n_bias, sizeof *s->bias_id);
	s->bias = copy(p->sampling.bias, p->sampling.n_bias, sizeof *s->bias);
	s->ids = malloc((size_t)s->capacity * sizeof *s->ids);
	if (!s->bias_id || !s->bias || !s->ids || copy_ends(s, p) || copy_kinds(s, p))
		return -ENOMEM;
	s->params.bias_id = s->bias_id;
	s->params.bias = s->bias;
	s->n_top = p->n_top;
	s->want_logprob = p->want_logprob;
	s->force_decode = p->force_decode && p->kind == APR_SEQ_SCORE;
	s->scope = p->scope;
	s->user = p->user;
	memcpy(s->ids, p->ids, p->n_ids * sizeof *s->ids);
	if (p->n_forced)
		memcpy(s->ids + p->n_ids, p->forced, p->n_forced * sizeof *s->ids);
	s->n_prompt = p->n_ids;
	s->n_known = p->n_ids + p->n_forced;
	return 0;
}

static int start(struct apr_seq *s, const struct apr_seq_params *p)
{
	uint64_t limit = (uint64_t)p->n_ids + p->max_tokens;
	int rc;

	if (limit > s->m->sizes.n_ctx)
		limit = s->m->sizes.n_ctx;
	s->kind = p->kind;
	if (p->kind == APR_SEQ_GENERATE) {
		s->limit = s->capacity = (uint32_t)limit;
		s->prefill_only = p->max_tokens == 0;
	} else {
		s->limit = s->capacity = p->n_ids;
		s->n_rows = p->n_ids > 1 ? p->n_ids - 1 : 1;
	}
	rc = copy_params(s, p);
	if (!rc)
		rc = start_window(s);
	return rc ? rc : apr_kv_seq_init(s->m->kv, &s->kv);
}

static uint32_t free_slot(const struct apr_loaded *m)
{
	uint32_t slot = 0;

	while (slot < APR_MAX_SLOTS && m->slot[slot])
		slot++;
	return slot < APR_MAX_SLOTS ? slot : APR_NO_SLOT;
}

int apr_seq_new(struct apr_loaded *m, const struct apr_seq_params *p, struct apr_seq **out, uint32_t *bad)
{
	uint32_t slot = free_slot(m), unused;
	struct apr_seq *s;
	int rc = check(m, p, bad ? bad : &unused);

	if (rc)
		return rc;
	if (slot == APR_NO_SLOT)
		return -EAGAIN;
	s = calloc(1, sizeof *s);
	if (!s)
		return -ENOMEM;
	s->m = m;
	s->slot = slot;
	s->kv.node = APR_KV_NONE;
	rc = start(s, p);
	if (rc) {
		s->m = NULL;
		apr_kv_seq_fini(m->kv, &s->kv);
		apr_seq_destroy(s);
		return rc;
	}
	m->slot[slot] = s;
	m->n_seqs++;
	apr_seq_look_up(s);
	s->n_cached = s->n_done < s->n_prompt ? s->n_done : s->n_prompt;
	*out = s;
	return 0;
}

void apr_seq_destroy(struct apr_seq *s)
{
	if (s->m) {
		apr_kv_seq_fini(s->m->kv, &s->kv);
		if (s->slot != APR_NO_SLOT)
			s->m->slot[s->slot] = NULL;
		s->m->n_seqs--;
	}
	apr_seen_free(s->seen);
	free(s->ids);
	free(s->kinds);
	free(s->bias_id);
	free(s->bias);
	free(s->ends);
	free(s);
}

void apr_seq_free(struct apr_seq *s)
{
	if (!s)
		return;
	apr_stepper_forget(s->m, s);
	s->freed = true;
	if (s->in_steps) { /* its pages and parameters are in use until the last of them ends */
		s->next_zombie = s->m->zombies;
		s->m->zombies = s;
	} else {
		apr_seq_destroy(s);
	}
}

/* ---- what comes next ------------------------------------------------------------- */

/* First position from `from` on, below end, that is of that kind; end if there is none. */
static uint32_t next_of(const uint64_t *kinds, uint32_t from, uint32_t end, bool generated)
{
	uint32_t i = from;

	while (i < end) {
		uint64_t word = (generated ? kinds[i / 64] : ~kinds[i / 64]) >> i % 64;

		if (word)
			return i + (uint32_t)__builtin_ctzll(word) < end ? i + (uint32_t)__builtin_ctzll(word) : end;
		i = (i / 64 + 1) * 64;
	}
	return end;
}

/* In one step a sequence's given tokens precede its generated ones: where they follow again, another step begins. */
static uint32_t end_of_turn(const struct apr_seq *s, uint32_t all)
{
	uint32_t end = s->n_known, i = next_of(s->kinds, next_of(s->kinds, s->n_done, end, true), end, false);

	return i < end ? i : all;
}

uint32_t apr_seq_todo(const struct apr_seq *s)
{
	uint32_t all = s->kind == APR_SEQ_SCORE ? s->n_rows : s->n_known + s->pending, left;

	/* a drawn token that is the last one allowed gets no row */
	if (s->ended || s->drop_after || s->n_done >= all || (s->pending && all >= s->limit))
		return 0;
	left = s->turns ? end_of_turn(s, all) - s->n_done : all - s->n_done;
	return s->force_decode ? 1 : left;
}

bool apr_seq_given(const struct apr_seq *s, uint32_t pos)
{
	return pos < s->n_prompt && !is_generated(s->kinds, pos);
}

bool apr_seq_wants_row(const struct apr_seq *s, uint32_t pos)
{
	if (s->kind == APR_SEQ_SCORE)
		return pos >= s->n_scored && pos + 1 < s->n_known;
	return pos + 1 == s->n_known + s->pending && pos + 1 < s->limit;
}

bool apr_seq_is_stop(const struct apr_seq *s, uint32_t id)
{
	uint32_t i;

	for (i = 0; i < s->n_ends; i++)
		if (s->ends[i] == id)
			return true;
	return false;
}

void apr_seq_take(struct apr_seq *s, uint32_t id)
{
	s->ids[s->n_known] = id;
	set_generated(s->kinds, s->n_known);
	if (s->seen)
		apr_seen_add(s->seen, id, true);
	s->n_known++;
}

void apr_seq_look_up(struct apr_seq *s)
{
	if (s->looked_up || s->n_done || s->kind != APR_SEQ_GENERATE)
		return;
	s->looked_up = true;
	s->n_done = apr_kv_lookup(s->m->kv, &s->kv, s->scope, s->ids, s->n_known, s->kinds);
}

void apr_seq_state(const struct apr_seq *s, struct apr_seq_state *st)
{
	st->n_prompt = s->n_prompt;
	st->n_cached = s->n_cached;
	st->n_computed = s->n_done;
	st->n_generated = s->n_known - s->n_prompt;
	st->todo = apr_seq_todo(s);
	st->decoding = s->force_decode || (s->kind == APR_SEQ_GENERATE && s->n_known + s->pending > s->n_prompt && st->todo <= 1);
	st->ended = s->ended;
	st->n_pages = 0;
	for (uint32_t g = 0; g < s->m->sizes.n_groups; g++)
		st->n_pages += s->kv.n[g] - s->kv.first[g];
}

int apr_seq_reserve(struct apr_seq *s, uint32_t rows)
{
	uint32_t todo;

	if (s->freed || s->slot == APR_NO_SLOT)
		return -EINVAL;
	apr_seq_look_up(s);
	todo = apr_seq_todo(s);
	return apr_kv_reserve(s->m->kv, &s->kv, s->n_done + (rows < todo ? rows : todo));
}

void apr_seq_drop(struct apr_seq *s)
{
	if (s->in_steps) {
		s->drop_after = true;
		return;
	}
	apr_kv_drop(s->m->kv, &s->kv);
	s->n_done = 0;
	s->looked_up = false;
}

void apr_seq_suspend(struct apr_seq *s)
{
	apr_seq_drop(s);
	if (s->in_steps) {
		s->suspend_after = true;
		return;
	}
	if (s->slot != APR_NO_SLOT)
		s->m->slot[s->slot] = NULL;
	s->slot = APR_NO_SLOT;
}

void apr_seq_given_up(struct apr_seq *s)
{
	bool suspend = s->suspend_after;

	if (!s->drop_after)
		return;
	s->drop_after = s->suspend_after = false;
	if (suspend)
		apr_seq_suspend(s);
	else
		apr_seq_drop(s);
}

int apr_seq_resume(struct apr_seq *s)
{
	uint32_t slot = free_slot(s->m);

	if (s->freed)
		return -EINVAL;
	s->suspend_after = false; /* its pages are given up all the same */
	if (s->slot != APR_NO_SLOT)
		return 0;
	if (slot == APR_NO_SLOT)
		return -EAGAIN;
	s->slot = slot;
	s->m->slot[slot] = s;
	return 0;
}

uint32_t apr_seq_known(const struct apr_seq *s, const uint32_t **ids, const uint64_t **kinds)
{
	*ids = s->ids;
	*kinds = s->kinds;
	return s->n_known;
}

uint32_t apr_loaded_peek(const struct apr_loaded *m, uint64_t scope, const uint32_t *ids, uint32_t n_ids, const uint64_t *kinds)
{
	return apr_kv_peek(m->kv, scope, ids, n_ids, kinds);
}

bool apr_loaded_room(const struct apr_loaded *m, uint32_t positions)
{
	return apr_kv_room(m->kv, positions < m->sizes.n_ctx ? positions : m->sizes.n_ctx, m->sizes.max_rows);
}
