"""Names of the strategy in Lightning's registry, without an import of Lightning."""

from importlib import import_module
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

START_METHODS = {"gnnscale": "popen", "gnnscale_fork": "fork", "gnnscale_spawn": "spawn"}


def register_with_lightning() -> None:
    """Make `Trainer(strategy="gnnscale")` known now where Lightning is imported, or as soon as it is.

    Commands that partition and processes that only prepare batches never import it: they start in half the time.
    """
    register_post_import_hook(_register, "lightning.pytorch.strategies")


def _register(strategies: ModuleType) -> None:
    for name, start_method in START_METHODS.items():
        if name not in strategies.StrategyRegistry:
            strategies.StrategyRegistry.register(
                name,
                _strategy,
                description=f"Partitioned training, gradients averaged at every step, `start_method` '{start_method}'",
                start_method=start_method,
            )


def _strategy(**options: Any):
    return import_module(".strategy", __package__).GNNScaleStrategy(**options)
