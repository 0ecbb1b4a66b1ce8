"""Control variates: each part's gradients, corrected by how far they lie from the mean over all parts."""

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import StrategyError
from .. import averaging


@dataclass
class PartVariate:
    """State of one part, by parameter name: corrections from the last round, and gradients of this round so far.

    Attributes:
        correction: Tensor added to every gradient; a name that is missing has no correction.
        sums: Sums of the uncorrected gradients, in float32 or wider.
        steps: Number of optimizer steps in `sums`; on the device while it counts.
    """

    correction: averaging.State = field(default_factory=dict)
    sums: averaging.State = field(default_factory=dict)
    steps: int | Tensor = 0


class ControlVariates:
    """Corrections of the parts' gradients, renewed at every averaging.

    Parts differ in their labels, so their steps lead to different optima, and the average of these is an optimum of
    none. Let g_k be the mean gradient of part k over the steps of the last round, and g = sum(n_k g_k) / sum(n_k). Then
    g - g_k is added to every gradient of part k in this round: a step follows the whole graph's gradient.

    A step whose gradients are not finite is not recorded. A part that made no step in a round does
    not count in its mean, and begins the next round uncorrected.

    Args:
        module: Module that names the parameters.
        optimizer: Optimizer of the trained parameters; more parameters may join it later.
        precision: Precision plugin, which may own a gradient scaler.

    Raises:
        StrategyError: an optimizer that evaluates its gradients several times a step.

    Cost: two copies of the weights a part of this rank, in float32 at least; 8 bytes a weight on the wire per average.
    Source: Karimireddy et al., SCAFFOLD, ICML 2020, Algorithm 1. Differs: a variate is the mean of a round's gradients,
        which is option II for plain SGD, so that other optimizers may follow; parts weigh by their training nodes.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, precision: Precision) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise StrategyError(
                "control_variates=True corrects gradients and not losses, which LBFGS compares: use another optimizer, "
                "or say control_variates=False"
            )
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._optimizer, self._precision = optimizer, precision
        self._parts: dict[int, PartVariate] = {}

    @torch.no_grad()
    def correct(self, part: int) -> None:
        """Note the gradients of a part as they are, and correct them in place; before they are clipped.

        Raises:
            StrategyError: a gradient is sparse.
        """
        parameters = self._parameters()
        finite = self._finite(parameters)
        if finite is None:
            return
        scale = self._gradient_scale()
        if part not in self._parts:
            self._parts[part] = PartVariate()
        variate = self._parts[part]
        variate.steps = variate.steps + finite  # where it is: a GPU is not waited for
        for name, parameter in parameters.items():
            if parameter.grad is None:
                if name not in variate.correction:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            if name not in variate.sums:
                variate.sums[name] = _zeros(parameter)
            own = torch.where(finite, parameter.grad, torch.zeros_like(parameter.grad))
            variate.sums[name].add_(own, alpha=1 / scale)
            if name in variate.correction:
                parameter.grad.add_(variate.correction[name], alpha=scale)

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
        for variate in self._parts.values():
            variate.steps = int(variate.steps)
        self._parts = {part: variate for part, variate in sorted(self._parts.items()) if variate.steps}
        nothing = {name: _zeros(parameter) for name, parameter in self._parameters().items()}
        means = []
        for part, variate in self._parts.items():
            variate.correction = {}
            for total in variate.sums.values():
                total.div_(variate.steps)
            means.append((weights[part], nothing | variate.sums))
        whole, num_bytes = averaging.weighted_average(means, like=nothing)
        used = {name for name, mean in whole.items() if mean.any()}
        for part, variate in self._parts.items():
            # In place of the sums; what no part has a gradient of is left alone, as a zero gradient would decay it.
            for name in (used | set(variate.sums)) & set(whole):
                own = variate.sums.get(name)
                variate.correction[name] = whole[name] if own is None else torch.sub(whole[name], own, out=own)
            self._parts[part] = PartVariate(variate.correction)
        return num_bytes

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return what each part of this rank has, on the CPU."""
        return {
            part: {
                "correction": averaging.on_cpu(variate.correction),
                "sums": averaging.on_cpu(variate.sums),
                "steps": int(variate.steps),
            }
            for part, variate in self._parts.items()
        }

    def load_state_dict(self, saved: dict[int, dict[str, Any]]) -> None:
        """Take over what `state_dict` returned, of any parts, onto the parameters' devices."""
        self._parts = {
            part: PartVariate(self._here(kept["correction"]), self._here(kept["sums"]), kept["steps"])
            for part, kept in saved.items()
        }

    def to_cpu(self) -> None:
        """Leave the device, where a run is over."""
        for variate in self._parts.values():
            variate.correction, variate.sums = averaging.on_cpu(variate.correction), averaging.on_cpu(variate.sums)
            variate.steps = int(variate.steps)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return those that train now, by name: a callback may have thawed more."""
        held = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return {self._names[value]: value for value in held if value.requires_grad and value in self._names}

    def _finite(self, parameters: dict[str, nn.Parameter]) -> Tensor | None:
        """Return whether all gradients are finite, one bool where they are; None: there are none."""
        gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
        for name, gradient in gradients.items():
            if gradient.layout != torch.strided:
                raise StrategyError(
                    f"control_variates=True needs dense gradients, {name} has sparse ones: leave sparse=True out of "
                    "its layer, or say control_variates=False"
                )
        finite = [torch.isfinite(gradient).all() for gradient in gradients.values()]
        return torch.stack(finite).all() if finite else None

    def _gradient_scale(self) -> float:
        """Return what gradients are multiplied by now: under a scaler, fused optimizers unscale them after this."""
        scaler = getattr(self._precision, "scaler", None)
        unscales = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        return scaler.get_scale() if scaler is not None and unscales else 1.0

    def _here(self, state: averaging.State) -> averaging.State:
        like = {name: value for value, name in self._names.items()}
        return {name: kept.to(like[name].device).clone() for name, kept in state.items() if name in like}


def _zeros(parameter: Tensor) -> Tensor:
    """Return zeros that many gradients may be added to: in bfloat16 a sum would soon stop growing."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
