"""Graphs with few dense features: rows of length 1, reduced by SVD, so that exchanges can be compared fast."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from lightning_gnnscale.dataset import CSRArrays, GraphDataset, generate, load_npz

SVD_ROUNDS = 4
SVD_SPARE = 16  # columns beyond those that are kept: the last ones are inexact
GENERATED = re.compile(r"planted:([\d_]+):([\d_]+)")
# Of generated graphs: neighbours that help and mislead, labels of which a tenth cannot be learned.
HOMOPHILY, LABEL_NOISE = 0.6, 0.1


def reduced_graph(name: str, folder: str | os.PathLike, dim: int, fractions: list[float], seed: int = 0) -> Path:
    """Write a graph with reduced features once, and return its file, which `load_npz` reads.

    Args:
        name: Name that `load_npz` knows, or "planted:EDGES:NODES": a generated graph of 16 communities, which are its
            classes.
        folder: Folder for `NAME-.../graph.npz`, whose name includes everything that determines the file.
        dim: Number of feature columns. Narrower features are only scaled to rows of length 1.
        fractions: Shares of train, validation and test nodes if the graph has no public split.
        seed: Seed of the split and of the SVD's first guess.

    Cost: a randomised SVD of the features, `SVD_ROUNDS` rounds.
    """
    dataset = _dataset(name, Path(folder), dim, fractions, seed)
    split = "-".join(f"{100 * fraction:g}" for fraction in fractions)
    path = Path(folder) / f"{dataset.name}-svd{dim}-{split}-seed{seed}" / "graph.npz"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new.npz")
    edges = [np.stack([chunk.src, chunk.dst]) for chunk in dataset.stream.chunks()]
    with _one_thread():
        x = _reduced(dataset.features, dim, seed)
    np.savez(
        fresh,
        edge_index=np.concatenate(edges, axis=1),
        x=x,
        y=dataset.labels,
        **{f"{split}_mask": mask for split, mask in dataset.masks.items()},
    )
    os.replace(fresh, path)
    return path


def _dataset(name: str, folder: Path, dim: int, fractions: list[float], seed: int) -> GraphDataset:
    generated = GENERATED.fullmatch(name)
    if generated is None:
        return load_npz(name, fractions=tuple(fractions), split_seed=seed)
    num_edges, num_nodes = (int(number) for number in generated.groups())
    noise = {"homophily": HOMOPHILY, "label_noise": LABEL_NOISE, "feature_dim": dim}
    shares = {"train": fractions[0], "val": fractions[1]}
    return generate(num_nodes, num_edges, folder, **noise, **shares, seed=seed, name=name.replace(":", "-"))


def _reduced(features, dim: int, seed: int) -> np.ndarray:
    if isinstance(features, CSRArrays):
        rows = np.repeat(np.arange(features.shape[0]), np.diff(features.indptr))
        places = torch.from_numpy(np.stack([rows, features.indices]))
        values = torch.from_numpy(features.data.astype(np.float32))
        x = torch.sparse_coo_tensor(places, values, features.shape, is_coalesced=True, check_invariants=True)
    else:
        rows = np.load(features) if isinstance(features, str) else features
        x = torch.from_numpy(np.asarray(rows, np.float32))
        x = torch.nn.functional.normalize(x)
    if x.shape[1] <= dim:
        return x.to_dense().numpy() if x.is_sparse else x.numpy()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, values, _ = torch.svd_lowrank(x, q=min(dim + SVD_SPARE, *x.shape), niter=SVD_ROUNDS)
    return (left * values)[:, :dim].numpy().copy()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Start no thread of OpenMP: runs are forked from this process, and would wait for it for ever."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
