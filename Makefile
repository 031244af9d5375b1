# SPDX-License-Identifier: MIT
# aprd: one Makefile for the whole tree. Sources are found by folder; a file's
# instruction-set flags follow from its name (*_avx2.c, *_avx512.c, *_vnni.c).
#
#   make            programs and libraries       make check   tests that need no GPU
#                   (the CUDA backend too, where nvcc is)
#   make demo       everything from nothing      make bench   figures as JSON lines
#   make lint       what CI lints                make install DESTDIR= PREFIX=
#   SAN=address,undefined | thread               CC=clang

# V=1 shows the commands; otherwise a line a file
Q := $(if $(V),,@)
say = $(if $(V),,@printf '  %-6s %s\n' '$(1)' '$@')

MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DELETE_ON_ERROR:

VERSION := 0.1.0
SONAME := libaprclient.so.0

ifeq ($(origin CC),default)
CC := gcc
endif
comma := ,
B := build$(if $(SAN),/san-$(subst $(comma),-,$(SAN)))$(if $(findstring clang,$(CC)),/clang)

PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
SBINDIR ?= $(PREFIX)/sbin
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DATADIR ?= $(PREFIX)/share
# /etc for a system's own prefix, as usual
SYSCONFDIR ?= $(if $(filter /usr,$(PREFIX)),/etc,$(PREFIX)/etc)
SYSTEMDDIR ?= $(PREFIX)/lib
MANDIR ?= $(DATADIR)/man

OPT ?= $(if $(SAN),-O1,-O2)
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Werror
# -ffp-contract=off: a fused multiply-add is written fmaf or an intrinsic, never guessed,
# since equal bits on every instruction set is a promise.
CFLAGS_ALL := -std=gnu11 $(OPT) -g -pthread -fPIC -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off \
	-fstack-protector-strong $(WARN) $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all $(if $(findstring clang,$(CC)),,-Wno-maybe-uninitialized)) $(CFLAGS)
CPPFLAGS_ALL := -D_GNU_SOURCE -DAPR_VERSION='"$(VERSION)"' $(if $(findstring O0,$(OPT)),,$(if $(SAN),,-D_FORTIFY_SOURCE=2)) \
	-I. -Ishm/include -Iclient/include $(CPPFLAGS)
LDFLAGS_ALL := -pthread -Wl,-z,relro,-z,now $(if $(SAN),-fsanitize=$(SAN)) $(LDFLAGS)

# without a compiler `make setup` still works, and brings it
ARCH := $(shell { $(CC) -dumpmachine || uname -m; } 2>/dev/null | cut -d- -f1)
ISA_avx2 := -mavx2 -mfma -mf16c
ISA_avx512 := $(ISA_avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq
ISA_vnni := $(ISA_avx512) -mavx512vnni
ISA_neon :=
isa = $(foreach s,avx2 avx512 vnni neon,$(if $(filter %_$(s).c,$(1)),$(ISA_$(s))))
ifeq ($(ARCH),x86_64)
skip_isa := %_neon.c
else ifeq ($(ARCH),aarch64)
skip_isa := %_avx2.c %_avx512.c %_vnni.c
else
skip_isa := %_avx2.c %_avx512.c %_vnni.c %_neon.c
endif
src = $(sort $(filter-out $(skip_isa),$(foreach d,$(1),$(wildcard $(d)/*.c))))
obj = $(patsubst %.c,$(B)/obj/%.o,$(1))

SHM := $(call src,shm)
CLIENT := $(filter-out client/ffi.c,$(call src,client))
FFI := $(wildcard client/ffi.c)
APRCTL := $(call src,client/aprctl)
FAKE := $(call src,client/fake)
MODEL := $(call src,model)
TEMPLATE := $(call src,template)
# attn_cut.c is host code of the CUDA backend that needs no toolkit, so it is tested everywhere
KERNELS := $(call src,kernels/common kernels/cpu) kernels/cuda/attn_cut.c
ENGINE := $(call src,engine)
DAEMON := $(filter-out daemon/main.c,$(call src,daemon))
ALGO_TABLE := graphs/algo_table.c
SUPPORT := $(call src,tests/support) $(wildcard tests/fuzz/fuzz_*.c)
TESTS := $(sort $(wildcard tests/*/test_*.c))
BENCHES := $(wildcard bench/bench_*.c)
EXAMPLES := $(wildcard examples/*.c)

PKGS := jansson liburing libutf8proc libconfuse
PKG_CFLAGS := $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
# libbsd's overlay (strlcpy and friends from the usual headers): daemon and aprctl alone,
# since libaprclient stands on libc
BSD_CFLAGS := $(shell pkg-config --cflags libbsd-overlay 2>/dev/null)
MODEL_LIBS := -lutf8proc
DAEMON_LIBS := $(MODEL_LIBS) -ljansson -luring -lbsd -lconfuse -ldl -lm
CTL_LIBS := -ljansson -lbsd -lm

PROGS := $(if $(wildcard daemon/main.c),$(B)/aprd) $(if $(APRCTL),$(B)/aprctl) $(if $(FAKE),$(B)/apr-fake-daemon)
LIBS := $(B)/$(SONAME) $(B)/libaprclient.a $(if $(FFI),$(B)/libaprclient-ffi.so.0)
TEST_PROGS := $(patsubst %.c,$(B)/%,$(TESTS))
BENCH_PROGS := $(patsubst %.c,$(B)/%,$(BENCHES))
EXAMPLE_PROGS := $(patsubst %.c,$(B)/%,$(EXAMPLES))

.PHONY: all lib tests benches examples
all: $(PROGS) $(LIBS) examples
lib: $(LIBS)
tests: $(TEST_PROGS) $(B)/tests/runner
benches: $(BENCH_PROGS)
examples: $(EXAMPLE_PROGS)

# What is missing is said in one line, before the compiler says it in many. The headers are asked for only
# where whole programs are made: a library or one file may need fewer.
WHOLE := $(if $(MAKECMDGOALS),$(filter all tests benches check-built check-san check-gpu bench% install,$(MAKECMDGOALS)),all)
HEADERS := jansson.h liburing.h utf8proc.h confuse.h bsd/string.h $(if $(filter-out all install,$(WHOLE)),CUnit/Basic.h)
have_cc = $(shell command -v $(firstword $(CC)) 2>/dev/null)
tries = $(CC) $(CPPFLAGS_ALL) $(PKG_CFLAGS) $(CFLAGS) $(1) -E -x c /dev/null >/dev/null 2>&1
lacks = $(shell $(call tries,$(HEADERS:%=-include %)) || \
	for h in $(HEADERS); do $(call tries,-include $$h) || { echo $$h; break; }; done)
check_cc = $(if $(have_cc),,$(error there is no $(firstword $(CC)) here: "make setup" installs what the build needs))
check_headers = $(foreach m,$(lacks),$(error the header $m is not here: "make setup" installs what the build needs))

# flags.stamp changes when the flags do, so that a new CFLAGS rebuilds everything
FLAGS_NOW := $(CC) $(CPPFLAGS_ALL) $(CFLAGS_ALL) $(LDFLAGS_ALL)
$(B)/flags.stamp: FORCE
	$(check_cc)$(if $(WHOLE),$(check_headers))
	@mkdir -p $(@D)
	@printf '%s\n' '$(subst ','\'',$(FLAGS_NOW))' | cmp -s - $@ || printf '%s\n' '$(subst ','\'',$(FLAGS_NOW))' >$@
# phony, since .SECONDARY below makes a missing file no reason to run a recipe
.PHONY: FORCE
FORCE:

$(B)/obj/%.o: %.c $(B)/flags.stamp
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CPPFLAGS_ALL) $(PKG_CFLAGS) $(if $(filter daemon/% client/aprctl/%,$<),$(BSD_CFLAGS)) $(CFLAGS_ALL) $(call isa,$<) -MMD -MP -c -o $@ $<

$(B)/obj/engine/module.o: CPPFLAGS_ALL += -DAPR_LIBDIR='"$(LIBDIR)"'

# ---- archives: one a folder --------------------------------------------------
define archive
$(B)/lib$(1).a: $(2)
	@rm -f $$@
	$(Q)ar rcs $$@ $$(filter %.o,$$^)
endef
$(eval $(call archive,aprclient,$(call obj,$(SHM) $(CLIENT))))
$(eval $(call archive,fake,$(call obj,$(filter-out client/fake/main.c,$(FAKE)))))
$(eval $(call archive,ctl,$(call obj,$(filter-out client/aprctl/main.c,$(APRCTL)))))
$(eval $(call archive,model,$(call obj,$(MODEL))))
$(eval $(call archive,template,$(call obj,$(TEMPLATE))))
$(eval $(call archive,kernels,$(call obj,$(KERNELS))))
$(eval $(call archive,engine,$(call obj,$(ENGINE)) $(B)/gen/build_id.o))
$(eval $(call archive,daemon,$(call obj,$(DAEMON))))
$(eval $(call archive,testsupport,$(call obj,$(SUPPORT))))
# of the CUDA backend the one file that knows no CUDA: its tests need no GPU
$(eval $(call archive,algotable,$(call obj,$(ALGO_TABLE))))

# What decides an answer's bits, hashed: a part of every receipt (engine/numerics.c).
$(B)/gen/build_id.c: $(call obj,$(ENGINE) $(MODEL) $(KERNELS)) scripts/build-id
	@mkdir -p $(@D)
	@scripts/build-id $(filter %.o,$^) >$@
$(B)/gen/build_id.o: $(B)/gen/build_id.c
	$(Q)$(CC) -std=gnu11 -fPIC -c -o $@ $<

$(B)/$(SONAME): $(call obj,$(SHM) $(CLIENT)) client/libaprclient.map
	$(call say,LINK)
	$(Q)$(CC) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=client/libaprclient.map -Wl,-z,defs -o $@ $(filter %.o,$^) $(LDFLAGS_ALL)
	@ln -sf $(SONAME) $(B)/libaprclient.so
$(B)/libaprclient-ffi.so.0: $(call obj,$(FFI)) $(B)/$(SONAME)
	$(call say,LINK)
	$(Q)$(CC) -shared -Wl,-soname,libaprclient-ffi.so.0 -Wl,-z,defs -o $@ $(filter %.o,$^) $(B)/$(SONAME) $(LDFLAGS_ALL)
	@ln -sf libaprclient-ffi.so.0 $(B)/libaprclient-ffi.so

DAEMON_ARCHIVES := $(foreach a,daemon template engine kernels model aprclient,$(B)/lib$(a).a)
$(B)/aprd: $(call obj,daemon/main.c) $(DAEMON_ARCHIVES)
	$(call say,LINK)
	$(Q)$(CC) -o $@ $< -Wl,--start-group $(DAEMON_ARCHIVES) -Wl,--end-group $(LDFLAGS_ALL) $(DAEMON_LIBS)
$(B)/aprctl: $(call obj,client/aprctl/main.c) $(B)/libctl.a $(B)/libaprclient.a
	$(call say,LINK)
	$(Q)$(CC) -o $@ $^ $(LDFLAGS_ALL) $(CTL_LIBS)
$(B)/apr-fake-daemon: $(call obj,client/fake/main.c) $(B)/libfake.a $(B)/libaprclient.a
	$(call say,LINK)
	$(Q)$(CC) -o $@ $^ $(LDFLAGS_ALL) $(CTL_LIBS)

# ---- tests, benches, examples ------------------------------------------------
TEST_ARCHIVES := $(B)/libtestsupport.a $(B)/libalgotable.a $(B)/libctl.a $(B)/libfake.a $(DAEMON_ARCHIVES)
$(TEST_PROGS): $(B)/tests/%: $(B)/obj/tests/%.o $(TEST_ARCHIVES)
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -o $@ $< -Wl,--start-group $(TEST_ARCHIVES) -Wl,--end-group $(LDFLAGS_ALL) $(DAEMON_LIBS) -lcunit
# aprd beside a module that takes two steps, without a GPU: see tests/support/two_deep.h
$(B)/two_deep/libaprd-cuda.so: $(B)/obj/tests/support/two_deep_module.o $(B)/obj/tests/support/two_deep.o \
		$(B)/libengine.a $(B)/libkernels.a $(B)/libmodel.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -shared -o $@ $(filter %.o,$^) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LDFLAGS_ALL) $(MODEL_LIBS) -ldl -lm
$(B)/two_deep/aprd: $(B)/aprd
	@mkdir -p $(@D)
	@ln -f $< $@
$(B)/tests/daemon/test_two_deep: $(B)/two_deep/libaprd-cuda.so $(B)/two_deep/aprd $(B)/tests/daemon/test_requests \
		$(B)/tests/daemon/test_many
# preloaded into aprd by the suite beside it; a sanitizer has an allocator of its own
ifeq ($(SAN),)
$(B)/tests/fault/test_fault: | $(B)/tests/fault/inject.so
$(B)/tests/fault/inject.so: $(B)/obj/tests/fault/inject.o
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -shared -o $@ $< $(LDFLAGS_ALL) -ldl
endif
$(B)/tests/runner: $(B)/obj/tests/runner.o
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -o $@ $< $(LDFLAGS_ALL)
$(BENCH_PROGS): $(B)/bench/%: $(B)/obj/bench/%.o $(B)/libtestsupport.a $(DAEMON_ARCHIVES)
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -o $@ $< -Wl,--start-group $(B)/libtestsupport.a $(DAEMON_ARCHIVES) -Wl,--end-group $(LDFLAGS_ALL) $(DAEMON_LIBS) -lcunit
$(EXAMPLE_PROGS): $(B)/examples/%: $(B)/obj/examples/%.o $(B)/libaprclient.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -o $@ $^ $(LDFLAGS_ALL)

include scripts/targets.mk

# The CUDA backend, where it can be compiled: a toolkit of release 12 or newer (sm_90a) that has cuBLASLt
NVCC := $(shell command -v nvcc 2>/dev/null)
ifneq ($(NVCC),)
CUDA_HOME := $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
nvcc_release := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
ifeq ($(or $(filter $(nvcc_release),$(shell seq 0 11)),$(if $(wildcard $(CUDA_HOME)/include/cublasLt.h),,none)),)
include kernels/cuda/cuda.mk
include tests/cuda_host/host.mk
include graphs/graphs.mk
else
$(info the CUDA backend is not built: it needs a toolkit of release 12 or newer with cuBLASLt; $(NVCC) is of $(nvcc_release))
endif
endif

.PHONY: clean
clean:
	rm -rf build

.SECONDARY:
-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)
