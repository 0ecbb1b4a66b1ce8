"""The edges of one block:

their halves add up, their reverse is the adjoint, pulled gradients read the right weights.
"""

import pytest
import torch
from model.row_blocks import NUM_NODES, make_rows

from lightning_gnnscale.model import GAT, GCN, NGNN, SGC, GraphSAGE
from lightning_gnnscale.model.block import Block
from lightning_gnnscale.model.layer_inputs import SparseInput
from lightning_gnnscale.model.row_layers import EdgeSums, edges_from, prepared_rows
from lightning_gnnscale.triton_kernels.aggregate import Transposed, aggregate, device

WEIGHED = [GCN, GraphSAGE, SGC, NGNN]
PULLED = [GCN, GraphSAGE, NGNN]


def build(kind, dtype=torch.float64):
    torch.manual_seed(0)
    return kind(5, 8, 3, num_layers=3, dropout=0.0).to(dtype)


def edges_of(model, rows, local_only=False):
    return model.row_edges(rows.block, rows.node_ids, {}, local_only)


def dense(block: Block) -> torch.Tensor:
    """The (num_targets, num_sources) matrix of a block, edge by edge."""
    matrix = torch.zeros(block.num_targets, block.num_sources, dtype=block.edge_weight.dtype)
    for row in range(block.num_targets):
        for edge in range(int(block.indptr[row]), int(block.indptr[row + 1])):
            matrix[row, int(block.indices[edge])] += block.edge_weight[edge]
    return matrix


def whole_matrix(model, **graph):
    (rows,) = make_rows((0, NUM_NODES), **graph)
    return dense(edges_of(model, rows).block)


@pytest.mark.parametrize("graph", [{}, {"directed": True}, {"weighted": True}], ids=["plain", "directed", "weighted"])
@pytest.mark.parametrize("kind", WEIGHED)
def test_inner_and_outer_sums_add_up_to_the_whole(kind, graph):
    model, whole = build(kind), whole_matrix(build(kind), **graph)
    torch.manual_seed(0)
    for rows in make_rows(**graph):
        edges = edges_of(model, rows)
        own = rows.node_ids[: rows.num_local]
        # the same weights as in the graph that is not cut
        assert torch.equal(dense(edges.block), whole[own][:, rows.node_ids])
        inner, outer = edges.inner, edges.outer
        assert torch.equal(dense(inner.block), dense(edges.block)[:, : edges.num_local])
        assert torch.equal(dense(outer.block), dense(edges.block)[:, edges.num_local :])
        x = torch.randn(len(rows.node_ids), 6, dtype=torch.float64)
        summed = inner(x[: edges.num_local].contiguous()) + outer(x[edges.num_local :].contiguous())
        expected = aggregate(x, edges.block.indptr, edges.block.indices, edges.block.edge_weight)
        # sums of at most 10 values of order 1
        torch.testing.assert_close(summed, expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(summed, dense(edges.block) @ x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("by_source", [True, False], ids=["transposed", "other devices"])
@pytest.mark.parametrize("kind", WEIGHED)
def test_the_sums_back_are_the_adjoint(kind, by_source):
    model = build(kind)
    for rows in make_rows(directed=True):
        for sums in (edges_of(model, rows).inner, edges_of(model, rows).outer):
            if not by_source:
                block = sums.block  # as on a device without that kernel
                weight, *edges = device.by_source(
                    block.indptr, block.indices, block.edge_weight[:, None], block.num_sources
                )
                sums.transposed = Transposed(*edges, weight)
            x = torch.randn(sums.block.num_sources, 4, dtype=torch.float64)
            y = torch.randn(sums.block.num_targets, 4, dtype=torch.float64)
            torch.testing.assert_close((sums(x) * y).sum(), (x * sums.back(y)).sum(), rtol=0, atol=1e-13)
            torch.testing.assert_close(sums.back(y), dense(sums.block).t() @ y, rtol=0, atol=1e-14)
            through = x.clone().requires_grad_()
            sums(through).backward(y)
            torch.testing.assert_close(through.grad, sums.back(y), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", PULLED)
def test_pulled_gradients_are_summed_along_the_edges_of_the_others(kind):
    """What the whole graph sums for the own rows: A transposed, split by who owns the target of the edge."""
    model, whole = build(kind), whole_matrix(build(kind))
    for rows in make_rows():
        edges = edges_of(model, rows)
        own, halo = rows.node_ids[: rows.num_local], rows.node_ids[rows.num_local :]
        torch.testing.assert_close(dense(edges.outer_reverse.block), whole[halo][:, own].t(), rtol=1e-15, atol=0)
        y = torch.randn(NUM_NODES, 3, dtype=torch.float64)
        pulled = edges.inner.back(y[own]) + edges.outer_reverse(y[halo].contiguous())
        torch.testing.assert_close(pulled, (whole.t() @ y)[own], rtol=0, atol=1e-14)


def test_nothing_is_pulled_along_weighted_edges_or_by_attention():
    (rows, *_) = make_rows(weighted=True)
    assert edges_of(build(GCN), rows).reverse_weight is None
    (rows, *_) = make_rows()
    assert edges_of(build(GAT), rows).reverse_weight is None
    assert edges_of(build(GCN), rows, local_only=True).reverse_weight is None


@pytest.mark.parametrize("kind", WEIGHED)
def test_without_the_halo_a_block_is_a_graph_of_its_own(kind):
    model = build(kind)
    for rows in make_rows():
        edges = edges_of(model, rows, local_only=True)
        assert edges.local_only and edges.num_halo == 0
        assert edges.node_ids.tolist() == rows.node_ids[: rows.num_local].tolist()
        inside = edges_from(rows.block, 0, rows.num_local)
        alone = Block(inside.indptr, inside.indices, rows.num_local, degree=inside.indptr.diff())
        assert torch.equal(
            dense(edges.block), dense(edges_of(model, type(rows)(0, alone, edges.node_ids, [], [])).block)
        )


def test_edges_have_the_same_numbers_on_every_process():
    (whole,) = make_rows((0, NUM_NODES), directed=True)

    def numbered(rows):
        edges = edges_of(build(GAT), rows)
        ends = zip(edges.block.target_of_edges().tolist(), edges.block.indices.tolist(), strict=True)
        nodes = rows.node_ids.tolist()
        return {(nodes[v], nodes[u]): number for (v, u), number in zip(ends, edges.edge_ids.tolist(), strict=True)}

    expected = numbered(whole)
    assert len(set(expected.values())) == len(expected)
    found = {}
    for rows in make_rows(directed=True):
        found |= numbered(rows)
    assert found == expected


def test_ids_of_own_rows_and_of_the_halo():
    first, *_ = make_rows()
    edges = edges_of(build(GCN), first)
    assert edges.own_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert edges.halo_ids.tolist() == [7, 8, 9, 12, 13, 14, 15]
    assert (edges.num_local, edges.num_halo) == (6, 7)


def test_what_is_kept_is_computed_once():
    edges, calls = edges_of(build(GCN), make_rows()[0]), []

    def compute():
        calls.append(1)
        return torch.ones(1)

    assert edges.keep("one", compute) is edges.keep("one", compute)
    assert edges.keep("two", compute) is not edges.keep("one", compute)
    assert len(calls) == 2


class Batch:
    """What `prepared_rows` reads of a full-graph batch."""

    def __init__(self, rows, x_dense=None, x_csr=None):
        self.x_dense, self.x_csr, self.memo = x_dense, x_csr, {}
        block = rows.block
        self.indptr, self.indices, self.edge_weight = block.indptr, block.indices, block.edge_weight
        self.degree, self.self_weight, self.n_id = block.degree, block.self_weight, rows.node_ids


@pytest.mark.parametrize("sparse", [False, True])
def test_a_batch_is_prepared_once_for_a_model(sparse):
    rows, *_ = make_rows()
    x = torch.rand(len(rows.node_ids), 5) * (torch.rand(len(rows.node_ids), 5) < 0.5)
    csr = x.to_sparse_csr()
    given = SparseInput(csr.crow_indices(), csr.col_indices(), csr.values(), 5)
    batch, model = Batch(rows, **({"x_csr": given} if sparse else {"x_dense": x})), build(GCN)
    first = prepared_rows(model, batch, False)
    again = prepared_rows(model, batch, False)
    assert first[0] is again[0] and first[1] is again[1]
    assert (first[0].data if sparse else first[0]).dtype == torch.float64
    local, edges = prepared_rows(model, batch, True)
    assert edges.local_only and (len(local.indptr) - 1 if sparse else len(local)) == rows.num_local
    assert prepared_rows(model, batch, False)[1] is first[1]  # both stay
    assert prepared_rows(build(GCN), batch, False)[1] is not first[1]
    assert prepared_rows(model.float(), batch, False)[1].dtype == torch.float32


def test_sums_over_no_edges():
    nothing = Block(torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), 2, torch.zeros(0))
    sums = EdgeSums(nothing, torch.float32)
    assert sums(torch.ones(2, 3)).tolist() == [[0.0] * 3] * 3
    assert sums.back(torch.ones(3, 3)).tolist() == [[0.0] * 3] * 2
    no_halo = EdgeSums(edges_from(nothing, 2, 0), torch.float32)
    assert no_halo(torch.ones(0, 3)).tolist() == [[0.0] * 3] * 3
    assert no_halo.back(torch.ones(3, 3)).shape == (0, 3)
