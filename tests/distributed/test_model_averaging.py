"""Model averaging in real processes: the same weights from any number of them (Invariant 2), and what averages hold."""

import pytest
from partition_stand_ins import Classifier, PartsData, train
from processes import launch

from lightning_gnnscale.strategy import ModelAveraging

SCENARIOS = {
    "interval 1": {},
    "interval 3": {"weights": {"every_n_epochs": 3}},
    "interval 2, three epochs": {"weights": {"every_n_epochs": 2}},
    "reset": {"weights": {"optimizer_state": "reset"}},
    "accumulation": {"options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}},
    "step scheduler": {"model": {"scheduler": "step"}},
    "epoch scheduler, accumulation": {
        "model": {"scheduler": "epoch"},
        "options": {"accumulate_grad_batches": 2, "max_epochs": 4},
    },
    "a part without training nodes": {"data": {"sizes": (8, 0, 11, 3)}},
    "bf16": {"options": {"precision": "bf16-mixed"}},
    "shared": {"weights": {"optimizer_state": "shared"}},
}


def run_scenario(folder, scenario):
    return train(
        folder,
        ModelAveraging(**scenario.get("weights", {})),
        Classifier(**scenario.get("model", {})),
        PartsData(**scenario.get("data", {})),
        **scenario.get("options", {}),
    )


def run_scenarios(folder):
    return {name: run_scenario(folder, scenario) for name, scenario in SCENARIOS.items()}


@pytest.fixture(scope="module")
def by_world_size(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averaging")
    return {world_size: launch(world_size, run_scenarios, folder / str(world_size)) for world_size in (1, 2, 4)}


def largest_difference(left, right):
    return max((left[name].double() - right[name].double()).abs().max().item() for name in left)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "shared"])
def test_any_number_of_processes_gives_the_same_weights(by_world_size, name):
    expected = by_world_size[1][0][name]
    for world_size in (2, 4):
        for result in by_world_size[world_size]:
            assert largest_difference(result[name], expected) <= 1e-5


def test_scenarios_differ(by_world_size):
    results = by_world_size[1][0]
    start = Classifier().state_dict()
    assert largest_difference(results["interval 1"], start) > 1e-2
    for name in ("interval 3", "reset", "shared", "accumulation", "step scheduler", "bf16"):
        assert largest_difference(results[name], results["interval 1"]) > 1e-4, name


def test_shared_optimizer_state_depends_on_the_processes(by_world_size):
    assert largest_difference(by_world_size[1][0]["shared"], by_world_size[4][0]["shared"]) > 1e-4
    # One part a rank: shared and per part are the same thing.
    assert largest_difference(by_world_size[4][0]["shared"], by_world_size[4][0]["interval 1"]) == 0.0


def test_integer_buffers_take_the_maximum(by_world_size):
    # Part 2 has three batches an epoch, more than any other part, and each visit begins from the last average.
    assert by_world_size[2][0]["interval 1"]["net.1.num_batches_tracked"] == 9
