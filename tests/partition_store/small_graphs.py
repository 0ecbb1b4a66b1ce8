"""Small graphs and partitions for the store's tests."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partition_store import WriteBudget
from lightning_gnnscale.partition_store.array_file import checksum
from lightning_gnnscale.partition_store.manifest import write_manifest

TINY = WriteBudget(spill_edges=3, sort_edges=4, block_bytes=16, checkpoint_bytes=1)


@dataclass
class Given:
    """A partitioning, as the writer needs it."""

    part_id: np.ndarray
    num_parts: int
    seed: int = 0
    method: str = "given"
    options: dict = field(default_factory=dict)


@dataclass
class SmallGraph:
    num_nodes: int
    edges: list[tuple[int, int]]
    part_id: list[int]
    num_parts: int
    to_undirected: bool = False
    remove_self_loops: bool = False
    seed: int = 0

    def stream(self, chunk_edges: int = 1 << 10, **options):
        pairs = np.array(self.edges, np.int64).reshape(-1, 2).T
        return open_edge_stream(
            pairs,
            num_nodes=self.num_nodes,
            chunk_edges=chunk_edges,
            to_undirected=self.to_undirected,
            remove_self_loops=self.remove_self_loops,
            **options,
        )

    @property
    def given(self) -> Given:
        return Given(np.array(self.part_id, np.int32), self.num_parts, self.seed)

    @property
    def edge_ids(self) -> np.ndarray:
        """Edge weights that tell edges apart."""
        return np.arange(len(self.edges), dtype=np.float32)


@st.composite
def small_graphs(draw, min_nodes=0):
    num_nodes = draw(st.integers(min_nodes, 10))
    num_parts = draw(st.integers(1, 4))
    node = st.integers(0, max(num_nodes - 1, 0))
    edges = draw(st.lists(st.tuples(node, node), max_size=30 if num_nodes else 0))
    part_id = draw(st.lists(st.integers(0, num_parts - 1), min_size=num_nodes, max_size=num_nodes))
    return SmallGraph(
        num_nodes, edges, part_id, num_parts, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 5))
    )


def random_graph(num_nodes: int, num_edges: int, num_parts: int, seed: int = 0, **options) -> SmallGraph:
    rng = np.random.default_rng(seed)
    edges = [tuple(pair) for pair in rng.integers(0, num_nodes, (num_edges, 2)).tolist()]
    return SmallGraph(num_nodes, edges, rng.integers(0, num_parts, num_nodes).tolist(), num_parts, **options)


def all_bytes(root: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {path.name: path.read_bytes() for path in sorted(Path(root).iterdir())}


def reseal(root: Path, change: Callable[[dict], None]) -> None:
    """Change the manifest of a store, and seal it again: only the checks of its fields can give it away."""
    manifest, source = (json.loads((root / f"{name}.json").read_text()) for name in ("manifest", "source"))
    for content in (manifest, source):
        content.pop("seal")
    source.pop("manifest")
    change(manifest)
    write_manifest(root, manifest, source)


def rewrite(store, name, change):
    """Change an array so that its checksum fits again: only the structure can give it away."""
    array = np.load(store.root / f"{name}.npy")
    change(array)
    with open(store.root / f"{name}.npy", "r+b") as file:
        file.seek(128)
        file.write(array.tobytes())
    crc = checksum(store.root / f"{name}.npy")
    reseal(store.root, lambda manifest: manifest["files"][name].update(crc32=crc))
