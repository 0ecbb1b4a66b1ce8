"""Heterogeneous graphs from files as a newcomer describes them: edge types in a column, readers, reverses, nodes."""

import warnings

import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.cli.checks import check_settings
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError
from lightning_gnnscale.dataset import load_hetero
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
    return load_hetero(edges, nodes=nodes, edge_types=TYPES, separate_reverses=True, **options)


@pytest.mark.parametrize("reader", [None, {"header": True}])
def test_a_column_of_the_edge_file_is_named_alone_and_not_warned_of(files, reader):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*header")  # a guess above ids that are words, where no reader says so
        graph = loaded(files, reader=reader)
    assert [name for _, name, _ in graph.schema.edge_types] == ["runs", "tests", "rev_runs", "rev_tests"]
    assert graph.stream.count() == (3, 3)


def test_an_options_of_a_reader_that_there_is_not_is_refused(files):
    with pytest.raises(ValueError, match=said("heder")):
        loaded(files, reader={"heder": True})


def test_reverses_that_share_their_edge_type_are_warned_of_unless_it_is_said(files):
    edges = {TYPES[0]: np.array([[0, 1], [1, 2]])}
    with pytest.warns(UserWarning, match=said("pkg,runs,pkg separate_reverses=True")):
        gs.HeteroGraph({"pkg": 3}, edges)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.HeteroGraph({"pkg": 3}, edges, separate_reverses=False)
        gs.HeteroGraph({"pkg": 3}, edges, to_undirected=False)


@pytest.mark.parametrize("given", ["packages.csv", 2.5, True])
def test_a_node_type_is_a_number_or_a_mapping(given):
    graph = gs.HeteroGraph({"pkg": given}, {TYPES[0]: np.array([[0], [1]])}, to_undirected=False)
    with pytest.raises(ValueError, match=said("nodes['pkg'] number mapping features")):
        graph.dataset()


def test_a_model_without_layers_asks_for_sampled_evaluation_before_work():
    words = ["dataset=hetero", "model=hetero", "sampler=hetero", "dataset.nodes={a: 3}", "dataset.edges=[]"]
    with pytest.raises(UsageError, match=said("evaluation=layerwise Hetero evaluation=sampled")):
        check_settings(compose_config("train", words))
