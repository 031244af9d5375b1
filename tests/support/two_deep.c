/* SPDX-License-Identifier: MIT */
/* The CPU's backend made two deep: see two_deep.h. */
#include "tests/support/two_deep.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODELS 8

enum { FREE, QUEUED, RUNNING, DONE };

struct copy { /* of a step, and what the CPU is given for it */
	int state, rc;
	uint32_t delay; /* polls for which it still seems to run */
	struct apr_step step, live;
	int32_t *tok, *live_tok;
	uint32_t *pos, *slot, *out, *live_pos, *live_slot, *live_out, *draw_of;
	uint8_t *kind, *live_kind;
	struct apr_draw *draws, *live_draws;
	struct apr_seen *seen; /* of all draws, one more each */
	struct apr_sample_result *results;
};

struct deep {
	struct apr_backend_model *m; /* NULL: unused */
	struct apr_sizes sizes;
	struct copy copy[2];
	uint32_t oldest, n;
	struct { /* by slot */
		uint32_t token;
		bool alive;
	} state[APR_MAX_SLOTS];
};

struct two_deep_counts two_deep_counts;
uint32_t two_deep_fail_at;
static struct deep models[MODELS];
static int notify_fd = -1;
static bool sick;
static const struct apr_backend *const cpu = &apr_cpu_backend;

static struct deep *find(const struct apr_backend_model *m)
{
	for (uint32_t i = 0; i < MODELS; i++)
		if (models[i].m == m)
			return &models[i];
	abort();
}

static void tell(void)
{
	const uint64_t one = 1;

	if (notify_fd >= 0 && write(notify_fd, &one, sizeof one) < 0)
		abort();
}

void two_deep_notify(int fd)
{
	notify_fd = fd;
}

static void *all(size_t n, size_t size)
{
	void *p = calloc(n + 1, size);

	if (!p)
		abort();
	return p;
}

/* ---- copies --------------------------------------------------------------------------- */

static void copy_init(struct copy *c, const struct apr_sizes *s)
{
	uint32_t n = s->max_rows;

	c->tok = all(n, sizeof *c->tok);
	c->live_tok = all(n, sizeof *c->tok);
	c->pos = all(n, sizeof *c->pos);
	c->live_pos = all(n, sizeof *c->pos);
	c->slot = all(n, sizeof *c->slot);
	c->live_slot = all(n, sizeof *c->slot);
	c->out = all(n, sizeof *c->out);
	c->live_out = all(n, sizeof *c->out);
	c->draw_of = all(n, sizeof *c->draw_of);
	c->kind = all(n, sizeof *c->kind);
	c->live_kind = all(n, sizeof *c->kind);
	c->draws = all(n, sizeof *c->draws);
	c->live_draws = all(n, sizeof *c->draws);
	c->results = all(n, sizeof *c->results);
}

static void copy_fini(struct copy *c)
{
	free(c->tok);
	free(c->live_tok);
	free(c->pos);
	free(c->live_pos);
	free(c->slot);
	free(c->live_slot);
	free(c->out);
	free(c->live_out);
	free(c->draw_of);
	free(c->kind);
	free(c->live_kind);
	free(c->draws);
	free(c->live_draws);
	free(c->results);
	free(c->seen);
}

static void keep_lists(struct copy *c)
{
	size_t n = 0;
	uint32_t i;

	for (i = 0; i < c->step.n_draws; i++)
		n += c->draws[i].n_seen + 1;
	free(c->seen);
	c->seen = all(n, sizeof *c->seen);
	n = 0;
	for (i = 0; i < c->step.n_draws; i++) {
		struct apr_draw *d = &c->draws[i];

		if (d->n_seen)
			memcpy(c->seen + n, d->seen, d->n_seen * sizeof *d->seen);
		d->seen = c->seen + n;
		n += d->n_seen + 1;
	}
}

static void keep(struct copy *c, const struct apr_step *s)
{
	uint32_t n = s->n_rows;

	c->step = *s;
	memcpy(c->tok, s->tok, n * sizeof *s->tok);
	memcpy(c->pos, s->pos, n * sizeof *s->pos);
	memcpy(c->slot, s->slot, n * sizeof *s->slot);
	memcpy(c->kind, s->kind, n * sizeof *s->kind);
	memcpy(c->out, s->out, s->n_draws * sizeof *s->out);
	memcpy(c->draws, s->draws, s->n_draws * sizeof *s->draws);
	keep_lists(c);
}

/* ---- what is known only now ------------------------------------------------------------- */

/* The slot's last token counts once more. */
static void see(struct apr_draw *d, uint32_t token)
{
	struct apr_seen *list = (struct apr_seen *)(uintptr_t)d->seen; /* keep_lists' */
	uint32_t i;

	for (i = 0; i < d->n_seen && list[i].id != token; i++)
		;
	if (i == d->n_seen)
		list[d->n_seen++] = (struct apr_seen){.id = token};
	list[i].output++;
	two_deep_counts.unseen++;
}

/* Live rows and their draws; dead ones get rubbish. */
static void resolve(struct deep *d, struct copy *c)
{
	struct apr_step *v = &c->live;
	uint32_t i, k = 0;

	*v = (struct apr_step){.n_updates = c->step.n_updates, .updates = c->step.updates, .tok = c->live_tok, .pos = c->live_pos,
	                       .slot = c->live_slot, .out = c->live_out, .draws = c->live_draws, .kind = c->live_kind};
	for (i = 0; i < c->step.n_rows; i++) {
		uint32_t slot = c->slot[i];
		bool last = c->tok[i] == APR_TOK_LAST, dead = last && !d->state[slot].alive;

		two_deep_counts.last_rows += last;
		two_deep_counts.dead_rows += dead;
		for (; k < c->step.n_draws && c->out[k] == i; k++) {
			struct apr_draw *draw = &c->draws[k];

			memset(&c->results[k], 0xff, sizeof c->results[k]);
			c->results[k].numeric = false;
			if (dead)
				continue;
			if (draw->unseen)
				see(draw, d->state[slot].token);
			c->draw_of[v->n_draws] = k;
			c->live_out[v->n_draws] = v->n_rows;
			c->live_draws[v->n_draws++] = *draw;
		}
		if (dead)
			continue;
		c->live_tok[v->n_rows] = last ? (int32_t)d->state[slot].token : c->tok[i];
		c->live_pos[v->n_rows] = c->pos[i];
		c->live_slot[v->n_rows] = slot;
		c->live_kind[v->n_rows++] = c->kind[i];
	}
}

static bool follows(const struct apr_draw *d, const struct apr_sample_result *r)
{
	uint32_t i;

	for (i = 0; i < d->n_ends; i++)
		if (d->ends[i] == r->id)
			return false;
	return !r->numeric && !d->last;
}

static void take_results(struct deep *d, struct copy *c)
{
	const struct apr_sample_result *res = NULL;
	uint32_t i;

	if (c->live.n_rows && cpu->records(d->m, &res))
		abort();
	for (i = 0; res && i < c->live.n_draws; i++) {
		const struct apr_draw *draw = &c->live_draws[i];

		c->results[c->draw_of[i]] = res[i];
		if (draw->kind == APR_DRAW_SCORE)
			continue;
		d->state[draw->slot].token = res[i].id;
		d->state[draw->slot].alive = !c->rc && follows(draw, &res[i]);
	}
	c->state = DONE;
}

/* The queue moves on as far as it can. */
static void advance(struct deep *d)
{
	uint32_t i;

	for (i = 0; i < d->n; i++) {
		struct copy *c = &d->copy[(d->oldest + i) % 2];

		if (c->state == QUEUED) {
			resolve(d, c);
			c->state = RUNNING;
			if (c->live.n_rows && cpu->submit(d->m, &c->live))
				abort();
		}
		if (c->state == RUNNING && c->live.n_rows && cpu->poll(d->m) != APR_STEP_DONE)
			return;
		if (c->state == RUNNING)
			take_results(d, c);
	}
}

/* ---- the table ---------------------------------------------------------------------------- */

static int deep_submit(struct apr_backend_model *m, const struct apr_step *step)
{
	struct deep *d = find(m);
	struct copy *c = &d->copy[(d->oldest + d->n) % 2];

	if (d->n == 2)
		return -EBUSY;
	keep(c, step);
	c->state = QUEUED;
	c->rc = two_deep_fail_at && !--two_deep_fail_at ? -EIO : 0;
	c->delay = 4 + two_deep_counts.steps % 3; /* the engine polls more than once */
	two_deep_counts.steps++;
	two_deep_counts.behind += d->n++;
	advance(d);
	tell(); /* it is near its end at once */
	return 0;
}

static enum apr_step_state deep_poll(struct apr_backend_model *m)
{
	struct deep *d = find(m);
	struct copy *c = &d->copy[d->oldest];

	if (!d->n)
		return APR_STEP_IDLE;
	advance(d);
	if (c->state != DONE)
		return APR_STEP_NEAR;
	if (!c->delay)
		return APR_STEP_DONE;
	c->delay--;
	tell();
	return APR_STEP_NEAR;
}

static int deep_records(struct apr_backend_model *m, const struct apr_sample_result **out)
{
	struct deep *d = find(m);
	struct copy *c = &d->copy[d->oldest];

	if (!d->n || c->state != DONE)
		return -EAGAIN;
	d->oldest = !d->oldest;
	d->n--;
	*out = c->results;
	sick |= c->rc != 0;
	return c->rc;
}

static void deep_fence(struct apr_backend_model *m)
{
	struct deep *d = find(m);
	uint32_t i;

	for (i = 0; i < d->n; i++) {
		advance(d);
		cpu->fence(m);
		advance(d);
		d->copy[(d->oldest + i) % 2].delay = 0;
	}
}

static int deep_open(struct apr_backend_ctx **out, const struct apr_backend_config *cfg, char *err, size_t errlen)
{
	notify_fd = cfg->notify_fd;
	return cpu->open(out, cfg, err, errlen);
}

static int deep_load(struct apr_backend_ctx *c, const struct apr_backend_load *in, struct apr_backend_model **out, char *err,
                     size_t errlen)
{
	int rc = cpu->load(c, in, out, err, errlen);
	struct deep *d;

	if (rc)
		return rc;
	d = find(NULL);
	memset(d, 0, sizeof *d);
	d->m = *out;
	d->sizes = *in->sizes;
	copy_init(&d->copy[0], in->sizes);
	copy_init(&d->copy[1], in->sizes);
	return 0;
}

static void deep_unload(struct apr_backend_model *m)
{
	struct deep *d;

	if (!m)
		return;
	d = find(m);
	cpu->unload(m);
	copy_fini(&d->copy[0]);
	copy_fini(&d->copy[1]);
	d->m = NULL;
}

static int deep_health(struct apr_backend_ctx *c, char *err, size_t errlen)
{
	(void)c;
	if (sick && err)
		snprintf(err, errlen, "a step failed on purpose");
	return sick ? -EIO : 0;
}

const struct apr_backend *two_deep_backend(void)
{
	static struct apr_backend table;

	table = apr_cpu_backend;
	table.name = "two-deep";
	table.depth = 2;
	table.open = deep_open;
	table.load = deep_load;
	table.unload = deep_unload;
	table.submit = deep_submit;
	table.poll = deep_poll;
	table.records = deep_records;
	table.fence = deep_fence;
	table.health = deep_health;
	return &table;
}
