"""Ray as this package uses it: connecting within a time limit, ranks that meet on one machine, actors by name."""

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import GNNScaleError, short
from ..events import SYSTEM_TEMPORARY

NAMESPACE = "gnnscale"
WORKER_GROUP = "beside"  # of a worker's methods that do not wait for a batch
PREPARED = "prepared-worker-"
_AUTH = "RAY_AUTH_MODE"
_STOP_LIMIT_S = 10.0
# What any HTTP/2 server answers with settings of its own: the preface and an empty SETTINGS frame.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

_lock = threading.RLock()  # a finalizer that leaves may run while this thread joins
_users = 0  # of the connection that this process made
_joined = False


def import_ray():
    """Return the module.

    Raises:
        GNNScaleError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise GNNScaleError(
            'source=ray needs Ray, which is not installed: pip install "lightning_gnnscale[ray]"'
        ) from None
    return ray


def ask_for_token() -> None:
    """Have a Ray started here ask for its user's token, and this process give it; a user's own setting is kept.

    Ray does so itself in the process that starts it; those that join it need the setting.
    """
    if os.environ.get(_AUTH) is not None:
        return
    imported = "ray" in sys.modules
    os.environ[_AUTH] = "token"
    if imported:  # it has read its variables
        with suppress(ImportError, AttributeError):  # older ones have no tokens
            from ray._raylet import Config

            Config.initialize("")


def _has_token() -> bool:
    """Whether this user has a token of Ray's: clusters that were started here ask for it, others ignore it."""
    return (Path.home() / ".ray" / "auth_token").is_file()


def one_line(error: BaseException) -> str:
    """Return the first line of an error, Ray's own tracebacks left out."""
    cause = getattr(error, "cause", None)
    lines = str(cause or error).strip().splitlines()
    return f"{type(cause or error).__name__}: {lines[0] if lines else ''}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error: where an actor did not start, its cause."""
    return str(error).strip().splitlines()[-1].strip() or type(error).__name__


def join_ray(address: str | None, timeout_s: float, store_bytes: int) -> str:
    """Connect this process to Ray unless it is connected; each call needs one call of `leave_ray`.

    Args:
        address: "host:port" of a cluster that has a node on this machine, or "auto" for the cluster that runs here.
            None: Ray is started on this machine, for as long as this process lives.
        timeout_s: How long the address may take to answer, seconds.
        store_bytes: Shared memory for batches of a Ray that is started here, bytes.

    Returns:
        The address.

    Raises:
        GNNScaleError: the address does not answer, or is not an address of Ray.
    """
    global _users, _joined
    ray = import_ray()
    with _lock:
        if not ray.is_initialized():
            if address is not None and address != "auto":
                check_answers(address, timeout_s)
            if address is None or _has_token():
                ask_for_token()
            _connect(ray, address, store_bytes)
            _joined, _users = True, 0
        _users += 1
        return ray.get_runtime_context().gcs_address


def leave_ray() -> None:
    """Undo a `join_ray`; the last one disconnects, and ends a Ray that was started here."""
    global _users, _joined
    with _lock:
        _users -= 1
        if _users <= 0 and _joined:
            _joined = False
            import_ray().shutdown()


def check_answers(address: str, timeout_s: float) -> None:
    """Raise GNNScaleError unless something like Ray's head answers at "host:port" within a time limit.

    Ray itself would try for minutes, and then end the process.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise GNNScaleError(f'address must be "host:port", "auto" or null, got {short(address)}')
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, int(port)), max(left, 0.1)) as connection:
                if os.environ.get("RAY_USE_TLS", "0") == "1":
                    return
                connection.settimeout(max(deadline - time.monotonic(), 0.1))
                connection.sendall(_PREFACE)
                if len(connection.recv(9)) >= 4:
                    return
                reason = "it closed the connection"
        except OSError as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() + 0.5 > deadline:
            raise GNNScaleError(
                f"no Ray cluster answers at {address} within {timeout_s:g} s ({reason}): start one with `ray start "
                "--head`, or leave the address out to start Ray on this machine"
            )
        time.sleep(0.5)


def _connect(ray, address: str | None, store_bytes: int) -> None:
    quiet = {"namespace": NAMESPACE, "logging_level": "error", "log_to_driver": False, "configure_logging": False}
    try:
        if address is not None:
            # "auto" is looked up in the system's temporary folder, whatever this run uses
            with _environment(RAY_TMPDIR=os.environ.get("RAY_TMPDIR", os.environ.get(SYSTEM_TEMPORARY))):
                ray.init(address=address, **quiet)
            return
        with _environment(RAY_USAGE_STATS_ENABLED="0"):
            ray.init(address="local", include_dashboard=False, object_store_memory=store_bytes, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise GNNScaleError(f"Ray {where} cannot be used ({one_line(error)}): is `ray start` done here?") from None


@contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    """Set variables for processes that are started meanwhile; None leaves one as it is."""
    values = {name: value for name, value in values.items() if value is not None}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass
class Meeting:
    """What the ranks of a run agree on before they use Ray; the sources of one rank share it.

    Attributes:
        run: names the run.
        folder: where the ranks of one machine meet, or None: each connects by itself.
        turn: how often they have met; every source that is opened is a turn, on all ranks alike.
        machine_bytes: Cap on the bytes of parts that a machine of workers holds, the least of all; None: there is none.
    """

    run: str
    folder: str | None = None
    turn: int = 0
    machine_bytes: int | None = None


class LocalMeeting:
    """How the ranks of one machine find the Ray that one of them starts, and end it when all have left.

    Args:
        folder: Folder that all ranks can reach; rank 0 makes it, and removes it when it leaves.
        rank: Rank of this process.
        turn: How often the ranks have met, this time included.
    """

    def __init__(self, folder: str, rank: int, turn: int):
        self._folder, self._rank, self._turn = Path(folder), rank, turn

    def join(self, timeout_s: float, store_bytes: int) -> None:
        """Connect to the Ray of rank 0, which starts it."""
        address, mine = self._folder / f"address-{self._turn}", self._mine(self._rank)
        if self._rank == 0:
            found = join_ray(None, timeout_s, store_bytes)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            unfinished = address.with_suffix(".part")
            unfinished.write_text(found)
            os.replace(unfinished, address)
        else:
            deadline = time.monotonic() + timeout_s
            while not address.exists():
                if time.monotonic() > deadline:
                    raise GNNScaleError(f"rank 0 started no Ray within {timeout_s:g} s: raise source.timeout_s")
                time.sleep(0.05)
            join_ray(address.read_text(), timeout_s, store_bytes)
        mine.write_text(str(os.getpid()))

    def leave(self) -> None:
        """Disconnect; rank 0 waits for the others first, and ends Ray."""
        self._mine(self._rank).unlink(missing_ok=True)
        deadline = time.monotonic() + _STOP_LIMIT_S
        while self._rank == 0 and time.monotonic() < deadline and any(map(_runs, self._others())):
            time.sleep(0.05)
        leave_ray()
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _mine(self, rank: int) -> Path:
        return self._folder / f"rank{rank}-{self._turn}"

    def _others(self) -> list[Path]:
        return list(self._folder.glob(f"rank*-{self._turn}"))


def _runs(note: Path) -> bool:
    """Whether the process that a note names runs."""
    try:
        os.kill(int(note.read_text() or 0), 0)
    except (OSError, ValueError):
        return False
    return True


def worker_handle(name: str) -> Any:
    """Return a worker's actor.

    Raises:
        ValueError: there is none.
    """
    return import_ray().get_actor(name, namespace=NAMESPACE)


def num_machines(label: str | None) -> int:
    """Return how many machines of this cluster may prepare batches, at least 1.

    Args:
        label: Resource that such a machine has; None: any does.
    """
    alive = [node for node in import_ray().nodes() if node["Alive"]]
    return max(1, sum(label is None or label in node["Resources"] for node in alive))


def workers_named(prefix: str = PREPARED) -> list[str]:
    """Return the names of the workers on this cluster that begin so, sorted: by default those of `gnnscale prepare`."""
    from ray.util import list_named_actors

    named = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    return sorted(name for name in named if name.startswith(prefix))
