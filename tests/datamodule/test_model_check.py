"""A model that does not fit its store, or a strategy that would wait for ever: one line before the first batch."""

from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.stored_graph import check_model
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import GAT, GCN, SGC, GraphSAGE
from tests.says import said

NUM_NODES, DIM = 12, 3


def write_store(root, labels=None, masks=True, edge_weight=None):
    ring = np.arange(NUM_NODES)
    stream = gs.open_edge_stream(np.stack([ring, np.roll(ring, 1)]), num_nodes=NUM_NODES, to_undirected=True)
    given = {"labels": ring % 4 if labels is None else labels, "masks": {"train": ring < 6} if masks else {}}
    given["edge_weight"] = edge_weight
    partitioning = gs.Partitioning((ring // 6).astype(np.int32), 2, "given", {}, 0)
    return gs.write_partition_store(root, stream, partitioning, features=np.ones((NUM_NODES, DIM)), **given)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("one") / "store")


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("several") / "store", np.ones((NUM_NODES, 5), np.int64))


def classifier(in_channels=DIM, out_channels=4, num_layers=2, **options):
    return gs.NodeClassifier(GCN(in_channels, 8, out_channels, num_layers=num_layers), **options)


BAD = [
    ("store", {"in_channels": 7}, "backbone.in_channels=7 is not the number of columns of the store's features, 3"),
    ("store", {"out_channels": 3}, "out_channels=3 is less than the classes, the store's labels go up to 3: say 4"),
    ("store", {"multilabel": True}, "the store has one label a node: say multilabel=False to NodeClassifier"),
    ("several", {"out_channels": 5}, "the store has 5 labels a node: say multilabel=True to NodeClassifier"),
    ("several", {"multilabel": True}, "out_channels=4 is not the number of labels a node, 5: say 5"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD, ids=[message for *_, message in BAD])
def test_what_does_not_fit_is_one_line(kind, options, message, request):
    with pytest.raises(StrategyError) as error:
        check_model(classifier(**options), request.getfixturevalue(kind))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_what_fits_or_says_nothing_is_let_through(store, several):
    check_model(classifier(out_channels=9), store, 2)
    check_model(classifier(out_channels=5, multilabel=True), several)
    check_model(None, store)
    check_model(SimpleNamespace(backbone=SimpleNamespace()), store)


def test_other_hops_than_layers_are_told(store):
    with pytest.warns(UserWarning, match=said("samples 1 hops backbone 2 layers")):
        check_model(classifier(), store, 1)


@pytest.mark.parametrize(
    ("backbone", "least", "refused"),
    [(GCN, -0.5, True), (SGC, -0.5, True), (GAT, -0.5, True), (GraphSAGE, -0.5, False), (GAT, 0.0, False)],
)
def test_weights_below_zero_are_refused_where_they_give_no_number(tmp_path, backbone, least, refused):
    weights = np.linspace(least, 1, NUM_NODES)
    store = write_store(tmp_path / "store", edge_weight=weights)
    module = gs.NodeClassifier(backbone(DIM, 8, 4))
    assert store.least_edge_weight == least
    with pytest.raises(StrategyError, match=said("-0.5")) if refused else nullcontext():
        check_model(module, store)


@pytest.mark.parametrize(("sampler", "hops"), [
    (gs.NeighborSampler([5, 5, 5]), 3), (gs.LayerwiseSampler([4, 4, 4]), 3), (gs.SaintSampler("walk"), None),
])  # fmt: skip
def test_samplers_tell_their_hops(store, sampler, hops):
    dm = gs.PartitionDataModule(store=store, sampler=sampler)
    with pytest.warns(UserWarning, match="samples 3 hops") if hops else nullcontext():
        L.Trainer(fast_dev_run=1, accelerator="cpu", devices=1, enable_progress_bar=False).fit(classifier(), dm)


def test_the_datamodule_asks(store, tmp_path):
    dm = gs.PartitionDataModule(store=store)
    dm.trainer = SimpleNamespace(
        lightning_module=classifier(in_channels=4),
        strategy=None,
        world_size=1,
        num_nodes=1,
        global_rank=0,
        is_global_zero=True,
    )
    with pytest.raises(StrategyError, match=r"in_channels=4"):
        dm.setup("fit")


def test_several_processes_need_a_strategy_that_lets_parts_differ(store):
    dm = gs.PartitionDataModule(store=store)
    dm.trainer = SimpleNamespace(
        lightning_module=classifier(), strategy=object(), world_size=2, num_nodes=1, global_rank=0
    )
    with pytest.raises(StrategyError, match=r'Trainer\(strategy="gnnscale"\)'):
        dm.setup("fit")


def test_whole_parts_are_no_batches_of_the_graph(store):
    dm = gs.PartitionDataModule(store=store, mode="full_batch", scope="graph")
    dm.trainer = SimpleNamespace(
        strategy=SimpleNamespace(weights=gs.GradientAveraging()), world_size=1, num_nodes=1, global_rank=0
    )
    with pytest.raises(StrategyError, match=said("weights=ModelAveraging() FullGraphDataModule")):
        dm.check_trainer(dm.trainer)


def test_a_store_without_masks_or_labels_says_so(tmp_path):
    dm = gs.PartitionDataModule(store=write_store(tmp_path / "bare", masks=False))
    with pytest.raises(StrategyError, match=said("training labels train mask")):
        dm.setup("fit")
