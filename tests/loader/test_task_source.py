"""Task graphs behind the loader: the batches of threads bit for bit, caps, errors, parts, resume, ends of threads."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_part_loader import SAMPLERS, WORLD, ToldFeatures, loader_threads, make_loader
from test_task_graph import FirstNeighbors, contents, sparse_features

import lightning_gnnscale as gs
from benchmarks.fixed_prefetch import FixedPrefetch
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader import BatchKey, Operators, RankPlace, RowReads, TaskGraphs
from lightning_gnnscale.loader.operators import FanoutNeighborhood
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.sampler import LayerwiseSampler, LinkSampler, LocalityBias, NeighborSampler
from tests.says import said
from tests.tiers import all_pairs

PLACED = gs.Placement((np.arange(0, 300, 3),), ((0,),), 300, None, {}, (), "test", "")
HOPS = SAMPLERS["neighbor"]
LINKS = {
    "neighbor": LinkSampler(HOPS),
    "walk, shared": LinkSampler(HOPS, "walk", num_negatives=4, negatives="uniform", share_negatives=True),
    "edge, without pairs": LinkSampler(HOPS, "edge", edges_per_node=2, exclude_pairs=True),
}
ALL_SAMPLERS = SAMPLERS | {
    "locality": NeighborSampler([4, 3], locality=LocalityBias(PLACED, 4.0, neighbor_set_size=30)),
    "all neighbours": NeighborSampler([-1, -1]),
    "layerwise": LayerwiseSampler(20, 2),
    **{f"links: {name}": sampler for name, sampler in LINKS.items()},
    "links, layerwise": LinkSampler(LayerwiseSampler(20, 2)),
}
WEIGHT = np.random.default_rng(0).uniform(0.5, 2, WORLD.csc.num_edges).astype(np.float32)
SETTINGS = {
    "two levels": TaskGraphs(3),
    "at once": TaskGraphs(2, sigma=0, chunks=5),
    "tight": TaskGraphs(3, queue_bytes=1),
    "fixed": FixedPrefetch(2, depth=3),
}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert loader_threads() == []


def with_tasks(settings=SETTINGS["two levels"], **options):
    ahead = {"source": settings.connect(RankPlace()), "prefetch_batches": settings.batches_ahead}
    return make_loader(**ahead | options)


def all_contents(batches) -> list[dict]:
    return [contents(batch) for batch in batches]


@pytest.mark.parametrize("name", ALL_SAMPLERS)
def test_every_sampler_gives_the_batches_of_threads(name):
    sampler = ALL_SAMPLERS[name]
    expected = all_contents(make_loader(sampler=sampler, num_threads=0))
    for settings in (SETTINGS["two levels"], SETTINGS["fixed"]):
        assert all_contents(with_tasks(settings, sampler=sampler)) == expected


@all_pairs
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("features", [WORLD.features, sparse_features(), None])
@pytest.mark.parametrize("sampler", [HOPS, LINKS["edge, without pairs"], SAMPLERS["cluster"]])
def test_features_weights_and_edges_of_every_scheduling(settings, features, sampler):
    edges = {"edge_weight": WEIGHT, "edge_attr": np.random.default_rng(1).random((len(WEIGHT), 3), np.float32)}
    options = {"sampler": sampler, "features": features, "edges": edges, "return_e_id": True}
    expected = make_loader(**options, num_threads=0)
    found = with_tasks(settings, **options)
    for epoch in range(2):
        expected.set_epoch(epoch)
        found.set_epoch(epoch)
        assert all_contents(found) == all_contents(expected)


def test_scope_graph_and_ranks_change_nothing():
    whole = WholeGraph.of(WORLD.csc, 0)
    for rank in range(2):
        options = {"parts": [rank], "load_part": lambda part: replace(whole, part=part, core_start=0)}
        options["batch_size"] = 7
        assert all_contents(with_tasks(**options)) == all_contents(make_loader(**options, num_threads=0))


@pytest.mark.parametrize("lookahead", [0, 4])
def test_features_that_are_gathered_after_the_sample(lookahead):
    """What a Belady cache lives on: rows are told ahead, and gathered by the loader's threads."""
    features = ToldFeatures(WORLD.features)
    options = {
        "reads": RowReads(fill_here=True, lookahead_batches=lookahead),
        "prefetch_batches": 2,
        "features": features,
    }
    batches = list(with_tasks(**options))
    assert all_contents(batches) == all_contents(make_loader(num_threads=0))
    if lookahead:
        assert [what for what, _ in features.notes][:6] == ["expect"] * 6


def test_resume_within_an_epoch_and_iterations_that_are_broken_off():
    everything = all_contents(make_loader(passes=2, num_threads=0))
    loader = with_tasks(passes=2)
    for stop in (0, 1, 7):
        iterator = iter(loader)
        head = [contents(next(iterator)) for _ in range(stop)]
        state = loader.state_dict()
        iterator.close()
        assert loader_threads() == []
        other = with_tasks(SETTINGS["fixed"], passes=2)
        other.load_state_dict(state)
        assert head + all_contents(other) == everything


def test_a_part_that_loads_holds_up_no_thread():
    """One thread prepares all batches of the first part while the second one is being loaded."""
    loaded = threading.Event()

    def load_part(part):
        assert part == 0 or loaded.wait(20)
        return WORLD.load_part(part)

    loader = with_tasks(TaskGraphs(1, sigma=0), parts=[0, 1], load_part=load_part, prefetch_batches=50)
    source, batches = loader._source, iter(loader)
    num_first = loader.walk.num_batches[0]
    taken = [next(batches) for _ in range(num_first)]
    assert {batch.part for batch in taken} == {0} and not loaded.is_set()
    assert not source.scheduler.policy.num_under_way
    loaded.set()
    assert {batch.part for batch in batches} == {1}


def test_finished_batches_stay_below_the_cap():
    """With the largest size known, finished batches and those under way are never more than the cap holds."""
    sizes = [sum(v.nbytes for v in vars(b).values() if isinstance(v, torch.Tensor)) for b in make_loader(batch_size=4)]
    cap = 3 * max(sizes)
    loader = with_tasks(TaskGraphs(4, sigma=0, queue_bytes=cap), batch_size=4, prefetch_batches=100)
    policy = loader._source.scheduler.policy
    policy.largest_bytes = max(sizes)
    list(loader)
    assert 0 < policy.peak_bytes <= cap


def test_a_users_neighbourhood_takes_the_place_of_ours():
    settings = TaskGraphs(2, operators=Operators(FirstNeighbors()))
    for found, ours in zip(with_tasks(settings), make_loader(num_threads=0), strict=True):
        assert torch.equal(found.n_id[: found.batch_size], ours.n_id[: ours.batch_size])
        assert len(found.num_sampled_nodes) == 2 and found.num_edges <= found.batch_size
        np.testing.assert_array_equal(found.x.numpy(), WORLD.features.array[found.n_id.numpy()])


class Elsewhere(FanoutNeighborhood):
    """Half of each hop is sampled by another worker, whose replies come late."""

    asks, in_chunks = True, False

    def __init__(self, sampler, worker):
        super().__init__(sampler)
        self.in_chunks, self.worker = False, worker

    def begin(self, *arguments):
        hops = super().begin(*arguments)
        half = hops.sample_chunk
        hops.sample_chunk = lambda chunk, num_chunks: half(0, 2)
        hops.ask = lambda: self.worker.submit(half, 1, 2)
        return hops


@pytest.mark.parametrize("settings", [SETTINGS["at once"], SETTINGS["fixed"]])
def test_hops_that_are_sampled_elsewhere_change_nothing(settings):
    expected = all_contents(make_loader(num_threads=0))
    with ThreadPoolExecutor(1) as worker:
        operators = Operators(Elsewhere(HOPS, worker))
        assert all_contents(with_tasks(replace(settings, operators=operators))) == expected


@pytest.mark.parametrize("settings", [SETTINGS["at once"], SETTINGS["fixed"]])
def test_a_reply_that_fails_names_its_batch(settings):
    class Gone:
        def submit(self, *_):
            reply = Future()
            reply.set_exception(OSError("host gone"))
            return reply

    operators = Operators(Elsewhere(HOPS, Gone()))
    with pytest.raises(GNNScaleError, match=said("part 0 batch 0 epoch 1: OSError: host gone")):
        list(with_tasks(replace(settings, operators=operators)))


def test_nothing_requested_is_told():
    with pytest.raises(ValueError, match=said("request(key) ready")):
        with_tasks()._source.ready()


def test_a_batch_may_be_asked_for_again_in_a_new_iteration():
    source = with_tasks()._source
    for _ in range(2):
        for batch in range(3):
            source.request(BatchKey(1, 0, 0, batch))
        assert source.ready()[0].batch == 0
        source.forget()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": 0}, "num_threads 1 0"),
        ({"sigma": -1}, "sigma >= 0 -1"),
        ({"queue_bytes": 0}, "queue_bytes 1 0"),
        ({"chunks": 0}, "chunks 1 0"),
        ({"operators": "pinsage"}, "gs.loader.Operators( None 'pinsage'"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=said(message)):
        TaskGraphs(**options)


def test_links_come_from_one_place():
    with pytest.raises(ValueError, match=said("links samples positives")):
        Operators(FirstNeighbors(), positives=object(), negatives=object(), links=LINKS["neighbor"])
