"""Sparse optimizers: a step of a few rows of a table, in place, by compiled loops that release the interpreter lock."""

from dataclasses import dataclass

import numpy as np

from ..errors import short
from ..jit import kernel
from ..rng import mix64
from ..triton_kernels.intrinsics import prefetch_line

AHEAD_ROWS = 4  # rows between a prefetch and its use
LINE_ITEMS = 16


@dataclass
class SparseSGD:
    """w -= lr g on the rows that have a gradient, as `torch.optim.SGD` on sparse gradients.

    Attributes:
        lr: > 0.

    Raises:
        ValueError: lr is not positive.
    """

    lr: float = 0.1

    num_moments = 0  # arrays of a row's width that are kept beside it

    def __post_init__(self):
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr must be > 0, got {self.lr}")

    def apply(self, rows, gradients, table, moments, counts, step) -> None:
        """Step; see `SparseAdam.apply`."""
        sgd_rows(rows, gradients, table, self.lr)


@dataclass
class SparseAdam:
    """Adam on the rows that have a gradient; the moments of other rows stay as they are.

    Attributes:
        lr: Learning rate, > 0.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the square root of the second moment, > 0.
        bias: "row": a row's bias correction depends on how often the row was pushed, so it does not depend on what
            other processes push meanwhile (as in DGL). "step": it depends on the number of pushes of the whole table,
            as in `torch.optim.SparseAdam`; if several processes push at once, a few pushes may go uncounted.

    Raises:
        ValueError: an argument outside its range.
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    bias: str = "row"

    num_moments = 2

    def __post_init__(self):
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr must be > 0, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {self.betas}")
        if not self.eps > 0:
            raise ValueError(f"optimizer.eps must be > 0, got {self.eps}")
        if self.bias not in ("row", "step"):
            raise ValueError(f'optimizer.bias must be "row" or "step", got {short(self.bias)}')

    def apply(self, rows, gradients, table, moments, counts, step) -> None:
        """Update some rows of a table by one step.

        Args:
            rows: (num,) int64 distinct rows of the table.
            gradients: (num, dim) of the table's dtype, C-contiguous.
            table: (num_rows, dim), changed in place.
            moments: (num_rows, num_moments * dim), changed in place.
            counts: (num_rows, 1) int32 steps of each row, changed in place.
            step: Number of the step of the whole table, from 1.
        """
        step = 0 if self.bias == "row" else step
        adam_rows(rows, gradients, table, moments, counts, step, self.lr, *self.betas, self.eps)


OPTIMIZERS = {"adam": SparseAdam, "sgd": SparseSGD}


@kernel
def sgd_rows(rows, gradients, table, lr):
    """Step of `SparseSGD`."""
    flat, dim = table.reshape(-1), table.shape[1]
    rate = table.dtype.type(lr)
    for i in range(len(rows)):
        if i + AHEAD_ROWS < len(rows):
            coming = rows[i + AHEAD_ROWS] * dim
            for at in range(0, dim, LINE_ITEMS):
                prefetch_line(flat, coming + at)
        row = rows[i]
        for column in range(dim):
            table[row, column] -= rate * gradients[i, column]


@kernel(error_model="numpy")
def adam_rows(rows, gradients, table, moments, counts, step, lr, beta1, beta2, eps):
    """Step of `SparseAdam`; step 0: by the count of each row."""
    dim = table.shape[1]
    flat, flat_moments = table.reshape(-1), moments.reshape(-1)
    kind = table.dtype.type
    rest1, rest2, small = kind(1 - beta1), kind(1 - beta2), kind(eps)
    for i in range(len(rows)):
        if i + AHEAD_ROWS < len(rows):
            coming = rows[i + AHEAD_ROWS] * dim
            for at in range(0, dim, LINE_ITEMS):
                prefetch_line(flat, coming + at)
            for at in range(0, 2 * dim, LINE_ITEMS):
                prefetch_line(flat_moments, 2 * coming + at)
        row = rows[i]
        counts[row, 0] += 1
        t = step if step > 0 else counts[row, 0]
        size = kind(lr * np.sqrt(1 - beta2**t) / (1 - beta1**t))
        for column in range(dim):
            gradient = gradients[i, column]
            first = moments[row, column]
            first += (gradient - first) * rest1
            second = moments[row, dim + column]
            second += (gradient * gradient - second) * rest2
            moments[row, column] = first
            moments[row, dim + column] = second
            table[row, column] -= size * first / (np.sqrt(second) + small)


def sum_duplicates(nodes: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct nodes, in order of their first places, and the sums of their gradients.

    Args:
        nodes: (num,) int64 >= 0.
        gradients: (num, dim), returned itself where no node comes twice.

    Cost: 4 to 8 bytes of scratch a node, and a random read of it.
    """
    target, num_distinct = number_distinct(nodes)
    if num_distinct == len(nodes):
        return nodes, gradients
    sums = np.zeros((num_distinct, gradients.shape[1]), gradients.dtype)
    distinct = np.empty(num_distinct, np.int64)
    add_rows(nodes, gradients, target, distinct, sums)
    return distinct, sums


def number_distinct(nodes: np.ndarray) -> tuple[np.ndarray, int]:
    """Return (num,) int64 numbers of the distinct nodes by their first places, and how many there are."""
    slots = np.zeros(1 << max(4, int(2 * len(nodes)).bit_length()), np.int32)
    target = np.empty(len(nodes), np.int64)
    return target, find_distinct(nodes, slots, target)


@kernel
def find_distinct(nodes, slots, target):
    """Number the distinct (num,) int64 nodes by their first places, into target, and return how many there are.

    slots: zeros, a power of two of them, more than num: the hash table.
    """
    mask, count = np.uint64(len(slots) - 1), 0
    for i in range(len(nodes)):
        slot = np.int64(mix64(np.uint64(nodes[i])) & mask)
        while slots[slot] != 0 and nodes[slots[slot] - 1] != nodes[i]:
            slot = (slot + 1) & np.int64(mask)
        if slots[slot] == 0:
            slots[slot] = i + 1
            target[i] = count
            count += 1
        else:
            target[i] = target[slots[slot] - 1]
    return count


@kernel
def add_rows(nodes, gradients, target, distinct, sums):
    """Sum the gradients of each node into sums, which is zero."""
    for i in range(len(nodes)):
        distinct[target[i]] = nodes[i]
        for column in range(gradients.shape[1]):
            sums[target[i], column] += gradients[i, column]
