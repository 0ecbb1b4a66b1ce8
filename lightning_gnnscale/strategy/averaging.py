"""Averaging over processes: weighted sums of module states, one all-reduce each, no knowledge of training.

Sums are taken in float64: w_1 n_1 + w_2 n_2 + ... then differs between one, two and four processes by 1e-16 at most, so
that rounding to float32 gives the same weights whatever the number of processes.
"""

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from ..across_ranks import rank, world_size  # noqa: F401  `averaging.rank()`, as the policies call it
from ..errors import StrategyError, clear_error
from ..events import clock
from . import averaging


def count_steps(trainer: pl.Trainer, extra: int) -> None:
    """Add to this rank's `trainer.global_step`; `extra` may be negative."""
    if extra:
        total = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        total.ready += extra
        total.completed += extra


def agree_on_steps(trainer: pl.Trainer) -> None:
    """Let every rank count the steps of the busiest one.

    ModelCheckpoint compares global_step on every rank by itself: ranks that disagree would part there for ever.

    Raises:
        StrategyError: another process was lost.
    """
    step = torch.tensor([trainer.global_step], device=trainer.strategy.root_device)
    averaging.all_reduce(step, "max", "counting optimizer steps")
    count_steps(trainer, int(step) - trainer.global_step)


def count_missing_batch(trainer: pl.Trainer) -> None:
    """Count a None batch as one that was begun.

    Lightning does not, and then takes a checkpoint of its training batches for one from within a batch: the run that
    goes on from it would wait for a batch that there is not, and never see the end of its first epoch.
    """
    trainer.fit_loop.epoch_loop.batch_progress.increment_started()


def is_within_epoch(trainer: pl.Trainer) -> bool:
    """Whether the checkpoint that a Trainer's loops are restored from was saved within an epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.current.ready > 0 and not progress.is_last_batch


def begin_next_epoch(trainer: pl.Trainer) -> None:
    """Count the epoch that begins, where the checkpoint that a Trainer goes on from has the last batch of one.

    Lightning takes it for one from within an epoch, calls no hook for the next one's start, and does not count it: a
    run that goes on from a later checkpoint would train batches twice.
    """
    loop = trainer.fit_loop
    if loop.restarted_mid_epoch and loop.epoch_progress.total.processed == loop.epoch_progress.total.started:
        loop.reset_restart_stage()


def check_ranks(trainer: pl.Trainer, saved_ranks: int) -> None:
    """Refuse to go on within an epoch on another number of processes: their shares of it are others.

    Args:
        trainer: its loops are restored from the checkpoint.
        saved_ranks: processes that the checkpoint was saved by, >= 1.

    Raises:
        StrategyError: the message names both numbers.
    """
    if is_within_epoch(trainer) and saved_ranks != averaging.world_size():
        raise StrategyError(
            f"the checkpoint is within an epoch of {saved_ranks} processes, this run has "
            f"{averaging.world_size()}: resume with as many as it was saved by, or from the end of an epoch"
        )


State = dict[str, Tensor]


def keep_in_step(device: torch.device) -> None:
    """Wait for rank 0 to come to the next batch.

    Raises:
        StrategyError: another process was lost.
    """
    with clock.doing("ranks"), clear_error("coming to the next batch"):
        dist.broadcast(torch.zeros(1, device=device), src=0)


def watch_metrics(module: nn.Module) -> None:
    """Let the metrics of a module fail with one line; those that have a gathering of their own keep it."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = _gather_state


def _gather_state(state: Tensor, group: Any | None = None) -> list[Tensor]:
    """Return a metric's state of every rank; every rank calls it."""
    with clear_error("reducing a metric"):
        return gather_all_tensors(state, group)


def all_reduce(tensor: Tensor, op: str, what: str) -> None:
    """Reduce a tensor over all processes, in place.

    Args:
        tensor: any shape, the same on every rank; changed in place.
        op: "sum" or "max".
        what: what is being done, for the error.

    Raises:
        StrategyError: another process was lost.
    """
    if world_size() > 1:
        with clock.doing("ranks"), clear_error(what):
            dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)


def module_state(module: nn.Module) -> State:
    """Return a module's parameters and buffers by name, each tensor once, without copying."""
    state = {name: parameter.detach() for name, parameter in module.named_parameters()}
    state.update((name, buffer.detach()) for name, buffer in module.named_buffers())
    return state


def copy_state(state: State) -> State:
    """Return a copy of a state that shares nothing with it."""
    return {name: tensor.clone() for name, tensor in state.items()}


def on_cpu(state: State) -> State:
    """Return a state on the CPU, sharing what lies there already."""
    return {name: tensor.cpu() for name, tensor in state.items()}


@torch.no_grad()
def load_state(target: State, source: State) -> None:
    """Copy the values of one state into the tensors of another, in place; names that `source` lacks stay."""
    for name, tensor in source.items():
        target[name].copy_(tensor)


@torch.no_grad()
def broadcast_state(state: State) -> None:
    """Overwrite a state on every rank by rank 0's, in place."""
    if world_size() == 1:
        return
    for name, tensor in state.items():
        # A buffer may be an expanded view, which the process group refuses.
        contiguous = tensor.contiguous()
        with clear_error(f"sending the initial value of {name}"):
            dist.broadcast(contiguous, src=0)
        if contiguous is not tensor:
            tensor.copy_(contiguous)


@torch.no_grad()
def weighted_sum(weighted_states: Iterable[tuple[float, State]], like: State) -> Tensor:
    """Sum the weights, and weight times value of every floating tensor.

    Args:
        weighted_states: (weight, state) pairs; weight >= 0, and a state of weight 0 is not read.
        like: gives names, shapes and the device; its values do not matter.

    Returns:
        (1 + num_values,) float64: the sum of weights, then the sums in the order of `like`; a complex value is two.
    """
    names = _floating_names(like)
    num_values = sum(_real(like[name]).numel() for name in names)
    total = torch.zeros(1 + num_values, dtype=torch.float64, device=_device(like))
    for weight, state in weighted_states:
        if weight == 0:
            continue
        total[0] += weight
        start = 1
        for name in names:
            values = _real(state[name]).reshape(-1).to(total.device)  # Adam counts its steps on the CPU
            total[start : start + len(values)].add_(values, alpha=weight)
            start += len(values)
    return total


@torch.no_grad()
def weighted_average(weighted_states: list[tuple[float, State]], like: State) -> tuple[State, int]:
    """Average states over all processes, each with its weight.

    Floating and complex tensors become sum(weight * value) / sum(weight); integer and boolean ones, such as the
    counter of BatchNorm, the maximum over all states of positive weight and `like`.

    Args:
        weighted_states: this rank's (weight, state) pairs, none allowed; weight >= 0.
        like: the state to return where all weights are 0; the same on every rank.

    Returns:
        The average, as new tensors of the dtypes of `like`, and the bytes that this rank handed to the process group.

    Raises:
        StrategyError: another process was lost.

    Cost: 8 bytes a value on the wire and in a buffer; one all-reduce, two where there are integer tensors.
    """
    total = weighted_sum(weighted_states, like)
    all_reduce(total, "sum", "averaging weights")
    sent = total.numel() * total.element_size() if world_size() > 1 else 0
    average, more = averaged(total, [state for weight, state in weighted_states if weight > 0], like)
    return average, sent + more


@torch.no_grad()
def averaged(total: Tensor, states: list[State], like: State) -> tuple[State, int]:
    """Return the average of a `weighted_sum` over all processes, and the bytes that this process handed over.

    Args:
        total: see `weighted_sum`, added up over all processes.
        states: this process's, of whose integers the maximum is taken.
        like: see `weighted_average`.
    """
    largest, num_bytes = _integer_maximum(states, like), 0
    if len(largest):
        all_reduce(largest, "max", "averaging weights")
        num_bytes = largest.numel() * largest.element_size()
    sent = num_bytes if world_size() > 1 else 0
    if total[0] == 0:
        return copy_state(like), sent
    return _unpack(total[1:] / total[0], largest, like), sent


def _unpack(values: Tensor, largest: Tensor, like: State) -> State:
    average, start, start_integer = {}, 0, 0
    for name, tensor in like.items():
        if _is_floating(tensor):
            real = _real(tensor)
            part = values[start : start + real.numel()].to(real.dtype).reshape(real.shape)
            average[name] = torch.view_as_complex(part.contiguous()) if tensor.is_complex() else part
            start += real.numel()
        else:
            part = largest[start_integer : start_integer + tensor.numel()]
            average[name] = part.to(tensor.dtype).reshape(tensor.shape)
            start_integer += tensor.numel()
    return average


def _integer_maximum(states: list[State], like: State) -> Tensor:
    names = [name for name, tensor in like.items() if not _is_floating(tensor)]
    if not names:
        return torch.empty(0, dtype=torch.int64)
    flat = [torch.cat([state[name].reshape(-1).to(torch.int64) for name in names]) for state in [like, *states]]
    return torch.stack(flat).amax(0)


def _floating_names(state: State) -> list[str]:
    return [name for name, tensor in state.items() if _is_floating(tensor)]


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _device(state: State) -> torch.device:
    return next(iter(state.values())).device if state else torch.device("cpu")
