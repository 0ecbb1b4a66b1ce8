"""Training on a store behind a URL equals training on the local one, bit for bit, with a cap and without."""

import lightning as L
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.errors import PartitionStoreError, StrategyError
from lightning_gnnscale.partition_store import PartitionStore, publish, published
from lightning_gnnscale.placement import PlacementSettings
from tests.says import said
from tests.tiers import first

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
BLOCK = 1024


@pytest.fixture(scope="module", params=["packed", pytest.param("loose", marks=pytest.mark.sweep)])
def root(dataset, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("stores")
    parts = gs.partition(dataset.stream, "random", num_parts=4, seed=1)
    arrays = {"features": dataset.features, "labels": dataset.labels, "masks": dataset.masks}
    gs.write_partition_store(folder / "one", dataset.stream, parts, **arrays, pack_halo=request.param == "packed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(published, "BLOCK_BYTES", BLOCK)
        publish(folder / "one", f"file://{folder}/published")
    return folder / "one"


@pytest.fixture
def url(root, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "BLOCK_BYTES", BLOCK)
    monkeypatch.setenv("GNNSCALE_FETCHED", str(tmp_path / "fetched"))
    return f"file://{root.parent}/published"


def trained(datamodule, weights, evaluated=True):
    """Weights after two epochs, and the metrics of an exact test."""
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.GraphSAGE(datamodule.store.features.dim, 16, 8, num_layers=2), lr=0.01)
    strategy = gs.GNNScaleStrategy(weights=weights)
    limits = {} if evaluated else {"limit_val_batches": 0}
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **limits, **QUIET)
    trainer.fit(model, datamodule)
    metrics = trainer.test(model, datamodule, verbose=False)[0] if evaluated else {}
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), metrics


CASES = {
    "threads": {},
    "read a part at a time": {"rows": "resident"},
    "read a run of batches at a time": {"rows": "planned"},
    "two hops": {"halo_hops": 2},
    "processes": {"source": gs.Processes(2)},
    "task graphs": {"source": gs.TaskGraphs(2)},
    "whole graph": {"scope": "graph"},
    "full batch": {"mode": "full_batch"},
    "sampled evaluation": {"evaluation": "sampled"},
    "placed": {"rows": PlacementSettings(buffer_rows=20, cache_rows=10)},
}


@first(4)
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_local_store(root, url, case):
    options = {"sampler": gs.NeighborSampler([4, 3]), "batch_size": 24, "seed": 3} | CASES[case]
    weights = [gs.GradientAveraging() if "scope" in options else gs.ModelAveraging() for _ in range(2)]
    given = (trained(gs.PartitionDataModule(store, **options), weights.pop()) for store in (root, url))
    local, fetched = given
    assert torch.isfinite(local[0]).all() and torch.equal(local[0], fetched[0])
    assert local[1] == fetched[1]


def test_under_a_cap_parts_are_fetched_again(root, url):
    options = {"sampler": gs.NeighborSampler([4, 3]), "batch_size": 24, "seed": 3, "interleave_parts": 2}
    total = sum(path.stat().st_size for path in root.glob("*.npy"))
    cap = total * 5 // 6
    store = PartitionStore.open(url, cache_bytes=cap)
    fetched = trained(gs.PartitionDataModule(store, **options), gs.GradientAveraging(), evaluated=False)
    local = trained(gs.PartitionDataModule(root, **options), gs.GradientAveraging(), evaluated=False)
    assert torch.equal(local[0], fetched[0])
    again = PartitionStore.open(store.root).fetched
    assert int(again._bytes[again._used[:-1] > 0].sum()) <= cap


def test_full_graph_training_reads_it(root, url):
    given = []
    for store in (root, url):
        dm = gs.FullGraphDataModule(store)
        torch.manual_seed(0)
        model = gs.NodeClassifier(gs.model.GraphSAGE(16, 16, 8, num_layers=2), lr=0.01)
        L.Trainer(accelerator="cpu", devices=1, strategy=gs.GNNScaleStrategy(), max_epochs=2, **QUIET).fit(model, dm)
        given.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*given)


def test_how_a_store_is_made_goes_with_no_url(url):
    with pytest.raises(ValueError, match=said("num_parts store")):
        gs.PartitionDataModule(url, num_parts=3)
    with pytest.raises(PartitionStoreError, match="no store is published here"):
        gs.PartitionDataModule(f"{url}-none")


def test_a_rank_with_another_store_is_refused(root, url, monkeypatch):
    datamodule = gs.PartitionDataModule(url)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=gs.GNNScaleStrategy(), max_epochs=1, **QUIET)
    monkeypatch.setattr(trainer.strategy, "broadcast", lambda value, src=0: f"{value}-of-another")
    datamodule.trainer = trainer
    with pytest.raises(StrategyError, match=said("published machine opened store fingerprint")):
        datamodule.setup("fit")
