"""A drop-in for PyG's `NeighborLoader` on a graph in memory, without a partition store."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from ..dataset.columns import opened
from ..errors import check_callable, check_flags, short
from ..foreign import torch_layout
from ..graph import CSC
from ..partition_store.part_graph import WholeGraph
from ..rng import batch_key
from ..sampler import NeighborSampler
from ..sampler.neighbor import SUBGRAPH_TYPES
from ..sampler.on_device import host_sampler
from ..triton_kernels.sample_neighbors import check_fanouts
from ..values import as_array, exact_integers, exact_times
from .data_batch import DataBatchMaker, SampledBatchMaker, check_data, check_layouts, compress
from .device_batches import DeviceBatches, gpu_of
from .part_loader import LoaderOptions, PartData, PartLoader
from .part_walk import split_targets
from .staged_part import StagedPart

_OF_PROCESSES = "batches are prepared by threads of this process"
# PyG's and DataLoader's arguments that change no result here: threads share memory.
_WITHOUT_EFFECT = {
    "pin_memory",
    "pin_memory_device",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "timeout",
    "in_order",
    "filter_per_worker",
    "collate_fn",
    "dataset",
}
# Those that `DataSampler` and PyG's filtering follow, with their neutral values.
_SAMPLED = {
    "input_time": None,
    "time_attr": None,
    "temporal_strategy": "uniform",
    "strictly_before": False,
    "weight_attr": None,
    "disjoint": False,
    "transform_sampler_output": None,
    "custom_cls": None,
    "input_id": None,
}
# Those that would change the result: the neutral value, and what to do instead.
_REFUSED = {
    "neighbor_sampler": (None, "pass num_neighbors, replace and subgraph_type"),
    "node_sampler": (None, "pass num_neighbors, replace and subgraph_type"),
    "link_sampler": (None, "pass num_neighbors, replace and subgraph_type"),
    "sampler": (None, "pass the seeds that it samples, seeds[list(sampler)], and disjoint=True where it repeats some"),
    "batch_sampler": (None, "pass the seeds in its order, with batch_size, and disjoint=True where it repeats some"),
    "generator": (None, "pass seed, which decides order and samples"),
    "worker_init_fn": (None, _OF_PROCESSES),
}

# Attributes of PyG's loaders for making a batch, or of DataLoader's processes.
_NOT_HERE = {
    "node_sampler": "the loader samples by itself, by num_neighbors, replace and subgraph_type",
    "link_sampler": "the loader samples by itself, by num_neighbors, replace and subgraph_type",
    "input_data": "the seeds are input_nodes or edge_label_index",
    "collate_fn": "call the loader with positions of seeds",
    "filter_fn": "call the loader with positions of seeds",
    "sampler": "the order of the seeds follows from seed and epoch",
    "generator": "the order of the seeds follows from seed and epoch",
    "transform_sampler_output": "the maker of the batches calls it",
    "custom_cls": "the maker of the batches uses it",
    "input_id": "batches have it",
    "check_worker_number_rationality": _OF_PROCESSES,
    "enable_cpu_affinity": _OF_PROCESSES,
    "enable_memory_log": _OF_PROCESSES,
    "enable_multithreading": _OF_PROCESSES,
    "filter_per_worker": _OF_PROCESSES,
    "in_order": _OF_PROCESSES,
    "multiprocessing_context": _OF_PROCESSES,
    "persistent_workers": _OF_PROCESSES,
    "pin_memory": _OF_PROCESSES,
    "pin_memory_device": _OF_PROCESSES,
    "prefetch_factor": _OF_PROCESSES,
    "timeout": _OF_PROCESSES,
    "worker_init_fn": _OF_PROCESSES,
}


def check_options(loader: str, options: Mapping) -> dict:
    """Accept those of PyG's arguments that change no result, and return those that only `DataSampler` follows.

    Args:
        loader: The loader's name.
        options: Arguments that it does not name itself.

    Raises:
        ValueError: one would change the result, and is not followed.
        TypeError: one is not PyG's.
    """
    found = {}
    for name, value in options.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _REFUSED and name not in _SAMPLED:
            raise TypeError(f"{loader} got an unexpected argument {name!r}")
        nothing, instead = _REFUSED.get(name, (_SAMPLED.get(name), ""))
        if value is nothing or (isinstance(value, bool | str) and value == nothing):
            continue
        if name in _REFUSED:
            raise ValueError(f"{loader} does not follow {name}={_short(value)}: {instead}")
        found[name] = value
    return found


def check_subgraph_type(subgraph_type, directed: bool, locality, data) -> str:
    """Return the name of the subgraph type.

    Raises:
        ValueError: it is not one of PyG's, or does not go with locality.
    """
    check_flags(directed=directed)
    name = "induced" if not directed else str(getattr(subgraph_type, "value", subgraph_type))
    if name not in SUBGRAPH_TYPES:
        raise ValueError(f"subgraph_type must be one of {', '.join(SUBGRAPH_TYPES)}, got {short(subgraph_type)}")
    if locality is not None and name != "directional":
        raise ValueError(
            f'locality weights the sampled edges, but a subgraph of type "{name}" has others: use "directional"'
        )
    if locality is not None and "edge_weight" in data:
        raise ValueError("locality gives the batch an edge_weight, but data has one: rename data.edge_weight")
    return name


def check_threads(num_threads: int | None, num_workers: int | None) -> int:
    """Return the threads that prepare batches; 1 where neither is given.

    Raises:
        ValueError: both are given, and differ.
    """
    if num_threads is not None and num_workers is not None and num_threads != num_workers:
        raise ValueError(f"num_workers is another name of num_threads, got {num_workers} and {num_threads}")
    given = num_threads if num_threads is not None else num_workers
    return 1 if given is None else given


def seeds_of(input_nodes, num_nodes: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the seeds in their order, and each seed's `input_id`.

    Args:
        input_nodes: Node ids, a bool mask, or None for all nodes.
        num_nodes: Number of nodes in the graph.

    Returns:
        seeds, (num_seeds,) int64; and input_id by node, (num_nodes,) int64 positions in input_nodes. The latter is None
        for a mask or all nodes: a seed is then its own input_id, as in PyG.

    Raises:
        ValueError: ids are out of range, repeated or no integers, or a mask has another length.
    """
    if input_nodes is None:
        return np.arange(num_nodes), None
    try:
        nodes = as_array("input_nodes", input_nodes)
    except ValueError:  # ragged, as PyG's ("type", ids)
        raise ValueError(
            f"input_nodes must be node ids or a ({num_nodes},) bool mask, got {_short(input_nodes)}"
        ) from None
    if nodes.ndim != 1 or not (nodes.dtype.kind in "bui" or len(nodes) == 0):
        raise ValueError(
            f"input_nodes must be node ids or a ({num_nodes},) bool mask, got {nodes.dtype} of shape {nodes.shape}"
        )
    if nodes.dtype == bool:
        if len(nodes) != num_nodes:
            raise ValueError(f"input_nodes as a mask must have {num_nodes} entries, one a node, got {len(nodes)}")
        return np.flatnonzero(nodes), None
    if len(nodes) and not (nodes.min() >= 0 and nodes.max() < num_nodes):
        raise ValueError(f"input_nodes must be in [0, {num_nodes}), got {nodes.min()} to {nodes.max()}")
    nodes = nodes.astype(np.int64)
    input_id = np.full(num_nodes, -1)
    input_id[nodes] = np.arange(len(nodes))
    repeats = np.flatnonzero(input_id[nodes] != np.arange(len(nodes)))
    if len(repeats):
        raise ValueError(
            f"input_nodes must be distinct, node {nodes[repeats[0]]} is repeated: disjoint=True gives each seed a "
            "subgraph of its own"
        )
    return nodes, input_id


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else type(value).__name__


class SeedLoader(PartLoader):
    """Batches around seeds of a graph in memory (its only part), prepared by threads.

    Args:
        data: The user's graph.
        seeds: (num_seeds,) seeds of the batches.
        csc: Its rows are as many as there may be seeds.
        maker, sampler: Make the batches, and hand out the seeds.
        rank, world_size, transform: See `NeighborLoader`.
        device: See `NeighborLoader`.
        options: Those of `LoaderOptions`.
    """

    def __init__(
        self, data, seeds: np.ndarray, csc: CSC, maker, sampler, rank, world_size, transform, device=None, **options
    ):
        on = None if device is None else gpu_of(device)
        self.data, self.transform = data, transform
        self.rank, self.world_size = 0 if rank is None else rank, world_size
        if (rank is None) != (world_size is None) and world_size != 1:
            raise ValueError(f"rank and world_size go together, got rank={rank} and world_size={world_size}")
        if world_size is not None:
            if not 0 <= self.rank < world_size:
                raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
            seeds = split_targets(seeds, world_size)[self.rank]
        self.dataset, self._seeds = range(len(seeds)), seeds
        self._advance = False
        graph = WholeGraph.of(csc, self.rank)
        super().__init__(
            [self.rank],
            PartData(lambda part: graph),
            {self.rank: seeds},
            sampler,
            LoaderOptions(**options),
            maker=maker,
        )
        if on is not None:
            self.send_to(DeviceBatches(on))

    def _sample_by_data(self, loader: str, sampler, rank, world_size, transform, own: dict, **inputs) -> None:
        """Begin with one of PyG's loaders over a `DataSampler`'s samples.

        Args:
            loader: "NodeLoader" or "LinkLoader".
            sampler: The `DataSampler`.
            own: Options of the batches.
            inputs: The loader's seeds, and its other arguments.
        """
        import torch_geometric.loader as pyg

        for name, value in inputs.items():
            if torch_layout(value):
                as_array(name, value)  # refuses what PyG would fail on
        made = getattr(pyg, loader)(sampler.data, sampler, **inputs)
        _check_inputs(made.input_data, sampler.num_nodes)
        hand_out, num_seeds = NeighborSampler([-1]), len(made.dataset)
        maker = SampledBatchMaker(hand_out, loader=made, data_sampler=sampler)
        csc = CSC(np.zeros(num_seeds + 1, np.int64), np.empty(0, np.int32))
        SeedLoader.__init__(
            self, sampler.data, np.arange(num_seeds), csc, maker, hand_out, rank, world_size, transform, **own
        )
        sampler.sample_on(None if self._device is None else self._device.device)

    @property
    def batch_size(self) -> int:
        """Seeds per batch."""
        return self.options.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is left out."""
        return self.options.drop_last

    @property
    def num_workers(self) -> int:
        """Threads that prepare batches."""
        return self.options.num_threads

    def __call__(self, index):
        """Return the batch of some of the seeds; its samples follow from (seed, epoch, index).

        Args:
            index: (num_seeds,) positions in this process's seeds, distinct; a tensor, an array or a list.

        Raises:
            ValueError: a position is out of range, repeated or no integer.
        """
        index = exact_integers("index", index, 0, len(self.dataset) - 1, unit="entry")
        if index.ndim != 1 or len(np.unique(index)) < len(index):
            raise ValueError(f"index must be distinct positions of seeds, got {_short(index.tolist())}")
        key = batch_key(self.options.seed, self.epoch, self.rank, zlib.crc32(index.tobytes()))
        maker = replace(self._maker, sampler=host_sampler(self._maker.sampler))
        batch = maker.build(self._whole, self._seeds[index], key)
        return batch if self.transform is None else self.transform(batch)

    @cached_property
    def _whole(self) -> StagedPart:
        return replace(self._stager, sampler=host_sampler(self._stager.sampler))(self.rank)

    def __getattr__(self, name: str):
        told = f": {_NOT_HERE[name]}" if name in _NOT_HERE else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{told}")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields; Lightning calls it."""
        super().set_epoch(epoch)
        self._advance = False

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume the next iteration where the state was taken: within its epoch, or with the next one."""
        super().load_state_dict(state)
        self._advance = state["delivered"] >= state["length"] > 0

    def __iter__(self) -> Iterator:
        self._check_alone()
        if self._advance:
            super().set_epoch(self.epoch + 1)
        self._advance = True
        yield from super().__iter__()

    @property
    def _stays(self) -> bool:
        return super()._stays and self.transform is None

    def _made(self, start: int) -> Iterator:
        batches = super()._made(start)
        return batches if self.transform is None else self._transformed(batches)

    def _transformed(self, batches: Iterator) -> Iterator:
        with closing(batches):
            for batch in batches:
                yield self.transform(batch)
                del batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _check_alone(self) -> None:
        if self.world_size is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            processes = torch.distributed.get_world_size()
            if processes > 1:
                raise ValueError(
                    f"each of {processes} processes would train on all seeds: pass {type(self).__name__} rank= and "
                    "world_size=, or world_size=1 where the seeds are this process's own"
                )


class NeighborLoader(SeedLoader):
    """Sample neighbours of seed nodes from a PyG `Data` or `HeteroData`, and yield batches of its own type.

    A batch is what PyG's loader makes of the same samples: node attributes at `n_id`, edge attributes at `e_id`,
    everything else as it is; `n_id` (seeds first), `e_id` (positions in `data.edge_index`), `input_id`, `batch_size`,
    and, where the subgraph is directional, `num_sampled_nodes` and `num_sampled_edges`. A node with at most as many
    neighbours as the fan-out gives them all, in the order in which PyG sorts them: then n_id, edge_index and e_id equal
    those of PyG with torch-sparse bit for bit. Neither pyg-lib nor torch-sparse is needed.

    Every choice follows from (seed, epoch, batch): threads and restarts change nothing. The next iteration is the next
    epoch, other samples in another order; `set_epoch`, which Lightning calls, chooses one.

    Args:
        data: A `Data` or `HeteroData` with `edge_index`; attributes are read from it without a copy. Or a `PyGStore`,
            or PyG's (feature store, graph store): rows are read as they are needed.
        num_neighbors: Neighbours per node for each hop, >= 1, or -1 for all; of a `HeteroData` for every edge type, or
            a list by edge type, in which 0 follows no edge.
        input_nodes: Seeds: distinct node ids as a tensor, array or list, or a (num_nodes,) bool mask; None: all nodes.
            Of a `HeteroData` a node type, or (node type, seeds).
        batch_size: Seeds per batch, >= 1.
        shuffle: Whether seeds get a new order every epoch. (PyG's default is False as well.)
        replace: Whether neighbours are sampled with replacement.
        subgraph_type: "directional": the sampled edges; "bidirectional": those and their reverses; "induced": all edges
            between the sampled nodes.
        directed: False means subgraph_type="induced" (PyG's older name for it).
        transform: Called on each batch in the thread that iterates, in the order of the batches.
        is_sorted: Whether `data.edge_index` is sorted by target; if so, it is not sorted again. (PyG's sort may reorder
            edges into one node, differently on different machines.)
        locality: `LocalityBias` that prefers rows of a placement. The batch then has an `edge_weight` that keeps the
            mean unbiased. Not allowed together with weights in the data, or with other subgraph types.
        rank, world_size: Rank of this process, and number of processes that share the seeds, each getting the same
            number; None: one process alone.
        options: drop_last, whether a short last batch is left out (False); seed, of the order of the seeds and of the
            samples (0); num_threads, the threads that prepare batches, each a whole one (1; 0: batches are prepared in
            the calling thread), or num_workers, PyG's name for them (nothing is copied between threads); device, a
            GPU that batches are copied to ahead of their use, through pinned memory and beside training, after
            `transform`, which sees them on the CPU (None: they stay there); without one they are sampled on it, and
            what is there of the data is taken there. Other
            arguments of PyG and DataLoader that do not change the result are taken too (`pin_memory`,
            `persistent_workers`, `prefetch_factor`, `filter_per_worker`, ...). time_attr, the attribute of nodes or
            edges with their times: no neighbour is later than the seed, or than its input_time,
            (num_seeds,); nor of the same time with strictly_before=True, which PyG lacks. temporal_strategy,
            "uniform", or "last", which takes the latest that may be sampled. weight_attr, the attribute of edges by
            which they are sampled. disjoint, whether each seed has a subgraph of its own, named by `batch` (always
            with times). transform_sampler_output, custom_cls and input_id as in PyG.

    A loader may be called, as in PyG: `loader([0, 5])` is the batch of the seeds at these positions.

    Raises:
        ValueError: an argument is out of range, or is one of PyG's that this loader does not follow.
        PlacementError: the placement of locality is for another number of nodes.
        TypeError: an argument that PyG does not know either.

    Cost: one sort of the edges unless is_sorted; the CSC of the graph, 4 bytes an edge (4 more for `e_id` unless
    is_sorted); 4 bytes a node and thread.
    Source: `torch_geometric.loader.NeighborLoader` (2.6 to 2.8). Differs: seeds must be distinct, except in disjoint
    subgraphs; a fan-out of 0 is refused where there is one edge type; counts of a hop need no pyg-lib.
    With node types, times, weights or disjoint subgraphs: see `DataSampler`.
    """

    def __init__(
        self,
        data,
        num_neighbors: Sequence[int] | Mapping,
        input_nodes=None,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        replace: bool = False,
        subgraph_type: str = "directional",
        directed: bool = True,
        transform: Callable | None = None,
        is_sorted: bool = False,
        locality=None,
        rank: int | None = None,
        world_size: int | None = None,
        **options,
    ):
        own = _own_options(options, batch_size, shuffle)
        sampled = check_options("NeighborLoader", options)
        check_flags(replace=replace, is_sorted=is_sorted)
        check_callable("transform", transform)
        self.input_nodes, self.input_time = input_nodes, sampled.get("input_time")
        if sampled or _has_node_types(data) or _of_stores(data):
            if locality is not None:
                raise ValueError("locality goes with one node type, without times, weights and disjoint subgraphs")
            subgraph_type = check_subgraph_type(subgraph_type, directed, None, data)
            made = _data_sampler(data, num_neighbors, subgraph_type, replace, is_sorted, own, sampled)
            seeds = _as_tensors(data, input_nodes)
            if "input_time" in sampled:
                sampled["input_time"] = _time_tensor("input_time", sampled["input_time"])
            self._sample_by_data("NodeLoader", made, rank, world_size, transform, own, input_nodes=seeds, **sampled)
            return
        sources, targets = check_data(data)
        subgraph_type = check_subgraph_type(subgraph_type, directed, locality, data)
        both_ways = (
            subgraph_type == "bidirectional"
        )  # PyG's: reverses of sampled edges, whether the graph has them or not
        sampler = _sampler(num_neighbors, replace, locality, "directional" if both_ways else subgraph_type)
        seeds, input_id = seeds_of(input_nodes, data.num_nodes)
        if locality is not None:
            locality.check_store(data.num_nodes)
        csc, edge_order = compress(sources, targets, data.num_nodes, is_sorted)
        given = {"data": data, "edge_order": edge_order, "input_id": input_id}
        maker = DataBatchMaker(sampler, both_ways=both_ways, **given)
        super().__init__(data, seeds, csc, maker, sampler, rank, world_size, transform, **own)
        self.sample_on(None if self._device is None else self._device.device)


class LinkNeighborLoader(SeedLoader):
    """Sample neighbours of the ends of links, and of negative ones, from a PyG `Data` or `HeteroData`.

    A batch is PyG's: `edge_label_index` and `edge_label`, or `src_index`, `dst_pos_index` and `dst_neg_index` of
    triplets, with the subgraph around them; of a `HeteroData` they are in the links' edge type. Every choice follows
    from (seed, epoch, batch), negatives too.

    Args:
        data: A `Data` or `HeteroData`.
        num_neighbors, replace, subgraph_type, directed, is_sorted, batch_size, shuffle, transform, rank, world_size: As
            for `NeighborLoader`.
        edge_label_index: Links: (2, num_links) node ids, or None for all edges; of a `HeteroData` an edge type, or
            (edge type, links); an edge type may be named by its two ends where there is one between them.
        edge_label: (num_links, ...) labels of the links.
        edge_label_time: (num_links,) time of each link; with `time_attr` alone.
        neg_sampling: PyG's `NegativeSampling`, its mode ("binary", "triplet"), or a dict of its arguments; None: none.
        neg_sampling_ratio: Number of negative links for each link (PyG's older form).
        options: Those of `NeighborLoader`; `input_nodes` and `input_time` are refused.

    Raises:
        ValueError: an argument is out of range, or is one of PyG's that this loader does not follow; times without
            `time_attr`, or the other way round.
        TypeError: an argument that PyG does not know either.

    Cost: as of `NeighborLoader` with times.
    Source: `torch_geometric.loader.LinkNeighborLoader` (2.6 to 2.8).
    """

    def __init__(
        self,
        data,
        num_neighbors: Sequence[int] | Mapping,
        edge_label_index=None,
        edge_label=None,
        edge_label_time=None,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        replace: bool = False,
        subgraph_type: str = "directional",
        directed: bool = True,
        neg_sampling=None,
        neg_sampling_ratio: float | None = None,
        transform: Callable | None = None,
        is_sorted: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        **options,
    ):
        own = _own_options(options, batch_size, shuffle)
        sampled = check_options("LinkNeighborLoader", options)
        check_callable("transform", transform)
        if "input_time" in sampled:
            raise ValueError("LinkNeighborLoader does not follow input_time: pass edge_label_time")
        if (edge_label_time is None) != ("time_attr" not in sampled):
            raise ValueError("edge_label_time and time_attr go together: links have times where neighbours do")
        subgraph_type = check_subgraph_type(subgraph_type, directed, None, data)
        made = _data_sampler(data, num_neighbors, subgraph_type, replace, is_sorted, own, sampled)
        if edge_label_time is not None:
            edge_label_time = _time_tensor("edge_label_time", edge_label_time)
        self.edge_label_index, self.edge_label = edge_label_index, edge_label
        self.edge_label_time, self.neg_sampling = edge_label_time, neg_sampling
        links = _as_tensors(data, edge_label_index, links=True)
        self._sample_by_data(
            "LinkLoader", made, rank, world_size, transform, own, edge_label_index=links,
            edge_label=_as_tensor("edge_label", edge_label), edge_label_time=edge_label_time, neg_sampling=neg_sampling,
            neg_sampling_ratio=neg_sampling_ratio, **sampled,
        )  # fmt: skip


def _own_options(options: dict, batch_size: int, shuffle: bool) -> dict:
    """Take the arguments of order and threads out of a loader's further arguments, and return them."""
    own = {name: options.pop(name) for name in ("seed", "drop_last", "device") if name in options}
    check_flags(shuffle=shuffle, drop_last=own.get("drop_last", False))
    own["num_threads"] = check_threads(options.pop("num_threads", None), options.pop("num_workers", None))
    return own | {"batch_size": batch_size, "shuffle": shuffle}


def _has_node_types(data) -> bool:
    from torch_geometric.data import HeteroData

    return isinstance(data, HeteroData)


def _of_stores(data) -> bool:
    """Whether a graph is in PyG's stores: a pair of them, or a `PyGStore`, which is both."""
    from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData

    if isinstance(data, Data | HeteroData):  # these are both as well
        return False
    pair = data if isinstance(data, tuple) and len(data) == 2 else (data, data)
    return isinstance(pair[0], FeatureStore) and isinstance(pair[1], GraphStore)


def _data_sampler(data, num_neighbors, subgraph_type: str, replace: bool, is_sorted: bool, own: dict, sampled: dict):
    """Return a `DataSampler`; its own arguments are taken out of `sampled`."""
    from ..sampler.data_sampler import DataSampler

    check_flags(replace=replace, is_sorted=is_sorted, disjoint=sampled.get("disjoint", False))
    if _of_stores(data):
        data = data if isinstance(data, tuple) else (data, data)
    elif _has_node_types(data):
        for store in data.stores:
            check_layouts(f"data[{store._key!r}]", store)
    else:
        check_data(data)

    names = ("time_attr", "temporal_strategy", "strictly_before", "weight_attr", "disjoint")
    chosen = {name: sampled.pop(name) for name in names if name in sampled}
    return DataSampler(
        data, num_neighbors, subgraph_type, replace, is_sorted=is_sorted, seed=own.get("seed", 0), **chosen
    )


def _as_tensors(data, seeds, links: bool = False):
    """Return seeds as PyG takes them: ids as int64 tensors, with the node type or edge type where there are several.

    Raises:
        ValueError: a heterogeneous graph without a node type, or with an unknown one; or ids that are not integers.
    """
    if _of_stores(data) and seeds is None:
        if not hasattr(data, "num_nodes"):
            raise ValueError(
                "stores do not list all their nodes: pass input_nodes, of several node types (node type, seeds)"
            )
        return torch.arange(data.num_nodes)
    if not _has_node_types(data):
        return _id_tensor(seeds)
    alone = isinstance(seeds, str) or (isinstance(seeds, tuple | list) and all(isinstance(one, str) for one in seeds))
    node_type, ids = (seeds, None) if alone or seeds is None else seeds
    if links and isinstance(node_type, tuple | list):
        node_type = _by_its_ends(tuple(node_type), data.edge_types)
    known, article, what = (data.edge_types, "an", "edge type") if links else (data.node_types, "a", "node type")
    if node_type not in known:
        raise ValueError(
            f"seeds of a HeteroData are {article} {what}, or ({what}, seeds): got {_short(node_type)}; {what}s "
            f"are {known}"
        )
    return node_type, _id_tensor(ids)


def _by_its_ends(node_type: tuple, edge_types: list[tuple]) -> tuple:
    """Return the edge type between two node types: the only one, or the one named "to", as in PyG; else the ends."""
    if len(node_type) != 2:
        return node_type
    found = [one for one in edge_types if (one[0], one[-1]) == node_type]
    return (
        found[0]
        if len(found) == 1
        else (node_type[0], "to", node_type[1])
        if (node_type[0], "to", node_type[1]) in found
        else node_type
    )


def _id_tensor(seeds):
    """Return node ids as an int64 tensor, a mask as a bool one; None and node types by their names as they are."""
    if seeds is None or isinstance(seeds, str) or (isinstance(seeds, tuple) and isinstance(seeds[0], str | tuple)):
        return seeds
    if isinstance(seeds, torch.Tensor) and seeds.dtype == torch.int64:
        return seeds
    array = as_array("seeds", opened(seeds))
    mask = array.dtype == bool and array.ndim == 1
    return torch.from_numpy(array if mask else exact_integers("seeds", array, unit="seed"))


def _time_tensor(name: str, times) -> torch.Tensor:
    """Return the times of seeds as int64."""
    if isinstance(times, torch.Tensor) and times.dtype == torch.int64:
        return times
    return torch.from_numpy(exact_times(name, opened(times), "seed").astype(np.int64, copy=False))


def _as_tensor(name: str, values):
    """Return values as a tensor; tensors and None as they are."""
    if values is None or isinstance(values, torch.Tensor):
        return values
    array = as_array(name, opened(values))
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} must be numbers or booleans, got {array.dtype}")
    return torch.from_numpy(np.ascontiguousarray(array))


def _check_inputs(inputs, num_nodes: int | dict) -> None:
    """Raise ValueError for seeds that are not nodes, or not one time a seed."""
    node_types = (None, None) if inputs.input_type is None else inputs.input_type
    links = hasattr(inputs, "row")
    ends = ((inputs.row, node_types[0]), (inputs.col, node_types[-1])) if links else ((inputs.node, inputs.input_type),)
    for ids, node_type in ends:
        count = num_nodes if node_type is None else num_nodes[node_type]
        if ids.ndim != 1:
            raise ValueError(f"seeds must be (num_seeds,) node ids, or (2, num_links), got shape {tuple(ids.shape)}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise ValueError(f"seeds must be in [0, {count}), got {int(ids.min())} to {int(ids.max())}")
    if inputs.time is not None and len(inputs.time) != len(ends[0][0]):
        raise ValueError(f"there are {len(ends[0][0])} seeds, but {len(inputs.time)} times of seeds: give one a seed")


def _sampler(num_neighbors: Sequence[int], replace: bool, locality, subgraph_type: str) -> NeighborSampler:
    """Return the sampler; errors name the argument as in PyG."""
    if isinstance(num_neighbors, dict):
        raise ValueError("num_neighbors by edge type needs a graph with several: a HeteroData")
    fanouts = num_neighbors.tolist() if isinstance(num_neighbors, np.ndarray | torch.Tensor) else num_neighbors
    fanouts = check_fanouts(fanouts, "num_neighbors")
    return NeighborSampler(fanouts, replace, locality=locality, subgraph_type=subgraph_type)
