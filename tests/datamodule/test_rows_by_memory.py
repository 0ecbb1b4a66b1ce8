"""A store whose features memory does not hold: its table is swept, and the batches stay the same."""

import lightning as L
import numpy as np
import pytest

import lightning_gnnscale as gs
from lightning_gnnscale.datamodule import train_loader
from lightning_gnnscale.loader import RankPlace
from lightning_gnnscale.loader.row_reads import Footprint
from lightning_gnnscale.planner.host_memory import COPIES_OF_OUTPUT


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_swept_where_that_reads_least(tmp_path, monkeypatch, packed):
    random = np.random.default_rng(0)
    num, edges = 20_000, random.integers(0, 20_000, (2, 100_000))
    stream = gs.open_edge_stream(edges, num_nodes=num, to_undirected=True)
    parts = gs.partition(stream, "range", num_parts=8)
    columns = {"labels": random.integers(0, 3, num), "masks": {"train": np.arange(num) % 4 == 0}}
    features = random.random((num, 64), np.float32)  # 5.1 MB
    gs.write_partition_store(tmp_path / "s", stream, parts, features=features, pack_halo=packed, **columns)
    found = {}
    for rows in ("mapped", "auto"):
        data = gs.PartitionDataModule(
            store=tmp_path / "s", sampler=gs.NeighborSampler([5, 5]), batch_size=32, rows=rows, source=gs.Threads(1)
        )
        data.verify = False
        monkeypatch.setattr(train_loader, "free_memory_bytes", lambda: 7_000_000)
        loader = data.train_dataloader()
        found[rows] = [(batch.key, batch.n_id.tolist(), batch.x.sum().item()) for batch in loader if batch is not None]
        loader.close()
    assert loader.reads.is_swept and loader.reads.predicted_bytes > features.nbytes
    assert found["auto"] == found["mapped"]
    now, more = data.predicted_reads(RankPlace(), None, [7_000_000, 1 << 30])
    (shared,) = data.predicted_reads(RankPlace(0, 2, num_local=2), None, [7_000_000])
    assert shared.shared_by == 2 and shared.predicted_bytes < 2 * now.predicted_bytes
    assert now.is_swept and more.predicted_bytes == features.nbytes
    model = gs.NodeClassifier(gs.model.GraphSAGE(64, 512, 3))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    trainer = L.Trainer(accelerator="cpu", strategy=gs.GNNScaleStrategy(), limit_val_batches=0, **options)
    trainer.fit(model, data)
    asked = RankPlace(), trainer.strategy.weights, [7_000_000]
    (known,), (unknown,) = data.predicted_reads(*asked, hidden_channels=512), data.predicted_reads(*asked)
    assert data.train_dataloader().reads.predicted_bytes == known.predicted_bytes
    assert known.window_bytes < unknown.window_bytes, "the model is left more"
    first = Footprint(part_bytes=1, rows=700, sampled_bytes=1, target_rows=300)
    assert train_loader._step_bytes(data.store, first, 20) == 4 * 64 * 700 + 4 * 300 * (64 + COPIES_OF_OUTPUT * 20)
    assert train_loader._step_bytes(data.store, first, 0) == train_loader._step_bytes(data.store, None, 20) == 0
