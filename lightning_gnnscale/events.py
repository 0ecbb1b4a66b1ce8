"""Event records: what every stage says of itself. Stages write them, `report/` reads them.

An event is one JSON line in a file that all processes of a run append to. Without a file the events of this
process stay in memory alone, so library use leaves nothing on disk. A wait for another process is told here too, and
what a process does while it trains an epoch (`clock`).
"""

import json
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from .device_time import StreamSpans, on_gpu
from .kernel_sets import version_of
from .memory import memory_limit_bytes
from .memory_peak import MemoryPeak
from .system import usable_cores

PACKAGES = ("lightning-gnnscale", "numpy", "numba", "torch", "lightning", "torch-geometric", "pymetis", "kaminpar")
ENV_FILE = "GNNSCALE_EVENTS"  # started processes find the run's file by it
HIDDEN = "GNNSCALE_HIDDEN"  # and what is kept out of it by this: JSON, names of variables to references
SYSTEM_TEMPORARY = "GNNSCALE_SYSTEM_TEMPORARY"  # and the system's temporary folder by this: a run has one of its own

on_stage: Callable[[str], None] | None = None  # called with the name of each stage of this process as it begins

_recent: deque[dict] = deque(maxlen=10_000)
_UNTOLD_WAIT_S = 1.0
_SOMEONE = "another process"
_OWN_WORDS = ("event", "time", "pid", "stage", "command")  # written by the code: readers look for them
_NAMES = ("event", "stage")  # of them, those that stand in summaries too
_SHORTEST = 4  # of a value that is looked for in text: shorter ones stand in any


def open_log(path: str | os.PathLike | None) -> None:
    """Send the events of this process, and of processes that it starts, to a JSON-lines file (None: memory alone)."""
    if path is None:
        os.environ.pop(ENV_FILE, None)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    os.environ[ENV_FILE] = str(Path(path).resolve())


def hide(variable: str, reference: str) -> None:
    """Keep a variable's value out of the events' file, here and in started processes: a reference replaces it."""
    os.environ[HIDDEN] = json.dumps(json.loads(os.environ.get(HIDDEN, "{}")) | {variable: reference})


def replaced(value: Any, references: Mapping[str, str]) -> Any:
    """Return text, or plain values, with references in place of values, also where a path spells them otherwise.

    Mappings, lists and tuples are gone into; the names of events and stages, which readers look for, stay, and so do
    values of fewer than 4 letters. references: value to the reference that replaces it.
    """
    if isinstance(value, str):
        spelled = {
            one: reference
            for text, reference in references.items()
            for one in (text, os.path.normpath(text), os.path.expanduser(text))
            if len(one) >= _SHORTEST
        }
        for text in sorted(spelled, key=len, reverse=True):
            value = value.replace(text, spelled[text])
        return value
    if isinstance(value, Mapping):
        return {
            replaced(key, references): entry if key in _NAMES else replaced(entry, references)
            for key, entry in value.items()
        }
    return [replaced(entry, references) for entry in value] if isinstance(value, list | tuple) else value


def record(name: str, **fields) -> dict:
    """Append one event, such as "average", of plain JSON values; units stand in the names (`seconds`, `peak_bytes`)."""
    event = {"event": name, "time": time.time(), "pid": os.getpid(), **fields}
    _recent.append(event)
    path = os.environ.get(ENV_FILE)
    if path:
        line = json.dumps(_without_hidden(event), default=str) + "\n"
        # One write of one line on a file opened for appending: lines of several processes do not mix.
        with open(path, "a") as file:
            file.write(line)
    return event


def _without_hidden(event: dict) -> dict:
    names = json.loads(os.environ.get(HIDDEN, "{}"))
    references = {os.environ[name]: reference for name, reference in names.items() if name in os.environ}
    if not references:
        return event
    plain = json.loads(json.dumps(event, default=str))  # paths as text
    return {key: entry if key in _OWN_WORDS else replaced(entry, references) for key, entry in plain.items()}


def begin_run(**fields) -> dict:
    """Mark the beginning of a run in the log, which may hold earlier runs of the same folder; see `last_run`."""
    return record("run", memory_bytes=memory_limit_bytes(), machine=machine(), **fields)


@cache
def machine() -> dict[str, str | int]:
    """Return CPU model, cores, memory, GPU and the versions of what the figures depend on, as plain values."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
    }


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str:
    if "torch" not in sys.modules and not Path("/dev/nvidia0").exists():
        return ""  # the seconds that importing torch takes would be for nothing
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def last_run(log: list[dict]) -> list[dict]:
    """Return the events since the last `begin_run`; all of them where none is marked."""
    starts = [position for position, event in enumerate(log) if event["event"] == "run"]
    return log[starts[-1] :] if starts else list(log)


def recent() -> list[dict]:
    """Return the latest events of this process, oldest first."""
    return list(_recent)


def read_log(path: str | os.PathLike) -> list[dict]:
    """Return the events of a file, oldest first; a line cut short by a kill is left out."""
    events = []
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file, or a pipe or device")
    for line in Path(path).read_text().splitlines():
        try:
            events.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return events


@contextmanager
def stage(name: str, **fields) -> Iterator[dict]:
    """Measure a stage: wall-clock seconds and the peak of this process tree's memory.

    Yields:
        A dict to which the stage may add fields; it becomes the event `stage` with `stage=name`, `seconds`,
        `peak_bytes` (anonymous + shared resident, all processes of the tree) and `failed`.
    """
    if on_stage is not None:
        on_stage(name)
    extra = dict(fields)
    start = time.perf_counter()
    failed = True
    with MemoryPeak() as peak:
        try:
            yield extra
            failed = False
        finally:
            seconds = time.perf_counter() - start
            record("stage", stage=name, seconds=seconds, peak_bytes=peak.update(), failed=failed, **extra)


_MOST_BINS = 384
_FIRST_BIN_S = 1e-3
_WHOLE = ("validation", "average", "save")  # what is done within them counts as them


class Activities:
    """Seconds of activities, in all and by time: in equal bins, which become twice as wide where they are too many."""

    def __init__(self, begin: float):
        self.begin, self.bin_s, self.seconds = begin, _FIRST_BIN_S, Counter()
        self._bins: Counter = Counter()  # (activity, bin): seconds

    def add(self, activity: str, begin: float, end: float) -> None:
        """Add a span; what lies before the beginning is left out."""
        begin, end = max(begin - self.begin, 0.0), end - self.begin
        if end <= begin:
            return
        self.seconds[activity] += end - begin
        while end > _MOST_BINS * self.bin_s:
            self.bin_s *= 2
            narrow, self._bins = self._bins, Counter()
            for (name, number), seconds in narrow.items():
                self._bins[name, number // 2] += seconds
        for number in range(int(begin / self.bin_s), min(int(end / self.bin_s) + 1, _MOST_BINS)):
            lowest, highest = number * self.bin_s, (number + 1) * self.bin_s
            self._bins[activity, number] += max(min(end, highest) - max(begin, lowest), 0.0)

    def by_time(self) -> dict[str, list[float]]:
        """Return activity to the seconds in each bin, to the tenth of a millisecond."""
        last = max((number for _, number in self._bins), default=-1)
        return {
            name: [round(self._bins.get((name, number), 0.0), 4) for number in range(last + 1)] for name in self.seconds
        }


class ActivityClock:
    """What a process does while it trains an epoch; off, and next to free, until `begin`.

    The thread that trains does one thing at a time, so that its seconds add up to those of the epoch: "wait" for a
    batch, "transfer", "forward", "backward", "update", "average" over ranks, "exchange" of rows, "ranks" (waiting for
    the other ranks), "validation", "save" (checkpoints), "other". Other threads and processes "sample" and "read"
    beside it. On a GPU the seconds of training are those of its stream, by events, whatever the host waits for; the
    others are the host's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._spans: StreamSpans | None = None

    def begin(self, device: Any = None) -> None:
        """Begin an epoch in the thread that trains it, on a device, or with None on the CPU."""
        self._now, self._since = "other", time.perf_counter()
        self.training, self.beside = Activities(self._since), Activities(self._since)
        self._spans = StreamSpans(self._since, self.training.add) if on_gpu(device) else None
        self._thread = threading.get_ident()

    def turn_to(self, activity: str) -> None:
        """Let the training thread do something else from now on; nothing happens in another thread."""
        if self._thread != threading.get_ident():
            return
        if self._spans is not None:
            self._spans.end_span(self._now)
        else:
            now = time.perf_counter()
            self.training.add(self._now, self._since, now)
            self._since = now
        self._now = activity

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Count a block as an activity; within validation and averaging it counts as these."""
        if self._thread is None:
            yield
        elif self._thread != threading.get_ident():
            begin = time.perf_counter()
            try:
                yield
            finally:
                self.add_beside([(activity, begin, time.perf_counter())])
        elif self._now in _WHOLE:
            yield
        else:
            before = self._now
            self.turn_to(activity)
            try:
                yield
            finally:
                self.turn_to(before)

    def add_beside(self, spans: Iterable[tuple[str, float, float]]) -> None:
        """Count (activity, begin, end) that passed beside the training thread, here or in a process of this machine."""
        with self._lock:
            for span in spans if self._thread is not None else ():
                self.beside.add(*span)

    def end(self) -> bool:
        """End the epoch; returns whether one was under way. `training` and `beside` then tell of it."""
        if self._thread is None:
            return False
        self.turn_to("other")
        self._thread = None
        if self._spans is not None:
            self._spans.finish()
            self._spans = None
        return True


clock = ActivityClock()


@contextmanager
def held_lock(path: str | os.PathLike, doing: str, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the lock of a file, which stays behind; it ends with the process, however it ends.

    Where another process holds it for longer than a second, an event `wait` and one line on stderr say who it is, and
    say it again when the holder changes.

    Args:
        doing: what a holder does, for the line: "is preparing the store /data/store".
        timeout_s: seconds to wait; None: without end.

    Raises:
        filelock.Timeout: another process still holds it after timeout_s.
    """
    lock = FileLock(str(path))
    _acquire(lock, doing, float("inf") if timeout_s is None else timeout_s)
    try:
        _write_holder(path, f"{os.getpid()} {int(psutil.Process().create_time())} {socket.gethostname()}")
        yield
    finally:
        _write_holder(path, "")
        lock.release()


def lock_holder(path: str | os.PathLike) -> str:
    """Return who holds a lock of `held_lock`: "process 17 on host a", or "another process" where that is not sure.

    The holder's note lies in the lock file. One that a killed process left counts only while that process lives.
    """
    try:
        pid, started, host = Path(path).read_text().split()
        if host == socket.gethostname() and int(psutil.Process(int(pid)).create_time()) != int(started):
            return _SOMEONE
    except (OSError, ValueError, psutil.Error):
        return _SOMEONE
    return f"process {pid} on {host}"


def _acquire(lock: FileLock, doing: str, wait_s: float) -> None:
    begin, told = time.monotonic(), None
    while True:
        left_s = wait_s - (time.monotonic() - begin)
        try:
            lock.acquire(timeout=max(0.0, min(_UNTOLD_WAIT_S, left_s)))
            return
        except Timeout:
            if left_s <= _UNTOLD_WAIT_S:
                raise
        holder = lock_holder(lock.lock_file)
        if told is None or holder not in (told, _SOMEONE):
            record("wait", holder=holder, doing=doing, lock=str(lock.lock_file))
            print(f"gnnscale: {holder} {doing}: waiting until it is done", file=sys.stderr, flush=True)
            told = holder


def _write_holder(path: str | os.PathLike, note: str) -> None:
    with suppress(OSError), open(path, "r+") as file:
        file.write(note)
        file.truncate()
