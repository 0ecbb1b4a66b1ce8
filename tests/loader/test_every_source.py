"""What every source behind the loader promises alike: errors, parts tried again, other samplers, a beginning."""

import gc

import numpy as np
import pytest
from test_part_loader import SAMPLERS, WORLD, all_contents, loader_threads, make_loader

import lightning_gnnscale as gs
from benchmarks.fixed_prefetch import FixedPrefetch
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import RankPlace
from lightning_gnnscale.loader.staged_part import StagedPart
from lightning_gnnscale.partition_store.features import Column
from lightning_gnnscale.sampler import NeighborSampler
from tests.says import said
from tests.tiers import each_value

SOURCES = {
    "the calling thread": None,
    "threads": gs.Threads(2),
    "processes": gs.Processes(2),
    "task graphs": gs.TaskGraphs(3),
    "fixed prefetch": FixedPrefetch(2, depth=3),
}


@pytest.fixture(params=SOURCES)
def load(request):
    """Makes a loader over one of the sources; nothing of it is left at the end."""
    settings, made = SOURCES[request.param], []

    def make(**options):
        ahead = {"num_threads": 0}
        if settings is not None:
            ahead = {"source": settings.connect(RankPlace()), "prefetch_batches": settings.batches_ahead}
        made.append(make_loader(**ahead | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
    assert loader_threads() == []


class Broken(Column):
    """Features whose disk goes at part 2."""

    is_sparse, dim, dtype = False, 16, np.dtype(np.float32)

    def read(self, nodes, out=None):
        if WORLD.part_offsets[2] <= nodes[0] < WORLD.part_offsets[3]:
            raise OSError("disk gone")
        return WORLD.features.read(nodes, out)


def test_an_error_names_part_batch_and_epoch(load):
    loader = load(features=Broken())
    loader.set_epoch(4)
    with pytest.raises(GNNScaleError, match=r"^part 2, batch 0 .*epoch 5: OSError: disk gone$"):
        list(loader)


def test_a_newer_iteration_ends_the_older_one_aloud(load):
    loader = load()
    expected = all_contents(loader)
    older = iter(loader)
    next(older)
    assert all_contents(loader) == expected  # begun while the older one stands
    with pytest.raises(GNNScaleError, match=said("iteration loader")):
        next(older)
    assert all_contents(loader) == expected


def staged_parts() -> dict[int, StagedPart]:
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if isinstance(thing, StagedPart)}


def test_closing_lets_go_of_the_parts(load):
    others = staged_parts()
    loader = load()
    expected = all_contents(loader)
    loader.close()
    assert not staged_parts().keys() - others.keys()
    assert all_contents(loader) == expected


class Mounting:
    """The parts of a disk that is mounted once `mounted` is there: a file, since workers load parts too."""

    def __init__(self, mounted):
        self.mounted = mounted

    def __call__(self, part):
        if not self.mounted.exists():
            raise OSError("not mounted")
        return WORLD.load_part(part)


def test_a_part_that_failed_to_load_is_tried_again(load, tmp_path):
    loader = load(parts=[0], load_part=Mounting(tmp_path / "mounted"))
    with pytest.raises(GNNScaleError, match=r"^part 0, batch 0 .*epoch 1: OSError: not mounted$"):
        list(loader)
    (tmp_path / "mounted").touch()
    assert len(list(loader)) == len(loader)


def test_another_sampler_serves_the_next_iteration(load):
    fewer, loader = NeighborSampler([2, 2]), load()
    first = all_contents(loader)
    loader.set_sampler(fewer)
    assert all_contents(loader) == all_contents(make_loader(sampler=fewer, num_threads=0))
    loader.set_sampler(SAMPLERS["neighbor"])
    assert all_contents(loader) == first


def test_a_rank_without_batches_begins_too(load, monkeypatch):
    """Other ranks may wait for it where they share what prepares."""
    loader, begun = load(parts=[], pad_to=3), []
    monkeypatch.setattr(loader._source, "begin", lambda: begun.append(1))
    assert list(loader) == [None] * 3
    assert begun == [1]


def test_halo_rows_come_from_where_they_are_packed(load):
    for batch in load(features=WORLD.packed_features()):
        np.testing.assert_array_equal(batch.x.numpy(), WORLD.rows_read(batch.part, batch.n_id.numpy()))


@each_value
@pytest.mark.parametrize("bits", [8, 4, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_codes_come_decoded(load, bits, packed):
    quantised, plain = WORLD.quantised(bits)
    features = quantised.packed_codes() if packed else quantised.features
    batches = list(load(features=features))
    assert len(batches) > 3
    for batch in batches:
        nodes = batch.n_id.numpy()
        rows = plain.rows_read(batch.part, nodes) if packed else plain.features.array[nodes]
        assert batch.x.numpy().tobytes() == rows.tobytes()
