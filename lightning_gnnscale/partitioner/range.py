"""Contiguous ranges of node ids: the order in which the nodes were numbered, taken as it is."""

import os

import numpy as np

from ..jit import kernel
from . import phases
from .constraints import judge, part_loads, resolve_constraints
from .graph_access.scratch import AUTO
from .graph_access.simple_graph import open_simple_graph
from .registry import register_partitioner


@register_partitioner("range", memory=lambda num_nodes, *_: 8 * num_nodes)
def range_parts(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    deduplicate: bool | None = None,
    scratch: str | os.PathLike | None = AUTO,
) -> np.ndarray:
    """Cut the nodes, in ascending order of their ids, into ranges of equal node count or of equal volume.

    Args:
        stream: an EdgeStream; its edges are read only for ranges of equal volume.
        num_parts: in [1, num_nodes].
        seed, masks: not used.
        balance: None or {"nodes": slack}: sizes differ by at most one node. {"volume": slack}: a node goes to the part
            in whose share of the volume (sum of degrees) its middle lies, so that no part is more than one node's
            degree above the mean; where that is above the slack, a warning tells. No other constraint is taken.
        progress: called as progress(what, done, total) once a chunk.
        deduplicate, scratch: see `open_simple_graph`; of use only for the volume.

    Returns:
        (num_nodes,) int32 part ids, ascending. Ranges of equal volume may leave a part without nodes.

    Raises:
        ValueError: other constraints, a slack below 1, or a layout that the edges contradict.

    Cost: O(num_nodes) time and 5 bytes a node; for the volume one pass over the stream and 8 bytes a node.
    """
    if len(balance or ()) > 1 or set(balance or ()) - {"nodes", "volume"}:
        raise ValueError(f"partitioner 'range' balances either nodes or volume, got balance={dict(balance)}")
    if stream.num_nodes is None:
        stream.count()
    degree = np.ones(stream.num_nodes, np.int8)
    if "volume" in (balance or ()):
        with phases.phase("degrees"):
            _, degree = open_simple_graph(stream, None, deduplicate, scratch, progress)
    with phases.phase("assignment"):
        constraints = resolve_constraints(balance, None, degree, num_parts, 1.0)
        total = int(degree.sum(dtype=np.int64))
        part_id = np.empty(len(degree), np.int32)
        _cut_evenly(degree if total else np.ones(len(degree), np.int8), total or len(degree), num_parts, part_id)
        if total:
            judge(constraints, part_loads(constraints, degree, part_id, num_parts))
    return part_id


@kernel
def _cut_evenly(weight, total, num_parts, part_id):
    """Give each node to the part in whose share of the total weight the middle of its own weight lies."""
    before = np.int64(0)
    for v in range(len(weight)):
        part_id[v] = min(num_parts - 1, (2 * before + weight[v]) * num_parts // (2 * total))
        before += weight[v]
