"""`BatchSampler` as a user meets it: a sampler from its docstring, one that does not derive from it, one misspelt."""

import ast
import inspect
import textwrap
from dataclasses import dataclass, replace

import lightning as L
import numpy as np
import pytest
from oracles.parts import part_loader, small_world

import lightning_gnnscale as gs
from lightning_gnnscale.graph import check_requires
from lightning_gnnscale.partition_store.part_graph import WholeGraph
from lightning_gnnscale.sampler import BatchSampler, protocol
from lightning_gnnscale.sampler.protocol import as_batch_sampler
from tests.says import said

WORLD = small_world()
METHODS = ("num_batches", "prepare", "items", "sample")


def documented_sampler(base: type = BatchSampler) -> type:
    """The class that stands in the docstring of `BatchSampler`, derived from a base."""
    text = inspect.getdoc(BatchSampler)
    begin, end = text.index("    class SeedsOnly"), text.index("A class that does not derive")
    names = vars(protocol) | {"BatchSampler": base}
    exec(textwrap.dedent(text[begin:end]), names)
    return names["SeedsOnly"]


def batches(sampler) -> list[tuple]:
    targets = {part: np.arange(*WORLD.part_offsets[part : part + 2]) for part in range(WORLD.num_parts)}
    loader = part_loader(list(targets), WORLD.load_part, WORLD.features, targets, sampler, batch_size=8)
    return [(batch.n_id.tolist(), batch.edge_index.tolist()) for batch in loader]


def test_a_sampler_from_the_docstring_alone_makes_batches():
    found = batches(documented_sampler()())
    assert found and all(len(set(nodes)) == len(nodes) for nodes, _ in found)
    assert any(edges[0] for _, edges in found)


def test_one_that_does_not_derive_from_the_base_makes_the_same():
    own = as_batch_sampler(documented_sampler(object)())
    assert isinstance(own, BatchSampler) and own.direction == "in" and own.requires == {}
    assert batches(documented_sampler(object)()) == batches(documented_sampler()())


def test_every_attribute_has_a_default_and_stands_in_the_docstring():
    assert set(METHODS) == BatchSampler.__abstractmethods__
    told = inspect.getdoc(BatchSampler).split("Attributes:")[1]
    body = ast.parse(textwrap.dedent(inspect.getsource(BatchSampler))).body[0].body
    assigned = [node.targets[0].id for node in body if isinstance(node, ast.Assign)]
    assert len(assigned) > 10
    for name in [*assigned, "requires"]:
        assert name in told, name


@pytest.mark.parametrize("base", [BatchSampler, object])
@pytest.mark.parametrize("name", ["temporal_stategy", "direcion", "num_layer", "weigthed"])
def test_a_misspelt_attribute_is_named_in_one_line(base, name):
    sampler = type("Mine", (documented_sampler(base),), {name: None})()
    meant = {"temporal_stategy": "temporal_strategy", "direcion": "direction", "num_layer": "num_layers"}
    with pytest.raises(ValueError, match=rf"^Mine\.{name} is no attribute of a sampler: write {meant.get(name, 'w')}"):
        as_batch_sampler(sampler)


def test_own_names_that_are_like_none_are_left_alone():
    @dataclass(frozen=True)
    class Walks(gs.NeighborSampler):
        length: int = 3
        weight: float = 1.0
        roots: int = 5

    assert as_batch_sampler(Walks([2])).length == 3


def test_what_is_no_sampler_says_what_it_lacks():
    half = type("Half", (), {"num_batches": len, "items": len})()
    with pytest.raises(ValueError, match=r"got .*Half.*, without prepare, sample"):
        as_batch_sampler(half)


def test_requires_names_what_a_graph_can_have():
    sampler = type("Mine", (documented_sampler(),), {"requires": {"edge_wieght": "give weights"}})()
    with pytest.raises(
        ValueError, match=r"^Mine\.requires must name what a graph can have, edge_types, .*, got edge_w"
    ):
        as_batch_sampler(sampler)


def test_what_is_required_is_compared_with_what_is_there():
    requires = {"edge_weight": "walks weigh edges: write the store with edge_weight=", "node_time": "give times"}
    with pytest.raises(ValueError, match="^walks weigh edges: write the store"):
        check_requires(requires, {"edge_weight": False, "node_time": False})
    with pytest.raises(ValueError, match="^give times$"):
        check_requires(requires, {"edge_weight": True, "node_time": False})
    check_requires(requires, {"edge_weight": True})  # a part does not know of the rest


def test_samplers_require_what_they_sample_by():
    assert gs.NeighborSampler([2]).requires == {}
    assert set(gs.NeighborSampler([2], weighted=True).requires) == {"edge_weight"}
    times = {"temporal_strategy": "uniform", "strictly_before": True}
    assert set(gs.NeighborSampler({"a,to,b": [2]}, **times).requires) == {"edge_types", "node_time"}
    links = gs.LinkSampler(gs.NeighborSampler([2], **times), positives="edge", labelled=True)
    assert set(links.requires) == {"edge_time", "edge_label"}  # a seed has the time of its link, not of its node


def test_a_documented_sampler_trains_and_one_that_requires_weights_is_refused(tmp_path):
    graph = gs.SyntheticGraph(60, 300, num_communities=3, seed=0)
    making = {
        "root": tmp_path / "store", "stream": graph.stream(to_undirected=True), "num_parts": 2, "partitioner": "random",
        "features": np.random.default_rng(0).random((60, 4), np.float32), "labels": np.arange(60) % 3,
        "masks": {"train": np.ones(60, bool)},
    }  # fmt: skip
    quiet = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False, "max_epochs": 1}

    def fit(sampler):
        dm = gs.PartitionDataModule(sampler=sampler, batch_size=8, **making)
        model = gs.NodeClassifier(gs.model.GCN(4, 8, 3, num_layers=2))
        trainer = L.Trainer(accelerator="cpu", devices=1, strategy="gnnscale", **quiet)
        trainer.fit(model, dm)
        return trainer

    assert fit(documented_sampler()()).global_step > 1
    assert fit(documented_sampler(object)()).global_step > 1
    needs = {"edge_weight": "walks weigh edges: write the store with edge_weight="}
    with pytest.raises(ValueError, match="^walks weigh edges"):
        fit(type("Walks", (documented_sampler(),), {"requires": needs})())


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"requires": ("edge_weight",)}, "Mine.requires dict ('edge_weight',)"),
        ({"requires": "edge_weight"}, "Mine.requires dict 'edge_weight'"),
        ({"direction": "out"}, "Mine.direction in both 'out'"),
    ],
)
def test_attributes_of_another_form_are_refused_by_their_names(attributes, message):
    with pytest.raises(ValueError, match=said(message)):
        as_batch_sampler(type("Mine", (documented_sampler(),), attributes)())


def test_weights_are_found_by_position_in_a_part_and_in_the_whole_graph(tmp_path):
    rng = np.random.default_rng(0)
    edges = np.unique(rng.integers(0, 40, (2, 200)), axis=1)
    weight = rng.random(edges.shape[1]).astype(np.float32)
    stream = gs.open_edge_stream(edges, num_nodes=40)
    parts = gs.partition(stream, "random", 2, seed=0)
    store = gs.write_partition_store(
        tmp_path / "store", stream, parts, features=np.ones((40, 1), np.float32), edge_weight=weight
    )
    wanted = {(int(u), int(v)): w for (u, v), w in zip(edges.T, weight, strict=True)}
    whole = WholeGraph.of(store.csc, 0, root=store.root)
    for graph, ids in ((store.load_part(1), store.load_part(1).nodes), (whole, np.arange(40))):
        graph = replace(graph, edge_weight=store.edge_weight)
        for row in range(graph.csc.num_rows):
            positions = np.arange(graph.csc.indptr[row], graph.csc.indptr[row + 1])
            found = graph.weights_at(positions)
            for position, w in zip(positions, found, strict=True):
                ends = store.original_nid[[ids[graph.csc.indices[position]], ids[row]]]
                assert w == wanted[tuple(ends.tolist())]
    assert replace(whole, edge_weight=None).weights_at(np.arange(3)) is None
