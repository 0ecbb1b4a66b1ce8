"""The benchmark of preparation: its rows, going on after a kill, its replay, and what it refuses."""

import csv

import pytest

from benchmarks import prepare, replay
from benchmarks.prepare import capacities, medians, over_device, replay_error
from benchmarks.prepare_cases import grid, source_of
from benchmarks.task_trace import BatchTimes, TaskTime, TaskTrace
from tests.says import said

SMALL = {
    "graphs": ["power_law:600:6000:8"], "sources": ["threads", "fixed_prefetch", "task_graphs"],
    "settings": {
        "threads": {"num_threads": [1]}, "fixed_prefetch": {"num_threads": [1, 2], "depth": [1, 2]},
        "task_graphs": {"num_threads": [2], "queue_batches": [1, 4]},
    },
    "fanouts": [3, 2], "batch_size": 14, "num_batches": 4, "device_batches": 4, "repeats": 1, "replay_cores": [1, 2, 8],
    "replay_queue_batches": [1, 8], "replay_sigmas": [0],
}  # fmt: skip


@pytest.mark.sweep
def test_every_source_is_measured_fed_and_replayed(tmp_path, monkeypatch, capsys):
    found = prepare.run(tmp_path, **SMALL, workloads=["graphsage", "unsupervised"], train=["cpu", 0])
    rows, replays = found["rows"], found["replay"]
    for workload in ("graphsage", "unsupervised"):
        own = [row for row in rows if row["workload"] == workload]
        for train in ("cpu", "0"):
            assert len([row for row in own if row["train"] == train]) == 7
        fed = [row for row in own if row["train"] == "fed"]  # the best settings of each source and number of workers
        assert sorted((row["source"], row["workers"]) for row in fed) == [
            ("fixed_prefetch", 1), ("fixed_prefetch", 2), ("task_graphs", 2), ("threads", 1),
        ]  # fmt: skip
        assert len({row["train_ms"] for row in fed}) == 1 and fed[0]["train_ms"] > 0
    assert all(row["batches"] == 4 and row["seeds_per_s"] > 0 and 0 <= row["wait_share"] <= 1 for row in rows)
    assert {row["seeds"] for row in rows if row["workload"] == "graphsage"} == {
        46
    }  # of 60, those of the last four batches
    assert len(replays) == 2 * 3 * 2
    assert all((row["fixed_prefetch_error"] == "") == (row["replayed_cores"] == 8) for row in replays)
    assert (tmp_path / "prepare.png").stat().st_size > 10_000
    for name in ("prepare", "replay"):
        with open(tmp_path / f"{name}.csv", newline="") as file:
            written = list(csv.DictReader(file))
        assert len(written) == len(rows if name == "prepare" else replays)
    assert {row["replayed_cores"] for row in written} == {"1", "2", "8"}
    assert "a REPLAY of measured task times, no measurement" in capsys.readouterr().out

    def again(*_):
        raise AssertionError("a finished row was measured again")

    monkeypatch.setattr(prepare, "measure", again)
    monkeypatch.setattr(replay, "make_data", again)
    assert prepare.run(tmp_path, **SMALL, workloads=["graphsage", "unsupervised"], train=["cpu", 0]) == found


def trace_of(tasks, num_batches=12) -> TaskTrace:
    times = [TaskTime("fetch", before, 1.0, seconds) for seconds, before in tasks]
    return TaskTrace([BatchTimes(0.0, times, 100, 10) for _ in range(num_batches)], [])


def test_task_graphs_win_where_memory_is_for_fewer_batches_than_cores():
    """Eight chunks that depend on nothing: as many cores share a batch, where fixed prefetch has one for each."""
    traces = {cores: {1: trace_of([(0.01, ())] * 8)} for cores in (1, 8)}
    rows = {(r["replayed_cores"], r["queue_batches"]): r for r in replay.replay_rows(traces, [1, 8], [1, 16], [0])}
    assert rows[1, 1]["fixed_prefetch_seeds_per_s"] == rows[1, 16]["task_graphs_seeds_per_s"] == pytest.approx(1250)
    assert rows[8, 1]["ratio"] == pytest.approx(8)
    assert rows[8, 16]["fixed_prefetch_seeds_per_s"] == pytest.approx(10000)
    assert rows[8, 16]["ratio"] == pytest.approx(1, abs=0.01)
    assert rows[8, 16]["fixed_prefetch_peak_mib"] <= 16 * 10 / 2**20 + 0.1


def test_chunks_are_chosen_by_what_they_cost():
    """Chunks of a long batch win where there is memory for one, and their scheduling loses where all cores are busy."""
    whole, split = trace_of([(0.04, ())]), trace_of([(0.01, ())] * 4)
    split.overhead_s = 0.002
    rows = replay.replay_rows({4: {1: whole, 4: split}}, [4], [1, 16], [0])
    assert "chunks=4" in rows[0]["task_graphs_settings"] and rows[0]["ratio"] > 2
    assert "chunks=1" in rows[1]["task_graphs_settings"] and rows[1]["ratio"] == pytest.approx(1, abs=0.01)


def test_errors_of_a_replay_are_held_against_what_was_measured():
    traces = {cores: {1: trace_of([(0.01, ())])} for cores in (1, 2)}
    seen = {("fixed_prefetch", 1, 8): 8000.0, ("task_graphs", 1, 8): 10000.0}
    rows = replay.replay_rows(traces, [1, 2], [8], [0], measured=lambda *case: seen.get(case))
    assert rows[0]["fixed_prefetch_error"] == pytest.approx(0.25)
    assert replay_error(rows) == pytest.approx(0.25)
    assert replay_error(rows[1:]) is None


@pytest.mark.slow
def test_ranks_share_the_workers_of_a_machine(tmp_path):
    """Two trainers take what two workers make, and the machine holds the parts once."""
    chosen = {"sources": ["ray"], "settings": {"ray": {"num_workers": [2]}}, "workloads": ["graphsage"], "train": [0]}
    case = SMALL | chosen | {"replay_cores": [1], "scope": "part", "fanouts": [2]}
    alone, both = (prepare.run(tmp_path, **case, num_ranks=ranks)["rows"][0] for ranks in (1, 2))
    assert (alone["ranks"], alone["batches"], both["ranks"], both["batches"]) == (1, 4, 2, 8)
    assert 0 < both["held_mib"] <= alone["held_mib"]
    assert both["seeds_per_s"] > 0


@pytest.mark.slow
def test_preparers_are_lost_and_join_and_parts_are_read_once(tmp_path):
    """Whoever prepares batches, they are the same."""
    chosen = {"sources": ["ray"], "settings": {"ray": {"num_workers": [2]}}, "workloads": ["graphsage"], "train": [0]}
    more = {"scope": "part", "fanouts": [2], "sample_ms": 40.0, "changes": ["lost", "joined"], "change_workers": 2}
    found = prepare.run(tmp_path, **SMALL | chosen | more | {"num_batches": 40})
    assert found["replay"] == [] and found["rows"][0]["parts_read"] <= found["rows"][0]["parts"]
    assert [row["change"] for row in found["changes"]] == ["lost", "joined"]
    assert all(row["same"] is True and row["batches"] > 80 for row in found["changes"])
    assert all(row["before_per_s"] > 0 and row["after_per_s"] > 0 for row in found["changes"])


def test_a_source_is_held_against_the_device_that_it_feeds():
    row = {"source": "threads", "settings": "num_threads=2", "seeds": 300, "batches": 3, "train_ms": 50}
    rows = [row | {"train": "0", "train_ms": 0, "seeds_per_s": 3000.0}, row | {"train": "fed", "seeds_per_s": 1990.0}]
    found = capacities(rows)
    assert over_device(rows[1], found) == pytest.approx(1.5)  # 2,000 seeds a second are what the device takes
    assert over_device(rows[0], found) is None


def test_settings_are_combined_and_repeats_are_summed_up():
    assert grid({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert grid({}) == [{}]
    assert source_of("task_graphs", {"num_threads": 3}).num_threads == 3
    case = dict.fromkeys(("graph", "workload", "source", "settings", "workers", "memory_batches", "train", "shape"), "")
    rows = [case | {"repeat": n, "seconds": float(n * n), "peak_queue_mib": ""} for n in range(3)]
    assert medians(rows) == [case | {"seconds": 1.0, "peak_queue_mib": ""}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": ["gat"]}, "bench.workloads gcn graphsage unsupervised gat"),
        ({"train": ["gpu"]}, "bench.train >= 0 'gpu'"),
        ({"sources": ["pigeons"]}, "bench.sources 'pigeons' fixed_prefetch processes"),
        ({"graphs": ["atlantis"]}, "bench.graphs 'atlantis'"),
        ({"changes": ["late"]}, "bench.changes lost, joined late"),
        ({"change_workers": 1}, "bench.change_workers 2 1"),
        ({"num_ranks": 0}, "bench.num_ranks 1 0"),
        ({"num_ranks": 8, "scope": "part"}, "bench.num_parts bench.num_ranks=8 bench.scope=part"),
        ({"num_ranks": 2}, "bench.num_ranks=2 bench.sources=[ray] threads"),
    ],
)
def test_bad_settings(tmp_path, options, message):
    with pytest.raises(ValueError, match=said(message)):
        prepare.run(tmp_path, **(SMALL | options))
