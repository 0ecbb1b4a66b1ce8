"""What layers are given: dense or sparse rows (bags of words) of nodes, features of edges, and cosines of times."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import check_integer
from ..foreign import is_csr as is_sparse
from ..triton_kernels.aggregate import aggregate

MOST_CHANNELS = 1 << 31


class SparseInput(NamedTuple):
    """Rows with few nonzeros.

    Attributes:
        indptr: (num_rows + 1,) int64; row i holds the nonzeros indptr[i] to indptr[i + 1].
        indices: (num_nonzeros,) int32 or int64, columns in [0, dim).
        data: (num_nonzeros,) floating.
        dim: number of columns.
    """

    indptr: Tensor
    indices: Tensor
    data: Tensor
    dim: int


def is_by_node_type(x: Any) -> bool:
    """Whether x has a table a node type, as `RowsByNodeType` has: anything with `node_type` and `tables`."""
    return hasattr(x, "tables")


def as_input(x: Any, like: Tensor) -> Tensor | SparseInput:
    """Return features as tensors of the device and dtype of `like` (a parameter of the model).

    Args:
        x: (num_nodes, dim) tensor or array of any number type, or sparse rows of tensors or arrays.
    """
    if not is_sparse(x):
        return torch.as_tensor(x).to(device=like.device, dtype=like.dtype)
    indptr = torch.as_tensor(x.indptr).to(like.device, torch.int64)
    indices = torch.as_tensor(x.indices).to(like.device)
    return SparseInput(indptr, indices, torch.as_tensor(x.data).to(like.device, like.dtype), int(x.dim))


def num_rows(x: Tensor | SparseInput) -> int:
    """Return the number of rows of dense or sparse features."""
    return len(x.indptr) - 1 if is_sparse(x) else x.shape[0]


def head_rows(x: Tensor | SparseInput, count: int) -> Tensor | SparseInput:
    """Return the first rows of dense or sparse features."""
    if not is_sparse(x):
        return x[:count]
    if count == num_rows(x):
        return x
    end = int(x.indptr[count])
    return SparseInput(x.indptr[: count + 1], x.indices[:end], x.data[:end], x.dim)


def dense_rows(x: Tensor | SparseInput) -> Tensor:
    """Return features as a dense (num_rows, dim) tensor; repeated columns add up."""
    if not is_sparse(x):
        return x
    row = torch.arange(num_rows(x), device=x.data.device)
    row = torch.repeat_interleave(row, x.indptr.diff(), output_size=len(x.indices))
    out = x.data.new_zeros((num_rows(x), x.dim))
    return out.index_put_((row, x.indices.long()), x.data, accumulate=True)


def linear(x: Tensor | SparseInput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias for dense or sparse x; the gradient goes to weight and bias (and to a dense x).

    Args:
        x: (num_rows, in_channels) dense or sparse.
        weight: (out_channels, in_channels).
        bias: (out_channels,) or None.

    Raises:
        ValueError: the columns of sparse rows are not in_channels.

    Cost: sparse: num_nonzeros * out_channels reads each way. Measured on two cores, 25,000 rows x 8,415 columns,
    35 nonzeros a row, 256 outputs: 73 ms forward and backward, 124 with embedding_bag, 4 s dense.
    """
    if not is_sparse(x):
        return F.linear(x, weight, bias)
    if x.dim != weight.shape[1]:
        raise ValueError(f"sparse rows have {x.dim} columns, the layer takes {weight.shape[1]}")
    out = aggregate(weight.t().contiguous(), x.indptr, x.indices, x.data)
    return out if bias is None else out + bias


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
    """Return the (num_edges, edge_dim) features of edges, or None, with the encoding of their times appended.

    Args:
        time: the encoding; None: features are returned as they are.
        target, edge_time: (num_edges,) int64 target and time of each edge.
        seed_time, seed_of: (num_seeds,) int64 times, and (num_nodes,) int64 seed that each node was sampled for.

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


def check_edge_attr(
    model: str, edge_dim: int | None, given: int | None, without: str = "leave them out with stored_edge_features=False"
) -> None:
    """Refuse edge features that a model does not read, and a model that reads missing ones or other widths.

    Args:
        edge_dim, given: columns that it reads, and that exist; None: none.
        without: how to do without them.
    """
    if edge_dim == given:
        return
    if given is None:
        raise ValueError(f"{model} reads edge features of {edge_dim} columns, but there are none: give edge_features=")
    if edge_dim is None:
        raise ValueError(
            f"no layer of {model} reads the edge features: use GAT or GINE with edge_dim={given} (with edge types RGAT "
            f"or HGT), or {without}"
        )
    raise ValueError(f"{model} reads edge features of {edge_dim} columns, but they have {given}: say edge_dim={given}")


def check_edge_inputs(edge_dim: int | None, time_channels: int | None) -> None:
    """Raise ValueError unless columns of edges' features and times are None or at least 1."""
    for name, value in (("edge_dim", edge_dim), ("time_channels", time_channels)):
        if value is not None:
            check_integer(f"model.{name}", value, 1, MOST_CHANNELS)
