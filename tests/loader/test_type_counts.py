"""Counts of each type that the host has of a batch, against plain counting."""

import numpy as np
import pytest
import torch

from lightning_gnnscale.graph import TypeCounts, numbered_schema
from lightning_gnnscale.loader import type_counts
from lightning_gnnscale.loader.type_counts import counted
from lightning_gnnscale.sampler.minibatch import MiniBatch

NUM_EDGE_TYPES = 3
SCHEMA = numbered_schema(NUM_EDGE_TYPES, "test")


def sampled(seed: int = 0, hops=((4, 5, 0, 6), (9, 12, 0))) -> MiniBatch:
    """A batch of hops, one of which finds no node, in which edges repeat."""
    rng = np.random.default_rng(seed)
    of_nodes, of_edges = (list(counts) for counts in hops)
    ends, num_nodes = np.cumsum([0, *of_nodes]), sum(of_nodes)
    target = np.concatenate(
        [np.sort(rng.integers(ends[hop], max(ends[hop + 1], ends[hop] + 1), size)) for hop, size in enumerate(of_edges)]
    )
    source = rng.integers(0, num_nodes, len(target))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=num_nodes))])
    return MiniBatch(
        n_id=torch.arange(num_nodes), edge_index=torch.from_numpy(np.stack([source, target])),
        indptr=torch.from_numpy(indptr), batch_size=of_nodes[0], part=0, key=0, num_sampled_nodes=of_nodes,
        num_sampled_edges=of_edges, schema=SCHEMA,
        edge_type=torch.from_numpy(rng.integers(0, NUM_EDGE_TYPES, len(target))),
    )  # fmt: skip


def counts_of(pairs, num_types: int) -> tuple[int, ...]:
    return tuple(sum(one[0] == number for one in set(pairs)) for number in range(num_types))


@pytest.mark.parametrize("largest", [1 << 28, 0], ids=["table", "sort"])
@pytest.mark.parametrize("in_hops", [True, False])
def test_counts_are_those_of_plain_counting(monkeypatch, largest, in_hops):
    monkeypatch.setattr(type_counts, "_LARGEST_TABLE", largest)
    batch = sampled()
    if not in_hops:
        batch.num_sampled_nodes = batch.num_sampled_edges = None
    found = counted(batch).type_counts
    assert found.ends == ((4, 9, 9, 15) if in_hops else (15,))
    for hop, end in enumerate(found.ends):
        edges = [
            (kind, *ends) for kind, ends in zip(batch.edge_type.tolist(), batch.edge_index.T.tolist(), strict=True)
        ]
        into = [(kind, a, b) for kind, a, b in edges if b < end]
        assert found.nodes[hop] == (end,)
        assert found.edges[hop] == tuple(sum(one[0] == number for one in into) for number in range(NUM_EDGE_TYPES))
        assert found.targets[hop] == counts_of([(kind, b) for kind, _, b in into], NUM_EDGE_TYPES)
        assert found.sources[hop] == counts_of([(kind, a) for kind, a, _ in into], NUM_EDGE_TYPES)
        assert found.of("targets", end, NUM_EDGE_TYPES) == list(found.targets[hop])
    assert found.of("targets", 5, NUM_EDGE_TYPES) is None and found.of("targets", 15, 7) is None


def test_counts_of_joined_batches_add_up_hop_by_hop():
    one, other = (counted(batch).type_counts for batch in (sampled(), sampled(1, ((2, 3), (5,)))))
    both = TypeCounts.sum([one, other])
    assert both.ends == (4 + 2, 9 + 5, 9 + 5, 15 + 5)
    for hop in range(4):
        for name in ("nodes", "edges", "targets", "sources"):
            parts = [getattr(each, name)[min(hop, len(each.ends) - 1)] for each in (one, other)]
            assert getattr(both, name)[hop] == tuple(map(sum, zip(*parts, strict=True)))


def test_batches_without_types_are_not_counted():
    batch = sampled()
    batch.schema = None
    assert counted(batch) is batch
