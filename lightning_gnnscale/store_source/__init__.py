"""What a partition store is made from: made once, found again by whoever asks for the same."""

from .preparation import partitioning_facts
from .source import StoreSource

__all__ = ["StoreSource", "partitioning_facts"]
