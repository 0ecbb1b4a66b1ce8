"""A generated graph on disk: written once, read again by the next run."""

import json
from collections.abc import Callable
from pathlib import Path

from ..edge_stream import SyntheticGraph, open_edge_stream, write_edges
from ..events import held_lock
from ..rng import fold
from .graph_dataset import GraphDataset
from .link_split import held_out


def generate(
    num_nodes: int,
    num_edges: int,
    folder: str,
    num_communities: int = 16,
    homophily: float = 0.8,
    exponent: float = 2.5,
    label_noise: float = 0.0,
    num_classes: int | None = None,
    feature_dim: int = 64,
    feature_noise: float = 1.0,
    feature_dtype: str = "float32",
    train: float = 0.6,
    val: float = 0.2,
    seed: int = 0,
    name: str = "synthetic",
    to_undirected: bool = True,
    remove_self_loops: bool = False,
    chunk_edges: int = 1 << 22,
    community_exponent: float | None = None,
    max_community: float | None = None,
    progress: Callable[[str, int, int | None], None] | None = None,
    hold_out: dict | None = None,
) -> GraphDataset:
    """Generate a planted-partition graph with power-law degrees, or open the one that an earlier run generated.

    Args:
        num_nodes, num_edges, num_communities, homophily, exponent, label_noise, seed, community_exponent,
            max_community: see `SyntheticGraph`.
        num_classes: Number of classes; a label is the community modulo this number. None: one class per community.
        folder: Folder of the data; edges and features go to a sub-folder named after the parameters.
        feature_dim, feature_noise, feature_dtype: Number of columns, standard deviation of their noise, and dtype:
            float32 or float16.
        train, val: Shares of the nodes for training and validation; the rest is for testing.
        name: Name of the data set.
        to_undirected, remove_self_loops, chunk_edges: See `open_edge_stream`.
        progress: Called as progress(what, done, total).
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.

    Cost: about 0.1 us an edge and 15 ns a feature value, once; 8 bytes an edge on disk.
    """
    graph = SyntheticGraph(
        num_nodes,
        num_edges,
        num_communities,
        homophily,
        exponent,
        label_noise=label_noise,
        seed=seed,
        community_exponent=community_exponent,
        max_community=max_community,
    )
    features = {"dim": feature_dim, "noise": feature_noise, "dtype": feature_dtype}
    classes = num_communities if num_classes is None else num_classes
    if not 1 <= classes <= num_communities:
        raise ValueError(f"dataset.num_classes must be in [1, {num_communities}], the communities, got {classes}")
    parameters = json.dumps({**graph.parameters(), **features}, sort_keys=True)
    target = Path(folder) / f"{name}-{fold(*parameters.encode()) >> 32:08x}"
    target.mkdir(parents=True, exist_ok=True)
    edges, rows = target / "edges.bin", target / "features.npy"
    with held_lock(target / "lock", f"is generating the graph {target}"):
        for left in target.glob("*.tmp*"):  # by a killed process
            left.unlink()
        if not edges.is_file():
            write_edges(graph.stream(chunk_edges), edges, dtype="int32", progress=progress)
        if not rows.is_file():
            graph.features(**features, path=rows, progress=progress)
    stream = open_edge_stream(
        edges,
        num_nodes=num_nodes,
        chunk_edges=chunk_edges,
        to_undirected=to_undirected,
        remove_self_loops=remove_self_loops,
        dtype="int32",
    )
    dataset = GraphDataset(
        name=name,
        stream=stream,
        features=str(rows),
        labels=graph.labels() % classes,
        masks=graph.masks(train, val),
        num_classes=classes,
        source={"generated": parameters, "num_classes": classes},
    )
    return held_out(dataset, hold_out)
