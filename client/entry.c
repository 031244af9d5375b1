/* SPDX-License-Identifier: MIT */
/* Owns: reading what an entry and its blob hold, and building parameter lists. Does not own: their order. */
#include "client/handle.h"
#include <errno.h>

/* A blob by its offset; NULL where it does not lie in the result arena. */
static const struct apr_blob *blob_at(const struct apr *c, uint32_t off)
{
	uint64_t end = (uint64_t)c->geo.res_arena_off + c->geo.res_arena_len;

	if (!c->res.base || off % 8 || off < c->geo.res_arena_off || off + sizeof(struct apr_blob) > end)
		return NULL;
	const struct apr_blob *b = (const void *)((const uint8_t *)c->res.base + off);
	return b->len <= end - off - sizeof(*b) ? b : NULL;
}

static const void *find_part(const struct apr_blob *b, unsigned fmt, size_t *len)
{
	const uint8_t *data = (const uint8_t *)(b + 1);

	if (b->fmt == fmt) {
		*len = b->len;
		return data;
	}
	if (b->fmt != APR_BLOB_LIST)
		return NULL;
	for (uint32_t at = 0; b->len - at >= sizeof(struct apr_blob);) {
		const struct apr_blob *part = (const void *)(data + at);
		uint32_t left = b->len - at - (uint32_t)sizeof(*part);
		if (part->len > left)
			return NULL;
		if (part->fmt == fmt) {
			*len = part->len;
			return part + 1;
		}
		uint32_t padded = (part->len + 7) & ~7u;
		if (padded > left)
			return NULL;
		at += (uint32_t)sizeof(*part) + padded;
	}
	return NULL;
}

const void *apr_cqe_blob(struct apr *c, const struct apr_cqe *cqe, unsigned fmt, size_t *len)
{
	*len = 0;
	if (!(cqe->flags & APR_CQE_BLOB) || apr_enter(c))
		return NULL;
	const struct apr_blob *b = blob_at(c, cqe->blob);
	const void *p = b ? find_part(b, fmt, len) : NULL;
	apr_leave(c, 0);
	return p;
}

const char *apr_cqe_text(struct apr *c, const struct apr_cqe *cqe, size_t *len)
{
	bool inlined = cqe->type == APR_CQE_TOKEN || cqe->type == APR_CQE_PIECE || cqe->type == APR_CQE_DATA;

	if (inlined && cqe->text_len) {
		*len = cqe->text_len <= APR_CQE_TEXT_MAX ? cqe->text_len : APR_CQE_TEXT_MAX;
		return cqe->u.text;
	}
	return apr_cqe_blob(c, cqe, APR_BLOB_TEXT, len);
}

const struct apr_top *apr_cqe_top(struct apr *c, const struct apr_cqe *cqe, size_t *n)
{
	size_t len;
	const struct apr_top *t = apr_cqe_blob(c, cqe, APR_BLOB_TOP, &len);
	*n = len / sizeof(*t);
	return t;
}

const uint32_t *apr_cqe_ids(struct apr *c, const struct apr_cqe *cqe, size_t *n)
{
	size_t len;
	const uint32_t *ids = apr_cqe_blob(c, cqe, APR_BLOB_IDS, &len);
	*n = len / sizeof(*ids);
	return ids;
}

/* ---- parameter lists -------------------------------------------------------- */

void apr_params_init(struct apr_params *p, void *buf, size_t cap)
{
	memset(p, 0, sizeof(*p));
	p->buf = buf;
	p->cap = cap > APR_PARAMS_MAX ? APR_PARAMS_MAX : (uint32_t)cap;
}

/* Room for one parameter's data, zeroed; NULL: p->err says why. */
static uint8_t *add(struct apr_params *p, unsigned type, unsigned flags, size_t len)
{
	if (p->err)
		return NULL;
	if (!type || type > UINT16_MAX || flags & ~APR_PARAM_OPTIONAL || (type < 32 && p->types >> type & 1)) {
		p->err = -EINVAL;
		return NULL;
	}
	if (len > APR_PARAMS_MAX || ((len + 7) & ~(size_t)7) + sizeof(struct apr_param) > p->cap - p->len) {
		p->err = -ENOSPC;
		return NULL;
	}
	struct apr_param head = { (uint16_t)type, (uint16_t)flags, (uint32_t)len };
	uint8_t *at = p->buf + p->len;
	size_t padded = (len + 7) & ~(size_t)7;
	memcpy(at, &head, sizeof(head));
	memset(at + sizeof(head), 0, padded);
	p->len += (uint32_t)(sizeof(head) + padded);
	if (type < 32)
		p->types |= 1u << type;
	return at + sizeof(head);
}

void apr_params_raw(struct apr_params *p, unsigned type, unsigned flags, const void *data, size_t len)
{
	uint8_t *at = add(p, type, flags, len);
	if (at && len)
		memcpy(at, data, len);
}

void apr_params_sampling(struct apr_params *p, const struct apr_sampling *s)
{
	apr_params_raw(p, APR_PARAM_SAMPLING, 0, s, sizeof(*s));
}

void apr_params_logprobs(struct apr_params *p, uint32_t k)
{
	apr_params_raw(p, APR_PARAM_LOGPROBS, 0, &k, sizeof(k));
}

void apr_params_bias(struct apr_params *p, const uint32_t *ids, const float *bias, size_t n)
{
	if (n > APR_BIAS_MAX && !p->err)
		p->err = -EINVAL;
	uint8_t *at = p->err ? NULL : add(p, APR_PARAM_BIAS, 0, n * 8);
	for (size_t i = 0; at && i < n; i++) {
		memcpy(at + i * 8, &ids[i], 4);
		memcpy(at + i * 8 + 4, &bias[i], 4);
	}
}

void apr_params_stop(struct apr_params *p, const char *const *text, const size_t *len, size_t n)
{
	size_t total = 0;

	for (size_t i = 0; i < n && !p->err; i++) {
		if (n > APR_STOP_MAX || !len[i] || len[i] > APR_STOP_BYTES_MAX)
			p->err = -EINVAL;
		total += 4 + ((len[i] + 3) & ~(size_t)3);
	}
	uint8_t *at = p->err ? NULL : add(p, APR_PARAM_STOP, 0, total);
	for (size_t i = 0; at && i < n; i++) {
		uint32_t k = (uint32_t)len[i];
		memcpy(at, &k, 4);
		memcpy(at + 4, text[i], k);
		at += 4 + ((k + 3) & ~3u);
	}
}

void apr_params_stop_ids(struct apr_params *p, const uint32_t *ids, size_t n)
{
	if (n > APR_STOP_IDS_MAX && !p->err)
		p->err = -EINVAL;
	if (!p->err)
		apr_params_raw(p, APR_PARAM_STOP_IDS, 0, ids, n * 4);
}

void apr_params_trace_id(struct apr_params *p, const unsigned char id[16])
{
	apr_params_raw(p, APR_PARAM_TRACE_ID, 0, id, 16);
}

int apr_sqe_params(struct apr *c, struct apr_sqe *sqe, const struct apr_params *p)
{
	int e;

	if (p->err || !p->len)
		return p->err;
	void *at = apr_sqe_param_space(c, sqe, p->len, &e);
	if (!at)
		return e;
	memcpy(at, p->buf, p->len);
	return 0;
}
