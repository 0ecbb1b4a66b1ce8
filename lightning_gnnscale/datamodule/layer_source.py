"""A partition store as the source of exact layer-wise inference: each rank's rows, in bounded blocks."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from ..across_ranks import failing_together, gather_from_ranks, group_device, rank, world_size
from ..edge_stream.read_ahead import read_ahead
from ..errors import PartitionStoreError, clear_error, wait_for_others
from ..graph import Batch
from ..jit import kernel
from ..memory import free_memory_bytes
from ..model.layer_source import NodeSet, RowBlock, closure
from ..partition_store import PartitionStore
from ..partition_store.coded_neighbors import CodedNeighbors
from ..partition_store.features import DenseFeatures
from ..partition_store.planned_reads import open_direct
from ..sampler.minibatch import rows_by_node_type, sparse_rows_to_torch
from ..scratch import Scratch
from ..system import CAN_ADVISE, PAGE_BYTES, advise
from ..triton_kernels.gather_rows import gather_rows
from .edge_spool import EdgeSpool
from .evaluation import EvaluationLinks
from .hop_rows import HopRows
from .kept_layers import KeptLayers

GAP_BYTES = 64 << 10  # read rather than skipped: a read from a new place takes about as long
READ_BYTES = 4 << 20  # of one read
_READS_AHEAD, _AHEAD_BYTES = 64, 16 << 20  # reads, and bytes of them, announced to the disk before they are made
_SHORT_READ = 64 << 10  # bytes: many such reads are announced, as each alone would wait for the disk
_NODES_AT_ONCE = 1 << 18  # nodes whose offsets are read at once
_BITS_AT_ONCE = 1 << 21  # bytes of a bitmap that ranks join at once
_ROUND_BYTES = 32 << 20  # of rows that all ranks together send at once


class StoreLayerSource:
    """The rows of some parts, and every node's features: implements the model's `LayerSource`.

    Args:
        store: the partition store.
        parts: parts whose rows this rank computes; each part belongs to one rank.
        scratch: folder of the tables of hidden layers while needed; None: only `rows` and nodes are read. Machines
            without a shared folder have tables of their own: at each barrier they send each other the rows that were
            written since the last one.
        block_edges: edges a block, at least one row's.
        stored_features: False: no features.
        edge_features: False: blocks without features of edges.
    """

    def __init__(
        self,
        store: PartitionStore,
        parts: list[int],
        scratch: Scratch | None,
        block_edges: int = 1 << 20,
        stored_features: bool = True,
        edge_features: bool = True,
    ):
        if block_edges < 1:
            raise ValueError(f"block_edges must be at least 1, got {block_edges}")
        self.store, self.parts, self.scratch, self.block_edges = store, list(parts), scratch, block_edges
        self.num_nodes = store.num_nodes
        self._features = store.features if stored_features else None
        self._with_edge_features = edge_features
        self.has_weights = store.has["edge_weight"]
        self._files: dict[str, FileRows | None] = {}
        self._unsent: dict[str, tuple[np.ndarray, list[list[int]]]] = {}  # tables, and rows that others lack
        self._kept: list[HopRows] = []
        self._keeps = False

    def blocks(self, needed: NodeSet | None = None) -> Iterator[RowBlock]:
        """Yield this rank's rows as CSC blocks of at most `block_edges` edges (one row may be longer).

        Edges of all rows are mapped; those of some rows are read, in the order of the file.
        """
        if needed is not None:
            kept = self._kept_rows(needed)
            if kept is not None:
                yield from kept.blocks()
            elif self._keeps:
                yield from self._keep(needed)
            else:
                yield from self._needed_blocks(needed)
            return
        csc, columns = self.store.csc, self._columns()
        for part in self.parts:
            start, end = int(self.store.part_offsets[part]), int(self.store.part_offsets[part + 1])
            while start < end:
                limit = csc.indptr[start] + self.block_edges
                stop = int(np.searchsorted(csc.indptr[start + 1 : end + 1], limit, side="right")) + start
                stop = min(max(stop, start + 1), end)
                first, last = int(csc.indptr[start]), int(csc.indptr[stop])
                yield RowBlock(
                    rows=np.arange(start, stop),
                    indptr=np.asarray(csc.indptr[start : stop + 1]) - first,
                    **{name: values[first:last] for name, values in columns.items()},
                )
                start = stop

    def _columns(self) -> dict[str, np.ndarray]:
        """Return what blocks have of each edge, (num_edges, ...) by the names of a `RowBlock`."""
        given = {"edge_weight": self.store.edge_weight, "edge_type": self.store.edge_type}
        given["edge_attr"] = self.store.edge_features if self._with_edge_features else None
        given = {name: values for name, values in given.items() if values is not None}
        return {"indices": self.store.csc.indices, **given}

    def _needed_blocks(self, needed: NodeSet) -> Iterator[RowBlock]:
        """Yield the blocks of some of this rank's rows; a thread reads the next one meanwhile."""
        return read_ahead(lambda stop: self._read_blocks(needed))

    def _read_blocks(self, needed: NodeSet) -> Iterator[RowBlock]:
        columns = self._columns()
        for nodes, edges, begins, ends in self._needed_rows(needed):
            first = 0
            while first < len(nodes):
                last = int(np.searchsorted(edges, edges[first] + self.block_edges, side="right")) - 1
                chosen = slice(first, max(last, first + 1))
                yield RowBlock(
                    rows=nodes[chosen],
                    indptr=edges[first : chosen.stop + 1] - edges[first],
                    **{name: self._segments(one, begins[chosen], ends[chosen]) for name, one in columns.items()},
                )
                first = chosen.stop

    @contextmanager
    def keeping_rows(self) -> Iterator[None]:
        """In the block, let rows that are asked for be kept in a file, for the layers that ask for them again.

        Rows that lie far apart are read with what lies between them. They are kept, on the disk of the scratch folder,
        where memory does not hold the edges, and the rows have at most a quarter of them. This source frees the file.
        """
        indices = self.store.csc.indices
        self._keeps = self.scratch is not None and is_beyond_memory(indices.nbytes)
        try:
            yield
        finally:
            self._keeps = False

    def _kept_rows(self, needed: NodeSet) -> HopRows | None:
        return next((kept for kept in self._kept if kept.nodes is needed), None)

    def _keep(self, needed: NodeSet) -> Iterator[RowBlock]:
        kept, most = HopRows(needed, self.scratch.parent), len(self.store.csc.indices) // 4
        for block in self._needed_blocks(needed):
            if kept is not None:
                kept.add(block)
                kept = kept if kept.num_edges <= most else None
            yield block
        if kept is not None:
            self._kept.append(kept)

    def rows(self, nodes: np.ndarray) -> RowBlock:
        """Return the rows of some nodes of any part, (num,) ascending store ids, as one block."""
        indptr = self.store.csc.indptr
        begins, ends = np.asarray(indptr[nodes]), np.asarray(indptr[np.asarray(nodes) + 1])
        columns = {name: self._segments(one, begins, ends) for name, one in self._columns().items()}
        return RowBlock(nodes, np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - begins)]), **columns)

    @property
    def row_bytes(self) -> float:
        """Bytes of the stored features of a node, the mean where rows differ; 0 without features."""
        return 0.0 if self._features is None else self._features.nbytes / max(1, self.num_nodes)

    def counts(self, needed: NodeSet | None = None) -> tuple[int, int]:
        """Return how many of this rank's rows are needed, and how many edges they have; None: all of them."""
        if needed is None:
            offsets, indptr = self.store.part_offsets, self.store.csc.indptr
            ends = [(int(offsets[part]), int(offsets[part + 1])) for part in self.parts]
            return sum(end - start for start, end in ends), sum(int(indptr[end] - indptr[start]) for start, end in ends)
        kept = self._kept_rows(needed)
        if kept is not None:
            return kept.num_rows, kept.num_edges
        found = [(len(nodes), int(edges[-1])) for nodes, edges, _, _ in self._needed_rows(needed)]
        return sum(rows for rows, _ in found), sum(edges for _, edges in found)

    def spool(self) -> EdgeSpool:
        """Return a file of this rank in the scratch folder, which the first table has made."""
        return EdgeSpool(self.scratch.folder / f"edges-{rank()}")

    def num_edges(self, needed: NodeSet) -> int:
        """Return how many edges some of this rank's rows have."""
        return self.counts(needed)[1]

    def _needed_rows(self, needed: NodeSet) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield (nodes, running number of edges, first edge of each, end of each) of this rank's rows, in chunks."""
        for part in self.parts:
            for start in range(
                int(self.store.part_offsets[part]), int(self.store.part_offsets[part + 1]), _NODES_AT_ONCE
            ):
                stop = min(start + _NODES_AT_ONCE, int(self.store.part_offsets[part + 1]))
                nodes = needed.within(start, stop)
                if not len(nodes):
                    continue
                offset = np.asarray(self.store.csc.indptr[start : stop + 1])
                begins, ends = offset[nodes - start], offset[nodes - start + 1]
                yield nodes, np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - begins)]), begins, ends

    def gather(self, nodes: np.ndarray, table: np.ndarray | None = None):
        """Return the features of some nodes: a (num, dim) tensor, sparse rows as `x_csr`, or `RowsByNodeType`; or None.

        Args:
            nodes: (num,) integers; ascending ones are read in runs of the file.
            table: its rows are returned instead of features, a (num, dim) tensor.
        """
        dense = table
        if table is None:
            if self._features is None:
                return None
            if type(self._features) is not DenseFeatures:
                rows = self._features.read(nodes)
                if self._features.by_node_type:
                    return rows_by_node_type(rows)
                return sparse_rows_to_torch(rows) if self._features.is_sparse else torch.from_numpy(rows)
            dense = self._features.array
        file, nodes = self._file(dense), np.asarray(nodes, np.int64)
        rows = np.asarray(dense[nodes]) if file is None else file.rows(nodes)
        if table is None and self._features.storage is not None:
            rows = gather_rows(rows, np.arange(len(rows)), code=self._features.storage)
        return torch.from_numpy(rows)

    def expect(self, nodes: np.ndarray, table: np.ndarray | None = None) -> None:
        """Read rows of (num,) ascending nodes at once, for this thread's next calls of `gather`; of a file only."""
        dense = table
        if table is None and type(self._features) is DenseFeatures:
            dense = self._features.array
        file = None if dense is None else self._file(dense)
        if file is not None:
            file.expect(np.asarray(nodes, np.int64))

    def write(self, table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
        """Write (num, dim) values to (num,) ascending rows of a table; consecutive ones in one run of the file."""
        if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1:
            self._file(table).write(int(rows[0]), values)
        else:
            table[rows] = values
        for unsent, runs in self._unsent.values():
            if unsent is table:
                _add_runs(runs, np.asarray(rows))

    def union(self, bits: np.ndarray) -> None:
        """Set the bits of a bitmap that are set on any rank, in place."""
        if world_size() == 1:
            return
        # Bits as bytes: all backends have their maximum; NCCL has no bitwise operation.
        device = group_device()
        for start in range(0, len(bits), _BITS_AT_ONCE):
            chunk = bits[start : start + _BITS_AT_ONCE]
            spread = torch.from_numpy(np.unpackbits(chunk)).to(device)
            with clear_error("joining the nodes that are evaluated"):
                dist.all_reduce(spread, dist.ReduceOp.MAX)
            chunk[:] = np.packbits(spread.cpu().numpy())

    def store_ids(self, nodes: np.ndarray) -> np.ndarray:
        """Return some nodes as they are."""
        return np.asarray(nodes, np.int64)

    def degree(self, nodes: np.ndarray) -> np.ndarray:
        """Return the in-degree of some nodes, (num,) int64; sums of weights, float32, where the store has weights."""
        if self.has_weights:
            return self.store.weighted_degree[nodes]
        indptr = self.store.csc.indptr
        return np.asarray(indptr[np.asarray(nodes) + 1] - indptr[nodes])

    def self_weight(self, nodes: np.ndarray) -> np.ndarray | None:
        """Return the (num,) float32 weights of the self-loops that GCN adds to some nodes; None: 1 for all."""
        return self.store.self_weight(nodes)

    def node_type(self, nodes: np.ndarray) -> np.ndarray | None:
        """Return the (num,) int64 node types of some nodes; None in a graph of one node type and one edge type."""
        return self.store.node_type(nodes)

    def table(self, name: str, dim: int, num_rows: int | None = None, dtype: type = np.float32) -> np.ndarray:
        """Return a (num_rows, dim) array on disk that the ranks of a folder share; every rank must ask for it.

        Args:
            num_rows: None: one a node.

        Raises:
            GNNScaleError: on every rank, where the disk of one is full, or cannot be written to.
        """
        path, firsts = self.scratch.path(name), self.scratch.firsts()
        with failing_together():
            if firsts[rank()] == rank():
                self.scratch.make_table(name, max(1, self.num_nodes if num_rows is None else num_rows), dim, dtype)
        table = np.load(path, mmap_mode="r+")
        if any(firsts):
            self._unsent[name] = (table, [])
        # An older table of that name is another file. The key is the memmap's: a path may be relative, or a link.
        self._files.pop(str(table.filename), None)
        return table

    def barrier(self) -> None:
        """Wait for the other ranks, and send what was written to machines with tables of their own."""
        wait_for_others()
        if self._unsent:
            told = gather_from_ranks([np.array(runs, np.int64).reshape(-1, 2) for _, runs in self._unsent.values()])
            for (table, runs), *written in zip(self._unsent.values(), *told, strict=True):
                _send_rows(self._file(table), written, self.scratch.firsts())
                runs.clear()
            wait_for_others()

    def close(self) -> None:
        """Remove the tables; every rank must call it."""
        self._files.clear()
        self._kept.clear()
        wait_for_others()
        self.scratch.close()

    def _segments(self, array: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return array[begins[i]:ends[i]] for each i, concatenated."""
        if isinstance(array, CodedNeighbors):
            return array.read(begins, ends)
        file = self._file(array)
        if file is not None:
            return file.read(begins, ends)
        chunks = [array[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return np.concatenate([array[:0], *chunks])

    def _file(self, array: np.ndarray) -> "FileRows | None":
        """Return the file of a mapped array; None: it has none."""
        mapped = _mapped(array)
        if mapped is None:
            return None
        name = str(mapped.filename)
        if name not in self._files:
            past_cache = is_beyond_memory(array.nbytes)
            self._files[name] = FileRows(name, _offset(array, mapped), array.dtype, array.shape[1:], past_cache)
        return self._files[name]


def is_beyond_memory(num_bytes: int) -> bool:
    """Return whether a file of so many bytes, read over and over in its order, is read from the disk each time."""
    return 2 * num_bytes > free_memory_bytes()


class FileRows:
    """Rows of a file, read in runs: a map's pages would come one fault after the other, with their surroundings.

    Args:
        path: the file.
        offset: bytes before the first row.
        dtype: dtype of an element.
        row_shape: shape of a row.
        past_cache: read past the page cache, where the disk can: pages that a cap of memory must drop again cost more
            than their reads, and those of other files stay.
    """

    def __init__(self, path: str, offset: int, dtype: np.dtype, row_shape: tuple[int, ...], past_cache: bool = False):
        self.path, self.offset, self.dtype, self.row_shape = path, offset, dtype, row_shape
        self.row_bytes = dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
        self._file, self._local = open(path, "rb", buffering=0), threading.local()  # noqa: SIM115
        self._past_cache, direct = past_cache, open_direct(path) if past_cache else None
        self._direct = None if direct is None else os.fdopen(direct, "rb", buffering=0)

    def expect(self, numbers: np.ndarray) -> None:
        """Read single rows, (num,) int64 ascending, into memory of this thread, for its next calls of `rows`."""
        size, held = len(numbers) * self.row_bytes, vars(self._local).get("coming_bytes")
        if held is None or len(held) < size:
            held = self._local.coming_bytes = np.empty(size, np.uint8)
        out = held[:size].view(self.dtype).reshape(len(numbers), *self.row_shape)
        self._local.coming = numbers, self.read(numbers, numbers + 1, out)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return single rows, (num,) int64; of those that `expect` has read the next ones, until it is called again."""
        coming, found = vars(self._local).get("coming"), None
        if coming is not None:
            count = len(numbers)
            if np.array_equal(coming[0][:count], numbers):
                found = coming[1][:count]
                coming = coming[0][count:], coming[1][count:]
            self._local.coming = coming if found is not None and len(coming[0]) else None
        return self.read(numbers, numbers + 1) if found is None else found

    def read(self, begins: np.ndarray, ends: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return the rows [begins[i], ends[i]) of each i, concatenated, bit for bit.

        Args:
            begins, ends: (num,) int64. Where they ascend, near ones are read together.
            out: (num rows, ...) of the file's dtype, filled and returned where given.
        """
        lengths = ends - begins
        if not (lengths > 0).all():
            begins, ends, lengths = begins[lengths > 0], ends[lengths > 0], lengths[lengths > 0]
        out = np.empty((int(lengths.sum()), *self.row_shape), self.dtype) if out is None else out
        if not self.row_bytes or not len(out):
            return out
        gap, most = GAP_BYTES // self.row_bytes, max(1, READ_BYTES // self.row_bytes)
        cuts = _runs(begins, ends, gap, most)
        firsts = begins[cuts[:-1]]
        lasts = ends[cuts[1:] - 1]
        rows = out.reshape(len(out), -1).view(np.uint8)
        places = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[cuts]
        behind = np.cumsum(lasts - firsts) * self.row_bytes
        direct, announced = self._direct is not None and behind[-1] >= _SHORT_READ * len(firsts), 1
        for run in range(len(firsts)):
            announced = announced if direct else self._announce(firsts, lasts, behind, run, announced)
            first, last, place = int(firsts[run]), int(lasts[run]), int(places[run])
            is_whole = last - first == places[run + 1] - place
            found = rows[place : place + last - first] if is_whole and not direct else self._buffer(last - first)
            found = self._read_direct(first, last) if direct else self._fill(found, first)
            if is_whole and direct:
                rows[place : place + last - first] = found
            elif not is_whole:
                chosen = slice(cuts[run], cuts[run + 1])
                _copy_segments(_words(found), first, begins[chosen], ends[chosen], _words(rows), place)
        return out

    def _announce(self, firsts: np.ndarray, lasts: np.ndarray, behind: np.ndarray, run: int, announced: int) -> int:
        """Tell the disk of the reads behind run `run`, some at a time; return how many have been announced."""
        until = int(np.searchsorted(behind, behind[run] + _AHEAD_BYTES))
        until = min(run + 1 + _READS_AHEAD, until, len(firsts))
        if not CAN_ADVISE or until < min(announced + _READS_AHEAD // 4, len(firsts)):
            return announced
        for coming in range(max(announced, run + 1), until):
            position, size = self._place(firsts[coming], lasts[coming])
            advise(self._file.fileno(), position, size, "willneed")
        return max(announced, until)

    def write(self, first: int, values: np.ndarray) -> None:
        """Write rows from row `first` on."""
        data, done = memoryview(np.ascontiguousarray(values, self.dtype)).cast("B"), 0
        with open(self.path, "r+b", buffering=0) as file:
            position = self._place(first, first)[0]
            while done < len(data):
                done += os.pwrite(file.fileno(), data[done:], position + done)
            # The disk begins to write: dirty pages cannot be dropped where memory is capped.
            advise(file.fileno(), position, len(data), "dontneed")

    def _place(self, first: int, last: int) -> tuple[int, int]:
        return self.offset + int(first) * self.row_bytes, int(last - first) * self.row_bytes

    def _buffer(self, num_rows: int) -> np.ndarray:
        """Return (num_rows, row_bytes) of memory that this thread reuses."""
        return self._memory(num_rows * self.row_bytes)[: num_rows * self.row_bytes].reshape(num_rows, self.row_bytes)

    def _memory(self, num_bytes: int) -> np.ndarray:
        """Return memory of so many bytes at least, from a page's begin on, that this thread reuses."""
        held = vars(self._local).get("held")
        if held is None or len(held) < num_bytes:
            memory = np.empty(max(READ_BYTES, num_bytes) + 4 * PAGE_BYTES, np.uint8)
            held = self._local.held = memory[-memory.ctypes.data % PAGE_BYTES :]
        return held

    def _read_direct(self, first: int, last: int) -> np.ndarray:
        """Return the rows [first, last) in memory that this thread reuses, read past the page cache."""
        position, size = self._place(first, last)
        skipped, done = position % PAGE_BYTES, 0
        whole = -(-(skipped + size) // PAGE_BYTES) * PAGE_BYTES
        memory = self._memory(whole)
        while done < skipped + size:
            count = os.preadv(self._direct.fileno(), [memory[done:whole]], position - skipped + done)
            done += count
            if not count or (done % PAGE_BYTES and done < skipped + size):
                raise PartitionStoreError(f"{self.path}: ends before row {last}; write the store again")
        return memory[skipped : skipped + size].reshape(last - first, self.row_bytes)

    def _fill(self, out: np.ndarray, first: int) -> np.ndarray:
        view, (position, size), done = memoryview(out).cast("B"), self._place(first, first + len(out)), 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], position + done)
            if not count:
                raise PartitionStoreError(f"{self.path}: ends before row {first + len(out)}; write the store again")
            done += count
        if self._past_cache:
            advise(self._file.fileno(), position, size, "dontneed")
        return out


@dataclass
class EvaluationPass(Batch):
    """One exact pass over this rank's rows: the single batch of the validation, test and predict loaders.

    Attributes:
        source: the source of layer-wise inference.
        split: "val", "test", or None to predict every node.
        labels: (num_nodes,) or (num_nodes, num_labels) in store ids, None without labels.
        masks: {"train" | "val" | "test": bool (num_nodes,)} in store ids.
        links: this rank's `EvaluationLinks`, or None.
        sample: the nodes of the split that are evaluated, or of all that are predicted; None: all of them.
        table_dtype: "float32", or "bfloat16" for the tables of hidden layers.
        layers: outputs of hidden layers that last longer than the pass, or None.
        computed: num_layers + 1 sets, the rows that each layer computes where `layers` has the others; None: what
            `sample` needs.
    """

    source: StoreLayerSource = field()  # has no default, unlike fields of `Batch`
    split: str | None
    labels: np.ndarray | None
    masks: dict[str, np.ndarray]
    links: EvaluationLinks | None = None
    sample: NodeSet | None = None
    table_dtype: str = "float32"
    layers: KeptLayers | None = None
    computed: Sequence[NodeSet] | None = None
    _needed: dict[int, list[NodeSet | None]] = field(default_factory=dict)

    def needed(self, num_layers: int) -> Sequence[NodeSet | None] | None:
        """Return which rows each layer of a model must have for this split, see `closure`; None: all of them."""
        if self.computed is not None or (self.split is None and self.sample is None):
            return self.computed
        if num_layers not in self._needed:
            of_store = isinstance(self.source, StoreLayerSource)
            with self.source.keeping_rows() if of_store else nullcontext():
                self._needed[num_layers] = closure(self.source, self.wanted(), num_layers)
        return self._needed[num_layers]

    def wanted(self) -> NodeSet:
        """Return the nodes whose outputs are evaluated: all ranks' of a mask, this rank's of links."""
        if self.links is not None:
            return NodeSet.of(self.links.nodes(), self.source.num_nodes)
        return NodeSet.of_mask(self.masks[self.split]) if self.sample is None else self.sample

    @property
    def rows(self) -> np.ndarray:
        """(num_rows,) int64 store ids that this rank computes, ascending within a part."""
        offsets = self.source.store.part_offsets
        ranges = [np.arange(offsets[part], offsets[part + 1]) for part in self.source.parts]
        return np.concatenate(ranges) if ranges else np.empty(0, np.int64)

    def to(self, device, non_blocking: bool = False) -> "EvaluationPass":
        """Return itself: blocks move to the device one by one."""
        return self


@dataclass(frozen=True)
class EvaluationLoader:
    """The validation, test or predict loader of a rank: one pass. (Lightning reads a list as several loaders.)"""

    evaluation: EvaluationPass

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EvaluationPass]:
        yield self.evaluation


def _add_runs(runs: list[list[int]], rows: np.ndarray) -> None:
    """Add ascending rows to a list of [first, end); consecutive rows are one run, and may continue the last."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    for chunk in np.split(rows, cuts) if len(rows) else ():
        first, end = int(chunk[0]), int(chunk[-1]) + 1
        if runs and runs[-1][1] == first:
            runs[-1][1] = end
        else:
            runs.append([first, end])


def _send_rows(file: "FileRows", written: Sequence[np.ndarray], firsts: Sequence[int]) -> None:
    """Send rows of a table to all machines, in rounds of a bounded chunk a rank; every rank calls it.

    Args:
        file: this machine's table; the rows that other machines' ranks wrote are written to it.
        written: (num_runs, 2) int64 of each rank: first row and end of each run that it wrote.
        firsts: for each rank, the first rank that sees the same folder.

    Cost: twice `_ROUND_BYTES`, or a row of each rank.
    """
    here = [number for number, first in enumerate(firsts) if first == firsts[rank()]]
    away = [number for number in range(len(firsts)) if number not in here][here.index(rank()) :: len(here)]
    most = max(int((runs[:, 1] - runs[:, 0]).sum()) for runs in written)
    step = max(1, _ROUND_BYTES // (len(written) * file.row_bytes))
    for start in range(0, most, step):
        stop = min(start + step, most)
        rows = file.read(*_part_of(written[rank()], start, stop))
        own = np.zeros((stop - start, *file.row_shape), file.dtype)
        own[: len(rows)] = rows
        sent = torch.from_numpy(own.view(np.uint8)).to(group_device())
        received = sent.new_empty((len(written) * len(sent), sent.shape[1]))
        with clear_error("sending rows of a table"):
            dist.all_gather_into_tensor(received, sent)
        for number in away:
            values = received[number * len(sent) :][: len(sent)].cpu().numpy().view(file.dtype)
            place = 0
            for begin, end in zip(*_part_of(written[number], start, stop), strict=True):
                file.write(begin, values[place : place + end - begin])
                place += end - begin


def _part_of(runs: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first and end of the runs of the rows [start, stop) in the concatenation of runs."""
    behind = np.cumsum(runs[:, 1] - runs[:, 0])
    begins = np.maximum(runs[:, 0], runs[:, 1] - behind + start)
    ends = np.minimum(runs[:, 1], runs[:, 1] - behind + stop)
    return begins[begins < ends], ends[begins < ends]


def _mapped(array: np.ndarray) -> np.memmap | None:
    """Return the map behind a contiguous array of at least one row, or None."""
    found, base = None, array
    while isinstance(base, np.ndarray):
        found = base if isinstance(base, np.memmap) else found
        base = base.base
    usable = found is not None and found.filename is not None and array.flags.c_contiguous and array.size
    return found if usable else None


def _offset(array: np.ndarray, mapped: np.memmap) -> int:
    """Return the byte of the file at which an array inside a map of it begins."""
    return mapped.offset + array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]


def _words(rows: np.ndarray) -> np.ndarray:
    """View (num, row_bytes) bytes as the largest words that divide them."""
    size = next(size for size in (8, 4, 2, 1) if rows.shape[1] % size == 0)
    return rows.view(np.dtype(f"u{size}"))


@kernel
def _runs(begins, ends, gap, most):
    """Return (num_runs + 1,) starts of runs of near segments, each of at most `most` rows, gaps included."""
    cuts = np.empty(len(begins) + 1, np.int64)
    cuts[0], count, first = 0, 1, begins[0]
    for i in range(1, len(begins)):
        if begins[i] < ends[i - 1] or begins[i] - ends[i - 1] > gap or ends[i] - first > most:
            cuts[count], first = i, begins[i]
            count += 1
    cuts[count] = len(begins)
    return cuts[: count + 1].copy()


@kernel
def _copy_segments(rows, first, begins, ends, out, place):
    """Copy segments of rows, which begin with row `first` of the file, to out from `place` on."""
    for i in range(len(begins)):
        for row in range(begins[i] - first, ends[i] - first):
            found, target = rows[np.uint64(row)], out[np.uint64(place)]
            for word in range(rows.shape[1]):
                target[word] = found[word]
            place += 1
