"""`gnnscale bench memory`: stages under caps of memory."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import memory
from lightning_gnnscale.errors import GNNScaleError
from tests.says import said


@pytest.mark.parametrize("options", [{"stages": ["batches", "sleep"]}, {"caps": [1, 0]}])
def test_bad_options_are_one_line(tmp_path, options):
    with pytest.raises(ValueError, match=said("bench.stages partition store bench.caps 0")) as told:
        memory.run(tmp_path, **options)
    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


def test_without_a_memory_group_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "GROUPS", ((tmp_path / "none", "a", "b", "c"),))
    with pytest.raises(GNNScaleError, match=said("memory cgroup run root Linux")):
        memory._new_group(None)


@pytest.mark.slow
def test_stages_run_uncapped_and_capped_and_rows_that_stand_are_taken(tmp_path):
    try:
        memory._new_group(None)[0].rmdir()
    except GNNScaleError as error:
        pytest.skip(str(error))
    options = {"num_nodes": 20_000, "num_edges": 100_000, "feature_dim": 16, "num_parts": 4, "train_share": 0.1}
    rows = memory.run(tmp_path, stages=["batches", "evaluate"], caps=[8], fanouts=[5, 5], batch_size=256, **options)
    assert [(row["stage"], row["cap"]) for row in rows] == [
        ("batches", "none"), ("batches", "8"), ("evaluate", "none"), ("evaluate", "8"),
    ]  # fmt: skip
    for row in rows:
        assert row["seconds"] > 0 and row["read_bytes"] > 0 and row["peak_bytes"] > 0, row
    before = (tmp_path / "memory.csv").read_bytes()
    again = memory.run(tmp_path, stages=["batches", "evaluate"], caps=[8], fanouts=[5, 5], batch_size=256, **options)
    assert (tmp_path / "memory.csv").read_bytes() == before
    assert [float(row["seconds"]) for row in again] == [row["seconds"] for row in rows]
    assert Path(tmp_path / "store-none" / "manifest.json").is_file()


def test_a_folder_is_of_one_graph(tmp_path):
    memory._keep_to(tmp_path / "settings", "0a")
    memory._keep_to(tmp_path / "settings", "0a")
    with pytest.raises(GNNScaleError, match=said("graph settings hydra.run.dir=")):
        memory._keep_to(tmp_path / "settings", "0b")


def test_caps_of_sizes_need_no_run_without_one(tmp_path):
    with pytest.raises(ValueError, match=said("bench.uncapped=false bench.caps 8GiB 0.5")):
        memory.run(tmp_path, uncapped=False, caps=["8GiB", 0.5])
    assert list(tmp_path.iterdir()) == []


def test_overlapping_rows_are_as_many_and_as_wide_as_others(tmp_path):
    bench = memory.MemoryBench(num_nodes=1000, num_edges=3000, feature_dim=8, overlapping_rows=True, test_share=0.01)
    bench._make_graph(tmp_path)
    rows = bench._features(tmp_path)
    assert rows.shape == (1000, 8) and rows.dtype == np.float16
    assert np.array_equal(rows[1:, :-1], rows[:-1, 1:])
    with np.load(tmp_path / "masks.npz") as arrays:
        assert 0 < arrays["test"].sum() < 50 < arrays["train"].sum()
