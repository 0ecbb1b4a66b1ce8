"""What an edge stream is: bounded chunks of checked edges, in the order of their source, read ahead by a thread."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import EdgeStreamError, check_integer
from ..jit import kernel
from ..traits import StreamTraits
from .options import StreamOptions
from .read_ahead import ChunkPool, read_ahead
from .relabel import NodeIds

Progress = Callable[[str, int, int | None], None]


class EdgeChunk(NamedTuple):
    """Some consecutive edges of a source.

    The arrays are plain, one-dimensional, C-contiguous, and stay valid as long as they are held. They may be
    views of the user's own array or file: read them only.

    Attributes:
        src, dst: (num_chunk_edges,) int32 or int64, ids in [0, num_nodes); one dtype throughout a stream.
        first_edge: position in the source of the first edge; edge `first_edge + i` is `src[i], dst[i]`.
        reverse: True where a consumer has swapped the ends; streams themselves yield False.
    """

    src: np.ndarray
    dst: np.ndarray
    first_edge: int
    reverse: bool = False


class EdgeStream:
    """A repeatable stream of edges in bounded chunks; subclasses implement reading one kind of source.

    Args:
        name: the path, or what the source is, for messages.
        dtype: int32 or int64, of the chunks.
        options: the options of all streams.
        num_edges: edges that the source lists, where that is known without reading.

    Attributes:
        num_nodes, num_edges: None until given, or counted by a whole pass.
        node_ids: the user's ids by node number (`NodeIds`) where `relabel=True`, else None; complete after a
            whole pass.
        layout, to_undirected, remove_self_loops: properties that consumers honour; `chunks` yields the source's
            edges as they are, so that an edge's position is its edge id.
    """

    seekable = False

    def __init__(self, name: str, dtype: np.dtype, options: StreamOptions, num_edges: int | None = None):
        self.name = name
        self.dtype = np.dtype(dtype)
        self.options = options
        self.num_nodes = options.num_nodes
        self.num_edges = num_edges
        self.chunk_edges = options.chunk_edges
        self.layout = options.layout
        self.to_undirected = bool(options.to_undirected)
        self.remove_self_loops = bool(options.remove_self_loops)
        self.node_ids = NodeIds() if options.relabel else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges})"

    def list_nodes(self, node_ids: NodeIds) -> None:
        """Take the ids of all nodes by their rows, see `NodeIds.of`, instead of numbers by first appearance."""
        if self.node_ids is None:
            raise ValueError("nodes goes with relabel=True, or without relabel: False says that ids are row numbers")
        if self.options.num_nodes not in (None, len(node_ids)):
            raise ValueError(f"nodes lists {len(node_ids)} ids, but num_nodes={self.options.num_nodes}")
        self.node_ids, self.num_nodes = node_ids, len(node_ids)

    def chunks(self, start_chunk: int = 0) -> Iterator[EdgeChunk]:
        """Iterate over the source's edges in their order.

        Args:
            start_chunk: chunks to skip, >= 0; seekable sources do not read them.

        Returns:
            A generator; its thread ends when it is exhausted, closed or collected.

        Raises:
            EdgeStreamError: the source cannot be read as edges (raised while iterating).
            ValueError: start_chunk is negative.

        Cost: O(num_edges) time; two chunks of memory beside the source's own buffers.
        """
        check_integer("edge_stream.start_chunk", start_chunk)
        start_chunk = int(start_chunk)
        return read_ahead(lambda stop: self._chunks_from(start_chunk, stop))

    def count(self, progress: Progress | None = None) -> tuple[int, int]:
        """Return (num_nodes, num_edges), reading the source once where they or the `node_ids` are not known yet."""
        numbered = self.node_ids is None or self.node_ids.complete
        if self.num_nodes is None or self.num_edges is None or not numbered:
            for chunk in self.chunks():
                if progress is not None:
                    progress("count edges", chunk.first_edge + len(chunk.src), self.num_edges)
        return self.num_nodes, self.num_edges

    def fingerprint(self) -> str:
        """Return a hex digest of what identifies the edges: the source and the options without chunk_edges."""
        described = {
            "source": self._identity(),
            "num_nodes": self.options.num_nodes,
            "layout": self.options.layout,
            "to_undirected": self.to_undirected,
            "remove_self_loops": self.remove_self_loops,
            "relabel": self.node_ids is not None,
        }
        if self.node_ids is not None and self.node_ids.listed is not None:
            described["node_ids"] = self.node_ids.listed
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def source_files(self) -> list[Path]:
        """Return the files that the edges are read from; [] where they are in memory or generated."""
        return []

    def _identity(self) -> dict:
        """Return plain JSON values that differ between sources."""
        raise NotImplementedError

    def _blocks(self, first_edge: int) -> Iterator:
        """Yield the source's own chunks of any length; `first_edge` > 0 only where `seekable`.

        Each is a pair of contiguous int32 or int64 arrays, or one (num_edges, 2) array; with relabel, also a pair
        of other arrays that `NodeIds` takes. A chunk need not outlive the next one.
        """
        raise NotImplementedError

    def _ready_chunks(self, first_edge: int, buffers: ChunkPool) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield checked (src, dst, largest id) of exactly chunk_edges, the last one shorter.

        Chunks are checked before they are narrowed to the stream's dtype, so that nothing wraps unseen.
        """
        buffer, filled, largest = None, 0, -1
        for block in self._numbered_blocks(first_edge):
            is_pairs = isinstance(block, np.ndarray)
            length = len(block) if is_pairs else len(block[0])
            offset = 0
            while offset < length:
                if buffer is None:
                    buffer, filled, largest = buffers.take(), 0, -1
                take = min(length - offset, self.chunk_edges - filled)
                out_src, out_dst = buffer[0, filled : filled + take], buffer[1, filled : filled + take]
                if is_pairs:
                    pairs = block[offset : offset + take]
                    low, high = split_pairs(pairs, out_src, out_dst)
                    self._check(pairs[:, 0], pairs[:, 1], low, high, first_edge)
                else:
                    src, dst = block[0][offset : offset + take], block[1][offset : offset + take]
                    low, high = copy_range(src, dst, out_src, out_dst)
                    self._check(src, dst, low, high, first_edge)
                largest = max(largest, int(high))
                offset, filled, first_edge = offset + take, filled + take, first_edge + take
                if filled == self.chunk_edges:
                    # Held nowhere here while the consumer has it, or the buffer would not become free.
                    ready = [(buffer[0], buffer[1], largest)]
                    buffer = out_src = out_dst = None
                    yield ready.pop()
        if buffer is not None:
            yield buffer[0, :filled], buffer[1, :filled], largest

    def _numbered_blocks(self, first_edge: int) -> Iterator:
        for block in self._readable_blocks(first_edge):
            if self.node_ids is None:
                yield block
            else:
                src, dst = (block[:, 0], block[:, 1]) if isinstance(block, np.ndarray) else block
                try:
                    yield self.node_ids.encode(src, dst)
                except EdgeStreamError as error:
                    raise EdgeStreamError(f"{self.name}: {error}") from None

    def _readable_blocks(self, first_edge: int) -> Iterator:
        try:
            yield from self._blocks(first_edge)
        except OSError as error:  # gone, replaced by a folder, or the disk fails
            raise EdgeStreamError(f"{self.name}: cannot be read: {error.strerror or error}") from error

    def _chunks_from(self, start_chunk: int, stop: threading.Event) -> Generator[EdgeChunk, None, None]:
        first_edge = start_chunk * self.chunk_edges
        # Numbers go by first appearance: before one whole pass nothing may be skipped.
        can_skip = self.seekable and (self.node_ids is None or self.node_ids.complete)
        position = first_edge if can_skip else 0
        from_start = position == 0
        largest = -1
        ready = self._ready_chunks(position, ChunkPool(self._buffer_edges(), self.dtype))
        for src, dst, high in ready:
            if stop.is_set():
                return
            largest = max(largest, high)
            ready_chunk = [EdgeChunk(src, dst, position)]
            position += len(src)
            del src, dst
            if position > first_edge:
                yield ready_chunk.pop()
        if from_start:
            self._note_counts(position, largest)

    def _buffer_edges(self) -> int:
        return self.chunk_edges if self.num_edges is None else max(1, min(self.chunk_edges, self.num_edges))

    def _note_counts(self, num_edges: int, largest: int) -> None:
        self.num_edges = num_edges
        if self.node_ids is not None:
            self.node_ids.complete = True
        if self.num_nodes is None:
            if self.node_ids is None and largest >= max(1 << 20, 1000 * num_edges):
                raise EdgeStreamError(
                    f"{self.name}: the largest id is {largest} with {num_edges} edges; pass relabel=True to number "
                    f"arbitrary ids, or num_nodes={largest + 1} if that is meant"
                )
            self.num_nodes = len(self.node_ids) if self.node_ids is not None else largest + 1

    def _check(self, src, dst, low: int, high: int, first_edge: int) -> None:
        """Raise for the first edge with an id outside [0, num_nodes), given the smallest and the largest id."""
        bound = np.iinfo(self.dtype).max + 1 if self.num_nodes is None else self.num_nodes
        if len(src) == 0 or (low >= 0 and high < bound):
            return
        bad = (src < 0) | (src >= bound) | (dst < 0) | (dst >= bound)
        i = int(np.argmax(bad))
        end, value = ("src", int(src[i])) if not 0 <= src[i] < bound else ("dst", int(dst[i]))
        where = f"{self.name}: {self._position(first_edge + i)}"
        if self.node_ids is not None:
            raise EdgeStreamError(f"{where}: more than num_nodes={bound} different ids; leave num_nodes out")
        if value < 0:
            raise EdgeStreamError(f"{where}: {end} {value} is negative; pass relabel=True to number arbitrary ids")
        raise EdgeStreamError(f"{where}: {end} {value} is not below num_nodes {bound}")

    def _position(self, edge: int) -> str:
        return f"edge {edge}"


def file_identity(path: str | os.PathLike) -> dict:
    """Return resolved path, size and modification time of a file: they distinguish its states."""
    path = Path(path).resolve()
    status = path.stat()
    return {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def file_states(stream) -> list[list]:
    """Return `file_state` of each file that a stream reads; [] where it has none or they are unknown."""
    return [file_state(path) for path in StreamTraits(stream).source_files()]


def file_state(path: str | os.PathLike) -> list:
    """Return [absolute path, size, time of change, inode] of a file as it is now; the path alone where it is gone."""
    try:
        facts = os.stat(path)
    except OSError:
        return [os.path.abspath(path)]
    return [os.path.abspath(path), facts.st_size, facts.st_mtime_ns, facts.st_ino]


def backing_file(array) -> Path | None:
    """Return the file that an array is read from: a path, or that of a memory map; None where it is in memory."""
    if isinstance(array, str | os.PathLike):
        return Path(array)
    memmap = backing_memmap(array)
    return None if memmap is None or memmap.filename is None else Path(memmap.filename)


def backing_memmap(array) -> np.memmap | None:
    """Return the memory map that an array is a view of, or None."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array._mmap is not None:
            return array
        array = array.base
    return None


@kernel
def value_range(src, dst):
    """Return (smallest, largest) over two arrays of one length, (0, -1) where they are empty."""
    if len(src) == 0:
        return np.int64(0), np.int64(-1)
    low, high = src[0], src[0]
    for i in range(len(src)):
        low = min(low, src[i])
        high = max(high, src[i])
    for i in range(len(dst)):
        low = min(low, dst[i])
        high = max(high, dst[i])
    return np.int64(low), np.int64(high)


@kernel
def copy_range(src, dst, out_src, out_dst):
    """Copy two arrays to the heads of two others, and return (smallest, largest) as read, (0, -1) if empty."""
    if len(src) == 0:
        return np.int64(0), np.int64(-1)
    low, high = src[0], src[0]
    for i in range(len(src)):
        low = min(low, src[i])
        high = max(high, src[i])
        out_src[i] = src[i]
    for i in range(len(dst)):
        low = min(low, dst[i])
        high = max(high, dst[i])
        out_dst[i] = dst[i]
    return np.int64(low), np.int64(high)


@kernel
def split_pairs(pairs, out_src, out_dst):
    """Split (num_edges, 2) into two arrays, and return (smallest, largest) as read, (0, -1) if empty."""
    if len(pairs) == 0:
        return np.int64(0), np.int64(-1)
    low, high = pairs[0, 0], pairs[0, 0]
    for i in range(len(pairs)):
        first, second = pairs[i, 0], pairs[i, 1]
        low = min(low, min(first, second))
        high = max(high, max(first, second))
        out_src[i] = first
        out_dst[i] = second
    return np.int64(low), np.int64(high)


Keep = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


class FilteredStream(EdgeStream):
    """The edges of another stream that a rule keeps, renumbered from 0, over the same nodes.

    Args:
        stream: the stream to filter; its nodes have been counted.
        keep: (src, dst, position of the first) of some edges to (num,) bool; a function of each edge alone.
        rule: plain values that identify the rule, for the fingerprint.
    """

    def __init__(self, stream: EdgeStream, keep: Keep, rule: dict):
        options = replace(stream.options, num_nodes=stream.num_nodes, chunk_edges=stream.chunk_edges)
        super().__init__(stream.name, stream.dtype, options)
        self.node_ids = stream.node_ids
        self._stream, self._keep, self._rule = stream, keep, rule

    def source_files(self) -> list[Path]:
        return self._stream.source_files()

    def _identity(self) -> dict:
        return {"filtered": self._stream.fingerprint(), "rule": self._rule}

    def _numbered_blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with closing(self._stream.chunks()) as chunks:
            for chunk in chunks:
                kept = self._keep(chunk.src, chunk.dst, chunk.first_edge)
                yield chunk.src[kept], chunk.dst[kept]
