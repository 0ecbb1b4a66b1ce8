"""Outputs of hidden layers beside predictions: whole tables, from which the next version of a store is predicted."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..across_ranks import failing_together, gather_from_ranks, of_first_rank, rank
from ..errors import PartitionStoreError, disk_errors
from ..model.backbone import Backbone
from ..model.inference import table_width
from ..model.layer_source import LayerSource
from ..partition_store.array_file import ArrayFile, map_rows
from ..partition_store.manifest import check_file, describe_files, sealed, sync_folder, unsealed, write_json

LAYERS = "layers.json"  # written last: a folder without it holds no layers
_BLOCK_BYTES = 8 << 20
_OTHER_PATH = "free space, or give PredictionWriter(<a path on another disk>) (hydra.run.dir=)"


def layers_folder(predictions: Path) -> Path:
    """Return where the layers of a file of predictions are kept: predictions.parquet has predictions.layers."""
    return predictions.with_suffix(".layers")


class KeptLayers:
    """The tables of hidden layers that a pass reads and keeps: implements the model's `LayerTables`.

    Row i of table l is what layer l reads of the node with store id i.

    Args:
        source: The graph.
        folder: Where the tables appear at the end, on rank 0's machine; None: none are kept.
        earlier: Of layers 1, 2, ... of the version before: (its num_nodes, width), mapped; None: there are none.
        parent_nid: (num_nodes,) store id in that version of each node, -1 of new ones; None: the same.

    Cost: a sequential read of the table that the pass made, or of that of before, and a write of each kept table.
    """

    def __init__(
        self,
        source: LayerSource,
        folder: Path | None,
        earlier: Sequence[np.ndarray] | None = None,
        parent_nid: np.ndarray | None = None,
    ):
        self.source, self.folder, self.earlier, self.parent_nid = source, folder, earlier, parent_nid
        self._checksums: dict[str, int] = {}

    @property
    def has_earlier(self) -> bool:
        return self.earlier is not None

    def read(self, layer: int, nodes: np.ndarray) -> Any:
        rows = nodes if self.parent_nid is None else np.asarray(self.parent_nid[nodes], np.int64)
        return self.source.gather(rows, self.earlier[layer - 1])

    def keep(self, layer: int, width: int, dtype: np.dtype, read: Callable[[np.ndarray], np.ndarray]) -> None:
        if self.folder is None:
            return
        path, num_nodes = self._unfinished / f"layer{layer}.npy", self.source.num_nodes
        with failing_together(), disk_errors(path, "written", _OTHER_PATH):
            if rank() != 0:
                return
            if layer == 1:
                self.discard()
            self._unfinished.mkdir(parents=True, exist_ok=True)
            file = ArrayFile(path, dtype, (width,))
            step = max(1, _BLOCK_BYTES // file.row_bytes)
            for begin in range(0, num_nodes, step):
                file.append(read(np.arange(begin, min(begin + step, num_nodes))))
            file.close()
            self._checksums[path.name] = file.crc

    def publish(self, identity: Mapping[str, str]) -> None:
        """Let the tables appear in their folder, in place of those there, on rank 0; identity: whose they are."""
        if self.folder is None:
            return
        if not self._checksums:  # of a model of one layer, which has no hidden one
            self.discard()
        folder, old = self._unfinished, self.folder.with_name(self.folder.name + ".old")
        folder.mkdir(parents=True, exist_ok=True)
        content = {**identity, "files": describe_files(folder, self._checksums)}
        write_json(folder / LAYERS, sealed(content))
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        folder.rename(self.folder)
        sync_folder(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove tables that did not become whole."""
        if self.folder is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    @property
    def _unfinished(self) -> Path:
        return self.folder.with_name(self.folder.name + ".tmp")


def earlier_layers(folder: Path, wanted: Mapping[str, str], backbone: Backbone) -> tuple[list[np.ndarray] | None, str]:
    """Map the tables that a pass over the version before has kept; every rank calls it.

    Args:
        folder: See `layers_folder`.
        wanted: Whose they must be.
        backbone: The model that reads them.

    Returns:
        Tables of layers 1, 2, ...; or None, and why there are none.

    Cost: one read of the tables on rank 0, which compares their checksums.
    """
    files, why = of_first_rank(lambda: _whole_files(folder, wanted, backbone))
    if files is not None and not all(gather_from_ranks(_content(folder).get("files") == files)):
        files, why = None, f"not every process sees {folder}"
    if files is None:
        return None, why
    names = [f"layer{layer}" for layer in range(1, backbone.num_layers)]
    entries = [(folder / f"{name}.npy", np.dtype(files[name]["dtype"]), tuple(files[name]["shape"])) for name in names]
    return [map_rows(*entry) for entry in entries], ""


def _content(folder: Path) -> dict[str, Any]:
    try:
        return unsealed((folder / LAYERS).read_bytes())
    except (OSError, ValueError):
        return {}


def _whole_files(folder: Path, wanted: Mapping[str, str], backbone: Backbone) -> tuple[dict | None, str]:
    """Return the entries of the files, once they are compared; or None, and why they are of no use."""
    content = _content(folder)
    files = content.pop("files", None)
    if files is None:
        return None, f"{folder} holds none of the version before"
    if content != dict(wanted):
        return None, f"those of {folder} are of another version, model or precision"
    widths = {f"layer{layer}": table_width(backbone, layer) for layer in range(1, backbone.num_layers)}
    if widths != {name: entry["shape"][1] for name, entry in files.items()}:
        return None, f"those of {folder} have other widths"
    try:
        for name, entry in files.items():
            check_file(folder, name, entry)
    except (PartitionStoreError, OSError):
        return None, f"those of {folder} are damaged"
    return files, ""
