"""The seeds' rule by hand, sizes as people write them, and errors that name the remedy."""

import math

import pytest

from lightning_gnnscale.memory import format_bytes, format_seconds, parse_bytes
from lightning_gnnscale.planner import csc_bytes, plan
from tests.says import said

GIB = 1 << 30


def make(total_bytes: int, **options):
    """A plan for a graph whose CSC and features add up to total_bytes."""
    features = total_bytes - csc_bytes(1000, 0)
    return plan(num_nodes=1000, num_edges=0, feature_bytes=features, **options)


@pytest.mark.parametrize(
    ("total", "devices", "memory", "compute", "parts"),
    [
        (8 * GIB, 4, 6 * GIB, 4 * GIB, 4),  # S = q (M - T): one part a device
        (8 * GIB + 1, 4, 6 * GIB, 4 * GIB, 5),  # one byte more: ceil(S / (M - T))
        (1 * GIB, 4, 6 * GIB, None, 4),  # T is two thirds of M by default
        (20 * GIB, 2, 6 * GIB, None, 10),
        (100 * GIB, 2, None, None, 2),  # no device memory known: one part a device
    ],
)
def test_rule(total, devices, memory, compute, parts):
    result = make(total, num_devices=devices, device_memory_bytes=memory, compute_bytes=compute)
    assert result.num_parts == parts


def test_part_of_the_user_is_kept_and_checked():
    result = make(8 * GIB, num_devices=2, device_memory_bytes=6 * GIB, num_parts=2)
    assert (result.num_parts, result.chosen_by, result.fits) == (2, "user", False)
    assert "num_parts=" in dict(result.terms())["fits"]


def test_halo_is_checked_again():
    before = make(4 * GIB, num_devices=2, device_memory_bytes=6 * GIB)
    assert before.fits
    after = before.with_halo(900)
    assert after.part_bytes > before.part_bytes
    assert not after.fits


def test_every_term_is_explained():
    text = make(20 * GIB, num_devices=2, device_memory_bytes="6GiB", host_memory_bytes="24GiB").explain()
    for term in (
        "S = CSC + features",
        "q, devices",
        "M, memory of a device",
        "T, set aside",
        "M - T",
        "p, parts",
        "fits",
    ):
        assert term in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 0}, "num_devices 1 0"),
        ({"num_parts": 0}, "num_parts 1 0"),
        ({"num_parts": 5000}, "num_parts [1, 1000] 5000"),
        ({"device_memory_bytes": "1GiB", "compute_bytes": "2GiB"}, "compute_bytes device_memory_bytes"),
        ({"device_memory_bytes": "many"}, "device_memory_bytes bytes 24GiB"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=said(message)):
        make(GIB, **options)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * GIB), ("500 MB", 500 * 10**6), ("8g", 8 * GIB), (17, 17), ("1.5k", 1536), (None, None)],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_bytes(text) == size


def test_units_for_people():
    assert [format_bytes(size) for size in (0, 1023, 1536, 5 * GIB)] == ["0 B", "1023 B", "1.50 KiB", "5.00 GiB"]
    assert [format_seconds(s) for s in (0.123, 12.34, 245)] == ["0.12 s", "12.3 s", "4 min 05 s"]


def test_forked_processes_share_an_interpreter():
    sizes = {"num_nodes": 1000, "num_edges": 10_000, "interpreter_bytes": 400 << 20, "host_memory_bytes": "8GiB"}
    peaks = {
        method: plan(**sizes, num_devices=2, start_method=method).host_peak_bytes["train"] >> 20
        for method in ("popen", "fork", "spawn")
    }
    assert peaks["fork"] < peaks["popen"] < peaks["spawn"]
    assert peaks["spawn"] - peaks["popen"] == 500, "the starting process waits beside the others"
    one = plan(**sizes, num_devices=1).host_peak_bytes["train"] >> 20
    assert one < peaks["popen"] - 500 + 1


ON_GPU = {"num_nodes": 400_000_000, "num_edges": 10**9, "feature_bytes": "200GiB", "accelerator": "gpu"}
ON_GPU |= {"feature_dim": 128, "fanouts": [15, 10, 5], "batch_size": 1024}


def test_parts_of_a_gpu_must_fit_the_host_where_they_lie():
    roomy, tight = (plan(device_memory_bytes="24GiB", host_memory_bytes=host, **ON_GPU) for host in ("256GiB", "64GiB"))
    assert (roomy.num_parts, roomy.fits) == (1, True)
    space = tight.device_memory_bytes - tight.compute_bytes
    assert tight.num_parts == math.ceil(tight.total_bytes / space) == 5
    assert tight.gpu_memory_bytes == 24 << 30 > tight.device_peak_bytes
    assert "host memory for a GPU's parts" in tight.explain() and "memory of a GPU" in tight.explain()


def test_batches_must_fit_the_gpu():
    small = plan(device_memory_bytes="1GiB", host_memory_bytes="256GiB", **ON_GPU)
    assert [what for what, _, _ in small.shortages()] == ["training on one device"]
    assert "planner.device_memory_bytes=" in small.remedy()
    enough = plan(device_memory_bytes=small.needed_device_bytes, host_memory_bytes="256GiB", **ON_GPU)
    assert enough.fits


@pytest.mark.parametrize(("num_devices", "num_parts"), [(1, 2), (2, 4)])
def test_gpus_whose_parts_do_not_fit_the_host_ask_for_memory_of_the_host(num_devices, num_parts):
    given = ON_GPU | {"num_devices": num_devices, "num_parts": num_parts, "device_memory_bytes": "24GiB"}
    told = plan(**given, host_memory_bytes="64GiB").remedy()
    assert f"{num_parts} parts" in told and "planner.host_memory_bytes=" in told
    host = told.rpartition("planner.host_memory_bytes=")[2]
    left = [what for what, _, _ in plan(**given, host_memory_bytes=host).shortages()]
    assert not [what for what in left if "parts" in what]
