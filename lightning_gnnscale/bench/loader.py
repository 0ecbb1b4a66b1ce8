"""How fast batches are prepared: seeds per CPU-second, beside the rate at which rows can be copied at all, and PyG."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..graph import CSC, build_csc
from ..loader import BufferPool, PartLoader, WholeGraph
from ..partition_store.features import DenseFeatures
from ..sampler import NeighborSampler
from ..triton_kernels.gather_rows import gather_rows
from .results import machine, machine_line, write_csv

Contender = Callable[[], int]  # prepares batches, returns the seeds they hold


def run(
    output_dir: str | os.PathLike,
    num_nodes: int = 1_000_000,
    num_edges: int = 20_000_000,
    dim: int = 128,
    fanouts: Sequence[int] = (15, 10, 5),
    batch_size: int = 1024,
    threads: Sequence[int] = (1, 2),
    num_batches: int = 40,
    repeats: int = 5,
    peer_batches: int = 4,
    seed: int = 0,
) -> dict[str, list[dict]]:
    """Measure sampling alone, sampling with features, the copy bound and PyG's loader, in turns.

    The graph has arcs whose ends are drawn independently, in proportion to Pareto(1.8) + 1 weights. The copy bound is
    the time in which the rows of a batch alone can be copied from random places into a reused buffer, by as many
    threads.

    Args:
        output_dir: folder for `loader.csv` and `loader.png`.
        num_nodes, num_edges: of the generated graph.
        dim: float32 features a node.
        fanouts, batch_size: of the sampler.
        threads: numbers of threads to measure, each >= 1.
        num_batches: batches of a measurement.
        repeats: measurements of each, in turns; medians count.
        peer_batches: batches of a measurement of PyG's loader.
        seed: of graph and batches.

    Returns:
        {"loader": rows}.
    """
    console = Console(width=max(Console().width, 120))
    console.print(f"generating {num_edges:,} edges of {num_nodes:,} nodes with {dim} features")
    csc = power_law_graph(num_nodes, num_edges, seed)
    features = np.random.default_rng(seed).random((num_nodes, dim), np.float32)
    seeds = np.sort(np.random.default_rng(seed + 1).permutation(num_nodes)[: num_batches * batch_size])
    contenders: dict[tuple[str, int], Contender] = {}
    rows_a_seed = _rows_a_seed(_loader(csc, None, seeds, fanouts, batch_size, 1, seed), len(seeds))
    for count in threads:
        sampling = _loader(csc, None, seeds, fanouts, batch_size, count, seed)
        loading = _loader(csc, features, seeds, fanouts, batch_size, count, seed)
        contenders["sampling", count] = _epochs(sampling)
        contenders["sampling and features", count] = _epochs(loading)
        contenders["row copy alone (bound)", count] = _copies(features, rows_a_seed, batch_size, num_batches, count)
    peer = _pyg_loader(csc, features, seeds[: peer_batches * batch_size], fanouts, batch_size)
    if peer is None:
        console.print("PyG's NeighborLoader is left out: neither pyg-lib nor torch-sparse is installed")
    else:
        contenders["PyG NeighborLoader", 1] = peer
    rows = summarise(measure(contenders, repeats), rows_a_seed)
    facts, output = machine(), Path(output_dir)
    write_csv(output / "loader.csv", rows, facts)
    console.print(_table(rows, fanouts, batch_size, machine_line(facts)))
    _draw(output / "loader.png", rows)
    return {"loader": rows}


def power_law_graph(num_nodes: int, num_edges: int, seed: int) -> CSC:
    """Return arcs with both ends drawn independently, in proportion to Pareto(1.8) + 1 weights."""
    rng = np.random.default_rng(seed)
    upper = np.cumsum(rng.pareto(1.8, num_nodes) + 1)
    upper /= upper[-1]
    src, dst = (np.searchsorted(upper, rng.random(num_edges)).astype(np.int32) for _ in range(2))
    return build_csc(src, dst, num_nodes)


def measure(contenders: dict[tuple[str, int], Contender], repeats: int) -> dict[tuple[str, int], list[tuple]]:
    """Run each contender `repeats` times, in turns, after one run that does not count.

    Returns:
        For each contender (seeds, CPU seconds of the process, seconds) of each run.
    """
    found: dict[tuple[str, int], list[tuple]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            seeds = contender()
            taken = (seeds, time.process_time() - start_cpu, time.perf_counter() - start)
            if repeat:
                found[name].append(taken)
    return found


def summarise(found: dict[tuple[str, int], list[tuple]], rows_a_seed: float) -> list[dict]:
    """Return a row for each contender: medians, and ratios within each turn, so that a busy machine hits both sides."""
    rows = []
    for (what, threads), runs in found.items():
        bound = found.get(("row copy alone (bound)", threads))
        peer = found.get(("PyG NeighborLoader", 1))
        rows.append(
            {
                "what": what,
                "threads": threads,
                "seeds_per_cpu_s": statistics.median(seeds / cpu for seeds, cpu, _ in runs),
                "seeds_per_cpu_s_best": max(seeds / cpu for seeds, cpu, _ in runs),
                "seeds_per_s": statistics.median(seeds / wall for seeds, _, wall in runs),
                "rows_a_seed": rows_a_seed,
                "share_of_copy_bound": _ratio(runs, bound),
                "times_pyg": _ratio(runs, peer),
            }
        )
    return rows


def _ratio(runs: list[tuple], others: list[tuple] | None) -> float | None:
    """Median over the turns of seeds per CPU-second against another contender's."""
    if others is None:
        return None
    pairs = zip(runs, others, strict=True)
    return statistics.median((a[0] / a[1]) / (b[0] / b[1]) for a, b in pairs)


def _loader(csc, features, seeds, fanouts, batch_size, threads, seed) -> PartLoader:
    """The loader as it trains; without features it carries ids and edges alone."""
    whole = WholeGraph.of(csc, 0)
    extra = {}
    if features is not None:
        train = np.zeros(csc.num_rows, np.bool_)
        train[seeds] = True
        extra = {"labels": np.arange(csc.num_rows) % 47, "masks": {"train": train}}
    table = None if features is None else DenseFeatures(features)
    options = {"batch_size": batch_size, "seed": seed, "num_threads": threads, "pool": BufferPool()}
    return PartLoader([0], lambda part: whole, table, {0: seeds}, NeighborSampler(fanouts), **options, **extra)


def _epochs(loader: PartLoader) -> Contender:
    def contender() -> int:
        loader.set_epoch(loader.epoch + 1)
        return sum(batch.batch_size for batch in loader)

    return contender


def _rows_a_seed(loader: PartLoader, num_seeds: int) -> float:
    return sum(batch.num_nodes for batch in loader) / num_seeds


def _copies(features, rows_a_seed, batch_size, num_batches, threads) -> Contender:
    """Copy as many random rows as the batches read, into one reused buffer a thread, and nothing else."""
    num = min(int(rows_a_seed * batch_size), len(features))
    orders = [np.random.default_rng(i).permutation(len(features))[:num] for i in range(3)]
    outs = [BufferPool().take((num, features.shape[1]), features.dtype) for _ in range(threads)]

    def copy(thread: int) -> None:
        for batch in range(thread, num_batches, threads):
            gather_rows(features, orders[batch % 3], outs[thread])

    def contender() -> int:
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(copy, range(threads)))
        return round(num_batches * num / rows_a_seed)

    return contender


def _pyg_loader(csc, features, seeds, fanouts, batch_size) -> Contender | None:
    """PyG's loader in this process, or None where it cannot sample."""
    import torch
    from torch_geometric import typing
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        return None
    target = torch.repeat_interleave(torch.arange(csc.num_rows), torch.from_numpy(csc.in_degree))
    data = Data(
        x=torch.from_numpy(features),
        edge_index=torch.stack([torch.from_numpy(csc.indices).long(), target]),
        y=torch.arange(csc.num_rows) % 47,
        train_mask=torch.ones(csc.num_rows, dtype=torch.bool),
    )
    loader = NeighborLoader(
        data, list(fanouts), torch.from_numpy(seeds), batch_size=batch_size, shuffle=True, is_sorted=True
    )
    return lambda: sum(batch.batch_size for batch in loader)


def _table(rows: list[dict], fanouts, batch_size, caption: str) -> Table:
    title = f"Batches of {batch_size} seeds, fan-outs {', '.join(map(str, fanouts))}: medians of runs in turns"
    table = Table(title=title, caption=caption, box=SIMPLE)
    table.add_column("what")
    for name in ("threads", "seeds per\nCPU-second", "best", "seeds per\nsecond", "share of\ncopy bound", "times PyG"):
        table.add_column(name, justify="right")
    for row in rows:
        share, times = row["share_of_copy_bound"], row["times_pyg"]
        table.add_row(
            row["what"],
            str(row["threads"]),
            f"{row['seeds_per_cpu_s']:,.0f}",
            f"{row['seeds_per_cpu_s_best']:,.0f}",
            f"{row['seeds_per_s']:,.0f}",
            "" if share is None else f"{share:.0%}",
            "" if times is None else f"{times:.1f}",
        )
    return table


def _draw(path: Path, rows: list[dict]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [f"{row['what']}, {row['threads']} thr." for row in rows]
    bars = axes.barh(names, [row["seeds_per_cpu_s"] for row in rows])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("seeds per CPU-second of all threads")
    figure.savefig(path, dpi=120)
