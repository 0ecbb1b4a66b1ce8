"""The processes of a run: starting them, reporting a lost one, and ending those that are stopped."""

import ctypes
import os
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from .. import errors
from ..errors import RankProcess, StrategyError, clear_error
from . import averaging

LOOPBACK = {"linux": "lo", "darwin": "lo0"}
# What Lightning, and `prefer_loopback`, write to the environment of a run.
RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
_PATIENCE_S = 3.0  # for processes to end by themselves, once one has failed
_START_LIMIT = timedelta(seconds=60)
_OMP_PAUSE_HARD = 2  # of omp.h
CAUSES = {
    signal.SIGSEGV: "a file of the store may be damaged: check it by gnnscale verify STORE",
    signal.SIGBUS: "a mapped file was shortened while it was read, or its disk is gone or full: check the store by "
    "gnnscale verify STORE",
    signal.SIGKILL: "memory was short (see the limit of its cgroup, and the system's log), or somebody killed it",
    signal.SIGTERM: "somebody, or a scheduler, asked it to end",
}


class Launcher(_MultiProcessingLauncher):
    """Lightning's launcher of forked and spawned processes, in which no process can stay stopped for ever.

    Where a process has failed, torch asks the others to end; one that is stopped hears nothing, and is killed. So is
    one that stays stopped for the strategy's timeout after another has ended. One that was ended by a signal is
    reported in one line.
    """

    @property
    def procs(self) -> list:
        """The processes, as Lightning sets them."""
        return self._procs

    @procs.setter
    def procs(self, started: list) -> None:
        self._procs, self._stopped = started, set()
        for process in started:
            process.terminate = partial(_terminate, process.pid)
        if started and self._strategy._timeout is not None:
            arguments = (started, self._strategy._timeout.total_seconds(), self._stopped)
            threading.Thread(target=_end_stopped, args=arguments, name="gnnscale-ranks", daemon=True).start()

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_procs": []}  # those of an earlier stage cannot be sent to a spawned process

    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function on every process; see Lightning.

        Raises:
            StrategyError: a process was ended by a signal.
        """
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()  # of an earlier run in this process: the others are to meet at its port
        if self._start_method == "fork":
            _end_openmp_threads()
        before = environment()
        try:
            return super().launch(function, *args, **kwargs)
        except ProcessRaisedException:
            raise
        except ProcessExitedException as error:
            if error.error_pid in self._stopped:
                line = f"rank {error.error_index} (process {error.error_pid}) stayed stopped for strategy.timeout"
                raise StrategyError(f"{line}, and was ended: start again from the last checkpoint") from None
            raise StrategyError(exit_line(error.error_index, error.error_pid, error.exit_code)) from None
        finally:
            restore_environment(before)


def environment() -> dict[str, str | None]:
    """Return what the environment says of ranks and their meeting place; None: nothing."""
    return {name: os.environ.get(name) for name in RANK_VARIABLES}


def restore_environment(before: dict[str, str | None]) -> None:
    """Let the environment say what it said: what is started later would else take itself for a rank of this run."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _end_openmp_threads() -> None:
    """End the threads that GNU OpenMP keeps for this one: a forked process would wait for them, and has none.

    They start again where they are next used. Other OpenMP libraries see to it themselves.
    """
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}:
            with suppress(OSError, AttributeError):  # AttributeError: older than OpenMP 5.0
                ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_HARD)


def _terminate(pid: int) -> None:
    """Ask a process to end, and see to it that it does.

    It is not asked how it ended: two threads that ask would take the answer from each other.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        process.kill() if process.status() == psutil.STATUS_STOPPED else process.terminate()
        later = threading.Timer(_PATIENCE_S, _kill, (process,))
        later.daemon = True
        later.start()


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.kill()


def _end_stopped(processes: list, limit_s: float, ended: set[int]) -> None:
    """Kill processes that stay stopped, so many seconds after another one has ended; their ids are added to a set."""
    sentinels = {process.sentinel: process.pid for process in processes}
    for sentinel in wait(list(sentinels)):
        del sentinels[sentinel]
    deadline = time.monotonic() + limit_s
    while sentinels and time.monotonic() < deadline:
        for sentinel in wait(list(sentinels), max(0.0, deadline - time.monotonic())):
            del sentinels[sentinel]
    for pid in sentinels.values():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_STOPPED:
                ended.add(pid)
                process.kill()


def exit_line(rank: int, pid: int, code: int) -> str:
    """Return one line on a process that has ended, with its likely cause.

    Args:
        rank: number of the process on its machine.
        pid: id of the process.
        code: what it ended with; below 0 it is the number of a signal.
    """
    if code >= 0:
        return f"rank {rank} (process {pid}) ended with exit code {code}: look for its own error above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = CAUSES.get(-code, "look for its own error above")
    return f"rank {rank} (process {pid}) was ended by {name}: {cause}; then start again from the last checkpoint"


def has_trained() -> bool:
    """Whether this process has trained, as one that nobody has started."""
    return bool(errors.peers)


def join_on_loopback(strategy: Any, timeout: Any, **options: Any) -> None:
    """Let the processes of one machine meet where no other can reach them; torch's own store listens to all.

    Args:
        strategy: Strategy whose ranks are set.
        timeout: Time limit of the group, a timedelta; the start may take a minute all the same.
        options: Further arguments of `init_process_group`.
    """
    environment = strategy.cluster_environment
    host, port, first = environment.main_address, environment.main_port, strategy.global_rank == 0
    world_size = strategy.num_processes
    patience = max(timeout, _START_LIMIT) if timeout else _START_LIMIT
    if first:
        listening = socket.create_server(("127.0.0.1", port), backlog=max(128, world_size))
        options["store"] = dist.TCPStore(
            host, port, world_size, True, patience, master_listen_fd=listening.detach(), use_libuv=True
        )
    else:
        options["store"] = dist.TCPStore(host, port, world_size, False, patience)
    dist.init_process_group(rank=strategy.global_rank, world_size=world_size, timeout=timeout, **options)


def join_by_torchrun(strategy: Any, timeout: Any, **options: Any) -> None:
    """Let processes that torchrun has started meet by its store, in a part of it of their own.

    torchrun keeps one store for all starts of a run (torch 2.13 does): processes that it starts again would look for
    those that have gone. Arguments as those of `join_on_loopback`.
    """
    rank, world_size = strategy.global_rank, strategy.world_size
    patience = max(timeout, _START_LIMIT) if timeout else _START_LIMIT
    store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=patience))
    own = unused_part(store, rank, world_size, patience.total_seconds())
    dist.init_process_group(rank=rank, world_size=world_size, timeout=timeout, store=own, **options)


def unused_part(store: Any, rank: int, world_size: int, patience_s: float) -> Any:
    """Return a part of a store in which no earlier processes of a run have written; every process calls it.

    Each says a token of its own, and the first answers to it with one for all: what is read is never an earlier one's.

    Args:
        store: Store of torch that all processes reach.
        rank, world_size: Place of this process.
        patience_s: Seconds that the first one waits for the others.

    Raises:
        RuntimeError: a process did not come.
    """
    meeting, mine = dist.PrefixStore("gnnscale_meeting", store), secrets.token_hex(8)
    if rank > 0:
        meeting.set(f"{rank}", mine)
        found = meeting.get(mine).decode()
        meeting.set(f"{found}/{rank}", "1")
        return dist.PrefixStore(found, store)
    awaited, answered, deadline = set(range(1, world_size)), set(), time.monotonic() + patience_s
    while awaited:
        for other in sorted(awaited):
            if meeting.check([f"{mine}/{other}"]):
                awaited.remove(other)
            elif meeting.check([f"{other}"]) and (token := meeting.get(f"{other}").decode()) not in answered:
                meeting.set(token, mine)  # or of a process that has gone, which nobody reads
                answered.add(token)
        if awaited and time.monotonic() > deadline:
            raise RuntimeError(f"ranks {sorted(awaited)} did not come within {patience_s:g} s")
        time.sleep(0.01 if awaited else 0)
    return dist.PrefixStore(mine, store)


def prefer_loopback() -> None:
    """Have gloo connect the processes of one machine over its loopback, unless the user names an interface."""
    if sys.platform in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])


def end_on_sigterm() -> None:
    """Let SIGTERM end this process, as it does any other, unless the user's script has a handler of its own.

    Lightning's handler enters a collective of its own where the others do not, and one that waits in a collective
    does not run it: the run would hang until the timeout, or go on with values of another collective.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGTERM)
    kept = getattr(handler, "signal_handlers", None)
    if kept is None:
        return
    kept[:] = [one for one in kept if getattr(one, "__name__", "") != "_sigterm_notifier_fn"]
    if not any(callable(one) for one in kept):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def keep_in_step(trainer: pl.Trainer) -> None:
    """Let the flag that Lightning broadcasts before every batch fail like other collectives: it swallows the error."""
    loop = trainer.fit_loop.epoch_loop
    if averaging.world_size() > 1 and hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: averaging.keep_in_step(trainer.strategy.root_device)


def interrupt_in_silence() -> None:
    """Let an interrupt that Python cannot raise, as it arrives while an object is finalized, print no traceback.

    The process that started this one sends it, says in one line what it did, and kills who goes on after it.
    """
    told = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else told(lost)


def meet(launched: bool) -> None:
    """Note which processes this run has on this machine; every rank calls it.

    Args:
        launched: a `Launcher` has started them.
    """
    errors.ends_stopped = not launched
    me = psutil.Process()
    mine = RankProcess(socket.gethostname(), me.pid, me.create_time())
    found: list[Any] = [mine] * averaging.world_size()
    if len(found) > 1:
        with clear_error("meeting the other processes"):
            dist.all_gather_object(found, mine)
    errors.peers[:] = found
