"""The mini-batch loaders of one rank: over its parts, or over its share of the whole graph's targets."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ..errors import StrategyError, short
from ..events import record
from ..loader import (
    HOWS,
    BufferPool,
    Interleave,
    LoaderOptions,
    MachineSweeps,
    PartData,
    PartLoader,
    PartShares,
    Processes,
    RankPlace,
    RowReads,
    SourceSettings,
    TaskGraphs,
    Threads,
    assign_targets,
    choose_row_reads,
    choose_swept,
    core_targets,
    fits_in_memory,
    longest_rank,
    parts_of_rank,
    rank_of_parts,
)
from ..loader.row_reads import Footprint
from ..loader.staged_part import PartStager, node_values
from ..loader.sweep_trial import SweepTrial
from ..memory import format_bytes, free_memory_bytes, return_freed_memory
from ..partition_store import PartitionStore
from ..partition_store.array_file import mapped_at_random
from ..partition_store.coded_neighbors import read_runs
from ..partition_store.part_graph import load_part_graph, load_whole_graph
from ..placement import Placement, PlacementSettings
from ..planner.host_memory import activation_bytes
from ..planner.sweep_plan import EpochUse
from ..rng import fold, permutation
from ..sampler import FullBatchSampler, LayerwiseSampler, NeighborSampler, SaintSampler
from ..sampler.link_sampler import GivenLinks
from ..sampler.protocol import BatchSampler
from ..traits import SourceTraits

if TYPE_CHECKING:
    from ..remote.holder import HeldGraph, OwnerReads

_log = logging.getLogger("lightning.pytorch.rows")
ROWS = ("auto", *HOWS, "tiered", "owners")
NO_GPU = "no GPU to place them on"
_CHUNK_EDGES = 1 << 22  # neighbours that are read at once
_FOOTPRINTS = 8  # parts whose first batches tell what an epoch uses
_COLUMNS_SHARE = 16  # of free memory: a window of rows of further columns, of which there are two
_TRIAL_BATCHES = 2  # of a part, to predict the work of an epoch


def _ray_workers() -> SourceSettings:
    from ..remote import RayWorkers  # its modules need the optional extra

    return RayWorkers()


@dataclass(frozen=True)
class RowsSetting:
    """Where the feature rows of training batches are: what the setting `rows` says, see `PartitionDataModule`.

    Attributes:
        how: "auto" or one of `HOWS`: how the store is read, where nothing else has the rows.
        owners: Machines ask each other for rows; None: they do not.
        placement: Rows are on the devices; None: they are not.
    """

    how: str = "auto"
    owners: "OwnerReads | None" = None
    placement: PlacementSettings | None = None

    @classmethod
    def of(cls, rows: Any) -> "RowsSetting":
        """Return what a setting says.

        Raises:
            ValueError: it is none that there is.
        """
        if isinstance(rows, str) and rows in ("auto", *HOWS):
            return cls(rows)
        if isinstance(rows, str) and rows == "tiered":
            return cls(placement=PlacementSettings())
        if isinstance(rows, PlacementSettings | Placement):
            return cls(placement=rows if isinstance(rows, PlacementSettings) else PlacementSettings(rows))
        owners = _owners(rows)
        if owners is None:
            raise ValueError(
                f"rows must be one of {', '.join(ROWS)}, or gs.OwnerReads(), gs.PlacementSettings() or a gs.Placement, "
                f"got {short(rows)}"
            )
        return cls(owners=owners)

    def source(self, source: SourceSettings, sampler: Any, scope: str) -> SourceSettings:
        """Return the settings of a source that reads rows this way; of workers that ask owners, these know them.

        Threads that ask them are several, where no number is given.

        Raises:
            ValueError: owners cannot serve such batches.
        """
        source = source.settled(self.owners is not None) if isinstance(source, Threads) else source
        if self.owners is None:
            return source
        if scope in ("part", "parts"):
            raise ValueError('rows=owners is for batches that cross parts: use scope="graph", or rows="auto"')
        asking = SourceTraits(source).asking
        self.owners.check(sampler, source.in_process or asking is not None)
        return source if asking is None else asking(self.owners)


def _owners(rows: Any) -> "OwnerReads | None":
    if isinstance(rows, str) and rows != "owners":
        return None
    from ..remote import OwnerReads  # its modules need the optional extra where they are used

    return OwnerReads() if isinstance(rows, str) else rows if isinstance(rows, OwnerReads) else None


SOURCES = {
    "threads": Threads,
    "processes": Processes,
    "task_graphs": TaskGraphs,
    "ray": _ray_workers,
}


def source_settings(source: str | SourceSettings) -> SourceSettings:
    """Return the default settings of a name; settings are returned as they are.

    Raises:
        ValueError: the name is unknown, or it is neither.
    """
    if isinstance(source, str) and source in SOURCES:
        return SOURCES[source]()
    if isinstance(source, str) or not callable(SourceTraits(source).connect):
        raise ValueError(
            f"source must be one of {', '.join(SOURCES)}, or settings such as gs.Threads(), got {short(source)}"
        )
    return source


def part_targets(store: PartitionStore, sampler: BatchSampler | None = None) -> dict[int, np.ndarray]:
    """Return each part's targets: part to (num,) int64 store ids, ascending.

    They are its training nodes with a known label, one of several at least, and all of its nodes where the sampler
    trains on links.
    """
    targets = {}
    for part in range(store.num_parts):
        if sampler is not None and sampler.trains_on_links:
            targets[part] = np.arange(store.part_offsets[part], store.part_offsets[part + 1])
            continue
        nodes = core_targets(store.masks["train"], store.part_offsets, part)
        labels = np.asarray(store.labels[nodes])
        targets[part] = nodes[labels >= 0] if labels.ndim == 1 else nodes[(labels >= 0).any(axis=1)]
    return targets


def rank_targets(store: PartitionStore, sampler, world_size: int) -> list[np.ndarray]:
    """Return the targets of each rank where batches cross parts, equally many, from its parts: `assign_targets`.

    Raises:
        StrategyError: there are fewer targets than ranks.
    """
    targets = list(part_targets(store, sampler).values())
    counts = [len(nodes) for nodes in targets]
    if sum(counts) < world_size:
        raise StrategyError(
            f"{sum(counts)} training nodes cannot be shared out to {world_size} processes: use devices={sum(counts)}"
        )
    owner = rank_of_parts(counts, np.diff(store.part_offsets), world_size, store.num_machines)
    return assign_targets(targets, owner, world_size, partial(_neighbors_by_rank, store, owner, world_size))


def _neighbors_by_rank(store: PartitionStore, owner: np.ndarray, world_size: int, nodes: np.ndarray) -> np.ndarray:
    """Return (num_nodes, world_size) int64: how many neighbours of each node each rank owns. Nodes ascend."""
    csc = store.csc_of_parts((), nodes)
    counts = np.zeros((len(nodes), world_size), np.int64)
    degrees = csc.indptr[nodes + 1] - csc.indptr[nodes]
    chunk_of = np.cumsum(degrees) // _CHUNK_EDGES
    for rows in np.split(np.arange(len(nodes)), np.flatnonzero(np.diff(chunk_of)) + 1):
        sources = read_runs(csc.indices, csc.indptr[nodes[rows]], csc.indptr[nodes[rows] + 1])
        ranks = owner[np.searchsorted(store.part_offsets, sources, side="right") - 1]
        np.add.at(counts, (np.repeat(rows, degrees[rows]), ranks), 1)
    return counts


def mixes_parts(sampler) -> bool:
    """Whether a batch may be made of chunks of several parts: the sampler starts from seeds alone."""
    return isinstance(sampler, NeighborSampler | LayerwiseSampler)


def check_scope(scope: str, weights, sampler) -> None:
    """Refuse settings under which training would differ from what it promises, alike on every rank.

    Args:
        scope: "part", "parts", "graph", or "alone": the parts of a rank, without the others.
        weights: The strategy's weight policy; None under another strategy.
        sampler: Sampler of the loader.

    Raises:
        StrategyError: the message names the remedy.
    """
    if scope == "alone" and (weights is None or not weights.equal_batches):
        given = "no weights=" if weights is None else type(weights).__name__
        raise StrategyError(
            f"repartition_every joins what ranks learn of their parts at every step, got {given}: use "
            'Trainer(strategy="gnnscale") with weights=GradientAveraging(), or leave repartition_every out'
        )
    if scope in ("graph", "parts") and weights is not None and not weights.equal_batches:
        raise StrategyError(
            f'scope="{scope}" gives {type(weights).__name__} batches that belong to no part: leave scope="auto", or '
            "use weights=GradientAveraging()"
        )
    if scope == "parts" and weights is None:
        raise StrategyError(
            'scope="parts" mixes parts in batches, as strategy="gnnscale" does: use it, or scope="part"'
        )
    if scope == "graph" and isinstance(sampler, FullBatchSampler):
        raise StrategyError(
            'mode="full_batch" makes each part a batch, and batches that cross parts would be the whole graph on every '
            "process: use weights=ModelAveraging(), or FullGraphDataModule for gradients of the full graph"
        )
    goes_with_parts = mixes_parts(sampler) or isinstance(sampler, FullBatchSampler)
    if scope == "part" and weights is not None and weights.equal_batches and not goes_with_parts:
        raise StrategyError(
            f'{type(weights).__name__} needs as many batches on every rank, scope="part" shares out those of '
            f'NeighborSampler and LayerwiseSampler, not of {type(sampler).__name__}: leave scope="auto", or use '
            "weights=ModelAveraging()"
        )


def check_even_parts(targets: Mapping[int, np.ndarray], world_size: int) -> None:
    """Refuse parts as batches where ranks would get unequal numbers of them.

    Args:
        targets: part to its targets.
        world_size: ranks that the parts are assigned to.

    Raises:
        StrategyError: the message names the remedy.
    """
    shares = [parts_of_rank(len(targets), rank, world_size) for rank in range(world_size)]
    num_batches = [sum(len(targets[part]) > 0 for part in share) for share in shares]
    if len(set(num_batches)) > 1:
        raise StrategyError(
            'mode="full_batch" makes each part a batch, and averaged gradients need as many batches on every rank, '
            f"got {min(num_batches)} to {max(num_batches)}: use weights=ModelAveraging(), or a multiple of "
            f"{world_size} parts that all have training nodes"
        )


def check_edge_weights(sampler, store: PartitionStore) -> None:
    """Refuse a sampler that would drop the store's edge weights.

    Raises:
        StrategyError: the message names the remedy.
    """
    if isinstance(sampler, SaintSampler) and store.has["edge_weight"]:
        raise StrategyError(
            "SaintSampler weighs edges by its own norms and would drop the store's edge weights: use NeighborSampler, "
            "or write the store without edge_weight"
        )


def settle_row_reads(
    loader: PartLoader,
    store: PartitionStore,
    source: SourceSettings,
    place: RankPlace,
    how: str,
    halo_hops: int | None,
    not_placed: str = "",
    hidden_channels: int = 0,
) -> None:
    """Choose how a loader that reads the store gets its feature rows, by the memory that is free now, and log it.

    Every process calls this function: those of a machine share a sweep.

    Args:
        loader: This rank's, over the store's features; over parts, with packed rows where there are some.
        store, source, place: See `make_part_loader`.
        how: "auto", or one of `RowReads`.
        halo_hops: How far the parts' halos reach; None: batches cross parts.
        not_placed: Why `rows="auto"` does not place them.
        hidden_channels: Of a model that trains in the memory that rows are read into; 0: unknown, or on a GPU.
    """
    local = source.in_process or isinstance(source, Processes)
    free = free_memory_bytes() // place.num_local - 2 * loader.columns_bytes
    packed = store.features if halo_hops is None else store.part_features
    # In a fetched store packed rows come with their part, others from all over the graph.
    mapped = store.features if store.fetched is None else packed
    capped = store.fetched is not None and store.fetched.cap_bytes is not None
    if local and how == "mapped":
        loader.set_reads(loader.reads, packed.at_random())
    if not local or how == "mapped":
        return
    fits = how == "auto" and not capped and fits_in_memory(store.features, free)
    first = None if fits else loader.first_footprint(_typical_parts(loader, store))
    if first is not None:
        # No more than is planned for parts: what one leaves is there for the next, as new memory is zeroed first.
        loader.parts_pool.max_bytes = _held_bytes(loader, store, source, first, halo_hops)
    step_bytes = _step_bytes(store, first, hidden_channels)
    given = loader, store, source, first, how, halo_hops, free, step_bytes
    if place.num_local > 1 and torch.distributed.is_initialized():
        shared = MachineSweeps.join(None if first is None else choose_reads(*given, place.num_local), place.num_local)
        if shared is not None:
            reads, sweeps = shared
            return_freed_memory()
            _tell(place, reads.how, reads.why, not_placed, predicted_bytes=reads.predicted_bytes)
            loader.set_reads(reads, packed, sweeps)
            return
    if fits:
        if packed is not mapped:
            loader.set_reads(loader.reads, mapped)
        _tell(place, "mapped", f"{format_bytes(store.features.nbytes)} of features fit the page cache", not_placed)
        return
    if first is None:
        return
    reads = choose_reads(*given)
    if capped and how == "auto" and reads.how == "mapped":
        reads = replace(reads, how="resident", why="store_cache_bytes may let go of a part that was read")
    if reads.how != "mapped":
        return_freed_memory()
    predicted = {} if reads.predicted_bytes is None else {"predicted_bytes": reads.predicted_bytes}
    _tell(place, reads.how, reads.why, not_placed, **predicted)
    # Packed rows are copies: they pay where memory does not hold all rows.
    loader.set_reads(reads, mapped if reads.how == "mapped" else packed)


def settle_evaluation_reads(loader: PartLoader, store: PartitionStore, place: RankPlace, how: str) -> None:
    """Choose how the batches of a sampled evaluation get their rows, by the memory that is free.

    Where it does not hold the features, their rows are read for a run of batches.

    Args:
        loader: Over the store's features, or without any.
        store, place, how: See `settle_row_reads`.
    """
    settle_column_reads(loader, place, how)
    free = free_memory_bytes() // place.num_local
    if store.features is None or not loader.gathers or fits_in_memory(store.features, free):
        return
    if how == "mapped":
        loader.set_reads(loader.reads, store.features.at_random())
    else:
        loader.set_reads(RowReads("planned", free // _COLUMNS_SHARE), store.features)


def settle_column_reads(loader: PartLoader, place: RankPlace, how: str) -> None:
    """Choose how a loader's batches get the further columns of their nodes, by the memory that is free, and log it.

    Args:
        loader: This rank's.
        place: Of this rank.
        how: "mapped" leaves them to the memory map.
    """
    free, columns = free_memory_bytes() // place.num_local, loader.columns
    size = sum(column.nbytes for column in columns.values())
    if 2 * size <= free:
        return
    if how == "mapped":
        loader.set_columns({name: column.at_random() for name, column in columns.items()}, 0)
        return
    loader.set_columns(columns, free // _COLUMNS_SHARE)
    if place.rank == 0:
        _log.info(
            "Further columns of nodes, %s, are read for a run of batches, %s held, of %s free",
            *map(format_bytes, (size, 2 * loader.columns_bytes, free)),
        )


def choose_reads(
    loader: PartLoader,
    store: PartitionStore,
    source: SourceSettings,
    first: Footprint,
    how: str,
    halo_hops: int | None,
    free_bytes: int,
    step_bytes: int = 0,
    num_processes: int = 1,
) -> RowReads:
    """Return how the batches of a loader get their feature rows, by the memory that is free.

    Args:
        first: Of some of its batches.
        loader, store, source, how, halo_hops: See `settle_row_reads`.
        free_bytes: Memory that this process may still take.
        step_bytes: What a step of the model is predicted to take of it; 0: unknown.
        num_processes: Of the machine, which would share a sweep.
    """
    packed = store.features if halo_hops is None else store.part_features
    parts = loader.walk.num_batches
    whole = halo_hops is None or halo_hops > 1
    rows = np.full(len(parts), store.num_nodes) if whole else store.part_rows[list(parts)]
    parts_held = min(loader.parts_held, len(parts)) + (not source.in_process)
    batches_ahead = loader.options.batches_ahead
    part_bytes = part_sizes(store, first, list(parts), whole)
    two_held = min(2 * loader.parts_together, len(parts)) + (not source.in_process)
    held_bytes = _held_bytes(loader, store, source, first, halo_hops)
    reads = choose_row_reads(
        packed,
        first,
        free_bytes=free_bytes,
        part_rows=loader.walk.most_held(rows, loader.parts_together),
        held_rows=loader.walk.most_held(rows, parts_held),
        parts_held=parts_held,
        batches_held=batches_ahead + 2,
        visit_batches=max(loader.per_step * len(loader) // max(len(parts), 1), 1),
        least_ahead=min(batches_ahead, max(1, -(-(source.batches_ahead - 1) // loader.chunks))),
        keeps=source.in_process and not whole,
        part_bytes=held_bytes,
        step_bytes=step_bytes,
    )
    if how not in ("auto", reads.how):
        # What is kept was chosen for the other way; parts of other processes would each hold it.
        reads = replace(reads, how=how, kept_halos=0, share_read=1.0, why=f"rows={how}")
    if how == "resident" or store.fetched is not None:
        return reads
    trial = sweep_trial(store, loader, first, rows, whole)
    return choose_swept(
        reads,
        packed,
        first,
        trial,
        free_bytes=free_bytes,
        part_bytes=held_bytes,
        two_parts_bytes=loader.walk.most_held(part_bytes, two_held),
        open_share=min(loader.parts_held / max(len(parts), 1), 1.0) if loader.chunks > 1 else 0.0,
        num_processes=num_processes,
        step_bytes=step_bytes,
    )


def _step_bytes(store: PartitionStore, first: Footprint | None, hidden_channels: int) -> int:
    """Predict what a step takes beside its batch: inputs as float32, rows of all layers; 0: the width is unknown."""
    if first is None or not hidden_channels:
        return 0
    width = store.features.dim
    return int(4 * width * first.rows + activation_bytes(first.target_rows, width, hidden_channels))


def _held_bytes(
    loader: PartLoader, store: PartitionStore, source: SourceSettings, first: Footprint, halo_hops: int | None
) -> int:
    """Return the most bytes of parts, without features, that are in memory at a time; see `choose_reads`."""
    parts = list(loader.walk.num_batches)
    part_bytes = part_sizes(store, first, parts, halo_hops is None or halo_hops > 1)
    return int(loader.walk.most_held(part_bytes, min(loader.parts_held, len(parts)) + (not source.in_process)))


def reads_by_memory(
    loader: PartLoader,
    store: PartitionStore,
    halo_hops: int | None,
    free_bytes: list[int],
    num_processes: int,
    hidden_channels: int = 0,
) -> list[RowReads]:
    """Return how a loader's batches would get their rows with so much memory free, for each of some sizes.

    Args:
        loader, store, halo_hops, num_processes: See `choose_reads`.
        free_bytes: Sizes, of each process.
        hidden_channels: See `settle_row_reads`.
    """
    first = loader.first_footprint(_typical_parts(loader, store))
    if first is None:
        return []
    step_bytes = _step_bytes(store, first, hidden_channels)
    fits = RowReads(predicted_bytes=int(store.features.nbytes), why="memory holds the features twice")
    return [
        fits
        if fits_in_memory(store.features, free)
        else choose_reads(loader, store, Threads(), first, "auto", halo_hops, free, step_bytes, num_processes)
        for free in free_bytes
    ]


def _tell(place: RankPlace, how: str, why: str, not_placed: str, **facts: Any) -> None:
    record("row_reads", rank=place.rank, how=how, why=why, not_placed=not_placed, **facts)
    if place.rank == 0 and (how, not_placed) != ("mapped", NO_GPU):  # without a choice there is nothing to say
        _log.info("Feature rows are %s: %s%s", how, why, f" ({not_placed})" if not_placed else "")


def part_sizes(store: PartitionStore, first: Footprint, parts: list[int], whole: bool) -> np.ndarray:
    """Return (num_parts,) the bytes of parts in memory, without features, from those of one of them."""
    if whole:
        return np.full(len(parts), first.part_bytes)
    edges = np.diff(store.csc.indptr[store.part_offsets])[parts]
    items = edges + store.part_rows[parts]
    return items * (first.part_bytes / max(first.part_edges + first.part_rows, 1))


def _edges_a_node(store: PartitionStore, parts: np.ndarray) -> np.ndarray:
    """Return the mean degree of the nodes of each part."""
    return np.diff(store.csc.indptr[store.part_offsets])[parts] / np.maximum(np.diff(store.part_offsets)[parts], 1)


def _typical_parts(loader: PartLoader, store: PartitionStore) -> list[int]:
    """Return some parts that have batches, from those of few edges a node to those of many."""
    parts = np.array([part for part, count in loader.walk.num_batches.items() if count], np.int64)
    parts = parts[np.argsort(_edges_a_node(store, parts), kind="stable")]
    num = min(_FOOTPRINTS, len(parts))
    return parts[(2 * np.arange(num) + 1) * len(parts) // (2 * num)].tolist() if num else []


def sweep_trial(
    store: PartitionStore, loader: PartLoader, first: Footprint, rows: np.ndarray, whole: bool
) -> SweepTrial:
    """Return what tries how an epoch's rows would be swept, with which rows its batches use.

    Args:
        first: Of typical parts.
        rows: (num_parts,) rows of its parts with their halos.
        whole: Whether batches cross parts.
    """
    parts, batches = np.array(list(loader.walk.num_batches)), loader.parts_of_batches()
    degree = _edges_a_node(store, np.arange(store.num_parts))
    shown = degree[[use.part for use in first.uses]]
    like = np.abs(degree[:, None] - shown).argmin(axis=1)
    chunk_rows = np.zeros((store.num_parts, 2))
    for part, seeds in loader.chunk_seeds().items():
        use = first.uses[like[part]]
        chunk_rows[part] = np.array([use.own_rows, use.other_rows]) * (seeds / max(use.seeds, 1))
    halo_rows = np.full(store.num_parts, store.num_nodes)
    if not whole:
        halo_rows[parts] = rows - np.diff(store.part_offsets)[parts]
    chunks = np.bincount([part for batch in batches for part in batch], minlength=store.num_parts)
    own, others = (chunks @ chunk_rows).tolist()
    use = EpochUse(
        store.num_nodes,
        store.features.nbytes / max(store.num_nodes, 1),
        rows=own + others,
        own_share=0.0 if whole else own / max(own + others, 1),
        waiting_bytes=first.waiting_bytes / max(first.rows, 1) * (own + others),
        part_rows=rows * loader.options.passes,
        degrees=np.concatenate([use.degrees for use in first.uses]),
    )
    return SweepTrial(use, store.part_offsets, halo_rows, batches, chunk_rows, first.uses, like)


def make_part_loader(
    store: PartitionStore,
    sampler,
    halo_hops: int,
    options: LoaderOptions,
    features,
    source: SourceSettings,
    place: RankPlace,
) -> PartLoader:
    """Return a loader over the parts of a process; batches stay in core and halo of their part.

    Args:
        store: The partition store.
        sampler: Samples the contents of a batch.
        halo_hops: Hops of halo of each part, 0 to 3.
        options: Options of the loader.
        features: A `Column` by store id; None: batches have no features.
        source: Settings of what prepares the batches.
        place: Place of this process.
    """
    targets = part_targets(store, sampler)
    counts = [options.passes * sampler.num_batches(len(nodes), options.batch_size, False) for nodes in targets.values()]
    shares = [parts_of_rank(store.num_parts, rank, place.num_ranks) for rank in place.ranks]
    if len(shares) > 1:  # each part is one batch, and ranks have equally many: `check_even_parts`
        trained = [[part for part in share if len(targets[part])] for share in shares]
        shares = [[part for step in zip(*trained, strict=True) for part in step]]
    return PartLoader(
        shares[0],
        _data_of_parts(store, halo_hops, features, options),
        targets,
        sampler,
        options,
        per_step=len(place.ranks),
        pad_to=longest_rank(counts, place.num_ranks),
        source=source.connect(place),
    )


def make_interleaved_loader(
    store: PartitionStore,
    sampler,
    halo_hops: int | None,
    open_parts: int,
    options: LoaderOptions,
    features,
    source: SourceSettings,
    place: RankPlace,
    together: bool = False,
) -> PartLoader:
    """Return a loader over all parts; each batch mixes chunks of several, and every rank has as many batches.

    Args:
        halo_hops: Hops of halo of each part, 0 to 3; None: each chunk of a batch has seeds of one part, and neighbours
            of any.
        open_parts: Parts that a batch mixes, >= 1; fewer where the source holds no more.
        store, sampler, options, features, source, place: See `make_part_loader`.
        together: Whether the parts that a batch mixes are sampled as one graph.
    """
    if halo_hops is None:
        edges = SourceTraits(source).owners is None
        data = _data(store, partial(load_whole_graph, store), features, options, is_whole=True, edges=edges)
    else:
        data = _data_of_parts(store, halo_hops, features, options)
    targets, connected = part_targets(store, sampler), source.connect(place)
    cap = SourceTraits(connected).machine_bytes
    if cap is not None and halo_hops is not None and open_parts > 1:
        stage = data.stager(targets, sampler, options.seed)
        open_parts = _lanes_that_fit(store, stage, features, cap, open_parts)
    return PartLoader(
        range(store.num_parts),
        data,
        targets,
        sampler,
        options,
        interleave=Interleave(
            place.ranks.start, place.num_ranks, open_parts, halo_hops is None, len(place.ranks), together
        ),
        source=connected,
    )


def _lanes_that_fit(store: PartitionStore, stage: PartStager, features, cap: int, open_parts: int) -> int:
    """Return how many parts a batch may mix so that each is read once an epoch; warns where the cap makes it fewer.

    Args:
        cap: Bytes of parts that a machine holds.
        open_parts: Parts that a batch mixes where there is no cap.

    Cost: reads one to three parts, the largest by edges, by rows and by both.
    """
    from ..remote.held_parts import part_bytes

    edges, rows = np.diff(store.csc.indptr[store.part_offsets]), np.asarray(store.part_rows)
    trained = np.array([len(nodes) > 0 for nodes in stage.targets.values()])
    sizes = [np.where(trained, size, -1.0) for size in (edges, rows, edges / max(1, edges.max()) + rows / rows.max())]
    largest = part_bytes(stage, {int(size.argmax()) for size in sizes}, features)
    fitting = max(1, min(open_parts, cap // largest))
    if fitting < open_parts:
        rank_zero_warn(
            f"a batch mixes {fitting} parts, not interleave_parts={open_parts}: source.worker_memory_bytes caps a "
            f"machine "
            f"at {cap} bytes, and a part takes up to {largest}, so more of them would be read repeatedly; "
            f"{open_parts * largest} for all workers of a machine hold them"
        )
    return fitting


def make_alone_loader(
    store: PartitionStore,
    sampler,
    every: int,
    options: LoaderOptions,
    features,
    source: SourceSettings,
    place: RankPlace,
) -> PartLoader:
    """Return a loader over the parts that a rank holds, which it samples as one graph without the others.

    Args:
        every: Epochs for which ranks keep their parts, >= 1.
        store, sampler, options, features, source, place: See `make_part_loader`.

    Raises:
        StrategyError: there are fewer parts than two a rank, or fewer with targets than ranks; or several edge types.
    """
    if store.schema is not None:
        raise StrategyError(
            f"repartition_every={every} corrects sums over edges of one edge type, and this store has "
            f"{store.schema.num_edge_types} edge types: leave it out, or use scope=parts"
        )
    targets = part_targets(store, sampler)
    trained = tuple(part for part, nodes in targets.items() if len(nodes))
    if store.num_parts < 2 * place.num_ranks or len(trained) < place.num_ranks:
        raise StrategyError(
            f"repartition_every={every} deals parts to {place.num_ranks} ranks, at least 2 to each and 1 with training "
            f"nodes, got {store.num_parts} parts, {len(trained)} with training nodes: use "
            f"num_parts={4 * place.num_ranks}"
        )
    num_batches = -(-sum(map(len, targets.values())) // (place.num_ranks * options.batch_size))
    idle = tuple(part for part in targets if part not in trained)
    shares = PartShares(trained, idle, place.num_ranks, every, num_batches, options.seed)
    alone = {"shares": shares, "part_offsets": np.asarray(store.part_offsets)}
    data = replace(_data_of_parts(store, 1, features, options), **alone)
    return PartLoader(
        place.ranks, data, targets, sampler, options, per_step=len(place.ranks), source=source.connect(place)
    )


def make_graph_loader(
    store: PartitionStore,
    sampler,
    options: LoaderOptions,
    features,
    source: SourceSettings,
    place: RankPlace,
    held: "HeldGraph | None" = None,
) -> PartLoader:
    """Return a loader over a rank's equal share of all targets; batches cross parts. Arguments: `make_part_loader`.

    Args:
        held: The graph as its owners hold it; None: the store is read.

    Raises:
        StrategyError: there are fewer targets than ranks.
    """
    load = partial(load_whole_graph, store, edges=held is None)
    # A part of the graph is a rank here. With the targets of all ranks, all tell workers the same.
    shares = dict(enumerate(rank_targets(store, sampler, place.num_ranks)))
    sampler = sampler if held is None else held.sampler(sampler)
    reads_edges = held is None and SourceTraits(source).owners is None
    data = _data(store, load, features, options, is_whole=True, edges=reads_edges)
    per_step, source = len(place.ranks), source.connect(place)
    return PartLoader(place.ranks, data, shares, sampler, options, per_step=per_step, source=source)


def make_evaluation_loader(
    store: PartitionStore,
    num_hops: int,
    split: str | None,
    options: LoaderOptions,
    features,
    rank: int,
    world_size: int,
    held: "HeldGraph | None" = None,
    sampled_by: Any = None,
) -> PartLoader:
    """Return a loader over a rank's share of a split, with all neighbours of `num_hops` hops; no node appears twice.

    Args:
        split: a mask of the store; None takes every node.
        features: a `Column` by store id, or None: batches come without.
        held: The graph as its owners hold it; None: the store is read.
        sampled_by: The sampler of the training; where it looks at times, neighbours that are later than the node are
            left out here too.

    Raises:
        StrategyError: fewer nodes than ranks.
    """
    nodes = np.flatnonzero(store.masks[split]) if split else np.arange(store.num_nodes)
    if not len(nodes):
        raise StrategyError(f"no node is in the {split} mask: name some nodes, or leave the mask out")
    if len(nodes) < world_size:
        raise StrategyError(
            f"{len(nodes)} nodes cannot be shared out to {world_size} processes: use devices=1 to evaluate"
        )
    whole, sampler = load_whole_graph(store, rank, edges=held is None), NeighborSampler([-1] * num_hops)
    if sampled_by is not None and sampled_by.temporal_strategy is not None:
        sampler = replace(
            sampler, temporal_strategy=sampled_by.temporal_strategy, strictly_before=sampled_by.strictly_before
        )
    data = _data(store, lambda part: whole, features, options, edges=held is None)
    mine = np.array_split(nodes, world_size)[rank]
    options = replace(options, shuffle=False, reads=RowReads())
    return PartLoader([rank], data, {rank: mine}, sampler if held is None else held.sampler(sampler), options)


def make_link_loader(
    store: PartitionStore, num_hops: int, links: Any, options: LoaderOptions, features, rank: int, sampled_by: Any
) -> PartLoader:
    """Return a loader over a rank's share of some links, with all neighbours of `num_hops` hops of their ends.

    Args:
        links: `EvaluationLinks`. A batch has as many as make about `options.batch_size` ends and negatives.
        store, num_hops, options, features, rank: As for `make_evaluation_loader`.
        sampled_by: The `LinkSampler` of the training; where it looks at times, neighbours that are not before the link
            are left out.

    Raises:
        StrategyError: a rank has no link.
    """
    if not links.edges.shape[1]:
        raise StrategyError(f"process {rank} has no link to evaluate, they are too few: use devices=1 to evaluate")
    inner = NeighborSampler([-1] * num_hops)
    if sampled_by.by_time:
        inner = replace(inner, temporal_strategy=sampled_by.sampler.temporal_strategy, strictly_before=True)
    whole = load_whole_graph(store, rank)
    size = max(1, options.batch_size // (2 + links.num_negatives))
    options = replace(options, batch_size=size, shuffle=False, reads=RowReads())
    data = _data(store, lambda part: whole, features, options)
    return PartLoader([rank], data, {rank: links.edges[0, :1]}, GivenLinks(inner, links), options)


def epoch_work(store: PartitionStore, sampler, halo_hops: int, scope: str, options: LoaderOptions) -> int:
    """Predict how many rows and edges the batches of an epoch hold, over all ranks, from a few that are sampled.

    It is a function of the arguments alone, the same for any number of ranks. Samplers that sample subgraphs of a part
    (`ClusterSampler`, `SaintSampler`, `FullBatchSampler`) are taken to read each row and edge once.

    Args:
        store: the partition store.
        sampler: what a batch samples.
        halo_hops, options: see `make_part_loader`.
        scope: "part" or "graph".

    Cost: a part's graph, and a few batches of two parts without features.
    """
    if not isinstance(sampler, NeighborSampler | LayerwiseSampler):
        return options.passes * (store.num_nodes + store.num_edges)
    targets = {part: nodes for part, nodes in part_targets(store, sampler).items() if len(nodes)}
    load = partial(load_whole_graph, store) if scope == "graph" else partial(load_part_graph, store, halo_hops)
    trial = replace(options, passes=1, num_threads=1, prefetch_batches=None, reads=RowReads())
    work = seeds = 0
    for part in list(targets)[:: max(1, len(targets) // 2)][:2]:
        few = permutation(len(targets[part]), fold(options.seed, part))[: _TRIAL_BATCHES * options.batch_size]
        chosen = {part: targets[part][np.sort(few)]}
        loader = PartLoader([part], _data(store, load, None, trial), chosen, sampler, trial)
        for batch in loader:
            work += len(batch.n_id) + batch.edge_index.shape[1]
            seeds += batch.batch_size
        loader.close()
    return int(options.passes * work / max(1, seeds) * sum(len(nodes) for nodes in targets.values()))


def _data(
    store: PartitionStore,
    load_part: Callable[[int], Any],
    features,
    options: LoaderOptions,
    is_whole: bool = False,
    edges: bool = True,
) -> PartData:
    """Return what batches are made of; edges: whether they read the columns of their edges from the store."""
    without = ["edge_time"] if options.edge_features else ["edge_time", "edge_features"]  # times come with the graph
    edges = store.edge_columns(without, whole=edges)
    if is_whole:
        edges = {name: mapped_at_random(values) for name, values in edges.items()}
    nodes = node_values(store.labels, store.masks) | store.node_columns
    return PartData(load_part, features, nodes, edges, is_whole)


def _data_of_parts(store: PartitionStore, halo_hops: int, features, options: LoaderOptions) -> PartData:
    """Return what batches of parts with some hops of halo are made of; the parts' memory is a pool's."""
    pool = BufferPool(0)
    load = partial(load_part_graph, store, halo_hops, rows=features is not None, allocate=pool.take)
    return replace(_data(store, load, features, options), pool=pool)
