"""How many logical ranks a run has, and what is refused; what each of a process's logical ranks keeps for itself."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lightning_gnnscale as gs
from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.strategy import averaging
from lightning_gnnscale.strategy.logical_ranks import LogicalRanks
from lightning_gnnscale.strategy.weights.logical_ranks import RankStates, loss_of
from tests.says import said

CPU = torch.device("cpu")


class ByRank:
    """A DataModule whose batches any process can compute."""

    shares_by_process = None


def trainer(datamodule=None, inputs=None, within=False):
    progress = SimpleNamespace(current=SimpleNamespace(ready=3 * within), is_last_batch=False)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    return SimpleNamespace(
        datamodule=ByRank() if datamodule is None else datamodule,
        lightning_module=SimpleNamespace(inputs=inputs),
        fit_loop=loop,
    )


def settled(given, processes, kept=None, **options):
    ranks = LogicalRanks(given, gs.GradientAveraging())
    ranks.kept = kept or {}
    ranks.settle(trainer(**options), processes, CPU)
    return ranks


@pytest.fixture(autouse=True)
def threads_kept():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "processes", "began", "count"),
    [(None, 2, None, 2), (8, 2, None, 8), (None, 2, 4, 4), (None, 3, 2, 3), (8, 2, 4, 8), (None, 1, 1, 1)],
)
def test_how_many_there_are(given, processes, began, count):
    ranks = settled(given, processes, {"ranks": began, "threads": 1} if began else None)
    assert ranks.count == count and ranks.state_dict()["ranks"] == count
    ranks.settle(trainer(), processes, CPU)
    assert ranks.count == (given or processes), "the next run begins from no checkpoint"


def test_threads_are_those_that_the_run_began_with(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 24)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    assert settled(None, 2).state_dict()["threads"] == 2
    assert settled(8, 2).state_dict()["threads"] == torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert settled(8, 2).state_dict()["threads"] == 2
    assert settled(None, 1, {"ranks": 8, "threads": 3}).state_dict()["threads"] == torch.get_num_threads() == 3


def test_parts_go_on_with_the_threads_that_they_began_with(monkeypatch):
    """A product of matrices rounds by them: 6 processes, 1 with more threads, and 6 again ended with other weights."""
    monkeypatch.setattr("os.cpu_count", lambda: 24)
    ranks = LogicalRanks(None, gs.ModelAveraging())
    ranks.kept = {"threads": 3}
    ranks.settle(SimpleNamespace(num_devices=8), 8, CPU)
    assert ranks.state_dict() == {"threads": 3} and torch.get_num_threads() == 3
    ranks.kept = {"threads": 4}
    with pytest.warns(UserWarning, match="began with 4 threads of torch a process.*8 processes: 3 are used"):
        ranks.settle(SimpleNamespace(num_devices=8), 8, CPU)
    assert torch.get_num_threads() == 3


class Rows:
    """Learned rows, which can be saved."""

    def save(self):
        raise AssertionError("nobody saves")


REFUSED = {
    "more processes": ({"given": 2, "processes": 3}, "strategy.logical_ranks=2 1 of 3 trainer.devices 2"),
    "other data": ({"given": 4, "processes": 2, "datamodule": object()}, "strategy.logical_ranks=4 2 PartitionDataM"),
    "learned rows": ({"given": 4, "processes": 2, "inputs": Rows()}, "strategy.logical_ranks=4 2 Rows as many"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused(name):
    given, words = REFUSED[name]
    with pytest.raises(StrategyError, match=said(words.replace("PartitionDataM", "PartitionDataModule"))):
        settled(**given)
    if name != "more processes":
        assert settled(**given | {"given": 2}).count == 2
        assert settled(**given | {"given": None}, kept={"ranks": 4}).count == 2


def test_model_averaging_has_none():
    with pytest.raises(StrategyError, match=said("strategy.logical_ranks=4 ModelAveraging GradientAveraging")):
        gs.GNNScaleStrategy(weights="model_averaging", logical_ranks=4)
    assert gs.GNNScaleStrategy(weights="model_averaging").logical_ranks is None
    with pytest.raises(ValueError, match=said("strategy.logical_ranks 0")):
        gs.GNNScaleStrategy(logical_ranks=0)


def test_another_number_is_refused_within_an_epoch_and_told_at_its_end():
    ranks = settled(4, 2)
    ranks.check_kept(trainer(within=True), {"ranks": 4}, None)
    ranks.check_kept(trainer(within=True), {}, None)  # of a policy that keeps nothing, from before there were any
    for kept, policy in (({"ranks": 8}, None), ({}, {"ranks": [{}] * 8})):
        with pytest.raises(StrategyError, match=said("8 logical ranks 4 strategy.logical_ranks=8 end of an epoch")):
            ranks.check_kept(trainer(within=True), kept, policy)
    with pytest.warns(UserWarning, match=said("8 logical ranks 4")):
        ranks.check_kept(trainer(), {"ranks": 8}, None)


def test_a_step_without_a_loss_is_refused():
    assert loss_of({"loss": torch.ones(())}) == loss_of(torch.ones(())) == 1
    for output in (None, {"other": 1}):
        with pytest.raises(StrategyError, match=said("training_step loss strategy.logical_ranks=null")):
            loss_of(output)


def test_each_logical_rank_has_its_own_statistics_and_all_begin_alike(monkeypatch):
    monkeypatch.setattr(averaging, "rank", lambda: 1)
    monkeypatch.setattr(averaging, "world_size", lambda: 2)
    module = nn.BatchNorm1d(1, momentum=1.0)
    states = RankStates(module, 5)
    assert states.own == range(2, 5)
    for rank in (2, 3, 4, 2):
        states.enter(rank)
        assert module.num_batches_tracked == int(states.own[0] == rank and module.running_mean.item() == 2.0)
        module(torch.tensor([[float(rank)], [float(rank)]]))
    assert [state["running_mean"].item() for state in states.buffers()] == [2.0, 3.0, 4.0]
    assert [int(state["num_batches_tracked"]) for state in states.buffers()] == [2, 1, 1]
    states.leave(states.live_buffers)
    module.running_mean.fill_(3.0)  # what is evaluated
    kept = states.state_dict(0, None)
    assert {rank: one["buffers"]["running_mean"].item() for rank, one in kept.items()} == {2: 2.0, 3: 3.0, 4: 4.0}
    again = RankStates(nn.BatchNorm1d(1), 5)
    assert again.load_state_dict(kept) == 0
    for one in (states, again):
        one.enter(4)
        assert one.live_buffers["running_mean"].item() == 4.0
