"""SkipG: gradients of other processes are used again for some epochs."""

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import StrategyError
from ...traits import DataTraits
from .. import averaging
from ..exchange.bounds import checked_epochs
from .gradient_averaging import GradientAveraging, reduce_gradients


class BoundedGradientStaleness(GradientAveraging):
    """Join gradients only every max_age + 1 epochs; SANCUS' baseline beside its own, SkipG.

    In the epochs between, a process steps with its own fresh gradient plus what the others' gradients added up to when
    they were joined last, so that replicas drift apart. When gradients are joined again, weights and the floating
    state of the optimizer are averaged, so that replicas are equal after that step. Evaluation and checkpoints see the
    average of the replicas, and training goes on from each one's own.

    Args:
        max_age: epochs that gradients of others may be old, an integer of at least 0; 0 is GradientAveraging.
        bucket_bytes, local_clip: see `GradientAveraging`.

    Raises:
        ValueError: max_age is no integer of at least 0.

    A checkpoint holds the average of the replicas and rank 0's state of the optimizer: after a resume replicas are
    equal, and gradients are joined in the first epoch.

    Cost: one copy of the gradients, and one of the weights while replicas are evaluated. On the wire 4 bytes a weight
        every max_age + 1 epochs, and with them 8 a weight and floating value of the optimizer; 8 a weight where
        replicas that differ are evaluated or saved.
    Source: SANCUS, experiments, SkipG, whose rule the paper does not give; this one is ours.
    """

    def __init__(self, max_age: int = 1, bucket_bytes: int = 25 * 2**20, local_clip: float | None = None) -> None:
        super().__init__(bucket_bytes, local_clip)
        self.max_age = checked_epochs("weights.max_age", max_age)

    def check(self, trainer: pl.Trainer) -> None:
        super().check(trainer)
        if not DataTraits(trainer.datamodule).trains_full_graph:
            raise StrategyError(
                "BoundedGradientStaleness adds up shares of one loss over the full graph: train with "
                "FullGraphDataModule, or use weights=GradientAveraging()"
            )

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._joined_epoch: int | None = None
        self._apart = False  # replicas have drifted since they were equal
        self._others: list[Tensor] = []

    def _average_for_evaluation(self) -> int:
        if not self._apart:
            return super()._average_for_evaluation()
        self._own = averaging.copy_state(self._live)
        average, num_bytes = averaging.weighted_average([(1.0, self._live)], like=self._live)
        averaging.load_state(self._live, average)
        return num_bytes

    def _join(self, parameters: list[Tensor], optimizer: Optimizer) -> int:
        epoch = self._trainer.current_epoch
        if self._joined_epoch is not None and 0 < epoch - self._joined_epoch <= self.max_age:
            self._apart = True
            for parameter, others in zip(parameters, self._others, strict=True):
                parameter.grad = others.clone() if parameter.grad is None else parameter.grad + others
            return 0
        own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        num_bytes = reduce_gradients(parameters, self._weight, self.bucket_bytes, mean=not self._adds_up)
        joined = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self._others = [total - mine for total, mine in zip(joined, own, strict=True)]
        if self._apart:  # the mean of equal weights may differ from them in the last bit
            num_bytes += self._average_replicas(parameters, optimizer)
        self._joined_epoch, self._apart = epoch, False
        return num_bytes

    def _average_replicas(self, parameters: list[Tensor], optimizer: Optimizer) -> int:
        state = dict(self._live)
        for index, parameter in enumerate(parameters):
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    state[f"optimizer.{index}.{name}"] = value
        average, num_bytes = averaging.weighted_average([(1.0, state)], like=state)
        averaging.load_state(state, average)
        return num_bytes
