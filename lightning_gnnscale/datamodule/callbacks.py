"""The callbacks of the DataModules: predictions on disk, what a process held, the dial of locality-aware sampling."""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from ..across_ranks import failing_together, first_in_folder, rank, send_file
from ..dataset.value_checks import UNKNOWN, blocks
from ..errors import StrategyError, disk_errors
from ..events import clock, record
from ..graph import Batch, batch_of, batches_of
from ..memory import disk_read_bytes
from ..memory_peak import MemoryPeak
from ..partition_store.versions import PARENT_NID, mapped
from ..placement.link_cost import gpu_name
from ..sampler.locality import LocalityScale
from ..traits import ANY, DataTraits, ModuleTraits
from .changed_outputs import METADATA, KeptOutputs, exact_pass_of, identity_of, kept_outputs, kept_rows
from .kept_layers import KeptLayers, layers_folder

_log = logging.getLogger("lightning.pytorch.predictions")
_OTHER_PATH = "free space, or give PredictionWriter(<a path on another disk>) (hydra.run.dir=)"
_STATE = ("scale", "previous", "fixed")
_BLOCK_ROWS = 1 << 18  # rows of predictions that are written at once
JOINED_BYTES = 256 << 20  # of predictions that are sorted at once
_IDS = ("nodes", "edges", "edge_type")  # of rows, as `predict_step` returns them
_ORDER = "original_nid"  # column that nodes are sorted by; the final table does not have it


class LocalityController(L.Callback):
    """Set the locality scale after each training epoch, by Algorithm 2.

    The scale starts at 1, doubles while loading takes more than `upper` of an epoch's time, goes back half way to the
    previous value where it takes less than `lower`, and stays for good once it is between them or at `max_scale`.
    Every rank uses the mean share over ranks, so all have the same scale. Logged at each epoch's end:
    `loading_share`, and `locality_scale` as it was in that epoch. The state is part of checkpoints.

    It reads `trainer.datamodule.loading_share()`, a float in [0, 1] of the epoch that ends, and calls
    `trainer.datamodule.set_locality_scale(scale)` before the first epoch and after each one.

    Args:
        lower, upper: shares of an epoch's time, 0 <= lower <= upper <= 1.
        max_scale: largest scale, finite and >= 1.

    Raises:
        ValueError: an argument out of range.
        StrategyError: at the start of training, a datamodule or sampler without locality.

    Source: Song and Jiang, ICS 2022, Algorithm 2; see `LocalityScale`.
    """

    def __init__(self, lower: float = 0.15, upper: float = 0.20, max_scale: float = 8.0):
        self.state = LocalityScale(lower, upper, max_scale)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a datamodule or a sampler without a scale that can be changed.

        Raises:
            StrategyError: the message names it.
        """
        if stage != "fit":
            return
        datamodule = trainer.datamodule
        data = DataTraits(datamodule)
        if data.set_locality_scale is None or data.loading_share is None:
            given = "no datamodule" if datamodule is None else type(datamodule).__name__
            raise StrategyError(
                "LocalityController needs a datamodule with set_locality_scale and loading_share, got "
                f"{given}: use PartitionDataModule, or leave the callback out"
            )
        sampler = data.sampler
        if sampler is None or sampler.locality is None:
            raise StrategyError(
                f"LocalityController needs a sampler with locality, got {type(sampler).__name__} without one: give "
                "NeighborSampler or LayerwiseSampler locality=LocalityBias(placement), or leave the callback out"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set the first scale, or that of a checkpoint."""
        trainer.datamodule.set_locality_scale(self.state.scale)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the share of loading and the scale, and set the scale of the next epoch."""
        share = torch.tensor(trainer.datamodule.loading_share(), dtype=torch.float32, device=pl_module.device)
        share = min(max(float(trainer.strategy.reduce(share, reduce_op="mean")), 0.0), 1.0)
        values = {"loading_share": share, "locality_scale": float(self.state.scale)}
        pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)
        self.state = self.state.after_epoch(share)
        trainer.datamodule.set_locality_scale(self.state.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the one before it, and whether it is fixed."""
        return {name: getattr(self.state, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; `lower`, `upper` and `max_scale` stay this callback's own.

        Raises:
            ValueError: the checkpoint's scale is above this callback's max_scale.
        """
        self.state = replace(self.state, **{name: state_dict[name] for name in _STATE})


class PeakRecorder(L.Callback):
    """Record the events `training_peak` and `evaluation_peak` on every rank, at the end of training and of testing.

    `peak_bytes` is the device's peak of allocated memory on CUDA; on a CPU the peak of the process (anonymous and
    shared memory; see `MemoryPeak`) beyond `start_bytes`, which it held at the start.
    """

    def __init__(self):
        self._peak: MemoryPeak | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end("training_peak", trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(pl_module)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end("evaluation_peak", trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._peak is not None:
            self._peak.__exit__()
            self._peak = None

    def _begin(self, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        else:
            self._peak = MemoryPeak(alone=True).__enter__()

    def _end(self, event: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = 0
        if self._peak is None:
            peak = torch.cuda.max_memory_allocated(pl_module.device)
        else:
            self._peak.__exit__()
            start = self._peak.start_bytes
            peak = self._peak.peak_bytes - start
            self._peak = None
        device, gpu = pl_module.device.type, gpu_name(pl_module.device) if pl_module.device.type == "cuda" else ""
        record(event, rank=trainer.global_rank, device=device, gpu=gpu, peak_bytes=peak, start_bytes=start)


class EpochTimes(L.Callback):
    """Record on every rank the event `epoch_times` of each training epoch, and `timeline` of the first and the last.

    `seconds` reach to the epoch's end, validation and saving included. `training` has the seconds of what the training
    thread did, which add up to them; `beside` those of what threads and worker processes did meanwhile; see
    `events.ActivityClock`. `counts` has the epoch's numbers of batches, seeds, nodes, edges, bytes of feature rows
    (`row_bytes`); `hop_nodes` and `hop_edges` where they were sampled hop by hop. `disk_bytes` is what the process
    read from disk, None where the system does not report it. `timeline` has both in bins of `bin_s` seconds.
    `latest` is this process' last `epoch_times`.

    Cost: some microseconds a batch; two events an epoch, and two of up to 50 kB a run.
    """

    def __init__(self):
        self._showed_first, self._is_within = False, False
        self.latest: dict = {}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end(trainer, is_last=False)
        self._is_within = True
        self._epoch, self._began = trainer.current_epoch, time.time()
        self._counts, self._hop_nodes, self._hop_edges = Counter(), Counter(), Counter()
        self._disk_bytes = disk_read_bytes()
        clock.begin(trainer.strategy.root_device)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_within:  # a run that goes on within an epoch does not begin it
            self.on_train_epoch_start(trainer, pl_module)
        for one in map(batch_of, batches_of(batch)):
            self._counts.update(_sizes(one))
            self._hop_nodes.update(dict(enumerate(one.num_sampled_nodes or ())))
            self._hop_edges.update(dict(enumerate(one.num_sampled_edges or ())))
        clock.turn_to("forward")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        clock.turn_to("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        clock.turn_to("update")

    def on_train_batch_end(self, *_: Any) -> None:
        clock.turn_to("other")

    def on_validation_start(self, *_: Any) -> None:
        clock.turn_to("validation")

    def on_validation_end(self, *_: Any) -> None:
        clock.turn_to("other")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end(trainer, is_last=True)
        self._is_within = False

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._end(trainer, is_last=True)
        self._is_within = False

    def _end(self, trainer: L.Trainer, is_last: bool) -> None:
        if not clock.end():
            return
        whose = {"epoch": self._epoch, "rank": trainer.global_rank, "began": self._began}
        disk_bytes = disk_read_bytes()
        self.latest = record(
            "epoch_times",
            **whose,
            device=trainer.strategy.root_device.type,
            seconds=sum(clock.training.seconds.values()),
            training=_rounded(clock.training.seconds),
            beside=_rounded(clock.beside.seconds),
            counts=dict(self._counts),
            hop_nodes=list(self._hop_nodes.values()),
            hop_edges=list(self._hop_edges.values()),
            disk_bytes=None if disk_bytes is None else disk_bytes - self._disk_bytes,
        )
        if self._showed_first and not is_last:
            return
        self._showed_first = True
        for lane, activities in (("training", clock.training), ("beside", clock.beside)):
            if activities.seconds:
                record("timeline", **whose, lane=lane, bin_s=activities.bin_s, by_time=activities.by_time())


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {activity: round(value, 6) for activity, value in seconds.items()}


def _sizes(batch: Batch) -> dict[str, int]:
    """Return the counts of a batch that `EpochTimes` adds up; 0 for those that it does not have."""
    sparse, rows = batch.x_csr, batch.x_dense
    tensors = [rows] if sparse is None else [value for value in sparse if torch.is_tensor(value)]
    if batch.x_by_node_type is not None:
        of_types = [table for table in batch.x_by_node_type.tables if table is not None]
        tensors = [one for table in of_types for one in ([table] if torch.is_tensor(table) else table)]
        tensors = [one for one in tensors if torch.is_tensor(one)]
    if batch.full_graph:
        tensors = []  # always in memory, not loaded
    edges = batch.indices if batch.edge_index is None else batch.edge_index[0]
    return {
        "batches": 1,
        "seeds": int(batch.batch_size or 0),
        "nodes": len(batch.n_id),
        "edges": 0 if edges is None else len(edges),
        "row_bytes": sum(one.numel() * one.element_size() for one in tensors if one is not None),
    }


class PredictionWriter(BasePredictionWriter):
    """Write one Parquet file with one row per node, in ascending order of the original ids; or with one per edge.

    Pages have checksums. Columns: `node_type`, its name, in a graph with several node types; `node`, the user's id (an
    integer, or text with `relabel=True`), of a typed node that of its node type; `prediction`, an
    int64 class, or a list: 0/1 labels, outputs with `predict_logits`, or an embedding. Needs
    `trainer.predict(model, datamodule)` with this package's DataModule.

    For `EdgeClassifier`, or another module whose `predict_step` returns `edges`, rows are the held-out edges that
    `PartitionDataModule.predict_dataloader` chooses, in the order of their `LinkSet`; see `hold_out_edges`. Columns
    instead of `node_type` and `node`: `source_type`, `source`, `relation`, `target_type` and `target`; the node types
    and the edge type, by their names, in a graph with several.

    A module that predicts labels gives no rows for node types in which no node of the store has a label; a line in the
    log names them. Where no node has one, or the module predicts embeddings, all nodes have rows.

    Args:
        path: Path of the file, on rank 0's machine. Each rank writes `path.rank` first; machines that do not see rank
            0's folder send theirs to it, a chunk at a time. Rank 0 joins them, and the complete file appears at once.
        earlier: Files of this class, on rank 0's machine, that may have the predictions of the store's parent version
            by the same model: where one has, only nodes whose outputs the update can have altered are computed, and the
            others' are taken from it. The log says how many, or why all are computed. It is read into memory.
        keep_layers: Whether the outputs of hidden layers are kept beside the file, in a folder of its name that ends in
            .layers. A pass over the next version with this one as `earlier` then computes, layer by layer, the rows
            alone that the update can have altered; without, all that these are made of.

    Attributes:
        kept: What the running prediction, or the last one, took from `earlier`: `kept.altered` are the nodes that it
            computes. None: it computes all.

    Raises:
        StrategyError: keep_layers, and nodes are not predicted layer by layer, or by a model with learned rows.
        GNNScaleError: on every rank, where one cannot write, for example because its disk is full.

    Cost: blocks of `JOINED_BYTES` in memory, where a module of this package predicts layer by layer; on the disk twice
        the rows while rank 0 joins them. Kept layers take num_nodes x width x 4 bytes each, 8 of a model in float64.
    """

    def __init__(self, path: str | os.PathLike, earlier: Sequence[str | os.PathLike] = (), keep_layers: bool = False):
        super().__init__("epoch")
        self.path, self.earlier, self.keep_layers = Path(path), [Path(one) for one in earlier], keep_layers
        self._identity: dict[str, str] | None = None
        self.kept: KeptOutputs | None = None
        self._layers: KeptLayers | None = None
        self._writer: pq.ParquetWriter | None = None
        self._left_out: np.ndarray | None = None  # numbers of node types without rows

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ask a module of this package for its rows block by block, as they are computed."""
        store, module = trainer.datamodule.store, ModuleTraits(pl_module)
        predicts_labels = module.multilabel is not None or module.num_targets is not None
        self._left_out = _without_labels(store) if predicts_labels else None
        if self._left_out is not None and trainer.is_global_zero:
            named = ", ".join(store.schema.node_types[number] for number in self._left_out)
            _log.info("No predictions for nodes of %s: no node of these node types has a label", named)
        if ModuleTraits(pl_module).write_predictions is not ANY:
            pl_module.write_predictions = partial(self._write, trainer.datamodule.store)
        self._identity, self.kept = identity_of(trainer, pl_module, self._left_out), None
        evaluation, self._layers = exact_pass_of(trainer, pl_module), None
        if self.keep_layers and (evaluation is None or evaluation.links is not None):
            raise StrategyError(
                'keep_layers=True needs nodes that are predicted layer by layer: give evaluation="layerwise" and a '
                "backbone with layer(index, x, block), or leave keep_layers out"
            )
        if self.keep_layers and pl_module.inputs is not None:
            raise StrategyError(
                "keep_layers=True is for models without learned rows, of which nothing says which differ later: leave "
                "it out"
            )
        if self.earlier:
            self.kept = kept_outputs(trainer, pl_module, self.earlier, self._identity, self._left_out, self.keep_layers)
        before = None if self.kept is None else self.kept.layers
        if self.keep_layers or before is not None:
            folder = layers_folder(self.path) if self.keep_layers else None
            places = None if before is None else mapped(store, PARENT_NID)
            self._layers = evaluation.layers = KeptLayers(evaluation.source, folder, before, places)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Release the module."""
        if ModuleTraits(pl_module).write_predictions is not ANY:
            pl_module.write_predictions = None

    def write_on_epoch_end(self, trainer: L.Trainer, pl_module, predictions, batch_indices) -> None:
        """Write this rank's rows and, on rank 0, the whole table."""
        store, own = trainer.datamodule.store, self._part(rank())
        try:
            with failing_together(), disk_errors(own, "written", _OTHER_PATH):
                for result in predictions:
                    self._write(store, result)
                before = self.kept if rank() == 0 else None
                for rows in () if before is None else kept_rows(store, before, self._left_out):
                    self._write(store, rows)
                if self._writer is None:  # a rank without rows gets the types from the others
                    own.parent.mkdir(parents=True, exist_ok=True)
                    own.touch()
                else:
                    self._writer.close()
            firsts = first_in_folder(self.path.parent, _OTHER_PATH)
            for number, first in enumerate(firsts):
                if first:
                    send_file(number, [0], self._part(number), _OTHER_PATH)
            with failing_together(), disk_errors(self.path, "written", _OTHER_PATH):
                if rank() == 0:
                    self._join(len(firsts), store.num_nodes)
                    if self._layers is not None:
                        self._layers.publish({name: self._identity[name] for name in ("store", "model")})
        finally:
            self._writer = None
            with suppress(OSError):
                own.unlink()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove this rank's rows."""
        if self._writer is not None:
            self._writer = None
            with suppress(OSError):
                self._part(rank()).unlink()
        if self._layers is not None and rank() == 0:
            self._layers.discard()

    def _write(self, store, rows: dict[str, Any]) -> None:
        """Add rows, as `predict_step` returns them, to this rank's file."""
        own = self._part(rank())
        if self._left_out is not None and "nodes" in rows:
            kept = ~np.isin(store.node_type(rows["nodes"]), self._left_out)
            rows = {"nodes": rows["nodes"][kept], "prediction": rows["prediction"][kept]}
        with disk_errors(own, "written", _OTHER_PATH):
            for at in range(0, len(rows["prediction"]), _BLOCK_ROWS):
                chosen = slice(at, at + _BLOCK_ROWS)
                block = {name: rows[name][..., chosen] for name in _IDS if name in rows}
                table = self._table(store, block | {"prediction": rows["prediction"][chosen]})
                if self._writer is None:
                    own.parent.mkdir(parents=True, exist_ok=True)
                    self._writer = pq.ParquetWriter(own, table.schema, write_page_checksum=True)
                self._writer.write_table(table)

    def _part(self, number: int) -> Path:
        return Path(f"{self.path}.{number}")

    def _join(self, num_ranks: int, num_nodes: int) -> None:
        """Write the rows of all ranks as one table: nodes in ascending order of the original ids, edges as they come.

        Nodes are assigned to files by ranges of ids that fit into memory, and each of these is sorted. Each rank
        has written a run of the edges.
        """
        parts, temporary = [self._part(number) for number in range(num_ranks)], Path(f"{self.path}.tmp")
        filled = [pq.ParquetFile(part, page_checksum_verification=True) for part in parts if part.stat().st_size]
        num_ranges = max(1, -(-sum(map(_bytes_of, filled)) // JOINED_BYTES))
        span = max(1, -(-num_nodes // num_ranges))
        chunks = [Path(f"{self.path}.range{number}") for number in range(num_ranges)]
        try:
            if filled and _ORDER not in filled[0].schema_arrow.names:
                batches = (batch for file in filled for batch in file.iter_batches(_BLOCK_ROWS))
                tables = (pa.Table.from_batches([batch]) for batch in batches)
            elif num_ranges > 1:
                _assign(filled, chunks, span)
                filled = [pq.ParquetFile(chunk) for chunk in chunks if chunk.is_file()]
                tables = (file.read() for file in filled)
            else:
                tables = iter([pa.concat_tables(file.read() for file in filled)]) if filled else iter(())
            writer = None
            for table in tables:
                ordered = table.sort_by(_ORDER).drop_columns([_ORDER]) if _ORDER in table.column_names else table
                if self._identity is not None:
                    ordered = ordered.replace_schema_metadata({METADATA: json.dumps(self._identity)})
                writer = writer or pq.ParquetWriter(temporary, ordered.schema, write_page_checksum=True)
                writer.write_table(ordered)
            if writer is not None:
                writer.close()
                os.replace(temporary, self.path)
        finally:
            for file in filled:
                file.close()
            for path in (*parts, *chunks, temporary):
                path.unlink(missing_ok=True)

    @staticmethod
    def _table(store, rows: dict[str, Any]) -> pa.Table:
        """Return rows in the user's ids; rows of nodes with the column that they are sorted by."""
        values = rows["prediction"]
        values = np.asarray(values.cpu().numpy() if isinstance(values, torch.Tensor) else values)
        dtype = pa.from_numpy_dtype(values.dtype)
        if values.ndim == 1:
            column = pa.array(values, dtype)
        else:
            offsets = pa.array(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1])
            column = pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values).reshape(-1), dtype))
        if "nodes" in rows:
            nodes = rows["nodes"]
            columns = {_ORDER: pa.array(store.original_nid[nodes])} | _named(store, nodes, "node_type", "node")
        else:
            source, target = rows["edges"]
            columns = _named(store, source, "source_type", "source")
            if "edge_type" in rows and store.schema is not None and store.schema.num_edge_types > 1:
                names = np.array([name for _, name, _ in store.schema.edge_types])
                columns["relation"] = pa.array(names[rows["edge_type"]])
            columns |= _named(store, target, "target_type", "target")
        return pa.table(columns | {"prediction": column})


def _without_labels(store) -> np.ndarray | None:
    """Return the numbers of node types without a labelled node; None where there are none, or nothing has a label."""
    if store.labels is None or store.schema is None or store.schema.num_node_types < 2:
        return None
    labelled = np.zeros(store.schema.num_node_types, bool)
    for begin, rows in blocks(store.labels):
        known = (~np.isnan(rows) if store.regression else rows != UNKNOWN).reshape(len(rows), -1).any(axis=1)
        labelled[store.node_type(begin + np.flatnonzero(known))] = True
        if labelled.all():
            return None
    return np.flatnonzero(~labelled) if labelled.any() else None


def _named(store, nodes: np.ndarray, node_type: str, node: str) -> dict[str, pa.Array]:
    """Return the columns of some nodes: their node types, where there are several, and the user's ids."""
    columns, ids = {}, store.user_ids(nodes)
    if store.schema is not None and store.schema.num_node_types > 1:
        columns[node_type] = pa.array(np.array(store.schema.node_types)[store.node_type(nodes)])
    return columns | {node: pa.array(ids, pa.string() if ids.dtype.kind in "OU" else None)}


def _bytes_of(file: pq.ParquetFile) -> int:
    """Return the memory that the rows of a file take, estimated from its first group."""
    first = file.read_row_group(0)
    return first.nbytes * file.metadata.num_rows // max(1, first.num_rows)


def _assign(files: list[pq.ParquetFile], chunks: list[Path], span: int) -> None:
    """Assign the rows of files to one file for each range of `span` original ids."""
    writers: dict[int, pq.ParquetWriter] = {}
    try:
        for file in files:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group)
                number = rows[_ORDER].to_numpy() // span
                for at in np.unique(number):
                    chosen = rows.filter(pa.array(number == at))
                    if at not in writers:
                        writers[at] = pq.ParquetWriter(chunks[at], rows.schema)
                    writers[at].write_table(chosen)
    finally:
        for writer in writers.values():
            writer.close()
