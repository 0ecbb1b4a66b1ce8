"""Rows of the graph that an evaluation reads again, layer after layer, in a file of their own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..model.layer_source import NodeSet, RowBlock
from ..scratch import nameless_file, read_at, write_at


class HopRows:
    """Blocks of rows, kept as they came; the system frees the file with this object.

    Args:
        nodes: whose rows they are.
        folder: on whose disk they lie; it is made.

    Raises:
        GNNScaleError: the disk is full, or cannot be written to.
    """

    def __init__(self, nodes: NodeSet, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.nodes, self.num_rows, self.num_edges = nodes, 0, 0
        self._file, self._end = nameless_file(folder), 0
        self._blocks: list[list[tuple[int, np.dtype, tuple[int, ...]] | None]] = []  # where the columns of each lie

    def add(self, block: RowBlock) -> None:
        """Write a block behind the others."""
        self._blocks.append([None if column is None else self._write(np.asarray(column)) for column in block])
        self.num_rows += len(block.rows)
        self.num_edges += len(block.indices)

    def blocks(self) -> Iterator[RowBlock]:
        """Yield the blocks as they came."""
        for columns in self._blocks:
            yield RowBlock(*(None if column is None else self._read(*column) for column in columns))

    def _write(self, values: np.ndarray) -> tuple[int, np.dtype, tuple[int, ...]]:
        begin = self._end
        write_at(self._file, np.ascontiguousarray(values), begin)
        self._end += values.nbytes
        return begin, values.dtype, values.shape

    def _read(self, begin: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        out = np.empty(shape, dtype)
        read_at(self._file, out, begin)
        return out
