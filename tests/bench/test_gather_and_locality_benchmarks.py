"""The benchmarks of gathering and of locality: every way gathers the same rows, and what the dial trades."""

import csv

import numpy as np
import pytest

from benchmarks import gather, locality
from benchmarks.graphs import load_workload
from lightning_gnnscale.sampler import LayerwiseSampler, NeighborSampler
from lightning_gnnscale.sampler.protocol import Subgraph
from tests.says import said


def test_gather_measures_every_way_and_cache(tmp_path):
    found = gather.run(
        tmp_path, num_nodes=2000, num_edges=20_000, dim=16, fanouts=[3, 2], batch_size=32, num_batches=6, repeats=1,
        cache_shares=[0.05, 0.2],
    )  # fmt: skip
    ways = {row["way"]: row for row in found["gather"]}
    assert ways[gather.BOUND]["share_of_bound"] == ways[gather.PLAIN]["time_over_plain"] == 1
    assert {f"plain table of {storage}" for storage in gather.STORAGES} < ways.keys()
    for row in found["gather"]:
        assert row["rows_per_s"] > 0
        if row.get("local") is not None:
            assert sum(row[tier] for tier in ("local", "peer", "host", "disk", "cache")) == pytest.approx(1, abs=1e-3)
    rate = {(row["policy"], row["cache_share"]): row["hit_rate"] for row in found["cache"]}
    for share in (0.05, 0.2):
        assert rate["belady", share] >= max(rate["lru", share], rate["sieve", share])
    assert rate["belady", 0.2] >= rate["belady", 0.05] > 0
    for name in ("gather.csv", "cache.csv"):
        with open(tmp_path / name) as file:
            assert "cpu" in next(csv.reader(file))
    assert (tmp_path / "gather.png").stat().st_size > 5000


def test_weighted_means_are_those_of_the_sampled_edges():
    values = np.arange(8.0).reshape(4, 2)
    sampled = Subgraph(
        n_id=np.array([1, 3, 0]), edge_index=np.array([[1, 2, 2], [0, 0, 1]]), indptr=np.array([0, 2, 3]), num_seeds=2
    )
    assert locality.weighted_means(sampled, values).tolist() == [[3, 4], [0, 1]]
    weighed = sampled._replace(edge_weight=np.array([0.5, 2.0, 1.0]))
    assert locality.weighted_means(weighed, values).tolist() == [[3, 5.5], [0, 1]]


@pytest.mark.sweep
@pytest.mark.parametrize("sampler", [NeighborSampler([4]), LayerwiseSampler([40])])
def test_a_wider_hop_has_less_variance(sampler):
    workload = load_workload("power_law:400", None)
    narrow = locality.mean_variance(workload, sampler, 32, 16)
    wide = NeighborSampler([-1]) if isinstance(sampler, NeighborSampler) else LayerwiseSampler([200])
    assert locality.mean_variance(workload, wide, 32, 16) < narrow


@pytest.mark.sweep
def test_the_dial_saves_reads_and_costs_variance(tmp_path):
    rows = locality.run(
        tmp_path, ["power_law:3000"], scales=[1, 8], nodes_per_layer=200, neighbor_set_size=300, batch_size=64,
        num_batches=8, num_keys=16, num_targets=64,
    )["dial"]  # fmt: skip
    assert [(row["sampler"], row["scale"]) for row in rows] == [
        (kind, scale) for kind in ("neighbor", "layerwise") for scale in (1, 8)
    ]
    for row in rows:
        if row["scale"] == 1:
            assert row["host_reads_saved"] == 0
            assert row["variance_ratio"] == 1
        else:
            assert row["host_reads_saved"] > 0.05
            assert row["variance_ratio"] > 1
    assert (tmp_path / "locality.png").stat().st_size > 5000


def test_losses_are_sampled_by_scale(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "metrics.csv").write_text("epoch,train_loss,val_acc\n0,2.5,\n0,,0.1\n1,1.25,\n")
    assert locality._losses(tmp_path) == {"losses": "2.5000 1.2500"}
    rows = [
        {"graph": "one", "scale": scale, "seed": seed, "test_acc": 0.5 + 0.1 * seed, "losses": f"3.0 {seed + scale}"}
        for scale in (1, 8)
        for seed in (0, 1)
    ]
    accuracy = locality._accuracies(rows, ["one"])
    assert [(row["scale"], row["test_acc"], row["last_loss"]) for row in accuracy] == [(1, 55, 1.5), (8, 55, 8.5)]
    locality._draw_losses(tmp_path / "losses.png", rows)
    assert (tmp_path / "losses.png").stat().st_size > 5000


def test_a_dial_without_host_reads_saves_none(tmp_path):
    rows = locality.run(
        tmp_path, ["power_law:100"], scales=[1, 2], samplers=["neighbor"], buffer_share=1.0, num_batches=1, num_keys=2,
        num_targets=4,
    )["dial"]  # fmt: skip
    assert [row["host_reads_saved"] for row in rows] == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": [2, 4]}, "bench.scales 1 [2, 4]"),
        ({"samplers": ["walk"]}, "bench.samplers neighbor layerwise walk"),
        ({"graphs": ["nothing_there"]}, "graph 'nothing_there'"),
        ({"train_graphs": ["nothing_there"]}, "graph 'nothing_there'"),
    ],
)
def test_bad_settings_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=said(message)):
        locality.run(tmp_path, **({"graphs": ["power_law:100"]} | options))
