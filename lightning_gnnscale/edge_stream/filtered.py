"""A stream without some of its edges, chosen edge by edge from their ends alone."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from .stream import EdgeStream

Keep = Callable[[np.ndarray, np.ndarray], np.ndarray]


class FilteredStream(EdgeStream):
    """The edges of another stream that a rule keeps, numbered anew from 0, over the same nodes.

    Args:
        stream: what is filtered; its nodes have been counted.
        keep: (src, dst) of some edges to (num,) bool; a function of each edge's ends alone.
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
                kept = self._keep(chunk.src, chunk.dst)
                yield chunk.src[kept], chunk.dst[kept]
