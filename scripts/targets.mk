# SPDX-License-Identifier: MIT
# What a person types beside `make`: set-up, demo, checks, benches, lint, install.

.PHONY: setup models check demo lint bench bench-ipc bench-cpu bench-gpu check-gpu install uninstall

# Both README commands start here: packages first, then models, then the rest in a
# second make that sees the packages' headers and pkg-config files.
setup:
	@scripts/setup
models: setup
	@scripts/get-model smollm2-135m gemma3-270m

check: models
	@$(MAKE) --no-print-directory check-built

.PHONY: check-built
check-built: all tests benches
	$(B)/tests/runner $(TEST_PROGS)
