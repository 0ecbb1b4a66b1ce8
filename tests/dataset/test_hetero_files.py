"""Heterogeneous graphs from files as a newcomer describes them: edge types in a column, readers, reverses, nodes."""

import warnings

import numpy as np
import pytest
import scipy.sparse

import lightning_gnnscale as gs
from lightning_gnnscale.cli.checks import check_settings
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError
from tests.says import said

TYPES = ["pkg,runs,pkg", "pkg,tests,pkg"]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "deps.csv").write_text("package,requires,kind\na,b,runs\nb,c,tests\nc,a,runs\n")
    (tmp_path / "packages.csv").write_text("id,size\na,1\nb,2\nc,3\n")
    return tmp_path


def loaded(files, **options):
    nodes = {"pkg": {"nodes": f"{files}/packages.csv:id", "features": f"{files}/packages.csv:size"}}
    edges = [{"type": "*", "edges": f"{files}/deps.csv", "relation": "kind"}]
    return gs.hetero_graph(nodes, edges, edge_types=TYPES, separate_reverses=True, **options)


@pytest.mark.parametrize("reader", [None, {"header": True}])
def test_a_column_of_the_edge_file_is_named_alone_and_not_warned_of(files, reader):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = loaded(files, reader=reader)
    assert [name for _, name, _ in graph.schema.edge_types] == ["runs", "tests", "rev_runs", "rev_tests"]
    assert graph.stream.count() == (3, 3)


def test_an_options_of_a_reader_that_there_is_not_is_refused(files):
    with pytest.raises(ValueError, match=said("heder")):
        loaded(files, reader={"heder": True})


def test_reverses_that_share_their_edge_type_are_warned_of_unless_it_is_said(files):
    edges = {TYPES[0]: np.array([[0, 1], [1, 2]])}
    with pytest.warns(UserWarning, match=said("pkg,runs,pkg separate_reverses=True")):
        gs.hetero_graph({"pkg": 3}, edges)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.hetero_graph({"pkg": 3}, edges, separate_reverses=False)
        gs.hetero_graph({"pkg": 3}, edges, to_undirected=False)


@pytest.mark.parametrize("given", ["packages.csv", 2.5, True])
def test_a_node_type_is_a_number_or_a_mapping(given):
    with pytest.raises(ValueError, match=said("nodes['pkg'] number mapping features")):
        gs.hetero_graph({"pkg": given}, {TYPES[0]: np.array([[0], [1]])}, to_undirected=False)


def test_a_model_without_layers_asks_for_sampled_evaluation_before_work():
    words = ["dataset=hetero", "model=hetero", "sampler=hetero", "dataset.nodes={a: 3}", "dataset.edges=[]"]
    with pytest.raises(UsageError, match=said("evaluation=layerwise Hetero evaluation=sampled")):
        check_settings(compose_config("train", words))


def test_a_column_of_names_between_two_node_types_stands_beside_other_files(files):
    (files / "people.csv").write_text("mail\nx@a\ny@a\n")
    (files / "maintains.csv").write_text("mail,pkg,since\nx@a,a,2001\ny@a,c,2002\n")
    nodes = {"pkg": {"nodes": f"{files}/packages.csv:id"}, "person": {"nodes": f"{files}/people.csv:mail"}}
    edges = [
        f"person,maintains,pkg={files}/maintains.csv",
        {"type": "pkg,*,pkg", "edges": f"{files}/deps.csv", "relation": "kind"},
    ]
    options = {"separate_reverses": True, "reader": {"header": True}}
    graph = gs.hetero_graph(nodes, edges, **options)
    types = ["person,maintains,pkg", "pkg,runs,pkg", "pkg,tests,pkg"]
    assert [",".join(one) for one in graph.schema.edge_types[:3]] == types
    listed = gs.hetero_graph(nodes, edges, edge_types=types[::-1], **options)
    for one in (graph, listed):
        edges_of = [
            (source, one.schema.edge_types[number][1], target)
            for chunk in one.stream.chunks()
            for source, target, number in zip(
                chunk.src.tolist(),
                chunk.dst.tolist(),
                one.stream.edge_type_of(np.arange(len(chunk.src))).tolist(),
                strict=True,
            )
        ]
        assert set(edges_of) == {
            (0, "runs", 1), (1, "tests", 2), (2, "runs", 0), (3, "maintains", 0), (4, "maintains", 2),
        }  # fmt: skip
    with pytest.raises(ValueError, match=said("pkg,*,pkg relation=")):
        gs.hetero_graph(nodes, [{"type": "pkg,*,pkg", "edges": f"{files}/deps.csv"}])


def test_a_column_that_is_not_read_is_told_with_the_keys_of_an_edge_type(files):
    nodes = {"pkg": {"nodes": f"{files}/packages.csv:id"}}
    with pytest.warns(UserWarning, match=said("deps.csv: kind: not read relation time weight")):
        gs.hetero_graph(nodes, [f"pkg,needs,pkg={files}/deps.csv"], separate_reverses=True)


@pytest.mark.parametrize("column", ["features", "labels", "time", "masks"])
def test_a_file_of_a_node_type_that_is_missing_is_named_with_its_column(column, tmp_path):
    missing = tmp_path / "missing.npy"
    given = {"num_nodes": 3, column: {"train": missing} if column == "masks" else missing}
    with pytest.raises(ValueError, match=said("nodes pkg " + column + " no such file missing.npy")):
        gs.hetero_graph({"pkg": given}, {TYPES[0]: np.array([[0], [1]])}, to_undirected=False)


def test_features_of_a_node_type_are_mapped_or_sparse_like_those_of_all_nodes(tmp_path):
    rows = np.eye(3, 5, dtype=np.float32)
    np.save(tmp_path / "x.npy", rows)
    edges = {TYPES[0]: np.array([[0], [1]])}
    for given in (tmp_path / "x.npy", scipy.sparse.csc_matrix(rows)):
        typed = gs.hetero_graph({"pkg": {"features": given}}, edges, to_undirected=False)
        alone = gs.GraphDataset("g", gs.open_edge_stream(np.array([[0], [1]]), num_nodes=3), features=given)
        assert type(typed.features["pkg"]) is type(alone.features)
        assert typed.feature_bytes == alone.feature_bytes and typed.feature_dim == alone.feature_dim == 5
    assert isinstance(alone.features, gs.dataset.CSRArrays)
