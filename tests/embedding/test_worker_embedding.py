"""Rows that Ray's workers own: against `DistributedEmbedding`, in training, saved and loaded, and lost."""

import os
import pickle
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from embedding_runs import NUM, embedding, fit, write_store

import lightning_gnnscale as gs
from lightning_gnnscale.embedding.shared_table import SharedColumn
from lightning_gnnscale.errors import GNNScaleError, PlacementError
from lightning_gnnscale.remote import shard_table
from lightning_gnnscale.remote.shard_keeper import Initial, RowShard
from lightning_gnnscale.rng import fold

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from processes import launch

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")

from lightning_gnnscale.remote import cluster  # noqa: E402
from tests.says import said  # noqa: E402

pytestmark = pytest.mark.sweep

DIM = 12
NODES = np.arange(NUM)
OFFSETS = [0, 40, 40, 170, 290, NUM]


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    """One Ray for all tables of this module."""
    cluster.join_ray(None, 60.0, 200 << 20)
    yield
    cluster.leave_ray()
    ray.shutdown()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store") / "store", num_parts=5)


@pytest.fixture(scope="module")
def of_workers(store):
    """Rows of two workers, for `fit` too; tests go on from what the others left."""
    made = gs.WorkerEmbedding.for_store(store, 16, optimizer=gs.SparseAdam(0.05, bias="step"), seed=1).open()
    yield made
    made.close()


def local_twin(store, **options):
    return gs.DistributedEmbedding.for_store(
        store, 16, optimizer=gs.SparseAdam(0.05, bias="step"), **{"seed": 1} | options
    ).open()


def pushes(seed, num=20, dim=16):
    rng = np.random.default_rng(seed)
    for _ in range(num):
        nodes = rng.integers(0, NUM, rng.integers(0, 80))
        yield nodes, rng.normal(size=(len(nodes), dim))


def equal(one, other) -> bool:
    return torch.equal(one.pull(NODES), other.pull(NODES))


# The first test of these that share `of_workers`: rows are as they were made.
def test_rows_are_those_of_one_process_bit_for_bit(store, of_workers, monkeypatch):
    local = local_twin(store)
    assert of_workers.is_local and of_workers.is_open
    assert equal(of_workers, local), "initial values"
    monkeypatch.setattr(shard_table, "BLOCK_BYTES", 7 * 16 * 4)  # many requests for a pull
    for number, (nodes, gradients) in enumerate(pushes(0)):
        for one in (of_workers, local):
            one.push(nodes, gradients)
        if number % 3 == 0:
            asked = np.random.default_rng(number).integers(0, NUM, 50)
            assert torch.equal(of_workers.pull(asked), local.pull(asked)), "a trainer sees its own pushes"
    of_workers.settle()
    assert not of_workers._table._under_way
    assert equal(of_workers, local)
    assert of_workers.num_pushes == local.num_pushes == 20
    blocks = list(of_workers.rows_here())
    assert np.array_equal(np.concatenate([rows for _, rows in blocks]), local.pull(NODES).numpy())


def test_pushes_under_way_are_bounded(of_workers):
    for nodes, gradients in pushes(1):
        of_workers.push(nodes, gradients)
        assert len(of_workers._table._under_way) <= of_workers.pushes_under_way == 4


def test_a_copy_in_another_process_reaches_the_same_rows(of_workers):
    copy = pickle.loads(pickle.dumps(of_workers))
    copy.push([5], np.ones((1, 16)))
    copy.settle()
    assert equal(of_workers, copy)
    copy.close()
    assert of_workers.pull([5]).shape == (1, 16), "only the process that made them ends them"


def test_training_equals_training_in_one_process(tmp_path, store, of_workers):
    local = local_twin(store)
    of_workers.load(tmp_path / "rows", [local.save(tmp_path / "rows")])
    results = []
    for number, inputs in enumerate((of_workers, local)):
        trainer, model, dm = fit(tmp_path / str(number), store.root, inputs)
        tested = trainer.test(model, dm, verbose=False)[0]
        path = Path(trainer.checkpoint_callback.best_model_path)
        results.append((model.state_dict(), tested, sorted(os.listdir(f"{path}.rows"))))
        assert tested["test_acc"] > 0.8
    (weights, *rest), (local_weights, *local_rest) = results
    assert equal(of_workers, local)
    assert all(torch.equal(weights[name], local_weights[name]) for name in weights)
    assert rest == local_rest, "metrics, and names of files, which hold their checksums"


def test_saved_rows_go_on_with_other_workers(tmp_path, store, of_workers):
    saved = [of_workers.save(tmp_path / "rows")]
    local = local_twin(store, seed=9)
    local.load(tmp_path / "rows", saved)
    other = gs.WorkerEmbedding(NUM, 16, optimizer=gs.SparseAdam(0.05, bias="step"), num_workers=1).join()
    assert other._table._user == os.getpid(), "a source of batches that starts later uses this Ray too"
    other.load(tmp_path / "rows", saved)
    assert other.loaded
    assert other.num_pushes == of_workers.num_pushes == local.num_pushes > 0
    for nodes, gradients in pushes(2):
        for one in (of_workers, local, other):
            one.push(nodes, gradients)
    assert equal(of_workers, local)
    assert equal(other, local)
    other.close()
    with pytest.raises(PlacementError, match=said("WorkerEmbedding rows memory")):
        other.pull([1])


def test_workers_own_the_rows_of_some_node_types(tmp_path):
    """Three workers for two parts, of which each then has a range of rows; and one, which has them by part."""
    dataset = gs.hetero_graph({"paper": 30, "author": 12}, {"author,writes,paper": np.arange(24).reshape(2, 12) % 12})
    parts = gs.partition(dataset.stream, method="random", num_parts=2, seed=0)
    typed = gs.write_partition_store(tmp_path / "typed", dataset.stream, parts)
    nodes = np.flatnonzero(typed.node_type(np.arange(42)) == 1)
    options = {"node_types": ["author"], "optimizer": gs.SparseAdam(0.05, bias="step"), "seed": 1}
    local = gs.DistributedEmbedding.for_store(typed, DIM, **options).open()
    for num_workers in (3, 1):
        made = gs.WorkerEmbedding.for_store(typed, DIM, num_workers=num_workers, timeout_s=120.0, **options).open()
        assert made.nbytes == local.nbytes == 12 * (3 * 4 * DIM + 4)
        if num_workers == 1:  # else those of `local` have been pushed to
            made.load(tmp_path / "rows", [local.save(tmp_path / "rows")])
        assert torch.equal(made.pull(nodes), local.pull(nodes))
        for seed in range(3):
            rng = np.random.default_rng(seed)
            chosen, gradients = rng.choice(nodes, 20), rng.normal(size=(20, DIM))
            made.push(chosen, gradients)
            local.push(chosen, gradients)
        made.settle()
        assert torch.equal(made.pull(nodes[::-1].copy()), local.pull(nodes[::-1].copy()))
        rows = np.concatenate([rows for _, rows in made.rows_here()])
        assert np.array_equal(rows, local.pull(nodes).numpy())
        with pytest.raises(ValueError, match=said("nodes 'paper'")):
            made.pull(np.arange(42))
        made.close()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_shard_fills_and_steps_its_rows(optimizer):
    local = gs.DistributedEmbedding(NUM, DIM, optimizer=optimizer, dtype="float64", seed=3).open()
    columns = {"rows": SharedColumn(DIM, "<f8")}
    if optimizer == "adam":
        columns |= {"moments": SharedColumn(2 * DIM, "<f8"), "counts": SharedColumn(1, "<i4")}
    made = gs.WorkerEmbedding(NUM, DIM, OFFSETS, optimizer=optimizer, dtype="float64", seed=3)
    assert made._columns() == columns
    assert made.nbytes == local.nbytes
    offsets, owners = made._owned_by_workers()
    assert (offsets.tolist(), owners) == (OFFSETS, [0, 1, 0, 1, 0])
    initial = Initial(fold(3, DIM), made.scale)
    shard = RowShard(
        130 + 10, columns, made.optimizer, [(0, initial.of(slice(40, 170))), (130, initial.of(slice(0, 10)))]
    )
    ids = np.concatenate([np.arange(40, 170), np.arange(10)])
    rows = np.arange(140)
    gradients = np.random.default_rng(0).normal(size=(140, DIM))
    gradients.flags.writeable = rows.flags.writeable = False  # as Ray gives them
    for _ in range(2):
        assert np.array_equal(shard.pull("rows", rows), local.pull(ids).numpy())
        shard.push(rows, gradients)
        local.push(ids, gradients)
    assert shard.pushes() == 2


def train_on_ranks(folder, root):
    """Ray started by rank 0; rank 1 lacks batches under model averaging."""
    store = gs.PartitionStore.open(root)
    inputs = gs.WorkerEmbedding(NUM, 16, store.part_offsets, optimizer=gs.SparseAdam(0.05), seed=1)
    trainer, model, dm = fit(folder, root, inputs, devices=2)
    metrics = trainer.test(model, dm, verbose=False)[0]
    rows = inputs.pull(NODES).clone()
    path = trainer.checkpoint_callback.best_model_path
    again = trainer.test(model, dm, ckpt_path=path, verbose=False)[0]
    return metrics, again, rows, inputs.num_pushes


@pytest.mark.slow
def test_two_processes_train_the_rows_of_workers(tmp_path):
    store = write_store(tmp_path / "store")
    ranks = launch(2, train_on_ranks, tmp_path / "run", store.root, limit_s=150)
    start = embedding(store).open().pull(NODES)
    for metrics, again, rows, num_pushes in ranks:
        assert metrics["test_acc"] > 0.75
        assert metrics == again == ranks[0][0]
        assert torch.equal(rows, ranks[0][2])
        assert not torch.equal(rows, start)
        assert num_pushes == ranks[0][3] > 12


def test_a_forked_process_is_told_that_ray_is_not_there(of_workers):
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            of_workers.pull([1])
        except GNNScaleError as error:
            os.write(send, str(error).encode())
        finally:
            os._exit(0)
    os.close(send)
    with open(receive) as told:
        assert "used Ray, which does not survive a fork: use start_method" in told.read()
    os.waitpid(child, 0)
    assert of_workers.pull([1]).shape == (1, 16)


def test_an_address_that_does_not_answer_is_told(store):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = gs.WorkerEmbedding.for_store(store, 4, address=f"127.0.0.1:{port}", timeout_s=1)
    begun = time.monotonic()
    with pytest.raises(GNNScaleError, match=said(f"127.0.0.1:{port} 1")) as caught:
        made.open()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 60
    assert not made.is_open


def test_without_ray_the_extra_is_named(monkeypatch, store):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(GNNScaleError, match=said('WorkerEmbedding "lightning_gnnscale[ray]"')):
        gs.WorkerEmbedding.for_store(store, 4).open()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: e.pull([NUM]), f"nodes [0, {NUM})"),
        (lambda e: e.push([1], np.ones((1, 3))), "gradients (1, 16) (1, 3)"),
        (lambda e: gs.WorkerEmbedding(9, 2, num_workers=0), "num_workers 1 0"),
        (lambda e: gs.WorkerEmbedding(9, 2, pushes_under_way=0), "pushes_under_way 1"),
        (lambda e: gs.WorkerEmbedding(9, 2, timeout_s=0), "timeout_s > 0 0"),
        (lambda e: gs.WorkerEmbedding(9, 2, optimizer="lion"), "optimizer adam sgd"),
    ],
)  # fmt: skip
def test_bad_arguments_are_told(of_workers, call, message):
    with pytest.raises(ValueError, match=said(message)):
        call(of_workers)


# The last test: rows of `of_workers` are gone.
def test_a_worker_that_is_killed_is_told_and_no_rows_are_made_up(tmp_path, of_workers):
    of_workers.settle()
    kept = np.arange(100)  # part 0 is worker 0's
    kept = kept[of_workers._table._ownership.locate(kept)[0] == 0]
    before = of_workers.pull(kept).clone()
    os.kill(ray.get(of_workers._table._actors[1].ping.remote()), signal.SIGKILL)
    message = "worker 1 of 2 that owned rows .* its rows are lost .*: start again from the last checkpoint$"

    def push():
        of_workers.push(NODES, np.ones((NUM, 16)))
        of_workers.settle()

    with pytest.raises(GNNScaleError, match=message) as caught:
        of_workers.pull(NODES)
    assert "\n" not in str(caught.value)
    assert torch.equal(of_workers.pull(kept), before), "rows of the others are there"
    for call in (push, lambda: of_workers.save(tmp_path / "late"), lambda: of_workers.pull(NODES)):
        with pytest.raises(GNNScaleError, match=message):
            call()
