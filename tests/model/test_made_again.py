"""Checkpoints that say how to make their model: `load_from_checkpoint` without `backbone=`, and what they may name."""

import lightning as L
import pytest
import torch
from torch import nn

import lightning_gnnscale as gs
from lightning_gnnscale.errors import CheckpointError
from lightning_gnnscale.model.backbone_module import make_backbone
from lightning_gnnscale.model.checkpoint_file import MODEL_KEY, saved_model


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
    with pytest.raises(CheckpointError, match="does not say how to make its model: give NodeClassifier.load_from"):
        gs.NodeClassifier.load_from_checkpoint(path)
    assert gs.NodeClassifier.load_from_checkpoint(path, backbone=nn.Linear(3, 2)).num_classes == 2


@pytest.mark.parametrize("target", ["os.system", "torch.nn.Linear", "torch_geometric.nn.summary", "no.such.Model", ""])
def test_a_checkpoint_may_name_models_alone(target):
    with pytest.raises(CheckpointError, match="no Backbone that is imported"):
        make_backbone({"_target_": target, "command": "touch trap"})


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
