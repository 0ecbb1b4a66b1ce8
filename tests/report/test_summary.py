"""The closing table: stages added up, the prediction beside the peak, the file whole."""

import io
import json
import math

from rich.console import Console

from lightning_gnnscale.report.figures import thinned
from lightning_gnnscale.report.terminal import ProgressBars, print_summary, stage_rows, write_summary

EVENTS = [
    {"event": "stage", "stage": "store", "seconds": 1.0, "peak_bytes": 10},
    {"event": "average", "seconds": 9.0},
    {"event": "stage", "stage": "store", "seconds": 0.5, "peak_bytes": 30, "note": "again"},
    {"event": "stage", "stage": "train", "seconds": 2.0, "peak_bytes": 2048},
]


def test_stages_are_added_up_and_peaks_compared():
    rows = stage_rows(EVENTS, {"train": 4096})
    assert [(row["stage"], row["seconds"], row["peak_bytes"]) for row in rows] == [
        ("store", 1.5, 30),
        ("train", 2.0, 2048),
    ]
    assert [row["predicted_bytes"] for row in rows] == [None, 4096]


def test_summary_is_printed_and_written(tmp_path):
    summary = {"title": 5, "stages": stage_rows(EVENTS, {"train": 4096}), "facts": {"test acc": "0.9"}}
    text = io.StringIO()
    print_summary(summary, Console(file=text, width=100))
    for word in ("5 ", "store", "1.50 s", "2.00 KiB", "4.00 KiB", "again", "test acc", "0.9"):
        assert word in text.getvalue()
    path = write_summary(tmp_path, summary)
    assert json.loads(path.read_text())["facts"] == {"test acc": "0.9"}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_bars_draw_nothing_without_a_terminal(capfd):
    with ProgressBars() as bars:
        bars("partition", 1, 2)
        bars("partition", 2, 2)
    assert capfd.readouterr().out == ""


def test_a_long_curve_is_drawn_by_its_ends_and_extremes():
    values = [(at, math.sin(at / 900) + at % 5) for at in range(50_000)]
    values[777] = (777, 99.0)
    shown = thinned(values)
    assert len(shown) < 2100 and shown == sorted(shown)
    assert shown[0] == values[0] and shown[-1] == values[-1] and (777, 99.0) in shown
    assert min(value for _, value in shown) == min(value for _, value in values)
    assert thinned(values[:2000]) == values[:2000]
