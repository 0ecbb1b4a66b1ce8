"""Layers sampled where tensors are: what numba samples, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.triton_kernels.sample_layer import sample_layers, sample_layers_on_device
from lightning_gnnscale.triton_kernels.sample_neighbors import Relation
from lightning_gnnscale.triton_kernels.sample_neighbors.device import UNSEEN, DeviceWorkspace
from lightning_gnnscale.triton_kernels.sample_neighbors.device_graph import DeviceRelation, placing
from tests.says import said

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(csc: CSC) -> DeviceRelation:
    return DeviceRelation.put(Relation.of(csc), placing(DEVICE, True))


def compare(csc, seeds, sizes, key, *, preferred=None, scale=1.0, space=None):
    space = space or DeviceWorkspace(csc.num_rows, DEVICE)
    masks = preferred and [torch.from_numpy(mask.view(np.uint8)).to(DEVICE) for mask in preferred]
    given = {"scale": scale, "return_e_id": True}
    mine = sample_layers_on_device(on_device(csc), seeds, sizes, key, space, preferred=masks, **given)
    other = sample_layers(csc, seeds, sizes, key, preferred=preferred, **given)
    for name in ("n_id", "edge_index", "indptr", "e_id", "edge_weight"):
        one, wanted = getattr(mine, name), torch.from_numpy(getattr(other, name))
        assert one.dtype == wanted.dtype and torch.equal(one.cpu(), wanted), name
    assert mine.num_sampled_nodes == other.num_sampled_nodes
    assert mine.num_sampled_edges == other.num_sampled_edges
    assert (space.label[:-1] == UNSEEN).all()  # ready for the next batch
    return other


def graph_of(num_nodes, num_edges, seed, skew=3.0) -> CSC:
    """Hubs among sources and targets, empty rows, self-loops and repeats."""
    random = np.random.default_rng(seed)
    src = (random.random(num_edges) ** skew * num_nodes).astype(np.int64)
    return build_csc(src, (random.random(num_edges) ** skew * num_nodes).astype(np.int64), num_nodes)


@given(
    st.builds(graph_of, st.integers(1, 40), st.integers(0, 200), st.integers(0, 99), st.sampled_from([1.0, 4.0])),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(0, 2**64 - 1),
    st.sampled_from([None, 1.0, 2.0, 7.5, 1e30]),
    st.integers(0, 40),
)
def test_layers_are_those_of_the_cpu(csc, sizes, key, scale, num_seeds):
    random = np.random.default_rng(num_seeds)
    seeds = random.permutation(csc.num_rows)[:num_seeds]
    if scale is None:
        compare(csc, seeds, sizes, key)
    else:
        compare(csc, seeds, sizes, key, preferred=[random.random(csc.num_rows) < 0.3 for _ in sizes], scale=scale)


def test_a_workspace_serves_batch_after_batch():
    csc, space = graph_of(300, 4000, 1), DeviceWorkspace(300, DEVICE)
    for batch in range(5):
        seeds = np.random.default_rng(batch).choice(300, 10 + batch, replace=False)
        found = compare(csc, seeds, [40, 5, 60], batch, space=space)
    assert found.num_sampled_nodes[:3] == [14, 40, 5] and min(found.num_sampled_edges) >= 5


def test_seeds_that_the_workspace_holds_already():
    csc, space = graph_of(50, 400, 2), DeviceWorkspace(50, DEVICE)
    ends = torch.tensor([7, 3, 7, 12, 3], device=DEVICE)
    place, count = space.number(ends, 0)
    mine = sample_layers_on_device(on_device(csc), count, [9, 9], 5, space)
    other = sample_layers(csc, np.array([7, 3, 12]), [9, 9], 5)
    assert place.tolist() == [0, 1, 0, 2, 1]
    assert mine.n_id.tolist() == other.n_id.tolist() and mine.edge_index.tolist() == other.edge_index.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": [1, 1, 2]}, "1 repeats 3"),
        ({"seeds": [0, 9]}, "seeds [0, 9) 0 9"),
        ({"scale": 0.5}, "scale >= 1 0.5"),
    ],
)
def test_refuses_what_the_cpu_refuses(arguments, message):
    csc, space = graph_of(9, 30, 8), DeviceWorkspace(9, DEVICE)
    given = {"seeds": [0], "nodes_per_layer": [3, 3], "key": 0} | arguments
    given["seeds"] = np.array(given["seeds"])
    with pytest.raises(ValueError, match=said(message)):
        sample_layers_on_device(on_device(csc), space=space, **given)
    compare(csc, np.array([0, 5]), [3], 1, space=space)
