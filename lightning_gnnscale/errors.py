"""The errors of this package. Bad arguments raise `ValueError`; everything else is a `GNNScaleError`."""

import difflib
import math
import os
import re
import signal
import socket
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Integral, Real
from typing import Any, NamedTuple

# What numpy raises where a file is no .npy or .npz, or a damaged one.
UNREADABLE = (OSError, ValueError, EOFError, SyntaxError, TypeError, OverflowError, MemoryError, KeyError, RuntimeError)
UNREADABLE += (zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError)


_LONGEST_TEXT = 2000


class GNNScaleError(Exception):
    """Base of every error that this package raises on its own account."""

    def __str__(self) -> str:
        return message_line(re.sub(r"\s*[\r\n]\s*", " ", super().__str__()))


def message_line(text: str, kept: str = "") -> str:
    """Return a message without control characters, which become \\x1b, and without the middle of a long one."""
    shown = "".join(one if one.isprintable() or one in kept else ascii(one)[1:-1] for one in text)
    if len(shown) <= _LONGEST_TEXT:
        return shown
    head, tail = shown[: _LONGEST_TEXT * 3 // 4], shown[-_LONGEST_TEXT // 4 :]  # the remedy is at the end
    return f"{head}... ({len(shown):,} letters) ...{tail}"


class EdgeStreamError(GNNScaleError):
    """An edge source cannot be read as edges; the message names the path and the position."""


class PartitionStoreError(GNNScaleError):
    """A partition store is missing, incomplete, damaged or in use; the message says how to go on."""


class ObjectStoreError(GNNScaleError):
    """An object store is not reachable, refuses, is full, or does not have what is asked of it."""


class PlacementError(GNNScaleError):
    """A feature placement does not fit the store or the devices."""


class PlanError(GNNScaleError):
    """The graph, its parts or their training do not fit memory; the message says what is short and what would fit."""


class StrategyError(GNNScaleError):
    """The Trainer, the strategy and the DataModule do not fit together; the message names the remedy."""


class CheckpointError(GNNScaleError):
    """A checkpoint is missing, damaged, of another model or not to be trusted, or cannot be written."""


class RankProcess(NamedTuple):
    """A process of the run: the name of its machine, and its pid and start, which distinguish it there."""

    host: str
    pid: int
    created: float


_GLOO_BESIDE = re.compile(r"^\[\S+:\d+\] |\. This is typically caused.*")  # a source line, and advice to developers
peers: list[RankProcess] = []  # by rank, once the processes have met
ends_stopped = True  # a launcher of ours does so itself, and reports whose end was the first


@contextmanager
def clear_error(what: str) -> Iterator[None]:
    """Turn the failure of a collective into one line, which says what was being done.

    Raises:
        StrategyError: another process died, or did not answer within the process group's timeout. Processes of this
            machine that stand stopped are named, and ended where no launcher does so: the run is over.
    """
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        cause = _GLOO_BESIDE.sub("", cause)
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("LOCAL_RANK", "0")
        raise StrategyError(
            f"rank {rank}: {what}: another process of this run was lost or does not answer ({cause}); "
            f"{_end_stopped()}look for its own error above, then start again from the last checkpoint "
            "(strategy.timeout is how long a process may be silent)"
        ) from error


def wait_for_others() -> None:
    """Wait for the other processes of the run, where there are any; StrategyError: one was lost."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with clear_error("waiting for the other processes"):
            dist.barrier()


def _end_stopped() -> str:
    """End processes of this run and machine that somebody has stopped, and return words that name them."""
    import psutil

    named = []
    for number, peer in enumerate(peers):
        with suppress(psutil.Error, OSError):
            process = psutil.Process(peer.pid)
            here = peer.host == socket.gethostname() and process.create_time() == peer.created
            if here and process.status() == psutil.STATUS_STOPPED:
                if ends_stopped:
                    os.kill(peer.pid, signal.SIGKILL)
                named.append(f"rank {number} (process {peer.pid}) was stopped by a signal, and is ended; ")
    return "".join(named)


_MOST_SHOWN = 80
_LONGEST_S = 1e9  # the system's timers take no more


def short(value: Any) -> str:
    """Return a value as a message shows it: on one line, cut where it is long."""
    if isinstance(value, int) and abs(value) >= 1 << 63:  # Python may refuse to write its digits
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes) and len(value) > _MOST_SHOWN:
        return f"{value[:_MOST_SHOWN]!r}... ({len(value):,} letters)"
    if isinstance(value, list | tuple | dict | set) and len(value) > _MOST_SHOWN:
        return f"a {type(value).__name__} of {len(value):,} entries"
    try:
        told = " ".join(repr(value).split())
    except Exception:  # of a user's class
        told = f"a {type(value).__name__}"
    return told if len(told) <= 2 * _MOST_SHOWN else f"{told[: 2 * _MOST_SHOWN]}... ({len(told):,} letters)"


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, of Python or numpy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Whether a value is an integer of Python that int64 holds, of at least 0; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def check_integer(name: str, value: Any, low: int = 0, high: int | None = None) -> None:
    """Raise ValueError unless an argument is an integer, also one of numpy, of at least `low` and at most `high`."""
    if not is_integer(value) or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be an integer {allowed}, got {short(value)}")


def check_number(name: str, value: Any, at_least: float) -> None:
    """Raise ValueError unless an argument is a finite number, also one of numpy, of at least `at_least`."""
    is_number = isinstance(value, Real) and type(value).__name__ not in ("bool", "bool_")
    if not is_number or not math.isfinite(value) or value < at_least:
        raise ValueError(f"{name} must be a finite number >= {at_least}, got {short(value)}")


def check_mapping(name: str, value: Any, example: str) -> None:
    """Raise ValueError unless an argument holds values by name."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping such as {example}, got {short(value)}")


def check_flags(**flags: Any) -> None:
    """Raise ValueError unless each argument is True or False (or 0 or 1): a word is not taken for True."""
    for name, value in flags.items():
        whole = isinstance(value, Integral) and value in (0, 1)
        if not whole and type(value).__name__ not in ("bool", "bool_"):
            raise ValueError(f"{name} must be True or False, got {short(value)}")


def check_callable(name: str, value: Any) -> None:
    """Raise ValueError unless an argument is a function or None."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {short(value)}")


def check_seconds(name: str, value: Any) -> None:
    """Raise ValueError unless an argument is a finite number of seconds above 0, at most those of 30 years."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value <= _LONGEST_S:
        longest = f", and at most {_LONGEST_S:.0e}" if isinstance(value, Real) and not value <= 0 else ""
        raise ValueError(f"{name} must be a number of seconds > 0{longest}, got {short(value)}")


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless an argument is an integer of at least 1."""
    check_integer(name, value, 1)


def one_line_of(error: BaseException) -> str:
    """Return an error's message on one line, cut where it is long."""
    return message_line(" ".join(str(error).split())) or type(error).__name__


def plain_text(text: str) -> str:
    """Return text of a file as a terminal may show it: control characters as \\x1b, lines kept, a long one cut."""
    return message_line(text, kept="\n")


def why_no_array(error: BaseException) -> str:
    """Return on one line why `numpy.load` read no array, in place of its advice to unpickle."""
    told = one_line_of(error)
    if "Object arrays" in told or "Python objects in dtype" in told:
        return "it holds Python objects: save numpy.array(ids, dtype=str), or give a Parquet or CSV column, x.csv:id"
    if "pickled (object) data" in told:
        return "it does not begin as .npy files do: give one, or a Parquet or CSV column, x.csv:id"
    return told


@contextmanager
def disk_errors(
    path: str | os.PathLike | Callable[[], str],
    doing: str,
    remedy: str = "",
    kind: type[GNNScaleError] = GNNScaleError,
) -> Iterator[None]:
    """Turn the system's errors of a block, which may name no file, into one line of a `GNNScaleError`, of a kind.

    Args:
        path: the file or folder that the block is about, for errors that name no file; or what returns it then.
        doing, remedy: what cannot be done to it, "written", and what to do: "free space, or give another scratch=".
    """
    try:
        yield
    except OSError as error:
        detail = error.strerror or one_line_of(error)
        where = error.filename or (path() if callable(path) else path)
        raise kind(f"{where}: cannot be {doing}: {detail}{'; ' + remedy if remedy else ''}") from error


# What was called otherwise in 0.2, and what says it now.
_RENAMED = {"row_reads": "rows", "placement": "rows", "construction": "rows=owners"}


def now_called(given: str) -> str:
    """Return " (it is NAME now)" for a setting that another one replaced, else ""."""
    return f" (it is {_RENAMED[given]} now)" if given in _RENAMED else ""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" where a known name is close to the one given, or stands for it now, else ""."""
    names = {name.lower(): name for name in map(str, known)}
    if _RENAMED.get(given) in names:
        return now_called(given)
    close = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.6)
    return f" (did you mean {names[close[0]]}?)" if close else ""
