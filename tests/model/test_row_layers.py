"""Layers over three blocks, each on a thread of its own: outputs and gradients of the graph that is not cut."""

import copy

import pytest
import torch
from model.row_blocks import NUM_NODES, Mail, MailExchange, make_rows, on_threads

from lightning_gnnscale.model import GAT, GCN, NGNN, GraphSAGE
from lightning_gnnscale.model.dropout import RowDropout
from lightning_gnnscale.model.row_layers import NO_HALO
from tests.tiers import all_pairs

IN, HIDDEN, OUT = 5, 4, 3
SUMMING = [GCN, GraphSAGE, NGNN]
CASES = [(kind, pulls) for kind in SUMMING for pulls in (False, True)] + [(GAT, False)]
NAMES = [f"{kind.__name__} {'pulls' if pulls else 'pushes'}" for kind, pulls in CASES]


def build(kind, **options):
    torch.manual_seed(0)
    options |= {"heads": 2} if kind is GAT else {}
    return kind(IN, HIDDEN, OUT, num_layers=3, **{"dropout": 0.0, "activation": "elu", **options}).double()


def copies(model, blocks, pulls, exchange=MailExchange):
    """A copy of the model for each block, its layers joined by one mail."""
    mail, models = Mail(), []
    for rows in blocks:
        models.append(copy.deepcopy(model))
        for index, layer in enumerate(models[-1].convs):
            layer.exchange = exchange(mail, rows, index, pulls)
    return models


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def added(many):
    """Sums over blocks of the gradients of each parameter."""
    return [sum(own) for own in zip(*many, strict=True)]


def close(found, expected, atol=1e-13):
    # float64, sums of up to 40 values of order 1
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def second_layer(model, rows, h, drop, weight):
    """Run the second layer of a model and its backward."""
    h = h.clone().requires_grad_()
    layer, edges = model.convs[1], model.row_edges(rows.block, rows.node_ids, {})
    out = layer.rows(h, edges, drop)
    (out * weight).sum().backward()
    return out.detach(), h.grad, gradients(layer), layer.exchange


def cut(tensor, blocks):
    return [tensor[rows.node_ids[: rows.num_local]] for rows in blocks]


def by_plain_sums(model, rows, h, drop, weight):
    """The second layer of the whole graph with a dense matrix, differentiated by torch alone."""
    edges = model.row_edges(rows.block, rows.node_ids, {})
    matrix = torch.zeros(NUM_NODES, NUM_NODES, dtype=torch.float64)
    matrix.index_put_(
        (edges.block.target_of_edges(), edges.block.indices.long()), edges.block.edge_weight, accumulate=True
    )
    layer, h = copy.deepcopy(model.convs[1]), h.clone().requires_grad_()
    own = h * drop(torch.ones_like(h), rows.node_ids)
    out = layer.add_own(matrix @ own @ layer.neighbor_weight.t(), own)
    (out * weight).sum().backward()
    return out.detach(), h.grad, gradients(layer)


@all_pairs
@pytest.mark.parametrize("drop", [RowDropout(0.0), RowDropout(0.4, 99)], ids=["whole", "dropped"])
@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("kind", SUMMING)
def test_a_summing_layer_equals_plain_sums(kind, pulls, drop):
    model, blocks = build(kind), make_rows()
    (whole,) = make_rows((0, NUM_NODES))
    torch.manual_seed(1)
    h = torch.randn(NUM_NODES, HIDDEN, dtype=torch.float64)
    weight = torch.randn(NUM_NODES, HIDDEN, dtype=torch.float64)
    out, h_grad, parameters = by_plain_sums(model, whole, h, drop, weight)
    results = on_threads(
        second_layer, copies(model, blocks, pulls), blocks, cut(h, blocks), [drop] * 3, cut(weight, blocks)
    )
    close(torch.cat([result[0] for result in results]), out)
    close(torch.cat([result[1] for result in results]), h_grad)
    close(added([result[2] for result in results]), parameters)
    for *_, exchange in results:
        back = ("pull", True, HIDDEN) if pulls else ("send back", True, HIDDEN)
        assert exchange.log == [("send", True, HIDDEN), back]


class OneWay(MailExchange):
    """Rows come, no gradient goes back."""

    def _start(self, rows):
        transfer = super()._start(rows)
        transfer.send_back, transfer.wait_back = lambda grad: None, lambda: None
        return transfer

    def pull(self, grad):
        class Nothing:
            def wait(self):
                return None

        return Nothing()


@pytest.mark.parametrize("pulls", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("kind", SUMMING)
def test_without_remote_gradients_own_rows_get_those_of_own_edges(kind, pulls):
    model, blocks = build(kind), make_rows()
    torch.manual_seed(1)
    h = torch.randn(NUM_NODES, HIDDEN, dtype=torch.float64)
    weight = torch.randn(NUM_NODES, HIDDEN, dtype=torch.float64)
    no_drop = [RowDropout(0.0)] * 3
    models = copies(model, blocks, pulls, OneWay)
    results = on_threads(second_layer, models, blocks, cut(h, blocks), no_drop, cut(weight, blocks))
    full = on_threads(second_layer, copies(model, blocks, False), blocks, cut(h, blocks), no_drop, cut(weight, blocks))
    for rows, (out, h_grad, parameters, _), (full_out, _, full_parameters, _) in zip(
        blocks, results, full, strict=True
    ):
        close(out, full_out)
        close(parameters, full_parameters)  # these are local
        edges = model.row_edges(rows.block, rows.node_ids, {})
        layer, own = model.convs[1], h[rows.node_ids[: rows.num_local]].clone().requires_grad_()
        halo = h[rows.node_ids[rows.num_local :]]
        summed = edges.inner(own) + edges.outer(halo)
        (layer.add_own(summed @ layer.neighbor_weight.t(), own) * weight[edges.own_ids]).sum().backward()
        close(h_grad, own.grad)


def run(model, rows, x, weight):
    """Run a whole model over one block, and its backward."""
    out = model.forward_rows(x[rows.node_ids], model.row_edges(rows.block, rows.node_ids, {}))
    (out * weight[rows.node_ids[: rows.num_local]]).sum().backward()
    return out.detach(), gradients(model), [layer.exchange.log for layer in model.convs]


def features():
    torch.manual_seed(2)
    return torch.randn(NUM_NODES, IN, dtype=torch.float64), torch.randn(NUM_NODES, OUT, dtype=torch.float64)


@pytest.mark.parametrize(("kind", "pulls"), CASES, ids=NAMES)
def test_a_model_on_three_blocks_equals_the_whole(kind, pulls):
    model, blocks, (x, weight) = build(kind), make_rows(), features()
    (whole,) = make_rows((0, NUM_NODES))
    edge_index = torch.stack([whole.block.indices.long(), whole.block.target_of_edges()])
    results = on_threads(run, copies(model, blocks, pulls), blocks, [x] * 3, [weight] * 3)
    out = model(x, edge_index, degree=whole.block.degree, indptr=whole.block.indptr)
    (out * weight).sum().backward()
    close(torch.cat([result[0] for result in results]), out.detach())
    close(added([result[1] for result in results]), gradients(model), atol=1e-12)
    for _, _, logs in results:
        # the input of the first layer is never exchanged, and each other layer asks once a way
        assert logs[0] == []
        backward = ("pull", True, OUT) if pulls else ("send back", True, HIDDEN)
        assert logs[2] == [("send", True, HIDDEN), backward]


@pytest.mark.parametrize(("kind", "pulls"), CASES, ids=NAMES)
def test_gradients_equal_finite_differences(kind, pulls):
    """Central differences of the loss of all blocks, by a parameter of which every block has its copy."""
    model, blocks, (x, weight) = build(kind), make_rows(), features()
    results = on_threads(run, copies(model, blocks, pulls), blocks, [x] * 3, [weight] * 3)
    found = added([result[1] for result in results])

    def loss():
        results = on_threads(run, copies(model, blocks, pulls), blocks, [x] * 3, [weight] * 3)
        return sum(
            float((out * weight[rows.node_ids[: rows.num_local]]).sum())
            for rows, (out, *_) in zip(blocks, results, strict=True)
        )

    step = 1e-5
    for parameter, grad in zip(model.parameters(), found, strict=True):
        flat = parameter.data.view(-1)
        for place in {0, len(flat) // 2, len(flat) - 1}:
            before = float(flat[place])
            flat[place] = before + step
            above = loss()
            flat[place] = before - step
            difference = (above - loss()) / (2 * step)
            flat[place] = before
            # truncation: step**2 x third derivatives of order 100; rounding: 1e-14 x losses of order 10 / step
            assert difference == pytest.approx(float(grad.view(-1)[place]), abs=1e-7)


@pytest.mark.parametrize(("kind", "pulls"), CASES, ids=NAMES)
def test_evaluation_asks_for_exact_rows_and_pulls_nothing(kind, pulls):
    model, blocks, (x, _) = build(kind), make_rows(), features()
    models = copies(model.eval(), blocks, pulls)

    def evaluate(model, rows):
        with torch.no_grad():
            return model.forward_rows(x[rows.node_ids], model.row_edges(rows.block, rows.node_ids, {}))

    out = torch.cat(on_threads(evaluate, models, blocks))
    (whole,) = make_rows((0, NUM_NODES))
    close(out, evaluate(model, whole))
    for own in models:
        assert [layer.exchange.log for layer in own.convs] == [[], *[[("send", False, HIDDEN)]] * 2]


@pytest.mark.parametrize("pulls", [False, True])
def test_a_block_that_nobody_reads(pulls):
    """The last block has rows, but no edge crosses its border."""
    model, offsets, (x, weight) = build(GCN), (0, 9, 16, NUM_NODES), features()
    blocks = make_rows(offsets)
    assert blocks[2].counts == [0, 0, 0]
    results = on_threads(run, copies(model, blocks, pulls), blocks, [x] * 3, [weight] * 3)
    (whole,) = make_rows((0, NUM_NODES))
    out = model.forward_rows(x, model.row_edges(whole.block, whole.node_ids, {}))
    (out * weight).sum().backward()
    close(torch.cat([result[0] for result in results]), out.detach())
    close(added([result[1] for result in results]), gradients(model), atol=1e-12)


def test_a_single_process_asks_nobody():
    h = torch.randn(4, 3, requires_grad=True)
    transfer = NO_HALO.send(h.detach(), True)
    assert transfer.wait().shape == (0, 3) and transfer.wait_back() is None
    transfer.send_back(torch.zeros(0, 3))
    assert NO_HALO.pull(h.detach()).wait().shape == (0, 3)
