"""Held-out links: none of them comes back into the graph, whatever the order, direction or repeats of the edges."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from lightning_gnnscale.dataset import GraphDataset, generate, hold_out_edges, load_npz
from lightning_gnnscale.dataset.split import held_out
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.partition_store import write_partition_store
from lightning_gnnscale.partitioner import partition
from tests.says import said

EDGES = np.random.default_rng(0).integers(0, 200, (2, 3000))


def dataset_of(edges, **options) -> GraphDataset:
    return GraphDataset("g", open_edge_stream(np.ascontiguousarray(edges), **options))


def edges_of(stream) -> np.ndarray:
    return np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in stream.chunks()], axis=1)


def pairs(edges) -> set:
    return {tuple(sorted(edge)) for edge in np.asarray(edges).T.tolist()}


@pytest.mark.parametrize("options", [{"to_undirected": True}, {"layout": "directed"}])
def test_the_three_sets_are_disjoint_and_complete(options):
    made = hold_out_edges(dataset_of(EDGES, num_nodes=210, **options), val=0.1, test=0.2, seed=3)
    kept, val, test = (
        pairs(edges) for edges in (edges_of(made.stream), made.links["val"].edges, made.links["test"].edges)
    )
    assert not kept & val and not kept & test and not val & test
    assert kept | val | test == pairs(EDGES)
    assert made.stream.count() == (210, made.stream.num_edges)
    # ShardMap of some 2,800 distinct pairs: 4 standard deviations of a binomial are below 0.035.
    total = len(kept | val | test)
    assert abs(len(val) / total - 0.1) < 0.035
    assert abs(len(test) / total - 0.2) < 0.035
    assert np.array_equal(edges_of(made.stream), edges_of(made.stream))


def test_self_loops_stay_and_undirected_links_stand_once_in_either_direction():
    both = np.concatenate([EDGES, EDGES[::-1]], axis=1)
    made = hold_out_edges(dataset_of(both, to_undirected=True), val=0.2, test=0.2)
    loops = int((both[0] == both[1]).sum())
    kept = edges_of(made.stream)
    assert loops == int((kept[0] == kept[1]).sum())
    edges = made.links["test"].edges
    assert len(pairs(edges)) == edges.shape[1]
    assert 0.3 < (edges[0] < edges[1]).mean() < 0.7


def test_edge_values_follow_their_edges_and_must_be_as_many(tmp_path):
    np.save(tmp_path / "w.npy", np.arange(3000.0))
    dataset = replace(dataset_of(EDGES), edge_weight=str(tmp_path / "w.npy"))
    made = hold_out_edges(dataset, val=0.1, test=0.2)
    assert np.array_equal(EDGES[:, made.edge_weight.astype(int)], edges_of(made.stream))
    with pytest.raises(ValueError, match=said("edge_weight (3000), (2999,)")):
        hold_out_edges(replace(dataset, edge_weight=np.ones(2999)))


@pytest.mark.parametrize("chunk_edges", [7, 500, 1 << 20])
def test_order_chunks_direction_and_repeats_change_no_split(chunk_edges):
    reference = hold_out_edges(dataset_of(EDGES, to_undirected=True), seed=5)
    order = np.random.default_rng(1).permutation(EDGES.shape[1])
    other = np.concatenate([EDGES[:, order][::-1], EDGES[:, :100]], axis=1)
    made = hold_out_edges(dataset_of(other, to_undirected=True, chunk_edges=chunk_edges), seed=5)
    for name in ("val", "test"):
        assert np.array_equal(made.links[name].edges, reference.links[name].edges)
    assert pairs(edges_of(made.stream)) == pairs(edges_of(reference.stream))
    assert pairs(hold_out_edges(dataset_of(EDGES), seed=6).links["test"].edges) != pairs(reference.links["test"].edges)


def test_a_store_holds_no_held_out_link_in_any_direction(tmp_path):
    made = hold_out_edges(dataset_of(EDGES, to_undirected=True), val=0.1, test=0.1)
    store = write_partition_store(tmp_path / "s", made.stream, partition(made.stream, "random", num_parts=3))
    targets = np.repeat(np.arange(store.num_nodes), np.diff(store.csc.indptr))
    edges = pairs(store.original_nid[np.stack([np.asarray(store.csc.indices), targets])])
    assert len(edges) > 1000
    for links in made.links.values():
        assert not edges & pairs(links.edges)


def test_edge_weights_follow_their_edges():
    weight = EDGES[0] * 1000.0 + EDGES[1]
    made = hold_out_edges(replace(dataset_of(EDGES), edge_weight=weight, edge_features=weight[:, None]))
    kept = edges_of(made.stream)
    assert np.array_equal(made.edge_weight, kept[0] * 1000.0 + kept[1])
    assert np.array_equal(made.edge_features[:, 0], made.edge_weight)


def test_arbitrary_ids_and_fingerprints():
    named = EDGES.astype(np.int64) * 10**12
    made = hold_out_edges(dataset_of(named, relabel=True))
    ids = np.asarray(made.stream.node_ids)
    original = {tuple(sorted(ids[list(pair)].tolist())) for pair in pairs(edges_of(made.stream))}
    assert original <= pairs(named)
    prints = {
        hold_out_edges(dataset_of(EDGES), val, 0.1, seed).stream.fingerprint() for val in (0, 0.1) for seed in (0, 1)
    }
    assert len(prints | {dataset_of(EDGES).stream.fingerprint()}) == 5


def test_a_filtered_stream_goes_to_another_process():
    made = hold_out_edges(dataset_of(EDGES))
    assert np.array_equal(edges_of(pickle.loads(pickle.dumps(made.stream))), edges_of(made.stream))


def test_loaders_take_hold_out(tmp_path, public_graphs):
    small = {"num_nodes": 300, "num_edges": 2000, "folder": str(tmp_path)}
    made = generate(**small, hold_out={"val": 0.0, "test": 0.1})
    assert set(made.links) == {"test"}
    assert made.stream.count()[1] < 2000 == generate(**small).stream.count()[1]
    cora = load_npz("cora", str(public_graphs), hold_out={"seed": 1})
    assert set(cora.links) == {"val", "test"}
    assert 150 < cora.links["val"].edges.shape[1] < 380  # a twentieth of 5,278, and 6 standard deviations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val": 1.0}, "val [0, 1) 1.0"),
        ({"val": 0.5, "test": 0.5}, "val + test 0 1 1.0"),
        ({"val": 0, "test": 0}, "0 1 0"),
        ({"test": 1e-9}, "test=1e-09 3000 edges"),
        ({"tests": 0.1}, "hold_out val test seed relations by_time reverses tests"),
    ],
)
def test_bad_shares(options, message):
    with pytest.raises(ValueError, match=said(message)):
        held_out(dataset_of(EDGES), options)


@pytest.fixture
def triples(tmp_path):
    """A folder in the form of the public knowledge graphs: edges with relations, and published held-out triples."""
    (tmp_path / "kg").mkdir()
    arrays = {
        "edge_index": np.array([[0, 1, 2, 2], [1, 2, 0, 2]], np.int32),
        "edge_type": np.array([0, 1, 0, 1], np.int16),
        "valid_edge_index": np.array([[0], [5]], np.int32),
        "valid_edge_type": np.array([2], np.int16),
        "test_edge_index": np.array([[1, 4], [0, 3]], np.int32),
        "test_edge_type": np.array([0, 1], np.int16),
        "entity_names": np.array(list("abcdefg")),
        "relation_names": np.array(["likes", "knows", "is"]),
    }
    return tmp_path / "kg", arrays


def saved(triples, **changed):
    folder, arrays = triples
    arrays = {name: array for name, array in (arrays | changed).items() if array is not None}
    np.savez(folder / "graph.npz", **arrays)
    return str(folder)


def test_a_knowledge_graph_is_read_whole(triples, recwarn):
    dataset = load_npz(saved(triples), to_undirected=False, remove_self_loops=False)
    assert not recwarn.list
    assert dataset.edge_type.tolist() == [0, 1, 0, 1]
    assert [name for _, name, _ in dataset.schema.edge_types] == ["likes", "knows", "is"]
    assert dataset.stream.num_nodes == 7  # the last one in no triple
    assert set(dataset.links) == {"val", "test"}
    assert dataset.links["val"].edges.tolist() == [[0], [5]]
    assert dataset.links["val"].edge_type.tolist() == [2]
    assert dataset.links["test"].edges.tolist() == [[1, 4], [0, 3]]
    assert dataset.links["test"].edge_type.tolist() == [0, 1]
    assert load_npz(saved(triples)).schema.reverse == (3, 4, 5, 0, 1, 2)


def test_relations_without_names_are_counted_in_all_splits(triples):
    dataset = load_npz(saved(triples, relation_names=None, entity_names=None), to_undirected=False)
    assert dataset.schema.num_edge_types == 3
    assert dataset.stream.num_nodes == 6


def test_published_links_without_relations(triples):
    path = saved(triples, edge_type=None, valid_edge_type=None, test_edge_type=None)
    dataset = load_npz(path)
    assert dataset.links["test"].edge_type is None
    assert dataset.schema is None


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"edge_type": None}, {}, "valid_edge_type edge_type"),
        (
            {"test_edge_type": np.array([0])},
            {},
            "test_edge_index (2, num_links) test_edge_type",
        ),
        ({"val_edge_index": np.array([[0], [1]])}, {}, "val_edge_index valid_edge_index"),
        ({}, {"hold_out": {"val": 0.1}}, "published val links"),
    ],
)
def test_knowledge_graphs_that_do_not_fit(triples, changed, options, message):
    with pytest.raises(ValueError, match=said(message)):
        load_npz(saved(triples, **changed), **options)
