"""Neighbour sampling in Triton: the neighbours, order and weights of the CPU form."""

import numpy as np
import pytest
import torch
from own_python import run_python

from lightning_gnnscale.graph import CSC, build_csc
from lightning_gnnscale.triton_kernels.sample_neighbors import SampleOptions, sample_neighbors, split_rows
from lightning_gnnscale.triton_kernels.sample_neighbors.device import (
    DeviceWorkspace,
    sample_tensors,
    sample_with_triton,
)
from lightning_gnnscale.triton_kernels.sample_neighbors.reference import sample_neighbors_reference
from tests.says import said
from tests.tiers import all_pairs, each_value

LAUNCH_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the interpreter takes CPU tensors
DEGREES = (0, 1, 5, 6, 7, 63, 64, 65, 66, 130, 200)


def rows_of(degrees, dtype=np.int32, seed=0) -> CSC:
    """A graph with a row of each degree; ids repeat within rows."""
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return CSC(indptr, np.random.default_rng(seed).integers(0, len(degrees), indptr[-1]).astype(dtype))


def on_device(arrays, device=LAUNCH_DEVICE):
    return type(arrays)(*(None if a is None else torch.from_numpy(np.array(a)).to(device) for a in arrays))


def assert_same(mine, other):
    for name, value in mine._asdict().items():
        expected = getattr(other, name)
        if isinstance(value, torch.Tensor):
            np.testing.assert_array_equal(value.cpu().numpy(), expected, err_msg=name)
            assert value.dtype == (torch.float32 if name == "edge_weight" else torch.int64), name
        else:
            assert value == expected, name


@each_value
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("fanouts", [[1], [6], [7, 2], [60], [64, 1], [-1], [3, -1], [129]])
def test_uniform_samples_are_the_references(fanouts, dtype):
    pytest.importorskip("triton")
    csc, seeds, key = rows_of(DEGREES, dtype), np.array([10, 3, 0, 9, 8, 7, 2]), 2**64 - 5 * len(fanouts)
    there = torch.from_numpy(seeds).to(LAUNCH_DEVICE)
    mine = sample_with_triton(on_device(csc), there, fanouts, key, SampleOptions(return_e_id=True))
    assert_same(mine, sample_neighbors_reference(csc, seeds, fanouts, key))


@all_pairs
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("scale", [1.0625, 8.0])
@pytest.mark.parametrize("fanouts", [[1], [6, 3], [70], [-1, 5]])
def test_preferring_samples_are_the_references(fanouts, scale, share):
    pytest.importorskip("triton")
    csc, seeds, key = rows_of(DEGREES, seed=3), np.array([10, 3, 0, 7]), int(scale * 1000) + len(fanouts)
    generator = np.random.default_rng(int(10 * share))
    preferred = [generator.random(csc.num_rows) < share for _ in fanouts]
    split = [on_device(split_rows(csc, inside, with_position=True)) for inside in preferred]
    seeds_there = torch.from_numpy(seeds).to(LAUNCH_DEVICE)
    options = SampleOptions(return_e_id=True, scale=scale)
    mine = sample_with_triton(on_device(csc), seeds_there, fanouts, key, options, split=split)
    plain = sample_neighbors_reference(csc, seeds, fanouts, key, preferred=preferred, scale=scale)
    assert_same(mine, plain)
    unseen = [rows._replace(position=None) for rows in split]
    options = SampleOptions(scale=scale)
    without = sample_with_triton(on_device(csc), seeds_there, fanouts, key, options, split=unseen)
    assert_same(without, plain._replace(e_id=None))


def test_a_used_workspace_and_scale_1_change_nothing():
    pytest.importorskip("triton")
    csc = rows_of(DEGREES)
    space, split = DeviceWorkspace(csc.num_rows, LAUNCH_DEVICE), [on_device(split_rows(csc, np.ones(11, bool)))]
    for key in range(3):
        seeds = np.random.default_rng(key).permutation(11)[:4]
        there = torch.from_numpy(seeds).to(LAUNCH_DEVICE)
        mine = sample_with_triton(on_device(csc), there, [4], key, SampleOptions(return_e_id=True), space, split)
        assert_same(mine, sample_neighbors_reference(csc, seeds, [4], key))
    assert (space.label[:-1] == torch.iinfo(torch.int32).max).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": [3, 12]}, "seeds [0, 11) 3 12"),
        ({"seeds": [3, 3, 4]}, "seeds distinct 1 3"),
        ({"fanouts": [0]}, "fanouts[0] >= 1"),
        ({"options": SampleOptions(scale=0.5)}, "scale >= 1"),
        ({"workspace": DeviceWorkspace(3, LAUNCH_DEVICE)}, "workspace 3 nodes graph 11"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    given = {"seeds": [1], "fanouts": [2]} | arguments
    seeds = torch.tensor(given.pop("seeds"), device=LAUNCH_DEVICE)
    with pytest.raises(ValueError, match=said(message)):
        sample_with_triton(on_device(rows_of(DEGREES)), seeds, given.pop("fanouts"), 0, **given)


@pytest.mark.parametrize("replace", [False, True])
def test_tensors_on_the_cpu_are_sampled_by_the_cpu_form(replace):
    csc, seeds = rows_of(DEGREES), np.array([10, 4])
    mine = sample_neighbors(
        on_device(csc, "cpu"), torch.from_numpy(seeds), [6, 2], 4, replace=replace, return_e_id=True
    )
    assert isinstance(mine.n_id, torch.Tensor)
    assert_same(mine, sample_neighbors_reference(csc, seeds, [6, 2], 4, replace=replace))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lightning_gnnscale.triton_kernels.sample_neighbors import kernel

def compiled(name, **given):
    types = {name: value if isinstance(value, str) else "constexpr" for name, value in given.items()}
    constants = {name: value for name, value in given.items() if not isinstance(value, str)}
    source = ASTSource(getattr(kernel, name), signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
    code = made.asm["ptx"]
    for inexact in ("fma.", "mad.rn.f", "div.full", "div.approx", "rcp.approx"):
        assert inexact not in code, (given, inexact)
    return code

MODES = {"uniform": {}, "split": dict(SPLIT=True), "replace": dict(REPLACE=True), "weighted": dict(WEIGHTED=True),
         "both": dict(REPLACE=True, WEIGHTED=True), "latest": dict(LATEST=True, TREES=True),
         "last": dict(LATEST=True, WEIGHTED=True)}
for number, (mode, flags) in enumerate(MODES.items()):
    flags = dict(SPLIT=False, REPLACE=False, WEIGHTED=False, LATEST=False, TREES=False) | flags
    words = {name: "*i64" for name in ("start_ptr", "degree_ptr", "offset_ptr", "node_ptr", "owner_ptr",
                                       "positive_ptr", "neighbor_ptr")}
    edges = number % 2 == 0
    position = 1 if mode == "split" and edges else 2 if edges else 0
    code = compiled(
        "sample_rows_kernel", **words, indices_ptr="*i64" if number % 3 else "*i32", inside_ptr="*i32",
        position_ptr="*i32" if edges else "*i64", weight_ptr="*fp32" if number % 3 else "*fp64", running_ptr="*fp64",
        edge_ptr="*i64" if edges else None, split_weight_ptr="*fp32" if mode == "split" else None, hop_key="i64",
        scale_bits="i64", num_nodes="i64", fanout="i32", steps="i32", **flags, POSITION=position,
        BLOCK=(32, 128, 1024)[number % 3],
    )
    assert ("div.rn.f64" in code) == (mode in ("split", "weighted")), mode
words = {name: "*i64" for name in ("indptr_ptr", "node_ptr", "num_ptr", "owner_ptr", "limit_ptr", "time_ptr",
                                   "positive_ptr", "start_ptr", "degree_ptr", "take_ptr")}
for flag in ("TIMED", "WEIGHTED", "REPLACE"):
    flags = dict(TIMED=False, BY_EDGE=False, STRICT=True, WEIGHTED=False, REPLACE=False) | {flag: True}
    compiled("look_up_kernel", **words, indices_ptr="*i32", num_rows="i64", fanout="i32", steps="i32", **flags,
             BLOCK=256)
compiled("read_kernel", values_ptr="*fp64", index_ptr="*i64", out_ptr="*fp64", num="i64", BLOCK=256)
"""


def test_the_kernels_compile_for_hopper_with_exact_arithmetic(tmp_path):
    pytest.importorskip("triton")
    run_python(COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_cuda_samples_what_the_cpu_samples(scale):
    rng = np.random.default_rng(0)
    csc = build_csc(
        (rng.random(2_000_000) ** 3 * 100_000).astype(np.int64), rng.integers(0, 100_000, 2_000_000), 100_000
    )
    split = [split_rows(csc, rng.random(100_000) < 0.1, with_position=True) for _ in range(3)]
    there, split_there = on_device(csc, "cuda"), [on_device(rows, "cuda") for rows in split]
    space = DeviceWorkspace(100_000, "cuda")
    for key in range(5):
        seeds = rng.permutation(100_000)[:1024]
        for fanouts in ([15, 10, 5], [-1, 70, 3]):
            on_cpu = sample_neighbors(csc, seeds, fanouts, key, return_e_id=True, split=split, scale=scale)
            on_gpu = sample_tensors(
                there, torch.from_numpy(seeds).cuda(), fanouts, key, return_e_id=True, workspace=space,
                split=split_there, scale=scale,
            )  # fmt: skip
            assert_same(on_gpu, on_cpu)
