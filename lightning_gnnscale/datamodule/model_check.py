"""Whether a model fits the store that it is to train on, said before the first batch."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ..errors import StrategyError
from ..partition_store import PartitionStore


def check_model(module: Any, store: PartitionStore, hops: int | None = None) -> None:
    """Compare widths, classes, edge weights and layers; whatever a module does not state is not compared.

    Args:
        module: The LightningModule, or None.
        store: A store with features and labels if the module reads them.
        hops: Number of hops that the sampler draws; None: not compared.

    Raises:
        StrategyError: batches would not fit the model; the message names both numbers.
    """
    backbone = getattr(module, "backbone", None)
    width = getattr(backbone, "in_channels", None)
    if isinstance(width, int) and store.features is not None and getattr(module, "inputs", None) is None:
        _check_equal("backbone.in_channels", width, "columns of the store's features", store.features.dim)
    if hasattr(module, "multilabel") and store.labels is not None:
        _check_labels(module, store.labels)
    check_edge_weights(backbone, store.least_edge_weight)
    layers = getattr(backbone, "num_layers", None)
    if isinstance(layers, int) and hops and hops != layers:
        rank_zero_warn(f"the sampler draws {hops} hops, and the backbone has {layers} layers: give it one hop a layer")


def check_edge_weights(backbone: Any, least: float | None) -> None:
    """Refuse edge weights below 0 for a backbone that divides by the root of their sums, or takes their logarithm.

    Args:
        backbone: Backbone of the module, or None.
        least: Smallest weight of an edge; None without weights.

    Raises:
        StrategyError: names the weight, the backbone and the remedy.
    """
    if least is not None and least < 0 and not getattr(backbone, "takes_negative_weights", True):
        raise StrategyError(
            f"edge_weight goes down to {least:g}, and {type(backbone).__name__} needs weights of at least 0: give "
            "such ones, or use GraphSAGE, which sums with any"
        )


def _check_labels(module: Any, labels: Any) -> None:
    several = labels.ndim == 2
    if several != bool(module.multilabel):
        kind = f"{labels.shape[1]} labels a node" if several else "one label a node"
        raise StrategyError(f"the store has {kind}: say multilabel={several} to {type(module).__name__}")
    outputs = getattr(module, "num_classes", None)
    if not isinstance(outputs, int):
        return
    if several:
        _check_equal("out_channels", outputs, "labels a node", labels.shape[1])
    elif (largest := int(labels.max(initial=-1))) >= outputs:
        raise StrategyError(
            f"out_channels={outputs} is less than the classes, the store's labels go up to {largest}: say {largest + 1}"
        )


def _check_equal(name: str, given: int, what: str, stored: int) -> None:
    if given != stored:
        raise StrategyError(f"{name}={given} is not the number of {what}, {stored}: say {stored}")
