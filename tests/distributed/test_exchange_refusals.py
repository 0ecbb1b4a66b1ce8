"""What full-graph training refuses: one line with the remedy, before processes are joined where it can be."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from full_graph_runs import BACKBONES, DIM, NUM_CLASSES, make_model, make_trainer, write_store
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.strategy import (
    BroadcastExchange,
    EpochAdaptive,
    EpochFixed,
    GNNScaleStrategy,
    GradientAveraging,
    HaloExchange,
    ModelAveraging,
    NoExchange,
    Quantized,
    SkipBroadcast,
)
from lightning_gnnscale.strategy.exchange import EXCHANGE_POLICIES

PULL = HaloExchange(backward="pull")


class Rows(torch.nn.Module):
    """A backbone that reads no neighbours."""

    out_channels = NUM_CLASSES

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(DIM, NUM_CLASSES)

    def forward(self, x, edge_index):
        return self.line(x)


# Name: what differs from GCN on FullGraphDataModule under HaloExchange and GradientAveraging; chunks of the message.
EARLY = {
    "no exchange layers": ({"model": "rows"}, ["HaloExchange", "NodeClassifier", "MessagePassing", "NoExchange()"]),
    "parts": ({"data": gs.PartitionDataModule}, ["HaloExchange", "PartitionDataModule", "FullGraphDataModule"]),
    "no DataModule": ({"data": None}, ["no DataModule", "train with FullGraphDataModule"]),
    "pulled attention": ({"model": "gat", "exchange": PULL}, ['"pull"', "GATLayer", 'backward="auto"']),
    "pulled attention in 4 bits": (
        {"model": "gat", "exchange": Quantized(4, backward="pull")},
        ["Quantized", "GATLayer"],
    ),
    "models": ({"weights": ModelAveraging()}, ["HaloExchange", "weights=GradientAveraging()", "NoExchange()"]),
    "models, skipped": (
        {"weights": ModelAveraging(), "exchange": SkipBroadcast(EpochFixed(1), BroadcastExchange())},
        ["ModelAveraging", "SkipBroadcast", 'SkipBroadcast(remote_gradient="drop")'],
    ),
    "more processes than parts": ({"store": "one part"}, ["2 processes", "1 part", "devices=1", "more parts"]),
    "no features": ({"store": "no features"}, ["no features", "features="]),
    "no labels": ({"store": "no labels"}, ["labels", "train mask"]),
    "accumulated": ({"accumulate_grad_batches": 4}, ["accumulate_grad_batches=4", "one batch", "leave it at 1"]),
    "accumulated later": (
        {"callbacks": [GradientAccumulationScheduler({0: 1, 3: 4})]},
        ["GradientAccumulationScheduler({0: 1, 3: 4})", "one batch", "leave it at 1"],
    ),
    "several passes an epoch": (
        {"weights": ModelAveraging(5, part_major=True), "exchange": NoExchange()},
        ["part_major=True", "5 passes", "leave part_major out"],
    ),
    "a stream of fewer parts": ({"made": {"num_parts": 1}}, ["2 processes", "1 part"]),
    "a stream without features": ({"made": {"features": None}}, ["features", "graph has none"]),
    "a stream without labels": ({"made": {"labels": None}}, ["labels", "graph has none"]),
    "a stream without a train mask": ({"made": {"masks": {}}}, ["a train mask", "graph has none"]),
    "half precision": ({"precision": "bf16-true"}, ["bf16-true", 'precision="bf16-mixed"']),
}
LATE = {
    "pulled in a directed graph": ({"store": "directed", "exchange": PULL}, ["directed", 'backward="auto"']),
    "pulled in a weighted graph": ({"store": "weighted", "exchange": PULL}, ["weighted", 'backward="auto"']),
    "other versions": (
        {"exchange": SkipBroadcast(EpochAdaptive(1, [0, 0, 0]))},
        ["initial_versions", "2 processes", "3"],
    ),
}


NODES = np.arange(8)
RING = {
    "stream": gs.open_edge_stream(np.stack([NODES, np.roll(NODES, 1)]), num_nodes=8, to_undirected=True),
    "features": np.ones((8, DIM)),
    "labels": NODES % NUM_CLASSES,
    "masks": {"train": NODES < 2},
}


def write_bare_store(root, num_parts, *without):
    """Write a ring of eight nodes."""
    given = {name: value for name, value in RING.items() if name not in without}
    partitioning = gs.Partitioning((NODES * num_parts // 8).astype(np.int32), num_parts, "given", {}, 0)
    return gs.write_partition_store(root, given.pop("stream"), partitioning, **given).root


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    kinds = {"undirected": {}, "directed": {"directed": True}, "weighted": {"weighted": True}}
    return {kind: write_store(folder / kind, **options) for kind, options in kinds.items()} | {
        "one part": write_bare_store(folder / "one", 1),
        "no features": write_bare_store(folder / "features", 2, "features"),
        "no labels": write_bare_store(folder / "labels", 2, "labels", "masks"),
    }


def run_refused(folder, stores):
    """Return of each case the error's message and whether processes had been joined."""
    join, results = DDPStrategy.setup_environment, {}
    for name, (case, _) in (EARLY | LATE).items():
        joined = []

        def note_and_join(strategy, joined=joined):
            joined.append(True)
            join(strategy)

        case = dict(case)
        kind, data = case.pop("model", "gcn"), case.pop("data", gs.FullGraphDataModule)
        store, made = stores[case.pop("store", "undirected")], case.pop("made", None)
        model = make_model(kind) if kind in BACKBONES else gs.NodeClassifier(Rows())
        exchange, weights = case.pop("exchange", HaloExchange()), case.pop("weights", GradientAveraging())
        with patch.object(DDPStrategy, "setup_environment", note_and_join):
            try:
                trainer = make_trainer(folder, exchange, weights, 1, **case)
                given = {"store": store} if made is None else {**RING, **made, "root": folder / "never written"}
                trainer.fit(model, data(**given)) if data else trainer.fit(model, [])
            except GNNScaleError as error:
                results[name] = str(error), bool(joined)
    return results, (folder / "never written").exists()


@pytest.fixture(scope="module")
def refused(stores, tmp_path_factory):
    return launch(2, run_refused, tmp_path_factory.mktemp("refused"), stores, limit_s=200)


@pytest.mark.parametrize("name", list(EARLY | LATE))
def test_refused_in_one_line_with_the_remedy_on_every_rank(refused, name):
    for results, written in refused:
        assert not written
        assert name in results, "not refused"
        message, joined = results[name]
        assert "\n" not in message
        missing = [chunk for chunk in (EARLY | LATE)[name][1] if chunk not in message]
        assert not missing, message
        assert not joined or name in LATE


def test_an_unknown_policy_lists_those_that_exist():
    with pytest.raises(ValueError) as caught:
        GNNScaleStrategy(exchange="pigeons")
    assert "\n" not in str(caught.value) and "'pigeons'" in str(caught.value)
    assert set(EXCHANGE_POLICIES) == {"no_exchange", "broadcast", "halo", "quantized", "skip_broadcast"}
    assert all(name in str(caught.value) for name in EXCHANGE_POLICIES)
    for name in EXCHANGE_POLICIES.keys() - {"skip_broadcast"}:
        strategy = GNNScaleStrategy(exchange=name, weights="gradient_averaging")
        assert type(strategy.exchange) is EXCHANGE_POLICIES[name]
    with pytest.raises(ValueError, match=r"SkipBroadcast\(\.\.\.\)"):
        GNNScaleStrategy(exchange="skip_broadcast")
