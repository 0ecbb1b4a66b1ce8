"""The process that holds the shards of a table and their Ray: trainers may be forked, spawned or killed."""

import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..embedding.optimizers import SparseAdam, SparseSGD
from ..embedding.row_exchange import Ownership
from ..embedding.row_owner import Pushed, RowOwner
from ..embedding.shared_table import SharedColumn, fill_initial, table_bytes
from ..errors import GNNScaleError
from ..triton_kernels.gather_rows import gather_rows
from .cluster import NAMESPACE, import_ray, join_ray, leave_ray, one_line


class Initial(NamedTuple):
    """The initial values of rows.

    Attributes:
        key: uint64 key derived from the seed.
        scale: Scale of the values.
        node_keys: (num_rows,) integers that determine the values; None: the ids.
    """

    key: int
    scale: float
    node_keys: np.ndarray | None = None

    def of(self, ids: slice) -> "Initial":
        """Return the integers that determine the rows of some ids."""
        keys = np.arange(ids.start, ids.stop) if self.node_keys is None else np.asarray(self.node_keys[ids])
        return self._replace(node_keys=keys)


class RowShard:
    """The rows that one worker owns, with the optimizer's state; an actor, or a plain object in tests.

    Calls run one after another; those of one trainer run in the order in which it makes them. A step is taken when
    every trainer has pushed.

    Args:
        num_rows: Number of rows, >= 0.
        columns: Maps a name to its width and dtype.
        optimizer: Optimizer that steps the rows.
        initial: (first row, initial values of the rows from there on) of each range.
    """

    def __init__(
        self,
        num_rows: int,
        columns: dict[str, SharedColumn],
        optimizer: SparseAdam | SparseSGD,
        initial: list[tuple[int, Initial]],
    ):
        self._arrays = {name: np.zeros((num_rows, width), dtype) for name, (width, dtype) in columns.items()}
        self._optimizer = optimizer
        for first, values in initial:
            rows = self._arrays["rows"][first : first + len(values.node_keys)]
            fill_initial(rows, np.array(values.node_keys), np.uint64(values.key), values.scale)
        self.pushes(0)

    def ping(self) -> int:
        """Return the process id."""
        return os.getpid()

    def pull(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return (num, width) of an array; rows: (num,) int64."""
        return gather_rows(self._arrays[name], np.array(rows))

    def read(self, rows: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the steps so far, and (num, dim) rows; rows: (num,) int64."""
        return self._owner.clock, self._owner.read(np.array(rows))

    def changed(self, rows: np.ndarray, since: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the steps so far, and the positions and rows of those that have changed since so many steps."""
        places = self._owner.changed(rows, since)
        return self._owner.clock, places, self._owner.read(rows[places])

    def push(self, rows: np.ndarray, gradients: np.ndarray, rank: int = 0, num_ranks: int = 1, since: int = -1) -> None:
        """Take what a trainer pushes of a step; see `Pushed`."""
        # Copies: what Ray shares is read-only, for which compiled kernels would be compiled once more.
        self._pushed.setdefault(rank, deque()).append(Pushed(np.array(rows), np.array(gradients), since))
        while len(self._pushed) == num_ranks and all(self._pushed.values()):
            self._owner.step([self._pushed[one].popleft() for one in range(num_ranks)])

    def write(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Set rows of an array; rows: (num,) int64, values: (num, width)."""
        self._arrays[name][rows] = values

    def pushes(self, count: int | None = None) -> int:
        """Return the steps so far; count: sets them, and drops what no step has taken."""
        if count is not None:
            self._owner = RowOwner(self._arrays, self._optimizer, count, watched=True)
            self._pushed: dict[int, deque[Pushed]] = {}
        return self._owner.clock

    def told(self) -> tuple[int, int]:
        """Return stale rows and the greatest age, see `RowOwner`."""
        return self._owner.stale_rows, self._owner.greatest_age


class ShardSpec(NamedTuple):
    """All shards of a table, as described to the process that starts them.

    Attributes:
        token: Token of the table; shards are named after it.
        address: Address of Ray; None: Ray is started.
        timeout_s: How long Ray or the shards may stay silent, seconds.
        part_offsets, owner_of_part: See `Ownership`.
        num_shards: Number of shards, each of which owns rows.
        columns, optimizer, initial: See `RowShard`; `initial` covers all rows.
        notes: Folder in which the processes that use a Ray that was started here note that they do.
    """

    token: str
    address: str | None
    timeout_s: float
    part_offsets: np.ndarray
    owner_of_part: list[int]
    num_shards: int
    columns: dict[str, SharedColumn]
    optimizer: SparseAdam | SparseSGD
    initial: Initial
    notes: str | None

    @property
    def ownership(self) -> Ownership:
        """Which shard owns which ids."""
        return Ownership(self.part_offsets, self.owner_of_part, self.num_shards)

    def name(self, shard: int) -> str:
        """Return the name of a shard's actor."""
        return f"{self.token}-rows-{shard}"

    def arguments(self, shard: int) -> tuple:
        """Return the arguments of a shard."""
        ownership = self.ownership
        initial = [(rows.start, self.initial.of(ids)) for _, ids, rows in ownership.parts(shard)]
        return ownership.num_rows(shard), self.columns, self.optimizer, initial


STORE_BYTES = 1 << 30  # of rows and gradients that are sent, of a Ray that is started
_END_LIMIT_S = 10.0
_RUN = "from lightning_gnnscale.remote.shard_keeper import keep; keep()"


class ShardKeeper:
    """A process that makes the shards of a table and keeps them until it is ended, or until no trainer is left.

    Args:
        spec: Description of the shards.

    Attributes:
        address: Address of Ray.

    Raises:
        GNNScaleError: Ray does not answer, or the shards do not start.
    """

    def __init__(self, spec: ShardSpec):
        reply, other_end = os.pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # A session of its own: what interrupts the trainer from the keyboard must not end the rows first.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN, str(other_end)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env=environment, pass_fds=(other_end,), start_new_session=True,
        )  # fmt: skip
        os.close(other_end)
        # Twice: Ray is started, then the shards. What is written to a process that is stopped would wait as well.
        limit_s = 2 * spec.timeout_s
        late, begun = threading.Timer(limit_s, self._process.kill), time.monotonic()
        late.daemon = True
        late.start()
        with open(reply, "rb") as answers:
            try:
                pickle.dump(spec, self._process.stdin)
                self._process.stdin.flush()
                self.address, failure = pickle.load(answers)
            except (EOFError, BrokenPipeError):
                code = self._process.wait()
                failure = f"the process that keeps the rows ended with {code}: memory may be short on this machine"
                if time.monotonic() - begun >= limit_s:
                    failure = (
                        f"the process that keeps the rows did not start them within twice timeout_s={spec.timeout_s:g} "
                        "s: was it stopped? Raise timeout_s where the machine is slow"
                    )
            late.cancel()
        if failure is not None:
            self.end()
            raise GNNScaleError(failure)

    def end(self) -> None:
        """End the shards, and a Ray that was started for them."""
        try:
            self._process.stdin.write(b"0")
            self._process.stdin.close()
        except OSError:  # it has ended
            pass
        try:
            self._process.wait(2 * _END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def keep() -> None:
    """Make what a spec on stdin describes, answer on the given descriptor, and stay until stdin ends."""
    spec: ShardSpec = pickle.load(sys.stdin.buffer)
    address = failure = None
    actors: list = []
    try:
        address = join_ray(spec.address, spec.timeout_s, STORE_BYTES)
        actors = _start(spec)
    except GNNScaleError as error:
        failure = str(error)
    except Exception as error:
        failure = f"the workers that own the rows did not start ({one_line(error)})"
    with open(int(sys.argv[1]), "wb") as answers:
        pickle.dump((address, failure), answers)
    sys.stdin.buffer.read(1)
    _wait_for_others(spec.notes)
    del actors
    if address is not None:
        leave_ray()
    if spec.notes is not None:
        shutil.rmtree(spec.notes, ignore_errors=True)


def _start(spec: ShardSpec) -> list:
    ray, ownership = import_ray(), spec.ownership
    actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")(RowShard)
    actors = []
    for shard in range(spec.num_shards):
        options = {"name": spec.name(shard), "namespace": NAMESPACE}
        if spec.address is not None:  # on a cluster, machines are chosen by what they have free
            options["memory"] = table_bytes(ownership.num_rows(shard), spec.columns)
        actors.append(actor.options(**options).remote(*spec.arguments(shard)))
    try:
        ray.get([one.ping.remote() for one in actors], timeout=spec.timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise GNNScaleError(
            f"the {spec.num_shards} workers that own the rows did not start within {spec.timeout_s:g} s: `ray status` "
            "says whether the cluster has the memory; raise timeout_s where it is slow"
        ) from None
    return actors


def note_use(notes: str | None) -> Path | None:
    """Note that this process uses the Ray of a keeper; the note is removed by the process that made it."""
    if notes is None:
        return None
    note = Path(notes) / str(os.getpid())
    try:
        note.touch()
    except OSError:
        return None  # the keeper has ended, as the first call will report
    return note


def _wait_for_others(notes: str | None) -> None:
    """Wait until the processes that use this Ray have left it: they would be ended with it."""
    deadline = time.monotonic() + _END_LIMIT_S
    while notes is not None and time.monotonic() < deadline and any(map(_runs, Path(notes).glob("*"))):
        time.sleep(0.05)


def _runs(note: Path) -> bool:
    try:
        os.kill(int(note.name), 0)
    except OSError:
        return False
    return True
