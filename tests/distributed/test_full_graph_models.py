"""Any model of PyG's layers on the full graph: several processes equal one, and what cannot be so is refused."""

import warnings

import numpy as np
import pytest
import torch
from full_graph_runs import DIM, NUM_CLASSES, fit, largest_difference, write_store
from processes import launch
from torch import nn
from torch_geometric import nn as pyg
from user_models import EDGE_DIM, HIDDEN, MODELS, TutorialConv, TwoConvs, appnp, classify, make_user_model

import lightning_gnnscale as gs
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.partition_store.block_rows import load_block_rows
from lightning_gnnscale.strategy import (
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    HaloExchange,
    NoExchange,
    Quantized,
    SkipBroadcast,
    VariationGap,
)

pytestmark = pytest.mark.sweep

STORES = {
    "undirected": {},
    "directed": {"directed": True},
    "weighted": {"weighted": True},
    "edges": {"edge_features": EDGE_DIM},
    # of three ranks the second has no row
    "empty": {"sizes": (41, 29, 0, 0, 20)},
}
STEPS = 4
# Every model on three processes, these on two as well.
ON_BOTH = ("GIN, BatchNorm within", "GAT", "GCN, weights", "Cheb", "own attention", "GINE", "own forward")


def train(folder, root, net, exchange, **options):
    """Return the weights and buffers, the losses of training and of validation, and the bytes forward by layer."""
    given = {"max_epochs": STEPS, "limit_val_batches": 1.0} | options
    weights, metrics = fit(folder, root, classify(net), exchange, **given)
    layers = [{name: value for name, value in epoch.items() if name.startswith("exchange_layer")} for epoch in metrics]
    return weights, [epoch["train_loss"] for epoch in metrics], [epoch["val_loss"] for epoch in metrics], layers[-1]


def train_all(folder, roots, names):
    return {name: train(folder, roots[MODELS[name][1]], make_user_model(name), HaloExchange()) for name in names}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return {kind: write_store(folder / kind, **options) for kind, options in STORES.items()}


@pytest.fixture(scope="module")
def exact(roots, tmp_path_factory):
    return {
        world_size: launch(world_size, train_all, tmp_path_factory.mktemp("exact"), roots, list(names), limit_s=300)
        for world_size, names in {1: MODELS, 2: ON_BOTH, 3: MODELS}.items()
    }


@pytest.mark.parametrize("name", list(MODELS))
def test_several_processes_equal_one(exact, name):
    single, losses, validation, _ = exact[1][0][name]
    for world_size in (2, 3) if name in ON_BOTH else (3,):
        for results in exact[world_size]:
            weights, found, validated, _ = results[name]
            assert largest_difference(weights, single) <= 1e-12
            assert found == pytest.approx(losses, abs=1e-12)
            assert validated == pytest.approx(validation, abs=1e-6)  # sums of float32
    assert len(set(losses)) == STEPS


# Rows that are exchanged in the forward of each, by width; features of the first layer are at hand.
SENT = {
    "SAGE, max": [HIDDEN],
    "GCN": [NUM_CLASSES],  # the first layer maps the halo's features itself
    "GIN": [HIDDEN],
    "Cheb": [DIM, HIDDEN, HIDDEN],  # one hop of the features needs none
    "own forward": [HIDDEN, HIDDEN, 2 * NUM_CLASSES, 2 * NUM_CLASSES],
}


@pytest.mark.parametrize("name", list(SENT))
def test_rows_travel_once_for_each_layer_that_reads_them(exact, roots, name):
    store = gs.PartitionStore.open(roots[MODELS[name][1]])
    num_halo = sum(load_block_rows(store, rank, 3).num_halo for rank in range(3))
    for results in exact[3]:
        sent = {key: value for key, value in results[name][3].items() if key.endswith("_forward_bytes")}
        expected = {
            f"exchange_layer{place}_forward_bytes": num_halo * width * 8 for place, width in enumerate(SENT[name], 1)
        }
        assert sent == expected


# -- other policies, and ranks without rows

POLICIES = {
    "16 bits": Quantized(16, delta=False),
    "8-bit differences": Quantized(8, backward_threshold=0.5),
    "every other epoch": SkipBroadcast(EpochFixed(1)),
    "rows in turns": SkipBroadcast(EpochAdaptive(1), rows="row"),
    "changed blocks": SkipBroadcast(VariationGap(0.3), skip_gradients=True),
    "changed rows, quantised": SkipBroadcast(VariationGap(0.1), Quantized(8), rows="row"),
    "gradients late": SkipBroadcast(EpochFixed(1), BroadcastExchange(), remote_gradient="late"),
    "extrapolated, dropped": SkipBroadcast(EpochFixed(1), stale="extrapolate", remote_gradient="drop"),
}
# Equal to the exact exchange, bit for bit.
ZERO = {
    "broadcast": BroadcastExchange(),
    "bound": SkipBroadcast(EpochFixed(0)),
    "bound of rows": SkipBroadcast(VariationGap(0), rows="row"),
}
TRAINED_BY_ALL = ("own forward", "GCN")


def train_by_policies(folder, roots):
    results = {}
    for name in TRAINED_BY_ALL:
        for policy, exchange in (POLICIES | ZERO | {"exact": HaloExchange()}).items():
            kind = "empty" if policy in ("8-bit differences", "changed blocks") else MODELS[name][1]
            results[name, policy] = train(folder, roots[kind], make_user_model(name), exchange, max_epochs=6)
    return results


@pytest.fixture(scope="module")
def by_policies(roots, tmp_path_factory):
    return launch(3, train_by_policies, tmp_path_factory.mktemp("policies"), roots, limit_s=300)


@pytest.mark.parametrize("policy", list(ZERO))
@pytest.mark.parametrize("name", TRAINED_BY_ALL)
def test_exact_policies_are_the_same_bit_for_bit(by_policies, name, policy):
    for results in by_policies:
        (weights, losses, *_), (exact_weights, exact_losses, *_) = results[name, policy], results[name, "exact"]
        assert losses == exact_losses and largest_difference(weights, exact_weights) == 0


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("name", TRAINED_BY_ALL)
def test_other_policies_learn_and_replicas_stay_equal(by_policies, name, policy):
    first = by_policies[0][name, policy]
    for results in by_policies:
        weights, losses, _, layers = results[name, policy]
        assert largest_difference(weights, first[0]) == 0
        assert losses[-1] < losses[0] and np.isfinite(losses).all()
    if policy == "16 bits":
        exact = by_policies[0][name, "exact"]
        assert losses == pytest.approx(exact[1], rel=1e-3) and losses != exact[1]
        assert layers["exchange_layer1_forward_bytes"] < exact[3]["exchange_layer1_forward_bytes"]


def train_locally(folder, root, names):
    return {name: train(folder, root, make_user_model(name), NoExchange()) for name in names}


def test_without_an_exchange_a_block_is_a_graph_of_its_own(roots, tmp_path):
    """The first 48 nodes are one rank's; what one process learns of the graph without the edges between them."""
    names = ["GCN", "GIN", "GAT", "Cheb"]
    cut = write_store(tmp_path / "cut", keep=lambda edges: (edges[0] < 70) == (edges[1] < 70))
    (alone,) = launch(1, train_locally, tmp_path / "1", cut, names)
    for results in launch(2, train_locally, tmp_path / "2", roots["undirected"], names):
        for name in names:
            assert largest_difference(results[name][0], alone[name][0]) <= 1e-12
            assert results[name][2] != pytest.approx(alone[name][2], abs=1e-4)  # evaluated on all edges


# -- what is refused, or warned of


class Gathers(TwoConvs):
    """Reads rows of neighbours outside of a MessagePassing layer."""

    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        summed = torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])
        return self.second(summed, edge_index)


class Centred(TwoConvs):
    def forward(self, x, edge_index):
        x = self.first(x, edge_index)
        return self.second(x - x.mean(dim=0), edge_index)


class Pooled(TwoConvs):
    def forward(self, x, edge_index):
        return pyg.global_mean_pool(super().forward(x, edge_index), None)


class NormWithin(TutorialConv):
    """Normalises by degrees, and by BatchNorm within itself."""

    def __init__(self, in_channels, out_channels):
        super().__init__(in_channels, out_channels)
        self.norm = nn.BatchNorm1d(out_channels)

    def forward(self, x, edge_index):
        return self.norm(super().forward(x, edge_index))


class DropsEdges(TwoConvs):
    def forward(self, x, edge_index):
        if self.training:
            edge_index = edge_index[:, torch.rand(edge_index.shape[1]) < 0.8]
        return super().forward(x, edge_index)


class NormBetween(TwoConvs):
    def __init__(self, norm):
        super().__init__(pyg.SAGEConv)
        self.norm = norm

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)), edge_index)


REFUSED = {
    "PairNorm": (lambda: NormBetween(pyg.PairNorm()), "undirected", ["backbone.norm (PairNorm)", "BatchNorm"]),
    "LayerNorm": (
        lambda: NormBetween(pyg.LayerNorm(HIDDEN)),
        "undirected",
        ["backbone.norm (LayerNorm)", 'LayerNorm(mode="node")'],
    ),
    "gathers": (lambda: Gathers(pyg.SAGEConv), "undirected", ["the backbone (Gathers)", "IndexError"]),
    "centred": (
        lambda: Centred(pyg.SAGEConv),
        "undirected",
        ["the backbone (Centred)", "other rows", "PartitionDataModule"],
    ),
    "pooled": (lambda: Pooled(pyg.SAGEConv), "undirected", ["Pooled", "(1, 4)", "pool"]),
    "norm within": (lambda: TwoConvs(NormWithin), "undirected", ["backbone.first", "BatchNorm (first.norm)"]),
    "reversed": (lambda: TwoConvs(pyg.SAGEConv, flow="target_to_source"), "directed", ["first (SAGEConv)", "reversed"]),
    "out-degrees": (lambda: TwoConvs(pyg.ChebConv, K=2), "directed", ["backbone.first (ChebConv)"]),
    "edge weights": (lambda: TwoConvs(pyg.SAGEConv), "weighted", ["TwoConvs.forward", "edge_weight"]),
    "fails anyway": (lambda: TwoConvs(pyg.SAGEConv, width=99), "undirected", ["backbone.second", "small graph"]),
}


def run_refused(folder, roots):
    results = {}
    for name, (make, kind, _) in REFUSED.items():
        try:
            train(folder, roots[kind], make().double(), HaloExchange())
        except GNNScaleError as error:
            results[name] = str(error)
    return results


@pytest.fixture(scope="module")
def refused(roots, tmp_path_factory):
    return launch(2, run_refused, tmp_path_factory.mktemp("refused"), roots, limit_s=200)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_exact_is_refused_in_one_line(refused, name):
    for results in refused:
        assert name in results, "not refused"
        message = results[name]
        assert "\n" not in message
        assert all(chunk in message for chunk in REFUSED[name][2]), message


def train_warned(folder, roots):
    found = {}
    cases = {
        "edges dropped": (DropsEdges(pyg.SAGEConv), "undirected"),
        "weights dropped": (appnp(dropout=0.5), "undirected"),
        "edge features": (TwoConvs(pyg.SAGEConv), "edges"),
        "nothing": (make_user_model("own forward"), "undirected"),
    }
    for name, (net, kind) in cases.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            train(folder, roots[kind], net.double(), HaloExchange(), max_epochs=2)
        found[name] = [str(one.message) for one in warned]
    return found


def test_what_differs_from_one_process_is_told(roots, tmp_path):
    told = launch(2, train_warned, tmp_path, roots)[0]
    assert any("backbone.first (SAGEConv) gives other rows while it trains" in line for line in told["edges dropped"])
    assert any("backbone.module_1 (APPNP) gives other rows while it trains" in line for line in told["weights dropped"])
    assert any("TwoConvs.forward takes no edge_attr" in line for line in told["edge features"])
    assert not any("while it trains" in line or "BatchNorm" in line for line in told["nothing"])
