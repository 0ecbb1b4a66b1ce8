"""The edges of several edge types as one stream: nodes of all node types in one id space, edges with types."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import EdgeStreamError
from ..graph import GraphSchema, id_dtype
from ..jit import kernel
from ..values import exact_integers
from .options import StreamOptions
from .relabel import NodeIds
from .stream import EdgeStream, backing_file

_HASH_BLOCK = 1 << 22


class EdgesByType(NamedTuple):
    """Edges of one edge type, or of several that (num_edges,) integers distinguish.

    Ids count a node type's nodes from 0.
    """

    stream: EdgeStream
    relation: int | np.ndarray


class HeteroStream(EdgeStream):
    """The edges of several edge types, one source after the other, over the nodes of all node types.

    Node i of node type k is node `type_offsets[k] + i` of the stream. With `to_undirected`, the reverse of an edge
    belongs to the edge type that `schema.reverse` names.

    Args:
        sources: Edges, in this order.
        schema: Node types and edge types, those of reverses included.
        num_nodes: By node type, number of nodes.
        chunk_edges, to_undirected, remove_self_loops: See `open_edge_stream`.

    Attributes:
        type_offsets: (num_node_types + 1,) int64.

    Raises:
        ValueError: counts or edge types do not fit the schema, or reverses are requested that it does not name.

    Cost: that of the sources, and a copy of each chunk.
    """

    def __init__(
        self,
        sources: Sequence[EdgesByType],
        schema: GraphSchema,
        num_nodes: Sequence[int],
        chunk_edges: int = 1 << 22,
        to_undirected: bool = False,
        remove_self_loops: bool = False,
    ):
        if len(num_nodes) != schema.num_node_types:
            raise ValueError(
                f"num_nodes must have {schema.num_node_types} counts, one a node type, got {len(num_nodes)}"
            )
        if to_undirected and len(schema.reverse) != schema.num_edge_types:
            raise ValueError("to_undirected needs a schema with the reverse of each edge type, which this one lacks")
        self.schema, self.sources = schema, list(sources)
        self.type_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(num_nodes, dtype=np.int64)])
        total = int(self.type_offsets[-1])
        options = StreamOptions(total, chunk_edges, "auto", to_undirected, remove_self_loops)
        counts = [source.stream.num_edges for source in self.sources]
        name = ", ".join(dict.fromkeys(source.stream.name for source in self.sources)) or "no edges"
        super().__init__(name, id_dtype(total), options, None if None in counts else sum(counts))
        for number, source in enumerate(self.sources):
            self._check_edge_type(number, source)

    @property
    def seekable(self) -> bool:
        """Whether edges can be skipped without reading them: their number in each source is known."""
        return all(source.stream.num_edges is not None for source in self.sources)

    @property
    def num_node_types(self) -> int:
        """Number of node types."""
        return self.schema.num_node_types

    @property
    def edge_type_dtype(self) -> np.dtype:
        """The smallest unsigned integers that hold an edge type's number."""
        return np.dtype(np.uint8 if self.schema.num_edge_types <= 256 else np.uint16)

    def type_of(self, nodes: np.ndarray) -> np.ndarray:
        """Return the (num,) int64 node types of the stream."""
        return np.searchsorted(self.type_offsets, nodes, side="right") - 1

    def edge_type_of(self, edges: np.ndarray) -> np.ndarray:
        """Return the edge types of edges, (num,) of `edge_type_dtype`.

        Args:
            edges: (num,) int64 positions in the stream; the complement of one, below 0, stands for its reverse. All
                edges have been counted.
        """
        reverse = edges < 0
        listed = np.where(reverse, ~edges, edges)
        first = self._first_edges()
        source = np.searchsorted(first, listed, side="right") - 1
        relation = np.empty(len(edges), np.int64)
        for number in np.unique(source):
            given = self.sources[number].relation
            chosen = source == number
            relation[chosen] = given if np.ndim(given) == 0 else given[listed[chosen] - first[number]]
        if reverse.any():
            relation[reverse] = np.array(self.schema.reverse)[relation[reverse]]
        return relation.astype(self.edge_type_dtype)

    def count(self, progress=None) -> tuple[int, int]:
        """Return (num_nodes, num_edges), reading sources whose edges are not counted yet."""
        for source in self.sources:
            source.stream.count(progress)
        self.num_edges = sum(source.stream.num_edges for source in self.sources)
        for number, source in enumerate(self.sources):
            self._check_edge_type(number, source)
        return self.num_nodes, self.num_edges

    def source_files(self) -> list[Path]:
        """Return the files of all sources, and those of the edge types of edges."""
        files = [path for source in self.sources for path in source.stream.source_files()]
        relations = (backing_file(source.relation) for source in self.sources if np.ndim(source.relation))
        return files + [path for path in relations if path is not None]

    def fingerprint(self) -> str:
        """Return a hex digest of what identifies the edges; their ids are those of the sources."""
        node_ids, self.node_ids = self.node_ids, None
        try:
            return super().fingerprint()
        finally:
            self.node_ids = node_ids

    def _identity(self) -> dict:
        named = [_digest(source.relation) if np.ndim(source.relation) else source.relation for source in self.sources]
        return {
            "relations": [source.stream.fingerprint() for source in self.sources],
            "numbers": named,
            "schema": self.schema.as_json(),
            "type_offsets": self.type_offsets.tolist(),
        }

    def _first_edges(self) -> np.ndarray:
        counts = [source.stream.num_edges for source in self.sources]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])[:-1]

    def _numbered_blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        passed = 0
        for number, source in enumerate(self.sources):
            num_edges = source.stream.num_edges
            if num_edges is not None and passed + num_edges <= first_edge:
                passed += num_edges
                continue
            skip = max(0, first_edge - passed)
            with closing(source.stream.chunks(skip // source.stream.chunk_edges)) as chunks:
                for chunk in chunks:
                    begin = max(0, skip - chunk.first_edge)
                    if begin < len(chunk.src):
                        yield self._in_one_space(number, chunk.src[begin:], chunk.dst[begin:], chunk.first_edge + begin)
            passed += source.stream.num_edges

    def _in_one_space(self, number: int, src: np.ndarray, dst: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of some edges of a source as nodes of the stream."""
        relation, schema = self.sources[number].relation, self.schema
        if np.ndim(relation):
            relation = np.asarray(relation[first : first + len(src)])
        ends = []
        for what, nodes, node_types in (("source", src, schema.sources), ("target", dst, schema.targets)):
            node_type = node_types[relation]
            count = (self.type_offsets[1:] - self.type_offsets[:-1])[node_type]
            bad = nodes >= count
            if len(nodes) and bool(np.any(bad)):
                at = int(np.argmax(bad))
                named = int(np.broadcast_to(relation, len(nodes))[at])
                edge_type = schema.edge_types[named]
                raise EdgeStreamError(
                    f"{self.sources[number].stream.name}: edge {first + at}: {what} {int(nodes[at])} of "
                    f"{','.join(edge_type)} is not below the {int(np.broadcast_to(count, len(nodes))[at])} nodes of "
                    f"node type {edge_type[0 if what == 'source' else 2]}"
                )
            ends.append((nodes + self.type_offsets[node_type]).astype(self.dtype, copy=False))
        return ends[0], ends[1]

    def _check_edge_type(self, number: int, source: EdgesByType) -> None:
        limit, given = self.schema.num_edge_types, source.relation
        low, high = (given, given) if np.ndim(given) == 0 else (given.min(initial=0), given.max(initial=0))
        if not 0 <= low <= high < limit:
            raise ValueError(f"edge types of {source.stream.name} must be in [0, {limit}), got {low} to {high}")
        if np.ndim(given) and source.stream.num_edges not in (None, len(given)):
            raise ValueError(
                f"{source.stream.name}: {source.stream.num_edges} edges, but {len(given)} edge types: give one an edge"
            )


def _digest(relation: np.ndarray) -> str:
    """Return a hash of the content of (num_edges,) integers."""
    digest = hashlib.sha256()
    for start in range(0, len(relation), _HASH_BLOCK):
        digest.update(np.ascontiguousarray(relation[start : start + _HASH_BLOCK], "<i8"))
    return digest.hexdigest()


class PairIds:
    """Ids of edges between two node types, each end numbered by the ids of its own; replaces `NodeIds`.

    Args:
        source, target: `NodeIds` of all nodes of either node type; None: its ids are numbers of rows.
    """

    complete, are_strings = True, False

    def __init__(self, source: NodeIds | None, target: NodeIds | None):
        self.ends = (source, target)

    @property
    def listed(self) -> list[str | None]:
        """Digests of the ids."""
        return [None if ids is None else ids.listed for ids in self.ends]

    def encode(self, src, dst) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of both ends; see `NodeIds.encode`."""
        pairs = zip(self.ends, (src, dst), strict=True)
        first, second = (_rows(values) if ids is None else ids.encode(values, values)[0] for ids, values in pairs)
        return first, second


def _rows(values) -> np.ndarray:
    if not isinstance(values, np.ndarray):
        raise EdgeStreamError(
            "ids of a node type without nodes= must be row numbers, got strings: give the ids of its rows"
        )
    try:
        return exact_integers("ids of a node type without nodes=, which are row numbers", values, 0, unit="edge")
    except ValueError as error:
        raise EdgeStreamError(str(error)) from None


class IdsByNodeType:
    """The user's ids of the nodes of all node types, in their order; the same id may occur in several node types.

    Args:
        ids: By node type, `NodeIds`; None: row numbers.
        counts: By node type, number of nodes.
    """

    complete, listed = True, None

    def __init__(self, ids: Sequence[NodeIds | None], counts: Sequence[int]):
        self.ids, self.offsets = list(ids), np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.are_strings = any(one is not None and one.are_strings for one in self.ids)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        counts = np.diff(self.offsets)
        parts = [
            np.arange(count) if ids is None else np.asarray(ids) for ids, count in zip(self.ids, counts, strict=True)
        ]
        out = np.concatenate(parts)
        return out if dtype is None else out.astype(dtype)

    def strings(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of (num,) nodes as texts: (num + 1,) int64 offsets and (num_bytes,) uint8."""
        node_type = np.searchsorted(self.offsets, numbers, side="right") - 1
        lengths, texts = np.zeros(len(numbers), np.int64), []
        for number, ids in enumerate(self.ids):
            rows = numbers[node_type == number] - self.offsets[number]
            if ids is None or not ids.are_strings:
                named = rows if ids is None else np.asarray(ids)[rows]
                encoded = [str(name).encode() for name in named.tolist()]
                offsets = np.concatenate([[0], np.cumsum([len(text) for text in encoded], dtype=np.int64)])
                data = np.frombuffer(b"".join(encoded), np.uint8)
            else:
                offsets, data = ids.strings(rows)
            lengths[node_type == number] = np.diff(offsets)
            texts.append(data)
        out_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        out = np.empty(int(out_offsets[-1]), np.uint8)
        for number, data in enumerate(texts):
            _place_texts(node_type, number, out_offsets, np.asarray(data), out)
        return out_offsets, out


@kernel
def _place_texts(node_type, number, offsets, data, out):
    at = 0
    for i in range(len(node_type)):
        if node_type[i] == number:
            for place in range(offsets[i], offsets[i + 1]):
                out[place] = data[at]
                at += 1
