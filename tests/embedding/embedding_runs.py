"""A small graph with communities, and a fit whose model takes inputs."""

import lightning as L
import torch

import lightning_gnnscale as gs
from lightning_gnnscale.edge_stream import SyntheticGraph

NUM = 300


def write_store(root, features=False, num_parts=3, **options):
    graph = SyntheticGraph(NUM, 1800, num_communities=4, homophily=0.95, seed=0)
    stream = graph.stream(chunk_edges=1000, to_undirected=True)
    parts = gs.partition(stream, "random", num_parts=num_parts, seed=1)
    stored = graph.features(8, noise=2.0) if features else None
    arrays = {"features": stored, "labels": graph.labels(), "masks": graph.masks()}
    return gs.write_partition_store(root, stream, parts, **arrays, **options)


def fit(
    folder, root, inputs, weights=None, epochs=6, width=None, devices=1, resume=None, dtype="float32",
    stored_features=True, scope="auto", logical_ranks=None, sampler=None, **options,
):  # fmt: skip
    dm = gs.PartitionDataModule(
        store=root,
        sampler=sampler or gs.NeighborSampler([5, 5]),
        batch_size=32,
        stored_features=stored_features,
        scope=scope,
    )
    torch.manual_seed(0)
    width = width or dm.num_features + inputs.dim
    backbone = gs.model.GraphSAGE(width, 16, dm.num_classes).to(getattr(torch, dtype))
    model = gs.NodeClassifier(backbone, lr=0.01, inputs=inputs)
    trainer = L.Trainer(**{
        "accelerator": "cpu", "devices": devices, "max_epochs": epochs, "logger": False, "default_root_dir": folder,
        "strategy": gs.GNNScaleStrategy(weights=weights or gs.ModelAveraging(), logical_ranks=logical_ranks),
        "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, **options,
    })  # fmt: skip
    trainer.fit(model, dm, ckpt_path=resume)
    return trainer, model, dm


def embedding(store, **options):
    options = {"optimizer": gs.SparseAdam(0.05), "seed": 1} | options
    return gs.DistributedEmbedding(store.num_nodes, 16, store.part_offsets, **options)
