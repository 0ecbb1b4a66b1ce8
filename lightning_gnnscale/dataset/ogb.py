"""OGB's node property data sets, from the downloaded files: no graph is ever whole in memory."""

import csv
import hashlib
import importlib.util
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..edge_stream import open_edge_stream
from ..edge_stream.array import ArrayFileStream, map_npz_member, write_npy_header
from ..edge_stream.options import StreamOptions
from ..errors import one_line_of, short
from ..events import held_lock
from ..keywords import passes_on
from ..system import whole_file
from .graph_dataset import GraphDataset, as_mask
from .split import held_out

_SPLITS = {"train": "train", "val": "valid", "test": "test"}
_HETERO = ("triplet-type-list.csv.gz", "edge_index_dict.npz")
_MADE = "gnnscale"  # folder of the arrays made from text
Progress = Callable[[str, int, int | None], None]


@passes_on(open_edge_stream, to_undirected=True)
def load_ogb(
    name: str = "ogbn-products",
    root: str = "dataset",
    use_features: bool = True,
    hold_out: dict | None = None,
    progress: Progress | None = None,
    **stream_options,
) -> GraphDataset:
    """Open a node property data set of OGB; the package `ogb` downloads it where its folder is missing.

    Edges are streamed from `raw/edge.csv.gz`, or from `raw/data.npz` (ogbn-papers100M). Features of nodes and edges
    given as text are written to .npy files beside, once; those in an .npz are mapped in place.

    Args:
        name: ogbn-products, ogbn-arxiv, ogbn-proteins or ogbn-papers100M.
        root: Folder with the data set's own, such as `ogbn_products`, as OGB's `root`.
        use_features: Whether features of nodes are used; False leaves them out, for a model that learns embeddings.
        hold_out: Which edges to hold out as links: arguments of `hold_out_edges` by name; None: none.
        progress: Called as progress(what, done, total).
        stream_options: to_undirected, here true by default, and the others of `open_edge_stream`. Where OGB's loader
            adds inverse edges (products, proteins), its files list each edge once.

    Raises:
        ValueError: no such data set, several node types or edge types, a file that is missing, damaged or of another
            layout; or it is missing and cannot be downloaded.

    Cost: 8 bytes a node for labels, a byte for each mask. Text: a read of it a pass, and 4 bytes of disk a value.
    """
    folder = Path(root).expanduser() / name.replace("-", "_")
    if not (folder / "raw").is_dir():
        _download(name, folder)
    raw = folder / "raw"
    if any((raw / file).exists() for file in _HETERO):
        raise ValueError(
            f"{name}: several node types or edge types are not read from OGB's files: PyG reads ogbn-mag, dataset=pyg "
            "dataset.dataset=OGB_MAG dataset.name=mag; else give edges and rows to gs.hetero_graph"
        )
    binary = (raw / "data.npz").is_file()
    if not binary and not (raw / "edge.csv.gz").is_file():
        raise ValueError(f"{raw}: holds neither edge.csv.gz nor data.npz, which OGB's data sets have; remove {folder}")
    made = folder / _MADE
    made.mkdir(exist_ok=True)
    with held_lock(made / "lock", f"is reading {folder}"):
        for left in made.glob("*.tmp*"):  # by a killed process
            left.unlink()
        parts = _of_npz(raw, made) if binary else _of_text(raw, made, progress)
    num_nodes, stream, labels = parts["num_nodes"], parts["stream"](stream_options), parts["labels"]
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    masks = {split: _split(folder, file, num_nodes) for split, file in _SPLITS.items()}
    _tell_unread(name, raw)
    dataset = GraphDataset(
        name=name,
        stream=stream,
        features=parts["features"] if use_features else None,
        labels=labels,
        masks=masks,
        edge_features=parts["edge_features"],
    )
    return held_out(dataset, hold_out)


def _of_text(raw: Path, made: Path, progress: Progress | None) -> dict:
    num_nodes = _count(raw / "num-node-list.csv.gz")
    edges = raw / "edge.csv.gz"

    def stream(options: dict):
        return open_edge_stream(edges, **{"num_nodes": num_nodes, "separator": ",", "header": False} | options)

    rows = {"features": ("node-feat.csv.gz", num_nodes), "edge_features": ("edge-feat.csv.gz", None)}
    found = {key: raw / file for key, (file, _) in rows.items() if (raw / file).is_file()}
    num_edges = _count(raw / "num-edge-list.csv.gz") if "edge_features" in found else None
    counts = {"features": num_nodes, "edge_features": num_edges}
    arrays = {key: str(_as_npy(path, made, counts[key], progress)) for key, path in found.items()}
    labels = np.concatenate(list(_text_blocks(raw / "node-label.csv.gz", np.float64)))
    if len(labels) != num_nodes:
        raise ValueError(f"{raw / 'node-label.csv.gz'}: {len(labels)} rows, and the graph has {num_nodes} nodes")
    return {
        "num_nodes": num_nodes,
        "stream": stream,
        "labels": labels,
        "edge_features": None,
        "features": None,
    } | arrays


def _of_npz(raw: Path, made: Path) -> dict:
    data = raw / "data.npz"
    counts = _member(data, "num_nodes_list", made)
    if counts.size != 1:
        raise ValueError(f"{data}: holds {counts.size} graphs, and one is read: split them")
    num_nodes, edges = int(counts.reshape(-1)[0]), _member(data, "edge_index", made)
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype.kind not in "iu":
        raise ValueError(f"{data}: edge_index must be (2, num_edges) integers, got {edges.dtype} of {edges.shape}")

    def stream(options: dict):
        given = StreamOptions(**{"num_nodes": num_nodes} | options)
        return ArrayFileStream(Path(edges.filename), edges.dtype, edges.shape[1], False, edges.offset, given)

    rows = {}
    for key, name in (("features", "node_feat"), ("edge_features", "edge_feat")):
        found = _member(data, name, made, needed=False)
        # As a path where it is a file of its own: spawned processes open it instead of receiving the rows.
        own = found is not None and Path(found.filename).suffix == ".npy"
        rows[key] = str(found.filename) if own else found
    return {
        "num_nodes": num_nodes,
        "stream": stream,
        "labels": _member(raw / "node-label.npz", "node_label", made),
        **rows,
    }


def _member(path: Path, name: str, made: Path, needed: bool = True) -> np.memmap | None:
    """Return an array of an .npz, mapped in place, or from a .npy made of it where it is compressed."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; remove {path.parents[1]} and load the data set again")
    try:
        found = map_npz_member(path, name, lambda: _named(path, name, made))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if found is None and needed:
        raise ValueError(f"{path}: has no array {name}, which data sets of OGB have")
    return found


def _named(path: Path, name: str, made: Path) -> Path:
    """Return the file made of an array; its name changes with its source."""
    facts = path.stat()
    digest = hashlib.blake2b(f"{facts.st_size} {facts.st_mtime_ns}".encode(), digest_size=4).hexdigest()
    return made / f"{name}-{digest}.npy"


def _as_npy(path: Path, made: Path, num_rows: int, progress: Progress | None) -> Path:
    """Write the float32 rows of a text file as .npy, whole or not at all, and return its path."""
    target = _named(path, path.name.split(".")[0], made)
    if target.is_file():
        return target
    done = 0
    with whole_file(target) as file:
        for rows in _text_blocks(path, np.float32):
            if done == 0:
                write_npy_header(file, (num_rows, rows.shape[1]), "<f4")
            done += len(rows)
            file.write(np.ascontiguousarray(rows, "<f4"))
            if progress is not None:
                progress(f"read {path.name}", done, num_rows)
        if done != num_rows:
            raise ValueError(f"{path}: {done} rows, where {num_rows} are reported: the file is damaged or cut short")
    return target


def _text_blocks(path: Path, dtype: type) -> Iterator[np.ndarray]:
    """Yield the (rows, columns) numbers of a .csv.gz without a header, a block at a time."""
    import pyarrow as pa
    from pyarrow import csv as text

    if not path.is_file():
        raise ValueError(f"{path}: no such file; remove {path.parents[1]} and load the data set again")
    kind, first = pa.from_numpy_dtype(np.dtype(dtype)), _first_line(path)
    names = [str(place) for place in range(len(first))]
    try:
        with pa.input_stream(str(path), compression="gzip") as file:
            reader = text.open_csv(
                file,
                text.ReadOptions(use_threads=False, column_names=names),
                text.ParseOptions(ignore_empty_lines=False),  # an unknown label
                convert_options=text.ConvertOptions(
                    column_types=dict.fromkeys(names, kind), null_values=["", "nan", "NaN"]
                ),
            )
            for batch in reader:
                if batch.num_rows:
                    yield np.column_stack([column.to_numpy(zero_copy_only=False) for column in batch.columns])
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(f"{path}: damaged, cut short or no numbers: {one_line_of(error)}") from None


def _first_line(path: Path) -> list[str]:
    import gzip

    try:
        with gzip.open(path, "rt") as file:
            line = file.readline()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged or cut short: {one_line_of(error)}") from None
    if not line.strip():
        raise ValueError(f"{path}: the file is empty")
    return line.split(",")


def _count(path: Path) -> int:
    counts = np.concatenate(list(_text_blocks(path, np.int64)))
    if counts.size != 1:
        raise ValueError(f"{path}: holds {counts.size} graphs, and one is read: split them")
    return int(counts.reshape(-1)[0])


def _split(folder: Path, name: str, num_nodes: int) -> np.ndarray:
    """Return (num_nodes,) bool: the nodes that the one folder of `split` lists."""
    splits = sorted(path for path in (folder / "split").glob("*") if path.is_dir())
    if len(splits) != 1:
        raise ValueError(
            f"{folder / 'split'}: one folder with the nodes of each split must be there, got {len(splits)}"
        )
    path = splits[0] / f"{name}.csv.gz"
    listed = np.concatenate(list(_text_blocks(path, np.int64)))
    return as_mask(str(path), listed[:, 0], num_nodes)


def _tell_unread(name: str, raw: Path) -> None:
    unread = sorted(path.name.split(".")[0] for path in raw.glob("node_*.csv.gz"))
    if unread:
        warnings.warn(f"{name}: {', '.join(unread)}: not read", stacklevel=3)


def _download(name: str, folder: Path) -> None:
    """Download and unpack a data set with the functions of the `ogb` package, whole or not at all."""
    package = importlib.util.find_spec("ogb")
    if package is None:
        raise ValueError(
            f"name={name}: {folder} is not there, and the package ogb, which downloads it, is not installed: "
            "pip install ogb, or unpack OGB's archive there"
        )
    with open(Path(package.submodule_search_locations[0]) / "nodeproppred" / "master.csv", newline="") as file:
        table = {row[""]: row for row in csv.DictReader(file)}
    known = [key for key in table["url"] if key and table["is hetero"][key] == "False"]
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}, got {short(name)}")
    from ogb.utils.url import download_url, extract_zip

    folder.parent.mkdir(parents=True, exist_ok=True)
    with held_lock(folder.parent / f".{folder.name}.lock", f"is downloading {name}"):
        if (folder / "raw").is_dir():
            return
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
            try:
                extract_zip(download_url(table["url"][name], place), place)
            except (OSError, RuntimeError, EOFError) as error:
                raise ValueError(
                    f"name={name}: {table['url'][name]} cannot be downloaded ({one_line_of(error)}): unpack it at "
                    f"{folder} yourself"
                ) from None
            shutil.move(Path(place) / table["download_name"][name], folder)
