"""Ranks that share no folder, as processes whose folders differ: tables, files and failures reach all of them."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import launch

import lightning_gnnscale as gs
from lightning_gnnscale import across_ranks
from lightning_gnnscale.datamodule import StoreLayerSource, layer_source
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.errors import CheckpointError, GNNScaleError
from lightning_gnnscale.model.inference import layerwise_inference
from lightning_gnnscale.model.layer_source import NodeSet, closure
from lightning_gnnscale.scratch import Scratch
from tests.says import said
from tests.tiers import first

BACKBONES = {
    "sage": lambda: gs.model.GraphSAGE(24, 16, 5, num_layers=3),
    "gcn": lambda: gs.model.GCN(24, 40, 5, num_layers=2),
    "gat": lambda: gs.model.GAT(24, 8, 5, num_layers=2),
}
FOLDERS = {"one": [0, 0, 0], "two": [0, 1, 1], "crossed": [0, 1, 0], "each": [0, 1, 2]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    graph = SyntheticGraph(900, 6000, num_communities=4, homophily=0.9, seed=0)
    stream = graph.stream(to_undirected=True)
    parts = gs.partition(stream, "random", num_parts=5, seed=1)
    folder = tmp_path_factory.mktemp("apart") / "store"
    gs.write_partition_store(folder, stream, parts, features=graph.features(24, noise=1.0), masks=graph.masks())
    return folder


def passes(folder: Path, root: Path, machines: list[int], round_bytes: int) -> dict:
    """Give the outputs of each model, of all nodes and of the test nodes, as the folder of this rank has them."""
    layer_source._ROUND_BYTES = round_bytes
    store, results = gs.PartitionStore.open(root), {}
    scratch = Scratch(folder / f"machine{machines[across_ranks.rank()]}", "run-1")
    parts = list(range(across_ranks.rank(), store.num_parts, across_ranks.world_size()))
    source = StoreLayerSource(store, parts, scratch, block_edges=500)
    for name, make in BACKBONES.items():
        for dtype in ("float32", "bfloat16"):
            torch.manual_seed(0)
            model = make()
            wanted = closure(source, NodeSet.of_mask(store.masks["test"]), model.num_layers)
            for needed in (None, wanted):
                given = layerwise_inference(model, source, needed=needed, table_dtype=dtype, memory_bytes=1 << 20)
                results[name, dtype, needed is None] = np.array(given.table)
                source.barrier()
        given = layerwise_inference(model, source, needed=wanted, memory_bytes=1 << 16, broadcast=True)
        results[name, "broadcast"] = np.array(given.table)
        source.barrier()
    source.close()
    return results


@first(1)
@pytest.mark.parametrize(
    ("machines", "round_bytes"), [("one", 1 << 20), ("two", 3000), ("crossed", 500), ("each", 1 << 20)]
)
def test_tables_are_whole_on_every_machine(root, tmp_path, machines, round_bytes):
    expected = passes(tmp_path / "alone", root, [0], 1)
    ranks = launch(3, passes, tmp_path / "ranks", root, FOLDERS[machines], round_bytes, limit_s=120)
    for results in ranks:
        assert results.keys() == expected.keys()
        for key, table in results.items():
            assert np.array_equal(table, expected[key]), key
    made = sorted(path.relative_to(tmp_path / "ranks").as_posix() for path in (tmp_path / "ranks").glob("machine*/**"))
    assert made == [f"machine{number}" for number in sorted(set(FOLDERS[machines]))], "nothing is left"


def files(folder: Path) -> dict:
    """Send files of each rank to one and to several others; give what this rank has, and how it was first told."""
    across_ranks.CHUNK_BYTES = 1000
    me, own = across_ranks.rank(), folder / f"of{across_ranks.rank()}"
    own.mkdir()
    found = {
        "firsts": across_ranks.first_in_folder(own, ""),
        "together": across_ranks.first_in_folder(folder / "all", ""),
    }
    for source, takers, size in [(0, [1, 2], 2500), (2, [0], 3000), (1, [2], 0)]:
        path = own / f"{source}-{size}"
        if me == source:
            path.write_bytes(np.random.default_rng(size).bytes(size))
        across_ranks.send_file(source, takers, path, "")
    found["contents"] = {path.name: path.read_bytes() for path in own.iterdir()}
    below_a_file = own / "0-2500" / "x" if me == 0 else own / ("1-0" if me == 1 else "fine")
    for case, source, takers, path in [("no file", 0, [2], own / "none"), ("no folder", 1, [0, 2], below_a_file)]:
        with pytest.raises(GNNScaleError) as error:
            across_ranks.send_file(source, takers, path, "free space")
        found[case] = str(error.value)
    found["left"] = [path.name for path in own.glob("*.part")]
    found["first"] = across_ranks.of_first_rank(lambda: "said" if me == 0 else 1 / 0)
    with pytest.raises(CheckpointError, match=said("rank 1")), across_ranks.failing_together():
        if me == 1:
            raise CheckpointError("rank 1 cannot")
    return found


def test_files_are_sent_whole_or_the_failure_is_told_on_all(tmp_path):
    content = {size: np.random.default_rng(size).bytes(size) for size in (0, 2500, 3000)}
    for rank, found in enumerate(launch(3, files, tmp_path)):
        assert found["firsts"] == [0, 1, 2] and found["together"] == [0, 0, 0] and found["first"] == "said"
        assert found["left"] == []
        names = {0: ["0-2500", "2-3000"], 1: ["0-2500", "1-0"], 2: ["0-2500", "2-3000", "1-0"]}[rank]
        assert found["contents"] == {name: content[int(name.split("-")[1])] for name in names}
        assert found["no file"] == f"{tmp_path}/of0/none: cannot be read: No such file or directory; free space"
        assert found["no folder"] == f"{tmp_path}/of0/0-2500/x.part: cannot be written: Not a directory; free space"
    assert list((tmp_path / "all").iterdir()) == []


def full_table(folder: Path, root: Path) -> str:
    """Have the second machine's disk full where a table is made; give what this rank is reported."""
    scratch = Scratch(folder / f"machine{across_ranks.rank()}", "run-1")
    if across_ranks.rank() == 1:
        os.posix_fallocate = _no_space
    source = StoreLayerSource(gs.PartitionStore.open(root), [across_ranks.rank()], scratch)
    with pytest.raises(GNNScaleError) as error:
        source.table("layer", 4)
    dist.barrier()
    return str(error.value)


def _no_space(descriptor: int, start: int, length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.sweep
def test_a_disk_that_is_full_on_one_machine_ends_all_ranks_in_its_line(root, tmp_path):
    told = launch(2, full_table, tmp_path, root)
    path = tmp_path / "machine1" / "run-1" / "layer.npy"
    assert told[0] == told[1] and told[0].startswith(f"{path}: evaluation writes 14400 bytes here"), told
    assert "No space left on device" in told[0] and "scratch=" in told[0]
    shutil.rmtree(tmp_path / "machine1")
