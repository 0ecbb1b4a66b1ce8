"""Central training, what parts are compared with: the same model in PyG's plain loop over the whole graph in memory."""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from ..cli.compose import compose_config


def train_central(folder: Path, overrides: list[str]) -> dict:
    """Train one case in a process of its own with all cores, and return the columns of its row; see `run_rows`.

    Args:
        folder: Not used, nothing is written.
        overrides: Words of `train`; those of dataset, model, sampler, batch size, seed and epochs count.

    Returns:
        `test_acc` of the epoch of the best validation, `best_val_acc`, `epochs`, `train_s` without evaluation,
        `epoch_s` (median) and `curve`, see `curve_text`.
    """
    spawn = multiprocessing.get_context("spawn")  # the runs beside it fork from a parent without threads
    with ProcessPoolExecutor(1, mp_context=spawn) as executor:
        return executor.submit(_train, overrides).result()


def curve_text(epochs: list[tuple[float, float]]) -> str:
    """Return training seconds and validation accuracy after each epoch as one word: "1.20:0.8125 2.38:0.8301"."""
    return " ".join(f"{seconds:.3f}:{accuracy:.4f}" for seconds, accuracy in epochs)


def seconds_to(curve: str, accuracy: float) -> float | None:
    """Return the training seconds after which a curve has reached a validation accuracy in [0, 1]; None: never."""
    points = [tuple(map(float, point.split(":"))) for point in curve.split()]
    return next((seconds for seconds, found in points if found >= accuracy), None)


def arcs_of(stream) -> np.ndarray:
    """Return (2, num_arcs) int64, the arcs that a store of an edge stream has: its chunks are as they were listed."""
    arcs = np.concatenate([np.stack([chunk.src, chunk.dst]) for chunk in stream.chunks()], axis=1).astype(np.int64)
    if stream.remove_self_loops:
        arcs = arcs[:, arcs[0] != arcs[1]]
    if stream.to_undirected:
        arcs = np.concatenate([arcs, arcs[::-1]], axis=1)
    return np.unique(arcs, axis=1)


def _train(overrides: list[str]) -> dict:
    import torch
    import torch.nn.functional as F
    from hydra.utils import instantiate
    from lightning import seed_everything
    from torch_geometric.data import Data

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    config = compose_config("train", overrides)
    dataset = instantiate(config.dataset)
    edge_index = torch.from_numpy(arcs_of(dataset.stream))
    labels = torch.from_numpy(np.asarray(dataset.labels)).long()
    rows = _rows_of(dataset.features)
    seed_everything(config.seed, verbose=False)
    widths = {"in_channels": dataset.features.shape[1], "out_channels": int(labels.max()) + 1}
    backbone = instantiate(config.model.backbone, **widths)
    optimizer = torch.optim.Adam(backbone.parameters(), lr=config.model.lr, weight_decay=config.model.weight_decay)
    data = Data(edge_index=edge_index, num_nodes=len(labels))
    train = torch.from_numpy(np.flatnonzero(np.asarray(dataset.masks["train"]) & (labels.numpy() >= 0)))
    loader = _loader(data, train, list(config.sampler.fanouts), config.datamodule.batch_size, config.seed)
    everything = rows(torch.arange(len(labels)))
    spent, epochs, took = 0.0, [], []
    for _ in range(config.trainer.max_epochs):
        backbone.train()
        began = time.perf_counter()
        for batch in loader:
            optimizer.zero_grad()
            outputs = backbone(rows(batch.n_id), batch.edge_index)[: batch.batch_size]
            F.cross_entropy(outputs, labels[batch.n_id[: batch.batch_size]]).backward()
            optimizer.step()
        took.append(time.perf_counter() - began)
        spent += took[-1]
        backbone.eval()
        with torch.no_grad():
            right = (backbone(everything, edge_index).argmax(dim=-1) == labels).numpy()
        epochs.append((spent, *(right[np.asarray(dataset.masks[split])].mean() for split in ("val", "test"))))
    best = max(epochs, key=lambda epoch: epoch[1])
    return {
        "test_acc": round(float(best[2]), 4),
        "best_val_acc": round(float(best[1]), 4),
        "epochs": len(epochs),
        "train_s": round(spent, 2),
        "epoch_s": round(float(np.median(took)), 4),
        "curve": curve_text([epoch[:2] for epoch in epochs]),
        "loader": type(loader).__module__.split(".")[0],
    }


def _rows_of(features):
    """Return what gives the rows of (num,) node ids: a dense tensor, or sparse rows as this package's models take."""
    import torch

    from ..dataset.graph_dataset import CSRArrays
    from ..sampler.minibatch import SparseFeatures

    if isinstance(features, CSRArrays):
        import scipy.sparse

        values = (features.data.astype(np.float32), features.indices, features.indptr)
        table = scipy.sparse.csr_matrix(values, shape=features.shape)

        def sparse(nodes) -> SparseFeatures:
            part = table[nodes.numpy()]
            arrays = (torch.from_numpy(a) for a in (part.indptr.astype(np.int64), part.indices, part.data))
            return SparseFeatures(*arrays, table.shape[1])

        return sparse
    x = torch.from_numpy(np.array(np.load(features) if isinstance(features, str) else features, np.float32))
    return lambda nodes: x[nodes]


def _loader(data, nodes, fanouts: list[int], batch_size: int, seed: int):
    """Return PyG's loader, or where its compiled sampler is not installed this package's, which draws as it does."""
    from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

    given = {"num_neighbors": fanouts, "input_nodes": nodes, "batch_size": batch_size, "shuffle": True}
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        from torch_geometric.loader import NeighborLoader

        return NeighborLoader(data, **given)
    from ..loader import NeighborLoader

    return NeighborLoader(data, **given, seed=seed)
