"""PyG graphs: a `Data` object, or one of PyG's data sets by class name."""

import os
import pickle
import re

import numpy as np

from ..edge_stream import open_edge_stream
from .graph_dataset import CSRArrays, GraphDataset
from .split import held_out, random_split

_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's, which overrides what its callers ask for


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
    **dataset_options,
) -> GraphDataset:
    """Take a graph from PyG.

    Args:
        data: A `torch_geometric.data.Data` with `edge_index`, and, if it has them, `x` (may be sparse), `y`,
            `train_mask`, ..., `edge_weight` and `edge_attr`.
        dataset: Name of a class of `torch_geometric.datasets`, for example "Planetoid", in place of `data`; its first
            graph is taken.
        name: Name of the data set, passed to the class if given; it also names the result.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        dataset_options: Further arguments of the class, for example `root`.

    Raises:
        ValueError: neither or both of `data` and `dataset`, no such class, a graph without `edge_index`, or files of
            the data set that torch cannot load without running what they hold.
    """
    if (data is None) == (dataset is None):
        raise ValueError("data and dataset: give exactly one of them")
    if data is None:
        import torch_geometric.datasets as classes

        if not hasattr(classes, dataset):
            raise ValueError(f"dataset: torch_geometric.datasets has no class {dataset!r}")
        named = {"name": name} if name else {}
        data = _weights_only(getattr(classes, dataset), **dataset_options, **named)[0]
    if getattr(data, "edge_index", None) is None:
        raise ValueError("data has no edge_index; of an adj_t make one: torch_geometric.utils.to_edge_index")
    masks = {}
    for split in ("train", "val", "test"):
        mask = getattr(data, f"{split}_mask", None)
        if mask is not None:
            masks[split] = _numpy(mask if mask.dim() == 1 else mask[:, 0])
    labels = getattr(data, "y", None)
    if labels is not None:
        labels = _numpy(labels.squeeze(-1) if labels.dim() == 2 and labels.shape[1] == 1 else labels)
    if not masks and labels is not None:
        masks = random_split(labels, fractions, split_seed)
    stream = open_edge_stream(
        np.ascontiguousarray(_numpy(data.edge_index)),
        num_nodes=int(data.num_nodes),
        chunk_edges=chunk_edges,
        to_undirected=to_undirected,
        remove_self_loops=remove_self_loops,
    )
    features, edge_weight, edge_attr = (getattr(data, key, None) for key in ("x", "edge_weight", "edge_attr"))
    graph = GraphDataset(
        name=(name or dataset or "pyg").lower(),
        stream=stream,
        features=None if features is None else _features(features),
        labels=labels,
        masks=masks,
        edge_weight=None if edge_weight is None else _numpy(edge_weight.reshape(-1)),
        edge_features=None if edge_attr is None else _numpy(edge_attr.reshape(len(edge_attr), -1)),
    )
    return held_out(graph, hold_out)


def _weights_only(make, **options):
    """Make a data set of PyG, which reads what it cannot load otherwise by running it, unless torch is told not to."""
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


def _numpy(tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _features(x):
    """Return dense features as an array, sparse ones as CSR."""
    if not (x.is_sparse or x.is_sparse_csr):
        return _numpy(x)
    x = x.detach().cpu().to_sparse_csr()
    return CSRArrays(x.crow_indices().numpy(), x.col_indices().numpy(), x.values().numpy(), tuple(x.shape))
