"""Plots of the partitioner benchmark, each from its rows alone."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from .partition_cases import GREEDY_EXPECTATION, PEERS
from .partition_tables import cut_of

_MARKERS = "osD^vP*X<>ph"
_LABELS = {"seconds": "seconds", "cpu_seconds": "CPU seconds"}


def draw_plots(output_dir: Path, names: list[str], rows: list[dict], baseline: str, clock: str) -> list[Path]:
    """Draw each plot that has something to show.

    Args:
        output_dir: Folder for `<name>.png`.
        names: Names of the plots, keys of `PLOTS`.
        rows: Rows of the benchmark; those that failed are left out.
        baseline: Method that the others are compared with.
        clock: Column that the time is taken from: "seconds" or "cpu_seconds".

    Returns:
        The files.
    """
    check_plots(names)
    good = [row for row in rows if not row["error"]]
    paths = []
    for name in names:
        figure = PLOTS[name](good, baseline, clock) if good else None
        if figure is not None:
            paths.append(output_dir / f"{name}.png")
            figure.savefig(paths[-1], dpi=120)
    return paths


def check_plots(names: list[str]) -> None:
    """Raise ValueError for a plot that does not exist."""
    unknown = sorted(set(names) - set(PLOTS))
    if unknown:
        raise ValueError(f"bench.plots must be of {', '.join(PLOTS)}; got {', '.join(unknown)}")


def _cut_seconds(rows: list[dict], baseline: str, clock: str):
    return _cut_against(rows, clock, 1.0, _LABELS[clock])


def _cut_memory(rows: list[dict], baseline: str, clock: str):
    return _cut_against(rows, "peak_bytes", 1e-6, "peak memory, MB")


def _cut_against(rows: list[dict], column: str, factor: float, label: str):
    """Draw one panel a graph: cut against a cost; what METIS and KaMinPar cut is a line across for each part count."""
    rows = [row for row in rows if row[column]]
    if not rows:
        return None
    styles = _styles(row["family"] for row in rows)
    figure, panels = _panels(list(dict.fromkeys(row["graph"] for row in rows)))
    for graph, axes in panels.items():
        for family, (colour, marker) in styles.items():
            own = [row for row in rows if row["graph"] == graph and row["family"] == family]
            costs, cuts = [row[column] * factor for row in own], [cut_of(row) for row in own]
            axes.plot(costs, cuts, marker, color=colour, label=family, markersize=5)
            for cost, cut, row in zip(costs, cuts, own, strict=True):
                axes.annotate(str(row["parts"]), (cost, cut), fontsize=6, xytext=(3, 3), textcoords="offset points")
                if row["partitioner"] in PEERS:
                    axes.axhline(cut, color=colour, linewidth=0.8, linestyle="--", alpha=0.7)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="cut edges over all", title=graph)
        _plain_ticks(axes.xaxis, axes.yaxis)
    _legend(figure, panels)
    return figure


def _scaling(rows: list[dict], baseline: str, clock: str):
    """Draw seconds and peak memory against edges, log-log, one line a method and number of parts."""
    rows = [row for row in rows if row[clock]]
    if not rows:
        return None
    styles = _styles(row["family"] for row in rows)
    figure, panels = _panels([_LABELS[clock], "peak memory, MB"])
    several = len({row["parts"] for row in rows}) > 1
    for (title, axes), (column, factor) in zip(panels.items(), ((clock, 1.0), ("peak_bytes", 1e-6)), strict=True):
        for method, num_parts in dict.fromkeys((row["method"], row["parts"]) for row in rows):
            own = [row for row in rows if (row["method"], row["parts"]) == (method, num_parts)]
            own.sort(key=lambda row: row["num_edges"])
            colour, marker = styles[own[0]["family"]]
            label = f"{method}, {num_parts} parts" if several else method
            values = [row[column] * factor for row in own]
            axes.plot([row["num_edges"] for row in own], values, f"-{marker}", color=colour, label=label)
        axes.set(xscale="log", yscale="log", xlabel="edges", ylabel=title)
        _plain_ticks(axes.yaxis)
        axes.grid(alpha=0.3)
    _legend(figure, panels)
    return figure


def _speedup(rows: list[dict], baseline: str, clock: str):
    """Draw how many times longer each method takes than the baseline, against the number of parts."""
    compared = {(row["graph"], row["parts"]): row[clock] for row in rows if row["method"] == baseline}
    others = [row for row in rows if row["method"] != baseline and compared.get((row["graph"], row["parts"]))]
    if not others:
        return None
    styles = _styles(row["family"] for row in others)
    figure, panels = _panels(list(dict.fromkeys(row["graph"] for row in others)))
    for graph, axes in panels.items():
        for method in dict.fromkeys(row["method"] for row in others if row["graph"] == graph):
            own = [row for row in others if (row["graph"], row["method"]) == (graph, method)]
            own.sort(key=lambda row: row["parts"])
            colour, marker = styles[own[0]["family"]]
            parts = [row["parts"] for row in own]
            ratios = [row[clock] / compared[graph, row["parts"]] for row in own]
            axes.plot(parts, ratios, f"-{marker}", color=colour, label=method)
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set(xscale="log", xlabel="parts", ylabel=f"{_LABELS[clock]} over {baseline}'s", title=graph)
        ticks = sorted({row["parts"] for row in others})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    _legend(figure, panels)
    return figure


def _grem_fig6(rows: list[dict], baseline: str, clock: str):
    """Draw Armada's Figure 6: cut against chunk size as a share of the edges, one panel a number of parts."""
    import json

    def share(row):
        return json.loads(row["options"]).get("chunk_edges_share")

    chunked = [row for row in rows if share(row) is not None]
    if not chunked:
        return None
    styles = _styles(row["family"] for row in chunked)
    figure, panels = _panels([f"{row['graph']}, {row['parts']} parts" for row in chunked])
    for title, axes in panels.items():
        here = [row for row in rows if f"{row['graph']}, {row['parts']} parts" == title]
        for family, (colour, marker) in styles.items():
            own = sorted((row for row in here if row["family"] == family and share(row)), key=share)
            line = "--" if own and own[0]["partitioner"] == GREEDY_EXPECTATION else f"-{marker}"
            shares, cuts = [100 * share(row) for row in own], [100 * row["edge_cut_ratio"] for row in own]
            axes.plot(shares, cuts, line, color=colour, label=family)
        for row in here:
            if row["method"] == baseline:
                axes.axhline(100 * row["edge_cut_ratio"], color="gray", linestyle=":", label=baseline)
        axes.set(xscale="log", xlabel="edges a chunk, % of all", ylabel="cut edges, %", title=title)
        _plain_ticks(axes.xaxis)
        axes.set_ylim(bottom=0)
    _legend(figure, panels)
    return figure


PLOTS: dict[str, Callable] = {
    "cut_seconds": _cut_seconds,
    "cut_memory": _cut_memory,
    "scaling": _scaling,
    "speedup": _speedup,
    "grem_fig6": _grem_fig6,
}


def _styles(families: Iterable[str]) -> dict[str, tuple]:
    """Return a colour and a marker for each name."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(families))
    colours = colormaps["tab20" if len(names) > 10 else "tab10"].colors
    return {name: (colours[i % len(colours)], _MARKERS[i % len(_MARKERS)]) for i, name in enumerate(names)}


def _panels(titles: Iterable[str]):
    """Return a figure and its axes by title, at most four a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titles = list(dict.fromkeys(titles))
    across = min(4, len(titles))
    down = math.ceil(len(titles) / across)
    figure = Figure(figsize=(4.2 * across + 2.2, 3.6 * down), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for spare in axes[len(titles) :]:
        spare.set_axis_off()
    return figure, dict(zip(titles, axes, strict=False))


def _plain_ticks(*scales) -> None:
    """Label logarithmic axes with plain numbers, at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in scales:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _legend(figure, panels: dict) -> None:
    """Put one legend for all panels to the right."""
    entries = {}
    for axes in panels.values():
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, line)
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize=8)
