"""Predictions on disk, keyed by the user's own node ids."""

import os
from pathlib import Path

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.callbacks import BasePredictionWriter


class PredictionWriter(BasePredictionWriter):
    """Write one Parquet file with one row per node, in ascending order of the original ids.

    Pages have checksums. Columns: `node`, the user's id (an integer, or text with `relabel=True`); `prediction`, an
    int64 class, or a list: 0/1 labels, outputs with `predict_logits`, or an embedding. Needs
    `trainer.predict(model, datamodule)` with this package's DataModule, and a path that all ranks reach.

    Args:
        path: Path of the file. Each rank writes `path.rank` first; rank 0 joins them, and the complete file appears at
            once.

    Cost: rank 0 holds the whole table, and its sorted copy, while it joins.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__("epoch")
        self.path = Path(path)

    def write_on_epoch_end(self, trainer: L.Trainer, pl_module, predictions, batch_indices) -> None:
        """Write this rank's rows and, on rank 0, the whole table in ascending order of the original ids."""
        store = trainer.datamodule.store
        own = Path(f"{self.path}.{trainer.global_rank}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tables = [self._table(store, result) for result in predictions]
        pq.write_table(pa.concat_tables(tables), own, write_page_checksum=True)
        trainer.strategy.barrier("gnnscale-predictions")
        if trainer.global_rank == 0:
            parts = [Path(f"{self.path}.{rank}") for rank in range(trainer.world_size)]
            joined = pa.concat_tables([pq.read_table(part, page_checksum_verification=True) for part in parts]).sort_by(
                "original_nid"
            )
            temporary = Path(f"{self.path}.tmp")
            pq.write_table(joined.drop_columns(["original_nid"]), temporary, write_page_checksum=True)
            os.replace(temporary, self.path)
            for part in parts:
                part.unlink()
        trainer.strategy.barrier("gnnscale-predictions-joined")

    @staticmethod
    def _table(store, result: dict) -> pa.Table:
        nodes = result["nodes"]
        values = result["prediction"].cpu().numpy()
        # With their types said: a rank without rows has nothing to take them from.
        kind = pa.from_numpy_dtype(values.dtype)
        column = pa.array(values, kind) if values.ndim == 1 else pa.array(list(values), pa.list_(kind))
        ids = store.user_ids(nodes)
        return pa.table(
            {
                "original_nid": pa.array(store.original_nid[nodes]),
                "node": pa.array(ids, pa.string() if ids.dtype.kind in "OU" else None),
                "prediction": column,
            }
        )
