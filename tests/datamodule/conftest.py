"""A small graph with communities, and a store of it."""

import pytest

from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.edge_stream import SyntheticGraph
from lightning_gnnscale.partition_store import write_partition_store
from lightning_gnnscale.partitioner import partition


def small_dataset(num_nodes: int = 400, num_edges: int = 2400, seed: int = 0, dim: int = 16) -> GraphDataset:
    graph = SyntheticGraph(num_nodes, num_edges, num_communities=8, homophily=0.9, seed=seed)
    stream = graph.stream(chunk_edges=1000, to_undirected=True)
    return GraphDataset("small", stream, graph.features(dim, noise=0.3), graph.labels(), graph.masks())


@pytest.fixture(scope="session")
def dataset() -> GraphDataset:
    return small_dataset()


@pytest.fixture(scope="session")
def store_root(dataset, tmp_path_factory):
    root = tmp_path_factory.mktemp("store") / "small"
    parts = partition(dataset.stream, "random", num_parts=4, seed=1)
    write_partition_store(
        root, dataset.stream, parts, features=dataset.features, labels=dataset.labels, masks=dataset.masks
    )
    return root
