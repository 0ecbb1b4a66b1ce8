"""Full-graph training in tests: a small uneven store, a model in float64, one fit."""

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

import lightning_gnnscale as gs
from lightning_gnnscale.model import GAT, GCN, SGC, GraphSAGE
from lightning_gnnscale.strategy import GNNScaleStrategy, GradientAveraging

BACKBONES = {"gcn": GCN, "graphsage": GraphSAGE, "gat": GAT, "sgc": SGC}
NUM_NODES, NUM_PARTS, DIM, NUM_CLASSES = 90, 5, 12, 4


def write_store(
    root, directed=False, sparse=False, weighted=False, keep=None, sizes=(41, 7, 22, 12, 8), edge_features=0
):
    """Write a random graph in five parts of very different sizes; the last two have no training nodes.

    keep(edges) says which of the (2, num_edges) edges stay; the rest of the store is the same.
    """
    rng = np.random.default_rng(0)
    edges = rng.integers(0, NUM_NODES, (2, 400))
    # In a directed graph the nodes 80 to 89 are read by others and read nobody.
    edges = edges[:, edges[1] < 80] if directed else edges
    edges = edges if keep is None else edges[:, keep(edges)]
    part_id = np.repeat(np.arange(NUM_PARTS), sizes).astype(np.int32)
    train = (rng.random(NUM_NODES) < 0.5) & (part_id < 3)
    features = rng.normal(size=(NUM_NODES, DIM))
    if sparse:
        import scipy.sparse

        features = scipy.sparse.csr_matrix(features * (rng.random(features.shape) < 0.3))
    masks = {"train": train, "val": ~train & (np.arange(NUM_NODES) % 2 == 0), "test": ~train}
    stream = gs.open_edge_stream(edges, num_nodes=NUM_NODES, to_undirected=not directed)
    return gs.write_partition_store(
        root,
        stream,
        gs.Partitioning(part_id, NUM_PARTS, "given", {}, 0),
        features=features,
        labels=rng.integers(0, NUM_CLASSES, NUM_NODES),
        masks=masks,
        **({"edge_weight": rng.random(edges.shape[1]).astype(np.float32) + 0.5} if weighted else {}),
        **({"edge_features": rng.random((edges.shape[1], edge_features))} if edge_features else {}),
    ).root


def make_model(backbone, dropout=0.0, input_dropout=0.0, scheduler=True, num_layers=3, dtype=torch.float64, **options):
    torch.manual_seed(3)
    options |= {"heads": 2} if backbone == "gat" else {}
    options |= {"dropout": dropout} if backbone != "sgc" else {}
    net = BACKBONES[backbone](DIM, 16, NUM_CLASSES, num_layers=num_layers, input_dropout=input_dropout, **options)
    step = (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)) if scheduler else None
    return gs.NodeClassifier(net.to(dtype), lr=0.005, scheduler=step)


class Epochs(Callback):
    """Keeps what each epoch logged."""

    def __init__(self):
        self.metrics = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def make_trainer(folder, exchange, weights=None, max_epochs=20, **options):
    strategy = GNNScaleStrategy(weights=weights or GradientAveraging(), exchange=exchange)
    defaults = {"accelerator": "cpu", "devices": torch.distributed.get_world_size()}
    defaults |= {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    return L.Trainer(
        strategy=strategy,
        max_epochs=max_epochs,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )


def fit(folder, root, model, exchange, weights=None, ckpt_path=None, **options):
    """Train, and return the weights, and each epoch's metrics."""
    epochs = Epochs()
    callbacks = [epochs, *options.pop("callbacks", ())]
    trainer = make_trainer(folder, exchange, weights, callbacks=callbacks, **options)
    trainer.fit(model, gs.FullGraphDataModule(store=root), ckpt_path=ckpt_path)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, epochs.metrics


def largest_difference(one, two):
    return max(float((one[name] - two[name]).abs().max()) for name in one)
