"""Rows, table and plot of `gnnscale bench sample`."""

from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from .turns import Taken, ratio, speeds

COLUMNS = {
    "seeds_per_cpu_s": ("seeds per\nCPU-second", "{:,.0f}"),
    "seeds_per_cpu_s_best": ("best", "{:,.0f}"),
    "seeds_per_s": ("seeds per\nsecond", "{:,.0f}"),
    "rows_a_seed": ("rows\na seed", "{:.0f}"),
    "ns_per_edge": ("CPU ns\nan edge", "{:.1f}"),
    "share_of_copy_bound": ("share of\ncopy bound", "{:.0%}"),
    "times_one_thread": ("times one\nthread", "{:.2f}"),
    "batch_time_over_uniform": ("time over\nuniform", "{:.2f}"),
    "edge_time_over_uniform": ("same,\nan edge", "{:.2f}"),
    "times_pyg": ("times\nPyG", "{:.1f}"),
    "times_pyg_workers": ("times PyG,\nworkers", "{:.1f}"),
    "times_graphbolt": ("times\nGraphBolt", "{:.1f}"),
}


def rows_of(found: Mapping[tuple, list[Taken]], counts: Mapping[tuple, tuple], threads: int) -> list[dict]:
    """Return a row for each contender; ratios are taken within each turn.

    Args:
        found: runs by `sample.Name`.
        counts: feature rows and edges a seed by `sample.Name`, None where they are not known.
        threads: those of the loader that ratios are taken from.
    """
    peer_of = {name.what: [other for other in found if other.what == name.what and other.workers] for name in found}
    rows = []
    for name, runs in found.items():
        plain = name._replace(scale=1.0)
        rows_a_seed, edges = counts.get(name._replace(workers=0), (None, None))
        speed = speeds(runs)
        workers = next(iter(peer_of.get("PyG NeighborLoader", [])), None)
        row = {
            "what": name.what,
            "locality_scale": name.scale,
            "threads": name.threads,
            "workers": name.workers,
            **speed,
            "rows_a_seed": rows_a_seed,
            "edges_a_seed": edges,
            "ns_per_edge": 1e9 / speed["seeds_per_cpu_s"] / edges if edges and name.what == "sampling alone" else None,
            "share_of_copy_bound": ratio(runs, _runs(found, "row copy alone (bound)", name.threads)),
            "times_one_thread": None,
            "batch_time_over_uniform": None,
            "edge_time_over_uniform": None,
            "times_pyg": ratio(runs, _runs(found, "PyG NeighborLoader")),
            "times_pyg_workers": ratio(runs, found.get(workers)),
            "times_graphbolt": ratio(runs, _runs(found, "GraphBolt")),
        }
        if name.threads != threads and (one := found.get(name._replace(threads=threads))):
            row["times_one_thread"] = ratio(runs, one, "wall_s")
        if name != plain:
            row["batch_time_over_uniform"] = 1 / ratio(runs, found[plain])
            row["edge_time_over_uniform"] = row["batch_time_over_uniform"] * counts[plain][1] / edges
        rows.append(row)
    return rows


def _runs(found: Mapping[tuple, list[Taken]], what: str, threads: int = 1) -> list[Taken] | None:
    same = (r for name, r in found.items() if name.what == what and name.threads == threads and not name.workers)
    return next(same, None)


def table_of(rows: list[dict], fanouts, batch_size: int, caption: str) -> Table:
    """Return the rows as a table for the terminal; a column that no row fills is left out."""
    title = f"Batches of {batch_size} seeds, fan-outs {', '.join(map(str, fanouts))}: medians of runs in turns"
    table = Table(title=title, caption=caption, box=SIMPLE)
    shown = [name for name in COLUMNS if any(row[name] is not None for row in rows)]
    table.add_column("what", no_wrap=True)
    for name in shown:
        table.add_column(COLUMNS[name][0], justify="right")
    for row in rows:
        values = ("" if row[name] is None else COLUMNS[name][1].format(row[name]) for name in shown)
        table.add_row(_label(row), *values)
    return table


def _label(row: Mapping) -> str:
    locality = f", s = {row['locality_scale']:g}" if row["locality_scale"] > 1 else ""
    threads = f", {row['threads']} threads" if row["threads"] > 1 else ""
    workers = f", {row['workers']} workers" if row["workers"] else ""
    return row["what"] + locality + threads + workers


def draw_rows(path: Path, rows: list[dict]) -> None:
    """Draw seeds per CPU-second of each row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars = axes.barh([_label(row) for row in rows], [row["seeds_per_cpu_s"] for row in rows])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("seeds per CPU-second of all processes")
    figure.savefig(path, dpi=120)
