"""What the batches of a part read from the disk: halo rows at their owners, or packed beside the part."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..datamodule import PartitionDataModule
from ..datamodule.train_loader import part_targets
from ..dataset import generate
from ..loader import LoaderOptions, PartData, PartLoader
from ..partition_store import PartitionStore
from ..report.progress import ProgressBars
from ..sampler import NeighborSampler
from .page_cache import cached_bytes, evict
from .results import machine_line, write_csv

LAYOUTS = {False: "at their owners", True: "packed beside the part"}
_FILES = ("features.npy", "halo_features.npy")


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

    Returns:
        One row per layout and part: bytes of core and halo rows, bytes of features that came from the disk (in whole
        pages), bytes of the whole table, and seconds.

    Raises:
        ValueError: a visit is not a part.
    """
    wrong = [part for part in visits if not 0 <= part < num_parts]
    if wrong:
        raise ValueError(f"bench.visits must be parts in [0, {num_parts}), got {wrong[0]}")
    output_dir, rows = Path(output_dir), []
    roots = {False: output_dir / "stores" / "plain", True: output_dir / "stores" / "packed"}
    with ProgressBars() as progress:
        dataset = generate(
            num_nodes, num_edges, str(output_dir / "graph"), feature_dim=feature_dim, seed=seed, progress=progress
        )
        for packs, root in roots.items():
            PartitionDataModule(
                root=root,
                dataset=dataset,
                partitioner=partitioner,
                num_parts=num_parts,
                seed=seed,
                pack_halo=packs,
                progress=progress,
            ).prepare_data()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as fresh:
        for packs, layout in LAYOUTS.items():
            for part in visits:
                facts = fresh.submit(visit, str(roots[packs]), part, list(fanouts), batch_size, seed).result()
                rows.append({"halo_rows": layout, "part": part, **facts})
    write_csv(output_dir / "halo.csv", rows)
    Console(width=max(Console().width, 100)).print(_table(rows))
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


def _table(rows: list[dict]) -> Table:
    title = "Feature bytes that one visit of a part reads from the disk, in MB"
    table = Table(title=title, title_justify="left", caption=machine_line(), caption_justify="left")
    table.add_column("halo rows")
    for name in ("part", "batches", "core + halo", "read", "of the table", "s", "stored"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["halo_rows"],
            str(row["part"]),
            str(row["num_batches"]),
            f"{row['needed_bytes'] / 1e6:,.1f}",
            f"{row['read_bytes'] / 1e6:,.1f}",
            f"{row['read_bytes'] / row['table_bytes']:.0%}",
            f"{row['seconds']:.2f}",
            f"{row['stored_bytes'] / 1e6:,.1f}",
        )
    return table
