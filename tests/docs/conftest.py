"""What tests of pages share."""

import importlib

import pytest

from lightning_gnnscale.cli import run_paths

cli = importlib.import_module("lightning_gnnscale.cli.main")  # the package's `main` is its function


@pytest.fixture
def composed(monkeypatch):
    """The list that collects what commands would have been run with: all is read and checked, and nothing is run."""
    configs = []
    monkeypatch.setattr(run_paths, "check_paths", lambda config: None)  # pages name files of the reader's
    for module, function in set(cli._RUN.values()):
        monkeypatch.setattr(importlib.import_module(f"lightning_gnnscale.cli.{module}"), function, configs.append)
    return configs
