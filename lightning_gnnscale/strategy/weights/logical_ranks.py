"""What each logical rank has of its own while a process computes the batches of several, one after another."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...across_ranks import own_ranks
from ...errors import StrategyError
from .. import averaging
from .policy import move_gradients, saved_gradients


class RankStates:
    """Buffers (BatchNorm's), targets and gradients of a window of each logical rank that this process computes.

    The model holds the buffers of one of them at a time, and none while it holds their average.

    Args:
        module: The model.
        count: Logical ranks of the run, at least as many as processes.

    Attributes:
        own: The logical ranks of this process.
        targets: By logical rank, the targets of the batches that wait for a step.
        gradients: By logical rank, the gradients of those batches, where they are not in the model.
    """

    def __init__(self, module: nn.Module, count: int):
        self.count, self.own = count, own_ranks(averaging.rank(), averaging.world_size(), count)
        self.targets = dict.fromkeys(self.own, 0)
        self.gradients: dict[int, list[Tensor | None]] = {}
        self._module, self._buffers = module, {}
        self._entered: int | None = None

    @property
    def live_buffers(self) -> averaging.State:
        """The buffers that the model holds; never kept, since modules replace them."""
        return {name: buffer.detach() for name, buffer in self._module.named_buffers()}

    def enter(self, rank: int) -> None:
        """Let the model hold what a logical rank has of its own; all begin an epoch from the same."""
        if rank == self._entered:
            return
        live = self.live_buffers
        if self._entered is not None:
            self._buffers[self._entered] = averaging.copy_state(live)
        elif not self._buffers and len(self.own) > 1:
            self._buffers = {one: averaging.copy_state(live) for one in self.own}
        if rank in self._buffers:
            averaging.load_state(averaging.module_state(self._module), self._buffers[rank])
        self._entered = rank

    def leave(self, state: averaging.State) -> None:
        """Keep what the model holds for the logical rank that it holds; `state` is all of that."""
        if self._entered is not None:
            self._buffers[self._entered] = averaging.copy_state(state)
        self._entered = None

    def forget(self) -> None:
        """Let all logical ranks go on from what the model holds."""
        self._buffers, self._entered = {}, None

    def buffers(self) -> list[averaging.State]:
        """Return the buffers of each logical rank of this process."""
        live = self.live_buffers
        return [live if rank == self._entered else self._buffers.get(rank, live) for rank in self.own]

    def end_window(self) -> None:
        """Begin another window of batches, after a step."""
        self.targets = dict.fromkeys(self.own, 0)
        self.gradients = {}

    def set_aside(self, rank: int, optimizer: torch.optim.Optimizer) -> None:
        """Keep the gradients in the model for a logical rank; the model then has none."""
        self.gradients[rank] = move_gradients(optimizer)

    def put_back(self, rank: int, optimizer: torch.optim.Optimizer) -> None:
        """Give the model the gradients that were kept for a logical rank, none if there are none."""
        move_gradients(optimizer, self.gradients.pop(rank, None))

    def state_dict(self, waiting: int, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Any]]:
        """Return, by logical rank, what it needs to go on within an epoch.

        Args:
            waiting: Batches of each that wait for a step.
            optimizer: Has the gradients of the last one of this process; None: there are none.
        """
        state: dict[int, dict[str, Any]] = {rank: {} for rank in self.own}
        names = list(self.live_buffers)
        for rank, kept in self._buffers.items():
            state[rank]["buffers"] = {name: kept[name].cpu() for name in names}
        for rank in self.own if waiting and optimizer is not None else ():
            gradients = self.gradients.get(rank) if rank != self.own[-1] else saved_gradients(optimizer)
            gradients = [None if one is None else one.detach().to("cpu", copy=True) for one in gradients or []]
            state[rank] |= {"batches": waiting, "targets": self.targets[rank], "gradients": gradients}
        return state

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> int:
        """Go on from what `state_dict` has said of these logical ranks; return how many batches of each wait."""
        self.forget()
        self._buffers = {rank: one["buffers"] for rank, one in state.items() if one.get("buffers") is not None}
        self.targets = {rank: state[rank].get("targets", 0) for rank in self.own}
        self.gradients = {rank: one["gradients"] for rank, one in state.items() if one.get("gradients") is not None}
        return max(one.get("batches", 0) for one in state.values())


def loss_of(output: Any) -> Tensor:
    """Return the loss of what a `training_step` has returned.

    Raises:
        StrategyError: it has returned none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise StrategyError(
            "training_step returned no loss, and a process that computes several logical ranks waits for each one's: "
            "return a loss of 0 that has a gradient, or say strategy.logical_ranks=null and as many devices"
        )
    return loss
