"""How links are scored: decoders of two embeddings, or of a head, a relation and a tail."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import check_count, short
from ..traits import DecoderTraits, arguments_of


class LinkDecoder(nn.Module):
    """Base of the decoders: a score of two ends, and scores of one end with many candidates for the other.

    A decoder of the user's own needs `forward` alone, and `relation` among its arguments if it reads relations.

    Attributes:
        pairwise: Whether `against` holds (num_ends, num_candidates, channels) values at once, and not the scores alone.
    """

    pairwise = True

    def forward(self, source: Tensor, other: Tensor) -> Tensor:
        """Return the scores of (..., channels) ends that broadcast."""
        raise NotImplementedError

    def against(
        self, ends: Tensor, candidates: Tensor, relation: Tensor | None = None, reverse: bool = False
    ) -> Tensor:
        """Return the (num_ends, num_candidates) scores of each end with each candidate.

        Args:
            ends, candidates: (num_ends, channels) known ends, (num_candidates, channels).
            relation: (num_ends,) int64, or None without edge types.
            reverse: Whether the known ends are the tails, and candidates heads.
        """
        return pair_scores(self, *_sides(ends[:, None], candidates[None], reverse), column(relation), reverse)


class DotDecoder(LinkDecoder):
    """Score of a link: the dot product of its ends."""

    pairwise = False

    def forward(self, source: Tensor, other: Tensor) -> Tensor:
        return (source * other).sum(dim=-1)

    def against(
        self, ends: Tensor, candidates: Tensor, relation: Tensor | None = None, reverse: bool = False
    ) -> Tensor:
        return ends @ candidates.T


class MLPDecoder(LinkDecoder):
    """Score of a link: a small network applied to the elementwise product of its two ends; direction has no effect.

    Args:
        channels: Width of the embeddings and of the hidden layer.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.hidden, self.out = nn.Linear(channels, channels), nn.Linear(channels, 1)

    def forward(self, source: Tensor, other: Tensor) -> Tensor:
        return self.out(self.hidden(source * other).relu()).squeeze(-1)


class RelationDecoder(LinkDecoder):
    """Base of the decoders with an embedding of each relation: a query of one end is matched with the other one.

    Args:
        channels: Width of the embeddings, >= 1.
        num_relations: Number of edge types, >= 1.
        inverse: Whether each relation has a second embedding, for queries for heads ("reciprocal relations"):
            the score of (h, r, t) as a query for h is that of (t, r + num_relations, h).

    Raises:
        ValueError: an argument out of range.

    Source of `inverse`: Lacroix, Usunier and Obozinski, ICML 2018; Kazemi and Poole, NeurIPS 2018.
    """

    pairwise = False

    def __init__(self, channels: int, num_relations: int, inverse: bool = False):
        super().__init__()
        for name, value in (("channels", channels), ("num_relations", num_relations)):
            check_count(name, value)
        self.channels, self.num_relations, self.inverse = channels, num_relations, inverse
        self.relations = nn.Parameter(torch.empty(num_relations * (2 if inverse else 1), channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sample the relations' embeddings again, each of a length of about 1."""
        nn.init.uniform_(self.relations, -math.sqrt(3 / self.channels), math.sqrt(3 / self.channels))

    def forward(self, source: Tensor, other: Tensor, relation: Tensor, reverse: bool = False) -> Tensor:
        """Return the scores of triples.

        Args:
            source, other: (..., channels) heads and tails that broadcast.
            relation: (...) int64 relations that broadcast with them.
            reverse: Whether the score is that of a query for the head; another one only with `inverse`.
        """
        if reverse and self.inverse:
            return self.match(self.query(other, self._embedded(relation, True)), source)
        return self.match(self.query(source, self._embedded(relation, False)), other)

    def against(
        self, ends: Tensor, candidates: Tensor, relation: Tensor | None = None, reverse: bool = False
    ) -> Tensor:
        find = self.query_head if reverse and not self.inverse else self.query
        return self.match_all(find(ends, self._embedded(relation, reverse)), candidates)

    def query(self, head: Tensor, relation: Tensor) -> Tensor:
        """Return the (..., channels) vectors that tails are matched with; relation: embeddings."""
        raise NotImplementedError

    def query_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        """Return the (..., channels) vectors that heads are matched with; relation: embeddings."""
        raise NotImplementedError

    def match(self, query: Tensor, candidate: Tensor) -> Tensor:
        """Return the scores of (..., channels) queries and candidates that broadcast: the dot products."""
        return (query * candidate).sum(dim=-1)

    def match_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Return the (num_queries, num_candidates) scores of each query with each candidate."""
        return query @ candidates.T

    def lengths(self, values: Tensor) -> Tensor:
        """Return the (..., num_parts) absolute values of an embedding's components, those of complex numbers as one."""
        return values.abs()

    def penalty(self, source: Tensor, other: Tensor, relation: Tensor) -> Tensor:
        """Return the nuclear 3-norm of triples: the mean of their sums of |component| ** 3 of head, relation and tail.

        Args:
            source, other: (num, channels) heads and tails.
            relation: (num,) int64.

        Source: N3 of Lacroix, Usunier and Obozinski, ICML 2018, equation (4).
        """
        relations = [self._embedded(relation, False)] + ([self._embedded(relation, True)] if self.inverse else [])
        cubes = [(self.lengths(values) ** 3).sum() for values in (source, other, *relations)]
        return (cubes[0] + cubes[1] + sum(cubes[2:]) / len(relations)) / max(1, len(source))

    def _embedded(self, relation: Tensor, reverse: bool) -> Tensor:
        return self.relations[relation + self.num_relations if reverse and self.inverse else relation]


class DistMult(RelationDecoder):
    """Score of a triple: sum of h * r * t. It is the same in both directions.

    Args:
        channels, num_relations, inverse: See `RelationDecoder`.

    Source: Yang et al., ICLR 2015.
    """

    def query(self, head: Tensor, relation: Tensor) -> Tensor:
        return head * relation

    def query_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        return tail * relation


class ComplEx(RelationDecoder):
    """Score of a triple: the real part of sum of h * r * conj(t), over complex numbers.

    The first half of an embedding's channels are the real parts, the second half the imaginary parts.

    Args:
        channels: Width of the embeddings, even: twice the complex dimension.
        num_relations, inverse: See `RelationDecoder`.

    Raises:
        ValueError: channels is odd, or an argument out of range.

    Source: Trouillon et al., ICML 2016.
    """

    def __init__(self, channels: int, num_relations: int, inverse: bool = False):
        if channels % 2:
            raise ValueError(f"channels of ComplEx must be even, real and imaginary parts, got {channels}")
        super().__init__(channels, num_relations, inverse)

    def query(self, head: Tensor, relation: Tensor) -> Tensor:
        """Return the complex product h * r."""
        (real, imaginary), (r, i) = head.chunk(2, dim=-1), relation.chunk(2, dim=-1)
        return torch.cat([real * r - imaginary * i, real * i + imaginary * r], dim=-1)

    def query_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        """Return the complex product t * conj(r)."""
        (real, imaginary), (r, i) = tail.chunk(2, dim=-1), relation.chunk(2, dim=-1)
        return torch.cat([real * r + imaginary * i, imaginary * r - real * i], dim=-1)

    def lengths(self, values: Tensor) -> Tensor:
        """Return the (..., channels / 2) absolute values of the complex numbers."""
        real, imaginary = values.chunk(2, dim=-1)
        return (real**2 + imaginary**2 + 1e-12).sqrt()  # whose gradient at 0 is 0


class TransE(RelationDecoder):
    """Score of a triple: margin - ||h + r - t||.

    Args:
        channels, num_relations, inverse: See `RelationDecoder`.
        norm: 1 or 2.
        margin: Score of a perfect triple. It matters for the logistic loss, where it separates true scores from
            negative ones.

    Raises:
        ValueError: another norm, or an argument out of range.

    Source: Bordes et al., NeurIPS 2013; the margin as in Sun et al., RotatE, ICLR 2019. Differs: embeddings of nodes
        are not normalised.
    """

    def __init__(self, channels: int, num_relations: int, inverse: bool = False, norm: int = 1, margin: float = 9.0):
        if norm not in (1, 2):
            raise ValueError(f"norm of TransE must be 1 or 2, got {norm}")
        super().__init__(channels, num_relations, inverse)
        self.norm, self.margin = norm, margin

    def query(self, head: Tensor, relation: Tensor) -> Tensor:
        """Return h + r."""
        return head + relation

    def query_head(self, tail: Tensor, relation: Tensor) -> Tensor:
        """Return t - r."""
        return tail - relation

    def match(self, query: Tensor, candidate: Tensor) -> Tensor:
        """Return the margin less the distances."""
        return self.margin - torch.linalg.vector_norm(query - candidate, ord=self.norm, dim=-1)

    def match_all(self, query: Tensor, candidates: Tensor) -> Tensor:
        """Return the margin less the distance of each query to each candidate."""
        # The form by products loses digits where both are near each other, which is where ranks are decided.
        distance = torch.cdist(query, candidates, p=self.norm, compute_mode="donot_use_mm_for_euclid_dist")
        return self.margin - distance


DECODERS = {"dot": DotDecoder, "mlp": MLPDecoder, "distmult": DistMult, "complex": ComplEx, "transe": TransE}


def make_decoder(name: str, channels: int, num_relations: int | None = None, **options: Any) -> LinkDecoder:
    """Return a decoder by its name, one of `DECODERS`.

    Args:
        channels: Width of the embeddings.
        num_relations: Number of edge types, for those that read them; None: not known.
        options: Further arguments of the decoder.

    Raises:
        ValueError: an unknown name, one that reads edge types without their number, or an option that it does not have.
    """
    if name not in DECODERS:
        raise ValueError(f"decoder must be a module or one of {', '.join(DECODERS)}, got {short(name)}")
    kind = DECODERS[name]
    parameters = inspect.signature(kind).parameters.values()
    taken = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    unknown = sorted(set(options) - set(taken) | {"channels", "num_relations"} & set(options))
    if unknown:
        known = ", ".join(option for option in taken if option not in ("channels", "num_relations")) or "none"
        raise ValueError(f"decoder_options of {name} must be of {known}, got {', '.join(unknown)}")
    if issubclass(kind, RelationDecoder):
        if num_relations is None:
            raise ValueError(f"decoder {name} reads relations: give num_relations=, from a graph with edge_type")
        return kind(channels, num_relations, **options)
    return kind(channels, **options) if "channels" in taken else kind(**options)


def reads_edge_types(decoder: Any) -> bool:
    """Whether a decoder is called with relations."""
    return "relation" in arguments_of(decoder)


def pair_scores(
    decoder: Any, source: Tensor, other: Tensor, relation: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """Return the scores of ends that broadcast, with their relations where the decoder reads them.

    The decoder: a `LinkDecoder`, or any module or function of (source, other) or (source, other, relation).
    """
    if not reads_edge_types(decoder):
        return decoder(source, other)
    if isinstance(decoder, RelationDecoder):
        return decoder(source, other, relation, reverse)
    return decoder(source, other, relation)


def scores_against(
    decoder: Any, ends: Tensor, candidates: Tensor, relation: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """Return the (num_ends, num_candidates) scores of any decoder; arguments as `LinkDecoder.against` has them."""
    if DecoderTraits(decoder).against is not None:
        return decoder.against(ends, candidates, relation, reverse)
    return pair_scores(decoder, *_sides(ends[:, None], candidates[None], reverse), column(relation), reverse)


def _sides(ends: Tensor, candidates: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    return (candidates, ends) if reverse else (ends, candidates)


def column(relation: Tensor | None) -> Tensor | None:
    """Return (num,) relations as a column, which goes with ends and their candidates."""
    return None if relation is None else relation[:, None]
