/* SPDX-License-Identifier: MIT */
/* A prompt's attention: error against double; equal bits however rows are cut into tiles, packed beside others, divided over
 * blocks, and wherever their pages lie. */
#include "kernels/cuda/sm90_any_attn_ref.h"
#include "tests/cuda/kv.cuh"

/* ---- attention ---------------------------------------------------------------------------- */

struct prompt { /* rows pos0 … of a sequence */
	uint32_t seq, pos0, rows;
};
struct cut { /* tiles of `most` rows, or below 64 of random numbers up to it; ranges of `range` segments, or whole */
	uint32_t most, range;
};
#define Q_ROWS 509u /* different ones */

struct attn_case {
	const struct shape_heads &h;
	kv_pool kv;
	apr_op_attn op;
	std::vector<float> q;
	step st;
	size_t out;

	attn_case(const struct shape_heads &heads, apr_kv_type type, uint32_t ctx)
		: h(heads), kv(heads, type, ctx, 3, 2, 1), q(random_rows(Q_ROWS, heads.n_heads * heads.k_dim, 9, false)),
		  st(256 * 1024 + (size_t)100 * heads.n_heads * 64 * (heads.v_dim + 2) * 4),
		  out((size_t)heads.n_heads * heads.v_dim)
	{
		op = {NULL,      NULL,     h.n_heads,        h.n_kv, h.k_dim, h.v_dim, 1.0f / sqrtf((float)h.k_dim),
		      h.softcap, h.window, {&kv.group, 1}};
	}
	const float *query(uint32_t seq, uint32_t pos, uint32_t head) const
	{
		return &q[((size_t)(seq * 131 + pos) % Q_ROWS * h.n_heads + head) * h.k_dim];
	}
	bool halves() const
	{
		return kv.type == APR_KV_F16 && h.k_dim == h.v_dim && (h.k_dim == 64 || h.k_dim == 128 || h.k_dim == 256);
	}
	/* A row of op->q as apr_cuda_prefill_heads leaves it */
	void put_row(float *dst, uint32_t seq, uint32_t pos) const
	{
		uint16_t *half = (uint16_t *)dst;
		float *unit = (float *)(half + (size_t)h.n_heads * h.k_dim);

		for (uint32_t n = 0; n < h.n_heads; n++) {
			const float *v = query(seq, pos, n);
			float amax = 0;

			if (!halves()) {
				memcpy(dst + (size_t)n * h.k_dim, v, h.k_dim * 4);
				continue;
			}
			for (uint32_t d = 0; d < h.k_dim; d++)
				amax = fmaxf(amax, fabsf(v[d]));
			unit[n] = ldexpf(1, ilogbf(amax) - 9);
			for (uint32_t d = 0; d < h.k_dim; d++)
				half[n * h.k_dim + d] = apr_half_from_f32(v[d] / unit[n]);
		}
	}
};

/* A tile, or its ranges and one among the divided */
static void add_tile(apr_cuda_attn_tile t, uint32_t range, std::vector<apr_cuda_attn_tile> &tiles,
                     std::vector<apr_cuda_attn_tile> &divided, uint32_t &parts)
{
	uint32_t segs = (t.pos + t.rows - 1) / APR_CUDA_ATTN_SEG + 1;

	t.seg = 0, t.segs = APR_CUDA_ATTN_SEGS, t.part = parts, t.merge = APR_CUDA_WHOLE;
	if (!range || segs <= range || divided.size() == APR_CUDA_ATTN_DIVIDED || parts + segs > 100) {
		tiles.push_back(t);
		return;
	}
	t.merge = (uint32_t)divided.size();
	divided.push_back(t);
	divided.back().seg = (segs + range - 1) / range, divided.back().segs = 0;
	for (t.seg = 0; t.seg < segs; t.seg += range) {
		t.segs = std::min(range, segs - t.seg);
		tiles.push_back(t);
	}
	parts += segs;
}

static std::vector<float> run_attn(attn_case &c, const std::vector<prompt> &prompts, cut how)
{
	std::vector<apr_cuda_attn_tile> tiles, divided;
	std::vector<uint32_t> pos, slot;
	size_t width = (size_t)c.h.n_heads * c.h.k_dim;
	rng r = {how.most};
	uint32_t n = 0, parts = 0;

	for (const prompt &p : prompts) {
		for (uint32_t i = 0, len; i < p.rows; i += len) {
			len = std::min(p.rows - i, how.most == 64 ? 64 : 1 + r.below(how.most));
			add_tile({p.seq, n + i, len, p.pos0 + i, 0, 0, 0, 0}, how.range, tiles, divided, parts);
		}
		for (uint32_t j = 0; j < p.rows; j++) {
			pos.push_back(p.pos0 + j);
			slot.push_back(p.seq);
		}
		n += p.rows;
	}
	for (size_t i = tiles.size() - 1; i > 0; i--)
		std::swap(tiles[i], tiles[r.below((uint32_t)i + 1)]);
	std::vector<uint32_t> count = {(uint32_t)tiles.size(), (uint32_t)divided.size()};
	tiles.insert(tiles.end(), divided.begin(), divided.end());
	std::vector<float> rows(n * width, NAN);
	for (uint32_t i = 0; i < n; i++)
		c.put_row(&rows[i * width], slot[i], pos[i]);
	dbuf<float> dq(rows), o((size_t)n * c.out);
	dbuf<apr_cuda_attn_tile> dt(tiles);
	dbuf<uint32_t> nt(count);
	c.op.q = dq.p, c.op.o = o.p;
	c.st.set(n, n, pos, slot);
	CHECK(apr_cuda_prefill_attn(&c.st.l, &c.op, dt.p, nt.p, (uint32_t)tiles.size() + 5) == 0, "launch");
	return o.get();
}

static double attn_error(attn_case &c, const std::vector<float> &got, uint32_t rows)
{
	std::vector<double> ref(c.h.v_dim);
	double err2 = 0, ref2 = 0;

	for (uint32_t p = 0; p < rows; p += p < 70 ? 23 : 173)
		for (uint32_t n = 0; n < c.h.n_heads; n++) {
			uint32_t kvh = n / (c.h.n_heads / c.h.n_kv);

			apr_ref_attn(c.query(1, p, n), c.kv.key(1, 0, kvh), c.kv.stride_k(), c.kv.value(1, 0, kvh), c.kv.stride_v(), p,
			             c.h.window, c.h.k_dim, c.h.v_dim, c.op.scale, c.h.softcap, ref.data());
			for (uint32_t d = 0; d < c.h.v_dim; d++) {
				err2 += pow(got[p * c.out + n * c.h.v_dim + d] - ref[d], 2);
				ref2 += ref[d] * ref[d];
			}
		}
	return sqrt(err2 / ref2);
}

static size_t rows_differ(const attn_case &c, const float *a, const float *b, uint32_t rows)
{
	size_t bad = 0;

	for (uint32_t i = 0; i < rows; i++)
		bad += !same_bits(a + i * c.out, b + i * c.out, c.out);
	return bad;
}

static void attention(const struct shape_heads &h, apr_kv_type type, uint32_t ctx, bool brief)
{
	const std::vector<uint32_t> cuts = brief ? std::vector<uint32_t>{17, 64} : std::vector<uint32_t>{1, 3, 17, 63, 64};
	attn_case c(h, type, ctx);
	std::vector<float> whole = run_attn(c, {{1, 0, ctx}}, {64, 0});
	double error = attn_error(c, whole, ctx);

	CHECK(error < (type == APR_KV_F16 ? 1e-3 : 1e-5), "prefill heads %u/%u dim %u type %d: rms %.3g", h.n_heads, h.n_kv,
	      h.k_dim, type, error);
	for (uint32_t most : cuts) { /* cut, chunked, packed, moved, divided, on few multiprocessors */
		c.kv.shuffle(most);
		c.st.l.sms = most == 3 ? 5 : device_sms;
		for (uint32_t range = 0; range < (ctx + APR_CUDA_ATTN_SEG - 1) / APR_CUDA_ATTN_SEG; range++) {
			uint32_t n = ctx - 50;
			std::vector<float> o = run_attn(c, {{0, 5, 70}, {1, 37, n}, {2, 0, 129}}, {most, range});
			size_t bad = rows_differ(c, &o[70 * c.out], &whole[37 * c.out], n);

			CHECK(!bad, "prefill heads %u/%u dim %u type %d tiles to %u, ranges of %u: %zu rows differ", h.n_heads, h.n_kv,
			      h.k_dim, type, most, range, bad);
		}
	}
	for (uint32_t n : shape_prefill) {
		if (n > ctx || (brief && n > 65))
			break;
		size_t bad = rows_differ(c, run_attn(c, {{1, 0, n}}, {64, 0}).data(), whole.data(), n);
		CHECK(!bad, "prefill heads %u/%u dim %u type %d: %zu of %u rows differ", h.n_heads, h.n_kv, h.k_dim, type, bad, n);
	}
	if (!h.window)
		return;
	c.st.l.sms = device_sms;
	c.kv.forget(1, (ctx - 300 - h.window + 1) / 64);
	for (uint32_t range = 0; range < 2; range++) {
		size_t bad = rows_differ(c, run_attn(c, {{1, ctx - 300, 300}}, {64, range}).data(), &whole[(ctx - 300) * c.out], 300);
		CHECK(!bad, "prefill heads %u/%u dim %u window %u, pages gone: %zu rows differ", h.n_heads, h.n_kv, h.k_dim, h.window,
		      bad);
	}
}

void check_attn_prefill(void)
{
	for (const struct shape_heads &h : shape_heads)
		attention(h, APR_KV_F16, h.n_kv == 3 || h.n_heads == 28 || h.window == 512 ? 2100 : h.n_heads == 32 ? 1100 : 700,
		          false);
	attention(shape_heads[0], APR_KV_F32, 700, true);
	attention(shape_heads[6], APR_KV_BF16, 700, true);
}

/* As little as shows every path of the warpgroups' kernel: for compute-sanitizer */
void check_attn_prefill_brief(void)
{
	for (uint32_t i : {0u, 1u, 4u, 6u})
		attention(shape_heads[i], APR_KV_F16, i == 6 ? 450 : 1100, true);
}
