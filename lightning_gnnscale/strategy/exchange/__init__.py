"""Exchange policies: how layers read rows of other processes. One policy a file."""

from .no_exchange import NoExchange
from .policy import ExchangePolicy

EXCHANGE_POLICIES: dict[str, type[ExchangePolicy]] = {"no_exchange": NoExchange}

__all__ = ["EXCHANGE_POLICIES", "ExchangePolicy", "NoExchange"]
