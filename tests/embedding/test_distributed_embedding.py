"""Pull and push in one process: against torch's sparse optimizers, and what is refused."""

import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.embedding.optimizers import sum_duplicates
from lightning_gnnscale.errors import PartitionStoreError, PlacementError
from lightning_gnnscale.rng import GOLDEN, combine_array, fold, mix64_array
from tests.says import said
from tests.tiers import each_value

NUM, DIM = 200, 12
STEPS = 25


def torch_trained(start, optimizer, batches):
    table = torch.nn.Embedding(NUM, DIM, sparse=True, dtype=start.dtype)
    table.weight.data[:] = start
    made = optimizer(table.parameters())
    for nodes, target in batches:
        made.zero_grad()
        loss(table(nodes), target).backward()
        made.step()
    return table.weight.detach()


def loss(rows, target):
    return (rows * target).sum() + (rows**2).mean()


def batches_of(dtype, seed=0, steps=STEPS, all_nodes=False):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        nodes = torch.randint(0, NUM, (60,), generator=generator)
        nodes = torch.arange(NUM) if all_nodes else nodes
        yield nodes, torch.randn(len(nodes), DIM, generator=generator, dtype=dtype)


ORACLES = {
    "sgd": (gs.SparseSGD(lr=0.1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), False),
    "adam": (
        gs.SparseAdam(lr=0.02, bias="step"),
        lambda parameters: torch.optim.SparseAdam(parameters, lr=0.02),
        False,
    ),
    "adam by row": (gs.SparseAdam(lr=0.02), lambda parameters: torch.optim.SparseAdam(parameters, lr=0.02), True),
    "adam betas": (
        gs.SparseAdam(lr=0.02, betas=(0.5, 0.9), eps=1e-3, bias="step"),
        lambda parameters: torch.optim.SparseAdam(parameters, lr=0.02, betas=(0.5, 0.9), eps=1e-3),
        False,
    ),
}


@each_value
@pytest.mark.parametrize("name", list(ORACLES))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_training_equals_torchs_sparse_optimizers(name, dtype):
    optimizer, of_torch, all_nodes = ORACLES[name]
    kind = getattr(torch, dtype)
    embedding = gs.DistributedEmbedding(NUM, DIM, optimizer=optimizer, dtype=dtype, seed=4).open()
    start = embedding.pull(np.arange(NUM)).clone()
    expected = torch_trained(start, of_torch, batches_of(kind, all_nodes=all_nodes))
    for nodes, target in batches_of(kind, all_nodes=all_nodes):
        loss(embedding(nodes), target).backward()
        embedding.step()
    trained = embedding.pull(np.arange(NUM))
    assert (trained - start).abs().max() > 0.1
    # A step rounds a few times, by one unit in the last place of values of about 1 each; steps add up.
    assert (trained - expected).abs().max() <= 8 * STEPS * torch.finfo(kind).eps
    assert embedding.num_pushes == STEPS


def test_rows_that_are_not_pushed_stay_bit_for_bit():
    embedding = gs.DistributedEmbedding(NUM, DIM).open()
    start = embedding.pull(np.arange(NUM)).clone()
    embedding.push([3, 5, 3], np.ones((3, DIM)))
    changed = (embedding.pull(np.arange(NUM)) != start).any(dim=1).nonzero().flatten()
    assert changed.tolist() == [3, 5]


@pytest.mark.parametrize("num,ids", [(0, 1), (1, 1), (500, 3), (500, 400), (300, 1 << 40)])
def test_gradients_of_a_node_are_added_up_first(num, ids):
    rng = np.random.default_rng(num)
    nodes, gradients = rng.integers(0, ids, num), rng.normal(size=(num, 5))
    expected = {}
    for node, gradient in zip(nodes.tolist(), gradients, strict=True):
        expected[node] = expected.get(node, 0) + gradient
    distinct, sums = sum_duplicates(nodes, gradients)
    assert distinct.tolist() == list(expected)
    assert all(np.array_equal(one, other) for one, other in zip(sums, expected.values(), strict=True))


def test_initial_values_go_by_the_node_alone():
    whole = gs.DistributedEmbedding(NUM, DIM, seed=3).open().pull(np.arange(NUM))
    in_parts = gs.DistributedEmbedding(NUM, DIM, [0, 7, 7, 120, NUM], seed=3).open().pull(np.arange(NUM))
    assert torch.equal(whole, in_parts)
    order = np.random.default_rng(0).permutation(NUM)
    relabelled = gs.DistributedEmbedding(NUM, DIM, seed=3, node_keys=order).open().pull(np.arange(NUM))
    assert torch.equal(relabelled, whole[order])
    assert not torch.equal(whole, gs.DistributedEmbedding(NUM, DIM, seed=4).open().pull(np.arange(NUM)))
    assert whole.abs().max() <= (3 / DIM) ** 0.5
    assert abs(whole.double().pow(2).sum(dim=1).mean() - 1) < 0.05


def test_initial_values_are_those_of_the_generator():
    embedding = gs.DistributedEmbedding(9, 3, seed=7, scale=2.0, dtype="float64").open()
    keys = combine_array(fold(7, 3), np.arange(9))
    halves = []
    for pair in range(2):
        random = mix64_array(keys + np.uint64(pair) * GOLDEN)
        halves += [random >> np.uint64(32), random & np.uint64(0xFFFFFFFF)]
    expected = np.stack([(half.astype(float) / 2**31 - 1) * 2.0 for half in halves[:3]], axis=1)
    assert np.array_equal(embedding.pull(np.arange(9)).numpy(), expected)


def test_memory_is_told_before_it_is_taken():
    assert gs.DistributedEmbedding(1000, 16).nbytes == 1000 * (3 * 16 * 4 + 4)
    assert gs.DistributedEmbedding(1000, 16, optimizer="sgd").nbytes == 1000 * 16 * 4
    huge = gs.DistributedEmbedding(1 << 40, 128, optimizer="sgd")
    with pytest.raises(PlacementError, match=said("1099511627776 512 TiB")):
        huge.open()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: e.pull([0, NUM]), f"nodes [0, {NUM}) 0 {NUM}"),
        (lambda e: e.pull([-1]), f"nodes [0, {NUM}) -1 -1"),
        (lambda e: e.pull([0.5]), "nodes float64"),
        (lambda e: e.push([NUM], np.ones((1, DIM))), f"nodes [0, {NUM})"),
        (lambda e: e.push([1], np.ones((1, DIM + 1))), f"gradients (1, {DIM})"),
        (lambda e: e.push([1, 2], np.ones((1, DIM))), f"gradients (2, {DIM}) (1, {DIM})"),
        (lambda e: gs.DistributedEmbedding(0, 1), "num_nodes 1 0"),
        (lambda e: gs.DistributedEmbedding(1, 2.5), "dim 1 2.5"),
        (lambda e: gs.DistributedEmbedding(9, 2, [0, 8]), "part_offsets num_nodes 9 8"),
        (lambda e: gs.DistributedEmbedding(9, 2, [0, 8, 7, 9]), "part_offsets 0"),
        (lambda e: gs.DistributedEmbedding(9, 2, optimizer="lion"), "optimizer adam sgd"),
        (lambda e: gs.DistributedEmbedding(9, 2, dtype="float16"), "dtype float32 float64 'float16'"),
        (lambda e: gs.DistributedEmbedding(9, 2, node_keys=[1]), "node_keys 9 1"),
        (lambda e: gs.DistributedEmbedding(9, 2, scale=-1), "scale >= 0"),
        (lambda e: gs.SparseAdam(lr=0), "optimizer.lr > 0 0"),
        (lambda e: gs.SparseAdam(betas=(0.9, 1)), "optimizer.betas two"),
        (lambda e: gs.SparseAdam(eps=0), "optimizer.eps > 0"),
        (lambda e: gs.SparseAdam(bias="none"), "optimizer.bias"),
        (lambda e: gs.SparseSGD(lr=-1), "optimizer.lr > 0 -1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_told_in_one_line(call, message):
    embedding = gs.DistributedEmbedding(NUM, DIM).open()
    before = embedding.pull(np.arange(NUM)).clone()
    with pytest.raises(ValueError, match=said(message)) as caught:
        call(embedding)
    assert "\n" not in str(caught.value)
    assert torch.equal(embedding.pull(np.arange(NUM)), before)


def test_rows_that_are_not_open_are_told():
    with pytest.raises(PlacementError, match=said("rows memory open() join() rank")):
        gs.DistributedEmbedding(4, 2).pull([1])


def trained(optimizer="adam", steps=4):
    embedding = gs.DistributedEmbedding(NUM, DIM, optimizer=optimizer).open()
    for nodes, target in batches_of(torch.float32, steps=steps):
        loss(embedding(nodes), target).backward()
        embedding.step()
    return embedding


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_saved_rows_go_on_as_if_nothing_had_happened(tmp_path, optimizer):
    one = trained(optimizer)
    saved = [one.save(tmp_path / "rows")]
    other = gs.DistributedEmbedding(NUM, DIM, [0, 50, NUM], optimizer=optimizer, seed=9).open()
    other.load(tmp_path / "rows", saved)
    for nodes, target in batches_of(torch.float32, seed=1):
        for embedding in (one, other):
            loss(embedding(nodes), target).backward()
            embedding.step()
    assert torch.equal(one.pull(np.arange(NUM)), other.pull(np.arange(NUM)))
    assert other.num_pushes == one.num_pushes == 4 + STEPS


def test_files_that_are_missing_or_damaged_are_told(tmp_path):
    embedding = trained()
    saved = [embedding.save(tmp_path)]
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(PartitionStoreError, match=said(f"{NUM} {DIM} <f4 {NUM} 3 <f4")):
        gs.DistributedEmbedding(NUM, 3).open().load(tmp_path, saved)
    path = next(tmp_path.glob("rows-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(PartitionStoreError, match="damaged"):
        embedding.load(tmp_path, saved)
    path.unlink()
    with pytest.raises(PartitionStoreError, match=said("missing checkpoint")):
        embedding.load(tmp_path, saved)
    saved[0]["files"] = [entry for entry in saved[0]["files"] if entry["array"] != "rows"]
    with pytest.raises(PartitionStoreError, match=said(f"{NUM} 0 {NUM}")):
        embedding.load(tmp_path, saved)
