"""`gnnscale bench remote_rows`: who makes which chunk, shares against what is known of them, and what it refuses."""

import numpy as np
import pytest

from benchmarks import remote_rows
from benchmarks.remote_rows import makers_of
from lightning_gnnscale.loader import InterleavedWalk

SETTINGS = {"graphs": ["lfr:30000:3000"], "methods": ["random", "spring"], "parts": 4, "machines": [2, 4]}
SETTINGS |= {"fanouts": [4, 3], "batch_size": 200, "chunks": 2}


@pytest.mark.parametrize(
    ("num_machines", "least_busy", "most_away"), [(2, 0.95, 0.02), (3, 0.8, 0.08), (4, 0.85, 0.02)]
)
def test_chunks_are_made_where_their_seeds_lie_and_no_worker_idles_for_long(num_machines, least_busy, most_away):
    """Eight parts of 20 to 26 chunks, four open at a time: with three machines two of the four are on one of them."""
    owner = np.arange(8) * num_machines // 8
    sizes = {part: 20 + part * 5 % 7 for part in range(8)}
    walk = InterleavedWalk(range(8), sizes, 0, 1, 4, seed=3, spread=True)
    parts = [position.part for position in walk.positions(0)]
    makers, busy = makers_of(parts, owner, num_machines, batches_per_group=2, chunks=4)
    assert set(makers.tolist()) == set(range(num_machines))
    assert (makers != owner[parts]).mean() <= most_away and busy >= least_busy


def test_chunks_that_all_lie_on_one_machine_are_made_by_all():
    makers, busy = makers_of([0] * 200, np.array([0, 1]), 2, batches_per_group=2, chunks=4)
    assert 0.3 < makers.mean() < 0.5 and busy > 0.75, "the holder keeps a share, and is never left behind by more"


@pytest.mark.parametrize("graph", ["lfr:30000:3000", "typed:30000:3000"])
def test_one_row_for_each_method_and_number_of_machines(tmp_path, monkeypatch, graph):
    monkeypatch.setattr(remote_rows, "in_fresh_process", lambda function, *given: function(*given))
    rows = remote_rows.run(tmp_path, **SETTINGS | {"graphs": [graph]})
    assert [(row["machines"], row["method"]) for row in rows] == [
        (machines, method) for machines in (2, 4) for method in ("random", "spring")
    ]
    for row in rows:
        elsewhere = row["armada_by_any"]
        assert elsewhere == 1 - 1 / row["machines"]
        for system in remote_rows.SYSTEMS:
            away, cut = row[f"{system}_away"], row[f"{system}_cut"]
            assert 0 < cut <= elsewhere and 0 < away <= elsewhere
            assert row[f"{system}_ratio"] == pytest.approx(away / cut, abs=1e-3)
            assert row["method"] == "spring" or cut > 0.85 * elsewhere  # its own seeds a machine has


def test_machines_are_not_more_than_parts(tmp_path):
    with pytest.raises(ValueError, match=r"bench.machines must be numbers from 2 to bench.parts=4, got \[1, 8\]"):
        remote_rows.run(tmp_path, **SETTINGS | {"machines": [1, 8]})
    assert not list(tmp_path.iterdir())
