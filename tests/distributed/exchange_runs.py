"""What tests of exchange policies measure in a run: bytes that really leave a process, and what the events tell."""

import torch
from full_graph_runs import fit
from lightning.pytorch.callbacks import Callback

from lightning_gnnscale import events
from lightning_gnnscale.strategy.exchange import transport


class CountedBytes(Callback):
    """Counts, at the process group itself, the bytes that this rank hands over for others.

    Attributes:
        epochs: of each epoch a dict: "forward", "backward", "evaluation" -> bytes; evaluation is that before the
            epoch's training.
    """

    def __init__(self):
        self.epochs, self.phase, self._now = [], "forward", {}

    def setup(self, trainer, pl_module, stage):
        self._plain = torch.distributed.all_to_all_single

        def counting(incoming, outgoing, arriving, leaving, **options):
            if outgoing.dtype != torch.uint8:  # gradients
                return self._plain(incoming, outgoing, arriving, leaving, **options)
            assert len(outgoing) == sum(leaving)
            assert len(incoming) == sum(arriving)
            others = [size for rank, size in enumerate(leaving) if rank != trainer.global_rank]
            self._now[self.phase] = self._now.get(self.phase, 0) + sum(others)
            return self._plain(incoming, outgoing, arriving, leaving, **options)

        self._plain_broadcast = torch.distributed.broadcast

        def counting_broadcast(tensor, src, **options):
            if src == trainer.global_rank and tensor.dtype == torch.uint8:
                self._now[self.phase] = self._now.get(self.phase, 0) + len(tensor) * (trainer.world_size - 1)
            return self._plain_broadcast(tensor, src, **options)

        transport.dist.all_to_all_single = counting
        transport.dist.broadcast = counting_broadcast

    def on_before_backward(self, trainer, pl_module, loss):
        self.phase = "backward"

    def on_after_backward(self, trainer, pl_module):
        self.phase = "forward"

    def on_validation_start(self, trainer, pl_module):
        self.phase = "evaluation"

    def on_validation_end(self, trainer, pl_module):
        self.phase = "forward"

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.epochs.append(self._now)
        self._now = {}

    def teardown(self, trainer, pl_module, stage):
        transport.dist.all_to_all_single = self._plain
        transport.dist.broadcast = self._plain_broadcast


def fit_and_tell(folder, name, root, model, exchange, **options):
    """Train; return the weights, each epoch's metrics and this rank's `exchange` events as the file has them."""
    path = folder / f"events of {name}.jsonl"
    events.open_log(path)
    weights, metrics = fit(folder, root, model, exchange, **options)
    events.open_log(None)
    rank = torch.distributed.get_rank()
    told = [event for event in events.read_log(path) if event["event"] == "exchange" and event["rank"] == rank]
    return weights, metrics, told


def rows_of(told):
    """Return, of `exchange` events, (epoch, layer) -> (rows sent, rows skipped)."""
    return {(event["epoch"], row["layer"]): (row["sent"], row["skipped"]) for event in told for row in event["rows"]}
