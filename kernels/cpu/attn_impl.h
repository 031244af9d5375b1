/* SPDX-License-Identifier: MIT */
/*
 * Attention of one tile of rows with one KV head, segment by segment.
 *
 * Owns: the arithmetic of attention, over kernels/common/vec.h. Included once by
 * each ops_<isa>.c. Does not own which rows form a tile or which thread runs it.
 *
 * The arithmetic of one row and head, which depends on nothing else:
 *   score(key) = chain of fmaf over the head's dimension, ascending, from 0
 *   u(key)     = score · (scale · log2 e), or by way of the soft cap
 *   in a segment of 256 keys, those the row sees only: m = max u, w = exp2(u - m),
 *   l = sum of w over lanes key mod 16, each ascending, then vec.h's tree;
 *   o[i] = chain of fmaf over the keys, ascending, from 0
 *   segments merged ascending: m' = max(M, m), a = exp2(M - m'), b = exp2(m - m'),
 *   L = fmaf(L, a, l · b), O = fmaf(O, a, o · b); the result is O / L.
 * A key that the row does not see is never touched, not even with weight 0: it may
 * be another row's NaN.
 */
#include "kernels/common/vec.h"
#include "kernels/cpu/ops_isa.h"

/* Registers: rows × vectors of accumulators that fit beside the operands. */
#if defined(APR_VEC_AVX512)
#define ATTN_ROWS 8
#define ATTN_COLS(rows) ((rows) <= 4 ? 4 : 2)
#elif defined(APR_VEC_AVX2) || defined(APR_VEC_NEON)
#define ATTN_ROWS 6
#define ATTN_COLS(rows) ((rows) <= 3 ? 2 : 1)
#else /* plain C has no vector registers to fill */
#define ATTN_ROWS 2
#define ATTN_COLS(rows) 1
#endif

VEC vf kv_load(enum apr_kv_type type, const void *p, size_t i)
{
	if (type == APR_KV_F16)
		return vf_load_half((const uint16_t *)p + i);
	if (type == APR_KV_BF16)
		return vf_load_bfloat((const uint16_t *)p + i);
	return vf_load((const float *)p + i);
}

/* Where a product's operands lie. b: n_k rows of the given type. */
struct product {
	uint32_t n_k, n_vec; /* vectors of 16 columns */
	const float *a;
	size_t lda;
	const void *b;
	size_t ldb;
	float *c;
	size_t ldc;
};

/* c[r][16 v …] (+)= a[r][k] · b[k][…], k ascending, for nv vectors from v on */
VEC void micro(int nr, int nv, enum apr_kv_type type, const struct product *p, uint32_t at, bool add)
{
	vf acc[ATTN_ROWS][4];
	const float *a = p->a;
	float *c = p->c + (size_t)VL * at;
	size_t b = (size_t)VL * at;
	int r, v;
	uint32_t k;

	APR_UNROLL
	for (r = 0; r < nr; r++) {
		APR_UNROLL
		for (v = 0; v < nv; v++)
			acc[r][v] = add ? vf_load(c + r * p->ldc + VL * v) : vf_set1(0.0f);
	}
	for (k = 0; k < p->n_k; k++, b += p->ldb) {
		vf bv[4];

		APR_UNROLL
		for (v = 0; v < nv; v++)
			bv[v] = kv_load(type, p->b, b + VL * v);
		APR_UNROLL
		for (r = 0; r < nr; r++) {
			vf x = vf_set1(a[r * p->lda + k]);

			APR_UNROLL
			for (v = 0; v < nv; v++)
				acc[r][v] = vf_fma(x, bv[v], acc[r][v]);
		}
	}
	APR_UNROLL
	for (r = 0; r < nr; r++) {
		APR_UNROLL
		for (v = 0; v < nv; v++)
			vf_store(c + r * p->ldc + VL * v, acc[r][v]);
	}
}

VEC void micro_rows(int nr, enum apr_kv_type type, const struct product *p, bool add)
{
	uint32_t v = 0;

	if (add)
		for (; v + ATTN_COLS(nr) <= p->n_vec; v += ATTN_COLS(nr))
			micro(nr, ATTN_COLS(nr), type, p, v, true);
	else
		for (; v + ATTN_COLS(nr) <= p->n_vec; v += ATTN_COLS(nr))
			micro(nr, ATTN_COLS(nr), type, p, v, false);
	for (; v < p->n_vec; v++)
		micro(nr, 1, type, p, v, add);
}

typedef void panel_fn(const struct product *, bool add);
#define MICRO(R, T) \
	static void micro_##R##_##T(const struct product *p, bool add) \
	{ \
		micro_rows(R, APR_KV_##T, p, add); \
	}
#define MICRO_TYPES(R) MICRO(R, F32) MICRO(R, F16) MICRO(R, BF16)
MICRO_TYPES(1)
MICRO_TYPES(2)
#define MICRO_LIST(T) micro_1_##T, micro_2_##T
#if ATTN_ROWS >= 6
MICRO_TYPES(3)
MICRO_TYPES(4)
MICRO_TYPES(5)
MICRO_TYPES(6)
#undef MICRO_LIST
#define MICRO_LIST(T) micro_1_##T, micro_2_##T, micro_3_##T, micro_4_##T, micro_5_##T, micro_6_##T
#endif
#if ATTN_ROWS == 8
MICRO_TYPES(7)
MICRO_TYPES(8)
#undef MICRO_LIST
#define MICRO_LIST(T) micro_1_##T, micro_2_##T, micro_3_##T, micro_4_##T, micro_5_##T, micro_6_##T, micro_7_##T, micro_8_##T
#endif

/* n_rows <= ATTN_ROWS */
static void panel(uint32_t n_rows, enum apr_kv_type type, const struct product *p, bool add)
{
	static panel_fn *const by_rows[3][ATTN_ROWS] = {
		[APR_KV_F16] = {MICRO_LIST(F16)}, [APR_KV_F32] = {MICRO_LIST(F32)}, [APR_KV_BF16] = {MICRO_LIST(BF16)}};

	by_rows[type][n_rows - 1](p, add);
}

VEC vf kv_loadn(enum apr_kv_type type, const void *p, size_t i, uint32_t n)
{
	uint16_t t[VL] = {0};

	if (n >= VL)
		return kv_load(type, p, i);
	if (type == APR_KV_F32)
		return vf_loadn((const float *)p + i, n);
	memcpy(t, (const uint16_t *)p + i, n * sizeof(*t));
	return kv_load(type, t, 0);
}

struct ahead {
	const uint8_t *k, *v;
};

/* K[64][dim] of 16 bits, turned to [dim][64]; keys first … last, in whole sixteens. What is read next (or NULL) is
 * asked for meanwhile: pages lie apart, where the hardware does not foresee them. */
static __attribute__((noinline)) void turn_half(const uint16_t *k, uint32_t dim, uint32_t first, uint32_t last, uint16_t *out,
                                                const struct ahead *next)
{
	size_t line, bytes = VL * sizeof(*k) * (size_t)dim;
	uint32_t key, d, i;

	for (key = first & ~15u; key <= last; key += VL) {
		for (line = 0; next->v && line < bytes; line += 64)
			__builtin_prefetch(next->v + key / VL * bytes + line, 0, 2);
		for (line = 0; next->k && line < bytes; line += 64)
			__builtin_prefetch(next->k + key / VL * bytes + line, 0, 2);
		for (d = 0; d + VL <= dim;)
			d += vh_turn(k + (size_t)key * dim + d, dim, dim - d, out + (size_t)d * APR_KV_PAGE + key, APR_KV_PAGE);
		for (; d < dim; d++)
			for (i = 0; i < VL; i++)
				out[(size_t)d * APR_KV_PAGE + key + i] = k[(size_t)(key + i) * dim + d];
	}
}

static __attribute__((noinline)) void turn_float(const float *k, uint32_t dim, uint32_t first, uint32_t last, float *out)
{
	uint32_t key, d, i;

	for (key = first & ~15u; key <= last; key += VL)
		for (d = 0; d < dim; d += VL) {
			uint32_t left = dim - d < VL ? dim - d : VL;
			vf r[VL];

			for (i = 0; i < VL; i++)
				r[i] = vf_load_upto(k + (size_t)(key + i) * dim + d, left);
			vf_transpose(r);
			for (i = 0; i < left; i++)
				vf_store(out + (size_t)(d + i) * APR_KV_PAGE + key, r[i]);
		}
}

/* 64 columns of K turned, to float; vectors of keys first / 16 … last / 16 */
VEC void widen_k(enum apr_kv_type type, const uint16_t *k, uint32_t dim, uint32_t first, uint32_t last, float *out)
{
	uint32_t d, key;

	for (d = 0; d < dim; d++)
		for (key = first & ~15u; key <= last; key += VL)
			vf_store(out + (size_t)d * APR_KV_PAGE + key, kv_load(type, k, (size_t)d * APR_KV_PAGE + key));
}

VEC void widen_v(enum apr_kv_type type, const void *v, uint32_t dim, uint32_t first, uint32_t last, float *out)
{
	uint32_t ldv = apr_attn_ldv(dim), key, d;

	for (key = first; key <= last; key++)
		for (d = 0; d < dim; d += VL)
			vf_store(out + (size_t)key * ldv + d, kv_loadn(type, v, (size_t)key * dim + d, dim - d));
}

/* A block's K or V as the products read it: of which type, and where. */
struct operand {
	enum apr_kv_type type;
	const void *at;
};

/* few: used by so few rows that widening in registers is cheaper than to memory */
static struct operand block_k(enum apr_kv_type t, const void *k, uint32_t dim, uint32_t first, uint32_t last, bool few,
                              const struct ahead *next, const struct apr_attn_work *w)
{
	if (t == APR_KV_F32) {
		turn_float(k, dim, first, last, w->block);
		return (struct operand){APR_KV_F32, w->block};
	}
	turn_half(k, dim, first, last, w->half, next);
	if (few)
		return (struct operand){t, w->half};
	if (t == APR_KV_F16)
		widen_k(APR_KV_F16, w->half, dim, first, last, w->block);
	else
		widen_k(APR_KV_BF16, w->half, dim, first, last, w->block);
	return (struct operand){APR_KV_F32, w->block};
}

static struct operand block_v(enum apr_kv_type t, const void *v, uint32_t dim, uint32_t first, uint32_t last, bool few,
                              const struct apr_attn_work *w)
{
	if (dim % VL == 0 && (few || t == APR_KV_F32))
		return (struct operand){t, v};
	if (t == APR_KV_F16)
		widen_v(APR_KV_F16, v, dim, first, last, w->block);
	else if (t == APR_KV_BF16)
		widen_v(APR_KV_BF16, v, dim, first, last, w->block);
	else
		widen_v(APR_KV_F32, v, dim, first, last, w->block);
	return (struct operand){APR_KV_F32, w->block};
}

/* One tile and KV head at work on one segment. */
struct seg {
	const struct apr_op_attn *op;
	const struct apr_attn_tile *tile;
	const struct apr_attn_work *w;
	uint32_t kvh, group, rows; /* rows of the tile: positions × group */
	uint32_t start;            /* the segment's first key */
	bool few;                  /* see block_k */
};

/* Keys of the segment that row r sees: [*a, *b) counted from the segment's start; empty where *a >= *b. */
VEC void seen(const struct seg *g, uint32_t r, uint32_t *a, uint32_t *b)
{
	uint32_t pos = g->tile->pos + r / g->group, lo = apr_attn_first(pos, g->op->window);
	uint32_t hi = pos + 1 > g->start ? pos + 1 - g->start : 0;

	*a = lo > g->start ? lo - g->start : 0;
	*b = hi < APR_KV_SEGMENT ? hi : APR_KV_SEGMENT;
}

static const uint8_t *kv_block(const struct seg *g, uint32_t block, bool v)
{
	const struct apr_kv_group *kv = g->op->kv.group;
	size_t size = kv->type == APR_KV_F32 ? 4 : 2;
	uint32_t page = kv->table[(size_t)g->tile->slot * kv->max_pages_seq + g->start / APR_KV_PAGE + block];
	const uint8_t *layer = kv->pool + ((uint64_t)page * kv->n_layers + g->op->kv.index) * kv->layer_bytes;

	if (v)
		return layer + size * APR_KV_PAGE * ((size_t)g->op->n_kv_heads * g->op->k_dim + (size_t)g->kvh * g->op->v_dim);
	return layer + size * APR_KV_PAGE * g->kvh * g->op->k_dim;
}

static void seg_scores(const struct seg *g, uint32_t block, uint32_t first, uint32_t last)
{
	uint32_t dim = g->op->k_dim, base = block * APR_KV_PAGE, r;
	bool more = g->few && last == APR_KV_PAGE - 1 && g->start + base + last < g->tile->pos;
	struct ahead next = {more ? kv_block(g, block + 1, false) : NULL, g->few ? kv_block(g, block, true) : NULL};
	struct operand k = block_k(g->op->kv.group->type, kv_block(g, block, false), dim, first, last, g->few, &next, g->w);
	size_t size = k.type == APR_KV_F32 ? 4 : 2;

	for (r = 0; r < g->rows; r += ATTN_ROWS) {
		uint32_t n = g->rows - r < ATTN_ROWS ? g->rows - r : ATTN_ROWS, a, b, unused;

		seen(g, r, &a, &unused);
		seen(g, r + n - 1, &unused, &b);
		a = a > base + first ? a - base : first;
		b = b < base + last + 1 ? b : base + last + 1;
		if (b <= base + a)
			continue;
		a &= ~15u;
		panel(n, k.type,
		      &(struct product){.n_k = dim, .n_vec = (b - base - a + VL - 1) / VL, .a = g->w->q + (size_t)r * dim, .lda = dim,
		                        .b = (const uint8_t *)k.at + size * a, .ldb = APR_KV_PAGE,
		                        .c = g->w->s + (size_t)r * APR_KV_SEGMENT + base + a, .ldc = APR_KV_SEGMENT},
		      false);
	}
}

/* Scores to weights; m and l of the row. Lanes outside [a, b) of the vectors touched become 0. */
VEC void seg_soft_max(const struct seg *g, uint32_t r, uint32_t a, uint32_t b)
{
	static const int32_t lane[VL] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
	float *s = g->w->s + (size_t)r * APR_KV_SEGMENT, cap = g->op->softcap;
	vf factor = vf_set1(cap != 0.0f ? g->op->scale / cap : g->op->scale * APR_LOG2E), capped = vf_set1(cap * APR_LOG2E);
	vf top = vf_set1(-INFINITY), sum = vf_set1(0.0f), m;
	vi lanes = vi_load(lane);
	uint32_t i;

	for (i = a & ~15u; i < b; i += VL) {
		vi at = vi_add(lanes, vi_set1((int32_t)i));
		vm in = vm_and(vi_gt(at, vi_set1((int32_t)a - 1)), vi_gt(vi_set1((int32_t)b), at));
		vf u = vf_mul(vf_load(s + i), factor);

		if (cap != 0.0f)
			u = vf_mul(vf_tanh(u), capped);
		u = vf_select(in, u, vf_set1(-INFINITY));
		vf_store(s + i, u);
		top = vf_max(top, u);
	}
	m = vf_set1(vf_hmax(top));
	for (i = a & ~15u; i < b; i += VL) {
		vf p = vf_exp2(vf_sub(vf_load(s + i), m));

		sum = vf_add(sum, p);
		vf_store(s + i, p);
	}
	g->w->ml[4 * (size_t)r] = vf_hmax(top);
	g->w->ml[4 * (size_t)r + 1] = vf_sum(sum);
}

/* o of n rows from r on += weights · V, keys from … to - 1 of the block */
static void add_values(const struct seg *g, uint32_t block, uint32_t r, uint32_t n, uint32_t from, uint32_t to,
                       const struct operand *v)
{
	uint32_t ldv = apr_attn_ldv(g->op->v_dim);
	size_t size = v->type == APR_KV_F32 ? 4 : 2;

	if (from < to)
		panel(n, v->type,
		      &(struct product){.n_k = to - from, .n_vec = ldv / VL,
		                        .a = g->w->s + (size_t)r * APR_KV_SEGMENT + block * APR_KV_PAGE + from, .lda = APR_KV_SEGMENT,
		                        .b = (const uint8_t *)v->at + size * ldv * from, .ldb = ldv, .c = g->w->o + (size_t)r * ldv, .ldc = ldv},
		      true);
}

/* The same over the keys of this block that each row sees */
static void seg_values(const struct seg *g, uint32_t block, uint32_t r, uint32_t n, const struct operand *v)
{
	uint32_t base = block * APR_KV_PAGE, i, a[ATTN_ROWS] = {0}, b[ATTN_ROWS] = {0}, from, to;

	for (i = 0; i < n; i++) {
		seen(g, r + i, &a[i], &b[i]);
		a[i] = a[i] > base ? a[i] - base : 0;
		b[i] = b[i] > base ? b[i] - base : 0;
		b[i] = b[i] < APR_KV_PAGE ? b[i] : APR_KV_PAGE;
	}
	from = a[n - 1]; /* later rows begin and end no earlier */
	to = b[0];
	if (from >= to) { /* no key that all of them see */
		for (i = 0; i < n; i++)
			add_values(g, block, r + i, 1, a[i], b[i], v);
		return;
	}
	for (i = 0; i < n; i++)
		add_values(g, block, r + i, 1, a[i], from, v);
	add_values(g, block, r, n, from, to, v);
	for (i = 0; i < n; i++)
		add_values(g, block, r + i, 1, to, b[i], v);
}

/* m, l of each row that sees a key of the segment, and its o; the others get m = -inf and l = 0. */
static void seg_run(const struct seg *g)
{
	uint32_t ldv = apr_attn_ldv(g->op->v_dim), a, b, unused, block, r;

	seen(g, 0, &a, &unused);
	seen(g, g->rows - 1, &unused, &b);
	for (block = a / APR_KV_PAGE; block * APR_KV_PAGE < b; block++) {
		uint32_t base = block * APR_KV_PAGE, end = b - base < APR_KV_PAGE ? b - base : APR_KV_PAGE;

		seg_scores(g, block, a > base ? a - base : 0, end - 1);
	}
	for (r = 0; r < g->rows; r++) {
		uint32_t lo, hi;

		seen(g, r, &lo, &hi);
		g->w->ml[4 * (size_t)r] = -INFINITY;
		g->w->ml[4 * (size_t)r + 1] = 0.0f;
		if (lo < hi)
			seg_soft_max(g, r, lo, hi);
	}
	memset(g->w->o, 0, (size_t)g->rows * ldv * sizeof(float));
	for (block = a / APR_KV_PAGE; block * APR_KV_PAGE < b; block++) {
		uint32_t base = block * APR_KV_PAGE, end = b - base < APR_KV_PAGE ? b - base : APR_KV_PAGE;
		struct operand v = block_v(g->op->kv.group->type, kv_block(g, block, true), g->op->v_dim, a > base ? a - base : 0,
		                           end - 1, g->few, g->w);

		for (r = 0; r < g->rows; r += ATTN_ROWS)
			seg_values(g, block, r, g->rows - r < ATTN_ROWS ? g->rows - r : ATTN_ROWS, &v);
	}
}

/* (M, L, O) of one row and head takes in (m, l, o); n floats of o, in whole vectors */
VEC void merge(float *total_ml, float *total, float m, float l, const float *o, uint32_t n, bool first)
{
	float big = total_ml[0] > m ? total_ml[0] : m, fa, fb;
	uint32_t i;

	if (first) {
		total_ml[0] = m;
		total_ml[1] = l;
		memcpy(total, o, n * sizeof(*o));
		return;
	}
	fa = apr_exp2(total_ml[0] - big);
	fb = apr_exp2(m - big);
	total_ml[0] = big;
	total_ml[1] = fmaf(total_ml[1], fa, l * fb);
	for (i = 0; i < n; i += VL)
		vf_store_upto(total + i, n - i,
		              vf_fma(vf_load_upto(total + i, n - i), vf_set1(fa), vf_mul(vf_load_upto(o + i, n - i), vf_set1(fb))));
}

VEC void divide(const float *total, float l, float *o, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i += VL)
		vf_store_upto(o + i, n - i, vf_div(vf_load_upto(total + i, n - i), vf_set1(l)));
}

/* A segment's results to their place among the partial ones. */
static void seg_leave(const struct seg *g, uint32_t index, float *part)
{
	uint32_t v_dim = g->op->v_dim, ldv = apr_attn_ldv(v_dim), r;
	size_t head = v_dim + APR_ATTN_PART_HEAD, pair = head * g->op->n_heads;

	for (r = 0; r < g->rows; r++) {
		size_t at = (size_t)g->tile->part + (size_t)(r / g->group) * g->tile->n_segs + index;
		float *p = part + at * pair + (g->kvh * g->group + r % g->group) * head;

		memcpy(p, g->w->ml + 4 * (size_t)r, APR_ATTN_PART_HEAD * sizeof(*p));
		memcpy(p + APR_ATTN_PART_HEAD, g->w->o + (size_t)r * ldv, v_dim * sizeof(*p));
	}
}

/* L = 0 marks a row that has seen nothing yet: a key seen gives l >= 1 or NaN. */
static void seg_merge(const struct seg *g, bool first)
{
	uint32_t ldv = apr_attn_ldv(g->op->v_dim), r;

	for (r = 0; r < g->rows; r++) {
		float *ml = g->w->ml + 4 * (size_t)r;

		if (first)
			ml[3] = 0.0f;
		if (ml[1] != 0.0f)
			merge(ml + 2, g->w->total + (size_t)r * ldv, ml[0], ml[1], g->w->o + (size_t)r * ldv, ldv, ml[3] == 0.0f);
	}
}

static void attn_tile(const struct apr_op_attn *op, const struct apr_attn_tile *tile, uint32_t kvh, uint32_t seg,
                      uint32_t seg_end, struct apr_attn_work *w, float *part)
{
	struct seg g = {.op = op, .tile = tile, .w = w, .kvh = kvh, .group = op->n_heads / op->n_kv_heads};
	uint32_t ldv = apr_attn_ldv(op->v_dim), i, r;
	size_t q_row = (size_t)op->n_heads * op->k_dim, q_group = (size_t)g.group * op->k_dim;

	g.rows = tile->n * g.group;
	g.few = g.rows <= 8;
	for (i = 0; i < tile->n; i++)
		memcpy(w->q + i * q_group, op->q + (tile->row + i) * q_row + kvh * q_group, q_group * sizeof(float));
	for (i = seg; i < seg_end; i++) {
		g.start = (tile->seg + i) * APR_KV_SEGMENT;
		seg_run(&g);
		if (part)
			seg_leave(&g, i, part);
		else
			seg_merge(&g, i == seg);
	}
	for (r = 0; !part && r < g.rows; r++)
		divide(w->total + (size_t)r * ldv, w->ml[4 * (size_t)r + 3],
		       op->o + ((size_t)(tile->row + r / g.group) * op->n_heads + kvh * g.group + r % g.group) * op->v_dim, op->v_dim);
}

static void attn_merge(const float *part, size_t stride, uint32_t n_segs, uint32_t v_dim, float *o)
{
	float ml[2] = {0.0f, 0.0f};
	uint32_t i;

	for (i = 0; i < n_segs; i++, part += stride)
		if (part[1] != 0.0f)
			merge(ml, o, part[0], part[1], part + APR_ATTN_PART_HEAD, v_dim, ml[1] == 0.0f);
	divide(o, ml[1], o, v_dim);
}
