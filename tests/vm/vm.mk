# Tests in virtual machines, with a soft-RoCE device. Included by the Makefile.

.PHONY: test-vm tried-with

FIELD := build/field

# The installed package is named, so pip adds what the extra asks for, and builds nothing.
$(GUESTS): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[vm]'
	@touch $@

test-vm: export PYTEST_ARGS := $(PYTEST_ARGS)
test-vm: $(BUILT) $(GUESTS) $(CTESTS:%=build/ctest/debug/%) $(SOAK) $(FIELD)/installed	## in VMs with a soft-RoCE device, on Debian's kernels $(KERNELS)
	@$(BIN)/python tests/vm/run.py $(KERNELS)

# Other people's programs, in an environment of their own. One that cannot be had is not tested.
# nixl asks for torch, gigabytes of which it uses nothing here.
FIELD_PACKAGES := dlslime ibverbs mooncake-transfer-engine-non-cuda numpy '--no-deps nixl-cu12'
$(FIELD)/installed: tests/vm/vm.mk
	@$(PYTHON) -m venv $(FIELD)
	@for package in $(FIELD_PACKAGES); do \
		$(FIELD)/bin/python -m pip install -q --disable-pip-version-check $$package || \
			echo "not tested: $$package cannot be installed"; \
	done
	@touch $@

tried-with: export PYTEST_ARGS := tests/vm/test_field.py
tried-with: $(BUILT) $(GUESTS) $(FIELD)/installed	## the table of docs/tried-with.md, in VMs with Debian's kernels $(KERNELS)
	@$(BIN)/python tests/vm/run.py $(KERNELS); failed=$$?; \
		$(BIN)/python docs/tried_with.py $(KERNELS:%=build/vm/%/tried) && exit $$failed
