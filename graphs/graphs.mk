# SPDX-License-Identifier: MIT
# The CUDA backend's module. Included after kernels/cuda/cuda.mk, so only where nvcc is found.
#
#   make cuda         libaprd-cuda.so beside the programs, and the programs of tests/graphs
#   make cuda-variants  the builds that check-gpu also runs

GRAPHS_OBJ := $(patsubst %.c,$(B)/obj/%.o,$(sort $(wildcard graphs/*.c))) \
	$(patsubst %.cu,$(B)/obj/%.o,$(sort $(wildcard graphs/*.cu))) $(B)/obj/kernels/cuda/attn_cut.o
CUDA_MODULE := $(B)/libaprd-cuda.so
GPU_RUNS := $(B)/run_score $(B)/run_stress $(B)/run_routes

$(B)/obj/graphs/%.o: CPPFLAGS_ALL += -isystem $(CUDA_HOME)/include
$(B)/obj/tests/graphs/test_stream.o: CPPFLAGS_ALL += -isystem $(CUDA_HOME)/include

# What decides an answer's bits here, hashed as the engine's objects are.
$(B)/gen/cuda_build_id.c: $(GRAPHS_OBJ) $(CUDA_OBJ) scripts/build-id
	@mkdir -p $(@D)
	@scripts/build-id $(filter %.o,$^) >$@
$(B)/gen/cuda_build_id.o: $(B)/gen/cuda_build_id.c
	$(Q)$(CC) -std=gnu11 -fPIC -c -o $@ $<

# The runtime is linked statically; cuBLASLt is found where the toolkit or the system has it.
define link_module
	$(call say,LINK)
	$(Q)$(NVCC) -shared -cudart static -Xcompiler -static-libstdc++,-static-libgcc \
		-Xlinker --version-script=graphs/libaprd-cuda.map,-z,defs,-rpath,$(CUDA_HOME)/lib64,-rpath,/usr/local/cuda/lib64 \
		-o $@ $(filter %.o %.a,$^) -L$(CUDA_HOME)/lib64 -lcublasLt -lpthread
endef
$(CUDA_MODULE): $(GRAPHS_OBJ) $(B)/gen/cuda_build_id.o $(B)/libkernels-cuda.a graphs/libaprd-cuda.map
	$(link_module)

# They stand on libc alone, so that they run on a machine with a GPU and without the daemon's libraries.
$(GPU_RUNS): $(B)/%: $(B)/obj/tests/graphs/%.o $(B)/libtestsupport.a $(B)/libengine.a $(B)/libkernels.a $(B)/libmodel.a
	$(call say,LINK)
	$(Q)$(CC) -o $@ $< -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDFLAGS_ALL) \
		-Wl,-Bstatic -lutf8proc -ljansson -Wl,-Bdynamic -ldl -lm

# Watches the driver calls of a real daemon: the program, and the library that the driver loads into it.
WATCH_LIB := $(if $(wildcard $(CUDA_HOME)/include/cupti.h $(CUDA_HOME)/extras/CUPTI/include/cupti.h),$(B)/libapr-watch-driver.so)
RUN_QUIET := $(B)/run_quiet
$(B)/obj/tests/graphs/watch_driver.o: CPPFLAGS_ALL += -isystem $(CUDA_HOME)/include -isystem $(CUDA_HOME)/extras/CUPTI/include \
	-DAPR_CUDA_HOME='"$(CUDA_HOME)"'
$(B)/libapr-watch-driver.so: $(B)/obj/tests/graphs/watch_driver.o
	$(call say,LINK)
	$(Q)$(CC) -shared -Wl,-z,defs -o $@ $^ $(LDFLAGS_ALL) -ldl
$(RUN_QUIET): $(B)/obj/tests/graphs/run_quiet.o $(B)/libtestsupport.a $(B)/libaprclient.a $(B)/libmodel.a $(B)/libkernels.a
	$(call say,LINK)
	$(Q)$(CC) -o $@ $< -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDFLAGS_ALL) \
		-Wl,-Bstatic -lutf8proc -Wl,-Bdynamic -lm

# From the GPU's store to the client's load
GPU_RING := $(B)/bench/gpu_ring
$(GPU_RING): $(B)/obj/bench/gpu_ring.o $(B)/obj/bench/gpu_echo.o $(B)/libaprclient.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(NVCC) -Xcompiler -static-libstdc++,-static-libgcc -o $@ $^ -lpthread

# Two more builds of the module, for check-gpu alone, each in a folder with the programs that use it.
# split: every buffer an allocation of its own, full of NaN. late: kernels chained by programmatic launch are late at random.
$(B)/split/backend.o: graphs/backend.c $(B)/flags.stamp
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) -isystem $(CUDA_HOME)/include -DAPR_ARENA_SPLIT -MMD -MP -c -o $@ $<
$(B)/split/libaprd-cuda.so: $(B)/split/backend.o $(filter-out %/backend.o,$(GRAPHS_OBJ)) $(B)/gen/cuda_build_id.o \
		$(B)/libkernels-cuda.a graphs/libaprd-cuda.map
	$(link_module)
LATE_OBJ := $(CUDA_OBJ:$(B)/obj/kernels/cuda/%=$(B)/late/obj/%)
$(LATE_OBJ): $(B)/late/obj/%.o: kernels/cuda/%.cu kernels/cuda/cuda.mk
	@mkdir -p $(@D)
	flock $(B)/nvcc.lock nice -n 10 $(NVCC_PREFIX) $(NVCC) $(NVCC_FLAGS) -DAPR_PDL_TEST -MMD -MP -c -o $@ $<
$(B)/late/libaprd-cuda.so: $(GRAPHS_OBJ) $(B)/gen/cuda_build_id.o $(LATE_OBJ) graphs/libaprd-cuda.map
	$(link_module)
$(B)/late/check_cuda: $(CUDA_CHECK_OBJ) $(LATE_OBJ) $(B)/libkernels.a
	$(call say,LINK)
	$(Q)$(link_check)
VARIANT_RUNS := $(B)/split/run_score $(B)/split/run_stress $(B)/late/run_stress
$(VARIANT_RUNS): $(B)/%: $(GPU_RUNS)
	@mkdir -p $(@D)
	@cp $(B)/$(@F) $@
.PHONY: cuda-variants
cuda-variants: $(B)/split/libaprd-cuda.so $(B)/late/libaprd-cuda.so $(B)/late/check_cuda $(VARIANT_RUNS)
-include $(wildcard $(B)/split/*.d $(B)/late/obj/*.d)

cuda: $(CUDA_MODULE) $(GPU_RUNS) $(WATCH_LIB) $(RUN_QUIET) $(GPU_RING)
bench-gpu: cuda
check-gpu pack-gpu: cuda cuda-variants
# `make` and `make check` compile it too, once: other compilers' and sanitizers' builds leave it out
ifeq ($(B),build)
all: $(CUDA_MODULE)
check-built: cuda
endif
