"""Edge streams: edges of any source, in order, in bounded chunks."""

from .open import open_edge_stream, write_edges
from .relabel import NodeIds
from .stream import EdgeChunk, EdgeStream
from .synthetic import SyntheticGraph, lfr_graph

__all__ = ["EdgeChunk", "EdgeStream", "NodeIds", "SyntheticGraph", "lfr_graph", "open_edge_stream", "write_edges"]
