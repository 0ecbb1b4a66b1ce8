"""What a sweep is predicted to hold and read, against counts of sampled rows and against the sweep itself."""

from itertools import pairwise

import numpy as np
import pytest

from lightning_gnnscale.loader.row_reads import Footprint, RowReads
from lightning_gnnscale.loader.sweep_choice import choose_swept
from lightning_gnnscale.loader.sweep_trial import PartUse, SweepTrial, blocks_touched
from lightning_gnnscale.partition_store import DenseFeatures
from lightning_gnnscale.partition_store.features import CSRFeatures
from lightning_gnnscale.planner.sweep_plan import EpochUse, plan_sweep, rows_space, window_bytes

NUM = 100_000


def use(**changes) -> EpochUse:
    given = {"rows": 2 * NUM, "waiting_bytes": 24.0 * NUM, "part_rows": np.full(10, NUM // 2)}
    return EpochUse(NUM, 128, **(given | changes))


@pytest.mark.parametrize("own_share", [0.0, 0.5])
def test_distinct_rows_are_those_of_a_sample(own_share):
    random, parts = np.random.default_rng(0), 20
    degrees = np.repeat([1.0, 10.0], NUM // 2)
    random.shuffle(degrees)
    drawn = []
    for part in range(parts):
        num, own = 2 * NUM // parts, np.arange(part * NUM // parts, (part + 1) * NUM // parts)
        for nodes, share in ((own, own_share), (np.arange(NUM), 1 - own_share)):
            drawn.append(random.choice(nodes, int(num * share), p=degrees[nodes] / degrees[nodes].sum()))
    found = use(own_share=own_share, degrees=degrees)
    for visited in (5, 10, 20):
        expected = len(np.unique(np.concatenate(drawn[: 2 * visited])))
        assert found.distinct(visited / parts) == pytest.approx(expected, rel=0.03)


def test_more_memory_reads_fewer_bytes_and_stays_within_it():
    plans = [plan_sweep(use(), space) for space in np.geomspace(1.5e6, 40e6, 12)]
    assert all(a.read_bytes >= b.read_bytes for a, b in pairwise(plans))
    assert plans[-1].passes == 1 and plans[0].passes > 5
    for plan, space in zip(plans, np.geomspace(1.5e6, 40e6, 12), strict=True):
        assert plan.held_bytes + plan.waiting_bytes <= space


def test_no_pass_reads_more_than_the_table_and_few_rows_leave_most_of_it():
    assert use().pass_bytes(1.0) <= NUM * 128
    assert use(rows=20).pass_bytes(1.0) < 0.2 * NUM * 128
    assert window_bytes(use(), 1e6, 0.0) > plan_sweep(use(waiting_bytes=0.0), 1e6 + 4 * NUM).read_bytes


def test_a_model_is_left_three_steps_within_bounds():
    assert rows_space(1000) == rows_space(1000, 90) == pytest.approx(700), "a share, whatever the model"
    assert rows_space(1000, 120) == pytest.approx(640)
    assert rows_space(1000, 900) == pytest.approx(500), "rows have a half"


def choose(features, reads, free_bytes=10_000_000, **options) -> RowReads:
    first = Footprint(part_bytes=10_000, rows=500, sampled_bytes=10_000, waiting_bytes=5000)
    parts = [PartUse(0, 10, 0, 5000, 0.0, 0.0, 0.0, blocks_touched(np.arange(0)), np.ones(1))]
    offsets, like = np.array([0, NUM]), np.zeros(1, np.int64)
    trial = SweepTrial(use(), offsets, np.array([NUM]), [[0]] * 40, np.array([[0.0, 5000.0]]), parts, like)
    sizes = {"part_bytes": 50_000, "two_parts_bytes": 20_000, "open_share": 0.0} | options
    return choose_swept(reads, features, first, trial, free_bytes=free_bytes, **sizes)


def test_what_reads_fewer_bytes_is_chosen_and_said():
    features = DenseFeatures(np.broadcast_to(np.float32(0), (NUM, 32)))
    planned = RowReads("planned", 500_000)
    swept = choose(features, planned)
    assert swept.is_swept and not swept.by_part and "passes over 12.2 MiB" in swept.why
    assert swept.predicted_bytes < 0.8 * window_bytes(use(), 500_000, 500 * 10_000)
    assert not choose(features, RowReads("planned", 30_000_000)).is_swept, "one window holds all"
    assert choose(features, RowReads(why="they fit")).how == "mapped"
    sparse = CSRFeatures(np.zeros(NUM + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32), 32)
    assert not choose(sparse, planned).is_swept
    assert choose(features, planned, open_share=0.001).by_part
    beside = choose(features, planned, step_bytes=1_200_000)
    assert beside.is_swept and beside.window_bytes < swept.window_bytes
    shared = choose(features, planned, free_bytes=5_000_000, num_processes=2)
    assert shared.shared_by == 2 and "by 2 processes together" in shared.why
    assert swept.predicted_bytes < shared.predicted_bytes, "twice the batches, in as much memory"
    assert shared.predicted_bytes < 2 * 0.8 * choose(features, planned, free_bytes=5_000_000).predicted_bytes
    assert not choose(features, planned, open_share=0.9, part_bytes=30_000).by_part, "whole visits would fill it"
