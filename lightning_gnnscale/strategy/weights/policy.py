"""What a weight policy is: how the replicas of a model become one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from ...graph import StepBatches

if TYPE_CHECKING:
    from ..exchange import ExchangePolicy


def saved_gradients(optimizer: Optimizer) -> list[Tensor | None]:
    """Return copies of an optimizer's gradients on the CPU, in the order of its parameters; None for one without.

    Cost: the bytes of the gradients.
    """
    gradients = [parameter.grad for parameter in _parameters(optimizer)]
    return [None if gradient is None else gradient.detach().to("cpu", copy=True) for gradient in gradients]


def move_gradients(optimizer: Optimizer, gradients: list[Tensor | None] | None = None) -> list[Tensor | None]:
    """Give an optimizer's parameters other gradients, None: none, and return those that they had; nothing is copied."""
    parameters, before = _parameters(optimizer), []
    for parameter, gradient in zip(parameters, gradients or [None] * len(parameters), strict=True):
        before.append(parameter.grad)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    return before


def load_gradients(optimizer: Optimizer, saved: list[Tensor | None]) -> None:
    """Put copies of the gradients of `saved_gradients` onto an optimizer's parameters, where these lie."""
    for parameter, gradient in zip(_parameters(optimizer), saved, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


def _parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


Step = Callable[[Optimizer, Callable[[], Any]], Any]


class WeightPolicy:
    """Base of the weight policies; the strategy calls these in the order of this class.

    Attributes:
        equal_batches: every rank must have the same number of batches, none of them None. The DataModule reads it.
        handles_gradient_accumulation: the policy decides when accumulated gradients become an optimizer step.
        passes_per_epoch: passes over a part in one Lightning epoch. The DataModule reads it.
        keeps_state: what `state_dict` returns differs between ranks and is gathered into checkpoints.
        replicas_equal: the model has the same weights on every rank now.
    """

    equal_batches = False
    handles_gradient_accumulation = False
    passes_per_epoch = 1
    keeps_state = False

    @property
    def replicas_equal(self) -> bool:
        """Whether all processes have the same weights between steps."""
        return True

    def check_exchange(self, exchange: "ExchangePolicy") -> None:
        """Refuse an exchange that cannot go with this policy, when the strategy is made.

        Raises:
            StrategyError: the message names the remedy.
        """

    def check_trainer(self, trainer: "pl.Trainer") -> None:
        """Refuse settings of the Trainer by themselves, before there is a model or data; `check` asks again.

        Raises:
            StrategyError: the message names the argument and the remedy.
        """

    def check(self, trainer: "pl.Trainer") -> None:
        """Refuse what does not fit, before anything is set up.

        Raises:
            StrategyError: trainer or DataModule do not fit this policy; the message names the remedy.
        """

    def setup(self, trainer: "pl.Trainer") -> None:
        """Begin a run: the model is on its device, equal on every rank, and the optimizers are new."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's gathered state (None: the checkpoint has none), after `setup`."""

    def on_train_start(self) -> None:
        """Begin training: the loaders exist."""

    def begin_batch(self, batch: Any) -> None:
        """Note the next training batch, None included, before it is moved to the device."""

    def compute_several(
        self, batches: StepBatches, compute: Callable[[Any], Any], backward: Callable[[Tensor], Any]
    ) -> Any:
        """Compute the batches of a step that this process has of several logical ranks, up to the last one's backward.

        Args:
            batches: On the device; gets the losses of all but the last.
            compute: Runs the module's training step on one of them.
            backward: Computes the gradients of a loss, which is divided by the batches of a window.

        Returns:
            What the training step of the last one returns; Lightning computes its gradients.
        """
        raise NotImplementedError(f"{type(self).__name__} has one batch a step")

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Step) -> Any:
        """Run a batch's closure, which computes gradients, and `step`, which clips them and changes the weights."""
        return step(optimizer, closure)

    def before_step(self) -> None:
        """Change the gradients of an optimizer step; they are whole, and not clipped yet."""

    def end_epoch(self) -> dict[str, float]:
        """End an epoch after its last batch on every rank, before validation; return metrics to log."""
        return {}

    def publish(self) -> None:
        """Put into the model, on every rank alike, the weights that evaluation, checkpoints and users see."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must keep to go on exactly, as plain containers and CPU tensors."""
        return {}

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Join the `state_dict`s of all ranks, in rank order, into one that any number of ranks can load."""
        return {}

    def teardown(self) -> None:
        """End a run: leave the devices."""
