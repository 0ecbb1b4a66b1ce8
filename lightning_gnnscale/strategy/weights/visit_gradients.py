"""Gradient accumulation by visit: windows begin with a part's first batch, and none reaches into another part."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .accumulated import load_gradients, saved_gradients
from .policy import Step


class VisitGradients:
    """Accumulates the gradients of one optimizer over the batches of a visit.

    Lightning counts windows over a rank's epoch and zeroes gradients by that count; what was accumulated is therefore
    put aside while a batch is computed, and added afterwards.

    Attributes:
        pending: batches accumulated since the last step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.pending = 0

    def accumulate(self, closure: Callable[[], Any]) -> Any:
        """Run a batch's closure and add its gradients to those that wait; return what the closure returns."""
        waiting = [parameter.grad if self.pending else None for parameter in self._parameters()]
        self._clear()
        output = closure()
        for parameter, gradient in zip(self._parameters(), waiting, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self.pending += 1
        return output

    def step(self, step: Step) -> None:
        """Turn the gradients that wait into an optimizer step (clipping and hooks included)."""
        # Precision plugins take None for a batch without a loss, and then leave the gradients unused.
        step(self._optimizer, lambda: torch.zeros(()))
        self.drop()

    def drop(self) -> None:
        """Forget the gradients that wait."""
        self._clear()
        self.pending = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that wait, on the CPU, and the batches that they are of."""
        return {"batches": self.pending, "gradients": saved_gradients(self._optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the gradients of a `state_dict` wait."""
        load_gradients(self._optimizer, state["gradients"])
        self.pending = state["batches"]

    def _clear(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
