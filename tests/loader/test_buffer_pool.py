"""The pool gives a buffer out again exactly when nothing views it any more."""

import gc
import threading

import numpy as np
import pytest
import torch

from lightning_gnnscale.loader import BufferPool
from tests.says import said

SHAPE = (500, 16)


def take(pool) -> np.ndarray:
    return pool.take(SHAPE, np.float32)


def test_arrays_are_aligned_and_of_the_asked_shape():
    pool = BufferPool()
    for shape, dtype in (((3, 5), np.int64), ((0,), np.float16), (7, np.bool_), ((2, 0), np.uint8)):
        array = pool.take(shape, dtype)
        assert array.shape == ((shape,) if isinstance(shape, int) else shape)
        assert array.dtype == dtype and array.flags.c_contiguous and array.flags.writeable
        assert array.ctypes.data % 64 == 0


def test_a_buffer_comes_back_when_its_array_dies():
    pool = BufferPool()
    array = take(pool)
    address = array.ctypes.data
    assert take(pool).ctypes.data != address
    del array
    assert take(pool).ctypes.data == address


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a[3:7],
        lambda a: a.T,
        lambda a: a.reshape(-1).view(np.uint8)[5:],
        torch.from_numpy,
        lambda a: torch.from_numpy(a)[2:, 1],
        lambda a: torch.from_numpy(a).numpy()[4:],
        lambda a: torch.from_numpy(a).view(torch.int32).t(),
    ],
)
def test_any_view_keeps_the_buffer(derive):
    pool = BufferPool()
    array = take(pool)
    address = array.ctypes.data
    view = derive(array)
    del array
    gc.collect()
    others = [take(pool) for _ in range(3)]
    assert address not in {other.ctypes.data for other in others}
    del view
    assert take(pool).ctypes.data == address


def test_autograd_keeps_the_buffer():
    pool = BufferPool()
    x = torch.from_numpy(take(pool).copy() * 0 + 1)
    x = torch.from_numpy(take(pool)).fill_(2)
    address = x.data_ptr()
    weight = torch.ones(16, 1, requires_grad=True)
    loss = (x @ weight).sum()
    del x
    assert take(pool).ctypes.data != address
    loss.backward()
    assert weight.grad.unique().tolist() == [1000.0]


def test_beyond_the_cap_memory_is_fresh_and_never_counted():
    pool = BufferPool(max_bytes=100_000)
    kept = [take(pool) for _ in range(10)]  # 32,000 bytes each
    assert pool.held_bytes <= 100_000
    for i, array in enumerate(kept):
        array.fill(i)
    assert [int(array[0, 0]) for array in kept] == list(range(10))
    kept.clear()
    assert take(pool).shape == SHAPE
    assert pool.held_bytes <= 100_000


def test_waiting_buffers_of_other_sizes_make_room():
    pool = BufferPool(max_bytes=100_000)
    address = {pool.take(30_000, np.uint8).ctypes.data for _ in range(1)}
    assert len(address) == 1
    array = pool.take(90_000, np.uint8)
    assert pool.held_bytes <= 100_000
    first = array.ctypes.data
    del array
    assert pool.take(90_000, np.uint8).ctypes.data == first


def test_sizes_that_are_close_share_a_buffer():
    pool = BufferPool()
    address = pool.take(1_000_000, np.uint8).ctypes.data
    assert pool.take(1_010_000, np.uint8).ctypes.data == address


@pytest.mark.parametrize(("num_bytes", "is_same"), [(1 << 20, True), (1 << 19, True), ((1 << 19) - (1 << 16), False)])
def test_a_buffer_serves_arrays_of_half_its_size_and_more(num_bytes, is_same):
    pool = BufferPool()
    address = pool.take(1 << 20, np.uint8).ctypes.data
    assert (pool.take(num_bytes, np.uint8).ctypes.data == address) == is_same


def test_of_buffers_that_serve_the_smallest_is_taken():
    pool = BufferPool()
    large, small = pool.take(1 << 20, np.uint8), pool.take(3 << 18, np.uint8)
    addresses = large.ctypes.data, small.ctypes.data
    del large, small
    found = [pool.take(5 << 17, np.uint8) for _ in range(3)]
    assert [array.ctypes.data for array in found[:2]] == [*reversed(addresses)]
    assert found[2].ctypes.data not in addresses


def test_what_has_waited_longest_makes_room():
    pool = BufferPool(max_bytes=1 << 20)
    first, last = pool.take(100_000, np.uint8), pool.take(800_000, np.uint8)
    address = last.ctypes.data
    del first, last  # in this order
    pool.take(200_000, np.uint8)
    assert pool.take(800_000, np.uint8).ctypes.data == address
    assert pool.held_bytes <= 1 << 20


def test_an_array_for_which_there_is_no_room_frees_nothing():
    pool = BufferPool(max_bytes=1 << 20)
    kept, waiting = pool.take(600_000, np.uint8), pool.take(100_000, np.uint8)
    address, held = waiting.ctypes.data, pool.held_bytes
    del waiting
    pool.take(900_000, np.uint8)
    assert pool.held_bytes == held
    assert pool.take(100_000, np.uint8).ctypes.data == address
    assert len(kept) == 600_000


def test_a_negative_cap_is_refused():
    with pytest.raises(ValueError, match=said("max_bytes >= 0 -1")):
        BufferPool(-1)


def test_threads_never_share_a_buffer():
    pool, clashes = BufferPool(), []

    def work(mark):
        for _ in range(300):
            array = take(pool)
            array.fill(mark)
            held = torch.from_numpy(array)
            del array
            if not (held == mark).all():
                clashes.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
