# Two commands do all set-up on a machine that has Python: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
TENSORFLOW ?= tensorflow-cpu
WORKERS ?= 2

export TF_CPP_MIN_LOG_LEVEL ?= 3

.PHONY: demo test test-rest test-with lint types check bench campaigns lowest clean

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TENSORFLOW)" -e ".[dev,demo,yaml]"
	@touch $@

demo: $(READY)  ## train one network twice on troubled data, with and without the guard
	$(BIN)/python -m keras_nanguard demo

# What CI runs. Modules that have not been seen green as a whole on one machine yet are in `test-rest`.
SUITE = tests/policy $(addprefix tests/test_,$(addsuffix .py,docs errors healthy keras_internals layout lifecycle \
	logs parity sites transaction upstream_defects))

test: $(READY) lint types  ## everything that CI runs
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(SUITE)

test-rest: $(READY)  ## the modules that CI does not run yet
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(filter-out $(SUITE),$(wildcard tests/test_*.py tests/*/))

lint: $(READY)
	$(BIN)/ruff check keras_nanguard tests benchmarks examples

types: $(READY)
	$(BIN)/mypy

coverage: $(READY)  ## the tests again, with coverage
	$(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term -m "not slow" tests

campaigns: $(READY)  ## the long forms: 20,000 healthy steps, every slow test
	$(BIN)/python -m pytest -n $(WORKERS) -m slow tests

bench: $(READY)  ## what guarding costs
	$(BIN)/python benchmarks/overhead.py

LOWEST_PYTHON ?= python3.10
lowest:  ## the tests on the lowest versions that are supported
	$(MAKE) test-with VENV=.venv-lowest PYTHON=$(LOWEST_PYTHON) TENSORFLOW="tensorflow-cpu==2.16.*" PIN="keras==3.6.*"

test-with:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TENSORFLOW)" "$(PIN)" -e ".[dev,demo,yaml]"
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" tests

clean:
	rm -rf .venv .venv-lowest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
