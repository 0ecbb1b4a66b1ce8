"""Synchronous SGD in real processes equals one process with all targets in one batch."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from partition_stand_ins import Batch, Classifier, Loader, part_data, train
from processes import launch

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.strategy import GradientAveraging
from lightning_gnnscale.strategy.weights.gradient_buckets import Buckets, reduce_gradients

NUM_TARGETS, BATCH_SIZE = 40, 8


class SplitTargets(L.LightningDataModule):
    """Batches of eight targets, of which each rank gets its share; no parts at all.

    Args:
        shares: targets of a batch for each rank; all of them on one process.
        missing: batches that the last rank lacks.
    """

    def __init__(self, shares, missing=0, pad=False):
        super().__init__()
        self.shares, self.missing, self.pad = shares, missing, pad

    def train_dataloader(self):
        x, y = part_data(0, NUM_TARGETS)
        batches = list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))
        length = len(batches)
        if self.trainer.world_size > 1:
            rank = self.trainer.global_rank
            batches = [(x.split(self.shares)[rank], y.split(self.shares)[rank]) for x, y in batches]
            if rank == self.trainer.world_size - 1:
                batches = batches[: len(batches) - self.missing]
        loader = Loader([(0, batches)], lambda: self.trainer.current_epoch)
        if self.pad:
            loader.length = length
        return loader


class Frozen(Classifier):
    """One parameter is never used, one only by rank 0's share: neither may keep ranks apart."""

    def __init__(self):
        super().__init__(dropout=0.0, batch_norm=False)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.of_rank_0 = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.of_rank_0 if self.trainer.global_rank == 0 else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


CASES = {
    "equal shares": {"shares": [4, 4]},
    "unequal shares": {"shares": [3, 5]},
    "clipped": {"shares": [3, 5], "options": {"gradient_clip_val": 0.05}},
    "accumulated": {"shares": [4, 4], "options": {"accumulate_grad_batches": 2}},
    "small buckets": {"shares": [3, 5], "bucket_bytes": 64},
}


def run_cases(folder):
    results = {}
    for name, case in CASES.items():
        weights = GradientAveraging(**{k: v for k, v in case.items() if k == "bucket_bytes"})
        model = Classifier(dropout=0.0, batch_norm=False)
        results[name] = train(folder, weights, model, SplitTargets(case["shares"]), **case.get("options", {}))
        early = GradientAveraging(**{k: v for k, v in case.items() if k == "bucket_bytes"}, overlap=True)
        model = Classifier(dropout=0.0, batch_norm=False)
        results[f"{name}, early"] = train(folder, early, model, SplitTargets(case["shares"]), **case.get("options", {}))
    early = GradientAveraging(overlap=True, bucket_bytes=16)
    results["unused parameters, early"] = train(folder, early, Frozen(), SplitTargets([4, 4]))
    results["batch norm"] = train(folder, GradientAveraging(), Classifier(), SplitTargets([4, 4]))
    results["unused parameters"] = train(folder, GradientAveraging(), Frozen(), SplitTargets([4, 4]))
    return results


@pytest.fixture(scope="module")
def by_world_size(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    return {n: launch(n, run_cases, folder / str(n)) for n in (1, 2)}


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_equal_one(by_world_size, name):
    expected = by_world_size[1][0][name]
    for result in by_world_size[2]:
        assert max((result[name][key] - expected[key]).abs().max() for key in expected) <= 1e-6


@pytest.mark.parametrize("name", [*CASES, "unused parameters"])
def test_sent_within_the_backward_they_are_the_same_bit_for_bit(by_world_size, name):
    for result in by_world_size[2]:
        plain, early = result[name], result[f"{name}, early"]
        assert all(torch.equal(early[key], plain[key]) for key in plain)


def test_clipping_and_accumulation_matter(by_world_size):
    results = by_world_size[1][0]
    for name in ("clipped", "accumulated"):
        assert (results[name]["net.0.weight"] - results["equal shares"]["net.0.weight"]).abs().max() > 1e-4


def test_replicas_stay_equal(by_world_size):
    first, second = by_world_size[2]
    for name in first:
        assert all(torch.equal(first[name][key], second[name][key]) for key in first[name]), name


def test_a_parameter_without_gradient_anywhere_is_left_alone(by_world_size):
    result = by_world_size[2][0]["unused parameters"]
    assert torch.equal(result["unused"], torch.ones(3))
    assert result["of_rank_0"] != 1.0


def run_refused(folder, pad):
    with pytest.raises(StrategyError) as caught:
        train(folder, GradientAveraging(), data=SplitTargets([4, 4], missing=1, pad=pad))
    return str(caught.value)


def test_different_numbers_of_batches_are_refused_on_every_rank(tmp_path):
    for message in launch(2, run_refused, tmp_path, False):
        assert "same number of train batches" in message and "got 4 to 5" in message


def reduce_shares(folder):
    rank, results = torch.distributed.get_rank(), {}
    for name, weights in {"one has none": (4, 0), "nobody has any": (0, 0)}.items():
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.full((2,), 0.0 if weights[rank] == 0 else 3.0)
        reduce_gradients(Buckets([parameter], 1 << 20), weights[rank])
        results[name] = parameter.grad
    return results


def test_a_batch_without_targets_weighs_nothing(tmp_path):
    for results in launch(2, reduce_shares, tmp_path):
        assert results["one has none"].tolist() == [3.0, 3.0]
        assert results["nobody has any"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("batch", "weight"),
    [
        (SimpleNamespace(batch_size=8), 8),
        (SimpleNamespace(batch_size=0), 0),
        (SimpleNamespace(), 1),
        # losses that the sampler has weighed are estimates of one mean
        (SimpleNamespace(batch_size=8, loss_weight=torch.ones(8)), 1),
    ],
)
def test_what_a_batch_weighs(batch, weight):
    policy = GradientAveraging()
    strategy = SimpleNamespace(root_device=torch.device("cpu"), logical_ranks=None)
    policy.setup(SimpleNamespace(strategy=strategy, lightning_module=torch.nn.Linear(1, 1)))
    policy.begin_batch(batch)
    assert policy._weight(0) == weight
