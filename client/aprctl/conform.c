/* SPDX-License-Identifier: MIT */
/*
 * The conformance program: runs the checks one after the other and reports.
 *
 * Owns: the report and the helpers of the checks. Does not own: the checks
 * (conform_*.c). Output: TAP, or one JSON object; exit 1 if any check fails.
 */
#include "client/aprctl/conform.h"
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum conf_result conf_no(struct conf *k, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(k->why, sizeof(k->why), fmt, ap);
	va_end(ap);
	return CONF_NO;
}

enum conf_result conf_skip(struct conf *k, const char *why)
{
	snprintf(k->why, sizeof(k->why), "%s", why);
	return CONF_SKIP;
}

/* ---- sessions ------------------------------------------------------------------- */

enum conf_result conf_open_rings(struct conf *k, uint32_t sq, uint32_t cq)
{
	struct apr_hello h;
	int e;

	raw_hello(&h);
	h.sq_entries = sq;
	h.cq_entries = cq;
	e = raw_open(&k->s, k->path, &h);
	CHECK(k, !e, "no session: %s (%s)", k->s.why, apr_strerror(e));
	return CONF_OK;
}

enum conf_result conf_open(struct conf *k)
{
	return conf_open_rings(k, 0, 0);
}

static enum conf_result nop_on(struct conf *k, struct raw *r, const char *whose)
{
	struct apr_sqe q = {.op = APR_OP_NOP, .user_data = UINT64_C(0xfeed0000) + k->next++};
	int e;

	CHECK(k, raw_push(r, &q), "%s submission queue stays full", whose);
	e = raw_next(r, CONF_MS);
	CHECK(k, !e, "%s NOP is not answered: %s", whose, apr_strerror(e));
	CHECK(k, r->cqe.user_data == q.user_data && r->cqe.type == APR_CQE_ACK && !r->cqe.res,
	      "%s NOP got type %u, res %d, user_data %llx", whose, r->cqe.type, r->cqe.res,
	      (unsigned long long)r->cqe.user_data);
	return CONF_OK;
}

enum conf_result conf_nop(struct conf *k)
{
	return nop_on(k, &k->s, "this session's");
}

enum conf_result conf_alive(struct conf *k)
{
	struct raw r;
	enum conf_result result;
	int e = raw_open(&r, k->path, NULL);

	CHECK(k, !e, "afterwards a new session is refused: %s (%s)", r.why, apr_strerror(e));
	result = nop_on(k, &r, "another session's");
	raw_close(&r);
	return result;
}

enum conf_result conf_dies(struct conf *k, struct raw *r)
{
	uint64_t until = apr_now_ns() + CONF_MS * UINT64_C(1000000);
	uint8_t buf[1024];

	while (apr_now_ns() < until) {
		int n = raw_recv(r->sock, buf, sizeof(buf), NULL, 20);
		struct apr_frame h = {0};

		if (n >= (int)sizeof(h))
			memcpy(&h, buf, sizeof(h));
		if (n == 0 || h.type == APR_FRAME_BYE || (r->res.base && raw_dead(r)))
			return CONF_OK;
	}
	return conf_no(k, "the daemon does not end the session");
}

/* ---- entries -------------------------------------------------------------------- */

struct apr_sqe conf_sqe(struct conf *k, unsigned op)
{
	struct apr_sqe q = {.op = (uint8_t)op, .user_data = 1000 + k->next++};

	return q;
}

struct apr_sqe conf_text_sqe(struct conf *k, unsigned op, const char *text, size_t len)
{
	struct apr_sqe q = conf_sqe(k, op);

	q.in_fmt = APR_IN_TEXT;
	q.in_off = raw_put(&k->s, text, len);
	q.in_len = (uint32_t)len;
	return q;
}

struct apr_sqe conf_ids_sqe(struct conf *k, unsigned op, const uint32_t *ids, size_t n)
{
	struct apr_sqe q = conf_sqe(k, op);

	q.in_fmt = APR_IN_IDS;
	q.in_off = raw_put(&k->s, ids, n * 4);
	q.in_len = (uint32_t)(n * 4);
	return q;
}

struct apr_sqe conf_generate(struct conf *k, uint32_t max_tokens, uint64_t seed)
{
	static const char prompt[] = "The lamp in the old house";
	struct apr_sqe q = conf_text_sqe(k, APR_OP_GENERATE, prompt, sizeof(prompt) - 1);

	q.flags = APR_SQE_ADD_BOS;
	q.max_tokens = max_tokens;
	q.seed = seed;
	return q;
}

void conf_params(struct conf *k, struct apr_sqe *q, const struct apr_params *p)
{
	q->par_off = raw_put(&k->s, p->buf, p->len);
	q->par_len = p->len;
}

void conf_greedy(struct apr_params *p, bool ignore_eos)
{
	struct apr_sampling s = {.set = APR_SET_TEMPERATURE | (ignore_eos ? APR_SET_IGNORE_EOS : 0u),
				 .ignore_eos = ignore_eos};

	apr_params_sampling(p, &s);
}

/* ---- answers -------------------------------------------------------------------- */

static const uint8_t *part(const struct raw *s, unsigned fmt, uint32_t *len)
{
	if (s->blob_fmt == fmt) {
		*len = s->blob_len;
		return s->blob;
	}
	for (uint32_t at = 0; s->blob_fmt == APR_BLOB_LIST && at + sizeof(struct apr_blob) <= s->blob_len;) {
		struct apr_blob b;

		memcpy(&b, s->blob + at, sizeof(b));
		at += (uint32_t)sizeof(b);
		if (b.len > s->blob_len - at)
			break;
		if (b.fmt == fmt) {
			*len = b.len;
			return s->blob + at;
		}
		at += (b.len + 7) & ~7u;
	}
	return NULL;
}

static enum conf_result take_token(struct conf *k, struct conf_answer *a)
{
	const struct apr_cqe *e = &k->s.cqe;
	const char *text = e->u.text;
	uint32_t len = e->text_len, n = 0;
	const uint8_t *p = part(&k->s, APR_BLOB_TEXT, &n);

	if (!len && p) {
		text = (const char *)p;
		len = n;
	}
	CHECK(k, e->text_len <= APR_CQE_TEXT_MAX, "text_len %u in an entry", e->text_len);
	if (!ctl_is_utf8(text, len))
		a->broken = true;
	if (a->len + len < sizeof(a->text)) {
		memcpy(a->text + a->len, text, len);
		a->len += len;
		a->text[a->len] = 0;
	}
	if (e->type == APR_CQE_PIECE)
		return CONF_OK;
	CHECK(k, a->n < CONF_TOKENS, "more tokens than this check asked for");
	if (!a->n)
		a->first_pos = e->pos;
	p = part(&k->s, APR_BLOB_TOP, &n);
	a->n_top[a->n] = p ? n / (uint32_t)sizeof(struct apr_top) : 0;
	if (p)
		memcpy(a->top[a->n], p, n < sizeof(a->top[0]) ? n : sizeof(a->top[0]));
	a->ids[a->n] = (uint32_t)e->res;
	a->logprob[a->n] = e->logprob;
	a->sample[a->n++] = e->sample;
	return CONF_OK;
}

static enum conf_result take_last(struct conf *k, struct conf_answer *a)
{
	const struct apr_cqe *e = &k->s.cqe;
	uint32_t n = 0;
	const uint8_t *why = part(&k->s, APR_BLOB_ERROR, &n);

	CHECK(k, !(e->flags & APR_CQE_MORE), "the last entry has MORE set");
	CHECK(k, e->res <= 0, "the last entry's res is %d: 0 or -errno", e->res);
	a->res = e->res;
	a->at = e->pos;
	a->type = e->type;
	a->finish = APR_AUX_REASON(e->aux);
	a->backend = APR_AUX_BACKEND(e->aux);
	if (e->type == APR_CQE_FINAL) {
		a->cost = e->u.final_;
		if (!a->data_len)
			CHECK(k, a->cost.generated == a->n, "FINAL counts %u tokens, %u came", a->cost.generated, a->n);
	}
	snprintf(a->why, sizeof(a->why), "%.*s", (int)(n < 255 ? n : 255), why ? (const char *)why : "");
	return CONF_OK;
}

enum conf_result conf_answer(struct conf *k, uint64_t user_data, struct conf_answer *a)
{
	memset(a, 0, sizeof(*a));
	for (;;) {
		int e = raw_next(&k->s, CONF_MS);
		const struct apr_cqe *q = &k->s.cqe;

		CHECK(k, !e, "no last entry: %s %s", apr_strerror(e), k->s.why);
		CHECK(k, q->user_data == user_data, "an entry for user_data %llx, which is not in flight",
		      (unsigned long long)q->user_data);
		if (q->type == APR_CQE_FINAL || q->type == APR_CQE_ACK)
			return take_last(k, a);
		CHECK(k, q->flags & APR_CQE_MORE, "an entry of type %u before the last has MORE clear", q->type);
		switch (q->type) {
		case APR_CQE_TOKEN:
		case APR_CQE_PIECE:
			PASS(take_token(k, a));
			break;
		case APR_CQE_DATA:
			CHECK(k, a->data_len + k->s.blob_len <= sizeof(a->data), "more data than expected");
			memcpy(a->data + a->data_len, k->s.blob, k->s.blob_len);
			a->data_len += k->s.blob_len;
			a->data_fmt = k->s.blob_fmt;
			break;
		case APR_CQE_SAMPLE_END:
			a->ended++;
			break;
		default:
			return conf_no(k, "an entry of unknown type %u", q->type);
		}
	}
}

enum conf_result conf_do(struct conf *k, struct apr_sqe *q, struct conf_answer *a)
{
	CHECK(k, raw_push(&k->s, q), "the submission queue stays full");
	return conf_answer(k, q->user_data, a);
}

enum conf_result conf_refused(struct conf *k, struct apr_sqe *q, int err, uint32_t at)
{
	PASS(conf_do(k, q, &k->a));
	CHECK(k, k->a.res == err, "res is %d (%s), not %d (%s)", k->a.res, apr_strerror(k->a.res), err, apr_strerror(err));
	CHECK(k, at == UINT32_MAX || k->a.at == at, "pos is %u, the culprit's offset is %u", k->a.at, at);
	return conf_nop(k);
}

/* ---- running --------------------------------------------------------------------- */

struct group {
	const struct conf_check *checks;
	size_t n;
};

static bool chosen(const struct ctl *c, const char *name)
{
	for (int i = 0; i < c->n_args; i++)
		if (!strcmp(c->args[i], name))
			return true;
	return !c->n_args;
}

static bool known(const struct group *g, size_t n, const char *name)
{
	for (size_t i = 0; i < n; i++)
		for (size_t j = 0; j < g[i].n; j++)
			if (!strcmp(g[i].checks[j].name, name))
				return true;
	return false;
}

/* What the daemon has, so that what it honestly lacks is skipped. */
static int survey(struct conf *k)
{
	union {
		uint8_t bytes[APR_FRAME_MAX];
		struct {
			struct apr_frame h;
			struct apr_model_row rows[64];
		} m;
	} *u = malloc(sizeof(*u));
	int e = raw_open(&k->s, k->path, NULL), n;

	if (!u || e) {
		free(u);
		return ctl_unreachable(k->c, e, k->path, k->path, k->s.why);
	}
	k->w = k->s.w;
	n = raw_ask(&k->s, APR_FRAME_GET_MODELS, NULL, 0) ? 0 : raw_frame(&k->s, u, sizeof(*u), NULL, 5000);
	for (int i = 0; n > 0 && (size_t)n >= sizeof(u->m.h) + (size_t)(i + 1) * sizeof(u->m.rows[0]) && i < 64; i++)
		if (u->m.rows[i].id == k->w.default_model)
			k->row = u->m.rows[i];
	raw_close(&k->s);
	free(u);
	return CTL_OK;
}

static enum conf_result run_one(struct conf *k, const struct conf_check *ch)
{
	enum conf_result r;

	k->why[0] = 0;
	if ((ch->ops & k->w.opcodes[0]) != ch->ops)
		return conf_skip(k, "the daemon does not serve the opcode");
	if ((ch->features & k->w.features) != ch->features)
		return conf_skip(k, "the daemon does not have the feature");
	if ((ch->ops & ~(UINT64_C(1) << APR_OP_NOP | UINT64_C(1) << APR_OP_CANCEL)) && !k->row.id)
		return conf_skip(k, "no model is loaded");
	memset(&k->s, 0, sizeof(k->s));
	k->s.sock = k->s.bell = k->s.req_fd = k->s.res_fd = -1;
	k->s.req = k->s.res = (struct apr_region)APR_REGION_INIT;
	r = ch->run(k);
	raw_close(&k->s);
	return r;
}

static void report(struct conf *k, const struct conf_check *ch, enum conf_result r, unsigned at, json_t *list)
{
	static const char *const word[] = {"ok", "not ok", "skip"};

	if (list) {
		json_t *j = json_pack("{s:s, s:s}", "name", ch->name, "result", word[r]);

		if (*k->why && r != CONF_OK)
			json_object_set_new(j, "why", ctl_json_text(k->why, strlen(k->why)));
		json_array_append_new(list, j);
		return;
	}
	if (r == CONF_SKIP)
		printf("ok %u - %s # SKIP %s\n", at, ch->name, k->why);
	else if (r == CONF_NO)
		printf("%snot ok%s %u - %s\n# %s\n", ctl_red(k->c), ctl_plain(k->c), at, ch->name, k->why);
	else
		printf("ok %u - %s\n", at, ch->name);
	fflush(stdout);
}

static int run_all(struct conf *k, const struct group *g, size_t n_groups)
{
	unsigned count[3] = {0, 0, 0}, total = 0, at = 0;
	json_t *list = k->c->json ? json_array() : NULL;

	for (size_t i = 0; i < n_groups; i++)
		for (size_t j = 0; j < g[i].n; j++)
			total += chosen(k->c, g[i].checks[j].name);
	if (!list)
		printf("TAP version 13\n1..%u\n", total);
	for (size_t i = 0; i < n_groups; i++)
		for (size_t j = 0; j < g[i].n; j++) {
			const struct conf_check *ch = &g[i].checks[j];
			enum conf_result r;

			if (!chosen(k->c, ch->name))
				continue;
			r = run_one(k, ch);
			count[r]++;
			report(k, ch, r, ++at, list);
		}
	if (list) {
		int e = ctl_print_json(k->c, json_pack("{s:i, s:i, s:i, s:o}", "passed", (int)count[CONF_OK], "failed",
						       (int)count[CONF_NO], "skipped", (int)count[CONF_SKIP], "checks", list));

		if (e)
			return e;
	} else {
		printf("# %u passed, %u failed, %u skipped\n", count[CONF_OK], count[CONF_NO], count[CONF_SKIP]);
	}
	if (ctl_flush(k->c, CTL_OK))
		return CTL_FAIL;
	return count[CONF_NO] ? ctl_fail(k->c, "%u of %u checks fail: the lines with \"not ok\" say how", count[CONF_NO],
					 total) :
				CTL_OK;
}

int cmd_conform(struct ctl *c)
{
	const struct group groups[] = {{conf_hello_checks, conf_n_hello},
				       {conf_ring_checks, conf_n_ring},
				       {conf_sqe_checks, conf_n_sqe},
				       {conf_text_checks, conf_n_text},
				       {conf_generate_checks, conf_n_generate}};
	const size_t n = sizeof(groups) / sizeof(groups[0]);
	struct conf *k;
	int status;

	for (int i = 0; i < c->n_args; i++)
		if (!known(groups, n, c->args[i]))
			return ctl_usage(c, "no check %s: --list names them", c->args[i]);
	if (c->list) {
		for (size_t i = 0; i < n; i++)
			for (size_t j = 0; j < groups[i].n; j++)
				printf("%s\n", groups[i].checks[j].name);
		return ctl_flush(c, CTL_OK);
	}
	k = calloc(1, sizeof(*k));
	if (!k)
		return ctl_fail(c, "out of memory");
	k->c = c;
	if (apr_socket_path(c->socket, k->path, sizeof(k->path)) < 0) {
		free(k);
		return ctl_fail(c, "the socket's path is too long");
	}
	status = survey(k);
	if (!status)
		status = run_all(k, groups, n);
	free(k);
	return status;
}
