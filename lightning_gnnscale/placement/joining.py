"""What the processes of a placement tell each other before they share rows."""

import torch

from ..errors import PlacementError
from .placement import Placement


def gather_objects(own: object) -> list:
    """Return the objects of all ranks.

    Raises:
        PlacementError: there is no process group.
    """
    if not torch.distributed.is_initialized():
        raise PlacementError("FeatureBuffer.join needs torch.distributed, or exchange=: use in_one_process without it")
    objects = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(objects, own)
    return objects


def devices_here(placement: Placement, device: int, machines: list[tuple[int, str]]) -> list[int]:
    """Return the devices on this host, ascending; machines: (device, machine) of each process.

    Raises:
        PlacementError: the processes are not one a device, or a group spans hosts.
    """
    where = dict(machines)
    named = sorted(number for number, _ in machines)
    if named != list(range(placement.num_devices)):
        raise PlacementError(
            f"the placement has {placement.num_devices} devices, the processes are for {named}: place for as many "
            f"devices as there are processes"
        )
    for group in placement.groups:
        if len({where[number] for number in group}) > 1:
            raise PlacementError(f"the devices {group} of one group are on different hosts: give groups= by host")
    return [number for number in named if where[number] == where[device]]
