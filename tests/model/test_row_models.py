"""Models over block rows on one process: `forward_rows` equals `forward`, and what does not change is kept."""

import copy

import pytest
import torch
from model.graphs import to_sparse
from model.row_blocks import NUM_NODES, Mail, MailExchange, make_rows, on_threads

from lightning_gnnscale.datamodule.full_graph_batch import FullGraphBatch
from lightning_gnnscale.model import GAT, GCN, NGNN, SGC, GraphSAGE, NodeClassifier, gcn, row_layers
from lightning_gnnscale.model.layer_inputs import is_sparse
from lightning_gnnscale.sampler.minibatch import SparseFeatures
from tests.tiers import all_pairs, each_value

KINDS = [GCN, GraphSAGE, GAT, SGC, NGNN]
OUT = 3


def build(kind, in_channels=5, dtype=torch.float64, num_layers=3, **options):
    torch.manual_seed(0)
    options |= {"heads": 2} if kind is GAT else {}
    return kind(in_channels, 4, OUT, num_layers=num_layers, **{"dropout": 0.0, **options}).to(dtype)


def features(in_channels=5, dtype=torch.float64):
    torch.manual_seed(2)
    x = torch.randn(NUM_NODES, in_channels, dtype=dtype)
    return x * (torch.rand(NUM_NODES, in_channels) < 0.6)


def whole(**graph):
    (rows,) = make_rows((0, NUM_NODES), **graph)
    return rows


def forward(model, rows, x):
    block = rows.block
    edge_index = torch.stack([block.indices.long(), block.target_of_edges()])
    return model(x, edge_index, block.edge_weight, block.degree, block.indptr)


def forward_rows(model, rows, x, kept=None):
    return model.forward_rows(x, model.row_edges(rows.block, rows.node_ids, {} if kept is None else kept))


def gradients(model):
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def close(found, expected, atol=1e-13):
    # float64, sums of up to 40 values of order 1
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


GRAPHS = {"plain": {}, "directed": {"directed": True}, "weighted": {"weighted": True}}


@all_pairs
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("in_channels", [2, 30], ids=["narrow", "wide"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_process_equal_forward(kind, graph, in_channels, sparse):
    model, rows, x = build(kind, in_channels), whole(**GRAPHS[graph]), features(in_channels)
    weight = torch.randn(NUM_NODES, OUT, dtype=torch.float64)
    given = to_sparse(x) if sparse else x
    expected = forward(model, rows, x)
    (expected * weight).sum().backward()
    wanted = gradients(model)
    found = forward_rows(model, rows, given)
    (found * weight).sum().backward()
    close(found, expected)
    close(gradients(model), wanted, atol=1e-12)


@each_value
@pytest.mark.parametrize("options", [{"norm": "batch"}, {"norm": "layer"}, {"activation": "elu"}, {"num_layers": 2}])
@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GAT, NGNN])
def test_norms_and_activations_come_as_in_forward(kind, options):
    model, rows, x = build(kind, **options), whole(), features()
    close(forward_rows(copy.deepcopy(model), rows, x), forward(model, rows, x))
    close(forward_rows(model.eval(), rows, x), forward(model, rows, x))


@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GAT, SGC])
def test_a_model_of_one_layer(kind):
    model, rows, x = build(kind, num_layers=1), whole(), features()
    close(forward_rows(model, rows, x), forward(model, rows, x))


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_cast_to_the_dtype_of_the_model(kind):
    model, rows, x = build(kind, dtype=torch.float32), whole(), (10 * features()).to(torch.int16)
    found = forward_rows(model, rows, x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, forward(model, rows, x))


@each_value
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_sampled_from_torch_and_only_while_training(kind, sparse):
    options = {} if kind is SGC else {"dropout": 0.5}
    model, rows = build(kind, input_dropout=0.5, **options), whole()
    x = to_sparse(features()) if sparse else features()
    torch.manual_seed(5)
    first, second = forward_rows(model, rows, x), forward_rows(model, rows, x)
    torch.manual_seed(5)
    assert torch.equal(forward_rows(model, rows, x), first)
    assert not torch.equal(first, second)
    model.eval()
    close(forward_rows(model, rows, x), forward(model, rows, features()))


def count_calls(monkeypatch, module):
    """Count the sums over edges of a module, by the width of what is summed."""
    widths, original = [], module.aggregate

    def counted(x, *arguments, **options):
        widths.append(x.shape[1])
        return original(x, *arguments, **options)

    monkeypatch.setattr(module, "aggregate", counted)
    return widths


@pytest.mark.parametrize("kind", [GCN, GraphSAGE, NGNN])
def test_sums_of_features_are_kept(kind, monkeypatch):
    model, rows, x, kept = build(kind, in_channels=7), whole(), features(7), {}
    widths = count_calls(monkeypatch, row_layers)
    edges = model.row_edges(rows.block, rows.node_ids, kept)
    outputs = [model.forward_rows(x, edges) for _ in range(3)]
    assert widths.count(7) == 1 and list(kept) == ["summed"]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert not kept["summed"].requires_grad
    model.eval()
    model.forward_rows(x, edges)
    assert widths.count(7) == 1


@pytest.mark.parametrize("kind", [GCN, GraphSAGE, NGNN, SGC])
def test_nothing_that_was_dropped_is_kept(kind):
    model, rows, kept = build(kind, input_dropout=0.5), whole(), {}
    model.forward_rows(features(), model.row_edges(rows.block, rows.node_ids, kept))
    assert kept == {}
    model.eval()  # what is whole may be
    forward_rows(model, rows, features(), kept)
    close(forward_rows(model, rows, features(), kept), forward(model, rows, features()))


def test_propagated_features_are_exchanged_once(monkeypatch):
    """SGC without dropout: one exchange a propagation but the first, in the first step alone, none of them trained."""
    model, blocks, x, mail = build(SGC), make_rows(), features(), Mail()
    sums = count_calls(monkeypatch, gcn)
    models = [copy.deepcopy(model) for _ in blocks]
    for own, rows in zip(models, blocks, strict=True):
        for index, layer in enumerate(own.convs):
            layer.exchange = MailExchange(mail, rows, index, False)

    def train(own, rows):
        edges = own.row_edges(rows.block, rows.node_ids, {})
        for _ in range(3):
            out = own.forward_rows(x[rows.node_ids], edges)
            out.sum().backward()
        assert not edges.kept["propagated"].requires_grad
        return out.detach()

    out = torch.cat(on_threads(train, models, blocks))
    assert sums == [5, 5, 5]  # the first propagation of each block
    close(out, forward(model, whole(), x))
    for own in models:
        assert [layer.exchange.log for layer in own.convs] == [[], *[[("send", False, 5)]] * 2]


def test_dropped_features_are_propagated_in_each_step():
    """SGC with dropout maps first, and what it propagates has a gradient: the other blocks' part of it returns."""
    model, rows, x = build(SGC, in_channels=5, dropout=0.5), whole(), features()
    (small, *_) = blocks = make_rows((0, NUM_NODES))
    own, mail = copy.deepcopy(model), Mail()
    for index, layer in enumerate(own.convs):
        layer.exchange = MailExchange(mail, small, index, False)
    torch.manual_seed(1)
    expected = forward_rows(model, rows, x)
    torch.manual_seed(1)
    (found,) = on_threads(lambda own, rows: forward_rows(own, rows, x), [own], blocks)
    close(found, expected)
    assert [layer.exchange.log for layer in own.convs] == [[], *[[("send", True, OUT)]] * 2]


class Closed:
    """An exchange that may not be asked."""

    local_only = True
    pulls = False

    def send(self, rows, training):
        raise AssertionError("asked for rows of other processes")


@each_value
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_halo_the_block_is_a_graph_of_its_own(kind, sparse):
    model, rows = build(kind), make_rows()[0]
    assert not model.local_only
    for layer in model.convs:
        layer.exchange = Closed()
    assert model.local_only
    x = features()[: rows.num_local]
    edges = model.row_edges(rows.block, rows.node_ids, {}, local_only=True)
    found = model.forward_rows(to_sparse(x) if sparse else x, edges)
    inside = rows.block.indices < rows.num_local
    ends = torch.stack([rows.block.indices.long(), rows.block.target_of_edges()])[:, inside]
    close(found, model(x, ends))


def make_batch(rows, x):
    """The batch of the whole graph as the DataModule makes it."""
    block = rows.block
    sparse = is_sparse(x)
    csr = SparseFeatures(x.indptr, x.indices, x.data, x.dim) if sparse else None
    return FullGraphBatch(
        n_id=rows.node_ids, indptr=block.indptr, indices=block.indices, degree=block.degree, batch_size=NUM_NODES,
        part=0, key=0, epoch=0, num_nodes_global=NUM_NODES, loss_count=NUM_NODES,
        loss_nodes=NUM_NODES, y=torch.arange(NUM_NODES) % OUT,
        x_dense=None if sparse else x, x_csr=csr,
    )  # fmt: skip


def step(module, batch):
    module.train()
    outputs = module(batch)
    torch.nn.functional.cross_entropy(outputs, batch.y).backward()
    return outputs.detach(), gradients(module)


@all_pairs
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_validation_before_training_changes_nothing(kind, sparse, mode):
    """What validation prepares and keeps serves training, also where it ran in inference mode."""
    x = to_sparse(features()) if sparse else features()
    expected = step(NodeClassifier(build(kind)), make_batch(whole(), x))
    module, batch = NodeClassifier(build(kind)), make_batch(whole(), x)
    module.eval()
    with mode():
        before = module(batch)
    found = step(module, batch)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(one, two) for one, two in zip(found[1], expected[1], strict=True))
    # kept sums may add up in another order than `forward` does
    close(before.clone(), expected[0])
    with mode():
        close(module.eval()(batch).clone(), expected[0])
