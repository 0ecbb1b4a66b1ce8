"""Which code starts and ends the processes, and which of them prints."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from omegaconf import DictConfig

from ..errors import short
from ..strategy import launcher
from .errors import UsageError

SIGTERM_CODE = 128 + signal.SIGTERM  # of a process that it ended, as in shells
START_METHODS = ("fork", "spawn", "forkserver")
BF16_CAPABILITY = (8, 0)  # Ampere: older GPUs emulate it, slowly
_PRODUCTS = {"high": "TF32", "medium": "bfloat16"}


def started_from_outside() -> bool:
    """Whether torchrun or Slurm has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ or SLURMEnvironment.detect()


def is_first_rank() -> bool:
    """Whether this process writes and prints what appears once a run."""
    return not started_from_outside() or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def num_gpus(accelerator: str = "auto") -> int:
    """Return how many GPUs a Trainer with an accelerator can take on this machine; 0: it trains on the CPU."""
    if accelerator == "cpu":
        return 0
    return torch.cuda.device_count() or int(torch.backends.mps.is_available())


def default_precision(accelerator: str = "auto", devices: int | str = "auto") -> str:
    """Return the precision of a Trainer: "bf16-mixed" on GPUs that compute in bfloat16, else "32-true"."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpu = accelerator in ("auto", "gpu", "cuda") and count > 0
    if accelerator == "auto" and isinstance(devices, int) and devices > count:
        on_gpu = False  # more processes than GPUs run on the CPU
    has_it = on_gpu and all(torch.cuda.get_device_capability(number) >= BF16_CAPABILITY for number in range(count))
    return "bf16-mixed" if has_it else "32-true"


def told_precision(precision: str, matmul_precision: str) -> str:
    """Return what GPUs compute in, and how to turn it off."""
    products = "" if matmul_precision == "highest" else f"; products of float32 in {_PRODUCTS[matmul_precision]}"
    off = [] if precision == "32-true" else ["trainer.precision=32-true"]
    off += [] if matmul_precision == "highest" else ["matmul_precision=highest"]
    return f"precision {precision}{products}" + (f" ({' '.join(off)}: all of float32)" if off else "")


def products_of(config: DictConfig) -> str:
    """Return the precision of float32 products on GPUs; runs saved before there was a choice have all of float32."""
    value = config.get("matmul_precision", "highest")
    if value not in ("highest", *_PRODUCTS):
        raise UsageError(f"matmul_precision must be one of highest, high, medium, got {short(value)}")
    return value


def set_matmul_precision(value: str, trainer, pl_module=None, stage: str | None = None) -> None:
    """Set the precision of float32 products in this process, if it trains on a GPU: those of CPUs stay as they are."""
    if trainer.strategy.root_device.type == "cuda":
        torch.set_float32_matmul_precision(value)


def accelerator(trainer_config: DictConfig) -> str:
    """Return the Trainer's accelerator; for "auto" with fewer GPUs than processes the CPU, with a message."""
    gpus = torch.cuda.device_count()
    wanted, processes = trainer_config.accelerator, trainer_config.devices
    if (wanted == "cuda" or (wanted == "gpu" and not torch.backends.mps.is_available())) and gpus == 0:
        raise UsageError(
            f"trainer.accelerator={wanted}: no GPU was found; say trainer.accelerator=auto or cpu (gnnscale doctor "
            "shows what there is)"
        )
    if wanted != "auto" or not isinstance(processes, int) or not 0 < gpus < processes:
        return wanted
    if is_first_rank():
        message = f"{processes} processes and {gpus} GPU{'s' * (gpus > 1)}: they run on the CPU"
        print(f"gnnscale: {message}; trainer.devices={gpus} takes what there is", file=sys.stderr)
    return "cpu"


def trains_on(trainer, matmul_precision: str = "highest") -> str:
    """Return what a Trainer takes of this machine, why where that is no GPU, and in which precision it computes."""
    count, nodes = trainer.num_devices, trainer.num_nodes
    where = f" on each of {nodes} machines" if nodes > 1 else ""
    if trainer.strategy.root_device.type != "cpu":
        names = (
            {torch.cuda.get_device_name(device) for device in trainer.device_ids} if torch.cuda.is_available() else ()
        )
        told = f" ({', '.join(sorted(names))})" if names else ""
        precision = told_precision(str(trainer.precision), matmul_precision)
        return f"trains on {count} GPU{'s' * (count > 1)}{told}{where}, {precision}"
    why = "torch sees no GPU" if num_gpus() == 0 else "its GPUs are not used: see trainer.accelerator"
    precision = "" if trainer.precision == "32-true" else f", precision {trainer.precision}"
    return f"trains on the CPU in {count} process{'es' * (count > 1)}{where}: {why}{precision}"


def start_method(trainer_config: DictConfig, given: str | None) -> str:
    """Return how the strategy starts processes: fork takes half the time of the others, but not with CUDA.

    Raises:
        UsageError: `given` does not work from the command line, or other machines are to be started from here.
    """
    if started_from_outside():
        return "popen"
    nodes = trainer_config.get("num_nodes") or 1
    if nodes > 1 and "NODE_RANK" not in os.environ:  # set by users who start each machine by hand
        raise UsageError(
            f"trainer.num_nodes={nodes}: this command starts the processes of one machine; start it on each by "
            "torchrun or srun, with --nnodes or --nodes"
        )
    if given is not None:
        if given not in START_METHODS:
            raise UsageError(
                f"strategy.start_method must be one of {', '.join(START_METHODS)} here, got {short(given)}"
            )
        return given
    return own_start_method(trainer_config.devices, trainer_config.accelerator)


def own_start_method(num_devices: int | str, accelerator: str = "auto") -> str:
    """Return how a command starts the training processes of this machine by default."""
    if num_devices == 1:
        return "popen"  # this process trains; another would need an interpreter of its own
    if launcher.has_trained():
        return "spawn"  # a forked process would wait for threads that it does not have
    on_cpu = accelerator == "cpu" or not torch.cuda.is_available()
    return "fork" if on_cpu else "spawn"


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block by SystemExit where this process is not a rank; ranks end at once by themselves."""
    ours = not started_from_outside() and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(SIGTERM_CODE)) if ours else None
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, before)


def end_processes() -> None:
    """End the processes of this run: they would go on training if a signal reached this one only."""
    children = multiprocessing.active_children()
    for signal_number, patience_s in ((None, 1), (signal.SIGINT, 2), (signal.SIGKILL, 2)):
        deadline = time.monotonic() + patience_s
        for child in children:
            if signal_number is not None and child.is_alive():
                os.kill(child.pid, signal_number)
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
