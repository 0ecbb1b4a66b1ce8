"""The features of training batches through a placement: made once a fit, one buffer a process."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ..errors import PlacementError
from ..events import record
from ..partition_store import PartitionStore
from ..placement import FeatureBuffer, FeatureCache, Placement, PlacementSettings
from ..placement.link_cost import link_alpha
from ..placement.place import RULES

HOPS_UNKNOWN = 2  # of samplers without fan-outs


def open_buffer(
    store: PartitionStore,
    placement: PlacementSettings | Placement,
    train_nodes: np.ndarray,
    sampler,
    batch_size: int,
    seed: int,
    trainer,
) -> FeatureBuffer:
    """Place the features and return this process's buffer; a device is a process of the Trainer.

    Args:
        store: A store with dense features.
        placement: Settings to place by, or a placement that was made for as many devices as there are processes.
        train_nodes: (num_train,) store ids of all targets.
        sampler: Sampler whose fan-outs the placement goes by; one without fan-outs is assumed to read all neighbours.
        batch_size: Targets per batch.
        seed: Seed of the placing.
        trainer: The Trainer; None: one process.

    Raises:
        PlacementError: no features, sparse ones, or a placement for another number of devices or another store.
    """
    if store.features is None:
        raise PlacementError(f"{store.root}: the store has no features that could be placed: leave placement out")
    rank, world_size = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
    on = _device(trainer)
    settings = placement if isinstance(placement, PlacementSettings) else PlacementSettings()
    if placement is settings:
        groups = settings.groups or linked_groups(trainer, world_size)
        placement = _with_one_alpha(settings, trainer).place(
            store, train_nodes, world_size, fanouts_of(sampler), batch_size, seed, groups
        )
    if placement.num_devices != world_size:
        raise PlacementError(
            f"the placement has {placement.num_devices} devices, training has {world_size} processes: place for "
            f"num_devices={world_size}"
        )
    options = {
        "on": on,
        "cache": FeatureCache(settings.cache_rows, settings.cache_policy) if settings.cache_rows else None,
        "fingerprint": store.layout_fingerprint,
    }
    if world_size > 1:
        buffer = FeatureBuffer.join(placement, store.features, rank, **options)
    else:
        buffer = FeatureBuffer(placement, store.features, rank, **options)
    record(
        "placement",
        rank=rank,
        method=placement.method,
        buffer_rows=len(placement.rows[rank]),
        buffer_bytes=buffer.nbytes,
        predicted=placement.device_shares[rank],
    )
    return buffer


def close_buffer(buffer: FeatureBuffer, trainer) -> None:
    """Record what each tier served, and let go of the rows; on GPUs once no peer reads them any more."""
    record("reads", rank=buffer.device, **buffer.hits)
    if buffer.on != "cpu" and trainer is not None and trainer.world_size > 1:
        trainer.strategy.barrier("close_buffer")
    buffer.close()


def fanouts_of(sampler) -> tuple[int, ...]:
    """Return a sampler's fan-outs; all neighbours of as many hops as it has layers where it has none."""
    hops = getattr(sampler, "num_layers", HOPS_UNKNOWN)
    return tuple(getattr(sampler, "fanouts", ())) or (-1,) * hops


def _with_one_alpha(settings: PlacementSettings, trainer) -> PlacementSettings:
    """Return settings with the alpha that the first process measured: two measurements give two placements."""
    if settings.alpha != "auto" or settings.method not in RULES or trainer is None or trainer.world_size == 1:
        return settings
    alpha = link_alpha(trainer.strategy.root_device.type) if trainer.global_rank == 0 else None
    return replace(settings, alpha=trainer.strategy.broadcast(alpha))


def linked_groups(trainer, world_size: int) -> Sequence[range]:
    """Return the ranks of each host, whose devices are taken to reach each other fast; GPUs that do not, alone."""
    size = world_size // getattr(trainer, "num_nodes", 1)
    devices = getattr(getattr(trainer, "strategy", None), "parallel_devices", None) or []
    pairs = ((one, other) for one in devices for other in devices if one != other and one.type == "cuda")
    if not all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs):
        size = 1
    return [range(first, first + size) for first in range(0, world_size, size)]


def _device(trainer) -> str:
    device = trainer.strategy.root_device if trainer is not None else torch.device("cpu")
    return str(device) if device.type == "cuda" else "cpu"
