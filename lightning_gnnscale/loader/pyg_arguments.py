"""What users of PyG's `NeighborLoader` pass: checked, brought into arrays, or refused in one line."""

from collections.abc import Mapping

import numpy as np
import torch

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
