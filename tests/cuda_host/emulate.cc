/* SPDX-License-Identifier: MIT */
/*
 * The fibers behind emulate.h, and the runtime calls that the checks make: device
 * memory is host memory.
 */
#include "tests/cuda_host/emulate.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <map>
#include <vector>

#define STACK (64u * 1024u)

emu_place emu;

namespace {

struct copy { /* asked for, not there yet */
	uint8_t *dst;
	const void *src;
	uint32_t bytes;
};
struct meeting { /* where so many have to come before any goes on */
	uint64_t round = 0;
	unsigned here = 0, all = 0;
};
struct warp {
	meeting m;
	alignas(16) uint8_t in[2][32][64]; /* used in turn: the next round begins when all have read */
};
struct mbar {
	uint32_t phase = 0, expected = 0, come = 0;
	bool armed = false;
	std::vector<copy> copies;
};
struct block {
	uint3 at;
	meeting m;
	std::vector<warp> warps;
	std::vector<uint8_t> shared;
	uint8_t *base = NULL;
	std::map<uint8_t *, mbar> bars;
};
struct fiber {
	void *sp = NULL;
	uint8_t *stack = NULL;
	uint3 thread;
	block *b = NULL;
	bool done = false;
	const uint64_t *round = NULL; /* waits until this is no longer `seen` */
	uint64_t seen = 0;
	std::vector<std::vector<copy>> groups; /* of cp.async, the last one open */
};

std::vector<fiber> fibers;
std::vector<block> blocks;
meeting cluster;
size_t now, live;
void *home;
const std::function<void(void)> *body;
dim3 grid_size, block_dim;

/* Keeps the callee's registers and the stack of who calls, goes on with another's */
extern "C" void emu_switch(void **save, void *load);
#if defined(__x86_64__)
asm(".text\n.globl emu_switch\nemu_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
#else
#error "fibers are written for x86-64"
#endif

void set_place(const fiber &f)
{
	emu.thread = f.thread;
	emu.block = f.b->at;
	emu.block_size = block_dim;
	emu.grid = grid_size;
}
/* To the next fiber that can go on */
void go_on(void)
{
	const size_t from = now;

	for (size_t i = 1; i <= fibers.size(); i++) {
		size_t n = (from + i) % fibers.size();
		fiber &f = fibers[n];

		if (f.done || (f.round && *f.round == f.seen))
			continue;
		f.round = NULL;
		now = n;
		set_place(f);
		if (n != from)
			emu_switch(&fibers[from].sp, f.sp);
		return;
	}
	fprintf(stderr, "emulate: every thread of block %u %u %u waits\n", emu.block.x, emu.block.y, emu.block.z);
	abort();
}
void meet(meeting &m)
{
	if (++m.here == m.all) {
		m.here = 0;
		m.round++;
		return;
	}
	fiber &f = fibers[now];

	f.round = &m.round;
	f.seen = m.round;
	go_on();
}
void bring(const copy &c)
{
	if (c.src)
		memcpy(c.dst, c.src, c.bytes);
	else
		memset(c.dst, 0, c.bytes);
}
[[noreturn]] void first(void)
{
	(*body)();
	fiber &f = fibers[now];

	for (const std::vector<copy> &g : f.groups)
		for (const copy &c : g)
			bring(c);
	f.groups.clear();
	f.done = true;
	/* who has ended is not waited for */
	f.b->m.all--;
	if (f.b->m.all && f.b->m.here == f.b->m.all) {
		f.b->m.here = 0;
		f.b->m.round++;
	}
	void *lost;

	if (!--live)
		emu_switch(&lost, home);
	go_on();
	abort();
}
void start(fiber &f, block *b, unsigned t)
{
	if (!f.stack) {
		f.stack = (uint8_t *)mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (f.stack == MAP_FAILED)
			abort();
	}
	void **sp = (void **)(f.stack + STACK) - 2;

	*sp-- = (void *)first; /* the return of its first switch; entered as by a call */
	for (int i = 0; i < 6; i++)
		*sp-- = NULL;
	f.sp = sp + 1;
	f.thread = {t, 0, 0};
	f.b = b;
	f.done = false;
	f.round = NULL;
	f.groups.assign(1, {});
}
void run_together(unsigned threads, size_t smem, unsigned n)
{
	if (blocks.size() < n)
		blocks.resize(n);
	if (fibers.size() != (size_t)n * threads)
		fibers.resize((size_t)n * threads);
	cluster = meeting();
	cluster.all = n * threads;
	for (unsigned i = 0; i < n; i++) {
		block &b = blocks[i];

		b.shared.assign(smem + 256, 0xff);
		b.base = (uint8_t *)(((uintptr_t)b.shared.data() + 127) & ~(uintptr_t)127);
		b.warps.assign(threads / 32, warp());
		for (warp &w : b.warps)
			w.m.all = 32;
		b.bars.clear();
		b.m = meeting();
		b.m.all = threads;
		for (unsigned t = 0; t < threads; t++)
			start(fibers[(size_t)i * threads + t], &b, t);
	}
	live = fibers.size();
	now = 0;
	set_place(fibers[0]);
	emu_switch(&home, fibers[0].sp);
}

} // namespace

void emu_run(dim3 grid, unsigned threads, size_t smem, unsigned together, const std::function<void(void)> &kernel)
{
	body = &kernel;
	grid_size = grid;
	block_dim = dim3(threads);
	for (unsigned z = 0; z < grid.z; z++)
		for (unsigned y = 0; y < grid.y; y++)
			for (unsigned x = 0; x < grid.x; x += together) {
				if (blocks.size() < together)
					blocks.resize(together);
				for (unsigned i = 0; i < together; i++)
					blocks[i].at = {x + i, y, z};
				run_together(threads, smem, together);
			}
}
uint8_t *emu_shared(void)
{
	return fibers[now].b->base;
}
uint8_t *emu_shared_of(unsigned rank)
{
	return blocks[rank].base;
}
unsigned emu_cluster_rank(void)
{
	return (unsigned)(fibers[now].b - blocks.data());
}
void emu_block_sync(void)
{
	meet(fibers[now].b->m);
}
void emu_cluster_sync(void)
{
	meet(cluster);
}
const void *emu_warp(const void *v, size_t bytes)
{
	static uint8_t all[32 * 64];
	warp &w = fibers[now].b->warps[emu.thread.x / 32];
	const unsigned side = w.m.round & 1;

	if (bytes > 64)
		abort();
	memcpy(w.in[side][emu.thread.x & 31], v, bytes);
	meet(w.m);
	for (unsigned i = 0; i < 32; i++)
		memcpy(all + i * bytes, w.in[side][i], bytes);
	return all;
}
void emu_yield(void)
{
	go_on();
}

/* ---- copies ---------------------------------------------------------------------------- */

void emu_mbar_init(uint8_t *bar)
{
	fibers[now].b->bars[bar] = mbar();
}
void emu_mbar_expect(uint8_t *bar, uint32_t bytes)
{
	mbar &m = fibers[now].b->bars.at(bar);

	if (m.armed)
		abort(); /* asked for again before it was waited for */
	m.armed = true;
	m.expected += bytes;
}
void emu_bulk(uint8_t *dst, const void *src, uint32_t bytes, uint8_t *bar)
{
	if (((uintptr_t)src | (uintptr_t)(dst - emu_shared()) | bytes) & 15)
		abort();
	memset(dst, 0xff, bytes);
	fibers[now].b->bars.at(bar).copies.push_back({dst, src, bytes});
}
void emu_mbar_wait(uint8_t *bar, uint32_t parity)
{
	for (;;) {
		mbar &m = fibers[now].b->bars.at(bar);

		if ((m.phase & 1) != parity)
			return;
		for (const copy &c : m.copies) {
			bring(c);
			m.come += c.bytes;
		}
		m.copies.clear();
		if (m.armed && m.come == m.expected) {
			m.armed = false;
			m.come = m.expected = 0;
			m.phase++;
			continue;
		}
		emu_yield();
	}
}
void emu_cp_async(uint8_t *dst, const void *src, bool on)
{
	memset(dst, 0xff, 16);
	fibers[now].groups.back().push_back({dst, on ? src : NULL, 16});
}
void emu_cp_commit(void)
{
	fibers[now].groups.push_back({});
}
void emu_cp_wait(unsigned n)
{
	std::vector<std::vector<copy>> &g = fibers[now].groups; /* the last is open: not committed */

	while (g.size() - 1 > n) {
		for (const copy &c : g.front())
			bring(c);
		g.erase(g.begin());
	}
}

/* ---- the runtime ------------------------------------------------------------------------- */

extern "C" {
cudaError_t cudaMalloc(void **p, size_t n)
{
	*p = aligned_alloc(256, (n + 255) & ~(size_t)255);
	return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *p)
{
	free(p);
	return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int byte, size_t n)
{
	memset(p, byte, n);
	return cudaSuccess;
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, cudaMemcpyKind)
{
	memcpy(dst, src, n);
	return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void)
{
	return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t)
{
	return "an error";
}
cudaError_t cudaGetLastError(void)
{
	return cudaSuccess;
}
}
