"""Ratios and the page of `gnnscale bench gpu`, made of its rows alone."""

from collections.abc import Mapping, Sequence

from .present import LEFT, grouped, shown

STAGES = {
    "copy": "Copies in order: what bounds the rest",
    "gather": "Rows gathered in random order, by their width and the tier of their table",
    "batch": "Batches by stage, each alone",
    "epoch": "Epochs: compute alone on batches that are there, with features by tier, and PyG's loop on the same card",
    "full graph": "A step of a GCN on the full graph",
    "exchange": "Rows of an exchange written and read, without the link",
}
COLUMNS = {
    "what": ("what", LEFT),
    "tier": ("features or table", LEFT),
    "ms": ("ms", ",.3f"),
    "gb_per_s": ("GB/s", ",.1f"),
    "share_of_bound": ("share of\nthe copy", ".0%"),
    "seeds_per_s": ("seeds/s", ",.0f"),
    "epoch_s": ("s an\nepoch", ",.2f"),
    "over_compute": ("over\ncompute", ".2f"),
    "times_pyg": ("times\nPyG", ".2f"),
    "times_no_overlap": ("times no\noverlap", ".2f"),
    "note": ("note", LEFT),
    "error": ("error", LEFT),
}
# What the copies bound: the copy of each (stage, tier).
_BOUNDS = {
    ("gather", "device"): "device",
    ("gather", "index_select"): "device",
    ("gather", "pinned"): "to device",
    ("batch", "device"): "device",
    ("batch", "pinned"): "to device",
    ("batch", ""): "to device",
    ("epoch", "pinned"): "to device",
    ("exchange", ""): "device",
}


def compared(rows: Sequence[Mapping]) -> list[dict]:
    """Return the rows with their ratios to copies, to compute alone, to PyG's loop and to no overlap.

    Args:
        rows: Rows by column; a ratio whose other side is missing is left out.
    """
    copies = {row["what"]: row.get("gb_per_s") for row in rows if row["stage"] == "copy"}
    epochs = {(row["what"], row["tier"]): row.get("epoch_s") for row in rows if row["stage"] == "epoch"}
    found = []
    for row in rows:
        own, model, tier = row.get("epoch_s"), row["what"], row["tier"]
        ratios = {"share_of_bound": _over(row.get("gb_per_s"), copies.get(_BOUNDS.get((row["stage"], tier))))}
        if row["stage"] == "epoch" and tier in ("device", "pinned", "disk"):
            ratios["over_compute"] = _over(own, epochs.get((model, "compute alone")))
            ratios["times_pyg"] = _over(epochs.get((model, f"PyG, {tier}")), own)
            ratios["times_no_overlap"] = _over(epochs.get((model, f"{tier}, no overlap")), own)
        found.append({**row, **ratios})
    return found


def of_stage(rows: Sequence[Mapping], stage: str) -> list[Mapping]:
    """Return the rows of a stage; those of one model or width together."""
    own = [row for row in rows if row["stage"] == stage]
    return [row for several in grouped(own, "what").values() for row in several]


def columns_of(rows: Sequence[Mapping]) -> dict[str, tuple]:
    """Return the columns in which some row has a value."""
    return {name: form for name, form in COLUMNS.items() if any(row.get(name) not in (None, "") for row in rows)}


def page(rows: Sequence[Mapping], machine: str, left_out: Mapping[str, Sequence[str]]) -> str:
    """Return a page in Markdown: the machine, a table for each stage, and what could not be measured.

    Args:
        rows: Rows of `compared`.
        machine: The machine in one line.
        left_out: Maps a reason to the rows that were left out by it.
    """
    lines = ["# gnnscale bench gpu", "", machine, ""]
    for stage, title in STAGES.items():
        own = of_stage(rows, stage)
        if own:
            lines += [f"## {title}", "", *_table(own, list(columns_of(own))), ""]
    for why, names in left_out.items():
        lines += [f"## Left out: {why}", "", *(f"- {name}" for name in names), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping], names: Sequence[str]) -> list[str]:
    heads = [COLUMNS[name][0].replace("\n", " ") for name in names]
    aligned = ["---" if COLUMNS[name][1] == LEFT else "--:" for name in names]
    cells = [[shown(row.get(name), COLUMNS[name][1]).replace("|", "\\|") for name in names] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (heads, aligned, *cells)]


def _over(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None
