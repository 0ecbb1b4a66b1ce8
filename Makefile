# `make demo`, `make test` and `make docs` do all their own set-up in .venv; a second call starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := pip install --quiet --disable-pip-version-check
# LOCKED=1 takes the versions of lock.txt too.
PIP := $(BIN)/$(PIP_INSTALL) -c constraints.txt $(if $(LOCKED),-c lock.txt)
# `make test-oldest` has an environment of its own. The oldest torch is a CUDA build of 6 GB; OLDEST_TORCH=2.13.0 takes
# the one of constraints.txt in its place.
OLD := .venv-oldest/bin
OLDEST_TORCH ?=

.PHONY: demo test test-oldest docs lint format settings lock clean

demo: $(VENV)/.ready-demo
	$(BIN)/gnnscale train recipe=demo

test: $(VENV)/.ready-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadscope $(PYTEST_ARGS)

# Edges of three formats, a store, partitioners, samplers, layers, kernels, the Trainer, ranks, every recipe, the commands.
test-oldest: .venv-oldest/.ready
	$(OLD)/python -m pytest -n 2 --dist loadscope $(PYTEST_ARGS) tests/test_registration.py \
		tests/edge_stream/test_edge_formats.py tests/partition_store/test_store_round_trip.py \
		tests/partitioner/test_partition.py tests/sampler/test_samplers.py tests/model tests/triton_kernels \
		tests/datamodule/test_partition_datamodule.py tests/distributed/test_end_to_end.py \
		tests/recipes/test_compose.py tests/cli/test_bad_words.py tests/report

docs: $(VENV)/.ready-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/.ready-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# What commands know of settings without an import: after a change of conf/ or of what a class that it names takes.
settings: $(VENV)/.ready-test
	$(BIN)/python -m tests.describe_settings

# torch, and what follows its build, is left out: which one serves is the machine's choice.
lock: $(VENV)/.ready-torch
	@$(PIP) uv
	@printf 'torch\ntorch-scatter\ntriton\n' > $(VENV)/not-locked.txt
	@$(BIN)/uv pip compile --quiet pyproject.toml --all-extras --universal --python-version 3.11 --upgrade \
		--excludes $(VENV)/not-locked.txt --no-emit-index-url --no-emit-find-links --no-annotate \
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

# torch-scatter has no wheels: it is built against the torch that stands here, its extensions side by side.
$(VENV)/.ready-test: $(VENV)/.ready-demo
	@echo "set-up 3/3: extras for the tests (torch-scatter is compiled: minutes, the first time)"
	@printf '[build_ext]\nparallel = 2\n' > $(VENV)/build.cfg
	@DIST_EXTRA_CONFIG=$(CURDIR)/$(VENV)/build.cfg CFLAGS=-g0 \
		$(PIP) --no-build-isolation -e ".[scatter,metis,kaminpar,ray,docs,dev]"
	@touch $@

.venv-oldest/.ready: pyproject.toml tests/oldest.py
	@test -x $(OLD)/python || $(PYTHON) -m venv .venv-oldest
	@$(OLD)/$(PIP_INSTALL) packaging "setuptools>=77" wheel
	@$(OLD)/python tests/oldest.py $(if $(OLDEST_TORCH),torch) > .venv-oldest/oldest.txt
	@$(OLD)/$(PIP_INSTALL) -r .venv-oldest/oldest.txt $(if $(OLDEST_TORCH),torch==$(OLDEST_TORCH)) \
		pytest pytest-timeout pytest-xdist hypothesis networkx scipy pandas "jsonargparse[signatures]"
	@$(OLD)/$(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@
