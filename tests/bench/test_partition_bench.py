"""The partitioner benchmark: its rows and how it goes on, its tables, and the figures that recipes sample."""

import contextlib
import csv
import math

import numpy as np
import pytest

from benchmarks import partition as bench
from benchmarks import partition_cases, partition_process
from benchmarks.partition_cases import leave_out_missing_peers, options_of, resolve_methods
from benchmarks.partition_tables import (
    EVERYTHING,
    MEASURED,
    PLOTS,
    draw_plots,
    graph_table,
    mean_rows,
)
from benchmarks.runner import RowFile
from lightning_gnnscale.cli.main import main
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.partitioner.metis import metis_is_installed
from tests.says import said

CASES = {"graphs": ["planted:3000"], "parts": [2, 3], "warm_runs": 0, "sets": {"made": ["planted:3000"]}, "plots": []}


class FakeServer(partition_process.MeasuringServer):
    """Measures nothing: a figure is a function of the case, and every case is written down."""

    asked: list = []  # noqa: RUF012 (shared on purpose)

    def measure(self, path, num_nodes, method, num_parts, **settings):
        FakeServer.asked.append((method, num_parts, settings))
        if settings["balance"] and "volume" in settings["balance"]:
            raise RuntimeError(f"first line\npartitioner {method!r} takes no balance constraints")
        figures = dict.fromkeys(("node_balance", "edge_balance", "volume_balance", "replication_factor"), 1.0)
        return {
            **figures,
            "edge_cut_ratio": 0.1 * num_parts,
            "seconds": 2.0,
            "seconds_median": 2.0,
            "cpu_seconds": 1.5,
            "peak_bytes": 5_000_000,
            "resident_bytes": 1,
            "num_edges": 3_000,
            "mask_balance": {"train": 1.25, "other": 1.5},
            "phases": {},
            "notes": {"balance_violations": {"train": 3}} if num_parts == 3 else {},
        }


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(bench, "MeasuringServer", FakeServer)
    FakeServer.asked = []
    return FakeServer


def test_rows_tables_and_plots_of_a_real_run(tmp_path, capsys, server, monkeypatch):
    monkeypatch.setattr(bench, "MeasuringServer", lambda cores: contextlib.nullcontext(server))
    methods = ["random", {"method": "spring", "name": "clusters", "tau_factor": [0.1, 0.5]}]
    plots = ["cut_seconds", "cut_memory"]
    rows = bench.run(tmp_path / "out", **{**CASES, "plots": plots}, methods=methods, baseline="random")
    assert [(row["method"], row["parts"]) for row in rows] == [
        (name, parts) for parts in (2, 3) for name in ("random", "clusters 0.1", "clusters 0.5")
    ]
    for row in rows:
        assert (row["num_nodes"], row["num_edges"], row["error"]) == (300, 3000, "")
        assert 0 < row["edge_cut_ratio"] < 0.8 and row["seconds"] > 0 and row["train_balance"] >= 1
        assert row["million_edges_per_s"] == pytest.approx(0.003 / row["seconds"])
    out = capsys.readouterr().out
    assert "planted:3000: 300 nodes, 3,000 edges" in out and "made" in out and EVERYTHING not in out
    with open(tmp_path / "out" / "rows.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 6 and all(row["cpu"] and row["numba"] for row in written)
    assert float(written[0]["edge_cut_ratio"]) == rows[0]["edge_cut_ratio"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"rows.csv", "means.csv", "cut_seconds.png", "cut_memory.png"}
    again = bench.run(tmp_path / "out", **CASES, methods=methods, baseline="random")
    assert [row["seconds"] for row in again] == [row["seconds"] for row in rows]


@pytest.mark.sweep
def test_a_run_that_was_cut_goes_on_at_the_first_missing_row(tmp_path, fake):
    rows = bench.run(tmp_path, **CASES, methods=["spring", "random"])
    path = tmp_path / "rows.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])
    fake.asked = []
    assert bench.run(tmp_path, **CASES, methods=["spring", "random"]) == rows
    assert [case[:2] for case in fake.asked] == [("spring", 3), ("random", 3)]
    assert path.read_text().count("\n") == 5


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"chunk_edges": 1000}, {"halo_hops": 2}, {"balance": {"nodes": 1.1}}, {"feature_bytes": 1}]
)
def test_other_settings_are_other_rows(tmp_path, fake, other):
    bench.run(tmp_path, **CASES, methods=["random"])
    bench.run(tmp_path, **{**CASES, **other}, methods=["random"])
    assert len(fake.asked) == 4
    name, value = next(iter(other.items()))
    assert fake.asked[2][2][name] == value


def test_a_case_that_fails_is_a_row_and_can_be_tried_again(tmp_path, fake, capsys):
    methods = ["random", {"method": "spring", "balance": {"volume": 1.1}}]
    rows = bench.run(tmp_path, **CASES, methods=methods, baseline="random")
    failed = [row for row in rows if row["error"]]
    assert [row["error"] for row in failed] == ["partitioner 'spring' takes no balance constraints"] * 2
    assert failed[0]["edge_cut_ratio"] is None
    assert [row["broken"] for row in rows if not row["error"]] == ["", "train"]
    out = capsys.readouterr().out
    assert "random *" in out and "* breaks a balance constraint" in out
    assert "2 of 4 cases failed; bench.again=failed tries them again" in out
    bench.run(tmp_path, **CASES, methods=methods, baseline="random")
    assert len(fake.asked) == 4
    bench.run(tmp_path, **CASES, methods=methods, baseline="random", again="failed")
    assert [case[0] for case in fake.asked[4:]] == ["spring", "spring"]
    bench.run(tmp_path, **CASES, methods=methods, baseline="random", again="all")
    assert len(fake.asked) == 10


def test_threads_follow_the_cores(tmp_path, fake):
    if not partition_cases.kaminpar_is_installed():
        pytest.skip("needs the extra [kaminpar]")
    assert options_of(resolve_methods(["kaminpar"])[0], "all") == {"threads": partition_process.core_count("all")}
    own = resolve_methods([{"method": "kaminpar", "threads": 1}])[0]
    assert options_of(own, "all") == {"threads": 1}
    assert options_of(resolve_methods(["random"])[0], "all") == {}


@pytest.mark.sweep
@pytest.mark.skipif(not metis_is_installed(), reason="needs METIS: the extra [metis], or libmetis")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_expectation_of_greedy_streaming_is_a_row(tmp_path, fake):
    methods = [{"method": "greedy_expectation", "name": "equation (1)", "chunk_edges_share": [0.1, 1.0]}]
    rows = bench.run(tmp_path, **{**CASES, "plots": ["grem_fig6"]}, methods=methods)
    assert [row["family"] for row in rows] == ["equation (1)"] * 4
    assert all(0 < row["edge_cut_ratio"] < 1 and row["seconds"] is None and not row["error"] for row in rows)
    assert not fake.asked
    assert (tmp_path / "grem_fig6.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"methods": ["sprong"]}, "partitioner 'sprong'"),
        ({"methods": [{"method": "spring", "tau": 1}]}, "partitioner 'spring' tau"),
        ({"methods": ["random", "random"]}, "bench.methods 'random'"),
        ({"methods": [{"name": "x"}]}, "has no method"),
        ({"methods": [{"method": "greedy_expectation"}]}, "chunk_edges_share"),
        ({"plots": ["cut"]}, "bench.plots cut_seconds cut"),
        ({"clock": "sun"}, "bench.clock seconds cpu_seconds 'sun'"),
        ({"again": "maybe"}, "bench.again none failed all 'maybe'"),
        ({"graphs": ["planted:10"], "sets": {}, "cores": 0}, "bench.cores"),
        ({"limit_bytes": "much"}, "bench.limit_bytes bytes size"),
    ],
)
def test_settings_are_checked_before_any_work(tmp_path, fake, setting, message):
    with pytest.raises(ValueError, match=said(message)):
        bench.run(tmp_path, **{**CASES, "methods": ["random"], **setting})
    assert not fake.asked


def test_missing_peers_are_left_out_and_told(monkeypatch):
    monkeypatch.setitem(partition_cases.PEERS, "metis", lambda: False)
    monkeypatch.setitem(partition_cases.PEERS, "kaminpar", lambda: False)
    told = []
    left = leave_out_missing_peers(resolve_methods(["metis", "spring"]), told.append)
    assert [spec.method for spec in left] == ["spring"]
    assert told == ["metis is left out: it is not installed (extra \\[metis])"]


def row_of(graph, method, parts, cut, seconds=1.0, peak=10, error="", **more):
    values = {"edge_cut_ratio": cut, "seconds": seconds, "peak_bytes": peak, "replication_factor": 2.0}
    values |= {"num_nodes": 10, "num_edges": 100, "node_balance": 1.0 + (cut or 0.0), "options": "{}"}
    row = dict.fromkeys((*MEASURED, "broken", "phases", "notes")) | {
        "graph": graph,
        "method": method,
        "family": method,
        "partitioner": method,
    }
    return row | {"parts": parts} | ({} if error else values) | {"error": error} | more


def test_means_are_geometric_over_cases_that_both_have():
    rows = [
        row_of("a", "metis", 2, 0.1, seconds=4.0),
        row_of("a", "fast", 2, 0.2),
        row_of("b", "metis", 2, 0.1),
        row_of("b", "fast", 2, 0.8, peak=40, broken="nodes"),
        row_of("b", "metis", 4, 0.0),
        row_of("b", "fast", 4, 0.0),
        row_of("c", "metis", 2, None, error="too large"),
        row_of("c", "fast", 2, 0.5),
    ]
    means = {(row["set"], row["method"]): row for row in mean_rows(rows, {"one": ["a"], "two": ["b", "c"]}, "metis")}
    assert means["one", "fast"]["cut"] == pytest.approx(2.0)
    assert means["one", "fast"]["seconds"] == pytest.approx(0.25)
    # 8 in one case, and a cut of nothing counts as one edge on both sides.
    assert means["two", "fast"]["cut"] == pytest.approx(math.sqrt(8.0))
    assert means["two", "fast"]["peak"] == pytest.approx(2.0)
    assert (means["two", "fast"]["cases"], means["two", "metis"]["failed"]) == (2, 1)
    assert means[EVERYTHING, "fast"]["cut"] == pytest.approx(16 ** (1 / 3))
    assert means["two", "fast"]["worst_node_balance"] == 1.8
    assert (means["two", "fast"]["broken"], means["one", "fast"]["broken"]) == (1, 0)
    assert means[EVERYTHING, "metis"]["cut"] == pytest.approx(1.0)


def test_a_table_without_the_baseline_has_no_ratio():
    table = graph_table("a", [row_of("a", "fast", 2, 0.2), row_of("a", "slow", 2, None, error="it [fails]")], "metis")
    assert table.row_count == 2
    assert next(iter(table.columns[3].cells)) == ""
    assert table.caption == "slow: it \\[fails]"


def test_rows_of_another_version_are_not_mixed_in(tmp_path):
    (tmp_path / "rows.csv").write_text("graph,method\na,b\n")
    with pytest.raises(GNNScaleError, match=said("rows.csv columns move")):
        RowFile(tmp_path / "rows.csv").find({"graph": "a", "method": "b", "settings": "01"})
    (tmp_path / "cut.csv").write_text("graph,met")
    assert RowFile(tmp_path / "cut.csv").rows == []


def figure_of(name, rows, baseline, clock="seconds"):
    figure = PLOTS[name](rows, baseline, clock)
    return {axes.get_title() or axes.get_ylabel(): axes for axes in figure.axes if axes.get_xlabel()}


def test_peers_are_lines_across_the_cut_plots():
    rows = [row_of(g, m, p, 0.1 * p, seconds=p, peak=p) for g in "ab" for m in ("metis", "spring") for p in (2, 4)]
    for name in ("cut_seconds", "cut_memory"):
        panels = figure_of(name, rows, "metis")
        assert set(panels) == {"a", "b"}
        across = [line for line in panels["a"].lines if line.get_linestyle() == "--"]
        assert sorted(line.get_ydata()[0] for line in across) == pytest.approx([0.2, 0.4])


def test_speedup_is_seconds_over_the_baselines():
    methods = (("spring", 1.0), ("hdrf", 3.0))
    rows = [row_of("a", m, p, 0.1, seconds=s * p, cpu_seconds=2**s) for m, s in methods for p in (8, 4)]
    (axes,) = figure_of("speedup", rows, "spring").values()
    assert axes.lines[0].get_xydata().tolist() == [[4, 3.0], [8, 3.0]]
    (axes,) = figure_of("speedup", rows, "spring", "cpu_seconds").values()
    assert axes.lines[0].get_xydata().tolist() == [[4, 4.0], [8, 4.0]]
    assert axes.get_ylabel() == "CPU seconds over spring's"


def test_scaling_is_by_edges():
    rows = [row_of(f"g{n}", "spring", 8, 0.1, seconds=n / 10, peak=n * 1e6, num_edges=n) for n in (100, 10)]
    panels = figure_of("scaling", rows, "metis")
    assert panels["seconds"].lines[0].get_xydata().tolist() == [[10, 1.0], [100, 10.0]]
    assert panels["peak memory, MB"].lines[0].get_ydata().tolist() == [10.0, 100.0]


def test_figure_6_has_a_line_a_family_over_the_chunk_share():
    rows = [row_of("fb", "metis", 2, 0.1)]
    for family, partitioner in (("refined", "grem"), ("equation (1)", "greedy_expectation")):
        for share in (0.1, 0.01):
            options = f'{{"chunk_edges_share": {share}}}'
            more = {"family": family, "partitioner": partitioner, "options": options}
            rows.append(row_of("fb", f"{family} {share}", 2, share, **more))
    (axes,) = figure_of("grem_fig6", rows, "metis").values()
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["refined"].get_xydata().tolist() == [[1.0, 1.0], [10.0, 10.0]]
    assert lines["equation (1)"].get_linestyle() == "--"
    assert list(lines["metis"].get_ydata()) == [10.0, 10.0]


def test_plots_without_rows_are_left_out(tmp_path):
    rows = [row_of("a", "spring", 2, None, error="no")]
    assert draw_plots(tmp_path, list(PLOTS), rows, "metis", "seconds") == []
    assert draw_plots(tmp_path, ["grem_fig6", "speedup"], [row_of("a", "spring", 2, 0.1)], "spring", "seconds") == []


@pytest.mark.sweep
def test_the_command_and_a_recipe_of_ones_own(tmp_path, monkeypatch, fake, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "defaults: [/bench/partition, _self_]\nname: bench-mine\nbench: {graphs: ['planted:1000'], parts: [2]}\n"
    )
    main(["bench", "partition", "recipe=mine.yaml", "bench.methods=[random,{method:spring,beta:1.2}]"])
    assert [(case[0], case[2]["options"]) for case in fake.asked] == [("random", {}), ("spring", {"beta": 1.2})]
    assert (tmp_path / "runs" / "bench-mine" / "rows.csv").is_file()
    main(["bench", "partition", "recipe=mine.yaml", "bench.methods=[random]"])
    assert len(fake.asked) == 2
    assert "planted:1000" in capsys.readouterr().out


def test_rows_survive_numbers_and_text(tmp_path):
    file = RowFile(tmp_path / "rows.csv")
    file.put({}, [row_of("a, b", "m", 2, 0.25, settings="0123", notes='{"x": "1"}', peak=np.int64(7))])
    (row,) = RowFile(tmp_path / "rows.csv").rows
    assert (row["graph"], row["settings"], row["notes"]) == ("a, b", "0123", '{"x": "1"}')
    assert (row["parts"], row["edge_cut_ratio"], row["peak_bytes"], row["components"]) == (2, 0.25, 7, None)
