"""Lightning knows the strategy by name whichever package is imported first, and neither import needs the other."""

import subprocess
import sys

import lightning.pytorch as pl
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale import START_METHODS

BEFORE_LIGHTNING = """
import sys
import lightning_gnnscale as gs
import lightning_gnnscale.loader, lightning_gnnscale.partition_store, lightning_gnnscale.planner
heavy = {"lightning", "torch_geometric", "torchmetrics"} & set(sys.modules)
assert not heavy, f"imported for nothing: {heavy}"
from lightning.pytorch import Trainer
strategy = Trainer(accelerator="cpu", devices=2, strategy="gnnscale_spawn", logger=False).strategy
assert type(strategy) is gs.GNNScaleStrategy, strategy
"""


def test_lightning_finds_it_when_it_comes_later():
    done = subprocess.run([sys.executable, "-c", BEFORE_LIGHTNING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", START_METHODS)
def test_lightning_finds_it_when_it_was_there(name):
    strategy = pl.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
    assert type(strategy) is gs.GNNScaleStrategy
    assert strategy._start_method == START_METHODS[name]


def test_a_name_that_is_taken_is_left():
    registry = pl.strategies.StrategyRegistry
    before = registry["gnnscale"]  # its get() makes a strategy, so monkeypatch would put one back
    registry["gnnscale"] = {"strategy": pl.strategies.DDPStrategy, "init_params": {}}
    try:
        gs._register(pl.strategies)
        assert registry["gnnscale"]["strategy"] is pl.strategies.DDPStrategy
    finally:
        registry["gnnscale"] = before
