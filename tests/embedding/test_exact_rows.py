"""Learned rows on any number of processes and machines: those of one process, bit for bit, or stale and counted."""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from embedding_runs import NUM, embedding, fit, write_store

import lightning_gnnscale as gs
from lightning_gnnscale.across_ranks import own_ranks
from lightning_gnnscale.embedding.row_exchange import Hosts, Ownership
from lightning_gnnscale.embedding.row_owner import Pushed, RowOwner
from lightning_gnnscale.remote import shard_table
from lightning_gnnscale.remote.shard_keeper import Initial, RowShard, ShardSpec
from lightning_gnnscale.remote.shard_table import ShardHandle, ShardTable
from lightning_gnnscale.rng import fold

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from processes import launch

RANKS, STEPS, DIM, OFFSETS = 4, 12, 6, [0, 60, 60, 200, 290, NUM]
TARGETS = np.random.default_rng(9).normal(size=(NUM, DIM)).astype("f4")


def batches_of(step):
    """The nodes of a step by logical rank: some of each come in every step, so that rows pulled ahead change."""
    rng = np.random.default_rng(step)
    return [
        np.concatenate([rng.choice(NUM, rng.integers(0, 40)), rng.choice(30, 9)]).astype(np.int64) for _ in range(RANKS)
    ]


def learn(inputs, first, stop, own, told=True):
    """Take steps as a module in training does; a batch now and then has no gradients.

    told: the loader tells of coming steps; "wrongly": a process tells of other nodes than it has then, now and then.
    """
    announced = first
    for step in range(first, stop):
        while told and announced < min(stop, step + 1 + inputs.batches_ahead):
            wrong = told == "wrongly" and (announced + min(own, default=0)) % 3 == 1
            inputs.announce([batches_of(announced + wrong)[rank] for rank in own])
            announced += 1
        mine = [batches_of(step)[rank] for rank in own]
        if not mine:
            inputs.skip()
            continue
        inputs.begin([torch.from_numpy(nodes) for nodes in mine])
        for rank, nodes in zip(own, mine, strict=True):
            rows = inputs(torch.from_numpy(nodes))
            if (step + rank) % 4 != 1:
                ((rows - torch.from_numpy(TARGETS[nodes])) ** 3).sum().backward()
            inputs.step()


def learn_on_ranks(folder, hosts, staleness=0, ranks=RANKS, told=True, save=None, saved=None):
    """Half of the steps, or the other half from what was saved; return all rows, counts and what was saved."""
    import torch.distributed as dist

    rank, world = (dist.get_rank(), dist.get_world_size()) if hosts else (0, 1)
    options = {"optimizer": gs.SparseAdam(0.05, bias="step"), "hosts": hosts, "staleness": staleness}
    inputs = gs.DistributedEmbedding(NUM, DIM, OFFSETS, seed=1, **options).join()
    if saved is not None:
        inputs.load(save, saved)
    first, stop = (0, STEPS // 2) if saved is None else (STEPS // 2, STEPS)
    count_what_follows(inputs._rows)
    learn(
        inputs,
        first,
        stop,
        own_ranks(rank, world, ranks) if ranks >= world else range(rank, min(rank + 1, ranks)),
        told,
    )
    kept = None if save is None or saved is not None else inputs.save(save)
    inputs.settle()
    if hosts:
        dist.barrier()
    rows = inputs.pull(np.arange(NUM)).clone()
    return rows, inputs.num_pushes, inputs.told() | {"after": inputs._rows.num_after}, kept


def count_what_follows(rows):
    """Count rows that are stepped while the next step computes, as `rows.num_after`."""
    step, rows.num_after = rows.owner.step, 0

    def counted(pushed, goes_on=False):
        rows.num_after += goes_on * sum(len(one.rows) for one in pushed)
        step(pushed, goes_on)

    rows.owner.step = counted


def rows_of_the_other_host():
    """How many distinct rows the batches of both processes have on the other's host."""
    owned, count = Ownership.by_rank(OFFSETS, [0, 1]), 0
    for step in range(STEPS // 2):
        for process in range(2):
            for rank in own_ranks(process, 2, RANKS):
                count += np.count_nonzero(owned.locate(np.unique(batches_of(step)[rank]))[0] != process)
    return count


@pytest.mark.sweep
@pytest.mark.parametrize("told", [True, False, "wrongly"])
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0], [0, 1, 1]])
def test_rows_are_those_of_one_process(tmp_path, hosts, told):
    """Rows of the other host are pulled a step ahead, and those that a step changes follow it."""
    rows, pushes, _, _ = learn_on_ranks(tmp_path, None)
    assert pushes == STEPS // 2
    received = 0
    for found in launch(len(hosts), learn_on_ranks, tmp_path / "run", hosts, 0, RANKS, told, limit_s=200):
        assert torch.equal(found[0], rows) and found[1] == pushes
        assert (found[2]["rows_stale"], found[2]["greatest_age"]) == (0, 0)
        assert found[2]["bytes_away"] > 0 or len(set(hosts)) == 1
        assert (found[2]["after"] > 0) == (told is not False and len(set(hosts)) > 1)
        received += found[2]["bytes_away"]
    if hosts == [0, 1] and told != "wrongly":  # each row of a batch travels once, and its gradient; at the end all rows
        assert received == 4 * DIM * (2 * rows_of_the_other_host() + NUM)


@pytest.mark.sweep
def test_rows_go_on_with_another_number_of_processes(tmp_path):
    kept = learn_on_ranks(tmp_path, None, save=tmp_path / "rows")
    expected = learn_on_ranks(tmp_path, None, save=tmp_path / "rows", saved=[kept[3]])
    half = launch(2, learn_on_ranks, tmp_path / "two", [0, 1], 0, RANKS, True, tmp_path / "of2", limit_s=200)
    saved = [one[3] for one in half]
    whole = launch(
        3, learn_on_ranks, tmp_path / "three", [0, 1, 2], 0, RANKS, True, tmp_path / "of2", saved, limit_s=200
    )
    assert all(torch.equal(found[0], expected[0]) and found[1] == STEPS for found in whole)


@pytest.mark.sweep
@pytest.mark.parametrize("staleness", [1, 3])
def test_stale_rows_are_bounded_and_counted(tmp_path, staleness):
    found = launch(2, learn_on_ranks, tmp_path, [0, 1], staleness, limit_s=200)
    told = [one[2] for one in found]
    assert sum(one["rows_stale"] for one in told) > 0
    assert max(one["greatest_age"] for one in told) == staleness
    exact = learn_on_ranks(tmp_path, None)[0]
    assert not torch.equal(found[0][0], exact) and torch.allclose(found[0][0], exact, atol=1.0)


def train(folder, root, hosts):
    """Return weights and rows of a run with four logical ranks."""
    store = gs.PartitionStore.open(root)
    inputs = embedding(store, hosts=hosts, optimizer=gs.SparseAdam(0.05, bias="step"))
    _, model, _ = fit(
        folder, root, inputs, gs.GradientAveraging(), epochs=2, devices=1 if hosts is None else len(hosts),
        scope="graph", logical_ranks=RANKS, enable_checkpointing=False, limit_val_batches=0,
    )  # fmt: skip
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, inputs.pull(np.arange(NUM)).clone(), inputs.num_pushes


@pytest.mark.slow
def test_training_with_logical_ranks_is_that_of_one_process(tmp_path):
    store = write_store(tmp_path / "store", num_parts=4)
    weights, rows, pushes = train(tmp_path / "one", store.root, None)
    for found in launch(2, train, tmp_path / "two", store.root, [0, 1], limit_s=400):
        assert pushes == found[2] > 2 and torch.equal(found[1], rows)
        assert all(torch.equal(found[0][name], weights[name]) for name in weights)


class Workers:
    """Stands in for Ray: workers in this process, which answer at once."""

    def __init__(self, made, counts):
        columns, (offsets, owners) = made._columns(), made._owned_by_workers()
        initial = Initial(fold(1, DIM), made.scale)
        spec = ShardSpec("rows", None, 9.0, offsets, owners, 2, columns, made.optimizer, initial, None)
        self.handle = ShardHandle(spec, "here")
        self.shards = [RowShard(*spec.arguments(shard)) for shard in range(2)]
        self.actors = [Asked(shard, counts) for shard in self.shards]


class Asked:
    def __init__(self, shard, counts):
        self._shard, self._counts = shard, counts

    def __getattr__(self, name):
        def remote(*arguments):
            self._counts[name] += 1
            return getattr(self._shard, name)(*arguments)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def workers(monkeypatch):
    """Make rows of workers without Ray: (staleness) -> (`WorkerEmbedding`, requests by name)."""
    monkeypatch.setattr(shard_table, "import_ray", lambda: SimpleNamespace(get=lambda answer, timeout: answer))
    monkeypatch.setattr(ShardTable, "connect", lambda table: table.actors)

    def make(staleness=0, number=1):
        options = {"optimizer": gs.SparseAdam(0.05, bias="step"), "seed": 1, "staleness": staleness}
        made, counts = [gs.WorkerEmbedding(NUM, DIM, OFFSETS, **options) for _ in range(number)], Counter()
        started = Workers(made[0], counts)
        for one in made:
            one._table = ShardTable(started.handle, one.pushes_under_way, staleness)
            one._table.actors = started.actors
            one.open()
        return made, counts

    return make


def test_workers_step_the_rows_of_one_process(tmp_path, workers):
    """A trainer: rows that were pulled ahead are asked for again, and all are those of `DistributedEmbedding`."""
    rows, pushes, _, _ = learn_on_ranks(tmp_path, None)
    ([made], counts) = workers()
    learn(made, 0, STEPS // 2, range(RANKS))
    assert torch.equal(made.pull(np.arange(NUM)), rows) and made.num_pushes == pushes
    assert counts["changed"] > 0 and made.told()["rows_stale"] == 0
    for staleness in (1, 3):
        ([made], _) = workers(staleness)
        learn(made, 0, STEPS // 2, range(RANKS))
        told = made.told()
        assert told["rows_stale"] > 0 and told["greatest_age"] == staleness


def test_a_worker_waits_for_what_every_trainer_pushes(tmp_path, workers, monkeypatch):
    """Two trainers, the later first: a step is that of their logical ranks in order."""
    monkeypatch.setattr(shard_table.dist, "barrier", lambda group: None)
    rows, pushes, _, _ = learn_on_ranks(tmp_path, None)
    made, _ = workers(number=2)
    for rank, one in enumerate(made):
        one._table._hosts = Hosts((0, 0), rank, group="both")
    for step in range(STEPS // 2):
        for rank in (1, 0):
            learn(made[rank], step, step + 1, own_ranks(rank, 2, RANKS), told=False)
            assert made[0].num_pushes == step + (rank == 0)
    assert torch.equal(made[0].pull(np.arange(NUM)), rows) and made[1].num_pushes == pushes


@pytest.mark.parametrize("optimizer", [gs.SparseAdam(0.05, bias="step"), gs.SparseAdam(0.05), gs.SparseSGD(0.5)])
def test_a_step_that_goes_on_with_other_rows_is_one_step(optimizer):
    rng, found = np.random.default_rng(3), []
    steps = [(rng.permutation(30)[:12], rng.normal(size=(12, 4)).astype("f4")) for _ in range(3)]
    for split in (12, 5, 0):
        arrays = {"rows": np.ones((30, 4), "f4"), "moments": np.zeros((30, 8), "f4"), "counts": np.zeros((30, 1), "i4")}
        owner = RowOwner(arrays, optimizer, watched=True)
        for rows, gradients in steps:
            owner.step([Pushed(rows[:split], gradients[:split])])
            if split < 12:
                owner.step([Pushed(rows[split:], gradients[split:], since=owner.clock - 1)], goes_on=True)
        assert (owner.clock, owner.stale_rows) == (3, 0)
        found.append(arrays)
    assert all(np.array_equal(one[name], found[0][name]) for one in found[1:] for name in one)


def test_a_step_adds_up_in_the_order_of_the_ranks_and_counts_what_was_stale():
    """Against plain sums: bits do not depend on who pushed which logical ranks, and ages are steps missed."""
    rng = np.random.default_rng(0)
    pushes = [(rng.permutation(20)[:8], rng.normal(size=(8, 3)).astype("f4") * 10.0**number) for number in range(4)]
    pushes = [(rows, gradients.astype("f4")) for rows, gradients in pushes]
    tables, pushed_rows = [], sorted(set(np.concatenate([rows for rows, _ in pushes]).tolist()))
    for split in ([4], [1, 3], [2, 1, 1]):
        table = np.zeros((20, 3), "f4")
        owner, at, given = RowOwner({"rows": table}, gs.SparseSGD(1.0), clock=5, watched=True), 0, []
        for count in split:
            own = pushes[at : at + count]
            given.append(Pushed(np.concatenate([rows for rows, _ in own]), np.concatenate([one for _, one in own])))
            at += count
        owner.step(given)
        tables.append(table)
        assert owner.clock == 6 and owner.changed(np.arange(20), 5).tolist() == pushed_rows
        assert len(owner.changed(np.arange(20), 6)) == owner.stale_rows == 0
    expected = np.zeros((20, 3), "f4")
    for rows, gradients in pushes:
        expected[rows] += gradients
    assert all(np.array_equal(table, -expected) for table in tables)
    row, gradient = np.array(pushed_rows[:1]), np.ones((1, 3), "f4")
    owner.step([Pushed(row, gradient, since=6)])
    owner.step([Pushed(row, gradient, since=5), Pushed(np.array([19]), gradient, since=7)])
    assert (owner.stale_rows, owner.greatest_age) == (1, 2)
