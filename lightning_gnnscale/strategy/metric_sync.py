"""Metrics over processes, with this package's error where a process is lost."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from . import averaging


def watch_metrics(module: nn.Module) -> None:
    """Let the metrics of a module fail with one line; those that have a gathering of their own keep it."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather_state


def gather_state(state: Tensor, group: Any | None = None) -> list[Tensor]:
    """Return a metric's state of every rank; every rank calls it.

    Raises:
        StrategyError: another process was lost.
    """
    with averaging.clear_error("reducing a metric"):
        return gather_all_tensors(state, group)
