"""Synchronous SGD: gradients are averaged over processes before every optimizer step, or with bounded staleness."""

import time
from collections.abc import Callable
from numbers import Real
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...errors import StrategyError, check_count
from ...events import clock, record
from ...graph import batch_of
from ...traits import DataTraits
from .. import averaging
from ..averaging import check_ranks
from ..exchange.bounds import checked_epochs
from .policy import Step, WeightPolicy, load_gradients, saved_gradients


class GradientAveraging(WeightPolicy):
    """Average gradients over ranks before each step, g = sum(b_r g_r) / sum(b_r), b_r = targets of rank r's batches.

    Where the sampler weighs losses (GraphSAINT) b_r is the number of batches: their losses are estimates of one mean.

    With losses that are means over targets this is the gradient of the mean over all of them; so it is with several
    labels a target where all are known (a mean over known labels is weighed by its targets all the same). Full-graph
    batches carry shares of one loss instead: their gradients are added up. It is done once a step, accumulated
    gradients included, after the last backward and before clipping. A parameter without gradient on a rank counts as
    zero there; one without gradient on every rank keeps none. Buffers (BatchNorm) are averaged before validation and
    checkpoints. Every rank must have the same number of batches.

    A checkpoint may be saved within an epoch: training goes on as if nothing had been saved, and so does a run that is
    resumed from it with as many processes. It then holds each rank's buffers, and its gradients where these wait for
    the rest of a window.

    Args:
        bucket_bytes: gradients are sent in buckets of about this size, > 0.
        local_clip: before gradients are joined, each rank clips the norm of its own to local_clip x
            sqrt(world_size), > 0; None: no clipping. The Trainer's own clipping comes after, and keeps training exact.

    Raises:
        ValueError: a number that is not positive.

    Cost: 4 bytes a weight on the wire per step (8 in float64).
    Source: Zheng et al., DistDGL, section 5.6; local clipping: SANCUS, Algorithm 3.
    """

    equal_batches = True
    keeps_state = True

    def __init__(self, bucket_bytes: int = 25 * 2**20, local_clip: float | None = None) -> None:
        check_count("weights.bucket_bytes", bucket_bytes)
        if local_clip is not None and not (isinstance(local_clip, Real) and local_clip > 0):
            raise ValueError(f"weights.local_clip must be a number > 0 or None, got {local_clip!r}")
        self.bucket_bytes, self.local_clip = bucket_bytes, local_clip
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
        self._own: averaging.State | None = None  # of this rank, while the model holds an average in their place
        self._targets = self._waiting = 0
        self._restored_gradients: list[Tensor | None] | None = None
        self._seconds, self._bytes, self._steps = 0.0, 0, 0

    def on_train_start(self) -> None:
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
        if self._restored_gradients is not None:  # not before: Lightning zeroes gradients after it has loaded all
            load_gradients(self._trainer.optimizers[0], self._restored_gradients)
            self._restored_gradients = None

    def begin_batch(self, batch: Any) -> None:
        if batch is None:
            raise StrategyError(
                f"rank {averaging.rank()}: a train loader yielded None, and GradientAveraging waits for a gradient of "
                "every rank: split the targets evenly, or use weights=ModelAveraging()"
            )
        if self._own is not None:
            averaging.load_state(self._live, self._own)
            self._own = None
        # Shares of one loss over the whole graph are added up, losses of batches are averaged.
        batch = batch_of(batch)
        self._adds_up = batch.loss_is_share
        # A sampler that weighs losses has made each batch's loss a fair estimate: they count alike.
        weighed = batch.loss_weight is not None or batch.batch_size is None
        self._targets += 1 if weighed else int(batch.batch_size)
        self._waiting += 1
        self._published = False

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], step: Step) -> Any:
        def averaged_closure() -> Any:
            loss = closure()
            self._average(optimizer)
            return loss

        output = step(optimizer, averaged_closure)
        self._targets = self._waiting = 0
        return output

    def end_epoch(self) -> dict[str, float]:
        self._record("gradients", self._seconds, self._bytes, steps=self._steps)
        metrics = {"passes": float(self._trainer.current_epoch + 1), "average_ms": self._seconds * 1e3}
        self._seconds, self._bytes, self._steps = 0.0, 0, 0
        return metrics

    def publish(self) -> None:
        if self._trainer is None or self._published:
            return
        start = time.perf_counter()
        with clock.doing("average"):
            num_bytes = self._average_for_evaluation()
        if num_bytes:
            self._record("evaluation", time.perf_counter() - start, num_bytes)
        self._published = True

    def _average_for_evaluation(self) -> int:
        """Average what differs between ranks; return the bytes that this rank sent."""
        buffers = {name: buffer.detach() for name, buffer in self._trainer.lightning_module.named_buffers()}
        if not buffers:
            return 0
        if not self._trainer.is_last_batch:
            self._own = averaging.copy_state(buffers)
        blocks = DataTraits(self._trainer.datamodule).blocks
        weight = 1.0 if blocks is None else float(blocks.num_local)  # of the full graph, statistics of its own rows
        average, num_bytes = averaging.weighted_average([(weight, buffers)], like=buffers)
        averaging.load_state(buffers, average)
        return num_bytes

    def state_dict(self) -> dict[str, Any]:
        if self._trainer is None or self._trainer.is_last_batch:
            return {}
        state: dict[str, Any] = {}
        if self._own is not None:
            names = [name for name, _ in self._trainer.lightning_module.named_buffers()]
            state["buffers"] = {name: self._own[name].cpu() for name in names}
        if self._waiting and self._trainer.optimizers:
            state |= {"batches": self._waiting, "targets": self._targets}
            state["gradients"] = saved_gradients(self._trainer.optimizers[0])
        return state

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"policy": type(self).__name__, "ranks": states} if any(states) else {}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if not state or state["policy"] != type(self).__name__:
            return
        check_ranks(self._trainer, len(state["ranks"]))
        mine = state["ranks"][averaging.rank()] if len(state["ranks"]) == averaging.world_size() else {}
        self._own = mine.get("buffers")
        self._restored_gradients = mine.get("gradients")
        self._waiting, self._targets = mine.get("batches", 0), mine.get("targets", 0)

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

    def _average(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if self.local_clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.local_clip * averaging.world_size() ** 0.5)
        if averaging.world_size() == 1:
            return
        start = time.perf_counter()
        with clock.doing("average"):
            self._bytes += self._join(parameters, optimizer)
        self._seconds += time.perf_counter() - start
        self._steps += 1

    @property
    def _weight(self) -> float:
        return 1 if self._adds_up else self._targets

    def _join(self, parameters: list[Tensor], optimizer: Optimizer) -> int:
        """Join the gradients of all ranks; return the bytes that this rank sent."""
        return reduce_gradients(parameters, self._weight, self.bucket_bytes, mean=not self._adds_up)


@torch.no_grad()
def reduce_gradients(parameters: list[Tensor], weight: float, bucket_bytes: int, mean: bool = True) -> int:
    """Replace gradients by their weighted mean or sum over all ranks, in place.

    Args:
        parameters: the same on every rank; `.grad` may be None.
        weight: this rank's weight, an integer >= 0.
        bucket_bytes: size of the messages, roughly.
        mean: divide by the sum of the weights.

    Returns:
        Bytes that this rank handed to the process group.

    Raises:
        StrategyError: a gradient is sparse, or another process was lost.
    """
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise StrategyError("GradientAveraging cannot average sparse gradients: build the embedding with sparse=False")
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    device = parameters[0].device
    # Filled on the device, and read on the host only where a gradient is missing here: a GPU is not waited for.
    missing = [number for number, p in enumerate(parameters) if p.grad is None]
    header = torch.ones(1 + len(parameters), dtype=dtype, device=device)
    header[0] = weight
    for number in missing:
        header[1 + number] = 0
    buckets = _buckets(parameters, max(1, bucket_bytes // dtype.itemsize))
    messages = [header]
    for bucket in buckets:
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        messages.append(torch.cat([gradient.reshape(-1).to(dtype) for gradient in flat]).mul_(weight))
    with averaging.clear_error("averaging gradients"):
        for work in [dist.all_reduce(message, async_op=True) for message in messages]:
            work.wait()
    present = iter(header[1:].tolist() if missing else [1.0] * len(parameters))
    for bucket, message in zip(buckets, messages[1:], strict=True):
        if mean:
            message.div_(header[0].clamp(min=1))  # counts; no targets at all leave a gradient of zero
        for p, values in zip(bucket, message.split([p.numel() for p in bucket]), strict=True):
            if next(present):
                p.grad = values.reshape(p.shape).to(p.dtype)
    return sum(message.numel() * message.element_size() for message in messages)


def _buckets(parameters: list[Tensor], capacity: int) -> list[list[Tensor]]:
    buckets, space = [], 0
    for parameter in parameters:
        if not buckets or parameter.numel() > space:
            buckets.append([])
            space = capacity
        buckets[-1].append(parameter)
        space -= parameter.numel()
    return buckets


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
