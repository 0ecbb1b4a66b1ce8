"""A small heterogeneous graphs: its batches, its rows for layer-wise inference, and PyG's form of it."""

from typing import NamedTuple

import numpy as np
import torch
from model.graphs import Graph, MemorySource, sampled, to_sparse

from lightning_gnnscale.graph import GraphSchema
from lightning_gnnscale.model import RowBlock
from lightning_gnnscale.sampler.minibatch import MiniBatch, RowsByNodeType

SCHEMA = GraphSchema(
    ("paper", "author", "field"),
    (
        ("paper", "cites", "paper"),
        ("author", "writes", "paper"),
        ("paper", "rev_writes", "author"),
        ("field", "names", "paper"),
        ("paper", "never", "paper"),  # without edges
    ),
)
ONE_NODE_TYPE = GraphSchema(("entity",), tuple(("entity", f"r{number}", "entity") for number in range(9)))
WIDTHS = {"paper": 6, "author": 5, "field": 0}
NUM_NODES, NUM_EDGES, EDGE_DIM = 40, 220, 3


class HeteroGraph(NamedTuple):
    graph: Graph  # edges by target
    schema: GraphSchema
    node_type: torch.Tensor
    edge_type: torch.Tensor
    tables: list  # of features by node type, for all nodes of the node type in ascending order
    edge_attr: torch.Tensor

    def rows(self, nodes: torch.Tensor, sparse=False) -> RowsByNodeType:
        place = torch.zeros_like(self.node_type)
        for node_type in range(self.schema.num_node_types):
            chosen = self.node_type == node_type
            place[chosen] = torch.arange(int(chosen.sum()))
        node_type, tables = self.node_type[nodes], []
        for number, table in enumerate(self.tables):
            rows = None if table is None else table[place[nodes[node_type == number]]]
            tables.append(to_sparse(rows) if sparse and rows is not None else rows)
        return RowsByNodeType(node_type, tables)

    def batch(self, seeds=None, num_hops=2) -> MiniBatch:
        """The whole graph, or all neighbours of some seeds."""
        graph = self.graph
        if seeds is None:
            n_id, edge_index, indptr, counts = torch.arange(NUM_NODES), graph.edge_index, graph.indptr, None
            edges = torch.arange(edge_index.shape[1])
        else:
            n_id, edge_index, indptr, counts = sampled(graph, seeds, num_hops)
            rows = n_id[: len(indptr) - 1].tolist()
            edges = torch.cat([torch.arange(int(graph.indptr[row]), int(graph.indptr[row + 1])) for row in rows])
        several = self.schema.num_node_types > 1
        return MiniBatch(
            n_id, edge_index, indptr, NUM_NODES if seeds is None else len(seeds), 0, 0, num_sampled_nodes=counts,
            edge_attr=self.edge_attr[edges], edge_type=self.edge_type[edges], schema=self.schema,
            node_type=self.node_type[n_id] if several else None, x_by_node_type=self.rows(n_id) if several else None,
            x_dense=None if several else self.tables[0][n_id], y=graph.y[n_id],
        )  # fmt: skip


def hetero_graph(schema=SCHEMA, seed=0, dtype=torch.float64) -> HeteroGraph:
    """Random edges between fitting node types; the last node has none, and repeats are kept."""
    rng = np.random.default_rng(seed)
    node_types = rng.integers(0, schema.num_node_types, NUM_NODES)
    edges = []
    for _ in range(NUM_EDGES):
        relation = rng.integers(0, max(1, schema.num_edge_types - 1))
        ends = []
        for type_number in (schema.sources[relation], schema.targets[relation]):
            ends.append(rng.choice(np.flatnonzero(node_types[:-1] == type_number)))
        edges.append((*ends, relation))
    src, dst, relation = np.array(edges).T
    order = np.lexsort((src, dst))
    src, dst, relation = src[order], dst[order], relation[order]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=NUM_NODES))])
    node_type = torch.from_numpy(node_types)
    widths = list(WIDTHS.values()) if schema is SCHEMA else [7]
    tables = [
        torch.from_numpy(rng.standard_normal((int((node_types == type_number).sum()), width))).to(dtype)
        if width
        else None
        for type_number, width in enumerate(widths)
    ]
    y = torch.from_numpy(rng.integers(0, 4, NUM_NODES))
    graph = Graph(NUM_NODES, torch.from_numpy(np.stack([src, dst])), torch.from_numpy(indptr), torch.empty(0), y)
    edge_attr = torch.from_numpy(rng.standard_normal((NUM_EDGES, EDGE_DIM))).to(dtype)
    return HeteroGraph(graph, schema, node_type, torch.from_numpy(relation), tables, edge_attr)


class TypedSource(MemorySource):
    """A `LayerSource` with node types and edge types; features may be sparse."""

    def __init__(self, typed: HeteroGraph, chunk=1000, sparse=False, edge_attr=False):
        super().__init__(typed.graph, chunk=chunk)
        self.typed, self.sparse, self.edge_attr = typed, sparse, edge_attr

    def all_blocks(self):
        indptr = self.graph.indptr.numpy()
        for block in super().all_blocks():
            edges = slice(indptr[block.rows[0]], indptr[block.rows[-1] + 1])
            attr = self.typed.edge_attr[edges].numpy() if self.edge_attr else None
            relations = self.typed.edge_type[edges].numpy().astype(np.uint8)
            yield RowBlock(*block[:3], block.edge_weight, attr, relations)

    def node_type(self, nodes):
        return self.typed.node_type.numpy()[nodes] if self.typed.schema.num_node_types > 1 else None

    def gather(self, nodes, table=None):
        if table is not None:
            return super().gather(nodes, table)
        if self.typed.schema.num_node_types == 1:
            return self.typed.tables[0][torch.from_numpy(nodes)]
        return self.typed.rows(torch.from_numpy(nodes), self.sparse)
