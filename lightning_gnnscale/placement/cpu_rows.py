"""The rows of simulated devices and of the host, made in one process or by the processes of a host together."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from .joining import make_on_all
from .row_layout import LaidRows, RowLayout, group_of
from .shared_rows import SharedRows, own_rows


def lay_here(layout: RowLayout, devices: list[int]) -> LaidRows:
    """Make the rows that some devices read, in memory of this process."""
    placement, features = layout.placement, layout.features
    rows = [None] * placement.num_devices
    for peer in {peer for device in devices for peer in group_of(placement, device)}:
        rows[peer] = private_copy(layout, layout.device_rows(peer))
    host_ids = layout.host_ids(devices)
    host = features.array if host_ids is None else private_copy(layout, host_ids)
    return LaidRows([features.array, host, *rows], host_ids)


def lay_jointly(
    layout: RowLayout, device: int, here: list[int], exchange: Callable[[object], list], folder: str | Path | None
) -> LaidRows:
    """Make the rows of one device, and those of the host if it is the first device here; map the rows of the others.

    Args:
        layout: Layout of the rows.
        device: Device of this process.
        here: The devices on this host.
        exchange: See `FeatureBuffer.join`.
        folder: Folder that the rows are kept in; None: memory.
    """
    placement, host_ids = layout.placement, layout.host_ids(here)

    def make():
        own = shared_copy(layout, layout.device_rows(device), folder)
        host = shared_copy(layout, host_ids, folder) if layout.copies_host and device == here[0] else None
        return (own, host), (own.ticket, host and host.ticket)

    (own, own_host), tickets = make_on_all(exchange, device, make)

    def map_others():
        rows = [None] * placement.num_devices
        for peer in group_of(placement, device):
            rows[peer] = own.array if peer == device else SharedRows.attach(tickets[peer][0]).array
        host = layout.features.array
        if layout.copies_host:
            host = (own_host or SharedRows.attach(tickets[here[0]][1])).array
        return LaidRows([layout.features.array, host, *rows], host_ids), None

    laid, _ = make_on_all(exchange, device, map_others)
    own.release()
    if own_host is not None:
        own_host.release()
    return laid


def private_copy(layout: RowLayout, ids: np.ndarray) -> np.ndarray:
    """Return a copy of rows in memory of this process."""
    features = layout.features
    return features.gather(ids, out=own_rows(len(ids), features.dim, features.dtype))


def shared_copy(layout: RowLayout, ids: np.ndarray, folder: str | Path | None = None) -> SharedRows:
    """Return a copy of rows that the processes of this host can map."""
    features = layout.features
    rows = SharedRows.create(len(ids), features.dim, features.dtype, folder)
    features.gather(ids, out=rows.array)
    return rows
