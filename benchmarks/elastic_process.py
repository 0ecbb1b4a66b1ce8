"""Processes that train for `elastic`: they are used again, and the one that is killed is replaced."""

import hashlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_gnnscale as gs
from lightning_gnnscale.cli.elastic import save_within_epochs
from lightning_gnnscale.cli.run_paths import CHECKPOINTS
from lightning_gnnscale.errors import GNNScaleError
from lightning_gnnscale.system import end_with_parent

PATIENCE_S = 5.0  # before processes that have lost one are killed too, as torchrun does
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.02),
}


@dataclass(frozen=True)
class Fit:
    """One training, or a piece of one; plain values.

    Attributes:
        store, folder: Folders of the store, and of checkpoints.
        policy, precision: Of weights, and of the Trainer.
        optimizer: One of OPTIMIZERS.
        ranks: Logical ranks under gradient averaging.
        data, trainer: Further settings of `PartitionDataModule`, and of the Trainer.
        width: Hidden channels.
        save_steps: Steps between two checkpoints within epochs; model averaging saves at their ends. None: no saves.
        resume: Checkpoint to go on from.
        stop_after: Batches of this piece after which it saves, and stops; under model averaging at the epoch's end.
        ordered: False: gradients are all-reduced in any order.
    """

    store: str
    folder: str
    policy: str
    optimizer: str
    precision: str
    ranks: int
    data: dict[str, Any]
    trainer: dict[str, Any]
    width: int = 8
    save_steps: int | None = None
    resume: str | None = None
    stop_after: int | None = None
    ordered: bool = True


class InAnyOrder(gs.GradientAveraging):
    """Adds up what processes have in the order of their all-reduce, as without logical ranks."""

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        self._in_order = False


class Progress(L.Callback):
    """Tells of every batch, and stops where it is asked to."""

    def __init__(self, fit: Fit, connection: Connection):
        self.fit, self.connection, self.batches, self.cpu_s = fit, connection, 0, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.cpu_s = -time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        self.batches += 1
        if self.fit.save_steps:
            self.connection.send(("batch", self.batches))
        if self.batches == self.fit.stop_after and trainer.strategy.weights.equal_batches:
            trainer.save_checkpoint(Path(self.fit.folder) / CHECKPOINTS / "last-stopped.ckpt")
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop |= self.fit.stop_after is not None and self.batches >= self.fit.stop_after

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.cpu_s += time.process_time()


def run_fit(fit: Fit, world_size: int, connection: Connection) -> dict[str, Any]:
    """Train in a process group that stands; return a digest of the weights, or None where it was stopped, and costs."""
    data = gs.PartitionDataModule(store=fit.store, sampler=gs.NeighborSampler([3, 3]), seed=3, **fit.data)
    torch.manual_seed(0)
    backbone = gs.model.GraphSAGE(data.store.features.dim, fit.width, data.num_classes, dropout=0.3, norm="batch")
    model = gs.NodeClassifier(backbone, optimizer=OPTIMIZERS[fit.optimizer])
    weights, options = fit.policy, {}
    if fit.policy == "gradient_averaging":
        weights = gs.GradientAveraging() if fit.ordered else InAnyOrder()
        options = {"logical_ranks": fit.ranks}
    progress = Progress(fit, connection)
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size, logger=False, enable_checkpointing=False, default_root_dir=fit.folder,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
        precision=fit.precision, callbacks=[progress], strategy=gs.GNNScaleStrategy(weights=weights, **options),
        **fit.trainer,
    )  # fmt: skip
    if fit.save_steps and fit.policy == "gradient_averaging":
        save_within_epochs(trainer, Path(fit.folder), fit.save_steps)
    elif fit.save_steps:
        folder = Path(fit.folder) / CHECKPOINTS
        trainer.callbacks.append(ModelCheckpoint(folder, "last-epoch", enable_version_counter=False))
    try:
        trainer.fit(model, data, ckpt_path=fit.resume)
    finally:
        data.teardown("fit")
    is_over = trainer.current_epoch == trainer.max_epochs and not trainer.should_stop
    found = {"batches": progress.batches, "cpu_s": progress.cpu_s, "steps": trainer.global_step}
    return found | {"digest": weights_digest(model) if is_over else None}


def weights_digest(module: torch.nn.Module) -> str:
    """Return a digest of all bits of a module's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def serve(connection: Connection, log: str) -> None:
    """Train what the connection asks for, until it is closed."""
    end_with_parent()
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # of torch, on any number of processes
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with suppress(EOFError):
        while True:
            connection.send(_answer(connection, *connection.recv()))


def _answer(connection: Connection, fit: Fit, rank: int, world_size: int, meeting: str) -> tuple[str, Any]:
    """Join the others at a file and train; return what `Workers.run` takes: how it ended, and with what."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (rank, rank, world_size, world_size)), strict=True))
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "bench", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    given = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=60)}
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", **given)
        return "ended", run_fit(fit, world_size, connection)
    except GNNScaleError as error:
        return "lost", str(error)
    except Exception:
        return "failed", traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Workers:
    """Processes that train together, a group anew for each `run`; a with-block that ends them.

    Args:
        folder: For files by which they meet, and their output.
    """

    def __init__(self, folder: Path):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._meetings, self._workers = folder, 0, []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()

    def run(self, fit: Fit, world_size: int, kill: tuple[int, int, float] | None = None, limit_s: float = 600) -> list:
        """Train on so many processes; return how each ended: ("ended", figures), ("lost", message), ("killed", None).

        Args:
            kill: The rank that SIGKILL ends, after so many batches, and so many seconds; it may have ended before.
            limit_s: Seconds after which processes that still run are killed.

        Raises:
            GNNScaleError: a process failed, or did not end in time.
        """
        self._meetings += 1
        meeting, workers = str(self._folder / f"meeting-{self._meetings}"), self._alive(world_size)
        for rank, (_, connection) in enumerate(workers):
            connection.send((fit, rank, world_size, meeting))
        ended: dict[int, tuple[str, Any]] = {}
        deadline, left = time.monotonic() + limit_s, dict(enumerate(connection for _, connection in workers))
        while left:
            there = wait(left.values(), max(0.0, deadline - time.monotonic()))
            if not there:
                for rank in left:
                    workers[rank][0].kill()
                if ("killed", None) not in ended.values():
                    raise GNNScaleError(f"ranks {sorted(left)} of {world_size} did not end within {limit_s:g} s: {fit}")
                deadline += limit_s
            for rank in [rank for rank, connection in left.items() if connection in there]:
                told = _received(left[rank])
                if told[0] != "batch":
                    ended[rank] = told
                    del left[rank]
                    if told[0] == "killed":
                        workers[rank][0].join(PATIENCE_S)
                        deadline = min(deadline, time.monotonic() + PATIENCE_S)
                elif kill is not None and told[1] >= kill[1]:
                    victim, _, delay_s = kill
                    kill = None
                    time.sleep(delay_s)
                    os.kill(workers[victim][0].pid, signal.SIGKILL)
        Path(meeting).unlink(missing_ok=True)
        failed = next((what for how, what in ended.values() if how == "failed"), None)
        if failed is not None:
            raise GNNScaleError(f"a process failed: {fit}\n{failed}")
        return [ended[rank] for rank in range(world_size)]

    def _alive(self, number: int) -> Sequence[tuple[Any, Connection]]:
        """Return so many processes that live; they are started where there are fewer."""
        kept = []
        for process, connection in self._workers:
            if process.is_alive():
                kept.append((process, connection))
            else:
                connection.close()
        while len(kept) < number:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=serve, args=(theirs, str(self._folder / "log.txt")), daemon=True)
            process.start()
            theirs.close()
            kept.append((process, ours))
        self._workers = kept
        return kept[:number]


def _received(connection: Connection) -> tuple[str, Any]:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return "killed", None
