"""How rows are read changes no batch; memory decides which way is taken."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.parts import part_loader
from test_part_loader import SAMPLERS, WORLD, all_contents, loader_threads, make_loader

from lightning_gnnscale.loader import Interleave, RowReads, TaskGraphs, choose_row_reads, fits_in_memory
from lightning_gnnscale.loader.row_reads import Footprint, sampled_bytes, window_end
from lightning_gnnscale.partition_store import DenseFeatures, LoadedRows, PackedFeatures, WholeGraph
from lightning_gnnscale.sampler import NeighborSampler
from tests.says import said
from tests.tiers import each_value

READS = {
    "resident": RowReads("resident"),
    "a batch a window": RowReads("planned", window_bytes=1),
    "a few batches a window": RowReads("planned", window_bytes=12_000),
    "one window at a time": RowReads("planned", window_bytes=12_000, windows_held=1),
    "one window": RowReads("planned", window_bytes=1 << 30),
    "swept, a batch at a time": RowReads("planned", window_bytes=1, is_swept=True),
    "swept": RowReads("planned", window_bytes=12_000, is_swept=True),
    "swept, few wait": RowReads("planned", window_bytes=12_000, is_swept=True, waiting_bytes=4000),
    "swept, part by part": RowReads("planned", window_bytes=12_000, is_swept=True, by_part=True),
    "swept once": RowReads("planned", window_bytes=1 << 30, is_swept=True, by_part=True),
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


@each_value
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


@pytest.fixture(scope="module")
def packed(features) -> PackedFeatures:
    """The world's rows, and those of each part's halo in an order of their own."""
    parts = [WORLD.load_part(part) for part in range(5)]
    halo = [part.halo_nodes for part in parts]
    orders = [np.random.default_rng(part).permutation(len(nodes)) for part, nodes in enumerate(halo)]
    return PackedFeatures(
        features,
        DenseFeatures(
            np.concatenate([features.array[nodes[order]] for nodes, order in zip(halo, orders, strict=True)])
        ),
        np.array([*(part.core_start for part in parts), features.num_rows]),
        np.cumsum([0, *map(len, halo)]),
        np.concatenate(halo),
        np.concatenate([np.argsort(order) for order in orders]).astype(np.int32),
        np.bincount(np.concatenate(halo), minlength=features.num_rows).astype(np.uint8),
    )


@each_value
@pytest.mark.parametrize("kept_halos", [0, 1, 3])
@pytest.mark.parametrize("reads", READS)
def test_packed_halo_rows_are_read_in_every_way(packed, reads, kept_halos):
    expected = all_contents(make_loader(num_threads=0))
    reads = replace(READS[reads], kept_halos=kept_halos)
    for source in (None, TaskGraphs(2).connect(None)):
        loader = make_loader(features=packed, reads=reads, source=source)
        assert all_contents(loader) == expected


def test_rows_that_stay_are_not_read_again(packed, monkeypatch):
    stays, read = np.flatnonzero(packed.halo_count >= 2), []
    assert 0 < len(stays) < packed.num_rows
    of = LoadedRows.of.__func__

    def note(cls, table, held, kept=None):
        read.append(held.count().nodes)
        return of(cls, table, held, kept)

    monkeypatch.setattr(LoadedRows, "of", classmethod(note))
    for reads in (RowReads("resident", kept_halos=2), RowReads("planned", 12_000, kept_halos=2)):
        read.clear()
        list(make_loader(features=packed, reads=reads))
        np.testing.assert_array_equal(read[0], stays)
        assert len(read) > 5 and not any(np.isin(nodes, stays).any() for nodes in read[1:])


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

    def note(cls, table, held, kept):
        read.append(len(held))
        return of(cls, table, held, kept)

    monkeypatch.setattr(LoadedRows, "of", classmethod(note))
    batches = list(make_loader(features=features, reads=READS["one window"]))
    assert read == [len(np.unique(np.concatenate([batch.n_id for batch in batches])))]
    read.clear()
    loader = make_loader(features=features, reads=READS["a batch a window"])
    for position, batch in enumerate(loader):
        assert len(read) <= position + 2
        assert len(batch.n_id) == read[position]
    assert len(read) == len(batches)


def test_a_visit_that_fits_is_read_in_one_window(features, monkeypatch):
    read = []
    of = LoadedRows.of.__func__
    note = classmethod(lambda cls, table, held, kept: read.append(len(held)) or of(cls, table, held, kept))
    monkeypatch.setattr(LoadedRows, "of", note)
    visits = {}
    for batch in make_loader(num_threads=0, features=None):
        visits.setdefault(batch.part, []).append(batch)
    rows = [len(np.unique(np.concatenate([batch.n_id for batch in visit]))) for visit in visits.values()]
    row_bytes = features.nbytes // features.num_rows
    largest = max(rows) * row_bytes + max(sum(map(sampled_bytes, visit)) for visit in visits.values())
    list(make_loader(features=features, reads=RowReads("planned", window_bytes=largest + 1)))
    assert read == _joined(visits, largest + 1, row_bytes)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_a_window_ends_where_few_visits_go_on(parts, data):
    most = data.draw(st.integers(1, len(parts)))
    ends = range(max(1, most // 2), most + 1)
    go_on = {end: Fraction(len({*parts[:end]} & {*parts[end:]}), end) for end in ends}
    assert window_end(parts, most) == max(end for end in ends if go_on[end] == min(go_on.values()))


def test_windows_of_parts_that_take_turns_end_between_visits():
    """Two parts enter where two others leave: a window ends there, not where its bytes do."""
    parts = [part for visits in range(0, 40, 2) for _ in range(3) for part in (visits, visits + 1)]
    first = 0
    while len(parts) - first > 16:
        end = window_end(parts[first : first + 16], 15)
        assert end == 12, "two visits of three batches each, twice"
        first += end


def _joined(visits, most_bytes, row_bytes) -> list[int]:
    """Rows of each window, where whole visits are joined as long as they fit."""
    windows = [([], 0)]
    for visit in visits.values():
        nodes = np.unique(np.concatenate([batch.n_id for batch in visit]))
        num_bytes = len(nodes) * row_bytes + sum(map(sampled_bytes, visit))
        joined = np.union1d(windows[-1][0], nodes)
        if windows[-1][1] + num_bytes > most_bytes:
            windows.append((nodes, num_bytes))
        else:
            windows[-1] = (
                joined,
                windows[-1][1] + num_bytes - (len(windows[-1][0]) + len(nodes) - len(joined)) * row_bytes,
            )
    return [len(nodes) for nodes, _ in windows]


def test_the_reads_of_a_loader_can_be_changed(features):
    expected = all_contents(make_loader(num_threads=0))
    loader = make_loader()
    for reads in (*READS.values(), RowReads()):
        loader.set_reads(reads, features)
        assert all_contents(loader) == expected
    loader.set_reads(RowReads(pool_bytes=12_345), features)
    assert loader._maker.pool.max_bytes == 12_345


def test_the_first_batch_tells_what_batches_take(features):
    loader = make_loader(features=features)
    first, batch = loader.first_footprint(), next(iter(make_loader(num_threads=0, features=None)))
    assert (first.rows, first.sampled_bytes) == (len(batch.n_id), sampled_bytes(batch))
    assert first.part_bytes >= WORLD.load_part(0).csc.indices.nbytes
    by_hop = np.cumsum(batch.num_sampled_nodes)
    assert len(by_hop) > 2 and first.target_rows == by_hop[:-1].sum()
    for sampler in ("full", "cluster", "saint"):
        first_of = make_loader(features=features, sampler=SAMPLERS[sampler]).first_footprint()
        assert first_of.target_rows == first_of.rows > 0, "hops are not told apart"
    assert part_loader([], WORLD.load_part, features, {}, NeighborSampler([2])).first_footprint() is None


def choose(free_bytes, **changes) -> RowReads:
    """100,000 rows of 64 float32: 25.6 MB; a part and its halo 10,000 rows, 2.56 MB; a batch 5,000 rows, 1.28 MB."""
    features = DenseFeatures(np.broadcast_to(np.float32(0), (100_000, 64)))
    count = changes.pop("count", None)
    if changes.pop("packed", count is not None):
        halo = np.zeros(2, np.int64), np.zeros(0, np.int64), None, count
        features = PackedFeatures(features, features, np.zeros(2, np.int64), *halo)
    shape = {"part_rows": 10_000, "parts_held": 2, "batches_held": 4, "visit_batches": 20}
    shape["held_rows"] = changes.pop("held_rows", 2 * changes.get("part_rows", 10_000))
    first = Footprint(part_bytes=500_000, rows=changes.pop("rows", 5_000), sampled_bytes=200_000)
    return choose_row_reads(features, first, free_bytes=free_bytes, **(shape | changes))


def test_memory_decides():
    assert choose(100_000_000).how == "mapped"
    resident = choose(30_000_000)
    assert resident.how == "resident"
    assert resident.why == "the rows of 2 parts take 4.88 MiB of 28.6 MiB free"
    assert choose(8_000_000).how == "planned"
    assert choose(8_000_000, step_bytes=1_000_000).window_bytes < choose(8_000_000).window_bytes
    assert choose(30_000_000, step_bytes=1_000_000).window_bytes == choose(30_000_000).window_bytes
    assert choose(30_000_000, visit_batches=3).how == "planned", "a short visit reads few of a part's rows"
    assert choose(16_000_000).how == "planned" and choose(16_000_000, held_rows=12_000).how == "resident"
    assert choose(30_000_000, visit_batches=3, packed=True).how == "resident", "they lie in two runs of the disk"
    assert choose(30_000_000, part_rows=100_000).how == "planned", "a halo as large as the graph"


@pytest.mark.parametrize("count", [None, np.repeat(np.arange(10, dtype=np.uint8), 10_000)])
def test_what_is_held_at_once_stays_within_the_memory(count):
    hows = set()
    for free in range(2_000_000, 60_000_000, 500_000):
        reads, batch, parts = choose(free, count=count), 1_480_000, 1_000_000
        kept = reads.kept_halos and int((count >= reads.kept_halos).sum())
        share = 1.0 if not kept else (1 + count)[count < reads.kept_halos].sum() / (1.0 + count).sum()
        if reads.how == "planned" and reads.window_bytes > 1_280_000 * share:
            assert kept * 256 + reads.windows_held * reads.window_bytes + 2 * batch + parts <= 0.7 * free
        if reads.how == "resident":
            assert kept * 256 + share * 2 * 2_560_000 + 4 * batch + parts <= 0.7 * free
        hows.add((reads.how, kept > 0))
    assert hows >= {("resident", count is not None), ("planned", count is not None), ("mapped", False)}


def test_one_window_of_twice_the_rows_is_held_where_a_visit_takes_more_than_one():
    whole, divided = choose(16_000_000), choose(16_000_000, part_rows=20_000)
    assert (whole.how, whole.windows_held) == (divided.how, 1 + divided.windows_held) == ("planned", 2)
    assert divided.window_bytes == pytest.approx(2 * whole.window_bytes, rel=1e-6)


def test_features_that_fit_twice_are_left_to_the_page_cache():
    features = DenseFeatures(np.zeros((1000, 4), np.float32))
    assert fits_in_memory(features, 32_000)
    assert not fits_in_memory(features, 31_999)


def test_bad_options():
    with pytest.raises(ValueError, match=said("row mapped resident planned 'all'")):
        RowReads("all")
    with pytest.raises(ValueError, match=said("windows_held 1 2 0")):
        RowReads(windows_held=0)
    with pytest.raises(ValueError, match=said("kept_halos [0, 255] 256")):
        RowReads(kept_halos=256)
    with pytest.raises(ValueError, match=said("lookahead_batches >= 0 -1")):
        RowReads(lookahead_batches=-1)
