"""The graphs that preparation is measured on, as partition stores that are made once and kept."""

import re
from pathlib import Path

import numpy as np

from ..dataset import load_npz
from ..edge_stream import open_edge_stream
from ..partition_store import PartitionStore, write_partition_store
from ..partitioner import partition
from ..rng import fold, permutation
from .power_law import power_law_graph

NUM_CLASSES, TRAIN_SHARE = 47, 0.1  # of generated graphs
_SEED, _TRAIN_SALT, _CHUNK_ROWS = 0, 12, 1 << 16
GENERATED = re.compile(r"power_law:([\d_]+):([\d_]+):([\d_]+)")


def open_graph(name: str, folder: Path, num_parts: int, data_root: Path | None) -> PartitionStore:
    """Open the store of a graph that `check_graph` has accepted; if it is missing, it is made.

    Args:
        name: Name of a public graph, or "power_law:NODES:EDGES:FEATURES".
        folder: Folder of the stores.
        num_parts: Number of parts, which are ranges of ids.
        data_root: Folder of public graphs.
    """
    root = folder / f"{name.replace(':', '-')}-p{num_parts}"
    if root.is_dir():
        return PartitionStore.open(root)
    folder.mkdir(parents=True, exist_ok=True)
    generated = GENERATED.fullmatch(name)
    if generated is None:
        data = load_npz(name, root=None if data_root is None else str(data_root))
        parts = partition(data.stream, "range", num_parts=num_parts)
        arrays = {"features": data.features, "labels": data.labels, "masks": data.masks}
        return write_partition_store(root, data.stream, parts, **arrays)
    num_nodes, num_edges, dim = (int(number) for number in generated.groups())
    csc = power_law_graph(num_nodes, num_edges, _SEED)
    dst = np.repeat(np.arange(num_nodes, dtype=csc.indices.dtype), np.diff(csc.indptr))
    stream = open_edge_stream(np.stack([np.asarray(csc.indices), dst]), num_nodes=num_nodes)
    features = _write_features(folder / f"{root.name}.npy", num_nodes, dim)
    labels = np.random.default_rng(_SEED).integers(0, NUM_CLASSES, num_nodes)
    train = np.zeros(num_nodes, np.bool_)
    train[permutation(num_nodes, fold(_SEED, _TRAIN_SALT))[: max(1, round(TRAIN_SHARE * num_nodes))]] = True
    parts = partition(stream, "range", num_parts=num_parts)
    arrays = {"features": features, "labels": labels, "masks": {"train": train}}
    store = write_partition_store(root, stream, parts, check_finite=False, **arrays)
    features.unlink()
    return store


def _write_features(path: Path, num_nodes: int, dim: int) -> Path:
    rng = np.random.default_rng(_SEED)
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (num_nodes, dim))
    for begin in range(0, num_nodes, _CHUNK_ROWS):
        rows[begin : begin + _CHUNK_ROWS] = rng.random((min(_CHUNK_ROWS, num_nodes - begin), dim), np.float32)
    rows.flush()
    return path
