"""Preparation on other machines: what travels between the workers that make batches and the trainers that use them."""

from .batch_group import BatchGroup, pack_group, unpack_group, unpack_one
from .versioned_cache import CacheCounts, TrainerCache
from .worker_view import CacheUpdate, Missing, WorkerView

__all__ = [
    "BatchGroup",
    "CacheCounts",
    "CacheUpdate",
    "Missing",
    "TrainerCache",
    "WorkerView",
    "pack_group",
    "unpack_group",
    "unpack_one",
]
