"""Parts that do not depend on edges: random ones, the floor for every other method, and ranges of ids."""

import numpy as np

from ..errors import is_integer
from ..jit import kernel
from ..rng import fold, permutation
from . import phases
from .constraints import caps, judge, node_weights, part_loads, resolve_constraints
from .graph_input import GraphInput, graph_partitioner
from .registry import complete_options, get_partitioner, promised_slack, register_partitioner

_SALT = 0x52414E44  # separates this use of the seed from all others


@register_partitioner("random", memory=lambda num_nodes, *_: 5 * num_nodes)
def random(stream, num_parts: int, *, seed: int = 0, masks=None, balance=None, progress=None) -> np.ndarray:
    """Assign the nodes in turn, in the order of a hash of (seed, node id); part sizes differ by at most one.

    Args:
        stream: an EdgeStream; only its number of nodes is used.
        seed: decides the order.
        masks: those that are balanced.
        balance: {"train": 1.05, ...}, None: nodes alone. Nodes of the same masks are assigned together, so that
            parts differ by few of them. Volumes and counts are not balanced: a warning says where they are not met.
        progress: not used.

    Returns:
        (num_nodes,) int32 part ids.

    Cost: O(num_nodes log num_nodes) time; about 32 bytes a node.
    """
    if stream.num_nodes is None:
        stream.count()
    constraints = None
    if balance:
        if "volume" in balance:
            raise ValueError("partitioner 'random' reads no edges, and can balance no volume: leave it out")
        constraints = resolve_constraints(balance, masks, np.ones(stream.num_nodes, np.int8), num_parts)
    with phases.phase("assignment"):
        part_id = np.empty(stream.num_nodes, np.int32)
        order = permutation(stream.num_nodes, fold(seed, _SALT))
        if constraints is not None and len(constraints.flags) > 1:
            order = order[np.argsort(constraints.flags[order], kind="stable")]
        part_id[order] = np.arange(stream.num_nodes) % num_parts
    if constraints is not None:
        judge(constraints, part_loads(constraints, np.ones(stream.num_nodes, np.int8), part_id, num_parts))
    return part_id


@graph_partitioner("range", memory=lambda num_nodes, *_: 8 * num_nodes, resumable=False)
def range_parts(graph: GraphInput, num_parts: int) -> np.ndarray:
    """Cut the nodes, in ascending order of their ids, into ranges of equal node count or of equal volume.

    Args:
        graph: the graph; its edges are read only for ranges of equal volume, its seed is not used.
        graph.balance: None or {"nodes": slack}: sizes differ by at most one node. {"volume": slack}: a node goes to the
            part in whose share of the volume (sum of degrees) its middle lies, so that no part is more than one node's
            degree above the mean; where that is above the slack, a warning says so. {"train": slack}, a mask or counts:
            the same of what they weigh. One constraint is taken.

    Returns:
        (num_nodes,) int32 part ids, ascending. Ranges of equal volume may leave a part without nodes, to which
        `partition` then gives a node from elsewhere.

    Raises:
        ValueError: several constraints, a slack below 1, or a layout that the edges contradict.

    Cost: O(num_nodes) time and 5 bytes a node; for the volume one pass over the stream and 8 bytes a node.
    """
    balance = graph.balance or {}
    if len(balance) > 1:
        raise ValueError(f"partitioner 'range' balances nodes, volume or one mask, got balance={dict(balance)}")
    degree = graph.open_simple() if "volume" in balance else np.ones(graph.num_nodes, np.int8)
    with phases.phase("assignment"):
        constraints = resolve_constraints(balance, graph.masks, degree, num_parts, 1.0)
        weight = node_weights(constraints, degree, np.int32)
        weight = weight[:, 0] if weight.size > 1 else np.ones(len(degree), np.int8)
        total = int(weight.sum(dtype=np.int64))
        part_id = np.empty(len(degree), np.int32)
        _cut_evenly(weight if total else np.ones(len(degree), np.int8), total or len(degree), num_parts, part_id)
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


_MIXED_SALT = 0x4D495845  # separates this use of the seed from all others


def _promised(num_nodes: int, num_parts: int, options: dict) -> float | None:
    own = {name: value for name, value in options.items() if name not in ("of", "pieces")}
    return promised_slack(options["of"], complete_options(options["of"], own), num_nodes, num_parts)


@register_partitioner("mixed", slack=_promised)
def mixed(
    stream,
    num_parts: int,
    *,
    seed: int = 0,
    masks=None,
    balance=None,
    progress=None,
    of: str = "streaming_multilevel",
    pieces: int = 16,
    **options,
) -> np.ndarray:
    """Cut the graph into num_parts * pieces small parts, and form each part from `pieces` random ones.

    A low cut puts communities, and with them classes, into parts of their own; models that are trained on such parts
    and then averaged agree badly. A union of small parts from all over the graph resembles the others and still holds
    most neighbours. Its cut lies between that of `of` (pieces=1) and that of random nodes (as many pieces as nodes).

    Args:
        stream: An EdgeStream.
        num_parts: In [1, num_nodes].
        seed: Seed that decides the small parts and how they are assigned.
        masks, balance, progress: As the method `of` takes them. Parts are judged by the same balance: small parts of
            few nodes differ by one node, which adds up; a warning says by how much.
        of: Name of the registered method that makes the small parts.
        pieces: Number of small parts per part, in [1, num_nodes // num_parts].
        options: Options of the method `of`.

    Returns:
        (num_nodes,) int32 part ids.

    Raises:
        ValueError: `of` or one of its options is unknown, or there are more small parts than nodes.

    Cost: that of the method with num_parts * pieces parts.
    Source: stochastic multiple partitions, Chiang et al., Cluster-GCN, KDD 2019, sampled once for all epochs.
    """
    method, options = get_partitioner(of), complete_options(of, options)
    if stream.num_nodes is None:
        stream.count()
    largest = stream.num_nodes // num_parts
    if not is_integer(pieces) or not 1 <= pieces <= largest:
        raise ValueError(f"partitioner.pieces must be in [1, {largest}] for {num_parts} parts, got {pieces}")
    num_pieces = num_parts * int(pieces)
    piece = method(stream, num_pieces, seed=seed, masks=masks, balance=balance, progress=progress, **options)
    part_of_piece = permutation(num_pieces, fold(seed, _MIXED_SALT)) % num_parts
    judged = phases.take_judgement()
    if judged is not None:
        constraints, piece_loads = judged
        loads = np.zeros((num_parts, piece_loads.shape[1]), np.int64)
        np.add.at(loads, part_of_piece, piece_loads)
        judge(constraints._replace(cap=caps(constraints.slack, constraints.total, num_parts)), loads)
    return part_of_piece[piece].astype(np.int32)
