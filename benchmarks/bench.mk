# Benchmarks of registrations and forks. Included by the Makefile.

.PHONY: bench bench-vm bench-check

RESULTS := benchmarks/results
README_FIGURE := fork_latency-size.svg
AT_DEVICE := device unmodified
BENCHMARKS := $(filter-out _% $(AT_DEVICE),$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py)))
MPIRUN := env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	$(BIN)/mpirun -n 2 --oversubscribe

$(FIGURES): pyproject.toml benchmarks/bench.mk | $(BUILT)
	@$(INSTALL) 'rdmafork[bench,mpi]'
	@touch $@

bench: $(BUILT) $(FIGURES)	## every benchmark in full, its JSON in benchmarks/results, its figures in build/figures
	@failed=0; for name in $(BENCHMARKS); do \
		[ $$name = mpi ] && run='$(MPIRUN)' || run=; \
		$$run $(BIN)/python -m rdmafork.benchmarks.$$name \
			--json $(RESULTS)/$$name.json --plot build/figures || failed=1; \
	done; cp build/figures/$(README_FIGURE) $(RESULTS); exit $$failed

bench-vm: export PYTEST_ARGS := tests/vm/bench.py
bench-vm: $(BUILT) $(GUESTS) $(FIGURES)	## those that need a device, in a VM with a soft-RoCE device, on Debian's kernel 6.1
	@$(BIN)/python tests/vm/run.py 6.1
	@cp $(AT_DEVICE:%=build/vm/6.1/%.json) $(RESULTS)

bench-check: $(BUILT)	## does what is claimed of the costs hold on this machine?
	@$(BIN)/python -m rdmafork.benchmarks._claims
