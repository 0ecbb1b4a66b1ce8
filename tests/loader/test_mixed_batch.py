"""Batches of several parts side by side: what a model makes of one is what it makes of its pieces."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from oracles.parts import part_loader, small_world

from lightning_gnnscale.loader.mixed_batch import mix, mixed_batches
from lightning_gnnscale.model import GCN, GraphSAGE
from lightning_gnnscale.sampler import LayerwiseSampler, NeighborSampler
from lightning_gnnscale.sampler.minibatch import SparseFeatures

WORLD = small_world(num_parts=3)
SAMPLERS = {"neighbour": NeighborSampler([4, 3]), "layerwise": LayerwiseSampler([12, 12])}


def pieces_of(sampler, **options) -> list:
    """Return the first batch of each part."""
    targets = {part: WORLD.targets(part) for part in range(3)}
    given = {"labels": WORLD.labels, "masks": WORLD.masks, "batch_size": 6, "num_threads": 0} | options
    loader = part_loader(range(3), WORLD.load_part, WORLD.features, targets, sampler, **given)
    return list({batch.part: batch for batch in reversed(list(loader))}.values())


def forward(model, batch, x):
    given = {name: getattr(batch, name) for name in ("edge_weight", "degree", "indptr", "num_sampled_nodes")}
    given = {name: value for name, value in given.items() if value is not None}
    return model(x, batch.edge_index, **given)[: batch.batch_size]


@pytest.mark.parametrize("backbone", [GraphSAGE, GCN])
@pytest.mark.parametrize("name", SAMPLERS)
def test_outputs_and_gradients_are_those_of_the_pieces(name, backbone):
    pieces = pieces_of(SAMPLERS[name])
    mixed = mix(pieces, np.empty)
    torch.manual_seed(0)
    model = backbone(pieces[0].x.shape[1], 8, 4, num_layers=2, dropout=0.0).double()
    outputs = torch.cat([forward(model, piece, piece.x.double()) for piece in pieces])
    outputs.square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    found = forward(model, mixed, mixed.x.double())
    found.square().sum().backward()
    torch.testing.assert_close(found, outputs, rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", SAMPLERS)
def test_rows_go_with_their_nodes_and_edges_with_their_ends(name):
    pieces = pieces_of(SAMPLERS[name], return_e_id=name == "neighbour")
    mixed = mix(pieces, np.empty)
    assert mixed.batch_size == sum(piece.batch_size for piece in pieces)
    seeds = torch.cat([piece.n_id[: piece.batch_size] for piece in pieces])
    assert torch.equal(mixed.n_id[: mixed.batch_size], seeds)
    assert torch.equal(mixed.y, torch.from_numpy(WORLD.labels[mixed.n_id.numpy()]).to(mixed.y.dtype))
    assert np.array_equal(mixed.train_mask.numpy(), WORLD.masks["train"][mixed.n_id.numpy()])
    edges = sorted(tuple(ends) for piece in pieces for ends in piece.n_id[piece.edge_index].T.tolist())
    assert sorted(tuple(ends) for ends in mixed.n_id[mixed.edge_index].T.tolist()) == edges
    targets = torch.repeat_interleave(torch.arange(mixed.num_targets), mixed.indptr.diff())
    assert torch.equal(mixed.edge_index[1], targets), "grouped by target, in ascending order"
    for field in fields(mixed):
        values = [getattr(piece, field.name) for piece in pieces]
        assert (getattr(mixed, field.name) is None) == (values[0] is None), field.name


def test_sparse_rows_are_joined():
    pieces = pieces_of(SAMPLERS["neighbour"])
    for piece in pieces:
        csr = piece.x.to_sparse_csr()
        rows = (csr.crow_indices(), csr.col_indices().int(), csr.values())
        piece.x_csr, piece.x_dense = SparseFeatures(*rows, piece.x.shape[1]), None
    dense = mix(pieces_of(SAMPLERS["neighbour"]), np.empty)
    assert torch.equal(mix(pieces, np.empty).x_csr.dense(), dense.x)


def test_runs_of_pieces_and_what_is_left():
    closed = []

    def three():
        try:
            yield from pieces_of(SAMPLERS["neighbour"])
        finally:
            closed.append(True)

    sizes = [batch.batch_size for batch in mixed_batches(three(), [2, 1], np.empty)]
    pieces = [piece.batch_size for piece in three()]
    assert sizes == [sum(pieces[:2]), pieces[2]]
    assert closed
