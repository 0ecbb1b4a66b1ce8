"""How many bytes each tier takes: by what is free, and by which rows are read at all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.planner.tier_sizes import PLACE_BYTES_A_NODE, FreeMemory, size_tiers

GIB = 1 << 30


def free(device: float, host: float = 0, **more) -> FreeMemory:
    return FreeMemory.of_host(int(device), int(host), **more)


def test_all_rows_are_on_a_gpu_that_has_space():
    sizes = size_tiers(free(80 * GIB, 100 * GIB), 10 * GIB, 1_000_000)
    assert sizes.by_tier() == {"device": 10 * GIB, "peer": 0, "pinned": 0, "host": 0, "disk": 0}
    assert sizes.buffer_rows == 1_000_000 and sizes.host_rows == 0


def test_what_does_not_fit_goes_from_tier_to_tier():
    sizes = size_tiers(free(10 * GIB, 20 * GIB), 40 * GIB, 1000)
    own = int(0.9 * 10 * GIB) - PLACE_BYTES_A_NODE * 1000
    assert sizes.device == pytest.approx(own, abs=2) and sizes.pinned == 10 * GIB
    assert sizes.host == pytest.approx(10 * GIB - PLACE_BYTES_A_NODE * 1000) and sizes.disk > 10 * GIB
    assert sizes.buffer_rows == sizes.device * 1000 // (40 * GIB)
    assert "of 40.0 GiB" in str(sizes) and "pinned" in str(sizes)


def test_peers_hold_what_one_device_lacks():
    alone, pair = (size_tiers(free(10 * GIB, 99 * GIB), 40 * GIB, 1000, group_size=size) for size in (1, 2))
    assert pair.device == pair.peer == alone.device and pair.pinned == alone.pinned - pair.peer
    assert pair.host_rows == alone.host_rows, "devices that keep copies of a row need more of the host"


def test_later_batches_and_evaluation_have_their_space():
    plain = size_tiers(free(10 * GIB), 40 * GIB, 1).device
    assert size_tiers(free(10 * GIB, step=4 * GIB), 40 * GIB, 1).device == plain - GIB
    assert size_tiers(free(10 * GIB, step=GIB, evaluation=3 * GIB), 40 * GIB, 1).device == plain - GIB
    assert size_tiers(free(10 * GIB, step=3 * GIB, evaluation=3 * GIB), 40 * GIB, 1).device < plain


def test_rows_that_nothing_reads_take_no_memory_of_a_device():
    prob = np.zeros((2, 1000), np.float32)
    prob[0, :100], prob[1, 50:150] = 0.5, 0.1
    sizes = size_tiers(free(GIB, GIB), 1000 * 64, 1000, prob)
    assert sizes.device == 150 * 64 and sizes.pinned == 0 and sizes.host == 850 * 64
    widths = np.where(np.arange(1000) < 120, 10, 64)
    assert size_tiers(free(GIB, GIB), int(widths.sum()), 1000, prob, widths).device == 120 * 10 + 30 * 64


@given(
    device=st.integers(0, 1 << 20), host=st.integers(0, 1 << 20), step=st.integers(0, 1 << 18),
    table=st.integers(0, 1 << 20), nodes=st.integers(1, 5000), group=st.integers(1, 8), read=st.floats(0, 1),
)  # fmt: skip
def test_every_row_has_a_tier_and_no_tier_more_than_is_free(device, host, step, table, nodes, group, read):
    prob = np.random.default_rng(0).random(nodes) < read
    sizes = size_tiers(free(device, host, step=step), table, nodes, prob, group_size=group)
    assert min(sizes) >= 0 and sum(sizes.by_tier().values()) == table
    assert (
        sizes.device <= device and sizes.pinned + sizes.host <= host and sizes.pinned <= sizes.most_pinned <= host // 2
    )
    assert 1 <= sizes.buffer_rows <= nodes and sizes.buffer_rows * table // nodes <= max(sizes.device, table // nodes)
    assert sizes.host_rows * table <= sizes.most_pinned * nodes


def test_the_poorest_process_decides():
    least = FreeMemory(5, 9, 4, 1, 2).least([FreeMemory(7, 8, 6, 3, 0)])
    assert least == FreeMemory(5, 8, 4, 3, 2)
