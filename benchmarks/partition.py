"""Partitioners side by side: cut, replication, balances, time and memory, each case in a process of its own."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import psutil

from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.memory import parse_bytes

from .graphs import GraphSpec, graph_file, public_root, resolve_graphs
from .partition_cases import (
    GREEDY_EXPECTATION,
    GreedyExpectation,
    MethodSpec,
    leave_out_missing_peers,
    options_of,
    resolve_methods,
)
from .partition_process import MeasuringServer, core_count
from .partition_tables import CLOCKS, MEASURED, PLOTS, draw_plots, graph_table, mean_rows, means_table
from .present import tell
from .runner import Case, Runner, benchmark, check_names, digest_of_text, machine_line, write_csv

_MEMORY_SHARE = 0.8  # of what is free, for a case


@dataclass(frozen=True)
class PartitionBench:
    """Partition every graph by every method into every number of parts; print tables, write CSV files and plots.

    A case that fails (a constraint that cannot be met, a limit that is exceeded) gives a row with its message. Writes
    `rows.csv`, `means.csv` and the plots.

    Attributes:
        graphs: Names of sets; names of public graphs (made simple, ids and edges shuffled); "planted:EDGES",
            "lfr:EDGES", "two_level:EDGES", "power_law:EDGES" or "grid:EDGES"; paths; or {path, name, num_nodes, layout,
            masks, reader}.
        methods: Names of partitioners, or {method, name, balance, and options of the method}; an option that is a list
            of values makes one method per value. METIS and KaMinPar are left out if they are not installed;
            "heistream" and "cuttana" are this benchmark's own, from their papers (`streaming_peers`).
        parts: Numbers of parts.
        sets: Maps a name to a list of graphs; means are reported for each.
        balance: Constraints, {"nodes": 1.05, "volume": 1.10, "train": 1.05}; None: each method's default.
        cores: Number of cores that a case may use, or "all".
        warm_runs: Number of runs of a case after the first; the best counts.
        chunk_edges: Edges per chunk.
        seed: Seed of the methods; the graphs do not depend on it.
        halo_hops: Hops of halo counted in the replication factor and in the bytes of a part.
        feature_bytes: Size of a feature row, for the bytes of the largest part.
        limit_s, limit_bytes: Time and memory at which a case is stopped; limit_bytes None: 80% of the free memory.
        baseline: Name of the method with which cuts, seconds and memory are compared.
        clock: Column that means and plots take the time from: "seconds", or "cpu_seconds" if the machine does other
            work.
        plots: Any of cut_seconds, cut_memory, scaling, speedup and grem_fig6.
        scratch: Folder for edge files; None: the system's folder for temporary files.
    """

    graphs: list[str | dict]
    methods: list[str | dict]
    parts: list[int]
    sets: dict[str, list] | None = None
    balance: dict[str, float] | None = None
    cores: int | str = 1
    warm_runs: int = 1
    chunk_edges: int = 1 << 18
    seed: int = 0
    halo_hops: int = 1
    feature_bytes: int = 512
    limit_s: float | None = None
    limit_bytes: int | str | None = None
    baseline: str = "metis"
    clock: str = "seconds"
    plots: list[str] = ("cut_seconds", "cut_memory")
    data_root: str | None = None
    scratch: str | None = None

    def __post_init__(self):
        check_names("plots", self.plots, PLOTS)
        if self.clock not in CLOCKS:
            raise ValueError(f"bench.clock must be seconds or cpu_seconds, got {self.clock!r}")
        if self.limit_bytes is not None:
            parse_bytes(self.limit_bytes, "bench.limit_bytes")
        core_count(self.cores)
        resolve_methods(self.methods)

    def measure(self, runner: Runner) -> list[dict]:
        """Return the rows, by graph, parts and method."""
        methods = leave_out_missing_peers(resolve_methods(self.methods), tell)
        sets, rows, shown = self.sets or {}, [], {"baseline": self.baseline, "clock": self.clock}
        graphs = resolve_graphs(self.graphs, sets, public_root(self.data_root))
        limit_bytes = self.limit_bytes
        if limit_bytes is None:
            limit_bytes = int(_MEMORY_SHARE * psutil.virtual_memory().available)
        names = ("limit_s", "chunk_edges", "seed", "halo_hops", "feature_bytes")
        options = {name: getattr(self, name) for name in names} | {"repeats": self.warm_runs}
        options["limit_bytes"] = parse_bytes(limit_bytes, "bench.limit_bytes")
        with MeasuringServer(self.cores) as server:
            measure = partial(server.measure, **options)
            for graph in graphs:
                with tempfile.TemporaryDirectory(dir=self.scratch) as folder, ExitStack() as stack:
                    made = cache(partial(stack.enter_context, graph_file(graph, Path(folder))))
                    found = runner.rows(self._cases(graph, made, methods, measure), say=_tell)
                if found:
                    tell(graph_table(graph.name, found, self.baseline))
                rows += found
        means = mean_rows(rows, sets, **shown)
        write_csv(runner.folder / "means.csv", means)
        tell(means_table(means, self.baseline, machine_line()))
        draw_plots(runner.folder, self.plots, rows, **shown)
        failed = sum(bool(row["error"]) for row in rows)
        if failed:
            tell(f"{failed} of {len(rows)} cases failed; bench.again=failed tries them again")
        tell(f"rows, means and plots: {runner.folder}")
        return rows

    def _cases(self, graph: GraphSpec, made, methods: list[MethodSpec], measure) -> Iterator[Case]:
        """Yield the cases of one graph, whose file is made for the first of them that is measured."""
        expectation = cache(lambda: GreedyExpectation(made(), self.seed))
        kept = [self.cores, self.chunk_edges, self.seed, self.halo_hops, self.feature_bytes]
        for num_parts, spec in product(self.parts, methods):
            facts = [spec.method, spec.options, spec.balance or self.balance, graph.source, kept]
            settings = digest_of_text(json.dumps(facts, sort_keys=True, default=str))
            key = {"graph": graph.name, "method": spec.name, "parts": num_parts, "settings": settings}
            yield Case(key, partial(self._row, measure, made, spec, num_parts, expectation))

    def _row(self, measure, made, spec: MethodSpec, num_parts: int, expectation) -> dict:
        """Return what was measured, or why nothing was."""
        graph, told = made(), dict.fromkeys((*MEASURED, "broken", "phases", "notes", "error"))
        row = {
            "family": spec.family,
            "partitioner": spec.method,
            "options": json.dumps(spec.options),
            "balance": json.dumps(spec.balance or self.balance),
            "cores_a_case": self.cores,
            "seed": self.seed,
            **told,
            "num_nodes": graph.num_nodes,
            "num_edges": graph.num_edges,
        }
        try:
            if spec.method == GREEDY_EXPECTATION:
                return row | {"edge_cut_ratio": expectation().cut(num_parts, spec.options)}
            file = {"layout": graph.layout, "reader": graph.reader, "masks": graph.masks and str(graph.masks)}
            given = {"options": options_of(spec, self.cores), "balance": spec.balance or self.balance}
            found = measure(graph.path, graph.num_nodes, spec.method, num_parts, **file, **given)
        except (RuntimeError, GNNScaleError) as error:
            return row | {"error": str(error).strip().splitlines()[-1]}
        found["num_nodes"] = graph.num_nodes
        found |= {f"{name}_balance": value for name, value in found["mask_balance"].items()}
        found["million_edges_per_s"] = found["num_edges"] / found["seconds"] / 1e6
        found["bytes_a_node"] = found["peak_bytes"] / graph.num_nodes
        found["broken"] = " ".join(found["notes"].get("balance_violations", ()))
        found |= {name: json.dumps(found[name], default=str) for name in ("phases", "notes")}
        return row | {name: value for name, value in found.items() if name in told}


run = benchmark(PartitionBench)


def _tell(row: dict) -> None:
    what = f"  {row['graph']}, {row['parts']} parts, {row['method']}: "
    if row["error"]:
        what += row["error"]
    else:
        seconds = "" if row["seconds"] is None else f", {row['seconds']:.2f} s, {row['peak_bytes'] / 1e6:.0f} MB"
        what += f"cut {row['edge_cut_ratio']:.4f}{seconds}"
    tell(what, markup=False, highlight=False)
