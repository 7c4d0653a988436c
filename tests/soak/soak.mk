# Hours of forks amid traffic. Included by the Makefile.

.PHONY: soak soak-vm

soak: $(BUILT) $(SOAK)	## $(HOURS) hours of forks amid traffic on pinned memory, every byte compared
	@$(BIN)/python tests/soak/run.py $(SOAK) build/soak/$$(uname -r).jsonl --hours $(HOURS)

soak-vm: export PYTEST_ARGS := tests/vm/soak.py --hours=$(HOURS)
soak-vm: export VM_MINUTES := $(shell echo '$(HOURS)' | awk '{ print $$1 * 60 + 20 }')
# Two nodes, for pages to be moved between them.
soak-vm: export VM_OPTIONS := --numa 1250M,cpus=0 --numa 1250M
soak-vm: $(BUILT) $(GUESTS) $(SOAK)	## the same on a soft-RoCE device, in VMs with Debian's kernels $(KERNELS), as long in each
	@$(BIN)/python tests/vm/run.py $(KERNELS)
	@mkdir -p build/soak
	@for kernel in $(KERNELS); do cp build/vm/$$kernel/soak* build/soak/; done
