"""The graphs that partitioners are compared on, as edge files: public ones, generated ones, and the user's own."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..dataset.npz import data_root as find_data_root
from ..dataset.split import random_split
from ..edge_stream import SyntheticGraph, lfr_graph, open_edge_stream, write_edges
from ..edge_stream.stream import file_identity
from ..rng import fold, permutation

NODES_A_COMMUNITY = 1000  # of generated planted graphs
_SHUFFLE_SEED, _NODE_SALT, _EDGE_SALT = 0, 1, 2
_PATH_KEYS = ("path", "name", "num_nodes", "layout", "masks", "reader")
_GENERATED = re.compile(r"(planted|lfr):([\d_]+)(?::([\d_]+))?")


@dataclass(frozen=True)
class GraphSpec:
    """One graph to be compared on, before it is made.

    Attributes:
        name: in rows and tables.
        kind: "public", "planted", "lfr" or "path".
        source: plain values that tell two sources of one name apart.
        details: what making it takes.
    """

    name: str
    kind: str
    source: dict
    details: dict = field(default_factory=dict)


@dataclass(frozen=True)
class GraphFile:
    """A graph on disk, as `partition_process.measure` takes it.

    Attributes:
        path: the edge file. num_nodes, num_edges: ids are below num_nodes; edges as listed.
        layout, reader: options of `open_edge_stream`.
        masks: path of an .npz of (num_nodes,) bool masks by name, or None.
    """

    path: Path
    num_nodes: int
    num_edges: int
    layout: str = "once"
    reader: dict = field(default_factory=dict)
    masks: Path | None = None


def resolve_graph(given: str | Mapping, data_root: Path | None) -> GraphSpec:
    """Say what a graph of the configuration is, and check that it can be had.

    Args:
        given: a public graph's name; "planted:EDGES" or "lfr:EDGES", with ":NODES" behind it where a tenth of the
            edges is not meant; a path; or {path, name, num_nodes, layout, masks, reader}.
        data_root: folder of public graphs; None: there is none.

    Raises:
        ValueError: nothing of this kind, with what there is.
    """
    if isinstance(given, Mapping):
        return _resolve_path(dict(given))
    generated = _GENERATED.fullmatch(given)
    if generated:
        kind, num_edges = generated[1], int(generated[2])
        num_nodes = int(generated[3]) if generated[3] else max(4, num_edges // 10)
        return GraphSpec(given, kind, {}, {"num_nodes": num_nodes, "num_edges": num_edges})
    if Path(given).suffix or "/" in given:
        return _resolve_path({"path": given})
    path = None if data_root is None else data_root / given / "graph.npz"
    if path is None or not path.is_file():
        there = [] if data_root is None else sorted(found.parent.name for found in data_root.glob("*/graph.npz"))
        where = data_root or "no folder of public graphs (set GNNSCALE_DATA or bench.data_root)"
        raise ValueError(
            f"bench.graphs: no graph {given!r} in {where}; there are {', '.join(there) or 'none'}, planted:EDGES, "
            "lfr:EDGES, and paths"
        )
    return GraphSpec(given, "public", file_identity(path), {"npz": path})


def public_root(data_root: str | None) -> Path | None:
    """Return the folder of public graphs: as given, or where it is found."""
    return find_data_root() if data_root is None else Path(data_root).expanduser()


@contextmanager
def graph_file(spec: GraphSpec, scratch: Path) -> Iterator[GraphFile]:
    """Make the edge file of a graph in the scratch folder for the block, and delete it afterwards.

    Cost: 8 bytes an edge of scratch disk for generated graphs; public ones are held in memory while they are written.
    """
    if spec.kind == "path":
        yield _own_file(**spec.details)
        return
    folder = scratch / f"bench-{spec.name.replace(':', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield (_write_public if spec.kind == "public" else _write_generated)(spec, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_shuffled(edge_index: np.ndarray, num_nodes: int, path: Path) -> tuple[np.ndarray, int]:
    """Write the undirected simple graph of some arcs as raw int32 pairs, each edge once, ids and edges in random order.

    Args:
        edge_index: (2, num_arcs) integers.
        num_nodes: ids are below it.
        path: a .bin file.

    Returns:
        (num_nodes,) int64, the new id of each node; and the number of edges.
    """
    low, high = np.sort(edge_index.astype(np.int64), axis=0)
    pairs = np.unique((low * num_nodes + high)[low != high])
    new_id = permutation(num_nodes, fold(_SHUFFLE_SEED, _NODE_SALT))
    order = permutation(len(pairs), fold(_SHUFFLE_SEED, _EDGE_SALT))
    ends = np.stack(np.divmod(pairs, num_nodes), axis=1)[order]
    new_id[ends].astype(np.int32).tofile(path)
    return new_id, len(pairs)


def _resolve_path(given: dict) -> GraphSpec:
    unknown = sorted(set(given) - set(_PATH_KEYS))
    if unknown or "path" not in given:
        what = f"has no {', '.join(unknown)}" if unknown else "needs path"
        raise ValueError(f"bench.graphs: a graph {what}; it takes {', '.join(_PATH_KEYS)}")
    path = Path(given["path"]).expanduser()
    if not path.exists():
        raise ValueError(f"bench.graphs: {path}: no such file or folder")
    if given.get("masks") is not None and not Path(given["masks"]).expanduser().is_file():
        raise ValueError(f"bench.graphs: masks {given['masks']}: no such .npz file")
    details = {key: value for key, value in given.items() if key not in ("path", "name")}
    return GraphSpec(
        given.get("name", path.name), "path", {**file_identity(path), **details}, {"path": path, **details}
    )


def _own_file(path: Path, num_nodes=None, layout="auto", masks=None, reader=None) -> GraphFile:
    stream = open_edge_stream(path, num_nodes=num_nodes, layout=layout, **(reader or {}))
    num_nodes, num_edges = stream.count()
    masks = None if masks is None else Path(masks).expanduser()
    return GraphFile(path, num_nodes, num_edges, layout, reader or {}, masks)


def _write_public(spec: GraphSpec, folder: Path) -> GraphFile:
    with np.load(spec.details["npz"]) as arrays:
        if "edge_index" not in arrays.files:
            raise ValueError(f"bench.graphs: {spec.name} holds no edge_index, so there is no graph to partition")
        edges = arrays["edge_index"]
        rows = [int(edges.max(initial=-1)) + 1, *(len(arrays[key]) for key in ("y", "train_mask") if key in arrays)]
        num_nodes = max(rows)
        masks = {key: arrays[f"{key}_mask"] for key in ("train", "val", "test") if f"{key}_mask" in arrays}
        labels = arrays["y"] if "y" in arrays else np.zeros(num_nodes, np.int64)
    if not masks:
        masks = random_split(labels, seed=_SHUFFLE_SEED)
    new_id, num_edges = write_shuffled(edges, num_nodes, folder / "edges.bin")
    moved = {name: np.zeros(num_nodes, bool) for name in masks}
    for name, mask in masks.items():
        moved[name][new_id[: len(mask)]] = mask
    np.savez(folder / "masks.npz", **moved)
    return GraphFile(folder / "edges.bin", num_nodes, num_edges, masks=folder / "masks.npz")


def _write_generated(spec: GraphSpec, folder: Path) -> GraphFile:
    num_nodes, num_edges = spec.details["num_nodes"], spec.details["num_edges"]
    if spec.kind == "lfr":
        graph = lfr_graph(num_nodes, num_edges, min_community=min(50, num_nodes / 2), seed=_SHUFFLE_SEED)
    else:
        num_communities = min(max(32, num_nodes // NODES_A_COMMUNITY), num_nodes // 2)
        graph = SyntheticGraph(num_nodes, num_edges, num_communities, seed=_SHUFFLE_SEED)
    path = write_edges(graph.stream(), folder / "edges.bin", dtype="int32")
    np.savez(folder / "masks.npz", **graph.masks())
    return GraphFile(path, num_nodes, num_edges, masks=folder / "masks.npz")
