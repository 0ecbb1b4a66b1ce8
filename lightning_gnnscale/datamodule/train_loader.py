"""The mini-batch loaders of one rank: over its parts, or over its share of the whole graph's targets."""

from dataclasses import dataclass

import numpy as np

from ..errors import StrategyError
from ..loader import PartLoader, WholeGraph, core_targets, longest_rank, parts_of_rank, split_targets
from ..partition_store import PartitionStore
from ..sampler import NeighborSampler


@dataclass(frozen=True)
class LoaderOptions:
    """What a loader is given beside its parts; see `PartitionDataModule`."""

    batch_size: int
    num_threads: int
    prefetch_batches: int
    shuffle: bool
    seed: int


def part_targets(store: PartitionStore) -> dict[int, np.ndarray]:
    """Return each part's training nodes with a known label: part to (num,) int64 store ids, ascending."""
    targets = {}
    for part in range(store.num_parts):
        nodes = core_targets(store.masks["train"], store.part_offsets, part)
        labels = np.asarray(store.labels[nodes])
        targets[part] = nodes[labels >= 0] if labels.ndim == 1 else nodes
    return targets


def make_part_loader(
    store: PartitionStore, sampler, halo_hops: int, passes: int, options: LoaderOptions, rank: int, world_size: int
) -> PartLoader:
    """Return a loader over the parts of a rank; batches stay in core and halo of their part.

    Args:
        store: the partition store.
        sampler: what a batch draws.
        halo_hops: of the parts, 0 to 3.
        passes: over a part in one visit.
        options: of the loader.
        rank, world_size: this process and how many there are.
    """
    targets = part_targets(store)
    counts = [passes * sampler.num_batches(len(nodes), options.batch_size, False) for nodes in targets.values()]
    return PartLoader(
        parts_of_rank(store.num_parts, rank, world_size),
        lambda part: store.load_part(part, halo_hops),
        targets=targets,
        passes=passes,
        pad_to=longest_rank(counts, world_size),
        **_shared(store, sampler, options),
    )


def make_graph_loader(store: PartitionStore, sampler, options: LoaderOptions, rank: int, world_size: int) -> PartLoader:
    """Return a loader over a rank's equal share of all targets; batches cross parts.

    Args:
        store: the partition store.
        sampler: what a batch draws.
        options: of the loader.
        rank, world_size: this process and how many there are.

    Raises:
        StrategyError: fewer targets than ranks.
    """
    targets = np.concatenate(list(part_targets(store).values()))
    if len(targets) < world_size:
        raise StrategyError(
            f"{len(targets)} training nodes cannot be shared out to {world_size} processes: use devices={len(targets)}"
        )
    whole = WholeGraph.of(store.csc, rank, store.symmetric)
    mine = split_targets(targets, world_size)[rank]
    return PartLoader([rank], lambda part: whole, targets={rank: mine}, **_shared(store, sampler, options))


def make_evaluation_loader(
    store: PartitionStore, num_hops: int, split: str | None, options: LoaderOptions, rank: int, world_size: int
) -> PartLoader:
    """Return a loader over the nodes of a split that a rank owns, with all neighbours of `num_hops` hops.

    Args:
        split: a mask of the store; None takes every node.
    """
    nodes = []
    for part in parts_of_rank(store.num_parts, rank, world_size):
        start, stop = store.part_offsets[part], store.part_offsets[part + 1]
        nodes.append(core_targets(store.masks[split], store.part_offsets, part) if split else np.arange(start, stop))
    whole = WholeGraph.of(store.csc, rank, store.symmetric)
    shared = _shared(store, NeighborSampler([-1] * num_hops), options) | {"shuffle": False}
    return PartLoader([rank], lambda part: whole, targets={rank: np.sort(np.concatenate(nodes))}, **shared)


def _shared(store: PartitionStore, sampler, options: LoaderOptions) -> dict:
    return {
        "features": store.features,
        "sampler": sampler,
        "labels": store.labels,
        "masks": store.masks,
        "edge_weight": store.edge_weight,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "num_threads": options.num_threads,
        "prefetch_batches": options.prefetch_batches,
        "shuffle": options.shuffle,
    }
