"""The figures of a report, as plain values that plotly draws; colours of text and lines are the page's."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .run_record import TRAINING, RunRecord

Figure = dict[str, Any]

_ACTIVITIES = {
    "wait": ("wait for a batch", "#d1495b"),
    "ranks": ("wait for other processes", "#f2a3a9"),
    "transfer": ("transfer", "#edae49"),
    "read": ("read rows", "#9a6a3a"),
    "sample": ("sample", "#00a5a8"),
    "forward": ("forward", "#3d6fb6"),
    "backward": ("backward", "#7fa8dc"),
    "update": ("update weights", "#57a773"),
    "average": ("average", "#9b6fc0"),
    "exchange": ("exchange rows", "#c77dbb"),
    "validation": ("validation", "#b9b44a"),
    "save": ("save checkpoints", "#6b7f86"),
    "other": ("other", "#9aa0a6"),
}
NAMES = {activity: name for activity, (name, _) in _ACTIVITIES.items()}
COLORS = {activity: color for activity, (_, color) in _ACTIVITIES.items()}
RUN_COLORS = ("#3d6fb6", "#d1495b", "#57a773", "#edae49", "#9b6fc0", "#00a5a8", "#9a6a3a", "#9aa0a6")
MOST_RANKS = 8
_SLIGHT = 0.002  # smaller shares are not drawn
_MOST_NUMBERS = 12  # parts up to which a matrix shows its numbers
_SHOWN = 1000  # runs of points of a curve, about one a pixel


def timeline(run: RunRecord, which: str) -> Figure | None:
    """The "first" or "last" epoch over time: what each rank's training thread did, and what was prepared meanwhile."""
    told = run.of("timeline")
    if not told:
        return None
    epochs = sorted({event["epoch"] for event in told})
    epoch = epochs[0 if which == "first" else -1]
    chosen = {(event["rank"], event["lane"]): event for event in told if event["epoch"] == epoch}
    ranks = sorted({rank for rank, _ in chosen})[:MOST_RANKS]
    lanes = [(rank, lane) for rank in ranks for lane in ("training", "beside") if (rank, lane) in chosen]
    data, layout = [], {}
    heights = [1.0 if lane == "training" else 0.6 for _, lane in lanes]
    gaps = [0.18 if lane == "training" else 0.06 for _, lane in lanes]  # above each
    unit, top = 1.0 / (sum(heights) + sum(gaps)), 1.0
    for number, (rank, lane) in enumerate(lanes, start=1):
        event, axis = chosen[rank, lane], "" if number == 1 else str(number)
        top -= gaps[number - 1] * unit
        bottom = max(top - heights[number - 1] * unit, 0.0)
        busy = [sum(bins) for bins in zip(*event["by_time"].values(), strict=True)]
        width = event["bin_s"]
        high = max([*(seconds / width for seconds in busy), 1.0])
        layout[f"yaxis{axis}"] = {
            "domain": [bottom, top],
            "range": [0, 1.0 if lane == "training" else high],
            "tickvals": [0.5 if lane == "training" else high / 2],
            "ticktext": [f"rank {rank}" if lane == "training" else "beside"],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        }
        top = bottom
        for activity in TRAINING:
            bins = event["by_time"].get(activity)
            if not bins or sum(bins) < _SLIGHT * sum(busy):
                continue
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [round(bin_number * width, 4) for bin_number in range(len(bins) + 1)],
                    "y": [round(seconds / width, 3) for seconds in (*bins, bins[-1])],
                    "stackgroup": f"{rank}-{lane}",
                    "line": {"shape": "hv", "width": 0},
                    "fillcolor": COLORS[activity],
                    "name": NAMES[activity],
                    "yaxis": f"y{axis}",
                    "hovertemplate": f"{NAMES[activity]}, %{{x:.3f}} s<extra>rank {rank}</extra>",
                }
            )
    layout["xaxis"] = {"title": {"text": f"seconds of epoch {epoch}"}, "anchor": f"y{len(lanes)}" if lanes[1:] else "y"}
    return {"data": data, "layout": layout, "height": int(110 + 62 * sum(heights) + 20 * len(ranks))}


def epoch_seconds(run: RunRecord) -> Figure | None:
    """Seconds of every epoch by activity, means over the ranks."""
    epochs = sorted(run.epochs)
    if len(epochs) < 2:
        return None
    data, longest = [], max(event["seconds"] for event in run.warm_epochs)
    for activity in TRAINING:
        means = [
            sum(event["training"].get(activity, 0.0) for event in run.epochs[epoch]) / len(run.epochs[epoch])
            for epoch in epochs
        ]
        if max(means) >= _SLIGHT * longest:
            data.append(_bars(epochs, means, NAMES[activity], COLORS[activity]))
    return _by_epoch(data, "seconds", 280)


def seconds_by_run(runs: Sequence[RunRecord]) -> Figure | None:
    """Seconds of a mean epoch by activity, one bar a run."""
    timed = [run for run in runs if run.epochs]
    if not timed:
        return None
    names = [run.label for run in timed]
    data = []
    for activity in TRAINING:
        seconds = [run.shares.get(activity, 0.0) * (run.epoch_seconds or 0.0) for run in timed]
        if max(seconds) >= _SLIGHT * max(run.epoch_seconds or 0.0 for run in timed):
            data.append(_bars_across(names, seconds, NAMES[activity], COLORS[activity]))
    layout = {"barmode": "stack", "xaxis": _titled("seconds of an epoch"), "yaxis": _FROM_THE_TOP}
    return {"data": data, "layout": layout, "height": 150 + 42 * len(timed)}


_FROM_THE_TOP = {"autorange": "reversed", "automargin": True}


def _titled(text: str, **more: Any) -> dict:
    """Return an axis with a title."""
    return {"title": {"text": text}, **more}


def _bars(x: Sequence, y: Sequence[float | None], name: str, color: str, digits: int = 4) -> dict:
    heights = [value if value is None else round(value, digits) for value in y]
    return {"type": "bar", "x": list(x), "y": heights, "name": name, "marker": {"color": color}}


def _bars_across(y: Sequence, x: Sequence[float | None], name: str, color: str, digits: int = 4) -> dict:
    bars = _bars(y, x, name, color, digits)
    return bars | {"orientation": "h", "x": bars["y"], "y": bars["x"]}


def _color(number: int) -> str:
    return RUN_COLORS[number % len(RUN_COLORS)]


def _by_epoch(data: list[dict], unit: str, height: int) -> Figure:
    """Return the figure of stacked bars by epoch; a first epoch that compiles is cut at the top, with a note."""
    heights = [sum(bars) for bars in zip(*(trace["y"] for trace in data), strict=True)]
    axis = _titled(unit, rangemode="tozero")
    layout = {"barmode": "stack", "bargap": 0.1, "xaxis": _titled("epoch"), "yaxis": axis}
    figure: Figure = {"data": data, "layout": layout, "height": height}
    most = max(heights[1:], default=0.0)
    if most and heights[0] > 3 * most:
        axis["range"] = [0, 1.25 * most]
        first = f"{heights[0]:,.0f}" if heights[0] >= 100 else f"{heights[0]:.3g}"
        figure["note"] = f"the first one, {first} {unit.split(',')[0]}, is cut at the top"
    return figure


def thinned(values: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return no more points of a curve than a picture shows: the ends, and of each run of points the extremes."""
    if len(values) <= 2 * _SHOWN:
        return values
    size, kept = -(-len(values) // _SHOWN), {0, len(values) - 1}
    for begin in range(0, len(values), size):
        run = range(begin, min(begin + size, len(values)))
        kept |= {min(run, key=lambda at: values[at][1]), max(run, key=lambda at: values[at][1])}
    return [values[at] for at in sorted(kept)]


def curves(runs: Sequence[RunRecord], losses: bool) -> Figure | None:
    """Metrics by epoch, of all runs: the losses, or all others."""
    names = sorted({name for run in runs for name in run.curves if ("loss" in name) == losses})
    if not names:
        return None
    data = []
    for number, run in enumerate(runs):
        for place, name in enumerate(names):
            values = run.curves.get(name)
            if not values:
                continue
            values = thinned(values)
            color = _color(number if runs[1:] else place)
            dash = ("solid", "dot", "dash", "dashdot")[place % 4] if runs[1:] else "solid"
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(values) < 40 else "lines",
                    "x": [epoch for epoch, _ in values],
                    "y": [value for _, value in values],
                    "name": f"{run.label}: {name}" if runs[1:] else name,
                    "line": {"color": color, "dash": dash, "width": 2},
                    "marker": {"size": 5},
                }
            )
    return {"data": data, "layout": {"xaxis": _titled("epoch")}, "height": 300}


def memory(runs: Sequence[RunRecord]) -> Figure | None:
    """Peak of memory by stage, measured and predicted."""
    rows = [(run, row) for run in runs for row in run.stages]
    if not rows:
        return None
    stages = list(dict.fromkeys(row["stage"] for _, row in rows))
    data = []
    for number, run in enumerate(runs):
        color = _color(number)
        of_run = {row["stage"]: row for row in run.stages}
        name = f"{run.label}: " if runs[1:] else ""
        measured = [of_run[stage]["peak_bytes"] / 2**30 if stage in of_run else None for stage in stages]
        data.append(_bars_across(stages, measured, f"{name}measured", color, digits=9) | {"offsetgroup": str(number)})
        predicted = [of_run.get(stage, {}).get("predicted_bytes") for stage in stages]
        if any(predicted):
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "y": stages,
                    "x": [value / 2**30 if value else None for value in predicted],
                    "name": f"{name}predicted",
                    "offsetgroup": str(number),
                    "marker": {"symbol": "line-ns", "size": 20, "line": {"width": 3, "color": "#d98324"}},
                }
            )
    layout = {"barmode": "group", "scattermode": "group", "yaxis": _FROM_THE_TOP}
    most = max(max(row["peak_bytes"], row.get("predicted_bytes") or 0) for _, row in rows) / 2**30
    layout["xaxis"] = _titled("GiB, all processes together", range=[0, 1.06 * most or 1.0])
    return {"data": data, "layout": layout, "height": 130 + 34 * len(stages) * max(1, len(runs))}


def part_sizes(parts: dict) -> Figure | None:
    """Nodes, halo and training nodes of each part."""
    if not parts.get("nodes"):
        return None
    names = [str(part) for part in parts["parts"]]
    data = []
    for key, name, color in (("nodes", "own nodes", "#3d6fb6"), ("halo", "halo, read beside them", "#7fa8dc")):
        if parts.get(key):
            data.append(_bars(names, parts[key], name, color))
    if parts.get("train"):
        marker = {"color": "#d1495b", "size": 9, "symbol": "diamond"}
        trace = {"type": "scatter", "mode": "markers", "name": "training nodes"}
        data.append(trace | {"x": names, "y": parts["train"], "marker": marker})
    layout = {"barmode": "stack", "xaxis": _titled("part", type="category"), "yaxis": _titled("nodes")}
    return {"data": data, "layout": layout, "height": 300}


def cut_matrix(parts: dict) -> Figure | None:
    """Share of the edges into each part that come from each part."""
    if not parts.get("edges") or len(parts["edges"]) < 2:
        return None
    shares = [[count / max(sum(row), 1) for count in row] for row in parts["edges"]]
    figure = _matrix(parts["parts"], parts["parts"], shares, "from part", "into part")
    # A part's own edges would hide the others.
    others = [share for at, row in enumerate(shares) for place, share in enumerate(row) if place != at]
    figure["data"][0] |= {"zmin": 0, "zmax": max([*others, 1e-6])}
    return figure


def label_matrix(parts: dict) -> Figure | None:
    """Share of each label in each part."""
    if not parts.get("label_counts"):
        return None
    shares = [[count / max(sum(row), 1) for count in row] for row in parts["label_counts"]]
    return _matrix(parts.get("labels") or [], parts["parts"], shares, "label", "part")


def _matrix(columns: list, rows: list, shares: list[list[float]], across: str, down: str) -> Figure:
    percent = [[round(100 * share, 2) for share in row] for row in shares]
    trace = {
        "type": "heatmap",
        "x": [str(one) for one in columns],
        "y": [str(one) for one in rows],
        "z": shares,
        "customdata": percent,
        "hovertemplate": f"{across} %{{x}}, {down} %{{y}}: %{{customdata}}%<extra></extra>",
        "colorscale": "theme",
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
    }
    if max(len(rows), len(columns)) <= _MOST_NUMBERS:
        trace |= {"text": [[f"{value:.3g}" for value in row] for row in percent], "texttemplate": "%{text}"}
    layout = {
        "xaxis": _titled(across, type="category", showgrid=False),
        "yaxis": _titled(down, type="category", autorange="reversed", showgrid=False),
    }
    return {"data": [trace], "layout": layout, "height": 120 + min(420, 26 * max(len(rows), 4))}


def exchanged_bytes(run: RunRecord) -> Figure | None:
    """MiB that all processes sent in each epoch, by layer and direction."""
    sums: dict[tuple, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    epochs = set()
    for event in run.of("exchange"):
        epochs.add(event["epoch"])
        for entry in event["bytes"]:
            sums[entry["layer"], entry["direction"]][event["epoch"]] += entry["bytes"] / 2**20
    if not sums or len(epochs) < 2:
        return None
    order = sorted(epochs)
    data = [
        _bars(order, [sent.get(epoch, 0.0) for epoch in order], f"layer {layer}, {direction}", _color(number))
        for number, ((layer, direction), sent) in enumerate(sorted(sums.items(), key=in_order))
    ]
    return _by_epoch(data, "MiB", 280)


def in_order(entry: tuple[tuple[int, str], Any]) -> tuple[bool, int, int]:
    """Order layers, forward before backward, evaluation last."""
    (layer, direction), _ = entry
    directions = ("static", "forward", "backward", "evaluation")
    return direction == "evaluation", layer, directions.index(direction) if direction in directions else len(directions)


def exchange_seconds(run: RunRecord) -> Figure | None:
    """Milliseconds of a full-graph epoch: computing, exchanging, waiting for the others' rows; means over ranks."""
    by_epoch: dict[int, list[dict]] = defaultdict(list)
    for event in run.of("exchange"):
        by_epoch[event["epoch"]].append(event)
    if len(by_epoch) < 2:
        return None
    order = sorted(by_epoch)
    parts = (
        ("compute", "#3d6fb6", lambda event: event["compute_seconds"]),
        ("quantise and send", "#c77dbb", lambda event: event["seconds"] - event["wait_seconds"]),
        ("wait for others' rows", "#f2a3a9", lambda event: event["wait_seconds"]),
    )
    data = []
    for name, color, value in parts:
        means = [1e3 * sum(map(value, by_epoch[epoch])) / len(by_epoch[epoch]) for epoch in order]
        data.append(_bars(order, means, name, color, digits=3))
    return _by_epoch(data, "ms, training step", 260)


def bytes_by_tier(named: Sequence[tuple[str, dict[str, float]]]) -> Figure | None:
    """MiB of an epoch by where they came from or went, of each run: (label, {name: bytes})."""
    tiers = list(dict.fromkeys(tier for _, sizes in named for tier in sizes))
    if not tiers:
        return None
    data = []
    for number, (label, sizes) in enumerate(named):
        held = [sizes[tier] / 2**20 if tier in sizes else None for tier in tiers]
        bars = _bars_across(tiers, held, label, _color(number), digits=3)
        data.append(bars | {"hovertemplate": "%{y}: %{x:.1f} MiB<extra></extra>"})
    layout = {"xaxis": _titled("MiB an epoch, all processes", rangemode="tozero"), "barmode": "group"}
    layout["yaxis"] = _FROM_THE_TOP
    return {"data": data, "layout": layout, "height": 110 + (12 + 20 * len(named)) * len(tiers)}
