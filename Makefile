# make help prints the targets. Everything they need is set up in .venv and build/.

PYTHON ?= python3
CC ?= cc
PYTEST_ARGS ?=
KERNELS ?= 5.10 6.1 6.12
FREETHREADED ?= 3.13

VENV := .venv
BIN := $(VENV)/bin
BUILT := $(VENV)/built
LINTERS := $(VENV)/linters
GUESTS := $(VENV)/guests
FIGURES := $(VENV)/figures
PAGES := $(VENV)/pages
PACKAGERS := $(VENV)/packagers
SOURCES := $(wildcard csrc/*.c csrc/preload/*.c)
HEADERS := $(wildcard csrc/*.h csrc/*.map csrc/preload/*.h)
MODULES := $(wildcard rdmafork/*.pyx rdmafork/*.pxd)
CTESTS := $(patsubst tests/c/%.c,%,$(wildcard tests/c/test_*.c))
SOAK := build/ctest/debug/soak
FUZZERS := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
SECONDS := 60
HOURS ?= 1

.DEFAULT_GOAL := help
SHELL := /bin/bash
.PHONY: help demo build test test-vm test-wheel test-pythons test-freethreaded \
	test-bare ctest asan tsan fuzz asan-python coverage soak soak-vm bench bench-vm bench-check docs \
	wheel release-check lint lint-c format clean
.DELETE_ON_ERROR:

help:	## print the targets (the default)
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

demo: build	## see fork() take registered pages away, and not with rdmafork
	@$(BIN)/rdmafork demo

build: $(BUILT)	## an editable install in .venv, rebuilt when a source has changed
	@:

test: build ctest $(SOAK)	## the tests of the engine, then pytest $(PYTEST_ARGS)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-vm: export PYTEST_ARGS := $(PYTEST_ARGS)
test-vm: $(BUILT) $(GUESTS) $(CTESTS:%=build/ctest/debug/%) $(SOAK)	## in VMs with a soft-RoCE device, on Debian's kernels $(KERNELS)
	@$(BIN)/python tests/vm/run.py $(KERNELS)

FREE := build/freethreaded
FREE_PYTHON := $(FREE)/$(FREETHREADED)/bin/python3
# Its modules lie beside the others, by other names; the library is the same, byte for byte.
# No PYTHON_GIL=0: a module that turned the GIL on would be an error, as all warnings are.
# Then again in four threads at once what is listed: tests that own, or only read, all they touch.
# Others fork, or count what the whole process has. The list is our own and not a plugin's, as most
# tests have a process of their own, and there the threads have to be.
test-freethreaded: $(FREE_PYTHON)	## pytest $(PYTEST_ARGS) on CPython $(FREETHREADED) without the GIL, built from Debian's source
	@PIP_PREFER_BINARY=1 $(MAKE) --no-print-directory VENV=$(FREE)/venv-$(FREETHREADED) PYTHON=$< build
	@$(FREE)/venv-$(FREETHREADED)/bin/python -X dev -m pytest $(PYTEST_ARGS)
	@$(if $(PYTEST_ARGS),,RDMAFORK_TEST_THREADS=4 $(FREE)/venv-$(FREETHREADED)/bin/python -m pytest @tests/parallel.txt)

$(FREE_PYTHON):
	@$(PYTHON) tests/freethreaded.py $(FREETHREADED)

## ---- Python -------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'rdmafork needs Python 3.10 or later; name one: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'Python cannot make a virtual environment; on Debian: apt install python3-venv' >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || \
		{ echo "Python's headers are missing; on Debian: apt install python3-dev" >&2; exit 1; }
	@command -v $(firstword $(CC)) >/dev/null || \
		{ echo 'No C compiler ($(CC)); on Debian: apt install gcc' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check
EDITABLE := -e '.[dev,test]'
REBUILD := $(BIN)/python setup.py -q build_ext --inplace

# The first time, and when the metadata has changed, pip; else what has changed is rebuilt.
$(BUILT): pyproject.toml setup.py $(SOURCES) $(HEADERS) $(MODULES) | $(BIN)/python
	@$(if $(filter pyproject.toml setup.py,$?),$(INSTALL) $(EDITABLE),$(REBUILD))
	@touch $@

# By the name of what is installed, what an extra asks for is added and nothing built again.
$(GUESTS): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[vm]'
	@touch $@

## ---- The engine alone: tests/c ------------------------------------------------------

CSHARED := $(filter-out tests/c/test_%,$(wildcard tests/c/*.c))
CTEST_CFLAGS := -std=gnu11 -g -DRF_TESTING -Icsrc -Itests/c -Itests/fuzz -pthread -MMD -MP \
	-Wall -Wextra -Wshadow -Werror=implicit-function-declaration
, := ,
# ThreadSanitizer cannot place its shadow where the kernel randomises too much.
FIXED := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# What fuzz_proc has to say in place of the kernel.
PROC_LDFLAGS := $(addprefix -Wl$(,)--wrap=,rf_sys_open rf_sys_read rf_sys_close rf_sys_map_over \
	socket setsockopt send recv)

# What test_intercept loads: libraries with the shape of libibverbs, as they are linked.
STANDINS := slots relro direct
standin_slots := -Wl,-z,lazy
standin_relro := -Wl,-z,relro,-z,now
standin_direct := -Wl,-Bsymbolic-functions

build/ctest/standin-%.so: tests/standin.c Makefile
	@mkdir -p $(@D)
	@$(CC) -O2 -fPIC -shared -pthread $(standin_$*) $< -o $@

# The soak's device, where libibverbs' headers are.
VERBS := $(shell echo '#include <infiniband/verbs.h>' | $(CC) -E - >/dev/null 2>&1 && echo yes)
VERBS_LIBS := $(VERBS:yes=-libverbs)
SOAKED := $(wildcard tests/soak/*.c) $(VERBS:yes=tests/vm/rc.c)

debug_CFLAGS := -O1 -UNDEBUG
release_CFLAGS := -O2 -DNDEBUG
asan_CFLAGS := -O1 -UNDEBUG -fno-omit-frame-pointer \
	-fsanitize=address,undefined -fno-sanitize-recover=all
tsan_CFLAGS := -O1 -UNDEBUG -fno-omit-frame-pointer -fsanitize=thread
# Asserts are no branches to be taken. gcc's own fork() forgets what the handlers did in a child.
coverage_CFLAGS := -O0 -DNDEBUG --coverage -fprofile-update=atomic -fno-builtin-fork \
	-include tests/c/coverage.h -Wl,--wrap=_exit

asan_RUN := ASAN_OPTIONS=detect_stack_use_after_return=1:$(ASAN_OPTIONS) \
	UBSAN_OPTIONS=print_stacktrace=1:$(UBSAN_OPTIONS)
tsan_RUN := TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:$(TSAN_OPTIONS) $(FIXED)

# variant NAME: its objects and programs in build/ctest/NAME, and a target that runs them.
define variant
$(1)_OBJECTS := $$(patsubst %.c,build/ctest/$(1)/%.o,$(SOURCES) $(CSHARED))

build/ctest/$(1)/%.o: %.c Makefile
	@mkdir -p $$(@D)
	@$$(CC) $$(CTEST_CFLAGS) $$($(1)_CFLAGS) $$(CFLAGS) -c $$< -o $$@

build/ctest/$(1)/test_%: build/ctest/$(1)/tests/c/test_%.o $$($(1)_OBJECTS)
	@$$(CC) $$(CTEST_CFLAGS) $$($(1)_CFLAGS) $$(CFLAGS) $$^ $$(LDFLAGS) -ldl -o $$@

build/ctest/$(1)/test_intercept build/ctest/$(1)/test_exec: | $$(STANDINS:%=build/ctest/standin-%.so)
build/ctest/$(1)/test_intercept: private LDFLAGS += -Wl,--export-dynamic-symbol=standin_wait
# As the library is linked: to look a symbol up takes kilobytes of stack.
build/ctest/$(1)/test_handler_stack: private LDFLAGS += -Wl,-z,now
build/ctest/$(1)/fuzz_proc: private LDFLAGS += $$(PROC_LDFLAGS)
# What fuzzing has found, or is to begin with, played again, and random inputs.
build/ctest/$(1)/fuzz_%: build/ctest/$(1)/tests/fuzz/fuzz_%.o \
		build/ctest/$(1)/tests/fuzz/replay.o $$($(1)_OBJECTS)
	@$$(CC) $$(CTEST_CFLAGS) $$($(1)_CFLAGS) $$(CFLAGS) $$^ $$(LDFLAGS) -ldl -o $$@

build/ctest/$(1)/soak: $$(SOAKED:%.c=build/ctest/$(1)/%.o) $$($(1)_OBJECTS)
	@$$(CC) $$(CTEST_CFLAGS) $$($(1)_CFLAGS) $$(CFLAGS) $$^ $$(LDFLAGS) -ldl $$(VERBS_LIBS) -o $$@

.PHONY: ctest-$(1)
.PRECIOUS: build/ctest/$(1)/%.o
ctest-$(1): $$(patsubst %,build/ctest/$(1)/%,$$(CTESTS) $$(FUZZERS))
	@test -n '$$^' || { echo 'no tests/c/test_*.c' >&2; exit 1; }
	@failed=0; for program in $$^; do \
		if $$($(1)_RUN) timeout 600 $$$$program >$$$$program.log 2>&1; \
		then echo "ok      $(1)	$$$${program##*/}"; \
		else echo "FAILED  $(1)	$$$${program##*/} ($$$$?)"; cat $$$$program.log; failed=1; fi; \
	done; exit $$$$failed
-include $$($(1)_OBJECTS:.o=.d) $(CTESTS:%=build/ctest/$(1)/tests/c/%.d)
-include $(FUZZERS:%=build/ctest/$(1)/tests/fuzz/%.d) build/ctest/$(1)/tests/fuzz/replay.d
-include $(SOAKED:%.c=build/ctest/$(1)/%.d)
endef

$(foreach name,debug release asan tsan coverage,$(eval $(call variant,$(name))))

ctest: ctest-debug ctest-release	## the engine's own tests, with asserts and with the release flags
asan: ctest-asan	## the same under AddressSanitizer and UndefinedBehaviorSanitizer
tsan: ctest-tsan	## the same under ThreadSanitizer

## ---- Fuzzing: tests/fuzz -------------------------------------------------------------

FUZZ_CC := clang
FUZZ_CFLAGS := -O1 -UNDEBUG -fno-omit-frame-pointer -fsanitize=address,undefined \
	-fno-sanitize-recover=all
FUZZ_OBJECTS := $(patsubst %.c,build/fuzz/%.o,$(SOURCES) $(CSHARED))

# New is what is new in the engine, not in what tests it.
build/fuzz/csrc/%.o: FUZZ_CFLAGS += -fsanitize=fuzzer-no-link
build/fuzz/%.o: %.c Makefile
	@mkdir -p $(@D)
	@$(FUZZ_CC) $(CTEST_CFLAGS) $(FUZZ_CFLAGS) -c $< -o $@

build/fuzz/fuzz_proc: private LDFLAGS += $(PROC_LDFLAGS)
build/fuzz/fuzz_%: build/fuzz/tests/fuzz/fuzz_%.o $(FUZZ_OBJECTS)
	@$(FUZZ_CC) $(CTEST_CFLAGS) $(FUZZ_CFLAGS) -fsanitize=fuzzer $^ $(LDFLAGS) -ldl -o $@

.PRECIOUS: build/fuzz/%.o
-include $(FUZZ_OBJECTS:.o=.d) $(FUZZERS:%=build/fuzz/tests/fuzz/%.d)

# What was found before comes first; what is new stays in build/fuzz/corpus for the next run.
fuzz: $(FUZZERS:%=build/fuzz/%)	## $(SECONDS) seconds of each fuzzer, on clang's libFuzzer
	@failed=0; for program in $^; do name=$${program##*/}; \
		mkdir -p build/fuzz/corpus/$$name; \
		if $(asan_RUN) $$program -max_total_time=$(SECONDS) -timeout=60 -max_len=4096 \
			-artifact_prefix=build/fuzz/$$name- -print_final_stats=1 \
			build/fuzz/corpus/$$name tests/fuzz/corpus/$$name >$$program.log 2>&1; \
		then echo "ok      $$name	$$(grep -o 'cov: [0-9]*' $$program.log | tail -n 1)," \
			"$$(sed -n 's/stat::number_of_executed_units: *//p' $$program.log) inputs"; \
		else echo "FAILED  $$name"; tail -n 60 $$program.log; failed=1; fi; \
	done; exit $$failed

# The modules and the engine, in an interpreter that knows nothing of it: the runtimes come first.
ASAN_PYTHON := build/asan-python
ASAN_RUNTIMES = $(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libubsan.so)
# Children that die of a page they lack are what is tested.
ASAN_PYTHON_RUN = ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:handle_segv=0:$(ASAN_OPTIONS) \
	UBSAN_OPTIONS=print_stacktrace=1:$(UBSAN_OPTIONS) PYTHONMALLOC=malloc \
	PYTHONPATH=$(CURDIR)/$(ASAN_PYTHON)/lib LD_PRELOAD='$(ASAN_RUNTIMES)'
ASAN_PYTHON_TESTS := $(patsubst %,tests/test_%.py,buffers verbs)

$(ASAN_PYTHON)/built: setup.py $(SOURCES) $(HEADERS) $(MODULES) $(wildcard rdmafork/*.py) | $(BUILT)
	@mkdir -p $(@D)
	@CFLAGS='$(CFLAGS) -g1 $(asan_CFLAGS) -U_FORTIFY_SOURCE' \
		LDFLAGS='$(LDFLAGS) -fsanitize=address,undefined' $(BIN)/python setup.py -q build \
		--build-base $(@D) --build-lib $(@D)/lib
	@touch $@

asan-python: $(ASAN_PYTHON)/built	## $(SECONDS) seconds of any calls from Python, and tests, under the sanitizers
	@$(ASAN_PYTHON_RUN) $(BIN)/python tests/fuzz/surface.py $(SECONDS)
	@RDMAFORK_TEST_PRELOAD='$(ASAN_RUNTIMES)' $(ASAN_PYTHON_RUN) \
		$(BIN)/python -m pytest -q $(ASAN_PYTHON_TESTS) $(PYTEST_ARGS)

## ---- What the tests reach -------------------------------------------------------------

COVERED := $(VENV)/coverage
COVERAGE := build/coverage
# A child's counts hold its parent's once more, so they grow to what gcovr takes for errors.
GCOVR := --gcov-ignore-parse-errors=all --gcov-suspicious-hits-threshold=0 \
	--merge-mode-functions=separate
COVERAGE_BUILD = RDMAFORK_LINETRACE=1 $(BIN)/python setup.py -q build --build-base $(COVERAGE) \
	--build-lib $(COVERAGE)/lib
# It follows each instruction, and makes a child at each: most would be those that count.
COVERAGE_CTESTS := $(filter-out test_steps,$(CTESTS))
# What only Python, a preloaded library or a device has the engine do, and all the modules do.
COVERAGE_TESTS ?= $(patsubst %,tests/test_%.py,witness intercept child engine_once covered trace \
	buffer buffer_life buffers clocks pins errors modes on_fork verbs)
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
$(COVERAGE)/built: setup.py tests/c/coverage.h $(SOURCES) $(HEADERS) $(MODULES) \
		$(wildcard rdmafork/*.py rdmafork/cli/*.py) | $(BUILT)
	@mkdir -p $(@D)
	@$(COVERAGE_BUILD)
	@rm $(COVERAGE)/lib/rdmafork/librdmafork.so
	@CFLAGS='-O0 --coverage -fprofile-update=atomic -U_FORTIFY_SOURCE -include tests/c/coverage.h' \
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

## ---- Soaking: tests/soak -------------------------------------------------------------

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

## ---- What it costs ------------------------------------------------------------------

RESULTS := benchmarks/results
AT_DEVICE := device unmodified
BENCHMARKS := $(filter-out _% $(AT_DEVICE),$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py)))
MPIRUN := env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	$(BIN)/mpirun -n 2 --oversubscribe

$(FIGURES): pyproject.toml Makefile | $(BUILT)
	@$(INSTALL) 'rdmafork[bench,mpi]'
	@touch $@

bench: $(BUILT) $(FIGURES)	## every benchmark in full, its JSON and its figures in benchmarks/results
	@failed=0; for name in $(BENCHMARKS); do \
		[ $$name = mpi ] && run='$(MPIRUN)' || run=; \
		$$run $(BIN)/python -m rdmafork.benchmarks.$$name \
			--json $(RESULTS)/$$name.json --plot $(RESULTS) || failed=1; \
	done; exit $$failed

bench-vm: export PYTEST_ARGS := tests/vm/bench.py
bench-vm: $(BUILT) $(GUESTS) $(FIGURES)	## those that need a device, in a VM with a soft-RoCE device, on Debian's kernel 6.1
	@$(BIN)/python tests/vm/run.py 6.1
	@cp $(AT_DEVICE:%=build/vm/6.1/%.json) $(RESULTS)
	@$(BIN)/python -m rdmafork.benchmarks $(AT_DEVICE:%=$(RESULTS)/%.json) $(RESULTS)

bench-check: $(BUILT)	## does what is claimed of the costs hold on this machine?
	@$(BIN)/python -m rdmafork.benchmarks._claims

## ---- Documentation: docs --------------------------------------------------------------

$(PAGES): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[docs]'
	@touch $@

# All anew, as what the pages show is of the whole tree. What needs no network is all there is.
docs: $(BUILT) $(PAGES)	## the documentation, in build/docs/html; a warning is an error
	@$(BIN)/sphinx-build -q -E -W -n --keep-going -d build/docs/doctrees docs build/docs/html
	@echo build/docs/html/index.html

## ---- Packages -----------------------------------------------------------------------

# A wheel for glibc 2.28 must not use what later ones have, and what a compiler here finds is this
# machine's: 2.36 gives pthread_create() the version 2.34. zig has the symbols of every glibc, and
# needs neither a container nor root. CFLAGS, empty too, take the place of Python's own.
ZIG_CC = $(abspath $(BIN))/python -m ziglang cc -target $(shell uname -m)-linux-gnu.2.28
PLATFORM = manylinux_2_28_$(shell uname -m)

$(PACKAGERS): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[wheel]'
	@touch $@

wheel: $(PACKAGERS)	## sdist, and from it a wheel for this Python and glibc 2.28, in dist
	@rm -rf dist build/wheel && mkdir -p build
	@CC='$(ZIG_CC)' LDSHARED='$(ZIG_CC) -shared' CFLAGS='$(CFLAGS)' \
		$(BIN)/pyproject-build -o build/wheel >build/wheel.log 2>&1 || \
		{ cat build/wheel.log; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" auditwheel -v repair --strip --only-plat --plat $(PLATFORM) \
		-w dist build/wheel/*.whl >>build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@cp build/wheel/*.tar.gz dist
	@$(BIN)/auditwheel show dist/*.whl
	@$(BIN)/python -c 'import sys, zipfile; [file] = map(zipfile.ZipFile, sys.argv[1:]); \
		print(sum(part.file_size for part in file.filelist), "bytes installed")' dist/*.whl
	@ls -sh dist

release-check:	## is this commit ready to be tagged as $(VERSION)?
	@.ci/release-check $(VERSION)

test-wheel: wheel	## pytest $(PYTEST_ARGS) on the wheel, in an environment of its own
	@tests/installed.sh $(PYTEST_ARGS)

test-pythons: wheel	## the sdist with Debian sid's Pythons, 3.13 and later (needs root)
	@tests/roots.sh pythons

test-bare: wheel	## the wheel where there is nothing but Python (needs root)
	@tests/roots.sh bare

## ---- Appearance ---------------------------------------------------------------------

# Trailing comments and macros' values may be aligned by hand: only what is left of them counts.
TIGHT := sed -E 's/([^ \t])[ \t]+/\1 /g'
CFORMATTED = $(wildcard $(addsuffix /*.[ch],csrc csrc/preload tests/c tests/fuzz tests/soak examples/*))
# Not a Python module; what Cython adds by itself.
STUBLESS := 'rdmafork\.librdmafork' '.*\.__test__' '.*\.__(reduce|setstate)_cython__' '.*\.__pyx_capi__' \
	'rdmafork\._(core\.Registration|verbs\.(ProtectionDomain|MemoryRegion))\.__init__'
EXAMPLES = build/readme $(wildcard examples/*.py examples/*/*/__init__.py)
PYTHON_TREES = setup.py $(wildcard rdmafork tests benchmarks docs examples)

$(LINTERS): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[lint]'
	@touch $@

lint-c: $(LINTERS)
	@for file in $(CFORMATTED); do \
		$(BIN)/clang-format $$file | $(TIGHT) | diff -u --label $$file --label formatted \
			<($(TIGHT) $$file) - || exit 1; \
		expand $$file | grep -nE '^.{101}' && { echo "$$file: over 100 columns"; exit 1; }; \
	done; echo clang-format

lint: lint-c	## every static check; changes nothing
	$(BIN)/ruff check $(PYTHON_TREES)
	$(BIN)/ruff format --check $(PYTHON_TREES)
	PATH="$(BIN):$$PATH" $(BIN)/cython-lint $(MODULES) $(wildcard examples/*/*/*.pyx)
	$(BIN)/codespell
	@for cc in gcc clang; do if command -v $$cc >/dev/null; then for flags in -UNDEBUG -DNDEBUG; do \
		for file in $(SOURCES); do \
			$$cc -std=gnu11 -O2 -Icsrc -Wall -Wextra -Wshadow -Werror -fPIC -pthread \
				$$flags -c $$file -o /dev/null || exit 1; \
		done; done; echo "$$cc -Wall -Wextra -Wshadow -Werror"; fi; done
	@$(BIN)/python tests/layers.py
	$(BIN)/mypy
	@mkdir -p build/readme
	@awk '/^```python/ { file = "build/readme/example" ++n ".py"; next } /^```/ { file = "" } \
		file { print > file }' README.md
	$(BIN)/mypy $(EXAMPLES)
	@rm -rf build/typed && $(BIN)/python setup.py -q build_py -d build/typed
	@if $(BIN)/pyright --version >/dev/null 2>&1; then $(BIN)/pyright $(EXAMPLES) && \
		{ PYTHONPATH=build/typed $(BIN)/pyright --verifytypes rdmafork --ignoreexternal \
			>build/typed.log || { cat build/typed.log; exit 1; }; grep score build/typed.log; }; \
		else echo 'pyright: needs node, and npm the first time'; fi
	$(BIN)/stubtest rdmafork --mypy-config-file pyproject.toml --ignore-unused-allowlist --allowlist <(printf '%s\n' $(STUBLESS))

format: $(LINTERS)	## rewrite Python as lint wants it
	$(BIN)/ruff check --fix --exit-zero --quiet $(PYTHON_TREES)
	$(BIN)/ruff format $(PYTHON_TREES)

clean:	## remove what was built, .venv too
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f rdmafork/*.so rdmafork/*.c rdmafork/_version.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
