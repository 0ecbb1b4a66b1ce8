"""The mathematics of averaging, in one process."""

import pytest
import torch
from torch import nn

from lightning_gnnscale.strategy import averaging


def test_a_weighted_average_by_hand():
    states = [
        (1.0, {"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(3), "on": torch.tensor([True, False])}),
        (3.0, {"w": torch.tensor([5.0, -2.0]), "steps": torch.tensor(2), "on": torch.tensor([False, False])}),
    ]
    like = {"w": torch.zeros(2), "steps": torch.tensor(0), "on": torch.tensor([False, False])}
    average, num_bytes = averaging.weighted_average(states, like)
    assert average["w"].tolist() == [4.0, -1.0] and average["w"].dtype == torch.float32
    assert average["steps"].item() == 3 and average["steps"].dtype == torch.int64
    assert average["on"].tolist() == [True, False]
    assert num_bytes == 0  # one process sends nothing


@pytest.mark.gpu
def test_values_on_other_devices_are_averaged():
    state = {"w": torch.ones(2, device="cuda"), "step": torch.tensor([4.0])}
    average, _ = averaging.weighted_average([(1.0, state)], state)
    averaging.load_state(state, average)
    assert state["w"].is_cuda and state["step"].tolist() == [4.0] and not state["step"].is_cuda


def test_weight_zero_is_not_read():
    like = {"w": torch.ones(2), "steps": torch.tensor(5)}
    broken = {"w": torch.full((2,), float("nan")), "steps": torch.tensor(9)}
    average, _ = averaging.weighted_average([(0.0, broken)], like)
    assert average["w"].tolist() == [1.0, 1.0] and average["steps"].item() == 5
    assert average["w"] is not like["w"]
    average, _ = averaging.weighted_average([(0.0, broken), (2.0, like)], like)
    assert average["w"].tolist() == [1.0, 1.0] and average["steps"].item() == 5
    assert averaging.weighted_average([], {})[0] == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_equal_states_average_to_themselves(dtype):
    torch.manual_seed(0)
    state = {"w": torch.randn(63, dtype=torch.float64).to(dtype), "scalar": torch.tensor(0.1).to(dtype)}
    average, _ = averaging.weighted_average([(weight, state) for weight in (3.0, 7.0, 11.0)], state)
    for name, tensor in state.items():
        # Sums of float64 are off by 1e-16, which rounding to the dtypes below hides.
        assert torch.allclose(average[name], tensor, rtol=0 if dtype != torch.float64 else 1e-15, atol=0)
        assert average[name].dtype == dtype and average[name].shape == tensor.shape


def test_the_sum_is_shared_out_without_loss():
    torch.manual_seed(1)
    states = [(float(3 + k), {"w": torch.randn(1000) * 10.0 ** (k - 3)}) for k in range(8)]
    like = {"w": torch.zeros(1000)}
    whole = averaging.weighted_sum(states, like)
    halves = averaging.weighted_sum(states[::2], like) + averaging.weighted_sum(states[1::2], like)
    assert whole[0] == halves[0] == sum(weight for weight, _ in states)
    assert torch.equal((whole[1:] / whole[0]).float(), (halves[1:] / halves[0]).float())


def test_module_state_lists_each_tensor_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("scratch", torch.zeros(1), persistent=False)
            self.register_buffer("absent", None)

    module = Tied()
    state = averaging.module_state(module)
    assert sorted(state) == [
        "first.weight", "norm.bias", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var",
        "norm.weight", "scratch",
    ]  # fmt: skip
    kept = averaging.copy_state(state)
    averaging.load_state(state, {name: torch.ones_like(tensor) for name, tensor in state.items()})
    assert module.second.weight.eq(1).all() and not kept["first.weight"].eq(1).all()
