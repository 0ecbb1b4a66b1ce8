import functools
import json

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.partition_store.manifest import wrong_field
from tests.says import said

EDGES = np.random.default_rng(0).integers(0, 60, (2, 400))
COLUMNS = {"features": np.random.default_rng(1).random((60, 4), np.float32), "labels": np.arange(60) % 3}
MASKS = {"train": np.arange(60) % 2 == 0}


def stream():
    return gs.open_edge_stream(EDGES, num_nodes=60, to_undirected=True)


def data(root, **options):
    return gs.PartitionDataModule(root=root, stream=stream(), masks=MASKS, **COLUMNS, **options)


def prepared(root, **options):
    module = data(root, **options)
    module.prepare_data()
    return module


def test_a_store_keeps_the_machines_that_its_parts_are_for(tmp_path):
    made = gs.partition(stream(), "spring", 6, num_machines=3)
    store = gs.write_partition_store(tmp_path / "three", stream(), made, masks=MASKS, **COLUMNS)
    assert store.num_machines == 3 and store.manifest["num_machines"] == 3
    plain = gs.write_partition_store(tmp_path / "one", stream(), gs.partition(stream(), "spring", 6), **COLUMNS)
    assert plain.num_machines == 1 and "num_machines" not in plain.manifest
    changed = gs.update_store(store, removed_edges=EDGES[:, :3])
    assert changed.num_machines == 3
    manifest = json.loads((tmp_path / "three" / "manifest.json").read_text())
    assert wrong_field(manifest) is None
    assert wrong_field(manifest | {"num_machines": 4}) == "num_machines is 4"


def test_a_datamodule_takes_it_for_any_registered_method(tmp_path):
    module = prepared(tmp_path / "a", partitioner="spring", num_parts=4, num_machines=2)
    assert module.store.num_machines == 2
    same = functools.partial(gs.partition, method="spring", num_machines=2)
    again = prepared(tmp_path / "a", partitioner=same, num_parts=4)
    assert again.store.num_machines == 2, "the same store"
    assert module.owners(4, gs.GradientAveraging()).tolist() == [0, 1, 2, 3]
    with pytest.raises(Exception, match=said("store other input")):
        prepared(tmp_path / "a", partitioner="spring", num_parts=4)


def test_auto_takes_a_multiple_of_the_machines(tmp_path):
    module = prepared(tmp_path / "auto", partitioner="spring", num_machines=3)
    assert module.store.num_parts == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_parts": 4, "num_machines": 3}, "num_parts multiple num_machines=3 4 num_parts=3 or 6"),
        ({"num_parts": 4, "num_machines": 0}, "num_machines 1 0"),
        ({"num_parts": 4, "num_machines": 2, "partitioner": max}, "num_machines=2 registered method max"),
    ],
)
def test_wrong_numbers_are_refused_before_work_starts(tmp_path, given, words):
    with pytest.raises(ValueError, match=said(words)):
        data(tmp_path / "none", **given)
    assert not list(tmp_path.iterdir())
