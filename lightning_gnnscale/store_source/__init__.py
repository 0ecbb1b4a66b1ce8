"""What a partition store is made from: made once, found again by whoever asks for the same."""

from .preparation import partitioning_facts
from .source import StoreMaking, StoreSource

__all__ = ["StoreMaking", "StoreSource", "partitioning_facts"]
