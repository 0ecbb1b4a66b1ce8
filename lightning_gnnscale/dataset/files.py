"""A user's own graph: an edge file, and arrays for what belongs to the nodes."""

import functools
import inspect
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ..edge_stream import open_edge_stream
from ..edge_stream.open import listed_nodes
from ..edge_stream.options import split_columns, table_path
from ..errors import UNREADABLE, short, why_no_array
from ..keywords import passes_on
from ..object_store import graph_name, query_of
from .columns import local_path, masks_by_name, named_file
from .graph_dataset import GraphDataset, as_mask
from .hetero_edges import column_of, header_of, numbered
from .split import held_out, random_split


def _naming_files(function: Callable) -> Callable:
    """Add the file's path to a ValueError that begins with the name of an argument which is one."""

    @functools.wraps(function)
    def load(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            told, given = str(error), inspect.signature(function).bind(*args, **kwargs).arguments
            paths = {key: path for key, path in given.items() if isinstance(path, str | os.PathLike)}
            path = next((str(path) for key, path in paths.items() if re.match(rf"{key}\b", told)), None)
            if path is None or str(named_file(path)) in told or type(error) is not ValueError:
                raise
            raise ValueError(f"{told} (file {path})") from error

    return load


@_naming_files
@passes_on(open_edge_stream, to_undirected=True)
def load_files(
    edges: str,
    features: str | None = None,
    labels: str | None = None,
    train_mask: str | None = None,
    val_mask: str | None = None,
    test_mask: str | None = None,
    edge_weight: str | None = None,
    edge_features: str | None = None,
    nodes: str | None = None,
    num_classes: int | None = None,
    name: str | None = None,
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15),
    split_seed: int = 0,
    reader: dict | None = None,
    hold_out: dict | None = None,
    masks: str | None = None,
    edge_label: str | None = None,
    regression: bool = False,
    edge_type: str | None = None,
    **stream_options,
) -> GraphDataset:
    """Open a graph from files; features, labels and masks stay in them, and are mapped.

    Any of them may be a URL, for example s3://bucket/x.npy: it is fetched to this machine once, see `local_copy`.

    Args:
        edges: .npy, .bin, .csv, .tsv, .txt (also .gz), .parquet, a folder of parquet, or a glob.
        features: .npy of (num_nodes, dim), memory-mapped; this and all that follow also .parquet, .csv or .tsv (these
            two also with .gz), which are read into memory: "nodes.csv:label" names a column, "nodes.csv:a,b" several.
        labels: (num_nodes,) integers, -1 = unknown, or (num_nodes, num_labels) of 0, 1 and -1.
        train_mask, val_mask, test_mask: (num_nodes,) bool, or of node ids, each once, as the edges name them. With none
            of them the labelled nodes are split at random by `fractions` and `split_seed`.
        edge_weight, edge_features: (num_edges,) and (num_edges, dim), by position of the edge.
        nodes: (num_nodes,) ids, each once: which node each row of the other files describes; with relabel, which it
            implies, features, labels and bool masks need it.
        num_classes: None counts them in the labels.
        name: None takes the edge file's, without its suffix, or its folder's where the file is called edges.
        reader: options of the edge reader, for example {"dtype": "int32"} for .bin.
        hold_out: edges held out as links, arguments of `hold_out_edges` by name, or None.
        masks: Instead of train_mask, val_mask and test_mask, a column of the words train, val and test, such as
            "nodes.csv:split", see `GraphDataset`.
        edge_label: (num_edges,) classes of edges, -1 = unknown, by position of the edge.
        regression: Whether labels are numbers to predict, see `GraphDataset`.
        edge_type: (num_edges,) names or integers, the type of each edge: a column of the edge file, such as
            "edge_type", or a file. Edge types are numbered in sorted order; added reverses have types of their own.
        stream_options: num_nodes (None takes the rows of the features or labels, else counts them), relabel (ids in the
            edge file are any 64-bit integers or strings; None: where nodes are given), to_undirected, here true
            by default, and the others of `open_edge_stream`.

    Raises:
        FileNotFoundError, ValueError: one line that names the key and the file.
    """
    if reader is not None and not isinstance(reader, Mapping):
        raise ValueError(f"reader must be options by name like {{dtype: int32}}, got {short(reader)}")
    type_column, edge_type = edge_type, None if edge_type is None else column_of(edges, edge_type)
    given = {
        "features": features,
        "labels": labels,
        "train_mask": train_mask,
        "val_mask": val_mask,
        "test_mask": test_mask,
        "edge_weight": edge_weight,
        "edge_features": edge_features,
        "edge_label": edge_label,
        "edge_type": edge_type,
        "masks": masks,
        "nodes": nodes,
    }
    storage_options = stream_options.get("storage_options")
    given = {key: local_path(path, storage_options) for key, path in given.items() if path is not None}
    masks, nodes, edge_type = given.pop("masks", None), given.pop("nodes", None), given.get("edge_type")
    arrays = {key: _load(key, path) for key, path in given.items()}
    # As paths where they are mapped: spawned processes open the files instead of receiving the rows.
    rows = {key: arrays[key] if _in_memory(path) else path for key, path in given.items()}
    arrays |= _of_words(masks, [key for key in arrays if key.endswith("_mask")])
    num_nodes, relabel = stream_options.pop("num_nodes", None), stream_options.pop("relabel", None)
    relabel = nodes is not None if relabel is None else relabel
    _check_named(arrays, needs_nodes=relabel and nodes is None)
    node_ids = None if nodes is None else listed_nodes(nodes)
    known = {"num_nodes": num_nodes, "nodes": None if node_ids is None else len(node_ids)}
    num_rows = _num_rows(arrays, known)
    if num_nodes is None:
        num_nodes = num_rows if node_ids is None else len(node_ids)
    stream_options |= {"num_nodes": num_nodes, "relabel": relabel, "nodes": node_ids}
    with warnings.catch_warnings():
        if edge_type is not None:  # not "edge_type: not read with the edges": it is read separately
            column = re.escape(split_columns(edge_type)[1] or str(type_column))
            warnings.filterwarnings("ignore", rf".*: {column}: not read with the edges")
        stream = open_edge_stream(edges, **stream_options, **{**header_of(edges, edge_type), **(reader or {})})
    if num_nodes is None or (relabel and node_ids is None and any(key.endswith("_mask") for key in arrays)):
        num_nodes, _ = stream.count()
    label_array = arrays.get("labels")
    split = {key[:-5]: as_mask(key, arrays[key], num_nodes, stream.node_ids) for key in arrays if key.endswith("_mask")}
    if not split and label_array is not None:
        split = random_split(label_array, fractions, split_seed, regression)
    types, schema = (None, None) if edge_type is None else numbered(arrays["edge_type"], edge_type)
    dataset = GraphDataset(
        name=name or graph_name(edges),
        stream=stream,
        features=rows.get("features"),
        labels=label_array,
        masks=split,
        num_classes=num_classes,
        edge_weight=rows.get("edge_weight"),
        edge_features=rows.get("edge_features"),
        edge_label=arrays.get("edge_label"),
        regression=regression,
        edge_type=types,
        schema=schema,
        source={key: _stamp(given[key]) for key in ("features", "labels") if key in given},
    )
    return held_out(dataset, hold_out)


def _of_words(masks: str | None, others: list[str]) -> dict[str, np.ndarray]:
    """Return the masks of a column of words, by their keys."""
    if masks is None:
        return {}
    if others:
        raise ValueError(f"masks: {others[0]} is given too: leave one of them out")
    if not named_file(masks).is_file():
        raise FileNotFoundError(f"masks: no file {named_file(masks)}")
    return {f"{name}_mask": mask for name, mask in masks_by_name(masks).items()}


def _check_named(arrays: dict[str, np.ndarray], needs_nodes: bool) -> None:
    """Refuse rows without the ids of their nodes."""
    by_row = [key for key in arrays if key in ("features", "labels")]
    by_row += [key for key in arrays if key.endswith("_mask") and arrays[key].dtype == bool]
    if by_row and needs_nodes:
        raise ValueError(
            f"nodes: with relabel=True nothing says which node each row of {by_row[0]} describes; give the id of each "
            "row instead of relabel: a .npy, or a column of a Parquet or CSV file: nodes=nodes.csv:id"
        )


def _num_rows(arrays: dict[str, np.ndarray], known: dict[str, int | None]) -> int | None:
    """Return the rows of features and labels, None without them; all known numbers must agree."""
    rows = {key: len(arrays[key]) for key in ("features", "labels") if key in arrays}
    counts = rows | {key: count for key, count in known.items() if count is not None}
    if len(set(counts.values())) > 1:
        if len(counts) == 2 and len(rows) == 2:
            masks = [key for key, array in arrays.items() if key.endswith("_mask") and array.dtype == bool]
            counts |= {key: len(arrays[key]) for key in masks}
        common, votes = Counter(counts.values()).most_common(1)[0]
        if len(rows) == 1:
            common, votes = next(count for key, count in counts.items() if key not in rows), 2
        odd = [key for key, count in counts.items() if count != common]
        if votes > 1 and len(odd) == 1:
            others = ", ".join(f"{key} {common}" for key in counts if key not in odd)
            raise ValueError(f"{odd[0]}: {counts[odd[0]]} rows, but {others}; one a node")
        listed = ", ".join(f"{key} {count}" for key, count in counts.items())
        raise ValueError(f"numbers of nodes differ: {listed}; give each one row a node")
    return next(iter(rows.values()), None)


def _in_memory(path: str) -> bool:
    return table_path(path) is not None or query_of(path) is not None


def _load(key: str, path: str) -> np.ndarray:
    if not named_file(path).is_file():
        raise FileNotFoundError(f"{key}: no file {named_file(path)}")
    if _in_memory(path):
        from ..edge_stream.table import ids_or_rows, rows_of

        try:
            rows = ids_or_rows(path) if key.endswith("_mask") or key == "edge_type" else rows_of(path)
            return rows[:, None] if key in ("features", "edge_features") and rows.ndim == 1 else rows  # one column
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    try:
        array = np.load(path, mmap_mode="r")
    except UNREADABLE as error:
        told = why_no_array(error)
        raise ValueError(f"{key}: {path} is not a .npy file that numpy can map ({told})") from None
    if not isinstance(array, np.ndarray):
        names = ", ".join(array.files)
        array.close()
        raise ValueError(f"{key}: {path} is an archive of {names or 'nothing'}; save one of them with numpy.save")
    return array


def _stamp(path: str) -> list:
    stat = named_file(path).stat()
    return [str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns]
