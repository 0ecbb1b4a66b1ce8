"""The Lightning strategy and its policies; importing this registers `Trainer(strategy="gnnscale")`."""

from .exchange import ExchangePolicy, NoExchange
from .gnnscale import GNNScaleStrategy, register
from .weights import GradientAveraging, ModelAveraging, WeightPolicy

register()

__all__ = [
    "ExchangePolicy",
    "GNNScaleStrategy",
    "GradientAveraging",
    "ModelAveraging",
    "NoExchange",
    "WeightPolicy",
    "register",
]
