/* SPDX-License-Identifier: MIT */
/*
 * The CUDA backend's module: where it is looked for, and whether it is fit.
 *
 * Owns: the search (beside the executable, then LIBDIR/aprd), the check of its
 * table's version. Does not own anything that the module does. It is never closed:
 * a CUDA runtime that was unloaded cannot be loaded again.
 */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/internal.h"

#define MODULE "libaprd-cuda.so"
#ifndef APR_LIBDIR
#define APR_LIBDIR "/usr/local/lib"
#endif

/* Its path, or false where there is none. */
static bool find_module(char *path, size_t len)
{
	char exe[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
	char *slash;

	if (n > 0) {
		exe[n] = 0;
		slash = strrchr(exe, '/');
		if (slash && (size_t)snprintf(path, len, "%.*s/" MODULE, (int)(slash - exe), exe) < len && access(path, F_OK) == 0)
			return true;
	}
	return (size_t)snprintf(path, len, "%s", APR_LIBDIR "/aprd/" MODULE) < len && access(path, F_OK) == 0;
}

int apr_module_open(const struct apr_backend **out, uint32_t device, char *err, size_t errlen)
{
	const struct apr_backend_config cfg = {.device = device, .notify_fd = -1};
	const struct apr_backend *b;
	char path[PATH_MAX], line[128], why[160] = "";
	void *so;
	int rc;

	if (!find_module(path, sizeof path))
		return apr_engine_fail(-ENODEV, err, errlen,
		                       "no CUDA module (" MODULE ") beside the program or in " APR_LIBDIR "/aprd");
	so = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (!so)
		return apr_engine_fail(-ENODEV, err, errlen, MODULE ": %s", dlerror());
	b = dlsym(so, "apr_cuda_backend");
	if (!b)
		return apr_engine_fail(-ENODEV, err, errlen, "%s: has no apr_cuda_backend", path);
	if (b->abi != APR_BACKEND_ABI || b->size != sizeof *b)
		return apr_engine_fail(-ENODEV, err, errlen, "%s: of another version (abi %u, %u bytes; here %u, %zu)", path, b->abi,
		                       b->size, APR_BACKEND_ABI, sizeof *b);
	rc = b->probe(&cfg, line, sizeof line, why, sizeof why);
	if (rc)
		return apr_engine_fail(rc, err, errlen, MODULE ": %s", why);
	*out = b;
	return 0;
}
