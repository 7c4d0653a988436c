# A wheel, and its tests far from the checkout. Included by the Makefile.

.PHONY: wheel test-wheel test-pythons test-bare test-debian

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

test-wheel: wheel	## pytest $(PYTEST_ARGS) on the wheel, in an environment of its own
	@tests/tools/installed.sh $(PYTEST_ARGS)

test-pythons: wheel	## the sdist with Debian sid's Pythons, 3.13 and later (needs root)
	@tests/tools/roots.sh pythons

test-bare: wheel	## the wheel where there is nothing but Python (needs root)
	@tests/tools/roots.sh bare

test-debian: wheel	## Debian packages from packaging/debian, in sid (needs root)
	@tests/tools/roots.sh debian
