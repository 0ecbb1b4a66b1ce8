"""Control variates: parts that pull apart meet where the whole graph's loss is lowest."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.strategy import ModelAveraging
from lightning_gnnscale.strategy.averaging import copy_state, load_state, module_state, weighted_average
from lightning_gnnscale.strategy.weights.control_variates import ControlVariates

# Part k has the loss curve_k / 2 * (w - centre_k)^2 and weight n_k.
CURVES, CENTRES, WEIGHTS = (1.0, 8.0, 3.0), (-2.0, 1.0, 5.0), [3.0, 1.0, 2.0]
PLAIN = SimpleNamespace()


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def rounds(corrected, num_rounds=300, steps=20):
    """Average the models of the three parts after some steps of SGD each; return where they end."""
    model, start = Point(), torch.zeros(1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    controls = ControlVariates(model, optimizer, PLAIN)
    for _ in range(num_rounds):
        states = []
        for part in range(3):
            load_state(module_state(model), {"w": start})
            for _ in range(steps):
                model.w.grad = CURVES[part] * (model.w.detach() - CENTRES[part])
                if corrected:
                    controls.correct(part)
                optimizer.step()
            states.append((WEIGHTS[part], copy_state(module_state(model))))
        start = weighted_average(states, like=states[0][1])[0]["w"]
        if corrected:
            controls.end_round(WEIGHTS)
    return start.item()


def test_parts_meet_where_the_whole_loss_is_lowest():
    pulls = [n * curve for n, curve in zip(WEIGHTS, CURVES, strict=True)]
    best = sum(pull * centre for pull, centre in zip(pulls, CENTRES, strict=True)) / sum(pulls)
    assert rounds(corrected=True) == pytest.approx(best, abs=1e-9)
    assert abs(rounds(corrected=False) - best) > 0.1


def noted(gradient, **options):
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for name, value in options.pop("optimizer", {}).items():
        setattr(optimizer, name, value)
    controls = ControlVariates(model, optimizer, SimpleNamespace(**options))
    controls.load_state_dict({1: {"correction": {"w": torch.ones(1)}, "sums": {}, "steps": 0}})
    model.w.grad = torch.tensor([gradient], dtype=torch.float64)
    controls.correct(1)
    kept = controls.state_dict()[1]
    return model.w.grad.item(), kept["steps"], kept["sums"].get("w", torch.zeros(1)).item()


def test_a_step_that_a_scaler_will_refuse_is_not_counted():
    scaler = SimpleNamespace(get_scale=lambda: 8.0)
    assert noted(2.0) == (3.0, 1, 2.0)
    assert noted(2.0, scaler=scaler) == (3.0, 1, 2.0)  # unscaled before
    assert noted(16.0, scaler=scaler, optimizer={"_step_supports_amp_scaling": True}) == (24.0, 1, 2.0)
    assert noted(float("inf"), scaler=scaler) == (float("inf"), 0, 0.0)


def test_frozen_parameters_and_parts_without_a_correction_stay_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    controls = ControlVariates(model, torch.optim.SGD(model[1].parameters(), lr=0.1), PLAIN)
    model(torch.ones(3, 2)).sum().backward()
    before = [copy.deepcopy(value.grad) for value in model[1].parameters()]
    controls.correct(0)
    assert all(torch.equal(value.grad, old) for value, old in zip(model[1].parameters(), before, strict=True))
    controls.end_round([1.0, 1.0])
    state = controls.state_dict()
    assert set(state) == {0} and set(state[0]["correction"]) == {"1.weight", "1.bias"}
    assert all((value == 0).all() for value in state[0]["correction"].values())  # the only part is the whole graph
    controls.to_cpu()


def test_sparse_gradients_are_refused():
    model = nn.Embedding(4, 2, sparse=True)
    controls = ControlVariates(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAIN)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(StrategyError, match="needs dense gradients, weight has sparse ones: leave sparse=True out"):
        controls.correct(0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="weights.control_variates must be true or false, got 'yes'"):
        ModelAveraging(control_variates="yes")
