"""Build one store from a generated graph, in a process of its own that a test may kill; compare stores."""

import hashlib
import os
import signal
from pathlib import Path

import numpy as np

from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.partition_store import WriteBudget, write_partition_store
from lightning_gnnscale.rng import combine_array


class HashParts:
    """Nodes to parts by a hash of their id."""

    num_parts, seed, method, options = 7, 0, "hash", {}

    def __init__(self, num_nodes: int):
        self.part_id = (combine_array(0, np.arange(num_nodes)) % np.uint64(self.num_parts)).astype(np.int32)


def build(root: str, num_nodes: int, num_edges: int, calls, die_at_call: int = -1) -> None:
    """Write the store; count the calls of progress in `calls`, and die of SIGKILL at one of them."""

    def count_call(what: str, done: int, total: int | None) -> None:
        calls.value += 1
        if calls.value == die_at_call:
            os.kill(os.getpid(), signal.SIGKILL)

    graph = SyntheticGraph(num_nodes, num_edges)
    write_partition_store(
        root,
        graph.stream(chunk_edges=1 << 17, to_undirected=True),
        HashParts(num_nodes),
        features=np.random.default_rng(0).random((num_nodes, 8), dtype=np.float32),
        labels=np.arange(num_nodes) % 5,
        masks={"train": np.arange(num_nodes) % 2 == 0},
        pack_halo=True,
        progress=count_call,
        budget=WriteBudget(spill_edges=1 << 17, sort_edges=1 << 19, block_bytes=1 << 18, checkpoint_bytes=1 << 20),
    )


def digests(root: Path) -> dict[str, str]:
    """Return a hash of each of a store's files."""
    return {path.name: hashlib.blake2b(path.read_bytes()).hexdigest() for path in sorted(root.iterdir())}
