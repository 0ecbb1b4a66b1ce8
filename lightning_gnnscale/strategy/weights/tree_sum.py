"""Sums over logical ranks in an order that depends on the logical ranks alone, whoever computes them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...across_ranks import own_ranks
from .. import averaging

Partial = tuple[int, int, Any]  # start, stop: the logical ranks of a sum; the sum


def fold(partial: list[Partial], item: Partial, count: int, add: Callable[[Any, Any], Any]) -> None:
    """Append a sum to those to its left, and join what the tree joins, in place.

    The tree over logical ranks 0 to count - 1 joins the ranges [start, start + size) and [start + size, start + 2 size)
    for every power of two `size` and every multiple `start` of 2 size; the last range may be shorter.
    """
    while partial:
        (start, middle, left), (_, stop, right) = partial[-1], item
        size = middle - start
        if size & (size - 1) or start % (2 * size) or stop != min(start + 2 * size, count):
            break
        partial.pop()
        item = start, stop, add(left, right)
    partial.append(item)


def subtrees(ranks: range, count: int) -> list[tuple[int, int]]:
    """Return the largest ranges within some logical ranks that the tree over `count` of them adds up by themselves."""
    partial: list[Partial] = []
    for rank in ranks:
        fold(partial, (rank, rank + 1, None), count, lambda left, right: None)
    return [(start, stop) for start, stop, _ in partial]


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


class TreeSum:
    """The sum over all logical ranks of a tensor of each, the same bits on every process and for any number of them.

    A process adds up whole subtrees of its own. Two terms that are left commute, so an all-reduce adds them; more are
    sent in slices, of which each process adds up one in the tree's order.

    Args:
        count: Logical ranks, at least as many as processes.
        in_order: False leaves the order of what is left to the process group.

    Cost: One copy of the tensor, and one more for every doubling of the logical ranks of a process, while they are
        added. On the wire as much as an all-reduce, times the subtrees of a process: one where the number of processes
        divides the logical ranks into powers of two.
    """

    def __init__(self, count: int, in_order: bool = True):
        self._count, self._partial, self._in_order = count, [], in_order
        self._own = own_ranks(averaging.rank(), averaging.world_size(), count)
        self._added, self._work, self._received, self.num_bytes = 0, None, None, 0

    def add(self, values: Tensor) -> None:
        """Add the tensor of the next logical rank of this process, which is changed in place."""
        rank = self._own[self._added]
        self._added += 1
        fold(self._partial, (rank, rank + 1, values), self._count, _add)

    def send(self) -> None:
        """Begin to send what this process has added up; every process calls it, for tensors in one order."""
        processes = averaging.world_size()
        if processes == 1:
            return
        shares = [subtrees(own_ranks(rank, processes, self._count), self._count) for rank in range(processes)]
        sums = [values for _, _, values in self._partial]
        if not self._in_order or sum(map(len, shares)) == 2:
            for values in sums[1:]:
                sums[0].add_(values)
            self._partial = [(0, self._count, sums[0])]
            self._work = dist.all_reduce(sums[0], async_op=True)
            self.num_bytes += sums[0].numel() * sums[0].element_size()
            return
        self._send_slices(shares, torch.stack(sums))

    def _send_slices(self, shares: list[list[tuple[int, int]]], sums: Tensor) -> None:
        processes, (num_sums, self._length) = len(shares), sums.shape
        size = -(-self._length // processes)
        padded = torch.nn.functional.pad(sums, (0, processes * size - self._length))
        leaving = padded.view(num_sums, processes, size).transpose(0, 1).contiguous().view(-1)
        coming = [len(share) * size for share in shares]
        self._received = leaving.new_empty(sum(coming))
        self._work = dist.all_to_all_single(
            self._received, leaving, coming, [num_sums * size] * processes, async_op=True
        )
        self._shares, self._size = shares, size
        # What leaves this process: the others' slices of its sums, and then its own slice of the total to each of them.
        self.num_bytes += (num_sums + 1) * (processes - 1) * size * leaving.element_size()

    def spread(self) -> None:
        """Add up this process's slice, once it is there, and begin to send it to all; call it before `total`."""
        if self._work is not None:
            self._work.wait()
        if self._received is None:
            return
        partial: list[Partial] = []
        slices = iter(self._received.split(self._size))
        for share in self._shares:
            for start, stop in share:
                fold(partial, (start, stop, next(slices)), self._count, _add)
        ((_, _, mine),) = partial
        whole = mine.new_empty(len(self._shares) * self._size)
        self._work = dist.all_gather(list(whole.split(self._size)), mine, async_op=True)
        self._partial = [(0, self._count, whole)]

    def total(self) -> Tensor:
        """Return the sum."""
        ((_, _, values),) = self._partial
        if self._received is None:
            return values
        self._work.wait()
        return values[: self._length]


def tree_sum(tensors: list[Tensor], count: int, what: str) -> tuple[Tensor, int]:
    """Return the sum over all logical ranks of one flat tensor of each, and the bytes that this process sent.

    Args:
        tensors: Those of this process's logical ranks in order; changed in place.
        count: Logical ranks.
        what: What is being done, for the error.

    Raises:
        StrategyError: another process was lost.
    """
    tree = TreeSum(count)
    for values in tensors:
        tree.add(values)
    with averaging.clear_error(what):
        tree.send()
        tree.spread()
        return tree.total(), tree.num_bytes
