"""Draw docs/images/headline.svg from the measured rows: seconds of each stage under the cap, bytes read and written."""

import csv
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "recipes" / "bench" / "measured" / "headline_2xepyc_2026-12-01.csv"
GRAPH = ROOT / "conf" / "bench" / "headline.yaml"
PICTURE = ROOT / "docs" / "images" / "headline.svg"
STAGES = {
    "partition": "partition",
    "store": "write the store",
    "train": "an epoch of training",
    "evaluate": "exact evaluation",
}
LEFT, TOP, STEP, BAR, WIDTH = 170, 62, 32, 18, 340  # in pixels; WIDTH: of the longest bar
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #24292f } .small { font-size: 12px; fill: #57606a }
  .bar { fill: #2f6fb3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9da7b1 } .bar { fill: #5b9ee0 }
  }"""


def picture() -> str:
    """Return the SVG."""
    with open(ROWS, newline="") as file:
        rows = {row["stage"]: row for row in csv.DictReader(file)}
    graph = yaml.safe_load(GRAPH.read_text())["bench"]
    longest = max(float(rows[stage]["seconds"]) for stage in STAGES)
    bars = [_bar(place, label, rows[stage], longest) for place, (stage, label) in enumerate(STAGES.items())]
    cap, cores = int(rows["train"]["cap_bytes"]) / 2**30, rows["train"]["cores"]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {TOP + STEP * len(bars) + 4}" role="img">',
            f"<title>Seconds of each stage under a cap of {cap:.0f} GiB</title>",
            f"<style>{STYLE}\n</style>",
            f'<text x="12" y="24">{graph["num_nodes"] / 1e6:.0f} million nodes, {graph["num_edges"] / 1e9:.1f} billion '
            f"edges, {graph['feature_dim']} features, {cores} cores</text>",
            '<text class="small" x="12" y="44">Each stage in a process whose memory, page cache included, is capped at '
            f"{cap:.0f} GiB</text>",
            *bars,
            "</svg>\n",
        ]
    )


def _bar(place: int, label: str, row: dict[str, str], longest: float) -> str:
    y, seconds = TOP + STEP * place, float(row["seconds"])
    text, width = y + BAR - 4, WIDTH * seconds / longest
    read, written = (int(row[name]) / 1e9 for name in ("read_bytes", "written_bytes"))
    told = f"{seconds:.0f} s, {read:.0f} GB read" + f", {written:.0f} GB written" * (written >= 1)
    return (
        f'<text x="{LEFT - 12}" y="{text}" text-anchor="end">{label}</text>'
        f'<rect class="bar" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>'
        f'<text class="small" x="{LEFT + width + 8:.1f}" y="{text}">{told}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
