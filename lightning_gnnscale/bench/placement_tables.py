"""Tables and plot of the placement benchmark, from its rows alone."""

from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..placement.place import RULES
from .results import machine_line

PEERS = ("naive", "random", "degree", "metis")  # read each other's buffers and the same batches, like "rule"


def print_tables(console: Console, rows: list[dict], facts: Mapping) -> None:
    """Print one table for each alpha, and what rule wins or loses in the worst case."""
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "rule"))
    rules = [rule for rule in RULES if rule in ("rule", *methods)]
    for alpha in sorted({row["alpha"] for row in rows if row["alpha"] is not None}):
        table = Table(title=_title(alpha), caption=machine_line(facts), box=SIMPLE, title_justify="left")
        for name in ("graph", "devices", "buffer", "of", "rule", *methods, "less than\nnaive", "predicted"):
            table.add_column(name.replace("_", "\n"), justify="left" if name in ("graph", "devices", "of") else "right")
        worst = dict.fromkeys(rules, 0.0)
        for case in cases_of(rows):
            rule = rule_of(case, alpha)
            what = compared(case, alpha)
            value = cost(rule, alpha, what)
            others = {row["method"]: cost(row, alpha, what) for row in case if row["alpha"] in (None, alpha)}
            for rule_name in rules:
                behind = (others[rule_name] - others[name] for name in PEERS if name in others)
                worst[rule_name] = max(worst[rule_name], *behind, 0.0)
            naive = others.get("naive")
            table.add_row(
                rule["graph"],
                rule["devices"],
                f"{rule['buffer_share']:g}",
                what,
                f"{100 * value:.1f}",
                *(f"{100 * others[name]:.1f}" if name in others else "" for name in methods),
                f"{round(1 - value / naive, 2) + 0.0:.0%}" if naive else "",
                f"{100 * cost(rule, alpha, what, 'predicted_'):.1f}",
            )
        console.print(table)
        for rule_name, points in worst.items():
            console.print(
                f"alpha {alpha:g}: {rule_name} loses at most {100 * points:.2f} points against {', '.join(PEERS)}"
            )
    gap = max(abs(row[tier] - row[f"predicted_{tier}"]) for row in rows if not row["method"].endswith("_local")
              for tier in ("local", "peer", "host"))  # fmt: skip
    console.print(
        f"predicted and counted shares differ by at most {100 * gap:.1f} points (batches of all devices alike)"
    )


def cases_of(rows: list[dict]) -> list[list[dict]]:
    """Group rows by graph, devices and buffer."""
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        cases.setdefault((row["graph"], row["devices"], row["buffer_share"]), []).append(row)
    return list(cases.values())


def rule_of(case: list[dict], alpha: float, method: str = "rule") -> dict:
    """Return the row of a rule for one alpha."""
    return next(row for row in case if row["method"] == method and row["alpha"] == alpha)


def compared(case: list[dict], alpha: float) -> str:
    """Return what a case is judged by: host reads, peer reads where all rows are on the devices, or the cost."""
    if alpha:
        return "cost"
    return "host" if rule_of(case, alpha)["host"] > 0 else "peer"


def cost(row: Mapping, alpha: float, what: str, prefix: str = "") -> float:
    """Return a share of reads, or the cost of a read in host reads; prefix "predicted_" for what was predicted.

    Where peers are free (alpha 0) and all rows fit, a host read of a placement that leaves rows out counts as a peer's.
    """
    host, peer = row[f"{prefix}host"], row[f"{prefix}peer"]
    return {"host": host, "peer": peer + host, "cost": host + alpha * peer}[what]


def draw(path: Path, rows: list[dict]) -> None:
    """Draw one panel a graph: host reads of each method at the smallest alpha, bars grouped by devices and buffer."""
    from matplotlib.figure import Figure

    alpha = min(row["alpha"] for row in rows if row["alpha"] is not None)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    figure = Figure(figsize=(12, 2.6 * len(graphs)), layout="constrained")
    panels = figure.subplots(len(graphs), 1, squeeze=False)[:, 0]
    for axes, graph in zip(panels, graphs, strict=True):
        cases = [case for case in cases_of(rows) if case[0]["graph"] == graph]
        width = 0.8 / len(methods)
        for number, method in enumerate(methods):
            chosen = [rule_of(case, alpha, method) if method in RULES else _row(case, method) for case in cases]
            places = [place + (number - len(methods) / 2) * width for place in range(len(cases))]
            heights = [100 * row["host"] for row in chosen]
            errors = [100 * row["host_std"] for row in chosen]
            colour = "black" if method == "rule" else None
            axes.bar(places, heights, width, yerr=errors, label=method, color=colour, error_kw={"linewidth": 0.6})
        labels = [f"{case[0]['devices']}\n{case[0]['buffer_share']:g}" for case in cases]
        axes.set_xticks(range(len(cases)), labels, fontsize=8)
        axes.set(ylabel="host reads, %", title=graph)
    panels[-1].set_xlabel("devices (groups), rows of a buffer over all rows")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(methods), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _row(case: list[dict], method: str) -> dict:
    return next(row for row in case if row["method"] == method)


def _title(alpha: float) -> str:
    if alpha == 0:
        return "reads that miss, %, peers free: of the host's memory; of peers where all rows fit on the devices"
    return f"cost of a read, % of a host read, a peer's read {alpha:g}"
