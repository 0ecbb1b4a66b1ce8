"""Model averaging in real processes: the same weights from any number of them (Invariant 2), and what averages hold."""

import copy

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from partition_stand_ins import Classifier, PartsData, part_data, train
from processes import launch

from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.strategy import ModelAveraging

pytestmark = pytest.mark.sweep

SCENARIOS = {
    "interval 1": {},
    "interval 3": {"weights": {"every_n_epochs": 3}},
    "interval 2, three epochs": {"weights": {"every_n_epochs": 2}},
    "part-major, interval 3": {"weights": {"every_n_epochs": 3, "part_major": True}, "options": {"max_epochs": 1}},
    "reset": {"weights": {"optimizer_state": "reset"}},
    "accumulation": {"options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}},
    "step scheduler": {"model": {"scheduler": "step"}},
    "epoch scheduler, accumulation": {
        "model": {"scheduler": "epoch"},
        "options": {"accumulate_grad_batches": 2, "max_epochs": 4},
    },
    "a part without training nodes": {"data": {"sizes": (8, 0, 11, 3)}},
    "bf16": {"options": {"precision": "bf16-mixed"}},
    "gradient scaler": {"half": True, "options": {"accumulate_grad_batches": 2}},
    "shared": {"weights": {"optimizer_state": "shared"}},
    # Without BatchNorm, under which a bias has no gradient but rounding, which Adam makes steps of.
    "control variates": {
        "weights": {"control_variates": True},
        "options": {"max_epochs": 4},
        "model": {"batch_norm": False},
    },
    "control variates, interval 2, accumulation": {
        "weights": {"control_variates": True, "every_n_epochs": 2},
        "options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 5},
        "model": {"batch_norm": False},
    },
    "control variates, gradient scaler": {"half": True, "weights": {"control_variates": True}, "options": {}},
}


def run_scenario(folder, scenario):
    if scenario.get("half"):
        # A scale that overflows at first, so that every part skips steps until its own scale has come down.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        scenario = {**scenario, "options": {**scenario["options"], "plugins": [precision]}}
    return train(
        folder,
        ModelAveraging(**scenario.get("weights", {})),
        Classifier(**scenario.get("model", {})),
        PartsData(**scenario.get("data", {})),
        **scenario.get("options", {}),
    )


ON_FOUR = ("interval 1", "interval 3", "accumulation", "a part without training nodes", "shared", "control variates")


def run_scenarios(folder, names):
    return {name: run_scenario(folder, SCENARIOS[name]) for name in names}


@pytest.fixture(scope="module")
def by_world_size(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averaging")
    names = {1: tuple(SCENARIOS), 2: tuple(SCENARIOS), 4: ON_FOUR}
    return {n: launch(n, run_scenarios, folder / str(n), names[n]) for n in (1, 2, 4)}


def largest_difference(left, right):
    return max((left[name].double() - right[name].double()).abs().max().item() for name in left)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "shared"])
def test_any_number_of_processes_gives_the_same_weights(by_world_size, name):
    expected = by_world_size[1][0][name]
    for world_size in (2, 4) if name in ON_FOUR else (2,):
        for result in by_world_size[world_size]:
            assert largest_difference(result[name], expected) <= 1e-5


def test_scenarios_differ(by_world_size):
    results = by_world_size[1][0]
    start = Classifier().state_dict()
    assert largest_difference(results["interval 1"], start) > 1e-2
    for name in ("interval 3", "reset", "shared", "accumulation", "step scheduler", "bf16", "gradient scaler"):
        assert largest_difference(results[name], results["interval 1"]) > 1e-4, name
    assert largest_difference(results["control variates, gradient scaler"], results["gradient scaler"]) > 1e-4


def test_shared_optimizer_state_depends_on_the_processes(by_world_size):
    assert largest_difference(by_world_size[1][0]["shared"], by_world_size[4][0]["shared"]) > 1e-4
    # One part a rank: shared and per part are the same thing.
    assert largest_difference(by_world_size[4][0]["shared"], by_world_size[4][0]["interval 1"]) == 0.0


def test_part_major_equals_the_interval(by_world_size):
    for world_size in (1, 2):
        results = by_world_size[world_size][0]
        assert largest_difference(results["part-major, interval 3"], results["interval 3"]) == 0.0


def test_integer_buffers_take_the_maximum(by_world_size):
    # Part 2 has three batches an epoch, more than any other part, and each visit begins from the last average.
    assert by_world_size[2][0]["interval 1"]["net.1.num_batches_tracked"] == 9


def corrected(model, sums, correction):
    """Note a model's gradients, and add the part's correction to them."""
    sums.append([value.grad.clone() for value in model.parameters()])
    for value, change in zip(model.parameters(), correction or (), strict=bool(correction)):
        value.grad += change


def corrections(sizes, sums):
    """How far the mean gradient of each part lies from the mean over all parts."""
    means = [[torch.stack(steps).mean(0) for steps in zip(*part, strict=True)] for part in sums]
    whole = [sum(n * g for n, g in zip(sizes, of, strict=True)) / sum(sizes) for of in zip(*means, strict=True)]
    return [[mean - own for mean, own in zip(whole, part, strict=True)] for part in means]


def plain_averaging(sizes, num_epochs, interval=1, window=1, clip=None, control=False):
    """The method as the paper tells it, without Lightning: one model and one Adam a part, visited in turn."""
    average = Classifier(batch_norm=not control)
    models = [copy.deepcopy(average) for _ in sizes]
    changes, sums = [None] * len(sizes), [[] for _ in sizes]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for epoch in range(num_epochs):
        for part, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.train()
            batches = list(zip(*(tensor.split(4) for tensor in part_data(part, sizes[part])), strict=True))
            for i, (x, y) in enumerate(batches):
                torch.manual_seed(batch_key(0, epoch, part, i))
                (torch.nn.functional.cross_entropy(model.net(x), y) / window).backward()
                if (i + 1) % window == 0 or i + 1 == len(batches):
                    if control:
                        corrected(model, sums[part], changes[part])
                    if clip is not None:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()
        if (epoch + 1) % interval == 0 or epoch + 1 == num_epochs:
            average = {}
            for name, like in models[0].state_dict().items():
                values = torch.stack([model.state_dict()[name].double() for model in models])
                weights = torch.tensor(sizes, dtype=torch.float64).reshape(-1, *[1] * like.dim())
                mean = (weights * values).sum(0) / sum(sizes)
                average[name] = mean.to(like.dtype) if like.is_floating_point() else values.max(0)[0].to(like.dtype)
            if (epoch + 1) % interval == 0:
                if control:
                    changes, sums = corrections(sizes, sums), [[] for _ in sizes]
                for model in models:
                    model.load_state_dict(average)
    return average


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("interval 1", {}),
        ("interval 3", {"interval": 3}),
        ("interval 2, three epochs", {"interval": 2}),
        ("accumulation", {"window": 2, "clip": 0.1}),
        ("control variates", {"control": True, "num_epochs": 4}),
        (
            "control variates, interval 2, accumulation",
            {"control": True, "interval": 2, "window": 2, "clip": 0.1, "num_epochs": 5},
        ),
    ],
)
def test_equals_the_method_written_without_lightning(by_world_size, name, arguments):
    expected = plain_averaging((8, 6, 11, 3), **{"num_epochs": 3, **arguments})
    assert largest_difference(by_world_size[2][0][name], expected) <= 1e-6
