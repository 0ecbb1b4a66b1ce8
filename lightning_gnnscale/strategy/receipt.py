"""What a run keeps so that a step can be computed again and compared: digests of data, code, batches and weights."""

import hashlib
import inspect
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from ..across_ranks import gather_from_ranks
from ..errors import GNNScaleError, is_integer
from ..events import machine
from ..graph import StepBatches, batch_of, batches_of
from ..kernel_sets import sources_digest
from ..traits import DataTraits, StrategyTraits

RECEIPT = "receipt.jsonl"
FORMAT = 1
MOST_IDS = 1024  # node ids of a batch that its digest covers; its seeds come beside them
WEIGHTS_SHARE = 0.005  # of training, for digests of weights between epochs
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LIBRARIES = ("builtins", "torch", "lightning", "torch_geometric", "torchmetrics", "abc", "typing", "collections")
_ITSELF = __package__.partition(".")[0]


class BatchRow(NamedTuple):
    """What the receipt says of a batch of training.

    Attributes:
        step: Optimizer steps before it, as its process counts them.
        key: Its key; None: a batch of another loader, which has none.
        batch: Digest of its size, seeds and nodes.
        loss: None: the training step returned none.
        weights: Digest of the parameters after the step that it ended; None: none was taken.
    """

    step: int
    key: int | None
    batch: str
    loss: float | None
    weights: str | None


@dataclass
class Section:
    """What one start of a run has left in its receipt; a run that is started again in its folder has several.

    Attributes:
        began: What it ran on, and from which step and weights.
        epochs: By epoch the rows of all processes.
        marks: Of moments at which all processes had the same weights, as dicts: "step" (steps taken), "epoch",
            "weights" (digest), "within" (whether the epoch went on), "saved" (whether a checkpoint was).
    """

    began: dict[str, Any]
    epochs: dict[int, list[BatchRow]] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, step: int) -> tuple[int, list[BatchRow]]:
        """Return the epoch and the batches of a step; (0, []) where the section has no such step."""
        for epoch, rows in self.epochs.items():
            found = [row for row in rows if row.step == step]
            if found:
                return epoch, found
        return 0, []


class RunReceipt(Callback):
    """Keep a receipt of a run, `receipt.jsonl`, by which `gnnscale reproduce` and `reproduce_step` compare a step.

    It begins with digests of the store, the code (this package's sources, and the files of other classes that are
    trained), the settings and the first weights, with versions, processor and threads. Each batch adds its key, a
    digest of its seeds and of up to `MOST_IDS` of its nodes (on a GPU of their number alone), and its loss; each epoch
    and each checkpoint a digest of the weights; so do steps between, as long as that takes less than `WEIGHTS_SHARE` of
    the time of training, and none on a GPU. It is written at the end of an epoch and with a checkpoint.

    `gnnscale train` keeps one. In Python `GNNScaleStrategy` does where a logger has a folder, which then has it.

    Args:
        folder: Where it is written; None: `trainer.log_dir`.
        settings: By group plain values whose digests are compared; None: the module's structure and hyperparameters.

    A receipt that cannot be written is given up with a warning.

    Cost: 20 to 50 microseconds a batch, about 90 bytes on disk; a gather of these from all processes an epoch.
    """

    def __init__(self, folder: str | os.PathLike | None = None, settings: Mapping[str, Any] | None = None):
        self.folder, self.settings = folder, settings
        self._path: Path | None = None
        self._rows: list[BatchRow] = []
        self._step, self._began_s, self._spent_s = 0, 0.0, 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the receipt, or go on with it."""
        self._rows, self._began_s, self._spent_s = [], time.perf_counter(), 0.0
        folder = self.folder or trainer.log_dir  # which asks the first process
        if trainer.global_rank == 0:
            self._path = Path(folder) / RECEIPT
            self._write({"run": described_run(trainer, pl_module, self.settings)}, "\n")  # a kill may have cut a line

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note which step the batch belongs to."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note what the batch was, and its loss."""
        if batch is not None:
            self._rows += rows_of(self._step, batch, outputs, self._weights(trainer, pl_module))
        if trainer.is_last_batch:
            self._flush(trainer)
            whole = _equal_weights(trainer)
            if trainer.global_rank == 0:
                self._mark(trainer, pl_module, whole, within=False, saved=False)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write what is noted, and a digest of the weights that are saved."""
        within = trainer.state.fn == TrainerFn.FITTING and not trainer.is_last_batch
        if within:  # after the last batch all is written; every process saves
            self._flush(trainer)
        if trainer.global_rank == 0 and self._path is not None:
            self._mark(trainer, pl_module, True, within=within, saved=True)

    def _weights(self, trainer: pl.Trainer, module: nn.Module) -> str | None:
        """Return the digest of the weights after a step, where it is this process's to take, and there is time."""
        policy = StrategyTraits(trainer.strategy).weights
        alike = policy is None or policy.equal_batches
        if trainer.global_step != self._step + 1 or (alike and trainer.global_rank) or not _on_cpu(trainer):
            return None
        if trainer.is_last_batch and not alike:  # they are the average of all parts by now
            return None
        began = time.perf_counter()
        if self._spent_s > WEIGHTS_SHARE * (began - self._began_s):
            return None
        digest = digest_of_weights(module)
        self._spent_s += time.perf_counter() - began
        return digest

    def _flush(self, trainer: pl.Trainer) -> None:
        """Write the rows of all processes; every process calls it."""
        rows, self._rows = [row._replace(loss=number_of(row.loss)) for row in self._rows], []
        every = gather_from_ranks(rows)
        if trainer.global_rank == 0 and any(every):
            self._write({"epoch": trainer.current_epoch, "rows": [row for own in every for row in own]})

    def _mark(self, trainer: pl.Trainer, module: nn.Module, whole: bool, within: bool, saved: bool) -> None:
        mark = {"step": trainer.global_step, "epoch": trainer.current_epoch, "within": within, "saved": saved}
        self._write({"mark": mark | {"weights": digest_of_weights(module) if whole else None}})

    def _write(self, line: dict[str, Any], before: str = "") -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a") as file:
                file.write(f"{before}{json.dumps(line, default=str)}\n")
        except OSError as error:  # training is worth more than its receipt
            rank_zero_warn(f"{self._path}: cannot be written ({error.strerror}): this run keeps no receipt from here")
            self._path = None


def keep_receipt(trainer: pl.Trainer) -> None:
    """Give a Trainer a `RunReceipt`, where it has none and a logger with a folder."""
    has_folder = bool(trainer.loggers) and trainer.loggers[0].save_dir is not None and not trainer.fast_dev_run
    if has_folder and not any(isinstance(callback, RunReceipt) for callback in trainer.callbacks):
        trainer.callbacks.insert(1, RunReceipt())  # behind that of the weight policy


def read_receipt(folder: str | os.PathLike) -> list[Section]:
    """Return the sections of a run's receipt, in the order in which they were written.

    Raises:
        GNNScaleError: there is none, or it is of another format; a line that a kill has cut is left out.
    """
    path, sections = Path(folder) / RECEIPT, []
    if not path.is_file():
        raise GNNScaleError(
            f"{folder}: has no {RECEIPT}: runs of gnnscale train keep one from their first step on, and runs of before "
            "there were receipts have none"
        )
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if "run" in line:
            if line["run"].get("format") != FORMAT:
                raise GNNScaleError(
                    f"{path}: is of format {line['run'].get('format')}, this version reads {FORMAT}: reproduce the run "
                    "with the version that made it"
                )
            sections.append(Section(line["run"]))
        elif sections and "rows" in line:
            rows = sections[-1].epochs.setdefault(line["epoch"], [])
            rows += [BatchRow(*row) for row in line["rows"]]
        elif sections and "mark" in line:
            sections[-1].marks.append(line["mark"])
    return sections


def described_run(trainer: pl.Trainer, module: pl.LightningModule, settings: Mapping[str, Any] | None) -> dict:
    """Return what a run is computed from and on, as plain values: see `Section.began`."""
    store, strategy = DataTraits(trainer.datamodule).store, StrategyTraits(trainer.strategy)
    about = dict(machine())
    gpu, cpu = about.pop("gpu"), about.pop("cpu")
    for name in ("cores", "memory_gib", "system"):
        about.pop(name)
    given = {"model": [str(module), dict(module.hparams)]} if settings is None else settings
    return {
        "format": FORMAT,
        "step": trainer.global_step,
        "weights": digest_of_weights(module),
        "checkpoint": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
        "store": None if store is None else {"root": str(store.root), "manifest": store.manifest_digest},
        "code": {_ITSELF: sources_digest()} | _own_files(module, trainer.datamodule),
        "versions": {name: version for name, version in about.items() if version},
        "processor": cpu if _on_cpu(trainer) else gpu,
        "on_gpu": not _on_cpu(trainer),
        "precision": str(trainer.precision),
        "threads": torch.get_num_threads(),
        "processes": trainer.world_size,
        "logical_ranks": strategy.logical_ranks,
        "shares_steps": strategy.weights is None or strategy.weights.equal_batches,
        "settings": {name: _short_digest([_as_text(one).encode()]) for name, one in given.items()},
    }


def rows_of(step: int, batch: Any, outputs: Any, weights: str | None) -> list[BatchRow]:
    """Return the rows of what a process has computed at once, a batch or those of several logical ranks.

    Args:
        step: Optimizer steps before it.
        outputs: What its training step returned; losses stay on their device.
        weights: Digest of the parameters after it, of the last row.
    """
    batches = batches_of(batch)
    losses = [*(batch.losses if isinstance(batch, StepBatches) else ()), _loss_of(outputs)]
    rows = []
    for number, (one, loss) in enumerate(zip(map(batch_of, batches), losses, strict=True)):
        last = weights if number == len(batches) - 1 else None
        rows.append(BatchRow(step, int(one.key) if is_integer(one.key) else None, digest_of_batch(one), loss, last))
    return rows


def _as_text(value: Any) -> str:
    """Return settings as text, without the places of functions in memory, which no two processes share."""
    return _ADDRESS.sub("", json.dumps(value, sort_keys=True, default=str))


def digest_of_weights(module: nn.Module) -> str:
    """Return the digest of a module's parameters, their names, dtypes and shapes. Cost: about 1 ms a MB."""
    return _short_digest(_bytes_of(module.named_parameters()))


def digest_of_batch(batch: Any) -> str:
    """Return the digest of a batch's sizes, and where they are on the host of its seeds and some of its nodes."""
    nodes = batch.n_id
    edges = batch.indices if batch.edge_index is None else batch.edge_index
    seeds = batch.batch_size if is_integer(batch.batch_size) else 0
    # Batches of others may have anything here, as those of several node types have mappings.
    sizes = [
        _length(nodes, 0),
        _length(edges, -1),
        seeds,
        *(one for one in batch.num_sampled_nodes or () if is_integer(one)),
    ]
    pieces: list[Any] = [np.array(sizes, np.int64)]
    if isinstance(nodes, Tensor) and nodes.device.type == "cpu" and nodes.ndim == 1 and len(nodes):
        ids, stride = nodes.numpy(), -(-len(nodes) // MOST_IDS)
        pieces += [np.ascontiguousarray(ids[: min(seeds, MOST_IDS)])]
        pieces += [np.ascontiguousarray(ids[::stride])]
    return _short_digest(pieces)


def _length(values: Any, axis: int) -> int:
    return int(values.shape[axis]) if isinstance(values, Tensor | np.ndarray) and values.ndim else 0


def _bytes_of(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[Any]:
    for name, tensor in tensors:
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode()
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _short_digest(pieces: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:16]


def _equal_weights(trainer: pl.Trainer) -> bool:
    """Whether the model holds weights that do not depend on which parts this process has."""
    policy = StrategyTraits(trainer.strategy).weights
    return trainer.world_size == 1 or policy is None or policy.replicas_equal


def _on_cpu(trainer: pl.Trainer) -> bool:
    return trainer.strategy.root_device.type == "cpu"


def _loss_of(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None


def number_of(loss: Tensor | None) -> float | None:
    """Return a loss as a number; one on a GPU is waited for."""
    return None if loss is None else float(loss)


def _own_files(*objects: Any) -> dict[str, str]:
    """Return the digests of the files of classes that are neither this package's nor of the libraries below it."""
    modules = {module for one in objects for module in (one.modules() if isinstance(one, nn.Module) else [one])}
    found = {}
    for kind in {kind for one in modules for kind in type(one).__mro__}:
        if kind.__module__.partition(".")[0] in (_ITSELF, *_LIBRARIES) or kind.__module__ in found:
            continue
        with suppress(TypeError, OSError):  # compiled, or typed into a shell
            found[kind.__module__] = _short_digest([Path(inspect.getfile(kind)).read_bytes()])
    return dict(sorted(found.items()))
