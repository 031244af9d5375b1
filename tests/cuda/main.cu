/* SPDX-License-Identifier: MIT */
/* The checks' runner. Usage: check_cuda [NAME]… ; a bench is `check_cuda bench`, or its
 * part bench_prefill; attn_prefill_brief: for compute-sanitizer. */
#include "tests/cuda/support.cuh"

static const struct {
	const char *name;
	void (*run)(void);
} checks[] = {
		{"weights", check_weights}, {"proj", check_proj},     {"ops", check_ops},    {"attn_decode", check_attn_decode},
		{"prefill", check_prefill}, {"attn_prefill", check_attn_prefill},
		{"sample", check_sample}, {"layer", check_layer}, {"chain", check_chain},
		{"gemm", check_gemm}};
void bench(void);
void bench_prefill(void);

int main(int argc, char **argv)
{
	cudaDeviceProp prop;
	int count = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (cudaGetDeviceCount(&count) != cudaSuccess || !count) {
		printf("SKIPPED: no GPU: 0 checks\n");
		return 77;
	}
	CUDA(cudaGetDeviceProperties(&prop, 0));
	if (prop.major != 9) {
		printf("SKIPPED: %s is no sm_90: 0 checks\n", prop.name);
		return 77;
	}
	device_sms = (uint32_t)prop.multiProcessorCount;
	CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	for (size_t i = 0; i < COUNT(checks); i++) {
		bool wanted = argc < 2;
		unsigned before = n_checks, failed = n_failed;

		for (int j = 1; j < argc; j++)
			wanted |= strcmp(argv[j], checks[i].name) == 0;
		if (!wanted)
			continue;
		checks[i].run();
		CUDA(cudaDeviceSynchronize());
		printf("%s: %u checks, %u failed\n", checks[i].name, n_checks - before, n_failed - failed);
	}
	for (int j = 1; j < argc; j++)
		if (strcmp(argv[j], "bench") == 0)
			bench();
		else if (strcmp(argv[j], "bench_prefill") == 0)
			bench_prefill();
		else if (strcmp(argv[j], "attn_prefill_brief") == 0)
			check_attn_prefill_brief();
	printf("check_cuda: %u checks, %u failed\n", n_checks, n_failed);
	return n_failed ? 1 : 0;
}
