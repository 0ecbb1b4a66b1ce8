"""Swapping optimizer states between parts equals an optimizer for each part."""

import copy

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn

from lightning_gnnscale.strategy.weights.model_averaging import VisitGradients
from lightning_gnnscale.strategy.weights.part_optimizers import PartOptimizers

VISITS = [0, 1, 0, 2, 1, 1, 0]


def make(kind=torch.optim.Adam, with_schedulers=True):
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        milestones=[3],
    )
    configs = [LRSchedulerConfig(scheduler, frequency=2)] if with_schedulers else []
    return model, optimizer, configs


def train(model, optimizer, visit, step):
    torch.manual_seed(1000 * visit + step)
    loss = model(torch.randn(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_parts(swap, num_steps=3):
    """Three parts, each with a model of its own; `swap` gives each the optimizer to use."""
    weights, rates = {}, {}
    for visit, part in enumerate(VISITS):
        for step in range(num_steps):
            weights[part], rates[part] = swap(part, visit, step)
    return weights, rates


def with_an_optimizer_each():
    runs = {part: make() for part in VISITS}
    counts = dict.fromkeys(VISITS, 0)

    def swap(part, visit, step):
        model, optimizer, configs = runs[part]
        train(model, optimizer, visit, step)
        counts[part] += 1
        if counts[part] % 2 == 0:
            configs[0].scheduler.step()
        return model.weight.detach().clone(), optimizer.param_groups[0]["lr"]

    return train_parts(swap)


def with_one_optimizer(save_at=None):
    model, optimizer, configs = make()
    start = copy.deepcopy(model.state_dict())
    parts, own = PartOptimizers(optimizer, configs, Precision()), {}
    saved_from = {}

    def swap(part, visit, step):
        nonlocal model, optimizer, configs, parts
        if visit == save_at and step == 0:
            saved_from.update(parts.state_dict())
            model, optimizer, configs = make()
            parts = PartOptimizers(optimizer, configs, Precision())
            parts.load_state_dict(copy.deepcopy(saved_from))
        parts.install(part)
        model.load_state_dict(own.get(part, start))
        train(model, optimizer, visit, step)
        for config in parts.count_step():
            config.scheduler.step()
        own[part] = copy.deepcopy(model.state_dict())
        return own[part]["weight"].clone(), optimizer.param_groups[0]["lr"]

    return train_parts(swap)


def test_swapping_equals_an_optimizer_for_each_part():
    expected_weights, expected_rates = with_an_optimizer_each()
    for save_at in (None, 4):
        weights, rates = with_one_optimizer(save_at)
        assert rates == expected_rates and len(set(rates.values())) > 1
        assert all(torch.equal(weights[part], expected_weights[part]) for part in expected_weights)


def test_without_step_schedulers_the_learning_rate_is_shared():
    model, optimizer, _ = make(with_schedulers=False)
    parts = PartOptimizers(optimizer, [], Precision())
    parts.install(0)
    train(model, optimizer, 0, 0)
    optimizer.param_groups[0]["lr"] = 0.05  # what a scheduler of epochs does
    parts.install(1)
    assert optimizer.param_groups[0]["lr"] == 0.05 and len(optimizer.state) == 0
    parts.install(0)
    assert optimizer.state[model.weight]["step"] == 1


def test_forgetting_moments_keeps_learning_rates():
    model, optimizer, configs = make()
    parts = PartOptimizers(optimizer, configs, Precision())
    for part in (0, 1):
        parts.install(part)
        train(model, optimizer, 0, part)
        optimizer.param_groups[0]["lr"] = 0.5 + part
    parts.forget_moments()
    for part in (0, 1):
        parts.install(part)
        assert len(optimizer.state) == 0 and optimizer.param_groups[0]["lr"] == 0.5 + part


def test_each_part_has_its_gradient_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer, _ = make(torch.optim.SGD)
    parts = PartOptimizers(optimizer, [], MixedPrecision("16-mixed", "cpu", scaler))
    parts.install(0)
    scaler.scale(model(torch.ones(1, 3)).sum())
    scaler.update(2.0)
    parts.install(1)
    assert scaler.get_scale() == 8.0
    parts.install(0)
    assert scaler.get_scale() == 2.0
    assert parts.state_dict()[0]["scaler"]["scale"] == 2.0


def test_gradients_of_a_window_add_up_whatever_is_zeroed_between():
    model, optimizer, _ = make(torch.optim.SGD)
    inputs = torch.randn(3, 4, 3)
    gradients, taken = VisitGradients(optimizer), []

    def batch(i, zero):
        def closure():
            if zero:
                optimizer.zero_grad()
            model(inputs[i]).square().mean().backward()

        return closure

    for i, zero in enumerate((True, False, True)):
        gradients.accumulate(batch(i, zero))
    assert gradients.pending == 3
    gradients.step(lambda optimizer, closure: taken.append((closure(), model.weight.grad.clone())))
    assert gradients.pending == 0 and model.weight.grad is None and taken[0][0] is not None
    sum(model(inputs[i]).square().mean() for i in range(3)).backward()
    assert torch.allclose(taken[0][1], model.weight.grad, rtol=1e-6)
