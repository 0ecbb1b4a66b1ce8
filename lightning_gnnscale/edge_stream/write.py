"""Write any stream's edges to a file that can be streamed again."""

import os
from pathlib import Path

import numpy as np

from ..errors import EdgeStreamError, disk_errors, short
from .stream import EdgeStream, Progress

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
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    write = {".bin": _write_bin, ".npy": _write_npy, ".parquet": _write_parquet}.get(path.suffix, _write_text)
    try:
        with disk_errors(path, "written", "make space, or give another path"):
            write(stream, temporary, id_type, path.suffix, progress or _silent)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _silent(what: str, done: int, total: int | None) -> None:
    pass


def _pieces(stream: EdgeStream, id_type: np.dtype, progress: Progress):
    narrows = stream.dtype.itemsize > id_type.itemsize
    for chunk in stream.chunks():
        if narrows and len(chunk.src):
            largest = max(int(chunk.src.max()), int(chunk.dst.max()))
            if largest > np.iinfo(id_type).max:
                raise EdgeStreamError(f"{stream.name}: node {largest} does not fit {id_type.name}: write int64")
        for start in range(0, len(chunk.src), _SLICE_EDGES):
            part = slice(start, start + _SLICE_EDGES)
            yield chunk.src[part], chunk.dst[part]
        progress("write edges", chunk.first_edge + len(chunk.src), stream.num_edges)


def _write_pairs(stream: EdgeStream, file, id_type: np.dtype, progress: Progress) -> None:
    for src, dst in _pieces(stream, id_type, progress):
        pairs = np.empty((len(src), 2), id_type)
        pairs[:, 0] = src
        pairs[:, 1] = dst
        file.write(memoryview(pairs).cast("B"))


def _write_bin(stream: EdgeStream, path: Path, id_type: np.dtype, suffix: str, progress: Progress) -> None:
    with open(path, "wb") as file:
        _write_pairs(stream, file, id_type, progress)


def _write_npy(stream: EdgeStream, path: Path, id_type: np.dtype, suffix: str, progress: Progress) -> None:
    _, num_edges = stream.count()
    with open(path, "wb") as file:
        header = {"descr": id_type.str, "fortran_order": False, "shape": (num_edges, 2)}
        np.lib.format.write_array_header_1_0(file, header)
        _write_pairs(stream, file, id_type, progress)


def _write_parquet(stream: EdgeStream, path: Path, id_type: np.dtype, suffix: str, progress: Progress) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow_type = pa.from_numpy_dtype(id_type)
    schema = pa.schema([("src", arrow_type), ("dst", arrow_type)])
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        for src, dst in _pieces(stream, id_type, progress):
            columns = [pa.array(end.astype(id_type, copy=False)) for end in (src, dst)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _write_text(stream: EdgeStream, path: Path, id_type: np.dtype, suffix: str, progress: Progress) -> None:
    import pyarrow as pa
    from pyarrow import csv

    delimiter = "," if suffix == ".csv" else "\t"
    arrow_type = pa.from_numpy_dtype(id_type)
    schema = pa.schema([("src", arrow_type), ("dst", arrow_type)])
    options = csv.WriteOptions(include_header=suffix == ".csv", delimiter=delimiter, quoting_style="none")
    with csv.CSVWriter(str(path), schema, write_options=options) as writer:
        for src, dst in _pieces(stream, id_type, progress):
            columns = [pa.array(end.astype(id_type, copy=False)) for end in (src, dst)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
