"""How many logical ranks a run has, and threads of torch: by the user, its checkpoint and its data."""

import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ..errors import StrategyError, check_count
from ..traits import DataTraits, InputsTraits, ModuleTraits
from .averaging import is_within_epoch
from .weights import WeightPolicy


class LogicalRanks:
    """The number of ranks by which an epoch's batches are shared out, whoever computes them.

    Args:
        given: What the user asks for; None: as many as the run began with.
        weights: The weight policy.

    Attributes:
        count: The number; None: not settled yet, or the policy has none.
        kept: What the checkpoint says that the next run goes on from.

    Raises:
        ValueError: given is below 1.
        StrategyError: given, and the policy shares out parts instead.
    """

    def __init__(self, given: int | None, weights: WeightPolicy) -> None:
        if given is not None:
            check_count("strategy.logical_ranks", given)
            if not weights.equal_batches:
                raise StrategyError(
                    f"strategy.logical_ranks={given} shares out the steps of gradient averaging, and "
                    f"{type(weights).__name__} has none that processes share: leave it out, as its result does not "
                    "depend on their number, or use weights=GradientAveraging()"
                )
        self._given, self._has_ranks = given, weights.equal_batches
        self.count: int | None = given
        self.kept: Mapping[str, int] = {}
        self._threads = 0

    def check(self, num_processes: int) -> None:
        """Refuse more processes than logical ranks.

        Raises:
            StrategyError: the message names both numbers.
        """
        if self._given is not None and self._given < num_processes:
            raise StrategyError(
                f"strategy.logical_ranks={self._given} leaves {num_processes - self._given} of {num_processes} "
                f"processes without a batch: use trainer.devices for at most {self._given} processes, or more logical "
                "ranks"
            )

    def settle(self, trainer: pl.Trainer, num_processes: int, device: torch.device) -> None:
        """Choose the number for a run, before its loaders are made, and the threads of torch that go with it.

        Raises:
            StrategyError: as `check`; or what is trained goes by processes, and they are not as many.
        """
        kept, self.kept = self.kept, {}
        if not self._has_ranks:
            self._keep_threads(kept.get("threads", 0), trainer.num_devices, device)
            return
        self.check(num_processes)
        began = kept.get("ranks", 0)
        wanted = self._given or (began if began >= num_processes else num_processes)
        refused = None if wanted == num_processes else _why_not(trainer)
        if refused is not None:
            if self._given is not None:
                raise StrategyError(
                    f"strategy.logical_ranks={wanted} on {num_processes} processes: {refused}; use as many processes, "
                    "or leave strategy.logical_ranks out"
                )
            wanted = num_processes
        self.count = wanted
        if device.type == "cpu" and (self._given is not None or wanted != num_processes):
            torch.set_num_threads(kept.get("threads") or _threads_of(wanted))
        self._threads = torch.get_num_threads()

    def _keep_threads(self, began: int, num_here: int, device: torch.device) -> None:
        """Train the parts on the threads of torch that the run began with: matrix products round by their number."""
        if device.type == "cpu" and began:
            if began * num_here <= (os.cpu_count() or 1):
                torch.set_num_threads(began)
            elif began != torch.get_num_threads():
                rank_zero_warn(
                    f"the run began with {began} threads of torch a process, which are more than the cores here for "
                    f"{num_here} processes: {torch.get_num_threads()} are used, and weights are equal to rounding; to "
                    "go on with the same bits on any number of processes, begin with OMP_NUM_THREADS=1"
                )
        self._threads = torch.get_num_threads()

    def state_dict(self) -> dict[str, int]:
        """Return what checkpoints keep."""
        return ({} if self.count is None else {"ranks": self.count}) | {"threads": self._threads}

    def check_kept(self, trainer: pl.Trainer, kept: Mapping[str, int], policy: Mapping[str, Any] | None) -> None:
        """Refuse to go on within an epoch of another number; warn where an epoch has ended.

        Args:
            trainer: Its loops are restored from the checkpoint.
            kept: What the checkpoint says of logical ranks.
            policy: What it says of the policy; older ones have no more.

        Raises:
            StrategyError: the message names both numbers.
        """
        began = kept.get("ranks") or len((policy or {}).get("ranks", ())) or self.count
        if self.count is None or began == self.count:
            return
        if is_within_epoch(trainer):
            raise StrategyError(
                f"the checkpoint is within an epoch of {began} logical ranks, this run has {self.count}: resume with "
                f"strategy.logical_ranks={began} on at most as many processes, or from the end of an epoch"
            )
        rank_zero_warn(
            f"the checkpoint was trained with {began} logical ranks, training goes on with {self.count}: epochs have "
            "other batches and steps from here"
        )


def _why_not(trainer: pl.Trainer) -> str | None:
    """Return why a process cannot compute the batches of several ranks, or None."""
    inputs = ModuleTraits(trainer.lightning_module).inputs
    if InputsTraits(inputs).save is not None and not InputsTraits(inputs).exact:
        return f"{type(inputs).__name__} updates its rows as each process comes to them (staleness=0 does not)"
    return DataTraits(trainer.datamodule).shares_by_process


def _threads_of(count: int) -> int:
    """Return the threads of torch by which results are the same on any number of processes of a machine."""
    threads, asked = max(1, (os.cpu_count() or 1) // count), os.environ.get("OMP_NUM_THREADS", "")
    return min(threads, max(1, int(asked))) if asked.isdigit() else threads
