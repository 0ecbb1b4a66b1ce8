"""Table and plot of the grouping benchmark."""

from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

CASE = ("graph", "fanouts", "batch_size")


def add_cuts(rows: list[dict]) -> None:
    """Add to each row how many times fewer bytes it has than batches sent alone without a cache."""
    alone = {_case(row): row for row in rows if row["group"] == 1 and row["cache_share"] == 0}
    for row in rows:
        row["cut"] = round(alone[_case(row)]["bytes"] / row["bytes"], 3)
        row["row_cut"] = round(alone[_case(row)]["row_bytes"] / max(1, row["row_bytes"]), 3)


def table(rows: list[dict], caption: str) -> Table:
    """Return one line a case and cache, with groups side by side: bytes a batch, and the cut."""
    groups = sorted({row["group"] for row in rows})
    out = Table(title="Bytes that travel for a batch, and times fewer than alone without a cache", caption=caption)
    out.box, out.title_justify = SIMPLE, "left"
    for name in ("graph", "fan-outs", "batch", "cache"):
        out.add_column(name, justify="left" if name in ("graph", "fan-outs") else "right")
    for group in groups:
        out.add_column(f"{group} a group", justify="right")
    cells = {(*_line(row), row["group"]): f"{_bytes(row['bytes'])} {row['cut']:.2f}x" for row in rows}
    for line in dict.fromkeys(_line(row) for row in rows):
        graph, fanouts, batch, share, policy = line
        cache = f"{share:.0%} {policy}" if share else "none"
        out.add_row(graph, fanouts, str(batch), cache, *(cells.get((*line, group), "") for group in groups))
    return out


def draw(path: Path, rows: list[dict]) -> None:
    """Draw the cut against batches a group: a panel a graph and fan-outs, a line a batch size and cache."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["graph"], row["fanouts"]) for row in rows))
    figure = Figure(figsize=(4.6 * len(panels), 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        own = [row for row in rows if (row["graph"], row["fanouts"]) == panel]
        sizes = list(dict.fromkeys(row["batch_size"] for row in own))
        caches = list(dict.fromkeys((row["cache_share"], row["policy"]) for row in own))
        for size, color in zip(sizes, _colors(len(sizes)), strict=True):
            for (share, policy), style in zip(caches, _styles(len(caches)), strict=True):
                line = [row for row in own if (row["batch_size"], row["cache_share"]) == (size, share)]
                line = sorted((row for row in line if row["policy"] == policy), key=lambda row: row["group"])
                label = f"batch {size}" + (f", cache {share:.0%} {policy}" if share else "")
                axes.plot([row["group"] for row in line], [row["cut"] for row in line], style, color=color, label=label)
        axes.axhline(1.5, color="0.6", linewidth=0.8)
        axes.set(xlabel="batches a group", title=f"{panel[0]}, {panel[1]}", xscale="log")
        axes.set_xticks(ticks := sorted({row["group"] for row in own}), [str(tick) for tick in ticks])
        axes.minorticks_off()
    figure.axes[0].set_ylabel("times fewer bytes a batch")
    figure.axes[-1].legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _case(row: dict) -> tuple:
    return tuple(row[name] for name in CASE)


def _line(row: dict) -> tuple:
    return (*_case(row), row["cache_share"], row["policy"])


def _bytes(number: float) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e6 else f"{number / 1e3:.0f} kB"


def _colors(number: int) -> list[str]:
    return [f"C{i}" for i in range(number)]


def _styles(number: int) -> list[str]:
    styles = ["o-", "s--", "^-.", "v:", "d--", "x-.", "+:"]
    return [styles[i % len(styles)] for i in range(number)]
