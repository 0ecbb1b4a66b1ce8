"""How fast batches are prepared: seeds per CPU-second, compared with the rate at which rows can be copied at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_gnnscale.graph import CSC
from lightning_gnnscale.loader import LoaderOptions, PartData, PartLoader
from lightning_gnnscale.loader.staged_part import node_values
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.features import DenseFeatures
from lightning_gnnscale.sampler import NeighborSampler

from .graphs import NUM_CLASSES, power_law_input, some_seeds
from .present import LEFT, draw_bars, show
from .runner import Case, Runner, benchmark, digest, machine_line
from .turns import Taken, batches_title, in_this_process, measure, ratio, row_copies, speeds

BOUND = "row copy alone (bound)"
COLUMNS = {
    "what": ("what", LEFT),
    "threads": ("threads", ">"),
    "seeds_per_cpu_s": ("seeds per\nCPU-second", ",.0f"),
    "seeds_per_cpu_s_best": ("best", ",.0f"),
    "seeds_per_s": ("seeds per\nsecond", ",.0f"),
    "share_of_copy_bound": ("share of\ncopy bound", ".0%"),
}


@dataclass(frozen=True)
class LoaderBench:
    """Measure sampling alone, sampling with features and the copy bound, in turns (`gnnscale bench sample` has peers).

    The copy bound is the time in which the rows of a batch alone are copied from random places into a reused buffer, by
    as many threads. Writes `loader.csv` and `loader.png`; all is one case, as it is measured in turns.

    Attributes:
        fanouts, batch_size: Fan-outs of the sampler, and seeds per batch.
        threads: Numbers of threads to measure, each >= 1.
        num_batches: Number of batches in a measurement.
    """

    num_nodes: int = 1_000_000
    num_edges: int = 20_000_000
    dim: int = 128
    fanouts: Sequence[int] = (15, 10, 5)
    batch_size: int = 1024
    threads: Sequence[int] = (1, 2)
    num_batches: int = 40
    repeats: int = 5
    seed: int = 0

    def measure(self, runner: Runner) -> dict[str, list[dict]]:
        """Return {"loader": rows}."""
        facts = (self.num_nodes, self.num_edges, self.dim, *self.fanouts, self.batch_size, *self.threads)
        facts += (self.num_batches, self.repeats, self.seed)
        rows = runner.rows([Case({"settings": digest(*facts)}, self._turns, None)], "loader.csv")
        show(rows, COLUMNS, batches_title(self.batch_size, self.fanouts), machine_line())
        xlabel = "seeds per CPU-second of all threads"
        draw_bars(runner.folder / "loader.png", rows, "{what}, {threads} thr.", "seeds_per_cpu_s", xlabel)
        return {"loader": rows}

    def _turns(self) -> list[dict]:
        csc, features = power_law_input(self.num_nodes, self.num_edges, self.dim, self.seed)
        seeds = some_seeds(self.num_nodes, self.num_batches * self.batch_size, self.seed)
        counted = sum(batch.num_nodes for batch in self._loader(csc, None, seeds, 1))
        rows_a_seed, contenders = counted / len(seeds), {}
        for count in self.threads:
            copies = row_copies(features, rows_a_seed, self.batch_size, self.num_batches, count)
            ways = {
                "sampling": epochs_of(self._loader(csc, None, seeds, count)),
                "sampling and features": epochs_of(self._loader(csc, features, seeds, count)),
                BOUND: copies,
            }
            contenders |= {(what, count): in_this_process(way) for what, way in ways.items()}
        return summarise(measure(contenders, self.repeats), rows_a_seed)

    def _loader(self, csc, features, seeds, threads: int) -> PartLoader:
        table = None if features is None else DenseFeatures(features)
        options = LoaderOptions(self.batch_size, self.seed, num_threads=threads)
        return whole_graph_loader(csc, table, seeds, self.fanouts, options)


run = benchmark(LoaderBench)


def whole_graph_loader(
    csc: CSC, table: DenseFeatures | None, seeds: np.ndarray, fanouts: Sequence[int], options: LoaderOptions
) -> PartLoader:
    """Return the loader of a DataModule over one graph in memory; without features it carries ids and edges alone."""
    whole, nodes = WholeGraph.of(csc, 0), {}
    if table is not None:
        train = np.zeros(csc.num_rows, np.bool_)
        train[seeds] = True
        nodes = node_values(np.arange(csc.num_rows) % NUM_CLASSES, {"train": train})
    return PartLoader([0], PartData(lambda part: whole, table, nodes), {0: seeds}, NeighborSampler(fanouts), options)


def summarise(found: dict[tuple[str, int], list[Taken]], rows_a_seed: float) -> list[dict]:
    """Return a row for each contender: medians, and ratios within each turn, so that a busy machine hits both sides."""
    return [
        {"what": what, "threads": threads, **speeds(runs), "rows_a_seed": rows_a_seed}
        | {"share_of_copy_bound": ratio(runs, found.get((BOUND, threads)))}
        for (what, threads), runs in found.items()
    ]


def epochs_of(loader: PartLoader) -> Callable[[], int]:
    """Return what prepares the batches of the next epoch, and says how many seeds they had."""

    def prepare() -> int:
        loader.set_epoch(loader.epoch + 1)
        return sum(batch.batch_size for batch in loader)

    return prepare
