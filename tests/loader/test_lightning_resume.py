"""The loader inside the Trainer: epochs, padding, and a checkpoint from the middle of an epoch."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from oracles.parts import part_loader, small_world

from lightning_gnnscale.loader import PartLoader
from lightning_gnnscale.sampler import NeighborSampler

WORLD = small_world(num_nodes=150, num_edges=900, num_parts=3)


def make_loader() -> PartLoader:
    targets = {part: WORLD.targets(part) for part in range(3)}
    options = {"labels": WORLD.labels, "masks": WORLD.masks, "batch_size": 16, "num_threads": 2, "prefetch_batches": 5}
    loader = part_loader(range(3), WORLD.load_part, WORLD.features, targets, NeighborSampler([3]), **options)
    return part_loader(
        range(3), WORLD.load_part, WORLD.features, targets, NeighborSampler([3]), pad_to=len(loader) + 2, **options
    )


class Recorder(L.LightningModule):
    """A linear model that writes down the keys of its batches."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 5)
        self.keys: list[tuple[int, int]] = []

    def training_step(self, batch, batch_idx):
        self.keys.append((self.current_epoch, batch.key))
        seeds = slice(0, batch.batch_size)
        return torch.nn.functional.cross_entropy(self.layer(batch.x[seeds]), batch.y[seeds])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(Callback):
    """Save once, at one batch of one epoch."""

    def __init__(self, path, epoch, batch):
        self.path, self.at = path, (epoch, batch)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            trainer.save_checkpoint(self.path)


def fit(path, callbacks=(), ckpt_path=None) -> Recorder:
    L.seed_everything(0, verbose=False)
    model = Recorder()
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=path,
    )
    trainer.fit(model, make_loader(), ckpt_path=ckpt_path)
    return model


def test_resume_from_the_middle_of_an_epoch_is_exact(tmp_path):
    num_batches = len(make_loader()) - 2
    whole = fit(tmp_path, [SaveAt(tmp_path / "mid.ckpt", epoch=1, batch=2)])
    assert [epoch for epoch, _ in whole.keys] == [0] * num_batches + [1] * num_batches + [2] * num_batches
    assert len({key for _, key in whole.keys}) == 3 * num_batches
    assert (whole.trainer.current_epoch, whole.trainer.train_dataloader.state_dict()["epoch"]) == (3, 2)
    resumed = fit(tmp_path, ckpt_path=tmp_path / "mid.ckpt")
    assert resumed.keys == whole.keys[num_batches + 3 :]
    torch.testing.assert_close(resumed.layer.weight, whole.layer.weight, rtol=0, atol=0)
