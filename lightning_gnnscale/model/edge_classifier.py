"""The Lightning module that classifies edges, from the embeddings of their ends."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from ..errors import StrategyError, check_count, check_integer
from ..graph import batch_of
from .backbone_module import (
    CHUNK_BYTES,
    MAKE_OPTIMIZER,
    MAKE_SCHEDULER,
    BackboneModule,
    is_pass,
    known_to_numpy,
    width_of,
)
from .node_classifier import UNKNOWN
from .node_inputs import NodeInputs


class EdgeClassifier(BackboneModule):
    """Classify edges: cross-entropy over one class for each, by a network of two layers over both ends.

    A training batch is a `MiniBatch` with `pairs`, (2, num_pairs) int64 positions of the edges' ends among the seeds,
    and `edge_label`, (num_pairs,) integers, -1 = unknown, as `LinkSampler(positives="edge", labelled=True)` makes them
    from a store with `edge_label`; or one of `gs.LinkNeighborLoader`, whose pairs are `edge_label_index`. With
    edge_channels it has `pair_attr`, (num_pairs, edge_channels) features of those edges, too. An evaluation batch is
    the same, or an `EvaluationShare` whose links have labels: all embeddings are computed exactly, layer by layer,
    and then each held-out edge is classified once over all ranks, a bounded chunk at a time. Prediction takes the same
    batches, and edges without a class too. Logged: `train_loss`, `val_loss`, `val_acc`, `test_loss`, `test_acc`.

    Args:
        backbone: As for `NodeClassifier`; its `out_channels` is the width of the embeddings.
        num_classes: Number of classes, >= 2.
        lr, weight_decay: Learning rate and weight decay of Adam, used if no optimizer is given.
        hidden_channels: Width between the two layers; None: that of the embeddings.
        edge_channels: Columns of `pair_attr`; 0: they are not read.
        embedding_channels: Width of the embeddings; None: the backbone's `out_channels`.
        predict_logits: Whether predictions are the (num_pairs, num_classes) outputs instead of the (num_pairs,) int64
            class.
        optimizer, scheduler, inputs: As for `NodeClassifier`.

    Raises:
        ValueError: fewer than two classes, edge_channels below 0, or embeddings of unknown width.
    """

    trains_on_links = True
    predicts_edges = True

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        hidden_channels: int | None = None,
        edge_channels: int = 0,
        embedding_channels: int | None = None,
        optimizer: MAKE_OPTIMIZER | None = None,
        scheduler: MAKE_SCHEDULER | None = None,
        inputs: NodeInputs | None = None,
        predict_logits: bool = False,
    ):
        lr, weight_decay = float(lr), float(weight_decay)  # checkpoints hold no numpy numbers
        super().__init__(backbone, lr, weight_decay, optimizer, scheduler, inputs)
        check_integer("num_classes", num_classes, 2)
        check_integer("edge_channels", edge_channels)
        if hidden_channels is not None:
            check_count("hidden_channels", hidden_channels)
        channels = width_of("embedding_channels", embedding_channels, backbone)
        num_classes, edge_channels = int(num_classes), int(edge_channels)
        self.save_hyperparameters(ignore=["backbone", "optimizer", "scheduler", "inputs"])
        self.num_edge_classes, self.edge_channels, self.predict_logits = num_classes, edge_channels, predict_logits
        hidden = hidden_channels or channels
        self.hidden, self.out = nn.Linear(2 * channels + edge_channels, hidden), nn.Linear(hidden, num_classes)
        self._make_metrics(self._score)

    def classify(self, batch: Any) -> Tensor:
        """Return the (num_pairs, num_classes) outputs of a batch's edges.

        Raises:
            StrategyError: the batch has no pairs, or other features of them than the module reads.
        """
        batch = batch_of(batch)
        pairs, attr = _pairs(batch), batch.pair_attr
        if is_pass(batch) or pairs is None:
            raise StrategyError(
                "EdgeClassifier reads batches with pairs and edge_label, but these have none: give PartitionDataModule "
                'sampler=LinkSampler(positives="edge", labelled=True), or the Trainer loaders of such batches'
            )
        embeddings = self(batch)
        return self._head(embeddings[pairs[0]], embeddings[pairs[1]], attr)

    def _head(self, source: Tensor, other: Tensor, attr: Tensor | None) -> Tensor:
        """Return the (num_pairs, num_classes) outputs of edges by the embeddings of both ends."""
        given = 0 if attr is None else attr.shape[1]
        if given != self.edge_channels:
            raise StrategyError(
                f"EdgeClassifier reads pair_attr of {self.edge_channels} columns, batches have {given}: say "
                f"edge_channels={given}"
            )
        rows = [source, other] if attr is None else [source, other, attr.to(source.dtype)]
        return self.out(self.hidden(torch.cat(rows, 1)).relu())

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return the mean loss over the batch's edges with a label; 0, with zero gradients, where there are none."""
        losses, count = self._losses(self.classify(batch), self._labels(batch))
        return losses / count.clamp(min=1)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Any]:
        """Classify this rank's share of the edges that are held out (`EvaluationShare`), or those of a batch.

        Returns:
            "edges": (2, num_pairs) int64 array of the ends' store ids, source and target; "edge_type": (num_pairs,)
            int64 array of their edge types, only where edges have some; "prediction": (num_pairs,) int64 on the CPU, or
            (num_pairs, num_classes) with `predict_logits`. Edges are in the order of the held-out ones, of which each
            rank has a run. No rows where `PredictionWriter` takes them a chunk at a time.
        """
        batch = batch_of(batch)
        links = batch.links
        if is_pass(batch) and links is not None:
            chunks = (
                _predicted(links.edges[:, chosen], links.edge_type, chosen, self.decide(outputs))
                for chosen, outputs in self._classified(batch, links)
            )
            nothing = torch.zeros(0, self.num_edge_classes)
            return self._kept(chunks, _predicted(links.edges[:, :0], links.edge_type, slice(0), self.decide(nothing)))
        outputs, node_types = self.classify(batch), batch.pair_type
        node_types = None if node_types is None else node_types.cpu().numpy()
        return _predicted(batch.n_id[_pairs(batch)].cpu().numpy(), node_types, slice(None), self.decide(outputs))

    def decide(self, outputs: Tensor) -> Tensor:
        """Return what is predicted from (num_pairs, num_classes) outputs."""
        if self.predict_logits:
            return known_to_numpy(outputs)
        return outputs.argmax(dim=-1)

    def _evaluate(self, batch: Any, split: str) -> Tensor | None:
        links = batch.links
        if is_pass(batch) and links is not None and links.label is not None:
            outputs, size = None, max(1, self._evaluate_exactly(batch, links, split))
        else:
            outputs, labels = self.classify(batch).detach(), self._labels(batch)
            self._update(split, outputs, labels)
            size = max(1, len(labels))
        self._log_metrics(split, size)
        return outputs

    def _evaluate_exactly(self, batch: Any, links: Any, split: str) -> int:
        """Score this rank's edges by the exact embeddings of their ends; return how many they are."""
        count = 0
        for chosen, outputs in self._classified(batch, links):
            self._update(split, outputs.detach(), torch.from_numpy(links.label[chosen]).to(self.device).long())
            count += len(outputs)
        if count == 0:  # a metric wants an update, and a rank without one would be warned about
            nothing = torch.full((1,), UNKNOWN, device=self.device)
            self._update(split, torch.zeros(1, self.num_edge_classes, device=self.device), nothing)
        return count

    def _classified(self, batch: Any, links: Any) -> Iterator[tuple[slice, Tensor]]:
        """Yield places among this rank's edges and their outputs, a bounded chunk at a time; every rank ends it."""
        output, first = self._infer(batch), 0
        width = self.hidden.in_features + self.hidden.out_features + self.num_edge_classes
        for pairs, _ in links.chunks(max(1, CHUNK_BYTES // (4 * width))):
            chosen = slice(first, first + pairs.shape[1])
            attr = None if links.features is None else torch.from_numpy(links.features[chosen]).to(self.device)
            yield chosen, self._head(*(self._rows(output, ends) for ends in pairs), attr)
            first = chosen.stop
        batch.source.barrier()

    def _update(self, split: str, outputs: Tensor, labels: Tensor) -> None:
        losses, count = self._losses(outputs.float(), labels)
        self.losses[split].update(losses / count.clamp(min=1), weight=count.float())
        self.scores[split].update(outputs.argmax(dim=-1), labels)

    def _labels(self, batch: Any) -> Tensor:
        labels = batch_of(batch).edge_label
        if labels is None:
            raise StrategyError(
                "EdgeClassifier needs edge_label, (num_pairs,) integers, in its batches: let the loader give them"
            )
        return labels.long()

    def _losses(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of losses, and over how many edges."""
        return F.cross_entropy(outputs, labels, ignore_index=UNKNOWN, reduction="sum"), (labels != UNKNOWN).sum()

    def _num_losses(self, batch: Any) -> int:
        return _pairs(batch).shape[1]

    def _score(self) -> Metric:
        return MulticlassAccuracy(self.num_edge_classes, average="micro", ignore_index=UNKNOWN, validate_args=False)


def _predicted(edges: np.ndarray, edge_type: np.ndarray | None, chosen: slice, prediction: Tensor) -> dict[str, Any]:
    """Return the rows of some edges, with their edge types where there are some."""
    typed = {} if edge_type is None else {"edge_type": edge_type[chosen]}
    return {"edges": edges, **typed, "prediction": prediction.cpu()}


def _pairs(batch: Any) -> Tensor | None:
    """Return the (2, num_pairs) ends of a batch's edges, by this package's name or PyG's."""
    batch = batch_of(batch)
    return batch.edge_label_index if batch.pairs is None else batch.pairs
