"""Edge types of a user's file: a column of names or numbers, by its name or in a file of its own."""

import warnings

import numpy as np
import pandas as pd
import pytest

from lightning_gnnscale.dataset import load_files

KINDS = ["runtime", "build", "test", "build"]


@pytest.fixture
def table():
    return pd.DataFrame({"src": ["a", "b", "c", "a"], "dst": ["b", "c", "a", "c"], "kind": KINDS})


def saved(table: pd.DataFrame, path) -> str:
    table.to_parquet(path) if path.suffix == ".parquet" else table.to_csv(path, index=False)
    return str(path)


@pytest.mark.parametrize("name", ["deps.csv", "deps.parquet"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_column_names_the_type_of_each_edge(table, tmp_path, name, apart):
    edges = saved(table, tmp_path / name)
    edge_type = f"{saved(table[['kind']], tmp_path / 'types.csv')}:kind" if apart else "kind"
    pd.DataFrame({"id": ["c", "a", "b"]}).to_csv(tmp_path / "nodes.csv", index=False)
    dataset = load_files(edges, nodes=f"{tmp_path}/nodes.csv:id", edge_type=edge_type)
    names = [relation for _, relation, _ in dataset.schema.edge_types]
    assert names == ["build", "runtime", "test", "rev_build", "rev_runtime", "rev_test"]
    assert [names[number] for number in dataset.stream.edge_type_of(np.arange(4))] == KINDS


def test_numbers_of_any_size_are_names(table, tmp_path):
    table["kind"] = [70, 5, 900, 5]
    dataset = load_files(saved(table, tmp_path / "deps.csv"), relabel=True, edge_type="kind", to_undirected=False)
    assert [relation for _, relation, _ in dataset.schema.edge_types] == ["5", "70", "900"]
    assert dataset.stream.edge_type_of(np.arange(4)).tolist() == [1, 0, 2, 0]


def test_the_column_is_not_told_to_be_unread(table, tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_files(saved(table, tmp_path / "deps.csv"), relabel=True, edge_type="kind")
    assert not [one for one in told if "not read with the edges" in str(one.message)]


@pytest.mark.parametrize(
    ("kinds", "edge_type", "told"),
    [
        (["a", None, "b", "a"], "kind", "edge_type: .*deps.parquet:kind has none at row 1"),
        ([0.5, 1.0, 2.0, 0.5], "kind", "edge_type: .* must be one column of names or integers, got float"),
        (KINDS, "knd", "edge_type: .*: has no column 'knd'; it has src, dst, kind"),
    ],
)
def test_what_is_no_type_is_refused_in_a_line(table, tmp_path, kinds, edge_type, told):
    table["kind"] = kinds
    with pytest.raises(ValueError, match=told) as caught:
        load_files(saved(table, tmp_path / "deps.parquet"), relabel=True, edge_type=edge_type)
    assert "\n" not in str(caught.value)


def test_a_name_needs_an_edge_file_with_columns(tmp_path):
    np.save(tmp_path / "edges.npy", np.array([[0, 1], [1, 0]]))
    with pytest.raises(ValueError, match="edge_type: 'kind' is taken for a column, and .*edges.npy is no .csv"):
        load_files(str(tmp_path / "edges.npy"), edge_type="kind")
