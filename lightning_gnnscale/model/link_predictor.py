"""The Lightning module over links: unsupervised node embeddings, and link prediction."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from ..errors import StrategyError, check_count, short
from ..graph import batch_of
from ..traits import BackboneTraits, DecoderTraits
from .backbone_module import CHUNK_BYTES, MAKE_OPTIMIZER, MAKE_SCHEDULER, BackboneModule, is_pass, width_of
from .decoders import DECODERS, column, make_decoder, pair_scores, reads_edge_types, scores_against
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


SCORE_BYTES = 16 << 20  # of scores held at once: memory of this size is used again, larger chunks are mapped again
_POSITIVE_ROWS = 256  # links whose true scores are computed as a block
LOSSES = ("logistic", "softmax")


class LinkPredictor(BackboneModule):
    """Embed nodes so that linked ones score high: unsupervised training, and link prediction.

    With loss="logistic" it is the mean over the batch's pairs of -log s(u, v) - w * mean over negatives of
    log(1 - s(u, n)), where s is the sigmoid of the decoder. It is GraphSAGE's loss if w is the number of negatives (the
    default), and plain binary cross-entropy over a balanced set if w = 1. With loss="softmax" it is the cross-entropy
    of each pair among its negatives. A training batch is a `MiniBatch` of a `LinkSampler`. Where it has negative first
    ends too (corrupt="both"), the loss is the mean of both directions.

    An evaluation batch is an `EvaluationShare` with links, or a `MiniBatch` with the pairs and negatives of some
    (evaluation="sampled"). For the former all embeddings are computed exactly, layer by layer. Then each held-out link
    is ranked among its negatives, a bounded chunk at a time, with the work divided among the ranks. Triples are ranked
    among all nodes, once as queries for the tail and once for the head, without the other triples that are known (the
    filtered setting). Logged: `train_loss`, and for val and test `*_loss`, `*_mrr` and `*_hits@k`. Predictions are the
    embeddings of all nodes, never scores of links: the decoder gives those of pairs of embeddings.

    Args:
        backbone: As for `NodeClassifier`; its `out_channels` is the width of the embeddings. `NoLayers`: the rows
            themselves.
        lr, weight_decay: Learning rate and weight decay of Adam, used if no optimizer is given.
        decoder: "dot", "mlp", "distmult", "complex", "transe", or a module called as (source, other), or (source,
            other, relation), with (..., channels) ends that broadcast.
        negative_weight: The w above; None: the number of negatives.
        hits: Values of k in Hits@k, each >= 1.
        embedding_channels: Width of the embeddings; None: the backbone's `out_channels`.
        optimizer, scheduler, inputs: As for `NodeClassifier`.
        loss: "logistic" or "softmax".
        num_relations: Number of relations, for decoders that read them.
        decoder_options: Further arguments of a decoder given by its name, for example {"inverse": True}.
        penalty: Weight of the decoder's `penalty` of the batch's triples (N3) in the loss, >= 0.

    Raises:
        ValueError: an unknown decoder or loss, a hit below 1, an embedding of unknown width, or settings that do not go
            together.

    Source: Hamilton et al., GraphSAGE, NeurIPS 2017, equation (1); triples: Bordes et al., TransE, NeurIPS 2013.
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
        loss: str = "logistic",
        num_relations: int | None = None,
        decoder_options: Mapping[str, Any] | None = None,
        penalty: float = 0.0,
    ):
        lr, weight_decay = float(lr), float(weight_decay)  # checkpoints hold no numpy numbers
        super().__init__(backbone, lr, weight_decay, optimizer, scheduler, inputs)
        for k in hits:
            check_count("hits", k)
        channels = width_of("embedding_channels", embedding_channels, backbone)
        if callable(decoder) and decoder_options:
            raise ValueError("decoder_options are for a decoder given by its name: give them to the module")
        if negative_weight is not None and negative_weight < 0:
            raise ValueError(f"negative_weight must be at least 0 or None, got {negative_weight}")
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {short(loss)}")
        if loss == "softmax" and negative_weight is not None:
            raise ValueError(f"negative_weight={negative_weight} is for loss=logistic: leave it out with softmax")
        hits, penalty = [int(k) for k in hits], float(penalty)
        decoder_options = dict(decoder_options or {})
        ignored = ["backbone", "decoder", "optimizer", "scheduler", "inputs"]
        self.save_hyperparameters(ignore=ignored)
        self.channels, self.negative_weight, self.hits = channels, negative_weight, hits
        self.loss, self.penalty = loss, penalty
        if not callable(decoder):
            decoder = make_decoder(decoder, self.channels, num_relations, **decoder_options)
        self.decoder = decoder
        if not penalty >= 0 or (penalty and DecoderTraits(decoder).penalty is None):
            able = "a decoder of relations, such as distmult" if penalty >= 0 else "at least 0"
            raise ValueError(f"penalty must be 0, or of {able}, got {penalty}")
        self._warned = False
        self._make_metrics(self._scores)

    def saved_arguments(self) -> dict[str, Any]:
        """Return the decoder's name, where it is one of `DECODERS`."""
        names = {kind: name for name, kind in DECODERS.items()}
        return {"decoder": names[type(self.decoder)]} if type(self.decoder) in names else {}

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Return the loss over the batch's pairs; 0, with zero gradients, where there are none."""
        batch = batch_of(batch)
        if batch.pairs is None:
            raise StrategyError(
                "LinkPredictor trains on batches with pairs, but these have none: use LinkSampler (sampler=links) with "
                "PartitionDataModule and mode=mini_batch"
            )
        if batch.negatives.shape[1] == 0 and len(batch.negatives):
            raise StrategyError("LinkPredictor needs negatives, but batches have none: leave labelled=True out")
        relation = self._relation(batch.pair_type, 'sampler.positives="edge"')
        embeddings = self(batch)[: batch.batch_size]
        source, other = (embeddings[ends] for ends in batch.pairs)
        directions = [(source, batch.pairs[1], batch.negatives, False)]
        if batch.source_negatives is not None:
            directions.append((other, batch.pairs[0], batch.source_negatives, True))
        loss = 0.0
        for ends, answers, negatives, reverse in directions:
            positive = pair_scores(self.decoder, source, other, relation, reverse)
            if len(negatives) == 1:  # shared by all pairs
                negative = scores_against(self.decoder, ends, embeddings[negatives[0]], relation, reverse)
            else:
                false, known, node_types = embeddings[negatives], ends[:, None], column(relation)
                sides = (false, known) if reverse else (known, false)
                negative = pair_scores(self.decoder, *sides, node_types, reverse)
            if relation is not None or self.loss == "softmax":
                negative = negative.masked_fill(negatives == answers[:, None], -torch.inf)  # the answer itself is true
            loss = loss + self._losses(positive, negative).sum() / max(1, len(source))
        loss = loss / len(directions)
        return loss + self.penalty * self.decoder.penalty(source, other, relation) if self.penalty else loss

    def predict_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Any]:
        """Embed this rank's nodes (`EvaluationShare`) or the seeds (`MiniBatch`).

        Returns:
            "nodes": (num_rows,) int64 array of store ids; "prediction": (num_rows, channels) float32 on the CPU.
        """
        return self._predict_nodes(batch, Tensor.float, self.channels)

    def _evaluate(self, batch: Any, split: str) -> None:
        links = batch.links
        if not is_pass(batch) and batch.pairs is not None:
            self._update(split, *self._rank_batch(batch))
            self._log_metrics(split, batch.pairs.shape[1])
            return
        if links is None:
            raise StrategyError(
                f"LinkPredictor evaluates on held-out links, but the {split} loader has none: hold some out "
                "(hold_out_edges, or dataset.hold_out), and give PartitionDataModule sampler=LinkSampler(...)"
            )
        output = self._infer(batch)
        count = 0
        for ranks, losses in self._ranked(output, links):
            self._update(split, ranks, losses)
            count += len(ranks)
        if count == 0:  # a metric wants an update, and a rank without one would be warned about
            self._update(split, torch.zeros(0, device=self.device), torch.zeros(0, device=self.device))
        batch.source.barrier()
        self._log_metrics(split, 1)

    def _rank_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return ranks and losses of a batch's links, from its own neighbourhoods."""
        relation = self._relation(batch.pair_type, "links with edge_type")
        embeddings = self(batch)[: batch.batch_size].float()
        source, other = (embeddings[ends] for ends in batch.pairs)
        false = embeddings[batch.negatives.clamp(min=0)]
        return self._rank(source, other, false, batch.negatives < 0, relation)

    def _ranked(self, output: LayerwiseOutput, links: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (num,) ranks and losses of this rank's links, of triples in both directions."""
        if links.among_all:
            for queries in links.queries(max(1, CHUNK_BYTES // (8 * self.channels))):
                yield self._rank_among_all(output, queries)
            return
        first = 0
        for pairs, negatives in links.chunks(self._chunk_links(links.num_negatives)):
            edge_type = links.edge_type
            edge_type = None if edge_type is None else torch.from_numpy(edge_type[first : first + pairs.shape[1]])
            relation = self._relation(edge_type, "links with edge_type")
            # Where there is no negative, a node whose embedding is there: the link's own first end.
            present = np.where(negatives < 0, pairs[0][:, None], negatives)
            ends = (self._rows(output, nodes) for nodes in (pairs[0], pairs[1], present))
            yield self._rank(*ends, torch.from_numpy(negatives < 0).to(self.device), relation)
            first += pairs.shape[1]

    def _rank(
        self, source: Tensor, other: Tensor, false: Tensor, missing: Tensor, relation: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return (num_links,) ranks and losses of links among their negatives.

        Args:
            source, other: (num_links, channels) ends.
            false: (num_links, num_negatives, channels) negatives.
            missing: (num_links, num_negatives) bool, where there is none.
        """
        positive = pair_scores(self.decoder, source, other, relation).float()
        negative = pair_scores(self.decoder, source[:, None], false, column(relation)).float()
        negative = negative.masked_fill(missing, -torch.inf)
        return link_ranks(positive, negative), self._losses(positive, negative)

    def _rank_among_all(self, output: LayerwiseOutput, queries: Any) -> tuple[Tensor, Tensor]:
        """Return (num_queries,) ranks and losses of links among all nodes but those that are known to be true.

        Cost: the embeddings of all nodes are read once; CHUNK_BYTES of them and SCORE_BYTES of scores are held.
        """
        relation = queries.relation if queries.relation is None else torch.from_numpy(queries.relation)
        relation = self._relation(relation, "links with edge_type")
        ends, answers = self._rows(output, queries.ends), self._rows(output, queries.answers)
        num, num_nodes = len(ends), queries.num_nodes
        width = self.channels if DecoderTraits(self.decoder).pairwise else 1
        most_nodes = max(1, min(num_nodes, CHUNK_BYTES // (4 * self.channels)))
        most_ends = max(1, SCORE_BYTES // (4 * width * most_nodes))

        def scores(begin: int, stop: int, candidates: Tensor) -> Tensor:
            edge_types = None if relation is None else relation[begin:stop]
            return scores_against(self.decoder, ends[begin:stop], candidates, edge_types, queries.reverse).float()

        # As a block of the same product, so that equal embeddings get equal scores.
        rows = min(most_ends, _POSITIVE_ROWS)
        blocks = [ends.new_zeros(0, dtype=torch.float32)]
        blocks += [scores(at, at + rows, answers[at : at + rows]).diagonal() for at in range(0, num, rows)]
        positive = torch.cat(blocks)
        above, beside = (torch.zeros(num, dtype=torch.float64, device=self.device) for _ in range(2))
        losses = _Losses(self, positive)
        for start in range(0, num_nodes, most_nodes):
            candidates = self._rows(output, np.arange(start, min(start + most_nodes, num_nodes)))
            for begin in range(0, num, most_ends):
                chunk = slice(begin, begin + most_ends)
                found = scores(begin, begin + most_ends, candidates)
                span = begin, begin + len(found), start, start + len(candidates)
                others = queries.of_other_node_types(*span)
                if others is not None:
                    found = found.masked_fill(torch.from_numpy(others).to(self.device), -torch.inf)
                row, column = queries.known(*span)
                found[torch.from_numpy(row).to(self.device), torch.from_numpy(column).to(self.device)] = -torch.inf
                true = positive[chunk, None]
                above[chunk] += (found > true).sum(dim=1)
                beside[chunk] += ((found == true) & found.isfinite()).sum(dim=1)
                losses.add(chunk, found)
        return 1 + above + beside / 2, losses.result()

    def _losses(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Return (num,) losses of (num,) true scores among (num, num_negatives) others; -inf where there is none."""
        losses = _Losses(self, positive)
        losses.add(slice(None), negative)
        return losses.result(negative.shape[1])

    def _relation(self, relation: Tensor | None, wanted: str) -> Tensor | None:
        """Return the relations of links, for a decoder that reads them."""
        if reads_edge_types(self.decoder):
            if relation is None:
                raise StrategyError(
                    f"decoder {type(self.decoder).__name__} reads the relation of each link, but these have none: give "
                    f"it a graph with edge_type, and {wanted}"
                )
            return relation.to(self.device)
        if relation is not None and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"links have relations that {type(self.decoder).__name__} does not read: decoder=distmult, complex and "
                "transe do"
            )
        return None

    def _infer(self, batch: Any) -> LayerwiseOutput:
        if BackboneTraits(self.backbone).num_layers == 0:
            source = self.source_of(batch)
            return LayerwiseOutput(batch.rows, None, source=source)
        return super()._infer(batch)

    def _update(self, split: str, ranks: Tensor, losses: Tensor) -> None:
        for metric in self.scores[split].values():
            metric.update(ranks)
        weight = float(len(losses))
        self.losses[split].update(
            losses.detach().mean() if len(losses) else torch.zeros((), device=self.device), weight
        )

    def _num_losses(self, batch: Any) -> int:
        return len(batch.pairs[0])

    def _chunk_links(self, num_negatives: int) -> int:
        return max(1, CHUNK_BYTES // (4 * self.channels * (num_negatives + 2)))

    def _scores(self) -> nn.ModuleDict:
        return nn.ModuleDict({"mrr": MeanReciprocalRank(), **{f"hits@{k}": HitsAt(k) for k in self.hits}})


class _Losses:
    """The losses of some links, whose negatives come in chunks.

    Args:
        module: Says which loss it is.
        positive: (num,) true scores.
    """

    def __init__(self, module: LinkPredictor, positive: Tensor):
        self.module, self.positive, self.softmax = module, positive, module.loss == "softmax"
        self.total = positive.clone() if self.softmax else torch.zeros_like(positive)  # logarithm of a sum, or a sum
        self.count = torch.zeros_like(positive)

    def add(self, chunk: slice, negative: Tensor) -> None:
        """Add (num_links, num) scores of some links' negatives, -inf where there is none."""
        if self.softmax:
            found = torch.cat([self.total[chunk, None], negative], dim=1).logsumexp(dim=1)
        else:
            found = self.total[chunk] + F.softplus(negative).sum(dim=1)
            self.count[chunk] += negative.isfinite().sum(dim=1)
        if chunk == slice(None):
            self.total = found
        else:
            self.total[chunk] = found

    def result(self, num_negatives: int | None = None) -> Tensor:
        """Return the (num,) losses; num_negatives: by which the mean is weighted, None: by what came."""
        if self.softmax:
            return self.total - self.positive
        count = self.count.clamp(min=1)
        given = self.module.negative_weight
        weight = given if given is not None else count if num_negatives is None else num_negatives
        return F.softplus(-self.positive) + weight * self.total / count
