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
MODULES := $(wildcard rdmafork/*.pyx rdmafork/*.pxd benchmarks/*.pyx)
CTESTS := $(patsubst tests/engine/%.c,%,$(wildcard tests/engine/test_*.c))
SOAK := build/ctest/debug/soak
FUZZERS := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
# Programs are linked with this; with nothing, RPATH=, where the loader searches LIBDIR by itself.
RPATH ?= -Wl,-rpath,$${libdir}
SECONDS := 60
HOURS ?= 1

.DEFAULT_GOAL := help
SHELL := /bin/bash
.PHONY: help demo build install check test test-freethreaded sentences docs release-check clean
.DELETE_ON_ERROR:

help:	## print the targets (the default)
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 19

demo: build	## what fork() does to pinned memory here, without and with rdmafork
	@$(BIN)/rdmafork demo

build: $(BUILT)	## an editable install in .venv, rebuilt when a source has changed
	@:

install: build	## the library, its header and rdmafork.pc, for C: PREFIX=/usr/local
	@install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(LIBDIR)/pkgconfig
	@install -m 644 csrc/rdmafork.h $(DESTDIR)$(PREFIX)/include
	@install -m 755 rdmafork/librdmafork.so $(DESTDIR)$(LIBDIR)
	@sed -e '/^#/d' -e 's|^libdir=.*|libdir=$(LIBDIR)|' \
		-e 's|^includedir=.*|includedir=$(PREFIX)/include|' -e 's|-Wl,-rpath,[^ ]* |$(RPATH) |' \
		rdmafork/pkgconfig/rdmafork.pc >$(DESTDIR)$(LIBDIR)/pkgconfig/rdmafork.pc

SLOW := $(patsubst %,test_%,steps fork_threads huge descriptors partial_pages fork mixture memory_limit)
QUICK_TESTS := tests/package/test_docs_lines.py \
	$(patsubst %,tests/surface/test_%.py,modes protection errors buffers)
changed = $(shell git diff --name-only --diff-filter=d HEAD -- $(foreach pattern,$(1),'$(pattern)'))
check: build	## a minute of the tests and of lint, for an edit
	@$(MAKE) --no-print-directory ctest-debug CTESTS='$(filter-out $(SLOW),$(CTESTS))' FUZZERS=
	@$(BIN)/python -m pytest -q -n auto --dist loadfile $(QUICK_TESTS)
	@$(MAKE) --no-print-directory lint-c lint-python CFORMATTED='$(call changed,*.[ch])' \
		PYTHON_TREES='$(call changed,*.py *.pyi)' CYTHON='$(call changed,*.pyx *.pxd)'
	@$(BIN)/python tests/tools/layers.py >/dev/null

# The share of the random and the volume tests: 1 without make, and .ci/run has its own.
test: export SCALE ?= 0.1
# tests/conftest.py gives the files their order: the longest come first.
test: build ctest $(SOAK)	## the engine's tests, then pytest $(PYTEST_ARGS), a process a core; all random rounds with SCALE=1
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

FREE := build/freethreaded
FREE_PYTHON := $(FREE)/$(FREETHREADED)/bin/python3
# Its modules lie beside the others, by other names; the library is the same, byte for byte.
# No PYTHON_GIL=0: a module that turned the GIL on would be an error, as all warnings are.
# Then the listed tests again, in four threads at once: they own, or only read, all they touch.
# Others fork, or count resources of the whole process. No plugin does it, as most tests have a
# process of their own, and the threads have to be there.
test-freethreaded: $(FREE_PYTHON)	## pytest $(PYTEST_ARGS) on CPython $(FREETHREADED) without the GIL, built from Debian's source
	@PIP_PREFER_BINARY=1 $(MAKE) --no-print-directory VENV=$(FREE)/venv-$(FREETHREADED) PYTHON=$< build
	@$(FREE)/venv-$(FREETHREADED)/bin/python -X dev -m pytest $(PYTEST_ARGS)
	@$(if $(PYTEST_ARGS),,RDMAFORK_TEST_THREADS=4 $(FREE)/venv-$(FREETHREADED)/bin/python -m pytest @tests/tools/safe_in_four_threads.txt)

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
# `pip install .` builds in build/ too, with other flags: its objects are not taken for ours.
REBUILD = $(FLAGS) $(BIN)/python setup.py -q build_ext --inplace -b build/inplace -t build/inplace

# pip the first time, and when the metadata has changed; else only changed sources are rebuilt.
$(BUILT): pyproject.toml setup.py $(SOURCES) $(HEADERS) $(MODULES) | $(BIN)/python
	@$(if $(filter pyproject.toml setup.py,$?),$(INSTALL) $(EDITABLE),$(REBUILD))
	@touch $@

## ---- Documentation: docs --------------------------------------------------------------

$(PAGES): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[bench,docs]'
	@touch $@

# All pages anew, as they show the whole tree. Nothing here needs a network.
docs: $(BUILT) $(PAGES)	## the documentation, in build/docs/html; a warning is an error
	@$(BIN)/python -m rdmafork.benchmarks $(RESULTS)/*.json build/figures >/dev/null
	@$(BIN)/sphinx-build -q -E -W -n --keep-going -d build/docs/doctrees docs build/docs/html
	@echo build/docs/html/index.html

sentences: build	## all that a user can be told, to be read in one go
	@$(BIN)/python tests/tools/sentences.py

## ---- The rest ------------------------------------------------------------------------

release-check:	## is this commit ready to be tagged as $(VERSION)?
	@.ci/release-check $(VERSION)

clean:	## remove what was built, .venv too
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f rdmafork/*.so rdmafork/*.c benchmarks/*.so benchmarks/*.c rdmafork/_version.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

include $(addsuffix .mk,tests/engine/engine tests/soak/soak tests/vm/vm benchmarks/bench \
	tests/tools/coverage tests/tools/lint tests/tools/torch tests/tools/wheel)
