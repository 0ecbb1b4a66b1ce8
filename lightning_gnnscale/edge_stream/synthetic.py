"""A generated graph of any size: degree-corrected planted partition, edge by edge from the counter-based generator.

Every edge is a function of (parameters, edge number), every label and feature row of (parameters, node): chunk
size, order and number of passes change nothing, and edges are never held.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import check_integer
from ..jit import kernel
from ..rng import below, combine, fold, unit
from ..system import whole_file
from .array import write_npy_header
from .options import CHUNK_EDGES, StreamOptions, checked_number
from .planted_edges import (
    SAMPLE_VERSION,
    SampleTables,
    build_tables,
    community_sizes,
    largest_weight,
    mean_size,
    sample_edges,
    settle,
)
from .read_ahead import ChunkPool
from .stream import EdgeStream, Progress


def feature_ranges(
    community: np.ndarray, num_communities: int, dim: int, noise: float, keys: tuple, num_rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first node, float32 rows) of at most `num_rows` consecutive nodes: their community's centre, and noise.

    The noise has one standard deviation in every column; centres have an expected length of 1. `keys` are the uint64
    keys of the centres and of the noise.
    """
    centres = np.empty((num_communities, dim), np.float32)
    _gaussian_rows(keys[0], 0, 1.0 / math.sqrt(dim), centres)
    for first in range(0, len(community), num_rows):
        last = min(first + num_rows, len(community))
        rows = np.empty((last - first, dim), np.float32)
        _gaussian_rows(keys[1], first, noise, rows)
        _add_centres(centres, community[first:last], rows)
        yield first, rows


@kernel
def _gaussian_rows(key, first_row, scale, out):
    """Fill float32 rows with N(0, scale**2), two values a hash (Box and Muller, 1958)."""
    low_32, half, width = np.uint64(0xFFFFFFFF), 0.5, 1.0 / 4294967296.0
    num_rows, dim = out.shape
    for i in range(num_rows):
        row = combine(key, first_row + i)
        for j in range(0, dim, 2):
            random = combine(row, j)
            radius = scale * np.sqrt(-2.0 * np.log((np.float64(random >> np.uint64(32)) + half) * width))
            angle = 2.0 * np.pi * np.float64(random & low_32) * width
            out[i, j] = radius * np.cos(angle)
            if j + 1 < dim:
                out[i, j + 1] = radius * np.sin(angle)


@kernel
def _add_centres(centres, community, rows):
    for i in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            rows[i, j] += centres[community[i], j]


_EDGES, _COMMUNITY, _WEIGHT, _LABEL, _LABEL_NOISE, _SPLIT, _CENTRE, _FEATURE = range(8)
_SLICE_EDGES = 1 << 17
_FEATURE_BYTES = 1 << 24
_WHOLE = 65536.0
FEATURE_DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class SyntheticGraph:
    """Degree-corrected planted partition with power-law degrees.

    Communities are assigned to nodes by hash, so node ids reveal nothing about them. Their sizes are equal, or follow a
    power law. An edge lies inside a community with probability `homophily`; its ends are sampled in proportion to their
    expected degrees. There are no self-loops. An edge may repeat, because hubs of one community meet more than once.
    `lfr_graph` takes the parameters of the LFR benchmark.

    Args:
        num_nodes: Number of nodes, in [2, 2**31).
        num_edges: Number of undirected edges, >= 0; each is listed once.
        num_communities: Number of communities, in [1, num_nodes / 2].
        homophily: Share of the edges inside a community, in [0, 1].
        exponent: Exponent of the degree distribution, P(degree > d) ~ d ** (1 - exponent), > 2.
        max_degree: Upper bound on a node's expected degree, >= the mean degree. None: sqrt(2 * num_edges), the largest
            value that a graph without repeated edges allows.
        label_noise: Share of the labels that are sampled again from all communities, in [0, 1].
        seed: Any 64-bit integer.
        community_exponent: Exponent of the distribution of community sizes, density(s) ~ s ** -community_exponent, in
            [1, 100]. A node then lives in a community that is larger than its expected number of neighbours inside.
            None: all communities have one size, and nodes are sampled evenly.
        max_community: Number of nodes in the largest community, in [num_nodes / num_communities, num_nodes]. None: a
            tenth of the nodes, but at least twice the mean. Needs `community_exponent`.

    Raises:
        ValueError: a parameter is outside of its range.

    Cost: 12 bytes a node once edges are sampled, about 40 bytes a node while the tables are built.
    Source: Karrer and Newman, Stochastic blockmodels and community structure in networks, 2011. Differs: a fixed
    number of independent edges instead of a Poisson count for every pair of nodes.
    """

    num_nodes: int
    num_edges: int
    num_communities: int = 16
    homophily: float = 0.8
    exponent: float = 2.5
    max_degree: float | None = None
    label_noise: float = 0.0
    seed: int = 0
    community_exponent: float | None = None
    max_community: float | None = None

    def __post_init__(self):
        check_integer("synthetic.num_nodes", self.num_nodes, 2, 2**31 - 1)
        check_integer("synthetic.num_edges", self.num_edges, 0)
        check_integer("synthetic.num_communities", self.num_communities, 1, self.num_nodes // 2)
        check_integer("synthetic.seed", self.seed, -(2**63), 2**64 - 1)
        checked_number("synthetic.homophily", self.homophily, 0, 1)
        checked_number("synthetic.label_noise", self.label_noise, 0, 1)
        checked_number("synthetic.exponent", self.exponent, 2.000001, 100)
        if self.max_degree is not None:
            checked_number("synthetic.max_degree", self.max_degree, 2 * self.num_edges / self.num_nodes, math.inf)
        if self.community_exponent is not None:
            checked_number("synthetic.community_exponent", self.community_exponent, 1, 100)
        if self.max_community is not None:
            if self.community_exponent is None:
                raise ValueError("synthetic.max_community needs synthetic.community_exponent: else sizes are equal")
            smallest = self.num_nodes / self.num_communities
            checked_number("synthetic.max_community", self.max_community, smallest, self.num_nodes)

    def parameters(self) -> dict:
        """Return the parameters as plain values; newer ones are left out where they are not given."""
        later = ("community_exponent", "max_community")
        given = {name: value for name, value in asdict(self).items() if value is not None or name not in later}
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}

    def __getstate__(self) -> dict:
        return asdict(self)

    def stream(self, chunk_edges: int = CHUNK_EDGES, layout: str = "once", **options) -> "SyntheticStream":
        """Return the edges as a stream; options as those of `open_edge_stream`."""
        if options.get("num_nodes") is None:
            options["num_nodes"] = self.num_nodes
        return SyntheticStream(self, StreamOptions(chunk_edges=chunk_edges, layout=layout, **options))

    def communities(self) -> np.ndarray:
        """Return the (num_nodes,) int32 communities."""
        out = np.empty(self.num_nodes, np.int32)
        if self.community_exponent is None:
            _nodes_below(self._key(_COMMUNITY), self.num_communities, out)
        else:
            settle(self._key(_COMMUNITY), self._neighbors_inside(), self._sizes(), out)
        return out

    def labels(self) -> np.ndarray:
        """Return the (num_nodes,) int64 labels: the communities, with `label_noise` of them sampled again."""
        labels = self.communities().astype(np.int64)
        if self.label_noise > 0:
            sampled = np.empty_like(labels)
            _nodes_below(self._key(_LABEL), self.num_communities, sampled)
            labels = np.where(self._units(_LABEL_NOISE) < self.label_noise, sampled, labels)
        return labels

    def masks(self, train: float = 0.6, val: float = 0.2, test: float | None = None) -> dict[str, np.ndarray]:
        """Split the nodes at random by hash.

        Args:
            train, val, test: shares of the nodes, in [0, 1], together at most 1; test=None is the rest.

        Returns:
            {"train", "val", "test"}: (num_nodes,) bool, disjoint.
        """
        test = 1.0 - train - val if test is None else test
        for name, share in (("train", train), ("val", val), ("test", test)):
            checked_number(f"synthetic.masks.{name}", share, -1e-12, 1)
        if train + val + test > 1 + 1e-12:
            raise ValueError(f"synthetic.masks shares must add up to at most 1, got {train} + {val} + {test}")
        u = self._units(_SPLIT)
        return {
            "train": u < train,
            "val": (u >= train) & (u < train + val),
            "test": (u >= train + val) & (u < train + val + test + 1e-12),
        }

    def features(
        self,
        dim: int,
        dtype: str = "float32",
        noise: float = 1.0,
        path: str | os.PathLike | None = None,
        progress: Progress | None = None,
    ) -> np.ndarray:
        """Return features: the centre of the node's community (expected length 1) plus Gaussian noise.

        Args:
            dim: columns, >= 1.
            dtype: "float32" or "float16".
            noise: standard deviation of the noise in every column, >= 0.
            path: a .npy file to write instead, by ranges of nodes, whole or not at all.
            progress: called as (what, nodes done, num_nodes).

        Returns:
            (num_nodes, dim) array, memory-mapped read-only where `path` is given.

        Cost: about 15 ns a value; 16 MiB beside the array, with `path` 16 MiB alone.
        """
        check_integer("synthetic.features.dim", dim, 1)
        checked_number("synthetic.features.noise", noise, 0, math.inf)
        dtype = np.dtype(dtype)
        if dtype.name not in FEATURE_DTYPES:
            raise ValueError(f"synthetic.features.dtype must be one of {', '.join(FEATURE_DTYPES)}, got {dtype.name}")
        if path is None:
            out = np.empty((self.num_nodes, dim), dtype)
            for first, rows in self._feature_ranges(dim, dtype, noise, progress):
                out[first : first + len(rows)] = rows
            return out
        path = Path(path)
        with whole_file(path, "make space, or give another folder") as file:
            write_npy_header(file, (self.num_nodes, dim), dtype)
            for _, rows in self._feature_ranges(dim, dtype, noise, progress):
                file.write(memoryview(rows).cast("B"))
        return np.load(path, mmap_mode="r")

    def _feature_ranges(self, dim: int, dtype: np.dtype, noise: float, progress) -> Iterator[tuple[int, np.ndarray]]:
        num_rows = max(1, _FEATURE_BYTES // (4 * dim))
        keys = (self._key(_CENTRE), self._key(_FEATURE))
        for first, rows in feature_ranges(self.communities(), self.num_communities, dim, noise, keys, num_rows):
            yield first, rows.astype(dtype, copy=False)
            if progress is not None:
                progress("synthetic features", first + len(rows), self.num_nodes)

    def _key(self, purpose: int) -> np.uint64:
        return np.uint64(fold(self.seed, purpose))

    def _units(self, purpose: int) -> np.ndarray:
        out = np.empty(self.num_nodes, np.float64)
        _node_units(self._key(purpose), out)
        return out

    @cached_property
    def _tables(self) -> SampleTables:
        return build_tables(self.communities(), self.num_communities, self._weights(), self.homophily)

    def _weights(self) -> np.ndarray:
        """Return (num_nodes,) float64 expected degrees, up to a factor, the smallest 1."""
        weight = self._units(_WEIGHT)
        np.subtract(1.0, weight, out=weight)
        np.power(weight, -1.0 / (self.exponent - 1.0), out=weight)
        return np.minimum(weight, self._largest_weight(), out=weight)

    def _largest_weight(self) -> float:
        mean_degree = max(2 * self.num_edges / self.num_nodes, 1e-12)
        max_degree = math.sqrt(2 * self.num_edges) if self.max_degree is None else self.max_degree
        return largest_weight(self.exponent, max_degree / mean_degree)

    def _neighbors_inside(self) -> np.ndarray:
        """Return (num_nodes,) float64, expected neighbours of each node in its own community."""
        weight = self._weights()
        np.rint(weight * _WHOLE, out=weight)  # their sum is then exact, and its last bit the same on every machine
        weight *= 2 * self.num_edges * self.homophily / weight.sum()
        return weight

    def _sizes(self) -> np.ndarray:
        largest = self.max_community
        if largest is None:
            largest = min(self.num_nodes, max(self.num_nodes / 10, 2 * self.num_nodes / self.num_communities))
        return community_sizes(self.num_nodes, self.num_communities, self.community_exponent, largest)


class SyntheticStream(EdgeStream):
    """The edges of a `SyntheticGraph`, sampled into the chunks themselves."""

    seekable = True

    def __init__(self, graph: SyntheticGraph, options: StreamOptions):
        if options.num_nodes is not None and options.num_nodes < graph.num_nodes:
            raise ValueError(f"edge_stream.num_nodes must be >= {graph.num_nodes}, got {options.num_nodes}")
        super().__init__("synthetic graph", np.dtype(np.int32), options, graph.num_edges)
        self.graph = graph

    def _identity(self) -> dict:
        return {"synthetic": self.graph.parameters(), "version": SAMPLE_VERSION}

    def _blocks(self, first_edge: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(first_edge, self.num_edges, _SLICE_EDGES):
            length = min(_SLICE_EDGES, self.num_edges - start)
            src, dst = np.empty(length, np.int32), np.empty(length, np.int32)
            self._sample(start, src, dst)
            yield src, dst

    def _ready_chunks(self, first_edge: int, buffers: ChunkPool) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        if self.node_ids is not None:
            yield from super()._ready_chunks(first_edge, buffers)
            return
        for start in range(first_edge, self.num_edges, self.chunk_edges):
            length = min(self.chunk_edges, self.num_edges - start)
            buffer = buffers.take()
            ready = [(buffer[0, :length], buffer[1, :length], self.graph.num_nodes - 1)]
            del buffer
            self._sample(start, *ready[0][:2])
            yield ready.pop()

    def _sample(self, first_edge: int, out_src: np.ndarray, out_dst: np.ndarray) -> None:
        tables = self.graph._tables
        sample_edges(self.graph._key(_EDGES), first_edge, *tables, out_src, out_dst)


@kernel
def _nodes_below(key, bound, out):
    for v in range(len(out)):
        out[v] = below(combine(key, v), bound)


@kernel
def _node_units(key, out):
    for v in range(len(out)):
        out[v] = unit(combine(key, v))


def lfr_graph(
    num_nodes: int,
    num_edges: int,
    mixing: float = 0.3,
    exponent: float = 2.5,
    community_exponent: float = 1.5,
    min_community: float = 50,
    max_community: float | None = None,
    max_degree: float | None = None,
    seed: int = 0,
) -> SyntheticGraph:
    """Return a generated graph by the parameters of the LFR benchmark; its edges are never held.

    Args:
        num_nodes, num_edges, exponent, max_degree, seed: see `SyntheticGraph`.
        mixing: mu, the share of the edges that leave their community, in [0, 1].
        community_exponent: density(s) ~ s ** -community_exponent of the sizes of communities, in [1, 100].
        min_community, max_community: their range, nodes; max_community None: a tenth of the nodes, but at least twice
            min_community.

    Raises:
        ValueError: a parameter is outside of its range.

    Source: Lancichinetti, Fortunato and Radicchi, Benchmark graphs for testing community detection algorithms, Phys.
        Rev. E 78, 2008. Differs: edges are sampled independently, so mixing, degrees and sizes spread around the
        given values, and a few percent of the edges repeat; without repeats, the share that leaves is a little higher.
    """
    check_integer("lfr.num_nodes", num_nodes, 4, 2**31 - 1)
    checked_number("lfr.mixing", mixing, 0, 1)
    checked_number("lfr.community_exponent", community_exponent, 1, 100)
    checked_number("lfr.min_community", min_community, 2, num_nodes)
    if max_community is None:
        max_community = min(num_nodes, max(num_nodes / 10, 2 * min_community))
    checked_number("lfr.max_community", max_community, min_community, num_nodes)
    mean = mean_size(min_community, max_community, community_exponent)
    num_communities = max(round(num_nodes / mean), math.ceil(num_nodes / max_community))
    return SyntheticGraph(
        num_nodes,
        num_edges,
        num_communities=min(num_communities, num_nodes // 2),
        homophily=1.0 - mixing,
        exponent=exponent,
        max_degree=max_degree,
        seed=seed,
        community_exponent=community_exponent,
        max_community=max_community,
    )
