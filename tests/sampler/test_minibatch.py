"""MiniBatch: PyG's names, lazily dense features, moving between devices, Lightning's own traversal."""

import numpy as np
import pytest
import torch

from lightning_gnnscale.partition_store.features import SparseRows
from lightning_gnnscale.sampler import MiniBatch
from lightning_gnnscale.sampler.minibatch import sparse_rows_to_torch


def make_batch(**changes) -> MiniBatch:
    fields = {
        "n_id": torch.tensor([4, 2, 9]),
        "edge_index": torch.tensor([[1, 2, 2], [0, 0, 1]]),
        "indptr": torch.tensor([0, 2, 3]),
        "batch_size": 1,
        "part": 3,
        "key": 2**64 - 1,
        "degree": torch.tensor([2, 1, 7]),
        "num_sampled_nodes": [1, 1, 1],
        "num_sampled_edges": [2, 1],
        "x_dense": torch.arange(6.0).reshape(3, 2),
        "y": torch.tensor([0, 1, -1]),
        "train_mask": torch.tensor([True, False, False]),
    }
    return MiniBatch(**fields | changes)


def sparse_rows() -> SparseRows:
    return SparseRows(np.array([0, 2, 2, 3]), np.array([1, 3, 0], np.int32), np.array([1.5, 2, -1], np.float16), dim=4)


def test_shape_and_aliases():
    batch = make_batch()
    assert (batch.num_nodes, batch.num_edges, batch.num_targets) == (3, 3, 2)
    assert batch.indices.tolist() == [1, 2, 2]
    assert batch.x is batch.x_dense


def test_sparse_features_become_dense_when_asked_for():
    rows = sparse_rows()
    batch = make_batch(x_dense=None, x_csr=sparse_rows_to_torch(rows))
    assert batch.x_dense is None
    np.testing.assert_array_equal(batch.x.numpy(), rows.dense())
    assert batch.x.dtype == torch.float16
    assert batch.x is batch.x
    assert batch.x_csr.data.data_ptr() == rows.data.ctypes.data


def test_no_features_is_none():
    assert make_batch(x_dense=None).x is None


@pytest.mark.parametrize("sparse", [False, True])
def test_to_moves_every_tensor_and_nothing_else(sparse):
    batch = make_batch(**({"x_dense": None, "x_csr": sparse_rows_to_torch(sparse_rows())} if sparse else {}))
    moved = batch.to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    tensors += [*moved.x_csr[:3]] if sparse else []
    assert len(tensors) >= 6 and all(tensor.is_meta for tensor in tensors)
    assert (moved.key, moved.part, moved.num_sampled_nodes) == (batch.key, 3, [1, 1, 1])
    assert moved.edge_weight is None
    assert not batch.n_id.is_meta


def test_a_tensor_that_is_there_already_is_shared():
    batch = make_batch()
    assert batch.to("cpu").x_dense is batch.x_dense


def test_lightning_moves_and_casts_it():
    from lightning.fabric.utilities.apply_func import move_data_to_device
    from lightning_utilities.core.apply_func import apply_to_collection

    batch = make_batch(x_dense=None, x_csr=sparse_rows_to_torch(sparse_rows()))
    assert move_data_to_device(batch, torch.device("cpu")).n_id is batch.n_id
    cast = apply_to_collection(batch, torch.Tensor, lambda t: t.double() if t.is_floating_point() else t)
    assert isinstance(cast, MiniBatch)
    assert cast.x.dtype == torch.float64
    assert cast.n_id.dtype == torch.int64
    assert cast.key == batch.key


@pytest.mark.gpu
def test_pinned_memory_on_a_device():
    batch = make_batch().pin_memory()
    assert batch.x.is_pinned()
    assert torch.equal(batch.to("cuda", non_blocking=True).x.cpu(), batch.x)
