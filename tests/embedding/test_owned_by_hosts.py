"""Ranks on one host and on simulated hosts: pulls equal indexing, pushes equal one table, and no push is lost."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_gnnscale as gs

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from processes import launch

from tests.tiers import first

NUM, DIM = 150, 6
OFFSETS = [0, 31, 31, 90, 97, NUM]
HOSTS = {"one host": (2, None), "two hosts": (2, [5, 3]), "two and one": (3, [0, 0, 1]), "four": (4, [0, 1, 0, 1])}


def requests(rank, step):
    """Nodes and gradients of a rank; now and then none."""
    rng = np.random.default_rng((rank, step))
    nodes = rng.integers(0, NUM, 0 if (rank + step) % 3 == 0 else 40)
    return nodes, rng.normal(size=(len(nodes), DIM))


def push_and_pull(folder, hosts, offsets, optimizer):
    import torch.distributed as dist

    rank = dist.get_rank()
    embedding = gs.DistributedEmbedding(NUM, DIM, offsets, optimizer, dtype="float64", hosts=hosts, seed=1).join()
    pulled = []
    for step in range(5):
        nodes, gradients = requests(rank, step)
        pulled.append(embedding.pull(nodes).clone())
        dist.barrier()
        embedding.push(nodes, gradients)
        dist.barrier()
    whole = embedding.pull(np.arange(NUM)).clone()
    own = {ids.start: rows.copy() for ids, rows in embedding.rows_here()}
    embedding.join()  # as a second run of the Trainer does
    again = embedding.pull(np.arange(NUM))
    return pulled, whole, own, torch.equal(whole, again), embedding.nbytes, embedding.received_bytes


@first(1)
@pytest.mark.parametrize("case", list(HOSTS))
@pytest.mark.parametrize("offsets", [OFFSETS, None])
def test_ranks_see_one_table(tmp_path, case, offsets):
    world, hosts = HOSTS[case]
    if offsets is None and case != "two and one":
        pytest.skip("ranges by host are the same for every grouping")
    table = gs.DistributedEmbedding(NUM, DIM, optimizer=gs.SparseSGD(0.1), dtype="float64", seed=1).open()
    expected = []
    for step in range(5):
        expected.append([table.pull(requests(rank, step)[0]).clone() for rank in range(world)])
        for rank in range(world):
            table.push(*requests(rank, step))
    whole = table.pull(np.arange(NUM))
    ranks = launch(world, push_and_pull, tmp_path, hosts, offsets, gs.SparseSGD(0.1), limit_s=90)
    covered = np.zeros(NUM, int)
    for rank, (pulled, seen, own, kept, _, received) in enumerate(ranks):
        # Sums of the same gradients in another order.
        for one, other in zip(pulled, expected, strict=True):
            assert torch.allclose(one, other[rank], rtol=0, atol=1e-13)
        assert torch.allclose(seen, whole, rtol=0, atol=1e-13)
        assert torch.equal(seen, ranks[0][1])
        assert received > 0
        assert kept
        for start, rows in own.items():
            covered[start : start + len(rows)] += 1
            assert np.array_equal(rows, seen[start : start + len(rows)].numpy())
    assert (covered == 1).all()
    by_host = {host: ranks[rank][4] for rank, host in enumerate(hosts or [0] * world)}
    assert sum(by_host.values()) == NUM * DIM * 8


def push_own_rows(folder, optimizer):
    """Each rank pushes rows of its own, all at once: a row beside another rank's row, in the same cache line."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    embedding = gs.DistributedEmbedding(NUM, 3, optimizer=optimizer, seed=2).join()
    mine = np.arange(rank, NUM, world)
    rng = np.random.default_rng(rank)
    for _ in range(300):
        chosen = rng.permutation(mine)[:20]
        embedding.push(chosen, rng.normal(size=(20, 3)))
    dist.barrier()
    return embedding.pull(np.arange(NUM)).clone()


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", [gs.SparseAdam(0.01), gs.SparseSGD(0.1)])
def test_no_update_is_lost_of_rows_that_no_other_process_pushes(tmp_path, optimizer):
    alone = gs.DistributedEmbedding(NUM, 3, optimizer=optimizer, seed=2).open()
    for rank in range(3):
        rng = np.random.default_rng(rank)
        for _ in range(300):
            chosen = rng.permutation(np.arange(rank, NUM, 3))[:20]
            alone.push(chosen, rng.normal(size=(20, 3)))
    expected = alone.pull(np.arange(NUM))
    for table in launch(3, push_own_rows, tmp_path, optimizer, limit_s=90):
        assert torch.equal(table, expected)


def learn_targets(folder):
    """All ranks push all rows, towards the same targets."""
    import torch.distributed as dist

    targets = torch.from_numpy(np.random.default_rng(9).normal(size=(NUM, DIM)).astype("f4"))
    embedding = gs.DistributedEmbedding(NUM, DIM, optimizer=gs.SparseAdam(0.05)).join()
    rng = np.random.default_rng(dist.get_rank())
    for _ in range(600):
        nodes = torch.from_numpy(rng.integers(0, NUM, 50))
        ((embedding(nodes) - targets[nodes]) ** 2).sum().backward()
        embedding.step()
    dist.barrier()
    return float((embedding.pull(np.arange(NUM)) - targets).abs().max())


@pytest.mark.sweep
def test_rows_that_all_push_converge(tmp_path):
    start = np.random.default_rng(9).normal(size=(NUM, DIM))
    assert np.abs(start).max() > 2
    assert max(launch(2, learn_targets, tmp_path, limit_s=90)) < 0.1


def save_rows(folder, target):
    embedding = gs.DistributedEmbedding(NUM, DIM, OFFSETS, hosts=[0, 1, 1], seed=5).join()
    nodes, gradients = requests(1, 0)
    embedding.push(nodes, gradients)
    return embedding.save(target), embedding.pull(np.arange(NUM)).clone()


def load_rows(folder, source, saved):
    embedding = gs.DistributedEmbedding(NUM, DIM, None, hosts=[0, 1], seed=6).join()
    embedding.load(source, saved)
    return embedding.pull(np.arange(NUM)).clone()


@pytest.mark.sweep
def test_saved_rows_are_read_under_another_sharding(tmp_path):
    ranks = launch(3, save_rows, tmp_path / "save", tmp_path / "rows", limit_s=90)
    saved = [one for one, _ in ranks]
    ids = sorted((e["start"], e["stop"]) for one in saved for e in one["files"] if e["array"] == "rows")
    assert ids[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(ids)) and ids[-1][1] == NUM
    assert all(one["files"] for one in saved), "every rank writes its share"
    for table in launch(2, load_rows, tmp_path / "load", tmp_path / "rows", saved, limit_s=90):
        assert torch.equal(table, ranks[0][1])
