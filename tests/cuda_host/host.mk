# SPDX-License-Identifier: MIT
# The CUDA kernels' checks on the CPU: kernels and checks are compiled as C++ against the
# headers of this folder (see emulate.h). Included by the root Makefile where nvcc is found:
# the toolkit's headers are needed, not its compiler, nor a GPU.
#
#   make check-cuda-host            runs them (part of make check)
#   make check-cuda-host ONLY=proj  runs one

EMU := $(B)/cuda_host
EMU_KERNELS := decode_ops sm90_any_proj_decode sm90_f16_attn_decode sm90_any_attn_plain sm90_any_heads_rope \
	sm90_any_weights sm90_any_prefill_rows sm90_any_sample_vocab
EMU_CHECKS := check_weights check_proj check_ops check_attn_decode check_sample check_layer check_prefill support
EMU_OBJ := $(EMU_KERNELS:%=$(EMU)/kernels/cuda/%.o) $(EMU_CHECKS:%=$(EMU)/tests/cuda/%.o) \
	$(EMU)/tests/cuda_host/main.o $(EMU)/tests/cuda_host/emulate.o
EMU_WARN = $(if $(filter %/main.o %/emulate.o,$@),-Wall -Wextra -Werror,-w)
# no contraction: as for the device, where sums are part of what is checked; no aliasing rule either. What nvcc compiles
# too, it warns about.
EMU_FLAGS = -std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing $(EMU_WARN) -Itests/cuda_host -I. \
	-isystem $(CUDA_HOME)/include -include tests/cuda_host/emulate.h -DEMU_CLUSTER=$(if $(filter %_vocab,$(basename $@)),8,1)

# Memory whose size a launch gives is no variable here.
$(EMU)/%.cc: %.cu
	@mkdir -p $(@D)
	$(call say,SED)
	$(Q)sed -E 's/extern __shared__ (__align__\([0-9]+\) )?(uint8_t|float) ([a-z]+)\[\];/\2 *\3 = (\2 *)emu_shared();/' $< >$@
$(EMU)/%.o: $(EMU)/%.cc
	$(call say,CXX)
	$(Q)$(CXX) $(EMU_FLAGS) -MMD -MP -c -o $@ $<
$(EMU)/%.o: %.cc
	@mkdir -p $(@D)
	$(call say,CXX)
	$(Q)$(CXX) $(EMU_FLAGS) -MMD -MP -c -o $@ $<
$(EMU)/check_host: $(EMU_OBJ) $(B)/obj/tests/cuda/cpu_side.o $(B)/libkernels.a
	$(call say,LINK)
	$(Q)$(CXX) -o $@ $^
-include $(EMU_OBJ:.o=.d)

# each check a target of its own, the longest first: they run side by side under -j
EMU_RUNS := $(patsubst %,check-cuda-host-%,$(or $(ONLY),proj ops sample attn_decode weights layer prefill))
.PHONY: check-cuda-host $(EMU_RUNS)
$(EMU_RUNS): check-cuda-host-%: $(EMU)/check_host
	$< $*
check-cuda-host: $(EMU_RUNS)
ifeq ($(shell uname -m),x86_64) # what its fibers are written for
check-built: check-cuda-host
endif
