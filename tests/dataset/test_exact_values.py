"""Ids, edge types and times reach a store as they are, or are refused with their row, by whichever door."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch_geometric.data import Data, HeteroData, TemporalData

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import LinkSet, load_npz, load_pyg
from tests.says import said

LARGE = np.uint64(2**63)
ENDS = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
FUTURE = np.array([1, 2, 3, LARGE], np.uint64)


def stream(**options):
    return gs.open_edge_stream(ENDS, num_nodes=4, **options)


def typed(**of_edges):
    return gs.hetero_graph({"a": 4}, {("a", "to", "a"): {"edges": ENDS, **of_edges}, ("a", "in", "a"): ENDS})


def temporal(t):
    return load_pyg(TemporalData(src=torch.tensor(ENDS[0]), dst=torch.tensor(ENDS[1]), t=t))


def hetero(t):
    data = HeteroData()
    data["a"].num_nodes = 4
    data["a", "to", "a"].edge_index, data["a", "to", "a"].time = torch.tensor(ENDS), t
    return load_pyg(data)


def loader(t, **options):
    data = Data(edge_index=torch.tensor(ENDS), num_nodes=4, t=t)
    return gs.NeighborLoader(data, [2], time_attr="t", **{"input_time": torch.arange(4)} | options)


def link_loader(**options):
    data = Data(edge_index=torch.tensor(ENDS), num_nodes=4, t=torch.arange(4))
    given = {"edge_label_index": torch.tensor(ENDS), "edge_label_time": torch.arange(4)} | options
    return gs.LinkNeighborLoader(data, [2], time_attr="t", **given)


TIMES = {
    "dataset": lambda t: gs.GraphDataset("g", stream(), edge_time=t),
    "nodes": lambda t: gs.GraphDataset("g", stream(), node_time=t),
    "pandas": lambda t: gs.GraphDataset("g", stream(), edge_time=pd.Series(t)),
    "arrow": lambda t: gs.GraphDataset("g", stream(), edge_time=pa.array(t)),
    "typed": lambda t: typed(time=t),
    "typed nodes": lambda t: gs.hetero_graph(
        {"a": {"num_nodes": 4, "time": t}, "b": {"time": [1, 2]}}, {("a", "to", "a"): ENDS}
    ),
    "TemporalData": lambda t: temporal(torch.from_numpy(t)),
    "HeteroData": lambda t: hetero(torch.from_numpy(t)),
    "NeighborLoader": lambda t: loader(torch.from_numpy(t)),
    "input_time": lambda t: loader(torch.arange(4), input_time=t),
    "edge_label_time": lambda t: link_loader(edge_label_time=t),
    "links": lambda t: gs.GraphDataset("g", stream(), links={"test": LinkSet(ENDS[:, :1], time=t)}),
}


@pytest.mark.parametrize("door", TIMES)
def test_times_that_no_int64_holds_are_refused_at_every_door(door):
    with pytest.raises(ValueError, match=said("3 9223372036854775808 int64")) as error:
        TIMES[door](FUTURE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("door", TIMES)
def test_times_of_floats_are_refused_at_every_door(door):
    with pytest.raises(ValueError, match=said("seconds dates float64")) as error:
        TIMES[door](np.array([0.1, 0.2, 0.3, np.nan]))
    assert "(NaN) in row 3" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("door", TIMES)
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint32", "uint64"])
def test_whole_times_are_taken_at_every_door(door, dtype):
    assert TIMES[door](np.array([1, 2, 3, 100], dtype)) is not None


def test_dates_of_any_unit_and_numbers_of_any_width_are_stored_as_they_are(tmp_path):
    days = np.array(["2020-01-01", "2021-01-01", "2022-01-01", "2262-01-01"], "M8[D]")
    expected = days.astype("M8[ns]").view(np.int64)
    given = {"array": days, "seconds": days.astype("M8[s]"), "pandas": pd.Series(pd.to_datetime(days)),
             "zoned": pd.Series(pd.to_datetime(days, utc=True)), "arrow": pa.array(days.astype("M8[ms]"))}  # fmt: skip
    for name, times in given.items():
        gs.write_partition_store(tmp_path / name, stream(), gs.partition(stream(), num_parts=1), edge_time=times)
        store = gs.PartitionStore.open(tmp_path / name)
        assert sorted(store.edge_time.tolist()) == expected.tolist()
    np.save(tmp_path / "t.npy", days)
    gs.write_partition_store(
        tmp_path / "p", stream(), gs.partition(stream(), num_parts=1), node_time=str(tmp_path / "t.npy")
    )
    assert gs.PartitionStore.open(tmp_path / "p").node_time.tolist() == expected.tolist()


def test_dates_of_nodes_beside_numbers_of_edges_are_refused():
    dates = np.arange(4).astype("M8[s]")
    with pytest.raises(ValueError, match=said("node_time edge_time")):
        gs.GraphDataset("g", stream(), node_time=dates, edge_time=np.arange(4))
    with pytest.raises(ValueError, match=said("times of a numbers")):
        gs.hetero_graph(
            {"a": {"num_nodes": 4, "time": np.arange(4)}}, {("a", "to", "a"): {"edges": ENDS, "time": dates}}
        )


def test_edges_of_times_at_the_top_of_int64_are_held_out_as_the_latest():
    times = np.array([5, 2**63 - 1, 7, 9], np.uint64)
    held = gs.hold_out_edges(gs.GraphDataset("g", stream(), edge_time=times), val=0.25, test=0.25, by_time=True)
    assert held.links["test"].edges.T.tolist() == [[1, 2]] and held.links["val"].edges.T.tolist() == [[3, 0]]


def test_classes_of_edges_of_two_relations_are_joined_whatever_their_widths():
    labels = {"to": np.array([0, 1, 2, 3], np.uint64), "in": np.array([-1, 0, 1, 2], np.int8)}
    graph = gs.hetero_graph(
        {"a": 4}, {("a", name, "a"): {"edges": ENDS, "labels": given} for name, given in labels.items()}
    )
    assert graph.edge_label.tolist() == [0, 1, 2, 3, -1, 0, 1, 2]
    with pytest.raises(ValueError, match=said("edge 3 9223372036854775808 [0, 2147483648)")):
        typed(labels=FUTURE)


def npz(folder, **arrays):
    (folder / "g").mkdir()
    np.savez(folder / "g" / "graph.npz", **{"edge_index": ENDS} | arrays)
    return load_npz("g", root=str(folder))


@pytest.mark.parametrize(
    "bad, message",
    [
        ([[0, 0.5], [1, 2]], "valid_edge_index 1 0.5"),
        ([[0, 1], [1, np.nan]], "valid_edge_index 1 nan"),
        ([[0, 1], [1, -1]], "valid_edge_index 1 -1 0"),
        ([[0, 1], [1, LARGE]], "valid_edge_index 1 9223372036854775808 int64"),
    ],
)
def test_published_links_that_name_no_node_are_refused_with_their_row(tmp_path, bad, message):
    values = np.array(bad, np.uint64 if bad[1][1] is LARGE else None)
    with pytest.raises(ValueError, match=said(message)):
        npz(tmp_path, valid_edge_index=values)


@pytest.mark.parametrize("bad", [0.5, np.nan, -1])
def test_published_relations_that_are_none_are_refused_with_their_row(tmp_path, bad):
    given = {"edge_type": np.array([0, 1, 0, 1]), "test_edge_index": ENDS, "test_edge_type": np.array([0, 1, 1, bad])}
    with pytest.raises(ValueError, match=said("test_edge_type 3")):
        npz(tmp_path, **given)


def weighted_loader(weight, fanout, **options):
    data = Data(edge_index=torch.tensor([[1, 2, 3], [0, 0, 0]]), num_nodes=4, w=torch.tensor(weight), t=torch.arange(3))
    if "temporal_strategy" in options:
        options |= {"time_attr": "t", "input_time": torch.tensor([5])}
    loader = gs.NeighborLoader(data, [fanout], input_nodes=torch.tensor([0]), weight_attr="w", **options)
    return sorted(next(iter(loader)).e_id.tolist())


@pytest.mark.parametrize(
    "options", [{}, {"disjoint": True}, {"temporal_strategy": "uniform"}, {"temporal_strategy": "last"}]
)
def test_edges_of_weight_zero_are_not_sampled_by_the_loader(options):
    for fanout in (1, 2, 5):
        assert weighted_loader([0.0, 0.0, 0.0], fanout, **options) == []
        assert weighted_loader([0.0, 0.5, 0.0], fanout, **options) == [1]
    assert weighted_loader([0.5, 0.5, 0.0], 2, **options) == [0, 1]
    assert weighted_loader([0.0, 0.5, 0.0], -1, **options) == [0, 1, 2]


def test_the_latest_neighbours_are_sampled_once_with_replacement_too():
    data = Data(edge_index=torch.tensor([[1, 2, 3], [0, 0, 0]]), num_nodes=4, t=torch.arange(3))
    options = {"time_attr": "t", "temporal_strategy": "last", "replace": True, "input_time": torch.tensor([1])}
    loader = gs.NeighborLoader(data, [5], input_nodes=torch.tensor([0]), **options)
    assert sorted(next(iter(loader)).e_id.tolist()) == [0, 1]


@pytest.mark.parametrize("seeds", [np.array([0, LARGE], np.uint64), np.array([0, -1]), [0, 4]])
def test_seeds_beyond_the_nodes_are_told_as_they_were_given(seeds):
    with pytest.raises(ValueError, match=said("[0, 4)")) as error:
        gs.NeighborLoader(Data(edge_index=torch.tensor(ENDS), num_nodes=4), [2], input_nodes=seeds)
    assert str(int(np.asarray(seeds)[1])) in str(error.value)
