"""Edge types from files as a shell writes them: they make the graph that Python describes, or one line."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from hydra.utils import instantiate

import lightning_gnnscale as gs
from lightning_gnnscale.cli.compose import compose_config
from lightning_gnnscale.cli.errors import UsageError, one_line
from lightning_gnnscale.cli.run_paths import check_paths
from tests.says import said

WRITES, CITES = np.array([[0, 1, 2, 0], [0, 1, 1, 2]]), np.array([[0, 1], [1, 2]])
NODES = {"author": 3, "paper": 3}
EXAMPLE = Path(__file__).parents[2] / "conf" / "dataset" / "hetero.yaml"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with the files that the words name."""
    monkeypatch.chdir(tmp_path)
    for name, edges in (("writes", WRITES), ("cites", CITES)):
        gs.write_edges(gs.open_edge_stream(edges, num_nodes=3), f"{name}.parquet")
        gs.write_edges(gs.open_edge_stream(edges, num_nodes=3), f"{name}.csv")
    np.save("x.npy", np.eye(3, dtype=np.float32))
    np.save("y.npy", np.arange(3) % 2)
    np.save("t.npy", np.arange(4))


def rows_of(dataset):
    found = []
    for chunk in dataset.stream.chunks():
        found += zip(chunk.src.tolist(), chunk.dst.tolist(), strict=True)
    return found, dataset.stream.edge_type_of(np.arange(len(found))).tolist()


def test_the_words_of_the_example_make_the_graph(tmp_path):
    lines = [line[1:].strip() for line in EXAMPLE.read_text().splitlines() if line.startswith("#   '")]
    words = [line.strip("'") for line in lines]
    assert [word.partition("=")[0] for word in words] == ["dataset.nodes", "dataset.edges"]
    config = compose_config("train", ["dataset=hetero", *(word.replace("300", "3") for word in words)])
    check_paths(config)
    found = instantiate(config.dataset)
    edges = {"author,writes,paper": WRITES, "paper,cites,paper": CITES}
    described = gs.hetero_graph({"author": 3, "paper": {"features": np.eye(3), "labels": np.arange(3) % 2}}, edges)
    assert rows_of(found) == rows_of(described)
    assert found.stream.schema.edge_types == described.stream.schema.edge_types


def test_a_mapping_in_the_list_has_more_than_a_path():
    written = '{type: "author,writes,paper", edges: writes.parquet, time: t.npy}'
    words = f'dataset.edges=[{written}, "paper,cites,paper=cites.csv"]'
    config = compose_config("train", ["dataset=hetero", "dataset.nodes={author: 3, paper: 3}", words])
    check_paths(config)
    assert instantiate(config.dataset).edge_time[:4].tolist() == [0, 1, 2, 3]


def test_a_recipe_may_still_map_relations_to_files():
    given = yaml.safe_load("{'author,writes,paper': writes.csv, 'paper,cites,paper': cites.csv}")
    listed = [f"{name}={path}" for name, path in given.items()]
    assert rows_of(gs.hetero_graph(nodes=NODES, edges=given)) == rows_of(gs.hetero_graph(nodes=NODES, edges=listed))


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        (["writes.csv"], 'edges "writes.csv" source,name,target=path author,writes,paper=writes.parquet'),
        ([{"edges": "writes.csv"}], "edges writes.csv source,name,target=path type="),
        ([3], "edges 3 source,name,target=path"),
        (["author,writes=writes.csv"], "source,name,target author,writes"),
        (["author,writes,paper=writes.csv"] * 2, "author,writes,paper listed twice"),
    ],
)
def test_entries_of_another_form_are_one_line(edges, words):
    with pytest.raises(ValueError, match=said(words.replace('"', ""))):
        gs.hetero_graph(nodes=NODES, edges=edges)


def test_a_file_that_is_not_there_is_told_with_its_place():
    words = 'dataset.edges=["author,writes,paper=writes.csv", "paper,cites,paper=cities.csv"]'
    config = compose_config("train", ["dataset=hetero", "dataset.nodes={author: 3, paper: 3}", words])
    with pytest.raises(UsageError, match=said("dataset.edges[1] cities.csv no such file cites.csv")):
        check_paths(config)


def test_names_in_quotes_within_braces_are_told_with_the_word():
    with pytest.raises(Exception) as caught:
        compose_config("train", ["dataset=hetero", 'dataset.edges={"author,writes,paper": w.parquet}'])
    line = one_line(caught.value)
    assert line.startswith('dataset.edges={"author,writes,paper": w.parquet} cannot be read: ')
    assert "dataset.edges=" in line and '["name=value"]' in line


IDS, NAMES = ["c", "a", "b"], ["extends", "cites", "cites"]
STAR = {"edges": [["a", "b", "c"], ["b", "c", "c"]], "relation": NAMES}


def test_one_source_of_relations_between_one_node_type_reads_ids():
    types = ["paper,cites,paper", "paper,extends,paper"]
    star = {"edges": np.array(STAR["edges"]), "relation": np.array(NAMES)}
    found = gs.hetero_graph({"paper": {"nodes": IDS}}, {"*": star}, edge_types=types, to_undirected=False)
    pairs, relations = rows_of(found)
    assert pairs == [(1, 2), (2, 0), (0, 0)] and relations == [1, 0, 0]


def test_the_remedy_for_ids_of_several_node_types_works():
    nodes, types = {"paper": {"nodes": IDS}, "tag": {"nodes": ["x"]}}, ["paper,cites,paper", "paper,has,tag"]
    with pytest.raises(ValueError, match=said("edges nodes paper lists ids number paper,*,paper")):
        gs.hetero_graph(
            nodes, {"*": {"edges": np.array([["a", "a"], ["x", "b"]]), "relation": ["has", "cites"]}}, edge_types=types
        )
    Path("cites.tsv").write_text("a\tb\nb\tc\n")
    Path("has.tsv").write_text("a\tx\n")
    found = gs.hetero_graph(
        nodes=nodes, edges=[f"{name}={name.split(',')[1]}.tsv" for name in types], to_undirected=False
    )
    assert rows_of(found) == ([(1, 2), (2, 0), (1, 3)], [0, 0, 1])
