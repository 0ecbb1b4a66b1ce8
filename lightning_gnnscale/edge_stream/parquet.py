"""Edges in Parquet: a file, a folder or a glob of files, in the order of their paths."""

import glob
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import EdgeStreamError
from .array import native_ids
from .id_tables import Strings
from .options import LIST_NODES, StreamOptions, pick_columns, tell_unread
from .stream import EdgeStream, file_identity

BATCH_ROWS = 1 << 17
_BUFFER_BYTES = 1 << 20


class ParquetStream(EdgeStream):
    """Edges of some Parquet files, one after the other; src, dst: names or positions of the columns."""

    seekable = True

    def __init__(self, name: str, files: list[Path], src, dst, options: StreamOptions):
        self._files, self._rows = files, []
        dtypes = []
        for path in files:
            with _open(path) as file:
                names = file.schema_arrow.names
                places = pick_columns(str(path), names, src, dst)
                dtypes += [id_dtype_of(path, file.schema_arrow.field(place), options.relabel) for place in places]
                self._rows.append(file.metadata.num_rows)
                if path == files[0]:
                    tell_unread(name, names)
        if sum(self._rows) == 0:
            raise EdgeStreamError(f"{name}: the {'file holds' if len(files) == 1 else 'files hold'} no edges")
        super().__init__(name, options.out_dtype(common_dtype(dtypes)), options, sum(self._rows))
        self._src, self._dst = src, dst

    def source_files(self) -> list[Path]:
        return [Path(path) for path in self._files]

    def _identity(self) -> dict:
        return {"parquet": [file_identity(path) for path in self._files], "src": self._src, "dst": self._dst}

    def _blocks(self, first_edge: int) -> Iterator[tuple]:
        edge = 0
        for path, num_rows in zip(self._files, self._rows, strict=True):
            if edge + num_rows > first_edge:
                yield from self._file_blocks(path, max(0, first_edge - edge), edge)
            edge += num_rows

    def _file_blocks(self, path: Path, skip_rows: int, first_edge: int) -> Iterator[tuple]:
        """Yield one file's batches from a row on; row groups before it are not read."""
        with _open(path) as file:
            names = file.schema_arrow.names
            columns = [names[place] for place in pick_columns(str(path), names, self._src, self._dst)]
            group_rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            first_group = 0
            while skip_rows and skip_rows >= group_rows[first_group]:
                skip_rows -= group_rows[first_group]
                first_edge += group_rows[first_group]
                first_group += 1
            groups = list(range(first_group, len(group_rows)))
            try:
                for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
                    skipped = min(skip_rows, batch.num_rows)
                    skip_rows -= skipped
                    first_edge += skipped
                    batch = batch.slice(skipped)
                    if batch.num_rows:
                        ids = (batch.column(name) for name in columns)
                        yield tuple(arrow_ids(path, each, first_edge, self.node_ids is not None) for each in ids)
                    first_edge += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                detail = " ".join(str(error).split())
                raise EdgeStreamError(f"{path}: edge {first_edge}: damaged or cut short: {detail}") from error


def arrow_ids(name, column: pa.Array, first_edge: int, keep_uint64: bool) -> np.ndarray | Strings:
    """Return a chunk of a column in the form that streams take ids: integers, or strings of any of Arrow's types.

    `first_edge` is the position of its first row; with `keep_uint64` ids of 2**63 and above are kept as they are.

    Raises:
        EdgeStreamError: an id is missing; names the edge.
    """
    if column.null_count:
        row = column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise EdgeStreamError(f"{name}: edge {first_edge + int(row)}: the id is missing (null): leave such rows out")
    if is_text(column.type):
        return Strings.from_arrow(plain_strings(column))
    column = plain_values(name, column)
    return native_ids(f"{name}: edge {first_edge} or later", column.to_numpy(), keep_uint64)


def plain_strings(column: pa.Array) -> pa.Array:
    """Return strings of any of Arrow's types, also dictionary-encoded, as `pa.string()`; missing ones stay missing."""
    if pa.types.is_dictionary(column.type):  # there is no kernel from a dictionary of views
        column = column.dictionary.cast(pa.string()).take(column.indices)
    return column.cast(pa.string())


def plain_values(name, column):
    """Return an array of Arrow, or a chunked one, as plain values; strings may stay dictionary-encoded.

    Categories other than strings, run lengths and Arrow's booleans of a byte become the values that they hold.

    Raises:
        EdgeStreamError: a type of another library, whose stored numbers mean something else, as periods do.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.bool8":
            return column.cast(pa.bool_())
        if not is_text(kind.storage_type):
            remedy = ": give dates, .dt.to_timestamp()" if "period" in kind.extension_name else ": give plain values"
            raise EdgeStreamError(f"{name}: values are of the type {kind.extension_name}{remedy}")
        return column.cast(kind.storage_type)
    if pa.types.is_run_end_encoded(kind):
        return plain_values(name, pc.run_end_decode(column))
    if pa.types.is_dictionary(kind) and not is_text(kind):
        return column.cast(kind.value_type)
    return column


def open_parquet(path: Path, options: StreamOptions, src=None, dst=None) -> ParquetStream:
    """Stream Parquet files.

    Args:
        path: a file, a folder (all .parquet files in it, at any depth, but for names that begin with "." or "_", which
            writers use for unfinished files) or a glob of files and such folders.
        options: the options of all streams.
        src, dst: the columns' names or positions; None: "src" and "dst" or another customary pair, else the only two.

    The checksums of pages are compared where the writer left them (pyarrow: `write_page_checksum=True`). In a file
    without them, and in every file's footer, a flipped bit that gives a valid value goes unseen.
    """
    if path.is_file():
        return ParquetStream(str(path), [path], src, dst, options)
    if path.is_dir():
        files = _files_in(path)
    else:
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        others = [match.name for match in matches if match.suffix.lower() != ".parquet"]
        if others:
            raise ValueError(f"edge_stream: {path}: a glob may match .parquet files only, got {others[0]}")
        # A set, as "**" finds both a folder and the files in it.
        files = {file for match in matches for file in (_files_in(match) if match.is_dir() else [match])}
    if not files:
        raise EdgeStreamError(f"{path}: no .parquet files there")
    return ParquetStream(str(path), sorted(files), src, dst, options)


def _files_in(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*.parquet") if path.is_file()]
    return [path for path in files if not any(n.startswith((".", "_")) for n in path.relative_to(folder).parts)]


def _open(path: Path) -> pq.ParquetFile:
    if path.stat().st_size == 0:
        raise EdgeStreamError(f"{path}: the file is empty")
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        detail = " ".join(str(error).split())
        raise EdgeStreamError(f"{path}: damaged, cut short or not a Parquet file: {detail}") from error


def is_text(arrow_type: pa.DataType) -> bool:
    """Whether a type of Arrow holds strings, plain or dictionary-encoded."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(arrow_type) for is_kind in kinds)


def common_dtype(dtypes: list[np.dtype]) -> np.dtype:
    """Return the integer dtype of ids that come in several."""
    common = np.result_type(*dtypes)
    # uint64 beside a signed type: ids above int64 are refused where they occur
    return np.dtype(np.int64) if common.kind == "f" else common


def id_dtype_of(name, field: pa.Field, relabel: bool) -> np.dtype:
    """Return the integer dtype of a column, int64 for strings that will be numbered; EdgeStreamError for others."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if pa.types.is_integer(kind):
        return np.dtype(kind.to_pandas_dtype())
    if is_text(field.type):
        if relabel:
            return np.dtype(np.int64)
        raise EdgeStreamError(
            f"{name}: column {field.name!r} holds strings; pass relabel=True to number arbitrary ids{LIST_NODES}"
        )
    raise EdgeStreamError(
        f"{name}: column {field.name!r} must hold integers, or strings with relabel=True, got {field.type}: cast it, "
        f"in a query {field.name}::bigint"
    )
