"""The graphs that partitioners are compared on: simple, shuffled, the same each time, and gone afterwards."""

import networkx as nx
import numpy as np
import pytest

from benchmarks import graphs
from benchmarks.graphs import graph_file, public_root, resolve_graph, write_shuffled
from lightning_gnnscale.edge_stream import open_edge_stream
from tests.says import said


@pytest.fixture
def public(tmp_path):
    """A folder of public graphs: edges with repeats, reverses and a self-loop; node 6 has no edge."""
    edges = np.array([[0, 1, 1, 2, 3, 3, 4, 5, 0], [1, 0, 2, 2, 4, 4, 5, 3, 5]], np.int32)
    (tmp_path / "tiny").mkdir()
    train = np.array([1, 0, 0, 1, 0, 0, 1], bool)
    np.savez(tmp_path / "tiny" / "graph.npz", edge_index=edges, y=np.arange(7), train_mask=train)
    (tmp_path / "bare").mkdir()
    np.savez(tmp_path / "bare" / "graph.npz", edge_index=edges)
    (tmp_path / "labels").mkdir()
    np.savez(tmp_path / "labels" / "graph.npz", y=np.arange(7))
    return tmp_path


def edges_in(path):
    return np.fromfile(path, np.int32).reshape(-1, 2)


def test_a_public_graph_becomes_simple_and_shuffled(public, tmp_path):
    expected = nx.Graph([(0, 1), (1, 2), (3, 4), (4, 5), (5, 3), (0, 5)])
    expected.add_node(6)
    with graph_file(resolve_graph("tiny", public), tmp_path / "scratch") as made:
        edges, masks = edges_in(made.path), dict(np.load(made.masks))
        assert (made.num_nodes, made.num_edges, made.layout) == (7, 6, "once")
    found = nx.Graph(edges.tolist())
    found.add_nodes_from(range(7))
    assert len(edges) == found.number_of_edges() == 6
    train = {int(v) for v in np.flatnonzero(masks["train"])}
    matched = nx.isomorphism.GraphMatcher(
        nx.Graph((u, v) for u, v in expected.edges) if False else _marked(expected, {0, 3, 6}),
        _marked(found, train),
        node_match=lambda a, b: a["train"] == b["train"],
    )
    assert matched.is_isomorphic()
    assert not made.path.exists() and list((tmp_path / "scratch").iterdir()) == []


def _marked(graph, train):
    nx.set_node_attributes(graph, {v: v in train for v in graph}, "train")
    return graph


def test_shuffling_is_the_same_each_time_and_keeps_no_order(tmp_path):
    path = np.stack([np.arange(999), np.arange(1, 1000)])
    new_id, num_edges = write_shuffled(path, 1000, tmp_path / "a.bin")
    again, _ = write_shuffled(path[:, ::-1], 1000, tmp_path / "b.bin")
    assert num_edges == 999 and np.array_equal(new_id, again)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert np.array_equal(np.sort(new_id), np.arange(1000))
    edges = edges_in(tmp_path / "a.bin")
    old = np.argsort(new_id)[edges]
    assert np.array_equal(np.sort(old.min(1)), np.arange(999)) and np.all(np.abs(old[:, 0] - old[:, 1]) == 1)
    # Neither ids nor places tell where an edge was: correlations of 999 pairs, five standard deviations.
    assert abs(np.corrcoef(new_id, np.arange(1000))[0, 1]) < 5 / np.sqrt(1000)
    assert abs(np.corrcoef(old.min(1), np.arange(999))[0, 1]) < 5 / np.sqrt(1000)


def test_a_graph_without_labels_has_random_masks(public, tmp_path):
    with graph_file(resolve_graph("bare", public), tmp_path / "scratch") as made:
        masks = dict(np.load(made.masks))
    assert set(masks) == {"train", "val", "test"}
    assert made.num_nodes == 6 and sum(mask.sum() for mask in masks.values()) == 6


def test_a_graph_without_edges_is_refused(public, tmp_path):
    with (
        pytest.raises(ValueError, match=said("labels edge_index")),
        graph_file(resolve_graph("labels", public), tmp_path / "scratch"),
    ):
        pass
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("given", "num_nodes"), [("planted:4000", 400), ("lfr:4000", 400), ("planted:4_000:50", 50), ("lfr:40", 4)]
)
def test_generated_graphs(tmp_path, given, num_nodes):
    with graph_file(resolve_graph(given, None), tmp_path) as made:
        edges = edges_in(made.path)
        assert made.num_nodes == num_nodes and len(edges) == made.num_edges == int(given.split(":")[1])
        assert edges.max() < num_nodes
        assert sum(mask.sum() for mask in np.load(made.masks).values()) == num_nodes
    assert list(tmp_path.iterdir()) == []


def test_a_path_is_taken_as_it_stands(tmp_path):
    np.save(tmp_path / "mine.npy", np.array([[0, 1, 2, 2], [1, 2, 0, 4]]))
    spec = resolve_graph(str(tmp_path / "mine.npy"), None)
    assert spec.name == "mine.npy"
    with graph_file(spec, tmp_path / "scratch") as made:
        assert (made.path, made.num_nodes, made.num_edges) == (tmp_path / "mine.npy", 5, 4)
        assert (made.layout, made.masks) == ("auto", None)
    assert (tmp_path / "mine.npy").exists()
    np.savez(tmp_path / "masks.npz", train=np.ones(9, bool))
    more = {"name": "named", "num_nodes": 9, "layout": "once", "masks": str(tmp_path / "masks.npz")}
    named = resolve_graph({"path": str(tmp_path / "mine.npy"), **more}, None)
    with graph_file(named, tmp_path / "scratch") as made:
        assert (made.num_nodes, made.layout, made.masks) == (9, "once", tmp_path / "masks.npz")
        assert open_edge_stream(made.path, num_nodes=9, layout="once").count() == (9, 4)
    assert named.name == "named" and named.source != spec.source


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing", "'nothing' bare labels tiny planted:EDGES"),
        ("planted:many", "graph 'planted:many'"),
        ("none/edges.npy", "none/edges.npy file folder"),
        ({"name": "x"}, "graph path path name num_nodes"),
        ({"path": "x", "edges": 3}, "a graph has no edges"),
        ({"path": ".", "masks": "none.npz"}, "masks none.npz"),
    ],
)
def test_what_is_no_graph_says_what_there_is(public, given, message):
    with pytest.raises(ValueError, match=said(message)):
        resolve_graph(given, public)


def test_without_a_folder_of_public_graphs_the_variable_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("GNNSCALE_DATA", str(tmp_path))
    assert public_root(None) == tmp_path
    assert public_root("/somewhere").name == "somewhere"
    with pytest.raises(ValueError, match=said("GNNSCALE_DATA bench.data_root")):
        resolve_graph("cora", None)


def test_grids_communities_of_communities_and_power_laws_are_what_they_are_called(tmp_path):
    with graph_file(resolve_graph("grid:180", None), tmp_path) as made:
        grid = nx.Graph(edges_in(made.path).tolist())
        assert nx.is_isomorphic(grid, nx.grid_2d_graph(9, 9)) and made.num_nodes == 81
    with graph_file(resolve_graph("power_law:20000:2000", None), tmp_path) as made:
        degree = np.bincount(edges_in(made.path).ravel(), minlength=2000)
        assert 17_000 < made.num_edges <= 20_000 and degree.max() > 20 * degree.mean()
    src, dst = graphs._two_level_edges(24_000, 200_000)
    shares = [np.mean(src // size == dst // size) for size in (250, 8000)]
    assert 0.6 < shares[0] < 0.62 and 0.88 < shares[1] < 0.91  # 0.6; 0.85, and a third of the rest


def test_a_typed_graph_has_each_edge_both_ways_between_the_types_of_its_ends(tmp_path):
    with graph_file(resolve_graph("typed:600:80", None), tmp_path) as made:
        edges, node_type = edges_in(made.path), np.load(made.node_type)
        masks = dict(np.load(made.masks))
        dataset = graphs.typed_dataset(made, masks)
        ends = np.concatenate([np.stack(chunk[:2]) for chunk in dataset.stream.chunks()], axis=1)
    assert not node_type[masks["train"]].any() and masks["train"].any(), "papers are the seeds"
    order = np.argsort(node_type, kind="stable")  # the data set numbers nodes by type
    expected = np.concatenate([edges, edges[:, ::-1]])
    assert sorted(map(tuple, order[ends].T.tolist())) == sorted(map(tuple, expected.tolist()))
    assert dataset.schema.node_types == tuple(graphs.NODE_TYPES)
    assert {(src, dst) for src, _, dst in dataset.schema.edge_types} == {
        tuple(dataset.schema.node_types[kind] for kind in pair) for pair in node_type[expected].tolist()
    }
