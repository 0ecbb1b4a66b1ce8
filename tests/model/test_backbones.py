"""Backbones: the same numbers as PyG's layers, sparse as dense, trimmed as whole, gradients and dtypes."""

import copy
import inspect
import os
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from model.graphs import make_graph, sampled, to_sparse
from torch import nn

from lightning_gnnscale.model import GAT, GCN, NGNN, SGC, GraphSAGE
from tests.says import said
from tests.tiers import each_value

BACKBONES = [GCN, GAT, GraphSAGE, SGC, NGNN]


def build(kind, in_channels=12, hidden=8, out=4, num_layers=3, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return kind(in_channels, hidden, out, num_layers=num_layers, **{"dropout": 0.0, **options}).to(dtype)


def pyg_twin(model, in_channels, num_layers):
    """The same model from PyG's own classes, with the same parameters."""
    if isinstance(model, SGC):
        twin = pyg.SGConv(in_channels, 4, K=num_layers)
        twin.load_state_dict(model.conv.state_dict())
        return twin
    kind = {GCN: pyg.GCN, GAT: pyg.GAT, GraphSAGE: pyg.GraphSAGE}[type(model)]
    options = {"heads": 4, "act": "elu"} if isinstance(model, GAT) else {}
    twin = kind(in_channels, 8, num_layers, 4, **options)
    twin.load_state_dict(model.state_dict())
    return twin


# 3 and 40 columns: the linear map comes after the sum over edges, and before it
@pytest.mark.parametrize("in_channels", [3, 40])
@pytest.mark.parametrize("kind", [GCN, GAT, GraphSAGE, SGC])
def test_equals_pyg_forward_and_backward(kind, in_channels):
    graph = make_graph(in_channels=in_channels, dtype=torch.float64)
    model = build(kind, in_channels, dtype=torch.float64)
    twin = pyg_twin(model, in_channels, 3).double()
    x, x_twin = graph.x.clone().requires_grad_(), graph.x.clone().requires_grad_()
    out, expected = model(x, graph.edge_index), twin(x_twin, graph.edge_index)
    # float64, values of order 1, PyG's softmax adds 1e-16 to its sums
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, x_twin.grad, rtol=0, atol=1e-12)
    ours = dict((model.conv if kind is SGC else model).named_parameters())
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", [GCN, SGC])
def test_equals_pyg_with_edge_weights(kind):
    graph = make_graph(dtype=torch.float64)
    weight = torch.rand(graph.edge_index.shape[1], dtype=torch.float64)
    model = build(kind, dtype=torch.float64)
    expected = pyg_twin(model, 12, 3).double()(graph.x, graph.edge_index, weight)
    torch.testing.assert_close(model(graph.x, graph.edge_index, weight), expected, rtol=0, atol=1e-12)


def test_self_loops_of_the_graph_are_replaced_as_in_pyg_gat():
    graph = make_graph(dtype=torch.float64)
    loops = torch.tensor([[0, 5, 7], [0, 5, 7]])
    edge_index = torch.cat([loops, graph.edge_index], dim=1)
    model = build(GAT, dtype=torch.float64)
    expected = pyg_twin(model, 12, 3).double()(graph.x, edge_index)
    torch.testing.assert_close(model(graph.x, edge_index), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", BACKBONES)
def test_edges_in_any_order_give_the_same(kind):
    graph = make_graph(dtype=torch.float64)
    model = build(kind, dtype=torch.float64)
    shuffled = graph.edge_index[:, torch.randperm(graph.edge_index.shape[1])]
    grouped = model(graph.x, graph.edge_index, indptr=graph.indptr)
    torch.testing.assert_close(model(graph.x, shuffled), grouped, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", BACKBONES)
def test_sparse_input_equals_dense(kind):
    graph = make_graph(in_channels=6, dtype=torch.float64)
    model = build(kind, 6, dtype=torch.float64)
    gradients = []
    for x in (graph.x, to_sparse(graph.x)):
        model.zero_grad()
        out = model(x, graph.edge_index, indptr=graph.indptr, degree=graph.degree)
        out.square().sum().backward()
        gradients.append([out.detach(), *(parameter.grad for parameter in model.parameters())])
    for dense, sparse in zip(*gradients, strict=True):
        torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-11)


@each_value
@pytest.mark.parametrize("norm", [None, "batch", "layer"])
@pytest.mark.parametrize("kind", BACKBONES)
def test_a_full_neighbour_batch_equals_the_whole_graph_on_its_seeds(kind, norm):
    options = {} if kind is SGC else {"norm": norm}
    graph = make_graph(dtype=torch.float64)
    model = build(kind, dtype=torch.float64, **options).eval()
    seeds = [7, 0, 59, 31]  # the hub and the isolated node among them
    n_id, edge_index, indptr, counts = sampled(graph, seeds, 3)
    whole = model(graph.x, graph.edge_index)[seeds]
    arguments = {"indptr": indptr, "degree": graph.degree[n_id]}
    trimmed = model(graph.x[n_id], edge_index, **arguments, num_sampled_nodes=counts)
    assert trimmed.shape == (4, 4)
    torch.testing.assert_close(trimmed, whole, rtol=0, atol=1e-12)
    untrimmed = model(graph.x[n_id], edge_index, **arguments)
    assert untrimmed.shape == (len(n_id), 4)
    torch.testing.assert_close(untrimmed[:4], whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", BACKBONES)
def test_whole_part_with_its_core_as_seeds(kind):
    graph = make_graph(dtype=torch.float64)
    model = build(kind, dtype=torch.float64)
    whole = model(graph.x, graph.edge_index, indptr=graph.indptr)
    core = model(graph.x, graph.edge_index, indptr=graph.indptr, num_sampled_nodes=[20])
    torch.testing.assert_close(core, whole[:20], rtol=0, atol=1e-12)


def test_more_hops_than_layers():
    graph = make_graph(dtype=torch.float64)
    model = build(GCN, num_layers=1, dtype=torch.float64)
    n_id, edge_index, indptr, counts = sampled(graph, [3, 4], 3)
    out = model(graph.x[n_id], edge_index, degree=graph.degree[n_id], indptr=indptr, num_sampled_nodes=counts)
    torch.testing.assert_close(out, model(graph.x, graph.edge_index)[[3, 4]], rtol=0, atol=1e-12)


def test_sampled_gcn_rows_are_unbiased():
    """Invariant 6 by enumeration: the mean over all samples of 2 of 4 neighbours is the full-neighbour value."""
    model = build(GCN, 3, num_layers=1, dtype=torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64)
    degree = torch.tensor([4, 2, 3, 1, 6])
    full = model(x, torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), degree=degree, indptr=torch.tensor([0, 4]))[0]
    pairs = torch.combinations(torch.arange(1, 5))
    samples = [
        model(x, torch.stack([pair, torch.zeros_like(pair)]), degree=degree, indptr=torch.tensor([0, 2]))[0]
        for pair in pairs
    ]
    assert (samples[0] - full).abs().max() > 1e-3
    torch.testing.assert_close(torch.stack(samples).mean(0), full, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", BACKBONES)
def test_gradcheck(kind):
    graph = make_graph(num_nodes=7, num_edges=9, in_channels=3, dtype=torch.float64)
    model = build(kind, 3, hidden=4, num_layers=2, dtype=torch.float64, **({} if kind is SGC else {"norm": "layer"}))
    x = torch.randn(graph.x.shape, dtype=torch.float64, requires_grad=True)  # no zeros: ReLU has a kink there
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]

    def run(x, *values):
        state = dict(zip(names, values, strict=True))
        arguments = {"degree": graph.degree, "indptr": graph.indptr}
        return torch.func.functional_call(model, state, (x, graph.edge_index), arguments)

    assert torch.autograd.gradcheck(run, (x, *parameters))


@pytest.mark.parametrize("kind", BACKBONES)
def test_autocast_stays_near_float32(kind):
    graph = make_graph()
    model = build(kind)
    exact = model(graph.x, graph.edge_index, degree=graph.degree)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(graph.x, graph.edge_index, degree=graph.degree)
    out.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    # 3 layers, a rounding of 2^-8 at each of about 4 operations a layer, on values up to the largest output
    assert (out.float() - exact).abs().max() < 3 * 4 * 2**-8 * exact.abs().max()


def test_stored_types_are_cast_to_the_model():
    graph = make_graph()
    model = build(GCN)
    small = (graph.x * 4).round().clamp(0, 9)
    expected = model(small, graph.edge_index)
    assert torch.equal(model(small.to(torch.uint8), graph.edge_index), expected)
    sparse = to_sparse(small)
    assert torch.equal(
        model(sparse._replace(data=sparse.data.half().numpy(), indices=sparse.indices.int()), graph.edge_index),
        model(sparse, graph.edge_index),
    )


def test_input_dropout_of_sparse_rows_drops_nonzeros_alone():
    graph = make_graph(in_channels=50)
    ones = to_sparse((graph.x != 0).float())
    model = build(SGC, 50, out=50, num_layers=1, input_dropout=0.5).train()
    nn.init.eye_(model.conv.lin.weight)
    nn.init.zeros_(model.conv.lin.bias)
    out = model(ones, torch.zeros(2, 0, dtype=torch.int64))  # no edges: the output is the input
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert not out[graph.x == 0].any()


def test_dropout_off_in_eval_and_on_in_training():
    graph = make_graph()
    for kind in (GCN, GAT, GraphSAGE, NGNN):
        model = build(kind, dropout=0.5)
        assert not torch.equal(model(graph.x, graph.edge_index), model(graph.x, graph.edge_index))
        model.eval()
        assert torch.equal(model(graph.x, graph.edge_index), model(graph.x, graph.edge_index))


def test_reset_samples_all_parameters_again():
    for kind in BACKBONES:
        model = build(kind)
        before = {name: value.clone() for name, value in model.named_parameters() if "bias" not in name}
        model.reset_parameters()
        after = dict(model.named_parameters())
        assert all(not torch.equal(value, after[name]) for name, value in before.items())


def test_where_ngnn_has_its_feed_forward_layers():
    def counts(position):
        model = build(NGNN, num_layers=4, position=position, feed_forward_layers=2)
        return [len(getattr(conv, "feed_forward", ())) for conv in model.convs]

    assert counts("all") == [2, 2, 2, 0]
    assert counts("input") == [2, 0, 0, 0]
    assert counts("hidden") == [0, 2, 2, 0]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (GCN, {"num_layers": 0}, "model.num_layers 1 0"),
        (GCN, {"dropout": 1.0}, "model.dropout [0, 1) 1.0"),
        (GCN, {"norm": "graph"}, "None ['batch', 'layer'] 'graph'"),
        (GraphSAGE, {"activation": "gelu"}, "['elu', 'relu'] 'gelu'"),
        (GAT, {"heads": 3}, "multiple heads (3), 8"),
        (GAT, {"attention_dropout": 1.0}, "model.attention_dropout [0, 1) 1.0"),
        (NGNN, {"position": "output"}, "'output'"),
        (NGNN, {"position": "hidden", "num_layers": 2}, "3 'hidden' 2"),
        (NGNN, {"feed_forward_layers": 0}, "feed_forward_layers 1 0"),
    ],
)
def test_refuses(kind, change, message):
    with pytest.raises(ValueError, match=said(message)):
        build(kind, **change)


def test_refuses_batches_that_do_not_fit():
    model, graph = build(GCN), make_graph()
    with pytest.raises(ValueError, match=said("[40, 21] add 60 rows")):
        model(graph.x, graph.edge_index, indptr=graph.indptr, num_sampled_nodes=[40, 21])
    with pytest.raises(ValueError, match=said("60 rows 10 rows")):
        model(graph.x[:10], graph.edge_index, indptr=graph.indptr)
    with pytest.raises(ValueError, match="targets up to"):
        model(graph.x[:10], graph.edge_index)
    with pytest.raises(ValueError, match=said("sparse rows 12 columns layer 5")):
        build(GCN, 5)(to_sparse(graph.x), graph.edge_index)
    with pytest.raises(ValueError, match=said("model.out_channels")):
        SGC(12)


@pytest.mark.parametrize("kind", BACKBONES)
def test_modules_that_pyg_writes_do_not_stay(kind):
    for model in (build(kind), pickle.loads(pickle.dumps(build(kind))), copy.deepcopy(build(kind))):
        layer = next(module for module in model.modules() if isinstance(module, pyg.MessagePassing))
        written = inspect.getfile(type(layer).propagate)
        assert "_propagate_" in written and not os.path.exists(written)
        assert "def propagate" in inspect.getsource(type(layer).propagate)  # tracebacks show its lines all the same
