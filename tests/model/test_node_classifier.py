"""The Lightning module: what it counts, what it logs, under the Trainer."""

from functools import partial
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from model.graphs import MemorySource, make_graph, sampled, to_sparse
from torch import nn

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import (
    GAT,
    GCN,
    NGNN,
    SGC,
    GraphSAGE,
    NodeClassifier,
    backbone_module,
    layerwise_inference,
)
from lightning_gnnscale.model import LayerwiseOutput as Output
from tests.says import said


class Pass:
    """An evaluation pass of one rank, as the DataModule gives it."""

    def __init__(self, graph, split, **options):
        self.source, self.split = MemorySource(graph, **options), split
        self.labels = graph.y.numpy()
        self.masks = {name: mask.numpy() for name, mask in graph.masks.items()}

    def to(self, device, non_blocking=False):
        return self


class Batch(SimpleNamespace):
    """A mini-batch with the attributes of the sampler's, and no more."""

    def to(self, device, non_blocking=False):
        return self


def make_batch(graph, seeds, num_hops=2, sparse=False):
    n_id, edge_index, indptr, counts = sampled(graph, seeds, num_hops)
    x = graph.x[n_id]
    return Batch(
        x=x, x_csr=to_sparse(x) if sparse else None, edge_index=edge_index, indptr=indptr, y=graph.y[n_id],
        batch_size=len(seeds), n_id=n_id, degree=graph.degree[n_id], num_sampled_nodes=counts,
        edge_weight=None, loss_weight=None, **{f"{name}_mask": mask[n_id] for name, mask in graph.masks.items()},
    )  # fmt: skip


class Batches:
    """A plain iterable with a length: what this package's loaders are."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@pytest.fixture
def graph():
    """Labels stand out in the first four features: learnable."""
    torch.manual_seed(0)
    graph = make_graph(num_nodes=120, num_edges=300)
    graph.x = torch.randn(graph.num_nodes, 12)
    graph.x[torch.arange(120), graph.y] += 4
    split = torch.arange(graph.num_nodes) % 4
    graph.masks = {"train": split < 2, "val": split == 2, "test": split == 3}
    graph.y[::10] = -1
    return graph


def batches_of(graph, size=16, **options):
    seeds = graph.masks["train"].nonzero().flatten().tolist()
    return Batches([make_batch(graph, seeds[i : i + size], **options) for i in range(0, len(seeds), size)])


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*num_workers.*")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_fit_validate_test_and_predict_under_the_trainer(graph, precision):
    torch.manual_seed(0)
    model = NodeClassifier(GraphSAGE(12, 32, 4, num_layers=2, dropout=0.2), lr=0.02)
    run = trainer(max_epochs=25, precision=precision)
    run.fit(model, batches_of(graph), Batches([Pass(graph, "val", chunk=50)]))
    assert {"train_loss", "val_loss", "val_acc"} <= set(run.callback_metrics)
    assert run.callback_metrics["train_loss"] < 0.7  # 1.39 for a guess
    logged = run.test(model, Batches([Pass(graph, "test")]), verbose=False)[0]
    assert logged["test_acc"] > 0.6  # 0.25 for a guess
    (result,) = run.predict(model, Batches([Pass(graph, None)]))
    known = graph.masks["test"] & (graph.y >= 0)
    accuracy = (result["prediction"][known] == graph.y[known]).float().mean()
    assert list(result["nodes"]) == list(range(120))
    assert logged["test_acc"] == pytest.approx(float(accuracy))


@pytest.mark.parametrize("kind", [GCN, GAT, SGC, NGNN])
def test_the_other_backbones_learn(graph, kind):
    torch.manual_seed(0)
    model = NodeClassifier(kind(in_channels=12, hidden_channels=32, out_channels=4, num_layers=2, dropout=0.0), lr=0.02)
    graph.masks["val"] = graph.masks["train"]
    batches = batches_of(graph, sparse=True)
    before = trainer().validate(model, batches, verbose=False)[0]["val_loss"]
    trainer(max_epochs=8).fit(model, batches)
    assert trainer().validate(model, batches, verbose=False)[0]["val_loss"] < 0.9 * before


def test_accumulated_batches_leave_the_logged_loss_as_it_is(graph):
    torch.manual_seed(0)
    model, batches, logged = NodeClassifier(GraphSAGE(12, 8, 4, dropout=0.0), lr=0.0), batches_of(graph), []
    for window in (1, 3):
        run = trainer(max_epochs=1, accumulate_grad_batches=window)
        run.fit(model, batches)
        logged.append(float(run.callback_metrics["train_loss"]))
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)


def test_a_module_goes_from_one_trainer_to_another(graph):
    model = NodeClassifier(GCN(12, 8, 4))
    results = [
        trainer(inference_mode=mode).test(model, Batches([Pass(graph, "test")]), verbose=False)
        for mode in (True, False, True)  # under gloo Lightning leaves inference mode
    ]
    assert results[0] == results[1] == results[2]


@pytest.fixture
def unlogged(monkeypatch):
    """Steps outside of a Trainer have nowhere to log to."""
    monkeypatch.setattr(NodeClassifier, "log", lambda *args, **options: None)


@pytest.mark.usefixtures("unlogged")
def test_the_training_loss_is_the_mean_over_known_training_seeds(graph):
    model = NodeClassifier(GCN(12, 8, 4, dropout=0.0))
    batch = make_batch(graph, list(range(30)))
    out = model(batch)
    chosen = (graph.masks["train"][:30] & (graph.y[:30] >= 0)).nonzero().flatten()
    assert 0 < len(chosen) < 30
    expected = F.cross_entropy(out[chosen], graph.y[chosen])
    torch.testing.assert_close(model.training_step(batch), expected)


@pytest.mark.usefixtures("unlogged")
def test_loss_weights_weigh_a_sum(graph):
    model = NodeClassifier(GraphSAGE(12, 8, 4, dropout=0.0))
    batch = make_batch(graph, list(range(30)))
    batch.loss_weight = torch.rand(30)
    known = graph.masks["train"][:30] & (graph.y[:30] >= 0)
    losses = F.cross_entropy(model(batch), graph.y[:30].clamp(min=0), reduction="none")
    torch.testing.assert_close(model.training_step(batch), (losses * batch.loss_weight)[known].sum())


@pytest.mark.usefixtures("unlogged")
def test_a_nodes_loss_weight_goes_to_the_mean_over_its_known_labels(graph):
    graph.y = torch.stack([graph.x[:, 0] > 0, graph.x[:, 1] > 0, graph.x[:, 2] > 0], dim=1).long()
    graph.y[3, 1] = graph.y[4] = -1
    model = NodeClassifier(GraphSAGE(12, 8, 3, dropout=0.0), multilabel=True)
    batch = make_batch(graph, list(range(20)))
    batch.loss_weight = torch.rand(20)
    outputs, labels = model(batch), graph.y[:20]
    expected = 0.0
    for node in range(20):
        known = labels[node] >= 0
        if graph.masks["train"][node] and known.any():
            loss = F.binary_cross_entropy_with_logits(outputs[node][known], labels[node][known].float())
            expected += batch.loss_weight[node] * loss
    torch.testing.assert_close(model.training_step(batch), expected)


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("seeds", [[], [0, 10, 20]])
def test_no_valid_target_gives_zero_loss_and_zero_gradients(graph, seeds):
    for kind in (GCN, GAT, GraphSAGE, SGC, NGNN):
        model = NodeClassifier(kind(in_channels=12, hidden_channels=8, out_channels=4, num_layers=2))
        batch = make_batch(graph, seeds or [1])
        if not seeds:
            batch.batch_size, batch.num_sampled_nodes = 0, None
            batch.indptr = torch.cat([batch.indptr, batch.indptr[-1:].expand(len(batch.n_id) + 1 - len(batch.indptr))])
        loss = model.training_step(batch)
        loss.backward()
        assert float(loss.detach()) == 0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.usefixtures("unlogged")
def test_evaluation_counts_each_node_of_the_split_once(graph, monkeypatch):
    model = NodeClassifier(GCN(12, 8, 4)).eval()
    outputs = torch.from_numpy(layerwise_inference(model.backbone, MemorySource(graph)).table)
    for split, step in (("val", model.validation_step), ("test", model.test_step)):
        for rank in range(2):  # two ranks' rows, one after the other, into the same counts
            rows = np.arange(graph.num_nodes)[rank::2]
            monkeypatch.setattr(backbone_module, "layerwise_inference", lambda *a, **o: Output(rows, outputs.numpy()))  # noqa: B023
            step(Pass(graph, split))
        known = graph.masks[split] & (graph.y >= 0)
        accuracy = (outputs.argmax(1) == graph.y)[known].float().mean()
        torch.testing.assert_close(model.scores[split].compute(), accuracy)
        loss = F.cross_entropy(outputs[known], graph.y[known])
        torch.testing.assert_close(model.losses[split].compute(), loss)


@pytest.mark.usefixtures("unlogged")
def test_a_rank_without_nodes_of_the_split_adds_nothing(graph):
    model = NodeClassifier(GCN(12, 8, 4)).eval()
    model.validation_step(Pass(graph, "val"))
    before = float(model.scores["val"].compute()), float(model.losses["val"].compute())
    nothing = Pass(graph, "val")
    nothing.masks["val"][:] = False
    model.validation_step(nothing)
    nothing.source.world_size, nothing.source.rank, nothing.source.chunk = 1, 1, 1000  # no rows at all
    nothing.source.blocks = lambda needed=None: iter(())
    model.validation_step(nothing)
    assert (float(model.scores["val"].compute()), float(model.losses["val"].compute())) == before


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("multilabel", [False, True])
def test_a_rank_without_rows_is_not_warned_about(graph, recwarn, multilabel):
    nothing = Pass(graph, "val")
    nothing.labels = np.eye(4, dtype=int)[nothing.labels] if multilabel else nothing.labels
    model = NodeClassifier(GCN(12, 8, 4), multilabel=multilabel).eval()
    model.test_step(nothing)  # its tables are there then
    nothing.source.world_size, nothing.source.rank, nothing.source.chunk = 1, 1, 1000
    nothing.source.blocks = lambda needed=None: iter(())
    nothing.labels.flags.writeable = False  # as a store's
    recwarn.clear()
    model.validation_step(nothing)
    assert float(model.scores["val"].compute()) == 0 and float(model.losses["val"].weight) == 0
    assert not [str(warning.message) for warning in recwarn]
    model._reset("test")
    model.scores["test"].compute()  # nothing was added to it: an error elsewhere is still told
    assert [warning for warning in recwarn if "before the ``update``" in str(warning.message)]


@pytest.mark.usefixtures("unlogged")
def test_sampled_evaluation_of_a_mini_batch(graph):
    model = NodeClassifier(GCN(12, 8, 4)).eval()
    exact, sampled_ = NodeClassifier(model.backbone).eval(), model
    exact.validation_step(Pass(graph, "val"))
    for start in range(0, 120, 40):
        sampled_.validation_step(make_batch(graph, list(range(start, start + 40))))
    torch.testing.assert_close(sampled_.scores["val"].compute(), exact.scores["val"].compute())
    torch.testing.assert_close(sampled_.losses["val"].compute(), exact.losses["val"].compute())
    predicted = model.predict_step(make_batch(graph, [5, 3]))
    whole = model.predict_step(Pass(graph, None))
    assert list(predicted["nodes"]) == [5, 3]
    assert torch.equal(predicted["prediction"], whole["prediction"][[5, 3]])


@pytest.mark.usefixtures("unlogged")
def test_several_labels_a_node(graph):
    graph.y = torch.stack([graph.x[:, 0] > 0, graph.x[:, 1] > 0, graph.x[:, 2] > 0], dim=1).long()
    graph.y[3, 1] = graph.y[4] = -1
    model = NodeClassifier(GraphSAGE(12, 8, 3, dropout=0.0), multilabel=True, predict_logits=True)
    batch = make_batch(graph, list(range(20)))
    known = (graph.y[:20] >= 0) & graph.masks["train"][:20, None]
    expected = F.binary_cross_entropy_with_logits(model(batch)[known], graph.y[:20][known].float())
    torch.testing.assert_close(model.training_step(batch), expected)
    model.eval()
    model.validation_step(Pass(graph, "val"))
    outputs = model.predict_step(Pass(graph, None))["prediction"]
    known = (graph.y >= 0) & graph.masks["val"][:, None]
    said, true = (outputs > 0) & known, (graph.y == 1) & known
    f1 = 2 * (said & true).sum() / (said.sum() + true.sum())
    torch.testing.assert_close(model.scores["val"].compute(), f1)
    decided = NodeClassifier(model.backbone, multilabel=True).predict_step(Pass(graph, None))["prediction"]
    assert torch.equal(decided, (outputs > 0).long())


def test_numbers_of_numpy_leave_a_checkpoint_that_loads(tmp_path):
    model = NodeClassifier(GraphSAGE(12, 8, np.int64(4)), lr=np.float64(0.1))
    torch.save({"hyper_parameters": dict(model.hparams)}, tmp_path / "saved.ckpt")
    loaded = torch.load(tmp_path / "saved.ckpt", weights_only=True)["hyper_parameters"]
    assert (loaded["num_classes"], loaded["lr"]) == (4, 0.1)


@pytest.mark.parametrize(("every", "frequency"), [(1, 1), (3, 3), (None, 1)])
def test_a_plateau_is_looked_for_where_there_is_a_loss(every, frequency):
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    model = NodeClassifier(GraphSAGE(12, 8, 4), num_classes=4, scheduler=plateau)
    model._trainer = SimpleNamespace(check_val_every_n_epoch=every)
    assert model.configure_optimizers()["lr_scheduler"]["frequency"] == frequency


@torch.no_grad()
def test_logits_of_autocast_can_be_written(graph):
    model = NodeClassifier(GraphSAGE(12, 8, 4, dropout=0.0), num_classes=4, predict_logits=True).eval()
    batch = make_batch(graph, list(range(20)))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch).dtype == torch.bfloat16
        assert model.predict_step(batch)["prediction"].numpy().dtype == np.float32
    batch.x = batch.x.double()
    assert model.double().predict_step(batch)["prediction"].dtype == torch.float64


class Own(nn.Module):
    """A user's model: two PyG layers, with the further arguments that it names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.SAGEConv(12, 8), pyg.SAGEConv(8, 4)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.usefixtures("unlogged")
def test_a_users_own_module(graph):
    batch = make_batch(graph, list(range(16)))
    batch.x = batch.x.half()
    model = NodeClassifier(Own(), num_classes=4)
    model.training_step(batch).backward()
    assert all(parameter.grad.any() for parameter in model.parameters())
    with pytest.raises(StrategyError, match=said('layer evaluation="sampled"')):
        model.validation_step(Pass(graph, "val"))
    batch.edge_weight = torch.ones(batch.edge_index.shape[1])
    with pytest.raises(StrategyError, match=said("Own.forward edge_weight")):
        model.training_step(batch)


def test_a_users_module_gets_what_it_names(graph):
    class Named(Own):
        def forward(self, x, edge_index, degree=None, num_sampled_nodes=None):
            self.seen = (degree, num_sampled_nodes)
            return super().forward(x, edge_index)

    batch = make_batch(graph, list(range(16)))
    model = NodeClassifier(Named(), num_classes=4)
    model(batch)
    assert model.backbone.seen == (batch.degree, batch.num_sampled_nodes)


def test_weights_of_a_mean_are_turned_into_weights_of_a_sum(graph):
    """Weights with 1 / degree in them: every backbone gives its full-neighbour value; others are left as they are."""
    batch = make_batch(graph, list(range(16)))
    for kind in (GCN, SGC, GAT, GraphSAGE):
        model = NodeClassifier(kind(in_channels=12, hidden_channels=8, out_channels=4)).eval()
        batch.edge_weight, batch.averaging_weights = None, False
        full = model(batch)
        batch.edge_weight = 1 / batch.degree[batch.edge_index[1]].float()
        batch.averaging_weights = True
        torch.testing.assert_close(model(batch), full)
        batch.edge_weight, batch.averaging_weights = torch.ones(batch.edge_index.shape[1]), False
        assert torch.allclose(model(batch), full) == (kind is not GraphSAGE)


def test_optimizer_and_scheduler_from_partials(graph):
    model = NodeClassifier(
        GCN(12, 8, 4),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
    )
    made = model.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.SGD)
    assert isinstance(made["lr_scheduler"]["scheduler"], torch.optim.lr_scheduler.StepLR)
    plain = NodeClassifier(GCN(12, 8, 4), lr=0.3, weight_decay=0.1).configure_optimizers()
    assert isinstance(plain, torch.optim.Adam)
    assert (plain.defaults["lr"], plain.defaults["weight_decay"]) == (0.3, 0.1)


@pytest.mark.usefixtures("unlogged")
def test_a_loss_of_ones_own(graph):
    own = NodeClassifier(GCN(12, 8, 4, dropout=0.0), loss=partial(F.cross_entropy, reduction="none"))
    batch = make_batch(graph, list(range(30)))
    torch.testing.assert_close(own.training_step(batch), NodeClassifier(own.backbone).training_step(batch))


@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_no_loss_a_row_is_refused(graph, reduction):
    own = NodeClassifier(GCN(12, 8, 4), loss=torch.nn.CrossEntropyLoss(reduction=reduction))
    with pytest.raises(ValueError, match=said('(30,), () reduction="none"')):
        own.training_step(make_batch(graph, list(range(30))))


def test_a_compiled_network_takes_what_the_network_takes():
    class Compiled(torch.nn.Module):
        def __init__(self, network):
            super().__init__()
            self._orig_mod = network

        def forward(self, *arguments, **keywords):
            return self._orig_mod(*arguments, **keywords)

    plain, compiled = (NodeClassifier(network, num_classes=4) for network in (Own(), Compiled(Own())))
    assert compiled._accepted == plain._accepted


def test_hyperparameters_hold_plain_values_alone():
    model = NodeClassifier(GCN(12, 8, 4), lr=0.3)
    assert dict(model.hparams) == {
        "lr": 0.3, "weight_decay": 0.0, "multilabel": False, "num_classes": 4, "predict_logits": False,
    }  # fmt: skip


class Named(NodeClassifier):
    """A classifier of one's own with arguments of its own, of which a command line keeps those alone."""

    def __init__(self, hidden: int = 8):
        super().__init__(GCN(12, hidden, 4), lr=0.3, weight_decay=0.1, predict_logits=True)


def test_a_subclass_is_trained_from_the_command_line_of_lightning():
    from lightning.pytorch.cli import LightningCLI

    model = LightningCLI(Named, run=False, args=["--model.hidden=16"]).model
    assert dict(model.hparams)["hidden"] == 16
    optimizer = model.configure_optimizers()
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"], model.predict_logits) == (0.3, 0.1, True)


def test_refuses():
    with pytest.raises(ValueError, match=said("num_classes")):
        NodeClassifier(Own())
    with pytest.raises(ValueError, match=said("['ce'], 'mse'")):
        NodeClassifier(GCN(12, 8, 4), loss="mse")
