/* SPDX-License-Identifier: MIT */
/*
 * A library to be preloaded: one call of one call stack fails.
 *
 * Owns: counting calls by kind and by who made them, failing the one that was asked for, counting what lives on the
 * heap. Does not own what must come of it (tests/fault/test_fault.c).
 *
 *   APR_FAULT_TRACE=FILE   a line for each new stack: kind, stack, frames; at each call the stack's count goes up in
 *                          the shared table FILE.counts
 *   APR_FAULT_FAIL=KIND:STACK:N:MARK   call N (from 1) of that stack fails, once over all processes: MARK is made then
 *   APR_FAULT_HEAP=FILE    a table of live bytes by process, kept while they run
 *
 * A stack is its return addresses, each relative to the file it lies in, so it is the same in every run.
 */
#undef _FORTIFY_SOURCE /* its inline read, recv and others would be defined before ours */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/fault/inject.h"

#define EXPORT __attribute__((visibility("default")))
#define DEPTH 10
#define SKIPPED 2 /* frames of this file */

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t each);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t align, size_t n);
void __libc_free(void *p);

static struct {
	bool on;
	int trace; /* -1 = none */
	struct fault_counts *counts;
	struct fault_heap *heap;
	char kind[48], mark[256];
	uint64_t stack, n;
	struct {
		uintptr_t from, to, base;
		uint64_t name;
	} file[64];
	int n_files;
} inject = { .trace = -1 };

static __thread bool inside __attribute__((tls_model("initial-exec")));

static uint64_t mix(uint64_t h, uint64_t v)
{
	h ^= v + UINT64_C(0x9e3779b97f4a7c15) + (h << 6) + (h >> 2);
	return h * UINT64_C(0xff51afd7ed558ccd);
}

static int each_file(struct dl_phdr_info *info, size_t size, void *arg)
{
	uint64_t name = 0;

	(void)size;
	(void)arg;
	for (const char *p = info->dlpi_name; *p; p++)
		name = *p == '/' ? 0 : mix(name, (uint64_t)*p);
	for (int i = 0; i < info->dlpi_phnum && inject.n_files < 64; i++) {
		const ElfW(Phdr) *h = &info->dlpi_phdr[i];
		if (h->p_type != PT_LOAD || !(h->p_flags & PF_X))
			continue;
		uintptr_t at = info->dlpi_addr + h->p_vaddr;
		inject.file[inject.n_files].from = at;
		inject.file[inject.n_files].to = at + h->p_memsz;
		inject.file[inject.n_files].base = info->dlpi_addr;
		inject.file[inject.n_files++].name = name;
	}
	return 0;
}

static void *shared(const char *path, size_t len)
{
	int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
	void *p = fd < 0 ? MAP_FAILED : (void *)syscall(SYS_mmap, NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (fd >= 0)
		syscall(SYS_close, fd);
	return p == MAP_FAILED ? NULL : p;
}

static void ask_to_fail(const char *ask)
{
	unsigned long long stack, n;

	if (sscanf(ask, "%47[^:]:%llx:%llu:%255s", inject.kind, &stack, &n, inject.mark) != 4)
		abort();
	inject.stack = stack;
	inject.n = n;
	inject.on = true;
}

__attribute__((constructor)) static void begin(void)
{
	const char *trace = getenv("APR_FAULT_TRACE"), *fail = getenv("APR_FAULT_FAIL"), *heap = getenv("APR_FAULT_HEAP");
	void *warm[4];
	char counts[512];

	inside = true;
	backtrace(warm, 4); /* loads what it needs, which allocates */
	dl_iterate_phdr(each_file, NULL);
	if (trace) {
		inject.trace = (int)syscall(SYS_openat, AT_FDCWD, trace, O_WRONLY | O_APPEND | O_CLOEXEC);
		snprintf(counts, sizeof(counts), "%s.counts", trace);
		inject.counts = shared(counts, sizeof(*inject.counts));
		inject.on = inject.counts != NULL;
	}
	if (heap)
		inject.heap = shared(heap, sizeof(*inject.heap));
	if (fail) {
		if (!inject.counts) /* this run's own */
			inject.counts = (void *)syscall(SYS_mmap, NULL, sizeof(*inject.counts), PROT_READ | PROT_WRITE,
							MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		ask_to_fail(fail);
	}
	inside = false;
}

/* ---- counting ---------------------------------------------------------------------------- */

static uint64_t stack_of(const char *kind, void **frames, int n, char *words, size_t len)
{
	uint64_t h = 0;
	size_t at = 0;

	for (const char *p = kind; *p; p++)
		h = mix(h, (uint64_t)*p);
	for (int i = SKIPPED; i < n; i++) {
		uintptr_t pc = (uintptr_t)frames[i];
		for (int k = 0; k < inject.n_files; k++) {
			if (pc < inject.file[k].from || pc >= inject.file[k].to)
				continue;
			h = mix(mix(h, inject.file[k].name), pc - inject.file[k].base);
			if (words && at < len)
				at += (size_t)snprintf(words + at, len - at, " %s%lx", k ? "lib+" : "",
						       (unsigned long)(pc - inject.file[k].base));
			break;
		}
	}
	return h ? h : 1;
}

/* Its row, made where there is none. NULL: the table is full. */
static struct fault_row *row_of(uint64_t stack, bool *is_new)
{
	for (uint32_t i = 0; i < FAULT_ROWS; i++) {
		struct fault_row *r = &inject.counts->row[(stack + i) % FAULT_ROWS];
		uint64_t none = 0;
		/* pairs with itself in another thread or process: one of them makes the row */
		if (__atomic_compare_exchange_n(&r->stack, &none, stack, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
			*is_new = true;
			return r;
		}
		if (none == stack)
			return r;
	}
	return NULL;
}

/* True: this call is to fail. */
static __attribute__((noinline)) bool fails(const char *kind)
{
	void *frames[DEPTH + SKIPPED];
	char words[400];
	bool is_new = false, fail = false;

	if (!inject.on || inside)
		return false;
	if (inject.trace < 0 && strcmp(kind, inject.kind) != 0)
		return false;
	inside = true;
	int n = backtrace(frames, DEPTH + SKIPPED);
	uint64_t stack = stack_of(kind, frames, n, NULL, 0);
	if (inject.trace >= 0 || stack == inject.stack) {
		struct fault_row *r = row_of(stack, &is_new);
		uint64_t count = r ? __atomic_add_fetch(&r->n, 1, __ATOMIC_RELAXED) : 0;
		if (is_new && inject.trace >= 0) {
			char line[512];
			stack_of(kind, frames, n, words, sizeof(words));
			int len = snprintf(line, sizeof(line), "%s %llx%s\n", kind, (unsigned long long)stack, words);
			(void)!syscall(SYS_write, inject.trace, line, (size_t)len);
		}
		if (stack == inject.stack && count == inject.n && !strcmp(kind, inject.kind)) {
			long fd = syscall(SYS_openat, AT_FDCWD, inject.mark, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
			fail = fd >= 0;
			if (fail)
				syscall(SYS_close, fd);
		}
	}
	inside = false;
	return fail;
}

/* ---- the heap ------------------------------------------------------------------------------ */

static void *live(void *p)
{
	if (p && inject.heap) {
		struct fault_heap_row *r = &inject.heap->row[(unsigned)getpid() % FAULT_PROCESSES];
		__atomic_store_n(&r->pid, getpid(), __ATOMIC_RELAXED);
		__atomic_fetch_add(&r->bytes, (int64_t)malloc_usable_size(p), __ATOMIC_RELAXED);
		__atomic_fetch_add(&r->blocks, 1, __ATOMIC_RELAXED);
	}
	return p;
}

static void dead(void *p)
{
	if (p && inject.heap) {
		struct fault_heap_row *r = &inject.heap->row[(unsigned)getpid() % FAULT_PROCESSES];
		__atomic_fetch_sub(&r->bytes, (int64_t)malloc_usable_size(p), __ATOMIC_RELAXED);
		__atomic_fetch_sub(&r->blocks, 1, __ATOMIC_RELAXED);
	}
}

EXPORT void *malloc(size_t n)
{
	if (fails("malloc")) {
		errno = ENOMEM;
		return NULL;
	}
	return live(__libc_malloc(n));
}

EXPORT void *calloc(size_t n, size_t each)
{
	if (fails("calloc")) {
		errno = ENOMEM;
		return NULL;
	}
	return live(__libc_calloc(n, each));
}

EXPORT void *realloc(void *p, size_t n)
{
	if (fails("realloc")) {
		errno = ENOMEM;
		return NULL;
	}
	dead(p);
	void *q = __libc_realloc(p, n);
	if (!q && n)
		live(p);
	return live(q);
}

EXPORT void *aligned_alloc(size_t align, size_t n)
{
	if (fails("aligned_alloc")) {
		errno = ENOMEM;
		return NULL;
	}
	return live(__libc_memalign(align, n));
}

EXPORT int posix_memalign(void **out, size_t align, size_t n)
{
	if (fails("posix_memalign"))
		return ENOMEM;
	void *p = live(__libc_memalign(align, n));
	if (!p)
		return ENOMEM;
	*out = p;
	return 0;
}

EXPORT void free(void *p)
{
	dead(p);
	__libc_free(p);
}

/* Past our own syscall(), which counts. */
static long inject_syscall3(long number, long a, long b, long c)
{
	bool was = inside;

	inside = true;
	long r = syscall(number, a, b, c);
	inside = was;
	return r;
}

/* ---- the rest: the next definition, found at its first call ---------------------------------- */

#define FAILS(type, name, params, args, err, failed) \
	EXPORT type name params; \
	EXPORT type name params \
	{ \
		static type(*next) params; \
		if (!next) { \
			bool was = inside; \
			inside = true; \
			next = (type(*) params)dlsym(RTLD_NEXT, #name); \
			inside = was; \
		} \
		if (fails(#name)) { \
			errno = err; \
			return failed; \
		} \
		return next args; \
	}

FAILS(void *, mmap, (void *a, size_t n, int prot, int flags, int fd, off_t off), (a, n, prot, flags, fd, off), ENOMEM,
      MAP_FAILED)
FAILS(int, mprotect, (void *a, size_t n, int prot), (a, n, prot), ENOMEM, -1)
FAILS(int, memfd_create, (const char *name, unsigned flags), (name, flags), EMFILE, -1)
FAILS(int, fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n), ENOSPC, -1)
FAILS(int, fchmod, (int fd, mode_t mode), (fd, mode), EPERM, -1)
FAILS(int, chmod, (const char *path, mode_t mode), (path, mode), EPERM, -1)
FAILS(int, eventfd, (unsigned v, int flags), (v, flags), EMFILE, -1)
FAILS(int, signalfd, (int fd, const void *set, int flags), (fd, set, flags), EMFILE, -1)
FAILS(int, epoll_create1, (int flags), (flags), EMFILE, -1)
FAILS(int, epoll_ctl, (int e, int op, int fd, void *ev), (e, op, fd, ev), op == 2 ? ENOENT : ENOSPC, -1)
FAILS(int, socket, (int d, int t, int p), (d, t, p), EMFILE, -1)
FAILS(int, socketpair, (int d, int t, int p, int sv[2]), (d, t, p, sv), EMFILE, -1)
FAILS(int, bind, (int fd, const struct sockaddr *a, socklen_t n), (fd, a, n), EADDRINUSE, -1)
FAILS(int, listen, (int fd, int n), (fd, n), EADDRINUSE, -1)
FAILS(int, connect, (int fd, const struct sockaddr *a, socklen_t n), (fd, a, n), ECONNREFUSED, -1)
FAILS(int, accept4, (int fd, struct sockaddr *a, socklen_t *n, int flags), (fd, a, n, flags), EMFILE, -1)
FAILS(int, setsockopt, (int fd, int l, int o, const void *v, socklen_t n), (fd, l, o, v, n), ENOMEM, -1)
FAILS(int, getsockopt, (int fd, int l, int o, void *v, socklen_t *n), (fd, l, o, v, n), ENOMEM, -1)
FAILS(ssize_t, send, (int fd, const void *b, size_t n, int flags), (fd, b, n, flags), ENOBUFS, -1)
FAILS(ssize_t, sendto, (int fd, const void *b, size_t n, int flags, const struct sockaddr *a, socklen_t l),
      (fd, b, n, flags, a, l), ENOBUFS, -1)
FAILS(ssize_t, sendmsg, (int fd, const struct msghdr *m, int flags), (fd, m, flags), ENOBUFS, -1)
FAILS(ssize_t, recv, (int fd, void *b, size_t n, int flags), (fd, b, n, flags), ENOMEM, -1)
FAILS(ssize_t, recvmsg, (int fd, struct msghdr *m, int flags), (fd, m, flags), ENOMEM, -1)
FAILS(ssize_t, read, (int fd, void *b, size_t n), (fd, b, n), EIO, -1)
FAILS(ssize_t, pread, (int fd, void *b, size_t n, off_t at), (fd, b, n, at), EIO, -1)
FAILS(int, fstat, (int fd, struct stat *st), (fd, st), EIO, -1)
FAILS(int, lstat, (const char *path, struct stat *st), (path, st), EIO, -1)
FAILS(int, fsync, (int fd), (fd), EIO, -1)
FAILS(int, rename, (const char *a, const char *b), (a, b), EIO, -1)
FAILS(int, mkdir, (const char *path, mode_t mode), (path, mode), ENOSPC, -1)
FAILS(int, unlink, (const char *path), (path), EACCES, -1)
FAILS(int, flock, (int fd, int op), (fd, op), ENOLCK, -1)
FAILS(FILE *, fopen, (const char *path, const char *mode), (path, mode), EMFILE, NULL)
FAILS(pid_t, fork, (void), (), EAGAIN, -1)
FAILS(int, getrlimit, (int what, void *r), (what, r), EPERM, -1)
FAILS(int, setrlimit, (int what, const void *r), (what, r), EPERM, -1)
FAILS(ssize_t, getrandom, (void *b, size_t n, unsigned flags), (b, n, flags), ENOSYS, -1)
FAILS(int, pthread_create, (pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *arg), (t, a, fn, arg), 0,
      EAGAIN)
FAILS(int, pthread_mutex_init, (pthread_mutex_t *m, const pthread_mutexattr_t *a), (m, a), 0, ENOMEM)
FAILS(int, pthread_cond_init, (pthread_cond_t *c, const pthread_condattr_t *a), (c, a), 0, ENOMEM)
struct io_uring;
FAILS(int, io_uring_queue_init_params, (unsigned n, struct io_uring *r, void *p), (n, r, p), 0, -ENOMEM)
FAILS(int, io_uring_submit, (struct io_uring *r), (r), 0, -EAGAIN)
FAILS(int, io_uring_submit_and_get_events, (struct io_uring *r), (r), 0, -EAGAIN)
FAILS(int, io_uring_submit_and_wait_timeout, (struct io_uring *r, void *cqe, unsigned n, void *ts, void *set),
      (r, cqe, n, ts, set), 0, -EAGAIN)

/* 8 bytes are an eventfd's, whose write cannot fail */
EXPORT ssize_t write(int fd, const void *b, size_t n)
{
	if (n != 8 && fails("write")) {
		errno = ENOSPC;
		return -1;
	}
	return inject_syscall3(SYS_write, fd, (long)b, (long)n);
}

EXPORT int open(const char *path, int flags, ...)
{
	va_list ap;

	va_start(ap, flags);
	mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
	va_end(ap);
	if (fails("open")) {
		errno = EMFILE;
		return -1;
	}
	return openat(AT_FDCWD, path, flags, mode);
}

EXPORT int fcntl(int fd, int cmd, ...)
{
	static int (*next)(int, int, ...);
	va_list ap;

	va_start(ap, cmd);
	void *arg = va_arg(ap, void *);
	va_end(ap);
	if (!next)
		next = (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl");
	if (fails("fcntl")) {
		errno = cmd == F_DUPFD_CLOEXEC ? EMFILE : EPERM;
		return -1;
	}
	return next(fd, cmd, arg);
}

/* The numbers that may be wanted: pidfd_open, io_uring_register; a futex does not fail. */
EXPORT long syscall(long number, ...)
{
	static long (*next)(long, ...);
	va_list ap;
	long a[6];

	va_start(ap, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(ap, long);
	va_end(ap);
	if (!next) {
		bool was = inside;
		inside = true;
		next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
		inside = was;
	}
	if (!inside && ((number == SYS_pidfd_open && fails("pidfd_open")) ||
			(number == SYS_io_uring_register && fails("io_uring_register")))) {
		errno = number == SYS_pidfd_open ? EMFILE : EINVAL;
		return -1;
	}
	return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
