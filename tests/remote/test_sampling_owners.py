"""Rows of owners: whoever holds which rows, batches are those sampled from the whole graph, bit for bit."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.parts import small_world

from benchmarks.fixed_prefetch import FixedPrefetch
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.graph import CSC
from lightning_gnnscale.loader import RankPlace, TaskGraphs
from lightning_gnnscale.loader.batch_maker import BatchMaker, BatchOrder
from lightning_gnnscale.loader.batch_source import BatchKey
from lightning_gnnscale.loader.batch_tasks import join_branches
from lightning_gnnscale.loader.operators import FanoutNeighborhood
from lightning_gnnscale.loader.staged_part import PartStager, node_values
from lightning_gnnscale.partition_store import WholeGraph
from lightning_gnnscale.partition_store.features import CSRFeatures
from lightning_gnnscale.placement import place
from lightning_gnnscale.remote.held_rows import (
    DistributedFeatures,
    HeldFeatures,
    HeldNodes,
    HeldRows,
    HopRequest,
    Neighbors,
    PartOwners,
    most_linked,
)
from lightning_gnnscale.remote.sampling_owners import OwnedGraph, sampler_of_owners
from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.sampler import ClusterSampler, LocalityBias, NeighborSampler
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from tests.says import said

WORLD = small_world(num_nodes=400, num_edges=6000, num_parts=5)
OWNER_OF = ("a", "b", "a", "c", "b")
OFFSETS = WORLD.part_offsets
# What a worker must not read: other owners' edges.
UNREAD = CSC(WORLD.csc.indptr, np.full_like(WORLD.csc.indices, -1))


def parts_of(owner: str) -> list[int]:
    return [part for part, own in enumerate(OWNER_OF) if own == owner]


def done(value) -> Future:
    future = Future()
    future.set_result(value)
    return future


class Workers:
    """Owners that answer at once, or in threads of an executor."""

    def __init__(self, replicated=(), executor=None, columns=None):
        self.columns = {} if columns is None else columns
        self.held = {
            owner: HeldRows.read(WORLD.csc, HeldNodes(OFFSETS, parts_of(owner), replicated), columns=self.columns)
            for owner in "abc"
        }
        self.owners, self.executor = PartOwners(OFFSETS, OWNER_OF), executor
        self.asked: list[tuple[str, int]] = []

    def ask(self, owner: str, requests: list[HopRequest]):
        self.asked.append((owner, sum(len(request.nodes) for request in requests)))
        if self.executor is not None:
            return self.executor.submit(self.answer, owner, requests)
        return done(self.answer(owner, requests))

    def answer(self, owner: str, requests: list[HopRequest]) -> list[Neighbors]:
        return [self.held[owner].sample(request) for request in requests]

    def sampler(self, owner: str, sampler, ask=None):
        return sampler_of_owners(sampler, OwnedGraph(self.held[owner], self.owners, ask or self.ask, (*self.columns,)))


def sampled(sampler, csc, seeds, key, return_e_id=True):
    state = sampler.prepare(WholeGraph.of(csc, 0), seeds, 0)
    return sampler.sample(state, seeds, key, Workspace(csc.num_rows, csc.indices.dtype), np.empty, return_e_id)


def assert_equal(one, other):
    for name, value in one._asdict().items():
        if isinstance(value, np.ndarray):
            assert value.dtype == getattr(other, name).dtype and np.array_equal(value, getattr(other, name)), name
        else:
            assert value == getattr(other, name), name


@given(
    st.sampled_from([[4, 3], [-1], [15, 10, 5], [1, -1, 2], [70]]),
    st.booleans(),
    st.booleans(),
    st.sampled_from("abc"),
    st.integers(0, 200),
    st.lists(st.integers(0, 399), unique=True, max_size=20),
)
def test_any_owners_sample_what_the_whole_graph_gives(fanouts, replace, return_e_id, owner, num_replicated, seeds):
    sampler, seeds = NeighborSampler(fanouts, replace=replace), np.array(seeds, np.int64)
    replicated = np.argsort(-WORLD.csc.in_degree, kind="stable")[:num_replicated]
    workers = Workers(replicated)
    expected = sampled(sampler, WORLD.csc, seeds, 77, return_e_id)
    assert_equal(expected, sampled(workers.sampler(owner, sampler), UNREAD, seeds, 77, return_e_id))


def test_requests_leave_before_own_rows_are_sampled_and_none_goes_to_oneself(monkeypatch):
    steps, workers = [], Workers()

    def ask(owner, request):
        steps.append(f"ask {owner}")
        future = workers.ask(owner, request)
        sampling = Future()
        sampling.result = lambda: steps.append(f"take {owner}") or future.result()
        return sampling

    held = workers.held["a"]
    sampler = workers.sampler("a", NeighborSampler([5, 5]), ask)
    sample = HeldRows.sample

    def watched(self, request, rows=None):
        if self is held:
            steps.append("sample")
        return sample(self, request, rows)

    monkeypatch.setattr(HeldRows, "sample", watched)
    sampled(sampler, UNREAD, np.arange(0, 400, 9), 3)
    for hop in (steps[:5], steps[5:]):
        assert [{*hop[:2]}, hop[2], {*hop[3:]}] == [{"ask b", "ask c"}, "sample", {"take b", "take c"}]


def test_batches_are_those_of_the_whole_graph_labels_and_masks_included():
    graph = WholeGraph.of(WORLD.csc, 0)
    targets = np.flatnonzero(WORLD.masks["train"])
    nodes = node_values(WORLD.labels, WORLD.masks)
    sampler = NeighborSampler([6, 4])
    weight = np.random.default_rng(0).random(WORLD.csc.num_edges).astype(np.float32)
    with ThreadPoolExecutor(3) as executor:
        workers = Workers(replicated=np.arange(20), executor=executor)
        made = {}
        for owner in (None, "a", "c"):
            own = sampler if owner is None else workers.sampler(owner, sampler)
            view = graph if owner is None else WholeGraph(0, UNREAD, graph.degree)
            stage = PartStager(lambda part, view=view: view, {0: targets}, own, nodes, 4, {"edge_weight": weight})
            staged, maker = stage(0), BatchMaker(own, WORLD.features, order=BatchOrder(32), return_e_id=True)
            made[owner] = [maker.make(BatchKey(4, 1, 0, batch), lambda staged=staged: staged) for batch in range(5)]
    assert {owner for owner, _ in workers.asked} == {"a", "b", "c"}
    for owner in "ac":
        for one, other in zip(made[None], made[owner], strict=True):
            assert_same(one, other)


def assert_same(one, other):
    """Two batches have the same bits."""
    for field in fields(one):
        pair = [getattr(batch, field.name) for batch in (one, other)]
        for value, same in zip(*(part if isinstance(part, tuple) else (part,) for part in pair), strict=True):
            assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same, field.name


def test_hop_by_hop_for_task_graphs():
    sampler, graph = NeighborSampler([4, 4]), WholeGraph.of(WORLD.csc, 0)
    seeds, key = np.arange(0, 400, 17), batch_key(1, 0, 0, 0)
    space = Workspace(400, WORLD.csc.indices.dtype)
    found = []
    for own in (sampler, Workers().sampler("b", sampler)):
        staged = PartStager(lambda part: graph, {0: seeds}, own, {}, 0)(0)
        operator = FanoutNeighborhood(own)
        assert operator.num_hops == 2
        hops = operator.begin(staged, seeds, key, space, False)
        seen = []
        for _ in range(2):
            seen += [hops.num_neighbors, hops.newest.tolist()]
            hops.sample()
        found.append((seen, hops.collect(np.empty)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


class SlowAnswers:
    """Owners that answer 20 ms after they are asked.

    Attributes:
        most: the most requests that were on their way at a time.
    """

    def __init__(self):
        self.pool, self.lock, self.out, self.most = ThreadPoolExecutor(32), threading.Lock(), 0, 0

    def slowly(self, answer, *arguments) -> Future:
        with self.lock:
            self.out += 1
            self.most = max(self.most, self.out)

        def late():
            time.sleep(0.02)
            with self.lock:
                self.out -= 1
            return answer(*arguments)

        return self.pool.submit(late)


@pytest.mark.parametrize("features", [WORLD.features, None, "sparse"], ids=["dense", "none", "sparse"])
@pytest.mark.parametrize("settings_", [TaskGraphs(2), FixedPrefetch(2)], ids=["two levels", "fixed"])
def test_task_graphs_ask_and_do_other_work_meanwhile(settings_, features):
    features = sparse_features() if features == "sparse" else features
    targets, sampler = np.flatnonzero(WORLD.masks["train"]), NeighborSampler([6, 4])
    weight = np.random.default_rng(0).random(WORLD.csc.num_edges).astype(np.float32)
    edges = {"edge_weight": weight, "edge_attr": np.random.default_rng(1).random((WORLD.csc.num_edges, 3))}
    unread = {name: np.full_like(values, np.nan) for name, values in edges.items()}
    told, workers = SlowAnswers(), Workers(columns={"edge_weight": weight, "edge_features": edges["edge_attr"]})
    own = workers.sampler("a", sampler, lambda *asked: told.slowly(workers.answer, *asked))
    table = None
    if features is not None:
        held = {owner: HeldFeatures.read(features, HeldNodes(OFFSETS, parts_of(owner), ())) for owner in "abc"}
        table = DistributedFeatures.of(
            features, held["a"], workers.owners, lambda owner, nodes: told.slowly(held[owner].answer, nodes)
        )
    keys = [BatchKey(4, 1, 0, batch) for batch in range(6)]
    graph, view = WholeGraph.of(WORLD.csc, 0), WholeGraph(0, UNREAD, WholeGraph.of(WORLD.csc, 0).degree)
    given = (node_values(WORLD.labels, WORLD.masks), 4)
    plain = BatchMaker(sampler, features, order=BatchOrder(16), return_e_id=True)
    staged = PartStager(lambda part: graph, {0: targets}, sampler, *given, edges)(0)
    expected = [plain.make(key, lambda: staged) for key in keys]
    maker = replace(plain, sampler=own, features=table)
    stage = PartStager(lambda part: view, {0: targets}, own, *given, unread)
    source = settings_.connect(RankPlace())(stage, maker)
    source.begin()
    for key in keys:
        source.request(key)
    for key, one in zip(keys, expected, strict=True):
        found_key, other = source.ready()
        assert found_key == key
        assert_same(one, other)
    source.close()
    assert told.most >= (2 if isinstance(settings_, FixedPrefetch) else 4), (
        "two threads, and more requests out than those"
    )


@pytest.mark.parametrize("replace", [False, True])
def test_a_hop_may_be_sampled_in_chunks(replace):
    sampler, seeds = NeighborSampler([6, 5], replace=replace), np.arange(0, 400, 9)
    distributed = Workers(replicated=np.arange(30)).sampler("b", sampler)
    state = distributed.prepare(WholeGraph.of(UNREAD, 0), seeds, 0)
    hops = distributed.begin(state, seeds, 7, Workspace(400, WORLD.csc.indices.dtype), True)
    for _ in range(2):
        for chunk in (2, 0, 1):
            hops.sample_chunk(chunk, 3)
        hops.relabel()
    assert_equal(sampled(sampler, WORLD.csc, seeds, 7), distributed.finish(state, hops, np.empty))


def test_replicated_rows_are_never_asked_for():
    everything = Workers(replicated=np.arange(400))
    sampled(everything.sampler("a", NeighborSampler([5, 5])), UNREAD, np.arange(50), 1)
    assert everything.asked == []
    some, none = Workers(most_linked(WORLD.csc.indptr, 4000)), Workers()
    for workers in (some, none):
        sampled(workers.sampler("c", NeighborSampler([5, 5])), UNREAD, np.arange(50), 1)
    assert sum(num for _, num in some.asked) < sum(num for _, num in none.asked)


def test_what_is_replicated_fits_the_budget_and_is_most_linked():
    degree = WORLD.csc.in_degree
    nodes = most_linked(WORLD.csc.indptr, 10_000, id_bytes=4, row_bytes=64)
    cost = degree * 4 + 8 + 4 + 64
    assert cost[nodes].sum() <= 10_000 < cost[nodes].sum() + cost.max()
    assert degree[nodes].min() >= np.delete(degree, nodes).max()
    assert np.array_equal(nodes, np.sort(nodes))
    assert len(most_linked(WORLD.csc.indptr, 0)) == 0
    assert len(most_linked(np.array([0, 0, 2, 2]), 1 << 30)) == 1
    with pytest.raises(ValueError, match=said("replicate_bytes 0 -1")):
        most_linked(WORLD.csc.indptr, -1)
    plain, more = (HeldRows.read(WORLD.csc, HeldNodes(OFFSETS, [1], beside)) for beside in ((), nodes))
    assert 0 < more.num_bytes - plain.num_bytes <= (degree[nodes] * 4 + 12).sum()


def test_rows_sampled_from_the_files_stand_in_for_an_owner():
    workers, request = Workers(), HopRequest(np.array([3, 390, 200]), 99, 3, False)
    files = HeldRows.of_files(WORLD.csc)
    parts = np.searchsorted(OFFSETS, request.nodes, "right") - 1
    one_by_one = [
        workers.held[OWNER_OF[part]].sample(request._replace(nodes=request.nodes[i : i + 1]))
        for i, part in enumerate(parts)
    ]
    assert np.array_equal(files.sample(request).neighbor, np.concatenate([one.neighbor for one in one_by_one]))


def test_empty_parts_and_owners_without_rows():
    offsets = np.array([0, 0, 150, 150, 400, 400])
    held = HeldRows.read(WORLD.csc, HeldNodes(offsets, [0, 1, 4]))
    rest = HeldRows.read(WORLD.csc, HeldNodes(offsets, [2, 3]))
    owners = PartOwners(offsets, ["x", "x", "y", "y", "x"])
    assert [owner for owner, _ in owners.group(np.array([0, 149, 150, 399]))] == ["x", "y"]
    assert owners.group(np.empty(0, np.int64)) == []
    sampler = NeighborSampler([4, 4])
    rows = OwnedGraph(held, owners, lambda owner, requests: done([rest.sample(one) for one in requests]))
    distributed = sampler_of_owners(sampler, rows)
    seeds = np.array([149, 150, 0])
    assert_equal(sampled(sampler, WORLD.csc, seeds, 5), sampled(distributed, UNREAD, seeds, 5))
    nobody = HeldRows.read(WORLD.csc, HeldNodes(offsets, []))
    assert nobody.nodes.find(np.array([0, 399])).tolist() == [-1, -1]


def test_what_does_not_fit_is_refused_in_one_line():
    workers = Workers()
    held = workers.held["a"]
    for sampler, match in (
        (ClusterSampler(4, 2), "LinkSampler sample, got ClusterSampler"),
        (NeighborSampler([2], direction="both"), "takes direction='in', got 'both'"),
        (NeighborSampler([2], locality=LocalityBias(place(np.ones(400), 1, 50), 2)), "takes no locality"),
    ):
        with pytest.raises(ValueError, match=match) as error:
            workers.sampler("a", sampler)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=said("name 5 owners 2")):
        PartOwners(OFFSETS, "ab")
    with pytest.raises(ValueError, match=said("parts [0, 5) 1 5")):
        HeldRows.read(WORLD.csc, HeldNodes(OFFSETS, [1, 5]))
    with pytest.raises(ValueError, match=said("replicated ids [0, 400) 7 400")):
        HeldRows.read(WORLD.csc, HeldNodes(OFFSETS, [1], [7, 400]))
    for node in (int(OFFSETS[1]), 400, -1):
        with pytest.raises(GNNScaleError, match=said(f"node {node} owner")):
            held.sample(HopRequest(np.array([0, node]), 1, 2, False))


def test_a_wrong_answer_or_a_lost_owner_leaves_the_workspace_usable():
    workers, sampler, seeds = Workers(), NeighborSampler([4, 3]), np.arange(0, 400, 11)
    space = Workspace(400, WORLD.csc.indices.dtype)

    def short(owner, requests):
        return done([one._replace(neighbor=one.neighbor[:-1]) for one in workers.answer(owner, requests)])

    def lost(owner, requests):
        future = Future()
        future.set_exception(ConnectionError("gone"))
        return future

    for ask, kind, match in (
        (short, GNNScaleError, "machine b was asked for .* and sent .* instead of"),
        (lost, ConnectionError, "gone"),
    ):
        broken = workers.sampler("a", sampler, ask)
        state = broken.prepare(WholeGraph.of(UNREAD, 0), seeds, 0)
        with pytest.raises(kind, match=match):
            broken.sample(state, seeds, 5, space, np.empty, False)
    fine = workers.sampler("a", sampler)
    again = fine.sample(state, seeds, 5, space, np.empty, False)
    assert_equal(sampled(sampler, WORLD.csc, seeds, 5, False), again)


def sparse_features() -> CSRFeatures:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 6, 400)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = np.concatenate([np.sort(rng.choice(30, length, replace=False)) for length in lengths]).astype(np.int32)
    return CSRFeatures(indptr, indices, rng.random(indptr[-1], np.float32), 30)


@pytest.mark.parametrize("features", [WORLD.features, sparse_features()], ids=["dense", "csr"])
def test_feature_rows_of_all_owners_come_in_order(features):
    replicated = np.arange(100, 140)
    held = {owner: HeldFeatures.read(features, HeldNodes(OFFSETS, parts_of(owner), replicated)) for owner in "abc"}
    steps = []

    def ask(owner, nodes):
        steps.append(owner)
        return done(held[owner].answer(nodes))

    table = DistributedFeatures.of(features, held["c"], PartOwners(OFFSETS, OWNER_OF), ask)
    assert (table.num_rows, table.dim, table.dtype) == (400, features.dim, features.dtype)
    for nodes in (np.random.default_rng(2).permutation(400)[:90], np.arange(100, 140), np.empty(0, np.int64)):
        expected, found = features.read(nodes), table.read(nodes)
        names = ("indptr", "indices", "data") if features.is_sparse else (slice(None),)
        for name in names:
            one, other = (getattr(r, name) if isinstance(name, str) else r[name] for r in (expected, found))
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
    assert set(steps) == {"a", "b"} and len(steps) == 2, "replicated rows are at hand"
    out = np.empty((3, features.dim), features.dtype)
    if not features.is_sparse:
        assert table.read(np.array([399, 0, 200]), out) is out
        assert out.tobytes() == features.read(np.array([399, 0, 200])).tobytes()
    assert held["c"].num_bytes < sum(owner.num_bytes for owner in held.values())
    with pytest.raises(GNNScaleError, match=said("row 0")):
        held["c"].answer(np.array([0]))
    short = DistributedFeatures.of(features, held["c"], table.owners, lambda owner, nodes: ask(owner, nodes[1:]))
    with pytest.raises(GNNScaleError, match=said("2 feature rows sent 1")):
        short.read(np.array([0, 1]))


def test_branches_are_joined_with_the_columns_of_their_edges():
    workers = Workers(columns={"edge_weight": np.arange(WORLD.csc.num_edges, dtype=np.float32)})
    own, seeds = workers.sampler("a", NeighborSampler([4, 3])), np.arange(0, 400, 11)
    branches = [sampled(own, UNREAD, some, 3) for some in (seeds[:10], seeds[10:12], seeds[12:])]
    joined = join_branches(branches, np.empty)
    assert np.array_equal(joined.columns["edge_weight"], joined.e_id) and len(joined.e_id) > 300
    assert join_branches([branches[0]._replace(columns=None), *branches[1:]], np.empty).columns is None
