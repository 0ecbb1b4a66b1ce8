"""Generated graphs: on disk, written once; papers in MAG240M's proportions; events whose future shows the label."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np

from ..edge_stream import SyntheticGraph, open_edge_stream, write_edges
from ..edge_stream.array import write_npy_header
from ..edge_stream.options import CHUNK_EDGES, StreamOptions
from ..edge_stream.stream import EdgeStream
from ..errors import check_count
from ..events import held_lock
from ..graph import id_dtype
from ..jit import kernel
from ..keywords import passes_on
from ..rng import combine, fold, unit
from ..system import whole_file
from .graph_dataset import GraphDataset
from .hetero import hetero_graph
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
    with _locked_folder(folder, name, parameters) as target:
        edges, rows = target / "edges.bin", target / "features.npy"
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


@contextmanager
def _locked_folder(folder: str, name: str, parameters: str) -> Iterator[Path]:
    """Yield the folder of the data with these parameters; other processes wait until the block is over."""
    target = Path(folder) / f"{name}-{fold(*parameters.encode()) >> 32:08x}"
    target.mkdir(parents=True, exist_ok=True)
    with held_lock(target / "lock", f"is generating the graph {target}"):
        for left in target.glob("*.tmp*"):  # by a killed process
            left.unlink()
        yield target


# MAG240M-LSC (Hu et al., 2021): nodes and edges of each type.
MAG_NODES = {"paper": 121_751_666, "author": 122_383_112, "institution": 25_721}
MAG_EDGES = {
    ("paper", "cites", "paper"): 1_297_748_926,
    ("author", "writes", "paper"): 386_022_720,
    ("author", "affiliated", "institution"): 44_592_586,
}
LABELLED = 0.0115  # share of its papers that have a label
_CHUNK = 1 << 20


class GroupedEdges(EdgeStream):
    """Generated edges between two node types whose nodes form groups; an edge is a function of its number.

    Both node types have as many groups; group g of one matches group g of the other. An edge stays in a group
    with the probability `homophily`. Low ids of a group have more edges: the density of a position x in (0, 1) falls
    as x ** -0.5.

    Args:
        counts: Nodes of the source node type, and of the target node type.
        num_edges: Number of edges.
        num_groups: Number of groups.
        homophily: In [0, 1].
        seed: Decides all edges.
        chunk_edges: See `open_edge_stream`.
    """

    seekable = True

    def __init__(
        self,
        counts: tuple[int, int],
        num_edges: int,
        num_groups: int,
        homophily: float,
        seed: int,
        chunk_edges: int = CHUNK_EDGES,
    ):
        options = StreamOptions(max(counts), chunk_edges, "directed")
        super().__init__("generated edges", id_dtype(max(counts)), options, num_edges)
        self._sampled_by = (counts[0], counts[1], num_groups, float(homophily), np.uint64(fold(seed)))

    def _identity(self) -> dict:
        return {"grouped": [str(value) for value in self._sampled_by], "num_edges": self.num_edges}

    def _blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(first_edge, self.num_edges, _CHUNK):
            ends = np.empty((2, min(_CHUNK, self.num_edges - first)), np.int64)
            _sample(first, *self._sampled_by, ends)
            yield ends[0], ends[1]


@kernel
def _sample(first, num_sources, num_targets, num_groups, homophily, key, ends):
    for i in range(ends.shape[1]):
        word = combine(key, np.uint64(first + i))
        group = np.int64(unit(word) * num_groups)
        other = group
        if unit(combine(word, np.uint64(1))) >= homophily:
            other = np.int64(unit(combine(word, np.uint64(2))) * num_groups)
        ends[0, i] = _member(num_sources, num_groups, group, unit(combine(word, np.uint64(3))))
        ends[1, i] = _member(num_targets, num_groups, other, unit(combine(word, np.uint64(4))))


@kernel(inline="always")
def _member(count, num_groups, group, share):
    """Return a node of a group; with fewer nodes than groups, groups share them."""
    begin, end = group * count // num_groups, (group + 1) * count // num_groups
    return min(begin + np.int64(share * share * max(end - begin, 1)), count - 1)


def group_of(count: int, num_groups: int) -> np.ndarray:
    """Return the (count,) int64 group of each node of a node type."""
    bounds = np.arange(num_groups + 1) * count // num_groups
    return np.repeat(np.arange(num_groups), np.diff(bounds))


def load_mag_shape(
    num_nodes: int,
    num_edges: int,
    folder: str,
    feature_dim: int = 128,
    num_classes: int = 153,
    num_groups: int | None = None,
    homophily: float = 0.8,
    feature_noise: float = 1.0,
    labelled: float = LABELLED,
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    chunk_edges: int = CHUNK_EDGES,
    name: str = "mag_shape",
) -> GraphDataset:
    """Generate papers, authors and institutions in MAG240M's proportions; reverses are added.

    Papers have float16 features and some have a label, the class of their group; authors and institutions have neither.

    Args:
        num_nodes, num_edges: Nodes and edges of all node types together.
        folder: Folder of the data; features go to a file in it, named after the parameters, written once.
        feature_dim, feature_noise: Columns of the papers' features, and the standard deviation of their noise around
            the mean of their class.
        num_classes, num_groups: Classes and groups; None: 16 groups a class.
        homophily: Share of edges within a group; the rest is random.
        labelled, fractions: Share of the papers that have a label, and of these for training, validation and test.
        seed: Decides everything.
        chunk_edges, name: See `open_edge_stream` and `GraphDataset`.

    Cost: 2 bytes a feature value on disk, written once; edges are generated again at each pass, about 20 ns an edge.
    Source: Hu et al., OGB-LSC, 2021 (MAG240M): its node types, edge types and their shares. Differs: generated groups.
    """
    for key, value in {"num_nodes": num_nodes, "num_edges": num_edges, "feature_dim": feature_dim}.items():
        check_count(key, value)
    num_groups = num_groups or 16 * num_classes
    total = sum(MAG_NODES.values())
    counts = {node_type: round(num_nodes * MAG_NODES[node_type] / total) for node_type in ("author", "institution")}
    counts = {
        "paper": num_nodes - sum(counts.values()),
        **{node_type: max(1, count) for node_type, count in counts.items()},
    }
    papers = counts["paper"]
    classes = group_of(papers, num_groups) % num_classes
    facts = {"papers": papers, "dim": feature_dim, "classes": num_classes, "groups": num_groups, "seed": seed}
    text = json.dumps(facts | {"noise": feature_noise}, sort_keys=True)
    with _locked_folder(folder, name, text) as target:
        rows = target / "paper_features.npy"
        if not rows.is_file():
            _write_features(rows, classes, feature_dim, num_classes, feature_noise, seed)
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(papers)[: max(3, round(labelled * papers))]
    labels = np.full(papers, -1, np.int64)
    labels[chosen] = classes[chosen]
    ends = np.cumsum(np.array(fractions) / sum(fractions) * len(chosen)).astype(int)
    masks = {}
    for name_of, begin, end in zip(("train", "val", "test"), (0, *ends), ends, strict=False):
        masks[name_of] = np.zeros(papers, bool)
        masks[name_of][chosen[begin:end]] = True
    edges, given = {}, sum(MAG_EDGES.values())
    for number, (edge_type, size) in enumerate(MAG_EDGES.items()):
        between = (counts[edge_type[0]], counts[edge_type[2]])
        size = max(1, round(num_edges * size / given))
        edges[edge_type] = GroupedEdges(between, size, num_groups, homophily, seed + 7 * number + 1, chunk_edges)
    nodes = {**counts, "paper": {"features": str(rows), "labels": labels, "masks": masks}}
    options = {"chunk_edges": chunk_edges, "num_classes": num_classes}
    return hetero_graph(nodes, edges, name=name, **{"separate_reverses": False, **options})


def _write_features(path: Path, classes: np.ndarray, dim: int, num_classes: int, noise: float, seed: int) -> None:
    """Write (num_papers, dim) float16 rows around the mean of each class, whole or not at all."""
    means = np.random.default_rng(seed).standard_normal((num_classes, dim), np.float32)
    step = max(1, _CHUNK * 8 // dim)
    with whole_file(path) as file:
        write_npy_header(file, (len(classes), dim), np.float16)
        for number, begin in enumerate(range(0, len(classes), step)):
            own = classes[begin : begin + step]
            sampled = np.random.default_rng((seed, number)).standard_normal((len(own), dim), np.float32)
            file.write((means[own] + noise * sampled).astype(np.float16))


def load_leaky_events(
    num_users: int = 4000,
    num_items: int = 1000,
    events_per_user: int = 20,
    seed: int = 0,
    name: str = "leaky_events",
    fractions: tuple[float, float, float] = (0.6, 0.2, 0.2),
) -> GraphDataset:
    """Generate users who buy items over time, whose label shows in what they buy afterwards.

    Each user has a query time and a random label, of which no earlier event gives a hint. Afterwards the user buys
    only items of the label's half, before that any. A model whose neighbourhoods reach into the future is always right;
    one that sees only the past is right half the time.

    Args:
        num_users, num_items: Nodes of either node type.
        events_per_user: Events of a user, half of them before its time.
        seed: Decides everything.
        name, fractions: See `GraphDataset` and `random_split`.
    """
    for key, value in {"num_users": num_users, "num_items": num_items, "events_per_user": events_per_user}.items():
        check_count(key, value)
    rng = np.random.default_rng(seed)
    labels, asked = rng.integers(0, 2, num_users), rng.integers(1_000, 9_000, num_users)
    user = np.repeat(np.arange(num_users), events_per_user)
    before = np.tile(np.arange(events_per_user) < events_per_user // 2, num_users)
    span = np.where(before, rng.integers(1, 1_000, len(user)), -rng.integers(1, 1_000, len(user)))
    half = np.where(before, rng.integers(0, 2, len(user)), labels[user])
    item = half * (num_items // 2) + rng.integers(0, num_items // 2, len(user))
    features = np.zeros((num_items, 2), np.float32)
    features[np.arange(num_items), (np.arange(num_items) >= num_items // 2).astype(int)] = 1
    nodes = {
        "user": {"features": np.ones((num_users, 1), np.float32), "labels": labels, "time": asked},
        "item": {"features": features, "time": np.zeros(num_items, np.int64)},
    }
    edges = {("user", "buys", "item"): {"edges": np.stack([user, item]), "time": asked[user] - span}}
    return hetero_graph(nodes, edges, name=name, fractions=fractions, split_seed=seed)
