"""Draw docs/images/partitioners.svg from the measured rows: cut against CPU seconds over METIS', a panel a family."""

import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "recipes" / "bench" / "measured" / "partition_flagship_2xxeon_2026-11-30.csv"
PICTURE = ROOT / "docs" / "images" / "partitioners.svg"
FAMILIES = {
    "two_level": "communities of communities",
    "lfr": "LFR communities",
    "power_law": "power law, no communities",
    "grid": "grid",
    "public": "public graphs (mean)",
}
COLOURS = {
    "fast": "#2f6fb3",
    "default": "#1b9e77",
    "best": "#7b4ab5",
    "metis": "#57606a",
    "kaminpar": "#c4452d",
    "fennel": "#d8a200",
    "heistream": "#c2659b",
    "cuttana": "#8a5a2b",
}
WIDTH, HEIGHT, GAP, LEFT, TOP, COLUMNS = 200, 150, 50, 56, 76, 3  # in pixels
SECONDS, CUTS = (0.02, 16.0), (0.5, 4.0)  # of METIS', at the ends of the axes
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-size: 14px }
  .small { font-size: 11px; fill: #57606a }
  .frame { fill: none; stroke: #8c959f } .same { stroke: #8c959f; stroke-dasharray: 4 4 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9da7b1 } }"""


def points() -> dict[tuple[str, str], tuple[float, float]]:
    """Return (CPU seconds, cut) over METIS' by family and method; of several graphs the geometric means."""
    with open(ROWS, newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["error"]]
    metis = {row["graph"]: row for row in rows if row["method"] == "metis"}
    ratios = defaultdict(list)
    for row in rows:
        family, peer = row["graph"].split(":")[0], metis[row["graph"]]
        ratio = [float(row[name]) / float(peer[name]) for name in ("cpu_seconds", "edge_cut_ratio")]
        ratios[family if family in FAMILIES else "public", row["method"]].append(ratio)
    return {key: tuple(map(geometric_mean, zip(*own, strict=True))) for key, own in ratios.items()}


def picture() -> str:
    """Return the SVG."""
    found = points()
    lines = [_panel(place, family, found) for place, family in enumerate(FAMILIES)]
    num_rows = -(-len(FAMILIES) // COLUMNS)
    width, height = LEFT + COLUMNS * (WIDTH + GAP), TOP + num_rows * (HEIGHT + GAP)
    legend = "".join(_legend(place, method) for place, method in enumerate(COLOURS))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>Cut against seconds of partitioners, over those of METIS</title>",
            f"<style>{STYLE}\n</style>",
            '<text class="title" x="12" y="22">Edges cut (upwards) and CPU seconds (to the right), 8 parts: '
            "METIS is 1 and 1, down and to the left is better</text>",
            legend,
            *lines,
            "</svg>\n",
        ]
    )


def _legend(place: int, method: str) -> str:
    x = 16 + place * 92
    return f'<circle cx="{x}" cy="42" r="5" fill="{COLOURS[method]}"/><text x="{x + 9}" y="46">{method}</text>'


def _panel(place: int, family: str, found: dict) -> str:
    left = LEFT + place % COLUMNS * (WIDTH + GAP)
    top = TOP + place // COLUMNS * (HEIGHT + GAP)

    def at(seconds: float, cut: float) -> tuple[float, float]:
        x, y = (
            math.log(min(max(value, low), high) / low) / math.log(high / low)
            for value, (low, high) in ((seconds, SECONDS), (cut, CUTS))
        )
        return round(left + x * WIDTH, 1), round(top + (1 - y) * HEIGHT, 1)

    same_x, same_y = at(1, 1)
    parts = [
        f'<text x="{left}" y="{top - 6}">{FAMILIES[family]}</text>',
        f'<rect class="frame" x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<line class="same" x1="{left}" x2="{left + WIDTH}" y1="{same_y}" y2="{same_y}"/>',
        f'<line class="same" x1="{same_x}" x2="{same_x}" y1="{top}" y2="{top + HEIGHT}"/>',
    ]
    for cut in (0.5, 1, 2, 4):
        said = f"{cut:g}" if cut < CUTS[1] else f"{cut:g}+"  # what lies beyond is drawn at the edge
        parts.append(f'<text class="small" x="{left - 5}" y="{at(1, cut)[1] + 4}" text-anchor="end">{said}</text>')
    for seconds in (0.1, 1, 10):
        x = at(seconds, 1)[0]
        parts.append(f'<text class="small" x="{x}" y="{top + HEIGHT + 14}" text-anchor="middle">{seconds:g}</text>')
    for method, colour in COLOURS.items():
        if (family, method) in found:
            x, y = at(*found[family, method])
            parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"><title>{method}</title></circle>')
    return "\n".join(parts)


if __name__ == "__main__":
    PICTURE.write_text(picture())
