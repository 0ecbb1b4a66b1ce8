"""Damaged stores, and writers that are killed and then damaged: refused in one line, or the very same content.

`GNNSCALE_FUZZ=1000` sets the number of damaged stores, each of which is read in three ways, `GNNSCALE_FUZZ_KILLS=100`
that of killed writers.
"""

import hashlib
import json
import os
import pickle
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from lightning_gnnscale.edge_stream import NodeIds, open_edge_stream
from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.partition_store import PartitionStore, WriteBudget, write_partition_store
from lightning_gnnscale.partition_store.block_rows import load_block_rows
from lightning_gnnscale.partition_store.verify import compare_once
from tests.partition_store.small_graphs import Given, all_bytes, reseal

NUM_STORES = int(os.environ.get("GNNSCALE_FUZZ", settings.default.max_examples // 3))
NUM_KILLS = int(os.environ.get("GNNSCALE_FUZZ_KILLS", 6))
NUM_NODES, NUM_EDGES, NUM_PARTS = 90, 500, 3
KINDS = ("dense", "sparse")


def write(root, kind, progress=None):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, NUM_NODES, (2, NUM_EDGES))
    edges[:, :NUM_NODES] = np.arange(NUM_NODES)
    names = np.array([f"node-{i}" for i in range(NUM_NODES)])
    stream = open_edge_stream(edges, num_nodes=NUM_NODES, chunk_edges=100)
    if kind == "sparse":
        stream.node_ids = NodeIds.of(names)
        features = (
            np.arange(0, 2 * NUM_NODES + 1, 2),
            np.arange(2 * NUM_NODES) % 9,
            np.ones(2 * NUM_NODES, np.float32),
        )
        features = (*features, (NUM_NODES, 9))
    else:
        features = rng.random((NUM_NODES, 4), dtype=np.float32)
    return write_partition_store(
        root,
        stream,
        Given(rng.integers(0, NUM_PARTS, NUM_NODES).astype(np.int32), NUM_PARTS),
        features=features,
        labels=np.arange(NUM_NODES) % 5,
        masks={"train": np.arange(NUM_NODES) % 2 == 0},
        edge_weight=rng.random(NUM_EDGES),
        pack_halo=True,
        progress=progress,
        budget=WriteBudget(spill_edges=150, sort_edges=200, block_bytes=500, checkpoint_bytes=1),
    )


def content(root) -> str:
    """A digest of all that readers get from a store."""
    store, digest = PartitionStore.open(root), hashlib.blake2b()

    def add(*values):
        for value in values:
            digest.update(pickle.dumps(np.asarray(value)))

    add(store.csc.indptr, store.csc.indices, store.labels, store.masks["train"], store.edge_weight)
    add(store.user_ids(np.arange(NUM_NODES)).astype(str), store.weighted_degree, store.original_nid, store.store_nid)
    add(store.symmetric, store.num_edges, store.least_edge_weight)
    for part in range(store.num_parts):
        for hops in (0, 1, 2):
            graph = store.load_part(part, hops)
            both = graph.symmetrised()
            add(graph.halo_nodes, *graph.csc, graph.degree, graph.edge_id, *both.csc)
        rows = store.load_features(graph)
        add(*([rows] if isinstance(rows, np.ndarray) else [rows.indptr, rows.indices, rows.data, rows.dense()]))
    for rank in range(2):
        block = load_block_rows(store, rank, 2)
        add(*block.csc, block.halo_nodes, *block.send_rows, block.degree)
    return digest.hexdigest()


def verified(root) -> str:
    PartitionStore.open(root).verify()
    return content(root)


def compared(root) -> str:
    compare_once(PartitionStore.open(root))
    return content(root)


def in_child(work) -> tuple[str, str]:
    """Run work in a forked process: ("same", its result), ("refused", the line), or what must never be."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = ("same", work())
        except PartitionStoreError as error:
            told = ("refused" if "\n" not in str(error) else "several lines", str(error))
        except BaseException as error:
            told = ("traceback", repr(error))
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}", ""
    return tuple(json.loads(text))


def damage(folder: Path, rng) -> str:
    """Damage a file of a folder in some way; return what was done."""
    paths = sorted(path for path in folder.iterdir() if path.name != "writer.txt")
    path, other = (paths[i] for i in rng.choice(len(paths), 2, replace=False))
    data = bytearray(path.read_bytes())
    size = len(data)
    begin = int(rng.integers(size))
    end = min(size, begin + int(rng.integers(1, 65)))
    what = ("flip", "zero", "fill", "truncate", "extend", "delete", "swap", "empty")[int(rng.integers(8))]
    if what == "flip":
        data[begin] ^= 1 << int(rng.integers(8))
    elif what == "zero":
        data[begin:end] = bytes(end - begin)
    elif what == "fill":
        data[begin:end] = rng.bytes(end - begin)
    elif what == "truncate":
        del data[begin:]
    elif what == "extend":
        data += rng.bytes(end - begin)
    elif what == "empty":
        data[128:] = bytes(max(size - 128, 0))
    elif what == "swap":
        data, swapped = other.read_bytes(), bytes(data)
        other.write_bytes(swapped)
    path.write_bytes(data)
    if what == "delete":
        path.unlink()
    return f"{what} {path.name}" + (f" {other.name}" if what == "swap" else "")


def edit(root: Path, rng) -> str:
    """Change a field of the manifest, and seal it again or not."""
    fields = {"num_nodes": 89, "num_arcs": 3, "num_parts": 2, "symmetric": 1, "masks": [], "feature_dim": 3}
    fields |= {"least_edge_weight": None, "pack_halo": False, "files": {}, "seed": "x", "num_nodes ": -1, "method": 3}
    name = sorted(fields)[int(rng.integers(len(fields)))]
    change = {name.strip(): fields[name]}
    if rng.integers(2):
        reseal(root, lambda manifest: manifest.update(change))
        return f"sealed edit {change}"
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps(manifest | change))
    return f"edit {change}"


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    roots = {kind: write(tmp_path_factory.mktemp(kind) / "store", kind).root for kind in KINDS}
    return {kind: (root, content(root)) for kind, root in roots.items()}


def test_a_damaged_store_is_refused_or_the_same(no_disk_wait, wholes, tmp_path):
    rng, outcomes, wrong, root = np.random.default_rng(0), Counter(), [], tmp_path / "store"
    for number in range(NUM_STORES):
        kind = KINDS[number % 2]
        whole, expected = wholes[kind]
        shutil.copytree(whole, root)
        done = edit(root, rng) if rng.random() < 0.1 else damage(root, rng)
        for name, work in (("plain", content), ("train", compared), ("verify", verified)):
            outcome, told = in_child(lambda work=work: work(root))
            if outcome == "same" and told != expected:
                outcome = "other content"
            outcomes[name, outcome] += 1
            if outcome not in ("same", "refused"):
                wrong.append((number, kind, done, name, outcome, told))
        shutil.rmtree(root)
        (tmp_path / "store.verified.json").unlink(missing_ok=True)
    print(dict(outcomes))
    assert not wrong
    assert outcomes["verify", "refused"] > NUM_STORES / 2


def test_columns_beyond_the_features_are_refused(no_disk_wait, wholes, tmp_path):
    root = shutil.copytree(wholes["sparse"][0], tmp_path / "store")
    reseal(root, lambda manifest: manifest.update(feature_dim=3))
    for _ in range(2):  # the second one finds the note of the first
        outcome, told = in_child(lambda: PartitionStore.open(root).verify())
        assert outcome == "refused" and "features_indices.npy: names what does not exist" in told


def test_a_store_that_changes_once_it_was_compared_crashes_nobody(no_disk_wait, wholes, tmp_path):
    """Damage that leaves size and times as they were passes the note; what compiled loops follow is still checked."""
    rng = np.random.default_rng(1)
    names = ("csc_indptr", "csc_indices", "halo_nodes", "halo_code", "halo_code_offsets", "halo_offsets", "in_degree")
    for name in names:
        for _ in range(3):
            root = tmp_path / "store"
            shutil.copytree(wholes["dense"][0], root)
            array = np.load(root / f"{name}.npy", mmap_mode="r+")
            most = np.iinfo(array.dtype).max
            array[int(rng.integers(len(array)))] = (np.iinfo(array.dtype).min, most, most >> 1)[int(rng.integers(3))]
            array.flush()

            def load(root=root):
                store = PartitionStore.open(root)
                return [len(store.load_part(part).halo_nodes) for part in range(NUM_PARTS)]

            outcome, told = in_child(load)
            assert outcome in ("refused", "same"), (name, told)
            assert outcome == "refused" or name in ("halo_nodes", "halo_code", "in_degree")  # no loop follows these
            shutil.rmtree(root)


@pytest.mark.sweep
def test_a_killed_and_damaged_writer_ends_in_the_same_bytes(no_disk_wait, wholes, tmp_path):
    rng, outcomes, wrong, root = np.random.default_rng(2), Counter(), [], tmp_path / "store"
    calls = {}
    for kind in KINDS:
        counted = []
        write(tmp_path / f"counted-{kind}", kind, progress=lambda *_, counted=counted: counted.append(1))
        calls[kind] = len(counted)
    for number in range(NUM_KILLS):
        kind = KINDS[number % 2]
        left = int(rng.integers(1, calls[kind] + 1))

        def die(*_, count=[left]):  # noqa: B006
            count[0] -= 1
            if count[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        killed, told = in_child(lambda kind=kind, die=die: str(write(root, kind, progress=die).root))
        assert killed == "signal 9", told
        done = [damage(tmp_path / "store.partial", rng) for _ in range(int(rng.integers(1, 3)))]
        outcome, told = in_child(lambda kind=kind: str(write(root, kind).root))
        if outcome == "same" and all_bytes(root) != all_bytes(wholes[kind][0]):
            outcome = "other bytes"
        outcomes[outcome] += 1
        if outcome not in ("same", "refused"):
            wrong.append((number, kind, left, done, outcome, told))
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(tmp_path / "store.partial", ignore_errors=True)
    print(dict(outcomes))
    assert not wrong
