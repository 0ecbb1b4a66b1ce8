"""`gnnscale bench sample` at a small size, with and without peers, and what a peer's turn counts."""

import csv
import json
import os
import re
import sys
import textwrap

import numpy as np
import pytest
import torch

from benchmarks.sample import Name, rows_of, run
from benchmarks.turns import Peer, Taken, tree_cpu_s
from tests.says import said

SMALL = {"num_nodes": 2000, "num_edges": 20_000, "dim": 16, "fanouts": (4, 3), "batch_size": 64}
SMALL |= {"num_batches": 3, "peer_batches": 2, "repeats": 1}

# Stands for peer_worker.py: it answers like one; a child of its own burns CPU and ends, or stays.
FAKE = """
    import json, subprocess, sys, time
    print(json.dumps({"versions": {"fake": "1.0"}}), flush=True)
    burn = "import time\\nwhile time.process_time() < 0.4: pass\\n"
    for line in sys.stdin:
        end = time.process_time() + 0.03
        while time.process_time() < end: pass
        workers = int(line.split()[0])
        if workers == 2:
            alive = subprocess.Popen([sys.executable, "-c", burn + "print(1, flush=True); time.sleep(60)"], stdout=-1)
            alive.stdout.readline()
        elif workers == 1:
            subprocess.run([sys.executable, "-c", burn])
        elif workers == 9:
            sys.exit("the graph does not fit")
        print(json.dumps({"seeds": 100, "rows": 700}), flush=True)
        if workers == 8:
            sys.exit("it ran out of memory")
    if "alive" in globals():
        alive.kill()
        alive.wait()
"""


@pytest.fixture
def fake_python(tmp_path):
    script, python = tmp_path / "fake.py", tmp_path / "python"
    script.write_text(textwrap.dedent(FAKE))
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    python.chmod(0o755)
    return str(python)


def test_it_runs_without_peers_and_says_how_to_have_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.sample._this_python", lambda: None)
    found = run(tmp_path, **SMALL)
    said = capsys.readouterr().out
    assert re.search(r"PyG NeighborLoader is left out: pass bench.pyg_python=.*torch-sparse", said)
    assert re.search(r"GraphBolt is left out: pass bench.graphbolt_python=.*dgl==", said)
    rows = list(csv.DictReader((tmp_path / "sample.csv").open()))
    assert [row["what"] for row in rows] == [row["what"] for row in found["sample"]]
    assert {(row["what"], float(row["locality_scale"]), int(row["threads"])) for row in rows} == {
        ("NeighborLoader", 1, 1),
        ("NeighborLoader", 1, 2),
        ("NeighborLoader", 8, 1),
        ("sampling alone", 1, 1),
        ("sampling alone", 8, 1),
        ("PartLoader, int8 rows", 1, 1),
        ("PartLoader, int8 rows", 1, 2),
        ("row copy alone (bound)", 1, 1),
        ("row copy alone (bound)", 1, 2),
    }
    assert all(float(row["seeds_per_cpu_s"]) > 0 and row["cpu"] and not row["times_pyg"] for row in rows)
    uniform, biased = (next(r for r in found["sample"] if r["locality_scale"] == s) for s in (1, 8))
    assert biased["rows_a_seed"] < uniform["rows_a_seed"] and biased["batch_time_over_uniform"] > 0
    assert (tmp_path / "sample.png").stat().st_size > 1000


@pytest.mark.sweep
def test_a_graph_with_node_types_is_sampled_by_relation_beside_pyg(tmp_path, fake_python):
    found = run(tmp_path, **SMALL, heterogeneous=True, pyg_python=fake_python)["sample"]
    rows = {(row["what"], row["threads"]): row for row in found if not row["workers"]}
    assert {what for what, threads in rows if threads == 1} == {
        "PartLoader",
        "NeighborLoader",
        "sampling alone",
        "sampling alone, edge types unseen",
        "PyG NeighborLoader",
    }
    alone, unseen = rows["sampling alone", 1], rows["sampling alone, edge types unseen", 1]
    assert 0 < alone["edges_a_seed"] <= unseen["edges_a_seed"]  # what one edge type leaves, another may sample
    rates = alone["seeds_per_cpu_s"] * alone["edges_a_seed"], unseen["seeds_per_cpu_s"] * unseen["edges_a_seed"]
    assert alone["edge_rate_over_one_node_type"] == pytest.approx(rates[0] / rates[1])
    assert rows["PartLoader", 1]["rows_a_seed"] > 1 and rows["PartLoader", 1]["times_pyg"]
    with pytest.raises(ValueError, match=said("PyG alone")):
        run(tmp_path / "other", **SMALL, heterogeneous=True, graphbolt_python=fake_python)


def test_pyg_reads_the_same_graph_with_node_types(tmp_path):
    """What the peer's process makes of the files: the same edge types, seeds and counts."""
    from benchmarks.graphs import typed_power_law
    from benchmarks.peer_worker import pyg_by_node_type
    from benchmarks.sample import _write_typed

    data, seen = typed_power_law(1000, 8000, 4, 0), []
    assert len(data.node_types) == 3 and len(data.edge_types) == 6
    _write_typed(tmp_path, data, np.arange(10))
    typed = json.loads((tmp_path / "kinds.json").read_text())
    names = ["features", "seeds", *(f"edges-{number}" for number in range(6))]
    arrays = {name: torch.from_numpy(np.load(tmp_path / f"{name}.npy")) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.peer_worker._pyg_epochs", lambda *given: seen.extend(given))
        pyg_by_node_type(typed)(torch, arrays, [4, 3], 5)
    made, fanouts, (node_type, seeds), batch_size, count = seen
    assert (fanouts, node_type, seeds.tolist(), batch_size) == ([4, 3], "paper", list(range(10)), 5)
    for edge_type in data.edge_types:
        assert torch.equal(made[edge_type].edge_index, data[edge_type].edge_index)
    made["paper"].batch_size = 10
    assert count(made) == (10, sum(typed["counts"].values()))


@pytest.mark.sweep
def test_peers_take_part_and_end_with_the_run(tmp_path, fake_python):
    rows = run(tmp_path, **SMALL, pyg_python=fake_python, graphbolt_python=fake_python)["sample"]
    peers = {(row["what"], row["threads"], row["workers"]): row["rows_a_seed"] for row in rows}
    alone = [(what, threads, 0) for what in ("PyG NeighborLoader", "GraphBolt") for threads in (1, os.cpu_count())]
    assert [peers[name] for name in [*alone, ("PyG NeighborLoader", 1, 2)]] == 5 * [7.0]
    assert all(row["times_pyg"] and row["times_pyg_workers"] and row["times_graphbolt"] for row in rows)
    assert "fake 1.0" in (tmp_path / "sample.csv").read_text()


def test_a_peers_turn_counts_all_its_processes(tmp_path, fake_python):
    peer = Peer("pyg", fake_python, tmp_path, {})
    try:
        for workers in (1, 2):  # a child that ended, one that lives
            taken = peer.contender(workers)()
            assert taken.seeds == 100 and 0.35 <= taken.cpu_s <= taken.wall_s + 0.1
        assert tree_cpu_s(peer._process.pid) >= 0.75
        with pytest.raises(ValueError, match=said("bench.pyg_python: the graph does not fit")):
            peer.contender(9)()
    finally:
        peer.close()
    assert peer._process.returncode is not None


def test_a_peer_that_ended_between_its_turns_is_told_in_one_line(tmp_path, fake_python):
    peer = Peer("pyg", fake_python, tmp_path, {})
    peer.contender(8)()
    os.waitid(os.P_PID, peer._process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ValueError, match=said("bench.pyg_python: it ran out of memory")):
        peer.contender(0)()
    peer.close()


def test_an_interpreter_that_cannot_run_its_peer_is_told_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=said("interpreter /no/such/python")):
        run(tmp_path, **SMALL, pyg_python="/no/such/python")
    with pytest.raises(ValueError, match=said("bench.graphbolt_python ModuleNotFoundError 'dgl'")):
        run(tmp_path, **SMALL, graphbolt_python=sys.executable)


def test_ratios_are_taken_within_a_turn():
    """The second turn ran on a machine half as fast: rates differ, ratios do not."""
    loader, sampling, peer = Name("NeighborLoader"), Name("sampling alone"), Name("PyG NeighborLoader")
    seconds = {
        loader: 1,
        loader._replace(threads=2): 0.5,
        loader._replace(scale=8.0): 0.8,
        sampling: 0.5,
        sampling._replace(scale=8.0): 0.6,
        Name("row copy alone (bound)"): 0.5,
        peer: 22,
        peer._replace(threads=2): 20,
        peer._replace(workers=2): 16,
        Name("GraphBolt"): 12,
    }
    found = {name: [Taken(100, s, s), Taken(100, 2 * s, 2 * s)] for name, s in seconds.items()}
    counts = dict.fromkeys((loader, sampling), (7.0, 500.0))
    counts |= {name._replace(scale=8.0): (4.0, 400.0) for name in counts}
    plain, two, biased, sampled, sampled_biased, copies, *_ = rows_of(found, counts, 1)
    assert (plain["times_pyg"], plain["times_pyg_workers"], plain["times_graphbolt"]) == (20, 16, 12)
    assert plain["share_of_copy_bound"] == 0.5 and copies["share_of_copy_bound"] == 1
    assert two["times_one_thread"] == 2 and plain["times_one_thread"] is None
    assert biased["batch_time_over_uniform"] == pytest.approx(0.8)
    assert sampled_biased["edge_time_over_uniform"] == pytest.approx(1.2 * 500 / 400)
    assert sampled["ns_per_edge"] == pytest.approx(1e9 / 150 / 500)  # 200 and 100 seeds per CPU-second
