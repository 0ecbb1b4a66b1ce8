"""The benchmark of bytes: what it counts against a plain recount, and that it goes on where it stopped."""

import csv

import numpy as np
import pytest

from benchmarks import grouping
from lightning_gnnscale.remote import pack_group
from tests.says import said

GRAPH = "power_law:1500:30000"
SETTINGS = {"fanouts": [[4, 3]], "batch_sizes": [32], "groups": [1, 2], "cache_shares": [0, 0.2], "dim": 8}


def test_bytes_are_those_of_unions_recounted(tmp_path):
    rows = grouping.run(tmp_path, [GRAPH], **SETTINGS)
    traffic = grouping.load_traffic(GRAPH, None, 0.1, 8, 0)
    batches = [batch for batch, _ in grouping._batches(traffic, [4, 3], 32, 1, 0)]
    assert len(batches) == 5  # 150 training nodes: the last group has one batch
    for group in (1, 2):
        parts = [batches[start : start + group] for start in range(0, 5, group)]
        unions = [set(np.concatenate([batch.n_id.numpy() for batch in part]).tolist()) for part in parts]
        (row,) = (row for row in rows if row["group"] == group and row["cache_share"] == 0)
        assert row["row_bytes"] == round(sum(len(union) for union in unions) * 32 / 5)
        assert row["beside_bytes"] == round(sum(pack_group(part).num_bytes for part in parts) / 5)
        assert row["bytes"] == pytest.approx(row["row_bytes"] + row["beside_bytes"], abs=1)
    alone, pairs, cached, _ = rows
    assert alone["cut"] == 1 and pairs["cut"] > 1
    assert cached["sent_rows"] < alone["sent_rows"] == cached["union_rows"]
    assert cached["cache_bytes"] > 0 == alone["cache_bytes"]


@pytest.mark.sweep
def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    rows = grouping.run(tmp_path, [GRAPH], **SETTINGS)
    with open(tmp_path / "grouping.csv") as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 4
    assert (tmp_path / "grouping.png").stat().st_size > 5_000
    counted, count = [], grouping.GroupingBench._count
    monkeypatch.setattr(grouping.GroupingBench, "_count", lambda *given: counted.append(given[3]) or count(*given))
    more = grouping.run(tmp_path, [GRAPH], **SETTINGS | {"batch_sizes": [32, 64]})
    assert counted == [64]
    assert more[:4] == rows and len(more) == 8
    grouping.run(tmp_path, [GRAPH], **SETTINGS | {"seed": 1})  # another seed is another row
    assert counted == [64, 32]


def test_public_graphs_have_their_own_features(public_graphs):
    traffic = grouping.load_traffic("cora", public_graphs, 0.1, 128, 0)
    assert traffic.csc.num_rows == len(traffic.row_bytes) == len(traffic.labels)
    assert len(np.unique(traffic.row_bytes)) > 1  # sparse rows
    assert np.array_equal(np.flatnonzero(traffic.masks["train"]), traffic.targets)


def test_what_the_others_are_compared_with_must_be_there(tmp_path):
    for changed in ({"groups": [2]}, {"cache_shares": [0.1]}):
        with pytest.raises(ValueError, match=said("bench.groups 1 bench.cache_shares 0")):
            grouping.run(tmp_path, [GRAPH], **SETTINGS | changed)
