"""Small stand-ins for what the strategy meets: batches of parts, a loader padded with None, a DataModule, a model."""

from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor, nn

from lightning_gnnscale.rng import batch_key
from lightning_gnnscale.strategy import GNNScaleStrategy, ModelAveraging

NUM_FEATURES, NUM_CLASSES = 6, 3


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    part: int
    key: int

    @property
    def batch_size(self):
        return len(self.y)

    def to(self, device, non_blocking=False):
        return Batch(self.x.to(device), self.y.to(device), self.part, self.key)


def part_data(part, num_nodes):
    generator = torch.Generator().manual_seed(100 + part)
    x = torch.randn(num_nodes, NUM_FEATURES, generator=generator) + 0.3 * (part % 4)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


class Loader:
    """Batches of some parts, one part after the other, padded with None up to a length.

    Args:
        parts: (part, batches) pairs in the order of their visits.
        epoch: returns the epoch.
        passes: passes over a part in one visit.
    """

    def __init__(self, parts, epoch, passes=1):
        self.parts, self.epoch, self.passes = parts, epoch, passes
        self.length = passes * sum(len(batches) for _, batches in parts)

    def __len__(self):
        return self.length

    def __iter__(self):
        first_pass, num_yielded = self.epoch() * self.passes, 0
        for part, batches in self.parts:
            for number in range(self.passes):
                for i, (x, y) in enumerate(batches):
                    yield Batch(x, y, part, batch_key(0, first_pass + number, part, i))
                    num_yielded += 1
        for _ in range(self.length - num_yielded):
            yield None

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class PartsData(L.LightningDataModule):
    """Parts of the given sizes in batches of four nodes; part k goes to rank k % world_size."""

    def __init__(self, sizes=(8, 6, 11, 3), batch_size=4):
        super().__init__()
        self.sizes, self.batch_size = list(sizes), batch_size
        self.part_weights = torch.tensor(sizes, dtype=torch.float64).numpy()

    def parts_of_rank(self, rank, world_size):
        return list(range(rank, len(self.sizes), world_size))

    def _loader(self, rank, world_size):
        parts = []
        for part in self.parts_of_rank(rank, world_size):
            x, y = part_data(part, self.sizes[part])
            batches = list(zip(x.split(self.batch_size), y.split(self.batch_size), strict=True)) if len(x) else []
            parts.append((part, batches))
        return Loader(parts, lambda: self.trainer.current_epoch, self.trainer.strategy.weights.passes_per_epoch)

    def train_dataloader(self):
        world_size = self.trainer.world_size
        loaders = [self._loader(rank, world_size) for rank in range(world_size)]
        mine = loaders[self.trainer.global_rank]
        mine.length = max(len(loader) for loader in loaders)
        return mine

    def val_dataloader(self):
        x, y = part_data(50, 20)
        return Loader([(0, [(x, y)])], lambda: 0)

    test_dataloader = predict_dataloader = val_dataloader


class Classifier(L.LightningModule):
    """A small classifier with dropout and BatchNorm.

    Args:
        scheduler: None, "step" or "epoch": halves the learning rate every second step or epoch.
    """

    def __init__(self, optimizer="adam", dropout=0.3, batch_norm=True, scheduler=None, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(7)
        norm = nn.BatchNorm1d(8, track_running_stats=True) if batch_norm else nn.Identity()
        self.net = nn.Sequential(
            nn.Linear(NUM_FEATURES, 8), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, NUM_CLASSES)
        )
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.trainer.current_epoch, batch.part, self.trainer.optimizers[0].param_groups[0]["lr"]))
        loss = nn.functional.cross_entropy(self.net(batch.x), batch.y)
        self.log("train_loss", loss, on_step=True, on_epoch=False, batch_size=batch.batch_size)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch.x), batch.y), batch_size=1, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.cross_entropy(self.net(batch.x), batch.y), batch_size=1, sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch.x).argmax(-1)

    def configure_optimizers(self):
        kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[self.hparams.optimizer]
        optimizer = kind(self.parameters(), lr=self.hparams.lr)
        if self.hparams.scheduler is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.hparams.scheduler}]


def make_trainer(folder, weights=None, max_epochs=3, strategy=None, **options):
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    quiet["enable_checkpointing"] = any("Checkpoint" in type(c).__name__ for c in options.get("callbacks", ()))
    strategy = strategy or GNNScaleStrategy(weights=weights or ModelAveraging())
    devices = options.pop("devices", None) or torch.distributed.get_world_size()
    return L.Trainer(
        devices=devices,
        strategy=strategy,
        max_epochs=max_epochs,
        default_root_dir=folder,
        **{**quiet, **options},
    )


def train(folder, weights=None, model=None, data=None, ckpt_path=None, **options):
    """Fit and return the model's final state, as float tensors of its own."""
    model = model or Classifier()
    trainer = make_trainer(folder, weights, **options)
    trainer.fit(model, datamodule=data or PartsData(), ckpt_path=ckpt_path)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
