"""The tiers of feature rows while a model trains: what is free for them, how much each takes, what they hold."""

from collections import Counter

import numpy as np
import torch

from ..memory import format_bytes, free_memory_bytes
from ..partition_store import PartitionStore
from ..partition_store.features import as_stored
from ..placement import FeatureBuffer, Placement, PlacementSettings, TypedBuffers
from ..placement.link_cost import gpu_uuid
from ..placement.place import linked_groups
from ..placement.placement import bytes_by_tier
from ..placement.shared_rows import gather_objects
from ..planner.tier_sizes import FreeMemory, TierSizes, size_tiers


def device_name(trainer) -> str:
    """Return where this process gathers: a GPU, or "cpu"."""
    device = trainer.strategy.root_device if trainer is not None else torch.device("cpu")
    return str(device) if device.type == "cuda" else "cpu"


def free_memory(trainer, evaluation_bytes: int = 0) -> FreeMemory:
    """Return what rows may take of this process's GPU and of its host: the least of all ranks; each of them calls it.

    Args:
        trainer: The Trainer, on a GPU.
        evaluation_bytes: Memory of the device that evaluation takes, predicted.
    """
    from ..placement.cuda_tiers import free_device_memory

    gpu = torch.device(device_name(trainer))
    device, step = free_device_memory(gpu)
    own = FreeMemory.of_host(device, free_memory_bytes(), step, evaluation_bytes)
    if trainer.world_size == 1:
        return own
    told = gather_objects((gpu_uuid(gpu), own))
    processes = Counter(uuid for uuid, _ in told)  # of each GPU
    shares = [free._replace(device=free.device // processes[uuid]) for uuid, free in told]
    return own.least(shares)


def is_placeable(features) -> bool:
    """Whether a table has dense rows, which can be placed."""
    tables = features.tables if features.by_node_type else [features]
    return any(table is not None and not table.is_sparse and table.num_rows for table in tables)


def row_bytes_of(store: PartitionStore):
    """Return the bytes of each node's row as it is stored: (num_nodes,), 0 for those that are not placed, or one."""
    if store.features.by_node_type:
        return store.features.row_bytes
    table = as_stored(store.features)[0]
    return table.dim * table.dtype.itemsize


def table_bytes(store: PartitionStore) -> int:
    """Return the bytes of all rows that can be placed."""
    widths = row_bytes_of(store)
    return widths * store.num_nodes if isinstance(widths, int) else int(widths.sum(dtype="int64"))


def sizes_of(
    store: PartitionStore, settings: PlacementSettings, free: FreeMemory, prob: np.ndarray | None, alphas: np.ndarray
) -> TierSizes:
    """Return how much each tier of a store's rows takes; see `size_tiers`.

    Args:
        settings: Settings of the placement, which may say how many rows are on each device.
        prob: (num_ranks, num_nodes); None: rows are read alike.
        alphas: (num_ranks, num_ranks) cost of reads between devices.
    """
    widths = row_bytes_of(store)
    each, largest = None if isinstance(widths, int) else widths, max(map(len, linked_groups(alphas)[0]))
    given = None if settings.sizes_itself else settings.rows_of(store.num_nodes)
    return size_tiers(free, table_bytes(store), store.num_nodes, prob, each, largest, given)


def tier_bytes(
    store: PartitionStore, placement: Placement, rank: int, on_host: int, free: FreeMemory | None, on: str
) -> dict[str, int]:
    """Return the bytes of each tier as one rank reads them: "device", "peer", "pinned", "host", "disk".

    Args:
        placement: Where the rows are.
        on_host: Ranks of a host.
        free: Memory that rows may take; None: it was not asked, and of rows in the store's files none are cached.
        on: Where rows are gathered; the host rows of CPUs are in the store's files, and not pinned.
    """
    first = rank // on_host * on_host
    found = bytes_by_tier(placement, rank, list(range(first, first + on_host)), row_bytes_of(store))
    left = found.pop("store")
    if on == "cpu":
        return found | {"pinned": 0, "host": found["pinned"], "disk": left}
    cached = 0 if free is None else max(0, min(left, free.host - found["pinned"]))
    return found | {"host": cached, "disk": left - cached}


def told_tiers(held: dict[str, int], free: FreeMemory | None = None) -> str:
    """Return the bytes of each tier in words, and what was free for them."""
    where = {
        "device": "on each device",
        "peer": "on its peers",
        "pinned": "in pinned memory",
        "host": "in the page cache",
        "disk": "on disk",
    }
    told = ", ".join(f"{format_bytes(held[tier])} {place}" for tier, place in where.items() if held[tier])
    if free is None:
        return told
    space = f"{format_bytes(free.device)} of a GPU and {format_bytes(free.host)} of the host were free"
    return f"{told}; {space}"


def buffer_of_store(store: PartitionStore, trainer) -> FeatureBuffer | TypedBuffers:
    """Return a buffer of this process that reads all rows from the store's files, for the first batches of a fit."""
    rank, world_size = trainer.global_rank, trainer.world_size
    placement = Placement.none(store.num_nodes, world_size)
    make = TypedBuffers if store.features.by_node_type else FeatureBuffer
    return make(placement, store.features, rank, on=device_name(trainer))
