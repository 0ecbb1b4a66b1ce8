"""Rows read range after range: no more slots than there are, each range once a pass, batches that wait in few bytes."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from test_part_loader import SAMPLERS, WORLD, contents, loader_threads, make_loader

from lightning_gnnscale import events
from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.loader import Interleave, InterleavedWalk, PartWalk, RowReads
from lightning_gnnscale.loader.part_walk import in_order, visits_together
from lightning_gnnscale.loader.row_sweep import RowSweep, swept_table
from lightning_gnnscale.loader.sweep_trial import PartUse, SweepTrial, blocks_touched, power_of_degree
from lightning_gnnscale.loader.waiting_batch import WaitingBatch
from lightning_gnnscale.partition_store import DenseFeatures
from lightning_gnnscale.partition_store.features import CSRFeatures
from lightning_gnnscale.partition_store.planned_reads import bytes_read
from lightning_gnnscale.planner.sweep_plan import RANGES, EpochUse
from tests.says import said


def take(shape, dtype):
    return np.empty(shape, dtype)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_batch_that_waits_comes_out_bit_for_bit(name):
    for batch in make_loader(sampler=SAMPLERS[name], features=None):
        expected = contents(batch)
        waiting = WaitingBatch.of(batch)
        for one in fields(batch):  # it shares no memory with the batch
            if isinstance(getattr(batch, one.name), torch.Tensor) and getattr(batch, one.name).dtype != torch.bool:
                getattr(batch, one.name).fill_(99)
        assert contents(waiting.batch(take)) == expected


def test_fields_of_every_kind_wait(monkeypatch):
    batch = next(iter(make_loader(num_threads=0, features=None)))
    num = len(batch.n_id)
    wide = torch.tensor([-(1 << 40), 1 << 40] * num)[:num]
    for degree in (wide, torch.full((num,), 7), torch.arange(num) - 300, torch.full((num,), np.nan), torch.rand(num)):
        given = replace(batch, degree=degree, seed_of=torch.zeros(0, dtype=torch.int64), n_id=batch.n_id + (1 << 33))
        waiting = WaitingBatch.of(given)
        assert waiting.nodes.dtype == np.int64
        assert contents(waiting.batch(take)) == contents(given)
    backwards = replace(batch, edge_index=batch.edge_index.flip(1))
    assert contents(WaitingBatch.of(backwards).batch(take)) == contents(backwards), "targets do not follow from indptr"


def test_it_waits_in_a_fraction_of_its_bytes():
    batch = next(iter(make_loader(num_threads=0, features=None)))
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert WaitingBatch.of(batch).nbytes < 0.25 * sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("start", [0, 3])
def test_visits_come_together_and_in_the_order_of_their_beginnings(passes, start):
    counts = {0: 3, 1: 0, 2: 5, 3: 1, 4: 2, 5: 4}
    for walk in (InterleavedWalk(range(6), counts, 1, 2, 3, seed=4), PartWalk((5, 2, 1, 0), counts, passes)):
        expected = list(walk.positions(0, start))
        found = list(visits_together(walk, iter(expected)))
        assert [position[:4] for _, position in sorted(found)] == [position[:4] for position in expected]
        visits = [(position.visit, position.part) for _, position in found]
        starts = [visit for at, visit in enumerate(visits) if at == 0 or visits[at - 1] != visit]
        assert starts == list(dict.fromkeys((position.visit, position.part) for position in expected))
        following = [position.following for _, position in found]
        parts = [part for _, part in starts]
        assert following == [next(iter(parts[starts.index(visit) + 1 :]), None) for visit in visits]
        assert list(in_order((place, position) for place, position in found)) == [
            position for _, position in sorted(found)
        ]


def waiting(nodes) -> WaitingBatch:
    return WaitingBatch(np.asarray(nodes, np.int32), 0, {}, 4 * len(nodes))


def swept(features, batches, held_rows, **options):
    """Read the rows of batches of nodes in a sweep; return them, and the sweep."""
    sweep, coming, found = RowSweep(features, held_rows * features.array[:1].nbytes, **options), iter(batches), []
    try:
        while True:
            while sweep.takes_more:
                nodes = next(coming, None)
                sweep.end() if nodes is None else sweep.add(waiting(nodes))
            sweep.advance()
            if sweep.is_ready:
                batch, rows = sweep.take()
                found.append(rows.read(batch.nodes.astype(np.int64)))
                sweep.free()
            elif sweep.is_empty:
                return found, sweep
            else:
                sweep.wait()
    finally:
        sweep.close()


@pytest.mark.parametrize("held_rows", [1, 300, 700, 5000])
@pytest.mark.parametrize("dtype", ["float16", "uint8", "float64"])
def test_rows_are_those_of_the_table(held_rows, dtype):
    random = np.random.default_rng(held_rows)
    features = DenseFeatures(random.integers(0, 256, (5000, 6)).astype(dtype))
    batches = [random.permutation(5000)[: random.integers(1, 200)] for _ in range(400)]
    found, sweep = swept(features, batches, held_rows)
    assert len(found) == len(batches)
    for rows, nodes in zip(found, batches, strict=True):
        np.testing.assert_array_equal(rows, features.array[nodes])
    largest = max(map(len, batches))
    assert len(sweep._free) <= max(held_rows, 2 * largest), "slots were taken beyond what one batch needs"
    assert sweep._num_free == len(sweep._free)
    assert len(sweep._slots) == 0, "rows outlive their sweep"
    assert loader_threads() == []


def test_a_pass_serves_more_batches_than_slots_hold():
    """Rows are held for about half of a pass: batches wait whose rows take nearly twice the slots."""
    random, num_nodes = np.random.default_rng(0), 64 * RANGES * 40
    features = DenseFeatures(np.arange(num_nodes, dtype=np.int32)[:, None])
    batches = [random.integers(0, num_nodes, 20) for _ in range(12_000)]  # 240,000 rows of 81,920
    held = num_nodes // 10
    _, sweep = swept(features, batches, held)
    windows = 240_000 / held  # in which each row is read and held at once, none twice
    assert 1 < sweep.passes < 0.75 * windows


def test_batches_that_wait_are_bounded():
    random = np.random.default_rng(1)
    features = DenseFeatures(random.random((5000, 2)))
    batches, most = [random.integers(0, 5000, 10) for _ in range(300)], 0
    sweep = RowSweep(features, features.nbytes, waiting_bytes=1000)
    coming, handed = iter(batches), 0
    while handed < len(batches):
        while sweep.takes_more:
            nodes = next(coming, None)
            sweep.end() if nodes is None else sweep.add(waiting(nodes))
        most = max(most, sweep._waiting)
        sweep.advance()
        if sweep.is_ready:
            sweep.take()
            sweep.free()
            handed += 1
        else:
            sweep.wait()
    sweep.close()
    assert 1000 <= most < 1000 + 41


def test_a_disk_that_fails_ends_in_its_line(tmp_path):
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).random((3000, 16)))
    features = DenseFeatures(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    with open(tmp_path / "rows.npy", "r+b") as file:
        file.truncate(100_000)
    with pytest.raises(PartitionStoreError, match=said("rows.npy cannot be read the file was shortened")):
        swept(features, [np.arange(3000)], 5000)
    assert loader_threads() == []


def test_what_an_epoch_read_is_recorded(tmp_path):
    np.save(tmp_path / "rows.npy", WORLD.features.array)
    features = DenseFeatures(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    reads = RowReads("planned", 20_000, is_swept=True, by_part=True, predicted_bytes=123)
    loader = make_loader(features=features, reads=reads, interleave=Interleave(0, 1, 3))
    rows = sum(len(batch.n_id) for batch in loader)
    told = [event for event in events.recent() if event["event"] == "rows_read"][-1]
    assert (told["how"], told["rows"], told["predicted_bytes"]) == ("swept", rows, 123)
    assert told["used_bytes"] == rows * features.array[:1].nbytes
    assert told["feature_bytes"] >= features.nbytes and told["passes"] >= 1


def test_only_dense_tables_are_swept():
    sparse = CSRFeatures(np.zeros(3, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32), 4)
    assert swept_table(sparse) is None and swept_table(WORLD.features) is WORLD.features
    with pytest.raises(ValueError, match=said("is_swept planned how='mapped'")):
        RowReads(is_swept=True)
    with pytest.raises(ValueError, match=said("by_part is_swept how='planned'")):
        RowReads("planned", by_part=True)


def test_a_trial_tells_what_a_sweep_reads(tmp_path):
    """Batches use cores of their parts by degree, and some nodes of the halos; the trial has half of the nodes."""
    random, num, parts = np.random.default_rng(0), 1 << 17, 32
    degrees, offsets = np.repeat([2.0, 30.0], num // 2), np.arange(parts + 1) * (num // parts)
    random.shuffle(degrees)
    halos = [random.choice(num, num // 8, replace=False) for _ in range(parts)]
    order = np.repeat(random.permutation(parts), 25).reshape(-1, 4)

    def chunk(part):
        own = np.arange(offsets[part], offsets[part + 1])
        keys = random.standard_exponential(len(own)) / (degrees[own] + 1)
        return np.concatenate([own[np.argsort(keys)[:600]], random.choice(halos[part], 200, replace=False)])

    batches = [np.concatenate([chunk(part) for part in batch]) for batch in order]
    own = chunk(0)[:600]
    power = power_of_degree(degrees[: offsets[1]], degrees[own], 600 / offsets[1])
    assert power == pytest.approx(1, abs=0.15)
    use = EpochUse(num, 64, rows=800 * order.size, own_share=0.75, waiting_bytes=3200 * order.size)
    shown = [PartUse(0, 8, 600, 200, power, 0.0, 0.0, blocks_touched(np.sort(halos[0])), degrees)]
    given = offsets, np.full(parts, num // 8), order.tolist(), np.full((parts, 2), [600, 200]), shown
    np.save(tmp_path / "rows.npy", np.zeros((num, 16), np.float32))
    features, before = DenseFeatures(np.load(tmp_path / "rows.npy", mmap_mode="r")), bytes_read.total
    run = SweepTrial(use, *given, np.zeros(parts, np.int64)).run(30_000 * 64)
    _, sweep = swept(features, batches, 30_000)
    assert sweep.passes > 3 and run.passes == pytest.approx(sweep.passes, rel=0.2)
    assert run.read_bytes == pytest.approx(bytes_read.total - before, rel=0.2)
