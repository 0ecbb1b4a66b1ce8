"""Where Triton is not installed every operator is there on the CPU."""

from own_python import run_python

OPERATORS = """
import sys; sys.modules["triton"] = None
import torch
from lightning_gnnscale.graph import CSC
from lightning_gnnscale.triton_kernels import aggregate, quantize_rows, sample_neighbors
from lightning_gnnscale.triton_kernels.quantize_rows import op as quantize_op
from lightning_gnnscale.triton_kernels.sample_neighbors import device as sample_device
from lightning_gnnscale.triton_kernels.aggregate import device as sum_device

out = aggregate.aggregate(torch.ones(2, 3), torch.tensor([0, 2]), torch.tensor([0, 1]), reduce="mean")
assert out.sum() == 3
codes = quantize_rows.encode_rows(torch.ones(2, 3), 4, 0, torch.arange(2))
assert torch.equal(quantize_rows.decode_rows(codes, 3, 4), torch.ones(2, 3))
csc = CSC(torch.tensor([0, 2, 2]), torch.tensor([0, 1], dtype=torch.int32))
assert sample_neighbors.sample_neighbors(csc, torch.tensor([0]), [2], 0).n_id.tolist() == [0, 1]
assert all(module._triton_kernels() is None for module in (sum_device, quantize_op))
assert sample_device.triton_kernels() is None
"""


def test_the_package_needs_no_triton():
    run_python(OPERATORS)
