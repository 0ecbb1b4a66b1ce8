"""The strategy on CUDA: gradient scaler by part, dropout by key, and checkpoints; two processes may share one GPU."""

import os

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from partition_stand_ins import Classifier, PartsData, train
from processes import launch

from lightning_gnnscale.strategy import GradientAveraging, ModelAveraging

pytestmark = pytest.mark.gpu

CASES = {
    "float32": {},
    "half": {"precision": "16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    "half, control variates": {"precision": "16-mixed", "gradient_clip_val": 1.0},
}


def run_cases(folder):
    # Each process is a node of its own, so that all may take the first GPU.
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    here = {"accelerator": "gpu", "devices": 1, "num_nodes": int(os.environ["WORLD_SIZE"]), "max_epochs": 4}
    results = {}
    for name, options in CASES.items():
        kept = ModelCheckpoint(dirpath=folder / name, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        weights = {"every_n_epochs": 2, "control_variates": "control" in name}
        model = Classifier(scheduler="step")
        whole = train(folder, ModelAveraging(**weights), model, callbacks=[kept], **here, **options)
        path = folder / name / "epoch=0.ckpt"
        resumed = train(
            folder, ModelAveraging(**weights), Classifier(scheduler="step"), ckpt_path=path, **here, **options
        )
        results[name] = (whole, resumed)
    data = PartsData(sizes=(8, 8))
    gradients = train(folder, GradientAveraging(), Classifier(batch_norm=False), data, precision="16-mixed", **here)
    return results, gradients


@pytest.fixture(scope="module")
def by_world_size(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    return {n: launch(n, run_cases, folder / str(n), limit_s=200) for n in (1, 2)}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_equals_the_uninterrupted_one(by_world_size, world_size, name):
    for results, _ in by_world_size[world_size]:
        whole, resumed = results[name]
        assert all(torch.equal(whole[key].cpu(), resumed[key].cpu()) for key in whole)


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_equal_one(by_world_size, name):
    expected = by_world_size[1][0][0][name][0]
    for results, _ in by_world_size[2]:
        for key, tensor in expected.items():
            assert torch.allclose(results[name][0][key].cpu(), tensor.cpu(), rtol=0, atol=1e-5)


def test_gradient_averaging_keeps_replicas_equal(by_world_size):
    first, second = (gradients for _, gradients in by_world_size[2])
    assert all(torch.equal(first[key].cpu(), second[key].cpu()) for key in first)
