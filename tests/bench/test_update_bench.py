"""`gnnscale bench update` at a small size: rows of both graphs, and stores that grow to the whole graph."""

import numpy as np
import pytest

from benchmarks import update
from benchmarks.runner import Runner
from lightning_gnnscale.partition_store import PartitionStore
from tests.says import said

SMALL = {"num_nodes": 600, "num_edges": 3000, "updates": 2, "new_share": 0.05, "feature_dim": 4, "num_parts": 2}


@pytest.mark.sweep
def test_updates_reach_the_whole_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(update, "in_fresh_process", lambda function, *arguments: update._stage(*_with_path(arguments)))
    rows = update.UpdateBench(partitioner="random", **SMALL).measure(Runner(tmp_path))
    stages = ["write", "update 1", "update 2", "partition again", *update.PREDICTIONS]
    assert [row["stage"] for row in rows] == stages * 2
    for graph in update.GRAPHS:
        last, whole = PartitionStore.open(tmp_path / f"{graph}-v2"), PartitionStore.open(tmp_path / f"{graph}-again")
        last.verify()
        assert last.num_nodes == whole.num_nodes == 600 and last.num_edges == whole.num_edges
        degrees = [np.diff(store.csc.indptr)[store.store_nid] for store in (last, whole)]
        assert np.array_equal(*degrees)
    assert rows[0]["of_write"] == 1 and rows[3]["of_again"] == 1
    assert all(row["outputs"] == 600 for row in rows if row["stage"] == update.ALL)


def _with_path(arguments):
    *first, folder = arguments
    return [*first, update.Path(folder)]


def test_settings_out_of_range_are_told():
    for given, message in ({"updates": 0}, "updates at least 1 0"), ({"new_share": 0}, "new_share"):
        with pytest.raises(ValueError, match=said(message)):
            update.UpdateBench(**given)
