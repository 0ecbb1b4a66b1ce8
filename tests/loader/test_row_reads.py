"""How rows are read changes no batch; memory decides which way is taken."""

from dataclasses import replace

import numpy as np
import pytest
from test_part_loader import SAMPLERS, WORLD, all_contents, loader_threads, make_loader

from lightning_gnnscale.loader import (
    Interleave,
    PartLoader,
    RowReads,
    TaskGraphs,
    WholeGraph,
    choose_row_reads,
    fits_in_memory,
)
from lightning_gnnscale.loader.row_reads import Footprint, drawn_bytes
from lightning_gnnscale.partition_store import DenseFeatures, LoadedRows, PackedFeatures
from lightning_gnnscale.sampler import NeighborSampler

READS = {
    "resident": RowReads("resident"),
    "a batch a window": RowReads("planned", window_bytes=1),
    "a few batches a window": RowReads("planned", window_bytes=12_000),
    "one window": RowReads("planned", window_bytes=1 << 30),
}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert loader_threads() == []


@pytest.fixture(scope="module")
def features(tmp_path_factory) -> DenseFeatures:
    """The world's rows on a file."""
    path = tmp_path_factory.mktemp("rows") / "features.npy"
    np.save(path, WORLD.features.array)
    return DenseFeatures(np.asarray(np.load(path, mmap_mode="r")))


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("reads", READS)
def test_batches_are_the_same(features, name, reads):
    expected = all_contents(make_loader(sampler=SAMPLERS[name], num_threads=0))
    for threads in (0, 2):
        loader = make_loader(sampler=SAMPLERS[name], features=features, reads=READS[reads], num_threads=threads)
        assert all_contents(loader) == expected
        assert all_contents(loader) == expected, "and again"
        loader.close()


@pytest.mark.parametrize("reads", READS)
def test_other_walks_and_sources(features, reads):
    whole = WholeGraph.of(WORLD.csc, 0)
    cases = [
        {"interleave": Interleave(1, 2, 3)},
        {"passes": 2},
        {"parts": [1], "load_part": lambda part: replace(whole, part=part, core_start=0), "batch_size": 4},
    ]
    for options in cases:
        expected = all_contents(make_loader(**options, num_threads=0))
        assert len(expected) > 3
        assert all_contents(make_loader(**options, features=features, reads=READS[reads])) == expected
        tasks = TaskGraphs(2).connect(None)
        assert all_contents(make_loader(**options, features=features, reads=READS[reads], source=tasks)) == expected


@pytest.mark.parametrize("reads", READS)
def test_packed_halo_rows_are_read_in_every_way(features, reads):
    parts = [WORLD.load_part(part) for part in range(5)]
    halo = np.concatenate([part.halo_nodes for part in parts])
    packed = PackedFeatures(
        features,
        DenseFeatures(features.array[halo]),
        np.array([*(part.core_start for part in parts), features.num_rows]),
        np.cumsum([0, *(part.num_halo for part in parts)]),
        halo,
    )
    expected = all_contents(make_loader(num_threads=0))
    assert all_contents(make_loader(features=packed, reads=READS[reads])) == expected


@pytest.mark.parametrize("reads", READS)
def test_an_iteration_goes_on_in_the_middle_and_may_be_broken_off(features, reads):
    expected = all_contents(make_loader(num_threads=0))
    loader = make_loader(features=features, reads=READS[reads])
    batches = iter(loader)
    taken = [next(batches) for _ in range(5)]
    state = loader.state_dict()
    batches.close()
    assert loader_threads() == []
    other = make_loader(features=features, reads=READS[reads])
    other.load_state_dict(state)
    assert all_contents(taken) + all_contents(other) == expected


def test_each_row_is_read_once_a_window(features, monkeypatch):
    """What is read is exactly the rows of the batches, and of two windows at a time."""
    read = []
    of = LoadedRows.of.__func__

    def note(cls, table, held):
        read.append(len(held))
        return of(cls, table, held)

    monkeypatch.setattr(LoadedRows, "of", classmethod(note))
    batches = list(make_loader(features=features, reads=READS["one window"]))
    assert read == [len(np.unique(np.concatenate([batch.n_id for batch in batches])))]
    read.clear()
    loader = make_loader(features=features, reads=READS["a batch a window"])
    for position, batch in enumerate(loader):
        assert len(read) <= position + 2
        assert len(batch.n_id) == read[position]
    assert len(read) == len(batches)


def test_the_reads_of_a_loader_can_be_changed(features):
    expected = all_contents(make_loader(num_threads=0))
    loader = make_loader()
    for reads in (*READS.values(), RowReads()):
        loader.set_reads(reads, features)
        assert all_contents(loader) == expected
    loader.set_reads(RowReads(pool_bytes=12_345), features)
    assert loader._builder.pool.max_bytes == 12_345


def test_the_first_batch_tells_what_batches_take(features):
    loader = make_loader(features=features)
    first, batch = loader.first_footprint(), next(iter(make_loader(num_threads=0, features=None)))
    assert (first.rows, first.drawn_bytes) == (len(batch.n_id), drawn_bytes(batch))
    assert first.part_bytes >= WORLD.load_part(0).csc.indices.nbytes
    assert PartLoader([], WORLD.load_part, features, {}, NeighborSampler([2])).first_footprint() is None


def choose(free_bytes, **changes) -> RowReads:
    """100,000 rows of 64 float32: 25.6 MB; a part and its halo 10,000 rows, 2.56 MB; a batch 5,000 rows, 1.28 MB."""
    features = DenseFeatures(np.broadcast_to(np.float32(0), (100_000, 64)))
    shape = {"part_rows": 10_000, "parts_held": 2, "batches_held": 4, "visit_batches": 20}
    first = Footprint(part_bytes=500_000, rows=changes.pop("rows", 5_000), drawn_bytes=200_000)
    return choose_row_reads(features, first, free_bytes=free_bytes, **(shape | changes))


def test_memory_decides():
    assert choose(100_000_000).how == "mapped"
    resident = choose(30_000_000)
    assert resident.how == "resident"
    assert resident.why == "the rows of 2 parts take 4.88 MiB of 28.6 MiB free"
    assert choose(8_000_000).how == "planned"
    assert choose(30_000_000, visit_batches=3).how == "planned", "a short visit reads few of a part's rows"
    assert choose(30_000_000, part_rows=100_000).how == "planned", "a halo as large as the graph"


def test_what_is_held_at_once_stays_within_the_memory():
    for free in range(2_000_000, 40_000_000, 500_000):
        reads, batch, parts = choose(free), 1_480_000, 1_000_000
        if reads.how == "planned" and reads.window_bytes > 1_280_000:
            assert 2 * reads.window_bytes + 3 * batch + parts <= 0.7 * free
        if reads.how == "resident":
            assert 2 * 2_560_000 + 4 * batch + parts <= 0.7 * free


def test_features_that_fit_twice_are_left_to_the_page_cache():
    features = DenseFeatures(np.zeros((1000, 4), np.float32))
    assert fits_in_memory(features, 32_000)
    assert not fits_in_memory(features, 31_999)


def test_bad_options():
    with pytest.raises(ValueError, match="row reads must be one of mapped, resident, planned, got 'all'"):
        RowReads("all")
    with pytest.raises(ValueError, match="lookahead_batches must be >= 0, got -1"):
        RowReads(lookahead_batches=-1)
