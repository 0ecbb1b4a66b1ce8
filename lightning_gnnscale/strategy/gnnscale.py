"""The Lightning strategy: processes as in DDP, but replicas are joined by a weight policy instead of DDP's reducer."""

import atexit
import math
import os
import signal
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import imports
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from ..across_ranks import failing_together, gather_from_ranks
from ..errors import CheckpointError, StrategyError, check_seconds, short
from ..events import clock
from ..graph import StepBatches, batch_of, batches_of
from ..model import checkpoint_file, made_again
from ..scratch import keep_sockets
from ..system import end_with_parent
from ..traits import CheckpointTraits, DataTraits, ModuleTraits
from . import averaging, launcher
from .exchange import EXCHANGE_POLICIES, ExchangePolicy, NoExchange
from .freed_memory import FreedMemory
from .logical_ranks import LogicalRanks
from .receipt import keep_receipt
from .trainer_check import check_module, check_on_exception
from .weights import WEIGHT_POLICIES, GradientAveraging, WeightPolicy

if TYPE_CHECKING:
    from .exchange.run import ExchangeRun


class RoundCallback(Callback):
    """Tells the policies of the moments that only callbacks see.

    It is first in `trainer.callbacks`, so that loggers, checkpoints and early stopping find the averaged weights.

    Args:
        weights: the policy of the strategy that inserted this callback.
    """

    def __init__(self, weights: WeightPolicy) -> None:
        self._weights = weights

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Where the model has asked for `estimated_stepping_batches`, Lightning has made the loader too early to give it
        # the position of a checkpoint within an epoch; where it has not, nothing is left to load.
        trainer.fit_loop._load_combined_loader_states()
        averaging.begin_next_epoch(trainer)
        self._weights.on_train_start()
        if trainer.strategy.root_device.type == "cpu":  # as late as here: reads of little memory have it returned
            trainer.strategy.freed_memory = FreedMemory(trainer.num_devices)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.strategy.freed_memory is not None:
            trainer.strategy.freed_memory.begin_step()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._weights.before_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.strategy.freed_memory is not None:
            trainer.strategy.freed_memory.end_step()
        # Validation runs before on_train_epoch_end: this is the last moment before it.
        if trainer.is_last_batch:
            metrics = self._weights.end_epoch()
            exchange = trainer.strategy.exchange_run
            if exchange is not None:
                metrics |= exchange.end_epoch(metrics.get("average_ms", 0.0) / 1e3)
                _hold_early_stopping(trainer, exchange.clock.exact_from)
            _share(metrics, trainer, trainer.current_epoch)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._weights.publish()
        if trainer.strategy.freed_memory is not None:
            trainer.strategy.freed_memory.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.strategy.freed_memory is not None:
            trainer.strategy.freed_memory.resume()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._weights.publish()
        exchange = trainer.strategy.exchange_run
        if exchange is not None:
            _share(exchange.end_training(), trainer, exchange.clock.epoch)


def _hold_early_stopping(trainer: pl.Trainer, exact_from: float) -> None:
    """Let early stopping begin to count where the exact epochs at the end begin, which it would otherwise cut off."""
    if trainer.current_epoch < exact_from < math.inf:
        for callback in trainer.early_stopping_callbacks:
            callback.wait_count = -1  # the validation of this epoch adds one where nothing has improved


def _share(metrics: dict[str, float], trainer: pl.Trainer, epoch: int) -> None:
    """Give callbacks and loggers the largest value of any rank, as `log` would, which takes a millisecond for each."""
    # float64: a count of bytes is no float32.
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=trainer.strategy.root_device)
    averaging.all_reduce(values, "max", "comparing the metrics of an epoch")
    shared = dict(zip(metrics, values.cpu(), strict=True))
    trainer.callback_metrics.update(shared)
    trainer.logged_metrics.update(shared)
    scalars = {"epoch": epoch, **{name: value.item() for name, value in shared.items()}}
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=max(0, trainer.global_step - 1))  # the step that Lightning logs epochs at


CHECKPOINT_KEY = "gnnscale"
RANKS_KEY = "gnnscale_ranks"
STAMPS_KEY = "gnnscale_exchange"


class GNNScaleStrategy(DDPStrategy):
    """Train on several processes, each with its own parts of the graph.

    Processes are started and joined as by Lightning's DDP, and start from rank 0's weights; there is no DDP wrapper.
    Before every batch the generators of the CPU and of the device are seeded by `batch.key`, so that dropout does not
    depend on which process computes it.

    Args:
        accelerator: as for DDPStrategy; the Trainer sets it.
        weights: how replicas become one, a policy or its name; GradientAveraging() by default.
        exchange: how layers read rows of other processes, a policy or its name; NoExchange() by default.
        start_method: "popen" runs the script again for each process, in notebooks it is "fork"; "fork" copies this one
            (before CUDA is used); "spawn" and "forkserver" import it (which needs a `__main__` guard).
        process_group_backend: "gloo", "nccl", ...; by the device where None.
        logical_ranks: ranks by which gradient averaging shares out the batches of an epoch, whoever computes them, at
            least as many as processes: steps, and on CPUs all bits of the weights, are the same on any number of them.
            None: as many as the run began with, as its checkpoints say.
        timeout: longest wait for another process, seconds or a timedelta: more than one rank may take longer than
            another between two averages, or over a layer of evaluation.
        checkpoint_io: how checkpoints are written and read; `CheckpointFiles` by default, also within one that wraps.
        parallel_devices, cluster_environment, precision_plugin: as for DDPStrategy.

    Raises:
        ValueError: an unknown policy, the message lists those that exist; a timeout that is not above 0, logical_ranks
            below 1.
        StrategyError: an option of DDP's wrapper was given; weights and exchange do not go together.
    """

    strategy_name = "gnnscale"

    freed_memory: FreedMemory | None = None  # of a run that trains on CPUs

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        weights: WeightPolicy | str | None = None,
        exchange: ExchangePolicy | str | None = None,
        start_method: Literal["popen", "fork", "spawn", "forkserver"] = "popen",
        process_group_backend: str | None = None,
        timeout: float | timedelta | None = 1800.0,
        logical_ranks: int | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **ddp_options: Any,
    ) -> None:
        if ddp_options:
            raise StrategyError(
                f"GNNScaleStrategy takes no {', '.join(sorted(ddp_options))}: it has no DDP wrapper; leave it out"
            )
        if timeout is not None:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            check_seconds("strategy.timeout", seconds)
            timeout = timedelta(seconds=float(seconds))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        weights = GradientAveraging() if weights is None else weights
        exchange = NoExchange() if exchange is None else exchange
        self.weights: WeightPolicy = _policy(weights, WeightPolicy, WEIGHT_POLICIES, "weights")
        self.exchange: ExchangePolicy = _policy(exchange, ExchangePolicy, EXCHANGE_POLICIES, "exchange")
        self.weights.check_exchange(self.exchange)
        self._ranks = LogicalRanks(logical_ranks, self.weights)
        self._exchange_run: ExchangeRun | None = None
        self._loaded_from: Any = None
        self._environment: dict[str, str | None] = {}  # as it was, where this process is the only one

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads checkpoint files: as given, or `CheckpointFiles`."""
        if self._checkpoint_io is None:
            self._checkpoint_io = checkpoint_file.CheckpointFiles()
        elif getattr(self._checkpoint_io, "checkpoint_io", self) is None:  # one that wraps, such as AsyncCheckpointIO
            self._checkpoint_io.checkpoint_io = checkpoint_file.CheckpointFiles()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @property
    def exchange_run(self) -> "ExchangeRun | None":
        """The exchange of the run that goes on; None outside of runs, and where the model trains on parts."""
        return self._exchange_run

    @property
    def logical_ranks(self) -> int | None:
        """Ranks by which an epoch's batches are shared out; None: not known before a run, or a policy without them."""
        return self._ranks.count

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the weight policy accumulates gradients itself."""
        return self.weights.handles_gradient_accumulation

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse settings of a Trainer that the policies cannot go with, before there is a model or data.

        Raises:
            StrategyError: the message names the argument and the remedy.
        """
        check_on_exception(trainer)
        self._ranks.check(trainer.num_devices * trainer.num_nodes)
        self.weights.check_trainer(trainer)
        self.exchange.check_trainer(trainer)

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up model, optimizer and policies.

        Raises:
            StrategyError: the policies cannot go with the model or with a setting of the Trainer.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._ranks.settle(trainer, averaging.world_size(), self.root_device)
            check_module(self.lightning_module)
            check_on_exception(trainer)
            self.weights.check(trainer)
        super().setup(trainer)
        if fitting:
            launcher.keep_in_step(trainer)
        averaging.watch_metrics(self.lightning_module)
        from .exchange.run import start_run  # compiled loops that a plain import does not need

        self._exchange_run = start_run(self.exchange, trainer)
        if fitting:
            self.weights.setup(trainer)
            # None is how a rank without further batches stays in step: nothing to warn of.
            warnings.filterwarnings("ignore", message=".*train_dataloader yielded None.*")
            # sync_dist in training_step would wait for ranks that have no batch left.
            warnings.filterwarnings("ignore", message=".*recommended to use `self.log.*sync_dist.*")
            for callback in trainer.checkpoint_callbacks:
                if CheckpointTraits(callback).save_last == "link":
                    callback._link_checkpoint = checkpoint_file.link_checkpoint  # Lightning's removes, then links
            if not any(isinstance(callback, RoundCallback) for callback in trainer.callbacks):
                trainer.callbacks.insert(0, RoundCallback(self.weights))
            keep_receipt(trainer)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizer and its schedulers.

        Raises:
            StrategyError: the model asks for several optimizers.
        """
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            # Lightning's remedy, optimizing by hand, is none here.
            if "multiple optimizers" not in str(error):
                raise
            raise StrategyError(
                "configure_optimizers returned several optimizers, one is supported: "
                "put their parameters into groups of one optimizer"
            ) from error

    def setup_environment(self) -> None:
        """Check what can be checked before work, then join the processes."""
        if self._is_alone:
            self._environment = launcher.environment()
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            self.exchange.check(trainer)
            self._ranks.check(trainer.num_devices * trainer.num_nodes)
            check_processes = DataTraits(trainer.datamodule).check_processes
            if check_processes is not None:
                check_processes(trainer.num_devices * trainer.num_nodes)
        self._check_one_number_of_processes()
        if self._start_method == "forkserver":
            _own_memory(self.lightning_module)
        if self._start_method != "popen" or (self._starts_processes and self.local_rank > 0):
            # torch asks for SIGINT, which a command that runs in a shell's background ignores, as do its processes.
            # SIGTERM would wait for Lightning's handler, which does not run while a process waits in a collective.
            end_with_parent()
        if self._start_method != "popen":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the process that this one was forked from
            launcher.interrupt_in_silence()
        with averaging.clear_error("joining the other processes"):
            super().setup_environment()
        launcher.meet(launched=self._start_method != "popen")
        if self._start_method != "popen" and self.root_device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            # As Lightning does for processes that it starts by popen: share the cores out.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.num_processes))
        # Lightning does so for NCCL alone; gloo's threads can bring an exiting interpreter down.
        atexit.unregister(_destroy_process_group)
        atexit.register(_destroy_process_group)

    def setup_distributed(self) -> None:
        """Join the processes; on one machine they listen on its loopback alone."""
        here = self._starts_processes and self.cluster_environment.main_address in ("127.0.0.1", "localhost")
        torchrun = "LOCAL_WORLD_SIZE" in os.environ and os.environ["LOCAL_WORLD_SIZE"] == os.environ.get("WORLD_SIZE")
        if self.num_nodes == 1 and (here or torchrun):
            launcher.prefer_loopback()
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        join = launcher.join_by_torchrun if agent_store else launcher.join_on_loopback if here else None
        if join is not None and (agent_store or self.num_nodes == 1) and not dist.is_initialized():
            self.set_world_ranks()
            on_gpu = self.root_device.type != "cpu"
            options = {"device_id": self.root_device} if on_gpu else {}
            join(self, self._timeout, backend=self._get_process_group_backend(), **options)
        super().setup_distributed()

    @property
    def _starts_processes(self) -> bool:
        # creates_processes_externally is true in the processes that Lightning has started, too
        return isinstance(self.cluster_environment, LightningEnvironment)

    @property
    def _is_alone(self) -> bool:
        return self.num_processes * self.num_nodes == 1

    @property
    def start_method(self) -> str:
        """How the processes of this machine start: "popen", "fork", "forkserver" or "spawn"."""
        return self._start_method

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen" and self._starts_processes and self._is_alone:
            self._launcher = None  # nothing to start: Lightning's would write this process's rank for others
            return
        if self._start_method == "popen" and imports._IS_INTERACTIVE and self._starts_processes:
            rank_zero_info("A notebook or a Python shell: processes are forked, as by strategy='gnnscale_fork'")
            self._start_method = "fork"
        if self._start_method == "forkserver":
            keep_sockets()
        if self._start_method != "popen":
            self._launcher = launcher.Launcher(self, start_method=self._start_method)

    def _check_one_number_of_processes(self) -> None:
        """Refuse a second Trainer of another size: it would join the first one's group, and train some parts alone."""
        processes = self.num_processes * self.num_nodes
        standing = dist.get_world_size() if dist.is_initialized() else processes
        if standing != processes or self.cluster_environment.local_rank() >= self.num_processes:
            found = f"a group of {standing} exists" if standing != processes else "this is a further one"
            raise StrategyError(
                f"this Trainer has {processes} processes and {found}: a script's Trainers must all have as many "
                "(devices, num_nodes); put the others into scripts of their own"
            )

    def configure_ddp(self) -> None:
        """Send the first process' parameters and buffers to all; the model is not wrapped in DDP."""
        averaging.broadcast_state(averaging.module_state(self.lightning_module))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Begin a step under the policies, seed it by the batch's key, and move the batch; None: no batch is left."""
        # The one hook that sees every training batch, None included, before anything is done with it.
        if self.lightning_module is not None and self.lightning_module.trainer.training:
            self.weights.begin_batch(batch)
            on_step_begin = ModuleTraits(self.lightning_module).on_step_begin
            if on_step_begin is not None:
                on_step_begin(() if batch is None else batches_of(batch))
            if self._exchange_run is not None:
                self._exchange_run.begin_step(self.lightning_module.trainer.current_epoch)
            self._seed(batches_of(batch)[0])
        with clock.doing("transfer"):
            if isinstance(batch, StepBatches):
                move = super().batch_to_device
                return StepBatches([move(one, device, dataloader_idx) for one in batch.batches])
            return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, of each batch where this process has those of several logical ranks."""
        step = super().training_step

        def compute(one: Any) -> Any:
            self._seed(one)  # here, whatever hooks have sampled since, so that the same is sampled on any process
            return step(one, *args, **kwargs)

        if not isinstance(batch, StepBatches):
            return compute(batch)
        return self.weights.compute_several(batch, compute, partial(self.backward, optimizer=self.optimizers[0]))

    def _seed(self, batch: Any) -> None:
        key = batch_of(batch).key
        if key is None:
            return
        key = int(key)
        # torch.manual_seed() also formats this thread's stack for every kind of device that is not there: 2 ms a step.
        torch.default_generator.manual_seed(key)
        if self.root_device.type != "cpu":
            torch.get_device_module(self.root_device).manual_seed(key)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: torch.nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """Take a step as the weight policy does; see `take_step`."""
        return self.weights.optimizer_step(optimizer, closure, partial(self.take_step, model=model, **kwargs))

    def take_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Compute gradients, clip them and change the weights, whatever the policy makes of the batch."""
        return super().optimizer_step(optimizer, closure, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state, after the weight policy has put the weights there that are to be seen."""
        self.weights.publish()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint on the first rank, with state and learned rows of all ranks; every rank calls it."""
        with clock.doing("save"):
            self._save_checkpoint(checkpoint, filepath, storage_options)

    def _save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        if self._exchange_run is not None and "optimizer_states" in checkpoint:
            # Stamps alone: rows are exchanged exactly in the first epoch after a resume.
            stamps = _gather_to_rank_zero(self._exchange_run.versions())
            checkpoint[STAMPS_KEY] = {"policy": repr(self.exchange), "versions": stamps}
        if self.weights.keeps_state and "optimizer_states" in checkpoint:
            merged = self.weights.merge(_gather_to_rank_zero(self.weights.state_dict()))
            if merged:
                checkpoint[CHECKPOINT_KEY] = merged
        if "optimizer_states" in checkpoint:
            checkpoint[RANKS_KEY] = self._ranks.state_dict()
        kept = self._save_inputs(checkpoint, filepath)
        with failing_together():
            super().save_checkpoint(checkpoint_file.plain(checkpoint), filepath, storage_options)
        if kept is not None:
            checkpoint_file.remove_other_rows(filepath, kept)

    def _save_inputs(self, checkpoint: dict[str, Any], filepath: Any) -> list[dict[str, Any]] | None:
        """Let each rank write the rows that it owns; the checkpoint holds their names."""
        save_inputs = ModuleTraits(self.lightning_module).save_inputs
        if save_inputs is None:
            return None
        folder = checkpoint_file.rows_folder(filepath)
        with failing_together(CheckpointError):
            own = save_inputs(folder, "optimizer_states" in checkpoint)
        if own is None:
            return None
        ranks = gather_from_ranks(own)
        checkpoint[checkpoint_file.ROWS_KEY] = {"folder": str(folder), "ranks": ranks}
        return ranks

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and plain values, whatever `weights_only` is by default; every rank calls it.

        A file that only some machines have is sent to the others.

        Raises:
            CheckpointError: the file is no checkpoint, damaged, or holds more than plain values.
            ValueError: weights_only is False.
        """
        checkpoint_file.check_weights_only(weights_only)
        with checkpoint_file.on_this_machine(checkpoint_path) as path:
            loaded = checkpoint_file.check_is_lightnings(super().load_checkpoint(path, True), checkpoint_path)
        self._loaded_from = checkpoint_path
        self._ranks.kept = loaded.get(RANKS_KEY) or {}
        return checkpoint_file.with_rows_located(loaded, checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint; another model's are refused in one line."""
        with checkpoint_file.of_this_model(self._loaded_from, type(self.lightning_module)):
            named = made_again.named_as(self.lightning_module, checkpoint["state_dict"])
            super().load_model_state_dict({**checkpoint, "state_dict": named}, strict)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and the learned rows beside it."""
        super().remove_checkpoint(filepath)
        checkpoint_file.remove_rows(filepath)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of optimizers and weight policy, and warn of another exchange policy."""
        super().load_optimizer_state_dict(checkpoint)
        trained_under = checkpoint.get(STAMPS_KEY, {}).get("policy", repr(self.exchange))
        if trained_under != repr(self.exchange):
            rank_zero_warn(
                f"the checkpoint was trained under {trained_under}; training goes on under {self.exchange!r}"
            )
        kept = checkpoint.get(CHECKPOINT_KEY)
        self._ranks.check_kept(self.lightning_module.trainer, checkpoint.get(RANKS_KEY) or {}, kept)
        self.weights.load_state_dict(made_again.named_as(self.lightning_module, kept))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks.

        Raises:
            StrategyError: one of them is lost or silent for `timeout`.
        """
        launcher.end_on_sigterm()  # the first barrier behind Lightning's handler is that of the stage
        with averaging.clear_error("waiting for the other processes"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src` on all ranks; raises as `barrier` does."""
        with averaging.clear_error(f"receiving from rank {src}"):
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Return a metric's tensor reduced over all ranks; raises as `barrier` does."""
        with averaging.clear_error("reducing a metric"):
            return super().reduce(tensor, group, reduce_op)

    def teardown(self) -> None:
        """Let go of processes, streams and what the policies hold."""
        try:
            super().teardown()
            self.weights.teardown()
            if self._exchange_run is not None:
                self._exchange_run.detach()
                self._exchange_run = None
        finally:
            if self.freed_memory is not None:
                self.freed_memory.close()
                self.freed_memory = None
            launcher.restore_environment(self._environment)
            self._environment = {}


def _policy(given: Any, base: type, known: dict[str, type], argument: str) -> Any:
    if isinstance(given, base):
        return given
    if isinstance(given, str) and given in known:
        try:
            return known[given]()
        except TypeError:
            name = known[given].__name__
            raise ValueError(f"strategy.{argument}={given!r} needs arguments: pass {name}(...) itself") from None
    names = ", ".join(sorted(known))
    raise ValueError(f"strategy.{argument} must be one of {names}, got {short(given)}")


def _gather_to_rank_zero(value: Any) -> list[Any]:
    if averaging.world_size() == 1:
        return [value]
    gathered = [None] * averaging.world_size() if averaging.rank() == 0 else None
    with averaging.clear_error("gathering a checkpoint"):
        dist.gather_object(value, gathered, dst=0)
    return gathered or []


def _own_memory(module: torch.nn.Module) -> None:
    """Give this process weights of its own: those sent to it are shared, which Lightning undoes for "spawn" alone."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_shared():
            tensor.data = tensor.data.clone()


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
