"""Rows that come in batches of Arrow, of readers, queries, lazy tables and data sets: read once, and kept.

The door is Arrow's interchange protocol: anything whose `__arrow_c_stream__` gives rows of several columns. Beside it
polars' `LazyFrame` gives batches by `collect_batches`, or is collected, a data set of pyarrow by its scanner, a Delta
table by its data set, and an Iceberg table or a scan of one by its reader.
"""

import mmap
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import EdgeStreamError, GNNScaleError, disk_errors, one_line_of
from ..foreign import (
    has_all,
    is_dataset,
    is_delta_table,
    is_iceberg_scan,
    is_iceberg_table,
    is_lazy_table,
    is_row_stream,
)
from ..memory import format_bytes
from ..object_store import query_of
from ..scratch import MAKE_SPACE, nameless_file, write_at
from .parquet import BATCH_ROWS, is_text, plain_strings, plain_values

IN_MEMORY_BYTES = 64 << 20  # of what is kept of a source; more is on scratch disk


def is_streamed(source: Any) -> bool:
    """Whether a value gives its rows in batches; "duckdb:graph.db?select ..." does too."""
    return query_of(source) is not None or is_row_stream(source)


def name_of_stream(source: Any) -> str:
    """Return what a source is, for messages: a query as it is written, of anything else its type."""
    return " ".join(source.split()) if isinstance(source, str) else type(source).__name__


def open_reader(source: Any) -> pa.RecordBatchReader:
    """Begin to read a source.

    Raises:
        EdgeStreamError: it cannot be read.
    """
    try:
        if isinstance(source, str):
            from .duckdb_query import read_query

            return read_query(source)
        if is_lazy_table(source):
            return _lazy_reader(source)
        if is_delta_table(source):
            return _scan(source.to_pyarrow_dataset())
        if is_iceberg_table(source):
            return source.scan().to_arrow_batch_reader()
        if is_iceberg_scan(source):
            return source.to_arrow_batch_reader()
        if is_dataset(source):
            return _scan(source)
        return pa.RecordBatchReader.from_stream(source)
    except GNNScaleError:
        raise
    except Exception as error:  # of any library: each has errors of its own
        raise EdgeStreamError(f"{name_of_stream(source)}: cannot be read: {one_line_of(error)}") from None


def _scan(source: Any) -> pa.RecordBatchReader:
    import pyarrow.dataset

    if isinstance(source, pyarrow.dataset.Scanner):
        return source.to_reader()
    return source.scanner(batch_size=BATCH_ROWS, batch_readahead=1, fragment_readahead=1).to_reader()


def _lazy_reader(source: Any) -> pa.RecordBatchReader:
    schema = source.collect_schema().to_frame().to_arrow().schema
    if has_all(source, "collect_batches"):
        frames = source.collect_batches(chunk_size=BATCH_ROWS, maintain_order=True)
    else:
        frames = [source.collect()]
    batches = (batch for frame in frames for batch in frame.to_arrow().cast(schema).to_batches())
    return pa.RecordBatchReader.from_batches(schema, batches)


def batches_of(name: str, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a source, none of them longer than `BATCH_ROWS`; the source makes the next one when asked.

    Raises:
        EdgeStreamError: the source fails; names the row.
    """
    rows, batches = 0, iter(reader)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # of any library
            raise EdgeStreamError(f"{name}: row {rows} or later cannot be read: {one_line_of(error)}") from None
        if batch is None:
            return
        rows += batch.num_rows
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def in_memory(source: Any) -> Any:
    """Return the rows of a stream as a table of Arrow in memory; anything else as it is."""
    if not is_streamed(source):
        return source
    reader = open_reader(source)
    return pa.Table.from_batches(batches_of(name_of_stream(source), reader), reader.schema)


def kept_columns(name: str, reader: pa.RecordBatchReader, places: Iterable[int]) -> list[pa.ChunkedArray]:
    """Read a source to its end, and return some columns: in memory, above `IN_MEMORY_BYTES` mapped from scratch disk.

    Args:
        name: Of the source, for messages.
        reader: The source.
        places: Positions of the columns; their values are integers or strings.
    """
    places, kept, spool, num_bytes = list(places), [], None, 0
    for batch in batches_of(name, reader):
        columns = [_plain(name, batch.column(place)) for place in places]
        plain = pa.record_batch(columns, [str(at) for at in range(len(columns))])
        num_bytes += plain.nbytes
        kept.append(plain)
        if spool is None and num_bytes > IN_MEMORY_BYTES:
            tell_kept(name)
            spool = nameless_file(Path(tempfile.gettempdir()))
            writer = pa.ipc.new_stream(spool, plain.schema)
        if spool is not None:
            with disk_errors(tempfile.gettempdir(), "written to as scratch disk", MAKE_SPACE):
                while kept:
                    writer.write_batch(kept.pop(0))
    if spool is None:
        empty = [_plain(name, pa.array([], reader.schema.types[at])) for at in places]
        kept = kept or [pa.record_batch(empty, [str(at) for at in range(len(empty))])]
        return pa.Table.from_batches(kept).columns
    with spool, disk_errors(tempfile.gettempdir(), "read as scratch disk", MAKE_SPACE):
        writer.close()
        mapped = mmap.mmap(spool.fileno(), 0, prot=mmap.PROT_READ)  # which keeps the file
    return pa.ipc.open_stream(pa.py_buffer(mapped)).read_all().columns


def _plain(name: str, column: pa.Array) -> pa.Array:
    return plain_strings(column) if is_text(column.type) else plain_values(name, column)


class KeptRows:
    """Rows that come in chunks: in memory, above `IN_MEMORY_BYTES` in a file without a name that is then mapped.

    The dtype is the one that holds those of all chunks: integers of which some are missing become floats.

    Args:
        name: Of what they are, for messages.
    """

    def __init__(self, name: str):
        self._name, self._file = name, None
        self._chunks: list[np.ndarray] = []
        self._num_rows = self._num_bytes = 0

    def append(self, rows: np.ndarray) -> None:
        """Keep (num, ...) rows, as wide as those before."""
        if self._num_rows and rows.shape[1:] != self._shape:
            raise ValueError(
                f"row {self._num_rows}: lists have {self._shape} values, then {rows.shape[1:]}: give all as many"
            )
        if self._num_rows and rows.dtype != self._dtype:
            self._widen(np.result_type(self._dtype, rows.dtype))
            rows = rows.astype(self._dtype, copy=False)
        if not self._num_rows:
            self._chunks = []
        self._dtype, self._shape = rows.dtype, rows.shape[1:]
        self._num_rows += len(rows)
        if self._file is not None:
            self._write(self._file, rows)
            return
        self._chunks.append(rows)
        self._num_bytes += rows.nbytes
        if self._num_bytes > IN_MEMORY_BYTES:
            tell_kept(self._name)
            self._file, self._chunks = self._filed(self._chunks), []

    def rows(self) -> np.ndarray:
        """Return all of them; at least one chunk has come."""
        if self._file is None:
            return self._chunks[0] if len(self._chunks) == 1 else np.concatenate(self._chunks)
        with self._file as file:  # what maps it keeps it
            return np.memmap(file, self._dtype, "r", shape=(self._num_rows, *self._shape))

    def _widen(self, dtype: np.dtype) -> None:
        if dtype != self._dtype and self._file is None:
            self._chunks = [self.rows().astype(dtype)]
        elif dtype != self._dtype:
            before = self.rows()
            starts = range(0, len(before), BATCH_ROWS)
            self._file = self._filed(before[start : start + BATCH_ROWS].astype(dtype) for start in starts)
        self._dtype = dtype

    def _filed(self, chunks: Iterable[np.ndarray]) -> Any:
        file, self._num_bytes = nameless_file(Path(tempfile.gettempdir())), 0
        for chunk in chunks:
            self._write(file, chunk)
        return file

    def _write(self, file: Any, rows: np.ndarray) -> None:
        write_at(file, np.ascontiguousarray(rows), self._num_bytes)
        self._num_bytes += rows.nbytes


def tell_kept(name: str) -> None:
    """Say that what a source gives is kept on scratch disk."""
    warnings.warn(
        f"{name}: gives its rows once, more than {format_bytes(IN_MEMORY_BYTES)}: they are kept on scratch disk in "
        f"{tempfile.gettempdir()} while this process lives (TMPDIR names another folder)",
        stacklevel=2,
    )
