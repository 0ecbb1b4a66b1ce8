"""Damaged input files: read as a plain reader reads them, or refused in one line that names the file; nothing else.

The plain readers are Python's, numpy's and pyarrow's own, with their checks. GNNSCALE_FUZZ_CASES sets another number of
cases than the quick one.
"""

import gzip
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

from lightning_gnnscale.dataset import load_files, load_npz
from lightning_gnnscale.dataset.columns import load_arrays, load_features
from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.errors import GNNScaleError

NUM_NODES, NUM_EDGES = 40, 300
NUM_CASES = int(os.environ.get("GNNSCALE_FUZZ_CASES", settings.default.max_examples))
SEPARATORS = {"csv": ",", "tsv": "\t", "txt": " "}
EDGE_KINDS = ["npy", "pairs.npy", "fortran.npy", "int32.npy", "bin", "csv", "tsv", "txt", "csv.gz", "txt.gz", "parquet"]
EDGE_KINDS += ["header.csv", "folder.parquet"]
RELABELLED = ["relabel.csv", "names.tsv", "names.parquet"]
ARRAY_KINDS = ["features", "labels", "several_labels", "train_mask", "mask_of_ids", "edge_weight", "edge_features"]
KINDS = [*EDGE_KINDS, *RELABELLED, *ARRAY_KINDS, "npz"]


def table(sample, kind):
    """Return the array behind a file of one kind."""
    if kind in EDGE_KINDS or kind in RELABELLED:
        edges = sample.integers(0, NUM_NODES, (NUM_EDGES, 2))
        return {
            "npy": edges.T.copy(),
            "fortran.npy": np.asfortranarray(edges),
            "int32.npy": edges.astype(np.int32),
        }.get(kind, edges)
    if kind == "features":
        return sample.standard_normal((NUM_NODES, 5)).astype(np.float32)
    if kind == "labels":
        return sample.integers(-1, 4, NUM_NODES)
    if kind == "several_labels":
        return sample.integers(0, 2, (NUM_NODES, 3))
    if kind == "train_mask":
        return sample.random(NUM_NODES) < 0.5
    if kind == "mask_of_ids":
        return sample.permutation(NUM_NODES)[:10]
    if kind == "edge_features":
        return sample.standard_normal((NUM_EDGES, 3)).astype(np.float32)
    return sample.random(NUM_EDGES)


def rewritten(sample, array):
    """Return an array of another type, byte order, memory order or column order, of the same shape."""
    way = sample.integers(6)
    if way == 0:
        return array[..., ::-1].copy()
    if way == 1:
        return array.astype(array.dtype.newbyteorder(">"))
    if way == 2:
        return np.asfortranarray(array)
    if way == 3:
        return array.astype(sample.choice(["float64", "int8", "uint64", "uint16", "bool", "U5", "complex64", "S3"]))
    if way == 4:
        return array.astype(object)
    return array.reshape(array.shape[::-1]) if array.ndim > 1 else array[: len(array) // 2]


def write(sample, folder, kind, array):
    """Write an array as one kind of file, and return the path."""
    name = "gène-{}" if kind.startswith("names") else "{}"
    if separator_of(kind):
        separator = separator_of(kind)
        pairs = [[name.format(u), name.format(v)] for u, v in array.reshape(-1, 2).tolist()]
        head = [["src", "dst"]] if kind == "header.csv" else []
        text = "".join(f"{u}{separator}{v}\n" for u, v in head + pairs).encode()
        path = folder / f"edges.{kind}"
        path.write_bytes(gzip.compress(text) if kind.endswith(".gz") else text)
    elif kind == "bin":
        path = folder / "edges.bin"
        array.tofile(path)
    elif kind.endswith("parquet"):
        path = folder / "edges.parquet"
        if kind == "folder.parquet":
            (folder / "edges").mkdir()
            path = folder / "edges" / "0.parquet"
            pq.write_table(pa.table({"src": [1, 2], "dst": [3, 4]}), folder / "edges" / "1.parquet")
        ids = [[name.format(u) if kind == "names.parquet" else u for u in column] for column in array.T.tolist()]
        compression = str(sample.choice(["none", "snappy", "zstd"]))
        options = {"compression": compression, "write_page_checksum": True, "row_group_size": 100}
        pq.write_table(pa.table({"src": ids[0], "dst": ids[1]}), path, **options)
    elif kind == "npz":
        path = folder / "graph.npz"
        arrays = {"edge_index": sample.integers(0, NUM_NODES, (2, NUM_EDGES)), "y": sample.integers(0, 3, NUM_NODES)}
        arrays["x"] = sample.standard_normal((NUM_NODES, 4))
        (np.savez if sample.random() < 0.5 else np.savez_compressed)(path, **arrays)
    else:
        path = folder / (f"edges.{kind}" if kind in EDGE_KINDS else f"{kind}.npy")
        np.save(path, array, allow_pickle=True)
    return path


def damaged(sample, data):
    """Return bytes with some flipped bits, some cut off, put in, taken out or repeated."""
    data, way = bytearray(data), sample.integers(7)
    # Heads, where formats describe themselves, are hit as often as all the rest.
    place = int(sample.integers(min(len(data), 200) if sample.random() < 0.5 else len(data)))
    length = int(sample.integers(1, 9))
    if way <= 1:
        for _ in range(1 if way else length):
            data[place] ^= 1 << int(sample.integers(8))
            place = int(sample.integers(len(data)))
    elif way == 2:
        del data[place:]
    elif way == 3:
        del data[place : place + length]
    elif way == 4:
        data[place:place] = bytes(sample.integers(0, 256, length, np.uint8))
    elif way == 5:
        data[place : place + length] = bytes(
            sample.choice([b'"', b"\r", b"\0", b"0x", b"+", b"_", b"\n", b"#", b"\xff"])
        )
    else:
        data[place:place] = data[place : place + 10 * length]
    return bytes(data)


def separator_of(kind):
    """Return what separates the fields of a kind of text; None of what is no text."""
    return SEPARATORS.get(kind.removesuffix(".gz").split(".")[-1])


def plain_text(path, separator, relabel, header):
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).split(b"\n")
    rows = [line.removesuffix(b"\r") for line in lines if line.strip() and line.strip()[:1] not in (b"#", b"%")]
    rows = [
        re.split(rb"[ \t]+", row.strip(b" \t")) if separator == " " else row.split(separator.encode()) for row in rows
    ]
    rows = [[field.strip(b" \t").decode() for field in row] for row in rows]
    if header:
        assert [len(row) for row in rows[:1]] == [2] and rows[0][0] != rows[0][1]
        rows = [[row[rows[0].index(name)] for name in ("src", "dst")] for row in rows[1:] if len(row) == 2 or 1 / 0]
    assert len({len(row) for row in rows}) == 1 and all(field for row in rows for field in row[:2])
    if relabel and not all(re.fullmatch(r"-?[0-9]+", field) for row in rows for field in row[:2]):
        return [row[:2] for row in rows]
    assert all(re.fullmatch(r"-?[0-9]+", field) for row in rows for field in row[:2])
    return [[int(field) for field in row[:2]] for row in rows]


def plain_edges(path, kind):
    """Return the edges as the plainest reader finds them; whatever it raises means that there are none."""
    if separator_of(kind):
        return plain_text(path, separator_of(kind), kind in RELABELLED, kind == "header.csv")
    if kind == "bin":
        assert path.stat().st_size % 16 == 0
        return np.fromfile(path, np.int64).reshape(-1, 2).tolist()
    if kind.endswith("parquet"):
        read = pq.ParquetFile(path, page_checksum_verification=True).read()
        if kind == "folder.parquet":
            read = pa.concat_tables([read, pq.read_table(path.with_name("1.parquet"))], promote_options="permissive")
        return [list(pair) for pair in zip(read["src"].to_pylist(), read["dst"].to_pylist(), strict=True)]
    array = np.load(path, allow_pickle=False)
    assert array.dtype.kind in "iu" and array.ndim == 2 and 2 in array.shape
    return (array.T if array.shape[0] == 2 else array).tolist()


def own_edges(sample, path, kind):
    options = {"dtype": "int64"} if kind == "bin" else {}
    if separator_of(kind):
        options = {"separator": separator_of(kind), "header": kind == "header.csv"}
    if kind == "header.csv":
        options |= {"src": "src", "dst": "dst"}
    relabel = kind in RELABELLED
    path = path.parent if kind == "folder.parquet" else path
    stream = open_edge_stream(path, chunk_edges=int(sample.choice([1, 7, 64, 1000])), relabel=relabel, **options)
    edges = np.concatenate([np.stack([chunk.src, chunk.dst], 1) for chunk in stream.chunks()])
    if relabel:
        return np.array(stream.node_ids.plain(edges.ravel()), dtype=object).reshape(-1, 2).tolist()
    return edges.tolist()


def own_array(folder, path, kind):
    """Return what a data set of this one file, beside sound edges, holds of it."""
    edges = folder / "sound.npy"
    np.save(edges, np.arange(2 * NUM_EDGES).reshape(2, NUM_EDGES) % NUM_NODES)
    key = {"several_labels": "labels", "mask_of_ids": "train_mask"}.get(kind, kind)
    dataset = load_files(str(edges), num_nodes=NUM_NODES, **{key: str(path)})
    if key == "features":
        return load_features(dataset.features, NUM_NODES)
    if key == "train_mask":
        return dataset.masks["train"]
    if key == "labels":
        return dataset.labels
    return load_arrays(dataset.stream, dataset)[key]  # paths: the store's writer reads them


def plain_array(path, kind):
    array = np.load(path, allow_pickle=False)
    assert isinstance(array, np.ndarray)
    if kind in ("train_mask", "mask_of_ids") and array.dtype != bool:
        assert array.dtype.kind in "iu" and len(set(array.tolist())) == len(array)
        mask = np.zeros(NUM_NODES, bool)
        mask[array] = True
        return mask
    return array


def same(own, plain):
    """Whether two arrays hold the same values, to the bit; single labels may be one column."""
    own, plain = np.asarray(own), np.asarray(plain)
    return own.shape == plain.reshape(own.shape).shape and np.array_equal(
        own, plain.reshape(own.shape), equal_nan=own.dtype.kind in "fc"
    )


def own_and_plain(sample, folder, path, kind):
    """Return two functions: the product's reading and the plain one."""
    if kind == "npz":

        def own():
            dataset = load_npz(str(path), to_undirected=False)
            edges = np.concatenate([np.stack([c.src, c.dst]) for c in dataset.stream.chunks()], axis=1)
            return {"edge_index": edges, "x": dataset.features, "y": dataset.labels}

        def plain():
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)

        return own, plain
    if kind in ARRAY_KINDS:
        return lambda: own_array(folder, path, kind), lambda: plain_array(path, kind)
    return lambda: own_edges(sample, path, kind), lambda: plain_edges(path, kind)


def verdict(sample, folder, kind):
    """Damage one file, read it both ways, and return "same" or "refused"; anything else fails."""
    array = table(sample, kind)
    rewrites = kind != "npz" and not kind.endswith(".gz") and sample.random() < 0.25
    if rewrites:
        array = rewritten(sample, array)
        if array.dtype == object and kind == "bin":
            return "refused"  # a raw file holds no objects
    path = write(sample, folder, kind, array)
    if not rewrites:
        path.write_bytes(damaged(sample, path.read_bytes()))
    own, plain = own_and_plain(sample, folder, path, kind)
    try:
        found = own()
    except (GNNScaleError, ValueError) as error:
        told = str(error)
        assert "\n" not in told and path.name in told, told
        return "refused"
    try:
        wanted = plain()
    except Exception as error:
        raise AssertionError(f"read, though a plain reader says {error!r}: {path}") from error
    if kind == "npz":
        assert all(same(found[name], wanted[name]) for name in ("edge_index", "x", "y") if name in wanted)
        assert all(found[name] is None for name in ("x", "y") if name not in wanted)
    elif kind in ARRAY_KINDS:
        assert same(found, wanted)
    else:
        assert found == wanted
    return "same"


def fuzz(folder, first, num_cases):
    counts = {"same": 0, "refused": 0}
    for number in range(first, first + num_cases):
        sample, case = np.random.default_rng([17, number]), Path(folder / f"case{number}")
        case.mkdir()
        kind = KINDS[number % len(KINDS)]
        try:
            counts[verdict(sample, case, kind)] += 1
        except Exception as error:
            raise AssertionError(f"case {number}, {kind}, {case}: {error!r}") from error
    return counts


@pytest.mark.filterwarnings("ignore")
def test_damaged_inputs_are_read_as_they_stand_or_refused(tmp_path):
    counts = fuzz(tmp_path, 0, NUM_CASES)
    print(counts)
    assert min(counts.values()) > NUM_CASES // 20
