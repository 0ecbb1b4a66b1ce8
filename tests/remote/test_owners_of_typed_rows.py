"""Every sampler over rows of several owners samples what it samples from the whole graph, bit for bit."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles.parts import small_world

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule.machine_plan import RowsAsked
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.loader.batch_maker import BatchMaker
from lightning_gnnscale.loader.staged_part import StagedPart
from lightning_gnnscale.partition_store.part_graph import load_whole_graph
from lightning_gnnscale.remote.held_rows import HeldNodes, HeldRows, PartOwners, batch_columns, owned_columns
from lightning_gnnscale.remote.holder import held_columns
from lightning_gnnscale.remote.sampling_owners import OwnedGraph, sampler_of_owners
from lightning_gnnscale.sampler import LayerwiseSampler, LinkSampler, NeighborSampler
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace
from tests.says import said

pytestmark = pytest.mark.filterwarnings("ignore:.*listed more often")
NODES = {"paper": 150, "author": 90}
OWNER_OF = ("a", "b", "a", "c")
TIMED = {"temporal_strategy": "uniform", "strictly_before": True}


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> gs.PartitionStore:
    rng = np.random.default_rng(2)
    cites = rng.integers(0, NODES["paper"], (2, 1500))
    wrote = np.stack([rng.integers(0, NODES["author"], 900), rng.integers(0, NODES["paper"], 900)])
    edges = {("paper", "cites", "paper"): cites, ("author", "writes", "paper"): wrote}
    columns = {
        key: {
            "edges": ends,
            "time": rng.integers(0, 40, ends.shape[1]),
            "features": rng.random((ends.shape[1], 3), np.float32),
            "labels": rng.integers(0, 4, ends.shape[1]),
        }
        for key, ends in edges.items()
    }
    graph = gs.hetero_graph(
        nodes={
            name: {
                "features": rng.random((num, 4), np.float32),
                "time": rng.integers(0, 60, num),
                "labels": rng.integers(0, 3, num),
                "masks": {"train": rng.random(num) < 0.5},
            }
            for name, num in NODES.items()
        },
        edges=columns,
    )  # fmt: skip
    parts = gs.partition(graph.stream, "random", 4, seed=1)
    return gs.write_partition_store(tmp_path_factory.mktemp("owners") / "typed", graph.stream, parts, graph)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> gs.PartitionStore:
    world, rng = small_world(num_nodes=300, num_edges=4000, num_parts=4), np.random.default_rng(3)
    target = np.repeat(np.arange(300), np.diff(world.csc.indptr))
    edges = np.stack([world.csc.indices, target])
    keep = edges[0] != edges[1]
    edges = edges[:, keep]
    stream = gs.open_edge_stream(edges, num_nodes=300)
    weight = rng.random(edges.shape[1], np.float32) * (rng.random(edges.shape[1]) < 0.9)
    return gs.write_partition_store(
        tmp_path_factory.mktemp("owners") / "plain", stream, gs.partition(stream, "random", 4, seed=1),
        features=rng.random((300, 4), np.float32), labels=rng.integers(0, 3, 300),
        edge_weight=weight.astype(np.float32), masks={"train": rng.random(300) < 0.5},
        node_time=rng.integers(0, 60, 300), edge_features=rng.random((edges.shape[1], 2)),
        edge_label=rng.integers(0, 5, edges.shape[1]),
    )  # fmt: skip


PLAIN = {
    "by weight": NeighborSampler([4, 3], weighted=True),
    "by weight with replacement": NeighborSampler([4, -1], weighted=True, replace=True),
    "disjoint": NeighborSampler([4, 3], disjoint=True),
    "times of nodes": NeighborSampler([4, 3], **TIMED),
    "the latest": NeighborSampler([4, 3], temporal_strategy="last"),
    "times and weights": NeighborSampler([4, 3], weighted=True, **TIMED),
    "induced": NeighborSampler([4, 3], subgraph_type="induced"),
    "bidirectional": NeighborSampler([4, 3], subgraph_type="bidirectional"),
    "layer-wise": LayerwiseSampler([40, 30]),
    "neighbours as links": LinkSampler(NeighborSampler([4, 3]), positives="neighbor"),
    "walks": LinkSampler(NeighborSampler([4, 3]), positives="walk", walk_length=4),
    "edges as links": LinkSampler(LayerwiseSampler([30]), positives="edge"),
    "without their own edges": LinkSampler(NeighborSampler([4, 3]), positives="edge", exclude_pairs=True),
    "classes of edges": LinkSampler(NeighborSampler([4, 3], weighted=True), positives="edge", labelled=True),
}
TYPED = {
    "by edge type": NeighborSampler({"author,writes,paper": [3, 2], "*": [4, 1]}),
    "all of some edge types": NeighborSampler({"author,writes,paper": [-1, 2], "paper,cites,paper": [0, 3]}),
    "with replacement": NeighborSampler({"*": [3, 2]}, replace=True),
    "by edge type and time": NeighborSampler({"*": [3, 2]}, **TIMED),
    "all edge types by time": NeighborSampler([4, 3], **TIMED),
    "the latest of each edge type": NeighborSampler({"*": [3, 2]}, temporal_strategy="last", replace=True),
    "induced": NeighborSampler({"*": [3, 2]}, subgraph_type="induced"),
    "triples": LinkSampler(NeighborSampler({"*": [3, 2]}), positives="edge", corrupt="both"),
    "triples with times": LinkSampler(NeighborSampler({"*": [3, 2]}, **TIMED), positives="edge"),
    "classes of triples": LinkSampler(NeighborSampler({"*": [3, 2]}, **TIMED), positives="edge", labelled=True),
}
CASES = [("plain", name) for name in PLAIN] + [("typed", name) for name in TYPED]


class Ready:
    """An answer that is there."""

    def __init__(self, found):
        self.result = lambda: found


def owned_by(store, sampler, owner: str, replicated=(), answers=None) -> OwnedGraph:
    """The rows of a store, as one of three owners reads them; requests are counted in `answers`."""
    names = owned_columns(sampler, store)
    columns = held_columns(store, names)
    parts = {name: [part for part, own in enumerate(OWNER_OF) if own == name] for name in "abc"}
    held = {
        name: HeldRows.read(store.csc, HeldNodes(store.part_offsets, own, replicated), columns=columns)
        for name, own in parts.items()
    }

    def ask(name, requests):
        if answers is not None:
            answers.append((name, len(requests)))
        return Ready([held[name].sample(request) for request in requests])

    return OwnedGraph(held[owner], PartOwners(store.part_offsets, OWNER_OF), ask, names)


def blind(state):
    """A state whose edges cannot be read: their ends and columns are wrong."""
    inner = state.inner if hasattr(state, "inner") else state
    wrong = {"csc": inner.csc._replace(indices=np.full_like(inner.csc.indices, -1))}
    if hasattr(inner, "relations"):
        wrong["relations"] = [
            one._replace(
                indices=wrong["csc"].indices,
                **{name: None for name in ("time", "weight", "edge_type") if getattr(one, name) is not None},
            )
            for one in inner.relations
        ]
    inner = inner._replace(**wrong)
    if not hasattr(state, "inner"):
        return inner
    edges = {name: np.empty(0) for name in ("edge_type", "edge_time") if getattr(state, name) is not None}
    return state._replace(inner=inner, **edges)


def unread(graph):
    """The whole graph with columns of its edges that must not be read."""
    columns = {name: np.empty(0) if name.startswith("edge") else one for name, one in graph.columns.items()}
    return replace(graph, columns=columns, edge_weight=graph.edge_weight if graph.edge_weight is None else np.empty(0))


def columns_of(store, sampled, sampler, return_e_id):
    """What owners give with a batch that is sampled from the whole graph: the columns of its edges and links."""
    found = {}
    if return_e_id:
        inner = sampler.sampler or sampler
        names = batch_columns(inner.rows.columns, inner.has_edge_types)
        own = {"edge_attr" if name == "edge_features" else name: store.edge_column(name) for name in names}
        found["columns"] = {name: np.asarray(values[sampled.e_id]) for name, values in own.items()}
    if sampled.pair_edges is not None:
        found["edge_label"] = np.asarray(store.edge_label[sampled.pair_edges]).astype(np.int64)
        found |= {"pair_attr": np.asarray(store.edge_features[sampled.pair_edges]), "pair_edges": None}
    return found


def batch(sampler, state, items, key, store, return_e_id):
    space = Workspace(store.num_nodes, store.csc.indices.dtype)
    return sampler.sample(state, items, key, space, np.empty, return_e_id)


@pytest.mark.parametrize("return_e_id", [True, False], ids=["positions", "no positions"])
@pytest.mark.parametrize(("which", "name"), CASES, ids=[f"{which}: {name}" for which, name in CASES])
def test_batches_are_those_of_the_whole_graph(request, which, name, return_e_id):
    store, sampler = request.getfixturevalue(which), (PLAIN if which == "plain" else TYPED)[name]
    graph, targets = load_whole_graph(store, 0), np.flatnonzero(store.masks["train"])
    state = sampler.prepare(graph, targets, 7)
    edges = 0
    for owner, replicated in (("a", ()), ("c", np.arange(0, store.num_nodes, 5))):
        asked: list[tuple[str, int]] = []
        own = sampler_of_owners(sampler, owned_by(store, sampler, owner, replicated, asked))
        for number, items in enumerate(sampler.items(state, 24, False, 5)[:3]):
            one = batch(sampler, state, items, 99 + number, store, return_e_id)
            other = batch(own, blind(own.prepare(unread(graph), targets, 7)), items, 99 + number, store, return_e_id)
            one = one._replace(**columns_of(store, one, own, return_e_id))
            for field, value in one._asdict().items():
                same = getattr(other, field)
                if isinstance(value, dict):
                    assert value.keys() == same.keys(), field
                    assert all(np.array_equal(value[name], same[name]) for name in value), field
                elif isinstance(value, np.ndarray):
                    assert value.dtype == same.dtype and np.array_equal(value, same), field
                else:
                    assert value == same, field
            edges += one.edge_index.shape[1]
        assert {to for to, _ in asked} == set("abc") - {owner}
    assert edges > 200, "and something is sampled"


@pytest.mark.parametrize(
    ("which", "name"),
    [("plain", "by weight"), ("plain", "times of nodes"), ("plain", "layer-wise"), ("plain", "disjoint"),
     ("typed", "by edge type"), ("typed", "by edge type and time"), ("typed", "all edge types by time")],
)  # fmt: skip
def test_the_plan_counts_the_bytes_that_owners_answer_with(request, which, name):
    store, sampler = request.getfixturevalue(which), (PLAIN if which == "plain" else TYPED)[name]
    traffic = RowsAsked(store, np.array(["abc".index(one) for one in OWNER_OF]), 3, 0, 0, sampler)
    rows, given = owned_by(store, sampler, "a"), [0, 0, 0]
    ask = rows.ask

    def counted(owner, requests):
        sampling = ask(owner, requests)
        given["abc".index(owner)] += sum(one.nbytes for one in sampling.result())
        return sampling

    graph, targets = load_whole_graph(store, 0), np.flatnonzero(store.masks["train"])
    own = sampler_of_owners(sampler, replace(rows, ask=counted))
    staged = StagedPart(graph, own.prepare(graph, targets, 7), {}, None, (), store.edge_columns(["edge_time"]))
    asks_edges = BatchMaker(sampler).asks_edges(staged)
    found = batch(own, staged.state, targets, 1, store, asks_edges)
    traffic.count(0, SimpleNamespace(n_id=torch.from_numpy(found.n_id), indptr=torch.from_numpy(found.indptr)))
    expected = traffic.num_bytes()[:, 0]
    if which == "typed" and name != "all edge types by time":
        # A node's count is there once for each edge type that may lead to it.
        assert (expected <= given).all() and (np.array(given) <= 1.3 * expected).all()
    else:
        assert expected.tolist() == given


def test_edge_types_of_a_hop_and_columns_of_their_edges_are_one_message_to_each_owner(typed):
    sampler, asked = NeighborSampler({"*": [3, 2]}), []
    own = sampler_of_owners(sampler, owned_by(typed, sampler, "a", answers=asked))
    targets = np.flatnonzero(typed.masks["train"])
    found = batch(own, own.prepare(load_whole_graph(typed, 0), targets, 7), targets, 1, typed, True)
    assert found.columns.keys() == {"edge_time", "edge_attr"}
    assert len(asked) == 4, "two owners, two hops"
    assert max(num for _, num in asked) == typed.schema.num_edge_types


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (lambda one: one._replace(neighbor=one.neighbor[:-1]), "neighbours instead of"),
        (lambda one: one._replace(count=one.count[:-1]), "counts of neighbours for nodes"),
        (lambda one: one._replace(count=None), "0 counts of neighbours for nodes"),
        (lambda one: one._replace(count=one.count - 4), "neighbours for a node that has to sample"),
        (lambda one: one._replace(count=one.count + 4), "neighbours for a node that has to sample"),
        (lambda one: one._replace(place=one.place[:-1]), "places instead of"),
        (lambda one: one._replace(columns={**one.columns, "edge_features": one.columns["edge_features"][:-1]}),
         "edge_features instead of"),
        (lambda one: one._replace(columns={}), "0 edge_time instead of"),
        (lambda one: one._replace(columns=one.columns | {"edge_features": one.columns["edge_features"][:, :1]}),
         "edge_features as float32 of shape (1,) instead of (3,)"),
    ],
)  # fmt: skip
def test_an_answer_that_does_not_fit_is_refused_in_one_line(typed, cut, told):
    sampler = NeighborSampler({"*": [3, 2]}, **TIMED)
    rows = owned_by(typed, sampler, "a")
    ask, targets = rows.ask, np.flatnonzero(typed.masks["train"])

    def damaged(owner, requests):
        return Ready(
            [cut(one) for one in ask(owner, requests).result()] if owner == "c" else ask(owner, requests).result()
        )

    own = sampler_of_owners(sampler, replace(rows, ask=damaged))
    with pytest.raises(GNNScaleError, match=said(f"machine c was asked for up to 3 neighbours edge type sent {told}")):
        batch(own, own.prepare(load_whole_graph(typed, 0), targets, 7), targets, 1, typed, True)


def test_a_missing_answer_is_refused_in_one_line(typed):
    sampler = NeighborSampler({"*": [3, 2]})
    rows = owned_by(typed, sampler, "a")
    ask, targets = rows.ask, np.flatnonzero(typed.masks["train"])
    own = sampler_of_owners(sampler, replace(rows, ask=lambda *given: Ready(ask(*given).result()[:-1])))
    with pytest.raises(GNNScaleError, match=said("machine was asked requests and sent answers same store")):
        batch(own, own.prepare(load_whole_graph(typed, 0), targets, 7), targets, 1, typed, False)
