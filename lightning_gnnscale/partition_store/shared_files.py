"""Files of stores that hold the same bytes take the disk once: hard links, each store whole by itself."""

import filecmp
import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .manifest import MANIFEST

SMALLEST = 1 << 16  # bytes of a file for which it pays to look


def share_files(root: Path, others: Iterable[Path]) -> int:
    """Replace files of a store by hard links to files of other stores with the same content.

    Stores of one graph whose parts are the same, such as one that packs halo rows and one that does not, or two with
    other labels, share their features and edges this way. Removing a store leaves the files of the others; each
    manifest has the checksums. Feature rows are stored by part: stores of other parts hold them in another order, and
    share none.

    Args:
        root: A finished store, which no process has open.
        others: Folders that may hold stores on the same disk.

    Returns:
        Bytes that became free.

    Cost: one read of both files for each pair of the same type, shape and checksum.
    """
    freed, own = 0, _large_files(root)
    for other in others:
        if not own or other == root:
            continue
        for name, entry in _large_files(other).items():
            if own.get(name) == entry and _link(other / f"{name}.npy", root / f"{name}.npy"):
                freed += entry["bytes"]
                del own[name]
    return freed


def _large_files(root: Path) -> dict[str, dict]:
    """Return a manifest's entries of large files; nothing where it cannot be read."""
    with suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        files = json.loads((root / MANIFEST).read_bytes())["files"]
        return {name: entry for name, entry in files.items() if entry["bytes"] >= SMALLEST}
    return {}


def _link(source: Path, path: Path) -> bool:
    """Let a path be another name of a file with the same bytes; False where it is already, or cannot be."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.link")
    try:
        if os.path.samefile(source, path) or not filecmp.cmp(source, path, shallow=False):
            return False
        os.link(source, temporary)
        os.replace(temporary, path)
    except OSError:  # another disk, a disk without links, or a store that was removed meanwhile
        with suppress(OSError):
            temporary.unlink()
        return False
    return True
