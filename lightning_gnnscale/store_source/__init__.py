"""What a partition store is made from: it is made once, and found again for the same input."""

from .preparation import partitioning_facts
from .source import StoreMaking, StoreSource

__all__ = ["StoreMaking", "StoreSource", "partitioning_facts"]
