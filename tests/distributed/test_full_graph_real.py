"""Full-graph training on real graphs: three processes equal one, on a directed and heterophilous graph too."""

import pytest
import torch
from full_graph_runs import BACKBONES, fit, largest_difference
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import load_npz
from lightning_gnnscale.strategy import EpochFixed, HaloExchange, Quantized, SkipBroadcast

pytestmark = [pytest.mark.sweep, pytest.mark.real_data]

GRAPHS = {"cora": {}, "squirrel": {"to_undirected": False}}
HALO = HaloExchange(backward="auto")
ZERO, QUANTISED = SkipBroadcast(EpochFixed(0), HALO), Quantized(4, backward_threshold=1)
CASES = {"gcn": ("gcn", HALO), "graphsage": ("graphsage", HALO), "gat": ("gat", HALO)}
CASES |= {"bound of zero": ("gcn", ZERO), "quantised": ("gcn", QUANTISED)}


def train(folder, roots):
    results = {}
    for graph, root in roots.items():
        store = gs.PartitionStore.open(root)
        for name, (backbone, exchange) in CASES.items():
            torch.manual_seed(0)
            options = {"heads": 2} if backbone == "gat" else {}
            num_classes = int(store.labels.max()) + 1
            net = BACKBONES[backbone](store.features.dim, 8, num_classes, num_layers=3, dropout=0.5, **options)
            model = gs.NodeClassifier(net.double(), lr=0.01)
            weights, metrics = fit(folder, root, model, exchange, max_epochs=5)
            results[graph, name] = weights, [epoch["train_loss"] for epoch in metrics]
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory, public_graphs):
    folder, roots = tmp_path_factory.mktemp("real"), {}
    for graph, options in GRAPHS.items():
        dataset = load_npz(graph, root=str(public_graphs), **options)
        dm = gs.FullGraphDataModule(root=folder / graph, dataset=dataset, num_parts=3)
        dm.prepare_data()
        roots[graph] = dm.root
    return launch(1, train, folder, roots, limit_s=250), launch(3, train, folder, roots, limit_s=250)


@pytest.mark.parametrize("backbone", ["gcn", "graphsage", "gat"])
@pytest.mark.parametrize("graph", list(GRAPHS))
def test_three_processes_equal_one(runs, graph, backbone):
    (alone,), together = runs
    weights, losses = alone[graph, backbone]
    for results in together:
        assert largest_difference(results[graph, backbone][0], weights) <= 1e-12
        assert results[graph, backbone][1] == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize("graph", list(GRAPHS))
def test_a_bound_of_zero_is_exact_bit_for_bit_and_few_bits_stay_near(runs, graph):
    for results in runs[1]:
        (exact, losses), (bounded, bounded_losses) = results[graph, "gcn"], results[graph, "bound of zero"]
        assert bounded_losses == losses and all(torch.equal(bounded[name], exact[name]) for name in exact)
        quantised, quantised_losses = results[graph, "quantised"]
        assert 0 < largest_difference(quantised, exact)
        assert quantised_losses == pytest.approx(losses, rel=0.02)
