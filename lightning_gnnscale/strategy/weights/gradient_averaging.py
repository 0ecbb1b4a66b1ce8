"""Synchronous SGD: gradients are averaged over processes before every optimizer step, or with bounded staleness."""

from collections.abc import Callable
from contextlib import nullcontext
from numbers import Real
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from ...device_time import DeviceTimer
from ...errors import StrategyError, check_count, short
from ...events import clock, record
from ...graph import StepBatches, batch_of, batches_of
from ...traits import DataTraits, ModuleTraits
from .. import averaging
from ..exchange.bounds import checked_epochs
from .gradient_buckets import Buckets, EarlyBuckets, reduce_gradients
from .logical_ranks import RankStates, loss_of
from .policy import Step, WeightPolicy, move_gradients
from .tree_sum import tree_sum


class GradientAveraging(WeightPolicy):
    """Average gradients over ranks before each step, g = sum(b_r g_r) / sum(b_r), b_r = targets of rank r's batches.

    Ranks are the strategy's logical ranks: a process computes the batches of several one after another, and sums are
    taken in an order of the logical ranks alone, so that the result does not depend on who computes them.

    Where the sampler weighs losses (GraphSAINT) b_r is the number of batches: their losses are estimates of one mean.

    With losses that are means over targets this is the gradient of the mean over all of them; so it is with several
    labels a target where all are known (a mean over known labels is weighed by its targets all the same). Full-graph
    batches carry shares of one loss instead: their gradients are added up. It is done once a step, accumulated
    gradients included, after the last backward and before clipping. A parameter without gradient on a rank counts as
    zero there; one without gradient on every rank keeps none. Buffers (BatchNorm) are averaged before validation and
    checkpoints, and at the end of every epoch. Every rank must have the same number of batches.

    A checkpoint may be saved within an epoch: training goes on as if nothing had been saved, and so does a run that is
    resumed from it on any number of processes. It then holds each rank's buffers, and its gradients where these wait
    for the rest of a window.

    Args:
        bucket_bytes: gradients are sent in buckets of about this size, > 0.
        local_clip: before gradients are joined, each rank clips the norm of its own to local_clip x
            sqrt(ranks), > 0; None: no clipping. The Trainer's own clipping comes after, and keeps training exact.
        overlap: send a bucket while the backward computes the others; None: on GPUs, where nothing else is sent in
            a backward (exchanges of rows, learned rows of nodes) and local_clip is None. The result is the same, bit
            for bit.

    Raises:
        ValueError: a number that is not positive, or overlap is no bool.

    A GPU is waited for in a step in which a parameter has no gradient on this rank: whether others have one decides
    whether it keeps none.

    Cost: 4 bytes a weight on the wire per step (8 in float64).
    Source: Zheng et al., DistDGL, section 5.6; local clipping: SANCUS, Algorithm 3.
    """

    equal_batches = True
    keeps_state = True
    _is_alike = True  # the weights of all ranks, after every step

    def __init__(
        self, bucket_bytes: int = 25 * 2**20, local_clip: float | None = None, overlap: bool | None = None
    ) -> None:
        check_count("weights.bucket_bytes", bucket_bytes)
        if not (overlap is None or isinstance(overlap, bool)):
            raise ValueError(f"weights.overlap must be true, false or None, got {short(overlap)}")
        if overlap and local_clip is not None:
            raise ValueError(
                "weights.overlap=true sends gradients before the norm of all is known, by which weights.local_clip "
                "clips: leave one of them out"
            )
        if local_clip is not None and not (isinstance(local_clip, Real) and local_clip > 0):
            raise ValueError(f"weights.local_clip must be a number > 0 or None, got {short(local_clip)}")
        self.bucket_bytes, self.local_clip, self.overlap = bucket_bytes, local_clip, overlap
        self._trainer: pl.Trainer | None = None

    def check_trainer(self, trainer: pl.Trainer) -> None:
        if self.local_clip is not None and trainer.precision == "16-mixed":
            raise StrategyError(
                'GradientAveraging(local_clip=...) would clip scaled gradients under Trainer(precision="16-mixed"): '
                "use gradient_clip_val of the Trainer, or another precision"
            )

    def check(self, trainer: pl.Trainer) -> None:
        self.check_trainer(trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._published = True
        count = trainer.strategy.logical_ranks or averaging.world_size()
        self._ranks = RankStates(trainer.lightning_module, count)
        self._waiting = 0
        # What a GPU computes twice differs in the last bits anyway, unless torch is asked for the same.
        on_gpu = trainer.strategy.root_device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
        self._in_order = not on_gpu or count != averaging.world_size()
        self._buckets: Buckets | None = None  # of the step that is being computed
        self._timer, self._bytes, self._steps = DeviceTimer(trainer.strategy.root_device), 0, 0
        self._early: EarlyBuckets | None = None

    def on_train_start(self) -> None:
        if self._overlaps():
            self._early = EarlyBuckets(_trained(self._trainer.optimizers[0]), self.bucket_bytes)
        length = self._trainer.num_training_batches
        length = -1 if length == float("inf") else int(length)
        extremes = torch.tensor([length, -length], device=self._trainer.strategy.root_device)
        averaging.all_reduce(extremes, "max", "comparing the lengths of train loaders")
        longest, shortest = int(extremes[0]), -int(extremes[1])
        if longest != shortest:
            raise StrategyError(
                f"GradientAveraging needs the same number of train batches on every rank, got {shortest} to {longest}: "
                'split the targets evenly (PartitionDataModule(scope="graph") does), or use weights=ModelAveraging()'
            )
        if self._waiting:  # not before: Lightning zeroes gradients after it has loaded all
            self._ranks.put_back(self._last_rank, self._trainer.optimizers[0])

    def begin_batch(self, batch: Any) -> None:
        if batch is None:
            raise StrategyError(
                f"rank {averaging.rank()}: a train loader yielded None, and GradientAveraging waits for a gradient of "
                "every rank: split the targets evenly, or use weights=ModelAveraging()"
            )
        ranks, batches = self._ranks, batches_of(batch)
        if len(batches) == 1:
            ranks.enter(self._last_rank)
        for rank, one in zip(ranks.own, map(batch_of, batches), strict=True):
            # Shares of one loss over the whole graph are added up, losses of batches are averaged.
            self._adds_up = one.loss_is_share
            # A sampler that weighs losses has made each batch's loss a fair estimate: they count alike.
            weighed = one.loss_weight is not None or one.batch_size is None
            ranks.targets[rank] += 1 if weighed else int(one.batch_size)
        self._waiting += 1
        self._published = False

    def compute_several(
        self, batches: StepBatches, compute: Callable[[Any], Any], backward: Callable[[Tensor], Any]
    ) -> Any:
        ranks, optimizer = self._ranks, self._trainer.optimizers[0]
        if self._waiting > 1:
            ranks.set_aside(self._last_rank, optimizer)
        move_gradients(optimizer)  # of the step before: Lightning zeroes them after this
        with nullcontext() if self._early is None else self._early.paused():
            for rank, batch in zip(ranks.own[:-1], batches.batches[:-1], strict=True):
                ranks.enter(rank)
                loss = loss_of(compute(batch)) / self._trainer.accumulate_grad_batches
                ranks.put_back(rank, optimizer)
                backward(loss)
                batches.losses.append(loss.detach())
                if self._buckets is None:  # the window goes on
                    ranks.set_aside(rank, optimizer)
                    continue
                self._clip(_trained(optimizer))
                with clock.doing("average"), self._timer.measure():
                    self._buckets.hold(self._weight(rank))
        ranks.enter(self._last_rank)
        output = compute(batches.batches[-1])
        loss_of(output)
        ranks.put_back(self._last_rank, optimizer)
        return output

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Step) -> Any:
        def averaged_closure() -> Any:
            parameters, weight, early = _trained(optimizer), self._weight(self._last_rank), self._early
            if early is not None and not early.is_of(parameters):  # a callback has thawed some
                early.close()
                early = self._early = EarlyBuckets(parameters, self.bucket_bytes)
            self._buckets = Buckets(parameters, self.bucket_bytes, self._ranks.count, self._in_order)
            try:
                with nullcontext() if early is None else early.sending(self._buckets, weight):
                    loss = closure()
                self._average(parameters, optimizer)
            finally:
                self._buckets = None
            return loss

        output = step(optimizer, averaged_closure)
        self._waiting = 0
        self._ranks.end_window()
        return output

    def end_epoch(self) -> dict[str, float]:
        seconds = self._timer.take()
        self._record("gradients", seconds, self._bytes, steps=self._steps)
        metrics = {"passes": float(self._trainer.current_epoch + 1), "average_ms": seconds * 1e3}
        self._bytes = self._steps = 0
        if self._is_alike:
            self.publish()  # whether or not anything is saved or validated here: all ranks begin an epoch alike
        return metrics

    def publish(self) -> None:
        if self._trainer is None or self._published:
            return
        timer = DeviceTimer(self._trainer.strategy.root_device)
        with clock.doing("average"), timer.measure():
            num_bytes = self._average_for_evaluation()
        if num_bytes:
            self._record("evaluation", timer.take(), num_bytes)
        self._published = True

    def _average_for_evaluation(self) -> int:
        """Average what differs between ranks; return the bytes that this process sent."""
        ranks, buffers = self._ranks, self._ranks.live_buffers
        if not buffers:
            return 0
        blocks = DataTraits(self._trainer.datamodule).blocks
        weight = 1.0 if blocks is None else float(blocks.num_local)  # of the full graph, statistics of its own rows
        states = ranks.buffers()
        sums = [averaging.weighted_sum([(weight, state)], like=buffers) for state in states]
        total, num_bytes = tree_sum(sums, ranks.count, "averaging weights")
        average, more = averaging.averaged(total, states, buffers)
        if self._trainer.is_last_batch:
            ranks.forget()
        else:
            ranks.leave(buffers)
        averaging.load_state(buffers, average)
        return num_bytes + more

    def state_dict(self) -> dict[str, Any]:
        if self._trainer is None or self._trainer.is_last_batch:
            return {}
        optimizers = self._trainer.optimizers
        return self._ranks.state_dict(self._waiting, optimizers[0] if optimizers else None)

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        ranks = [own for process in states for own in process.values()]  # processes have them in order
        return {"policy": type(self).__name__, "ranks": ranks} if any(ranks) else {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if not state or state["policy"] != type(self).__name__ or len(state["ranks"]) != self._ranks.count:
            return
        self._waiting = self._ranks.load_state_dict({rank: state["ranks"][rank] for rank in self._ranks.own})

    @property
    def _last_rank(self) -> int:
        """The last logical rank of this process, whose gradients Lightning computes."""
        return self._ranks.own[-1]

    @property
    def _live(self) -> averaging.State:
        return averaging.module_state(self._trainer.lightning_module)

    def _record(self, purpose: str, seconds: float, num_bytes: int, **counts: int) -> None:
        record(
            "average",
            purpose=purpose,
            epoch=self._trainer.current_epoch,
            passes=self._trainer.current_epoch + 1,
            seconds=seconds,
            bytes=num_bytes,
            rank=averaging.rank(),
            world_size=averaging.world_size(),
            **counts,
        )

    def teardown(self) -> None:
        self._published = True
        if self._trainer is not None and self._early is not None:
            self._early.close()
            self._early = None

    def _overlaps(self) -> bool:
        """Whether buckets are sent while the backward goes on."""
        trainer, module = self._trainer, self._trainer.lightning_module
        if averaging.world_size() == 1 or not trainer.optimizers or self.local_clip is not None:
            return False
        others = trainer.strategy.exchange_run is not None or ModuleTraits(module).inputs is not None
        if self.overlap is None:
            return trainer.strategy.root_device.type == "cuda" and not others
        if self.overlap and others:
            raise StrategyError(
                "GradientAveraging(overlap=True) sends gradients in the backward, where rows are sent already: leave "
                "overlap out"
            )
        return self.overlap

    def _clip(self, parameters: list[Tensor]) -> None:
        if self.local_clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.local_clip * self._ranks.count**0.5)

    def _average(self, parameters: list[Tensor], optimizer: Optimizer) -> None:
        self._clip(parameters)
        if self._ranks.count == 1:
            return
        with clock.doing("average"), self._timer.measure():
            self._bytes += self._join(parameters, optimizer)
        self._steps += 1

    def _weight(self, rank: int) -> float:
        return 1 if self._adds_up else self._ranks.targets[rank]

    def _join(self, parameters: list[Tensor], optimizer: Optimizer) -> int:
        """Join the gradients of all ranks; return the bytes that this process sent."""
        weight, mean = self._weight(self._last_rank), not self._adds_up
        if self._early is not None:
            return self._early.join(weight, mean)
        return reduce_gradients(self._buckets, weight, mean)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


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

    _is_alike = False

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

    @property
    def replicas_equal(self) -> bool:
        """Whether no process has stepped by itself since weights were last averaged."""
        return not self._apart

    def _average_for_evaluation(self) -> int:
        if not self._apart:
            return super()._average_for_evaluation()
        self._ranks.leave(self._live)
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
        num_bytes = super()._join(parameters, optimizer)
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
