"""What the batches of a part read from the disk: halo rows at their owners, or packed beside the part."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

from ..datamodule import PartitionDataModule
from ..datamodule.train_loader import part_targets
from ..dataset import generate
from ..loader import LoaderOptions, PartData, PartLoader
from ..memory import cached_bytes, evict
from ..partition_store import PartitionStore
from ..report.terminal import ProgressBars
from ..sampler import NeighborSampler
from .present import LEFT, table, tell
from .runner import Case, Runner, digest, machine_line

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


def run(
    output_dir: str | os.PathLike,
    num_nodes: int = 1_000_000,
    num_edges: int = 8_000_000,
    feature_dim: int = 64,
    partitioner: str = "streaming_multilevel",
    num_parts: int = 32,
    visits: Sequence[int] = (0, 11, 22),
    fanouts: Sequence[int] = (25, 10),
    batch_size: int = 512,
    seed: int = 0,
    minutes: float | None = None,
    again: str = "none",
) -> list[dict]:
    """Draw all batches of a part once, with no features in memory at the start, from both kinds of store.

    Args:
        output_dir: Folder for `halo.csv`, the graph and the stores, on a disk; existing ones are reused.
        num_nodes, num_edges, feature_dim: Number of nodes and edges in the generated graph, and of float32 features per
            node.
        partitioner, num_parts: Partitioner and number of parts of the stores.
        visits: Parts to visit, each in a process of its own.
        fanouts, batch_size: Fan-outs and size of the batches.
        seed: Seed of the graph, the parts and the batches.
        minutes, again: See `Runner`.

    Returns:
        One row per layout and part: bytes of core and halo rows, bytes of features that came from the disk (in whole
        pages), bytes of the whole table, and seconds.

    Raises:
        ValueError: a visit is not a part.
    """
    wrong = [part for part in visits if not 0 <= part < num_parts]
    if wrong:
        raise ValueError(f"bench.visits must be parts in [0, {num_parts}), got {wrong[0]}")
    folder, facts = Path(output_dir), (num_nodes, num_edges, feature_dim, partitioner, num_parts, seed)
    settings = digest(*facts, *fanouts, batch_size)

    @cache
    def stores() -> dict[bool, Path]:
        roots = {packs: folder / "stores" / ("packed" if packs else "plain") for packs in LAYOUTS}
        with ProgressBars() as progress:
            size = {"feature_dim": feature_dim, "seed": seed, "progress": progress}
            dataset = generate(num_nodes, num_edges, str(folder / "graph"), **size)
            options = {"partitioner": partitioner, "num_parts": num_parts, "seed": seed, "progress": progress}
            for packs, root in roots.items():
                PartitionDataModule(root=root, dataset=dataset, pack_halo=packs, **options).prepare_data()
        return roots

    def visited(packs: bool, part: int) -> dict:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as fresh:
            return fresh.submit(visit, str(stores()[packs]), part, list(fanouts), batch_size, seed).result()

    cases = [
        Case({"halo_rows": layout, "part": part, "settings": settings}, partial(visited, packs, part))
        for packs, layout in LAYOUTS.items()
        for part in visits
    ]
    with Runner(folder, minutes, again) as runner:
        rows = runner.rows(cases, "halo.csv")
        shown = [row | {"share": row["read_bytes"] / row["table_bytes"]} for row in rows]
        tell(table(shown, COLUMNS, "Feature bytes that one visit of a part reads from the disk, in MB", machine_line()))
    return rows


def visit(root: str, part: int, fanouts: list[int], batch_size: int, seed: int) -> dict:
    """Drop a store's features from memory, draw every batch of a part, and count what was read.

    Args:
        root: Folder of the store.
        part: Part to visit.
        fanouts, batch_size, seed: Fan-outs, size and seed of the batches.

    Returns:
        num_batches; needed_bytes: size of the feature rows of core and halo; read_bytes: bytes of feature files that
        are now in memory; table_bytes: size of all rows once; stored_bytes: size of all feature files; seconds.

    Raises:
        GNNScaleError: the features cannot be dropped from memory.
    """
    files = [Path(root) / name for name in _FILES if (Path(root) / name).exists()]
    for file in files:
        evict(file)
    store = PartitionStore.open(root)
    graph = store.load_part(part)
    loader = PartLoader(
        [part],
        PartData(store.load_part, store.part_features, store.labels, store.masks),
        part_targets(store),
        NeighborSampler(fanouts),
        LoaderOptions(batch_size, seed),
    )
    start = time.perf_counter()
    num_batches = sum(1 for _ in loader)
    seconds = time.perf_counter() - start
    return {
        "num_batches": num_batches,
        "needed_bytes": graph.num_local * store.features.array[:1].nbytes,
        "read_bytes": sum(cached_bytes(file) for file in files),
        "table_bytes": store.features.array.nbytes,
        "stored_bytes": sum(file.stat().st_size for file in files),
        "seconds": round(seconds, 3),
    }
