# The tests that need torch, which is too large for everybody's .venv. Included by the Makefile.

.PHONY: test-torch

# The build for CPUs, which PyPI does not have for Linux. Another: make test-torch TORCH=torch==2.13.0
TORCH ?= --index-url https://download.pytorch.org/whl/cpu torch
HAS_TORCH := $(VENV)/has-torch
TORCH_TESTS := tests/surface/test_child_fault.py tests/surface/test_buffer_views.py \
	tests/surface/test_buffers.py tests/surface/test_killers.py tests/package/test_examples.py

$(HAS_TORCH): | $(BUILT)
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	@touch $@

test-torch: $(HAS_TORCH)	## the tests that skip without torch; TORCH= is what pip installs in .venv
	@$(BIN)/python -m pytest -q -rs -k 'torch or dataloader or killer or tensor' $(TORCH_TESTS)
