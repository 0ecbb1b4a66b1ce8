"""`gnnscale bench gpu` at a tiny size on the CPU: every stage, the order of its rows, resuming, its ratios."""

import csv
from importlib.metadata import version

import pytest
import torch

import lightning_gnnscale as gs
from benchmarks import gpu_peer
from benchmarks.gpu import _SAMPLERS, GPUBench, Inputs, run
from benchmarks.gpu_graph import generate
from benchmarks.gpu_table import compared, page
from benchmarks.gpu_training import Training
from benchmarks.wheels import lines
from tests.says import said

CPU = torch.device("cpu")
TINY = {"device": "cpu", "scale": 0.0001, "dim": 8, "fanouts": (3, 2), "batch_size": 8, "hidden_channels": 8}
TINY |= {"threads": 1, "epoch_s": 0.02}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_copies.MOST_RUNS", 3)
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.set_num_threads(before[1])


def test_every_stage_runs_on_a_cpu_and_the_rows_of_a_gpu_are_named(tmp_path, capsys):
    rows = run(tmp_path, **TINY)
    assert not [row["error"] for row in rows if row.get("error")]
    assert {row["stage"] for row in rows} == {"copy", "gather", "batch", "epoch", "full graph", "exchange"}
    assert all(row["ms"] > 0 for row in rows)
    epochs = {(row["what"], row["tier"]): row for row in rows if row["stage"] == "epoch"}
    for model in ("GraphSAGE", "GAT", "R-GCN"):
        assert all(epochs[model, tier]["over_compute"] > 0 for tier in ("device", "pinned", "disk"))
    told = capsys.readouterr().out
    assert "there is no GPU; left out: copy, to device;" in told and "no overlap" in told
    assert "PyG's NeighborLoader needs" in told or gpu_peer.missing_sampler() == ""
    assert len(list(csv.DictReader((tmp_path / "gpu.csv").open()))) == len(rows)
    text = (tmp_path / "gpu.md").read_text()
    assert "| GraphSAGE | disk |" in text and "## Left out: there is no GPU" in text
    assert not (tmp_path / "features.npy").exists()


def test_a_second_call_goes_on_where_the_first_was_cut_off(tmp_path, monkeypatch, capsys):
    few = TINY | {"models": ("GraphSAGE",)}
    monkeypatch.setattr(Inputs, "_full_graph", lambda self: [])
    begun = iter([0.0] * 4)
    monkeypatch.setattr("benchmarks.runner.time.monotonic", lambda: next(begun, 1e9))
    first = run(tmp_path, **few, minutes=1)
    assert 0 < len(first) < 5 and "bench.minutes=1 are over" in capsys.readouterr().out
    rest = run(tmp_path, **few)
    assert [row["ms"] for row in rest[: len(first)]] == [row["ms"] for row in first] and len(rest) > 10


def test_the_rows_that_matter_most_come_first():
    inputs = Inputs(GPUBench(), torch.device("cuda"), None)
    names = [row.name for row in inputs.rows()]
    assert len({(row.stage, row.what, row.tier, row.width) for row in inputs.rows()}) == len(names)
    places = [names.index(f"epoch, GraphSAGE, {tier}") for tier in ("device", "pinned")]
    assert max(places) < names.index("batch, cross") < names.index("epoch, GAT, device")
    assert names.index("epoch, R-GCN, pinned") < names.index("epoch, GraphSAGE, disk")
    assert names.index("copy, device") == 0


def test_ratios_are_of_the_rows_that_bound_them():
    def epoch(tier, seconds, **more):
        return {"stage": "epoch", "what": "GAT", "tier": tier, "epoch_s": seconds, **more}

    rows = [
        {"stage": "copy", "what": "device", "tier": "", "gb_per_s": 2000.0},
        {"stage": "copy", "what": "to device", "tier": "", "gb_per_s": 50.0},
        {"stage": "gather", "what": "512 bytes", "tier": "device", "gb_per_s": 1000.0},
        {"stage": "gather", "what": "512 bytes", "tier": "pinned", "gb_per_s": 40.0},
        epoch("compute alone", 2.0),
        epoch("device", 3.0, gb_per_s=700.0),
        epoch("pinned", 4.0, gb_per_s=45.0),
        epoch("PyG, device", 12.0),
        epoch("device, no overlap", 6.0),
    ]
    found = {(row["what"], row["tier"]): row for row in compared(rows)}
    assert found["512 bytes", "device"]["share_of_bound"] == 0.5
    assert found["512 bytes", "pinned"]["share_of_bound"] == 0.8
    resident, pinned = found["GAT", "device"], found["GAT", "pinned"]
    assert (resident["over_compute"], resident["times_pyg"], resident["times_no_overlap"]) == (1.5, 4.0, 2.0)
    assert (pinned["over_compute"], pinned["share_of_bound"], pinned["times_pyg"]) == (2.0, 0.9, None)
    text = page(compared(rows), "a machine", {"no wheel": ["epoch, GAT, PyG"]})
    assert "| GAT | device | 700.0 |" in text and "## Left out: no wheel\n\n- epoch, GAT, PyG" in text


@pytest.mark.parametrize("name", ["GraphSAGE", "GAT", "R-GCN"])
@pytest.mark.parametrize("tier", ["device", "pinned"])
def test_pygs_loop_trains_on_the_same_graph(tmp_path, monkeypatch, name, tier):
    """Its sampler is a stand-in with the same batches: none is installed with the tests."""

    def loader(data, fanouts, seeds, *, batch_size, num_workers, **options):
        assert options["is_sorted"] and bool((data.edge_index[1].diff() >= 0).all())
        return gs.NeighborLoader(data, fanouts, seeds, batch_size=batch_size, num_workers=0, is_sorted=True)

    monkeypatch.setattr("torch_geometric.loader.NeighborLoader", loader)
    graph = generate(200, 1000, 8, 40, 0, CPU, tmp_path)
    found = gpu_peer.pyg_epoch(Training(graph, CPU, (3, 2), 8, 8, 1, 5.0), name, tier)
    assert found["batches"] == 5 and found["epoch_s"] > 0


@pytest.mark.parametrize("sampler", [*_SAMPLERS.values()], ids=[*_SAMPLERS])
def test_batches_sampled_on_the_device(tmp_path, sampler):
    pytest.importorskip("triton")
    graph = generate(200, 1000, 8, 40, 0, CPU, tmp_path)
    found = Training(graph, CPU, (3, 2), 2, 8, 1, 5.0).sampling_by(sampler)
    assert found["ms"] > 0 and found["seeds_per_s"] == pytest.approx(2e3 / found["ms"])


def test_the_generated_graph_is_heavy_tailed_and_repeatable(tmp_path):
    graph, again = (generate(3000, 60_000, 4, 30, 1, CPU, tmp_path) for _ in range(2))
    assert graph.csc.num_edges == graph.csc.indptr[-1] == 60_000 and graph.csc.num_rows == 3000
    assert graph.csc.in_degree.max() > 10 * graph.csc.in_degree.mean()
    assert 0 <= graph.csc.indices.min() and graph.csc.indices.max() < 3000
    assert (graph.csc.indices == again.csc.indices).all() and (graph.features == again.features).all()


def test_a_row_that_fails_says_why_and_the_others_are_measured(tmp_path, monkeypatch):
    def failing(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr("benchmarks.gpu.full_graph_step", failing)
    monkeypatch.setattr(Inputs, "rows", Inputs._full_graph)
    rows = run(tmp_path, **TINY)
    assert rows[0]["error"] == "OutOfMemoryError: CUDA out of memory." and rows[1]["ms"] > 0


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"device": "tpu"}, said("bench.device auto cuda cpu tpu")),
        ({"models": ["GIN"]}, said("bench.models GraphSAGE GAT R-GCN GIN")),
        ({"scale": 0}, said("bench.scale above 0")),
    ],
)
def test_settings_are_refused_in_one_line(tmp_path, wrong, told):
    with pytest.raises(ValueError, match=told):
        run(tmp_path, **wrong)


def test_the_wheels_of_a_machine_without_a_network_are_listed():
    told = list(lines())
    pinned = dict(line.split("==") for line in told if not line.startswith("#"))
    assert {"torch", "lightning", "torch-geometric", "numba", "llvmlite", "hydra-core", "fsspec"} <= pinned.keys()
    assert "lightning-gnnscale" not in pinned and "+" not in "".join(pinned.values())
    assert pinned["numba"] == version("numba") and any("pyg-lib" in line for line in told)
