"""A generated graph on disk: written once, read by later runs."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from ..edge_stream import SyntheticGraph, open_edge_stream, write_edges
from ..edge_stream.options import CHUNK_EDGES
from ..events import held_lock
from ..keywords import passes_on
from ..rng import fold
from .graph_dataset import GraphDataset
from .split import held_out


@passes_on(SyntheticGraph, open_edge_stream, to_undirected=True)
def generate(
    num_nodes: int,
    num_edges: int,
    folder: str,
    num_classes: int | None = None,
    feature_dim: int = 64,
    feature_noise: float = 1.0,
    feature_dtype: str = "float32",
    train: float = 0.6,
    val: float = 0.2,
    name: str = "synthetic",
    progress: Callable[[str, int, int | None], None] | None = None,
    hold_out: dict | None = None,
    **options,
) -> GraphDataset:
    """Generate a planted-partition graph with power-law degrees, or open the one that an earlier run generated.

    Args:
        num_nodes, num_edges: Number of nodes and edges.
        num_classes: Number of classes; a label is the community modulo this number. None: one class per community.
        folder: Folder of the data; edges and features go to a sub-folder named after the parameters.
        feature_dim, feature_noise, feature_dtype: Number of columns, standard deviation of their noise, and dtype:
            float32 or float16.
        train, val: Shares of the nodes for training and validation; the rest is for testing.
        name: Name of the data set.
        progress: Called as progress(what, done, total).
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        options: Other arguments of `SyntheticGraph`, and of `open_edge_stream` (to_undirected is true by default).

    Cost: about 0.1 us an edge and 15 ns a feature value, once; 8 bytes an edge on disk.
    """
    sampled = {each.name: options.pop(each.name) for each in fields(SyntheticGraph) if each.name in options}
    graph = SyntheticGraph(num_nodes, num_edges, **sampled)
    features = {"dim": feature_dim, "noise": feature_noise, "dtype": feature_dtype}
    classes = graph.num_communities if num_classes is None else num_classes
    if not 1 <= classes <= graph.num_communities:
        most = graph.num_communities
        raise ValueError(f"num_classes must be in [1, {most}], the communities, got {classes}")
    parameters = json.dumps({**graph.parameters(), **features}, sort_keys=True)
    target = Path(folder) / f"{name}-{fold(*parameters.encode()) >> 32:08x}"
    target.mkdir(parents=True, exist_ok=True)
    edges, rows = target / "edges.bin", target / "features.npy"
    with held_lock(target / "lock", f"is generating the graph {target}"):
        for left in target.glob("*.tmp*"):  # by a killed process
            left.unlink()
        if not edges.is_file():
            write_edges(graph.stream(options.get("chunk_edges", CHUNK_EDGES)), edges, dtype="int32", progress=progress)
        if not rows.is_file():
            graph.features(**features, path=rows, progress=progress)
    stream = open_edge_stream(edges, num_nodes=num_nodes, dtype="int32", **options)
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
