"""Public graphs in one neutral form: a folder with `graph.npz`."""

import os
import warnings
from pathlib import Path

import numpy as np

from ..edge_stream import open_edge_stream
from ..edge_stream.array import load_npz_arrays
from ..errors import short
from ..graph import GraphSchema, numbered_schema
from ..values import exact_integers
from .columns import CSRArrays
from .graph_dataset import GraphDataset
from .split import LinkSet, held_out, random_split

ENV_ROOT = "GNNSCALE_DATA"
_LINKS = {"val": ("val", "valid"), "test": ("test",)}  # splits by their names in files
_READ = {f"{word}_edge_{what}" for words in _LINKS.values() for word in words for what in ("index", "type")}
_READ |= {"edge_index", "edge_type", "entity_names", "relation_names"}
_READ |= {"x", "x_data", "x_indices", "x_indptr", "x_shape", "y", "train_mask", "val_mask", "test_mask"}
DENSE_ABOVE = 0.1  # share of nonzeros above which dense rows cost less than sparse ones


def data_root() -> Path | None:
    """Return the folder of public graphs: `GNNSCALE_DATA`, else the nearest `shared/data` above; None without one."""
    given = os.environ.get(ENV_ROOT)
    if given:
        return Path(given)
    here = Path.cwd().resolve()
    for parent in (here, *here.parents):
        if (parent / "shared" / "data").is_dir():
            return parent / "shared" / "data"
    return None


def load_npz(
    name: str,
    root: str | None = None,
    split: str = "auto",
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15),
    split_seed: int = 0,
    normalize: bool = True,
    to_undirected: bool = True,
    remove_self_loops: bool = True,
    chunk_edges: int = 1 << 22,
    hold_out: dict | None = None,
    use_features: bool = True,
) -> GraphDataset:
    """Open one folder of public graphs.

    Args:
        name: Name of the folder, for example "cora"; or a path to a folder or an .npz file.
        root: Parent of the folders. None: `GNNSCALE_DATA`, else the nearest `shared/data` above the working directory.
        split: "public" (the published masks), "random", or "auto": public if there is one.
        fractions, split_seed: Shares and seed of a random split; see `random_split`.
        normalize: Whether each row of sparse features is divided by its Euclidean length; False keeps counts.
        to_undirected, remove_self_loops, chunk_edges: See `open_edge_stream`.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        use_features: Whether stored features are used; False leaves them out, for a model that learns embeddings
            instead.

    The file holds `edge_index` (2, num_edges); `x` (num_nodes, dim) or `x_data`, `x_indices`, `x_indptr`, `x_shape`;
    `y` (num_nodes,), -1 = unknown, or (num_nodes, num_labels); `train_mask`, `val_mask`, `test_mask`; for a graph with
    edge types `edge_type` (num_edges,), and their names in `relation_names`, those of nodes in `entity_names`.
    Published links to evaluate on, `valid_edge_index` (2, num_links) and `valid_edge_type` (num_links,), and so of
    test, become the data set's `links`. Everything but the edges is optional; other arrays are named in a
    warning. Sparse features with more than a tenth of nonzeros are made dense.

    Raises:
        FileNotFoundError: no such folder; the message lists those that are there.
        ValueError: an unknown split, or "public" where there is none; a damaged file; edges to hold out where links
            are published, or of a graph with edge types.
    """
    if split not in ("auto", "public", "random"):
        raise ValueError(f"split must be auto, public or random, got {short(split)}")
    path = _find(name, root)
    arrays = load_npz_arrays(path)
    if "edge_index" not in arrays:
        raise ValueError(f"{path}: holds no edge_index, so there is no graph to train on")
    _tell_unread(path, arrays)
    features = _features(arrays, normalize)
    labels = arrays.get("y")
    if labels is not None and labels.dtype.kind != "f":  # the data set checks fractions and NaN
        labels = exact_integers("y", labels, -1, 2**31 - 1, booleans=True)
    links = _published_links(path, arrays)
    if links and hold_out is not None:
        raise ValueError(f"hold_out={hold_out}: {path} has published {' and '.join(links)} links: leave it out")
    rows = [len(arrays[name]) for name in ("y", "train_mask", "entity_names") if name in arrays]
    rows += [_nodes_named(found.edges) for found in links.values()]
    if features is not None:
        rows.append(features.shape[0])
    num_nodes = max([_nodes_named(arrays["edge_index"]), *rows])
    masks = {key: arrays[f"{key}_mask"] for key in ("train", "val", "test") if f"{key}_mask" in arrays}
    if split == "public" and not masks:
        raise ValueError(f"{path}: has no public split; say split=random")
    if labels is not None and (split == "random" or not masks):
        masks = random_split(labels, fractions, split_seed)
    stream = open_edge_stream(
        arrays["edge_index"],
        num_nodes=num_nodes,
        chunk_edges=chunk_edges,
        to_undirected=to_undirected,
        remove_self_loops=remove_self_loops,
    )
    features = features if use_features else None
    dataset = GraphDataset(
        name=path.parent.name,
        stream=stream,
        features=features,
        labels=labels,
        masks=masks,
        links=links,
        edge_type=arrays.get("edge_type"),
        schema=_relations(arrays, links),
    )
    return held_out(dataset, hold_out)


def _published_links(path: Path, arrays: dict) -> dict[str, LinkSet]:
    """Return the held-out links of the file, by split."""
    links = {}
    for split, words in _LINKS.items():
        there = [word for word in words if f"{word}_edge_index" in arrays]
        if not there:
            continue
        if len(there) > 1:
            raise ValueError(f"{path}: {there[0]}_edge_index and {there[1]}_edge_index both exist: leave one out")
        word = there[0]
        edges, link_types = arrays[f"{word}_edge_index"], arrays.get(f"{word}_edge_type")
        if edges.ndim != 2 or len(edges) != 2 or (link_types is not None and link_types.shape != edges.shape[1:]):
            raise ValueError(f"{path}: {word}_edge_index must be (2, num_links), and {word}_edge_type one each")
        edges = exact_integers(f"{path}: {word}_edge_index", edges, 0, unit="link", whole_floats=True)
        if link_types is not None:
            link_types = exact_integers(f"{path}: {word}_edge_type", link_types, 0, unit="link", whole_floats=True)
        if (link_types is None) != ("edge_type" not in arrays):
            raise ValueError(f"{path}: {word}_edge_type and edge_type must both be there, or neither")
        links[split] = LinkSet(edges, None, link_types)
    return links


def _relations(arrays: dict, links: dict[str, LinkSet]) -> GraphSchema | None:
    """Return the edge types by name, or by number where the file has no names; None: one edge type."""
    if "edge_type" not in arrays:
        return None
    names = arrays.get("relation_names")
    if names is None:
        link_types = [
            exact_integers("edge_type", arrays["edge_type"], 0, unit="edge"),
            *(found.edge_type for found in links.values()),
        ]
        return numbered_schema(max(int(found.max(initial=0)) for found in link_types) + 1, "edge_type")
    return GraphSchema(("node",), tuple(("node", str(name), "node") for name in names))


def _find(name: str, root: str | None) -> Path:
    given = Path(name).expanduser()
    if given.suffix == ".npz" and given.is_file():
        return given
    if (given / "graph.npz").is_file():
        return given / "graph.npz"
    folder = Path(root) if root else data_root()
    if folder is None:
        raise FileNotFoundError(
            f"name: no folder {name!r}, and no folder of public graphs is known; set {ENV_ROOT} or root="
        )
    if (folder / name / "graph.npz").is_file():
        return folder / name / "graph.npz"
    there = sorted(path.parent.name for path in folder.glob("*/graph.npz"))
    raise FileNotFoundError(f"name: no graph {name!r} in {folder}; there are {', '.join(there) or 'none'}")


def _tell_unread(path: Path, arrays: dict) -> None:
    """Warn of arrays of numbers that are not read."""
    unread = [name for name in arrays if name not in _READ and np.asarray(arrays[name]).dtype.kind not in "US"]
    if unread:
        warnings.warn(f"{path}: {', '.join(unread)} not read", stacklevel=3)


def _nodes_named(edges: np.ndarray) -> int:
    return int(edges.max()) + 1 if edges.size else 0


def _features(arrays: dict, normalize: bool):
    if "x" in arrays:
        return arrays["x"]
    if "x_indptr" not in arrays:
        return None
    rows, dim = (int(size) for size in arrays["x_shape"])
    indptr, indices, data = arrays["x_indptr"].astype(np.int64), arrays["x_indices"].astype(np.int32), arrays["x_data"]
    row = np.repeat(np.arange(rows), np.diff(indptr))
    if normalize:
        lengths = np.sqrt(np.bincount(row, weights=data.astype(np.float64) ** 2, minlength=rows))
        data = (data / np.where(lengths == 0, 1, lengths)[row]).astype(np.float32)
    if len(data) <= DENSE_ABOVE * rows * dim:
        return CSRArrays(indptr, indices, data, (rows, dim))
    dense = np.zeros((rows, dim), data.dtype)
    dense[row, indices] = data
    return dense
