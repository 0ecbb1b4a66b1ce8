"""The unfinished store: a folder beside the root, its journal, and a lock on both; it appears whole, at once."""

import json
import os
import shutil
import socket
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from ..errors import PartitionStoreError
from ..events import held_lock, lock_holder
from ..system import sync_data
from .array_file import HEADER_BYTES, ArrayFile, checksum
from .manifest import MANIFEST, SOURCE, is_whole, read_manifest, read_source, sealed, sync_folder, unsealed

JOURNAL = "journal.jsonl"
CHAIN = ("edges", "rows", "halo", "edge_code", "halo_features")  # steps that read what those before have made
WRITER_NOTE = "writer.txt"  # who was at work; it marks the folder as a writer's


def partial_folder(root: Path) -> Path:
    """Return where a store at `root` is built."""
    return root.with_name(root.name + ".partial")


@contextmanager
def writer_lock(root: Path, timeout_s: float, doing: str = "writing") -> Iterator[None]:
    """Hold the right to write at `root`, or to update what is there; the lock ends with the process, however it ends.

    Raises:
        PartitionStoreError: another process holds it after timeout_s; the message says which and where.
    """
    path, at_work = root.with_name(root.name + ".lock"), False
    try:
        with held_lock(path, f"is {doing} the store {root}", timeout_s):
            at_work = True
            yield
    except Timeout:
        if at_work:
            raise
        raise PartitionStoreError(
            f"{root}: {lock_holder(path)} is {doing} this store; wait for it (lock_timeout_s) or choose another root"
        ) from None


class Journal:
    """What has been finished of an unfinished store, one sealed JSON line at a time.

    A line names every file that its step has made so far, with the checksums of what was written. Nothing that a line
    does not vouch for is continued: a damaged line is the end of what counts, a step with a file that does not fit its
    checksums is made again, and a file that no line names is deleted.

    Args:
        folder: the partial folder; made if it is missing.
        head: what the work depends on; a journal with another head is not continued.
        every_bytes: how much is written between two lines of one step.

    Cost: one read of what an interrupted writer left, about 1 GB/s.
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
        if self.resumed:
            self.forget_damaged()
            self._delete_unnamed()
        else:
            self.write("begin", **head)

    def state(self, step: str) -> dict:
        """Return the last line of a step, {} if there is none."""
        return self._states.get(step, {})

    def is_done(self, step: str) -> bool:
        """Return whether a step is finished."""
        return bool(self.state(step).get("done"))

    def write(self, step: str, **state) -> None:
        """Add a line; it replaces the step's line before it."""
        state = json.loads(json.dumps(state))
        line = memoryview((json.dumps(sealed({"step": step, **state})) + "\n").encode())
        while line:
            line = line[os.write(self._fd, line) :]
        sync_data(self._fd)
        self._states[step] = state
        self._since_bytes = 0

    def finish(self, step: str, *files: ArrayFile, **state) -> None:
        """Close the files that a step has made, and write that it is done."""
        for file in files:
            file.close()
        self.write(step, done=True, files=file_states(*files), **state)

    def due(self, num_bytes: int) -> bool:
        """Count written bytes; return whether a line is due."""
        self._since_bytes += num_bytes
        return self._since_bytes >= self._every_bytes

    def open_file(self, step: str, name: str, dtype, row_shape: tuple[int, ...] = (), num_rows: int | None = None):
        """Open an array of a step where its last line left it.

        Args:
            num_rows: the whole length, of a file whose rows are written by position.
        """
        _, stand, _, runs = self.state(step).get("files", {}).get(name, (0, 0, None, ()))
        return ArrayFile(self.folder / name, dtype, row_shape, stand if num_rows is None else num_rows, runs)

    def checksums(self) -> dict[str, int]:
        """Return the crc32 of the data of each finished file, as it was written, by file name."""
        files = (item for state in self._states.values() for item in state.get("files", {}).items())
        return {name: runs[0][2] if runs else 0 for name, (_, _, head_crc, runs) in files if head_crc is not None}

    def forget_damaged(self) -> list[str]:
        """Compare all files with what was written, and forget the steps whose files do not fit.

        Returns:
            One line for each damaged file; [] where everything is as it was written.
        """
        damage, forgotten = [], set()
        for step, state in self._states.items():
            for name, entry in state.get("files", {}).items():
                what = self._damage(name, *entry)
                if what:
                    damage.append(f"{self.folder / name}: {what}")
                    forgotten.update(_made_with(step, self._states))
        for step in sorted(forgotten):
            for name in self.state(step).get("files", {}):
                (self.folder / name).unlink(missing_ok=True)
            self.write(step)
        return damage

    def write_undamaged(self, write: Callable[[], None], stacklevel: int = 4) -> None:
        """Write the files, and those again that are found damaged before the manifest certifies them.

        Args:
            write: Makes the steps that are not done.
            stacklevel: Of the warning, so that it names the line of the user.

        Raises:
            PartitionStoreError: a file is damaged for the second time.
        """
        write()
        damage = self.forget_damaged()
        if damage:
            warnings.warn(f"{damage[0]}; what is damaged is made again", stacklevel=stacklevel)
            write()
            damage = self.forget_damaged()
        if damage:
            raise PartitionStoreError(f"{damage[0]}, for the second time: check the disk, or choose another root")

    def close(self) -> None:
        """Close the journal file."""
        os.close(self._fd)

    def _read(self, head: dict) -> bool:
        path, trusted = self.folder / JOURNAL, 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            try:
                state = unsealed(line) if line.endswith(b"\n") else None
            except ValueError:
                state = None
            if state is None:
                break
            self._states[state.pop("step")] = state
            trusted += len(line)
        if self._states.get("begin") != json.loads(json.dumps(head)):
            return False
        os.truncate(path, trusted)
        return True

    def _damage(self, name: str, row_bytes: int, num_rows: int, head_crc: int | None, runs: list) -> str | None:
        path, size = self.folder / name, HEADER_BYTES + num_rows * row_bytes
        if not path.is_file():
            return "is missing"
        found = path.stat().st_size
        if found < size or (head_crc is not None and found != size):
            return f"has {found} bytes instead of {size}"
        if head_crc is not None:
            with open(path, "rb") as file:
                if zlib.crc32(file.read(HEADER_BYTES)) != head_crc:
                    return "its header is not what was written"
        for first, end, crc in runs:
            if checksum(path, (end - first) * row_bytes, first * row_bytes) != crc:
                return "its content is not what was written (crc32 differs)"
        return None

    def _delete_unnamed(self) -> None:
        named = {name for state in self._states.values() for name in state.get("files", {})}
        delete_files(path for path in self.folder.iterdir() if path.name not in (JOURNAL, WRITER_NOTE, *named))


def _made_with(step: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the steps that are made again with a step whose files are damaged: those that go on from them."""
    if step in CHAIN[:-1]:  # scratch of earlier steps is gone by now
        return (*CHAIN, *(name for name in known if name.endswith(f"_{CHAIN[-1]}")))
    kind, is_table, _ = step.partition("features")
    return (step, f"{kind}{CHAIN[-1]}") if is_table and not kind.endswith("halo_") else (step,)


def file_states(*files: ArrayFile) -> dict[str, tuple]:
    """Return a journal line's facts of files: bytes a row, rows, crc32 of the header (None: open), runs of rows."""
    return {file.path.name: (file.row_bytes, file.num_rows, file.head_crc, file.runs) for file in files}


def journal_head(folder: Path) -> dict:
    """Return the first line of the journal in a folder, {} if there is none."""
    with suppress(OSError, ValueError), open(folder / JOURNAL, "rb") as file:
        head = unsealed(file.readline())
        head.pop("step", None)
        return head
    return {}


def clear_folder(folder: Path) -> None:
    """Remove what a writer left in a folder.

    The journal goes first, so that a kill in between leaves nothing to continue; the note that marks the folder as a
    writer's goes last.
    """
    (folder / JOURNAL).unlink(missing_ok=True)
    delete_files(entry for entry in folder.iterdir() if entry.name != WRITER_NOTE)
    (folder / WRITER_NOTE).unlink(missing_ok=True)


def delete_files(paths: Iterable[Path]) -> None:
    """Delete files of a writer's folder.

    Raises:
        PartitionStoreError: a folder is among them, which no writer makes.
    """
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            raise PartitionStoreError(f"{path}: a folder that no writer made; move it, and run the same command again")
        path.unlink()


def store_folder(root: str | os.PathLike) -> Path:
    """Return where a store at root is: a link is followed, so that it is built and replaced on its own disk."""
    path = Path(root).absolute()
    return path.resolve() if path.is_symlink() else path


def stands(root: Path, source: dict, overwrite: bool) -> bool:
    """Return whether the finished store at root is the wanted one; raise if another may not be replaced."""
    if not check_is_store(root) or overwrite:
        return False
    if read_source(root) == source:
        return True
    read_manifest(root)  # an older or a damaged store is reported as such
    raise PartitionStoreError(
        f"{root}: a store of another input or of other options exists here;"
        " replace it with overwrite=True or choose another root"
    )


def check_is_store(root: Path) -> bool:
    """Return whether a store, whole or damaged, is at root.

    Raises:
        PartitionStoreError: something else is there.
    """
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    if not _has_store(root):
        raise PartitionStoreError(f"{root}: exists and is not a partition store; choose another root")
    return True


def check_partial(partial: Path, source: dict, overwrite: bool) -> None:
    """Raise if an unfinished store of another input, or files of somebody else, would be lost."""
    if partial.is_dir() and any(partial.iterdir()) and not _is_writers(partial):
        raise PartitionStoreError(f"{partial}: holds files that no writer left; move them, or choose another root")
    head = journal_head(partial) or read_source(partial)
    if not head or overwrite or all(head.get(name) == value for name, value in source.items()):
        return
    raise PartitionStoreError(
        f"{partial}: an unfinished store of another input or of other options exists here;"
        " discard it with overwrite=True, or choose another root"
    )


def finish_publishing(root: Path, source: dict, overwrite: bool) -> bool:
    """Go on where a kill fell between the last byte of a store and its appearing at root; return whether it did."""
    partial, old = partial_folder(root), _old_folder(root)
    if (partial / MANIFEST).is_file() and read_source(partial) == source and (overwrite or not _has_store(root)):
        if is_whole(partial):
            publish(partial, root)
            return True
        (partial / MANIFEST).unlink()  # what a kill left is damaged: the journal says what of it is still valid
        (partial / SOURCE).unlink()
        (partial / WRITER_NOTE).touch()
    if old.exists() and not root.exists():
        old.rename(root)
    elif old.exists():
        shutil.rmtree(old)
    return False


def publish(partial: Path, root: Path) -> None:
    """Let the finished store appear at root; one that exists there goes once the new one has its name."""
    for path in partial.iterdir():
        if path.name not in (MANIFEST, SOURCE) and path.suffix != ".npy":
            path.unlink()
    sync_folder(partial)
    old = _old_folder(root)
    if _has_store(root):
        if old.exists():
            shutil.rmtree(old)
        root.rename(old)
    partial.rename(root)
    sync_folder(root.parent)
    if old.exists():
        shutil.rmtree(old)


def _is_writers(partial: Path) -> bool:
    return any((partial / name).is_file() for name in (JOURNAL, WRITER_NOTE, MANIFEST))


def _has_store(root: Path) -> bool:
    """Either file is the writer's own mark: a store that lost its manifest is still one that may be written again."""
    return (root / MANIFEST).is_file() or "part_id_crc32" in read_source(root)


def _old_folder(root: Path) -> Path:
    return root.with_name(root.name + ".old")
