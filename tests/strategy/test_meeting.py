"""Processes that torchrun starts again meet in a part of its store that those before them have not written to."""

import threading

import pytest
import torch.distributed as dist

from lightning_gnnscale.strategy.launcher import unused_part
from tests.says import said


def meet(store, world_size):
    """Let so many processes meet, the first one last or not; return what each reads of what all wrote."""
    parts, threads = {}, []
    for rank in reversed(range(world_size)):
        join = threading.Thread(target=lambda rank=rank: parts.update({rank: unused_part(store, rank, world_size, 20)}))
        threads.append(join)
        join.start()
    for join in threads:
        join.join()
    for rank, part in parts.items():
        assert not part.check([f"address {rank}"]), "an earlier process has written it"
        part.set(f"address {rank}", f"{rank} of {world_size}")
    return [[parts[rank].get(f"address {other}").decode() for other in range(world_size)] for rank in range(world_size)]


def test_each_start_has_a_part_of_the_store_of_its_own():
    store = dist.HashStore()
    for world_size in (3, 3, 2, 1, 3):
        everyone = [f"{rank} of {world_size}" for rank in range(world_size)]
        assert meet(store, world_size) == [everyone] * world_size


def test_who_does_not_come_is_told():
    with pytest.raises(RuntimeError, match=said("ranks [1, 2] 0.1 s")):
        unused_part(dist.HashStore(), 0, 3, 0.1)
