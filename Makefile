# Everything here needs git, make and Python 3.11 or later, and nothing else: each target makes the virtual
# environment it needs. Stamp files remember what is installed, so that a second run installs nothing and
# needs no network.

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
PYTEST_ARGS ?=
PROMPT ?= The capital of France is

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Torch processes that run side by side slow each other down many times over if each spins a thread per core.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help demo test quick check format bench bench-peers zoo clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMPS)/run  ## install, fetch the default model, explain "The capital of France is"
	$(BIN)/mainstem explain "$(PROMPT)"

test: check  ## the checks, then the whole test suite
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

quick: $(STAMPS)/dev  ## of each test that is not slow one parameter set, in under two minutes
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --quick $(PYTEST_ARGS)

check: $(STAMPS)/dev  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMPS)/dev  ## put imports and layout in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMPS)/dev  ## cost of capture, decomposition and scores, as ratios to the bare forward pass
	$(BIN)/python -m benchmarks.capture
	$(BIN)/python -m benchmarks.search --measure
	$(BIN)/python -m benchmarks.patching
	$(BIN)/python -m benchmarks.attribution
	$(BIN)/python -m benchmarks.composition
	$(BIN)/python -m benchmarks.basis

bench-peers: $(STAMPS)/dev  ## the same beside other tools, each in an environment of its own
	$(BIN)/python -m benchmarks.peers --install

zoo: $(STAMPS)/dev  ## what is exact and what is refused, family by family
	$(TEST_ENV) $(BIN)/python -m tests.zoo_table

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Mainstem needs Python 3.11 or later; say which with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "Python has no venv module; install it (on Debian and Ubuntu: python3-venv)."; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# Torch first and by itself: it is by far the largest download, and is not fetched again when others change.
$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) install '$(TORCH)'
	@touch $@

$(STAMPS)/run: pyproject.toml $(STAMPS)/torch
	$(PIP) install --quiet -e .
	@touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/torch
	$(PIP) install --quiet -e '.[dev]'
	@touch $(STAMPS)/run $@
