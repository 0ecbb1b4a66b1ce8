"""Which steps of refinement read which graph."""

from ..row_threads import RowThreads
from .edge_graph import EdgeGraph
from .edge_steps import EdgeSteps
from .row_steps import RowSteps


def steps_of(graph, threads: RowThreads) -> RowSteps | EdgeSteps:
    """Return the steps over a graph's rows or, where it has none, over its edges."""
    return EdgeSteps(graph, threads) if isinstance(graph, EdgeGraph) else RowSteps(graph, threads)
