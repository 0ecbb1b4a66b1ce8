"""The Lightning strategy and its policies; importing this registers `Trainer(strategy="gnnscale")`."""

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
from .gnnscale import GNNScaleStrategy, register
from .weights import BoundedGradientStaleness, GradientAveraging, ModelAveraging, WeightPolicy

register()

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
    "SkipBroadcast",
    "VariationGap",
    "WeightPolicy",
    "register",
]
