"""How fast batches are prepared: seeds per CPU-second, beside the rate at which rows can be copied at all."""

import os
from collections.abc import Callable, Sequence

import numpy as np

from ..loader import LoaderOptions, PartData, PartLoader
from ..partition_store import WholeGraph
from ..partition_store.features import DenseFeatures
from ..sampler import NeighborSampler
from .graphs import power_law_graph
from .present import LEFT, draw_bars, table, tell
from .runner import Case, Runner, digest, machine_line
from .turns import Contender, Taken, in_this_process, measure, ratio, row_copies, speeds

BOUND = "row copy alone (bound)"
COLUMNS = {
    "what": ("what", LEFT),
    "threads": ("threads", ">"),
    "seeds_per_cpu_s": ("seeds per\nCPU-second", ",.0f"),
    "seeds_per_cpu_s_best": ("best", ",.0f"),
    "seeds_per_s": ("seeds per\nsecond", ",.0f"),
    "share_of_copy_bound": ("share of\ncopy bound", ".0%"),
}


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
    seed: int = 0,
    minutes: float | None = None,
    again: str = "none",
) -> dict[str, list[dict]]:
    """Measure sampling alone, sampling with features and the copy bound, in turns (`gnnscale bench sample` has peers).

    The ends of the graph's arcs are drawn independently, in proportion to Pareto(1.8) + 1 weights. The copy bound is
    the time in which the rows of a batch alone are copied from random places into a reused buffer, by as many threads.

    Args:
        output_dir: Folder for `loader.csv` and `loader.png`.
        num_nodes, num_edges: Number of nodes and edges in the generated graph.
        dim: Number of float32 features per node.
        fanouts, batch_size: Fan-outs of the sampler, and seeds per batch.
        threads: Numbers of threads to measure, each >= 1.
        num_batches: Number of batches in a measurement.
        repeats: Number of measurements of each kind, in turns; the median counts.
        seed: Seed of the graph and of the batches.
        minutes, again: See `Runner`; all is one case, as it is measured in turns.

    Returns:
        {"loader": rows}.
    """

    def measured() -> list[dict]:
        tell(f"generating {num_edges:,} edges of {num_nodes:,} nodes with {dim} features")
        csc = power_law_graph(num_nodes, num_edges, seed)
        features = np.random.default_rng(seed).random((num_nodes, dim), np.float32)
        seeds = np.sort(np.random.default_rng(seed + 1).permutation(num_nodes)[: num_batches * batch_size])
        contenders: dict[tuple[str, int], Contender] = {}
        rows_a_seed = _rows_a_seed(_loader(csc, None, seeds, fanouts, batch_size, 1, seed), len(seeds))
        for count in threads:
            sampling = _loader(csc, None, seeds, fanouts, batch_size, count, seed)
            loading = _loader(csc, features, seeds, fanouts, batch_size, count, seed)
            copies = row_copies(features, rows_a_seed, batch_size, num_batches, count)
            contenders["sampling", count] = in_this_process(_epochs(sampling))
            contenders["sampling and features", count] = in_this_process(_epochs(loading))
            contenders[BOUND, count] = in_this_process(copies)
        return summarise(measure(contenders, repeats), rows_a_seed)

    facts = (num_nodes, num_edges, dim, *fanouts, batch_size, *threads, num_batches, repeats, seed)
    with Runner(output_dir, minutes, again) as runner:
        rows = runner.rows([Case({"settings": digest(*facts)}, measured, None)], "loader.csv")
        title = f"Batches of {batch_size} seeds, fan-outs {', '.join(map(str, fanouts))}: medians of runs in turns"
        tell(table(rows, COLUMNS, title, machine_line()))
        labels = [f"{row['what']}, {row['threads']} thr." for row in rows]
        speeds_shown = [row["seeds_per_cpu_s"] for row in rows]
        draw_bars(runner.folder / "loader.png", labels, speeds_shown, "seeds per CPU-second of all threads")
    return {"loader": rows}


def summarise(found: dict[tuple[str, int], list[Taken]], rows_a_seed: float) -> list[dict]:
    """Return a row for each contender: medians, and ratios within each turn, so that a busy machine hits both sides."""
    rows = []
    for (what, threads), runs in found.items():
        share = ratio(runs, found.get((BOUND, threads)))
        rows.append(
            {
                "what": what,
                "threads": threads,
                **speeds(runs),
                "rows_a_seed": rows_a_seed,
                "share_of_copy_bound": share,
            }
        )
    return rows


def _loader(csc, features, seeds, fanouts, batch_size, threads, seed) -> PartLoader:
    """The loader as it trains; without features it carries ids and edges alone."""
    whole = WholeGraph.of(csc, 0)
    extra = {}
    if features is not None:
        train = np.zeros(csc.num_rows, np.bool_)
        train[seeds] = True
        extra = {"labels": np.arange(csc.num_rows) % 47, "masks": {"train": train}}
    table = None if features is None else DenseFeatures(features)
    data, options = PartData(lambda part: whole, table, **extra), LoaderOptions(batch_size, seed, num_threads=threads)
    return PartLoader([0], data, {0: seeds}, NeighborSampler(fanouts), options)


def _epochs(loader: PartLoader) -> Callable[[], int]:
    def prepare() -> int:
        loader.set_epoch(loader.epoch + 1)
        return sum(batch.batch_size for batch in loader)

    return prepare


def _rows_a_seed(loader: PartLoader, num_seeds: int) -> float:
    return sum(batch.num_nodes for batch in loader) / num_seeds
