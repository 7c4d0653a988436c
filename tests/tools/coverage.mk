# The lines that tests reach. Included by the Makefile.

.PHONY: coverage

COVERED := $(VENV)/coverage
COVERAGE := build/coverage
# A child's counts hold its parent's once more, so they grow to what gcovr takes for errors.
GCOVR := --gcov-ignore-parse-errors=all --gcov-suspicious-hits-threshold=0 \
	--merge-mode-functions=separate
COVERAGE_BUILD = RDMAFORK_LINETRACE=1 $(BIN)/python setup.py -q build --build-base $(COVERAGE) \
	--build-lib $(COVERAGE)/lib
# It follows each instruction, and makes a child at each: most would be those that count.
COVERAGE_CTESTS := $(filter-out test_steps,$(CTESTS))
# Tests of engine code that only Python, a preloaded library or a device uses, and of the modules.
COVERAGE_TESTS ?= $(wildcard $(patsubst %,tests/*/test_%.py,intercept child engine_once trace buffer \
	buffer_life buffers clocks pins errors modes on_fork verbs))
# A lock of coverage.py's, or the loader's that writing counts takes, may be held by a thread that
# is not in a child. Tracing maps memory and makes calls where there are to be none, and a signal's
# handler may run in coverage.py's code, which keeps what it raises. Counts, too, are files, where
# none may grow.
COVERAGE_NOT := finds_the_loader_free or threads or while_others or leaves_no_memory or interrupt \
	or signal or cannot_be_finished or make_no_system_call or too_few_huge_pages

$(COVERED): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[coverage]'
	@touch $@

# The modules tell of their lines. Of what is C only the engine counts: the counters of a module
# would look for those of an engine that is preloaded.
$(COVERAGE)/built: setup.py tests/engine/coverage.h $(SOURCES) $(HEADERS) $(MODULES) \
		$(wildcard rdmafork/*.py rdmafork/cli/*.py) | $(BUILT)
	@mkdir -p $(@D)
	@$(COVERAGE_BUILD)
	@rm $(COVERAGE)/lib/rdmafork/librdmafork.so
	@CFLAGS='-O0 --coverage -fprofile-update=atomic -U_FORTIFY_SOURCE -include tests/engine/coverage.h' \
		LDFLAGS='--coverage -Wl,--wrap=_exit' $(COVERAGE_BUILD)
	@touch $@

coverage: $(COVERED) $(COVERAGE)/built	## the lines that tests reach; those they do not, held against docs/coverage.md
	@find build/ctest/coverage $(COVERAGE)/lib -name '*.gcda' -delete 2>/dev/null; rm -rf $(COVERAGE)/lines
	@mkdir -p $(COVERAGE)/lines $(COVERAGE)/html
	@failed=0; \
	$(MAKE) --no-print-directory ctest-coverage CTESTS='$(COVERAGE_CTESTS)' \
		>$(COVERAGE)/programs.log 2>&1 & programs=$$!; \
	export COVERAGE_FILE=$(CURDIR)/$(COVERAGE)/lines/of; \
	RDMAFORK_TEST_COVERAGE=1 PYTHONPATH=$(CURDIR)/$(COVERAGE)/lib $(BIN)/coverage run \
		$(BIN)/pytest -q $(COVERAGE_TESTS) -k 'not ($(COVERAGE_NOT))' $(PYTEST_ARGS) || failed=1; \
	wait $$programs || failed=1; cat $(COVERAGE)/programs.log; \
	$(BIN)/python docs/uncovered.py $(COVERAGE)/lines; $(BIN)/coverage combine -q; \
	$(BIN)/coverage html -q -d $(COVERAGE)/html/modules; \
	$(BIN)/coverage json -q -o $(COVERAGE)/modules.json; \
	$(BIN)/gcovr --filter csrc/ $(GCOVR) --html-details $(COVERAGE)/html/index.html \
		--json $(COVERAGE)/engine.json build/ctest/coverage $(COVERAGE)/lib; \
	$(BIN)/python docs/uncovered.py $(COVERAGE)/engine.json $(COVERAGE)/modules.json || failed=1; \
	exit $$failed
