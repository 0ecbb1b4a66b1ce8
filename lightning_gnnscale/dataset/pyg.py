"""PyG graphs: a `Data`, `HeteroData` or `TemporalData`, or one of PyG's data sets by class name."""

import inspect
import os
import pickle
import re
import warnings

import numpy as np

from ..edge_stream import open_edge_stream
from ..edge_stream.adjacency import AdjacencyStream
from ..edge_stream.options import StreamOptions
from ..errors import did_you_mean, short
from ..foreign import is_array, is_hetero, is_pyg, is_temporal
from ..graph import MASK_NAMES
from ..values import exact_integers, exact_times, of_tensor
from .columns import one_column
from .graph_dataset import GraphDataset
from .hetero import hetero_graph
from .split import held_out, random_split

# Options of the graph, not of PyG's classes.
_OF_GRAPHS = ("num_classes", "regression", "feature_storage", "edge_storage")
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # of torch; overrides what its callers ask for


def load_pyg(
    data=None,
    dataset: str | None = None,
    name: str | None = None,
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15),
    split_seed: int = 0,
    to_undirected: bool | None = None,
    remove_self_loops: bool = False,
    chunk_edges: int = 1 << 22,
    hold_out: dict | None = None,
    split: int = 0,
    **options,
) -> GraphDataset:
    """Take a graph from PyG.

    Args:
        data: A `torch_geometric.data.Data` with `edge_index`, or `adj_t`, and, if it has them, `x` (may be sparse),
            `y`, `train_mask`, ..., `edge_weight` and `edge_attr`; or a `TemporalData`: its events are edges with
            their `t` as times, `msg` as features and integer `y` as classes; or a `HeteroData` with the same of
            each node type and edge type, and `time`. Other data of nodes and edges is not read; a warning names it.
        dataset: Name of a class of `torch_geometric.datasets`, for example "Planetoid", instead of `data`; its first
            graph is taken.
        name: Name of the result, also passed to a class that takes one.
        fractions, split_seed: Random split of the labelled nodes of a graph without masks, see `random_split`.
        to_undirected: Whether reverses are added; None: of one edge type. Most graphs with several list their reverses.
        remove_self_loops, chunk_edges: See `open_edge_stream`.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        split: Column of masks that have several, one for each public split.
        options: `num_classes`, `regression`, `feature_storage` and `edge_storage` of `GraphDataset`,
            `separate_reverses` of `hetero_graph`; with `dataset` also further arguments of the class, for example
            `root`.

    Raises:
        ValueError: neither or both of `data` and `dataset`, no such class or option, a graph without edges, no such
            split, or files of the data set that torch cannot load without running them.
    """
    if (data is None) == (dataset is None):
        raise ValueError("data and dataset: give exactly one of them")
    of_graph = {key: options.pop(key) for key in _OF_GRAPHS if key in options}
    separate_reverses = options.pop("separate_reverses", None)
    if data is None:
        data = _of_class(dataset, name, options)
    elif options or not is_pyg(data):
        raise ValueError(_wrong(data, options))
    several, called = is_hetero(data), name or dataset
    options = {
        "to_undirected": not several if to_undirected is None else to_undirected,
        "remove_self_loops": remove_self_loops,
        "chunk_edges": chunk_edges,
    }
    split_by = {"fractions": fractions, "split_seed": split_seed}
    if several:
        of_graph |= {"name": (called or "typed").lower(), "hold_out": hold_out, "separate_reverses": separate_reverses}
        return hetero_graph(*_by_type(data, split), **options, **split_by, **of_graph)
    if separate_reverses is not None:
        raise ValueError(f"separate_reverses is for a HeteroData, got {type(data).__name__}: leave it out")
    of_graph |= {"name": (called or "pyg").lower()}
    if is_temporal(data):
        return held_out(_events(data, options, **of_graph), hold_out)
    return held_out(_of_one_type(data, split, options, split_by, **of_graph), hold_out)


def _of_class(dataset: str, name: str | None, options: dict):
    """Return the first graph of a class of `torch_geometric.datasets`."""
    import torch_geometric.datasets as classes

    if not hasattr(classes, dataset):
        raise ValueError(f"dataset: torch_geometric.datasets has no class {dataset!r}")
    given = getattr(classes, dataset)
    named = {"name": name} if name and "name" in inspect.signature(given).parameters else {}
    return _weights_only(given, **options, **named)[0]


def _wrong(data, options: dict) -> str:
    """Return what is wrong with a value given as `data`, or with the options beside it."""
    if not is_pyg(data):
        return f"data must be a Data, HeteroData or TemporalData of PyG, got {short(data)}"
    unknown, known = next(iter(options)), (*_OF_GRAPHS, "separate_reverses")
    return f"load_pyg(data): no option {unknown!r}, allowed: {', '.join(known)}{did_you_mean(unknown, known)}"


def _of_one_type(data, split: int, options: dict, split_by: dict, **of_graph) -> GraphDataset:
    """Return the graph of a `Data`; options: of the reader of its edges."""
    if data.get("edge_index") is None and data.get("adj_t") is None:
        raise ValueError("data has no edges: set data.edge_index, (2, num_edges) node ids, or data.adj_t")
    if data.num_nodes is None:
        raise ValueError("data does not say how many nodes it has: set data.num_nodes")
    edge_index, edge_weight, edge_attr = (data.get(key) for key in ("edge_index", "edge_weight", "edge_attr"))
    if edge_index is None:
        stream = AdjacencyStream("data.adj_t", data.adj_t, StreamOptions(**options), transposed=True)
        values = stream.values
        if values is not None and values.ndim > 1 and edge_attr is None:
            edge_attr = values
        elif values is not None and edge_weight is None and len(values) and not (values == 1).all():
            edge_weight = values
    else:
        edges = np.ascontiguousarray(_numpy(edge_index))
        stream = open_edge_stream(edges, num_nodes=int(data.num_nodes), **options)
    masks, labels = _masks(data, split), data.get("y")
    if not masks and labels is not None:
        masks = random_split(one_column(_numpy(labels)), **split_by, regression=of_graph.get("regression", False))
    _tell_unread(data)
    return GraphDataset(
        stream=stream,
        features=data.get("x"),
        labels=labels,
        masks=masks,
        edge_weight=None if edge_weight is None else edge_weight.reshape(-1),
        edge_features=None if edge_attr is None else edge_attr.reshape(len(edge_attr), -1),
        **of_graph,
    )


def _by_type(data, split: int) -> tuple[dict[str, dict], dict[tuple, dict]]:
    """Return nodes and edges of a `HeteroData` as `hetero_graph` takes them."""
    nodes, edges = {}, {}
    for node_type, store in data.node_items():
        given = {"features": store.get("x"), "labels": store.get("y"), "time": store.get("time")}
        nodes[node_type] = {"num_nodes": store.num_nodes, **given, "masks": _masks(store, split) or None}
    for edge_type, store in data.edge_items():
        if "edge_index" not in store:
            raise ValueError(f"{edge_type}: has no edge_index: adj_t of heterogeneous graphs is not read")
        features = store.get("edge_attr")
        edges[edge_type] = {
            "edges": store.edge_index,
            "time": store.get("time"),
            "weight": store.get("edge_weight"),
            "features": features.unsqueeze(1) if features is not None and features.dim() == 1 else features,
        }
    _tell_unread_types(data)
    return nodes, edges


def _events(data, options: dict, **of_graph) -> GraphDataset:
    """Return the events of a `TemporalData` as edges."""
    ends = np.stack([exact_integers(f"data.{end}", data[end], 0, unit="event") for end in ("src", "dst")])
    label, message = (None if value is None else _numpy(value) for value in (data.get("y"), data.get("msg")))
    if label is not None and label.dtype.kind not in "iub":
        raise ValueError(
            f"data.y of a TemporalData must be integers, classes of events, got {label.dtype}: leave it out"
        )
    unread = sorted(set(data.keys()) - {"src", "dst", "t", "msg", "y"})
    if unread:
        warnings.warn(f"data.{', data.'.join(unread)}: not read", stacklevel=3)
    return GraphDataset(
        stream=open_edge_stream(ends, num_nodes=int(data.num_nodes), **options),
        edge_time=exact_times("data.t", data.t, "event").astype(np.int64, copy=False),
        edge_label=None
        if label is None
        else exact_integers("data.y", label.reshape(-1), -1, 2**31 - 1, "event", booleans=True),
        edge_features=None if message is None else message.reshape(ends.shape[1], -1),
        **of_graph,
    )


_READ = {"x", "y", "edge_index", "adj_t", "edge_weight", "edge_attr", "num_nodes", "n_id", "e_id"}
_READ |= {f"{name}_mask" for name in MASK_NAMES}


def _tell_unread(data) -> None:
    """Warn of data of nodes and edges that is not read."""
    keys = sorted(set(data.keys()) - _READ)  # PyG lists them in any order
    unread = [key for key in keys if data.is_node_attr(key) or data.is_edge_attr(key)]
    if not unread:
        return
    types = "edge_type" in unread
    remedy = ": edge types are read as edge features, data.edge_attr = one_hot(data.edge_type)" if types else ""
    warnings.warn(f"data.{', data.'.join(unread)}: not read{remedy}", stacklevel=3)


def _tell_unread_types(data) -> None:
    """Warn of data of a node type or an edge type of a `HeteroData` that is not read."""
    unread = []
    for called, store in (*data.node_items(), *data.edge_items()):
        name = ",".join(called) if isinstance(called, tuple) else called
        unread += [f"{name}.{key}" for key in sorted(set(store.keys()) - _READ - {"time"}) if is_array(store[key])]
    if unread:
        warnings.warn(f"{', '.join(unread)}: not read", stacklevel=4)


def _masks(data, split: int) -> dict[str, np.ndarray]:
    """Return the masks of a graph or of a node type by name."""
    return {name: _mask(data, f"{name}_mask", split) for name in MASK_NAMES if data.get(f"{name}_mask") is not None}


def _mask(data, key: str, split: int) -> np.ndarray:
    mask = _numpy(data[key])
    if mask.ndim == 1:
        return mask
    if not 0 <= split < mask.shape[1]:
        raise ValueError(f"split must be in [0, {mask.shape[1]}), the columns of {key}, got {split}")
    return mask[:, split]


def _weights_only(make, **options):
    """Make a data set of PyG, without letting it run code in files that torch cannot load otherwise."""
    given = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        return make(**options)
    except pickle.UnpicklingError as error:
        told = re.search(r"GLOBAL (\S+)|whose module (\S+) is blocked", str(error))
        held = next(filter(None, told.groups())) if told else "objects"
        raise ValueError(
            f"dataset={make.__name__}: a file below {options.get('root')} holds {held}, which torch does not "
            "load without running it: remove the file, or load the data set in Python and give data="
        ) from None
    finally:
        if given is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = given


def _numpy(values) -> np.ndarray:
    return np.asarray(of_tensor(values))
