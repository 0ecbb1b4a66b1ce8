"""Parts that are alike and still keep edges inside: random unions of many small parts of another method."""

import numpy as np

from ..rng import fold, permutation
from . import phases
from .constraints import caps, judge
from .registry import complete_options, get_partitioner, promised_slack, register_partitioner

_SALT = 0x4D495845  # separates this use of the seed from all others


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
    is_whole = isinstance(pieces, (int, np.integer)) and not isinstance(pieces, bool)
    if not is_whole or not 1 <= pieces <= largest:
        raise ValueError(f"partitioner.pieces must be in [1, {largest}] for {num_parts} parts, got {pieces}")
    num_pieces = num_parts * int(pieces)
    piece = method(stream, num_pieces, seed=seed, masks=masks, balance=balance, progress=progress, **options)
    part_of_piece = permutation(num_pieces, fold(seed, _SALT)) % num_parts
    judged = phases.take_judgement()
    if judged is not None:
        constraints, piece_loads = judged
        loads = np.zeros((num_parts, piece_loads.shape[1]), np.int64)
        np.add.at(loads, part_of_piece, piece_loads)
        judge(constraints._replace(cap=caps(constraints.slack, constraints.total, num_parts)), loads)
    return part_of_piece[piece].astype(np.int32)
