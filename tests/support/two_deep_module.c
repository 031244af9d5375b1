/* SPDX-License-Identifier: MIT */
/*
 * The two-deep backend as a module that aprd loads where it looks for the CUDA one,
 * so that the daemon's part in two steps in flight is tested without a GPU.
 *
 * Owns: the symbol, filled before dlopen returns. Where APR_TWO_DEEP_FAIL names a file
 * that is there, it goes away and the fourth step fails: once, not in the worker that
 * comes next.
 */
#include <stdlib.h>
#include <unistd.h>

#include "tests/support/two_deep.h"

extern struct apr_backend apr_cuda_backend __attribute__((visibility("default")));
struct apr_backend apr_cuda_backend;

__attribute__((constructor)) static void fill(void)
{
	const char *once = getenv("APR_TWO_DEEP_FAIL");

	apr_cuda_backend = *two_deep_backend();
	if (once && unlink(once) == 0)
		two_deep_fail_at = 4;
}
