# Every target installs what it needs: Python 3.11+, make and a package index are enough.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; \
	done)
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
# One stamp for everything, and one for each extra that a target can do with alone.
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.installed-demo
DOCS := $(VENV)/.installed-docs
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c $(CONSTRAINTS)
# The oldest torch that is promised, in an environment of its own.
FLOOR := VENV=.venv-floor CONSTRAINTS=constraints-floor.txt
# The libraries whose models `make outside` runs, in an environment of their own.
OUTSIDE := .venv-outside
WORKERS ?= 2
PRECISION ?= bf16
SEED ?= 0
N ?= 1000
ARGS ?=

# One thread per worker: workers with a thread per core each slow one another down.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install test tests counts test-slow test-floor versions mutants fuzz zoo zoo-compiled outside demo bench bench-gpu bench-models bench-tables lint format types clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## set up .venv with the package and its tools

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@# BackPACK asks for torchvision, which only its examples use, and which must fit torch to the build.
	$(INSTALL) --no-deps backpack-for-pytorch
	@touch $@ $(DEMO) $(DOCS)

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) -e '.[$*]'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

test: lint types ## lint, type-check and run the tests
	$(PYTEST) $(ARGS)

test-slow: $(STAMP) ## run the tests that `make test` leaves out
	$(PYTEST) -m slow $(ARGS)

test-floor: ## run the tests with the oldest torch and Triton that are promised (installs several GB)
	$(MAKE) $(FLOOR) tests

versions: $(STAMP) ## run the tests with both sets of versions and write the counts into the docs
	$(MAKE) $(FLOOR) counts
	$(BIN)/python -m tests.versions --write docs/support.md
	$(MAKE) counts
	$(BIN)/python -m tests.versions --write docs/support.md

tests: $(STAMP)
	$(PYTEST) $(ARGS)

counts: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m tests.versions --run --workers $(WORKERS)

mutants: $(STAMP) ## change 200 random lines, one at a time: do the tests notice? (SEED=0)
	$(BIN)/python -m mutation --seed $(SEED) --workers $(WORKERS) $(ARGS)

fuzz: $(STAMP) ## run random programs: is every gradient right, or refused? (SEED=0 N=1000 ARGS=--mixing)
	$(ONE_THREAD) $(BIN)/python -m fuzz --seed $(SEED) --programs $(N) --workers $(WORKERS) $(ARGS)

zoo: $(STAMP) ## check every Hugging Face architecture and write its table
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo.table --write tests/zoo/RESULTS.md
	$(BIN)/python -m tests.support --write docs/support.md

zoo-compiled: $(STAMP) ## compile a step of every Hugging Face architecture, and count slow rungs (an hour or more)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo.explained --write tests/zoo/RUNGS.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo.compiled --write --backend eager $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo.compiled --write --backend inductor $(ARGS)

$(OUTSIDE)/.installed: constraints-outside.txt tests/outside/requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(OUTSIDE)
	$(OUTSIDE)/bin/python -m pip install --disable-pip-version-check --quiet --prefer-binary \
		-c constraints-outside.txt -r tests/outside/requirements.txt -e .
	@# Its compiled part is of another torch and fails to load; the models are Python, and do without it.
	rm -f $(OUTSIDE)/lib/python3*/site-packages/torchaudio/lib/*.so
	@touch $@

outside: $(STAMP) $(OUTSIDE)/.installed ## check models of 71 other libraries and write their table (installs several GB)
	$(ONE_THREAD) HF_HUB_OFFLINE=1 $(OUTSIDE)/bin/python -m tests.outside.table --write $(ARGS)
	$(BIN)/python -m tests.support --write docs/support.md

# One thread: the demo's tensors are too small for a second one to help.
demo: $(DEMO) ## find wrong labels that a model has learnt by heart, and write a report
	OMP_NUM_THREADS=1 $(BIN)/python examples/mislabelled_digits.py $(ARGS)

bench: $(STAMP) ## time pergrad against the alternatives
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-gpu: $(STAMP) ## time pergrad against the alternatives on a GPU, and check the goals
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m benchmarks.run --size gpu --precision $(PRECISION) --budget 3600 $(ARGS)
	$(BIN)/python -m benchmarks.targets

bench-models: $(STAMP) ## time Hugging Face models (ARGS="--compiled"; on a GPU ARGS="--size gpu --compiled")
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.hugging_face --store $(ARGS)
	$(BIN)/python -m benchmarks.hugging_face --write docs/benchmarks.md

bench-tables: $(STAMP) ## write the stored rows into the documentation and its charts
	$(BIN)/python -m benchmarks.table --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.targets --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.summary --write README.md
	$(BIN)/python -m benchmarks.hugging_face --write docs/benchmarks.md
	$(BIN)/python -m benchmarks.plot

lint: $(STAMP) ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## type-check
	MYPY_NUM_WORKERS=$(WORKERS) $(BIN)/mypy

.PHONY: docs
docs: $(DOCS) ## build the documentation into site/; a warning is an error
	@# The variable silences an advertisement; warnings of the build itself are still errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

format: $(STAMP) ## fix style and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove everything that make and its tools create
	rm -rf $(VENV) .venv-floor $(OUTSIDE) .mutants build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
