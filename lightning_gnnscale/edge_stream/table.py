"""Tables and columns in memory, of pandas, polars and Arrow: their edges as a stream, their rows as arrays."""

import gzip
import hashlib
import os
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from ..errors import EdgeStreamError, one_line_of
from ..foreign import (
    has_all,
    is_array,
    is_column,
    is_pandas,
    is_polars_table,
    is_table,
    name_of,
    speaks_arrow,
    torch_layout,
)
from ..object_store import query_of
from ..values import of_tensor
from .array import open_array
from .arrow_rows import KeptRows, batches_of, in_memory, is_streamed, kept_columns, name_of_stream, open_reader
from .options import StreamOptions, pick_columns, table_path, tell_unread
from .parquet import BATCH_ROWS, arrow_ids, common_dtype, id_dtype_of, is_text, plain_strings, plain_values
from .relabel import NodeIds
from .stream import EdgeStream, file_identity

_PAIR = "a pair of columns"


def as_column(source: Any) -> pa.ChunkedArray:
    """Return a column, or a list or numpy array of strings, as Arrow's; numbers and Arrow's own strings are shared.

    Raises:
        EdgeStreamError: Arrow cannot hold it, or its numbers mean something else, see `plain_values`.
    """
    return plain_values(name_of(source, type(source).__name__), _arrow_column(source))


def _arrow_column(source: Any) -> pa.ChunkedArray:
    try:
        if isinstance(source, pa.Array):
            return pa.chunked_array([source])
        if isinstance(source, pa.ChunkedArray):
            return source
        if speaks_arrow(source):
            return pa.chunked_array(source)
        values = source.to_numpy() if has_all(source, "to_numpy") else np.asarray(of_tensor(source))
        return pa.chunked_array([pa.array(values.tolist() if values.dtype.kind in "UT" else values)])
    except (pa.ArrowException, TypeError) as error:
        raise EdgeStreamError(
            f"{type(source).__name__}: Arrow cannot hold it as a column: {one_line_of(error)}"
        ) from None


def table_columns(table: Any, names: list[int]) -> list[pa.ChunkedArray]:
    """Return some columns of a table, by position; their memory is shared where Arrow can take it."""
    if isinstance(table, pa.Table):
        return [as_column(table.column(place)) for place in names]
    if is_pandas(table):  # of pandas: the other columns need not be of Arrow's types
        return [as_column(table.iloc[:, place]) for place in names]
    if is_polars_table(table):  # of polars
        return [as_column(table.get_column(list(table.columns)[place])) for place in names]
    return [as_column(pa.table(table).column(place)) for place in names]


def column_names(table: Any) -> list[str]:
    """Return the names of a table's columns, as text."""
    names = table.column_names if isinstance(table, pa.Table) else table.columns
    return [str(name) for name in names]


def rows_of(values: Any) -> Any:
    """Return a table as (num_rows, num_columns), a column as (num_rows,), or of lists of one length two axes.

    Numbers of one column, lists of one length, and tables of pandas that hold one block are shared; others are copied.
    Missing numbers become NaN. A table of one column is a column, one of dates datetime64. Tensors become arrays that
    share their memory.

    Args:
        values: A table or a column of pandas, polars or Arrow; rows in batches, see `open_reader`, which are mapped
            from scratch disk above 64 MiB; a tensor; a path of a Parquet, .csv or .tsv file, see `table_path`, which is
            read whole; a query, see `read_query`; anything else is returned as it is.

    Raises:
        ValueError: a column or a file holds no numbers.
    """
    if is_streamed(values):
        return _rows_of_stream(values)
    if isinstance(values, str | os.PathLike):
        found = table_path(values)
        if found is None:
            return values
        path, values = values, read_table(*found)
        if found[1] is None:
            _check_numbers(path, values)
    if torch_layout(values) == "strided":
        return of_tensor(values)
    if is_column(values):
        return _numbers(as_column(values), name_of(values, "values"), dates=True)
    if not is_table(values):
        return values
    if is_pandas(values) and len(set(values.dtypes)) == 1 and len(values.columns) > 1:
        rows = values.to_numpy()  # of one block: shared
        if rows.dtype != object:
            return rows
    names = column_names(values)
    columns = table_columns(values, list(range(len(names))))
    alone = len(columns) == 1
    rows = [_numbers(column, name, dates=alone) for column, name in zip(columns, names, strict=True)]
    return rows[0] if len(rows) == 1 else np.column_stack(rows)


def _rows_of_stream(source: Any) -> np.ndarray:
    """Return the rows of a stream as those of a table; above 64 MiB they are mapped from scratch disk."""
    name, reader = name_of_stream(source), open_reader(source)
    kept = KeptRows(name)
    try:
        kept.append(rows_of(reader.schema.empty_table()))
        for batch in batches_of(name, reader):
            kept.append(rows_of(pa.Table.from_batches([batch])))
    except (ValueError, EdgeStreamError) as error:
        raise ValueError(str(error) if name in str(error) else f"{name}: {error}") from None
    return kept.rows()


def ids_or_rows(path: str | os.PathLike) -> np.ndarray:
    """Return one column of a table file: strings as an array of objects, else numbers as `rows_of` gives them."""
    table = in_memory(path) if is_streamed(path) else read_table(*_named_columns(path), of_ids=True)
    if table.num_columns == 1 and is_text(table.column(0).type):
        return table.column(0).to_numpy()
    return rows_of(table)


def marked_by_words(values: Any, words: dict[str, list[str]]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return a mask for each name, true where a column holds one of its words, and up to five other words of it.

    Args:
        values: (num_nodes,) strings: an array, a list, a column or a table of one, or the path of a column.
        words: What to look for, in small letters, by name; case and surrounding blanks are ignored.

    Raises:
        ValueError, EdgeStreamError: the values are not strings, or several columns.
    """
    values = in_memory(values)
    if isinstance(values, str | os.PathLike):
        values = read_table(*_named_columns(values), of_ids=True)
    column = as_column(_only_column(values, "words") if is_table(values) else values)
    if not is_text(column.type):
        raise ValueError(f"must be words, {', '.join(words)}, got {column.type}")
    column = pa.chunked_array([plain_strings(piece) for piece in column.chunks], pa.string())
    column = pc.utf8_lower(pc.utf8_trim_whitespace(column))
    masks = {name: pc.is_in(column, pa.array(known)).to_numpy() for name, known in words.items()}
    others = (word for word in column.unique().to_pylist() if word and word not in {*chain(*words.values())})
    return masks, list(islice(others, 5))


def _only_column(table: Any, of: str) -> pa.ChunkedArray:
    names = column_names(table)
    if len(names) != 1:
        raise ValueError(f"must be one column of {of}, got the columns {', '.join(names)}: choose one")
    return table_columns(table, [0])[0]


def _named_columns(path: str | os.PathLike) -> tuple[Path, list[str] | None]:
    """Return the file and columns of a path of ids; a text file must name one: its first line could be an id."""
    file, columns = table_path(path)
    if columns is None and not _is_parquet(file):
        raise ValueError(f"{path}: name a column of it, {path}:COLUMN; it has {', '.join(_header(file)[0])}")
    return file, columns


def _holds_numbers(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _check_numbers(path: str | os.PathLike, table: pa.Table) -> None:
    """Refuse a file that is read whole and has columns without numbers; the error lists those with numbers."""
    other = next((field for field in table.schema if not _holds_numbers(field.type)), None)
    if other is None:
        return
    numbers = [field.name for field in table.schema if _holds_numbers(field.type)]
    told = f"{path}: column {other.name!r} holds {other.type}, not numbers"
    if not numbers:
        raise ValueError(f"{told}, nor does any other column: {', '.join(table.column_names)}")
    raise ValueError(f"{told}: name columns, as {path}:{numbers[-1]}; numbers are in {', '.join(numbers)}")


def _numbers(column: pa.ChunkedArray, name: str, dates: bool = False) -> np.ndarray:
    kind = column.type
    if dates and (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return column.to_numpy()  # a missing one is NaT
    if pa.types.is_fixed_size_list(kind):
        if column.null_count:
            raise ValueError(f"column {name!r} has rows without values: fill them in")
        flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], kind.value_type)
        return _numbers(flat, name).reshape(len(column), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = {len(row) for chunk in column.chunks for row in chunk}
        if column.null_count or len(lengths) > 1:
            raise ValueError(f"column {name!r} holds lists of several lengths: give each row as many numbers")
        return _numbers(column.cast(pa.list_(kind.value_type, lengths.pop() if lengths else 0)), name)
    if pa.types.is_dictionary(kind) or not (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    ):
        raise ValueError(
            f"column {name!r} must hold numbers or booleans, got {kind}: number such values, as pandas does by "
            '.astype("category").cat.codes'
        )
    if column.null_count and pa.types.is_boolean(kind):
        raise ValueError(f"column {name!r} has rows without a value: fill them in with true or false")
    if column.num_chunks == 1 and not column.null_count and not pa.types.is_boolean(kind):
        return column.chunk(0).to_numpy()
    return column.to_numpy()


class TableStream(EdgeStream):
    """Edges of two columns, integers, or strings with relabel, which are shared; chunks are copies.

    Args:
        name: For messages.
        ends: The columns.
        options: The options of all streams.
        query: Database and SQL that the columns are read by, which identify them; None: their values do.
    """

    seekable = True

    def __init__(
        self,
        name: str,
        ends: tuple[pa.ChunkedArray, pa.ChunkedArray],
        options: StreamOptions,
        query: tuple | None = None,
    ):
        self._ends, self._query = ends, query
        if len(ends[0]) != len(ends[1]):
            raise EdgeStreamError(f"{name}: src has {len(ends[0])} rows, dst {len(ends[1])}; one an edge")
        fields = [pa.field(end, column.type) for end, column in zip(("src", "dst"), ends, strict=True)]
        dtypes = [id_dtype_of(name, field, options.relabel) for field in fields]
        super().__init__(name, options.out_dtype(common_dtype(dtypes)), options, len(ends[0]))
        self._state = None if query is None else file_identity(query[0])

    def source_files(self) -> list[Path]:
        return [] if self._query is None else [Path(self._query[0])]

    def _identity(self) -> dict:
        if self._query is not None:
            return {"database": self._state, "query": self._query[1]}
        digest = hashlib.sha256()
        for start in range(0, self.num_edges, BATCH_ROWS):
            for column in self._ends:
                piece = column.slice(start, BATCH_ROWS).combine_chunks()
                if is_text(column.type):
                    piece = piece.cast(pa.large_string()) if not pa.types.is_large_string(column.type) else piece
                    digest.update("\0".join(piece.to_pylist()).encode())
                else:
                    digest.update(piece.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
        return {"array": digest.hexdigest(), "num_edges": self.num_edges}

    def _blocks(self, first_edge: int) -> Iterator[tuple]:
        for start in range(first_edge, self.num_edges, BATCH_ROWS):
            pieces = (column.slice(start, BATCH_ROWS).combine_chunks() for column in self._ends)
            yield tuple(arrow_ids(self.name, piece, start, self.node_ids is not None) for piece in pieces)


def open_table(
    source, options: StreamOptions, src: str | int | None = None, dst: str | int | None = None
) -> EdgeStream:
    """Stream a DataFrame of pandas or polars, or a Table of Arrow; src, dst: see `pick_columns`."""
    name, names = type(source).__name__, column_names(source)
    places = pick_columns(name, names, src, dst)
    tell_unread(name, names)
    return TableStream(name, tuple(table_columns(source, list(places))), options)


def open_rows(source, options: StreamOptions, src: str | int | None = None, dst: str | int | None = None) -> EdgeStream:
    """Read two columns of what gives its rows in batches, see `open_reader`, and stream them; src, dst: `pick_columns`.

    Cost: the two columns in memory up to 64 MiB, of scratch disk above; a batch of the source at a time.
    """
    name, reader = name_of_stream(source), open_reader(source)
    names = [str(column) for column in reader.schema.names]
    places = pick_columns(name, names, src, dst)
    for place in places:
        id_dtype_of(name, reader.schema.field(place), options.relabel)
    tell_unread(name, names)
    query = query_of(source)
    found = None if query is None else (query[0], f"{query[1]} {places}")
    return TableStream(name, tuple(kept_columns(name, reader, places)), options, found)


def open_columns(source, options: StreamOptions) -> EdgeStream:
    """Stream a pair of columns, or arrays of strings: a pair, (2, num_edges) or (num_edges, 2)."""
    if is_array(source) and len(source.shape) == 2 and 2 in source.shape:
        source = tuple(source if source.shape[0] == 2 else source.T)
    ends = tuple(as_column(end) for end in source)
    if len(ends) != 2:
        raise EdgeStreamError(f"edges must be a pair of columns, got {len(ends)}")
    if not any(is_text(end.type) or pa.types.is_integer(end.type) for end in ends):
        return open_array(tuple(np.asarray(end) for end in ends), options)  # its error says what is allowed
    return TableStream(_PAIR, ends, options)


def listed_ids(ids: Any) -> NodeIds:
    """List the ids of all nodes, see `NodeIds.of`; from a column of strings only the table of ids is made.

    `ids` is an array, a list, a column, rows in batches of one column, a path of .npy or of a column of a Parquet, .csv
    or .tsv file, or a query.

    Raises:
        ValueError, EdgeStreamError: of another shape or type, or an id is missing or repeated.
    """
    ids = in_memory(ids)
    if isinstance(ids, str | os.PathLike):
        found = table_path(ids)
        if found is None:
            return NodeIds.load(ids)
        ids = read_table(*_named_columns(ids), of_ids=True)
    if is_table(ids):
        ids = _only_column(ids, "ids")
    column = as_column(ids) if is_column(ids) else None
    if column is not None and column.null_count:
        raise ValueError(f"nodes: the id of row {column.is_null().to_numpy().argmax()} is missing (null)")
    if column is None or not is_text(column.type):
        return NodeIds.of(ids if column is None else _numbers(column, "nodes"))
    starts = range(0, len(column), BATCH_ROWS)
    pieces = (arrow_ids("nodes", column.slice(start, BATCH_ROWS).combine_chunks(), start, True) for start in starts)
    return NodeIds.of_pieces(pieces, len(column))


def read_table(path: str | os.PathLike, columns: list[str] | None = None, of_ids: bool = False) -> pa.Table:
    """Return a Parquet, .csv or .tsv file (these two also with .gz), or some of its columns, in memory.

    Columns of text files become whole numbers, else other numbers or booleans, else they stay strings. An empty field
    is missing; in a column of numbers so are NA, NaN, null and None.

    Args:
        path: The file. A text file begins with a line of names; columns are separated by tabs in .tsv, else by the
            first of comma, tab, semicolon and bar that is in that line.
        columns: Their names; None: all.
        of_ids: Columns of text files that are no whole numbers or booleans stay strings.

    Raises:
        ValueError: the file is missing, is damaged, or lacks a column.

    Cost: the columns asked for in memory, of text files once more as text.
    """
    path = Path(path)
    kind = "Parquet" if _is_parquet(path) else "text"
    try:
        if kind == "text":
            return _read_text(path, columns, of_ids)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(path, file.schema_arrow.names, columns)
            return file.read(columns)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        told = one_line_of(error)
        raise ValueError(f"{path}: cannot be read, is damaged or not a {kind} file: {told}") from None


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _check_columns(path: Path, names: list[str], columns: list[str] | None) -> None:
    missing = [name for name in columns or [] if name not in names]
    if missing:
        raise ValueError(f"{path}: has no column {missing[0]!r}; it has {', '.join(names)}")


def _header(path: Path) -> tuple[list[str], str]:
    """Return the names and the separator of a text file's columns."""
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
        line = file.readline(_LONGEST_HEADER)
    separator = "\t" if ".tsv" in path.name.lower() else next((mark for mark in ",\t;|" if mark in line), ",")
    if not line.strip():
        raise ValueError(f"{path}: does not begin with a line of column names")
    rows = pyarrow.csv.read_csv(
        pa.BufferReader(line.encode()), parse_options=pyarrow.csv.ParseOptions(delimiter=separator)
    )
    if all(re.fullmatch(r"[-+.\deE]+", name) for name in rows.column_names):
        raise ValueError(f"{path}: its first line must name the columns, got {line.strip()[:60]!r}: add such a line")
    return rows.column_names, separator


def _read_text(path: Path, columns: list[str] | None, of_ids: bool) -> pa.Table:
    names, separator = _header(path)
    _check_columns(path, names, columns)
    wanted = columns or names
    with pyarrow.csv.open_csv(
        path,
        # As text in chunks, typed at the end: Arrow would hold all columns to find types, or guess by the first chunk.
        parse_options=pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=wanted,
            column_types=dict.fromkeys(wanted, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        ),
    ) as file:
        table = file.read_all()
    for place, name in enumerate(wanted):
        table = table.set_column(place, name, _typed(table.column(place), of_ids))
    return table


_LONGEST_HEADER = 1 << 20
_MISSING = pa.array(["NA", "N/A", "NaN", "nan", "null", "NULL", "None"])
_WHOLE = (pa.int64(), pa.uint64(), pa.bool_())


def _typed(texts: pa.ChunkedArray, of_ids: bool) -> pa.ChunkedArray:
    """Return a column of strings as numbers or booleans where all of them are."""
    values = pc.utf8_trim_whitespace(texts)
    if not of_ids:
        values = pc.if_else(pc.is_in(values, _MISSING), pa.scalar(None, pa.string()), values)
    for kind in _WHOLE if of_ids else (*_WHOLE, pa.float64()):
        try:
            return values.cast(kind)
        except pa.ArrowInvalid:
            continue
    return texts
