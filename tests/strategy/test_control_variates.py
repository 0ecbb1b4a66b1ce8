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
from tests.says import said

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


def noted(gradient, dtype=torch.float64, optimizer=None, **options):
    """Correct one gradient by 1; return it, and the steps and the sum that were noted."""
    model = Point().to(dtype)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    for name, value in (optimizer or {}).items():
        setattr(plain, name, value)
    controls = ControlVariates(model, plain, SimpleNamespace(**options))
    controls.load_state_dict({1: {"correction": {"w": torch.ones(1)}, "sums": {}, "steps": 0}})
    model.w.grad = None if gradient is None else torch.tensor([gradient], dtype=dtype)
    controls.correct(1)
    kept = controls.state_dict()[1]
    return model.w.grad if gradient is None else model.w.grad.item(), kept["steps"], kept["sums"].get("w")


def test_gradients_that_a_scaler_has_multiplied_are_noted_and_corrected_as_such():
    scaler = SimpleNamespace(get_scale=lambda: 8.0)
    assert noted(2.0) == (3.0, 1, 2.0)
    assert noted(2.0, scaler=scaler) == (3.0, 1, 2.0)  # unscaled before
    assert noted(16.0, scaler=scaler, optimizer={"_step_supports_amp_scaling": True}) == (24.0, 1, 2.0)


def test_steps_without_finite_gradients_are_not_counted():
    assert noted(float("inf")) == (float("inf"), 0, 0.0)
    assert noted(None) == (None, 0, None)  # a training step that returned no loss


def test_sums_in_bfloat16_go_on_growing():
    model = Point().to(torch.bfloat16)
    controls = ControlVariates(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAIN)
    for _ in range(1000):
        model.w.grad = torch.ones(1, dtype=torch.bfloat16)
        controls.correct(0)
    assert controls.state_dict()[0]["sums"]["w"].item() == 1000
    model.w.grad = torch.full((1,), 2.0, dtype=torch.bfloat16)
    controls.correct(1)
    controls.end_round([1.0, 3.0])
    assert [controls.state_dict()[part]["correction"]["w"].item() for part in (0, 1)] == [0.75, -0.25]


def test_a_parameter_that_some_batches_leave_out_is_corrected_in_all():
    """Half of part 0's steps have no gradient of the weight, which counts as zero."""
    model = nn.Linear(1, 1)
    controls = ControlVariates(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAIN)
    for _ in range(2):  # rounds
        for part, gradients in ((0, (4.0, None)), (1, (0.0, 0.0))):
            for gradient in gradients:
                model.weight.grad = None if gradient is None else torch.full((1, 1), gradient)
                model.bias.grad = torch.zeros(1)
                controls.correct(part)
                if controls.state_dict()[part]["correction"]:
                    assert model.weight.grad.item() == (gradient or 0.0) + (-1.0 if part == 0 else 1.0)
        controls.end_round([1.0, 1.0])


def test_parameters_that_are_thawed_join():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    controls = ControlVariates(model, optimizer, PLAIN)
    for thawed in (False, True):
        if thawed:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters()})
        for part in range(2):
            model.zero_grad()
            (model(torch.full((3, 2), part + 1.0)).sum() * (part + 1)).backward()
            controls.correct(part)
        controls.end_round([1.0, 1.0])
    state = controls.state_dict()
    assert set(state[0]["correction"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    controls.correct(0)
    model[0].requires_grad_(False)  # within a round
    controls.end_round([1.0, 1.0])
    assert set(controls.state_dict()[0]["correction"]) == {"1.weight", "1.bias"}
    again = ControlVariates(model[1], torch.optim.SGD(model[1].parameters(), lr=0.1), PLAIN)
    again.load_state_dict(state)  # of a module that has more
    assert again.state_dict()[0]["correction"] == {}


def test_one_part_is_the_whole_graph():
    model = nn.Linear(2, 2)
    controls = ControlVariates(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAIN)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        before = copy.deepcopy([value.grad for value in model.parameters()])
        controls.correct(0)
        assert all(torch.equal(value.grad, old) for value, old in zip(model.parameters(), before, strict=True))
        controls.end_round([1.0])
    controls.to_cpu()
    assert set(controls.state_dict()[0]["correction"]) == {"weight", "bias"}


def test_sparse_gradients_are_refused():
    model = nn.Embedding(4, 2, sparse=True)
    controls = ControlVariates(model, torch.optim.SGD(model.parameters(), lr=0.1), PLAIN)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(StrategyError, match=said("dense gradients sparse=True")):
        controls.correct(0)


def test_bad_arguments():
    with pytest.raises(ValueError, match=said("weights.control_variates true false 'yes'")):
        ModelAveraging(control_variates="yes")


def test_an_optimizer_that_compares_losses_is_refused():
    model = Point()
    with pytest.raises(StrategyError, match=said("losses LBFGS compares")):
        ControlVariates(model, torch.optim.LBFGS(model.parameters()), PLAIN)
