"""NodeRegressor: losses and metrics over known targets, in batches and exactly; what it refuses."""

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model.graphs import make_graph
from model.test_node_classifier import Batches, Pass, make_batch, trainer

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.model import GraphSAGE, NodeRegressor
from lightning_gnnscale.model.checkpoint_file import MODEL_KEY
from tests.says import said

QUIET = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*num_workers.*")


@pytest.fixture
def graph():
    """Targets are features, 0 and 1 of them; some are unknown."""
    torch.manual_seed(0)
    graph = make_graph(num_nodes=300, num_edges=600)
    graph.x = torch.randn(graph.num_nodes, 12)
    split = torch.arange(graph.num_nodes) % 3
    graph.masks = {name: split == number for number, name in enumerate(("train", "val", "test"))}
    graph.y = graph.x[:, :2].clone()
    graph.y[::7, 0] = torch.nan
    graph.y[::14] = torch.nan
    return graph


def build(targets=2, **options):
    torch.manual_seed(1)
    return NodeRegressor(GraphSAGE(12, 16, targets, dropout=0.0), **options)


def batches_of(graph):
    seeds = graph.masks["train"].nonzero().flatten().tolist()
    return Batches([make_batch(graph, seeds[start : start + 25]) for start in range(0, len(seeds), 25)])


@QUIET
@pytest.mark.parametrize("loss", ["mse", "l1"])
def test_it_learns_and_logs_both_errors(graph, loss):
    module, run = build(loss=loss, lr=0.02), trainer(max_epochs=40)
    before = trainer().validate(module, Batches([Pass(graph, "val")]), verbose=False)[0]
    run.fit(module, batches_of(graph), Batches([Pass(graph, "val", chunk=40)]))
    assert {"train_loss", "val_loss", "val_mae", "val_rmse"} <= set(run.callback_metrics)
    found = run.test(module, Batches([Pass(graph, "test")]), verbose=False)[0]
    predicted = run.predict(module, Batches([Pass(graph, None)]))[0]
    outputs = torch.empty(300, 2)
    outputs[predicted["nodes"]] = predicted["prediction"]
    known = graph.masks["test"].unsqueeze(1) & ~graph.y.isnan()
    errors = (outputs - graph.y)[known]
    assert found["test_mae"] == pytest.approx(float(errors.abs().mean()), rel=1e-5)
    assert found["test_rmse"] == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-5)
    mean = errors.square().mean() if loss == "mse" else errors.abs().mean()
    assert found["test_loss"] == pytest.approx(float(mean), rel=1e-5)
    assert found["test_rmse"] < 0.7 * before["val_rmse"]


def test_the_loss_is_the_mean_over_known_targets_of_training_seeds(graph):
    module, batch = build(), make_batch(graph, list(range(20)))
    known = graph.masks["train"][:20].unsqueeze(1) & ~graph.y[:20].isnan()
    outputs = module(batch)
    expected = F.mse_loss(outputs[known], graph.y[:20][known])
    loss = module.training_step(batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(value.grad.isfinite().all() for value in module.parameters())  # NaN times 0 would show
    own = build(loss=lambda outputs, targets: F.mse_loss(outputs, targets, reduction="none"))
    torch.testing.assert_close(own.training_step(batch), expected)
    graph.y[:] = torch.nan
    nothing = module.training_step(make_batch(graph, list(range(20))))
    nothing.backward()
    assert float(nothing.detach()) == 0


def test_one_target_a_node(graph):
    module = build(1)
    graph.y = graph.y[:, 0]
    flat = module.training_step(make_batch(graph, [0, 3, 6, 9]))
    graph.y = graph.y.unsqueeze(1)
    torch.testing.assert_close(flat, module.training_step(make_batch(graph, [0, 3, 6, 9])))
    assert module.predict_step(make_batch(graph, [5, 6]))["prediction"].shape == (2, 1)


def test_a_rank_without_rows_or_known_targets_adds_nothing(graph, monkeypatch):
    monkeypatch.setattr(NodeRegressor, "log", lambda *args, **options: None)
    module = build()
    module.validation_step(Pass(graph, "val"))
    before = [float(metric.compute()) for metric in (*module.scores["val"].values(), module.losses["val"])]
    graph.masks["val"][:] = False
    module.validation_step(Pass(graph, "val"))
    after = [float(metric.compute()) for metric in (*module.scores["val"].values(), module.losses["val"])]
    assert before == after and all(np.isfinite(before))


def test_what_it_does_not_take_is_refused(graph):
    with pytest.raises(ValueError, match=said("loss 'mse' 'l1' 'ce'")):
        build(loss="ce")
    batch = make_batch(graph, [0, 1])
    with pytest.raises(StrategyError, match=said("3 2 out_channels=2")):
        build(3).training_step(batch)
    batch.y = torch.zeros(len(batch.n_id), dtype=torch.int64)
    with pytest.raises(StrategyError, match=said("NaN = torch.int64")):
        build(1).training_step(batch)
    with pytest.raises(ValueError, match=said("return loss target")):
        build(loss=F.mse_loss).training_step(make_batch(graph, [0, 1]))


def test_a_checkpoint_says_how_to_make_it(tmp_path):
    module = build(loss="l1")
    run = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=0, barebones=True)
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert MODEL_KEY in torch.load(tmp_path / "x.ckpt", weights_only=False)
    assert NodeRegressor.load_from_checkpoint(tmp_path / "x.ckpt").loss == "l1"
