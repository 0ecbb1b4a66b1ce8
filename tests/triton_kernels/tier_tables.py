"""Rows of random bits that lie in several tables, and where each node's is."""

import numpy as np
import torch

from lightning_gnnscale.triton_kernels.gather_rows import RowTables, pack_places

TORCH_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float64, torch.bool]


def random_bits(num_rows, dim, dtype, seed):
    """A tensor of random bits: NaN patterns and all."""
    size = torch.empty(0, dtype=dtype).element_size()
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, num_rows * dim * size, np.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(num_rows, dim)


def spread(whole, num_tables, seed, unreachable=()):
    """Assign the rows of a tensor out to tables at random; return (places, tables)."""
    random = np.random.default_rng(seed)
    table = random.integers(0, num_tables, len(whole))
    row = np.zeros(len(whole), np.int64)
    tables = []
    for number in range(num_tables):
        own = random.permutation(np.flatnonzero(table == number))
        row[own] = np.arange(len(own))
        tables.append(None if number in unreachable else whole[torch.from_numpy(own)].contiguous())
    return pack_places(table, row), RowTables(tables, whole.shape[1] * whole.element_size())


def as_bytes(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
