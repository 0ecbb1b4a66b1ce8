"""`datamodule=full_graph` on the command line: the same config, without what only mini-batches need."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.cli.models import make_model
from lightning_gnnscale.cli.settings import taker_of
from lightning_gnnscale.cli.train import fit, make_datamodule
from lightning_gnnscale.cli.typed import check_keys
from lightning_gnnscale.datamodule import FullGraphDataModule, PartitionDataModule
from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.edge_stream import SyntheticGraph
from tests.says import said


@pytest.fixture
def dataset() -> GraphDataset:
    graph = SyntheticGraph(200, 800, num_communities=4, homophily=0.9, seed=0)
    return GraphDataset("small", graph.stream(to_undirected=True), graph.features(8), graph.labels(), graph.masks())


@pytest.mark.parametrize(("choice", "kind"), [("full_graph", FullGraphDataModule), ("partition", PartitionDataModule)])
def test_one_config_makes_either_datamodule_and_its_model(tmp_path, dataset, choice, kind):
    words = [f"datamodule={choice}", "num_parts=2", "seed=3", f"paths.stores={tmp_path}", "model=gcn"]
    config = compose_config("train", words)
    given = OmegaConf.to_container(config, resolve=False)
    check_keys(given, given, taker_of)
    dm = make_datamodule(config, dataset)
    assert type(dm) is kind and dm.seed == 3
    dm.store_source.root = tmp_path / "store"
    dm.prepare_data()
    assert dm.store.num_parts == 2
    model = make_model(config, dm)
    assert (model.backbone.in_channels, model.num_classes) == (8, 4)


def test_layers_need_no_fan_outs(tmp_path, dataset):
    words = ["datamodule=full_graph", "num_parts=2", f"paths.stores={tmp_path}", "model=gcn"]
    config = compose_config("train", [*words, "model.backbone.num_layers=3"])
    dm = make_datamodule(config, dataset)
    dm.store_source.root = tmp_path / "store"
    dm.prepare_data()
    assert make_model(config, dm).backbone.num_layers == 3


@pytest.mark.parametrize("equal_batches", [False, True])
def test_every_process_needs_a_part(tmp_path, dataset, equal_batches):
    dm = FullGraphDataModule(root=tmp_path / "store", dataset=dataset, partitioner="random", num_parts=1)
    dm.prepare_data()
    weights = SimpleNamespace(equal_batches=equal_batches)
    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(weights=weights))
    with pytest.raises(UsageError, match=said("trainer.devices=2 1 num_parts=2")):
        fit(trainer, None, dm, None)


def test_a_setting_of_mini_batches_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "datamodule=full_graph", "datamodule.batch_size=4"])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "datamodule.batch_size is a setting of datamodule=partition: say that too" in line
