"""Gradients that wait for the rest of their window, in a checkpoint: Lightning saves none."""

import torch
from torch import Tensor
from torch.optim import Optimizer


def saved_gradients(optimizer: Optimizer) -> list[Tensor | None]:
    """Return copies of an optimizer's gradients on the CPU, in the order of its parameters; None for one without.

    Cost: the bytes of the gradients.
    """
    gradients = [parameter.grad for parameter in _parameters(optimizer)]
    return [None if gradient is None else gradient.detach().to("cpu", copy=True) for gradient in gradients]


def load_gradients(optimizer: Optimizer, saved: list[Tensor | None]) -> None:
    """Put copies of the gradients of `saved_gradients` onto an optimizer's parameters, where these lie."""
    for parameter, gradient in zip(_parameters(optimizer), saved, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)


def _parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
