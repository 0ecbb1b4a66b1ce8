"""A small graph with communities."""

from lightning_gnnscale.dataset import GraphDataset
from lightning_gnnscale.edge_stream import SyntheticGraph


def small_dataset(num_nodes: int = 400, num_edges: int = 2400, seed: int = 0, dim: int = 16) -> GraphDataset:
    graph = SyntheticGraph(num_nodes, num_edges, num_communities=8, homophily=0.9, seed=seed)
    stream = graph.stream(chunk_edges=1000, to_undirected=True)
    return GraphDataset("small", stream, graph.features(dim, noise=0.3), graph.labels(), graph.masks())
