# The engine alone: its own tests, sanitizers and fuzzers. Included by the Makefile.

.PHONY: ctest asan tsan mutants mutants-python fuzz asan-python

## ---- The engine alone: tests/engine ------------------------------------------------------

CSHARED := $(filter-out tests/engine/test_%,$(wildcard tests/engine/*.c))
CTEST_CFLAGS := -std=gnu11 -g -DRF_TESTING -Icsrc -Itests/engine -Itests/fuzz -pthread -MMD -MP \
	-Wall -Wextra -Wshadow -Werror=implicit-function-declaration
, := ,
# ThreadSanitizer cannot place its shadow where the kernel randomises too much.
FIXED := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# Flags of single programs. fuzz_engine runs the fork handlers by itself.
fuzz_engine_LDFLAGS := -Wl,--wrap=__register_atfork
# fuzz_proc answers in place of the kernel.
fuzz_proc_LDFLAGS := $(addprefix -Wl$(,)--wrap=,rf_sys_open rf_sys_read rf_sys_close rf_sys_map_over \
	socket setsockopt syscall)
# To answer as a device does.
test_descriptors_LDFLAGS := -Wl,--wrap=ioctl
# As the library is linked: to look a symbol up takes kilobytes of stack.
test_handler_stack_LDFLAGS := -Wl,-z,now
test_intercept_LDFLAGS := $(addprefix -Wl$(,)--export-dynamic-symbol=,standin_wait standin_asks)

# Libraries that test_intercept loads, with the shape of libibverbs, in all the ways it is linked.
STANDINS := got relro direct asked
standin_got := -Wl,-z,lazy
standin_relro := -Wl,-z,relro,-z,now
standin_direct := -Wl,-Bsymbolic-functions
standin_asked := -DOTHER_CODE

build/ctest/standin-%.so: tests/standin.c tests/engine/engine.mk
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
	-include tests/engine/coverage.h -Wl,--wrap=_exit

asan_RUN := ASAN_OPTIONS=detect_stack_use_after_return=1:$(ASAN_OPTIONS) \
	UBSAN_OPTIONS=print_stacktrace=1:$(UBSAN_OPTIONS)
tsan_RUN := TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:$(TSAN_OPTIONS) $(FIXED)

# Programs own what they touch, and share the pool of huge pages through a lock.
CORES := $(shell nproc)

# variant NAME: its objects and programs in build/ctest/NAME, and a target that runs them.
define variant
$(1)_OBJECTS := $$(patsubst %.c,build/ctest/$(1)/%.o,$(SOURCES) $(CSHARED))

build/ctest/$(1)/%.o: %.c tests/engine/engine.mk
	@mkdir -p $$(@D)
	@$$(CC) $$(CTEST_CFLAGS) $$($(1)_CFLAGS) $$(CFLAGS) -c $$< -o $$@

build/ctest/$(1)/test_%: build/ctest/$(1)/tests/engine/test_%.o $$($(1)_OBJECTS)
	@$$(CC) $$(CTEST_CFLAGS) $$($(1)_CFLAGS) $$(CFLAGS) $$^ $$($$(@F)_LDFLAGS) $$(LDFLAGS) -ldl -o $$@

build/ctest/$(1)/test_intercept build/ctest/$(1)/test_exec: | $$(STANDINS:%=build/ctest/standin-%.so)
# A fuzzer's corpus, played again, and random inputs.
build/ctest/$(1)/fuzz_%: build/ctest/$(1)/tests/fuzz/fuzz_%.o \
		build/ctest/$(1)/tests/fuzz/replay.o $$($(1)_OBJECTS)
	@$$(CC) $$(CTEST_CFLAGS) $$($(1)_CFLAGS) $$(CFLAGS) $$^ $$($$(@F)_LDFLAGS) $$(LDFLAGS) -ldl -o $$@

build/ctest/$(1)/soak: $$(SOAKED:%.c=build/ctest/$(1)/%.o) $$($(1)_OBJECTS)
	@$$(CC) $$(CTEST_CFLAGS) $$($(1)_CFLAGS) $$(CFLAGS) $$^ $$(LDFLAGS) -ldl $$(VERBS_LIBS) -o $$@

.PHONY: ctest-$(1)
.PRECIOUS: build/ctest/$(1)/%.o
# The longest come first.
ctest-$(1): $$(patsubst %,build/ctest/$(1)/%,$$(filter $$(SLOW),$$(CTESTS)) $$(CTESTS) $$(FUZZERS))
	@test -n '$$^' || { echo 'no tests/engine/test_*.c' >&2; exit 1; }
	@printf '%s\n' $$^ | xargs -n 1 -P $(CORES) env $$($(1)_RUN) tests/engine/run.sh $(1)
-include $$($(1)_OBJECTS:.o=.d) $(CTESTS:%=build/ctest/$(1)/tests/engine/%.d)
-include $(FUZZERS:%=build/ctest/$(1)/tests/fuzz/%.d) build/ctest/$(1)/tests/fuzz/replay.d
-include $(SOAKED:%.c=build/ctest/$(1)/%.d)
endef

$(foreach name,debug release asan tsan coverage,$(eval $(call variant,$(name))))

ctest: ctest-debug ctest-release	## the engine's own tests, with asserts and with the release flags
asan: ctest-asan	## the same under AddressSanitizer and UndefinedBehaviorSanitizer
tsan: ctest-tsan	## the same under ThreadSanitizer

SAMPLE := 100
SEED := 1
mutants: FILES := $(SOURCES) $(filter %.h,$(HEADERS))
mutants: $(patsubst %,build/ctest/debug/%,$(CTESTS) $(FUZZERS))	## $(SAMPLE) small changes of csrc/, by $(SEED): do the tests notice?
	@$(PYTHON) tests/tools/mutants.py --compiler '$(CC) $(CTEST_CFLAGS) $(debug_CFLAGS) $(CFLAGS)' \
		--objects '$(debug_OBJECTS)' --quick '$(filter-out $(SLOW),$(CTESTS) $(FUZZERS))' --slow '$(SLOW)' \
		--link '$(foreach name,$(CTESTS) $(FUZZERS),$($(name)_LDFLAGS:%=$(name)=%))' \
		--sample $(SAMPLE) --seed $(SEED) --list build/mutants.tsv $(FILES)

# In a copy of the tree with a build of its own.
mutants-python: FILES := $(shell git ls-files 'rdmafork/*.py' 'rdmafork/*.pyx')
mutants-python:	## the same of rdmafork/ and of the tests in Python
	@$(PYTHON) tests/tools/mutants_python.py --sample $(SAMPLE) --seed $(SEED) \
		--list build/mutants-python.tsv --seconds 150 $(FILES)

## ---- Fuzzing: tests/fuzz -------------------------------------------------------------

FUZZ_CC := clang
FUZZ_CFLAGS := -O1 -UNDEBUG -fno-omit-frame-pointer -fsanitize=address,undefined \
	-fno-sanitize-recover=all
FUZZ_OBJECTS := $(patsubst %.c,build/fuzz/%.o,$(SOURCES) $(CSHARED))

# New code is looked for in the engine, not in its tests.
build/fuzz/csrc/%.o: FUZZ_CFLAGS += -fsanitize=fuzzer-no-link
build/fuzz/%.o: %.c tests/engine/engine.mk
	@mkdir -p $(@D)
	@$(FUZZ_CC) $(CTEST_CFLAGS) $(FUZZ_CFLAGS) -c $< -o $@

build/fuzz/fuzz_%: build/fuzz/tests/fuzz/fuzz_%.o $(FUZZ_OBJECTS)
	@$(FUZZ_CC) $(CTEST_CFLAGS) $(FUZZ_CFLAGS) -fsanitize=fuzzer $^ $($(@F)_LDFLAGS) $(LDFLAGS) -ldl -o $@

.PRECIOUS: build/fuzz/%.o
-include $(FUZZ_OBJECTS:.o=.d) $(FUZZERS:%=build/fuzz/tests/fuzz/%.d)

# The corpus comes first; new inputs stay in build/fuzz/corpus for the next run.
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
# The tests have children that die of a page they lack: no handler of ASan's for them.
ASAN_PYTHON_RUN = ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:handle_segv=0:$(ASAN_OPTIONS) \
	UBSAN_OPTIONS=print_stacktrace=1:$(UBSAN_OPTIONS) PYTHONMALLOC=malloc \
	PYTHONPATH=$(CURDIR)/$(ASAN_PYTHON)/lib LD_PRELOAD='$(ASAN_RUNTIMES)'
ASAN_PYTHON_TESTS := tests/surface/test_buffers.py tests/devices/test_verbs.py

$(ASAN_PYTHON)/built: setup.py $(SOURCES) $(HEADERS) $(MODULES) $(wildcard rdmafork/*.py) | $(BUILT)
	@mkdir -p $(@D)
	@CFLAGS='$(CFLAGS) -g1 $(asan_CFLAGS) -U_FORTIFY_SOURCE' \
		LDFLAGS='$(LDFLAGS) -fsanitize=address,undefined' $(BIN)/python setup.py -q build \
		--build-base $(@D) --build-lib $(@D)/lib
	@touch $@

asan-python: $(ASAN_PYTHON)/built	## $(SECONDS) seconds of any calls from Python, and tests, under the sanitizers
	@$(ASAN_PYTHON_RUN) $(BIN)/python tests/fuzz/fuzz_surface.py $(SECONDS)
	@RDMAFORK_TEST_PRELOAD='$(ASAN_RUNTIMES)' $(ASAN_PYTHON_RUN) \
		$(BIN)/python -m pytest -q $(ASAN_PYTHON_TESTS) $(PYTEST_ARGS)
