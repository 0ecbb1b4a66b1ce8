"""The unfinished store: a folder beside the root, a journal of what is done in it, and a lock on both."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from ..errors import PartitionStoreError
from ..events import held_lock, lock_holder
from .array_file import HEADER_BYTES, ArrayFile, checksum, sync_data

JOURNAL = "journal.jsonl"
WRITER_NOTE = "writer.txt"  # who was at work; it tells the folder for a writer's


def partial_folder(root: Path) -> Path:
    """Return where a store at `root` is built."""
    return root.with_name(root.name + ".partial")


@contextmanager
def writer_lock(root: Path, timeout_s: float) -> Iterator[None]:
    """Hold the right to write at `root`; the lock ends with the process, however it ends.

    Raises:
        PartitionStoreError: another process holds it after timeout_s; the message says which and where.
    """
    path, at_work = root.with_name(root.name + ".lock"), False
    try:
        with held_lock(path, f"is writing the store {root}", timeout_s):
            at_work = True
            yield
    except Timeout:
        if at_work:
            raise
        raise PartitionStoreError(
            f"{root}: {lock_holder(path)} is writing this store; wait for it (lock_timeout_s) or choose another root"
        ) from None


class Journal:
    """What has been finished of an unfinished store, one JSON line at a time.

    A line speaks only of bytes that are written; of bytes that may not have reached the disk it carries a crc32,
    which `open` compares, so neither a kill nor a loss of power leaves a store built on damage.

    Args:
        folder: the partial folder; made if it is missing.
        head: what the work depends on; a journal with another head is not continued.
        every_bytes: how much is written between two lines of one step.
    """

    def __init__(self, folder: Path, head: dict, every_bytes: int):
        self.folder = folder
        self._every_bytes = every_bytes
        self._since_bytes = 0
        self._states: dict[str, dict] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.resumed = self._read(head)
        if not self.resumed:
            clear_folder(folder)
            self._states = {}
        (folder / WRITER_NOTE).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._fd = os.open(folder / JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if not self.resumed:
            self.write("begin", **head)

    def state(self, step: str) -> dict:
        """Return the last line of a step, {} if there is none."""
        return self._states.get(step, {})

    def is_done(self, step: str) -> bool:
        """Return whether a step is finished."""
        return bool(self.state(step).get("done"))

    def write(self, step: str, **state) -> None:
        """Add a line; it replaces what was said of the step before."""
        state = json.loads(json.dumps(state))
        os.write(self._fd, (json.dumps({"step": step, **state}) + "\n").encode())
        sync_data(self._fd)
        self._states[step] = state
        self._since_bytes = 0

    def due(self, num_bytes: int) -> bool:
        """Count written bytes; return whether a line is due."""
        self._since_bytes += num_bytes
        return self._since_bytes >= self._every_bytes

    def open_file(self, step: str, name: str, dtype, row_shape: tuple[int, ...] = ()) -> ArrayFile:
        """Open an array of a step where its last line left it."""
        num_rows, crc, _ = self.state(step).get("files", {}).get(name, (0, 0, 0))
        return ArrayFile(self.folder / name, dtype, row_shape, num_rows, crc)

    def close(self) -> None:
        """Close the journal file."""
        os.close(self._fd)

    def _read(self, head: dict) -> bool:
        path = self.folder / JOURNAL
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines():
            state = json.loads(line)
            self._states[state.pop("step")] = state
        if self._states.get("begin") != json.loads(json.dumps(head)):
            return False
        os.truncate(path, len(whole))
        return all(self._intact(state) for state in self._states.values())

    def _intact(self, state: dict) -> bool:
        for name, (num_rows, crc, row_bytes) in state.get("files", {}).items():
            path = self.folder / name
            num_bytes = num_rows * row_bytes
            if not path.exists() or path.stat().st_size < HEADER_BYTES + num_bytes:
                return False
            if checksum(path, num_bytes) != crc:
                return False
        return True


def file_states(*files: ArrayFile) -> dict[str, tuple[int, int, int]]:
    """Return what a journal line says of growing files: rows, crc32, bytes a row."""
    return {file.path.name: (file.num_rows, file.crc, file.row_bytes) for file in files}


def journal_head(folder: Path) -> dict:
    """Return the first line of the journal in a folder, {} if there is none."""
    with suppress(OSError, ValueError), open(folder / JOURNAL) as file:
        head = json.loads(file.readline())
        head.pop("step", None)
        return head
    return {}


def clear_folder(folder: Path) -> None:
    """Remove what a writer left in a folder.

    The journal goes first, so that a kill in between leaves nothing to continue; the note that tells the folder for a
    writer's goes last.
    """
    (folder / JOURNAL).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if entry.name != WRITER_NOTE:
            entry.unlink()
    (folder / WRITER_NOTE).unlink(missing_ok=True)
