"""The graphs that benchmarks run on: public ones, generated ones, and the user's own.

Partitioners are given edge files (`graph_file`), placements and samplers a graph in memory (`load_workload`), sources
of batches a partition store (`open_graph`).
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from lightning_gnnscale.dataset import GraphDataset, load_npz, load_pyg
from lightning_gnnscale.dataset.generated import MAG_EDGES, MAG_NODES
from lightning_gnnscale.dataset.npz import data_root as find_data_root
from lightning_gnnscale.dataset.split import random_split
from lightning_gnnscale.edge_stream import EdgeStream, SyntheticGraph, lfr_graph, open_edge_stream, write_edges
from lightning_gnnscale.edge_stream.stream import file_identity
from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.partition_store import PartitionStore, write_partition_store
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.partitioner.metis import metis_is_installed
from lightning_gnnscale.rng import fold, permutation

from .present import tell

NODES_A_COMMUNITY = 1000  # of generated planted graphs
NUM_CLASSES = 47  # of power-law graphs
TRAIN_SHARE = 0.1  # of the nodes, where a graph has no published split
WORKLOADS = re.compile(r"power_law:([\d_]+)(?::([\d_]+))?")  # names of what `load_workload` generates
STORES = re.compile(r"power_law:([\d_]+):([\d_]+):([\d_]+)")  # and `open_graph`
_EDGE_FILES = re.compile(r"(planted|typed|lfr|two_level|power_law|grid):([\d_]+)(?::([\d_]+))?")  # and `graph_file`
_LEVELS = (0.6, 0.85)  # shares of a two-level graph's edges within a community, and within 32 of them
NODE_TYPES = {"paper": 0.5, "author": 0.45, "institution": 0.05}  # of typed graphs, by their share of the nodes
_EDGES_A_NODE = 20  # of power-law graphs, unless said otherwise
_SEED, _NODE_SALT, _EDGE_SALT, _ID_SALT, _TRAIN_SALT = 0, 1, 2, 11, 12
_PATH_KEYS = ("path", "name", "num_nodes", "layout", "masks", "reader")


def public_root(data_root: str | None) -> Path | None:
    """Return the folder of public graphs: as given, or where it is found."""
    return find_data_root() if data_root is None else Path(data_root).expanduser()


def without_metis(methods: Sequence[str]) -> list[str]:
    """Return the methods without those of METIS where it is not installed, and say so."""
    kept = [method for method in methods if metis_is_installed() or not method.startswith("metis")]
    if len(kept) < len(methods):
        tell("METIS is left out: it is not installed (extra \\[metis])")
    return kept


def check_graphs(
    graphs: list[str], data_root: Path | None, generated: re.Pattern = WORKLOADS, form: str = "power_law:NODES"
) -> None:
    """Raise ValueError, which names what is available, unless each graph is public, or of a name that can be generated.

    Args:
        generated: Pattern of the names of graphs that can be generated; `form` describes them in messages.
    """
    for name in graphs:
        if not generated.fullmatch(name):
            _public_file(name, data_root, f"and {form}")


def _public_file(name: str, data_root: Path | None, generated: str) -> Path:
    path = None if data_root is None else data_root / name / "graph.npz"
    if path is not None and path.is_file():
        return path
    there = [] if data_root is None else sorted(found.parent.name for found in data_root.glob("*/graph.npz"))
    where = data_root or "no folder of public graphs (set GNNSCALE_DATA or bench.data_root)"
    raise ValueError(f"bench.graphs: no graph {name!r} in {where}; there are {', '.join(there) or 'none'}, {generated}")


def power_law_graph(num_nodes: int, num_edges: int, seed: int) -> CSC:
    """Return edges with both ends sampled independently, in proportion to Pareto(1.8) + 1 weights."""
    return build_csc(*_power_law_edges(num_nodes, num_edges, seed), num_nodes)


def _power_law_edges(num_nodes: int, num_edges: int, seed: int = _SEED) -> np.ndarray:
    rng = np.random.default_rng(seed)
    upper = np.cumsum(rng.pareto(1.8, num_nodes) + 1)
    upper /= upper[-1]
    return np.stack([np.searchsorted(upper, rng.random(num_edges)).astype(np.int32) for _ in range(2)])


def _two_level_edges(num_nodes: int, num_edges: int) -> np.ndarray:
    """Return the edges of communities of 250 nodes, 32 of which make a larger one; degrees follow a power law."""
    rng = np.random.default_rng(_SEED)
    upper = np.concatenate([[0], np.cumsum(np.minimum(rng.pareto(1.5, num_nodes) + 1, 200))])
    src = np.searchsorted(upper, rng.random(num_edges) * upper[-1], side="right") - 1
    level = np.searchsorted(_LEVELS, rng.random(num_edges))
    size = np.array([250, 250 * 32, num_nodes])[level]
    first = src // size * size
    last = np.minimum(first + size, num_nodes)
    at = upper[first] + rng.random(num_edges) * (upper[last] - upper[first])
    return np.stack([src, np.clip(np.searchsorted(upper, at, side="right") - 1, first, last - 1)])


def _grid_edges(num_nodes: int, num_edges: int) -> np.ndarray:
    side = round(num_nodes**0.5)
    node = np.arange(num_nodes).reshape(side, side)
    pairs = ((node[:, :-1], node[:, 1:]), (node[:-1], node[1:]))
    return np.concatenate([np.stack([src.ravel(), dst.ravel()]) for src, dst in pairs], axis=1)


_EDGES_OF = {"two_level": _two_level_edges, "power_law": _power_law_edges, "grid": _grid_edges}


def stream_of(csc: CSC) -> EdgeStream:
    """Return the edges of a graph as a stream."""
    target = np.repeat(np.arange(csc.num_rows, dtype=csc.indices.dtype), csc.in_degree)
    return open_edge_stream(np.stack([np.asarray(csc.indices), target]), num_nodes=csc.num_rows)


def power_law_input(num_nodes: int, num_edges: int, dim: int, seed: int) -> tuple[CSC, np.ndarray]:
    """Generate a `power_law_graph`, and (num_nodes, dim) random float32 features."""
    tell(f"generating {num_edges:,} edges of {num_nodes:,} nodes with {dim} features")
    return power_law_graph(num_nodes, num_edges, seed), np.random.default_rng(seed).random((num_nodes, dim), np.float32)


def typed_power_law(num_nodes: int, num_edges: int, dim: int, seed: int):
    """Return a PyG `HeteroData` of 3 node types and 6 edge types in MAG240M's proportions, edges sorted by target.

    Half of the edges are the reverses of the others. Ends are sampled as in `power_law_graph`. Papers have
    (num_papers, dim) random float32 features, the other node types none.
    """
    from torch_geometric.data import HeteroData

    tell(f"generating {num_edges:,} edges of {num_nodes:,} nodes of 3 types, papers with {dim} features")
    rng, data = np.random.default_rng(seed), HeteroData()
    total = sum(MAG_NODES.values())
    upper = {}
    for node_type, count in MAG_NODES.items():
        data[node_type].num_nodes = max(1, round(num_nodes * count / total))
        upper[node_type] = np.cumsum(rng.pareto(1.8, data[node_type].num_nodes) + 1)
    data["paper"].x = torch.from_numpy(rng.random((data["paper"].num_nodes, dim), np.float32))
    for (source, name, target), count in MAG_EDGES.items():
        size = max(1, round(num_edges / 2 * count / sum(MAG_EDGES.values())))
        ends = [np.searchsorted(upper[one], rng.random(size) * upper[one][-1]) for one in (source, target)]
        for edge_type, (src, dst) in (
            ((source, name, target), ends),
            ((target, f"rev_{name}", source), ends[::-1]),
        ):
            order = np.argsort(dst, kind="stable")
            data[edge_type].edge_index = torch.from_numpy(np.stack([src[order], dst[order]]))
    return data


def some_seeds(num_nodes: int, num: int, seed: int) -> np.ndarray:
    """Return so many random nodes, ascending."""
    return np.sort(np.random.default_rng(seed + 1).permutation(num_nodes)[:num])


@dataclass(frozen=True)
class Workload:
    """A graph and the training nodes whose batches read it.

    Attributes:
        csc: in-neighbours; public graphs hold both directions of each edge once, without self-loops.
        train_nodes: (num_train,) int64, ascending.
    """

    name: str
    csc: CSC
    train_nodes: np.ndarray


def load_workload(name: str, data_root: Path | None) -> Workload:
    """Load or generate a graph that `check_graphs` has accepted.

    Public graphs are made undirected, and their ids are permuted. Ids that follow the crawl would give ranges of ids,
    the placement by ranges, a locality that most data sets do not have.

    Generated ones are named "power_law:NODES" or "power_law:NODES:EDGES"; the default is 20 edges per node.
    """
    generated = WORKLOADS.fullmatch(name)
    if generated:
        num_nodes = int(generated[1])
        num_edges = int(generated[2]) if generated[2] else _EDGES_A_NODE * num_nodes
        return Workload(name, power_law_graph(num_nodes, num_edges, _SEED), _some_nodes(num_nodes))
    with np.load(data_root / name / "graph.npz") as arrays:
        edges = arrays["edge_index"]
        num_nodes = _num_nodes(edges, arrays)
        mask = arrays["train_mask"] if "train_mask" in arrays.files else None
    new_id = permutation(num_nodes, fold(_SEED, _ID_SALT))
    first, second = new_id[_simple_pairs(edges, num_nodes)]
    csc = build_csc(np.concatenate([first, second]), np.concatenate([second, first]), num_nodes)
    train_nodes = _some_nodes(num_nodes) if mask is None else np.sort(new_id[np.flatnonzero(mask)])
    return Workload(name, csc, train_nodes)


def _num_nodes(edges: np.ndarray, arrays) -> int:
    """Return the number of nodes of a public graph: the last ones may have no edge."""
    return max([int(edges.max(initial=-1)) + 1, *(len(arrays[key]) for key in ("y", "train_mask") if key in arrays)])


def _simple_pairs(edges: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return (2, num_edges) int64: the ends of each undirected edge once, without self-loops."""
    low, high = np.sort(edges.astype(np.int64), axis=0)
    return np.stack(np.divmod(np.unique((low * num_nodes + high)[low != high]), num_nodes))


def _some_nodes(num_nodes: int) -> np.ndarray:
    return np.sort(permutation(num_nodes, fold(_SEED, _TRAIN_SALT))[: max(1, round(TRAIN_SHARE * num_nodes))])


def open_graph(name: str, folder: Path, num_parts: int, data_root: Path | None) -> PartitionStore:
    """Open the store of a graph that `check_graphs` has accepted; it is made where it is missing, of ranges of ids."""
    root = folder / f"{name.replace(':', '-')}-p{num_parts}"
    if root.is_dir():
        return PartitionStore.open(root)
    folder.mkdir(parents=True, exist_ok=True)
    generated = STORES.fullmatch(name)
    if generated is None:
        data = load_npz(name, root=None if data_root is None else str(data_root))
        parts = partition(data.stream, "range", num_parts=num_parts)
        arrays = {"features": data.features, "labels": data.labels, "masks": data.masks}
        return write_partition_store(root, data.stream, parts, **arrays)
    num_nodes, num_edges, dim = (int(number) for number in generated.groups())
    csc, features = power_law_input(num_nodes, num_edges, dim, _SEED)
    stream = stream_of(csc)
    labels = np.random.default_rng(_SEED).integers(0, NUM_CLASSES, num_nodes)
    train = np.zeros(num_nodes, np.bool_)
    train[_some_nodes(num_nodes)] = True
    arrays = {"features": features, "labels": labels, "masks": {"train": train}}
    parts = partition(stream, "range", num_parts=num_parts)
    return write_partition_store(root, stream, parts, check_finite=False, **arrays)


@dataclass(frozen=True)
class GraphSpec:
    """One graph to be compared on, before it is made.

    Attributes:
        kind: "public", "path", or what is generated.
        source: plain values that distinguish two sources of one name.
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
        node_type: path of an .npy of the (num_nodes,) node type of each node, or None: there is one.
    """

    path: Path
    num_nodes: int
    num_edges: int
    layout: str = "once"
    reader: dict = field(default_factory=dict)
    masks: Path | None = None
    node_type: Path | None = None


def resolve_graph(given: str | Mapping, data_root: Path | None) -> GraphSpec:
    """Return what a graph of the configuration is, and check that it is available.

    Args:
        given: a public graph's name; "planted:EDGES", "typed:EDGES" (the same, of three node types), "lfr:EDGES",
            "two_level:EDGES" or "power_law:EDGES" (without communities), with ":NODES" behind it where a tenth of the
            edges is not meant; "grid:EDGES", a square one; a path; or {path, name, num_nodes, layout, masks, reader}.

    Raises:
        ValueError: no such graph; the message lists what there is.
    """
    if isinstance(given, Mapping):
        return _resolve_path(dict(given))
    generated = _EDGE_FILES.fullmatch(given)
    if generated:
        kind, num_edges = generated[1], int(generated[2])
        num_nodes = int(generated[3]) if generated[3] else max(4, num_edges // 10)
        if kind == "grid":
            num_nodes = max(2, round((num_edges / 2) ** 0.5)) ** 2
        return GraphSpec(given, kind, {}, {"num_nodes": num_nodes, "num_edges": num_edges})
    if Path(given).suffix or "/" in given:
        return _resolve_path({"path": given})
    path = _public_file(
        given,
        data_root,
        "planted:EDGES, typed:EDGES, lfr:EDGES, two_level:EDGES, power_law:EDGES, grid:EDGES, paths",
    )
    return GraphSpec(given, "public", file_identity(path), {"npz": path})


def resolve_graphs(given: list, sets: Mapping[str, list], data_root: Path | None) -> list[GraphSpec]:
    """Return what graphs and sets of graphs are, each graph once; see `resolve_graph`."""
    specs: dict[str, GraphSpec] = {}
    for name in given:
        for graph in sets[name] if isinstance(name, str) and name in sets else [name]:
            spec = resolve_graph(graph, data_root)
            if specs.setdefault(spec.name, spec) != spec:
                raise ValueError(f"bench.graphs has two graphs named {spec.name!r}: give one another name")
    return list(specs.values())


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
    """Write the undirected simple graph of edges as raw int32 pairs, each once, ids and edges in random order.

    Returns:
        (num_nodes,) int64, the new id of each node; and the number of edges.
    """
    ends = _simple_pairs(edge_index, num_nodes).T
    new_id = permutation(num_nodes, fold(_SEED, _NODE_SALT))
    order = permutation(len(ends), fold(_SEED, _EDGE_SALT))
    new_id[ends[order]].astype(np.int32).tofile(path)
    return new_id, len(ends)


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
        num_nodes = _num_nodes(edges, arrays)
        masks = {key: arrays[f"{key}_mask"] for key in ("train", "val", "test") if f"{key}_mask" in arrays}
        labels = arrays["y"] if "y" in arrays else np.zeros(num_nodes, np.int64)
    if not masks:
        masks = random_split(labels, seed=_SEED)
    new_id, num_edges = write_shuffled(edges, num_nodes, folder / "edges.bin")
    moved = {name: np.zeros(num_nodes, bool) for name in masks}
    for name, mask in masks.items():
        moved[name][new_id[: len(mask)]] = mask
    np.savez(folder / "masks.npz", **moved)
    return GraphFile(folder / "edges.bin", num_nodes, num_edges, masks=folder / "masks.npz")


def _write_generated(spec: GraphSpec, folder: Path) -> GraphFile:
    num_nodes, num_edges = spec.details["num_nodes"], spec.details["num_edges"]
    if spec.kind in _EDGES_OF:
        edges = _EDGES_OF[spec.kind](num_nodes, num_edges)
        _, num_edges = write_shuffled(edges, num_nodes, folder / "edges.bin")
        np.savez(folder / "masks.npz", **random_split(np.zeros(num_nodes, np.int64), seed=_SEED))
        return GraphFile(folder / "edges.bin", num_nodes, num_edges, masks=folder / "masks.npz")
    if spec.kind == "lfr":
        graph = lfr_graph(num_nodes, num_edges, min_community=min(50, num_nodes / 2), seed=_SEED)
    else:
        num_communities = min(max(32, num_nodes // NODES_A_COMMUNITY), num_nodes // 2)
        graph = SyntheticGraph(num_nodes, num_edges, num_communities, seed=_SEED)
    path = write_edges(graph.stream(), folder / "edges.bin", dtype="int32")
    masks, types = graph.masks(), {}
    if spec.kind == "typed":
        node_type = np.random.default_rng(_SEED).choice(len(NODE_TYPES), num_nodes, p=list(NODE_TYPES.values()))
        masks = {name: mask & (node_type == 0) for name, mask in masks.items()}
        types = {"node_type": folder / "node_type.npy"}
        np.save(types["node_type"], node_type.astype(np.uint8))
    np.savez(folder / "masks.npz", **masks)
    return GraphFile(path, num_nodes, num_edges, masks=folder / "masks.npz", **types)


def typed_dataset(graph: GraphFile, masks: Mapping[str, np.ndarray]) -> GraphDataset:
    """Return the graph of a file with node types: its edges in both directions, an edge type for each pair of them.

    Args:
        graph: With `node_type`, places in `NODE_TYPES`; the first is the type of the seeds.
        masks: (num_nodes,) bool by name.

    Cost: all edges in memory, at about 40 bytes each.
    """
    from torch_geometric.data import HeteroData

    names, node_type, data = list(NODE_TYPES), np.load(graph.node_type), HeteroData()
    number = np.zeros(graph.num_nodes, np.int64)  # of a node among those of its type
    for place, name in enumerate(names):
        nodes = np.flatnonzero(node_type == place)
        number[nodes] = np.arange(len(nodes))
        data[name].num_nodes = len(nodes)
        if place == 0:
            data[name].y = torch.zeros(len(nodes), dtype=torch.long)
            for split, mask in masks.items():
                data[name][f"{split}_mask"] = torch.from_numpy(mask[nodes])
    ends = np.fromfile(graph.path, np.int32).reshape(-1, 2)
    src, dst = np.concatenate([ends, ends[:, ::-1]]).T
    pair = node_type[src].astype(np.int64) * len(names) + node_type[dst]
    for place in np.unique(pair):
        edges = np.flatnonzero(pair == place)
        of_type = np.stack([number[src[edges]], number[dst[edges]]])
        data[names[place // len(names)], "to", names[place % len(names)]].edge_index = torch.from_numpy(of_type)
    return load_pyg(data, to_undirected=False)
