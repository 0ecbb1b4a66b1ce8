"""Partitioners side by side: cut, replication, balances, time and memory, each case in a process of its own."""

import json
import os
import tempfile
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import psutil

from ..errors import GNNScaleError
from ..memory import parse_bytes
from .graphs import GraphFile, GraphSpec, graph_file, public_root, resolve_graph
from .partition_cases import (
    GREEDY_EXPECTATION,
    GreedyExpectation,
    MethodSpec,
    Settings,
    leave_out_missing_peers,
    resolve_methods,
)
from .partition_process import MeasuringServer
from .partition_tables import MEASURED, check_plots, draw_plots, graph_table, mean_rows, means_table
from .present import tell
from .runner import Case, Runner, machine_line, write_csv

_MEMORY_SHARE = 0.8  # of what is free, for a case


def run(
    output_dir: str | os.PathLike,
    graphs: list[str | dict],
    methods: list[str | dict],
    parts: list[int],
    sets: dict[str, list] | None = None,
    balance: dict[str, float] | None = None,
    cores: int | str = 1,
    warm_runs: int = 1,
    chunk_edges: int = 1 << 18,
    seed: int = 0,
    halo_hops: int = 1,
    feature_bytes: int = 512,
    limit_s: float | None = None,
    limit_bytes: int | str | None = None,
    baseline: str = "metis",
    clock: str = "seconds",
    plots: list[str] = ("cut_seconds", "cut_memory"),
    data_root: str | None = None,
    scratch: str | None = None,
    minutes: float | None = None,
    again: str = "none",
) -> list[dict]:
    """Partition every graph by every method into every number of parts; print tables, write CSV files and plots.

    A case that fails (a constraint that cannot be met, a limit that is exceeded) gives a row with its message.

    Args:
        output_dir: Folder for `rows.csv`, `means.csv` and the plots.
        graphs: Names of sets; names of public graphs (made simple, ids and edges shuffled); "planted:EDGES";
            "lfr:EDGES"; paths; or {path, name, num_nodes, layout, masks, reader}.
        methods: Names of partitioners, or {method, name, balance, and options of the method}; an option that is a list
            of values makes one method per value. METIS and KaMinPar are left out if they are not installed.
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
        data_root: Folder of public graphs; None: it is searched for.
        scratch: Folder for edge files; None: the system's folder for temporary files.
        minutes, again: See `Runner`.

    Returns:
        The rows, by graph, parts and method.
    """
    if limit_bytes is None:
        limit_bytes = int(_MEMORY_SHARE * psutil.virtual_memory().available)
    limit_bytes = parse_bytes(limit_bytes, "bench.limit_bytes")
    check_plots(plots)
    if clock not in ("seconds", "cpu_seconds"):
        raise ValueError(f"bench.clock must be seconds or cpu_seconds, got {clock!r}")
    settings = Settings(balance, cores, warm_runs, chunk_edges, seed, halo_hops, feature_bytes, limit_s, limit_bytes)
    specs = leave_out_missing_peers(resolve_methods(methods), tell)
    graph_specs = _resolve_graphs(graphs, sets or {}, public_root(data_root))
    rows: list[dict] = []
    with Runner(output_dir, minutes, again) as runner, MeasuringServer(cores) as server:
        for graph in graph_specs:
            with tempfile.TemporaryDirectory(dir=scratch) as folder, ExitStack() as stack:
                made = cache(partial(stack.enter_context, graph_file(graph, Path(folder))))
                found = runner.rows(_cases(graph, made, specs, parts, settings, server), say=_tell)
            if found:
                tell(graph_table(graph.name, found, baseline))
            rows += found
        means = mean_rows(rows, sets or {}, baseline, clock)
        write_csv(runner.folder / "means.csv", means)
        tell(means_table(means, baseline, machine_line()))
        draw_plots(runner.folder, plots, rows, baseline, clock)
        failed = sum(bool(row["error"]) for row in rows)
        if failed:
            tell(f"{failed} of {len(rows)} cases failed; bench.again=failed tries them again")
        tell(f"rows, means and plots: {output_dir}")
    return rows


def _resolve_graphs(graphs: list, sets: dict[str, list], root: Path | None) -> list[GraphSpec]:
    """Return the graphs, sets spread out, each once."""
    given = []
    for graph in graphs:
        given += sets[graph] if isinstance(graph, str) and graph in sets else [graph]
    specs = {}
    for graph in given:
        spec = resolve_graph(graph, root)
        if specs.setdefault(spec.name, spec) != spec:
            raise ValueError(f"bench.graphs has two graphs named {spec.name!r}: give one another name")
    return list(specs.values())


def _cases(graph: GraphSpec, made, specs: list[MethodSpec], parts: list[int], settings: Settings, server):
    """Yield the cases of one graph, whose file is made for the first of them that is measured."""
    expectation = cache(lambda: GreedyExpectation(made(), settings.seed))
    for num_parts in parts:
        for spec in specs:
            key = {"graph": graph.name, "method": spec.name, "parts": num_parts}
            key["settings"] = settings.key(spec, graph.source)
            yield Case(key, partial(_row, server, made, spec, num_parts, settings, expectation))


def _row(server, made, spec: MethodSpec, num_parts: int, settings: Settings, expectation) -> dict:
    row = _describe(spec, settings) | dict.fromkeys((*MEASURED, "broken", "phases", "notes", "error"))
    found = _measure(server, made(), spec, num_parts, settings, expectation)
    return row | {name: value for name, value in found.items() if name in row}


def _describe(spec: MethodSpec, settings: Settings) -> dict:
    return {
        "family": spec.family,
        "partitioner": spec.method,
        "options": json.dumps(spec.options),
        "balance": json.dumps(spec.balance or settings.balance),
        "cores_a_case": settings.cores,
        "seed": settings.seed,
    }


def _measure(server, graph: GraphFile, spec: MethodSpec, num_parts: int, settings: Settings, expectation) -> dict:
    """Return what was measured, or why nothing was."""
    facts = {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges}
    try:
        if spec.method == GREEDY_EXPECTATION:
            return {**facts, "edge_cut_ratio": expectation().cut(num_parts, spec.options)}
        file = {"layout": graph.layout, "reader": graph.reader, "masks": graph.masks and str(graph.masks)}
        measured = settings.measured(spec)
        found = server.measure(graph.path, graph.num_nodes, spec.method, num_parts, **file, **measured)
    except (RuntimeError, GNNScaleError) as error:
        return {**facts, "error": str(error).strip().splitlines()[-1]}
    masks = {f"{name}_balance": value for name, value in found.pop("mask_balance").items()}
    return {
        **found,
        **masks,
        "num_nodes": graph.num_nodes,
        "million_edges_per_s": found["num_edges"] / found["seconds"] / 1e6,
        "bytes_a_node": found["peak_bytes"] / graph.num_nodes,
        "broken": " ".join(found["notes"].get("balance_violations", ())),
        "phases": json.dumps(found["phases"]),
        "notes": json.dumps(found["notes"]),
    }


def _tell(row: dict) -> None:
    what = f"  {row['graph']}, {row['parts']} parts, {row['method']}: "
    if row["error"]:
        what += row["error"]
    else:
        seconds = "" if row["seconds"] is None else f", {row['seconds']:.2f} s, {row['peak_bytes'] / 1e6:.0f} MB"
        what += f"cut {row['edge_cut_ratio']:.4f}{seconds}"
    tell(what, markup=False, highlight=False)
