"""alpha="auto": measured once, remembered by devices, clipped."""

import json
import threading

import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.placement import link_cost


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning_gnnscale" / "link_cost.json"


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures simulated devices: needs a machine without a GPU")
def test_auto_measures_once_and_remembers(memory, monkeypatch):
    prob = np.random.default_rng(0).random(50)
    placement = gs.place(prob, 2, 10, alpha="auto")
    (devices, entry), *others = json.loads(memory.read_text()).items()
    assert devices.startswith("cpu: ") and not others
    assert 0 <= entry["alpha"] <= 1 and entry["peer_ns_per_row"] > 0 and entry["host_ns_per_row"] > 0
    assert entry["alpha"] == pytest.approx(min(1, entry["peer_ns_per_row"] / entry["host_ns_per_row"]))
    monkeypatch.setattr(link_cost, "measure_on_cpu", lambda: pytest.fail("measured again"))
    again = gs.place(prob, 2, 10, alpha="auto")
    # A matrix, as links are measured: devices that read each other no faster than the host are no group then.
    expected = gs.place(prob, 2, 10, alpha=np.full((2, 2), entry["alpha"]))
    for rows in (placement.rows, again.rows):
        assert [own.tolist() for own in rows] == [own.tolist() for own in expected.rows]


def test_nothing_is_measured_where_no_peer_is_read(memory):
    gs.place(np.ones(9), 2, 3, alpha="auto", groups=[[0], [1]])
    gs.place(np.ones(9), 2, 3, alpha="auto", method="ranges")
    assert not memory.exists()


@pytest.mark.parametrize(("peer", "host", "alpha"), [(1.0, 4.0, 0.25), (3.0, 2.0, 1.0), (0.0, 1.0, 0.0)])
def test_values_are_clipped_and_kept_by_device(memory, peer, host, alpha):
    assert link_cost.remembered("a", lambda: (peer, host))["alpha"] == alpha
    assert link_cost.remembered("b", lambda: (1.0, 2.0))["alpha"] == 0.5
    assert link_cost.remembered("a", lambda: pytest.fail("measured again"))["alpha"] == alpha


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 3}', '{"a": {"alpha": 7}}', '{"a": {"alpha": NaN}}'])
def test_a_damaged_file_is_measured_again(memory, content):
    memory.parent.mkdir(parents=True)
    memory.write_text(content)
    assert link_cost.remembered("a", lambda: (1.0, 2.0))["alpha"] == 0.5
    assert json.loads(memory.read_text())["a"]["alpha"] == 0.5


def test_side_by_side_one_measures(memory):
    measured = []

    def measure():
        measured.append(1)
        return 1.0, 2.0

    threads = [threading.Thread(target=link_cost.remembered, args=("a", measure)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured) == 1


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert link_cost.remembered("a", lambda: (1.0, 2.0))["alpha"] == 0.5


def test_training_on_cpus_is_measured_on_cpus(memory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(link_cost, "measure_on_cpu", lambda: (1.0, 4.0))
    cpus, gpus = [torch.device("cpu")] * 3, [torch.device("cuda", i) for i in range(3)]
    assert link_cost.link_alphas(cpus).tolist() == [[0, 0.25, 0.25], [0.25, 0, 0.25], [0.25, 0.25, 0]]
    assert (link_cost.link_alphas(gpus) == 1 - np.eye(3)).all(), "there is one GPU, and no other to reach"


def test_each_pair_of_gpus_is_measured(memory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(link_cost, "gpu_uuid", lambda device: f"id-{device.index}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one.index, other.index} != {0, 2})
    seconds = {(0, 1): (1.0, 10.0), (1, 2): (5.0, 10.0)}
    monkeypatch.setattr(link_cost, "measure_on_cuda", lambda one, other: seconds[one.index, other.index])
    alphas = link_cost.link_alphas([torch.device("cuda", i) for i in range(3)])
    assert alphas.tolist() == [[0, 0.1, 1], [0.1, 0, 0.5], [1, 0.5, 0]]
    assert sorted(json.loads(memory.read_text())) == ["cuda: a GPU id-0, a GPU id-1", "cuda: a GPU id-1, a GPU id-2"]
    # Under CUDA_VISIBLE_DEVICES=0,4 another GPU is number 1.
    monkeypatch.setattr(link_cost, "gpu_uuid", lambda device: f"id-{4 * device.index}")
    monkeypatch.setattr(link_cost, "measure_on_cuda", lambda one, other: (9.0, 10.0))
    assert link_cost.link_alphas([torch.device("cuda", i) for i in range(2)])[0, 1] == 0.9


@pytest.mark.gpu
def test_peers_cost_less_than_the_host(memory):
    alphas = link_cost.link_alphas(link_cost.devices_here(2))
    assert 0 < alphas[0, 1] <= 1 and (torch.cuda.device_count() > 1 or alphas[0, 1] == 1)
