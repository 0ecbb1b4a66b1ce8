"""Edges of sparse matrices in memory: SciPy's, torch's, and the `adj_t` of PyG."""

import hashlib
import warnings
from collections.abc import Iterator

import numpy as np

from ..errors import EdgeStreamError
from ..foreign import is_scipy, is_sparse_tensor
from .array import native_ids
from .options import StreamOptions
from .stream import EdgeStream

_SLICE_EDGES = 1 << 17
_OTHER_FORMATS = ("bsr", "dia", "dok", "lil")


class AdjacencyStream(EdgeStream):
    """Edges of a sparse matrix, whose entry (i, j) is an edge from i to j; its arrays are shared.

    Rows and columns of compressed matrices are expanded a chunk at a time. Stored zeros are edges.

    Args:
        name: for messages.
        matrix: square; of SciPy, a sparse tensor of torch, or a `SparseTensor` of torch_sparse.
        options: the options of all streams.
        transposed: entry (i, j) is an edge from j to i.

    Attributes:
        values: (num_edges, ...) of the entries in the order of the edges, or None; the stream does not read them.

    Raises:
        EdgeStreamError: the matrix is not square.
    """

    seekable = True

    def __init__(self, name: str, matrix, options: StreamOptions, transposed: bool = False):
        shape = tuple(int(size) for size in (matrix.sparse_sizes() if is_sparse_tensor(matrix) else matrix.shape))
        if len(shape) != 2 or shape[0] != shape[1]:
            raise EdgeStreamError(f"{name}: a matrix of edges must be square, (num_nodes, num_nodes), got {shape}")
        if options.relabel:
            raise ValueError("relabel=True goes with lists of edges: the rows of a matrix are numbered already")
        if options.num_nodes not in (None, shape[0]):
            raise ValueError(f"num_nodes={options.num_nodes}, but the matrix has {shape[0]} rows: leave num_nodes out")
        self._indptr, indices, by_row, self.values = _compressed(matrix)
        self._indices, self._by_src = indices, by_row != transposed
        if self._indptr is None and transposed:
            self._indices = indices[::-1]
        super().__init__(name, options.out_dtype(np.dtype(np.int64)), options, len(self._ends(0, None)[0]))
        self.num_nodes = shape[0]

    def _ends(self, start: int, stop: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return (src, dst) of some edges."""
        if self._indptr is None:
            return self._indices[0][start:stop], self._indices[1][start:stop]
        others = self._indices[start:stop]
        if stop is None:
            return others, others
        first = int(np.searchsorted(self._indptr, start, side="right")) - 1
        last = int(np.searchsorted(self._indptr, stop, side="left"))
        counts = np.diff(np.clip(self._indptr[first : last + 1], start, stop))
        own = np.repeat(np.arange(first, last, dtype=np.int64), counts)
        return (own, others) if self._by_src else (others, own)

    def _blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(first_edge, self.num_edges, _SLICE_EDGES):
            src, dst = self._ends(start, min(start + _SLICE_EDGES, self.num_edges))
            yield tuple(native_ids(self.name, np.asarray(end, np.int64), False) for end in (src, dst))

    def _identity(self) -> dict:
        digest = hashlib.sha256()
        for src, dst in self._blocks(0):
            digest.update(src.astype("<i8").tobytes())
            digest.update(dst.astype("<i8").tobytes())
        return {"array": digest.hexdigest(), "num_edges": self.num_edges, "num_nodes": self.num_nodes}


def _compressed(matrix) -> tuple[np.ndarray | None, np.ndarray, bool, np.ndarray | None]:
    """Return (indptr, indices, whether rows are compressed, values); without indptr indices are rows and columns."""
    if is_sparse_tensor(matrix):
        indptr, indices, values = matrix.csr()
        return _array(indptr), _array(indices), True, _array(values)
    if is_scipy(matrix):
        if matrix.format in _OTHER_FORMATS:
            matrix = matrix.tocsr()
        if matrix.format == "coo":
            return None, (matrix.row, matrix.col), True, matrix.data
        return matrix.indptr, matrix.indices, matrix.format == "csr", matrix.data
    layout = str(matrix.layout)
    if layout == "torch.sparse_coo":
        return None, tuple(_array(matrix._indices())), True, _array(matrix._values())
    if layout == "torch.sparse_csr":
        return _array(matrix.crow_indices()), _array(matrix.col_indices()), True, _array(matrix.values())
    if layout == "torch.sparse_csc":
        return _array(matrix.ccol_indices()), _array(matrix.row_indices()), False, _array(matrix.values())
    raise EdgeStreamError(f"a matrix of edges must be torch.sparse_coo, sparse_csr or sparse_csc, got {layout}")


def _array(tensor) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().cpu().numpy()


def told(stream: AdjacencyStream) -> AdjacencyStream:
    """Return the stream, after a warning where its matrix has values that are not read."""
    values = stream.values
    if values is not None and len(values) and not (values == values.flat[0]).all():
        warnings.warn(
            f"{stream.name}: the values of the matrix, {values.min():g} to {values.max():g}, are not read with its "
            "edges: give them as edge_weight=, in the order of the entries, if they weigh the edges",
            stacklevel=3,
        )
    return stream


def open_adjacency(matrix, options: StreamOptions) -> EdgeStream:
    """Stream a sparse matrix of SciPy or torch, or a `SparseTensor`; see `AdjacencyStream`."""
    return told(AdjacencyStream(type(matrix).__name__, matrix, options))
