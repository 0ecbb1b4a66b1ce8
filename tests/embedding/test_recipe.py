"""The recipe's settings, on a data set without features: the model is made with the rows that it names."""

from dataclasses import replace

import lightning as L
import numpy as np
import pytest
from embedding_runs import write_store
from omegaconf import OmegaConf

import lightning_gnnscale as gs
from lightning_gnnscale.cli.checks import check_dataset
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.models import make_model, model_widths
from lightning_gnnscale.cli.recipes import take_recipe
from lightning_gnnscale.cli.train import make_datamodule
from lightning_gnnscale.dataset import load_npz
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.planner import predict_training
from lightning_gnnscale.planner.host_memory import BatchShape, RunSize
from tests.says import said


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    edges, labels = rng.integers(0, 60, (2, 300)), rng.integers(0, 3, 60)
    (tmp_path / "small").mkdir()
    np.savez(tmp_path / "small" / "graph.npz", edge_index=edges, y=labels, x=rng.normal(size=(60, 5)))
    return tmp_path


def composed(overrides, recipe="embeddings"):
    config_dir, name, _ = take_recipe("train", [f"recipe={recipe}"])
    return compose_config(name, overrides, config_dir)


def test_the_model_has_a_row_a_node_whatever_the_parts_are(folder):
    rows = {}
    for num_parts in (2, 5):
        store = f"paths.stores={folder}/stores{num_parts}"
        config = composed([store, f"num_parts={num_parts}", "model.inputs.dim=6", "model.inputs.optimizer.lr=0.5"])
        dataset = load_npz("small", root=str(folder), use_features=False)
        assert dataset.features is None
        check_dataset(config, dataset)
        datamodule = make_datamodule(config, dataset)
        datamodule.prepare_data()
        model = make_model(config, datamodule)
        assert model.backbone.in_channels == model.inputs.dim == 6
        assert model.inputs.optimizer.lr == 0.5
        assert model.inputs.is_open, "forked processes share what stands before they are forked"
        rows[num_parts] = model.inputs.pull(datamodule.store.store_nid).numpy()
    assert np.array_equal(rows[2], rows[5]), "initial values go by the nodes, not by their parts"


def test_stored_features_stand_before_the_rows(folder):
    config = composed([f"paths.stores={folder}/stores", "num_parts=2"])
    datamodule = make_datamodule(config, load_npz("small", root=str(folder)))
    datamodule.prepare_data()
    assert make_model(config, datamodule).backbone.in_channels == 5 + 64


def test_distdgl_reads_the_rows_of_owners_and_on_one_machine_the_store(folder):
    config = composed([f"paths.stores={folder}/stores", "num_parts=2", "partitioner.balance={nodes:1.2}"], "distdgl")
    datamodule = make_datamodule(config, load_npz("small", root=str(folder)))
    datamodule.prepare_data()
    assert datamodule.rows.owners == gs.OwnerReads()
    rows = datamodule.store.features.array
    assert all(np.array_equal(batch.x.numpy(), rows[batch.n_id]) for batch in datamodule.train_dataloader())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"scope": "part"}, 'parts scope="graph" rows="auto"'),
        ({"source": "processes"}, "source=threads task_graphs"),
        ({"sampler": gs.SaintSampler()}, "NeighborSampler SaintSampler rows=auto"),
        ({"rows": "owner"}, "rows auto mapped owners gs.OwnerReads gs.PlacementSettings 'owner'"),
        ({"rows": gs.OwnerReads(memory_bytes="1GiB"), "source": "ray"}, "source=ray source.worker_memory_bytes"),
    ],
)
def test_where_owners_cannot_be_asked_it_is_said(tmp_path, settings, told):
    store = write_store(tmp_path, features=True)
    with pytest.raises(ValueError, match=said(told)):
        gs.PartitionDataModule(store=store, **({"rows": "owners", "scope": "graph"} | settings))


def test_sizes_of_owners_are_read():
    assert gs.OwnerReads(memory_bytes="2GiB").memory_bytes == "2GiB"
    with pytest.raises(ValueError, match=said("memory_bytes bytes 24GiB")):
        gs.OwnerReads(memory_bytes="much")
    with pytest.raises(ValueError, match="timeout_s"):
        gs.OwnerReads(timeout_s=0)


def test_links_are_predicted_from_learned_rows(folder):
    embedding = "{_target_: lightning_gnnscale.embedding.DistributedEmbedding, dim: 4}"
    overrides = [f"paths.stores={folder}/stores", "num_parts=2", f"+model.inputs={embedding}"]
    config = composed(overrides, "link_prediction")
    dataset = load_npz("small", root=str(folder))
    assert model_widths(config, dataset)["embedding_dim"] == 4
    datamodule = make_datamodule(config, load_npz("small", root=str(folder)))
    datamodule.prepare_data()
    model = make_model(config, datamodule)
    assert (model.inputs.dim, model.backbone.in_channels) == (4, 5 + 4)


def test_the_plan_counts_learned_rows():
    run, shape = RunSize(10**6, 10**7, num_parts=4), BatchShape(batch_size=512, fanouts=[10, 10])
    without, learned = predict_training(run, shape), replace(shape, embedding_dim=64)
    alone, shared = (predict_training(replace(run, num_processes=num), learned) for num in (1, 2))
    table = 10**6 * (3 * 4 * 64 + 4)
    assert alone - without >= table
    assert (alone - shared) >= table / 2, "processes of a host share the rows"


def test_batches_without_features_need_inputs(tmp_path):
    store = write_store(tmp_path, features=True)
    with pytest.raises(ValueError, match=said("features stored_features=True")):
        gs.PartitionDataModule(store=store, stored_features=False, rows=gs.PlacementSettings("ranges"))
    dm = gs.PartitionDataModule(store=store, stored_features=False)
    model = gs.NodeClassifier(gs.model.GraphSAGE(8, 8, dm.num_classes))
    with pytest.raises(StrategyError, match=said("stored_features=False leaves batches")):
        L.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False).fit(model, dm)


def test_a_data_set_without_features_names_the_recipe(folder):
    config = composed([])
    OmegaConf.update(config, "model.inputs", None)
    with pytest.raises(UsageError, match=said("model.inputs.dim=64 recipe=embeddings")):
        check_dataset(config, load_npz("small", root=str(folder), use_features=False))
