"""Training and evaluation on features stored as codes equal those on the decoded rows as float32, bit for bit."""

import lightning as L
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.placement import PlacementSettings
from tests.says import said
from tests.tiers import first

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


@pytest.fixture(scope="module")
def roots(dataset, tmp_path_factory):
    """One store of int8 rows with packed halos, and one of what they decode to."""
    return written(dataset, tmp_path_factory.mktemp("stores"), "int8")


@pytest.fixture(scope="module")
def rounded_roots(dataset, tmp_path_factory):
    """One store of bfloat16, and one of float32 features that torch has rounded to bfloat16."""
    roots = written(dataset, tmp_path_factory.mktemp("rounded"), "bfloat16")
    store = gs.PartitionStore.open(roots[1])
    given = torch.from_numpy(np.asarray(dataset.features)[store.original_nid]).bfloat16().float()
    assert store.features.array.tobytes() == given.numpy().tobytes()
    return roots


def written(dataset, folder, storage):
    parts = gs.partition(dataset.stream, "random", num_parts=4, seed=1)
    arrays = {"labels": dataset.labels, "masks": dataset.masks}
    options = {"features": dataset.features, "feature_storage": storage, "pack_halo": True}
    quantised = gs.write_partition_store(folder / storage, dataset.stream, parts, **arrays, **options)
    decoded = quantised.features.read(quantised.store_nid)
    assert not np.array_equal(decoded, dataset.features)
    gs.write_partition_store(folder / "plain", dataset.stream, parts, **arrays, features=decoded, pack_halo=True)
    return folder / storage, folder / "plain"


def trained(datamodule, weights=None):
    """Weights after two epochs, and the metrics of an exact test and of validation."""
    torch.manual_seed(0)
    store = datamodule.store
    model = gs.NodeClassifier(gs.model.GraphSAGE(store.features.dim, 16, 8, num_layers=2), lr=0.01)
    strategy = gs.GNNScaleStrategy(weights=weights or gs.ModelAveraging())
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(model, datamodule)
    metrics = trainer.test(model, datamodule, verbose=False)[0]
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), metrics


CASES = {
    "threads": {},
    "processes": {"source": gs.Processes(2)},
    "task graphs": {"source": gs.TaskGraphs(2)},
    "whole graph": {"scope": "graph"},
    "full batch": {"mode": "full_batch"},
    "sampled evaluation": {"evaluation": "sampled"},
    "placed": {"rows": PlacementSettings(buffer_rows=20, cache_rows=10)},
}


def check_alike(roots, case):
    options = {"sampler": gs.NeighborSampler([4, 3]), "batch_size": 24, "seed": 3} | CASES[case]
    weights = gs.GradientAveraging() if "scope" in options else None
    of_codes, of_rows = (trained(gs.PartitionDataModule(root, **options), weights) for root in roots)
    assert torch.isfinite(of_codes[0]).all() and torch.equal(of_codes[0], of_rows[0])
    assert of_codes[1] == of_rows[1]


@first(2)
@pytest.mark.parametrize("case", CASES)
def test_codes_train_as_what_they_decode_to(roots, case):
    check_alike(roots, case)


@first(1)
@pytest.mark.parametrize("case", ["placed", *(case for case in CASES if case != "placed")])
def test_bfloat16_trains_as_float32_rounded_to_it(rounded_roots, case):
    check_alike(rounded_roots, case)


def test_full_graph_training_reads_codes(roots):
    of_codes, of_rows = (trained(gs.FullGraphDataModule(root)) for root in roots)
    assert torch.equal(of_codes[0], of_rows[0]) and of_codes[1] == of_rows[1]


@pytest.mark.parametrize("datamodule", [gs.PartitionDataModule, gs.FullGraphDataModule])
def test_a_datamodule_writes_what_it_is_told(dataset, tmp_path, datamodule):
    dm = datamodule(root=tmp_path / "s", dataset=dataset, num_parts=2, partitioner="random", feature_storage="int4")
    assert dm.dataset.feature_bytes == dataset.stream.num_nodes * (4 + dataset.feature_dim // 2)
    assert dataset.feature_storage is None, "the data set that was given stays as it is"
    dm.prepare_data()
    assert dm.store.feature_storage == "int4" and dm.store.features.nbytes == dm.dataset.feature_bytes
    again = datamodule(root=tmp_path / "s", dataset=dataset, num_parts=2, partitioner="random")
    with pytest.raises(gs.errors.PartitionStoreError, match="made from other input"):
        again.prepare_data()
    with pytest.raises(ValueError, match=said("feature_storage=int4 store=")):
        datamodule(tmp_path / "s", feature_storage="int4")


def test_a_name_that_is_no_storage_is_refused_before_any_work(dataset, tmp_path):
    with pytest.raises(ValueError, match=said("feature_storage null")):
        gs.PartitionDataModule(root=tmp_path / "s", dataset=dataset, feature_storage="int2")
    with pytest.raises(TypeError, match="batchsize"):
        gs.PartitionDataModule(root=tmp_path / "s", dataset=dataset, batchsize=3)
