"""A small world with a placement: samplers that prefer its rows, and loaders that sample with them."""

import numpy as np
from oracles.parts import part_loader, small_world

import lightning_gnnscale as gs
from lightning_gnnscale.partition_store import WholeGraph

WORLD = small_world()
NUM_NODES = WORLD.csc.num_rows
RANDOM = np.random.default_rng(0)
ROWS = RANDOM.permutation(NUM_NODES)[:100]
WEIGHT = RANDOM.uniform(0.5, 2, WORLD.csc.num_edges).astype(np.float32)


def placement(rows=ROWS, num_nodes=NUM_NODES, fingerprint=""):
    return gs.Placement((np.asarray(rows),), ((0,),), num_nodes, None, {}, (), "test", fingerprint)


PLACED = placement()


def biased(fanouts=(4, 3), scale=4.0, direction="in", **changes):
    locality = gs.LocalityBias(PLACED, scale, neighbor_set_size=30, **changes)
    return gs.NeighborSampler(fanouts, direction=direction, locality=locality)


def batches(sampler, threads=0, edge_weight=None, graph="part", epoch=0, batch_size=32, **options):
    parts = list(range(WORLD.num_parts)) if graph == "part" else [0]
    whole = WholeGraph.of(WORLD.csc, 0)
    targets = {part: WORLD.targets(part) for part in parts}
    if graph != "part":
        targets = {0: np.concatenate([WORLD.targets(part) for part in range(WORLD.num_parts)])}
    edges = {} if edge_weight is None else {"edge_weight": edge_weight}
    loader = part_loader(
        parts, WORLD.load_part if graph == "part" else lambda part: whole, WORLD.features, targets, sampler,
        labels=WORLD.labels, masks=WORLD.masks, edges=edges, batch_size=batch_size, num_threads=threads,
        **options,
    )  # fmt: skip
    loader.set_epoch(epoch)
    return loader
