"""One case in a process of its own: what it reports, and how it fails."""

import numpy as np
import pytest

from benchmarks.partition_process import core_count
from lightning_gnnscale.edge_stream import SyntheticGraph, open_edge_stream, write_edges
from lightning_gnnscale.partitioner import evaluate_partitioning, partition
from tests.says import said
from tests.tiers import first

GRAPH = SyntheticGraph(3_000, 20_000, num_communities=12, seed=4)


@pytest.fixture(scope="module")
def edges(tmp_path_factory):
    return write_edges(GRAPH.stream(), tmp_path_factory.mktemp("edges") / "edges.bin", dtype="int32")


@pytest.fixture(scope="module")
def masks(edges):
    np.savez(edges.parent / "masks.npz", **GRAPH.masks(0.3, 0.2))
    return str(edges.parent / "masks.npz")


def test_the_figures_are_those_of_the_partition(server, edges, masks):
    options = {"tau_factor": 0.3}
    found = server.measure(
        edges, 3_000, "spring", 4, repeats=2, options=options, masks=masks, halo_hops=2, feature_bytes=40, seed=3
    )
    stream = open_edge_stream(edges, num_nodes=3_000, layout="once")
    p = partition(stream, "spring", 4, seed=3, evaluate=False, **options)
    q = evaluate_partitioning(stream, p.part_id, 4, 2, GRAPH.masks(0.3, 0.2), feature_bytes=40)
    for name in ("edge_cut_ratio", "replication_factor", "node_balance", "volume_balance", "mask_balance"):
        assert found[name] == getattr(q, name)
    assert found["largest_part_bytes"] == max(q.bytes_per_part)
    assert found["components"] == sum(q.components_per_part)
    assert found["notes"]["layout"] == "once"
    assert 0 < found["seconds"] <= found["seconds_median"]
    assert {"degrees", "clustering", "merging", "assignment", "total"} == set(found["phases"])


@first(1)
@pytest.mark.parametrize("layout", ["both_ways", "directed", "auto"])
@pytest.mark.parametrize(("suffix", "reader"), [(".bin", {"dtype": "int64"}), (".csv", {"header": True})])
def test_a_file_of_any_layout_and_format(server, tmp_path, layout, suffix, reader):
    chunk = next(GRAPH.stream().chunks())
    ends = np.stack([chunk.src, chunk.dst])
    ends = np.concatenate([ends, ends[::-1]], axis=1) if layout == "both_ways" else ends
    stream = open_edge_stream(np.ascontiguousarray(ends), num_nodes=3_000)
    path = write_edges(stream, tmp_path / f"edges{suffix}", dtype="int64")
    found = server.measure(path, 3_000, "random", 3, repeats=0, layout=layout, reader=reader, chunk_edges=7_000)
    assert found["edge_cut_ratio"] == pytest.approx(2 / 3, abs=0.02)


def test_what_a_method_refuses_is_its_own_line(server, edges):
    with pytest.raises(RuntimeError, match=said("partitioner 'hdrf' balance=")):
        server.measure(edges, 3_000, "hdrf", 4, repeats=0, balance={"nodes": 1.1})


def test_a_crash_tells_its_end(server, edges):
    with pytest.raises(RuntimeError, match=said("measuring spring TypeError")):
        server.measure(edges, 3_000, "spring", 4, repeats="many")
    assert server.measure(edges, 3_000, "random", 2, repeats=0)["node_balance"] == 1.0


@pytest.mark.parametrize(
    ("limit", "message"), [({"limit_s": 0.0}, "stopped 0"), ({"limit_bytes": 1 << 20}, "1.00 MiB")]
)
def test_a_case_that_passes_a_limit_is_stopped(server, edges, limit, message):
    with pytest.raises(RuntimeError, match=said(message)):
        server.measure(edges, 3_000, "spring", 4, repeats=10_000, **limit)
    assert server.measure(edges, 3_000, "random", 2, repeats=0)["node_balance"] == 1.0


@pytest.mark.sweep
def test_memory_is_that_of_the_first_run(server, edges):
    num_nodes = 1_000_000
    small = server.measure(edges, num_nodes, "random", 2, repeats=0)
    # An order of the nodes by hash: at least two arrays of 8 bytes a node at a time.
    assert 16 * num_nodes < small["peak_bytes"] < 80 * num_nodes


@pytest.mark.parametrize("cores", [0, 10_000, "some", True])
def test_cores_that_are_not_there(cores):
    with pytest.raises(ValueError, match=said("bench.cores [1, ] all")):
        core_count(cores)
    assert core_count("all") >= core_count(1) == 1
