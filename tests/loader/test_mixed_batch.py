"""Batches of several parts side by side: what a model makes of one is what it makes of its pieces."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from oracles.parts import part_loader, small_world

from lightning_gnnscale.loader.mixed_batch import mix, mixed_batches
from lightning_gnnscale.model import GCN, GraphSAGE
from lightning_gnnscale.partition_store.features import CSRFeatures, DenseFeatures
from lightning_gnnscale.sampler import LayerwiseSampler, NeighborSampler
from lightning_gnnscale.sampler.minibatch import SparseFeatures

WORLD = small_world(num_parts=3)
SAMPLERS = {"neighbour": NeighborSampler([4, 3]), "layerwise": LayerwiseSampler([12, 12])}


def pieces_of(sampler, features=WORLD.features, **options) -> list:
    """Return the first batch of each part."""
    targets = {part: WORLD.targets(part) for part in range(3)}
    given = {"labels": WORLD.labels, "masks": WORLD.masks, "batch_size": 6, "num_threads": 0} | options
    loader = part_loader(range(3), WORLD.load_part, features, targets, sampler, **given)
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


@pytest.mark.parametrize("how", ["one column", "a column each", "sparse rows each"])
def test_rows_read_into_the_batch_are_those_of_its_chunks(how):
    table = WORLD.features.array
    dense = DenseFeatures(table)
    columns = {"one column": [dense] * 3, "a column each": [DenseFeatures(table.copy()) for _ in range(3)]}
    where, filled = np.nonzero(table), pieces_of(SAMPLERS["neighbour"])
    indptr = np.append(0, np.cumsum(np.count_nonzero(table, axis=1)))
    rows = indptr, where[1].astype(np.int32), table[where], table.shape[1]
    columns["sparse rows each"] = [CSRFeatures(*rows) for _ in range(3)]
    unread = pieces_of(SAMPLERS["neighbour"], features=None)
    for piece, column in zip(unread, columns[how], strict=True):
        piece.unread = column
    mixed, expected = mix(unread, np.empty), mix(filled, np.empty)
    assert mixed.unread is None and (mixed.x_csr is not None) == how.startswith("sparse")
    assert torch.equal(mixed.x, expected.x) and torch.equal(mixed.n_id, expected.n_id)
    (one,) = mixed_batches((piece for piece in [replace(unread[0], unread=dense)]), [1], np.empty)
    assert torch.equal(one.x, filled[0].x) and one.unread is None
