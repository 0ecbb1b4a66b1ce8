"""One run under an exchange policy: the route, the state of every layer, the account of what was sent."""

from contextlib import ExitStack
from functools import partial

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ...across_ranks import of_first_rank
from ...device_time import DeviceTimer
from ...errors import StrategyError
from ...events import record
from ...traits import DataTraits
from .. import averaging
from .layer_exchange import ExchangeClock, LayerExchange, RowTransfer
from .policies import ExchangePlan, ExchangePolicy, exchange_layers, row_model_of
from .route import Blocks, block_route, halo_route
from .transport import BACKWARD, EVALUATION, FORWARD, STATIC, Ledger, Transport


class ExchangeRun:
    """State that the exchanges of all layers share during one fit.

    Args:
        plan: How rows travel.
        blocks: Block of this process.
        layers: The model's exchange layers, in the order of its forward pass.
        pulls: Whether gradients are pulled, one flag per layer.
        device: Device of the model.
        num_epochs: Epochs of the run; exact epochs at its end, and shares, are counted from it.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        blocks: Blocks,
        layers: list,
        pulls: list[bool],
        device: torch.device,
        num_epochs: int = 0,
    ):
        self.route = (block_route if plan.whole_blocks else halo_route)(blocks, device)
        self.ledger, self.clock = Ledger(device), ExchangeClock(plan, num_epochs)
        self._step, self._step_timer = ExitStack(), DeviceTimer(device)
        self.transport = Transport(self.ledger, device)
        shared = (self.route, self.transport, self.clock)
        self.layers = [LayerExchange(*shared, index, pull) for index, pull in enumerate(pulls)]
        self._modules, self._norms = layers, []
        for module, exchange in zip(layers, self.layers, strict=True):
            module.exchange = exchange

    def begin_step(self, epoch: int) -> None:
        """Begin the training step of an epoch; see `ExchangeClock.begin_step`.

        Where changes decide who sends, ranks announce all layers at once, while the first layer is computed.
        """
        self._step = ExitStack()
        self._step.enter_context(self._step_timer.measure())
        self.ledger.begin_step()
        self.clock.begin_step(epoch)
        if self.clock.plan.foretells and not self.clock.exact and len(self.layers) > 1:
            coming = torch.stack([layer.coming_bytes() for layer in self.layers[1:]], dim=1).flatten(1)
            self.clock.agreement = self.transport.agree(coming.to(self.transport.device), 1)

    def end_epoch(self, averaging_seconds: float = 0.0) -> dict[str, float]:
        """Record the epoch's exchange, and return its metrics, summed over all ranks.

        Evaluation bytes are those since the step before.

        Args:
            averaging_seconds: Time that joining gradients took in this step; it counts as neither exchange nor compute.
        """
        ledger, rank = self.ledger, averaging.rank()
        cache_bytes = sum(layer.cache_bytes for layer in self.layers)
        self._step.close()
        compute_seconds = self._step_timer.take() - ledger.seconds - averaging_seconds
        record(
            "exchange",
            epoch=self.clock.epoch,
            rank=rank,
            world_size=averaging.world_size(),
            bytes=[
                {"layer": layer, "direction": direction, "bytes": count}
                for (layer, direction), count in sorted(ledger.bytes.items())
            ],
            rows=[
                {"layer": layer, "sent": sent, "skipped": ledger.skipped_rows[layer]}
                for layer, sent in sorted(ledger.sent_rows.items())
            ],
            broadcasts=[
                {"layer": layer, "done": done, "skipped": ledger.skipped_broadcasts[layer]}
                for layer, done in sorted(ledger.broadcasts.items())
            ],
            seconds=ledger.seconds,
            wait_seconds=ledger.wait_seconds,
            compute_seconds=compute_seconds,
            evaluation_seconds=ledger.evaluation_seconds,
            cache_bytes=cache_bytes,
        )
        metrics = self._sum_over_ranks(self._counts(cache_bytes))
        seconds = {"exchange": ledger.seconds, "exchange_wait": ledger.wait_seconds, "compute": compute_seconds}
        metrics |= {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
        ledger.clear()
        return metrics

    def end_training(self) -> dict[str, float]:
        """Write down what evaluation sent after the last epoch, and return its metric, a sum over all ranks."""
        return self._sum_over_ranks({f"exchange_{EVALUATION}_bytes": self._record_evaluation()})

    def versions(self) -> dict[int, torch.Tensor]:
        """Return the int64 versions of each layer but the first: the epochs in which what receivers hold was sent.

        One a source of the bound; this rank's alone where a block's change decides, which no other rank sees. Under a
        policy that holds nothing they stay -1.
        """
        bound, rank = self.clock.plan.bound, self.route.rank
        own = bound is not None and bound.needs_change and not self.clock.plan.by_row
        known = slice(rank, rank + 1) if own else slice(None)
        return {layer.layer: torch.from_numpy(layer.versions[known].copy()) for layer in self.layers[1:]}

    def join_norms(self, model: nn.Module) -> None:
        """Let every BatchNorm of a model take its statistics over the rows of all processes, while it trains."""
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                object.__setattr__(module, "forward", partial(_joined_norm, module))
                self._norms.append(module)

    def detach(self) -> None:
        """Leave the model as a single process reads it; write down what testing and predicting sent."""
        self._record_evaluation()
        for norm in self._norms:
            object.__delattr__(norm, "forward")
        self.transport.close()
        for module in self._modules:
            del module.exchange

    def _counts(self, cache_bytes: int) -> dict[str, int]:
        ledger, bound = self.ledger, self.clock.plan.bound
        counts = {f"exchange_{direction}_bytes": 0 for direction in DIRECTIONS}
        for (_, direction), num_bytes in ledger.bytes.items():
            counts[f"exchange_{direction}_bytes"] += num_bytes
        for layer in self.layers[1:]:
            for direction in (FORWARD, BACKWARD):
                counts[f"exchange_layer{layer.layer}_{direction}_bytes"] = ledger.bytes[layer.layer, direction]
        counts |= {"rows_sent": sum(ledger.sent_rows.values()), "rows_skipped": sum(ledger.skipped_rows.values())}
        counts["exchange_cache_bytes"] = cache_bytes
        for rank in range(averaging.world_size()) if bound is not None else ():
            own = rank == averaging.rank()
            counts[f"broadcasts_done_rank{rank}"] = sum(ledger.broadcasts.values()) if own else 0
            counts[f"broadcasts_skipped_rank{rank}"] = sum(ledger.skipped_broadcasts.values()) if own else 0
        return counts

    def _sum_over_ranks(self, counts: dict[str, int]) -> dict[str, float]:
        sums = torch.tensor(list(counts.values()), dtype=torch.float64, device=self.transport.device)
        averaging.all_reduce(sums, "sum", "adding up bytes")
        return dict(zip(counts, sums.tolist(), strict=True))

    def _record_evaluation(self) -> int:
        """Write down what was sent since the last epoch's end, or the last call; return its bytes."""
        self.ledger.begin_step()
        num_bytes = sum(self.ledger.bytes.values())
        if num_bytes:
            record(
                "exchange_evaluation",
                epoch=self.clock.epoch,
                rank=averaging.rank(),
                bytes=num_bytes,
                seconds=self.ledger.evaluation_seconds,
            )
        self.ledger.clear()
        return num_bytes


DIRECTIONS = (FORWARD, BACKWARD, STATIC, EVALUATION)


class LocalRows(ExchangeRun):
    """A run in which edges between processes are dropped while training.

    Args:
        blocks: Block of this process.
        layers: The model's exchange layers.
        device: Device of the model.
    """

    def __init__(self, blocks: Blocks, layers: list, device: torch.device):
        super().__init__(ExchangePlan(), blocks, layers, [False] * len(layers), device)
        for module in layers:
            module.exchange = EvaluationOnly(module.exchange)


class EvaluationOnly:
    """An exchange that a layer asks outside of training alone.

    Args:
        exact: what it then asks.
    """

    local_only = True
    pulls = False

    def __init__(self, exact: LayerExchange):
        self._exact = exact

    def send(self, rows: Tensor, training: bool) -> RowTransfer:
        return self._exact.send(rows, False)


def start_run(policy: ExchangePolicy, trainer: pl.Trainer) -> ExchangeRun | LocalRows | None:
    """Give every exchange layer of the model its exchange; None where the model trains on parts.

    Raises:
        StrategyError: gradients cannot be pulled in this graph.
    """
    blocks = DataTraits(trainer.datamodule).blocks
    if blocks is None:
        return None
    row_model = row_model_of(trainer.lightning_module)
    if row_model is not None:
        try_out = partial(trainer.lightning_module.try_out_rows, trainer.datamodule.whole_block)
        row_model.adopt(None if trainer.world_size == 1 else of_first_rank(try_out))
    layers, device = exchange_layers(trainer.lightning_module), trainer.strategy.root_device
    plan = policy.plan()
    if plan is None:
        return LocalRows(blocks, layers, device)
    given = plan.given_versions
    if given is not None and len(given) != blocks.world_size:
        raise StrategyError(
            f"bound.initial_versions must be one for each of the {blocks.world_size} processes, got {len(given)}"
        )
    undirected = blocks.symmetric and blocks.edge_weight is None
    if plan.backward == "pull" and not undirected:
        kind = "directed" if not blocks.symmetric else "weighted"
        raise StrategyError(
            f'{type(policy).__name__}(backward="pull") needs an undirected graph without weights, this one is {kind}: '
            'use backward="auto" or "push"'
        )
    pulls = [plan.backward != "push" and undirected and layer.can_pull for layer in layers]
    run = ExchangeRun(plan, blocks, layers, pulls, device, trainer.max_epochs or 0)
    if trainer.world_size > 1 and plan.remote_gradient:
        run.join_norms(trainer.lightning_module)
    return run


class _JoinedSum(Function):
    """The sum of a tensor over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return _summed(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        return _summed(grad)


def _summed(value: Tensor) -> Tensor:
    value = value.clone(memory_format=torch.contiguous_format)
    averaging.all_reduce(value, "sum", "adding up the statistics of BatchNorm")
    return value


def _joined_norm(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Return what a BatchNorm gives for the rows of this process, with the statistics of all processes' rows.

    Args:
        norm: The layer; its running statistics are changed as by its own `forward`.
        x: (num_rows, channels) or (num_rows, channels, length).
    """
    if not (norm.training or norm.running_mean is None):
        return type(norm).forward(norm, x)
    others = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x if x.dtype.itemsize >= 4 else x.float()
    count = _summed(torch.tensor(float(x.numel() // max(1, x.shape[1])), dtype=wide.dtype, device=x.device))
    mean = _JoinedSum.apply(wide.sum(others)) / count
    centred = wide - mean.view(shape)
    variance = _JoinedSum.apply((centred * centred).sum(others)) / count
    if norm.training and norm.running_mean is not None:
        with torch.no_grad():
            norm.num_batches_tracked += 1
            share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
    out = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.weight is not None:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    return out.to(x.dtype)
