"""The Lightning strategy and its policies."""

from .exchange import (
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    ExchangePolicy,
    HaloExchange,
    NoExchange,
    Quantized,
    SkipBroadcast,
    VariationGap,
)
from .gnnscale import GNNScaleStrategy
from .receipt import RunReceipt
from .reproduction import reproduce_step
from .weights import BoundedGradientStaleness, GradientAveraging, ModelAveraging, WeightPolicy

__all__ = [
    "BoundedGradientStaleness",
    "BroadcastExchange",
    "EpochAdaptive",
    "EpochFixed",
    "ExchangePolicy",
    "GNNScaleStrategy",
    "GradientAveraging",
    "HaloExchange",
    "ModelAveraging",
    "NoExchange",
    "Quantized",
    "RunReceipt",
    "SkipBroadcast",
    "VariationGap",
    "WeightPolicy",
    "reproduce_step",
]
