"""EdgeClassifier: losses and scores over the labelled edges of sampled batches, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from model.graphs import make_graph
from model.test_node_classifier import Batches, Pass, make_batch, trainer
from torch_geometric.data import Data

import lightning_gnnscale as gs
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import EdgeClassifier, GraphSAGE
from tests.says import said


@pytest.fixture
def graph():
    torch.manual_seed(0)
    graph = make_graph(num_nodes=80, num_edges=200)
    graph.x = torch.randn(graph.num_nodes, 12)
    graph.masks = {}
    return graph


def edges(graph, first, count=40, attr=0):
    """A batch of random pairs; the class says whether the first features of both ends add up to more than 0."""
    generator = torch.Generator().manual_seed(first)
    ends = torch.randint(graph.num_nodes, (2, count), generator=generator)
    seeds, places = ends.unique(return_inverse=True)
    batch = make_batch(graph, seeds.tolist())
    batch.pairs = places
    batch.edge_label = (graph.x[ends[0], 0] + graph.x[ends[1], 0] > 0).to(torch.int32)
    batch.edge_label[::9] = -1
    if attr:
        batch.pair_attr = torch.randn(count, attr, generator=generator)
    return batch


def build(**options):
    torch.manual_seed(1)
    return EdgeClassifier(GraphSAGE(12, 16, 8, dropout=0.0), 2, **{"lr": 0.02} | options)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*num_workers.*")
def test_it_learns_under_the_trainer(graph):
    module, run = build(hidden_channels=16), trainer(max_epochs=25)
    train, held_out = (Batches([edges(graph, first) for first in numbers]) for numbers in (range(8), range(8, 10)))
    run.fit(module, train, held_out)
    assert {"train_loss", "val_loss", "val_acc"} <= set(run.callback_metrics)
    found = run.test(module, held_out, verbose=False)[0]
    outputs = torch.cat([module.classify(batch) for batch in held_out]).detach()
    labels = torch.cat([batch.edge_label for batch in held_out]).long()
    known = labels >= 0
    assert found["test_acc"] == pytest.approx(float((outputs.argmax(1) == labels)[known].float().mean()))
    assert found["test_loss"] == pytest.approx(float(F.cross_entropy(outputs[known], labels[known])), rel=1e-5)
    assert found["test_acc"] > 0.75  # 0.5 for a guess
    predicted = run.predict(module, held_out)[0]
    batch = next(iter(held_out))
    assert (predicted["edges"] == batch.n_id[batch.pairs].numpy()).all()
    assert torch.equal(predicted["prediction"], outputs[: batch.pairs.shape[1]].argmax(1))


def test_the_loss_is_the_mean_over_edges_with_a_label(graph):
    module, batch = build(edge_channels=3), edges(graph, 0, attr=3)
    outputs = module(batch)[: batch.batch_size]
    rows = torch.cat([outputs[batch.pairs[0]], outputs[batch.pairs[1]], batch.pair_attr], 1)
    logits = module.out(module.hidden(rows).relu())
    known = batch.edge_label >= 0
    expected = F.cross_entropy(logits[known], batch.edge_label[known].long())
    torch.testing.assert_close(module.training_step(batch), expected)
    batch.edge_label[:] = -1
    loss = module.training_step(batch)
    loss.backward()
    assert float(loss.detach()) == 0


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*num_workers.*")
def test_batches_of_the_link_loader_are_taken(graph):
    data = Data(x=graph.x, edge_index=graph.edge_index, num_nodes=graph.num_nodes)
    label = (graph.x[graph.edge_index, 0].sum(dim=0) > 0).long()
    options = {"num_neighbors": [-1, -1], "edge_label_index": graph.edge_index, "edge_label": label}
    loader = gs.LinkNeighborLoader(data, batch_size=32, **options)
    module = build()
    batch = next(iter(loader))
    whole = module.backbone(graph.x, graph.edge_index)
    ends = batch.n_id[batch.edge_label_index]
    expected = module.out(module.hidden(torch.cat([whole[ends[0]], whole[ends[1]]], 1)).relu())
    torch.testing.assert_close(module.classify(batch), expected, rtol=1e-4, atol=1e-5)
    run = trainer(max_epochs=15)
    run.fit(module, loader, loader)
    assert run.callback_metrics["val_acc"] > 0.8  # about 0.5 for a guess


def test_what_it_does_not_read_is_refused(graph):
    with pytest.raises(StrategyError, match=said("pair_attr 0 3 edge_channels=3")):
        build().training_step(edges(graph, 0, attr=3))
    with pytest.raises(StrategyError, match=said("EdgeClassifier edge_label")):
        build().training_step(make_batch(graph, [0, 1]))
    with pytest.raises(StrategyError, match=said("EdgeClassifier edge_label")):
        build().validation_step(Pass(graph, "val"))
    batch = edges(graph, 0)
    del batch.edge_label
    with pytest.raises(StrategyError, match=said("EdgeClassifier edge_label")):
        build().training_step(batch)
    with pytest.raises(ValueError, match=said("num_classes 2 1")):
        EdgeClassifier(GraphSAGE(12, 16, 8), 1)
