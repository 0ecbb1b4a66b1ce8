"""Fan-out sampling: PyG's semantics, the keyed oracle bit for bit, uniformity and unbiasedness."""

import os
import subprocess
import sys
from math import sqrt
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.pyg_neighbor import pyg_neighbor_sample
from sampled_graphs import random_csc, star

from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.triton_kernels.sample_layer import sample_layers
from lightning_gnnscale.triton_kernels.sample_neighbors import Workspace, sample_neighbors
from lightning_gnnscale.triton_kernels.sample_neighbors.reference import sample_neighbors_reference
from tests.says import said

ERROR_RATE = 1e-6  # of a false alarm over all comparisons of one statistical test


def assert_same(mine, other):
    for name, value in mine._asdict().items():
        if value is None or isinstance(value, list):
            assert value == getattr(other, name), name
        elif name == "edge_weight":
            np.testing.assert_array_equal(value, other.edge_weight)
            assert value.dtype == np.float32
        else:
            np.testing.assert_array_equal(value, getattr(other, name), err_msg=name)
            assert value.dtype == np.int64, name


@given(
    num_nodes=st.integers(1, 120),
    num_edges=st.integers(0, 900),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 3, 7, 15, 70]), min_size=1, max_size=3),
    key=st.integers(0, 2**64 - 1),
    replace=st.booleans(),
    hub=st.booleans(),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_equals_the_keyed_oracle(num_nodes, num_edges, fanouts, key, replace, hub, dtype):
    csc = random_csc(num_nodes, num_edges, seed=key % 97, hub=hub, dtype=dtype)
    seeds = np.random.default_rng(key).permutation(num_nodes)[: max(1, num_nodes // 3)]
    mine = sample_neighbors(csc, seeds, fanouts, key, replace=replace, return_e_id=True)
    assert_same(mine, sample_neighbors_reference(csc, seeds, fanouts, key, replace=replace))


@given(num_nodes=st.integers(1, 80), num_edges=st.integers(0, 500), key=st.integers(0, 2**64 - 1), whole=st.booleans())
def test_with_all_neighbours_it_is_pygs_sampler(num_nodes, num_edges, key, whole):
    csc = random_csc(num_nodes, num_edges, seed=key % 89)
    seeds = np.random.default_rng(key).permutation(num_nodes)[:5]
    fanouts = [-1, -1, -1] if whole else [int(csc.in_degree.max()) or 1] * 2
    mine = sample_neighbors(csc, seeds, fanouts, key, return_e_id=True)
    n_id, row, col, e_id, nodes, edges = pyg_neighbor_sample(
        csc.indptr, csc.indices, seeds, fanouts, lambda node, degree, fanout, hop: range(degree)
    )
    assert mine.n_id.tolist() == n_id
    assert mine.edge_index.tolist() == [row, col]
    assert mine.e_id.tolist() == e_id
    assert (mine.num_sampled_nodes, mine.num_sampled_edges) == (nodes, edges)


def test_equals_pyg_itself_where_its_sampler_is_installed():
    import torch_geometric

    if not (torch_geometric.typing.WITH_TORCH_SPARSE or torch_geometric.typing.WITH_PYG_LIB):
        pytest.skip("PyG's own sampler needs torch-sparse or pyg-lib; the oracle in tests/oracles stands in for it")
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    csc = random_csc(500, 4000, seed=3)
    dst = np.repeat(np.arange(500), csc.in_degree)
    data = Data(edge_index=torch.from_numpy(np.stack([csc.indices.astype(np.int64), dst])), num_nodes=500)
    loader = NeighborLoader(data, num_neighbors=[-1, 60], batch_size=40, is_sorted=True)
    for i, batch in enumerate(loader):
        mine = sample_neighbors(csc, np.arange(500)[i * 40 : (i + 1) * 40], [-1, 60], 0, return_e_id=True)
        np.testing.assert_array_equal(mine.n_id, batch.n_id.numpy())
        np.testing.assert_array_equal(mine.edge_index, batch.edge_index.numpy())
        np.testing.assert_array_equal(mine.e_id, batch.e_id.numpy())


def test_edges_exist_and_stand_by_target():
    csc = random_csc(200, 3000, hub=True)
    mine = sample_neighbors(csc, np.array([0, 7, 11]), [10, 5], 1, return_e_id=True)
    source, target = mine.edge_index
    np.testing.assert_array_equal(np.repeat(np.arange(len(mine.indptr) - 1), np.diff(mine.indptr)), target)
    np.testing.assert_array_equal(csc.indices[mine.e_id], mine.n_id[source])
    assert ((csc.indptr[mine.n_id[target]] <= mine.e_id) & (mine.e_id < csc.indptr[mine.n_id[target] + 1])).all()
    assert len(np.unique(mine.e_id)) == len(mine.e_id)
    assert len(mine.indptr) - 1 == sum(mine.num_sampled_nodes[:-1])


def test_a_used_workspace_changes_nothing():
    csc = random_csc(300, 4000, hub=True)
    space = Workspace(300, csc.indices.dtype)
    for key in range(20):
        seeds = np.random.default_rng(key).permutation(300)[: 5 + key]
        assert_same(
            sample_neighbors(csc, seeds, [6, 4], key, workspace=space, return_e_id=True),
            sample_neighbors(csc, seeds, [6, 4], key, return_e_id=True),
        )


def test_labels_start_over_before_they_overflow():
    csc = random_csc(50, 300)
    space = Workspace(80, csc.indices.dtype)  # larger than the graph
    fresh = sample_neighbors(csc, np.arange(5), [3, 3], 4)
    space.label.fill(2**31 - 100)
    space.base = 2**31 - 60
    assert_same(
        sample_neighbors(csc, np.arange(5), [3, 3], 4, workspace=space)._replace(e_id=fresh.indptr),
        fresh._replace(e_id=fresh.indptr),
    )
    assert space.base < 1000


def test_a_failed_call_leaves_the_workspace_usable():
    csc = random_csc(50, 300)
    space = Workspace(50, csc.indices.dtype)
    with pytest.raises(ValueError, match=said("1 repeats 3")):
        sample_neighbors(csc, np.array([4, 9, 4]), [3], 0, workspace=space)
    mine = sample_neighbors(csc, np.array([4, 9]), [3], 0, workspace=space, return_e_id=True)
    assert_same(mine, sample_neighbors_reference(csc, np.array([4, 9]), [3], 0))


@pytest.mark.parametrize("calls_before", range(6))
def test_running_out_of_memory_within_a_batch_leaves_the_workspace_usable(calls_before, monkeypatch):
    csc = random_csc(60, 400)
    seeds, expected = np.arange(5), sample_neighbors(csc, np.arange(20, 30), [4, 3], 9)
    space = Workspace(60, csc.indices.dtype)
    left, reserve = [calls_before], Workspace.reserve

    def scarce(self, name, size, keep=0):
        if name in ("edge", "neighbor", "node") and size > 5:
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError(name)
        return reserve(self, name, size, keep)

    monkeypatch.setattr(Workspace, "reserve", scarce)
    try:
        sample_neighbors(csc, seeds, [4, 3], 1, workspace=space)
    except MemoryError:
        pass
    else:
        assert calls_before > 3, "memory was never short"
    monkeypatch.undo()
    assert_same(sample_neighbors(csc, np.arange(20, 30), [4, 3], 9, workspace=space), expected)


def test_a_batch_whose_results_find_no_memory_leaves_the_workspace_usable():
    csc, space = random_csc(60, 400), Workspace(60, np.dtype(np.int32))

    def none_left(shape, dtype):
        raise MemoryError("results")

    with pytest.raises(MemoryError, match="results"):
        sample_neighbors(csc, np.arange(5), [4, 3], 1, workspace=space, allocate=none_left)
    assert_same(
        sample_neighbors(csc, np.arange(20, 30), [4, 3], 9, workspace=space),
        sample_neighbors(csc, np.arange(20, 30), [4, 3], 9),
    )


def test_memory_maps_are_read_like_arrays(tmp_path):
    csc = random_csc(100, 900)
    for name, array in csc._asdict().items():
        np.save(tmp_path / name, array)
    mapped = CSC(*(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in csc._fields))
    seeds = np.arange(0, 100, 9)
    assert_same(
        sample_neighbors(mapped, seeds, [4, 4], 8, return_e_id=True),
        sample_neighbors(csc, seeds, [4, 4], 8, return_e_id=True),
    )


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_graphs_without_edges(num_nodes):
    csc = random_csc(num_nodes, 0) if num_nodes else CSC(np.zeros(1, np.int64), np.zeros(0, np.int32))
    for replace in (False, True):
        mine = sample_neighbors(csc, np.arange(num_nodes), [3, -1], 0, replace=replace, return_e_id=True)
        assert mine.n_id.tolist() == list(range(num_nodes))
        assert (mine.num_sampled_nodes, mine.num_sampled_edges) == ([num_nodes, 0, 0], [0, 0])
        assert mine.edge_index.shape == (2, 0)
        assert mine.indptr.tolist() == [0] * (num_nodes + 1)


def test_self_loops_and_repeated_edges_are_kept():
    csc = build_csc(np.array([0, 1, 1, 1]), np.array([0, 0, 0, 1]), 2)
    mine = sample_neighbors(csc, np.array([0]), [-1, -1], 0)
    assert mine.n_id.tolist() == [0, 1]
    assert mine.edge_index.tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]]


def test_with_replacement_every_row_gives_its_fan_out():
    csc = random_csc(60, 200, seed=5)
    mine = sample_neighbors(csc, np.arange(60), [4], 2, replace=True)
    np.testing.assert_array_equal(np.diff(mine.indptr), np.where(csc.in_degree > 0, 4, 0))


@pytest.mark.parametrize(
    ("degree", "fanout", "replace"),
    [(12, 5, False), (12, 9, False), (64, 6, False), (64, 60, False), (65, 6, False), (200, 70, False), (12, 5, True)],
)
def test_inclusion_is_uniform_for_nodes_and_for_pairs(degree, fanout, replace):
    num_keys = 4000
    hits = np.zeros((num_keys, degree), np.int64)
    csc, space = star(degree), Workspace(degree + 1, np.int32)
    for key in range(num_keys):
        sampled = sample_neighbors(
            csc, np.array([0]), [fanout], key, replace=replace, return_e_id=True, workspace=space
        )
        np.add.at(hits[key], sampled.e_id, 1)
    assert (hits.sum(1) == fanout).all()
    probability = fanout / degree
    variance = probability * (1 - 1 / degree) if replace else probability * (1 - probability)
    assert_normal(hits.sum(0), num_keys * probability, sqrt(num_keys * variance))
    if not replace:
        assert hits.max() == 1
        pairs = (hits.T @ hits)[np.triu_indices(degree, 1)]
        probability *= (fanout - 1) / (degree - 1)
        assert_normal(pairs, num_keys * probability, sqrt(num_keys * probability * (1 - probability)))


def assert_normal(counts, mean, deviation):
    """Every count within the two-sided normal bound at ERROR_RATE, shared out over the counts."""
    bound = NormalDist().inv_cdf(1 - ERROR_RATE / (2 * len(counts)))
    assert np.abs((counts - mean) / deviation).max() < bound


@pytest.mark.parametrize("replace", [False, True])
def test_sampled_aggregation_is_unbiased(replace):
    """Invariant 6: the mean over keys of the sampled two-hop mean aggregation is the full-neighbour value."""
    csc = random_csc(150, 2500, seed=1, hub=True)
    value = np.random.default_rng(2).normal(size=150)
    seeds = np.array([0, 3, 17, 60])  # node 0 is the hub: the filter's path
    degree = np.maximum(csc.in_degree, 1)
    full = np.add.reduceat(np.append(value[csc.indices], 0), csc.indptr[:-1]) / degree
    full[csc.in_degree == 0] = 0
    exact = np.array([full[csc.indices[csc.indptr[v] : csc.indptr[v + 1]]].mean() for v in seeds])
    space, results = Workspace(150, np.int32), []
    for key in range(4000):
        sampled = sample_neighbors(csc, seeds, [4, 3], key, replace=replace, workspace=space)
        count = np.maximum(np.diff(sampled.indptr), 1)
        hidden = value[sampled.n_id]
        # A node's row is sampled once, so the inner mean of a seed is shared; expectation is linear all the same.
        inner = np.bincount(sampled.edge_index[1], hidden[sampled.edge_index[0]], len(count)) / count
        first = slice(0, sampled.num_sampled_edges[0])
        source, target = sampled.edge_index[:, first]
        results.append(np.bincount(target, inner[source], len(seeds)) / count[: len(seeds)])
    results = np.array(results)
    error = results.std(0, ddof=1) / sqrt(len(results))
    bound = NormalDist().inv_cdf(1 - ERROR_RATE / (2 * len(seeds)))
    assert (np.abs(results.mean(0) - exact) / error).max() < bound


@pytest.mark.parametrize(
    ("fanouts", "message"),
    [
        ([], "fanouts []"),
        ([5, 0], "fanouts[1] >= 1 -1 0"),
        ([-2], "fanouts[0] -2"),
        ([2.5], "fanouts[0] 2.5"),
        ([True], "fanouts[0] True"),
        ([float("nan")], "fanouts[0] nan"),
        ([4, None], "fanouts[1] None"),
        (["ten"], "fanouts[0] ten"),
        (5, "fanouts [15, 10 5] 5"),
    ],
)
def test_bad_fan_outs_are_named(fanouts, message):
    with pytest.raises(ValueError, match=said(message)):
        sample_neighbors(random_csc(5, 10), np.array([0]), fanouts, 0)


@pytest.mark.parametrize("seeds", [[5], [-1], [0, 7]])
def test_seeds_out_of_range_are_named(seeds):
    with pytest.raises(ValueError, match=said("seeds [0, 5)")):
        sample_neighbors(random_csc(5, 10), np.array(seeds), [2], 0)


@pytest.mark.parametrize("seeds", [np.array([0.0, 1.0]), np.array([True, False]), np.array([[0, 1]])])
@pytest.mark.parametrize("sample", [sample_neighbors, sample_layers])
def test_seeds_that_are_no_ids_are_named(sample, seeds):
    with pytest.raises(ValueError, match=said("seeds one-dimensional integers")):
        sample(random_csc(5, 10), seeds, [2], 0)


@pytest.mark.parametrize("sample", [sample_neighbors, sample_layers])
def test_no_seeds_give_no_nodes(sample):
    assert len(sample(random_csc(5, 10), [], [2, 3], 0).n_id) == 0


def test_a_workspace_of_another_graph_is_refused():
    with pytest.raises(ValueError, match=said("4 int32 5 int32")):
        sample_neighbors(random_csc(5, 10), np.array([0]), [2], 0, workspace=Workspace(4, np.int32))


UNCOMPILED = """
import numpy as np
np.seterr(over="ignore")
from lightning_gnnscale.graph import CSC
from lightning_gnnscale.triton_kernels.gather_rows import gather_rows
from lightning_gnnscale.triton_kernels.sample_neighbors import sample_neighbors
degree = np.array([0, 3, 64, 90, 12])
csc = CSC(np.concatenate([[0], np.cumsum(degree)]), np.random.default_rng(0).integers(0, 5, degree.sum(), np.int32))
table = np.arange(5 * 32, dtype=np.float32).reshape(5, 32)
for replace in (False, True):
    sampled = sample_neighbors(csc, np.array([3, 2]), [8, 60], 5, replace=replace, return_e_id=True)
    print(sampled.n_id.tolist(), sampled.edge_index.tolist(), sampled.e_id.tolist())
    print(gather_rows(table, sampled.n_id).sum())
"""


def test_compiled_and_uncompiled_code_agree(capsys):
    """Compiled code would read out of bounds in silence; plain Python would raise."""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run([sys.executable, "-c", UNCOMPILED], env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    with np.errstate(over="ignore"):
        exec(UNCOMPILED, {})
    assert capsys.readouterr().out == run.stdout
