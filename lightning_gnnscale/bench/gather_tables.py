"""Tables and plot of `gnnscale bench gather`."""

from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from ..placement.feature_buffer import TIERS


def speed_table(rows: list[dict], caption: str) -> Table:
    """Return the table of ways and their speeds."""
    table = Table(
        title="Gathering the rows of batches: medians of runs in turns", caption=caption, box=SIMPLE,
        title_justify="left",
    )  # fmt: skip
    table.add_column("on")
    table.add_column("way")
    for name in ("million\nrows/s", "GB/s", "share of\nbound", "time over\nplain", *TIERS):
        table.add_column(name, justify="right")
    for row in rows:
        over = row["time_over_plain"]
        tiers = (row.get(tier) for tier in TIERS)
        table.add_row(
            row["device"],
            row["way"],
            f"{row['rows_per_s'] / 1e6:.2f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['share_of_bound']:.0%}",
            "" if over is None else f"{over:.2f}",
            *("" if share is None else f"{share:.0%}" for share in tiers),
        )
    return table


def hits_table(rows: list[dict]) -> Table:
    """Return the table of caches and what they hit."""
    table = Table(title="Caches of rows that lie on no device", box=SIMPLE, title_justify="left")
    table.add_column("policy")
    for name in ("rows of\nall", "hits of\nfar reads", *TIERS, "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['cache_share']:.0%}",
            f"{row['hit_rate']:.1%}",
            *(f"{row[tier]:.0%}" for tier in TIERS),
            f"{row['seconds']:.2f}",
        )
    return table


def draw(path: Path, rows: list[dict]) -> None:
    """Draw the speed of each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.45 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([f"{row['device']}: {row['way']}" for row in rows], [row["gb_per_s"] for row in rows])
    axes.bar_label(bars, fmt="{:.1f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("GB of feature rows a second")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
