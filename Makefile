# make help prints the targets. Everything they need is set up in .venv and build/.

PYTHON ?= python3
CC ?= cc
PYTEST_ARGS ?=
KERNELS ?= 5.10 6.1 6.12 7.3
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
CTESTS := $(patsubst tests/engine/%.c,%,$(wildcard tests/engine/test_*.c))
SOAK := build/ctest/debug/soak
FUZZERS := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
FIELD := build/field
PREFIX ?= /usr/local
SECONDS := 60
HOURS ?= 1

.DEFAULT_GOAL := help
SHELL := /bin/bash
.PHONY: help demo build install check test sentences mutants test-vm tried-with test-wheel test-pythons test-freethreaded \
	test-bare ctest asan tsan fuzz asan-python coverage soak soak-vm bench bench-vm bench-check docs \
	wheel release-check lint lint-c format clean
.DELETE_ON_ERROR:

help:	## print the targets (the default)
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 13

demo: build	## see fork() take registered pages away, and not with rdmafork
	@$(BIN)/rdmafork demo

build: $(BUILT)	## an editable install in .venv, rebuilt when a source has changed
	@:

INSTALLED = $(DESTDIR)$(PREFIX)
install: build	## the library, its header and rdmafork.pc, for C: PREFIX=/usr/local
	@install -d $(INSTALLED)/include $(INSTALLED)/lib/pkgconfig
	@install -m 644 csrc/rdmafork.h $(INSTALLED)/include
	@install -m 755 rdmafork/librdmafork.so $(INSTALLED)/lib
	@sed 's|^includedir=.*|includedir=$${libdir}/../include|' rdmafork/pkgconfig/rdmafork.pc \
		>$(INSTALLED)/lib/pkgconfig/rdmafork.pc

SLOW := $(patsubst %,test_%,steps fork_threads huge descriptors edges fork mixture memory_limit)
QUICK_TESTS := tests/package/test_docs_lines.py \
	$(patsubst %,tests/surface/test_%.py,modes protection errors buffers)
check: build	## a minute of the tests and of lint, for an edit
	@$(MAKE) --no-print-directory ctest-debug CTESTS='$(filter-out $(SLOW),$(CTESTS))' FUZZERS=
	@$(BIN)/python -m pytest -q -n auto --dist loadfile $(QUICK_TESTS)
	@$(MAKE) --no-print-directory lint-c CFORMATTED="$$(git diff --name-only HEAD -- '*.[ch]')"
	@$(BIN)/python tests/tools/layers.py >/dev/null

test: build ctest $(SOAK)	## the tests of the engine, then pytest $(PYTEST_ARGS), a process a core
	@$(BIN)/python -m pytest -n auto --dist loadfile $(PYTEST_ARGS)

test-vm: export PYTEST_ARGS := $(PYTEST_ARGS)
test-vm: $(BUILT) $(GUESTS) $(CTESTS:%=build/ctest/debug/%) $(SOAK) $(FIELD)/installed	## in VMs with a soft-RoCE device, on Debian's kernels $(KERNELS)
	@$(BIN)/python tests/vm/run.py $(KERNELS)

# Programs nobody here wrote, in an environment of their own. What cannot be had is not tested.
# nixl asks for torch, gigabytes of which it uses nothing here.
FIELD_PACKAGES := dlslime ibverbs mooncake-transfer-engine-non-cuda numpy '--no-deps nixl-cu12'
$(FIELD)/installed: Makefile
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
	@$(if $(PYTEST_ARGS),,RDMAFORK_TEST_THREADS=4 $(FREE)/venv-$(FREETHREADED)/bin/python -m pytest @tests/tools/parallel.txt)

$(FREE_PYTHON):
	@$(PYTHON) tests/tools/freethreaded.py $(FREETHREADED)

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

# As the published wheels are built: pyproject.toml has the flags. $CFLAGS come after them.
PUBLISHED_x86_64 := -fcf-protection
PUBLISHED_aarch64 := -mbranch-protection=standard
PUBLISHED := $(shell sed -n 's/^CFLAGS = "\(.*\)"/\1/p' pyproject.toml) $(PUBLISHED_$(shell uname -m))
PUBLISHED_LINK := $(shell sed -n 's/^LDFLAGS = "\(.*\)"/\1/p' pyproject.toml)
FLAGS = CFLAGS='$(PUBLISHED) $(CFLAGS)' LDFLAGS='$(PUBLISHED_LINK) $(LDFLAGS)'
INSTALL = $(FLAGS) $(BIN)/python -m pip install -q --disable-pip-version-check
EDITABLE := -e '.[dev,test]'
REBUILD = $(FLAGS) $(BIN)/python setup.py -q build_ext --inplace

# The first time, and when the metadata has changed, pip; else what has changed is rebuilt.
$(BUILT): pyproject.toml setup.py $(SOURCES) $(HEADERS) $(MODULES) | $(BIN)/python
	@$(if $(filter pyproject.toml setup.py,$?),$(INSTALL) $(EDITABLE),$(REBUILD))
	@touch $@

# By the name of what is installed, what an extra asks for is added and nothing built again.
$(GUESTS): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[vm]'
	@touch $@

include tests/engine/engine.mk tests/tools/coverage.mk tests/tools/lint.mk

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
README_FIGURE := fork_latency-size.svg
AT_DEVICE := device unmodified
BENCHMARKS := $(filter-out _% $(AT_DEVICE),$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py)))
MPIRUN := env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	$(BIN)/mpirun -n 2 --oversubscribe

$(FIGURES): pyproject.toml Makefile | $(BUILT)
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

## ---- Documentation: docs --------------------------------------------------------------

$(PAGES): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[bench,docs]'
	@touch $@

sentences: build	## all that a user can be told, to be read in one go
	@$(BIN)/python tests/tools/sentences.py

# All anew, as what the pages show is of the whole tree. What needs no network is all there is.
docs: $(BUILT) $(PAGES)	## the documentation, in build/docs/html; a warning is an error
	@$(BIN)/python -m rdmafork.benchmarks $(RESULTS)/*.json build/figures >/dev/null
	@$(BIN)/sphinx-build -q -E -W -n --keep-going -d build/docs/doctrees docs build/docs/html
	@echo build/docs/html/index.html

## ---- Packages -----------------------------------------------------------------------

# A wheel for glibc 2.28 must not use what later ones have, and what a compiler here finds is this
# machine's: 2.36 gives pthread_create() the version 2.34. zig has the symbols of every glibc, and
# needs neither a container nor root.
ZIG_CC = $(abspath $(BIN))/python -m ziglang cc -target $(shell uname -m)-linux-gnu.2.28
PLATFORM = manylinux_2_28_$(shell uname -m)

$(PACKAGERS): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[wheel]'
	@touch $@

wheel: $(PACKAGERS)	## sdist, and from it a wheel for this Python and glibc 2.28, in dist
	@rm -rf dist build/wheel && mkdir -p build
	@$(FLAGS) CC='$(ZIG_CC)' LDSHARED='$(ZIG_CC) -shared' \
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
	@tests/tools/installed.sh $(PYTEST_ARGS)

test-pythons: wheel	## the sdist with Debian sid's Pythons, 3.13 and later (needs root)
	@tests/tools/roots.sh pythons

test-bare: wheel	## the wheel where there is nothing but Python (needs root)
	@tests/tools/roots.sh bare

clean:	## remove what was built, .venv too
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f rdmafork/*.so rdmafork/*.c rdmafork/_version.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
