# `make demo`, `make test` and `make docs` do all their own set-up in .venv; a second call starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test docs lint format clean

demo: $(VENV)/.ready-demo
	$(BIN)/gnnscale train recipe=demo

test: $(VENV)/.ready-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadscope $(PYTEST_ARGS)

docs: $(VENV)/.ready-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/.ready-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

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
