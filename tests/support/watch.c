/* SPDX-License-Identifier: MIT */
/* The asking side of a watch: see watch.h. */
#include "tests/support/watch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

int watch_open(struct watch *w, const char *dir, const char *library)
{
	int fd, e = 0;

	w->page = NULL;
	snprintf(w->path, sizeof w->path, "%s/watch.%d", dir, (int)getpid());
	fd = open(w->path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	if (ftruncate(fd, sizeof *w->page))
		e = -errno;
	w->page = e ? MAP_FAILED : mmap(NULL, sizeof *w->page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (w->page == MAP_FAILED) {
		e = e ? e : -errno;
		w->page = NULL;
	}
	close(fd);
	if (!e && (setenv(WATCH_ENV, w->path, 1) || setenv("CUDA_INJECTION64_PATH", library, 1)))
		e = -ENOMEM;
	return e;
}

void watch_close(struct watch *w)
{
	if (w->page)
		munmap(w->page, sizeof *w->page);
	w->page = NULL;
	unlink(w->path);
	unsetenv(WATCH_ENV);
	unsetenv("CUDA_INJECTION64_PATH");
}

enum watch_state watch_state(const struct watch *w)
{
	return (enum watch_state)__atomic_load_n(&w->page->state, __ATOMIC_ACQUIRE); /* pairs with the library's release */
}

int watch_order(struct watch *w, enum watch_order what)
{
	uint32_t serial = w->page->order + 1; /* only this side writes it */

	w->page->what = what;
	__atomic_store_n(&w->page->order, serial, __ATOMIC_RELEASE); /* pairs with the library's acquire */
	for (int i = 0; i < 50000; i++) {
		if (__atomic_load_n(&w->page->done, __ATOMIC_ACQUIRE) == serial) /* pairs with the library's release */
			return w->page->result;
		nanosleep(&(struct timespec){0, 100000}, NULL);
	}
	return -ETIMEDOUT;
}

const char *watch_kind_name(unsigned kind)
{
	static const char *const name[WATCH_KINDS] = {"allocations", "frees", "synchronising calls", "legacy-stream calls",
	                                              "objects made or destroyed", "launches", "copies", "other calls"};

	return kind < WATCH_KINDS ? name[kind] : "?";
}
