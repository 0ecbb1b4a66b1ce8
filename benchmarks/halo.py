"""What the batches of a part read from the disk: halo rows at their owners, or packed with the part."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from lightning_gnnscale.datamodule import PartitionDataModule
from lightning_gnnscale.datamodule.train_loader import part_targets
from lightning_gnnscale.dataset import generate
from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader
from lightning_gnnscale.loader.staged_part import node_values
from lightning_gnnscale.partition_store import PartitionStore
from lightning_gnnscale.report.terminal import ProgressBars
from lightning_gnnscale.sampler import NeighborSampler

from .page_cache import cached_bytes, evict
from .present import LEFT, show
from .runner import Case, Runner, benchmark, digest, in_fresh_process, machine_line

LAYOUTS = {False: "at their owners", True: "packed beside the part"}
_FILES = ("features.npy", "halo_features.npy")


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


COLUMNS = {
    "halo_rows": ("halo rows", LEFT),
    "part": ("part", ">"),
    "num_batches": ("batches", ">"),
    "needed_bytes": ("core + halo", _mb),
    "read_bytes": ("read", _mb),
    "share": ("of the table", ".0%"),
    "seconds": ("s", ".2f"),
    "stored_bytes": ("stored", _mb),
}


@dataclass(frozen=True)
class HaloBench:
    """Sample all batches of a part once, with no features in memory at the start, from both kinds of store.

    Writes `halo.csv`, the graph and the stores; the run folder must be on a disk. A graph and stores that are there are
    reused.

    Attributes:
        num_nodes, num_edges, feature_dim: Number of nodes and edges in the generated graph, and of float32 features per
            node.
        partitioner, num_parts: Partitioner and number of parts of the stores.
        visits: Parts to visit, each in a process of its own.
        fanouts, batch_size: Fan-outs and size of the batches.
    """

    num_nodes: int = 1_000_000
    num_edges: int = 8_000_000
    feature_dim: int = 64
    partitioner: str = "streaming_multilevel"
    num_parts: int = 32
    visits: Sequence[int] = (0, 11, 22)
    fanouts: Sequence[int] = (25, 10)
    batch_size: int = 512
    seed: int = 0

    def __post_init__(self):
        wrong = [part for part in self.visits if not 0 <= part < self.num_parts]
        if wrong:
            raise ValueError(f"bench.visits must be parts in [0, {self.num_parts}), got {wrong[0]}")

    def measure(self, runner: Runner) -> list[dict]:
        """Return one row per layout and part, see `visit`."""
        stores = cache(lambda: self._stores(runner.folder))
        facts = (self.num_nodes, self.num_edges, self.feature_dim, self.partitioner, self.num_parts, self.seed)
        settings = digest(*facts, *self.fanouts, self.batch_size)

        def visited(packs: bool, part: int) -> dict:
            batches = (list(self.fanouts), self.batch_size, self.seed)
            return in_fresh_process(visit, str(stores()[packs]), part, *batches)

        cases = [
            Case({"halo_rows": layout, "part": part, "settings": settings}, partial(visited, packs, part))
            for packs, layout in LAYOUTS.items()
            for part in self.visits
        ]
        rows = runner.rows(cases, "halo.csv")
        shown = [row | {"share": row["read_bytes"] / row["table_bytes"]} for row in rows]
        show(shown, COLUMNS, "Feature bytes that one visit of a part reads from the disk, in MB", machine_line())
        return rows

    def _stores(self, folder: Path) -> dict[bool, Path]:
        roots = {packs: folder / "stores" / ("packed" if packs else "plain") for packs in LAYOUTS}
        with ProgressBars() as progress:
            common = {"seed": self.seed, "progress": progress}
            size = (self.num_nodes, self.num_edges, str(folder / "graph"))
            dataset = generate(*size, feature_dim=self.feature_dim, **common)
            for packs, root in roots.items():
                options = {"partitioner": self.partitioner, "num_parts": self.num_parts, "pack_halo": packs, **common}
                PartitionDataModule(root=root, dataset=dataset, **options).prepare_data()
        return roots


run = benchmark(HaloBench)


def visit(root: str, part: int, fanouts: list[int], batch_size: int, seed: int) -> dict:
    """Drop a store's features from memory, sample every batch of a part, and count what was read.

    Returns:
        num_batches; needed_bytes: size of the feature rows of core and halo; read_bytes: bytes of feature files that
        are now in memory, in whole pages; table_bytes: size of all rows once; stored_bytes: size of all feature files;
        seconds.

    Raises:
        GNNScaleError: the features cannot be dropped from memory.
    """
    files = [path for name in _FILES if (path := Path(root) / name).exists()]
    for file in files:
        evict(file)
    store = PartitionStore.open(root)
    graph = store.load_part(part)
    data = PartData(store.load_part, store.part_features, node_values(store.labels, store.masks))
    options = LoaderOptions(batch_size, seed)
    loader = PartLoader([part], data, part_targets(store), NeighborSampler(fanouts), options)
    start = time.perf_counter()
    num_batches = sum(1 for _ in loader)
    seconds = time.perf_counter() - start
    return {
        "num_batches": num_batches,
        "needed_bytes": graph.num_local * store.features.array[:1].nbytes,
        "read_bytes": sum(map(cached_bytes, files)),
        "table_bytes": store.features.array.nbytes,
        "stored_bytes": sum(file.stat().st_size for file in files),
        "seconds": round(seconds, 3),
    }
