"""A part prepared for sampling batches, and the loading of the next one while this one trains."""

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ..events import clock
from ..graph import MASK_NAMES
from ..partition_store.array_file import file_place
from ..partition_store.features import Column, LoadedRows
from ..partition_store.packed_features import features_of_part
from ..partition_store.part_graph import SeenEdges, local_rows, parts_alone, union_of_parts
from ..partition_store.planned_reads import RankedNodes, read_slice
from ..sampler.protocol import BatchSampler, num_slices
from .part_walk import PartShares, even_slices, order_key

_BLOCK = 1 << 20  # nodes


class PartStates(NamedTuple):
    """What a sampler prepared for each part of a union of parts."""

    by_part: dict[int, Any]


@dataclass
class StagedPart:
    """A part in memory: its graph, the columns of its nodes and edges, and what its sampler prepared for it.

    Attributes:
        graph: A `PartGraph` or `WholeGraph`.
        state: State that the sampler prepared for this part.
        nodes: Columns of its nodes by their names in a batch, (num_local, ...) by local id; all but the masks.
        masks: (num_local,) uint8; bit i belongs to the mask MASK_NAMES[i].
        mask_names: Masks that there are.
        edges: Columns of the edges by their names in a batch, (num_edges, ...) in the store's edge order.
        features: Rows of core and halo, if they were read with the part.
        dtypes: What batches have of those of `nodes` that are held in fewer bytes.
    """

    graph: Any
    state: Any
    nodes: Mapping[str, np.ndarray]
    masks: np.ndarray
    mask_names: tuple[str, ...]
    edges: Mapping[str, np.ndarray]
    features: LoadedRows | None = None
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    _items: dict = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _there: list = field(default_factory=list)

    def __reduce__(self):
        columns = self.nodes, self.masks, self.mask_names, self.edges
        return StagedPart, (self.graph, self.state, *columns, self.features, self.dtypes)

    @property
    def nbytes(self) -> int:
        """Bytes in memory: of the graph and the columns without what they map, and of features."""
        graph = (*self.graph.csc, self.graph.degree, self.graph.halo_nodes, self.graph.edge_id, self.graph.self_weight)
        arrays = (*graph, *self.graph.columns.values(), *self.nodes.values(), self.masks, *self.edges.values())
        own = [array for array in arrays if array is not None and file_place(array) is None]
        return sum(array.nbytes for array in own) + (0 if self.features is None else self.features.nbytes)

    def of(self, part: int) -> "StagedPart":
        """Return what the batches of a part are sampled from; of a union of parts, with that part's targets."""
        if not isinstance(self.state, PartStates):
            return self
        with self._lock:
            if part not in self._items:
                self._items[part] = replace(
                    self,
                    graph=replace(self.graph, part=part),
                    state=self.state.by_part[part],
                    _items={},
                    _lock=self._lock,
                    _there=self._there,
                )
            return self._items[part]

    def on_device(self, make: Callable[["StagedPart"], Any]) -> Any:
        """Return what is made of the part on a device: at the first call, kept as long as the part."""
        with self._lock:
            if not self._there:
                self._there.append(make(self))
            return self._there[0]

    def items(
        self,
        sampler: BatchSampler,
        batch_size: int,
        drop_last: bool,
        seed: int,
        epoch: int,
        shuffle: bool,
        num_ranks: int | None = None,
    ):
        """Return the items of each batch of a pass; made once a pass.

        Args:
            num_ranks: ranks that share the pass; there are as many batches for each, of equal size but for one item.
                None: batches of `batch_size`, the last one shorter.
        """
        with self._lock:
            if epoch not in self._items:
                key = order_key(seed, epoch, self.graph.part) if shuffle else None
                while len(self._items) > 1:  # batches of two passes may be under way
                    del self._items[next(iter(self._items))]
                self._items[epoch] = (
                    sampler.items(self.state, batch_size, drop_last, key)
                    if num_ranks is None
                    else self._shared_items(sampler, batch_size, key, num_ranks)
                )
            return self._items[epoch]

    def _shared_items(self, sampler: BatchSampler, batch_size: int, key: int | None, num_ranks: int):
        (items,) = sampler.items(self.state, sys.maxsize, False, key)
        return even_slices(items, num_ranks * num_slices(len(items), batch_size * num_ranks, False))


@dataclass(frozen=True)
class PartStager:
    """Load one part: its graph, then its own range and its halo of node columns and features; nothing else is read.

    Args:
        load_part: Maps a part id to its `PartGraph` or to a `WholeGraph`.
        targets: Maps a part id to (num_targets,) store ids in its core, ascending.
        sampler: Sampler that is prepared for each part.
        nodes: Columns of the nodes by their names in a batch, (num_nodes, ...) in store order; see `node_values`.
        seed: Seed of the run.
        edges: Columns of the edges by their names in a batch, (num_edges, ...) in the store's edge order: batches read
            them where they lie.
        features: A `Column` whose rows are read with each part; None: batches gather them from elsewhere.
        kept: Rows of that table that stay in memory and are not read with a part.
        is_whole: Whether every part is the whole graph; parts then differ in their targets alone.
        held: Columns of `nodes` that are in memory, in few bytes a node, see `with_held_columns`: halos reach all over
            the graph, so that a part would read most pages of a column again. "masks" has a bit for each mask.
        shares: Parts of a rank are one graph without the others, and its batches have seeds of all of them; None: parts
            of a union see their halos, and a batch has seeds of one.
        part_offsets: (num_parts + 1,) of the store, where there are shares.
    """

    load_part: Callable[[int], Any]
    targets: Mapping[int, np.ndarray]
    sampler: BatchSampler
    nodes: Mapping[str, np.ndarray]
    seed: int
    edges: Mapping[str, np.ndarray] = field(default_factory=dict)
    features: Column | None = None
    kept: LoadedRows | None = None
    is_whole: bool = False
    held: Mapping[str, np.ndarray] = field(default_factory=dict)
    shares: PartShares | None = None
    part_offsets: np.ndarray | None = None

    def with_held_columns(self) -> "PartStager":
        """Return a stager with columns of the nodes in memory: masks, and integers a node.

        Cost: one read of these columns, the first time.
        """
        if self.held:
            return self
        held = {}
        for name in self._columns:
            values = self.nodes[name]
            if values.ndim == 1 and values.dtype.kind in "iu" and values.itemsize > 1:
                held[name] = _in_few_bytes(values)
        names = [name for name in MASK_NAMES if f"{name}_mask" in self.nodes]
        if names:
            held["masks"] = np.zeros(len(self.nodes[f"{names[0]}_mask"]), np.uint8)
            for name in names:
                mask, bit = self.nodes[f"{name}_mask"], MASK_NAMES.index(name)
                for at in range(0, len(mask), _BLOCK):
                    held["masks"][at : at + _BLOCK] |= read_slice(mask[at : at + _BLOCK]).astype(np.uint8) << bit
        return replace(self, held=held)

    def __call__(self, part: int | tuple[int, ...]) -> StagedPart:
        """Return a part, or a union of parts, ready.

        Raises:
            ValueError: a target lies outside the core of the part.
        """
        loaded = self.loaded(part)
        if not isinstance(part, tuple):
            return self.prepared(loaded, part)
        nodes, sampler = loaded.graph.halo_nodes, self.sampler
        targets = {one: np.searchsorted(nodes, self.targets[one]) for one in part}
        if self.shares is not None:
            of_all = np.concatenate([targets[one] for one in part])
            return replace(loaded, state=sampler.prepare(loaded.graph, of_all, self.seed))
        state = sampler.prepare(loaded.graph, targets[part[0]], self.seed)
        return replace(loaded, state=PartStates({one: sampler.with_targets(state, targets[one]) for one in part}))

    def loaded(self, part: int | tuple[int, ...]) -> StagedPart:
        """Return the part before its sampler is prepared."""
        with clock.doing("read"):
            return self._loaded(part)

    def _loaded(self, part: int | tuple[int, ...]) -> StagedPart:
        if self.shares is not None:
            graph = parts_alone([self.load_part(one) for one in part], self.part_offsets, self._seen)
        elif isinstance(part, tuple):
            graph = union_of_parts([self.load_part(one) for one in part])
        else:
            graph = self.load_part(part)
        if self.sampler.direction == "both":
            graph = graph.symmetrised()
        nodes = {name: self._local_values(name, graph) for name in self._columns}
        masks = self._local_masks(graph), tuple(name for name in MASK_NAMES if f"{name}_mask" in self.nodes)
        dtypes = {name: self.nodes[name].dtype for name in nodes if name in self.held}
        return StagedPart(graph, None, nodes, *masks, self.edges, self._local_features(graph), dtypes)

    def _seen(self, part_of: np.ndarray) -> SeenEdges:
        sort = np.zeros(len(self.part_offsets) - 1, np.int8)
        sort[list(self.shares.idle)] = 1
        return SeenEdges(part_of, sort, self.shares.together())

    @property
    def _columns(self) -> list[str]:
        return [name for name in self.nodes if name.removesuffix("_mask") not in MASK_NAMES]

    def prepared(self, loaded: StagedPart, part: int) -> StagedPart:
        """Return a loaded part, ready; the whole graph may have been loaded as any part.

        Raises:
            ValueError: a target lies outside the core of the part.
        """
        graph = replace(loaded.graph, part=part) if self.is_whole else loaded.graph
        targets = np.asarray(self.targets[part]) - graph.core_start
        if len(targets) and not (targets.min() >= 0 and targets.max() < graph.num_core):
            raise ValueError(
                f"targets of part {part} must be core nodes, store ids in [{graph.core_start}, "
                f"{graph.core_start + graph.num_core}), got {self.targets[part].min()} to {self.targets[part].max()}"
            )
        state = self.sampler.prepare(graph, targets, self.seed)
        return replace(loaded, graph=graph, state=state, _items={}, _lock=Lock(), _there=[])

    def _local_features(self, graph) -> LoadedRows | None:
        if self.features is None:
            return None
        held = RankedNodes.empty(self.features.num_rows)
        for nodes in (np.arange(graph.core_start, graph.core_start + graph.num_core), graph.halo_nodes):
            held.add(nodes, self.kept and self.kept.held)
        return LoadedRows.of(features_of_part(self.features, graph.part), held, self.kept)

    def _local_values(self, name: str, graph) -> np.ndarray:
        return np.ascontiguousarray(local_rows(self.held.get(name, self.nodes[name]), graph))

    def _local_masks(self, graph) -> np.ndarray:
        if "masks" in self.held:
            return np.ascontiguousarray(local_rows(self.held["masks"], graph))
        packed = np.zeros(graph.num_local, np.uint8)
        for bit, name in enumerate(MASK_NAMES):
            if f"{name}_mask" in self.nodes:
                packed |= local_rows(self.nodes[f"{name}_mask"], graph).astype(np.uint8) << bit
        return packed


def _in_few_bytes(values: np.ndarray) -> np.ndarray:
    """Return (num,) integers in the narrowest type that holds them; two reads of a mapped column."""
    blocks = [slice(at, at + _BLOCK) for at in range(0, len(values), _BLOCK)]
    ends = [(int(block.min()), int(block.max())) for block in (read_slice(values[at]) for at in blocks)]
    low, high = min((one for one, _ in ends), default=0), max((one for _, one in ends), default=0)
    dtype = np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))
    if dtype.kind not in "iu" or dtype.itemsize >= values.itemsize:
        return np.asarray(values)
    out = np.empty(len(values), dtype)
    for at in blocks:
        out[at] = read_slice(values[at])
    return out


def node_values(labels: np.ndarray | None, masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return labels and masks as columns of the nodes, by their names in a batch.

    Args:
        labels: (num_nodes,) integers or (num_nodes, num_labels) in store order, or None.
        masks: Maps a name of MASK_NAMES to a (num_nodes,) bool mask in store order.
    """
    found = {f"{name}_mask": mask for name, mask in masks.items() if name in MASK_NAMES}
    if labels is None:
        return found
    return {"y": labels.astype(np.int64, copy=False) if labels.ndim == 1 else labels} | found


class PartCache:
    """The parts that are in memory: the one that trains and the next one. Parts stay until their place is needed.

    Args:
        stage: part id to `StagedPart`.
        capacity: most parts kept, >= 1.
    """

    def __init__(self, stage: Callable[[int], StagedPart], capacity: int = 2):
        self.stage, self.capacity = stage, capacity
        self._parts: dict[int, Future] = {}

    def request(self, part: int, executor: Executor | None) -> Future:
        """Return the future of a part; loaded by the executor, or at once without one.

        A part that could not be loaded is tried again at the next request.
        """
        future = self._parts.pop(part, None)
        if future is None or future.cancelled() or (future.done() and future.exception() is not None):
            while len(self._parts) >= self.capacity:
                del self._parts[next(iter(self._parts))]
            future = executor.submit(self.stage, part) if executor else _done(self.stage, part)
        self._parts[part] = future  # last: the least recently requested part goes first
        return future

    def clear(self) -> None:
        """Release all parts."""
        self._parts.clear()


def _done(function: Callable, argument: int) -> Future:
    future: Future = Future()
    try:
        future.set_result(function(argument))
    except Exception as error:
        future.set_exception(error)
    return future
