# `make demo`, `make test`, `make test-all` and `make docs` do all their own set-up in .venv; a second call starts at once.
PYTHON ?= python3
VENV := .venv
# Bytecode is kept: pip leaves it to the first import.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
# Modules are compiled as they are imported: pip would take longer to compile all of them than to install them.
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
# LOCKED=1 takes the versions of lock.txt too.
PIP := $(BIN)/$(PIP_INSTALL) -c constraints.txt $(if $(LOCKED),-c lock.txt)
# `make test-oldest` has an environment of its own. The oldest torch is a CUDA build of 6 GB; OLDEST_TORCH=2.13.0 takes
# the one of constraints.txt in its place.
OLD := .venv-oldest/bin
OLDEST_TORCH ?=
# One more than two cores: tests of several processes wait for one another.
WORKERS ?= 3

.PHONY: demo test test-all test-oldest kernels docs lint format settings lock clean

demo: $(VENV)/.ready-demo
	$(BIN)/gnnscale train recipe=demo

# The first tier: at most ten minutes on two cores, set-up and cold kernels included.
test: $(VENV)/.ready-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope $(PYTEST_ARGS)

# Everything that needs neither a GPU nor hours: the sweeps too, 300 examples of each property, and every extra.
test-all: $(VENV)/.ready-all
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -m "not slow and not gpu" --hypothesis-profile=all $(PYTEST_ARGS)

# Edges of three formats, a store, partitioners, samplers, layers, kernels, the Trainer, ranks, every recipe, the commands.
test-oldest: .venv-oldest/.ready
	$(OLD)/python -m pytest -n 2 --dist loadscope $(PYTEST_ARGS) tests/test_registration.py \
		tests/edge_stream/test_edge_formats.py tests/partition_store/test_store_round_trip.py \
		tests/partitioner/test_partition.py tests/sampler/test_samplers.py tests/model tests/triton_kernels \
		tests/datamodule/test_partition_datamodule.py tests/distributed/test_end_to_end.py \
		tests/recipes/test_compose.py tests/cli/test_bad_words.py tests/report

# What commands compile ahead: run it when kernels, or the types that they are called with, have changed.
kernels: $(VENV)/.ready-test
	$(BIN)/python -m tests.record_kernels $(SETS)

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/.ready-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# What commands know of settings without an import: after a change of conf/ or of what a class that it names takes.
settings: $(VENV)/.ready-test
	$(BIN)/python -m tests.describe_settings

# torch, and what follows its build, is left out: which one serves is the machine's choice. No beta is taken, but of
# opentelemetry-semantic-conventions, of which there is nothing else: mlflow needs it.
lock: $(VENV)/.ready-torch
	@$(PIP) uv
	@printf 'torch\ntorch-scatter\ntriton\n' > $(VENV)/not-locked.txt
	@echo 'opentelemetry-semantic-conventions>=0.40b0' > $(VENV)/betas.txt
	@$(BIN)/uv pip compile --quiet pyproject.toml --all-extras --universal --python-version 3.11 --upgrade \
		--excludes $(VENV)/not-locked.txt --no-emit-index-url --no-emit-find-links --no-annotate \
		--prerelease explicit -c $(VENV)/betas.txt \
		--custom-compile-command "make lock" -o lock.txt

clean:
	rm -rf $(VENV) .venv-oldest build *.egg-info

$(VENV)/.ready-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; say make PYTHON=/path/to/python3.11")'
	@echo "set-up 1/3: virtual environment and torch"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch setuptools wheel
	@touch $@

$(VENV)/.ready-demo: $(VENV)/.ready-torch pyproject.toml
	@echo "set-up 2/3: the package and what it needs"
	@$(PIP) -e .
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-demo
	@echo "set-up 3/3: what the tests of make test need"
	@$(PIP) -e ".[test,ray,metis,kaminpar]"
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-demo
	@echo "set-up 3/3: what builds the docs"
	@$(PIP) -e ".[docs]"
	@touch $@

# torch-scatter has no wheels: it is built against the torch that stands here, its extensions side by side.
$(VENV)/.ready-all: $(VENV)/.ready-test
	@echo "set-up of every extra (torch-scatter is compiled: minutes, the first time)"
	@printf '[build_ext]\nparallel = 2\n' > $(VENV)/build.cfg
	@DIST_EXTRA_CONFIG=$(CURDIR)/$(VENV)/build.cfg CFLAGS=-g0 $(PIP) --no-build-isolation -e ".[scatter,docs,dev]"
	@touch $@

.venv-oldest/.ready: pyproject.toml tests/oldest.py
	@test -x $(OLD)/python || $(PYTHON) -m venv .venv-oldest
	@$(OLD)/$(PIP_INSTALL) packaging "setuptools>=77" wheel
	@$(OLD)/python tests/oldest.py $(if $(OLDEST_TORCH),torch) > .venv-oldest/oldest.txt
	@$(OLD)/$(PIP_INSTALL) -r .venv-oldest/oldest.txt $(if $(OLDEST_TORCH),torch==$(OLDEST_TORCH)) \
		pytest pytest-timeout pytest-xdist hypothesis networkx scipy pandas "jsonargparse[signatures]"
	@$(OLD)/$(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@
