"""`partition`: the one door to every partitioner."""

import numpy as np

from .. import events
from ..edge_stream.stream import file_states
from ..memory import MemoryPeak
from . import phases
from .partitioning import Partitioning
from .quality import evaluate_partitioning
from .registry import complete_options, decisive_options, get_partitioner


def partition(
    stream,
    method: str = "spring",
    num_parts: int | None = None,
    seed: int = 0,
    masks: dict | None = None,
    balance: dict | None = None,
    progress=None,
    evaluate: bool = True,
    **options,
) -> Partitioning:
    """Assign every node of a stream to a part.

    Args:
        stream: an EdgeStream.
        method: one of `available_partitioners()`.
        num_parts: in [1, num_nodes].
        seed: decides every random choice.
        masks: {"train": (num_nodes,) bool, ...}, for methods that balance them and for `train_balance`.
        balance: {"nodes": 1.05, ...}: the largest part over the mean, for methods that take constraints.
        progress: called as progress(what, done, total) at most once a chunk; total may be None.
        evaluate: measure the result, which takes one more pass.
        options: the method's own.

    Returns:
        The Partitioning.

    Raises:
        ValueError: an unknown method or option, or a value outside its range; the message says what is allowed.
        EdgeStreamError: the source cannot be read, or changed between two passes.
    """
    function = get_partitioner(method)
    edge_files = file_states(stream)
    options = complete_options(method, options)
    if stream.num_nodes is None:
        stream.count()
    num_parts = _check_num_parts(num_parts, stream.num_nodes)
    with phases.recording() as record, MemoryPeak() as peak:
        with phases.phase("total"):
            part_id = function(stream, num_parts, seed=seed, masks=masks, balance=balance, progress=progress, **options)
        peak_bytes = max(0, peak.update() - peak.start_bytes)
        part_id = _check_result(method, part_id, stream.num_nodes, num_parts)
        quality = None
        if evaluate:
            with phases.phase("evaluate"):
                shared = {name: options[name] for name in ("deduplicate", "scratch") if name in options}
                quality = evaluate_partitioning(
                    stream, part_id, num_parts, 1, masks, progress=progress, graph=record.graph, **shared
                )
    events.record(
        "partition", method=method, num_parts=num_parts, seconds=record.seconds, peak_bytes=peak_bytes, **record.notes
    )
    made_with = decisive_options(method, options)
    return Partitioning(
        part_id, num_parts, method, made_with, seed, quality, record.seconds, peak_bytes, record.notes, edge_files
    )


def _check_num_parts(num_parts, num_nodes: int) -> int:
    is_whole = isinstance(num_parts, (int, np.integer)) and not isinstance(num_parts, bool)
    if not is_whole or not 1 <= num_parts <= num_nodes:
        raise ValueError(f"partitioner.num_parts must be in [1, {num_nodes}], got {num_parts}")
    return int(num_parts)


def _check_result(method: str, part_id, num_nodes: int, num_parts: int) -> np.ndarray:
    part_id = np.asarray(part_id)
    if part_id.shape != (num_nodes,) or part_id.dtype.kind not in "iu":
        raise ValueError(
            f"partitioner {method!r} returned {part_id.shape} {part_id.dtype}, not ({num_nodes},) integers"
        )
    if int(part_id.min()) < 0 or int(part_id.max()) >= num_parts:
        raise ValueError(f"partitioner {method!r} returned part ids {part_id.min()} to {part_id.max()}")
    return part_id.astype(np.int32, copy=False)
