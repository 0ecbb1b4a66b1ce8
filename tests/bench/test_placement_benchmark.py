"""The placement benchmark: what it counts, and what its tables say."""

import csv

import numpy as np
import pytest

from benchmarks.graphs import load_workload
from benchmarks.placement import Reads, cases_of, compared, cost, count_epochs, rule_of, run
from lightning_gnnscale.graph import build_csc
from lightning_gnnscale.placement import Placement
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace, sample_neighbors
from tests.says import said

DEVICES = {"2": [2], "2+2": [2, 2]}


def test_reads_are_shared_out_by_where_the_reading_device_finds_a_row():
    placement = Placement((np.array([0, 1]), np.array([2])), ((0, 1),), 5, np.arange(5) == 4, {}, (), "rule")
    reads = Reads(np.array([[4, 0, 3, 2, 1], [1, 1, 1, 1, 1]]))
    shares = reads.shares(placement)
    assert shares["local"].tolist() == [0.4, 0.2]
    assert shares["peer"].tolist() == [0.3, 0.4]
    assert shares["host"].tolist() == [0.2, 0.2]
    assert shares["disk"].tolist() == [0.1, 0.2]


def test_global_shuffling_deals_one_order_out_and_local_shuffling_keeps_to_own_nodes():
    # a star: every node reads node 0
    num_nodes = 9
    csc = build_csc(np.zeros(num_nodes - 1, np.int64), np.arange(1, num_nodes), num_nodes)
    space = Workspace(num_nodes, csc.indices.dtype)

    def sample(seeds, key):
        return sample_neighbors(csc, seeds, (1,), key, workspace=space).n_id

    together = np.arange(1, num_nodes)
    counts = count_epochs(sample, num_nodes, [together, together], 2, 0, 3).counts
    assert counts[:, 1:].sum(axis=0).tolist() == [3] * 8, "each node is a seed once an epoch"
    assert counts[:, 0].tolist() == [6, 6], "12 batches of two seeds in turns, and each reads node 0 once"
    apart = count_epochs(sample, num_nodes, [together[:4], together[4:]], 2, 0, 1).counts
    assert apart[0].tolist() == [2, 1, 1, 1, 1, 0, 0, 0, 0]
    assert apart[1].tolist() == [2, 0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.sweep
def test_a_run_writes_rows_in_which_the_rule_is_never_behind(tmp_path):
    rows = run(
        tmp_path,
        ["power_law:2000:30000"],
        DEVICES,
        buffer_shares=[0.1, 0.5],
        methods=["rule", "ranges", "random", "degree", "pagraph", "pagraph_local"],
        batch_size=32,
        seeds=[0, 1],
        batches_per_device=8,
    )
    with open(tmp_path / "placement.csv") as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 2 * 2 * 7
    assert (tmp_path / "placement.png").stat().st_size > 10_000
    for case in cases_of(rows):
        for alpha in (0.0, 0.2):
            rule, what = rule_of(case, alpha), compared(case, alpha)
            assert abs(rule["host"] + rule["peer"] + rule["local"] - 1) < 1e-4
            assert abs(rule["host"] - rule["predicted_host"]) < 0.05
            for row in case:
                if row["method"] in ("ranges", "random", "degree"):
                    assert cost(rule, alpha, what) <= cost(row, alpha, what) + 0.005, row
    # two devices of half the rows hold all of them: peer reads are compared
    assert {compared(case, 0.0) for case in cases_of(rows) if case[0]["buffer_share"] == 0.5} == {"peer"}


def test_layers_are_placed_by_their_own_samples(tmp_path):
    """All neighbours of two hops are nearly the whole graph: placed by them, the rows on devices are any rows."""
    case = {"graphs": ["power_law:2000:30000"], "devices": {"2": [2]}, "buffer_shares": [0.1], "alphas": [0.0]}
    case |= {
        "methods": ["rule", "naive", "random"],
        "nodes_per_layer": [64, 64],
        "batch_size": 32,
        "seeds": [0, 1],
    }
    host = {}
    for probability in ("auto", "vip"):
        rows = run(tmp_path / probability, **case, probability=probability)
        host[probability] = {row["method"]: row["host"] for row in rows}
    assert host["auto"]["rule"] < 0.8 * host["auto"]["random"]
    assert host["auto"]["rule"] <= host["auto"]["naive"] + 0.01 < host["auto"]["random"]
    assert host["auto"]["rule"] < host["vip"]["rule"]


@pytest.mark.sweep
def test_loading_and_computing_are_timed(tmp_path):
    case = {"graphs": ["power_law:2000:30000"], "devices": {"2": [2]}, "buffer_shares": [0.1, 0.5], "alphas": [0.0]}
    case |= {"methods": ["rule"], "batch_size": 32, "seeds": [0], "timed_batches": 2}
    rows = run(tmp_path, **case)
    assert all(row["load_s"] > 0 and row["compute_s"] > 0 for row in rows)
    assert rows[0]["compute_s"] == rows[1]["compute_s"], "whatever is placed"


def test_a_generated_workload_is_the_same_twice():
    one, two = (load_workload("power_law:500", None) for _ in range(2))
    assert np.array_equal(one.csc.indices, two.csc.indices)
    assert one.csc.num_edges == 10_000
    assert np.array_equal(one.train_nodes, two.train_nodes)
    assert len(one.train_nodes) == 50


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"graphs": ["nothing_there"]}, "graph 'nothing_there'"),
        ({"methods": ["rule", "best"]}, "bench.methods best"),
        (
            {"methods": ["ranges"]},
            "bench.methods ['ranges']",
        ),
        ({"seeds": []}, "bench.seeds value"),
        ({"buffer_shares": [0.1, 1.5]}, "bench.buffer_shares (0, 1] [0.1, 1.5]"),
        ({"nodes_per_layer": [0]}, "nodes_per_layer"),
        ({"probability": "guess"}, "bench.probability auto samples vip guess"),
        ({"devices": {"x": 4}}, "bench.devices.x sizes groups"),
    ],
)
def test_bad_settings_are_named(tmp_path, changed, message):
    settings = {"graphs": ["power_law:500"], "devices": {"2": [2]}, "methods": ["rule"], **changed}
    with pytest.raises(ValueError, match=said(message)):
        run(tmp_path, **settings)
