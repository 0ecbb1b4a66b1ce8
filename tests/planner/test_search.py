"""Halos by the number of parts: estimated, measured, and searched for the fewest parts that fit."""

import dataclasses

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.planner import search
from lightning_gnnscale.planner.search import MOST_MEASURED, PartRows, SampledHalos, rows_curve, search_parts

NUM_NODES = 100_000
FEATURES = 400 * NUM_NODES


def plan_at(space: int):
    """Plans of a graph of 40 MB of features, of which a part may have so many bytes."""

    def plan(num_parts: int, part: PartRows):
        sizes = {"num_nodes": NUM_NODES, "num_edges": 0, "feature_bytes": FEATURES, "num_parts": num_parts}
        memory = {"device_memory_bytes": (1 << 30) + space, "compute_bytes": 1 << 30, "host_memory_bytes": None}
        halo = part.rows - NUM_NODES // num_parts if part.halo is None else part.halo
        return gs.plan(**sizes, **memory, part_rows=part.rows).with_halo(max(0, halo), part.part_bytes)

    return plan


class Measure:
    """A partitioner of which only the rows of its largest part are known."""

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def __call__(self, num_parts: int) -> PartRows:
        self.asked.append(num_parts)
        return PartRows(int(self.rows(num_parts)))


def test_a_curve_passes_through_what_is_known_and_goes_on():
    rows = rows_curve({4: 50_000, 16: 25_000}, NUM_NODES)
    assert [rows(p) for p in (1, 4, 16)] == [NUM_NODES, 50_000, 25_000]
    assert rows(2) == pytest.approx(NUM_NODES * 2**-0.5)
    assert rows(64) == pytest.approx(12_500)
    assert rows_curve({2: 50_000}, NUM_NODES)(1000) == NUM_NODES / 1000
    assert rows_curve({}, NUM_NODES)(7) == NUM_NODES


def test_the_fewest_parts_are_found_with_few_partitionings():
    measure, known = Measure(lambda p: 3 * NUM_NODES / p**0.7), {}
    plan = search_parts(plan_at(5_000_000), NUM_NODES, 8, 4096, known, measure, {})
    assert plan.fits
    assert len(measure.asked) <= MOST_MEASURED
    assert plan.num_parts == measure.asked[-1]
    least = next(p for p in range(8, 4096) if plan_at(5_000_000)(p, measure(p)).fits)
    assert plan.num_parts <= 1.3 * least
    again = Measure(measure.rows)
    assert search_parts(plan_at(5_000_000), NUM_NODES, 8, 4096, known, again, {}).num_parts == plan.num_parts
    assert again.asked == [], "what was measured is known"


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_halos_that_tend_to_the_whole_graph_end_the_search(share):
    measure = Measure(lambda p: share * NUM_NODES)
    for _ in range(2):
        known: dict = {}
        assert search_parts(plan_at(5_000_000), NUM_NODES, 8, 4096, known, measure, {}) is None
    assert len(measure.asked) <= 2 * MOST_MEASURED


def test_every_search_is_bounded_whatever_the_halos_do():
    generator = np.random.default_rng(0)
    for _ in range(50):
        measure = Measure(lambda p: generator.integers(1, NUM_NODES))
        search_parts(plan_at(300_000), NUM_NODES, 130, 4096, {}, measure, {})
        assert len(measure.asked) <= MOST_MEASURED


def test_an_estimate_that_does_not_fit_is_measured_all_the_same():
    measure, guessed = Measure(lambda p: NUM_NODES), {8: NUM_NODES, 32: NUM_NODES}
    assert search_parts(plan_at(5_000_000), NUM_NODES, 8, 4096, {}, measure, guessed) is None
    assert measure.asked, "an estimate may be too high"


def test_a_sample_of_a_small_graph_is_the_graph():
    graph = gs.SyntheticGraph(1000, 5000, num_communities=10, seed=0)
    sample = SampledHalos(graph.stream(), 0)
    assert sample.rate == 1
    for method in ("spring", "random"):
        made = gs.partition(graph.stream(), method=method, num_parts=4, seed=0)
        rows = max(np.add(made.quality.nodes_per_part, made.quality.halo_per_part))

        def partition(stream, num_parts, seed, made=made):
            return dataclasses.replace(made, part_id=made.part_id[sample.nodes_of_sample])

        assert sample.rows(partition, 4) == pytest.approx(rows, rel=0.02)


@pytest.mark.parametrize("method", ["spring", "random"])
def test_halos_of_a_sample_are_those_of_the_graph_nearly(monkeypatch, method):
    monkeypatch.setattr(search, "SAMPLE_EDGES", 20_000)
    graph = gs.SyntheticGraph(10_000, 100_000, num_communities=20, homophily=0.9, seed=0)
    sample = SampledHalos(graph.stream(), 0)
    assert sample.edges.shape[1] < 30_000
    assert "estimated on a sample" in sample.note
    for num_parts in (4, 16):

        def partition(stream, num_parts, seed):
            return gs.partition(stream, method=method, num_parts=num_parts, seed=seed)

        quality = gs.partition(graph.stream(), method=method, num_parts=num_parts, seed=0).quality
        rows = max(np.add(quality.nodes_per_part, quality.halo_per_part))
        assert sample.rows(partition, num_parts) == pytest.approx(rows, rel=0.3)
