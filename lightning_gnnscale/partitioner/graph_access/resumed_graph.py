"""The simple graph of a run, opened from where a checkpoint left it."""

import numpy as np

from .. import phases
from ..checkpoint import Checkpoint
from .layout import ScanState
from .simple_graph import SimpleGraph, open_simple_graph, reopen_simple_graph

DEGREES = "degrees"


def open_or_reopen(
    stream, saved: Checkpoint, deduplicate: bool | None, scratch, progress=None
) -> tuple[SimpleGraph, str, dict[str, np.ndarray]]:
    """Return the undirected simple graph behind a stream, without the passes that an earlier process has made.

    Args:
        stream: an EdgeStream.
        saved: the run's checkpoint; the first pass saves itself to it under the phase "degrees". Every later phase
            must save `graph_facts(graph)` with its own arrays.
        deduplicate, scratch, progress: see `open_simple_graph`.

    Returns:
        The graph, and the saved phase with its arrays; ("", {}) where nothing beyond the first pass was saved.
    """
    phase, arrays = saved.load() or ("", {})
    with phases.phase(DEGREES):
        if phase not in ("", DEGREES):
            return reopen_simple_graph(stream, arrays, scratch, progress), phase, arrays
        state = ScanState(*(arrays[name] for name in ScanState._fields)) if phase else None

        def after_chunk(state: ScanState) -> None:
            saved.after_chunk(DEGREES, state._asdict())

        graph, _ = open_simple_graph(stream, state, deduplicate, scratch, progress, after_chunk)
    return graph, "", {}
