"""`gnnscale bench loader` at a small size: what it counts, and what it leaves behind."""

import csv

import numpy as np
import pytest

from benchmarks.graphs import power_law_graph
from benchmarks.loader import run, summarise
from benchmarks.turns import Taken


@pytest.mark.sweep
def test_it_writes_a_table_and_a_plot(tmp_path):
    found = run(tmp_path, 2000, 20_000, 16, (4, 3), 64, threads=(1, 2), num_batches=3, repeats=1)
    rows = list(csv.DictReader((tmp_path / "loader.csv").open()))
    assert [row["what"] for row in rows] == [row["what"] for row in found["loader"]]
    assert {("sampling", "1"), ("sampling and features", "2")} <= {(row["what"], row["threads"]) for row in rows}
    assert all(float(row["seeds_per_cpu_s"]) > 0 and row["cpu"] for row in rows)
    assert (tmp_path / "loader.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"fanouts\[0\]"):
        run(tmp_path, 100, 100, 4, (0,), 8, num_batches=1, repeats=1)


def test_ratios_are_taken_within_a_turn():
    """The second turn ran on a machine half as fast: rates differ, ratios do not."""
    bound = ("row copy alone (bound)", 1)
    runs = {("sampling", 1): [(100, 1.0, 1.0), (100, 2.0, 2.0)], bound: [(100, 0.5, 0.5), (100, 1.0, 1.0)]}
    found = {name: [Taken(*taken) for taken in several] for name, several in runs.items()}
    sampling, copying = summarise(found, 10.0)
    assert sampling["share_of_copy_bound"] == 0.5
    assert copying["share_of_copy_bound"] == 1.0
    assert sampling["seeds_per_cpu_s"] == 75


def test_the_graph_is_heavy_tailed_and_repeatable():
    csc = power_law_graph(3000, 60_000, seed=0)
    assert csc.num_edges == 60_000
    assert csc.in_degree.max() > 10 * csc.in_degree.mean()
    np.testing.assert_array_equal(csc.indices, power_law_graph(3000, 60_000, seed=0).indices)
