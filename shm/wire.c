/* SPDX-License-Identifier: MIT */
/* Owns: entries and frames as one line of text. See wire.h. */
#include "shm/wire.h"
#include "shm/errors.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct out {
	char *buf;
	size_t n, at;
};

__attribute__((format(printf, 2, 3))) static void put(struct out *o, const char *fmt, ...)
{
	va_list ap;

	if (o->at >= o->n)
		return;
	va_start(ap, fmt);
	int k = vsnprintf(o->buf + o->at, o->n - o->at, fmt, ap);
	va_end(ap);
	if (k > 0)
		o->at += (size_t)k;
}

static void put_quoted(struct out *o, const char *text, size_t len)
{
	put(o, "\"");
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)text[i];
		if (c == '"' || c == '\\')
			put(o, "\\%c", c);
		else if (c == '\n')
			put(o, "\\n");
		else if (c < 0x20 || c >= 0x7f)
			put(o, "\\x%02x", c);
		else
			put(o, "%c", c);
	}
	put(o, "\"");
}

static const char *pick(const char *const *names, size_t n, unsigned i)
{
	return i < n && names[i] ? names[i] : "?";
}
#define PICK(names, i) pick(names, sizeof(names) / sizeof((names)[0]), i)

const char *apr_wire_op(unsigned op)
{
	static const char *const names[] = { "NOP", "GENERATE", "CHAT", "SCORE", "TOKENIZE",
					     "DETOKENIZE", "EMBED", "CANCEL", "FREE" };
	return PICK(names, op);
}

const char *apr_wire_cqe_type(unsigned type)
{
	static const char *const names[] = { NULL, "TOKEN", "PIECE", "DATA", "SAMPLE_END", "FINAL", "ACK" };
	return PICK(names, type);
}

const char *apr_wire_frame_type(unsigned type)
{
	static const char *const names[] = {
		[APR_FRAME_HELLO] = "HELLO", [APR_FRAME_WELCOME] = "WELCOME", [APR_FRAME_READY] = "READY",
		[APR_FRAME_GET_MODELS] = "GET_MODELS", [APR_FRAME_GET_VOCAB] = "GET_VOCAB",
		[APR_FRAME_ATTACH] = "ATTACH", [APR_FRAME_NOTIFY] = "NOTIFY",
		[APR_FRAME_MODEL_CHANGED] = "MODEL_CHANGED", [APR_FRAME_BYE] = "BYE",
		[APR_FRAME_CANCEL_ALL] = "CANCEL_ALL", [APR_FRAME_STATUS] = "STATUS", [APR_FRAME_LOAD] = "LOAD",
		[APR_FRAME_UNLOAD] = "UNLOAD", [APR_FRAME_WARMUP] = "WARMUP", [APR_FRAME_RELOAD] = "RELOAD",
		[APR_FRAME_DRAIN] = "DRAIN", [APR_FRAME_CANCEL] = "CANCEL", [APR_FRAME_TRACE] = "TRACE",
		[APR_FRAME_LOG] = "LOG",
	};
	return PICK(names, type);
}

const char *apr_wire_finish(unsigned reason)
{
	static const char *const names[] = { "none", "stop", "stop_string", "length", "cancelled",
					     "timeout", "numeric", "drained", "error" };
	return PICK(names, reason);
}

const char *apr_wire_backend(unsigned id)
{
	static const char *const names[] = { [APR_BACKEND_NONE] = "none", [APR_BACKEND_CPU] = "cpu",
					     [APR_BACKEND_CUDA] = "cuda", [APR_BACKEND_FAKE] = "fake" };
	return PICK(names, id);
}

const char *apr_wire_route(unsigned id)
{
	static const char *const names[] = { "none", "f32", "quant", "fp16", "fp8", "fp8-fast", "fused", "int16" };
	return PICK(names, id);
}

static void put_flags(struct out *o, unsigned flags, const char *const *names, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (flags >> i & 1)
			put(o, " %s", names[i]);
	if (flags >> n)
		put(o, " flags=%#x", flags >> n << n);
}

char *apr_wire_sqe(const struct apr_sqe *s, char *buf, size_t n)
{
	static const char *const flags[] = { "NO_STREAM", "REPLAYABLE", "PARSE_SPECIAL", "KEEP", "FORCED", "ADD_BOS" };
	static const char *const fmts[] = { "TEXT", "IDS", "MESSAGES", "PARTS" };
	struct out o = { buf, n, 0 };

	put(&o, "SQE %s", apr_wire_op(s->op));
	if (apr_wire_op(s->op)[0] == '?')
		put(&o, "(%u)", s->op);
	put(&o, " user_data=%#llx model=%u", (unsigned long long)s->user_data, s->model);
	put_flags(&o, s->flags, flags, sizeof(flags) / sizeof(flags[0]));
	if (s->in_len)
		put(&o, " in=%s@%u+%u", PICK(fmts, s->in_fmt), s->in_off, s->in_len);
	if (s->par_len)
		put(&o, " par=@%u+%u", s->par_off, s->par_len);
	if (s->arg)
		put(&o, " arg=%#llx", (unsigned long long)s->arg);
	if (s->op == APR_OP_GENERATE || s->op == APR_OP_CHAT)
		put(&o, " max_tokens=%u n=%u seed=%#llx", s->max_tokens, s->n ? s->n : 1, (unsigned long long)s->seed);
	if (s->timeout_ms)
		put(&o, " timeout_ms=%u", s->timeout_ms);
	if (s->prio || s->region || s->zero)
		put(&o, " prio=%u region=%u zero=%u", s->prio, s->region, s->zero);
	return buf;
}

static void put_res(struct out *o, int32_t res)
{
	const char *name = res < 0 ? apr_errno_name(res) : NULL;
	if (name)
		put(o, " res=-%s", name);
	else
		put(o, " res=%d", res);
}

static void put_final(struct out *o, const struct apr_cqe *e)
{
	const struct apr_cqe_final *f = &e->u.final_;

	put(o, " finish=%s backend=%s route=%s%s", apr_wire_finish(APR_AUX_REASON(e->aux)),
	    apr_wire_backend(APR_AUX_BACKEND(e->aux)), apr_wire_route(APR_AUX_ROUTE(e->aux)),
	    APR_AUX_FELL_BACK(e->aux) ? " fell_back" : "");
	if (e->type == APR_CQE_FINAL)
		put(o, " queue=%uus prefill=%uus decode=%uus prompt=%u cached=%u generated=%u handle=%#llx", f->queue_us,
		    f->prefill_us, f->decode_us, f->prompt, f->cached, f->generated, (unsigned long long)f->handle);
}

char *apr_wire_cqe(const struct apr_cqe *e, char *buf, size_t n)
{
	static const char *const flags[] = { "MORE", "BLOB" };
	struct out o = { buf, n, 0 };

	put(&o, "CQE %s", apr_wire_cqe_type(e->type));
	put(&o, " user_data=%#llx", (unsigned long long)e->user_data);
	put_res(&o, e->res);
	put(&o, " pos=%u", e->pos);
	put_flags(&o, e->flags, flags, 2);
	if (e->sample)
		put(&o, " sample=%u", e->sample);
	if (e->blob)
		put(&o, " blob=@%u", e->blob);
	if (e->type == APR_CQE_FINAL || e->type == APR_CQE_SAMPLE_END) {
		put_final(&o, e);
	} else if (e->type == APR_CQE_ACK) {
		put(&o, " waited=%lluns served=%lluns", (unsigned long long)e->u.nop.waited_ns,
		    (unsigned long long)e->u.nop.served_ns);
	} else {
		if (e->type == APR_CQE_TOKEN)
			put(&o, " logprob=%g", (double)e->logprob);
		put(&o, " text=");
		put_quoted(&o, e->u.text, e->text_len <= APR_CQE_TEXT_MAX ? e->text_len : APR_CQE_TEXT_MAX);
	}
	return buf;
}

static void put_hello(struct out *o, const struct apr_hello *h)
{
	put(o, " %u.%u flags=%#x need=%#llx want=%#llx sq=%u cq=%u req=%u res=%u name=", h->major, h->minor, h->flags,
	    (unsigned long long)h->need, (unsigned long long)h->want, h->sq_entries, h->cq_entries, h->req_size,
	    h->res_size);
	put_quoted(o, h->name, strnlen(h->name, sizeof(h->name)));
	if (h->old_session)
		put(o, " old=%#llx/%#llx", (unsigned long long)h->old_epoch, (unsigned long long)h->old_session);
}

static void put_welcome(struct out *o, const struct apr_welcome *w)
{
	put(o, " %u.%u features=%#llx epoch=%#llx session=%#llx req=%u res=%u inflight=%u input=%u blob=%u", w->major,
	    w->minor, (unsigned long long)w->features, (unsigned long long)w->epoch, (unsigned long long)w->session,
	    w->req_size, w->res_size, w->max_inflight, w->max_input, w->max_blob);
	put(o, " model=%u/%u gen=%u fds=%u,%u,%u opcodes=%#llx poll=%uus spin=%uus", w->default_model, w->n_models,
	    w->models_gen, w->fd_kind[0], w->fd_kind[1], w->fd_kind[2], (unsigned long long)w->opcodes[0], w->poll_us,
	    w->spin_us);
}

char *apr_wire_frame(const void *frame, size_t len, char *buf, size_t n)
{
	struct out o = { buf, n, 0 };
	struct apr_frame f;

	if (len < sizeof(f)) {
		put(&o, "FRAME of %zu bytes: too short", len);
		return buf;
	}
	memcpy(&f, frame, sizeof(f));
	put(&o, "FRAME %s", apr_wire_frame_type(f.type));
	if (f.magic != APR_FRAME_MAGIC)
		put(&o, " magic=%#x", f.magic);
	put(&o, " size=%u", f.size);
	if (f.size != len)
		put(&o, " (got %zu)", len);
	if (f.flags)
		put(&o, " flags=%#x", f.flags);
	const char *body = (const char *)frame + sizeof(f);
	if (f.err) {
		put_res(&o, f.err);
		put(&o, " ");
		put_quoted(&o, body, len - sizeof(f));
	} else if (f.type == APR_FRAME_HELLO && len >= sizeof(struct apr_hello)) {
		struct apr_hello h;
		memcpy(&h, frame, sizeof(h));
		put_hello(&o, &h);
	} else if (f.type == APR_FRAME_WELCOME && len >= sizeof(struct apr_welcome)) {
		struct apr_welcome w;
		memcpy(&w, frame, sizeof(w));
		put_welcome(&o, &w);
	} else if ((f.type == APR_FRAME_STATUS || f.type >= APR_FRAME_LOAD) && len > sizeof(f)) {
		put(&o, " ");
		put_quoted(&o, body, len - sizeof(f));
	}
	return buf;
}
