"""What a GPU can copy at all, and how near to it rows are gathered, by their width and their tier."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lightning_gnnscale.triton_kernels.gather_rows import RowTables, gather_tiers, pack_places

LEAST_S, MOST_RUNS = 0.3, 50


def median_s(work: Callable[[], object], device: torch.device, least_s: float = LEAST_S) -> float:
    """Return the median seconds of a call, after one that does not count; on a GPU by events of its stream.

    Args:
        work: The call.
        device: Device that it keeps busy.
        least_s: Seconds of calls that are enough.
    """
    work()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < least_s and len(seconds) < MOST_RUNS):
        seconds.append(_once_s(work, device))
    return statistics.median(seconds)


def _once_s(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copy_speed(way: str, num_bytes: int, device: torch.device) -> dict:
    """Return the GB a second of a copy in order.

    Args:
        way: "device" within its memory; "to device" from pinned memory, "from device" into it.
        num_bytes: Bytes copied.
        device: The device.
    """
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if way == "device":
        here = torch.zeros_like(there)
    else:
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    source, target = (there, here) if way == "from device" else (here, there)
    return _speed(median_s(lambda: target.copy_(source, non_blocking=True), device), num_bytes)


def gather_speed(tier: str, row_bytes: int, num_bytes: int, table_bytes: int, device: torch.device) -> dict:
    """Return the GB a second at which the kernel of all tiers gathers rows in random order.

    Args:
        tier: "device" or "pinned", where the table is; "index_select": the device's, gathered by torch.
        row_bytes: Bytes of a row, a multiple of 8.
        num_bytes: Bytes gathered in a call.
        table_bytes: Bytes of the table.
        device: Device that gathers.
    """
    num, rows = max(1, num_bytes // row_bytes), max(1, table_bytes // row_bytes)
    wide = row_bytes // 4
    pinned = tier == "pinned" and device.type == "cuda"
    table = torch.empty((rows, wide), dtype=torch.float32, device="cpu" if pinned else device, pin_memory=pinned)
    table.zero_()
    out = torch.empty((num, wide), dtype=torch.float32, device=device)
    chosen = torch.randint(rows, (num,), generator=torch.Generator(device).manual_seed(0), device=device)
    if tier == "index_select":
        return _speed(median_s(lambda: torch.index_select(table, 0, chosen, out=out), device), num * row_bytes)
    gather = gathering(table, chosen, out)
    return _speed(median_s(gather, device), num * row_bytes)


def gathering(table: Tensor, chosen: Tensor, out: Tensor) -> Callable[[], object]:
    """Return what gathers rows of a table that `out`'s device can read; their places are found already."""
    if out.is_cuda:
        tables = RowTables([table])
        return lambda: gather_tiers(chosen, None, tables, out)
    tables, places = RowTables([table.numpy()]), pack_places(np.zeros(len(chosen), np.int64), chosen.numpy())
    return lambda: gather_tiers(places, None, tables, out.numpy())


def _speed(seconds: float, num_bytes: int) -> dict:
    return {"ms": 1e3 * seconds, "gb_per_s": num_bytes / seconds / 1e9, "bytes": num_bytes}
