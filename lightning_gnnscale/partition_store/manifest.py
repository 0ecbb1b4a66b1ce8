"""The manifest of a store: what files there are, of what shape, with what checksum. It is sealed, and written last."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..dataset.columns import EDGE_COLUMNS
from ..dataset.feature_storage import EDGE_STORAGE, FEATURE_STORAGE, row_code
from ..errors import PartitionStoreError, one_line_of
from ..graph import GraphSchema, id_dtype
from .array_file import HEADER_BYTES, checksum, little_endian, npy_header
from .edge_code import BLOCK

FORMAT_VERSION = 5
EDGE_FILES = {*EDGE_COLUMNS, "edge_type"}
EDGE_COUNTS = ("inside", "cut", "components")  # of each part's core, where each edge is listed in both directions
MANIFEST = "manifest.json"
REMEDY = "write the store again with overwrite=True, or restore the file"
SOURCE = "source.json"  # the fingerprint of the input: separate, as it differs between files of the same graph
_SEAL = "seal"
# Of directed graphs, of one node type and edge type, of classes, without such columns, of what is no update, as ids, of
# parts that were made at once.
_MAY_LACK = ("edge_counts", "schema", "regression", "node_columns", "version", "num_edge_classes", "edge_storage")
_MAY_LACK += ("num_machines",)


def describe_files(folder: Path, checksums: Mapping[str, int] | None = None) -> dict[str, dict]:
    """Return dtype, shape and checksum of every .npy file in a folder, by name.

    Args:
        checksums: crc32 by file name, where they are known.

    Cost: one read of the files whose checksums are not given, about 1 GB/s.
    """
    entries = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode=None if path.stat().st_size == HEADER_BYTES else "r")
        entries[path.stem] = {
            "dtype": np.lib.format.dtype_to_descr(little_endian(array.dtype)),
            "shape": list(array.shape),
            "bytes": path.stat().st_size,
            "crc32": checksum(path) if checksums is None else checksums[path.name],
        }
    return entries


def sealed(content: dict) -> dict:
    """Return a JSON object with a digest of its content, by which an edit or a damage of it is seen."""
    return {**content, _SEAL: digest(content)}


def unsealed(text: str | bytes) -> dict:
    """Return the content of a sealed JSON object.

    Raises:
        ValueError: the text is not a JSON object, or not the one that was sealed.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("damaged, nested too deep") from None
    if not isinstance(content, dict) or content.pop(_SEAL, None) != digest(content):
        raise ValueError("damaged, or edited by hand")
    return content


def digest(content: dict) -> str:
    """Return a digest of a JSON object, 16 hexadecimal digits."""
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file so that it is either whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_manifest(folder: Path, manifest: dict, source: dict) -> None:
    """Seal a store: the record of its input first, bound to this manifest, and then the manifest."""
    manifest = sealed(manifest)
    write_json(folder / SOURCE, sealed({**source, "manifest": manifest[_SEAL]}))
    write_json(folder / MANIFEST, manifest)


def read_manifest(root: Path) -> dict:
    """Return the manifest of a finished store whose files have the sizes it states.

    Raises:
        PartitionStoreError: nothing is there, the store is unfinished, of another version, or a file does not fit.
    """
    manifest = read_sealed_manifest(root)
    for name, entry in manifest["files"].items():
        check_size(Path(root) / f"{name}.npy", entry["bytes"])
    return manifest


def read_sealed_manifest(root: Path) -> dict:
    """Return the manifest in a folder, whose files are not looked at; raises as `read_manifest` does."""
    root = Path(root)
    path = root / MANIFEST
    if not path.is_file():
        raise PartitionStoreError(_what_is_missing(root))
    manifest = _read_sealed(path)
    wrong = wrong_field(manifest) or wrong_files(manifest)
    if wrong:
        raise PartitionStoreError(f"{path}: damaged ({wrong}); {REMEDY}")
    if not (root / SOURCE).is_file():
        raise PartitionStoreError(f"{root / SOURCE}: is missing; {REMEDY}")
    if _read_sealed(root / SOURCE).get("manifest") != digest(manifest):
        raise PartitionStoreError(f"{root / SOURCE}: belongs to another store; {REMEDY}")
    return manifest


def check_size(path: Path, wanted: int) -> None:
    """Raise PartitionStoreError unless a file of a store is there with its size."""
    size = path.stat().st_size if path.is_file() else None
    if size != wanted:
        found = "is missing" if size is None else f"has {size} bytes instead of {wanted}"
        raise PartitionStoreError(f"{path}: {found}; {REMEDY}")


def check_file(root: Path, name: str, entry: dict) -> None:
    """Read a file of a store and compare it with its entry in the manifest.

    Raises:
        PartitionStoreError: its size, header or content differs.

    Cost: one read, about 1 GB/s.
    """
    path = root / f"{name}.npy"
    check_size(path, entry["bytes"])
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if header != npy_header(np.dtype(entry["dtype"]), tuple(entry["shape"])):
        raise PartitionStoreError(f"{path}: its header is damaged; {REMEDY}")
    if checksum(path) != entry["crc32"]:
        raise PartitionStoreError(f"{path}: its content is damaged (crc32 differs); {REMEDY}")


def is_whole(root: Path) -> bool:
    """Return whether a finished store is in a folder, with every byte as its manifest says."""
    try:
        for name, entry in read_manifest(root)["files"].items():
            check_file(root, name, entry)
    except (PartitionStoreError, OSError):
        return False
    return True


def read_source(root: Path) -> dict:
    """Return the record of a store's input: its fingerprint, and the checksum of part_id; {} if it is not there."""
    try:
        source = unsealed((Path(root) / SOURCE).read_bytes())
    except (OSError, ValueError):
        return {}
    source.pop("manifest", None)
    return source


def _read_sealed(path: Path) -> dict:
    """Return the content of a sealed file of this version of the format, or say in one line what is wrong with it."""
    text = path.read_bytes()
    try:
        version = json.loads(text).get("format_version", FORMAT_VERSION)
    except (ValueError, AttributeError, RecursionError):
        raise PartitionStoreError(f"{path}: damaged; {REMEDY}") from None
    if version != FORMAT_VERSION:
        raise PartitionStoreError(
            f"{path.parent}: store of format {version}, this version reads {FORMAT_VERSION}; write it again with "
            "overwrite=True, or use the version that wrote it"
        )
    try:
        return unsealed(text)
    except ValueError as error:
        raise PartitionStoreError(f"{path}: {error}; {REMEDY}") from None


def wrong_field(manifest: dict) -> str | None:
    """Return the field of a manifest that is missing, of another type or out of range, or None."""
    checks: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("num_nodes", "num_arcs"), lambda value: _is_count(value)),
        "num_parts": lambda value: _is_count(value) and value > 0,
        **dict.fromkeys(
            ("symmetric", "to_undirected", "remove_self_loops", "pack_halo"), lambda value: isinstance(value, bool)
        ),
        "method": lambda value: isinstance(value, str),
        "seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
        "masks": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "feature_dim": lambda value: value is None or _is_count(value),
        "feature_storage": lambda value: value is None or value in FEATURE_STORAGE,
        "edge_storage": lambda value: value is None or value in EDGE_STORAGE,
        "least_edge_weight": lambda value: value is None or isinstance(value, float),
        "edge_counts": _are_edge_counts,
        "schema": lambda value: value is None or _is_schema(value),
        "regression": lambda value: isinstance(value, bool),
        "node_columns": _are_node_columns,
        "version": _is_version,
        "num_edge_classes": _is_count,
        "num_machines": lambda value: _is_count(value) and value > 0 and manifest["num_parts"] % value == 0,
        "files": lambda value: isinstance(value, dict) and all(_is_entry(entry) for entry in value.values()),
    }
    for name, fits in checks.items():
        if name not in manifest and name in _MAY_LACK:
            continue
        if name not in manifest:
            return f"{name} is missing"
        if name == "schema" and isinstance(manifest[name], dict):
            try:
                GraphSchema.of_json(manifest[name])
            except (KeyError, TypeError, ValueError) as error:
                return f"schema: {one_line_of(error)[:200]}"
        if not fits(manifest[name]):
            return f"{name} is {str(manifest[name])[:80]}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_edge_counts(value: Any) -> bool:
    lists = [value.get(name) for name in EDGE_COUNTS] if isinstance(value, dict) else [None]
    return all(isinstance(one, list) and len(one) == len(lists[0]) and all(map(_is_count, one)) for one in lists)


def _are_node_columns(value: Any) -> bool:
    if not isinstance(value, dict) or not all(name.isidentifier() for name in value):
        return False
    widths = (width if isinstance(width, list) else [width] for width in value.values())
    return all(one is None or _is_count(one) for width in widths for one in width)


def _is_version(value: Any) -> bool:
    """Whether an entry has the form of `version_record` in `versions`."""
    try:
        parent, cut = value["parent"], value["cut"]
        counts = [value["number"], parent["num_nodes"], *value["counts"].values()]
        shares = [*cut.values(), *value["balance"].values()]
        texts = [value["change"], parent["name"], parent["layout"], parent["manifest"]]
    except (KeyError, TypeError, AttributeError):
        return False
    return (
        all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
        and all(isinstance(share, float | int) for share in shares)
        and {"first", "before", "after"} <= set(cut)
        and all(isinstance(text, str) for text in texts)
        and "/" not in parent["name"]
        and isinstance(value["renumbered"], bool)
    )


def _is_schema(value: Any) -> bool:
    try:
        schema = GraphSchema.of_json(value)
        sizes, dims = value["kind_sizes"], value["feature_dims"]
    except (KeyError, TypeError, ValueError):
        return False
    num_types = schema.num_node_types
    names = (*schema.node_types, *(name for edge_type in schema.edge_types for name in edge_type))
    return (
        all(isinstance(name, str) for name in names)
        and isinstance(sizes, list)
        and len(sizes) == num_types
        and all(_is_count(size) for size in sizes)
        and (dims is None or (isinstance(dims, list) and len(dims) == num_types))
        and all(width is None or _is_count(width) for width in dims or ())
    )


def _is_entry(entry: Any) -> bool:
    """Whether an entry of `files` has the form it must have, and as many bytes as its shape says."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "bytes", "crc32"} <= set(entry):
        return False
    shape = entry["shape"]
    if not isinstance(shape, list) or not shape or not all(_is_count(size) for size in shape):
        return False
    try:
        dtype = np.dtype(entry["dtype"])
    except (TypeError, ValueError):
        return False
    wanted = HEADER_BYTES + dtype.itemsize * int(np.prod([int(size) for size in shape], dtype=object))
    return dtype.kind in "fiub" and entry["bytes"] == wanted and _is_count(entry["crc32"])


def wrong_files(manifest: dict) -> str | None:
    """Return what does not fit between the files of a manifest and its counts, or None."""
    files, nodes, edges = manifest["files"], manifest["num_nodes"], manifest["num_arcs"]
    ids, dim = id_dtype(nodes), manifest["feature_dim"]
    has_edge_arrays = not EDGE_FILES.isdisjoint(files)
    expected: dict[str, tuple[Any, tuple]] = {
        "part_offsets": (np.int64, (manifest["num_parts"] + 1,)),
        "original_nid": (ids, (nodes,)),
        "store_nid": (ids, (nodes,)),
        "csc_indptr": (np.int64, (nodes + 1,)),
        "csc_indices": (ids, (edges,)),
        "halo_offsets": (np.int64, (manifest["num_parts"] + 1,)),
        "in_degree": (np.uint8, (nodes,)),
        **{f"mask_{name}": (np.bool_, (nodes,)) for name in manifest["masks"]},
    }
    if manifest.get("edge_storage") is not None:
        del expected["csc_indices"]
        expected |= {"csc_code": (np.uint8, (None,)), "csc_code_offsets": (np.int64, (-(-edges // BLOCK) + 1,))}
    if has_edge_arrays or not manifest["symmetric"]:
        expected["halo_code"] = (np.uint8, (None,))
        expected["halo_code_offsets"] = (np.int64, (manifest["num_parts"] + 1,))
    schema = manifest.get("schema")
    if schema is not None and sum(schema["kind_sizes"]) != nodes:
        return f"schema.kind_sizes add up to {sum(schema['kind_sizes'])}, and there are {nodes} nodes"
    sizes, dims = ([], []) if schema is None else (schema["kind_sizes"], schema["feature_dims"] or [])
    tables = _tables("features", dims if schema is not None and schema["feature_dims"] else dim, nodes, sizes)
    for prefix, _, rows, _ in tables if manifest["pack_halo"] else ():
        own, packed = id_dtype(rows), (_length(files, f"{prefix}halo_nodes"),)
        expected |= {f"{prefix}halo_nodes": (own, packed), f"{prefix}halo_places": (np.int32, packed)}
        expected[f"{prefix}halo_count"] = (np.uint8, (rows,))
        if prefix:
            expected[f"{prefix}halo_offsets"] = (np.int64, (manifest["num_parts"] + 1,))
    if manifest["least_edge_weight"] is not None:
        expected |= {"edge_weight": (np.float32, (edges,)), "weighted_degree": (np.float32, (nodes,))}
    for name, column in EDGE_COLUMNS.items():
        if name in files and name != "edge_weight":
            expected[name] = (column.dtype, (edges, None)[: column.num_dims])
    if not {"self_loop_nodes", "self_loop_weight"}.isdisjoint(files):
        looped = (_length(files, "self_loop_nodes"),)
        expected |= {"self_loop_nodes": (ids, looped), "self_loop_weight": (np.float32, looped)}
    if "node_time" in files:
        expected["node_time"] = (np.int64, (nodes,))
    if schema is not None:
        expected["edge_type"] = (np.uint8 if len(schema["edge_types"]) <= 256 else np.uint16, (edges,))
        expected["kind_starts"] = (np.int64, (manifest["num_parts"] * len(schema["node_types"]) + 1,))
    if "labels" in files:
        several = len(files["labels"]["shape"]) == 2
        expected["labels"] = (np.float32, (nodes, None)) if several else (np.int64, (nodes,))
    for name, widths in manifest.get("node_columns", {}).items():
        if isinstance(widths, list) and len(widths) != len(sizes):
            return f"node_columns: {name} has {len(widths)} widths for {len(sizes)} node types"
        tables += _tables(f"column_{name}", widths, nodes, sizes)
    for prefix, stem, rows, width in tables:
        code = row_code(manifest["feature_storage"], width) if stem == "features" else None
        named = [(f"{prefix}{stem}", rows)]
        if manifest["pack_halo"] and stem == "features":
            named.append((f"{prefix}halo_features", _length(files, f"{prefix}halo_nodes")))
        for name, num_rows in named:
            values = _length(files, f"{name}_data")
            sparse = {
                f"{name}_indptr": (np.int64, (num_rows + 1,)),
                f"{name}_indices": (np.int32, (values,)),
                f"{name}_data": (None, (values,)),
            }
            dense = (None, (num_rows, width)) if code is None else (np.uint8, (num_rows, code.row_bytes))
            expected |= sparse if f"{name}_indptr" in files else {name: dense}
    if "version" in manifest:
        expected["node_changes"] = (np.uint8, (nodes,))
        if manifest["version"]["renumbered"]:
            expected["parent_nid"] = (None, (nodes,))
    if "user_id_offsets" in files:
        expected |= {"user_id_offsets": (np.int64, (nodes + 1,)), "user_id_bytes": (np.uint8, (None,))}
    elif "user_ids" in files:
        expected["user_ids"] = (None, (nodes,))
    if set(files) != set(expected):
        return f"files: {sorted(set(files) ^ set(expected))[0]} does not go with the rest"
    for name, (dtype, shape) in expected.items():
        entry = files[name]
        fits = len(entry["shape"]) == len(shape) and all(
            size in (None, found) for size, found in zip(shape, entry["shape"], strict=True)
        )
        if not fits or (dtype is not None and np.dtype(entry["dtype"]) != little_endian(dtype)):
            return f"files: {name} is {entry['dtype']} of shape {entry['shape']}"
    return None


def _tables(stem: str, widths: int | list | None, nodes: int, sizes: list[int]) -> list[tuple[str, str, int, int]]:
    """Return (prefix, stem, rows, width) of each table of a column: of all nodes, or one a node type that has some."""
    if not isinstance(widths, list):
        return [] if widths is None else [("", stem, nodes, widths)]
    numbered = enumerate(zip(sizes, widths, strict=True))
    return [(type_prefix(number), stem, rows, width) for number, (rows, width) in numbered if width is not None]


def type_prefix(node_type: int | None) -> str:
    """Return the prefix of the names of a node type's own files; "" for None, where all nodes have one table."""
    return "" if node_type is None else f"kind{node_type}_"


def without_prefix(name: str) -> str:
    """Return the name of a file without the prefix of a node type."""
    prefix, _, stem = name.partition("_")
    return stem if prefix.startswith("kind") and prefix[len("kind") :].isdigit() else name


def _length(files: dict, name: str) -> int:
    return files[name]["shape"][0] if name in files else 0


def _what_is_missing(root: Path) -> str:
    partial = root.with_name(root.name + ".partial")
    if partial.is_dir():
        return (
            f"{root}: the store is not finished ({partial} holds what is done);"
            " run the command that writes it again: it goes on from there"
        )
    if root.is_dir():
        return f"{root}: no {MANIFEST} in this folder, so it is not a partition store; check the path"
    return f"{root}: no such partition store; make one with write_partition_store or `gnnscale partition`"
