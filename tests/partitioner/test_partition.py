import copy
import inspect
import json
import os
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_gnnscale as gs
from lightning_gnnscale.errors import EdgeStreamError, GNNScaleError
from lightning_gnnscale.partition_store import StoreSource
from lightning_gnnscale.partitioner import (
    Partitioning,
    PartitionQuality,
    available_partitioners,
    evaluate_partitioning,
    partition,
    register_partitioner,
    registry,
)
from lightning_gnnscale.partitioner.partition import DEFAULT_METHOD
from tests.partitioner.graphs import stream_of
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

GRID = [(10 * r + c, 10 * r + c + 1) for r in range(10) for c in range(9)] + [(v, v + 10) for v in range(90)]


def test_the_default_is_one_everywhere():
    doors = [(partition, "method"), (StoreSource, "partitioner"), (gs.PartitionDataModule, "partitioner")]
    methods = [inspect.signature(door).parameters[name].default for door, name in doors]
    conf = (Path(__file__).parents[2] / "conf" / "train.yaml").read_text()
    assert set(methods) == {DEFAULT_METHOD} and f"- partitioner: {DEFAULT_METHOD}" in conf


def test_the_result_tells_how_it_came_about():
    told = []
    p = partition(
        stream_of(GRID, 100, chunk_edges=50),
        "spring",
        num_parts=4,
        masks={"train": np.arange(100) < 50},
        progress=lambda *step: told.append(step),
    )
    assert (p.method, p.num_parts, p.num_nodes, p.seed) == ("spring", 4, 100, 0)
    assert p.options["beta"] == 1.05
    assert {"degrees", "clustering", "merging", "assignment", "total"} == set(p.seconds)
    assert p.seconds["total"] >= p.seconds["clustering"]
    assert p.notes["layout"] == "once"
    assert "quality" not in {name for name, *_ in told}  # until it is asked for
    assert sum(p.quality.train_per_part) == 50
    assert p.quality.num_edges == len(GRID)
    assert set(p.seconds) >= {"evaluate", "total"}
    for what in ("degrees", "clustering", "quality"):
        assert [(done, total) for name, done, total in told if name == what] == [
            (50, 180),
            (100, 180),
            (150, 180),
            (180, 180),
        ]


def reader(stream):
    """The stream, which counts its passes, and what takes quality's one along."""
    passes, chunks = [], stream.chunks

    def counted(*start):
        passes.append(start)
        return chunks(*start)

    stream.chunks = counted
    return stream, passes


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p.quality,
        lambda p: pickle.loads(pickle.dumps(p)).quality,
        lambda p: copy.copy(p).quality,
        lambda p: replace(p, seed=7).quality,
        lambda p: PartitionQuality(**asdict(p)["quality"]),
        lambda p: eval(repr(p).partition("quality=")[2].partition(", seconds=")[0]),
    ],
)
def test_quality_is_measured_once_when_it_is_asked_for(ask):
    stream, passes = reader(stream_of(GRID, 100))
    p = partition(stream, num_parts=4)
    before = len(passes)
    expected = evaluate_partitioning(stream_of(GRID, 100), p.part_id, 4)
    assert len(passes) == before
    assert ask(p) == expected
    assert len(passes) == before + 1
    assert p.quality == expected and p.notes["layout"] == "once"
    assert len(passes) == before + 1
    assert partition(stream_of(GRID, 100), num_parts=4, evaluate=False).quality is None


def test_quality_of_edges_that_changed_since_is_refused():
    stream = stream_of(GRID, 100)
    p = partition(stream, num_parts=4)
    stream.chunks = stream_of([(0, 99), *GRID[1:]], 100).chunks
    with pytest.raises(EdgeStreamError, match=said("edges changed partitioned")):
        p.quality  # noqa: B018


def test_masks_that_do_not_fit_are_refused_before_the_work():
    stream, passes = reader(stream_of(GRID, 100))
    with pytest.raises(ValueError, match=said("masks['train'] (100,) (7,)")):
        partition(stream, num_parts=4, masks={"train": np.ones(7, bool)})
    assert passes == []


@settings(max_examples=settings.default.max_examples // 4)
@given(num_nodes=st.integers(1, 300), data=st.data())
def test_random_parts_differ_by_one_node_at_most(num_nodes, data):
    num_parts = data.draw(st.integers(1, num_nodes))
    seed = data.draw(st.integers(0, 2**40))
    stream = stream_of([], num_nodes)
    p = partition(stream, "random", num_parts, seed=seed, evaluate=False)
    sizes = np.bincount(p.part_id, minlength=num_parts)
    assert sizes.max() - sizes.min() <= 1
    again = partition(stream, "random", num_parts, seed=seed, evaluate=False)
    assert np.array_equal(p.part_id, again.part_id)
    if num_nodes > 60 and num_parts > 1:
        other = partition(stream, "random", num_parts, seed=seed + 1, evaluate=False)
        assert not np.array_equal(p.part_id, other.part_id)


@pytest.fixture
def own_partitioner():
    @register_partitioner("stripes")
    def stripes(stream, num_parts, *, seed=0, masks=None, balance=None, progress=None, width=1, shift=0):
        return np.arange(stream.num_nodes) // width % num_parts + shift

    yield
    registry._PARTITIONERS.pop("stripes")


def test_a_users_own_partitioner(own_partitioner):
    assert "stripes" in available_partitioners()
    assert available_partitioners() == sorted(available_partitioners())
    p = partition(stream_of(GRID, 100), "stripes", 2, width=10)
    assert p.part_id.dtype == np.int32
    assert p.options == {"width": 10, "shift": 0}
    assert p.quality.cut_edges == 90
    with pytest.raises(ValueError, match=said("partitioner 'stripes' height")):
        partition(stream_of(GRID, 100), "stripes", 2, height=10)
    with pytest.raises(ValueError, match=said("partitioner 'stripes' 1 2")):
        partition(stream_of(GRID, 100), "stripes", 2, shift=1)
    with pytest.raises(ValueError, match=said("partitioner 'stripes' (100,) float64 (100,)")):
        partition(stream_of(GRID, 100), "stripes", 2, shift=0.5)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match=said("'spring' lightning_gnnscale")):
        register_partitioner("spring")(lambda stream, num_parts: None)


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(ValueError, match=said("partitioner 'sprong'")):
        partition(stream_of(GRID, 100), "sprong", 2)


@pytest.mark.parametrize("num_parts", [0, -1, 101, 2.5, None, True])
def test_num_parts_outside_its_range(num_parts):
    with pytest.raises(ValueError, match=said("partitioner.num_parts [1, 100]")):
        partition(stream_of(GRID, 100), num_parts=num_parts)


def test_saved_and_loaded(tmp_path):
    p = partition(stream_of(GRID, 100), num_parts=4)
    p.save(tmp_path / "p")
    q = Partitioning.load(tmp_path / "p")
    assert np.array_equal(p.part_id, q.part_id)
    assert q.part_id.dtype == np.int32
    for name in ("num_parts", "method", "options", "seed", "quality", "seconds", "peak_bytes", "notes"):
        assert getattr(p, name) == getattr(q, name)
    assert sorted(f.name for f in (tmp_path / "p").iterdir()) == ["part_id.npy", "partitioning.json"]


@pytest.mark.parametrize("moment", ["part_id.npy", "partitioning.json"])
def test_a_save_that_is_cut_short_leaves_nothing_that_loads(tmp_path, monkeypatch, moment):
    partition(stream_of(GRID, 100), num_parts=4).save(tmp_path)
    original = os.replace

    def killed(source, target):
        if str(target).endswith(moment):
            raise KeyboardInterrupt
        original(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        partition(stream_of(GRID, 100), num_parts=3).save(tmp_path)
    with pytest.raises(GNNScaleError, match="no partitioning can be read there"):
        Partitioning.load(tmp_path)


def test_damaged_folders_are_named(tmp_path):
    with pytest.raises(GNNScaleError, match="no partitioning can be read there"):
        Partitioning.load(tmp_path / "nothing")
    partition(stream_of(GRID, 100), num_parts=4).save(tmp_path)
    np.save(tmp_path / "part_id.npy", np.zeros(7, np.int32))
    with pytest.raises(GNNScaleError, match=said("100 part_id.npy (7,)")):
        Partitioning.load(tmp_path)
    facts = json.loads((tmp_path / "partitioning.json").read_text())
    (tmp_path / "partitioning.json").write_text(json.dumps({**facts, "format_version": 99}))
    with pytest.raises(GNNScaleError, match=said("format version 99 package 1")):
        Partitioning.load(tmp_path)


@pytest.mark.parametrize("name", ["part_id.npy", "partitioning.json"])
def test_a_saved_partitioning_with_any_flipped_bit_is_refused(tmp_path, name):
    made = partition(stream_of(GRID, 100), num_parts=4)
    made.save(tmp_path)
    whole = (tmp_path / name).read_bytes()
    sample = np.random.default_rng(0)
    for place in sample.integers(0, len(whole), 60):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(sample.integers(8))
        (tmp_path / name).write_bytes(damaged)
        try:
            read = Partitioning.load(tmp_path)
        except GNNScaleError as error:
            assert "\n" not in str(error)
        else:  # a blank between two words, or of a header
            assert read.part_id.tolist() == made.part_id.tolist() and (read.method, read.seed) == (made.method, 0)
