"""The number of parts and the partitioner are settled by halos as measured, or the run is refused in one line."""

from functools import partial

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale import memory
from lightning_gnnscale.errors import PlanError
from lightning_gnnscale.partition_store import StoreSource, store_source
from tests.says import said

NUM_NODES, REACH = 2000, 15
STEPS = np.arange(1, REACH + 1)
# A band: parts of neighbouring ids have small halos, random ones read nearly the whole graph.
BAND = np.stack([np.repeat(np.arange(NUM_NODES), REACH), (np.arange(NUM_NODES)[:, None] + STEPS).ravel() % NUM_NODES])
FEATURES = np.ones((NUM_NODES, 100), np.float32)
SPACE = 300_000  # bytes for a part; the features are 800,000
BATCHES = {"batch_size": 8, "fanouts": (2, 2)}


def make_source(folder, space: int = SPACE, memory_bytes: int = 200 << 20, **options) -> StoreSource:
    stream = gs.open_edge_stream(BAND, num_nodes=NUM_NODES, layout="once")
    given = {"device_memory_bytes": memory_bytes, "compute_bytes": memory_bytes - space, "host_memory_bytes": None}
    dataset = gs.GraphDataset("band", stream, FEATURES)
    return StoreSource(dataset, folder / "store", planner=partial(gs.plan, **given), **options)


def settled(made: StoreSource):
    return made.settle(partial(made.make_plan, 1, **BATCHES))


def count_partitionings(monkeypatch) -> list:
    asked = []

    def counted(stream, method, num_parts, **options):
        asked.append((method, num_parts))
        return gs.partition(stream, method=method, num_parts=num_parts, **options)

    monkeypatch.setattr(store_source, "partition", counted)
    return asked


def test_nothing_is_measured_where_memory_is_ample(tmp_path, monkeypatch):
    asked = count_partitionings(monkeypatch)
    made = make_source(tmp_path, space=10 << 20, partitioner="random")
    assert settled(made).num_parts == made.num_parts == 1
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_parts_grow_until_the_largest_fits_with_its_halo(tmp_path, monkeypatch):
    asked = count_partitionings(monkeypatch)
    made = make_source(tmp_path, partitioner="range")
    plan = settled(made)
    assert plan.fits
    assert plan.chosen_by == "halo"
    assert 800_000 / plan.num_parts < plan.part_bytes <= SPACE
    assert "the fewest tried that fit" in plan.explain()
    made.prepare(plan.num_parts)
    assert len(asked) <= 3, "the partitioning that was measured is stored"
    again = make_source(tmp_path, partitioner="range")
    assert settled(again).num_parts == plan.num_parts
    assert len(asked) <= 3, "what was measured is known"


def test_a_partitioner_whose_halos_do_not_fit_is_kept_and_another_is_named(tmp_path, monkeypatch):
    asked = count_partitionings(monkeypatch)
    made = make_source(tmp_path, partitioner="random")
    with pytest.raises(PlanError) as refused:
        settled(made)
    line = str(refused.value)
    assert "\n" not in line
    assert "with parts by random" in line
    assert "partitioner=streaming_multilevel" in line
    assert "short" in line
    assert made.partitioner == "random"
    assert len(asked) <= 3
    before = len(asked)
    with pytest.raises(PlanError):
        settled(make_source(tmp_path, partitioner="random"))
    assert len(asked) <= before + 1


def test_a_partitioner_that_does_not_fit_is_refused_before_work_and_a_lighter_one_is_named(tmp_path):
    made = make_source(tmp_path, partitioner="streaming_multilevel")
    made.planner = partial(gs.plan, host_memory_bytes=51 << 20)
    with pytest.raises(PlanError, match=said("streaming_multilevel partitioner=spring planner.host_memory_bytes=")):
        made.settle(partial(made.make_plan, 1, interpreter_bytes=0, **BATCHES))


@pytest.mark.parametrize("num_parts", ["auto", 4])
def test_what_fits_at_no_number_of_parts_ends_before_work(tmp_path, monkeypatch, num_parts):
    asked = count_partitionings(monkeypatch)
    made = make_source(tmp_path, space=1, memory_bytes=1 << 20, partitioner="random", num_parts=num_parts)
    with pytest.raises(PlanError, match=said("1.00 MiB num_parts= planner.device_memory_bytes=")):
        settled(made)
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_record_of_measurements_is_measured_again(tmp_path):
    first = settled(make_source(tmp_path, partitioner="range"))
    record = tmp_path / "store.halos.json"
    for damage in ("", "[1]", '{"a": {"x": {}}}', record.read_text()[:-9]):
        record.write_text(damage)
        assert settled(make_source(tmp_path, partitioner="range")) == first


def test_a_datamodule_settles_what_it_prepares(tmp_path):
    made = make_source(tmp_path, space=2 * SPACE)
    given = {"partitioner": "range", "planner": made.planner, "batch_size": 8, "sampler": gs.NeighborSampler([2, 2])}
    dm = gs.PartitionDataModule(root=tmp_path / "s", dataset=made.dataset, **given)
    dm.prepare_data()
    again = make_source(tmp_path, space=2 * SPACE, partitioner="range")
    plan = again.settle(partial(again.make_plan, 1, mixed_parts=4, **BATCHES))
    assert dm.store.num_parts == plan.num_parts > 5
    assert plan.part_bytes * 5 <= 2 * SPACE


def test_a_cap_of_a_cgroup_is_found_and_said(monkeypatch):
    sizes = {"num_nodes": 1000, "num_edges": 4000, "batch_size": 8, "fanouts": (2, 2), "accelerator": "cpu"}
    monkeypatch.setattr(memory, "_cgroup_limits", lambda: [(2 << 30, 0)])
    found = gs.plan(**sizes, num_devices=2)
    assert found.host_memory_bytes == 2 << 30
    assert found.device_memory_bytes < 1 << 30, "interpreters are left out"
    assert "2.00 GiB (found)" in found.explain()
    assert found.fits
    given = gs.plan(**sizes, host_memory_bytes="3GiB", device_memory_bytes="1GiB")
    assert "3.00 GiB (given)" in given.explain()
    assert "1.00 GiB (given)" in given.explain()
    monkeypatch.setattr(memory, "_cgroup_limits", lambda: [(200 << 20, 0)])
    assert "NO: " in gs.plan(**sizes).explain()
    free = gs.plan(**sizes, host_memory_bytes=None, device_memory_bytes=None)
    assert free.fits
    assert "not limited" in free.explain()
