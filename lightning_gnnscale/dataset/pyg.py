"""PyG graphs: a `Data` object, or one of PyG's data sets by class name."""

import os
import pickle
import re
import warnings

import numpy as np

from ..edge_stream import open_edge_stream
from ..edge_stream.adjacency import AdjacencyStream
from ..edge_stream.open import ONE_NODE_TYPE
from ..edge_stream.options import StreamOptions
from ..foreign import csr_of, is_array, is_hetero, is_temporal
from ..values import exact_integers, exact_times, of_tensor
from .columns import CSRArrays
from .graph_dataset import GraphDataset
from .split import held_out, random_split

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # of torch; overrides what its callers ask for


def load_pyg(
    data=None,
    dataset: str | None = None,
    name: str | None = None,
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15),
    split_seed: int = 0,
    to_undirected: bool = True,
    remove_self_loops: bool = False,
    chunk_edges: int = 1 << 22,
    hold_out: dict | None = None,
    split: int = 0,
    **dataset_options,
) -> GraphDataset:
    """Take a graph from PyG.

    Args:
        data: A `torch_geometric.data.Data` with `edge_index`, or `adj_t`, and, if it has them, `x` (may be sparse),
            `y`, `train_mask`, ..., `edge_weight` and `edge_attr`; or a `TemporalData`: its events are edges with
            their `t` as times, `msg` as features and integer `y` as classes. Other data of nodes and
            edges is not read; a warning names it.
        dataset: Name of a class of `torch_geometric.datasets`, for example "Planetoid", instead of `data`; its first
            graph is taken.
        name: Name of the data set, passed to the class if given; it also names the result.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        split: Column of masks that have several, one for each public split.
        dataset_options: Further arguments of the class, for example `root`.

    Raises:
        ValueError: neither or both of `data` and `dataset`, no such class, a graph without edges or with several node
            types or edge types, no such split, or files of the data set that torch cannot load without running
            them.
    """
    if (data is None) == (dataset is None):
        raise ValueError("data and dataset: give exactly one of them")
    if data is None:
        import torch_geometric.datasets as classes

        if not hasattr(classes, dataset):
            raise ValueError(f"dataset: torch_geometric.datasets has no class {dataset!r}")
        named = {"name": name} if name else {}
        data = _weights_only(getattr(classes, dataset), **dataset_options, **named)[0]
    options = {"chunk_edges": chunk_edges, "to_undirected": to_undirected, "remove_self_loops": remove_self_loops}
    if is_temporal(data):
        return held_out(_events(data, (name or dataset or "pyg").lower(), options), hold_out)
    _check_data(data)
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
    masks = {
        part: _mask(data, f"{part}_mask", split)
        for part in ("train", "val", "test")
        if data.get(f"{part}_mask") is not None
    }
    labels = data.get("y")
    if labels is not None:
        labels = _numpy(labels)
        labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if not masks and labels is not None:
        masks = random_split(labels, fractions, split_seed)
    _tell_unread(data)
    graph = GraphDataset(
        name=(name or dataset or "pyg").lower(),
        stream=stream,
        features=_features(data.get("x")),
        labels=labels,
        masks=masks,
        edge_weight=None if edge_weight is None else _numpy(edge_weight).reshape(-1),
        edge_features=None if edge_attr is None else _numpy(edge_attr).reshape(len(edge_attr), -1),
    )
    return held_out(graph, hold_out)


def _events(data, name: str, options: dict) -> GraphDataset:
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
        name=name,
        stream=open_edge_stream(ends, num_nodes=int(data.num_nodes), **options),
        edge_time=exact_times("data.t", data.t, "event").astype(np.int64, copy=False),
        edge_label=None
        if label is None
        else exact_integers("data.y", label.reshape(-1), -1, 2**31 - 1, "event", booleans=True),
        edge_features=None if message is None else message.reshape(ends.shape[1], -1),
    )


def _check_data(data) -> None:
    kind = type(data).__name__
    if is_hetero(data):
        raise ValueError(f"{kind}: {ONE_NODE_TYPE}")
    if data.get("edge_index") is None and data.get("adj_t") is None:
        raise ValueError("data has no edges: set data.edge_index, (2, num_edges) node ids, or data.adj_t")
    if data.num_nodes is None:
        raise ValueError("data does not say how many nodes it has: set data.num_nodes")


_READ = {"x", "y", "edge_index", "adj_t", "edge_weight", "edge_attr", "num_nodes", "n_id", "e_id"}
_READ |= {f"{part}_mask" for part in ("train", "val", "test")}


def _tell_unread(data) -> None:
    """Warn of data of nodes and edges that is not read."""
    keys = sorted(set(data.keys()) - _READ)  # PyG lists them in any order
    unread = [key for key in keys if data.is_node_attr(key) or data.is_edge_attr(key)]
    if not unread:
        return
    types = "edge_type" in unread
    remedy = ": edge types are read as edge features, data.edge_attr = one_hot(data.edge_type)" if types else ""
    warnings.warn(f"data.{', data.'.join(unread)}: not read{remedy}", stacklevel=3)


_READ_OF_NODE_TYPES = {"x", "y", "time", "edge_index", "edge_attr", "edge_weight", "num_nodes", "n_id", "e_id"}
_READ_OF_NODE_TYPES |= {f"{part}_mask" for part in ("train", "val", "test")}


def tell_unread_types(data) -> None:
    """Warn of data of a node type or an edge type of a `HeteroData` that is not read."""
    unread = []
    for kind, store in (*data.node_items(), *data.edge_items()):
        name = ",".join(kind) if isinstance(kind, tuple) else kind
        unread += [f"{name}.{key}" for key in sorted(set(store.keys()) - _READ_OF_NODE_TYPES) if is_array(store[key])]
    if unread:
        warnings.warn(f"{', '.join(unread)}: not read", stacklevel=4)


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


def _features(x):
    """Return dense features as an array, sparse ones as CSR; None without any."""
    sparse = csr_of(x)
    if sparse is not None:
        *arrays, shape = sparse
        return CSRArrays(*map(_numpy, arrays), shape)
    return None if x is None else _numpy(x)
