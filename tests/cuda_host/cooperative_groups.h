/* SPDX-License-Identifier: MIT */
/* In place of CUDA's: what the sampling kernel uses of it. */
#ifndef APR_TESTS_CUDA_HOST_COOPERATIVE_GROUPS_H
#define APR_TESTS_CUDA_HOST_COOPERATIVE_GROUPS_H

#include "tests/cuda_host/emulate.h"

namespace cooperative_groups
{
struct cluster_group {
	void sync(void) const { emu_cluster_sync(); }
	unsigned block_rank(void) const { return emu_cluster_rank(); }
	template <typename T> T *map_shared_rank(T *p, unsigned rank) const
	{
		return (T *)(emu_shared_of(rank) + ((uint8_t *)p - emu_shared()));
	}
};
static inline cluster_group this_cluster(void)
{
	return {};
}
} // namespace cooperative_groups

#endif
