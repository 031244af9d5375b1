# SPDX-License-Identifier: MIT
# What a person types beside `make`: set-up, demo, checks, benches, lint, install.

.PHONY: fault-full fuzz fuzz-built setup models check check-built check-san demo check-gpu pack-gpu bench bench-ipc bench-cpu bench-short bench-wakeups bench-gpu lint tidy install uninstall

# Both README commands start here: packages first, then models, then the rest in a
# second make that sees the packages' headers and pkg-config files.
setup:
	@scripts/setup
models: setup
	@scripts/get-model smollm2-135m gemma3-270m >/dev/null

check: models
	@$(MAKE) --no-print-directory check-built
check-built: all tests benches
	$(B)/tests/runner -a $(TEST_PROGS)
# The same suites under a sanitizer. ThreadSanitizer leaves out those whose subject is arithmetic or one
# thread's parsing of files: they take it tens of minutes, and the threads they use are the pool's and the
# engine's, which kernels/test_pool, engine/test_cases, test_kv and the daemon's suites put before it.
# aprctl/test_conform takes minutes there too; its rings and its daemon are those of test_cli and tests/daemon.
SAN_ENV := ASAN_OPTIONS=detect_leaks=1:abort_on_error=1:use_sigaltstack=0 \
	UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:suppressions=tests/tsan.supp
TSAN_LEAVES_OUT := fuzz/test_fuzz aprctl/test_conform engine/test_arch engine/test_forward_golden engine/test_same_bits engine/test_two_steps \
	kernels/test_attention kernels/test_dequant kernels/test_linear kernels/test_math kernels/test_ops kernels/test_sample \
	template/test_golden template/test_limits model/test_fields model/test_gguf model/test_golden model/test_pretok
SAN_TESTS := $(filter-out $(if $(findstring thread,$(SAN)),$(TSAN_LEAVES_OUT:%=$(B)/tests/%)),$(TEST_PROGS))
check-san: all tests
	@$(SAN_ENV) $(B)/tests/runner -a -j2 $(SAN_TESTS)

# CASE 11 at length: ten minutes unless S says another number of seconds
S ?= 600
.PHONY: check-isolation bench-simulate bench-crowd
check-isolation: $(B)/aprd $(B)/tests/system/test_isolation
	APR_ISOLATION_S=$(S) $(B)/tests/system/test_isolation
bench-simulate: $(B)/bench/bench_simulate
	$(B)/bench/bench_simulate --cost
	$(B)/bench/bench_simulate
bench-crowd: $(B)/aprd $(B)/bench/bench_crowd
	$(B)/bench/bench_crowd

# Every call of aprd that can fail, each once (minutes); check has the first, second and last of each stack
fault-full: all $(B)/tests/fault/test_fault
	APR_FAULT=full $(B)/tests/fault/test_fault

# libFuzzer over each target of tests/fuzz for FUZZ_SECONDS, with address and undefined sanitizers; what it finds new is
# kept in build/fuzz/NAME, and the lines that were met are told at the end.
FUZZ_TARGETS := gguf tokens sqe hello config
FUZZ_SECONDS ?= 60
FUZZ_LINES_gguf := model/gguf.c model/gguf_parse.c model/arch.c model/arch_weights.c model/tok_load.c
FUZZ_LINES_tokens := model/tok_bpe.c model/tok_spm.c model/tok_special.c model/tokenizer.c model/pretok.c
FUZZ_LINES_sqe := shm/check.c
FUZZ_LINES_hello := shm/check.c shm/wire.c
FUZZ_LINES_config := daemon/config.c
fuzz:
	@$(MAKE) --no-print-directory CC=clang SAN=fuzzer-no-link,address,undefined \
		CFLAGS="-fprofile-instr-generate -fcoverage-mapping" fuzz-built
fuzz-built: $(FUZZ_TARGETS:%=$(B)/fuzz/%)
	@for t in $(FUZZ_TARGETS); do scripts/fuzz $(B)/fuzz/$$t tests/fuzz/corpus/$$t build/fuzz/$$t $(FUZZ_SECONDS) || exit 1; done
	@$(foreach t,$(FUZZ_TARGETS),scripts/fuzz --lines $(B)/fuzz/$(t) build/fuzz/$(t) $(FUZZ_LINES_$(t));)
$(FUZZ_TARGETS:%=$(B)/fuzz/%): $(B)/fuzz/%: $(B)/libtestsupport.a $(DAEMON_ARCHIVES)
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -fsanitize=fuzzer,address,undefined -fprofile-instr-generate -Wl,--defsym=LLVMFuzzerTestOneInput=fuzz_$* \
		-Wl,-u,fuzz_$* -o $@ -Wl,--start-group $^ -Wl,--end-group -pthread $(DAEMON_LIBS) -lcunit

demo: setup
	@scripts/get-model smollm2-135m >/dev/null
	@$(MAKE) --no-print-directory all
	@scripts/demo $(B)

# Skips what cannot run here, with a count; graphs/graphs.mk has what it needs built where nvcc is.
check-gpu: all tests benches
	@scripts/check-gpu $(CHECK_GPU) $(B)
# A folder for a machine with a GPU and nothing installed
pack-gpu: all tests benches
	@scripts/pack-gpu $(B) $(B)/pack-gpu

bench: bench-ipc bench-short bench-wakeups bench-cpu
# the peer is measured beside where scripts/get-peer has built it
bench-ipc bench-cpu bench-short bench-wakeups: bench-%: all benches
	APR_LLAMA_BENCH=$${APR_LLAMA_BENCH-$$(scripts/get-peer --path)} $(B)/bench/bench_$*

# The peer on a GPU is its own build: APR_LLAMA_BENCH names it
bench-gpu: all benches
	@scripts/bench-gpu $(BENCH_GPU) $(B)

lint:
	@scripts/lint
# one stamp a file, so that a second lint looks only at what changed
TIDY_SRC := $(SHM) $(CLIENT) $(FFI) $(APRCTL) $(FAKE) $(MODEL) $(TEMPLATE) $(KERNELS) $(ENGINE) $(ALGO_TABLE) $(DAEMON) $(wildcard daemon/main.c)
tidy: $(patsubst %.c,$(B)/tidy/%.ok,$(TIDY_SRC))
$(B)/tidy/%.ok: %.c .clang-tidy
	@mkdir -p $(@D)
	@clang-tidy --quiet $< -- $(CPPFLAGS_ALL) $(PKG_CFLAGS) $(if $(filter daemon/% client/aprctl/%,$<),$(BSD_CFLAGS)) -std=gnu11 $(call isa,$<) 2>$@.err || { cat $@.err; exit 1; }
	@touch $@

install: all
	install -d $(DESTDIR)$(SBINDIR) $(DESTDIR)$(BINDIR) $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(INCLUDEDIR)/apr
	install -m 755 $(B)/aprd $(DESTDIR)$(SBINDIR)/
	install -m 755 $(B)/aprctl $(B)/apr-fake-daemon $(DESTDIR)$(BINDIR)/
	install -m 755 $(B)/$(SONAME) $(B)/libaprclient-ffi.so.0 $(DESTDIR)$(LIBDIR)/
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libaprclient.so
	ln -sf libaprclient-ffi.so.0 $(DESTDIR)$(LIBDIR)/libaprclient-ffi.so
	install -m 644 $(B)/libaprclient.a $(DESTDIR)$(LIBDIR)/
	if [ -e $(B)/libaprd-cuda.so ]; then install -d $(DESTDIR)$(LIBDIR)/aprd && \
		install -m 755 $(B)/libaprd-cuda.so $(DESTDIR)$(LIBDIR)/aprd/; fi
	install -m 644 $(wildcard shm/include/apr/*.h client/include/apr/*.h) $(DESTDIR)$(INCLUDEDIR)/apr/
	sed 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(LIBDIR)|; s|@INCLUDEDIR@|$(INCLUDEDIR)|; s|@VERSION@|$(VERSION)|' client/libaprclient.pc.in \
		>$(DESTDIR)$(LIBDIR)/pkgconfig/libaprclient.pc
	for page in man/*.[1-9]; do s=$${page##*.}; install -d $(DESTDIR)$(MANDIR)/man$$s; cp -P $$page $(DESTDIR)$(MANDIR)/man$$s/; done
	install -d $(DESTDIR)$(DATADIR)/bash-completion/completions $(DESTDIR)$(DATADIR)/zsh/site-functions \
		$(DESTDIR)$(DATADIR)/fish/vendor_completions.d
	for p in aprd aprctl; do \
		scripts/completions $$p $(B)/$$p bash >$(DESTDIR)$(DATADIR)/bash-completion/completions/$$p && \
		scripts/completions $$p $(B)/$$p zsh >$(DESTDIR)$(DATADIR)/zsh/site-functions/_$$p && \
		scripts/completions $$p $(B)/$$p fish >$(DESTDIR)$(DATADIR)/fish/vendor_completions.d/$$p.fish || exit 1; done
	install -d $(DESTDIR)$(SYSTEMDDIR)/systemd/system $(DESTDIR)$(SYSTEMDDIR)/sysusers.d $(DESTDIR)$(SYSTEMDDIR)/tmpfiles.d \
		$(DESTDIR)$(DATADIR)/aprd
	sed 's|@SBINDIR@|$(SBINDIR)|; s|@SYSCONFDIR@|$(SYSCONFDIR)|' contrib/systemd/aprd.service.in \
		>$(DESTDIR)$(SYSTEMDDIR)/systemd/system/aprd.service
	install -m 644 contrib/systemd/aprd.socket $(DESTDIR)$(SYSTEMDDIR)/systemd/system/
	install -m 644 contrib/systemd/aprd.sysusers.conf $(DESTDIR)$(SYSTEMDDIR)/sysusers.d/aprd.conf
	install -m 644 contrib/systemd/aprd.tmpfiles.conf $(DESTDIR)$(SYSTEMDDIR)/tmpfiles.d/aprd.conf
	install -m 644 contrib/aprd.conf contrib/prometheus/aprd.rules.yml contrib/grafana/aprd.json $(DESTDIR)$(DATADIR)/aprd/
	@$(if $(DESTDIR),:,scripts/linker-cache $(LIBDIR))
uninstall:
	rm -f $(DESTDIR)$(SBINDIR)/aprd $(DESTDIR)$(BINDIR)/aprctl $(DESTDIR)$(BINDIR)/apr-fake-daemon
	rm -f $(DESTDIR)$(LIBDIR)/aprd/libaprd-cuda.so
	rm -f $(DESTDIR)$(LIBDIR)/libaprclient* $(DESTDIR)$(LIBDIR)/pkgconfig/libaprclient.pc
	rm -f $(patsubst man/%,$(DESTDIR)$(MANDIR)/man*/%,$(wildcard man/*.[1-9]))
	rm -rf $(DESTDIR)$(INCLUDEDIR)/apr $(DESTDIR)$(DATADIR)/aprd
	rm -f $(DESTDIR)$(SYSTEMDDIR)/systemd/system/aprd.service $(DESTDIR)$(SYSTEMDDIR)/systemd/system/aprd.socket \
		$(DESTDIR)$(SYSTEMDDIR)/sysusers.d/aprd.conf $(DESTDIR)$(SYSTEMDDIR)/tmpfiles.d/aprd.conf
	for p in aprd aprctl; do rm -f $(DESTDIR)$(DATADIR)/bash-completion/completions/$$p \
		$(DESTDIR)$(DATADIR)/zsh/site-functions/_$$p $(DESTDIR)$(DATADIR)/fish/vendor_completions.d/$$p.fish; done

# Examples in C++ show that the headers can be used from there; built where there is a compiler for it
ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),clang++,g++)
endif
CXX_EXAMPLES := $(if $(shell command -v $(CXX) 2>/dev/null),$(patsubst %.cpp,$(B)/%,$(wildcard examples/*.cpp)))
examples: $(CXX_EXAMPLES)
$(CXX_EXAMPLES): $(B)/%: %.cpp $(B)/libaprclient.a
	@mkdir -p $(@D)
	$(call say,CXX)
	$(Q)$(CXX) -std=c++17 $(OPT) -g -Wall -Wextra -Wshadow -Werror $(if $(SAN),-fsanitize=$(SAN)) -Ishm/include -Iclient/include $(CXXFLAGS) -o $@ $^ $(LDFLAGS_ALL)
