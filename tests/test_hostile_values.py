"""What attacks got through: text that steers a terminal, JSON nested too deep, pipes, values of another kind."""

import json
import os
from datetime import date

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import lightning_gnnscale as gs
from lightning_gnnscale import events
from lightning_gnnscale.cli.errors import one_line
from lightning_gnnscale.dataset.split import random_split
from lightning_gnnscale.errors import CheckpointError, GNNScaleError, one_line_of, plain_text, short
from lightning_gnnscale.foreign import is_hetero, is_pyg
from lightning_gnnscale.object_store import ObjectStore
from lightning_gnnscale.partition_store.manifest import unsealed
from lightning_gnnscale.values import exact_times
from tests.says import said


def test_text_of_a_file_cannot_steer_a_terminal():
    assert plain_text("\x1b]0;pwned\x07\x1b[2J") == r"\x1b]0;pwned\x07\x1b[2J"
    assert plain_text("größe\nя") == "größe\nя"
    assert len(plain_text("x" * 100_000)) < 2100


def test_json_nested_too_deep_is_one_line():
    with pytest.raises(ValueError, match=said("damaged nested")):
        unsealed("[" * 100_000)


def test_a_pipe_is_no_file_of_events(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(FileNotFoundError):
        events.read_log(tmp_path / "events.jsonl")
    (tmp_path / "plain.jsonl").write_text(json.dumps({"event": "x"}) + "\n")
    assert events.read_log(tmp_path / "plain.jsonl") == [{"event": "x"}]


def test_a_graph_whose_properties_fail_is_still_recognised():
    class Broken:
        @property
        def edge_index(self):
            raise TypeError("expected Tensor")

    assert is_pyg(Broken()) and not is_hetero(Broken())


@pytest.mark.parametrize("backbone", [5, None, "gcn"])
def test_a_backbone_is_a_module(backbone):
    with pytest.raises(ValueError, match=said("backbone model")):
        gs.NodeClassifier(backbone, num_classes=3)


@pytest.mark.parametrize("path", [None, 5, ["x"]])
def test_a_checkpoint_is_a_path_or_a_file(path):
    with pytest.raises(CheckpointError, match=said("path URL file")):
        gs.NodeClassifier.load_from_checkpoint(path, backbone=torch.nn.Identity())


DATA = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0, 1], [1, 2]]))
ENDS = np.array([[0, 1], [1, 2]])
STREAM = gs.open_edge_stream(ENDS, num_nodes=3)
PARTS = gs.partition(STREAM, "random", num_parts=1)
GRAPH = {"nodes": {"a": 3}, "edges": {"a,to,a": np.array([[0, 1], [1, 2]])}, "separate_reverses": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val": "x"}, "val [0, 1) x"),
        ({"seed": [1]}, "seed integer [1]"),
        ({"relations": 5}, "relations list 5"),
        ({"reverses": 5}, "reverses edge type 5"),
    ],
)
def test_options_of_another_kind_are_refused(options, message):
    with pytest.raises(ValueError, match=said(message)):
        gs.hold_out_edges(gs.hetero_graph(**GRAPH), **options)


def test_links_are_held_out_of_a_data_set():
    with pytest.raises(ValueError, match=said("dataset GraphDataset Data load_pyg")):
        gs.hold_out_edges(Data())


@pytest.mark.parametrize("name", ["weight", "labels"])
def test_values_of_edges_are_numbers(name):
    dates = np.array(["2020-01-01", "2021-01-01"], "datetime64[D]")
    edges = {key: {"edges": np.array([[0, 1], [1, 2]]), name: dates} for key in ("a,to,a", "a,of,a")}
    with pytest.raises(ValueError, match=said(f"{name} edges numbers datetime64")):
        gs.hetero_graph({"a": 3}, edges, separate_reverses=False)


@pytest.mark.parametrize("rows", [np.float32(1), 5])
def test_features_have_a_row_for_each_node(rows):
    with pytest.raises(ValueError, match=said("nodes['a'].features row node")):
        gs.hetero_graph({"a": {"features": rows}}, {"a,to,a": np.array([[0], [0]])}, separate_reverses=False)


@pytest.mark.parametrize("value", ["yes", None, 2, 1.5, [True], np.array([True, False])])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: gs.NeighborSampler([2], replace=value), "replace"),
        (lambda value: gs.LinkSampler(share_negatives=value), "share_negatives"),
        (lambda value: gs.NeighborLoader(DATA, [2], shuffle=value), "shuffle"),
        (lambda value: gs.NeighborLoader(DATA, [2], directed=value), "directed"),
        (lambda value: gs.hold_out_edges(gs.hetero_graph(**GRAPH), by_time=value), "by_time"),
    ],
)
def test_a_flag_is_true_or_false(make, name, value):
    with pytest.raises(ValueError, match=said(f"{name} True False")):
        make(value)


def test_a_transform_is_a_function():
    with pytest.raises(ValueError, match=said("transform function 5")):
        gs.NeighborLoader(DATA, [2], transform=5)
    assert gs.NeighborSampler([2], replace=np.bool_(True)).replace


@pytest.mark.parametrize("year", [1600, 3000])
def test_dates_that_nanoseconds_do_not_hold_are_refused(year):
    with pytest.raises(ValueError, match=said(f"t {year}")):
        exact_times("t", [date(2020, 1, 1), date(year, 1, 1)])
    assert exact_times("t", [date(1970, 1, 2), np.datetime64("1970-01-01T00:00:00.000000001")]).tolist() == [
        86400 * 10**9,
        1,
    ]


@pytest.mark.parametrize("name", ["features", "labels", "node_time"])
def test_values_under_a_mask_are_not_taken(name):
    values = np.ma.array(np.ones((3, 1) if name == "features" else 3, np.int64), mask=False)
    stream = gs.open_edge_stream(np.array([[0, 1], [1, 2]]), num_nodes=3)
    gs.GraphDataset("g", stream, **{name: values})
    values[1] = np.ma.masked
    with pytest.raises(ValueError, match=said("masks filled")):
        gs.GraphDataset("g", stream, **{name: values})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gs.hetero_graph(None, {}), "nodes mapping None"),
        (lambda: gs.hetero_graph({"a": 3}, 5), "edges mapping 5"),
        (lambda: gs.hetero_graph({"a": 3}, {}, edge_types=[1]), "edge type source,name,target 1"),
        (lambda: gs.hetero_graph({"a": 3}, {}, edge_types="a,to,a"), "edge_types list a,to,a"),
        (lambda: gs.hetero_graph(**GRAPH, reader="x"), "reader mapping x"),
        (lambda: gs.hetero_graph(**GRAPH | {"nodes": {"a": {"columns": 5, "num_nodes": 3}}}), "columns 5"),
        (lambda: gs.GraphDataset("g", STREAM, links=None), "links mapping None"),
        (lambda: gs.GraphDataset("g", STREAM, links={"foo": gs.LinkSet(ENDS)}), "links val test 'foo'"),
        (lambda: gs.GraphDataset("g", STREAM, links={"test": ENDS}), "links['test'] LinkSet"),
        (lambda: gs.EvaluationOptions(links={"tset": gs.LinkSet(ENDS)}), "links val test 'tset'"),
        (lambda: gs.GraphDataset("g", STREAM, node_columns=5), "node_columns mapping 5"),
        (lambda: gs.partition(None), "stream gs.open_edge_stream None"),
        (lambda: gs.partition(STREAM, ["random"]), "partitioner ['random'] available"),
        (lambda: random_split([0, 1], 5), "fractions three 5"),
    ],
)
def test_containers_of_another_kind_are_refused(make, message):
    with pytest.raises(ValueError, match=said(message)):
        make()


FEATURES = torch.ones(3, 4)
WIDTHS = {"in_channels": 4, "hidden_channels": 8, "out_channels": 4}
SCHEMA = gs.GraphSchema(("a",), (("a", "to", "a"),))
DATASET = gs.GraphDataset("g", STREAM, features=FEATURES, labels=[0, 1, 2])


def _model(name, more=None):
    kind = getattr(gs.model, name)
    return lambda key, value: kind(**{**WIDTHS, **(more or {}), key: value})


def _module(kind, **given):
    return lambda key, value: kind(gs.model.GCN(4, 8, 4), **{**given, key: value})


INTEGERS = {
    "partition": (lambda key, value: gs.partition(STREAM, "random", **{"num_parts": 1, key: value}), "num_parts seed"),
    "dataset": (lambda key, value: gs.GraphDataset("g", STREAM, labels=[0, 1, 2], **{key: value}), "num_classes"),
    "hetero": (lambda key, value: gs.hetero_graph(**GRAPH, **{key: value}), "split_seed"),
    "split": (lambda key, value: random_split([0, 1], **{key: value}), "seed"),
    "generated": (lambda key, value: gs.SyntheticGraph(**{"num_nodes": 99, "num_edges": 99, key: value}),
                  "num_nodes num_edges seed"),
    "NodeClassifier": (_module(gs.NodeClassifier), "num_classes"),
    "NodeRegressor": (_module(gs.NodeRegressor), "num_targets"),
    "EdgeClassifier": (_module(gs.EdgeClassifier, num_classes=2), "num_classes hidden_channels edge_channels"),
    "LinkPredictor": (_module(gs.LinkPredictor), "embedding_channels"),
    "DistMult": (_module(gs.LinkPredictor, decoder="distmult"), "num_relations"),
    "GCN": (_model("GCN"), "in_channels hidden_channels out_channels num_layers"),
    "GraphSAGE": (_model("GraphSAGE"), "in_channels hidden_channels"),
    "GAT": (_model("GAT"), "heads edge_dim time_channels hidden_channels"),
    "NGNN": (_model("NGNN"), "feed_forward_layers num_layers"),
    "GINE": (_model("GINE", {"edge_dim": 2}), "edge_dim"),
    "RGCN": (_model("RGCN", {"schema": SCHEMA}), "in_channels num_bases"),
    "RGAT": (_model("RGAT", {"schema": SCHEMA}), "heads num_bases time_channels"),
    "HGT": (_model("HGT", {"schema": SCHEMA}), "heads edge_dim"),
    "DataModule": (lambda key, value: gs.PartitionDataModule(dataset=DATASET, **{key: value}),
                   "seed batch_size interleave_parts halo_hops"),
    "FullGraph": (lambda key, value: gs.FullGraphDataModule(dataset=DATASET, **{key: value}), "seed"),
    "NeighborLoader": (lambda key, value: gs.NeighborLoader(DATA, [2], **{key: value}), "seed batch_size"),
    "Placement": (lambda key, value: gs.PlacementSettings(**{key: value}),
                  "buffer_rows host_rows cache_rows gather_threads lookahead_batches neighbor_set_size"),
    "Ray": (lambda key, value: gs.RayWorkers(**{key: value}), "cache_rows credits batches_per_group"),
    "Embedding": (lambda key, value: gs.DistributedEmbedding(**{"num_nodes": 4, "dim": 4, key: value}),
                  "num_nodes dim seed"),
    "averaging": (lambda key, value: gs.ModelAveraging(**{key: value}), "every_n_epochs"),
    "gradients": (lambda key, value: gs.GradientAveraging(**{key: value}), "bucket_bytes"),
    "plan": (lambda key, value: gs.plan(**{"num_nodes": 9, "num_edges": 9, key: value}),
             "num_nodes num_edges num_devices num_parts interpreter_bytes"),
}  # fmt: skip
PLACES = [(door, key) for door, (_, keys) in INTEGERS.items() for key in keys.split()]


@pytest.mark.parametrize(("door", "key"), PLACES)
def test_an_integer_is_an_integer(door, key):
    make = INTEGERS[door][0]
    for value in (1.5, 2.0, True, "5", [1], float("nan"), np.float64(2), "x" * 100_000):
        with pytest.raises(ValueError, match=said(key)) as caught:
            make(key, value)
        assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
@pytest.mark.parametrize(("door", "key"), [place for place in PLACES if place not in [("partition", "num_parts")]])
def test_an_integer_of_numpy_is_one(door, key, dtype):
    value = 3 if key in ("num_classes", "halo_hops") else 99 if door == "generated" else 4 if key == "heads" else 8
    INTEGERS[door][0](key, dtype(value))


SECONDS = {
    "Processes": (gs.Processes, "timeout_s"),
    "RayWorkers": (gs.RayWorkers, "timeout_s"),
    "a slow worker": (gs.RayWorkers, "slow_s"),
    "strategy": (gs.GNNScaleStrategy, "timeout"),
    "storage": (lambda storage_timeout_s: ObjectStore("memory://x", None, storage_timeout_s), "storage_timeout_s"),
    "lock": (lambda **given: gs.write_partition_store("x", STREAM, PARTS, **given), "lock_timeout_s"),
}  # fmt: skip


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, True, "5", 1e300, [1]])
@pytest.mark.parametrize("door", SECONDS)
def test_seconds_are_finite(door, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, name = SECONDS[door]
    with pytest.raises(ValueError, match=said(f"{name} seconds 0")):
        make(**{name: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [GNNScaleError, CheckpointError])
def test_a_message_is_one_line_that_no_value_stretches(kind):
    error = kind("\x1b[2Jx\n" + "y" * 100_000 + ": give another")
    assert str(error).startswith(r"\x1b[2Jx yyy") and str(error).endswith("yyy: give another")
    for text in (
        str(error),
        one_line(error),
        one_line(ValueError("z\r\n" * 100_000)),
        one_line_of(OSError("\x07" * 9)),
    ):
        assert text.isprintable() and len(text) < 2100
    assert str(kind("short")) == "short" and str(kind()) == ""


def test_a_value_in_a_message_is_short():
    class Broken:
        def __repr__(self):
            raise RuntimeError

    for value in (
        "x" * 100_000,
        b"x" * 100_000,
        [1] * 100_000,
        Broken(),
        10**9999,
        np.zeros((200, 200)),
        {"a": "b" * 999},
    ):
        assert len(short(value)) < 250 and "\n" not in short(value)
    assert short("a\nb") == r"'a\nb'" and short(5) == "5"
