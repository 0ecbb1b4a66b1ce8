"""A part trains from what it owns and what it lists as halo: everything else is taken away, and nothing changes."""

import shutil

import lightning as L
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.dataset import CSRArrays
from lightning_gnnscale.partition_store import reader
from tests.tiers import first

BITS_GONE = 0xFF  # NaN, -1, or true: as a label it is unknown, so that no node of another part is trained on


def take_away(root, part: int, target) -> gs.PartitionStore:
    """Copy a store and overwrite every byte of its node and edge files that the part neither owns nor lists."""
    shutil.copytree(root, target)
    store = gs.PartitionStore.open(root)
    start, stop = store.part_offsets[part], store.part_offsets[part + 1]
    owned = np.zeros(store.num_nodes, bool)
    owned[start:stop] = True
    listed = owned.copy()
    listed[store.halo(part)] = True
    keep = dict.fromkeys(("labels", "mask_train", "mask_val", "mask_test"), listed)
    if store.features.is_sparse:
        values = np.repeat(listed, np.diff(np.load(root / "features_indptr.npy")))
        keep |= {"features_indices": values, "features_data": values}
    else:
        keep["features"] = owned if "halo_features" in store.manifest["files"] else listed  # else packed beside it
    keep["csc_indices"] = np.repeat(owned, np.diff(store.csc.indptr))
    keep["csc_indptr"] = _bounds(listed)
    keep["weighted_degree"] = listed
    keep["in_degree"] = listed
    keep["halo_code"] = _of_part(np.load(root / "halo_code_offsets.npy"), part)
    if "halo_features" in store.manifest["files"]:
        packed = _of_part(np.load(root / "halo_offsets.npy"), part)
        keep |= {"halo_features": packed, "halo_nodes": packed, "halo_places": packed, "halo_count": listed}
    keep["edge_weight"] = keep["csc_indices"].copy()  # of edges to its nodes, and those to halo nodes that it lists
    keep["edge_weight"][store.load_part(part).edge_id] = True
    whole = {"halo_code_offsets", "halo_offsets", "original_nid", "part_offsets", "store_nid"}
    if store.features.is_sparse:
        whole.add("features_indptr")  # every process looks whether it rises
    assert set(store.manifest["files"]) == whole | keep.keys()
    for name, kept in keep.items():
        array = np.lib.format.open_memmap(target / f"{name}.npy", mode="r+")
        assert not kept.all(), f"{name}: nothing to take away, so this would show nothing"
        array.view(np.uint8).reshape(len(array), -1)[~kept] = BITS_GONE
        array.flush()
    return gs.PartitionStore.open(target)


def _of_part(offsets: np.ndarray, part: int) -> np.ndarray:
    """Which rows of a file that holds one part behind the other are a part's."""
    rows = np.zeros(offsets[-1], bool)
    rows[offsets[part] : offsets[part + 1]] = True
    return rows


def _bounds(rows: np.ndarray) -> np.ndarray:
    """The entries of an indptr that bound some rows."""
    return np.append(rows, False) | np.insert(rows, 0, False)


@pytest.fixture(scope="module")
def roots(dataset, tmp_path_factory):
    """Make a store with edge weights that trains on one part's nodes alone."""
    folder, made = tmp_path_factory.mktemp("stores"), {}
    parts = gs.partition(dataset.stream, "random", num_parts=4, seed=1)
    _, num_edges = dataset.stream.count()
    weight = np.random.default_rng(0).uniform(0.5, 2, num_edges).astype(np.float32)
    row, column = np.nonzero(dataset.features > 0.5)
    indptr = np.searchsorted(row, np.arange(len(dataset.features) + 1))
    sparse = CSRArrays(indptr, column.astype(np.int32), dataset.features[row, column], dataset.features.shape)
    tables = {"dense": dataset.features, "sparse": sparse}

    def make(features: str, part: int):
        kind, _, packed = features.partition(" ")
        root = folder / f"{kind}{packed}{part}"
        if root not in made:
            masks = {**dataset.masks, "train": dataset.masks["train"] & (parts.part_id == part)}
            arrays = {"features": tables[kind], "labels": dataset.labels, "masks": masks, "edge_weight": weight}
            made[root] = gs.write_partition_store(root, dataset.stream, parts, **arrays, pack_halo=bool(packed))
        return root

    return make


def train_part(store: gs.PartitionStore, mode: str, **options) -> torch.Tensor:
    """Train the part that has training nodes for three epochs and return all weights as one vector."""
    sampler = gs.NeighborSampler([4, 3]) if mode == "mini_batch" else None
    dm = gs.PartitionDataModule(store=store, mode=mode, sampler=sampler, batch_size=24, seed=3, **options)
    dm.verify = False
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.GCN(store.features.dim, 16, 8, num_layers=2), lr=0.01)
    untrained = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "limit_val_batches"), False
    )
    L.Trainer(accelerator="cpu", devices=1, strategy="gnnscale", max_epochs=3, **quiet).fit(model, dm)
    trained = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert not torch.equal(trained, untrained)
    return trained


@first(2)
@pytest.mark.parametrize(
    ("features", "mode", "part"),
    [
        ("dense", "mini_batch", 0),
        ("dense", "full_batch", 0),
        ("dense packed", "mini_batch", 3),
        ("dense packed", "full_batch", 3),
        ("sparse", "mini_batch", 3),
        ("sparse", "full_batch", 3),
    ],
)
def test_a_part_trains_to_the_same_bits_without_the_rest(roots, tmp_path, monkeypatch, features, mode, part):
    monkeypatch.setattr(reader, "compare_once", lambda store, names: 0)  # what is not the part's is overwritten here
    options = {"rows": "mapped"} if "packed" in features else {}  # memory holds all: owners would be read
    root = roots(features, part)
    expected = train_part(gs.PartitionStore.open(root), mode, **options)
    found = train_part(take_away(root, part, tmp_path / "alone"), mode, **options)
    assert torch.isfinite(expected).all()
    assert torch.equal(expected, found)


def test_no_halo_differs(roots):
    store = gs.PartitionStore.open(roots("dense", 0))
    assert not torch.equal(train_part(store, "mini_batch"), train_part(store, "mini_batch", halo_hops=0))
