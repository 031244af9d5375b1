/* SPDX-License-Identifier: MIT */
/* The checks of tests/cuda that need no more than kernels and memory, on the CPU: see emulate.h. */
#include "tests/cuda/support.cuh"

static const struct {
	const char *name;
	void (*run)(void);
} checks[] = {{"weights", check_weights},         {"proj", check_proj},     {"ops", check_ops},
              {"attn_decode", check_attn_decode}, {"sample", check_sample}, {"layer", check_layer},
              {"prefill", check_prefill}};

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	few = true;
	device_sms = 12; /* fewer than any device has: each block then has more to do */
	for (size_t i = 0; i < COUNT(checks); i++) {
		bool wanted = argc < 2;
		unsigned before = n_checks, failed = n_failed;

		for (int j = 1; j < argc; j++)
			wanted |= strcmp(argv[j], checks[i].name) == 0;
		if (!wanted)
			continue;
		checks[i].run();
		printf("%s: %u checks, %u failed\n", checks[i].name, n_checks - before, n_failed - failed);
	}
	return n_failed ? 1 : 0;
}

/* A prompt's attention is made of instructions that have no counterpart here; its scratch is none. */
extern "C" uint32_t apr_cuda_attn_parts(const apr_cuda_limits *)
{
	return 0;
}
