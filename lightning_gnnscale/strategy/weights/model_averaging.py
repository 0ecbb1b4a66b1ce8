"""Weighted model averaging: each part trains its own copy, and copies are averaged by their training nodes."""

import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from ...device_time import DeviceTimer
from ...errors import StrategyError, check_count, short
from ...events import clock, record
from ...graph import batch_of
from ...traits import DataTraits
from .. import averaging
from ..averaging import agree_on_steps, check_ranks, count_missing_batch, count_steps
from ..exchange import ExchangePolicy
from ..trainer_check import check_model_averaging, check_rounds, step_schedulers
from .control_variates import ControlVariates
from .part_optimizers import SHARED_KEY, PartOptimizers, merge_states, shared_optimizer
from .policy import Step, WeightPolicy, load_gradients, saved_gradients


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


OPTIMIZER_STATES = ("per_part", "shared", "reset")


class ModelAveraging(WeightPolicy):
    """Train every part on its own and average the weights, w = sum(n_k w_k) / sum(n_k), n_k = training nodes of part k.

    A rank that owns several parts visits them one after the other. A visit begins from the weights of the last average
    (or, between averages, from the part's own) and ends with a batch of another part, a None batch or the epoch's last
    batch. The average is taken at the epoch's last batch on every rank, before validation. What evaluation and
    checkpoints see is always an average: between averages one is taken for them, and the parts go on unchanged.

    BatchNorm's statistics are averaged like weights, integer buffers take the maximum, gradients and optimizer state
    are never averaged. Accumulated gradients never cross from one part into another: the last window of a visit may
    be shorter and then ends in a step of its own. `trainer.global_step` counts the steps of the busiest rank.

    A checkpoint may be saved within an epoch, by `trainer.save_checkpoint` after the same batch on every rank: the
    model in it is the average of the parts as they then are, beside it lie the weights and optimizer states of the
    parts and the gradients that wait for a step. Training goes on as if nothing had been saved, and so does a run that
    is resumed from it with as many processes.

    Args:
        every_n_epochs: passes over all parts between two averages, >= 1.
        optimizer_state: "per_part": each part keeps its own, so that the result does not depend on the number of
            processes; "shared": one for all parts of a rank; "reset": a new one after each average.
        part_major: a part does its every_n_epochs passes in one visit, so that it is loaded once a round; one
            Lightning epoch is then a round.
        control_variates: correct each part's gradients by how far they lay from the mean over all parts in the round
            before, see `ControlVariates`: parts with different labels, as low cuts make them, then train together.

    Raises:
        ValueError: every_n_epochs is below 1, optimizer_state is unknown, or control_variates is no bool.

    Cost: per part of this rank one copy of the weights between averages and one optimizer state, on the device;
        8 bytes a weight on the wire per average. With control variates two more copies, and as many bytes again.
    Source: Huang et al., SDT-GNN, training; CATGNN. Differs: equal initial weights; the interval works with more
        parts than devices; the last average closes the run; control variates are SCAFFOLD's.
    """

    handles_gradient_accumulation = True
    keeps_state = True

    def __init__(
        self,
        every_n_epochs: int = 1,
        optimizer_state: str = "per_part",
        part_major: bool = False,
        control_variates: bool = False,
    ) -> None:
        check_count("weights.every_n_epochs", every_n_epochs)
        if optimizer_state not in OPTIMIZER_STATES:
            raise ValueError(f"weights.optimizer_state must be one of {OPTIMIZER_STATES}, got {short(optimizer_state)}")
        if not isinstance(control_variates, bool):
            raise ValueError(f"weights.control_variates must be true or false, got {short(control_variates)}")
        self.every_n_epochs = int(every_n_epochs)
        self.optimizer_state = optimizer_state
        self.part_major, self.control_variates = part_major, control_variates
        self._trainer: pl.Trainer | None = None

    @property
    def _live(self) -> averaging.State:
        # Never kept: modules replace their buffers.
        return averaging.module_state(self._trainer.lightning_module)

    @property
    def replicas_equal(self) -> bool:
        """Whether the module has the average, as at the end of an epoch."""
        return self._published

    @property
    def passes_per_epoch(self) -> int:
        return self.every_n_epochs if self.part_major else 1

    def check_exchange(self, exchange: ExchangePolicy) -> None:
        if exchange.live:
            raise StrategyError(
                f"ModelAveraging lets replicas differ, and {type(exchange).__name__} sends gradients between them: use "
                'weights=GradientAveraging(), exchange=NoExchange(), or SkipBroadcast(remote_gradient="drop")'
            )

    def check_trainer(self, trainer: pl.Trainer) -> None:
        check_rounds(trainer)

    def check(self, trainer: pl.Trainer) -> None:
        check_model_averaging(trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._weights = [float(weight) for weight in trainer.datamodule.part_weights]
        store = DataTraits(trainer.datamodule).store
        self._parts = {"weights": self._weights, "store": None if store is None else store.layout_fingerprint}
        self._start = averaging.copy_state(self._live)
        self._model_holds_start = True
        self._own: dict[int, averaging.State] = {}
        self._part: int | None = None
        self._published = True
        self._begin_from_checkpoint_optimizer = False
        self._restored_gradients: dict[int, dict[str, Any]] = {}
        self._step: Step = trainer.strategy.take_step
        self._optimizers = self._gradients = self._controls = None
        if trainer.optimizers:
            trained = {self._optimizer_key(part) for part in self._parts_of_rank() if self._weights[part] > 0}
            schedulers = step_schedulers(trainer, len(trained))
            self._optimizers = PartOptimizers(trainer.optimizers[0], schedulers, trainer.precision_plugin)
            for config in schedulers:
                config.frequency = sys.maxsize  # Lightning counts the batches of a rank, which differ between ranks
            self._gradients = VisitGradients(trainer.optimizers[0])
            if self.control_variates:
                module, precision = trainer.lightning_module, trainer.precision_plugin
                self._controls = ControlVariates(module, trainer.optimizers[0], precision)

    def on_train_start(self) -> None:
        if self._begin_from_checkpoint_optimizer:
            self._optimizers.start_from_current()
        # Not before: Lightning zeroes gradients and loads rank 0's schedulers after the policy has loaded its state.
        for part, waiting in self._restored_gradients.items():
            scaler = getattr(self._trainer.precision_plugin, "scaler", None)
            if scaler is not None:  # it has no scale before it has scaled something, and a step may come first
                scaler.scale(torch.zeros((), device=self._trainer.strategy.root_device))
            self._gradients.load_state_dict(waiting)
            self._optimizers.install(self._optimizer_key(part))
            self._part = part
        self._restored_gradients = {}

    def begin_batch(self, batch: Any) -> None:
        part = None if batch is None else self._part_of(batch)
        if part is None:
            count_missing_batch(self._trainer)
        self._return_to_part()
        if part != self._part:
            self._end_visit()
            if part is not None:
                self._begin_visit(part)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Step) -> Any:
        window = self._trainer.accumulate_grad_batches
        counted_by_lightning = not self._trainer.fit_loop._should_accumulate()
        self._step = step
        if window == 1:
            output, stepped = step(optimizer, closure), 1
        else:
            output, stepped = self._gradients.accumulate(closure), 0
            # The last batch is known in advance, and an epoch's schedulers step before its batch has ended.
            if self._gradients.pending >= window or self._trainer.is_last_batch:
                self._gradients.step(step)
                stepped = 1
        count_steps(self._trainer, stepped - counted_by_lightning)
        if stepped:
            self._step_schedulers()
        return output

    def before_step(self) -> None:
        if self._controls and self._part is not None:
            self._controls.correct(self._part)

    def end_epoch(self) -> dict[str, float]:
        self._return_to_part()
        self._end_visit()
        agree_on_steps(self._trainer)
        passes = (self._trainer.current_epoch + 1) * self.passes_per_epoch
        metrics = {"passes": float(passes)}
        if passes % self.every_n_epochs == 0:
            self._start, seconds = self._average("round")
            averaging.load_state(self._live, self._start)
            self._own.clear()
            self._model_holds_start = self._published = True
            if self.optimizer_state == "reset" and self._optimizers:
                self._optimizers.forget_moments()
            metrics["average_ms"] = seconds * 1e3
        return metrics

    def publish(self) -> None:
        if self._trainer is None or self._published:
            return
        self._keep_part()
        average, _ = self._average("evaluation")
        averaging.load_state(self._live, average)
        self._model_holds_start = False
        self._published = True

    def state_dict(self) -> dict[str, Any]:
        if self._trainer is None:
            return {}
        self._keep_part()
        waits = self._part is not None and self._gradients and self._gradients.pending
        return {
            "policy": type(self).__name__,
            "optimizer_state": self.optimizer_state,
            "parts": self._parts,
            "start": averaging.on_cpu(self._start) if self._own else None,
            "own": {part: averaging.on_cpu(state) for part, state in self._own.items()},
            "optimizers": self._optimizers.state_dict() if self._optimizers else {},
            "controls": self._controls.state_dict() if self._controls else {},
            "waiting": {self._part: self._gradients.state_dict()} if waits else {},
            "steps": self._trainer.global_step,
        }

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return merge_states(states)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        mine = self._parts_of_rank()
        self._part, self._published = None, True  # a search for a learning rate may have left a visit open
        if self._gradients:
            self._gradients.drop()
        same_policy = bool(state) and state["policy"] == type(self).__name__
        same_parts = same_policy and state.get("parts") == self._parts
        if same_policy:
            self._restore_steps(state.get("steps"))
        if same_parts:
            self._own = {part: self._like_live(state["own"][part]) for part in mine if part in state["own"]}
            if state["start"] is not None:
                self._start = self._like_live(state["start"])
                self._model_holds_start = False
            if self._controls:
                kept = state.get("controls", {})
                self._controls.load_state_dict({part: kept[part] for part in mine if part in kept})
        if self._optimizers is None:
            return
        if not same_parts or state["optimizer_state"] != self.optimizer_state:
            missing = f'no optimizer state for ModelAveraging(optimizer_state="{self.optimizer_state}")'
            if same_policy and not same_parts:
                missing = "the weights and optimizers of other parts than these"
            rank_zero_warn(f"the checkpoint has {missing}: every part goes on from the model and optimizer that it has")
            self._begin_from_checkpoint_optimizer = True
            return
        waiting, saved = state.get("waiting", {}), state["optimizers"]
        self._restored_gradients = {part: kept for part, kept in waiting.items() if part in mine}
        if self.optimizer_state == "shared":
            mine, saved = [SHARED_KEY], shared_optimizer(saved, num_ranks=len(state["steps"]))
        self._optimizers.load_state_dict({part: saved[part] for part in mine if part in saved})

    def teardown(self) -> None:
        if self._trainer is None:
            return
        self._start = averaging.on_cpu(self._start)
        self._own = {part: averaging.on_cpu(state) for part, state in self._own.items()}
        for kept in (self._optimizers, self._controls):
            if kept:
                kept.to_cpu()
        self._part, self._published = None, True

    def _parts_of_rank(self) -> list[int]:
        return [int(part) for part in self._trainer.datamodule.parts_of_rank(averaging.rank(), averaging.world_size())]

    def _part_of(self, batch: Any) -> int:
        part = batch_of(batch).part
        if part is None:
            raise StrategyError(
                f"ModelAveraging needs batches that say which part they are of, got {type(batch).__name__} without "
                "`part`: train with PartitionDataModule, or use weights=GradientAveraging()"
            )
        if not 0 <= int(part) < len(self._weights):
            raise StrategyError(f"a batch is of part {part}, datamodule.part_weights has {len(self._weights)} parts")
        return int(part)

    def _begin_visit(self, part: int) -> None:
        if part in self._own:
            averaging.load_state(self._live, self._own[part])
        elif not self._model_holds_start:
            averaging.load_state(self._live, self._start)
        self._model_holds_start = False
        if self._optimizers:
            self._optimizers.install(self._optimizer_key(part))
        self._part = part

    def _optimizer_key(self, part: int) -> int:
        return SHARED_KEY if self.optimizer_state == "shared" else part

    def _keep_part(self) -> None:
        if self._part is not None and not self._published:
            self._own[self._part] = averaging.copy_state(self._live)

    def _return_to_part(self) -> None:
        if self._part is not None and self._published:  # a checkpoint within the visit put an average into the model
            averaging.load_state(self._live, self._own[self._part])
        self._published = False

    def _end_visit(self) -> None:
        if self._part is None:
            return
        if self._gradients and self._gradients.pending:
            self._gradients.step(self._step)
            count_steps(self._trainer, 1)
            self._step_schedulers()
        self._keep_part()
        self._part = None

    def _average(self, purpose: str) -> tuple[averaging.State, float]:
        timer = DeviceTimer(self._trainer.strategy.root_device)
        states = [(self._weights[part], self._own[part]) for part in sorted(self._own)]
        with clock.doing("average"), timer.measure():
            average, num_bytes = averaging.weighted_average(states, like=self._start)
            if self._controls and purpose == "round":
                num_bytes += self._controls.end_round(self._weights)
        seconds = timer.take()
        record(
            "average",
            purpose=purpose,
            epoch=self._trainer.current_epoch,
            passes=(self._trainer.current_epoch + 1) * self.passes_per_epoch,
            seconds=seconds,
            bytes=num_bytes,
            parts=len(states),
            rank=averaging.rank(),
            world_size=averaging.world_size(),
        )
        return average, seconds

    def _step_schedulers(self) -> None:
        for config in self._optimizers.count_step():
            call._call_lightning_module_hook(self._trainer, "lr_scheduler_step", config.scheduler, None)

    def _restore_steps(self, saved: list[int] | None) -> None:
        if saved is None:
            return
        check_ranks(self._trainer, len(saved))
        if len(saved) == averaging.world_size():
            # Lightning gives every rank the count of rank 0, and within an epoch each has its own.
            count_steps(self._trainer, saved[averaging.rank()] - self._trainer.global_step)

    def _like_live(self, state: averaging.State) -> averaging.State:
        return {name: state[name].to(tensor.device, tensor.dtype).clone() for name, tensor in self._live.items()}
