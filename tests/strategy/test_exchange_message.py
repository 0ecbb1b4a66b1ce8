"""Messages: what is packed comes out again, at the places it belongs to, in the bytes that are counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.strategy.exchange.message import (
    bitmap_bytes,
    pack_all,
    pack_bits,
    pack_chosen,
    pack_nothing,
    unpack_all,
    unpack_bits,
    unpack_chosen,
)


@st.composite
def boundaries(draw):
    """Rows of bytes, which of them each process is sent, and which are chosen."""
    num_rows, row_bytes = draw(st.integers(0, 21)), draw(st.integers(1, 9))
    codes = torch.randint(256, (num_rows, row_bytes), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    rows = list(range(num_rows))
    leaving = [
        torch.tensor(sorted(draw(st.sets(st.sampled_from(rows)))) if rows else [], dtype=torch.int64)
        for _ in range(draw(st.integers(1, 4)))
    ]
    chosen = torch.tensor(draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)), dtype=torch.bool)
    return codes.to(torch.uint8), leaving, chosen


def received(packed, codes, leaving, unpack):
    """Read what one receiver gets that is sent all the chunks: place -> row; None: all in order."""
    return unpack(packed.payload, packed.sizes, [len(positions) for positions in leaving], codes.shape[1])


def slots(leaving):
    """The position that each place of the receiver stands for."""
    return torch.cat(leaving).tolist()


@given(boundaries())
def test_all_rows_arrive_in_order(boundary):
    codes, leaving, _ = boundary
    packed = pack_all(codes, leaving)
    assert packed.sizes == [len(positions) * codes.shape[1] for positions in leaving]
    assert len(packed.payload) == sum(packed.sizes)
    rows, places = received(packed, codes, leaving, unpack_all)
    assert places is None
    assert rows.tolist() == [codes[position].tolist() for position in slots(leaving)]


@given(boundaries())
def test_chosen_rows_arrive_at_their_places(boundary):
    codes, leaving, chosen = boundary
    packed = pack_chosen(codes[chosen], chosen, leaving)
    expected = [(place, position) for place, position in enumerate(slots(leaving)) if chosen[position]]
    rows, places = received(packed, codes, leaving, unpack_chosen)
    assert places.tolist() == [place for place, _ in expected]
    assert rows.tolist() == [codes[position].tolist() for _, position in expected]
    # bytes by hand: the rows, and a bit for each row that could have come, where any did
    for positions, size in zip(leaving, packed.sizes, strict=True):
        there = int(chosen[positions].sum())
        assert size == (there * codes.shape[1] + (len(positions) + 7) // 8 if there else 0)
    assert len(packed.payload) == sum(packed.sizes)


@given(boundaries(), st.data())
def test_whole_blocks_may_be_missing(boundary, data):
    """Some senders pack everything, others nothing: rows of the others take their places."""
    codes, leaving, _ = boundary
    sent = [(positions, data.draw(st.booleans())) for positions in leaving]
    chunks = [pack_all(codes, [positions]) if sends else pack_nothing(codes, 1) for positions, sends in sent]
    payload, sizes = torch.cat([chunk.payload for chunk in chunks]), [chunk.sizes[0] for chunk in chunks]
    counts = [len(positions) for positions in leaving]
    rows, places = unpack_all(payload, sizes, counts, codes.shape[1])
    places = list(range(sum(counts))) if places is None else places.tolist()
    by_place = [(position, sends) for positions, sends in sent for position in positions.tolist()]
    assert places == [place for place, (_, sends) in enumerate(by_place) if sends]
    assert rows.tolist() == [codes[position].tolist() for position, sends in by_place if sends]


@given(st.lists(st.booleans(), max_size=40))
def test_bits_go_there_and_back(bits):
    packed = pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.dtype == torch.uint8 and len(packed) == bitmap_bytes(len(bits)) == -(-len(bits) // 8)
    assert unpack_bits(packed, len(bits)).tolist() == bits


def test_the_first_bit_is_the_lowest():
    bits = torch.tensor([True, False, False, True, False, False, False, False, False, True])
    assert pack_bits(bits).tolist() == [0b1001, 0b10]


def test_nothing_for_anybody():
    packed = pack_nothing(torch.zeros(3, 2), 3)
    assert packed.sizes == [0, 0, 0] and packed.payload.shape == (0,) and packed.payload.dtype == torch.uint8
    rows, places = unpack_all(packed.payload, packed.sizes, [2, 0, 1], 4)
    assert rows.shape == (0, 4) and places.tolist() == []
    rows, places = unpack_chosen(packed.payload, packed.sizes, [2, 0, 1], 4)
    assert rows.shape == (0, 4) and places.tolist() == []


@pytest.mark.parametrize("unpack", [unpack_all, unpack_chosen])
def test_a_message_from_nobody(unpack):
    rows, places = unpack(torch.empty(0, dtype=torch.uint8), [0, 0], [0, 0], 8)
    assert rows.shape == (0, 8) and (places is None or places.tolist() == [])
