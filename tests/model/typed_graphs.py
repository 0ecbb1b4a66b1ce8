"""A small graph with kinds and relations: its batches, its rows for layer-wise inference, and PyG's form of it."""

from typing import NamedTuple

import numpy as np
import torch
from model.graphs import Graph, MemorySource, sampled, to_sparse

from lightning_gnnscale.graph import GraphSchema
from lightning_gnnscale.model import RowBlock
from lightning_gnnscale.sampler.minibatch import MiniBatch, RowsByKind

SCHEMA = GraphSchema(
    ("paper", "author", "field"),
    (
        ("paper", "cites", "paper"),
        ("author", "writes", "paper"),
        ("paper", "rev_writes", "author"),
        ("field", "names", "paper"),
        ("paper", "never", "paper"),  # without arcs
    ),
)
ONE_KIND = GraphSchema(("entity",), tuple(("entity", f"r{number}", "entity") for number in range(9)))
WIDTHS = {"paper": 6, "author": 5, "field": 0}
NUM_NODES, NUM_ARCS, EDGE_DIM = 40, 220, 3


class TypedGraph(NamedTuple):
    graph: Graph  # arcs by target
    schema: GraphSchema
    node_type: torch.Tensor
    edge_type: torch.Tensor
    tables: list  # of features by kind, for all nodes of the kind in ascending order
    edge_attr: torch.Tensor

    def rows(self, nodes: torch.Tensor, sparse=False) -> RowsByKind:
        place = torch.zeros_like(self.node_type)
        for kind in range(self.schema.num_kinds):
            chosen = self.node_type == kind
            place[chosen] = torch.arange(int(chosen.sum()))
        kind, tables = self.node_type[nodes], []
        for number, table in enumerate(self.tables):
            rows = None if table is None else table[place[nodes[kind == number]]]
            tables.append(to_sparse(rows) if sparse and rows is not None else rows)
        return RowsByKind(kind, tables)

    def batch(self, seeds=None, num_hops=2) -> MiniBatch:
        """The whole graph, or all neighbours of some seeds."""
        graph = self.graph
        if seeds is None:
            n_id, edge_index, indptr, counts = torch.arange(NUM_NODES), graph.edge_index, graph.indptr, None
            arcs = torch.arange(edge_index.shape[1])
        else:
            n_id, edge_index, indptr, counts = sampled(graph, seeds, num_hops)
            rows = n_id[: len(indptr) - 1].tolist()
            arcs = torch.cat([torch.arange(int(graph.indptr[row]), int(graph.indptr[row + 1])) for row in rows])
        several = self.schema.num_kinds > 1
        return MiniBatch(
            n_id, edge_index, indptr, NUM_NODES if seeds is None else len(seeds), 0, 0, num_sampled_nodes=counts,
            edge_attr=self.edge_attr[arcs], edge_type=self.edge_type[arcs], schema=self.schema,
            node_type=self.node_type[n_id] if several else None, x_by_kind=self.rows(n_id) if several else None,
            x_dense=None if several else self.tables[0][n_id], y=graph.y[n_id],
        )  # fmt: skip


def typed_graph(schema=SCHEMA, seed=0, dtype=torch.float64) -> TypedGraph:
    """Random arcs between fitting kinds; the last node has none, and repeats are kept."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, schema.num_kinds, NUM_NODES)
    arcs = []
    for _ in range(NUM_ARCS):
        relation = rng.integers(0, max(1, schema.num_relations - 1))
        ends = []
        for kind in (schema.sources[relation], schema.targets[relation]):
            ends.append(rng.choice(np.flatnonzero(kinds[:-1] == kind)))
        arcs.append((*ends, relation))
    src, dst, relation = np.array(arcs).T
    order = np.lexsort((src, dst))
    src, dst, relation = src[order], dst[order], relation[order]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=NUM_NODES))])
    node_type = torch.from_numpy(kinds)
    widths = list(WIDTHS.values()) if schema is SCHEMA else [7]
    tables = [
        torch.from_numpy(rng.standard_normal((int((kinds == kind).sum()), width))).to(dtype) if width else None
        for kind, width in enumerate(widths)
    ]
    y = torch.from_numpy(rng.integers(0, 4, NUM_NODES))
    graph = Graph(NUM_NODES, torch.from_numpy(np.stack([src, dst])), torch.from_numpy(indptr), torch.empty(0), y)
    edge_attr = torch.from_numpy(rng.standard_normal((NUM_ARCS, EDGE_DIM))).to(dtype)
    return TypedGraph(graph, schema, node_type, torch.from_numpy(relation), tables, edge_attr)


class TypedSource(MemorySource):
    """A `LayerSource` with kinds and relations; features may be sparse."""

    def __init__(self, typed: TypedGraph, chunk=1000, sparse=False, edge_attr=False):
        super().__init__(typed.graph, chunk=chunk)
        self.typed, self.sparse, self.edge_attr = typed, sparse, edge_attr

    def all_blocks(self):
        indptr = self.graph.indptr.numpy()
        for block in super().all_blocks():
            arcs = slice(indptr[block.rows[0]], indptr[block.rows[-1] + 1])
            attr = self.typed.edge_attr[arcs].numpy() if self.edge_attr else None
            relations = self.typed.edge_type[arcs].numpy().astype(np.uint8)
            yield RowBlock(*block[:3], block.edge_weight, attr, relations)

    def node_type(self, nodes):
        return self.typed.node_type.numpy()[nodes] if self.typed.schema.num_kinds > 1 else None

    def gather(self, nodes, table=None):
        if table is not None:
            return super().gather(nodes, table)
        if self.typed.schema.num_kinds == 1:
            return self.typed.tables[0][torch.from_numpy(nodes)]
        return self.typed.rows(torch.from_numpy(nodes), self.sparse)
