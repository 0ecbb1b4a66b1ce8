"""One run under an exchange policy: the route, the state of every layer, the account of what was sent."""

import time

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import StrategyError
from ...events import record
from .. import averaging
from .layer_exchange import Blocks, ExchangeClock, LayerExchange, RowTransfer, block_route, halo_route
from .policies import ExchangePlan, ExchangePolicy, exchange_layers
from .transport import BACKWARD, EVALUATION, FORWARD, STATIC, Ledger, Transport


class ExchangeRun:
    """State that the exchanges of all layers share during one fit.

    Args:
        plan: How rows travel.
        blocks: Block of this process.
        layers: The model's exchange layers, in the order of its forward pass.
        pulls: Whether gradients are pulled, one flag per layer.
        device: Device of the model.
        num_epochs: Epochs of the run, where its end is exact.
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
        self.ledger, self.clock = Ledger(), ExchangeClock(plan, num_epochs)
        self.transport = Transport(self.ledger, device)
        shared = (self.route, self.transport, self.clock)
        self.layers = [LayerExchange(*shared, index, pull) for index, pull in enumerate(pulls)]
        self._modules = layers
        for module, exchange in zip(layers, self.layers, strict=True):
            module.exchange = exchange

    def begin_step(self, epoch: int) -> None:
        """Begin the training step of an epoch; see `ExchangeClock.begin_step`.

        Where changes decide who sends, ranks tell each other of all layers at once, while the first layer is computed.
        """
        self._step_start = time.perf_counter()
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
        compute_seconds = time.perf_counter() - self._step_start - ledger.seconds - averaging_seconds
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

    def detach(self) -> None:
        """Leave the model as a single process reads it; write down what testing and predicting sent."""
        self._record_evaluation()
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
    """A run in which arcs between processes are dropped while training.

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
    blocks = getattr(trainer.datamodule, "blocks", None)
    if blocks is None:
        return None
    layers, device = exchange_layers(trainer.lightning_module), trainer.strategy.root_device
    if trainer.world_size > 1 and any(isinstance(one, _BatchNorm) for one in trainer.lightning_module.modules()):
        rank_zero_warn(
            "BatchNorm (norm=batch) takes its statistics from each process's own block: results differ from those of "
            "one process; norm=layer gives the same on any number of them"
        )
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
    pulls = [plan.backward != "push" and undirected and getattr(layer, "can_pull", False) for layer in layers]
    return ExchangeRun(plan, blocks, layers, pulls, device, trainer.max_epochs or 0)
