"""State by part: swapped in and out of one optimizer, joined over ranks and assigned again in a checkpoint."""

import copy
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from .. import averaging

SHARED_KEY = -1
_BY_PART = ("own", "waiting", "controls")


@dataclass
class PartState:
    """What one part keeps between its visits.

    Attributes:
        state: parameter -> the optimizer's state of it, held by reference.
        groups: hyperparameters of each parameter group (learning rate, ...), without the parameters.
        schedulers: state of each scheduler that counts steps.
        scaler: state of the gradient scaler, empty where there is none.
        steps: optimizer steps taken.
    """

    state: dict[Hashable, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] = field(default_factory=dict)
    steps: int = 0


class PartOptimizers:
    """The states of one optimizer, its step-counting schedulers and the gradient scaler, by key (a part).

    Swapping is by reference: no tensor is copied. Learning rates belong to the part only where a scheduler counts
    steps; otherwise the parameter groups are shared, as schedulers that count epochs are.

    Args:
        optimizer: the optimizer, new.
        schedulers: the configurations of schedulers that count steps, frequencies and all, as they now are; Lightning
            must not step them itself.
        precision: the precision plugin, which may own a gradient scaler.
    """

    def __init__(self, optimizer: Optimizer, schedulers: list[LRSchedulerConfig], precision: Precision) -> None:
        self._optimizer = optimizer
        self._configs = schedulers
        self._frequencies = [config.frequency for config in schedulers]
        self._precision = precision
        self._installed: int | None = None
        self._kept: dict[int, PartState] = {}
        self._steps = 0
        self._fresh = self._capture()

    def install(self, key: int) -> None:
        """Put the state of a part into the optimizer, after keeping that of the part before."""
        if key == self._installed:
            return
        self.keep()
        kept = self._kept.get(key)
        if kept is None:
            state = {parameter: copy.deepcopy(value) for parameter, value in self._fresh.state.items()}
            kept = PartState(state, self._fresh.groups, self._fresh.schedulers, self._fresh.scaler, self._fresh.steps)
        self._optimizer.state.clear()
        self._optimizer.state.update(kept.state)
        for group, saved in zip(self._optimizer.param_groups, kept.groups, strict=False):
            group.update(copy.deepcopy(saved))
        for config, saved in zip(self._configs, kept.schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(saved))
        if kept.scaler:
            self._precision.load_state_dict(copy.deepcopy(kept.scaler))
        self._steps = kept.steps
        self._installed = key

    def keep(self) -> None:
        """Keep the state of the installed part."""
        if self._installed is not None:
            self._kept[self._installed] = self._capture()

    def count_step(self) -> list[LRSchedulerConfig]:
        """Count one optimizer step of the installed part; return the schedulers that are due."""
        self._steps += 1
        return [c for c, every in zip(self._configs, self._frequencies, strict=True) if self._steps % every == 0]

    def forget_moments(self) -> None:
        """Drop the optimizer's state of every part; learning rates, schedulers and scaler stay."""
        self.keep()
        self._optimizer.state.clear()
        self._fresh.state = {}
        for kept in self._kept.values():
            kept.state = {}

    def start_from_current(self) -> None:
        """Let parts that have no state yet begin from what the optimizer holds now, instead of from nothing."""
        self._fresh = self._capture()

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return every part's state, with parameters by their position and tensors on the CPU."""
        self.keep()
        position = {parameter: i for i, parameter in enumerate(self._parameters())}
        return {
            key: {
                "state": {
                    position.get(parameter, parameter): _to_cpu(value) for parameter, value in kept.state.items()
                },
                "groups": _to_cpu(kept.groups),
                "schedulers": _to_cpu(kept.schedulers),
                "scaler": _to_cpu(kept.scaler),
                "steps": kept.steps,
            }
            for key, kept in self._kept.items()
        }

    def load_state_dict(self, saved: dict[int, dict[str, Any]]) -> None:
        """Take over states from `state_dict`, of any parts, onto the parameters' devices."""
        groups = self._optimizer.state_dict()["param_groups"]
        self._installed, self._kept = None, {}
        for key, part in saved.items():
            # The optimizer itself knows which tensor belongs on which device in which dtype.
            self._optimizer.load_state_dict({"state": part["state"], "param_groups": groups})
            self._kept[key] = PartState(
                dict(self._optimizer.state), part["groups"], part["schedulers"], part["scaler"], part["steps"]
            )

    def to_cpu(self) -> None:
        """Move all states off the device, where a run is over."""
        self.keep()
        for kept in self._kept.values():
            kept.state = {parameter: _to_cpu(value) for parameter, value in kept.state.items()}

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _capture(self) -> PartState:
        groups = []
        if self._configs:
            groups = [
                copy.deepcopy({name: value for name, value in group.items() if name != "params"})
                for group in self._optimizer.param_groups
            ]
        return PartState(
            state=dict(self._optimizer.state),
            groups=groups,
            schedulers=[copy.deepcopy(config.scheduler.state_dict()) for config in self._configs],
            scaler=copy.deepcopy(self._precision.state_dict()),
            steps=self._steps,
        )


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_cpu(item) for item in value)
    return value


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what `ModelAveraging.state_dict` returned on each rank, in rank order, into one for any number of ranks."""
    states = [state for state in states if state]
    if not states:
        return {}
    same = {name: states[0][name] for name in ("policy", "optimizer_state", "parts")}
    merged = {**same, "optimizers": {}, "steps": [state["steps"] for state in states]}
    merged["start"] = next((state["start"] for state in states if state["start"] is not None), None)
    for name in _BY_PART:
        merged[name] = {part: kept for state in states for part, kept in state[name].items()}
    for rank, state in enumerate(states):
        for part, optimizer in state["optimizers"].items():
            merged["optimizers"][rank if merged["optimizer_state"] == "shared" else part] = optimizer
    return merged


def shared_optimizer(by_rank: dict[int, Any], num_ranks: int) -> dict[int, Any]:
    """Return what this rank goes on from: its own state, or one of those saved where there were other ranks."""
    rank = averaging.rank()
    if num_ranks != averaging.world_size() and by_rank:
        rank = sorted(by_rank)[rank % len(by_rank)]
    return {SHARED_KEY: by_rank[rank]} if rank in by_rank else {}
