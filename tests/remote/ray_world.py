"""A small world, loaders over Ray's workers, and batches that can be compared."""

import os
import time
from dataclasses import fields
from functools import partial

import torch
from oracles.parts import SmallWorld, part_loader, small_world

import lightning_gnnscale as gs
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.loader import PartLoader, RankPlace
from lightning_gnnscale.remote import RayWorkers, cluster
from lightning_gnnscale.sampler import NeighborSampler

WORLD = small_world(num_parts=5)
NUM_NODES = 400  # of `write_store`


def make_loader(settings: RayWorkers | None = None, world: SmallWorld = WORLD, sampler=None, **options) -> PartLoader:
    """A loader over all parts; with settings over workers, without in this thread."""
    chosen = {"labels": world.labels, "masks": world.masks, "batch_size": 16, "seed": 1, "num_threads": 0}
    if settings is not None:
        chosen |= {"source": settings.connect(RankPlace()), "prefetch_batches": 4}
    chosen |= options
    parts, features = range(world.num_parts), chosen.pop("features", world.features)
    targets = {part: world.targets(part) for part in parts}
    return part_loader(parts, world.load_part, features, targets, sampler or NeighborSampler([4, 3]), **chosen)


def write_store(root, seed=0, **options) -> gs.PartitionStore:
    """Write a store of 4 random parts of a synthetic graph."""
    graph = SyntheticGraph(NUM_NODES, 3000, num_communities=4, homophily=0.9, seed=seed)
    stream = graph.stream(to_undirected=True)
    parts = gs.partition(stream, "random", num_parts=4, seed=1)
    arrays = {"features": graph.features(6, noise=1.0), "labels": graph.labels(), "masks": graph.masks()}
    return gs.write_partition_store(root, stream, parts, **(arrays | options))


def whole_loader(whole, targets, settings: RayWorkers | None = None) -> PartLoader:
    """A loader over batches that cross parts."""
    source = settings and settings.connect(RankPlace())
    return part_loader(
        [0], partial(_whole, whole), WORLD.features, {0: targets}, NeighborSampler([4, 3]), batch_size=16, seed=1,
        source=source, num_threads=0, prefetch_batches=4, is_whole=True,
    )  # fmt: skip


def _whole(whole, part: int):
    return whole


def contents(batch) -> dict:
    """Everything in a batch, comparable bit for bit."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    values["x_csr"] = values["x_csr"] and tuple(values["x_csr"])
    flat = lambda v: v.numpy().tobytes() if isinstance(v, torch.Tensor) else v  # noqa: E731
    return {k: tuple(map(flat, v)) if isinstance(v, tuple) else flat(v) for k, v in values.items()}


def all_contents(batches) -> list[dict]:
    return [contents(batch) for batch in batches]


def start_cluster():
    """Return a cluster of one node on this machine, to which more can be added, and the options of a node."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if cluster._has_token():  # who joins will ask for it, so must the cluster
        cluster.ask_for_token()
    options = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    return Cluster(initialize_head=True, head_node_args=options), options


def wait_until(holds, limit_s: float = 30.0) -> bool:
    """Whether something comes to hold within a limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
