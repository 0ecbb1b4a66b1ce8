"""The recipe's settings, on a data set without features: the model is made with the rows that it names."""

import numpy as np
import pytest
from omegaconf import OmegaConf

from lightning_gnnscale.cli.check_dataset import check_dataset
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.recipe import take_recipe
from lightning_gnnscale.cli.train import make_datamodule, make_model
from lightning_gnnscale.dataset import load_npz


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    edges, labels = rng.integers(0, 60, (2, 300)), rng.integers(0, 3, 60)
    (tmp_path / "small").mkdir()
    np.savez(tmp_path / "small" / "graph.npz", edge_index=edges, y=labels, x=rng.normal(size=(60, 5)))
    return tmp_path


def composed(overrides):
    config_dir, name, _ = take_recipe("train", ["recipe=embeddings"])
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


def test_a_data_set_without_features_names_the_recipe(folder):
    config = composed([])
    OmegaConf.update(config, "model.inputs", None)
    with pytest.raises(UsageError, match=r"has none; training needs .* model\.inputs, as in recipe=embeddings"):
        check_dataset(config, load_npz("small", root=str(folder), use_features=False))
