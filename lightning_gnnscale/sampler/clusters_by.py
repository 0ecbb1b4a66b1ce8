"""Clusters of a part by one of the partitioners, for `ClusterSampler`."""

from collections.abc import Callable
from functools import partial

import numpy as np

from ..edge_stream import open_edge_stream
from ..partitioner import partition


def clusters_by(method: str) -> Callable[..., np.ndarray]:
    """Return a function that cuts the core of a part into clusters.

    Args:
        method: one of `available_partitioners()`.

    Returns:
        (part, num_clusters, seed) -> (num_core,) int32 cluster ids, as `ClusterSampler.cluster` takes it; it can be
        pickled.
    """
    return partial(_cluster, method)


def _cluster(method: str, part, num_clusters: int, seed: int) -> np.ndarray:
    rows = np.repeat(np.arange(part.num_core, dtype=np.int32), np.diff(part.csc.indptr[: part.num_core + 1]))
    sources = part.csc.indices[: len(rows)]
    inside = sources < part.num_core
    edges = np.stack([sources[inside], rows[inside]])
    layout = "both_ways" if part.symmetric else "auto"
    stream = open_edge_stream(edges, num_nodes=part.num_core, layout=layout)
    return partition(stream, method, num_parts=num_clusters, seed=seed, evaluate=False).part_id
