"""Bytes that an exact evaluation of all nodes reads, as the planner predicts and as layers are then computed."""

from lightning_gnnscale.graph import id_dtype
from lightning_gnnscale.memory import pass_bytes
from lightning_gnnscale.model import GraphSAGE
from lightning_gnnscale.model.edge_bins import plan_buckets, row_bytes_of
from lightning_gnnscale.planner import plan
from lightning_gnnscale.planner.host_memory import SPOOLED_EDGE_BYTES, BatchShape, RunSize, predict_evaluation_reads


def test_buckets_are_those_that_layers_are_computed_in():
    num_nodes, num_edges, free = 20_000_000, 200_000_000, 3 << 30
    batches = BatchShape(feature_dim=128, hidden_channels=64, fanouts=(5, 5, 5))
    reads = [predict_evaluation_reads(RunSize(num_nodes, num_edges, 1, count), batches, 1000, 2000, free)
             for count in (1, 4)]  # fmt: skip
    row_bytes = row_bytes_of(GraphSAGE(128, 64, 64).streamed_layer(0, False, False), 4)
    inputs, edges = 2000 + 2 * 256 * num_nodes, 3 * (1000 + SPOOLED_EDGE_BYTES * num_edges)
    for read, count in zip(reads, (1, 4), strict=True):
        buckets = plan_buckets(num_nodes // count, 0, row_bytes, 4, pass_bytes(free)).num_buckets
        assert buckets == (3 if count == 1 else 1)
        assert read == count * buckets * inputs + edges


def test_a_graph_that_fits_memory_has_none():
    batches = BatchShape(feature_dim=128)
    assert predict_evaluation_reads(RunSize(1000, 5000), batches, 1000, 2000, None) == 0
    assert predict_evaluation_reads(RunSize(1000, 5000), batches, 1000, 2000, 1 << 30) == 0
    assert predict_evaluation_reads(RunSize(0, 0), batches, 0, 0, 1) == 0


def test_the_plan_says_what_evaluation_reads():
    sizes = {"num_nodes": 20_000_000, "num_edges": 200_000_000, "feature_bytes": "2GiB", "accelerator": "cpu"}
    shape = {"feature_dim": 128, "hidden_channels": 64, "fanouts": [5, 5], "batch_size": 1024}
    little = plan(**sizes, **shape, host_memory_bytes="4GiB", num_parts=100)
    assert id_dtype(sizes["num_nodes"]).itemsize == 4
    assert little.evaluation_read_bytes > 10 << 30
    assert "read to evaluate all nodes, predicted" in little.explain() and "at 1 GB/s" in little.explain()
    ample = plan(**sizes, **shape, host_memory_bytes="64GiB", num_parts=100)
    assert ample.evaluation_read_bytes == 0 and "evaluate all nodes" not in ample.explain()
