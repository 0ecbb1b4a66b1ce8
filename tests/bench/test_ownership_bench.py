"""`gnnscale bench ownership`: its counts against what holders answer, and what it refuses."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import ownership
from benchmarks.runner import RowFile
from lightning_gnnscale.datamodule.train_loader import make_graph_loader
from lightning_gnnscale.edge_stream import lfr_graph
from lightning_gnnscale.loader import LoaderOptions, RankPlace, Threads
from lightning_gnnscale.partition_store import write_partition_store
from lightning_gnnscale.partitioner import partition
from lightning_gnnscale.remote.held_rows import (
    DistributedFeatures,
    HeldFeatures,
    HeldNodes,
    HeldRows,
    PartOwners,
    most_linked,
)
from lightning_gnnscale.remote.holder import Answered, num_bytes
from lightning_gnnscale.remote.sampling_owners import OwnedGraph, sampler_of_owners
from lightning_gnnscale.sampler import NeighborSampler
from tests.says import said

NODES, DIM, MACHINES = 3000, 6, 3
SETTINGS = {"graphs": ["lfr:30000:3000"], "methods": ["random", "spring"], "parts": [4], "machines": [2, 4, 8]}
SETTINGS |= {"fanouts": [4, 3], "batch_size": 200, "feature_bytes": 4 * DIM}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    graph = lfr_graph(NODES, 30_000, seed=3)
    stream, masks = graph.stream(), graph.masks()
    arrays = {"features": np.random.default_rng(0).random((NODES, DIM), np.float32), "masks": masks}
    parts = partition(stream, "spring", 5, masks=masks)
    return write_partition_store(tmp_path_factory.mktemp("own") / "s", stream, parts, labels=graph.labels(), **arrays)


@pytest.mark.parametrize("replicate_share", [0.0, 0.2])
def test_counts_are_the_bytes_that_holders_answer_with(store, replicate_share):
    bench = ownership.OwnershipBench(**SETTINGS)
    asked = ownership.Asked(store, MACHINES, bench, replicate_share)
    replicated = most_linked(store.csc.indptr, int(replicate_share * NODES * 4 * DIM), 4, 4 * DIM)
    owners, held = PartOwners(store.part_offsets, asked.owner.tolist()), []
    for machine in range(MACHINES):
        nodes = HeldNodes(store.part_offsets, np.flatnonzero(asked.owner == machine), replicated)
        held.append((HeldRows.read(store.csc, nodes), HeldFeatures.read(store.features, nodes)))
    answered = np.zeros((MACHINES, MACHINES), np.int64)
    for machine in range(MACHINES):

        def ask(owner, request, to=machine):
            rows, features = held[owner]
            answer = list(map(rows.sample, request)) if isinstance(request, list) else features.answer(request)
            answered[owner, to] += num_bytes(answer)
            return Answered(answer)

        rows, own = held[machine]
        graph = SimpleNamespace(
            sampler=lambda one, rows=rows, ask=ask: sampler_of_owners(one, OwnedGraph(rows, owners, ask))
        )
        features = DistributedFeatures.of(store.features, own, owners, ask)
        options, place = LoaderOptions(200, 0), RankPlace(machine, MACHINES, machine)
        for batch in make_graph_loader(store, NeighborSampler([4, 3]), options, features, Threads(), place, graph):
            asked.count(machine, batch)
    assert (answered > 0).sum() == MACHINES * (MACHINES - 1)
    assert np.array_equal(asked.traffic.num_bytes(), answered)
    # All batches of an epoch were counted: nothing is extrapolated, and a link of 1 Gbit/s carries 125 MB a second.
    told, busiest = asked.told(), max(answered.sum(axis=0).max(), answered.sum(axis=1).max())
    assert told["epoch_bytes"] == pytest.approx(answered.sum(), rel=2e-3)
    assert told["link_s"] == pytest.approx(busiest / 125e6, abs=1e-4)


def test_one_row_for_each_method_and_number_of_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "in_fresh_process", lambda function, *given: function(*given))
    rows = ownership.run(tmp_path, **SETTINGS, num_batches=2)
    assert [(row["machines"], row["method"]) for row in rows] == [
        (machines, method) for machines in (2, 4) for method in ("random", "spring")
    ]
    assert len(RowFile(tmp_path / "ownership.csv").rows) == 4, "no row for more machines than parts"
    for row in rows:
        assert row["num_batches"] == 2 * row["machines"]
        assert 0 < row["away_share_replicated"] < row["away_share"] < 1
        assert 0 < row["link_s_replicated"] <= row["link_s"] <= row["epoch_bytes"] / 125e6
    for row in (row for row in rows if row["method"] == "random"):
        elsewhere = 1 - 1 / row["machines"]  # of all nodes; but its own targets a machine has, a tenth of the rows
        assert 0.9 * elsewhere < row["away_share"] < elsewhere
    measured = ownership.run(tmp_path, **SETTINGS, num_batches=2)
    assert measured == rows, "a case that has its rows is not measured again"


def test_settings_out_of_range_are_told_in_one_line(tmp_path):
    for changed, message in (
        ({"machines": [8]}, "bench.machines 4 bench.parts [8]"),
        ({"parts": [0, 4]}, "bench.parts 1 [0, 4]"),
        ({"replicate_share": 1.5}, "bench.replicate_share [0, 1] 1.5"),
        ({"link_gbit_per_s": 0}, "bench.link_gbit_per_s 0 0"),
    ):
        with pytest.raises(ValueError, match=said(message)):
            ownership.run(tmp_path, **SETTINGS | changed)
    assert not list(tmp_path.iterdir())
