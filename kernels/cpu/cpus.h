/* SPDX-License-Identifier: MIT */
/*
 * The cgroup half of apr_pool_usable_cpus(), with its paths as arguments for tests.
 */
#ifndef APR_KERNELS_CPU_CPUS_H
#define APR_KERNELS_CPU_CPUS_H

/* CPUs that the quotas allow the process whose /proc/…/cgroup this is, rounded up; 0 = no limit.
 * root: where the cgroup file systems are mounted (/sys/fs/cgroup). */
unsigned apr_cpus_quota(const char *cgroup_file, const char *root);

#endif
