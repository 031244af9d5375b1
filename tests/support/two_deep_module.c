/* SPDX-License-Identifier: MIT */
/*
 * The two-deep backend as a module that aprd loads where it looks for the CUDA one,
 * so that the daemon's part in two steps in flight is tested without a GPU.
 *
 * Owns: the symbol. It is filled before dlopen returns.
 */
#include "tests/support/two_deep.h"

extern struct apr_backend apr_cuda_backend __attribute__((visibility("default")));
struct apr_backend apr_cuda_backend;

__attribute__((constructor)) static void fill(void)
{
	apr_cuda_backend = *two_deep_backend();
}
