"""What the package says in Python's words the command line says in its own; data sets that recipes do not choose."""

import numpy as np
import pytest
from cli.refusals import refused
from omegaconf import OmegaConf
from own_process import gnnscale

from lightning_gnnscale.cli.compose import compose_config, fill_inputs
from lightning_gnnscale.cli.errors import in_words_of_shell
from lightning_gnnscale.cli.recipes import for_other_choices, recipes_folder


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("the id of each row: nodes=nodes.csv:id", "the id of each row: dataset.nodes=nodes.csv:id"),
        ("pass relabel=True to number arbitrary ids", "pass dataset.relabel=true to number arbitrary ids"),
        ("say header=True, or header=False", "say dataset.reader.header=true, or dataset.reader.header=false"),
        ("pass relabel=True, id_type='string' to", "pass dataset.relabel=true, dataset.reader.id_type=string to"),
        ("list every node in nodes=", "list every node in dataset.nodes="),
        ("deduplicate=True drops them", "partitioner.deduplicate=true drops them"),
        ("or overwrite=True", "or overwrite=true"),
        ('give evaluation="sampled"', "give evaluation=sampled"),
        ("edge_stream.num_nodes must be", "dataset.num_nodes must be"),
        ("edge_stream.separator must be", "dataset.reader.separator must be"),
        ("or set num_classes=100001", "or set dataset.num_classes=100001"),
        ("num_classes=3a", "num_classes=3a"),
        ("dataset.relabel=true, self.nodes=3, my_header=True", "dataset.relabel=true, self.nodes=3, my_header=True"),
        ("a file nodes=x.npy", "a file nodes=x.npy"),
    ],
)
def test_words(told, said):
    assert in_words_of_shell(told) == said


def test_what_a_recipe_says_of_its_own_data_set():
    words = ["dataset=files", "dataset.edges=e.npy"]
    folder, back, left_out = for_other_choices(str(recipes_folder()), "embeddings", words)
    assert (folder, left_out) == (str(recipes_folder()), [])
    assert back == ['dataset.name="${name_of:edges}"', "~dataset.use_features"]
    config = compose_config("embeddings", [*back, *words], str(recipes_folder()))
    assert config.name == "embeddings-e" and "use_features" not in config.dataset
    assert for_other_choices(str(recipes_folder()), "embeddings", [*words, "dataset.name=mine"])[1:] == (back[1:], [])
    for same in (["dataset=npz"], ["dataset.name=cora"], ["dataset=no_such"], []):
        assert for_other_choices(str(recipes_folder()), "embeddings", same)[1:] == ([], [])
    assert for_other_choices(None, "train", words) == (None, [], [])


def test_what_another_choice_does_not_have_is_left_out_of_a_recipe():
    folder = str(recipes_folder())
    copy, added, left_out = for_other_choices(folder, "locality_sampling", ["sampler=layerwise"])
    assert (added, left_out) == ([], ["sampler.fanouts"])
    assert "fanouts" not in compose_config("locality_sampling", ["sampler=layerwise"], copy).sampler
    assert compose_config("locality_sampling", [], copy).rows.locality_scale == 1
    for words in (["sampler=layerwise", "sampler.fanouts=[3]"], ["sampler=neighbor"], []):
        assert for_other_choices(folder, "locality_sampling", words) == (folder, [], [])
    _, _, left_out = for_other_choices(folder, "sancus", ["strategy/exchange=halo"])
    assert {"strategy.exchange.warmup_epochs", "strategy.exchange.exchange"} <= set(left_out)


def test_a_width_of_inputs_means_embeddings():
    config = OmegaConf.create({"model": {"inputs": {"dim": 64}}, "seed": 5})
    OmegaConf.set_struct(config, True)
    fill_inputs(config)
    assert config.model.inputs == {
        "dim": 64, "seed": 5, "_target_": "lightning_gnnscale.embedding.DistributedEmbedding"
    }  # fmt: skip
    for given in ({}, {"model": {}}, {"model": {"inputs": None}}, {"model": {"inputs": {"_target_": "x", "dim": 2}}}):
        config = OmegaConf.create(given)
        fill_inputs(config)
        assert config == given


def test_edge_features_that_no_layer_reads(tmp_path, capsys):
    edges = np.unique(np.random.default_rng(0).integers(0, 20, (2, 60)), axis=1)
    arrays = {"edges": edges, "features": np.ones((20, 2)), "labels": np.arange(20) % 2}
    arrays["edge_features"] = np.ones((edges.shape[1], 3))
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    words = ["train", "dataset=files", *(f"dataset.{name}={tmp_path}/{name}.npy" for name in arrays)]
    words += [f"hydra.run.dir={tmp_path}/run", f"paths.stores={tmp_path}/stores", "num_parts=2", "trainer.devices=1"]
    told = refused(capsys, *words)
    assert "dataset.edge_features: no layer of GraphSAGE reads them: say model=gat or model=gine, or leave" in told
    assert "full-graph training does not read them" in refused(capsys, *words, "datamodule=full_graph", "model=gat")
    pyg = "+model.backbone={_target_:torch_geometric.nn.GAT,hidden_channels:4,num_layers:2,edge_dim:3}"
    alone = ["recipe=cagnet", "~model.backbone", pyg, "trainer.max_epochs=1", "test=false"]
    ended = gnnscale(tmp_path, *words, *alone)
    assert ended.returncode == 0, ended.stderr
    without = [word for word in words if not word.startswith("dataset.edge_features=")]
    assert "GINE reads them, so give dataset.edge_features" in refused(capsys, *without, "model=gine")
    assert "has no effect, the run fills it in" in refused(capsys, *words, "model=gat", "model.backbone.edge_dim=2")
