"""Everything on Ray: workers that make batches, messages between them and trainers, and rows that workers own."""

from .batch_group import BatchGroup, pack_group, unpack_group, unpack_one
from .held_rows import DistributedFeatures, HeldFeatures, HeldRows, HopRequest, Neighbors, PartOwners, most_linked
from .holder import OwnerReads
from .ray_source import RayWorkers
from .sampling_owners import OwnedGraph, sampler_of_owners
from .versioned_cache import CacheCounts, CacheUpdate, Missing, TrainerCache, WorkerView
from .worker_embedding import WorkerEmbedding

__all__ = [
    "BatchGroup",
    "CacheCounts",
    "CacheUpdate",
    "DistributedFeatures",
    "HeldFeatures",
    "HeldRows",
    "HopRequest",
    "Missing",
    "Neighbors",
    "OwnedGraph",
    "OwnerReads",
    "PartOwners",
    "RayWorkers",
    "TrainerCache",
    "WorkerEmbedding",
    "WorkerView",
    "most_linked",
    "pack_group",
    "sampler_of_owners",
    "unpack_group",
    "unpack_one",
]
