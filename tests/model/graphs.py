"""Small graphs, batches and a source of layer-wise inference held in memory."""

import threading
from dataclasses import dataclass, field

import numpy as np
import torch

from lightning_gnnscale.datamodule.edge_spool import EdgeSpool
from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.model import RowBlock
from lightning_gnnscale.model.layer_inputs import SparseInput
from lightning_gnnscale.model.layer_source import select_rows


@dataclass
class Graph:
    """A directed graph without self-loops or repeats: node 0 is a hub, the last node is isolated."""

    num_nodes: int
    edge_index: torch.Tensor
    indptr: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    masks: dict = field(default_factory=dict)

    @property
    def degree(self):
        return self.indptr.diff()


def make_graph(num_nodes=60, num_edges=300, in_channels=12, num_classes=4, seed=0, dtype=torch.float32, hub=True):
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(0, num_nodes - 1, (2, num_edges))
    if hub:
        src, dst = np.r_[src, np.arange(1, num_nodes - 1)], np.r_[dst, np.zeros(num_nodes - 2, np.int64)]
    src, dst = np.unique(np.stack([src, dst])[:, src != dst], axis=1)
    return make_graph_of(src, dst, num_nodes, in_channels, num_classes, rng, dtype)


def make_graph_of(src, dst, num_nodes, in_channels=12, num_classes=4, rng=None, dtype=torch.float32):
    """Return the graph of some edges, kept as they are."""
    rng = np.random.default_rng(0) if rng is None else rng
    csc = build_csc(np.asarray(src), np.asarray(dst), num_nodes)
    row = np.repeat(np.arange(num_nodes), csc.in_degree)
    edge_index = torch.from_numpy(np.stack([csc.indices.astype(np.int64), row]))
    x = rng.standard_normal((num_nodes, in_channels)) * (rng.random((num_nodes, in_channels)) < 0.4)
    y = torch.from_numpy(rng.integers(0, num_classes, num_nodes))
    return Graph(num_nodes, edge_index, torch.from_numpy(csc.indptr), torch.from_numpy(x).to(dtype), y)


def to_sparse(x: torch.Tensor) -> SparseInput:
    csr = x.to_sparse_csr()
    return SparseInput(csr.crow_indices(), csr.col_indices(), csr.values(), x.shape[1])


def sampled(graph: Graph, seeds: list[int], num_hops: int):
    """Full-neighbour sampling, slow and obvious.

    Returns:
        n_id, edge_index, indptr, num_sampled_nodes: as a `MiniBatch` has them.
    """
    nodes, place = list(seeds), {node: i for i, node in enumerate(seeds)}
    counts, sources, indptr = [len(seeds)], [], [0]
    done = 0
    for _ in range(num_hops):
        stop = len(nodes)
        for node in nodes[done:stop]:
            for source in graph.edge_index[0, graph.indptr[node] : graph.indptr[node + 1]].tolist():
                if source not in place:
                    place[source] = len(nodes)
                    nodes.append(source)
                sources.append(place[source])
            indptr.append(len(sources))
        done = stop
        counts.append(len(nodes) - stop)
    target = torch.repeat_interleave(torch.arange(done), torch.tensor(indptr).diff())
    edge_index = torch.stack([torch.tensor(sources, dtype=torch.int64), target])
    return torch.tensor(nodes), edge_index, torch.tensor(indptr), counts


class SharedTables:
    """What the ranks of a host share: tables by name, one barrier, and how many tables stand."""

    def __init__(self, world_size: int, folder=None):
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.tables, self.folder = {}, folder
        self.bits, self.lock = None, threading.Lock()


class MemorySource:
    """A `LayerSource` of one rank of `world_size` simulated ones: rows rank, rank + world_size, ... of `chunk` rows."""

    def __init__(self, graph: Graph, rank=0, shared=None, world_size=1, chunk=1000, sparse=False, edge_weight=None):
        self.graph, self.rank, self.world_size, self.chunk = graph, rank, world_size, chunk
        self.shared = shared or SharedTables(1)
        self.features = to_sparse(graph.x) if sparse else graph.x
        self.edge_weight = edge_weight
        self.num_nodes = graph.num_nodes
        self.row_bytes, self.has_weights = 4.0 * graph.x.shape[-1], edge_weight is not None
        self.gathered = []

    def counts(self, needed=None):
        blocks = list(self.blocks(needed))
        return sum(len(block.rows) for block in blocks), sum(len(block.indices) for block in blocks)

    def spool(self):
        return None if self.shared.folder is None else EdgeSpool(self.shared.folder / f"edges-{self.rank}")

    def blocks(self, needed=None):
        for block in self.all_blocks():
            yield block if needed is None else select_rows(block, needed)

    def all_blocks(self):
        indptr, indices = self.graph.indptr.numpy(), self.graph.edge_index[0].numpy()
        starts = range(0, self.num_nodes, self.chunk)
        for start in list(starts)[self.rank :: self.world_size]:
            stop = min(start + self.chunk, self.num_nodes)
            edges = slice(indptr[start], indptr[stop])
            weight = None if self.edge_weight is None else self.edge_weight[edges]
            yield RowBlock(np.arange(start, stop), indptr[start : stop + 1] - indptr[start], indices[edges], weight)

    def gather(self, nodes, table=None):
        if table is not None:
            return torch.from_numpy(table[nodes])
        self.gathered.append(len(nodes))
        if isinstance(self.features, torch.Tensor):
            return self.features[torch.from_numpy(nodes)]
        return to_sparse(self.graph.x[torch.from_numpy(nodes)])

    def expect(self, nodes, table=None):
        assert (np.diff(nodes) > 0).all()

    def store_ids(self, nodes):
        return np.asarray(nodes, np.int64)

    def degree(self, nodes):
        return self.graph.degree.numpy()[nodes]

    def self_weight(self, nodes):
        return None

    def write(self, table, rows, values):
        table[rows] = values

    def union(self, bits):
        with self.shared.lock:
            if self.shared.bits is None:
                self.shared.bits = np.zeros_like(bits)
            self.shared.bits |= bits
        self.barrier()
        bits[:] = self.shared.bits
        self.barrier()
        self.shared.bits = None
        self.barrier()

    def table(self, name, dim, num_rows=None, dtype=np.float32):
        if self.rank == 0:
            shape = (self.num_nodes if num_rows is None else num_rows, dim)
            if self.shared.folder is None:
                nothing = np.nan if np.dtype(dtype).kind == "f" else 0x7FC0  # not a number in bfloat16
                self.shared.tables[name] = np.full(shape, nothing, dtype)
            else:
                path = self.shared.folder / f"{name}.npy"
                self.shared.tables[name] = np.lib.format.open_memmap(path, "w+", dtype, shape)
        self.barrier()
        return self.shared.tables[name]

    def barrier(self):
        self.shared.barrier.wait()
