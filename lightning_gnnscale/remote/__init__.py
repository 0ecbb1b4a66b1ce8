"""Preparation on other machines: what travels between the workers that make batches and the trainers that use them."""

from .batch_group import BatchGroup, pack_group, unpack_group, unpack_one
from .held_features import DistributedFeatures, HeldFeatures
from .held_nodes import PartOwners, most_linked
from .held_rows import HeldRows, HopRequest
from .sampling_owners import DistributedNeighborSampler
from .settings import RayWorkers
from .versioned_cache import CacheCounts, TrainerCache
from .worker_view import CacheUpdate, Missing, WorkerView

__all__ = [
    "BatchGroup",
    "CacheCounts",
    "CacheUpdate",
    "DistributedFeatures",
    "DistributedNeighborSampler",
    "HeldFeatures",
    "HeldRows",
    "HopRequest",
    "Missing",
    "PartOwners",
    "RayWorkers",
    "TrainerCache",
    "WorkerView",
    "most_linked",
    "pack_group",
    "unpack_group",
    "unpack_one",
]
