"""What full-graph training refuses: one line with the remedy, before processes are joined where it can be."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from full_graph_runs import BACKBONES, DIM, NUM_CLASSES, make_model, make_trainer, write_store
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


# Name: what differs from GCN on FullGraphDataModule under HaloExchange and GradientAveraging; pieces of the message.
EARLY = {
    "no exchange layers": ({"model": "rows"}, ["HaloExchange", "NodeClassifier", "use GCN", "NoExchange()"]),
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
    "half precision": ({"precision": "bf16-mixed"}, ["bf16-mixed", 'precision="32-true"']),
}
LATE = {
    "pulled in a directed graph": ({"store": "directed", "exchange": PULL}, ["directed", 'backward="auto"']),
    "pulled in a weighted graph": ({"store": "weighted", "exchange": PULL}, ["weighted", 'backward="auto"']),
    "more processes than parts": ({"store": "one part"}, ["2 processes", "1 part", "devices=1", "more parts"]),
    "no features": ({"store": "no features"}, ["no features", "features="]),
    "no labels": ({"store": "no labels"}, ["labels"]),
    "other versions": (
        {"exchange": SkipBroadcast(EpochAdaptive(1, [0, 0, 0]))},
        ["initial_versions", "2 processes", "3"],
    ),
}


def write_bare_store(root, num_parts, **arrays):
    """Write a ring of eight nodes."""
    ring = np.arange(8)
    stream = gs.open_edge_stream(np.stack([ring, np.roll(ring, 1)]), num_nodes=8, to_undirected=True)
    partitioning = gs.Partitioning((ring * num_parts // 8).astype(np.int32), num_parts, "given", {}, 0)
    return gs.write_partition_store(root, stream, partitioning, **arrays).root


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    features, labels = np.ones((8, DIM)), np.arange(8) % NUM_CLASSES
    masks = {"train": labels < 2}
    kinds = {"undirected": {}, "directed": {"directed": True}, "weighted": {"weighted": True}}
    return {kind: write_store(folder / kind, **options) for kind, options in kinds.items()} | {
        "one part": write_bare_store(folder / "one", 1, features=features, labels=labels, masks=masks),
        "no features": write_bare_store(folder / "features", 2, labels=labels, masks=masks),
        "no labels": write_bare_store(folder / "labels", 2, features=features),
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
        store = stores[case.pop("store", "undirected")]
        model = make_model(kind) if kind in BACKBONES else gs.NodeClassifier(Rows())
        trainer = make_trainer(
            folder, case.pop("exchange", HaloExchange()), case.pop("weights", GradientAveraging()), 1, **case
        )
        with patch.object(DDPStrategy, "setup_environment", note_and_join):
            try:
                trainer.fit(model, data(store=store)) if data else trainer.fit(model, [])
            except GNNScaleError as error:
                results[name] = str(error), bool(joined)
    return results


@pytest.fixture(scope="module")
def refused(stores, tmp_path_factory):
    return launch(2, run_refused, tmp_path_factory.mktemp("refused"), stores, limit_s=200)


@pytest.mark.parametrize("name", list(EARLY | LATE))
def test_refused_in_one_line_with_the_remedy_on_every_rank(refused, name):
    for results in refused:
        assert name in results, "not refused"
        message, joined = results[name]
        assert "\n" not in message
        missing = [piece for piece in (EARLY | LATE)[name][1] if piece not in message]
        assert not missing, message
        assert not joined or name in LATE


def test_an_unknown_policy_lists_those_that_exist():
    with pytest.raises(ValueError) as caught:
        GNNScaleStrategy(exchange="pigeons")
    assert "\n" not in str(caught.value) and "'pigeons'" in str(caught.value)
    assert set(EXCHANGE_POLICIES) == {"no_exchange", "broadcast", "halo", "quantized", "skip_broadcast"}
    assert all(name in str(caught.value) for name in EXCHANGE_POLICIES)
    for name in EXCHANGE_POLICIES.keys() - {"skip_broadcast"}:
        assert type(GNNScaleStrategy(exchange=name).exchange) is EXCHANGE_POLICIES[name]
    with pytest.raises(ValueError, match=r"SkipBroadcast\(\.\.\.\)"):
        GNNScaleStrategy(exchange="skip_broadcast")
