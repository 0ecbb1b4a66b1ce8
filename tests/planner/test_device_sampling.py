"""What the plan says of sampling on a GPU: bytes by hand, the decision, and that it is the sampler's own."""

import re

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.graph import CSC
from lightning_gnnscale.planner import plan
from lightning_gnnscale.planner.device_sampling import SHARE, size_sampling
from lightning_gnnscale.planner.device_speed import stage_bounds
from lightning_gnnscale.planner.host_memory import BatchShape, RunSize
from lightning_gnnscale.triton_kernels.sample_neighbors import Relation, device_graph
from tests.says import said

RUN = RunSize(1_000_000, 20_000_000, num_parts=4)
SHAPE = BatchShape(feature_dim=128, batch_size=1000, fanouts=(10, 5), prefetch_batches=3)
ROWS = 500_000  # core and halo of a part
EDGES = 8 * (ROWS + 1) + 4 * 5_000_000


def sizes(free=None, sampled_on="auto", shape=SHAPE, **options):
    return size_sampling(RUN, shape, free, sampled_on, **{"part_rows": ROWS} | options)


def test_edges_and_columns_of_the_parts_that_are_held_and_samples_in_flight():
    found = sizes()
    assert found.there and found.num_parts == 2
    assert found.graph_bytes == 2 * (EDGES + 24 * ROWS)
    assert found.sample_bytes > 3 * 4 * ROWS and found.device_bytes == found.graph_bytes + found.sample_bytes
    assert sizes(samples_whole=True).graph_bytes == 8 * 1_000_001 + 4 * 20_000_000 + 24 * 1_000_000
    assert sizes(mixed_parts=3).num_parts == 4


def test_the_share_and_the_bytes_of_edges_are_the_samplers_own():
    assert device_graph.SHARE == SHARE
    indptr, indices = np.arange(11, dtype=np.int64) * 2, np.zeros(20, np.int32)
    plain = size_sampling(RunSize(10, 20), BatchShape(batch_size=2, fanouts=(2,)), None)
    assert plain.graph_bytes - 24 * 10 == device_graph.relation_bytes(Relation.of(CSC(indptr, indices)))


@pytest.mark.parametrize(
    ("free", "sampled_on", "why"),
    [
        (EDGES + 2 * EDGES, "auto", ""),  # the second part has half of what the first leaves
        (3 * EDGES - 1, "auto", "edges of a part 0.5 free"),
        (3 * EDGES - 1, "cuda", ""),
        (None, "cpu", "sampler.device=cpu"),
    ],
)
def test_where_auto_samples(free, sampled_on, why):
    found = sizes(free, sampled_on)
    assert found.there == (not why)
    assert not why or re.search(said(why), found.why)
    assert found.device_bytes == (0 if why else found.graph_bytes + found.sample_bytes)


def test_another_setting_is_refused():
    with pytest.raises(ValueError, match=said("planner.sampled_on auto cpu cuda gpu")):
        sizes(sampled_on="gpu")


GIVEN = {"num_nodes": 1_000_000, "num_edges": 20_000_000, "feature_dim": 128, "batch_size": 1000, "fanouts": [10, 5]}
GIVEN |= {"host_memory_bytes": "64GiB", "num_parts": 4}


def test_a_plan_for_a_gpu_counts_it():
    found = {on: plan(**GIVEN, accelerator="gpu", device_memory_bytes="8GiB", sampled_on=on) for on in ("auto", "cpu")}
    more = found["auto"].device_peak_bytes - found["cpu"].device_peak_bytes
    assert more == found["auto"].sampling.device_bytes > 0
    assert dict(found["auto"].terms())["neighbours are sampled"] == "on the GPU"
    assert dict(found["cpu"].terms())["neighbours are sampled"].startswith("on the CPU: sampler.device=cpu")
    assert plan(**GIVEN, accelerator="cpu", device_memory_bytes="8GiB").sampling is None
    without = plan(**GIVEN | {"fanouts": ()}, accelerator="gpu", device_memory_bytes="8GiB", device="h200")
    assert without.sampling is None


def test_a_card_samples_by_its_memory_and_ids_do_not_cross():
    there = {one.stage: one for one in stage_bounds(10**7, 2 * 10**8, SHAPE, "h200", sampled_there=True)}
    nodes, edges = (1000, 10_000, 50_000), 60_000
    moved = 32 * (5 * edges + 2 * 11_000)
    assert there["sample"].num_bytes == moved
    assert there["sample"].seconds == pytest.approx(moved / 4800e9 + 2 * 10e-6)
    assert there["cross"].num_bytes == 8 * sum(nodes)
    on_host = {one.stage: one for one in stage_bounds(10**7, 2 * 10**8, SHAPE, "h200", "host", sampled_there=True)}
    assert on_host["cross"].seconds == pytest.approx(sum(nodes) * 512 / 64e9)
    terms = dict(plan(**GIVEN, accelerator="cpu", device_memory_bytes="8GiB", device="h200").terms())
    assert terms["neighbours are sampled"] == "on the GPU"
    small = dict(
        plan(**GIVEN | {"num_edges": 10**11}, accelerator="cpu", device_memory_bytes=None, device="l4").terms()
    )
    assert "are more than 0.5" in small["neighbours are sampled"]


def test_a_datamodule_says_where_it_samples(tmp_path):
    made = gs.PartitionDataModule(store=tmp_path, sampler=gs.NeighborSampler([2], device="cuda"))
    assert made._sampled_on == "cuda"
    assert (
        gs.PartitionDataModule(store=tmp_path, sampler=gs.NeighborSampler([2]), source="processes")._sampled_on == "cpu"
    )
    induced = gs.NeighborSampler([2], subgraph_type="induced")
    assert gs.PartitionDataModule(store=tmp_path, sampler=induced)._sampled_on == "cpu"
