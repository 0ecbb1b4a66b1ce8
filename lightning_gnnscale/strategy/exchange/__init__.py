"""Exchange policies: how layers read rows of other processes. The policies are in `policies.py`."""

from .bounds import BOUNDS, Bound, EpochAdaptive, EpochFixed, VariationGap
from .policies import BroadcastExchange, ExchangePolicy, HaloExchange, NoExchange, Quantized, SkipBroadcast

EXCHANGE_POLICIES: dict[str, type[ExchangePolicy]] = {
    "no_exchange": NoExchange,
    "broadcast": BroadcastExchange,
    "halo": HaloExchange,
    "quantized": Quantized,
    "skip_broadcast": SkipBroadcast,
}

__all__ = [
    "BOUNDS",
    "EXCHANGE_POLICIES",
    "Bound",
    "BroadcastExchange",
    "EpochAdaptive",
    "EpochFixed",
    "ExchangePolicy",
    "HaloExchange",
    "NoExchange",
    "Quantized",
    "SkipBroadcast",
    "VariationGap",
]
