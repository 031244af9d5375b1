# SPDX-License-Identifier: MIT
# The CUDA kernels and their checks. Included by the root Makefile only where nvcc is
# found. One nvcc at a time: it is heavy on memory.
#
#   make cuda        the kernels' archive and the checks' program
#   make check-cuda  runs the checks (exits 77, loudly, where there is no GPU)
#   NVCC_PREFIX=ccache   keeps compiled kernels

NVCC_FLAGS := -O3 -std=c++17 -fmad=false -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra \
	-Werror all-warnings -I.
CUDA_OBJ := $(patsubst %.cu,$(B)/obj/%.o,$(sort $(wildcard kernels/cuda/*.cu)))
CUDA_CHECK_OBJ := $(patsubst %.cu,$(B)/obj/%.o,$(sort $(wildcard tests/cuda/*.cu))) $(B)/obj/tests/cuda/cpu_side.o
CUDA_CHECK := $(B)/tests/cuda/check_cuda

$(B)/obj/%.o: %.cu kernels/cuda/cuda.mk
	@mkdir -p $(@D)
	flock $(B)/nvcc.lock nice -n 10 $(NVCC_PREFIX) $(NVCC) $(NVCC_FLAGS) -MMD -MP -c -o $@ $<
$(B)/libkernels-cuda.a: $(CUDA_OBJ)
	@rm -f $@
	ar rcs $@ $^
# static runtime and C++ library: the program runs where a driver and cuBLASLt are
link_check = $(NVCC) -Xcompiler -static-libstdc++,-static-libgcc -Xlinker -rpath,$(CUDA_HOME)/lib64,-rpath,/usr/local/cuda/lib64 \
	-o $@ $^ -L$(CUDA_HOME)/lib64 -lcublasLt
$(CUDA_CHECK): $(CUDA_CHECK_OBJ) $(B)/libkernels-cuda.a $(B)/libkernels.a
	@mkdir -p $(@D)
	$(link_check)

.PHONY: cuda check-cuda
cuda: $(B)/libkernels-cuda.a $(CUDA_CHECK)
check-cuda: cuda
	$(CUDA_CHECK)
