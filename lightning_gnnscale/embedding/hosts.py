"""The ranks of a run by the host they run on, and the group in which they send rows to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ..placement.joining import gather_objects
from ..placement.shared_rows import machine_id


@dataclass(frozen=True)
class Hosts:
    """The ranks of a run, grouped by host.

    Attributes:
        host_of_rank: (world_size,) host of each rank; hosts are numbered from 0 in the order of their first ranks.
        rank: Rank of this process.
        group: Process group of the ranks on the CPU; None if there is one host, so that nothing is sent.
        world: The default process group when the hosts were found.
    """

    host_of_rank: tuple[int, ...]
    rank: int
    group: object | None = None
    world: object | None = None

    @classmethod
    def alone(cls) -> "Hosts":
        """One process."""
        return cls((0,), 0)

    @classmethod
    def join(cls, hosts: Sequence[int] | None, before: "Hosts | None" = None) -> "Hosts":
        """Find out where the ranks run; every rank must call it.

        Args:
            hosts: host of each rank, any integers; None: by the machines that the ranks run on.
            before: what an earlier call returned, whose group is used again while it stands.

        Raises:
            ValueError: as many hosts as ranks must be given.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.alone()
        names = gather_objects(machine_id()) if hosts is None else list(hosts)
        if len(names) != dist.get_world_size():
            raise ValueError(f"hosts must name the host of each of {dist.get_world_size()} ranks, got {names}")
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        host_of_rank, world = tuple(numbers[name] for name in names), dist.group.WORLD
        if before is not None and before.host_of_rank == host_of_rank and before.world is world:
            return before
        group = dist.new_group(backend="gloo", timeout=_timeout_of(world)) if len(numbers) > 1 else None
        return cls(host_of_rank, dist.get_rank(), group, world)

    @property
    def host(self) -> int:
        return self.host_of_rank[self.rank]

    @property
    def num_hosts(self) -> int:
        return max(self.host_of_rank) + 1

    def ranks(self, host: int) -> list[int]:
        """Return the ranks on a host, ascending."""
        return [rank for rank, its_host in enumerate(self.host_of_rank) if its_host == host]

    @property
    def place(self) -> tuple[int, int]:
        """Return the position of this rank among those of its host, and how many they are."""
        here = self.ranks(self.host)
        return here.index(self.rank), len(here)


def _timeout_of(world: dist.ProcessGroup) -> timedelta | None:
    """Return how long a process of the run may be silent; a new group would have torch's own limit."""
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)
