"""Checkpoint files: what loads, what is refused, every flipped bit, and writes that fail."""

import fcntl
import os
import resource
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_gnnscale as gs
from lightning_gnnscale.errors import CheckpointError
from lightning_gnnscale.model.checkpoint_file import CheckpointFiles, link_checkpoint, plain, read_checkpoint
from lightning_gnnscale.model.made_again import named_as
from tests.says import said


class Touch:
    """What unpickling would run."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Setting:
    """A user's class in hyperparameters."""

    value = 3


class Linear(L.LightningModule):
    def __init__(self, width=3):
        super().__init__()
        self.layer = torch.nn.Linear(width, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(torch.ones(1, 3)).sum()

    test_step = predict_step = training_step

    def train_dataloader(self):
        return [0, 1]

    test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def state():
    return {"state_dict": {"w": torch.arange(40.0), "b": torch.ones(3)}, "epoch": 3, "callbacks": {"x": {"y": "text"}}}


def save(folder: Path, content=None, name="a.ckpt") -> Path:
    CheckpointFiles().save_checkpoint(state() if content is None else content, folder / name)
    return folder / name


def same(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


def trainer(folder, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    strategy = gs.GNNScaleStrategy(weights=gs.GradientAveraging())
    return L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, default_root_dir=folder,
        **quiet | {"enable_checkpointing": False} | options,
    )  # fmt: skip


def outcome(path: Path, expected) -> str:
    try:
        found = read_checkpoint(path)
    except CheckpointError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return "found"
    return "harmless" if same(found, expected) else "other weights"


def test_every_flipped_bit_is_found_or_changes_nothing(tmp_path):
    """One bit of each byte, and every bit of the archive's directory, which has no checksum of its own."""
    path = save(tmp_path)
    raw, expected = path.read_bytes(), read_checkpoint(path)
    directory = raw.index(b"PK\x01\x02")
    bits = [8 * byte + byte % 8 for byte in range(directory)] + list(range(8 * directory, 8 * len(raw)))
    counts = Counter()
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        counts[outcome(path, expected)] += 1
    assert counts["other weights"] == 0
    assert counts["found"] > 1000 and sum(counts.values()) == len(bits)


def test_what_is_cut_off_empty_or_no_checkpoint_is_told_with_a_remedy(tmp_path):
    path = save(tmp_path)
    raw = path.read_bytes()
    other = save(tmp_path, name="b.ckpt")
    for length in range(0, len(raw), 37):
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"(empty|damaged|no checkpoint).*b.ckpt"):
            read_checkpoint(path)
    path.write_text("hello\n")
    with pytest.raises(CheckpointError, match=said("checkpoint Lightning b.ckpt")):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match=said("folder checkpoint ckpt")):
        read_checkpoint(tmp_path)
    np.savez(tmp_path / "arrays.npz", a=np.ones(3))
    with pytest.raises(CheckpointError, match=said("checkpoint Lightning")):
        read_checkpoint(tmp_path / "arrays.npz")
    other.unlink()
    path.unlink()
    with pytest.raises(CheckpointError, match=said("a.ckpt checkpoints/")):
        read_checkpoint(path)


def test_checksums_are_written_whatever_torch_is_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(read_checkpoint(path), state())


def test_numbers_and_paths_load_as_plain_values(tmp_path):
    given = {"state_dict": {}, "hyper": {"lr": np.float32(0.5), "n": (np.int64(3), [tmp_path])}, "flag": np.True_}
    loaded = read_checkpoint(save(tmp_path, plain(given)))
    assert loaded == {"state_dict": {}, "hyper": {"lr": 0.5, "n": (3, [str(tmp_path)])}, "flag": True}
    assert type(loaded["hyper"]["lr"]) is float


LOADERS = {
    "fit": lambda folder, path: trainer(folder).fit(Linear(), ckpt_path=path),
    "test": lambda folder, path: trainer(folder).test(Linear(), ckpt_path=path),
    "predict": lambda folder, path: trainer(folder).predict(Linear(), ckpt_path=path),
    "classifier": lambda folder, path: gs.NodeClassifier.load_from_checkpoint(path, backbone=torch.nn.Linear(3, 2)),
    "link predictor": lambda folder, path: gs.LinkPredictor.load_from_checkpoint(path, backbone=torch.nn.Linear(3, 2)),
    "data": lambda folder, path: gs.PartitionDataModule.load_from_checkpoint(path),
    "whole graph's data": lambda folder, path: gs.FullGraphDataModule.load_from_checkpoint(str(path)),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_checkpoint_that_would_run_a_command_is_refused(tmp_path, monkeypatch, loader):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trap, path = tmp_path / "trap", tmp_path / "bad.ckpt"
    module = Linear()
    content = {"state_dict": module.state_dict(), "pytorch-lightning_version": L.__version__, "epoch": 0}
    torch.save(content | {"global_step": 0, "callbacks": {"x": Touch(trap)}}, path)
    torch.load(path, weights_only=False)
    assert trap.is_dir()  # so the trap works
    trap.rmdir()
    with pytest.raises(CheckpointError, match=said("bad.ckpt posix.mkdir")) as caught:
        LOADERS[loader](tmp_path, path)
    assert "\n" not in str(caught.value)
    assert not trap.exists()


def test_code_is_not_run_on_request_either(tmp_path):
    path = save(tmp_path)
    for load in (
        lambda: trainer(tmp_path).fit(Linear(), ckpt_path=path, weights_only=False),
        lambda: gs.NodeClassifier.load_from_checkpoint(path, weights_only=False),
        lambda: CheckpointFiles().load_checkpoint(path, weights_only=False),
    ):
        with pytest.raises(ValueError, match=said("weights_only=False add_safe_globals")):
            load()


def test_a_class_of_the_users_is_named_when_saved_and_loads_once_it_is_trusted(tmp_path):
    content = state() | {"hyper_parameters": {"setting": Setting()}}
    with pytest.warns(UserWarning, match=said("Setting load add_safe_globals([Setting])")):
        path = save(tmp_path, content)
    with pytest.raises(CheckpointError, match=said("Setting add_safe_globals([Setting]) Python")):
        read_checkpoint(path)
    with torch.serialization.safe_globals([Setting]):
        assert read_checkpoint(path)["hyper_parameters"]["setting"].value == 3


def test_a_checkpoint_of_another_model_is_one_line(tmp_path):
    first = trainer(tmp_path)
    first.fit(Linear())
    first.save_checkpoint(tmp_path / "own.ckpt")
    message = r"own.ckpt: a checkpoint of another model than this Linear \(size mismatch for layer.weight.*run that sav"
    for run in ("fit", "test"):
        with pytest.raises(CheckpointError, match=message) as caught:
            getattr(trainer(tmp_path), run)(Linear(4), ckpt_path=tmp_path / "own.ckpt")
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=said("own.ckpt NodeClassifier")):
        backbone = torch.nn.Linear(3, 2)
        gs.NodeClassifier.load_from_checkpoint(tmp_path / "own.ckpt", backbone=backbone, num_classes=2)
    torch.save({"weights": 1}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=said("x.ckpt own.ckpt")):
        trainer(tmp_path).fit(Linear(), ckpt_path=tmp_path / "x.ckpt")


def compiled(model):
    return torch.compile(model, backend="eager")


BOTH_WAYS = pytest.mark.parametrize(("saved", "loaded"), [(compiled, None), (None, compiled)], ids=["off", "on"])


def backbone(wrap):
    model = gs.model.GraphSAGE(3, 4, 2, num_layers=2, norm="batch")
    return compiled(model) if wrap is compiled else model


def values(model):
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


class CompiledWithin(Linear):
    def __init__(self, wrap):
        super().__init__()
        self.layer = compiled(self.layer) if wrap is compiled else self.layer
        self.before = []

    def on_train_start(self):
        self.before = values(self)

    on_test_start = on_predict_start = on_train_start


@BOTH_WAYS
def test_a_compiled_backbones_checkpoint_loads_into_a_plain_one_and_back(tmp_path, saved, loaded):
    model = gs.NodeClassifier(backbone(saved), num_classes=2, lr=0.5)
    content = {"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams)}
    model.on_save_checkpoint(content)
    path = save(tmp_path, content | {"pytorch-lightning_version": L.__version__, "epoch": 0, "global_step": 0})
    assert any("_orig_mod" in name for name in content["state_dict"]) == (saved is compiled)
    given = gs.NodeClassifier.load_from_checkpoint(path, backbone=backbone(loaded))
    made_again = gs.NodeClassifier.load_from_checkpoint(path)
    for one in (given, made_again):
        assert all(map(torch.equal, values(model), values(one)))
    with pytest.raises(CheckpointError, match=said("another model NodeClassifier")):
        gs.NodeClassifier.load_from_checkpoint(path, backbone=compiled(gs.model.GraphSAGE(3, 5, 2)))


@BOTH_WAYS
def test_the_trainer_goes_on_from_a_compiled_models_checkpoint_and_back(tmp_path, saved, loaded):
    model, first = CompiledWithin(saved), trainer(tmp_path)
    first.fit(model)
    first.save_checkpoint(tmp_path / "own.ckpt")
    for run in ("fit", "test", "predict"):
        other = CompiledWithin(loaded)
        getattr(trainer(tmp_path, max_epochs=2), run)(other, ckpt_path=tmp_path / "own.ckpt")
        assert all(map(torch.equal, other.before, values(model)))


def test_states_of_weight_policies_get_the_names_of_the_model():
    weight = torch.ones(2)
    state = {"policy": "ModelAveraging", "own": {3: {"layer.weight": weight}}, "ranks": [{"layer.bias": weight}]}
    named = named_as(CompiledWithin(compiled), state)
    assert named["policy"] == "ModelAveraging" and list(named["own"][3]) == ["layer._orig_mod.weight"]
    assert named["own"][3]["layer._orig_mod.weight"] is weight
    assert list(named["ranks"][0]) == ["layer._orig_mod.bias"]
    assert list(named_as(CompiledWithin(None), named)["own"][3]) == ["layer.weight"]


def test_modules_load_from_their_checkpoints(tmp_path):
    backbone = gs.model.GraphSAGE(3, 4, 2)
    model = gs.NodeClassifier(backbone, lr=0.5)
    content = {"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams)}
    path = save(tmp_path, content | {"pytorch-lightning_version": L.__version__, "epoch": 0, "global_step": 0})
    loaded = gs.NodeClassifier.load_from_checkpoint(path, backbone=gs.model.GraphSAGE(3, 4, 2))
    assert loaded.lr == 0.5
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        model.load_from_checkpoint(path)


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(tmp_path):
    path = save(tmp_path)
    before = path.read_bytes()
    large = state() | {"more": torch.ones(1 << 20)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=said("a.ckpt free")):
            save(tmp_path, large)
        with pytest.raises(CheckpointError, match=said("new.ckpt free space")):
            save(tmp_path, large, "new.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_write_that_is_stopped_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = save(tmp_path)
    before = path.read_bytes()

    def stop(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, state() | {"epoch": 4})
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["a.ckpt"]


def test_what_kills_left_is_cleared_and_what_is_being_written_is_not(tmp_path):
    left, busy, foreign = (tmp_path / f"{name}.tmp" for name in (".a.ckpt.1.gnnscale", ".b.ckpt.2.gnnscale", "notes"))
    for path in (left, busy, foreign):
        path.write_bytes(b"half")
    with open(busy, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", busy.name, foreign.name}


def test_a_link_is_never_missing(tmp_path, monkeypatch):
    for name in ("one.ckpt", "two.ckpt"):
        save(tmp_path, name=name)
    process = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(barrier=lambda: None))
    link = tmp_path / "last.ckpt"
    link_checkpoint(process, tmp_path / "one.ckpt", link)
    assert os.readlink(link) == "one.ckpt"
    monkeypatch.setattr(os, "remove", lambda path: pytest.fail("the link is removed first"))
    link_checkpoint(process, tmp_path / "two.ckpt", link)
    assert os.readlink(link) == "two.ckpt"
    assert {path.name for path in tmp_path.iterdir()} == {"one.ckpt", "two.ckpt", "last.ckpt"}


def test_lightnings_link_is_replaced_by_one_that_is_never_missing(tmp_path):
    kept = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last="link")
    run = trainer(tmp_path, callbacks=[kept], enable_checkpointing=True, max_epochs=2)
    run.fit(Linear())
    assert kept._link_checkpoint is link_checkpoint
    assert os.readlink(tmp_path / "last.ckpt") == Path(kept.best_model_path).name
    save(tmp_path, name="last.ckpt")  # replaces the link, not what it stands for
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert read_checkpoint(kept.best_model_path)["epoch"] == 1


def test_a_users_way_of_writing_is_kept_or_wrapped(tmp_path):
    own = TorchCheckpointIO()
    assert gs.GNNScaleStrategy(checkpoint_io=own).checkpoint_io is own
    assert isinstance(gs.GNNScaleStrategy().checkpoint_io, CheckpointFiles)
    wrapping = AsyncCheckpointIO()
    run = trainer(tmp_path, plugins=[wrapping])
    assert run.strategy.checkpoint_io is wrapping
    assert isinstance(wrapping.checkpoint_io, CheckpointFiles)
    run.fit(Linear())
    run.save_checkpoint(tmp_path / "a.ckpt")
    wrapping.teardown()
    assert read_checkpoint(tmp_path / "a.ckpt")["epoch"] == 1


def test_other_file_systems_are_read_and_written_by_lightning(tmp_path):
    files = CheckpointFiles()
    files.save_checkpoint(state(), "memory://folder/a.ckpt")
    assert same(files.load_checkpoint("memory://folder/a.ckpt"), state())
    files.save_checkpoint(state() | {"callbacks": Touch(tmp_path / "trap")}, "memory://folder/b.ckpt")
    with pytest.raises(Exception, match=said("Weights load failed")):
        files.load_checkpoint("memory://folder/b.ckpt")
    assert not (tmp_path / "trap").exists()
    files.save_checkpoint(state(), f"file://{tmp_path}/c.ckpt")
    assert same(read_checkpoint(tmp_path / "c.ckpt"), state())


def test_a_class_is_warned_of_once(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for name in ("a.ckpt", "b.ckpt", "c.ckpt"):
            save(tmp_path, state() | {"setting": Setting()}, name)
    assert len(caught) == 1
