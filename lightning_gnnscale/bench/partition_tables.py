"""The partitioner benchmark on the terminal: one table a graph, and geometric means by set of graphs."""

import math
from collections.abc import Iterable

from rich.box import SIMPLE
from rich.table import Table

EVERYTHING = "all graphs"


def graph_table(graph: str, rows: list[dict], baseline: str) -> Table:
    """Return one line per case, with its balances (nodes, edges, volume, train); a case that failed says why.

    Args:
        graph: Name of the graph.
        rows: Rows of this graph.
        baseline: Method that cuts are compared with.
    """
    size = next((f": {row['num_nodes']:,} nodes, {row['num_edges']:,} edges" for row in rows), "")
    table = Table(title=f"{graph}{size}", title_justify="left", box=SIMPLE)
    table.add_column("parts", justify="right")
    table.add_column("method")
    for name in ("cut", f"cut /\n{baseline}", "RF", "nodes", "edges", "volume", "train"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("s", "CPU-s", "Me/s", "peak\nMB", "bytes\na node"):
        table.add_column(name, justify="right", no_wrap=True)
    compared = {row["parts"]: row for row in rows if row["method"] == baseline}
    failed = []
    for row in rows:
        if row["error"]:
            failed.append(row)
            table.add_row(str(row["parts"]), row["method"], "[red]failed[/]")
            continue
        ratio = cut_of(row) / cut_of(compared[row["parts"]]) if _is_there(compared.get(row["parts"])) else None
        table.add_row(
            str(row["parts"]),
            row["method"] + (" *" if row["broken"] else ""),
            f"{row['edge_cut_ratio']:.4f}",
            _number(ratio, 3),
            _number(row["replication_factor"], 2),
            *(_number(row[f"{name}_balance"], 3) for name in ("node", "edge", "volume", "train")),
            _number(row["seconds"], 2),
            _number(row["cpu_seconds"], 2),
            _number(row["million_edges_per_s"], 2),
            _number(row["peak_bytes"], 1, 1e-6),
            _number(row["bytes_a_node"], 0),
        )
    reasons = dict.fromkeys(f"{row['method']}: {row['error']}" for row in failed)
    if any(row["broken"] for row in rows):
        reasons["* breaks a balance constraint"] = None
    table.caption, table.caption_justify = "\n".join(_escaped(reason) for reason in reasons) or None, "left"
    return table


def mean_rows(rows: list[dict], sets: dict[str, list], baseline: str, clock: str = "seconds") -> list[dict]:
    """Return geometric means of each method over the baseline, by set of graphs and over all.

    Args:
        rows: Rows of the benchmark.
        sets: Maps a name to a list of graphs.
        baseline: Method that the others are divided by.
        clock: Column that the time is taken from: "seconds" or "cpu_seconds".

    Only cases in which both methods succeeded count; a cut below one edge counts as one edge.

    Returns:
        One dict per set and method: set, method, cases, failed, broken (cases that broke a balance constraint), cut,
        replication, seconds, peak (ratios, None without a case), and the worst node balance.
    """
    compared = {(row["graph"], row["parts"]): row for row in rows if row["method"] == baseline}
    means = []
    everything = {row["graph"] for row in rows}
    whole = any(everything <= set(graphs) for graphs in sets.values())  # one set tells all that there is
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
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE)
    for name in ("set", "method"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "failed", "broken", "cut", "RF", "seconds", "peak", "worst node\nbalance"):
        table.add_column(name, justify="right")
    last = None
    for row in means:
        if last is not None and row["set"] != last:
            table.add_section()
        values = [_number(row[name], 3) for name in ("cut", "replication", "seconds", "peak", "worst_node_balance")]
        counts = [str(row[name]) for name in ("cases", "failed", "broken")]
        table.add_row(row["set"], row["method"], *counts, *values)
        last = row["set"]
    return table


def cut_of(row: dict) -> float:
    """Return the share of cut edges, at least one edge, so that a ratio of two exists."""
    return max(row["edge_cut_ratio"], 1 / max(1, row["num_edges"]))


def _is_there(row: dict | None) -> bool:
    return row is not None and not row["error"]


def _ratio_mean(pairs: list[tuple[dict, dict]], name: str) -> float | None:
    return _mean(row[name] / other[name] for row, other in pairs if row[name] and other[name])


def _mean(ratios: Iterable[float]) -> float | None:
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:.{digits}f}"


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
