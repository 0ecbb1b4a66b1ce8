"""`gnnscale bench halo` at a small size: what is counted, on the disk that the tests run on."""

import os

import numpy as np
import pytest

from benchmarks import halo
from benchmarks.page_cache import cached_bytes, evict
from benchmarks.runner import RowFile
from lightning_gnnscale.errors import GNNScaleError
from tests.says import said

PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise and mincore: Linux")


@pytest.fixture
def cold(tmp_path):
    """A folder whose files can leave the page cache."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(PAGE))
    try:
        evict(probe)
    except GNNScaleError as error:
        pytest.skip(f"the tests' folder lies in memory: {error}")
    return tmp_path


def test_pages_are_counted_as_they_are_read(cold):
    path = cold / "file"
    np.zeros(64 * PAGE, np.uint8).tofile(path)
    evict(path)
    assert cached_bytes(path) == 0
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(descriptor, 1, 5 * PAGE)
    os.close(descriptor)
    assert cached_bytes(path) == PAGE
    (cold / "empty").touch()
    assert cached_bytes(cold / "empty") == 0


@pytest.mark.sweep
def test_a_visit_counts_what_it_read(cold):
    size = {"num_nodes": 10_000, "num_edges": 20_000, "feature_dim": 64}
    rows = halo.run(cold, **size, partitioner="range", num_parts=8, visits=[3], fanouts=[3, 2], batch_size=500)
    plain, packed = rows
    assert plain["num_batches"] == packed["num_batches"] > 1
    assert plain["needed_bytes"] == packed["needed_bytes"] < plain["table_bytes"] == 10_000 * 64 * 4
    assert packed["stored_bytes"] > plain["stored_bytes"]
    # How much more is read than needed is the system's choice: at this size that may be all there is.
    for row in rows:
        assert row["needed_bytes"] <= row["read_bytes"] <= row["stored_bytes"] + 2 * PAGE
    assert [row["halo_rows"] for row in RowFile(cold / "halo.csv").rows] == list(halo.LAYOUTS.values())


def test_a_visit_of_no_part_is_refused(tmp_path):
    with pytest.raises(ValueError, match=said("bench.visits [0, 4) 4")):
        halo.run(tmp_path, num_parts=4, visits=[0, 4])
