"""One loop over hops with two backends: what Triton samples is what numba samples, bit for bit."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_gnnscale.triton_kernels.sample_neighbors import (
    HopSampling,
    Relation,
    SampleOptions,
    Workspace,
    choice,
)
from lightning_gnnscale.triton_kernels.sample_neighbors.device import DeviceWorkspace
from lightning_gnnscale.triton_kernels.sample_neighbors.device_graph import (
    DeviceRelation,
    fits_on_device,
    placing,
    relation_bytes,
)
from tests.says import said
from tests.tiers import each_value

LAUNCH_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the interpreter takes CPU tensors
DEGREES = (0, 1, 5, 6, 7, 33, 64, 65, 0, 130, 300)
NUM_NODES = len(DEGREES)


def relation_of(seed, *, weighted=False, timed="", number=0, ends=(0, 0), dtype=np.int32) -> Relation:
    """An edge type with a hub, empty rows, repeated ids, weights of 0, a row of weights 0, and equal times."""
    generator = np.random.default_rng(seed)
    degrees = np.array(DEGREES) if number == 0 else generator.integers(0, 40, NUM_NODES)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = generator.integers(0, NUM_NODES, indptr[-1]).astype(dtype)
    weight = time = None
    if weighted:
        weight = generator.random(len(indices)).astype(np.float32) ** 4
        weight[generator.random(len(indices)) < 0.3] = 0
        weight[indptr[4] : indptr[5]] = 0
    if timed == "edge":
        time = generator.integers(0, 20, len(indices))
    elif timed == "node":
        time = generator.integers(0, 20, NUM_NODES)
    if timed:  # rows are in the order of time
        for begin, end in pairwise(indptr):
            own = time[begin:end] if timed == "edge" else time[indices[begin:end]]
            order = np.argsort(own, kind="stable")
            indices[begin:end] = indices[begin:end][order]
            if timed == "edge":
                time[begin:end] = own[order]
    position = generator.permutation(len(indices)).astype(np.int32)
    return Relation(*ends, indptr, indices, time, weight, timed == "edge", number=number, position=position)


def sampled_by(relations, fanouts, options, *, on_device, key=7, seeds=(10, 3, 0, 9, 8, 7, 2), times=None, by_type=0):
    """What one backend samples, as arrays."""
    given = [(0, np.array(seeds))]
    num_types = max(by_type, 1)
    if on_device:
        relations = [DeviceRelation.put(relation, placing(LAUNCH_DEVICE, True)) for relation in relations]
        spaces = [DeviceWorkspace(NUM_NODES, LAUNCH_DEVICE) for _ in range(num_types)]
    else:
        spaces = [Workspace(NUM_NODES, relations[0].indices.dtype) for _ in range(num_types)]
    for _ in range(2):  # a used workspace changes nothing
        hops = HopSampling(relations, given, fanouts, key, spaces, options, times=times)
        for _ in range(hops.num_hops):
            hops.sample()
        found = hops.collect_by_type() if by_type else hops.collect(with_edge_type=True)
    return found


def assert_same(mine, other):
    for name, expected in other._asdict().items():
        value = getattr(mine, name)
        several = isinstance(expected, list)
        for one, wanted in zip(value if several else [value], expected if several else [expected], strict=True):
            if not isinstance(wanted, np.ndarray):
                assert one == wanted, name
            else:
                assert one.dtype == (torch.float32 if name == "edge_weight" else torch.int64), name
                np.testing.assert_array_equal(one.cpu().numpy(), wanted, err_msg=name)


def compared(relations, fanouts, options, **given):
    pytest.importorskip("triton")
    numba = sampled_by(relations, fanouts, options, on_device=False, **given)
    assert_same(sampled_by(relations, fanouts, options, on_device=True, **given), numba)
    return numba


@each_value
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fanouts", [(1,), (6, 3), (40, 0, 2), (-1, 5), (129,)])
def test_samples_of_one_edge_type(fanouts, weighted, replace):
    relation = relation_of(len(fanouts), weighted=weighted, dtype=np.int64 if replace else np.int32)
    options = SampleOptions(replace, return_e_id=True, with_weight=True)
    found = compared([relation], [fanouts], options)
    assert sum(found.num_sampled_edges) >= 4


@each_value
@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("timed", ["edge", "node"])
def test_samples_before_the_times_of_seeds(timed, weighted, strict, latest):
    relation = relation_of(5, weighted=weighted, timed=timed)
    options = SampleOptions(return_e_id=True, disjoint=True, latest=latest, strict=strict, with_weight=True)
    times = np.array([19, 0, 5, 12, 3, 8, 30])
    found = compared([relation], [(8, 4)], options, times=times)
    assert sum(found.num_sampled_edges) >= 4


@pytest.mark.parametrize("disjoint", [False, True])
def test_samples_of_several_edge_types_over_one_set_of_ids(disjoint):
    relations = [relation_of(number, weighted=number == 1, number=number) for number in range(3)]
    fanouts = [(4, 2), (3, -1), (0, 5)]
    found = compared(relations, fanouts, SampleOptions(return_e_id=True, disjoint=disjoint), key=2**64 - 3)
    assert len(np.unique(found.edge_type)) == 3


@pytest.mark.parametrize("disjoint", [False, True])
def test_samples_of_several_node_types(disjoint):
    ends = [(0, 0), (1, 0), (0, 1), (1, 1)]
    relations = [relation_of(number, number=number, ends=ends[number]) for number in range(4)]
    compared(relations, [(3, 2)] * 4, SampleOptions(return_e_id=True, disjoint=disjoint), by_type=2)


def test_a_batch_reads_the_device_once_a_hop(monkeypatch):
    pytest.importorskip("triton")
    reads = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor, own=torch.Tensor.tolist: reads.append(1) or own(tensor))
    for name in ("item", "__int__", "__bool__", "__index__", "cpu", "numpy", "nonzero"):
        if LAUNCH_DEVICE.type == "cuda":  # the interpreter itself reads what it launches on
            monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(name))
    relations = [relation_of(number, number=number) for number in range(2)]
    sampled_by(relations, [(3, 2), (2, 2)], SampleOptions(), on_device=True)
    assert len(reads) == 2 * 3  # two batches: the rows of the seeds, then each hop


def test_weights_that_are_no_weights_are_refused_when_they_are_put_on_a_device():
    relation = relation_of(0, weighted=True)
    relation.weight[3] = np.nan
    with pytest.raises(ValueError, match=said("weights >= 0 finite")):
        DeviceRelation.put(relation, placing(LAUNCH_DEVICE, True))


def test_edges_are_on_the_device_where_they_take_half_of_what_is_free_at_most():
    relation = relation_of(0, weighted=True)
    put = DeviceRelation.put(relation, placing(LAUNCH_DEVICE, True))
    arrays = [value for value in put if isinstance(value, torch.Tensor)]
    num_bytes = relation_bytes(relation)
    assert abs(num_bytes - sum(array.nbytes for array in arrays)) <= 8
    assert fits_on_device(num_bytes, 2 * num_bytes)
    assert not fits_on_device(num_bytes, 2 * num_bytes - 1)


def test_logarithms_are_within_one_unit_in_the_last_place():
    shares = 1 - np.random.default_rng(0).integers(0, 2**53, 2000) * 2.0**-53
    for share in [1.0, 0.5, 2.0**-53, 0.75, np.sqrt(0.5), *shares]:
        np.testing.assert_array_max_ulp(np.array(choice.minus_log(share)), np.array(-np.log(share)), 2)
