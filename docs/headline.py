"""Draw docs/images/headline.svg from the measured rows: each stage's peak beside the cap, and the store on disk."""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "recipes" / "bench" / "measured" / "headline_papers_shape_2xepyc_2026-11-25.csv"
PICTURE = ROOT / "docs" / "images" / "headline.svg"
STAGES = {
    "partition": "partition",
    "store": "write the store",
    "batches": "an epoch of batches",
    "train": "an epoch of training",
    "evaluate": "exact evaluation",
}
LEFT, TOP, STEP, BAR, GIB = 170, 70, 32, 18, 20  # in pixels; GIB: pixels a GiB
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #24292f } .small { font-size: 12px; fill: #57606a }
  .peak { fill: #2f6fb3 } .disk { fill: #c9d1d9 } .cap { stroke: #c4452d; stroke-width: 1.5; stroke-dasharray: 5 4 }
  .of-cap { fill: #c4452d }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9da7b1 } .peak { fill: #5b9ee0 } .disk { fill: #4a535d }
    .cap { stroke: #f0765e } .of-cap { fill: #f0765e }
  }"""


def picture() -> str:
    """Return the SVG."""
    with open(ROWS, newline="") as file:
        rows = {row["stage"]: row for row in csv.DictReader(file)}
    store, cap = rows["store"], int(rows["store"]["cap_bytes"]) / 2**30
    lines = [_bar(0, "the store on disk", int(store["disk_bytes"]), "disk", 0)]
    for place, (stage, label) in enumerate(STAGES.items(), 1):
        lines.append(_bar(place, label, int(rows[stage]["peak_bytes"]), "peak", cap))
    bottom = TOP + STEP * len(lines)
    at_cap = LEFT + cap * GIB
    nodes, edges = int(store["nodes"]), int(store["edges"])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {bottom + 8}" role="img">',
            f"<title>Memory of each stage under a cap of {cap:.0f} GiB</title>",
            f"<style>{STYLE}\n</style>",
            f'<text x="12" y="24">{nodes / 1e6:.0f} million nodes, {edges / 1e9:.1f} billion edges, '
            f"{store['feature_dim']} features, {store['cores']} cores: peak memory</text>",
            *lines,
            f'<line class="cap" x1="{at_cap}" x2="{at_cap}" y1="{TOP - 12}" y2="{bottom}"/>',
            f'<text class="small of-cap" x="{at_cap - 4}" y="{TOP - 17}" text-anchor="middle">'
            f"cap: {cap:.0f} GiB, page cache included</text>",
            "</svg>\n",
        ]
    )


def _bar(place: int, label: str, num_bytes: int, kind: str, at_least: float) -> str:
    y, gib = TOP + STEP * place, num_bytes / 2**30
    text = y + BAR - 4
    return (
        f'<text x="{LEFT - 12}" y="{text}" text-anchor="end">{label}</text>'
        f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{gib * GIB:.1f}" height="{BAR}" rx="2"/>'
        f'<text class="small" x="{LEFT + max(gib, at_least) * GIB + 8:.1f}" y="{text}">{gib:.1f} GiB</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
