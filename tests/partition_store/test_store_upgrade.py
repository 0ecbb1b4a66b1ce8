"""Stores of formats 2 and 3, as earlier releases wrote them: refused with a remedy, and upgraded where they lie."""

import json
import shutil

import numpy as np
import pytest

from lightning_gnnscale.edge_stream import open_edge_stream
from lightning_gnnscale.errors import PartitionStoreError
from lightning_gnnscale.partition_store import PartitionStore, upgrade, upgrade_store, write_partition_store
from lightning_gnnscale.partition_store.manifest import SOURCE, describe_files, sealed, write_json, write_manifest
from tests.own_process import gnnscale
from tests.partition_store.small_graphs import Given, all_bytes
from tests.partition_store.test_store_damage import content
from tests.tiers import first

NUM_NODES, NUM_PARTS = 90, 3
WEIGHTS = np.random.default_rng(1).random(500, dtype=np.float32)
KINDS = {
    "undirected": {"to_undirected": True},
    "directed": {},
    "undirected and weighted": {"to_undirected": True, "edge_weight": WEIGHTS},
    "directed, weighted, packed": {"edge_weight": WEIGHTS, "pack_halo": True},
    "packed": {"to_undirected": True, "pack_halo": True},
    "no cross arcs": {"filled_parts": 1, "pack_halo": True, "edge_weight": np.ones(500)},
}


def write(root, to_undirected=False, filled_parts=NUM_PARTS, **options):
    rng = np.random.default_rng(0)
    stream = open_edge_stream(rng.integers(0, NUM_NODES, (2, 500)), num_nodes=NUM_NODES, to_undirected=to_undirected)
    parts = Given(rng.integers(0, filled_parts, NUM_NODES).astype(np.int32), NUM_PARTS)
    features, masks = rng.random((NUM_NODES, 4), dtype=np.float32), {"train": np.arange(NUM_NODES) % 2 == 0}
    return write_partition_store(root, stream, parts, features=features, masks=masks, **options)


def make_older(root, version):
    """Store the halos as formats 2 and 3 did: nodes, degrees, rows and arcs in full, packed rows in their order."""
    store = PartitionStore.open(root)
    graphs = [store.load_part(part) for part in range(store.num_parts)]
    nodes = np.concatenate([graph.halo_nodes for graph in graphs])
    lengths = [np.diff(graph.csc.indptr)[graph.num_core :] for graph in graphs]
    arrays = {
        "halo_nodes": nodes,
        "halo_degree": np.diff(store.csc.indptr)[nodes].astype(np.int32),
        "halo_indptr": np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64),
        "halo_indices": np.concatenate([graph.csc.indices[graph.csc.indptr[graph.num_core] :] for graph in graphs]),
    }
    if store.edge_weight is not None:
        arrays["halo_arc"] = np.concatenate([graph.arc_id[graph.csc.indptr[graph.num_core] :] for graph in graphs])
    if store.manifest["pack_halo"]:
        arrays["halo_features"] = store.features.gather(nodes)
    old, source = dict(store.manifest), json.loads((root / SOURCE).read_text())
    for name in ("in_degree", "halo_code", "halo_code_offsets", "halo_count", "halo_places"):
        (root / f"{name}.npy").unlink(missing_ok=True)
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    old |= {"format_version": version, "files": describe_files(root)}
    for name in ("seal", "manifest"):
        source.pop(name)
    if version == 3:
        write_manifest(root, old, source)
        return
    del old["least_edge_weight"], old["feature_storage"]
    write_json(root / SOURCE, source)
    write_json(root / "manifest.json", old)


@pytest.fixture(params=[2, 3])
def version(request):
    return request.param


@first(3)
@pytest.mark.parametrize("kind", KINDS)
def test_an_older_store_is_upgraded_to_the_content_of_todays(no_disk_wait, tmp_path, kind, version):
    whole, root = write(tmp_path / "whole", **KINDS[kind]).root, tmp_path / "store"
    shutil.copytree(whole, root)
    make_older(root, version)
    with pytest.raises(PartitionStoreError, match=f"of format {version}.*gnnscale verify {root} checks it and brings"):
        PartitionStore.open(root)
    assert upgrade_store(root) == version
    assert upgrade_store(root) is None
    PartitionStore.open(root).verify()
    assert content(root) == content(whole)
    assert set(all_bytes(root)) == set(all_bytes(whole))
    if "packed" not in kind and kind != "no cross arcs":  # rows that many halos read do not come first in older ones
        assert all_bytes(root) == all_bytes(whole)


def test_a_damaged_older_store_stays_what_it_is(no_disk_wait, tmp_path, version):
    made = write(tmp_path / "made", **KINDS["directed, weighted, packed"]).root
    make_older(made, version)
    for name in sorted(all_bytes(made)):
        root = shutil.copytree(made, tmp_path / "store")
        data = bytearray((root / name).read_bytes())
        data[-3] ^= 1
        (root / name).write_bytes(data)
        before = all_bytes(root)
        if name != "source.json" or version == 3:  # what format 2 said of its input is not checked
            with pytest.raises(PartitionStoreError, match=f"{name}: .*damaged") as error:
                upgrade_store(root)
                PartitionStore.open(root)  # a manifest that nobody can read is of no format
            assert "\n" not in str(error.value)
            assert {name: all_bytes(root)[name] for name in before} == before
        shutil.rmtree(root)


FIELDS = {"num_nodes": 89, "num_arcs": 3, "num_parts": 2, "symmetric": True, "masks": [], "feature_dim": 3, "seed": "x"}


@pytest.mark.parametrize("name", FIELDS)
def test_an_older_manifest_that_was_edited_is_refused(no_disk_wait, tmp_path, name):
    root = write(tmp_path / "store", **KINDS["directed, weighted, packed"]).root
    make_older(root, 2)
    manifest = json.loads((root / "manifest.json").read_text())
    write_json(root / "manifest.json", manifest | {name: FIELDS[name]})
    with pytest.raises(PartitionStoreError, match="overwrite=True") as error:
        upgrade_store(root)
    assert "\n" not in str(error.value)
    assert json.loads((root / "manifest.json").read_text())["format_version"] == 2


def test_an_upgrade_that_was_cut_off_is_done_anew(no_disk_wait, tmp_path, monkeypatch, version):
    whole, root = write(tmp_path / "whole", **KINDS["directed, weighted, packed"]).root, tmp_path / "store"
    shutil.copytree(whole, root)
    make_older(root, version)

    def cut_off(folder, manifest, source):
        write_json(folder / SOURCE, sealed({**source, "manifest": "of the manifest that did not come"}))
        raise KeyboardInterrupt

    monkeypatch.setattr(upgrade, "write_manifest", cut_off)
    with pytest.raises(KeyboardInterrupt):
        upgrade_store(root)
    monkeypatch.undo()
    assert upgrade_store(root) == version
    assert content(root) == content(whole)


def test_the_command_upgrades(no_disk_wait, tmp_path):
    root = write(tmp_path / "store").root
    make_older(root, 2)
    done = gnnscale(tmp_path, "verify", str(root))
    assert done.returncode == 0, done.stderr
    assert f"{root}: was of format 2, and is of format 5 now" in done.stdout and "all as written" in done.stdout
