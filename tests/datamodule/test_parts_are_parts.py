"""A part trains from what it owns and what it lists as halo: everything else is taken away, and nothing changes."""

import shutil

import lightning as L
import numpy as np
import pytest
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.loader import PartLoader, core_targets

BITS_GONE = 0xFF


def take_away(root, part: int, target) -> gs.PartitionStore:
    """Copy a store and overwrite every byte of its node and arc files that the part neither owns nor lists."""
    shutil.copytree(root, target)
    store = gs.PartitionStore.open(root)
    start, stop = store.part_offsets[part], store.part_offsets[part + 1]
    owned = np.zeros(store.num_nodes, bool)
    owned[start:stop] = True
    listed = owned.copy()
    listed[store.halo(part)] = True
    keep = dict.fromkeys(("features", "labels", "mask_train", "mask_val", "mask_test"), listed)
    if "halo_features" in store.manifest["files"]:
        keep["features"] = owned  # rows of the halo are packed beside the part
    keep["csc_indices"] = np.repeat(owned, np.diff(store.csc.indptr))
    keep["csc_indptr"] = _bounds(owned)
    halo_offsets, halo_indptr = np.load(root / "halo_offsets.npy"), np.load(root / "halo_indptr.npy")
    halo = np.zeros(halo_offsets[-1], bool)
    halo[halo_offsets[part] : halo_offsets[part + 1]] = True
    keep |= {"halo_nodes": halo, "halo_degree": halo, "halo_indptr": _bounds(halo)}
    if "halo_features" in store.manifest["files"]:
        keep["halo_features"] = halo
    keep["halo_indices"] = np.repeat(halo, np.diff(halo_indptr))
    for name, kept in keep.items():
        array = np.lib.format.open_memmap(target / f"{name}.npy", mode="r+")
        assert not kept.all(), f"{name}: nothing to take away, so this would show nothing"
        array.view(np.uint8).reshape(len(array), -1)[~kept] = BITS_GONE
        array.flush()
    return gs.PartitionStore.open(target)


def _bounds(rows: np.ndarray) -> np.ndarray:
    """The entries of an indptr that bound some rows."""
    return np.append(rows, False) | np.insert(rows, 0, False)


def train_part(store: gs.PartitionStore, part: int, hops: int = 1) -> torch.Tensor:
    """Train a part by itself for three epochs and return all weights as one vector."""
    loader = PartLoader(
        [part],
        lambda p: store.load_part(p, hops),
        store.part_features,
        {part: core_targets(store.masks["train"], store.part_offsets, part)},
        gs.NeighborSampler([4, 3]),
        labels=store.labels,
        masks=store.masks,
        batch_size=24,
        seed=3,
    )
    torch.manual_seed(0)
    model = gs.NodeClassifier(gs.model.GCN(store.features.dim, 16, 8, num_layers=2), lr=0.01)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    torch.manual_seed(1)
    L.Trainer(accelerator="cpu", devices=1, max_epochs=3, **quiet).fit(model, loader)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.fixture(scope="module")
def packed_root(dataset, tmp_path_factory):
    """The store of `store_root`, with packed halo rows."""
    root = tmp_path_factory.mktemp("packed") / "small"
    options = {"dataset": dataset, "num_parts": 4, "seed": 1, "partitioner": "random"}
    gs.PartitionDataModule(root=root, pack_halo=True, **options).prepare_data()
    return root


@pytest.mark.parametrize("part", [0, 3])
@pytest.mark.parametrize("root", ["store_root", "packed_root"])
def test_a_part_trains_to_the_same_bits_without_the_rest(store_root, root, request, tmp_path, part):
    expected = train_part(gs.PartitionStore.open(store_root), part)
    found = train_part(take_away(request.getfixturevalue(root), part, tmp_path / "alone"), part)
    assert torch.isfinite(expected).all()
    assert torch.equal(expected, found)


def test_no_halo_differs(store_root):
    store = gs.PartitionStore.open(store_root)
    assert not torch.equal(train_part(store, 0, hops=1), train_part(store, 0, hops=0))
