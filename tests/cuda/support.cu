/* SPDX-License-Identifier: MIT */
/* What the checks share: see support.cuh. */
#include "tests/cuda/support.cuh"

unsigned n_checks, n_failed;
cudaStream_t stream;
uint32_t device_sms;
bool few;

/* A 16-bit scale at byte `at` of a block, of moderate size */
static void put_half(uint8_t *b, uint32_t at, float v)
{
	uint16_t h = apr_half_from_f32(v);

	b[at] = (uint8_t)h;
	b[at + 1] = (uint8_t)(h >> 8);
}

std::vector<uint8_t> random_blocks(uint32_t type, uint32_t n_in, uint32_t n_out, uint64_t seed)
{
	std::vector<uint8_t> v(file_row_bytes(type, n_in) * n_out);
	rng r = {seed};
	size_t size = block_size(type);

	for (size_t i = 0; i < v.size(); i++)
		v[i] = (uint8_t)(r.u32() >> 13);
	for (size_t i = 0; i < v.size(); i += size) {
		uint8_t *b = &v[i];
		float d = (0.5f + r.unit()) * 0.01f, x = r.normal() * 0.05f;
		uint32_t u;

		switch (type) {
		case APR_TYPE_F32: memcpy(b, &x, 4); break;
		case APR_TYPE_F16: put_half(b, 0, x); break;
		case APR_TYPE_BF16:
			u = apr_bfloat_from_f32(x);
			b[0] = (uint8_t)u, b[1] = (uint8_t)(u >> 8);
			break;
		case APR_TYPE_Q4_1:
		case APR_TYPE_Q5_1:
			put_half(b, 0, d);
			put_half(b, 2, -d * 7 * r.unit());
			break;
		case APR_TYPE_Q4_0:
		case APR_TYPE_Q5_0:
		case APR_TYPE_Q8_0: put_half(b, 0, r.u32() & 1 ? d : -d); break;
		case APR_TYPE_Q2_K:
			put_half(b, 80, d / 8);
			put_half(b, 82, d / 8);
			break;
		case APR_TYPE_Q3_K: put_half(b, 108, d / 16); break;
		case APR_TYPE_Q6_K: put_half(b, 208, d / 64); break;
		default:
			put_half(b, 0, d / 32);
			put_half(b, 2, d / 8);
			break;
		}
	}
	return v;
}

/* Rows of normal values; planted: a few channels a thousand times larger, a few rows tiny or zero */
std::vector<float> random_rows(uint32_t rows, uint32_t n, uint64_t seed, bool planted)
{
	std::vector<float> v((size_t)rows * n);
	rng r = {seed};

	for (uint32_t i = 0; i < rows; i++)
		for (uint32_t k = 0; k < n; k++) {
			float f = r.normal();

			if (planted && k % 97 == 5)
				f *= 1000;
			if (planted && i % 7 == 3)
				f *= 1e-6f;
			if (planted && i % 7 == 5)
				f *= 300;
			v[(size_t)i * n + k] = f;
		}
	return v;
}

weight::weight(uint32_t t, uint32_t n_in, uint32_t n_out, uint64_t seed, uint32_t order, uint32_t dim, uint32_t half)
	: a(random_blocks(t, n_in, order == APR_ORDER_GATE_UP ? n_out / 2 : n_out, seed)),
	  b(order == APR_ORDER_GATE_UP ? random_blocks(t, n_in, n_out / 2, seed + 77) : std::vector<uint8_t>()), type(t),
	  raw_a(a), raw_b(b), tiles(apr_cuda_tile_bytes(apr_cuda_tile_of(t), n_in, n_out))
{
	memset(&m, 0, sizeof m);
	m.type = t, m.tile = apr_cuda_tile_of(t), m.n_in = n_in, m.n_out = n_out, m.order = order, m.dim = dim,
	m.half = half;
	m.tiles = tiles.p;
	CHECK(tiles.n > 0 && apr_cuda_repack(stream, &m, raw_a.p, b.empty() ? NULL : raw_b.p, tiles.p) == 0,
	      "repack %u %u %u", t, n_in, n_out);
}

step::step(size_t bytes) : n(1), n_out(1), pos(4096), slot(4096), out(4096), tok(4096), scratch(bytes)
{
	CUDA(cudaMemset(scratch.p, 0, 256 * 1024)); /* counters; the rest keeps its NaN */
	CUDA(cudaDeviceSynchronize());
	l = {};
	l.stream = stream;
	l.rows = {n.p, n_out.p, tok.p, pos.p, slot.p, out.p};
	l.sms = device_sms;
	l.pdl = true;
	l.scratch = scratch.p;
	l.scratch_bytes = bytes;
	l.bucket = 1;
}
void step::set(uint32_t bucket, uint32_t live, const std::vector<uint32_t> &p, const std::vector<uint32_t> &s)
{
	CUDA(cudaDeviceSynchronize());
	n.put({live});
	n_out.put({live});
	pos.put(p);
	slot.put(s);
	std::vector<uint32_t> o(live);
	for (uint32_t i = 0; i < live; i++)
		o[i] = i;
	if (live)
		out.put(o);
	l.bucket = bucket;
}

bool same_bits(const float *a, const float *b, size_t n)
{
	return memcmp(a, b, n * sizeof(float)) == 0;
}
