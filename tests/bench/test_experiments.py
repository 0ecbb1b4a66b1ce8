"""Benchmarks that train: their tables and plots, and going on after a kill at the first row that is missing."""

import csv
import json

import numpy as np
import pytest

import lightning_gnnscale as gs
from benchmarks import accuracy, averaging, exchange, experiment, parts
from benchmarks.parts import curve_text, edges_of, seconds_to
from benchmarks.reduced_graph import reduced_graph
from lightning_gnnscale.edge_stream import SyntheticGraph
from tests.says import said

SMALL = ["model.backbone.hidden_channels=8", "datamodule.batch_size=64", "sampler=neighbor", "sampler.fanouts=[4,4]"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph") / "tiny"
    folder.mkdir()
    made = SyntheticGraph(300, 1500, num_communities=4, homophily=0.9)
    chunk = next(iter(made.stream().chunks()))
    arrays = {"edge_index": np.stack([chunk.src, chunk.dst]), "x": made.features(8, noise=0.3), "y": made.labels()}
    np.savez(folder / "graph.npz", **arrays)
    return str(folder)


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.sweep
def test_exchange_puts_policies_beside_the_exact_halo(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"halo": "halo", "cagnet": "broadcast", "none": "none", "quantised": "quantized"}
    policies = {name: [f"strategy/exchange={choice}"] for name, choice in names.items()} | {"left out": None}
    sizes = {"hidden_channels": 8, "num_layers": 2, "feature_dim": 4, "max_epochs": 4, "evaluate_every": 2}
    sizes |= {"late_evaluations": 2, "overrides": ["strategy.start_method=forkserver"]}
    table = exchange.run(tmp_path / "out", [graph], policies, ["random"], [2], [0], **sizes)
    rows = {row["policy"]: row for row in table}
    assert list(rows) == ["halo", "cagnet", "none", "quantised"]
    assert rows["cagnet"]["share_of_cagnet"] == 100  # 300 nodes x 1 other process x 8 columns x 4 bytes x 2 x 4 epochs
    assert rows["cagnet"]["bytes"] == 300 * 8 * 4 * 2 * 4
    assert rows["none"]["bytes"] == 0 < rows["quantised"]["bytes"] < rows["halo"]["bytes"] < rows["cagnet"]["bytes"]
    assert rows["cagnet"]["late_acc_lost"] == rows["halo"]["late_acc_lost"] == 0
    assert (tmp_path / "out" / "exchange.png").stat().st_size > 10_000
    reduced = np.load(next((tmp_path / "out" / "graphs").glob("tiny-svd4-*/graph.npz")))
    assert reduced["x"].shape == (300, 4)
    # An SVD keeps the inner products of rows as well as four columns can.
    x = np.load(f"{graph}/graph.npz")["x"].astype(np.float64)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    left, values, right = np.linalg.svd(x, full_matrices=False)
    best = (left[:, :4] * values[:4]) @ right[:4]
    assert np.allclose(reduced["x"] @ reduced["x"].T, best @ best.T, atol=1e-3)


@pytest.mark.sweep
def test_averaging_samples_intervals_and_halo_hops(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"graph": graph, "num_parts": 3, "intervals": [1, 2], "halo_hops": [0, 1], "seeds": [0], "max_epochs": 2}
    options["devices"], options["overrides"] = 1, ["strategy/weights=model_averaging", *SMALL]
    result = averaging.run(tmp_path / "out", **options)
    assert [row["interval"] for row in result["interval"]] == [1, 2]
    assert [row["halo_hops"] for row in result["halo_hops"]] == [0, 1]
    assert all(0 < row["test_acc"] <= 100 for rows in result.values() for row in rows)
    assert (tmp_path / "out" / "averaging.png").stat().st_size > 10_000
    runs = rows_of(tmp_path / "out" / "interval_rows.csv")
    assert [int(run["averages"]) for run in runs] == [2, 1]

    def trained_again(*arguments):
        raise AssertionError("a finished row was trained again")

    monkeypatch.setattr(experiment, "train", trained_again)
    assert averaging.run(tmp_path / "out", **options) == result


@pytest.mark.sweep
def test_accuracy_puts_parts_beside_central_training(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = accuracy.run(tmp_path / "out", [graph], ["graphsage"], [2], [0, 1], devices=1, max_epochs=2, overrides=SMALL)
    assert len(rows) == 1
    assert rows[0]["difference"] == pytest.approx(rows[0]["parted"] - rows[0]["central"], abs=0.011)
    runs = rows_of(tmp_path / "out" / "rows.csv")
    assert [(int(run["seed"]), int(run["parts"])) for run in runs] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    with pytest.raises(ValueError, match=said("bench.models gcn gat graphsage mlp")):
        accuracy.run(tmp_path / "out", [graph], ["mlp"], [2], [0])


@pytest.mark.sweep
def test_parts_trains_the_same_model_on_parts_of_each_partitioner(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graphs = {"tiny": ["dataset=npz", f"dataset.name={graph}"]}
    options = {"num_parts": 3, "devices": 1, "seeds": [0, 1], "max_epochs": 3, "overrides": SMALL}
    models = "strategy/weights=model_averaging"
    weights = {"averaging": [models], "controlled": [models, "strategy.weights.control_variates=true"]}
    table = parts.run(tmp_path / "out", graphs, ["random", "streaming_multilevel"], weights, **options)
    methods = ["random", "random", "streaming_multilevel", "streaming_multilevel"]
    assert [row["partitioner"] for row in table] == methods
    assert [row["weights"] for row in table] == 2 * list(weights)
    assert table[2]["edge_cut_ratio"] < table[0]["edge_cut_ratio"]
    assert table[2]["replication_factor"] < table[0]["replication_factor"]
    assert all(0 < row["test_acc"] <= 100 and row["epoch_s"] > 0 for row in table)
    runs = rows_of(tmp_path / "out" / "rows.csv")
    assert [run["partitioner"] for run in runs] == [method for method in methods for _ in range(2)]
    assert [run["seed"] for run in runs] == ["0", "1"] * 4
    assert all(float(run["epoch_s"]) < float(run["train_s"]) for run in runs)
    assert (tmp_path / "out" / "parts.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match=said("bench.graphs name overrides")):
        parts.run(tmp_path / "out", ["cora"], ["random"], weights)
    with pytest.raises(ValueError, match=said("bench.weights name overrides")):
        parts.run(tmp_path / "out", graphs, ["random"], ["averaging"])


def test_an_epoch_takes_as_long_as_its_slowest_process(tmp_path):
    quality = {"edge_cut_ratio": 0.25, "replication_factor": 1.5, "node_balance": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps({"quality": quality | {"more": 1}}))
    seconds = {0: (1.0, 3.0), 1: (2.0, 1.5), 2: (4.0, 5.0)}
    events = [
        {"event": "epoch", "epoch": epoch, "rank": rank, "seconds": own, "cpu_s": 10 * own, "val_acc": epoch / 4}
        for epoch, of_ranks in seconds.items()
        for rank, own in enumerate(of_ranks)
    ]
    lines = [json.dumps(event) for event in [{"event": "epoch_start", "epoch": 0, "rank": 0}, *events]]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    found = parts._measure(tmp_path)
    assert found == quality | {
        "epoch_s": 3.0, "epoch_cpu_s": 40.0, "curve": curve_text([(3.0, 0.0), (5.0, 0.25), (10.0, 0.5)]),
    }  # fmt: skip


@pytest.mark.sweep
def test_parts_stand_beside_central_training_with_the_seconds_to_its_accuracy(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graphs = {"tiny": ["dataset=npz", f"dataset.name={graph}"], "left out": None}
    options = {"num_parts": 3, "seeds": [0], "max_epochs": 8, "devices": 1, "overrides": SMALL, "feature_dim": 4}
    table = parts.run(tmp_path / "out", graphs, ["random"], {"default": []}, central=True, **options)
    assert [(row["partitioner"], row["weights"]) for row in table] == [("", parts.CENTRAL), ("random", "default")]
    assert table[0]["difference"] == 0
    assert 0 < table[0]["to_central_s"]
    (run,) = rows_of(tmp_path / "out" / "rows.csv")
    accuracies = [float(point.split(":")[1]) for point in run["curve"].split()]
    assert len(accuracies) == 8
    assert max(accuracies) == pytest.approx(float(run["best_val_acc"]), abs=1e-4)
    assert len(set(accuracies)) > 1, "the default, relative folder of stores: each epoch is validated again"


def test_central_training_has_the_edges_of_the_store(tmp_path):
    edges = np.array([[0, 1, 1, 2, 3, 0], [1, 0, 2, 3, 3, 1]])
    stream = gs.open_edge_stream(edges, num_nodes=4, to_undirected=True, remove_self_loops=True)
    store = gs.write_partition_store(tmp_path / "s", stream, gs.partition(stream, "range", num_parts=2))
    directed_edges = edges_of(stream)
    assert directed_edges.shape[1] == store.num_edges == 6
    assert {*map(tuple, directed_edges.T.tolist())} == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert edges_of(gs.open_edge_stream(edges, num_nodes=4)).shape[1] == 5


def test_seconds_to_an_accuracy():
    curve = curve_text([(1.0, 0.5), (2.5, 0.75), (4.0, 0.7)])
    assert seconds_to(curve, 0.5) == 1.0
    assert seconds_to(curve, 0.72) == 2.5
    assert seconds_to(curve, 0.8) is None


def test_a_generated_graph_is_written_like_a_public_one(tmp_path):
    path = reduced_graph("planted:2_000:300", tmp_path, 8, [0.5, 0.25, 0.25])
    arrays = np.load(path)
    assert arrays["edge_index"].shape == (2, 2000)
    assert arrays["x"].shape == (300, 8)
    assert np.allclose(np.linalg.norm(arrays["x"], axis=1), 1, atol=1e-5)
    assert set(arrays["y"].tolist()) == set(range(16))
    masks = np.stack([arrays[f"{split}_mask"] for split in ("train", "val", "test")])
    assert (masks.sum(axis=0) == 1).all()
    assert abs(masks[0].mean() - 0.5) < 0.15  # 5 standard deviations
    assert reduced_graph("planted:2_000:300", tmp_path, 8, [0.5, 0.25, 0.25]) == path
