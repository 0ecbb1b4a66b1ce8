"""Sums over logical ranks: one order, whatever the number of processes; what a process adds up by itself."""

from contextvars import ContextVar
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.across_ranks import own_ranks
from lightning_gnnscale.strategy.weights import tree_sum
from lightning_gnnscale.strategy.weights.tree_sum import TreeSum, fold, subtrees


def tree(start, stop):
    """The tree by its definition: the left half of a range is the largest power of two below its length."""
    if stop - start == 1:
        return start
    half = 1 << (stop - start - 1).bit_length() - 1
    return tree(start, start + half), tree(start + half, stop)


@given(count=st.integers(1, 40), processes=st.integers(1, 40))
def test_what_processes_add_up_joins_into_the_one_tree(count, processes):
    processes = min(count, processes)
    shares = [own_ranks(rank, processes, count) for rank in range(processes)]
    assert [rank for share in shares for rank in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    joined = []
    for share in shares:
        own = []
        for rank in share:
            fold(own, (rank, rank + 1, rank), count, lambda left, right: (left, right))
        assert [item[:2] for item in own] == subtrees(share, count)
        for item in own:
            fold(joined, item, count, lambda left, right: (left, right))
    assert joined == [(0, count, tree(0, count))]


def test_powers_of_two_leave_one_subtree_a_process():
    for processes in (1, 2, 4, 8):
        assert all(len(subtrees(own_ranks(rank, processes, 8), 8)) == 1 for rank in range(processes))


class Processes:
    """Processes one after another: what they send is kept, until all have sent."""

    def __init__(self, monkeypatch, number):
        self.rank, self.number, self.sent = ContextVar("rank", default=0), number, {}
        monkeypatch.setattr(tree_sum.averaging, "rank", self.rank.get)
        monkeypatch.setattr(tree_sum.averaging, "world_size", lambda: number)
        monkeypatch.setattr(tree_sum, "dist", SimpleNamespace(**{
            name: getattr(self, f"_{name}") for name in ("all_reduce", "all_to_all_single", "all_gather")
        }))  # fmt: skip

    def total(self, tensors):
        sums = []
        for rank in range(self.number):
            self.rank.set(rank)
            sums.append(TreeSum(len(tensors)))
            for number in own_ranks(rank, self.number, len(tensors)):
                sums[-1].add(tensors[number].clone())
        for step in ("send", "spread", "total"):
            results = []
            for rank, one in enumerate(sums):
                self.rank.set(rank)
                results.append(getattr(one, step)())
        return results

    def _later(self, name, given, deliver):
        self.sent.setdefault(name, []).append(given)
        return SimpleNamespace(wait=lambda: deliver(self.sent[name]))

    def _all_reduce(self, tensor, async_op):
        def deliver(sent):
            tensor.copy_(sum(sent[1:], sent[0]))

        return self._later("reduce", tensor.clone(), deliver)

    def _all_to_all_single(self, out, given, coming, leaving, async_op):
        rank = self.rank.get()

        def deliver(sent):
            out.copy_(torch.cat([chunks[rank] for chunks in sent]))
            assert [len(chunks[rank]) for chunks in sent] == coming

        return self._later("slices", given.clone().split(leaving), deliver)

    def _all_gather(self, out, given, async_op):
        def deliver(sent):
            for place, chunk in zip(out, sent, strict=True):
                place.copy_(chunk)

        return self._later("gather", given.clone(), deliver)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_the_sum_has_the_same_bits_on_any_number_of_processes(monkeypatch, count):
    rng = np.random.default_rng(count)
    # Sizes far apart, so that every other order of adding gives other bits.
    tensors = [torch.from_numpy(rng.normal(size=37).astype(np.float32) * 10.0 ** rng.integers(-6, 6, 37).astype(
        np.float32)) for _ in range(count)]  # fmt: skip

    def added(item):
        return tensors[item] if isinstance(item, int) else added(item[0]) + added(item[1])

    expected = added(tree(0, count))
    if count > 2:
        in_turn = sum(tensors[1:], tensors[0])
        assert count == 3 or not torch.equal(expected, in_turn)
    for processes in range(1, count + 1):
        for total in Processes(monkeypatch, processes).total(tensors):
            assert torch.equal(total, expected), processes
