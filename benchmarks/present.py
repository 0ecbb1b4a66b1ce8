"""The one presenter of all benchmarks: tables from specs of columns, means over seeds, and a few forms of plots."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MARKERS = "osD^vP*X<>ph"
LEFT, RIGHT = "<", ">"
WIDTH = 150  # of tables where the terminal is narrower, or none


def tell(what: Any, **how: Any) -> None:
    """Print a table or a line."""
    Console(width=max(Console().width, WIDTH)).print(what, **how)


def table(
    rows: Iterable[Mapping],
    columns: Mapping[str, tuple[str, str | Callable[[Any], str]]],
    title: str,
    caption: str | None = None,
    section: str | None = None,
) -> Table:
    """Return a table with one line per row; what is None or not there stays empty.

    Args:
        rows: Rows by column.
        columns: Maps a column to its head and to its form: a format such as ".2f", or a function of the value that
            returns text. Columns of the form `LEFT` are text, the others are aligned to the right.
        title, caption: Lines above and below.
        section: Column between whose values the table has a gap.
    """
    out = Table(title=title, caption=caption, box=SIMPLE, title_justify="left", caption_justify="left")
    for head, form in columns.values():
        out.add_column(head, justify="left" if form == LEFT else "right", no_wrap=form == LEFT)
    rows, last = list(rows), None
    for number, row in enumerate(rows):
        if section and number and row[section] != last:
            out.add_section()
        last = row[section] if section else None
        out.add_row(*(shown(row.get(name), form) for name, (_, form) in columns.items()))
    return out


def show(rows: Sequence[Mapping], columns: Mapping[str, tuple], title: str, caption: str | None = None, **more) -> None:
    """Print a table as `table` makes it, if there are rows."""
    if rows:
        tell(table(rows, columns, title, caption, **more))


def shown(value: Any, form: str | Callable[[Any], str]) -> str:
    """Return a value in a form, as `table` takes it."""
    if value is None or value == "":
        return ""
    return escape(form(value) if callable(form) else format(str(value) if form in (LEFT, RIGHT) else value, form))


def plain_columns(rows: Sequence[Mapping], left: Iterable[str] = (), hidden: Iterable[str] = ()) -> dict:
    """Return columns for `table` that show the rows as they are, under their own names."""
    names = dict.fromkeys(name for row in rows for name in row if name not in hidden)
    return {name: (name.replace("_", " "), LEFT if name in left else RIGHT) for name in names}


def grouped(rows: Iterable[Mapping], *names: str) -> dict[tuple, list]:
    """Return rows by their values of some columns, in the order of their first rows."""
    found: dict[tuple, list] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def average(rows: Sequence[Mapping], name: str, digits: int | None = None, factor: float = 1.0) -> float | None:
    """Return the rounded mean of a column times a factor; None without rows, or where one lacks it."""
    values = [row.get(name) for row in rows]
    if not values or any(value is None or value == "" for value in values):
        return None
    found = factor * mean(map(float, values))
    return found if digits is None else round(found, digits)


def mean_of(num_seeds: int) -> str:
    """Return the words on seeds for a table's title."""
    return f"mean of {num_seeds} seeds" if num_seeds > 1 else "one seed"


def panels(titles: Iterable[str], across: int = 4, size: tuple[float, float] = (4.2, 3.6), beside: float = 2.2):
    """Return a figure and its axes by title.

    Args:
        titles: One a panel; the same one twice is one.
        across: Largest number of panels side by side.
        size: Inches of one panel.
        beside: Inches to the right of all, as for a legend.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titles = list(dict.fromkeys(titles))
    across = min(across, len(titles))
    down = -(-len(titles) // across)
    figure = Figure(figsize=(size[0] * across + beside, size[1] * down), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for spare in axes[len(titles) :]:
        spare.set_axis_off()
    for title, one in zip(titles, axes, strict=False):
        one.set_title(title)
    return figure, dict(zip(titles, axes, strict=False))


def save(figure, path: str | os.PathLike) -> Path:
    """Write a figure as PNG."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def bars(axes, labels: Sequence[str], values: Sequence[float], xlabel: str, form: str = "{:,.0f}") -> None:
    """Draw horizontal bars with their values, the first on top."""
    axes.bar_label(axes.barh(labels, values), fmt=form, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(xlabel)


def draw_bars(path: str | os.PathLike, rows: Sequence[Mapping], label: str, column: str, xlabel: str, **more) -> None:
    """Draw one panel of `bars`, one a row, if there are any; `label` is a format of the row's columns."""
    if rows:
        figure, found = panels([""], size=(9, 0.5 * len(rows) + 1.5), beside=0)
        bars(found[""], [label.format(**row) for row in rows], [row[column] for row in rows], xlabel, **more)
        save(figure, path)


def lines(
    axes, rows: Iterable[Mapping], x: str, y: str, style: str = "-o", note: str | None = None, **more: Any
) -> None:
    """Draw one line, or points, through rows in the order of x; rows that lack a value are left out.

    Args:
        axes: Axes of the plot.
        rows: Rows by column.
        x, y: Columns of the coordinates.
        style: Line and marker, as matplotlib writes them; a marker alone draws points, "" leaves both to `more`.
        note: Column whose value is printed beside each point.
        more: Further options of matplotlib's `plot`, such as label and color.
    """
    own = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    own.sort(key=lambda row: row[x])
    axes.plot([row[x] for row in own], [row[y] for row in own], *[style] * bool(style), **more)
    for row in own if note else ():
        place = (row[x], row[y])
        axes.annotate(shown(row[note], "g" if isinstance(row[note], float) else LEFT), place, fontsize=7, xytext=(3, 4),
                      textcoords="offset points")  # fmt: skip


def styles(names: Iterable[str]) -> dict[str, dict]:
    """Return a colour and a marker for each name, as `plot` takes them."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(names))
    colours = colormaps["tab20" if len(names) > 10 else "tab10"].colors
    return {n: {"color": colours[i % len(colours)], "marker": MARKERS[i % len(MARKERS)]} for i, n in enumerate(names)}


def ticks(axes, values: Iterable[Any]) -> None:
    """Label the x axis at these values, and nowhere else."""
    values = sorted(set(values))
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def plain_ticks(*scales) -> None:
    """Label logarithmic axes with plain numbers, at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in scales:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def legend(figure, found: Mapping[str, Any], loc: str = "outside right upper", **more: Any) -> None:
    """Put one legend for all panels beside them; each label appears once."""
    entries = {}
    for axes in found.values():
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, line)
    figure.legend(entries.values(), entries.keys(), loc=loc, fontsize=8, **more)
