"""Edge features of a store reach the batches: each edge has the row of the edge that it came from, bit for bit."""

import lightning as L
import numpy as np
import pytest
import torch
from torch_geometric.nn import NNConv

import lightning_gnnscale as gs
from lightning_gnnscale.remote import pack_group, unpack_group
from tests.tiers import first

NUM_NODES, DIM = 120, 3
RNG = np.random.default_rng(3)


def distinct_edges() -> np.ndarray:
    """(2, num_edges) edges, no pair of nodes twice, whichever way; one node is a coordinator, another has no edge."""
    pairs = np.stack(np.triu_indices(NUM_NODES - 1, 1))
    chosen = RNG.choice(pairs.shape[1], 500, replace=False)
    edges = np.concatenate([pairs[:, chosen], pairs[:, pairs[0] == 0]], axis=1)
    edges = np.unique(edges, axis=1)
    flipped = RNG.random(edges.shape[1]) < 0.5
    return RNG.permutation(np.where(flipped, edges[::-1], edges), axis=1)


EDGES = distinct_edges()
ROWS = RNG.random((EDGES.shape[1], DIM))
EDGE_OF = {pair: number for number, pair in enumerate(zip(*EDGES.tolist(), strict=True))}


def make(root, to_undirected=False, dtype=np.float32, **options) -> gs.PartitionDataModule:
    """A DataModule over a store of three parts that it wrote."""
    labels, mask = np.arange(NUM_NODES) % 4, np.arange(NUM_NODES) % 3 > 0
    dm = gs.PartitionDataModule(
        root=root,
        stream=gs.open_edge_stream(EDGES, num_nodes=NUM_NODES, chunk_edges=100, to_undirected=to_undirected),
        features=RNG.random((NUM_NODES, 5), np.float32),
        labels=labels,
        masks={"train": mask, "val": ~mask},
        **{"edge_features": (100 * ROWS).astype(dtype), "partitioner": "random", "num_parts": 3} | options,
    )
    dm.prepare_data()
    return dm


def check(batch, store, rows: np.ndarray, both_ways: bool) -> int:
    """Compare a batch's rows with those of its edges' edges, looked up by their ends; return how many there were."""
    source, target = store.original_nid[batch.n_id.numpy()][batch.edge_index.numpy()]
    edges = []
    for pair in zip(source.tolist(), target.tolist(), strict=True):
        edges.append(EDGE_OF[pair] if pair in EDGE_OF or not both_ways else EDGE_OF[pair[::-1]])
    expected = rows[np.array(edges, np.int64)]
    assert batch.edge_attr.numpy().dtype == expected.dtype
    np.testing.assert_array_equal(batch.edge_attr.numpy(), expected)
    return len(edges)


@first(4)
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": gs.NeighborSampler([4, 3])},
        {"sampler": gs.NeighborSampler([4, 3], replace=True), "halo_hops": 0},
        {"sampler": gs.NeighborSampler([4, 3], direction="both"), "halo_hops": 2},
        {"sampler": gs.NeighborSampler([4, 3]), "source": "processes", "dtype": np.float16},
        {"sampler": gs.NeighborSampler([4, 3]), "source": "task_graphs", "dtype": np.int64},
        {"sampler": gs.NeighborSampler([4, 3]), "scope": "graph", "to_undirected": True},
        {"sampler": gs.NeighborSampler([4, 3]), "rows": gs.PlacementSettings(locality_scale=2.0)},
        {"sampler": gs.NeighborSampler([4, 3]), "edge_weight": 1 + ROWS[:, 0]},
        {"sampler": gs.LayerwiseSampler([20, 20]), "dtype": np.uint8},
        {"sampler": gs.LinkSampler(gs.NeighborSampler([4, 3]), exclude_pairs=True), "source": "task_graphs"},
        {"sampler": gs.ClusterSampler(4, 2)},
        {"sampler": gs.SaintSampler("walk", num_roots=9, num_norm_samples=2)},
        {"mode": "full_batch"},
        {"mode": "full_batch", "to_undirected": True, "halo_hops": 2, "source": "processes"},
    ],
    ids=lambda options: ",".join(name if np.ndim(value) else f"{name}={value}" for name, value in options.items()),
)
def test_each_edge_has_the_row_of_its_edge(tmp_path, options):
    dtype, to_undirected = options.get("dtype", np.float32), options.get("to_undirected", False)
    both_ways = to_undirected or getattr(options.get("sampler"), "direction", "in") == "both"
    dm = make(tmp_path / "s", batch_size=16, **options)
    dm.setup("fit")
    rows = (100 * ROWS).astype(dtype)
    num_edges = sum(check(batch, dm.store, rows, both_ways) for batch in dm.train_dataloader())
    dm.teardown("fit")
    assert num_edges > 100


def test_groups_of_batches_carry_them(tmp_path):
    """What travels from workers on other machines."""
    dm = make(tmp_path / "s", batch_size=16, sampler=gs.NeighborSampler([4, 3]), stored_features=False)
    batches = list(dm.train_dataloader())
    for batch, back in zip(batches, unpack_group(pack_group(batches), None), strict=True):
        assert torch.equal(back.edge_attr, batch.edge_attr)
        assert check(back, dm.store, (100 * ROWS).astype(np.float32), False)
    dm._train_loader.close()


def test_a_store_without_them_gives_batches_without(tmp_path):
    dm = make(tmp_path / "s", edge_features=None, edge_weight=1 + ROWS[:, 0])
    assert all(batch.edge_attr is None and batch.edge_weight is not None for batch in dm.train_dataloader())


class EdgeConditioned(L.LightningModule):
    """A user's own module: messages by a network of the edge's features."""

    def __init__(self):
        super().__init__()
        self.conv, self.seen = NNConv(5, 4, torch.nn.Linear(DIM, 20), aggr="mean"), set()

    def _loss(self, batch, split):
        self.seen.add(split)
        out = self.conv(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
        return torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])

    def training_step(self, batch, batch_idx):
        return self._loss(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._loss(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_a_module_of_the_users_own_trains_on_them(tmp_path):
    dm = make(tmp_path / "s", sampler=gs.NeighborSampler([5]), evaluation="sampled")
    model = EdgeConditioned()
    before = model.conv.nn.weight.detach().clone()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(accelerator="cpu", devices=1, strategy="gnnscale", max_epochs=1, **quiet).fit(model, dm)
    assert model.seen == {"train", "val"}
    assert not torch.equal(model.conv.nn.weight, before)
