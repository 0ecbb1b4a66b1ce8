"""The report of a run, or of several side by side: one HTML file that opens without a network."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from omegaconf import OmegaConf
from plotly.offline import get_plotlyjs

from ..errors import disk_errors
from ..memory import format_bytes, format_seconds
from . import figures
from .run_record import TRAINING, RunRecord
from .side_by_side import differing, labelled, other_split
from .suggestions import suggest, what_curves_show
from .terminal import shown

NAME = "report.html"
_ACTIVITIES_TOLD = 0.001  # smaller shares of an epoch are not in the tables
_SENT = ("average", "exchange", "exchange_evaluation")


class Page:
    """The content of the template: sections of blocks, and the figures that they name, for plotly.

    A section is {"id", "title", "blocks"}; a block is a dict of one of "figure" (a number), "table" ({"columns",
    "rows"}), "text", "links" ([(text, address)]), "heading"; "fold" hides it under a title.
    """

    def __init__(self) -> None:
        self.sections: list[dict] = []
        self.figures: list[dict] = []

    def section(self, name: str, title: str, blocks: Iterable[dict | None]) -> None:
        """Add a section, unless it would be empty."""
        told = [block for block in blocks if block is not None]
        if any(set(block) - {"heading"} for block in told):
            self.sections.append({"id": name, "title": title, "blocks": told})

    def figure(self, figure: dict | None, about: str, **more: Any) -> dict | None:
        """Return the block of a figure; None without one."""
        if figure is None:
            return None
        self.figures.append(figure)
        about += f"; {figure['note']}" if "note" in figure else ""
        return {"figure": len(self.figures) - 1, "height": figure["height"], "about": about, **more}


def write_report(folders: Sequence[str | os.PathLike], path: str | os.PathLike | None = None) -> Path:
    """Write the report of the last run of each of some folders, at least one; return its path.

    path: None: `report.html` in the folder of the only run, else in the working folder.

    Raises:
        GNNScaleError: a folder is not a run's, or the file cannot be written.

    Cost: 5 MB, most of which is plotly.
    """
    runs = labelled([RunRecord.open(folder) for folder in folders])
    target = Path(path or (runs[0].folder / NAME if len(runs) == 1 else NAME))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with disk_errors(target, "written", "free space, or name another file by output="):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(render(runs, target.parent), encoding="utf-8")
        os.replace(temporary, target)
    return target


def render(runs: Sequence[RunRecord], beside: Path) -> str:
    """Return the report of runs, with labels of their own, as HTML; links are relative to the folder `beside`."""
    page = Page()
    _fill(page, runs, beside)
    environment = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(Path(__file__).parent))
    suggestions = [(run.label, suggest(run)) for run in runs]
    return environment.get_template("page.html").render(
        title=runs[0].label if len(runs) == 1 else " and ".join(run.label for run in runs),
        subtitle=what_was_trained(runs[0]) if len(runs) == 1 else f"{len(runs)} runs side by side",
        state=_state(runs[0]) if len(runs) == 1 else "",
        cards=_cards(runs[0]) if len(runs) == 1 else [],
        overview=_table(*_overview(runs)) if len(runs) > 1 else None,
        suggestions=suggestions,
        sections=page.sections,
        figures=page.figures,
        plotly=get_plotlyjs(),
    )


def _told_fanouts(fanouts) -> str:
    """Return fan-outs as text: a list, or the lists of edge types by name."""
    if isinstance(fanouts, dict):
        return "; ".join(f"{name} {_told_fanouts(hops)}" for name, hops in fanouts.items())
    return ", ".join(map(str, fanouts)) if isinstance(fanouts, list) else str(fanouts)


def what_was_trained(run: RunRecord) -> str:
    """Return one sentence: the model, the graph, its parts, the processes."""
    if run.is_partitioning:
        nodes, edges, parts = run.facts.get("nodes", ""), run.facts.get("edges stored", ""), run.parts.get("nodes", [])
        return f"{nodes} nodes, {edges} edges in {len(parts)} parts by {run.method}; nothing was trained"
    model = run.class_at("model.backbone")
    layers, width = run.get("model.backbone.num_layers"), run.get("model.backbone.hidden_channels")
    told = [f"{model}, {layers} layers of {width}" if layers and width else model] if model else []
    dataset = run.get("dataset.name") or run.class_at("dataset")
    graph = run.facts.get("graph", "")
    told += [f"on {dataset} ({graph})" if graph and dataset else f"on {dataset or graph}"] if dataset or graph else []
    if run.facts.get("parts"):
        count, _, how = str(run.facts["parts"]).partition(" ")
        told += [f"in {count} parts by {how.strip('()')}" if how else f"in {count} parts"]
    text = " ".join(told) or "a run"
    processes = f"{run.num_ranks} process{'es' * (run.num_ranks > 1)}"
    policies = run.class_at("strategy.weights"), run.class_at("strategy.exchange")
    how = [processes, *(name for name in policies if name and name != "NoExchange")]
    if run.get("sampler.fanouts") and "FullGraph" not in run.class_at("datamodule"):
        how.append(f"neighbours {_told_fanouts(run.get('sampler.fanouts'))}")
    return f"{text}; {', '.join(how)}"


def _state(run: RunRecord) -> str:
    if run.is_finished:
        return ""
    where = f" in the stage {run.failed_stage}" if run.failed_stage else ""
    return f"This run did not finish{where}: this report shows what it recorded until then."


def _cards(run: RunRecord) -> list[dict]:
    """Return the first screen: metrics, time, memory, and the cut of the graph."""
    cards = []
    best, headline = run.best(), run.headline
    if headline is not None:
        below = f"best {run.monitor} {best[1]:.4f}, epoch {best[0]}" if best else ""
        cards.append({"name": headline[0], "value": f"{headline[1]:.4f}", "below": below})
    below = ", ".join(
        f"{text} {format_seconds(seconds)}"
        for text, seconds in (("training", run.train_seconds), ("an epoch", run.epoch_seconds))
        if seconds is not None
    )
    cards.append({"name": "time", "value": format_seconds(run.seconds), "below": below})
    fullest = max(run.stages, key=lambda row: row["peak_bytes"], default=None)
    if fullest is not None:
        predicted = fullest.get("predicted_bytes")
        below = f"in {fullest['stage']}, all processes"
        below += f"; predicted {format_bytes(predicted)}" if predicted else ""
        cards.append({"name": "memory", "value": format_bytes(fullest["peak_bytes"]), "below": below})
    if "edge_cut_ratio" in run.quality:
        method = f"by {run.method}" if run.method else ""
        below = f"{len(run.quality.get('nodes_per_part', []))} parts {method}"
        cards.append({"name": "edges cut", "value": f"{run.quality['edge_cut_ratio']:.1%}", "below": below})
    for card in cards:  # a figure and its unit stay on one line
        card["below"] = re.sub(r"(?<=\d) (?=s\b|min\b|[KMGT]?i?B\b)", "\u00a0", card["below"])
    return cards


def _overview(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Return the first screen of several runs: a column a run."""

    def row(name: str, value) -> list[str]:
        return [name, *(value(run) or "" for run in runs)]

    def fact(key: str):
        return lambda run: shown(run.facts.get(key, ""))

    def waits(run: RunRecord) -> str:
        return f"{run.waiting:.1%} and {run.shares.get('ranks', 0.0):.1%}" if run.shares else ""

    names = list(dict.fromkeys(name for run in runs for name in run.results))
    rows = [row(name, lambda run, name=name: _number(run.results.get(name))) for name in names]
    rows += [
        row("best in validation", lambda run: f"{run.monitor} {run.best()[1]:.4f}" if run.best() else ""),
        row("epochs", lambda run: str(run.num_epochs or "")),
        row("time", lambda run: format_seconds(run.seconds)),
        row("training", lambda run: format_seconds(run.train_seconds) if run.train_seconds else ""),
        row("an epoch", lambda run: format_seconds(run.epoch_seconds) if run.epoch_seconds else ""),
        row("waited for batches and processes", waits),
        row("memory, all processes", lambda run: format_bytes(run.peak_bytes)),
        row("processes", lambda run: str(run.num_ranks)),
        row("graph", fact("graph")),
        row("parts", fact("parts")),
        row("edges cut", lambda run: _percent(run.quality.get("edge_cut_ratio"))),
        row("sent an epoch", lambda run: format_bytes(sent) if (sent := _sent_bytes(run)) else ""),
    ]
    return ["", *(run.label for run in runs)], [line for line in rows if any(line[1:])]


def _fill(page: Page, runs: Sequence[RunRecord], beside: Path) -> None:
    several = len(runs) > 1
    if several:
        told = other_split(runs)
        page.section("settings", "Settings that differ", [{"text": told} if told else None, _differing(runs)])

    def each(make) -> list[dict | None]:
        """Return the blocks of each run, with its label above them where there are several."""
        blocks: list[dict | None] = []
        for run in runs:
            own = [block for block in make(run) if block is not None]
            blocks += [{"heading": run.label}] * bool(several and own) + own
        return blocks

    page.section(
        "epoch",
        "An epoch",
        [
            {"text": _EPOCH_TEXT} if any(run.of("timeline") for run in runs) else None,
            *each(lambda run: _timelines(page, run)),
            page.figure(figures.seconds_by_run(runs), "Seconds of a mean epoch by activity") if several else None,
            _activities(runs),
            *([] if several else [page.figure(figures.epoch_seconds(runs[0]), "Seconds of each epoch")]),
            *each(lambda run: [] if run.epochs or run.is_partitioning else [{"text": _UNTIMED}]),
        ],
    )
    page.section(
        "curves",
        "Curves",
        [
            page.figure(figures.curves(runs, losses=False), "Metrics by epoch"),
            page.figure(figures.curves(runs, losses=True), "Losses by epoch"),
            *each(lambda run: [{"text": text}] if (text := what_curves_show(run)) else []),
        ],
    )
    page.section("bytes", "Bytes", [*_bytes(page, runs), *each(lambda run: [_hops(run)])])
    page.section("machines", "Machines", each(_machines))
    page.section("exchange", "Exchange", each(lambda run: _exchange(page, run)))
    page.section("memory", "Memory", [page.figure(figures.memory(runs), "Peak by stage"), *each(_process_peaks)])
    page.section("parts", "Parts", each(lambda run: _parts(page, run)))
    page.section("stages", "Stages", each(_stages))
    page.section("run", "Settings and versions", each(lambda run: _settings(run, beside)))


_EPOCH_TEXT = (
    "Each band is one process: what its training thread did. The thinner band below it is what other threads and "
    "worker processes prepared meanwhile; its height is the number that were busy. On a GPU the seconds are the "
    "host's, which runs ahead."
)


_UNTIMED = "The events of this run do not include the activities of an epoch."


def _timelines(page: Page, run: RunRecord) -> list[dict | None]:
    epochs = {event["epoch"] for event in run.of("timeline")}
    blocks = [page.figure(figures.timeline(run, "last"), "What each process did in the last epoch")]
    if len(epochs) > 1:
        first = figures.timeline(run, "first")
        blocks.append(
            page.figure(first, "The same for the first epoch", fold="The first epoch, which compiles and warms up")
        )
    if run.num_ranks > figures.MOST_RANKS and epochs:
        blocks.append({"text": f"The first {figures.MOST_RANKS} of {run.num_ranks} processes are shown."})
    return blocks


def _activities(runs: Sequence[RunRecord]) -> dict | None:
    """Return the table of activities: of one run a column a rank, of several a column a run."""
    timed = [run for run in runs if run.epochs]
    if not timed:
        return None
    if len(runs) > 1:
        columns = ["share of an epoch", *(run.label for run in timed)]
        shares, beside = [run.shares for run in timed], [run.beside_shares for run in timed]
    else:
        run = timed[0]
        ranks = sorted({event["rank"] for event in run.warm_epochs})[: figures.MOST_RANKS]
        by_rank = [replace(run, log=[e for e in run.log if e.get("rank", rank) == rank]) for rank in ranks]
        chosen = {"mean": run} if ranks[1:] else {}
        chosen |= {f"rank {rank}": one for rank, one in zip(ranks, by_rank, strict=True)}
        columns = ["share of an epoch", *chosen]
        shares, beside = [one.shares for one in chosen.values()], [one.beside_shares for one in chosen.values()]
    rows = [
        [figures.NAMES[name], *(_percent(one.get(name, 0.0)) for one in shares)]
        for name in TRAINING
        if any(one.get(name, 0.0) >= _ACTIVITIES_TOLD for one in shares)
    ]
    rows += [
        [f"{figures.NAMES[name]}, beside training", *(_percent(one.get(name, 0.0)) for one in beside)]
        for name in TRAINING
        if any(one.get(name) for one in beside)
    ]
    return _table(columns, rows)


def tiers(run: RunRecord) -> dict[str, float]:
    """Return the bytes of a mean epoch by source or destination, over all processes: {name: bytes}."""
    num_epochs = max(run.num_epochs, 1)
    row_bytes = run.parts.get("row_bytes") or 0
    rows = [("feature rows in batches", run.per_epoch("row_bytes")), ("read from disk", run.per_epoch("disk_bytes"))]
    read = run.of("rows_read")
    read_epochs = max(len({event["epoch"] for event in read}), 1)
    rows.append(("of that: feature rows", sum(event["feature_bytes"] for event in read) / read_epochs))
    for tier in ("local", "peer", "host", "cache", "disk"):
        served = sum(event.get(tier, 0) for event in run.of("reads"))
        rows.append((f"placed rows read: {tier}", served * row_bytes / num_epochs))
    away = sum(event["bytes_away"] for event in run.of("owner_reads"))
    told = [event for event in run.of("preparation") if "bytes_away" in event]
    of_workers = {event.get("node"): event["bytes_away"] for event in told}  # each has the total so far
    rows.append(("from other machines", (away + sum(of_workers.values())) / num_epochs))
    learned = sum(event["bytes_away"] for event in run.of("learned_rows"))
    rows.append(("learned rows and their gradients", learned / num_epochs))
    of_ranks = {event.get("rank"): event.get("bytes_received", 0) for event in run.of("preparation")}  # totals, too
    rows.append(("from workers of Ray", sum(of_ranks.values()) / num_epochs))
    rows.append(("sent: averages", _bytes_of(run, "average") / num_epochs))
    rows.append(("sent: rows exchanged in training", _bytes_of(run, "exchange") / num_epochs))
    rows.append(("sent: rows exchanged in evaluation", _bytes_of(run, "exchange_evaluation") / num_epochs))
    return {name: size for name, size in rows if size > 0}


def _bytes_of(run: RunRecord, kind: str) -> float:
    """Return the bytes that all ranks sent in a run, for averages or rows."""
    told = [event["bytes"] for event in run.of(kind)]
    return sum(sum(entry["bytes"] for entry in one) if isinstance(one, list) else one for one in told)


def _sent_bytes(run: RunRecord) -> float:
    return sum(_bytes_of(run, kind) for kind in _SENT) / max(run.num_epochs, 1)


def _bytes(page: Page, runs: Sequence[RunRecord]) -> list[dict | None]:
    named = [(run.label, tiers(run)) for run in runs]
    names = list(dict.fromkeys(name for _, sizes in named for name in sizes))
    if not names:
        return []
    rows = [[name, *(format_bytes(sizes[name]) if name in sizes else "" for _, sizes in named)] for name in names]
    columns = [label for label, _ in named] if len(runs) > 1 else ["bytes"]
    figure = page.figure(figures.bytes_by_tier(named), "Bytes by source or destination")
    return [figure, _table(["an epoch, all processes", *columns], rows)]


def _hops(run: RunRecord) -> dict | None:
    """Return what each layer of a mean epoch read: nodes, edges and feature rows, by hop from the seeds."""
    chosen = [event for event in run.warm_epochs if event.get("hop_nodes")]
    if not chosen:
        return None
    num_epochs = len({event["epoch"] for event in chosen})
    num_hops = max(len(event["hop_nodes"]) for event in chosen)
    nodes = sum(event["counts"].get("nodes", 0) for event in chosen)
    row_bytes = sum(event["counts"].get("row_bytes", 0) for event in chosen) / max(nodes, 1)
    told = {name: [event.get(name) or [] for event in chosen] for name in ("hop_nodes", "hop_edges")}
    rows = []
    for hop in range(num_hops):
        reached, drawn = (
            sum(counts[at] for counts in told[name] if 0 <= at < len(counts)) / num_epochs
            for name, at in (("hop_nodes", hop), ("hop_edges", hop - 1))
        )
        name = "seeds, the last layer's targets" if hop == 0 else f"hop {hop}, read by layer {num_hops - hop}"
        rows.append([name, f"{reached:,.0f}", f"{drawn:,.0f}" if hop else "", format_bytes(reached * row_bytes)])
    return _table(["by layer, an epoch", "nodes", "edges", "feature rows"], rows)


def _exchange(page: Page, run: RunRecord) -> list[dict | None]:
    told = run.of("exchange")
    if not told:
        return []
    layers: dict[tuple, float] = {}
    for event in told:
        for entry in event["bytes"]:
            key = (entry["layer"], entry["direction"])
            layers[key] = layers.get(key, 0) + entry["bytes"]
    total = sum(layers.values())
    rows = [
        [str(layer), direction, format_bytes(size), _percent(size / max(total, 1))]
        for (layer, direction), size in sorted(layers.items(), key=figures.in_order)
    ]
    sent = sum(entry["sent"] for event in told for entry in event["rows"])
    skipped = sum(entry["skipped"] for event in told for entry in event["rows"])
    seconds, waited, computed = (
        sum(event[name] for event in told) for name in ("seconds", "wait_seconds", "compute_seconds")
    )
    shares = (
        f"Of a training step {seconds / max(seconds + computed, 1e-9):.1%} was spent exchanging, "
        f"{waited / max(seconds + computed, 1e-9):.1%} waiting for the others' rows."
    )
    if skipped:
        shares += f" Of {sent + skipped:,} rows to send {skipped / (sent + skipped):.1%} were skipped."
    return [
        {"text": shares},
        page.figure(figures.exchange_seconds(run), "Milliseconds of each training step"),
        page.figure(figures.exchanged_bytes(run), "MiB that all processes sent in each epoch"),
        _table(["layer", "direction", "sent in the run", "share"], rows),
    ]


def _machines(run: RunRecord) -> list[dict | None]:
    """Return what an epoch was predicted to cost, and did, and what one machine more or less would do."""
    found = run.summary.get("machines")
    if not found:
        return []

    def row(name: str, cost: dict, share: str = "") -> list[str]:
        price = "" if cost.get("price") is None else f"{cost['price']:.4g}"
        numbers = [str(cost.get(key, "")) for key in ("training", "preparing")]
        sizes = [format_bytes(round(cost[key])) for key in ("sent_bytes", "averaged_bytes")]
        return [name, *numbers, f"{cost['seconds']:.2f} s", *sizes, price, share]

    predicted, measured = found["predicted"], found["measured"]
    ratio = f"{predicted['seconds'] / measured['seconds']:.2f}" if measured["seconds"] else ""
    rows = [row("measured", {**predicted, **measured}), row("predicted", predicted, ratio)]
    for cost in found["others"]:
        more = cost["training"] + cost["preparing"] > predicted["training"] + predicted["preparing"]
        who = "trains" if cost["training"] != predicted["training"] else "prepares"
        times = f"{cost['seconds'] / max(predicted['seconds'], 1e-9):.2f}"
        rows.append(row(f"one machine {'more' if more else 'fewer'} that {who}", cost, times))
    text = (
        f"By the seconds of {found.get('seconds_from')}: {found['batch']['train_s'] * 1e3:.1f} ms to train a batch, "
        f"{found['batch']['prepare_s'] * 1e3:.1f} ms of a thread to prepare it. An epoch is bound by "
        f"{predicted.get('bound_by')}. Seconds are without validation. The last column is "
        "predicted over measured; of other numbers of machines over what is predicted here."
    )
    columns = ["an epoch", "train", "prepare", "time", "between machines", "averages", "price", "times"]
    return [{"text": text}, _table(columns, rows)]


def _process_peaks(run: RunRecord) -> list[dict | None]:
    peaks = {(event["event"], event["rank"]): event for event in run.of("training_peak", "evaluation_peak")}
    rows = [
        [str(rank), event.split("_")[0], format_bytes(told["peak_bytes"]), format_bytes(told["start_bytes"])]
        for (event, rank), told in sorted(peaks.items(), key=lambda one: (one[0][1], one[0][0] != "training_peak"))
    ]
    fact = run.facts.get("training peak of a process")
    blocks: list[dict | None] = [{"text": f"Training peak of a process: {fact}."}] if fact else []
    if rows:
        columns = ["rank", "stage", "peak beyond the start", "held at the start"]
        blocks.append(_table(columns, rows, fold="Peaks by process"))
    return blocks


def _parts(page: Page, run: RunRecord) -> list[dict | None]:
    parts = run.parts
    if not parts:
        return []
    quality = [
        [key.replace("_", " "), _number(run.quality[key])]
        for key in ("edge_cut_ratio", "replication_factor", "node_balance", "edge_balance", "train_balance")
        if isinstance(run.quality.get(key), int | float)
    ]
    share = parts.get("edges_share", 1.0)
    counted = "" if share >= 1 else f", from {share:.1%} of the edges"
    grouped = len(parts["parts"]) > 1 and parts["parts"][1] - parts["parts"][0] > 1
    cut, labels = figures.cut_matrix(parts), figures.label_matrix(parts)
    sizes = page.figure(figures.part_sizes(parts), "Nodes, halos and training nodes of each part")
    return [
        {"text": "Parts are counted in groups, named after their first."} if grouped else None,
        sizes,
        _table(["", "value"], quality) if quality else None,
        page.figure(
            cut, f"Sources of the edges into each part, %{counted}; the strongest colour is the most of another"
        ),
        page.figure(labels, f"Labels of each part, %{counted}"),
    ]


def _stages(run: RunRecord) -> list[dict | None]:
    rows = [
        [
            row["stage"],
            format_seconds(row["seconds"]),
            format_bytes(row["peak_bytes"]),
            format_bytes(row["predicted_bytes"]) if row.get("predicted_bytes") else "",
            row.get("note") or "",
        ]
        for row in run.stages
    ]
    told = [[str(name), shown(value)] for name, value in run.facts.items()]
    plan = run.summary.get("plan_terms") or run.summary.get("plan")  # older runs have the terms in plan
    terms = [[str(name), str(text)] for name, text in plan.items()] if isinstance(plan, dict) else []
    return [
        _table(["stage", "time", "peak memory", "predicted", "note"], rows) if rows else None,
        _table(["result", ""], told, fold="All results, as the terminal printed them") if told else None,
        _table(["term", ""], terms, fold="The plan") if terms else None,
    ]


def _settings(run: RunRecord, beside: Path) -> list[dict | None]:
    blocks: list[dict | None] = []
    if run.traces:
        links = [(path.name, _address(path, beside)) for path in run.traces]
        blocks.append(
            {"text": "Traces of Lightning's PyTorch profiler; chrome://tracing and ui.perfetto.dev open them:"}
        )
        blocks.append({"links": links})
    rows = [[name.replace("_", " "), str(value)] for name, value in run.machine.items() if value not in ("", None)]
    rows += [["memory that a process may take", format_bytes(run.memory_limit)]] if run.memory_limit else []
    blocks.append(_table(["machine and versions", ""], rows) if rows else {"text": "This run recorded no versions."})
    if run.config:
        blocks.append({"code": OmegaConf.to_yaml(run.config), "fold": "All settings (config.yaml)"})
    files = [run.folder / name for name in ("config.yaml", "summary.json", "metrics/metrics.csv", "events.jsonl")]
    blocks.append({"links": [(path.name, _address(path, beside)) for path in files if path.is_file()]})
    return blocks


def _differing(runs: Sequence[RunRecord]) -> dict:
    rows = [[name, *values] for name, values in differing(runs).items()]
    if not rows:
        return {"text": "None: these runs had the same settings."}
    return _table(["setting", *(run.label for run in runs)], rows)


def _address(path: Path, beside: Path) -> str:
    return quote(os.path.relpath(path.resolve(), beside.resolve()))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _table(columns: list[str], rows: list[list[str]], **more: Any) -> dict:
    """Return the block of a table; columns of figures are right-aligned."""
    figure = re.compile(r"^[\d.,]+( ?%| [KMGT]?i?B| s| min \d+ s)?$")
    right = [
        any(row[at] for row in rows) and all(not row[at] or figure.match(row[at]) for row in rows)
        for at in range(len(columns))
    ]
    return {"table": {"columns": columns, "rows": rows, "right": right}, **more}
