"""What the processes of a placement tell each other before they share rows."""

import hashlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from ..errors import PlacementError, clear_error
from .placement import Placement

Made = TypeVar("Made")


def gather_objects(own: object) -> list:
    """Return the objects of all ranks.

    Raises:
        PlacementError: there is no process group.
    """
    if not torch.distributed.is_initialized():
        raise PlacementError("FeatureBuffer.join needs torch.distributed, or exchange=: use in_one_process without it")
    objects = [None] * torch.distributed.get_world_size()
    with clear_error("agreeing with the other processes"):
        torch.distributed.all_gather_object(objects, own)
    return objects


def digest_of(placement: Placement) -> str:
    """Return what tells placements of other rows apart."""
    digest = hashlib.sha256(repr((placement.num_nodes, placement.groups)).encode())
    for rows in placement.rows:
        digest.update(len(rows).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(rows, np.int64))
    if placement.on_disk is not None:
        digest.update(np.packbits(placement.on_disk))
    return digest.hexdigest()[:16]


def devices_here(placement: Placement, device: int, processes: list[tuple[int, str, str]]) -> list[int]:
    """Return the devices on this host, ascending; processes: (device, machine, digest of the placement) of each.

    Raises:
        PlacementError: the processes are not one a device, a group spans hosts, or those of a host placed other rows.
    """
    where = {number: machine for number, machine, _ in processes}
    named = sorted(number for number, _, _ in processes)
    if named != list(range(placement.num_devices)):
        raise PlacementError(
            f"the placement has {placement.num_devices} devices, the processes are for {named}: place for as many "
            f"devices as there are processes"
        )
    for group in placement.groups:
        if len({where[number] for number in group}) > 1:
            raise PlacementError(f"the devices {group} of one group are on different hosts: give groups= by host")
    for host in set(where.values()):
        if len({digest for _, machine, digest in processes if machine == host}) > 1:
            raise PlacementError(
                "the processes of a host have placements that differ: place with the same arguments on each, a number "
                "for alpha= among them, or make the placement on one and send it to the others"
            )
    return [number for number in named if where[number] == where[device]]


def make_on_all(
    exchange: Callable[[object], list], device: int, make: Callable[[], tuple[Made, object]]
) -> tuple[Made, dict[int, object]]:
    """Make something, and exchange the tickets for it. If one process cannot make its own, all raise.

    A process that raised before it exchanged would leave the others waiting.

    Args:
        exchange: See `FeatureBuffer.join`.
        device: Device of this process.
        make: Returns what it made, and a ticket for it.

    Returns:
        What this process made, and the tickets of all devices.

    Raises:
        PlacementError: another process failed. What `make` raises here is raised as it is.
    """
    made = ticket = failure = None
    try:
        made, ticket = make()
    except Exception as error:
        failure = error
    answers = exchange((device, ticket, failure and (str(failure) or type(failure).__name__)))
    if failure is not None:
        raise failure
    for other, _, reason in answers:
        if reason is not None:
            raise PlacementError(f"device {other} could not share its rows: {reason}")
    return made, {other: ticket for other, ticket, _ in answers}
