"""Checkpoints on disk: written whole or not at all, checked, loaded without running code; and the rows beside them."""

import errno
import fcntl
import hashlib
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePath
from typing import IO, Any

import numpy as np
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from ..across_ranks import first_in_folder, gather_from_ranks, rank, send_file, world_size
from ..errors import CheckpointError, short
from .made_again import MODEL_KEY, ROWS_KEY, NoLargerThan, check_entries, check_hyper_parameters, is_of_package

_UNFINISHED = "gnnscale.tmp"  # suffix of an unfinished file
_ARCHIVE = b"PK\x03\x04"  # first bytes of a zip archive
_FOLDER = 0x10  # attribute of a member, from DOS
_MOST_NAMED = 5
_TAIL_BYTES = 1 << 20  # where an archive lists its members with their checksums
_MORE_SPACE = "free space, or name another folder for checkpoints"

PathLike = str | os.PathLike


class CheckpointFiles(TorchCheckpointIO):
    """Checkpoints as files that are always whole, whatever ends the process or fills the disk.

    A file is written under a temporary name in the same folder, brought to the disk, and renamed; leftovers of killed
    processes are removed by the next one that saves there. Loading checks every member of the archive against its
    checksum, one read more than Lightning's, and takes weights and plain values alone. Paths on other file systems
    (`s3://...`) are read and written as by Lightning, weights alone too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cleared: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Write a checkpoint; the one of that name stays until the new one is whole.

        Raises:
            CheckpointError: it cannot be written, for example because the disk is full.
        """
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            if local.parent not in self._cleared:
                _clear_unfinished(local.parent)
                self._cleared.add(local.parent)
            _write(checkpoint, local)
        except (OSError, RuntimeError) as error:
            cause = _os_error(error)
            if cause is None:
                raise
            before = "the previous one is kept; " if local.is_file() else ""
            raise CheckpointError(
                f"{local}: cannot be written ({cause.strerror or cause}); {before}free space, or name another folder "
                "for checkpoints, and resume from the last one"
            ) from error

    def load_checkpoint(self, path: PathLike, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        """Read a checkpoint; see `read_checkpoint`."""
        check_weights_only(weights_only)
        if local_path(path) is None:
            return super().load_checkpoint(path, map_location, weights_only=True)
        return read_checkpoint(path, map_location)


class LoadsWeightsOnly:
    """Mix-in of Lightning's modules and data modules: `load_from_checkpoint` never runs what a file holds."""

    @_restricted_classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: PathLike | IO, *args: Any, weights_only: bool | None = None, **kwargs
    ):
        """Load as Lightning does, a local file only where it is undamaged.

        A module of this package needs no `backbone=` where the checkpoint says how to make it, see
        `BackboneModule.on_save_checkpoint`.

        Raises:
            CheckpointError: the file is not a checkpoint, damaged, of another model, or holds more than plain values.
            ValueError: weights_only is False.
        """
        check_weights_only(weights_only)
        load = super().load_from_checkpoint
        with _opened(checkpoint_path, cls) as (file, path):
            saved = check_is_lightnings(_read(path, file, "cpu", mmap=isinstance(path, Path)), path)
            check_hyper_parameters(saved, cls, path)
            bounded = NoLargerThan(saved["state_dict"], path)
            if hasattr(cls, "made_again"):
                with bounded:
                    kwargs |= cls.made_again(saved.get(MODEL_KEY) or {}, kwargs)
            file.seek(0)
            try:
                with bounded if is_of_package(cls) else nullcontext():  # others may make what they do not save
                    return load(file, *args, weights_only=True, **kwargs)
            except (TypeError, ValueError) as error:
                if "'backbone'" in str(error):
                    raise CheckpointError(
                        f"{path} does not say how to make its model: give {cls.__name__}.load_from_checkpoint(..., "
                        "backbone=...)"
                    ) from None
                if args or {*kwargs} - {"backbone", "map_location", "strict"}:  # the caller's may be wrong
                    raise
                told = " ".join(str(error).split())[:200]
                raise CheckpointError(
                    f"{path}: its arguments of {cls.__name__} do not make one ({told}): give those as keywords"
                ) from error


@contextmanager
def _opened(checkpoint: PathLike | IO, module: type) -> Iterator[tuple[IO, Path | str]]:
    """Yield a checkpoint as a file, and what errors call it: a local one is checked, others are read as they are."""
    if not isinstance(checkpoint, str | os.PathLike):
        if not callable(getattr(checkpoint, "seek", None)):
            raise CheckpointError(f"a checkpoint must be a path, a URL or an open file, got {short(checkpoint)}")
        with of_this_model(name := getattr(checkpoint, "name", "the checkpoint"), module):
            yield checkpoint, name
        return
    path = local_path(checkpoint)
    if path is None:
        with get_filesystem(checkpoint).open(str(checkpoint), "rb") as file, of_this_model(checkpoint, module):
            yield file, str(checkpoint)
        return
    with of_this_model(path, module), checked_file(path) as file:
        yield file, path


def check_weights_only(given: bool | None) -> None:
    """Raise ValueError where a caller asks for a checkpoint whose code is run."""
    if given is False:
        raise ValueError(
            "weights_only=False would run code from the checkpoint: leave it out; classes that you trust are named to "
            "torch.serialization.add_safe_globals([...])"
        )


def local_path(path: PathLike) -> Path | None:
    """Return a path of this machine's file system, file:// included; None for one of another."""
    files = get_filesystem(path)
    protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
    return Path(files._strip_protocol(str(path))) if "file" in protocols else None


def read_checkpoint(path: PathLike, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Read weights and plain values of a local checkpoint; mmap leaves tensors in the file until they are read.

    Raises:
        CheckpointError: the file is missing, not a checkpoint, damaged, or holds more than plain values.

    Cost: one read of the whole file for its checksums, beside the loading.
    """
    with checked_file(path) as file:
        return _read(path, file, map_location, mmap)


def saved_model(path: PathLike) -> dict[str, Any]:
    """Return a checkpoint's "out_channels", the width of its outputs or None, and its module's hyperparameters by name.

    Raises:
        CheckpointError: as of `read_checkpoint`, or the file is not a checkpoint of Lightning.
    """
    checkpoint = check_is_lightnings(read_checkpoint(path, mmap=True), path)
    saved = dict(checkpoint.get("hyper_parameters") or {})
    backbone = (checkpoint.get(MODEL_KEY) or {}).get("backbone") or {}
    return {**saved, "out_channels": backbone.get("out_channels") or saved.get("num_classes")}


def _read(path: PathLike, file: IO, map_location: Any, mmap: bool) -> Any:
    try:
        return torch.load(str(path) if mmap else file, map_location=map_location, mmap=mmap, weights_only=True)
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise pickle.UnpicklingError(str(error)) from None


def check_is_lightnings(checkpoint: Any, path: PathLike) -> dict[str, Any]:
    """Return a checkpoint of Lightning, or refuse a file that holds something else by a CheckpointError."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} is no checkpoint of Lightning{_others(Path(path))}")
    check_entries(checkpoint, path)
    return checkpoint


@contextmanager
def checked_file(path: PathLike) -> Iterator[IO]:
    """Open a checkpoint whose checksums match; a CheckpointError of one line says why it does not load."""
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, not a checkpoint{_others(path)}")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint{_others(path)}")
    with open(path, "rb") as file:
        objects = _check_archive(file, path)
        try:
            yield file
        except (pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(_refusal(path, objects, error)) from None


@contextmanager
def of_this_model(path: PathLike, module: type) -> Iterator[None]:
    """Raise a CheckpointError that names the first weight where weights do not fit a module."""
    try:
        yield
    except RuntimeError as error:
        head, *lines = str(error).splitlines()
        if "loading state_dict" not in head:
            raise
        first = " ".join(lines[0].split()).rstrip(".") if lines else head
        raise CheckpointError(
            f"{path}: a checkpoint of another model than this {module.__name__} ({first[:200]}): "
            "give the settings of the run that saved it"
        ) from None


def plain(value: Any) -> Any:
    """Return a value of a checkpoint with Python's numbers for numpy's and text for paths, which load as they are."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if type(value) is dict:
        return {plain(key): plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(entry) for entry in value)
    return value


def link_checkpoint(trainer: Any, filepath: PathLike, linkpath: PathLike) -> None:
    """Let one name stand for another checkpoint: `ModelCheckpoint`'s link, which is never missing in between."""
    target, link = os.path.abspath(filepath), os.path.abspath(linkpath)
    if trainer.is_global_zero and target != link:
        unfinished = _unfinished(Path(link))
        unfinished.unlink(missing_ok=True)
        os.symlink(os.path.relpath(target, os.path.dirname(link)), unfinished)
        if os.path.isdir(link) and not os.path.islink(link):
            shutil.rmtree(link)
        os.replace(unfinished, link)
    trainer.strategy.barrier()


@contextmanager
def on_this_machine(path: PathLike) -> Iterator[PathLike]:
    """Yield where this rank reads a checkpoint: its path or, where the file lies on other machines, a copy for a while.

    Every rank enters it. All read the file of the first rank that has one: a file of that name elsewhere may be
    another run's. GNNScaleError, on every rank: one cannot write its copy.
    """
    local = local_path(path)
    found = [None] if local is None or world_size() == 1 else gather_from_ranks(_mark(local))
    source = next((number for number, mark in enumerate(found) if mark is not None), 0)
    takers = [number for number, mark in enumerate(found) if mark != found[source]]
    if not takers:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="gnnscale-") as folder:
        here = Path(folder) / local.name if rank() in takers else local
        send_file(source, takers, here, "free space, or set TMPDIR to another folder")
        try:
            yield here
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(here), str(local))) from None


def _mark(path: Path) -> str | None:
    """Return an identity of a file, from its size and its end; None: there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return f"{size}-{hashlib.sha256(file.read()).hexdigest()}"
    except OSError:
        return None


def bring_rows(folder: PathLike, needed: Sequence[str]) -> None:
    """Copy files of learned rows from the machines that have them to those that read them; every rank calls it.

    Args:
        folder: where this rank expects them.
        needed: names of the files that this rank reads; those that no machine has stay missing.
    """
    folder = Path(folder)
    missing = [name for name in needed if os.path.basename(name) == name and not (folder / name).is_file()]
    wanted = gather_from_ranks(missing)
    names = sorted({name for one in wanted for name in one})
    if not names or len(wanted) == 1:
        return
    firsts = first_in_folder(folder, _MORE_SPACE)
    held = gather_from_ranks({name for name in names if (folder / name).is_file()})
    for name in names:
        source = next((number for number, have in enumerate(held) if name in have), None)
        takers = sorted({firsts[number] for number, one in enumerate(wanted) if name in one})
        if source is not None:
            send_file(source, takers, folder / name, _MORE_SPACE)


def rows_folder(filepath: PathLike) -> Path:
    """Return the folder of the learned rows beside a checkpoint, which ranks write them to, each on its machine."""
    path = Path(os.path.abspath(filepath))
    return path.with_name(f"{path.name}.rows")


def with_rows_located(checkpoint: dict[str, Any], filepath: PathLike) -> dict[str, Any]:
    """Let a checkpoint name the folder of its rows as it is now: beside the file, links followed."""
    if ROWS_KEY in checkpoint:
        beside = rows_folder(os.path.realpath(filepath))
        if beside.is_dir():
            checkpoint[ROWS_KEY]["folder"] = str(beside)
    return checkpoint


def remove_other_rows(filepath: PathLike, kept: list[dict[str, Any]]) -> None:
    """Remove the rows of an earlier checkpoint of this name, once the new one is complete; on every rank."""
    names = {entry["name"] for one in kept for entry in one["files"]}
    for path in rows_folder(filepath).iterdir():
        if path.name not in names:
            path.unlink(missing_ok=True)


def remove_rows(filepath: PathLike) -> None:
    """Remove the rows of a checkpoint that was removed; on every rank."""
    shutil.rmtree(rows_folder(filepath), ignore_errors=True)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    unfinished = _unfinished(path)
    try:
        with open(unfinished, "w+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: an unlocked file is a leftover
            _save_with_checksums(checkpoint, file)
            _warn_of_objects(file, path)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _save_with_checksums(checkpoint: dict[str, Any], file: IO) -> None:
    given = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(checkpoint, file)
    finally:
        torch.serialization.set_crc32_options(given)


def _warn_of_objects(file: IO, path: Path) -> None:
    """Warn during the run that its checkpoints will be refused, and because of which classes."""
    file.seek(0)
    names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if names:
        # The same text each time, so that Python's filter shows it once.
        rank_zero_warn(
            f"checkpoints in {path.parent} hold {', '.join(names)}: to load them call "
            f"torch.serialization.add_safe_globals([{_short(names)}]), or save plain values"
        )


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{_UNFINISHED}")


def _clear_unfinished(folder: Path) -> None:
    """Remove what killed processes left; a file that a process writes to is locked."""
    for path in folder.glob(f".*.{_UNFINISHED}"):
        try:
            if not path.is_symlink():
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except OSError:
            continue


def _check_archive(file: IO, path: Path) -> list[str]:
    """Read every member of an archive, and refuse it where a checksum differs or torch would read it otherwise.

    Returns:
        Names of what it holds beside plain values.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            # torch leaves the contents of a member that is marked as a folder unread.
            damaged = damaged or next((one.filename for one in archive.infolist() if one.external_attr & _FOLDER), None)
            holds_values = any(name.endswith("/data.pkl") for name in archive.namelist())
        if damaged is None and holds_values:
            file.seek(0)
            objects = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception as error:  # readers of a forged archive may raise anything
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise
        file.seek(0)
        head = file.read(len(_ARCHIVE))
        what = "is damaged or cut off" if head == _ARCHIVE else "is no checkpoint of Lightning" if head else "is empty"
        raise CheckpointError(f"{path} {what}{_others(path)}") from None
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged (in its {damaged}){_others(path)}")
    if not holds_values:
        raise CheckpointError(f"{path} is no checkpoint of Lightning{_others(path)}")
    file.seek(0)
    return objects


def _refusal(path: Path, objects: list[str], error: Exception) -> str:
    """Return why an undamaged archive does not load."""
    if not objects:
        told = " ".join(str(error).split("WeightsUnpickler error:")[-1].split("Check the documentation")[0].split())
        return f"{path} does not load as weights and plain values ({told[:200]}); nothing of it was run"
    return (
        f"{path} holds {', '.join(objects)}, and checkpoints may hold weights and plain values alone; nothing of it "
        f"was run. If you trust its maker: torch.serialization.add_safe_globals([{_short(objects)}]) in Python"
    )


def _short(names: list[str]) -> str:
    return ", ".join(name.rpartition(".")[2] for name in names)


def _others(path: Path) -> str:
    """Return the remedy: the checkpoints beside one or, of a folder, in it, the newest first."""
    folder, where = (path, "in it") if path.is_dir() else (path.parent, "beside it")
    found = sorted((other for other in folder.glob("*.ckpt") if other != path), key=_written, reverse=True)
    if not found:
        return "; give a checkpoint that a run left under its checkpoints/"
    names = ", ".join(other.name for other in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"; {where}: {names}{more}"


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # a link without its file
        return 0.0


def _os_error(error: BaseException | None) -> OSError | None:
    """Return the error of the system below torch's, which its writer hides."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
