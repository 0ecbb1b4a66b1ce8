"""The numbers that a prediction of memory goes by: the run's, and those of its batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import check_integer, short


@dataclass(frozen=True)
class RunSize:
    """The graph of a run, and how many parts and processes it is for.

    Attributes:
        num_nodes, num_edges: counts of the graph; edges as stored (directed).
        num_parts: parts it is cut into.
        num_processes: training processes on one host.
        edge_row_bytes: weight and features of one edge.
    """

    num_nodes: int
    num_edges: int
    num_parts: int = 1
    num_processes: int = 1
    edge_row_bytes: int = 0


@dataclass(frozen=True)
class BatchShape:
    """How large batches and the rows of the model are.

    Attributes:
        feature_dim: columns of the features.
        feature_row_bytes: bytes of one row in a batch; None: dense float32.
        batch_size: seeds a batch; None trains each part as one batch.
        fanouts: neighbours a hop; -1 takes all.
        hidden_channels: width of the hidden layers.
        prefetch_batches: batches held at once.
        device_batches: batches on a GPU at once: the one that trains, and those that are copied ahead.
        embedding_dim: columns of learnable node embeddings, which processes of a host share with Adam's two moments.
        embedding_rows: nodes with learnable embeddings, where some node types have none; None: all.

    Raises:
        ValueError: a count, a width or a fan-out out of range.
    """

    feature_dim: int = 0
    feature_row_bytes: float | None = None
    batch_size: int | None = None
    fanouts: Sequence[int] = ()
    hidden_channels: int = 256
    prefetch_batches: int = 3
    device_batches: int = 3
    embedding_dim: int = 0
    embedding_rows: int | None = None

    def __post_init__(self):
        check_integer("feature_dim", self.feature_dim, 0)
        check_integer("hidden_channels", self.hidden_channels, 1)
        check_integer("prefetch_batches", self.prefetch_batches, 1)
        check_integer("device_batches", self.device_batches, 1)
        check_integer("embedding_dim", self.embedding_dim, 0)
        if self.batch_size is not None:
            check_integer("batch_size", self.batch_size, 1)
        if self.embedding_rows is not None:
            check_integer("embedding_rows", self.embedding_rows, 0)
        row_bytes = self.feature_row_bytes
        if row_bytes is not None and not (isinstance(row_bytes, Real) and row_bytes >= 0):
            raise ValueError(f"feature_row_bytes must be at least 0, or None, got {short(row_bytes)}")
        check_fanouts(self.fanouts)


def check_fanouts(fanouts: Any) -> None:
    """Raise ValueError unless fan-outs are integers of at least 1, or -1 for all neighbours, one a hop."""
    if not isinstance(fanouts, Sequence) or isinstance(fanouts, str):
        raise ValueError(f"fanouts must be a list like [25, 10], one a hop, got {short(fanouts)}")
    for fanout in fanouts:
        if not isinstance(fanout, Integral) or isinstance(fanout, bool) or (fanout < 1 and fanout != -1):
            raise ValueError(
                f"fanouts must be integers of at least 1, or -1 for all, got {short(fanout)} in {list(fanouts)}"
            )
