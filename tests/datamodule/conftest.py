"""A small graph with communities, and a store of it."""

import pytest
from community_graph import small_dataset

from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.partition_store import write_partition_store
from lightning_gnnscale.partitioner import partition


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
