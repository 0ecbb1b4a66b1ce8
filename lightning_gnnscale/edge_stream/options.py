"""The options of every edge stream, and the choice of the two columns of a table that are the ends of edges."""

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import check_integer, short
from ..graph import id_dtype

_NAME_PAIRS = (
    ("src", "dst"),
    ("source", "target"),
    ("source", "destination"),
    ("from", "to"),
    ("from_id", "to_id"),
    ("fromnodeid", "tonodeid"),
    ("head", "tail"),
    ("u", "v"),
    ("node1", "node2"),
    ("node_1", "node_2"),
    ("id_1", "id_2"),
)

# Customary names of edge columns, which are rarely ids.
COLUMN_WORDS = {
    "source", "target", "src", "dst", "destination", "from", "to", "head", "tail", "subject", "object", "parent",
    "child", "user", "item", "node", "vertex", "name", "id", "ids", "package", "packages", "requires", "required",
    "dependency", "dependent", "depends", "dependencies", "author", "paper", "citing", "cited", "cites", "citation",
    "follower", "followee", "following", "follows", "friend", "sender", "receiver", "caller", "callee", "owner",
    "member", "page", "link", "links", "url", "origin", "start", "end", "left", "right", "first", "second", "actor",
    "movie", "customer", "product", "gene", "protein", "entity",
}  # fmt: skip


def known_pair(names: list[str]) -> tuple[int, int] | None:
    """Return the positions of the first pair of customary names (any case) among column names, or None."""
    lowered = [name.strip().lower() for name in names]
    for src, dst in _NAME_PAIRS:
        if src in lowered and dst in lowered:
            return lowered.index(src), lowered.index(dst)
    return None


def pick_columns(source: str, names: list[str], src: str | int | None, dst: str | int | None) -> tuple[int, int]:
    """Return the positions of the columns that hold src and dst.

    Args:
        source: for messages.
        names: the table's columns.
        src, dst: a name or a position each; None: a customary pair of names, else the only two columns.
    """
    listed = ", ".join(names)
    if src is None and dst is None:
        pair = known_pair(names) or ((0, 1) if len(names) == 2 else None)
        if pair is None:
            raise ValueError(f"{source}: which columns are the edges? pass src= and dst=; columns: {listed}")
        return pair
    if src is None or dst is None:
        raise ValueError(f"{source}: pass both src= and dst=, or neither; columns: {listed}")
    places = []
    for option, wanted in (("src", src), ("dst", dst)):
        if isinstance(wanted, str) and wanted in names:
            places.append(names.index(wanted))
        elif isinstance(wanted, int) and not isinstance(wanted, bool) and 0 <= wanted < len(names):
            places.append(wanted)
        else:
            raise ValueError(f"{source}: {option}={wanted!r} is not a column; columns: {listed}")
    if places[0] == places[1]:
        raise ValueError(f"{source}: src and dst are the same column {src!r}")
    return places[0], places[1]


# Columns with data of an edge.
_OF_EDGES = {
    "weight",
    "weights",
    "w",
    "type",
    "edge_type",
    "relation",
    "rel",
    "predicate",
    "kind",
    "rating",
    "timestamp",
}


class UnreadColumns(UserWarning):
    """Columns with data of the edges that are not read with them, and how to give them."""

    def __init__(self, source: str, columns: list[str], remedy: str):
        super().__init__(f"{source}: {', '.join(columns)}: not read with the edges; {remedy}")
        self.source, self.columns = source, columns


def tell_unread(source: str, names: list[str]) -> None:
    """Warn of columns with data of the edges that are not read with them."""
    unread = [name for name in names if name.strip().lower() in _OF_EDGES]
    if unread:
        remedy = (
            "give such columns as edge_weight= or edge_features=, or names of edge types as edge_type=, in the order "
            "of the edges, to use them"
        )
        warnings.warn(UnreadColumns(source, unread, remedy), stacklevel=3)


_TABLE_FILE = re.compile(r"(.+?\.(?:parquet|(?:csv|tsv)(?:\.gz)?))(?::(.*))?", re.IGNORECASE | re.DOTALL)


def split_columns(path: str | os.PathLike) -> tuple[str, str | None]:
    """Return the file, or the URL, and the columns of "nodes.csv:a,b" as written; None: it names no columns."""
    found = _TABLE_FILE.fullmatch(os.fspath(path))
    return (os.fspath(path), None) if found is None else (found[1], found[2])


def table_path(path: str | os.PathLike) -> tuple[Path, list[str] | None] | None:
    """Return the file and the columns of "x.parquet", "x.csv:label" or "x.tsv:a,b"; None: not a table file."""
    if _TABLE_FILE.fullmatch(os.fspath(path)) is None:
        return None
    file, columns = split_columns(path)
    return Path(file), columns.split(",") if columns is not None else None


LIST_NODES = ", or nodes= with the id of each row where there are features, labels or masks: nodes=nodes.csv:id"
LAYOUTS = ("auto", "once", "both_ways", "directed")
CHUNK_EDGES = 1 << 22


@dataclass(frozen=True)
class StreamOptions:
    """The options of every stream, checked.

    Args:
        num_nodes: ids must be below it; None: one more than the largest id, known after a whole pass.
        chunk_edges: edges a chunk, >= 1; the last chunk may be shorter.
        layout: "once" (undirected, each edge once), "both_ways" (undirected, both directions listed), "directed",
            or "auto" (the consumer finds out).
        to_undirected: consumers add the reverse of every edge.
        remove_self_loops: consumers leave out edges from a node to itself.
        relabel: ids are arbitrary 64-bit integers or strings, numbered in order of first appearance.

    Raises:
        ValueError: an option is out of range.
    """

    num_nodes: int | None = None
    chunk_edges: int = CHUNK_EDGES
    layout: str = "auto"
    to_undirected: bool = False
    remove_self_loops: bool = False
    relabel: bool = False

    def __post_init__(self):
        if self.num_nodes is not None:
            check_integer("edge_stream.num_nodes", self.num_nodes)
            object.__setattr__(self, "num_nodes", int(self.num_nodes))
        check_integer("edge_stream.chunk_edges", self.chunk_edges, 1)
        object.__setattr__(self, "chunk_edges", int(self.chunk_edges))
        if self.layout not in LAYOUTS:
            raise ValueError(f"edge_stream.layout must be one of {', '.join(LAYOUTS)}, got {short(self.layout)}")
        for name in ("to_undirected", "remove_self_loops", "relabel"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"edge_stream.{name} must be True or False, got {getattr(self, name)!r}")

    def out_dtype(self, source_dtype: np.dtype) -> np.dtype:
        """Return int32 or int64: the dtype of chunks that are copied from a source of this integer dtype."""
        if self.relabel or self.num_nodes is not None:
            return id_dtype(self.num_nodes or 0)
        narrow = np.can_cast(source_dtype, np.int32)
        return np.dtype(np.int32 if narrow else np.int64)


def checked_number(name: str, value, low: float, high: float) -> None:
    """Raise one line that names it unless it is a number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {short(value)}")
