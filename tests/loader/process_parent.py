"""A process that reads from worker processes until it is killed."""

from functools import partial

from oracles.parts import part_loader, small_world

from lightning_gnnscale.loader import ProcessSource
from lightning_gnnscale.sampler import NeighborSampler


def train_until_killed(connection) -> None:
    """Read batches for ever; sends the ids of both workers once they run."""
    world = small_world(num_parts=2)
    loader = part_loader(
        [0, 1], world.load_part, world.features, {part: world.targets(part) for part in (0, 1)},
        NeighborSampler([4, 3]), batch_size=16, source=partial(ProcessSource, num_workers=2), prefetch_batches=4,
    )  # fmt: skip
    told = False
    while True:
        for _ in loader:
            pids = loader._source.worker_pids
            if len(pids) == 2 and not told:
                connection.send(pids)
                told = True
