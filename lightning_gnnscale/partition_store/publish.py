"""How a finished store appears at its root: whole, at once, and never before an older one may go."""

import os
import shutil
from pathlib import Path

from ..errors import PartitionStoreError
from .journal import JOURNAL, WRITER_NOTE, journal_head, partial_folder
from .manifest import MANIFEST, SOURCE, is_whole, read_manifest, read_source, sync_folder


def store_folder(root: str | os.PathLike) -> Path:
    """Return where a store at root lies: a link is followed, so that it is built and replaced on its own disk."""
    path = Path(root).absolute()
    return path.resolve() if path.is_symlink() else path


def stands(root: Path, source: dict, overwrite: bool) -> bool:
    """Return whether the finished store at root is the wanted one; raise if another may not be replaced."""
    if not check_is_store(root) or overwrite:
        return False
    if read_source(root) == source:
        return True
    read_manifest(root)  # an older or a damaged store is told for what it is
    raise PartitionStoreError(
        f"{root}: a store of another input or of other options stands here;"
        " replace it with overwrite=True or choose another root"
    )


def check_is_store(root: Path) -> bool:
    """Return whether a store, whole or damaged, stands at root.

    Raises:
        PartitionStoreError: something else stands there.
    """
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    if not _has_store(root):
        raise PartitionStoreError(f"{root}: exists and is no partition store; choose another root")
    return True


def check_partial(partial: Path, source: dict, overwrite: bool) -> None:
    """Raise if an unfinished store of another input, or files of somebody else, would be lost."""
    if partial.is_dir() and any(partial.iterdir()) and not _is_writers(partial):
        raise PartitionStoreError(f"{partial}: holds files that no writer left; move them, or choose another root")
    head = journal_head(partial) or read_source(partial)
    if not head or overwrite or all(head.get(name) == value for name, value in source.items()):
        return
    raise PartitionStoreError(
        f"{partial}: an unfinished store of another input or of other options stands here;"
        " discard it with overwrite=True, or choose another root"
    )


def finish_publishing(root: Path, source: dict, overwrite: bool) -> bool:
    """Go on where a kill fell between the last byte of a store and its appearing at root; return whether it did."""
    partial, old = partial_folder(root), _old_folder(root)
    if (partial / MANIFEST).is_file() and read_source(partial) == source and (overwrite or not _has_store(root)):
        if is_whole(partial):
            publish(partial, root)
            return True
        (partial / MANIFEST).unlink()  # what a kill left is damaged: the journal says what of it still counts
        (partial / SOURCE).unlink()
        (partial / WRITER_NOTE).touch()
    if old.exists() and not root.exists():
        old.rename(root)
    elif old.exists():
        shutil.rmtree(old)
    return False


def publish(partial: Path, root: Path) -> None:
    """Let the finished store appear at root; one that stands there goes once the new one has its name."""
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
