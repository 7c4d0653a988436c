# Static checks. Included by the Makefile.

.PHONY: lint lint-c lint-python format

# Trailing comments and macros' values may be aligned by hand: spaces before them do not count.
TIGHT := sed -E 's/([^ \t])[ \t]+/\1 /g'
CFORMATTED = $(wildcard $(addsuffix /*.[ch],csrc csrc/preload tests/engine tests/fuzz tests/soak examples/*))
# Not a Python module; names that Cython adds by itself.
STUBLESS := 'rdmafork\.librdmafork' '.*\.__test__' '.*\.__(reduce|setstate)_cython__' '.*\.__pyx_capi__' \
	'rdmafork\._(core\.Registration|verbs\.(ProtectionDomain|MemoryRegion))\.__init__'
EXAMPLES = build/readme $(wildcard examples/*.py examples/*/*/__init__.py)
PYTHON_TREES = setup.py $(wildcard rdmafork tests benchmarks docs examples)
CYTHON = $(MODULES) $(wildcard examples/*/*/*.pyx)

$(LINTERS): pyproject.toml | $(BUILT)
	@$(INSTALL) 'rdmafork[lint]'
	@touch $@

lint-c: $(LINTERS)
	@for file in $(CFORMATTED); do \
		$(BIN)/clang-format $$file | $(TIGHT) | diff -u --label $$file --label formatted \
			<($(TIGHT) $$file) - || exit 1; \
		expand $$file | grep -nE '^.{101}' && { echo "$$file: over 100 columns"; exit 1; }; \
	done; echo clang-format

lint-python: $(LINTERS)
	$(if $(PYTHON_TREES),$(BIN)/ruff check $(PYTHON_TREES))
	$(if $(PYTHON_TREES),$(BIN)/ruff format --check $(PYTHON_TREES))
	$(if $(CYTHON),PATH="$(BIN):$$PATH" $(BIN)/cython-lint $(CYTHON))

lint: lint-c lint-python	## every static check; changes nothing
	$(BIN)/codespell
	@for cc in gcc clang; do if command -v $$cc >/dev/null; then for flags in -UNDEBUG -DNDEBUG; do \
		for file in $(SOURCES); do \
			$$cc -std=gnu11 -O2 -Icsrc -Wall -Wextra -Wshadow -Werror -fPIC -pthread \
				$$flags -c $$file -o /dev/null || exit 1; \
		done; done; echo "$$cc -Wall -Wextra -Wshadow -Werror"; fi; done
	@$(BIN)/python tests/tools/layers.py
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
