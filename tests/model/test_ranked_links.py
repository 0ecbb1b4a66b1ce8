"""Links that are ranked in several chunks are scored by their own edge types."""

from types import SimpleNamespace

import numpy as np
import torch

import lightning_gnnscale as gs


def test_each_chunk_of_links_has_the_edge_types_of_its_own_links(monkeypatch):
    edge_type = np.array([2, 0, 1, 1, 2])
    pairs, negatives = np.arange(10).reshape(2, 5), np.zeros((5, 1), np.int64)
    chunks = [(pairs[:, at : at + 2], negatives[at : at + 2]) for at in (0, 2, 4)]
    links = SimpleNamespace(among_all=False, num_negatives=1, edge_type=edge_type, chunks=lambda num: iter(chunks))
    seen = []
    model = gs.LinkPredictor(gs.model.GraphSAGE(4, 8, 8))
    monkeypatch.setattr(model, "_relation", lambda given, told: given)
    monkeypatch.setattr(model, "_rows", lambda output, nodes: nodes)
    monkeypatch.setattr(model, "_rank", lambda source, other, false, missing, relation: seen.append((source, relation)))
    list(model._ranked(None, links))
    for source, relation in seen:
        assert torch.equal(relation, torch.from_numpy(edge_type[source]))
    assert len(seen) == 3
