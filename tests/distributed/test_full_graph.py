"""Full-graph training in real processes: exact on any number of them (Invariant 1), and what the policies change."""

import pytest
from full_graph_runs import fit, largest_difference, make_model, write_store
from processes import launch

from lightning_gnnscale.strategy import (
    BroadcastExchange,
    HaloExchange,
)
from tests.tiers import first

STORES = {
    "undirected": {},
    "directed": {"directed": True},
    "sparse": {"sparse": True},
    "weighted": {"weighted": True},
    # of four ranks the second has no row
    "empty": {"sizes": (41, 29, 0, 12, 8)},
}
PUSH, PULL, BROADCAST = HaloExchange(), HaloExchange(backward="auto"), BroadcastExchange()
EXACT = {
    "gcn": ("undirected", PUSH, {"backbone": "gcn"}),
    "gcn, pulled": ("undirected", PULL, {"backbone": "gcn"}),
    "gcn, broadcast": ("undirected", BROADCAST, {"backbone": "gcn"}),
    "gcn, directed": ("directed", PULL, {"backbone": "gcn"}),
    "gcn, weighted": ("weighted", PULL, {"backbone": "gcn"}),
    "gcn, sparse features": ("sparse", PULL, {"backbone": "gcn"}),
    "gcn, dropout": ("undirected", PULL, {"backbone": "gcn", "dropout": 0.5, "input_dropout": 0.3}),
    "gcn, sparse, dropout": ("sparse", PUSH, {"backbone": "gcn", "dropout": 0.5, "input_dropout": 0.3}),
    "graphsage": ("undirected", PUSH, {"backbone": "graphsage"}),
    "graphsage, pulled": ("undirected", PULL, {"backbone": "graphsage", "dropout": 0.5}),
    "graphsage, directed": ("directed", BROADCAST, {"backbone": "graphsage"}),
    "gat": ("undirected", PULL, {"backbone": "gat"}),
    "gat, directed, dropout": ("directed", PUSH, {"backbone": "gat", "dropout": 0.5}),
    "gcn, a rank without rows": ("empty", PULL, {"backbone": "gcn", "dropout": 0.5}),
    "gat, a rank without rows": ("empty", PUSH, {"backbone": "gat"}),
    "sgc": ("undirected", PUSH, {"backbone": "sgc"}),
    "sgc, sparse": ("sparse", PUSH, {"backbone": "sgc"}),
}
# Every case on three processes, these on two and four as well.
ON_ALL = (
    "gcn", "gcn, directed", "gcn, dropout", "graphsage", "gat", "gat, directed, dropout", "gcn, a rank without rows",
    "gat, a rank without rows",
)  # fmt: skip


def train_exactly(folder, roots, names):
    """Train cases: 10 steps of Adam, a scheduler, and Lightning's clipping of the joined gradient."""
    results = {}
    for name in names:
        kind, exchange, options = EXACT[name]
        shortened = {"max_epochs": 10, "gradient_clip_val": 0.1}
        weights, metrics = fit(folder, roots[kind], make_model(**options), exchange, **shortened)
        results[name] = weights, [epoch["train_loss"] for epoch in metrics]
    return results


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return {kind: write_store(folder / kind, **options) for kind, options in STORES.items()}


@pytest.fixture(scope="module")
def alone(roots, tmp_path_factory):
    return launch(1, train_exactly, tmp_path_factory.mktemp("exact"), roots, list(EXACT), limit_s=300)[0]


@first(1)
@pytest.mark.parametrize(("world_size", "names"), [(3, EXACT), (2, ON_ALL), (4, ON_ALL)])
def test_exact_exchange_on_several_processes_equals_one(alone, roots, tmp_path, world_size, names):
    runs = launch(world_size, train_exactly, tmp_path, roots, list(names), limit_s=300)
    for rank, results in enumerate(runs):
        for name, (weights, losses) in results.items():
            single, single_losses = alone[name]
            where = f"{name}, rank {rank} of {world_size}"
            assert largest_difference(weights, single) <= 1e-12, where
            assert losses == pytest.approx(single_losses, abs=1e-12), where
