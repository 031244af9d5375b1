/* SPDX-License-Identifier: MIT */
/* Owns: the rules of the wire, one small function a thing judged. See check.h. */
#include "shm/check.h"
#include <errno.h>
#include <math.h>
#include <string.h>

static int bad(struct apr_fault *f, int err, uint32_t at, const char *why)
{
	f->err = err;
	f->at = at;
	f->why = why;
	return err;
}

/* ---- submission entries ------------------------------------------------- */

#define GEN_FLAGS (APR_SQE_NO_STREAM | APR_SQE_REPLAYABLE | APR_SQE_PARSE_SPECIAL | APR_SQE_KEEP)
#define F(fmt) (1u << (fmt))

/* what each opcode may carry */
struct op_rule {
	uint16_t flags;
	uint8_t fmts;  /* bit an in_fmt; 0 = no input */
	bool generate; /* max_tokens, n, handle in arg */
};
static const struct op_rule rules[] = {
	[APR_OP_NOP] = { 0, 0, false },
	[APR_OP_GENERATE] = { GEN_FLAGS | APR_SQE_ADD_BOS, F(APR_IN_TEXT) | F(APR_IN_IDS) | F(APR_IN_PARTS), true },
	[APR_OP_CHAT] = { GEN_FLAGS, F(APR_IN_MESSAGES), true },
	[APR_OP_SCORE] = { APR_SQE_FORCED, F(APR_IN_IDS), false },
	[APR_OP_TOKENIZE] = { APR_SQE_PARSE_SPECIAL | APR_SQE_ADD_BOS, F(APR_IN_TEXT) | F(APR_IN_PARTS), false },
	[APR_OP_DETOKENIZE] = { APR_SQE_PARSE_SPECIAL, F(APR_IN_IDS), false },
	[APR_OP_EMBED] = { APR_SQE_PARSE_SPECIAL | APR_SQE_ADD_BOS, F(APR_IN_TEXT) | F(APR_IN_IDS), false },
	[APR_OP_CANCEL] = { 0, 0, false },
	[APR_OP_FREE] = { 0, 0, false },
};
enum { N_RULES = sizeof(rules) / sizeof(rules[0]) };

#define AT(field) ((uint32_t)offsetof(struct apr_sqe, field))

static int check_flags(const struct apr_sqe *s, const struct op_rule *r, const struct apr_check *c,
		       struct apr_fault *f)
{
	if (s->flags & ~APR_SQE_FLAGS_ALL)
		return bad(f, -EINVAL, AT(flags), "unknown flag");
	if (s->flags & ~r->flags)
		return bad(f, -EINVAL, AT(flags), "a flag that this opcode does not take");
	if ((s->flags & APR_SQE_REPLAYABLE) && !(c->features & APR_FEAT_REPLAY))
		return bad(f, -EOPNOTSUPP, AT(flags), "REPLAYABLE is not supported here");
	if ((s->flags & APR_SQE_KEEP) && !(c->features & APR_FEAT_HANDLES))
		return bad(f, -EOPNOTSUPP, AT(flags), "KEEP is not supported here");
	if ((s->flags & APR_SQE_FORCED) && !(c->features & APR_FEAT_FORCED))
		return bad(f, -EOPNOTSUPP, AT(flags), "FORCED is not supported here");
	if ((s->flags & APR_SQE_REPLAYABLE) && s->arg)
		return bad(f, -EINVAL, AT(flags), "REPLAYABLE with a conversation handle");
	if ((s->flags & APR_SQE_ADD_BOS) && s->in_fmt != APR_IN_TEXT)
		return bad(f, -EINVAL, AT(flags), "ADD_BOS with an input that is not TEXT");
	return 0;
}

/* Does [off, off + len) lie in the request arena? Both are u32: the sum cannot wrap in 64 bits. */
static bool in_arena(uint32_t off, uint32_t len, const struct apr_check *c)
{
	return off >= c->arena_off && (uint64_t)off + len <= (uint64_t)c->arena_off + c->arena_len;
}

static int check_input(const struct apr_sqe *s, const struct op_rule *r, const struct apr_check *c,
		       struct apr_fault *f)
{
	if (s->in_fmt > APR_IN_PARTS)
		return bad(f, -EINVAL, AT(in_fmt), "unknown in_fmt");
	if (!r->fmts) {
		if (s->in_fmt)
			return bad(f, -EINVAL, AT(in_fmt), "an in_fmt where there is no input");
		if (s->in_len)
			return bad(f, -EINVAL, AT(in_len), "this opcode takes no input");
		return 0;
	}
	if (!(r->fmts & F(s->in_fmt)))
		return bad(f, -EINVAL, AT(in_fmt), "an in_fmt that this opcode does not take");
	if (s->in_fmt == APR_IN_MESSAGES && !(c->features & APR_FEAT_MESSAGES))
		return bad(f, -EOPNOTSUPP, AT(in_fmt), "MESSAGES is not supported here");
	if (s->in_fmt == APR_IN_PARTS && !(c->features & APR_FEAT_PARTS))
		return bad(f, -EOPNOTSUPP, AT(in_fmt), "PARTS is not supported here");
	if (s->in_len > c->max_input)
		return bad(f, -E2BIG, AT(in_len), "input longer than max_input");
	if (s->in_len && !in_arena(s->in_off, s->in_len, c))
		return bad(f, -EINVAL, AT(in_off), "input outside the request arena");
	if (s->in_fmt == APR_IN_IDS && s->in_len % 4)
		return bad(f, -EINVAL, AT(in_len), "length of ids is no multiple of 4");
	if (s->in_fmt == APR_IN_IDS && s->in_len && s->in_off % 4)
		return bad(f, -EINVAL, AT(in_off), "ids are not 4-aligned");
	return 0;
}

static int check_list_place(const struct apr_sqe *s, const struct op_rule *r, const struct apr_check *c,
			    struct apr_fault *f)
{
	if (!s->par_len)
		return 0;
	if (!r->fmts)
		return bad(f, -EINVAL, AT(par_len), "this opcode takes no parameters");
	if (s->par_len > APR_PARAMS_MAX)
		return bad(f, -E2BIG, AT(par_len), "parameter list above 64 KiB");
	if (s->par_len % 8)
		return bad(f, -EINVAL, AT(par_len), "length of the parameter list is no multiple of 8");
	if (s->par_off % 8)
		return bad(f, -EINVAL, AT(par_off), "parameter list is not 8-aligned");
	if (!in_arena(s->par_off, s->par_len, c))
		return bad(f, -EINVAL, AT(par_off), "parameter list outside the request arena");
	return 0;
}

static int check_generate(const struct apr_sqe *s, const struct op_rule *r, const struct apr_check *c,
			  struct apr_fault *f)
{
	if (r->generate) {
		if (s->arg && !(c->features & APR_FEAT_HANDLES))
			return bad(f, -EOPNOTSUPP, AT(arg), "conversation handles are not supported here");
		if (s->n > 1 && !(c->features & APR_FEAT_SAMPLES))
			return bad(f, -EOPNOTSUPP, AT(n), "several samples are not supported here");
		if (s->n > 1 && (s->flags & APR_SQE_REPLAYABLE))
			return bad(f, -EINVAL, AT(n), "REPLAYABLE with several samples");
		return 0;
	}
	if (s->arg && s->op != APR_OP_CANCEL && s->op != APR_OP_FREE)
		return bad(f, -EINVAL, AT(arg), "this opcode takes no arg");
	if (!s->arg && s->op == APR_OP_FREE)
		return bad(f, -EINVAL, AT(arg), "FREE of no handle");
	if (s->max_tokens)
		return bad(f, -EINVAL, AT(max_tokens), "this opcode takes no max_tokens");
	if (s->n > 1)
		return bad(f, -EINVAL, AT(n), "this opcode has one answer");
	return 0;
}

int apr_check_sqe(const struct apr_sqe *s, const struct apr_check *c, struct apr_fault *f)
{
	memset(f, 0, sizeof(*f));
	if (s->op >= APR_OP_LIMIT)
		return bad(f, -EINVAL, AT(op), "an opcode that is never assigned");
	if (s->op >= N_RULES || !(c->opcodes[s->op / 64] >> s->op % 64 & 1))
		return bad(f, -EOPNOTSUPP, AT(op), "opcode is not supported here");
	const struct op_rule *r = &rules[s->op];

	if (s->prio > 2)
		return bad(f, -EINVAL, AT(prio), "unknown priority");
	if (s->region && !(c->features & APR_FEAT_ATTACH))
		return bad(f, -EOPNOTSUPP, AT(region), "attached regions are not supported here");
	if (s->zero)
		return bad(f, -EINVAL, AT(zero), "reserved field is not zero");
	if (!r->fmts && s->timeout_ms)
		return bad(f, -EINVAL, AT(timeout_ms), "this opcode takes no timeout");
	int e = check_flags(s, r, c, f);
	if (!e)
		e = check_input(s, r, c, f);
	if (!e)
		e = check_list_place(s, r, c, f);
	if (!e)
		e = check_generate(s, r, c, f);
	return e;
}

/* ---- parameters ------------------------------------------------------------ */

struct span { /* one parameter's data */
	const uint8_t *p;
	uint32_t len;
	uint32_t at; /* as apr_fault.at */
};

static uint32_t u32_at(const void *p)
{
	uint32_t v;
	memcpy(&v, p, sizeof(v));
	return v;
}

/* A struct that may have grown: whole, and what we do not know of it zero. */
static int check_struct(const struct span *d, uint32_t size, struct apr_fault *f)
{
	if (d->len < size)
		return bad(f, -EINVAL, d->at, "parameter is too short");
	for (uint32_t i = size; i < d->len; i++)
		if (d->p[i])
			return bad(f, -EINVAL, d->at + i, "unknown part of a parameter is not zero");
	return 0;
}

static int check_array(const struct span *d, uint32_t each, uint32_t least, uint32_t most, struct apr_fault *f)
{
	if (d->len % each)
		return bad(f, -EINVAL, d->at, "parameter's length is no multiple of its elements'");
	if (d->len / each < least)
		return bad(f, -EINVAL, d->at, "parameter is empty");
	if (d->len / each > most)
		return bad(f, -E2BIG, d->at, "parameter has too many elements");
	return 0;
}

#define AT_S(field) (d->at + (uint32_t)offsetof(struct apr_sampling, field))

static int check_sampling(const struct span *d, struct apr_param_view *v, struct apr_fault *f)
{
	int e = check_struct(d, sizeof(struct apr_sampling), f);
	if (e)
		return e;
	const struct apr_sampling *s = (const void *)d->p;
	if (s->set & ~APR_SET_ALL)
		return bad(f, -EINVAL, AT_S(set), "unknown bit in set");
	/* each test is written so that a NaN fails it */
	if ((s->set & APR_SET_TEMPERATURE) && !(isfinite(s->temperature) && s->temperature >= 0))
		return bad(f, -EINVAL, AT_S(temperature), "temperature must be finite and not negative");
	if ((s->set & APR_SET_TOP_P) && !(s->top_p >= 0 && s->top_p <= 1))
		return bad(f, -EINVAL, AT_S(top_p), "top_p must be from 0 to 1");
	if ((s->set & APR_SET_MIN_P) && !(s->min_p >= 0 && s->min_p <= 1))
		return bad(f, -EINVAL, AT_S(min_p), "min_p must be from 0 to 1");
	if ((s->set & APR_SET_REPEAT) && !(isfinite(s->repeat_penalty) && s->repeat_penalty > 0))
		return bad(f, -EINVAL, AT_S(repeat_penalty), "repeat_penalty must be finite and above 0");
	if ((s->set & APR_SET_FREQUENCY) && !isfinite(s->frequency_penalty))
		return bad(f, -EINVAL, AT_S(frequency_penalty), "frequency_penalty must be finite");
	if ((s->set & APR_SET_PRESENCE) && !isfinite(s->presence_penalty))
		return bad(f, -EINVAL, AT_S(presence_penalty), "presence_penalty must be finite");
	if ((s->set & APR_SET_WINDOW) && s->penalty_window < -1)
		return bad(f, -EINVAL, AT_S(penalty_window), "penalty_window must be -1 or more");
	if ((s->set & APR_SET_IGNORE_EOS) && s->ignore_eos > 1)
		return bad(f, -EINVAL, AT_S(ignore_eos), "ignore_eos must be 0 or 1");
	v->sampling = s;
	return 0;
}

static int check_logprobs(const struct span *d, struct apr_param_view *v, struct apr_fault *f)
{
	int e = check_struct(d, 4, f);
	if (e)
		return e;
	v->logprobs = u32_at(d->p);
	if (v->logprobs > APR_LOGPROBS_MAX)
		return bad(f, -EINVAL, d->at, "more log-probabilities than 20");
	return 0;
}

static int check_bias(const struct span *d, struct apr_param_view *v, struct apr_fault *f)
{
	int e = check_array(d, sizeof(struct apr_bias), 1, APR_BIAS_MAX, f);
	if (e)
		return e;
	v->bias = (const void *)d->p;
	v->n_bias = d->len / (uint32_t)sizeof(struct apr_bias);
	for (uint32_t i = 0; i < v->n_bias; i++) {
		float b = v->bias[i].bias;
		if (isnan(b) || (isinf(b) && b > 0))
			return bad(f, -EINVAL, d->at + i * 8 + 4, "bias must be finite or minus infinity");
	}
	return 0;
}

static int check_stop(const struct span *d, struct apr_param_view *v, struct apr_fault *f)
{
	uint32_t at = 0, n = 0;

	while (at < d->len) {
		if (d->len - at < 4)
			return bad(f, -EINVAL, d->at + at, "stop string is cut short");
		uint32_t len = u32_at(d->p + at);
		if (!len)
			return bad(f, -EINVAL, d->at + at, "empty stop string");
		if (len > APR_STOP_BYTES_MAX)
			return bad(f, -E2BIG, d->at + at, "stop string above 256 bytes");
		uint32_t padded = (len + 3) & ~3u;
		if (padded > d->len - at - 4)
			return bad(f, -EINVAL, d->at + at, "stop string is cut short");
		for (uint32_t i = len; i < padded; i++)
			if (d->p[at + 4 + i])
				return bad(f, -EINVAL, d->at + at + 4 + i, "padding is not zero");
		if (++n > APR_STOP_MAX)
			return bad(f, -E2BIG, d->at + at, "more than 16 stop strings");
		at += 4 + padded;
	}
	if (!n)
		return bad(f, -EINVAL, d->at, "parameter is empty");
	v->stop = d->p;
	v->stop_bytes = d->len;
	v->n_stop = n;
	return 0;
}

bool apr_param_stop(const struct apr_param_view *v, uint32_t *pos, const uint8_t **text, uint32_t *len)
{
	if (*pos >= v->stop_bytes)
		return false;
	*len = u32_at(v->stop + *pos);
	*text = v->stop + *pos + 4;
	*pos += 4 + ((*len + 3) & ~3u);
	return true;
}

static int check_stop_ids(const struct span *d, struct apr_param_view *v, struct apr_fault *f)
{
	int e = check_array(d, 4, 1, APR_STOP_IDS_MAX, f);
	v->stop_ids = (const void *)d->p;
	v->n_stop_ids = d->len / 4;
	return e;
}

static int check_resume(const struct span *d, struct apr_param_view *v, struct apr_fault *f)
{
	int e = check_array(d, 4, 0, APR_PARAMS_MAX / 4, f);
	v->resume = (const void *)d->p;
	v->n_resume = d->len / 4;
	return e;
}

static int check_trace_id(const struct span *d, struct apr_param_view *v, struct apr_fault *f)
{
	v->trace_id = d->p;
	return check_struct(d, 16, f);
}

#define OPS_GENERATE (1u << APR_OP_GENERATE | 1u << APR_OP_CHAT)
#define OPS_SCORE (OPS_GENERATE | 1u << APR_OP_SCORE)
#define OPS_ALL UINT32_MAX

struct param_rule {
	int (*check)(const struct span *d, struct apr_param_view *v, struct apr_fault *f); /* NULL = not built */
	uint32_t ops;
	uint64_t feature;
};
static const struct param_rule param_rules[] = {
	[APR_PARAM_SAMPLING] = { check_sampling, OPS_GENERATE, APR_FEAT_SAMPLING },
	[APR_PARAM_LOGPROBS] = { check_logprobs, OPS_SCORE, APR_FEAT_LOGPROBS },
	[APR_PARAM_BIAS] = { check_bias, OPS_GENERATE, APR_FEAT_SAMPLING },
	[APR_PARAM_STOP] = { check_stop, OPS_GENERATE, APR_FEAT_SAMPLING },
	[APR_PARAM_STOP_IDS] = { check_stop_ids, OPS_GENERATE, APR_FEAT_SAMPLING },
	[APR_PARAM_RESUME] = { check_resume, OPS_GENERATE, APR_FEAT_REPLAY },
	[APR_PARAM_TRACE_ID] = { check_trace_id, OPS_ALL, 0 },
};
enum { N_PARAM_RULES = sizeof(param_rules) / sizeof(param_rules[0]) };
_Static_assert(N_PARAM_RULES <= sizeof(((struct apr_param_view *)0)->at) / 4, "apr_param_view.at has a place for each");

static int check_param(const struct apr_param *p, struct span *d, uint8_t op, uint64_t features,
		       struct apr_param_view *v, struct apr_fault *f)
{
	uint32_t head = d->at - (uint32_t)sizeof(*p);
	const struct param_rule *r = p->type < N_PARAM_RULES ? &param_rules[p->type] : NULL;

	if (p->flags & ~APR_PARAM_OPTIONAL)
		return bad(f, -EINVAL, head + 2, "unknown flag of a parameter");
	if (!r || !r->check || (r->feature & features) != r->feature) {
		if (p->type && (p->flags & APR_PARAM_OPTIONAL))
			return 0;
		return bad(f, p->type ? -EOPNOTSUPP : -EINVAL, head, "parameter type is not supported here");
	}
	if (op >= 32 || !(r->ops >> op & 1))
		return bad(f, -EINVAL, head, "a parameter that this opcode does not take");
	if (v->at[p->type])
		return bad(f, -EINVAL, head, "a parameter type twice");
	v->at[p->type] = d->at;
	return r->check(d, v, f);
}

int apr_check_params(const void *list, uint32_t len, uint8_t op, uint64_t features, struct apr_param_view *v,
		     struct apr_fault *f)
{
	const uint8_t *base = list;
	const uint32_t origin = sizeof(struct apr_sqe); /* faults in the list are counted on from the entry's */

	memset(v, 0, sizeof(*v));
	memset(f, 0, sizeof(*f));
	if (len > APR_PARAMS_MAX)
		return bad(f, -E2BIG, AT(par_len), "parameter list above 64 KiB");
	for (uint32_t at = 0; at < len;) {
		struct apr_param p;
		if (len - at < sizeof(p))
			return bad(f, -EINVAL, origin + at, "parameter list is cut short");
		memcpy(&p, base + at, sizeof(p));
		uint32_t left = len - at - (uint32_t)sizeof(p);
		if (p.len > left || ((p.len + 7) & ~7u) > left)
			return bad(f, -EINVAL, origin + at + 4, "parameter is longer than its list");
		struct span d = { base + at + sizeof(p), p.len, origin + at + (uint32_t)sizeof(p) };
		uint32_t padded = (p.len + 7) & ~7u;
		for (uint32_t i = p.len; i < padded; i++)
			if (d.p[i])
				return bad(f, -EINVAL, d.at + i, "padding is not zero");
		int e = check_param(&p, &d, op, features, v, f);
		if (e)
			return e;
		at += (uint32_t)sizeof(p) + padded;
	}
	return 0;
}

/* ---- HELLO -------------------------------------------------------------------- */

#define AT_H(field) ((uint32_t)offsetof(struct apr_hello, field))

int apr_check_hello(const void *buf, size_t n, uint64_t features, struct apr_hello *out, struct apr_fault *f)
{
	memset(f, 0, sizeof(*f));
	memset(out, 0, sizeof(*out));
	if (n < sizeof(struct apr_frame))
		return bad(f, -EPROTO, 0, "a frame shorter than its header");
	memcpy(out, buf, n < sizeof(*out) ? n : sizeof(*out));
	if (out->hdr.magic != APR_FRAME_MAGIC)
		return bad(f, -EPROTO, AT_H(hdr.magic), "not an aprd frame");
	if (out->hdr.type != APR_FRAME_HELLO)
		return bad(f, -EPROTO, AT_H(hdr.type), "the first frame must be HELLO");
	if (n < 20) /* the version must be judged before the size, which another version may change */
		return bad(f, -EPROTO, AT_H(hdr.size), "HELLO is too short");
	if (out->major != APR_ABI_MAJOR)
		return bad(f, -EPROTONOSUPPORT, AT_H(major), "another major version of the protocol");
	if (out->hdr.size != n || n < sizeof(*out))
		return bad(f, -EPROTO, AT_H(hdr.size), "HELLO has the wrong size");
	for (size_t i = sizeof(*out); i < n; i++)
		if (((const uint8_t *)buf)[i])
			return bad(f, -EINVAL, (uint32_t)i, "unknown part of HELLO is not zero");
	if (out->hdr.flags || out->hdr.err)
		return bad(f, -EINVAL, AT_H(hdr.flags), "HELLO's header has flags or err");
	if (out->flags & ~APR_HELLO_RING_ALWAYS)
		return bad(f, -EINVAL, AT_H(flags), "unknown flag in HELLO");
	if (out->zero0)
		return bad(f, -EINVAL, AT_H(zero0), "reserved field of HELLO is not zero");
	for (size_t i = 0; i < sizeof(out->zero1); i++)
		if (out->zero1[i])
			return bad(f, -EINVAL, AT_H(zero1) + (uint32_t)i, "reserved field of HELLO is not zero");
	if (out->need & ~features)
		return bad(f, -EOPNOTSUPP, AT_H(need), "a needed feature is not supported here");
	return 0;
}
