"""Checkpoints that say how to make their model: `load_from_checkpoint` without `backbone=`, and what they may name."""

import lightning as L
import pytest
import torch
from torch import nn

import lightning_gnnscale as gs
from lightning_gnnscale.errors import CheckpointError
from lightning_gnnscale.model import made_again
from lightning_gnnscale.model.backbone_module import make_backbone
from lightning_gnnscale.model.checkpoint_file import MODEL_KEY, saved_model
from tests.says import said


class Deeper(gs.model.GraphSAGE):
    """A user's own, with an argument of its own."""

    def __init__(self, in_channels, hidden_channels, out_channels, extra: int = 1, **kwargs):
        super().__init__(in_channels, hidden_channels, out_channels, **kwargs)
        self.extra = nn.Linear(extra, extra)


class Mine(gs.NodeClassifier):
    """A user's own module, which makes its backbone itself."""

    def __init__(self, width: int = 3):
        super().__init__(gs.model.GCN(4, width, 2))
        self.save_hyperparameters()


def saved(module, path):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=0, barebones=True)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    return path


MODULES = {
    "sage": lambda: gs.NodeClassifier(gs.model.GraphSAGE(4, 8, 3, num_layers=3, dropout=0.1), lr=0.5),
    "gat": lambda: gs.NodeClassifier(gs.model.GAT(4, hidden_channels=8, out_channels=3, heads=2, norm="batch")),
    "sgc": lambda: gs.NodeClassifier(gs.model.SGC(4, out_channels=3), multilabel=True),
    "ngnn": lambda: gs.NodeClassifier(gs.model.NGNN(4, 8, 3, position="all")),
    "own": lambda: gs.NodeClassifier(Deeper(4, 8, 3, 2, norm="layer")),
    "links": lambda: gs.LinkPredictor(gs.model.GraphSAGE(4, 8, 3), decoder="mlp", hits=(3,)),
    "module": lambda: Mine(5),
}


@pytest.mark.parametrize("name", MODULES)
def test_they_open_without_a_backbone(tmp_path, name):
    module = MODULES[name]()
    loaded = type(module).load_from_checkpoint(saved(module, tmp_path / "x.ckpt"))
    assert repr(loaded) == repr(module)
    for key, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)


def test_a_backbone_that_is_given_is_taken(tmp_path):
    path = saved(MODULES["sage"](), tmp_path / "x.ckpt")
    backbone = gs.model.GraphSAGE(4, 8, 3, num_layers=3)
    assert gs.NodeClassifier.load_from_checkpoint(path, backbone=backbone).backbone is backbone
    with pytest.raises(CheckpointError, match="a checkpoint of another model"):
        gs.NodeClassifier.load_from_checkpoint(path, backbone=gs.model.GCN(4, 8, 3))
    assert saved_model(path)["out_channels"] == 3


def test_another_model_has_to_be_given(tmp_path):
    path = saved(gs.NodeClassifier(nn.Linear(3, 2), num_classes=2), tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=said("x.ckpt NodeClassifier.load_from_checkpoint(")):
        gs.NodeClassifier.load_from_checkpoint(path)
    assert gs.NodeClassifier.load_from_checkpoint(path, backbone=nn.Linear(3, 2)).num_classes == 2


@pytest.mark.parametrize("target", ["os.system", "torch.nn.Linear", "torch_geometric.nn.summary", "no.such.Model", ""])
def test_a_checkpoint_may_name_models_alone(target):
    with pytest.raises(CheckpointError, match=said("imported Backbone")):
        make_backbone({"_target_": target, "command": "touch trap"})


PYG = {"_target_": "torch_geometric.nn.GCN", "in_channels": 4, "hidden_channels": 8, "num_layers": 2, "out_channels": 3}
TRAP = "x: __import__('os').system('touch trap')"
ATTACKS = {
    "text that PyG runs": {"_target_": "torch_geometric.nn.Sequential", "input_args": TRAP, "modules": []},
    "by another name": {"_target_": "torch_geometric.nn.sequential.Sequential", "input_args": TRAP, "modules": []},
    "a file that PyG unpickles": {"_target_": "torch_geometric.nn.GPSE", "in_channels": 4},
    "within a list's model": {"_target_": "lightning_gnnscale.model.Hetero", "model": PYG, "schema": None},
    "within an argument": PYG | {"act": {"_target_": "torch_geometric.nn.Sequential", "input_args": TRAP}},
    "within options": PYG | {"norm": "batch", "norm_kwargs": {"_target_": "os.system"}},
    "an activation of modules": PYG | {"act": "MultiheadAttention", "act_kwargs": {"embed_dim": 1 << 20}},
    "a norm that is none": PYG | {"norm": TRAP},
    "an aggregation of others": PYG | {"aggr": "MultiAggregation", "aggr_kwargs": {"aggrs": ["lstm"]}},
    "aggregations": PYG | {"aggr": ["mean", TRAP]},
    "text for a number": PYG | {"hidden_channels": TRAP},
    "a bomb of layers": PYG | {"num_layers": 10**9},
    "a bomb of columns": PYG | {"hidden_channels": 1 << 70},
    "a nest": PYG | {"act_kwargs": {"a": [[[[[[[[[[[[1]]]]]]]]]]]]}},
    "a tensor": PYG | {"bias": torch.ones(3)},
    "own, with a target within": {"_target_": "lightning_gnnscale.model.GCN", "in_channels": 4, "hidden_channels": 8,
                                  "out_channels": 3, "norm": {"_target_": "os.system"}},
    "own, of another type": {"_target_": "lightning_gnnscale.model.GCN", "in_channels": "4", "hidden_channels": None,
                             "out_channels": 3},
    "own, a schema of another shape": {"_target_": "lightning_gnnscale.model.RGCN", "in_channels": 4,
                                       "hidden_channels": 8, "out_channels": 3, "schema": {"node_types": 3}},
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_a_checkpoint_runs_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.ckpt"
    module = gs.NodeClassifier(gs.model.GCN(4, 8, 3))
    saved(module, path)
    content = torch.load(path, weights_only=True)
    content[MODEL_KEY]["backbone"] = ATTACKS[name]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"^[^\n]+backbone=\.\.\.\)$"):
        gs.NodeClassifier.load_from_checkpoint(path)
    assert not (tmp_path / "trap").exists()
    assert isinstance(gs.NodeClassifier.load_from_checkpoint(path, backbone=gs.model.GCN(4, 8, 3)), gs.NodeClassifier)


@pytest.mark.parametrize("name", made_again.PYG_MODELS)
def test_the_plain_models_of_pyg_are_made(name):
    more = {"aggregators": ["mean", "max"], "scalers": ["identity"], "act": "ReLU", "norm": "batch_norm"}
    options = {
        "GAT": {"heads": 2, "v2": True, "fill_value": "mean"},
        "GraphSAGE": {"aggr": ["mean", "max"], "jk": "cat"},
    }
    settings = (
        PYG | {"act": "elu", "act_kwargs": {"alpha": 0.5}} | options.get(name, {}) if name != "PNA" else PYG | more
    )
    if name == "PNA":  # needs degrees, which are no plain value
        with pytest.raises(CheckpointError, match=said("'deg' backbone=")):
            make_backbone(settings | {"_target_": "torch_geometric.nn.models.PNA"})
        return
    assert type(make_backbone(settings | {"_target_": f"torch_geometric.nn.{name}"})).__name__ == name


ENTRIES = {
    "no settings": {MODEL_KEY: {"backbone": ["torch_geometric.nn.GCN"]}},
    "no name": {MODEL_KEY: {"backbone": PYG | {"_target_": {"a": 1}}}},
    "a tensor for a name": {MODEL_KEY: {"backbone": {"_target_": torch.ones(2)}}},
    "a tensor for a width": {MODEL_KEY: {"backbone": PYG | {"out_channels": torch.ones(2)}}},
    "text for a weight": {"state_dict": {"backbone.convs.0.weight": "x"}},
    "an instantiator": {"hyper_parameters": {"_instantiator": "lightning.pytorch.cli.instantiate_module"}},
    "a function": {"hyper_parameters": {"lr": torch._utils._rebuild_tensor_v2}},
    "an optimizer": {"hyper_parameters": {"optimizer": {"_target_": "os.system"}}},
    "another optimizer": {MODEL_KEY: {"optimizer": "torch.optim.SGD"}},
    "inputs": {MODEL_KEY: {"inputs": [1]}},
    "a list": {"hyper_parameters": [1]},
    "a type": {"hparams_type": torch.Tensor},
    "a name": {"hparams_name": "backbone"},
    "an old key": {"hparams": {"scheduler": "x"}},
    "weights that are none": {"state_dict": 5},
    "a version": {"pytorch-lightning_version": "x.y"},
    "half an epoch": {"epoch": 2.5},
    "true for a number": {"global_step": True},
    "a file to remove": {"callbacks": {"ModelCheckpoint{}": {"dirpath": "/a", "best_k_models": {"/a/../b/c": 0.0}}}},
    "an object to remove": {"callbacks": {"ModelCheckpoint{}": {"last_model_path": "s3://bucket/key"}}},
    "rows elsewhere": {"gnnscale_inputs": {"folder": "x", "ranks": [{"files": [{"name": "../../etc"}]}]}},
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_another_type_are_one_line(tmp_path, name):
    path = saved(gs.NodeClassifier(gs.model.GCN(4, 8, 3)), tmp_path / "x.ckpt")
    content = torch.load(path, weights_only=True)
    torch.save(content | ENTRIES[name], path)
    for source in (path, open(path, "rb")):  # noqa: SIM115
        with pytest.raises(CheckpointError, match=r"^[^\n]+$"):
            gs.NodeClassifier.load_from_checkpoint(source, backbone=gs.model.GCN(4, 8, 3))


WIDE = {"in_channels": 4, "hidden_channels": 10**9, "out_channels": 3}
HUGE = {
    "columns": PYG | {"hidden_channels": 10**9},
    "columns of ours": WIDE | {"_target_": "lightning_gnnscale.model.GCN"},
    "layers": PYG | {"hidden_channels": 1000, "num_layers": 1000},
    "heads": WIDE | {"_target_": "lightning_gnnscale.model.GAT", "hidden_channels": 80_000, "heads": 10_000},
    "small layers": PYG | {"_target_": "torch_geometric.nn.GIN", "num_layers": 1000, "norm": "batch"},
    "a decoder": {"decoder": "transe", "num_relations": 1 << 30},
    "classes": {"num_classes": 1 << 30},
}


@pytest.mark.parametrize("name", HUGE)
def test_a_model_far_larger_than_its_weights_takes_no_memory(tmp_path, name):
    links = name == "a decoder"
    module = (gs.LinkPredictor if links else gs.NodeClassifier)(gs.model.GCN(4, 8, 3))
    path = saved(module, tmp_path / "x.ckpt")
    content = torch.load(path, weights_only=True)
    if "_target_" in HUGE[name]:
        content[MODEL_KEY]["backbone"] = HUGE[name]
    else:
        content["hyper_parameters"].update(HUGE[name])
    # a shape that the file does not hold explains nothing
    content["state_dict"]["more"] = torch.ones(1).expand(1 << 20, 1 << 20)
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"^[^\n]+x\.ckpt: [^\n]+$"):
        type(module).load_from_checkpoint(path)


def test_models_of_pyg_are_made_from_their_settings(tmp_path):
    from torch_geometric.nn.models import GCN

    module = gs.NodeClassifier(GCN(4, 8, 2, 3))
    module.backbone_settings = {
        "_target_": "torch_geometric.nn.models.GCN", "in_channels": 4, "hidden_channels": 8, "num_layers": 2,
        "out_channels": 3,
    }  # fmt: skip
    loaded = gs.NodeClassifier.load_from_checkpoint(saved(module, tmp_path / "x.ckpt"))
    assert repr(loaded.backbone) == repr(module.backbone)
    with pytest.raises(CheckpointError, match="is not made again"):
        make_backbone(module.backbone_settings | {"no_such": 1})
    assert MODEL_KEY in torch.load(tmp_path / "x.ckpt", weights_only=True)
