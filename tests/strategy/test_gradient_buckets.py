"""Buckets that are sent while the backward goes on: when, in which order, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_gnnscale.errors import StrategyError
from lightning_gnnscale.strategy import GradientAveraging, averaging
from lightning_gnnscale.strategy.weights import gradient_buckets
from lightning_gnnscale.strategy.weights.gradient_buckets import Buckets, EarlyBuckets
from tests.says import said


@pytest.fixture
def sent(monkeypatch):
    """What was handed over: its size, and how many parameters had a gradient then."""
    found = []

    def all_reduce(message, async_op):
        found.append((len(message), sum(p.grad is not None for p in found.parameters)))
        return SimpleNamespace(wait=lambda: None)

    class Sent(list):
        parameters = ()

    found = Sent()
    monkeypatch.setattr(gradient_buckets.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(averaging, "world_size", lambda: 2)
    return found


def layers(sent):
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False))
    sent.parameters = list(model.parameters())
    return model, EarlyBuckets(sent.parameters, 4), Buckets(sent.parameters, 4)


def test_the_last_layers_gradients_leave_before_the_first_ones_are_there(sent):
    model, early, buckets = layers(sent)
    with early.sending(buckets, 2):
        model(torch.ones(1, 2)).sum().backward()
        assert sent == [(4, 1), (12, 2), (6, 3)]
    own = [p.grad.clone() for p in sent.parameters]
    assert early.join(2, mean=True) == 4 * (6 + 12 + 4 + 4)
    assert sent[3:] == [(4, 3)]  # the weight, and which have a gradient
    for p, gradient in zip(sent.parameters, own, strict=True):
        assert torch.equal(p.grad, gradient)


def test_buckets_leave_in_one_order_whatever_has_no_gradient(sent):
    """Of the last layer there is none: what follows waits for the end, as ranks must send alike."""
    model, early, buckets = layers(sent)
    with early.sending(buckets, 1):
        model[:2](torch.ones(1, 2)).sum().backward()
    assert sent == []
    early.join(1, mean=False)
    assert [size for size, _ in sent] == [4, 12, 6, 4] and model[2].weight.grad is None


def test_between_steps_and_after_the_end_nothing_is_sent(sent):
    model, early, buckets = layers(sent)
    model(torch.ones(1, 2)).sum().backward()  # of a window's first batches
    early.close()
    with early.sending(buckets, 1):
        model(torch.ones(1, 2)).sum().backward()
    assert sent == []


def test_a_second_backward_in_a_step_is_refused(sent):
    model, early, buckets = layers(sent)
    with pytest.raises(StrategyError, match=said("one backward overlap=False")), early.sending(buckets, 1):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("wrong", [{"overlap": 1}, {"overlap": True, "local_clip": 1.0}])
def test_settings_that_do_not_go_together_are_refused(wrong):
    with pytest.raises(ValueError, match=said("weights.overlap")):
        GradientAveraging(**wrong)
