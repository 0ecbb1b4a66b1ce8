"""Rows as they were last sent: the same state at the sender and at every receiver."""

import torch
from torch import Tensor


class HeldRows:
    """What receivers hold of some rows, moved on to any epoch.

    Sender and receivers make the same changes in the same order, so that they hold the same bits.

    Args:
        num_rows, width: of the rows; they begin at 0.
        like: a tensor whose dtype and device are taken.
        extrapolate: rows go on along their last change, in proportion to the epochs since.

    Cost: num_rows x width values; twice that, and 8 bytes a row, to extrapolate.
    """

    def __init__(self, num_rows: int, width: int, like: Tensor, extrapolate: bool):
        self._values = like.new_zeros((num_rows, width))
        self._slopes = like.new_zeros((num_rows, width)) if extrapolate else None
        self._versions = torch.full((num_rows,), -1, device=like.device) if extrapolate else None

    @property
    def nbytes(self) -> int:
        tensors = [self._values, self._slopes, self._versions]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def at(self, epoch: int, rows: Tensor | None = None) -> Tensor:
        """Return rows as they stand in an epoch: a copy, except of all rows where they are held as they came.

        Args:
            epoch: not before any in which rows were stored.
            rows: (num,) int64, or None: all.
        """
        values = self._values if rows is None else self._values.index_select(0, rows)
        if self._slopes is None:
            return values
        chosen = slice(None) if rows is None else rows
        age = (epoch - self._versions[chosen]).unsqueeze(1).to(values.dtype)
        return values + self._slopes[chosen] * age

    def store(self, values: Tensor, epoch: int, rows: Tensor | None = None) -> None:
        """Replace rows (None: all) by (num, width) values that were sent in an epoch."""
        chosen = slice(None) if rows is None else rows
        if self._slopes is not None:
            age = (epoch - self._versions[chosen]).unsqueeze(1)
            known = (self._versions[chosen] >= 0).unsqueeze(1) & (age > 0)
            change = (values - self._values[chosen]) / age.clamp(min=1).to(values.dtype)
            self._slopes[chosen] = torch.where(known, change, torch.zeros_like(change))
            self._versions[chosen] = epoch
        self._values[chosen] = values
