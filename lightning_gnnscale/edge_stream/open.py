"""Two doors: one function that opens every edge source, one that writes any stream's edges to a file."""

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ..errors import EdgeStreamError, short
from ..foreign import (
    has_all,
    is_array,
    is_hetero,
    is_pair_of_arrays,
    is_pyg,
    is_row_stream,
    is_sparse,
    is_table,
    is_tabular,
)
from ..object_store import is_url, local_copy, query_of
from ..system import whole_file
from .adjacency import AdjacencyStream, open_adjacency, told
from .array import ArrayStream, open_array, open_bin, open_npy, write_npy_header
from .options import CHUNK_EDGES, StreamOptions
from .relabel import NodeIds
from .stream import EdgeStream, Progress
from .synthetic import SyntheticGraph


def open_pyg(data, options: StreamOptions) -> EdgeStream:
    """Stream `data.edge_index` (2, num_edges), or `data.adj_t`; num_nodes defaults to the data's own.

    Raises:
        EdgeStreamError: the data has neither, or they are not integers, or it has several node types or edge types.
    """
    name = type(data).__name__
    if is_hetero(data):
        raise EdgeStreamError(f"{name}: {ONE_NODE_TYPE}")
    edge_index, adj_t = getattr(data, "edge_index", None), getattr(data, "adj_t", None)
    if edge_index is None and adj_t is None:
        raise EdgeStreamError(f"{name}: has neither edge_index nor adj_t, so no edges: set one of them")
    if edge_index is None:
        return told(AdjacencyStream(f"{name}.adj_t", adj_t, options, transposed=True))
    if options.num_nodes is None and not options.relabel:
        options = dataclasses.replace(options, num_nodes=_known_num_nodes(data))
    return ArrayStream(f"{name}.edge_index", edge_index, options)


ONE_NODE_TYPE = (
    "a stream has edges of one type: gs.dataset.load_pyg(data) reads several, or data.to_homogeneous() joins them"
)


def _known_num_nodes(data) -> int | None:
    """Return the data's own number of nodes, without PyG's guess from the largest id."""
    keys = data.keys() if has_all(data, "keys") else ()
    if "num_nodes" in keys and data.num_nodes is not None:
        return int(data.num_nodes)
    values = (data[key] for key in ("x", "y", "pos", "train_mask") if key in keys)
    return next((int(value.shape[0]) for value in values if is_array(value) and len(value.shape) > 0), None)


_ALLOWED = ".npy, .bin, .csv, .tsv, .txt (these three also with .gz), .parquet, a folder or glob of .parquet"


def open_edge_stream(
    source,
    num_nodes: int | None = None,
    chunk_edges: int = CHUNK_EDGES,
    layout: str = "auto",
    to_undirected: bool = False,
    remove_self_loops: bool = False,
    relabel: bool | None = None,
    nodes=None,
    storage_options: Mapping | None = None,
    **reader_options,
) -> EdgeStream:
    """Open a source of edges as a stream.

    Args:
        source: A path (.npy of shape (2, num_edges) or (num_edges, 2); raw .bin; .csv, .tsv, .txt, also with .gz;
            .parquet, a folder or a glob of them); a URL of one of these, such as s3://bucket/edges.csv, which is
            fetched to this machine once, see `local_copy`; a PyG `Data`; a (2, num_edges) or (num_edges, 2) array or
            tensor, or a pair of (num_edges,) ones; a table of pandas, polars or Arrow, or a pair of its columns; what
            gives rows by `__arrow_c_stream__`, as readers of Arrow and relations of DuckDB do, a lazy table of polars,
            a data set of pyarrow, or a query such as "duckdb:graph.db?select src, dst from follows": these are read
            when they are opened, see `kept_columns` and `read_query`; a sparse matrix of SciPy or torch, whose entry
            (i, j) is an edge from i to j; a `SyntheticGraph`.
        num_nodes: Upper bound of the ids, exclusive; None: counted by the first whole pass (`stream.count()`).
        chunk_edges: Edges per chunk, >= 1.
        layout: "once", "both_ways", "directed", or "auto" (consumers find out).
        to_undirected, remove_self_loops: Instructions for consumers; the stream itself yields the source's edges
            unchanged.
        relabel: Whether ids are arbitrary 64-bit integers or strings; None: where nodes are given. They are then
            numbered by first appearance.
            `stream.node_ids` keeps them and is complete once the stream was read (`stream.count()`). Rows of features
            and labels are in that order: `stream.node_ids.index_of(ids)` gives the row of each id.
        nodes: The id of each row of features, labels and masks, each once: (num_nodes,) array, list, column of a
            table, path of .npy or of a column, "nodes.csv:id" (.parquet, .csv, .tsv). Ids are then numbered by their
            rows, and edges of others refused.
        storage_options: Options of the file system of a URL, see `ObjectStore`.
        reader_options: Options for one kind of source. .bin: dtype="int32", bin_layout="pairs" | "columns". Text:
            separator, comment, header, src, dst, id_type. Parquet and tables: src, dst. "auto": detected.

    Returns:
        The stream. The source is open and its shape is checked; its edges are checked while they are read.

    Raises:
        EdgeStreamError: the source is missing, empty or damaged, or holds no edges.
        ObjectStoreError: a URL is not reachable, or nothing exists there.
        ValueError: an option or this kind of source is not supported.
    """
    relabel = nodes is not None if relabel is None else relabel
    options = StreamOptions(num_nodes, chunk_edges, layout, to_undirected, remove_self_loops, relabel)
    if is_url(source):
        source = local_copy(source, storage_options)
    if nodes is not None and not relabel:
        raise ValueError("nodes goes with relabel=True, or without relabel: False says that ids are row numbers")
    kind, reader, opened = _reader_of(source)
    found = [name for name, value in reader_options.items() if isinstance(value, str) and value == "auto"]
    reader_options = {name: value for name, value in reader_options.items() if name not in found}
    _check_reader_options(kind, reader, reader_options)
    try:
        stream = reader(opened, options, **reader_options)
        if nodes is not None:
            stream.list_nodes(nodes if isinstance(nodes, NodeIds) else listed_nodes(nodes))
        return stream
    except OSError as error:
        raise EdgeStreamError(f"{error.filename or source}: cannot be read: {error.strerror or error}") from error


def listed_nodes(nodes, where: str = "nodes") -> NodeIds:
    """Return the ids of all nodes, see `table.listed_ids`; errors say where they were given."""
    from .table import listed_ids  # imports pyarrow

    try:
        return listed_ids(nodes)
    except (ValueError, EdgeStreamError) as error:
        raise ValueError(f"{where}: {str(error).removeprefix('nodes: ')}") from None


def _reader_of(source) -> tuple[str, Callable, object]:
    """Return (kind for messages, function that opens it, its argument)."""
    if isinstance(source, SyntheticGraph):
        return "a synthetic graph", _open_synthetic, source
    if isinstance(source, str | os.PathLike) and query_of(source) is None:
        return _reader_of_path(Path(source))
    if is_pyg(source):
        return "PyG data", open_pyg, source
    if is_sparse(source):
        return "a sparse matrix", open_adjacency, source
    given = _table_reader(source)
    if given is not None:
        return given
    if is_pair_of_arrays(source) or is_array(source):
        return "an array", open_array, source
    raise ValueError(
        f"edge_stream: source must be a path ({_ALLOWED}), PyG Data, an array or tensor of shape (2, num_edges), a "
        f"pair of arrays, a table, a sparse matrix or a SyntheticGraph, got {type(source).__name__}"
    )


def _table_reader(source) -> tuple[str, Callable, object] | None:
    """Return the reader of a table, of a pair of columns, or of arrays of strings; None for another source."""
    if query_of(source) is not None or is_row_stream(source):
        from .table import open_rows

        return "a query" if isinstance(source, str) else "rows in batches", open_rows, source
    ends = source if isinstance(source, tuple | list) and len(source) == 2 else [source]
    if not any(map(is_tabular, ends)):
        return None
    from .table import open_columns, open_table

    if is_table(source):
        return "a table", open_table, source
    return "columns", open_columns, source


def _reader_of_path(path: Path) -> tuple[str, Callable, Path]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = suffixes[-1] if suffixes else ""
    is_text = suffix in (".csv", ".tsv", ".txt")
    if suffix == ".gz":
        is_text = len(suffixes) < 2 or suffixes[-2] in (".csv", ".tsv", ".txt")
    is_glob = any(mark in str(path) for mark in "*?[") and not path.exists()
    if not is_glob and not path.exists():
        raise EdgeStreamError(f"{path}: no such file or folder{_near_names(path)}")
    if is_glob or path.is_dir() or suffix == ".parquet":
        from .parquet import open_parquet

        return ".parquet", open_parquet, path
    if is_text:
        from .text import open_text

        return "text", open_text, path
    if suffix == ".npy":
        return ".npy", open_npy, path
    if suffix == ".bin":
        return ".bin", open_bin, path
    raise ValueError(f"edge_stream: {path}: a path must be {_ALLOWED}, got {''.join(path.suffixes) or 'no suffix'!r}")


def _near_names(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (nor the folder {folder})"
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; {folder} has {', '.join(near)}" if near else f"; nothing in {folder} has a similar name"


def _check_reader_options(kind: str, reader: Callable, given: dict) -> None:
    allowed = list(inspect.signature(reader).parameters)[2:]
    for name in given:
        if name not in allowed:
            says = f"allowed: {', '.join(allowed)}" if allowed else "it has none of its own"
            if name.startswith(("edge_", "weight")):
                says += "; values of edges are given beside the stream: PartitionDataModule(edge_weight=)"
            raise ValueError(f"edge_stream: unknown option {name!r} for {kind}; {says}")


def _open_synthetic(graph: SyntheticGraph, options: StreamOptions) -> EdgeStream:
    layout = "once" if options.layout == "auto" else options.layout
    return graph.stream(
        options.chunk_edges,
        layout,
        num_nodes=options.num_nodes,
        to_undirected=options.to_undirected,
        remove_self_loops=options.remove_self_loops,
        relabel=options.relabel,
    )


WRITE_SUFFIXES = (".bin", ".npy", ".parquet", ".csv", ".tsv", ".txt")
_SLICE_EDGES = 1 << 17


def write_edges(
    stream: EdgeStream, path: str | os.PathLike, dtype: str | None = None, progress: Progress | None = None
) -> Path:
    """Write a stream's edges in their order, whole or not at all.

    Args:
        stream: any stream; its `to_undirected` and `remove_self_loops` are not applied.
        path: .bin (pairs of raw ids), .npy ((num_edges, 2)), .parquet (columns src, dst, with checksums), .csv (header
            src,dst), .tsv or .txt (no header).
        dtype: "int32" or "int64"; None: the stream's.
        progress: called as (what, edges done, num_edges).

    Returns:
        The path.

    Raises:
        ValueError: another suffix or dtype.
        EdgeStreamError: the stream cannot be read, or an id does not fit the dtype.
        GNNScaleError: the disk is full, or cannot be written to.
    """
    path = Path(path)
    if path.suffix not in WRITE_SUFFIXES:
        raise ValueError(f"write_edges: path must end in one of {', '.join(WRITE_SUFFIXES)}, got {short(path.name)}")
    id_type = stream.dtype if dtype is None else np.dtype(dtype).newbyteorder("=")
    if id_type.name not in ("int32", "int64"):
        raise ValueError(f"write_edges: dtype must be int32 or int64, got {id_type.name}")
    if path.suffix == ".npy":
        stream.count()
    pieces = _pieces(stream, id_type, progress)
    with whole_file(path) as file:
        if path.suffix not in (".bin", ".npy"):
            _write_table(file, path.suffix, id_type, pieces)
            return path
        if path.suffix == ".npy":
            write_npy_header(file, (stream.num_edges, 2), id_type)
        for ends in pieces:
            file.write(memoryview(np.stack(ends, axis=1).astype(id_type, copy=False)).cast("B"))
    return path


def _write_table(file, suffix: str, id_type: np.dtype, pieces: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    schema = pa.schema([(end, pa.from_numpy_dtype(id_type)) for end in ("src", "dst")])
    if suffix == ".parquet":
        writer = pa.parquet.ParquetWriter(file, schema, write_page_checksum=True)
    else:
        form = {"include_header": suffix == ".csv", "delimiter": "," if suffix == ".csv" else "\t"}
        writer = pa.csv.CSVWriter(file, schema, write_options=pa.csv.WriteOptions(**form, quoting_style="none"))
    with writer:
        for ends in pieces:
            columns = [pa.array(end.astype(id_type, copy=False)) for end in ends]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _pieces(stream: EdgeStream, id_type: np.dtype, progress: Progress | None) -> Iterator[tuple]:
    narrows = stream.dtype.itemsize > id_type.itemsize
    for chunk in stream.chunks():
        if narrows and len(chunk.src):
            largest = max(int(chunk.src.max()), int(chunk.dst.max()))
            if largest > np.iinfo(id_type).max:
                raise EdgeStreamError(f"{stream.name}: node {largest} does not fit {id_type.name}: write int64")
        for start in range(0, len(chunk.src), _SLICE_EDGES):
            part = slice(start, start + _SLICE_EDGES)
            yield chunk.src[part], chunk.dst[part]
        if progress is not None:
            progress("write edges", chunk.first_edge + len(chunk.src), stream.num_edges)
