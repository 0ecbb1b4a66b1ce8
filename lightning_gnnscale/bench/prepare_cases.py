"""What is prepared and trained in the benchmark of preparation: workloads, sources, trainers."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ..datamodule import PartitionDataModule
from ..loader import SourceSettings
from ..model import GCN, GraphSAGE, LinkPredictor, NodeClassifier
from ..partition_store import PartitionStore
from ..sampler import LinkSampler, MiniBatch, NeighborSampler
from .prepare_graphs import NUM_CLASSES

WORKLOADS = {"gcn": GCN, "graphsage": GraphSAGE, "unsupervised": GraphSAGE}
CPU = "cpu"  # the trainer that is a model on these cores; another one is a number of milliseconds


@dataclass(frozen=True)
class Shape:
    """Shape of batches and model, the same for all sources.

    Attributes:
        fanouts: Fan-outs of the batches.
        batch_size: Number of nodes at the head of a batch.
        hidden_channels: Width of the model that trains on the CPU.
        num_negatives: Negatives per link in the unsupervised workload.
        num_batches: Number of batches in one measurement.
        scope: See `PartitionDataModule`.
        seed: Seed of the order and of the draws.
    """

    fanouts: tuple[int, ...]
    batch_size: int
    hidden_channels: int
    num_negatives: int
    num_batches: int
    scope: str
    seed: int = 0


def source_of(name: str, options: Mapping[str, Any]) -> SourceSettings:
    """Return the settings of a source of conf/source.

    Raises:
        ValueError: there is no such source.
    """
    folder = files("lightning_gnnscale.conf") / "source"
    there = sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))
    if name not in there:
        raise ValueError(f"bench.sources: no source {name!r}; there are {', '.join(there)}")
    return instantiate(OmegaConf.merge(OmegaConf.create((folder / f"{name}.yaml").read_text()), dict(options)))


def grid(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every choice of one value for each option."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def make_data(store: PartitionStore, workload: str, shape: Shape, source: SourceSettings) -> PartitionDataModule:
    """Return the data module of a workload, as a Trainer would be given it; ready for `train_dataloader`."""
    sampler: Any = NeighborSampler(shape.fanouts)
    if workload == "unsupervised":
        sampler = LinkSampler(sampler, "walk", walk_length=2, num_negatives=shape.num_negatives)
    links = shape.batch_size // (2 + shape.num_negatives) if workload == "unsupervised" else shape.batch_size
    options = {"batch_size": max(links, 1), "scope": shape.scope, "seed": shape.seed}
    data = PartitionDataModule(store=store, sampler=sampler, source=source, links={}, **options)
    data.setup("fit")
    return data


def make_trainer(store: PartitionStore, workload: str, shape: Shape, train: str | float) -> Callable[[MiniBatch], None]:
    """Return a function that trains on a batch, or that only takes as long.

    Args:
        store, workload, shape: Store, workload and shape that the batches come from.
        train: "cpu": forward, backward and step of the workload's model on these cores. A number: sleep for this many
            milliseconds, just as a device that takes so long would leave the cores free.
    """
    if train != CPU:
        seconds = float(train) / 1000
        return lambda batch: time.sleep(seconds) if seconds else None
    torch.manual_seed(0)
    links = workload == "unsupervised"
    channels = (store.features.dim, shape.hidden_channels, shape.hidden_channels if links else _num_classes(store))
    backbone = WORKLOADS[workload](*channels, num_layers=len(shape.fanouts))
    model = LinkPredictor(backbone) if links else NodeClassifier(backbone)
    model.log = lambda *_, **__: None  # there is no Trainer to log to
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: MiniBatch) -> None:
        optimizer.zero_grad()
        model.training_step(batch).backward()
        optimizer.step()

    return step


def num_seeds(batch: MiniBatch) -> int:
    """Return the seeds of a batch: of links their first ends."""
    return batch.batch_size if batch.pairs is None else batch.pairs.shape[1]


def _num_classes(store: PartitionStore) -> int:
    return NUM_CLASSES if store.labels is None else int(store.labels.max()) + 1
