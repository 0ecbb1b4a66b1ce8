"""The time from an edge to its seed, as cosines: columns that layers read beside the features of edges."""

import torch
from torch import Tensor, nn


class TimeEncoding(nn.Module):
    """Learned frequencies and phases of the time between an edge and its seed.

    Args:
        channels: number of cosines, >= 1. Frequencies begin from 1 down to 10^-9, per unit of time.

    Raises:
        ValueError: channels below 1.

    Source: Xu et al., Inductive representation learning on temporal graphs (TGAT), ICLR 2020, section 3.1.
    """

    def __init__(self, channels: int):
        super().__init__()
        if channels < 1:
            raise ValueError(f"model.time_channels must be at least 1, or None, got {channels}")
        self.frequency, self.phase = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set frequencies and phases to their initial values."""
        with torch.no_grad():
            self.frequency.copy_(10.0 ** -torch.linspace(0, 9, len(self.frequency)))
            self.phase.zero_()

    def forward(self, elapsed: Tensor) -> Tensor:
        """Return (num_edges, channels) cosines of (num_edges,) times, in the dtype of the parameters."""
        return torch.cos(elapsed.to(self.frequency.dtype).unsqueeze(1) * self.frequency + self.phase)


def edge_features(
    time: TimeEncoding | None,
    edge_attr: Tensor | None,
    target: Tensor,
    edge_time: Tensor | None,
    seed_time: Tensor | None,
    seed_of: Tensor | None,
) -> Tensor | None:
    """Return the features of edges with the encoding of their times appended.

    Args:
        time: the encoding; None: features are returned as they are.
        edge_attr: (num_edges, edge_dim), or None.
        target: (num_edges,) int64 target of each edge.
        edge_time: (num_edges,) int64.
        seed_time: (num_seeds,) int64.
        seed_of: (num_nodes,) int64 seed that each node was sampled for.

    Raises:
        ValueError: the encoding is used, but a batch has no times, or nodes have no single seed.
    """
    if time is None:
        return edge_attr
    if edge_time is None or seed_time is None or seed_of is None:
        lacking = [
            name
            for name, value in (("edge_time", edge_time), ("seed_time", seed_time), ("seed_of", seed_of))
            if value is None
        ]
        raise ValueError(
            f"time_channels encodes seed_time - edge_time, but batches have no {' and no '.join(lacking)}: sample "
            "disjoint trees by time, or leave time_channels out"
        )
    encoded = time(seed_time[seed_of[target]] - edge_time)
    return encoded if edge_attr is None else torch.cat([edge_attr.to(encoded.dtype), encoded], dim=1)


def check_times(model: str, time_channels: int | None) -> None:
    """Raise ValueError for a model that reads times: layer by layer, an edge would have one value for all seeds."""
    if time_channels is not None:
        raise ValueError(
            f"{model} with time_channels={time_channels} has other values for each seed's time, which layer-wise "
            'evaluation does not: give the DataModule evaluation="sampled"'
        )
