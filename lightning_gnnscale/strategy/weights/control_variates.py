"""Control variates: each part's gradients, corrected by how far they lie from the mean over all parts."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.optim import Optimizer

from ...errors import StrategyError
from .. import averaging


class ControlVariates:
    """Corrections of the gradients of parts, renewed at every average.

    Parts differ in their labels, so their steps lead to different places and the average of these is none of them.
    With g_k the mean gradient of part k over the steps of the last round and g = sum(n_k g_k) / sum(n_k), every
    gradient of part k in this round has g - g_k added: a step then follows the whole graph's gradient.

    Args:
        module: whose parameters are trained.
        optimizer: the optimizer of them.
        precision: the precision plugin, which may own a gradient scaler.

    Cost: three copies of the weights a part of this rank; 8 bytes a weight on the wire per average.
    Source: Karimireddy et al., SCAFFOLD, ICML 2020, Algorithm 1. Differs: a variate is the mean of a round's gradients,
        which is option II for plain SGD, so that any optimizer may follow; parts weigh by their training nodes.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, precision: Precision) -> None:
        self._parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._optimizer, self._precision = optimizer, precision
        self._corrections: dict[int, averaging.State] = {}
        self._sums: dict[int, averaging.State] = {}
        self._steps: dict[int, int] = {}

    @torch.no_grad()
    def correct(self, part: int) -> None:
        """Note the gradients of a part as they are, and correct them in place; before they are clipped.

        Raises:
            StrategyError: a gradient is sparse.
        """
        scale = self._gradient_scale()
        if scale is None:
            return
        sums = self._sums.setdefault(part, self._zeros())
        self._steps[part] = self._steps.get(part, 0) + 1
        correction = self._corrections.get(part)
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise StrategyError(
                    f"control_variates=True needs dense gradients, {name} has sparse ones: leave sparse=True out of "
                    "its layer, or say control_variates=False"
                )
            sums[name].add_(parameter.grad, alpha=1 / scale)
            if correction is not None:
                parameter.grad.add_(correction[name], alpha=scale)

    @torch.no_grad()
    def end_round(self, weights: list[float]) -> int:
        """Make the corrections of the next round; every rank calls it.

        Args:
            weights: training nodes of each part.

        Returns:
            Bytes that this rank handed to the process group.

        Raises:
            StrategyError: another process was lost.
        """
        own = {part: {name: s / self._steps[part] for name, s in sums.items()} for part, sums in self._sums.items()}
        mean, num_bytes = averaging.weighted_average(
            [(weights[part], own[part]) for part in sorted(own)], like=self._zeros()
        )
        self._corrections = {part: {name: mean[name] - g for name, g in grads.items()} for part, grads in own.items()}
        self._sums, self._steps = {}, {}
        return num_bytes

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return what each part of this rank has, on the CPU."""
        return {
            part: {
                "correction": averaging.on_cpu(self._corrections.get(part, {})),
                "sums": averaging.on_cpu(self._sums.get(part, {})),
                "steps": self._steps.get(part, 0),
            }
            for part in sorted({*self._corrections, *self._sums})
        }

    def load_state_dict(self, saved: dict[int, dict[str, Any]]) -> None:
        """Take over what `state_dict` returned, of any parts, onto the parameters' devices."""
        self._corrections = {part: self._like(kept["correction"]) for part, kept in saved.items() if kept["correction"]}
        self._sums = {part: self._like(kept["sums"]) for part, kept in saved.items() if kept["sums"]}
        self._steps = {part: kept["steps"] for part, kept in saved.items() if kept["steps"]}

    def to_cpu(self) -> None:
        """Leave the device, where a run is over."""
        self._corrections = {part: averaging.on_cpu(state) for part, state in self._corrections.items()}
        self._sums = {part: averaging.on_cpu(state) for part, state in self._sums.items()}

    def _gradient_scale(self) -> float | None:
        """Return what gradients are multiplied by now; None where a scaler will refuse them and make no step."""
        scaler = getattr(self._precision, "scaler", None)
        if scaler is None:
            return 1.0
        gradients = [value.grad for value in self._parameters.values() if value.grad is not None]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            return None
        # Fused optimizers unscale gradients themselves, after this.
        return scaler.get_scale() if getattr(self._optimizer, "_step_supports_amp_scaling", False) else 1.0

    def _zeros(self) -> averaging.State:
        return {name: torch.zeros_like(value) for name, value in self._parameters.items()}

    def _like(self, state: averaging.State) -> averaging.State:
        return {name: state[name].to(value.device, value.dtype).clone() for name, value in self._parameters.items()}
