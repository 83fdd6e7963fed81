# Two commands do all set-up on a machine that has Python: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
TENSORFLOW ?= tensorflow-cpu
WORKERS ?= 3

export TF_CPP_MIN_LOG_LEVEL ?= 3

# A backend has thousands of modules of which few are imported: compile each on its first import.
INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE =

.PHONY: nightly oldest clients healthy demo docs fuzz pages test test-all test-jax test-torch test-full-xla lint types check bench slow lowest matrix release crash memory campaign mutate soak scale clean

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --upgrade pip
	$(BIN)/python $(INSTALL) "$(TENSORFLOW)" -e ".[dev,docs,demo,yaml]"
	@touch $@

demo: $(READY)  ## train one network on broken data with and without the guard, and on clean data
	$(BIN)/python -m keras_nanguard demo

test: $(READY)  ## what CI runs: what is above the backends once, the rest on each backend
	@$(MAKE) --silent .venv-jax/.ready .venv-torch/.ready & made=$$!; \
	{ $(MAKE) lint types && $(FAST_XLA) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(SHARE) tests; }; status=$$?; \
	wait $$made && exit $$status
	$(MAKE) test-jax test-torch

lint: $(READY)
	$(BIN)/ruff check keras_nanguard tests campaigns benchmarks examples docs

types: $(READY)
	$(BIN)/mypy

coverage: $(READY)  ## the tests again, with coverage
	$(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term -m "not slow" tests

slow: $(READY) .venv-jax/.ready .venv-torch/.ready  ## the slow tests on each backend
	$(BIN)/python -m pytest $(SLOW) tests
	KERAS_BACKEND=jax .venv-jax/bin/python -m pytest $(SLOW) tests
	KERAS_BACKEND=torch OMP_NUM_THREADS=1 .venv-torch/bin/python -m pytest $(SLOW) tests

SLOW = -n $(WORKERS) --dist worksteal -m slow --nightly --share

docs: $(READY)  ## build the site in docs/_build/html, offline, with warnings as errors
	$(BIN)/python docs/reference_pages.py
	$(BIN)/python docs/evidence_tables.py
	$(BIN)/python docs/packages_picture.py
	$(BIN)/python -m sphinx -W --keep-going -n -E -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

pages: $(READY)  ## run the code of each page and write its output into the page
	$(BIN)/python docs/run_pages.py --write README.md $$(find docs -name "*.md" -not -path "*/_build/*")

bench: $(READY)  ## measure the cost of the guard
	$(BIN)/python benchmarks/overhead.py

test-jax: .venv-jax/.ready  ## the suite on JAX
	$(FAST_XLA) $(ON_JAX) tests

test-torch: .venv-torch/.ready  ## the suite on PyTorch
	$(ON_TORCH) tests

test-full-xla:  ## the tests with XLA's default optimization, as users have it
	$(MAKE) test FAST_XLA=

healthy: $(READY) .venv-jax/.ready .venv-torch/.ready  ## healthy programs on three backends: the guard must leave them alone
	KERAS_BACKEND=tensorflow $(BIN)/python benchmarks/healthy.py --check
	KERAS_BACKEND=jax .venv-jax/bin/python benchmarks/healthy.py --check
	KERAS_BACKEND=torch OMP_NUM_THREADS=1 .venv-torch/bin/python benchmarks/healthy.py --check

nightly:  ## every test on every backend, the site, all pages, slow tests, healthy programs, oldest backends
	$(MAKE) test-all
	$(MAKE) slow
	$(MAKE) healthy
	$(MAKE) oldest

test-all:  ## every test on every backend, without the slow ones
	$(MAKE) test SHARE=--nightly

SHARE = --share

# In tests XLA mostly compiles programs that run for milliseconds. These flags halve that time.
FAST_XLA = XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# With threads of PyTorch in each of three workers, small steps wait for one another on two cores.
ON_TORCH = KERAS_BACKEND=torch OMP_NUM_THREADS=1 .venv-torch/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(SHARE)
ON_JAX = KERAS_BACKEND=jax .venv-jax/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(SHARE)

.venv-jax/.ready .venv-torch/.ready: .venv-%/.ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(INSTALL) --upgrade pip
	.venv-$*/bin/python $(INSTALL) $(BACKEND_$*) -e ".[dev,yaml]"
	@touch $@

BACKEND_jax = "jax==0.10.*" "keras==3.15.*"
BACKEND_torch = "torch==2.13.0" "keras==3.15.*"

clients: .venv-clients/.ready  ## test tuners, model libraries, trackers and data sources; writes a table of docs/compatibility.md
	.venv-clients/bin/python benchmarks/clients.py --write docs/compatibility.md

.venv-clients/.ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python $(INSTALL) --upgrade pip
	.venv-clients/bin/python $(INSTALL) "$(TENSORFLOW)" $(BACKEND_jax) $(BACKEND_torch) -e ".[dev,demo,yaml,clients]"
	.venv-clients/bin/python -m pip freeze | grep -E "^(tensorflow.*|jax|jaxlib|torch|keras|numpy)==" > .venv-clients/constraints.txt
	@for client in $(CLIENTS); do echo "$$client"; \
	.venv-clients/bin/python $(INSTALL) -c .venv-clients/constraints.txt "$$client" || echo "$$client does not install"; done
	@touch $@

# Installed one by one: a client that does not install has `-` in the table. None may change Keras or a backend.
CLIENTS = keras-hub keras-rs tf_keras datasets mlflow-skinny sqlalchemy alembic wandb

MINUTES ?= 36
fuzz: .venv-fuzz/.ready  ## fuzz every reader of files; writes campaigns/results/fuzz.md
	nice -n 10 .venv-fuzz/bin/python campaigns/fuzz.py --minutes $(MINUTES) --write campaigns/results/fuzz.md

.venv-fuzz/.ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python $(INSTALL) --upgrade pip
	.venv-fuzz/bin/python $(INSTALL) "$(TENSORFLOW)" -e ".[yaml]" atheris tensorstore coverage
	@touch $@

matrix: .venv-release/.ready  ## run the short suite on each Python, Keras and backend; writes a table of docs/compatibility.md
	.venv-release/bin/python campaigns/matrix.py --write docs/compatibility.md

lowest: .venv-release/.ready  ## run all tests on the lowest versions; CELL names other ones
	.venv-release/bin/python campaigns/matrix.py --whole $(WORKERS) --only "$(CELL)"

CELL ?= keras 3.6, tensorflow 2.16

oldest: .venv-release/.ready  ## the short suite on the oldest version of each backend, with the newest Keras
	.venv-release/bin/python campaigns/matrix.py --fresh --only "$(OLDEST)"

OLDEST = keras newest, (tensorflow 2.16|jax 0.4.38|torch 2.3)

release: .venv-release/.ready  ## build sdist and wheel, and test them in empty environments
	rm -rf build/lib build/bdist* dist
	.venv-release/bin/python -m build
	.venv-release/bin/twine check --strict dist/*
	.venv-release/bin/python campaigns/installed.py dist

.venv-release/.ready:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python $(INSTALL) "build>=1.2" "twine>=6" "uv>=0.5"
	@touch $@

memory: $(READY) .venv-jax/.ready .venv-torch/.ready  ## plain and guarded runs under memory limits; needs root, Linux and an hour
	$(BIN)/python campaigns/memory.py --write

crash: $(READY) .venv-jax/.ready .venv-torch/.ready  ## 50 kills on each backend, full disks, damaged files; needs root for its file systems
	for backend in "tensorflow $(BIN)" "jax .venv-jax/bin" "torch .venv-torch/bin"; do set -- $$backend; \
	KERAS_BACKEND=$$1 OMP_NUM_THREADS=1 $$2/python campaigns/crash.py kills || exit 1; done
	KERAS_BACKEND=torch OMP_NUM_THREADS=1 .venv-torch/bin/python campaigns/crash.py faults
	KERAS_BACKEND=torch .venv-torch/bin/python campaigns/crash.py write

campaign: $(READY) .venv-jax/.ready .venv-torch/.ready  ## 3,000 seeded faults on three backends; takes hours, and continues after an interruption
	$(BIN)/python campaigns/campaign.py --backend tensorflow
	.venv-torch/bin/python campaigns/campaign.py --backend torch
	.venv-jax/bin/python campaigns/campaign.py --backend jax
	$(BIN)/python campaigns/campaign.py --table

soak: $(READY) .venv-jax/.ready .venv-torch/.ready  ## a million steps with a fault every 997, and 500 fits in one process; takes hours
	KERAS_BACKEND=tensorflow $(BIN)/python campaigns/soak.py
	KERAS_BACKEND=jax .venv-jax/bin/python campaigns/soak.py
	KERAS_BACKEND=torch .venv-torch/bin/python campaigns/soak.py
	$(BIN)/python campaigns/soak.py --write campaigns/results/soak.md

scale: $(READY) .venv-jax/.ready .venv-torch/.ready  ## the cost of the guard against depth, width, batch and processes
	KERAS_BACKEND=tensorflow $(BIN)/python campaigns/scale.py
	KERAS_BACKEND=jax .venv-jax/bin/python campaigns/scale.py
	KERAS_BACKEND=torch .venv-torch/bin/python campaigns/scale.py
	$(BIN)/python campaigns/scale.py --write campaigns/results/scale.md

mutate: $(READY) .venv-jax/.ready .venv-torch/.ready .venv-mutate/.ready  ## mutation testing of the rules and the transaction
	.venv-mutate/bin/python campaigns/mutate.py --make rules tensorflow jax torch run
	$(BIN)/python campaigns/mutate.py rules
	$(FAST_XLA) $(BIN)/python campaigns/mutate.py tensorflow
	$(FAST_XLA) .venv-jax/bin/python campaigns/mutate.py jax
	.venv-torch/bin/python campaigns/mutate.py torch
	.venv-torch/bin/python campaigns/mutate.py run
	$(BIN)/python campaigns/mutate.py --write campaigns/results/mutate.md

.venv-mutate/.ready:
	$(PYTHON) -m venv .venv-mutate
	.venv-mutate/bin/python $(INSTALL) "cosmic-ray>=8.4,<9"
	@touch $@

clean:
	rm -rf .venv .venv-release .venv-jax .venv-torch .venv-clients .venv-fuzz build dist out *.egg-info docs/_build .pytest_cache .mypy_cache .ruff_cache .venv-lowest .venv-mutate
