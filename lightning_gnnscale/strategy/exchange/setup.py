"""The start of a run: what fits a policy, and which layers get an exchange."""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import StrategyError
from .local_rows import LocalRows
from .run import ExchangeRun

if TYPE_CHECKING:
    from .policy import ExchangePolicy


def exchange_layers(model: nn.Module) -> list[Any]:
    """Return the modules that read rows through an `exchange` (`RowLayer`s), in the order in which they stand."""
    return [module for module in model.modules() if hasattr(module, "exchange") and hasattr(module, "can_pull")]


def check_exchange(policy: "ExchangePolicy", trainer: pl.Trainer) -> None:
    """Refuse a model without exchange layers, and a DataModule without blocks; see `ExchangePolicy.check`."""
    if policy.plan() is None:
        return
    name = type(policy).__name__
    if not hasattr(trainer.datamodule, "blocks"):
        given = "no DataModule" if trainer.datamodule is None else type(trainer.datamodule).__name__
        raise StrategyError(
            f"{name} exchanges rows of the whole graph ({given} gives parts): train with FullGraphDataModule, or use "
            "exchange=NoExchange()"
        )
    layers = exchange_layers(trainer.lightning_module)
    if not layers:
        raise StrategyError(
            f"{name} finds no layer in {type(trainer.lightning_module).__name__} that exchanges rows: use GCN, "
            "GraphSAGE, GAT or SGC of lightning_gnnscale.model, or exchange=NoExchange()"
        )
    check_precision(policy, trainer)
    pushing = [type(layer).__name__ for layer in layers if not getattr(layer, "can_pull", False)]
    if policy.plan().backward == "pull" and pushing:
        raise StrategyError(
            f'{name}(backward="pull"): {pushing[0]} is not linear in its neighbours: use backward="auto" or "push"'
        )


def check_precision(policy: "ExchangePolicy", trainer: pl.Trainer) -> None:
    """Refuse rows of less than float32 where rows are exchanged; see `ExchangePolicy.check_trainer`."""
    if policy.plan() is not None and trainer.precision not in ("32-true", "64-true"):
        raise StrategyError(
            f"{type(policy).__name__} sends rows of float32 or float64, not what "
            f'Trainer(precision={trainer.precision!r}) makes: use precision="32-true"'
        )


def start_run(policy: "ExchangePolicy", trainer: pl.Trainer) -> ExchangeRun | LocalRows | None:
    """Give every exchange layer of the model its exchange; None where the model trains on parts.

    Raises:
        StrategyError: gradients cannot be pulled in this graph.
    """
    blocks = getattr(trainer.datamodule, "blocks", None)
    if blocks is None:
        return None
    layers, device = exchange_layers(trainer.lightning_module), trainer.strategy.root_device
    if trainer.world_size > 1 and any(isinstance(one, _BatchNorm) for one in trainer.lightning_module.modules()):
        rank_zero_warn(
            "BatchNorm (norm=batch) takes its statistics from each process's own block: results differ from those of "
            "one process; norm=layer gives the same on any number of them"
        )
    plan = policy.plan()
    if plan is None:
        return LocalRows(blocks, layers, device)
    given = getattr(plan.bound, "initial_versions", None)
    if given is not None and len(given) != blocks.world_size:
        raise StrategyError(
            f"bound.initial_versions must be one for each of the {blocks.world_size} processes, got {len(given)}"
        )
    undirected = blocks.symmetric and blocks.edge_weight is None
    if plan.backward == "pull" and not undirected:
        kind = "directed" if not blocks.symmetric else "weighted"
        raise StrategyError(
            f'{type(policy).__name__}(backward="pull") needs an undirected graph without weights, this one is {kind}: '
            'use backward="auto" or "push"'
        )
    pulls = [plan.backward != "push" and undirected and getattr(layer, "can_pull", False) for layer in layers]
    return ExchangeRun(plan, blocks, layers, pulls, device)
