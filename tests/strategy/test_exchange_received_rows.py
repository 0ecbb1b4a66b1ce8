"""Rows as they were last sent: what is held, how it moves on, and the same bits on both sides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.strategy.exchange.message import QuantisedRows, RawRows
from lightning_gnnscale.strategy.exchange.transport import ReceivedRows
from tests.tiers import all_pairs

LIKE = torch.zeros((), dtype=torch.float64)


def test_rows_are_held_as_they_came():
    held = ReceivedRows(4, 2, LIKE, extrapolate=False)
    assert held.at(3).tolist() == [[0.0, 0.0]] * 4
    some = torch.tensor([2, 0])
    held.store(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), 5, some)
    assert held.at(9).tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    assert held.at(9, some).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    held.store(torch.ones(4, 2, dtype=torch.float64), 6)
    assert held.at(6).tolist() == [[1.0, 1.0]] * 4


@given(
    epochs=st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True).map(sorted),
    ahead=st.integers(0, 9),
    start=st.integers(-50, 50),
    slope=st.integers(-50, 50),
)
def test_a_linear_sequence_is_predicted_exactly(epochs, ahead, start, slope):
    """Whole numbers: no rounding, so that the prediction is equal, not close."""

    def line(epoch):
        return torch.tensor([[float(start + slope * epoch), 7.0]], dtype=torch.float64)

    held = ReceivedRows(1, 2, LIKE, extrapolate=True)
    held.store(line(epochs[0]), epochs[0])
    assert torch.equal(held.at(epochs[0] + ahead), line(epochs[0]))  # one version has no slope
    for epoch in epochs[1:]:
        held.store(line(epoch), epoch)
        assert torch.equal(held.at(epoch), line(epoch))
    assert torch.equal(held.at(epochs[-1] + ahead), line(epochs[-1] + ahead))


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def test_rows_move_on_along_their_own_last_change():
    held = ReceivedRows(2, 1, LIKE, extrapolate=True)
    held.store(column(0, 10), 0)
    held.store(column(4), 2, torch.tensor([0]))  # 2 an epoch
    held.store(column(13), 3, torch.tensor([1]))  # 1 an epoch
    assert held.at(5).tolist() == [[10.0], [15.0]]
    assert held.at(5, torch.tensor([1])).tolist() == [[15.0]]
    held.store(column(5), 3, torch.tensor([0]))  # 1 in one epoch: from what was sent, not from what was predicted
    assert held.at(5).tolist() == [[7.0], [15.0]]


def test_rows_that_never_came_stay_zero():
    held = ReceivedRows(3, 2, LIKE, extrapolate=True)
    held.store(torch.ones(1, 2, dtype=torch.float64), 4, torch.tensor([1]))
    assert held.at(8).tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    held.store(torch.full((1, 2), 3.0, dtype=torch.float64), 4, torch.tensor([1]))  # the same epoch again
    assert held.at(8).tolist() == [[0.0, 0.0], [3.0, 3.0], [0.0, 0.0]]


@pytest.mark.parametrize("extrapolate", [False, True])
def test_bytes_are_those_of_the_tensors(extrapolate):
    held = ReceivedRows(5, 3, torch.zeros((), dtype=torch.float32), extrapolate)
    # 15 values of 4 bytes; with slopes twice that, and an int64 version a row
    assert held.nbytes == (2 * 60 + 40 if extrapolate else 60)
    assert ReceivedRows(0, 3, LIKE, extrapolate).nbytes == 0


CODECS = {
    "raw": RawRows(),
    **{f"{bits} bits": QuantisedRows(bits) for bits in (16, 8, 4, 2)},
    **{f"{bits} bits of change": QuantisedRows(bits, delta=True) for bits in (16, 4, 2)},
}


@all_pairs
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("extrapolate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sender_and_receiver_hold_the_same_bits(name, extrapolate, dtype):
    """Six epochs of changing rows; in each one some of them are sent."""
    torch.manual_seed(0)
    codec, num_rows, width = CODECS[name], 11, 5
    like = torch.zeros((), dtype=dtype)
    sent, got = ReceivedRows(num_rows, width, like, extrapolate), ReceivedRows(num_rows, width, like, extrapolate)
    rows = torch.randn(num_rows, width, dtype=dtype)
    for epoch, share in enumerate([1.0, 0.5, 0.0, 0.3, 1.0, 0.6]):
        rows = rows + 0.1 * torch.randn_like(rows)
        places = (torch.rand(num_rows) < share).nonzero().squeeze(1)
        base = sent.at(epoch, places).clone()
        codes = codec.encode(rows[places], 99 + epoch, 50 + places, held=base)
        assert codes.shape == (len(places), codec.row_bytes(width, dtype)) and codes.dtype == torch.uint8
        sent.store(base, epoch, places)
        before = got.at(epoch, places).clone()
        got.store(codec.decode(codes, width, dtype, held=before), epoch, places)
        for later in (epoch, epoch + 2):
            assert torch.equal(sent.at(later), got.at(later))
        if name == "raw":
            assert torch.equal(got.at(epoch, places), rows[places])


@pytest.mark.parametrize("delta", [False, True])
def test_differences_close_in_on_rows_that_rest(delta):
    """With error feedback what one message loses stands in the next one's difference."""
    torch.manual_seed(1)
    rows, codec = torch.randn(20, 16, dtype=torch.float64), QuantisedRows(4, delta)
    held, errors = torch.zeros_like(rows), []
    for key in range(12):
        codec.encode(rows, key, torch.arange(20), held=held)
        errors.append(float((rows - held).abs().max()))
    # 4 bits: an error is at most 1/7 of the largest difference, rounded up to bfloat16 (1 + 2**-7)
    if delta:
        assert errors[-1] <= errors[0] * ((1 + 2**-7) / 7) ** 11 * (1 + 1e-9) + 1e-15
    else:
        assert errors[-1] > 0.01
