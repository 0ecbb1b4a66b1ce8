"""The partitioner benchmark from its rows: one table a graph, geometric means by set of graphs, and plots."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean

from rich.markup import escape
from rich.table import Table

from .partition_cases import GREEDY_EXPECTATION, PEERS
from .present import LEFT, grouped, legend, lines, panels, plain_ticks, save, styles, table, ticks

EVERYTHING = "all graphs"
_QUALITY = ("edge_cut_ratio", "replication_factor", "node_balance", "edge_balance", "volume_balance", "train_balance")
_MORE = ("val_balance", "test_balance", "components", "largest_part_bytes")
_TIMES = ("seconds", "seconds_median", "cpu_seconds", "million_edges_per_s")
MEASURED = ("num_nodes", "num_edges", *_QUALITY, *_MORE, *_TIMES, "peak_bytes", "bytes_a_node", "resident_bytes")
CLOCKS = {"seconds": "seconds", "cpu_seconds": "CPU seconds"}
_COLUMNS = {
    "parts": ("parts", ">"),
    "method": ("method", LEFT),
    "cut": ("cut", ">"),
    "ratio": ("cut /\n{}", ".3f"),
    "replication_factor": ("RF", ".2f"),
    "node_balance": ("nodes", ".3f"),
    "edge_balance": ("edges", ".3f"),
    "volume_balance": ("volume", ".3f"),
    "train_balance": ("train", ".3f"),
    "seconds": ("s", ".2f"),
    "cpu_seconds": ("CPU-s", ".2f"),
    "million_edges_per_s": ("Me/s", ".2f"),
    "peak_bytes": ("peak\nMB", lambda value: f"{value / 1e6:.1f}"),
    "bytes_a_node": ("bytes\na node", ".0f"),
}
_MEANS = {
    "set": ("set", LEFT),
    "method": ("method", LEFT),
    "cases": ("cases", ">"),
    "failed": ("failed", ">"),
    "broken": ("broken", ">"),
    "cut": ("cut", ".3f"),
    "replication": ("RF", ".3f"),
    "seconds": ("seconds", ".3f"),
    "peak": ("peak", ".3f"),
    "worst_node_balance": ("worst node\nbalance", ".3f"),
}


def graph_table(graph: str, rows: list[dict], baseline: str) -> Table:
    """Return one line per case, with its balances (nodes, edges, volume, train); a case that failed says why."""
    size = next((f": {row['num_nodes']:,} nodes, {row['num_edges']:,} edges" for row in rows), "")
    compared = {row["parts"]: row for row in rows if row["method"] == baseline and not row["error"]}
    shown, reasons = [], {}
    for row in rows:
        if row["error"]:
            reasons[f"{row['method']}: {row['error']}"] = None
            shown.append({"parts": row["parts"], "method": row["method"], "cut": "failed"})
            continue
        other = compared.get(row["parts"])
        ratio = None if other is None else cut_of(row) / cut_of(other)
        method = row["method"] + (" *" if row["broken"] else "")
        shown.append(row | {"method": method, "cut": f"{row['edge_cut_ratio']:.4f}", "ratio": ratio})
    if any(row["broken"] for row in rows):
        reasons["* breaks a balance constraint"] = None
    columns = _COLUMNS | {"ratio": (f"cut /\n{baseline}", ".3f")}
    return table(shown, columns, f"{graph}{size}", "\n".join(map(escape, reasons)) or None)


def mean_rows(rows: list[dict], sets: dict[str, list], baseline: str, clock: str = "seconds") -> list[dict]:
    """Return geometric means of each method over the baseline, by set of graphs and over all.

    Only cases in which both methods succeeded count; a cut below one edge counts as one edge. The time is taken from
    the column `clock`.

    Returns:
        One dict per set and method: set, method, cases, failed, broken (cases that broke a balance constraint), cut,
        replication, seconds, peak (ratios, None without a case), and the worst node balance.
    """
    compared = {(row["graph"], row["parts"]): row for row in rows if row["method"] == baseline}
    means = []
    everything = {row["graph"] for row in rows}
    whole = any(everything <= set(graphs) for graphs in sets.values())  # one set covers all graphs
    for name, graphs in {**sets, **({} if whole else {EVERYTHING: everything})}.items():
        chosen = [row for row in rows if row["graph"] in graphs]
        for method in dict.fromkeys(row["method"] for row in chosen):
            own = [row for row in chosen if row["method"] == method]
            pairs = [(row, compared.get((row["graph"], row["parts"]))) for row in own]
            pairs = [(row, other) for row, other in pairs if _is_there(row) and _is_there(other)]
            balances = [row["node_balance"] for row in own if row["node_balance"] is not None]
            means.append(
                {
                    "set": name,
                    "method": method,
                    "cases": len(pairs),
                    "failed": sum(bool(row["error"]) for row in own),
                    "broken": sum(bool(row["broken"]) for row in own),
                    "cut": _mean(cut_of(row) / cut_of(other) for row, other in pairs),
                    "replication": _ratio_mean(pairs, "replication_factor"),
                    "seconds": _ratio_mean(pairs, clock),
                    "peak": _ratio_mean(pairs, "peak_bytes"),
                    "worst_node_balance": max(balances, default=None),
                }
            )
    return means


def means_table(means: list[dict], baseline: str, caption: str) -> Table:
    """Return the means as a table; sets one below the other."""
    title = f"geometric means over {baseline} (cases in which both succeeded)"
    return table(means, _MEANS, title, caption, section="set")


def cut_of(row: dict) -> float:
    """Return the share of cut edges, at least one edge, so that a ratio of two exists."""
    return max(row["edge_cut_ratio"], 1 / max(1, row["num_edges"]))


def _is_there(row: dict | None) -> bool:
    return row is not None and not row["error"]


def _ratio_mean(pairs: list[tuple[dict, dict]], name: str) -> float | None:
    return _mean(row[name] / other[name] for row, other in pairs if row[name] and other[name])


def _mean(ratios: Iterable[float]) -> float | None:
    ratios = list(ratios)
    return geometric_mean(ratios) if ratios else None


def draw_plots(output_dir: Path, names: list[str], rows: list[dict], baseline: str, clock: str) -> list[Path]:
    """Draw each plot of `PLOTS` that has something to show, and return the files; rows that failed are left out."""
    good = [row for row in rows if not row["error"]]
    figures = {name: PLOTS[name](good, baseline, clock) for name in names if good}
    return [save(figure, output_dir / f"{name}.png") for name, figure in figures.items() if figure is not None]


def _cut_seconds(rows: list[dict], baseline: str, clock: str):
    return _cut_against(rows, clock, 1.0, CLOCKS[clock])


def _cut_memory(rows: list[dict], baseline: str, clock: str):
    return _cut_against(rows, "peak_bytes", 1e-6, "peak memory, MB")


def _cut_against(rows: list[dict], column: str, factor: float, label: str):
    """Draw one panel a graph: cut against a cost; what METIS and KaMinPar cut is a line across for each part count."""
    rows = [row | {"cost": row[column] * factor, "cut": cut_of(row)} for row in rows if row[column]]
    if not rows:
        return None
    looks = styles(row["family"] for row in rows)
    figure, found = panels(row["graph"] for row in rows)
    for (graph, family), own in grouped(rows, "graph", "family").items():
        axes = found[graph]
        lines(axes, own, "cost", "cut", "", "parts", label=family, linestyle="", markersize=5, **looks[family])
        for row in own:
            if row["partitioner"] in PEERS:
                axes.axhline(row["cut"], color=looks[family]["color"], linewidth=0.8, linestyle="--", alpha=0.7)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="cut edges over all")
        plain_ticks(axes.xaxis, axes.yaxis)
    legend(figure, found)
    return figure


def _scaling(rows: list[dict], baseline: str, clock: str):
    """Draw seconds and peak memory against edges, log-log, one line a method and number of parts."""
    rows = [row | {"peak_mb": (row["peak_bytes"] or 0) / 1e6} for row in rows if row[clock]]
    if not rows:
        return None
    looks = styles(row["family"] for row in rows)
    several = len({row["parts"] for row in rows}) > 1
    figure, found = panels([CLOCKS[clock], "peak memory, MB"])
    for (title, axes), column in zip(found.items(), (clock, "peak_mb"), strict=True):
        for (method, num_parts), own in grouped(rows, "method", "parts").items():
            label = f"{method}, {num_parts} parts" if several else method
            lines(axes, own, "num_edges", column, "-", label=label, **looks[own[0]["family"]])
        axes.set(xscale="log", yscale="log", xlabel="edges", ylabel=title)
        plain_ticks(axes.yaxis)
        axes.grid(alpha=0.3)
    legend(figure, found)
    return figure


def _speedup(rows: list[dict], baseline: str, clock: str):
    """Draw how many times longer each method takes than the baseline, against the number of parts."""
    compared = {(row["graph"], row["parts"]): row[clock] for row in rows if row["method"] == baseline}
    others = [row for row in rows if row["method"] != baseline and row[clock]]
    others = [row for row in others if compared.get((row["graph"], row["parts"]))]
    others = [row | {"times": row[clock] / compared[row["graph"], row["parts"]]} for row in others]
    if not others:
        return None
    looks = styles(row["family"] for row in others)
    figure, found = panels(row["graph"] for row in others)
    for (graph, method), own in grouped(others, "graph", "method").items():
        lines(found[graph], own, "parts", "times", "-", label=method, **looks[own[0]["family"]])
    for axes in found.values():
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set(xscale="log", xlabel="parts", ylabel=f"{CLOCKS[clock]} over {baseline}'s")
        ticks(axes, (row["parts"] for row in others))
        axes.set_ylim(bottom=0)
    legend(figure, found)
    return figure


def _grem_fig6(rows: list[dict], baseline: str, clock: str):
    """Draw Armada's Figure 6: cut against chunk size as a share of the edges, one panel a number of parts."""
    rows = [
        row
        | {
            "panel": f"{row['graph']}, {row['parts']} parts",
            "share": 100 * (json.loads(row["options"]).get("chunk_edges_share") or 0) or None,
            "cut": 100 * row["edge_cut_ratio"],
        }
        for row in rows
    ]
    chunked = [row for row in rows if row["share"]]
    if not chunked:
        return None
    looks = styles(row["family"] for row in chunked)
    figure, found = panels(row["panel"] for row in chunked)
    for (title, family), own in grouped(chunked, "panel", "family").items():
        look = looks[family]
        if own[0]["partitioner"] == GREEDY_EXPECTATION:
            look = {"color": look["color"], "linestyle": "--"}
        lines(found[title], own, "share", "cut", "", label=family, **{"linestyle": "-"} | look)
    for title, axes in found.items():
        for row in rows:
            if (row["panel"], row["method"]) == (title, baseline):
                axes.axhline(row["cut"], color="gray", linestyle=":", label=baseline)
        axes.set(xscale="log", xlabel="edges a chunk, % of all", ylabel="cut edges, %")
        plain_ticks(axes.xaxis)
        axes.set_ylim(bottom=0)
    legend(figure, found)
    return figure


PLOTS: dict[str, Callable] = {
    "cut_seconds": _cut_seconds,
    "cut_memory": _cut_memory,
    "scaling": _scaling,
    "speedup": _speedup,
    "grem_fig6": _grem_fig6,
}
