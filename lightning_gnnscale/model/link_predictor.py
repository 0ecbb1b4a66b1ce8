"""The Lightning module over links: unsupervised node embeddings, and link prediction."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from ..errors import StrategyError
from .backbone_module import MAKE_OPTIMIZER, MAKE_SCHEDULER, BackboneModule, is_pass
from .inference import LayerwiseOutput
from .node_inputs import NodeInputs


def link_ranks(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the rank of each link among its negatives, 1 the best; with ties the mean of best and worst.

    Args:
        positive: (num_links,) scores.
        negative: (num_links, num_negatives) scores, -inf where there is none.

    Returns:
        (num_links,) float64, multiples of a half.
    """
    above = (negative > positive[:, None]).sum(dim=1)
    beside = ((negative == positive[:, None]) & negative.isfinite()).sum(dim=1)
    return 1 + above.double() + beside.double() / 2


class LinkMetric(Metric):
    """Base: the mean of a value of the rank over all links of all processes; a link counts alike on each of them."""

    full_state_update = False

    def __init__(self, **options):
        super().__init__(**options)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def value(self, ranks: Tensor) -> Tensor:
        """Return what a link of this rank adds, (num_links,)."""
        raise NotImplementedError

    def update(self, ranks: Tensor) -> None:
        """Add links by their (num_links,) ranks; none are fine."""
        self.total += self.value(ranks).double().sum()
        self.count += len(ranks)

    def compute(self) -> Tensor:
        """Return the mean as float32; 0 without links."""
        return (self.total / self.count.clamp(min=1)).float()


class MeanReciprocalRank(LinkMetric):
    """The mean of 1 / rank."""

    def value(self, ranks: Tensor) -> Tensor:
        return ranks.reciprocal()


class HitsAt(LinkMetric):
    """The share of links whose rank is at most k.

    Args:
        k: >= 1.

    Raises:
        ValueError: k below 1.
    """

    def __init__(self, k: int, **options):
        super().__init__(**options)
        if k < 1:
            raise ValueError(f"hits must be at least 1, got {k}")
        self.k = k

    def value(self, ranks: Tensor) -> Tensor:
        return ranks <= self.k


DECODERS = ("dot", "mlp")
CHUNK_BYTES = 64 << 20  # of embeddings read at once while links are ranked


class DotDecoder(nn.Module):
    """Score of a link: the dot product of its ends."""

    def forward(self, source: Tensor, other: Tensor) -> Tensor:
        """Return the scores of (..., channels) ends that broadcast."""
        return (source * other).sum(dim=-1)


class MLPDecoder(nn.Module):
    """Score of a link: a small network applied to the elementwise product of its two ends; direction has no effect.

    Args:
        channels: Width of the embeddings and of the hidden layer.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.hidden, self.out = nn.Linear(channels, channels), nn.Linear(channels, 1)

    def forward(self, source: Tensor, other: Tensor) -> Tensor:
        """Return the scores of (..., channels) ends that broadcast."""
        return self.out(self.hidden(source * other).relu()).squeeze(-1)


class LinkPredictor(BackboneModule):
    """Embed nodes so that linked ones score high: unsupervised training, and link prediction.

    The loss is the mean over the batch's pairs of -log s(u, v) - w * mean over negatives of log(1 - s(u, n)), where s
    is the sigmoid of the decoder. It is GraphSAGE's loss if w is the number of negatives (the default), and plain
    binary cross-entropy over a balanced set if w = 1. A training batch is a `MiniBatch` of a `LinkSampler`.

    An evaluation batch is an `EvaluationShare` with links. All embeddings are computed exactly, layer by layer. Then
    each held-out link is ranked among its false ends, a bounded piece at a time, with the work divided among the ranks.
    Logged: `train_loss`, and for val and test `*_loss`, `*_mrr` and `*_hits@k`. Predictions are the embeddings, by
    node.

    Args:
        backbone: As for `NodeClassifier`; its `out_channels` is the width of the embeddings.
        lr, weight_decay: Learning rate and weight decay of Adam, used if no optimizer is given.
        decoder: "dot", "mlp", or a module called as (source, other) with (..., channels) ends that broadcast.
        negative_weight: The w above; None: the number of negatives.
        hits: Values of k in Hits@k, each >= 1.
        embedding_channels: Width of the embeddings; None: the backbone's `out_channels`.
        optimizer, scheduler, inputs: As for `NodeClassifier`.

    Raises:
        ValueError: an unknown decoder, a hit below 1, or an embedding of unknown width.

    Source: Hamilton et al., GraphSAGE, NeurIPS 2017, equation (1).
    """

    trains_on_links = True

    def __init__(
        self,
        backbone: nn.Module,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        decoder: str | Callable[[Tensor, Tensor], Tensor] = "dot",
        negative_weight: float | None = None,
        hits: Sequence[int] = (1, 10),
        embedding_channels: int | None = None,
        optimizer: MAKE_OPTIMIZER | None = None,
        scheduler: MAKE_SCHEDULER | None = None,
        inputs: NodeInputs | None = None,
    ):
        lr, weight_decay = float(lr), float(weight_decay)  # numpy's numbers bar a checkpoint
        super().__init__(backbone, lr, weight_decay, optimizer, scheduler, inputs)
        channels = embedding_channels or getattr(backbone, "out_channels", None)
        if channels is None:
            raise ValueError("embedding_channels must be given: the backbone has no out_channels to take it from")
        if not callable(decoder) and decoder not in DECODERS:
            raise ValueError(f"decoder must be a module or one of {', '.join(DECODERS)}, got {decoder!r}")
        if negative_weight is not None and negative_weight < 0:
            raise ValueError(f"negative_weight must be at least 0 or None, got {negative_weight}")
        hits = [int(k) for k in hits]
        self.save_hyperparameters(ignore=["backbone", "decoder", "optimizer", "scheduler", "inputs"])
        self.channels, self.negative_weight, self.hits = int(channels), negative_weight, hits
        self.decoder = decoder if callable(decoder) else DotDecoder() if decoder == "dot" else MLPDecoder(self.channels)
        self.losses = nn.ModuleDict({split: MeanMetric() for split in ("val", "test")})
        self.scores = nn.ModuleDict({split: self._scores() for split in ("val", "test")})

    def saved_arguments(self) -> dict[str, Any]:
        """Return the decoder's name, where it is one of `DECODERS`."""
        names = {DotDecoder: "dot", MLPDecoder: "mlp"}
        return {"decoder": names[type(self.decoder)]} if type(self.decoder) in names else {}

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return the loss over the batch's pairs; 0, with zero gradients, where there are none."""
        if getattr(batch, "pairs", None) is None:
            raise StrategyError(
                "LinkPredictor trains on batches with pairs, and these have none: use LinkSampler (sampler=links) with "
                "PartitionDataModule and mode=mini_batch"
            )
        embeddings = self(batch)[: batch.batch_size]
        source = embeddings[batch.pairs[0]]
        positive = self.decoder(source, embeddings[batch.pairs[1]])
        negative = self.decoder(source[:, None], embeddings[batch.negatives])
        num_pairs, num_negatives = max(1, len(source)), batch.negatives.shape[1]
        loss = F.softplus(-positive).sum() / num_pairs
        return loss + self._negative_weight(num_negatives) * F.softplus(negative).sum() / (num_pairs * num_negatives)

    def on_validation_epoch_start(self) -> None:
        """Start the validation metrics anew."""
        self._reset("val")

    def on_test_epoch_start(self) -> None:
        """Start the test metrics anew."""
        self._reset("test")

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Rank this rank's share of the validation links."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Rank this rank's share of the test links."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Any]:
        """Embed this rank's nodes (`EvaluationShare`) or the seeds (`MiniBatch`).

        Returns:
            "nodes": (num_rows,) int64 array of store ids; "prediction": (num_rows, channels) float32 on the CPU.
        """
        if not is_pass(batch):
            nodes = batch.n_id[: batch.batch_size].cpu().numpy()
            return {"nodes": nodes, "prediction": self(batch)[: batch.batch_size].float().cpu()}
        return self._predict_layerwise(batch, lambda outputs: outputs, self.channels)

    def _evaluate(self, batch: Any, split: str) -> None:
        links = getattr(batch, "links", None)
        if links is None:
            raise StrategyError(
                f"LinkPredictor evaluates on held-out links, and the {split} loader has none: hold some out "
                "(hold_out_edges, or dataset.hold_out), and give PartitionDataModule sampler=LinkSampler(...)"
            )
        output = self._infer(batch)
        count = 0
        for pairs, negatives in links.chunks(self._chunk_links(links.num_negatives)):
            ranks, losses = self._rank(output, pairs, negatives)
            self._update(split, ranks, losses)
            count += len(ranks)
        if count == 0:  # a metric wants an update, and a rank without one would be warned about
            self._update(split, torch.zeros(0, device=self.device), torch.zeros(0, device=self.device))
        batch.source.barrier()
        # Metric objects, not numbers: they add up counts over ranks, so no link weighs more on one of them.
        for name, metric in self.scores[split].items():
            self.log(f"{split}_{name}", metric, on_step=False, on_epoch=True, prog_bar=name == "mrr", batch_size=1)
        self.log(f"{split}_loss", self.losses[split], on_step=False, on_epoch=True, batch_size=1)

    def _rank(self, output: LayerwiseOutput, pairs: np.ndarray, negatives: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return (num_links,) ranks and losses; `negatives` has -1 where there is none."""
        missing = torch.from_numpy(negatives < 0).to(self.device)
        source, other, false = (self._rows(output, nodes) for nodes in (pairs[0], pairs[1], _present(negatives, pairs)))
        positive = self.decoder(source, other).float()
        negative = self.decoder(source[:, None], false).float().masked_fill(missing, -torch.inf)
        found = (~missing).sum(dim=1)
        weight = self._negative_weight(negatives.shape[1])
        losses = F.softplus(-positive) + weight * F.softplus(negative).sum(dim=1) / found.clamp(min=1)
        return link_ranks(positive, negative), losses

    def _rows(self, output: LayerwiseOutput, nodes: np.ndarray) -> Tensor:
        dtype = next(self.backbone.parameters()).dtype
        return torch.from_numpy(output.read(nodes)).to(device=self.device, dtype=dtype)

    def _update(self, split: str, ranks: Tensor, losses: Tensor) -> None:
        for metric in self.scores[split].values():
            metric.update(ranks)
        weight = float(len(losses))
        self.losses[split].update(
            losses.detach().mean() if len(losses) else torch.zeros((), device=self.device), weight
        )

    def _reset(self, split: str) -> None:
        # As in NodeClassifier: counts reset in inference mode cannot be added to outside of it.
        with torch.inference_mode(False):
            self.losses[split].reset()
            for metric in self.scores[split].values():
                metric.reset()

    def _num_losses(self, batch: Any) -> int:
        return len(batch.pairs[0])

    def _negative_weight(self, num_negatives: int) -> float:
        return num_negatives if self.negative_weight is None else self.negative_weight

    def _chunk_links(self, num_negatives: int) -> int:
        return max(1, CHUNK_BYTES // (4 * self.channels * (num_negatives + 2)))

    def _scores(self) -> nn.ModuleDict:
        return nn.ModuleDict({"mrr": MeanReciprocalRank(), **{f"hits@{k}": HitsAt(k) for k in self.hits}})


def _present(negatives: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return false ends with the link's own first end where there is none: a node whose embedding is there."""
    return np.where(negatives < 0, pairs[0][:, None], negatives)
