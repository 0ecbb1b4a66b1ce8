"""A drop-in for PyG's `NeighborLoader` on a graph in memory, without a partition store."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from ..partition_store.part_graph import WholeGraph
from ..sampler import NeighborSampler
from .buffer_pool import BufferPool
from .data_batch import DataBatchBuilder, check_data, compress
from .part_loader import LoaderOptions, PartData, PartLoader
from .part_walk import split_targets

SUBGRAPH_TYPES = ("directional", "bidirectional", "induced")

# PyG's and DataLoader's arguments that change no result here: threads share the memory that these are about.
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
# Those that would change it: the value that asks for nothing, and what to do instead.
_REFUSED = {
    "input_time": (None, "sampling by time needs torch_geometric's NeighborLoader with pyg-lib"),
    "time_attr": (None, "sampling by time needs torch_geometric's NeighborLoader with pyg-lib"),
    "temporal_strategy": ("uniform", "sampling by time needs torch_geometric's NeighborLoader with pyg-lib"),
    "weight_attr": (None, "sampling by edge weight needs torch_geometric's NeighborLoader with pyg-lib"),
    "disjoint": (False, "disjoint subgraphs need torch_geometric's NeighborLoader with pyg-lib"),
    "neighbor_sampler": (None, "pass num_neighbors, replace and subgraph_type"),
    "transform_sampler_output": (None, "pass transform, which is given the batch"),
    "custom_cls": (None, "pass transform, which may return any class"),
    "input_id": (None, "look the ids up by batch.input_id in transform"),
    "sampler": (None, "pass the seeds as input_nodes, in their order, with shuffle=False"),
    "batch_sampler": (None, "pass the seeds as input_nodes, in their order, with batch_size"),
    "generator": (None, "pass seed, which decides order and draws"),
    "worker_init_fn": (None, "batches are prepared by threads of this process"),
}


def check_options(options: Mapping) -> None:
    """Accept those of PyG's arguments that change no result.

    Raises:
        ValueError: one would change it.
        TypeError: one is not PyG's.
    """
    for name, value in options.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _REFUSED:
            raise TypeError(f"NeighborLoader got an unexpected argument {name!r}")
        nothing, instead = _REFUSED[name]
        if value is not nothing and not (isinstance(value, bool | str) and value == nothing):
            raise ValueError(f"NeighborLoader does not follow {name}={_short(value)}: {instead}")


def check_subgraph_type(subgraph_type, directed: bool, locality, data) -> str:
    """Return the name of the subgraph type.

    Raises:
        ValueError: it is not one of PyG's, or does not go with locality.
    """
    name = "induced" if not directed else str(getattr(subgraph_type, "value", subgraph_type))
    if name not in SUBGRAPH_TYPES:
        raise ValueError(f"subgraph_type must be one of {', '.join(SUBGRAPH_TYPES)}, got {subgraph_type!r}")
    if locality is not None and name != "directional":
        raise ValueError(f'locality weights the edges drawn, a subgraph of type "{name}" has others: use "directional"')
    if locality is not None and "edge_weight" in data:
        raise ValueError("locality gives the batch an edge_weight, and data has one: rename data.edge_weight")
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
        nodes = input_nodes.cpu().numpy() if isinstance(input_nodes, torch.Tensor) else np.asarray(input_nodes)
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
    nodes = nodes.astype(np.int64)
    if len(nodes) and not (nodes.min() >= 0 and nodes.max() < num_nodes):
        raise ValueError(f"input_nodes must be in [0, {num_nodes}), got {nodes.min()} to {nodes.max()}")
    input_id = np.full(num_nodes, -1)
    input_id[nodes] = np.arange(len(nodes))
    repeats = np.flatnonzero(input_id[nodes] != np.arange(len(nodes)))
    if len(repeats):
        raise ValueError(
            f"input_nodes must be distinct, node {nodes[repeats[0]]} is repeated: pass torch.unique(input_nodes)"
        )
    return nodes, input_id


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else type(value).__name__


class NeighborLoader(PartLoader):
    """Sample neighbours of seed nodes from a homogeneous PyG `Data`, and yield batches of its own type.

    A batch is what PyG's loader makes of the same draws: node attributes at `n_id`, edge attributes at `e_id`,
    everything else as it is; `n_id` (seeds first), `e_id` (positions in `data.edge_index`), `input_id`, `batch_size`,
    and, where the subgraph is directional, `num_sampled_nodes` and `num_sampled_edges`. A node with at most as many
    neighbours as the fan-out gives them all, in the order in which PyG sorts them: then n_id, edge_index and e_id equal
    those of PyG with torch-sparse bit for bit. Neither pyg-lib nor torch-sparse is needed.

    Every choice follows from (seed, epoch, batch): threads and restarts change nothing. The next iteration is the next
    epoch, other draws in another order; `set_epoch`, which Lightning calls, chooses one.

    Args:
        data: A `torch_geometric.data.Data` with `edge_index`; attributes are read from it without a copy.
        num_neighbors: Neighbours per node for each hop, >= 1, or -1 for all.
        input_nodes: Seeds: distinct node ids as a tensor, array or list, or a (num_nodes,) bool mask; None: all nodes.
        batch_size: Seeds per batch, >= 1.
        shuffle: Whether the seeds come in a new order every epoch. (PyG's default is False as well.)
        replace: Whether neighbours are drawn with replacement.
        subgraph_type: "directional": the drawn edges; "bidirectional": those and their reverses; "induced": all edges
            between the drawn nodes.
        directed: False means subgraph_type="induced" (PyG's older name for it).
        transform: Called on each batch in the thread that iterates, in the order of the batches.
        is_sorted: Whether `data.edge_index` is sorted by target; if so, it is not sorted again. (PyG's sort may reorder
            edges into one node, differently on different machines.)
        locality: `LocalityBias` that prefers rows of a placement. The batch then has an `edge_weight` that keeps the
            mean unbiased. Not allowed together with weights in the data, or with other subgraph types.
        rank, world_size: Rank of this process, and number of processes that share the seeds, each getting the same
            number; None: one process alone.
        options: drop_last, whether a short last batch is left out (False); seed, of the order of the seeds and of the
            draws (0); num_threads, the threads that prepare batches, each a whole one (1; 0: batches are prepared in
            the calling thread), or num_workers, PyG's name for them (nothing is copied between threads). Other
            arguments of PyG and DataLoader that do not change the result are taken too (`pin_memory`,
            `persistent_workers`, `prefetch_factor`, `filter_per_worker`, ...).

    Raises:
        ValueError: an argument is out of range, or is one of PyG's that this loader does not follow.
        PlacementError: the placement of locality is for another number of nodes.
        TypeError: an argument that PyG does not know either.

    Cost: one sort of the edges unless is_sorted; the CSC of the graph, 4 bytes an edge (4 more for `e_id` unless
    is_sorted); 4 bytes a node and thread.
    Source: `torch_geometric.loader.NeighborLoader` (2.6 to 2.8). Differs: seeds must be distinct; a fan-out of 0 is
    refused; the counts of a hop are there without pyg-lib too.
    """

    def __init__(
        self,
        data,
        num_neighbors: Sequence[int],
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
        own = {name: options.pop(name) for name in ("seed", "drop_last") if name in options}
        own["num_threads"] = check_threads(options.pop("num_threads", None), options.pop("num_workers", None))
        check_options(options)
        sources, targets = check_data(data)
        subgraph_type = check_subgraph_type(subgraph_type, directed, locality, data)
        sampler = _sampler(num_neighbors, replace, locality)
        seeds, input_id = seeds_of(input_nodes, data.num_nodes)
        if locality is not None:
            locality.check_store(data.num_nodes)
        csc, edge_order = compress(sources, targets, data.num_nodes, is_sorted)
        self.data, self.transform, self.input_nodes = data, transform, input_nodes
        self.rank, self.world_size = 0 if rank is None else rank, world_size
        if (rank is None) != (world_size is None) and world_size != 1:
            raise ValueError(f"rank and world_size go together, got rank={rank} and world_size={world_size}")
        if world_size is not None:
            if not 0 <= self.rank < world_size:
                raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
            seeds = split_targets(seeds, world_size)[self.rank]
        self.dataset = range(len(seeds))
        self._advance = False
        graph = WholeGraph.of(csc, self.rank)
        super().__init__(
            [self.rank],
            PartData(lambda part: graph),
            {self.rank: seeds},
            sampler,
            LoaderOptions(batch_size, shuffle=shuffle, **own),
            builder=DataBatchBuilder(data, sampler, BufferPool(), subgraph_type, edge_order, input_id),
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration yields; Lightning calls it."""
        super().set_epoch(epoch)
        self._advance = False

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on where the state was taken: within its epoch, or with the next one."""
        super().load_state_dict(state)
        self._advance = state["delivered"] >= state["length"] > 0

    def __iter__(self) -> Iterator:
        self._check_alone()
        if self._advance:
            super().set_epoch(self.epoch + 1)
        self._advance = True
        for batch in super().__iter__():
            yield batch if self.transform is None else self.transform(batch)
            del batch

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _check_alone(self) -> None:
        if self.world_size is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            processes = torch.distributed.get_world_size()
            if processes > 1:
                raise ValueError(
                    f"each of {processes} processes would train on all seeds: pass NeighborLoader rank= and "
                    "world_size=, or world_size=1 where input_nodes are this process's own"
                )


def _sampler(num_neighbors: Sequence[int], replace: bool, locality) -> NeighborSampler:
    """Return the sampler; errors name the argument as PyG does."""
    if isinstance(num_neighbors, dict):
        raise ValueError("num_neighbors by edge type needs a heterogeneous graph: use torch_geometric's NeighborLoader")
    if isinstance(num_neighbors, str) or not isinstance(num_neighbors, Sequence | np.ndarray | torch.Tensor):
        raise ValueError(
            f"num_neighbors must be a list with a fan-out for each hop, like [15, 10, 5], got {num_neighbors!r}"
        )
    fanouts = num_neighbors if isinstance(num_neighbors, Sequence) else num_neighbors.tolist()
    for hop, fanout in enumerate(fanouts):
        if isinstance(fanout, bool) or not isinstance(fanout, int | np.integer) or fanout == 0 or fanout < -1:
            raise ValueError(f"num_neighbors[{hop}] must be an integer >= 1, or -1 for all neighbours, got {fanout!r}")
    options = {} if locality is None else {"locality": locality}
    return NeighborSampler([int(fanout) for fanout in fanouts], replace, **options)
